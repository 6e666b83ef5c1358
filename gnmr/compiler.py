"""Keep code out of the graphs of torch.compile without loading its compiler.

The compiler takes as long to import as torch itself, and `torch.compiler.disable` and `torch.compiler.set_stance`
import it at once. Most runs compile nothing and never need it. Code that shall stay between graphs is therefore written
twice: as a method, and as the same method behind `between_graphs`, which is called once the compiler is loaded.

    def forward(self, x):
        return self._between_graphs(x) if compiler_loaded() else self._plain(x)

    _between_graphs = between_graphs(_plain)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Private, because torch.compiler says neither whether the compiler is in memory nor how much it has compiled. Public
# answers would replace it.
_COMPILER = "torch._dynamo"


def compiler_loaded() -> bool:
    """Return whether this call may be compiled; without the compiler in memory, nothing can be."""
    # The first condition is a constant for the compiler, which therefore does not trace the second one.
    return torch.compiler.is_compiling() or _COMPILER in sys.modules


def functions_compiled() -> int:
    """Return how many functions torch.compile has looked at in this process."""
    compiler: Any = sys.modules.get(_COMPILER)
    return 0 if compiler is None else int(compiler.utils.counters["frames"]["total"])


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Return `torch.compiler.disable(function)`, which imports the compiler at the first call and not before.

    Args:
        function: a plain function, not yet bound to an object. What it calls is not compiled either.
    """
    # Private, because torch.compiler.disable imports the compiler. If it goes, use torch.compiler.disable.
    outside: Callable[P, R] = torch._disable_dynamo(function)
    return outside


def compiled_code_eagerly() -> AbstractContextManager[None]:
    """Return a context in which compiled modules run eagerly. Modules that are first compiled inside it may not."""
    # Calling `set_stance` puts the stance in force, so the context must be entered at once.
    stance: AbstractContextManager[None] = (
        torch.compiler.set_stance("force_eager") if compiler_loaded() else nullcontext()
    )
    return stance
