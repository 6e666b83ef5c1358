"""Torch's dispatch modes, which see every operation: make one, hide from all, or from selective checkpointing alone.

All private names of these modes are here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

# Private, because torch documents the class of a mode but has no public path to it, and lets a mode leave only itself.
# A public path, and a public way to leave the modes of others, would replace all of this.
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_CACHES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""Modes by which selective checkpointing caches the results of operations, and returns them in the recomputation."""
TorchDispatchMode = dispatch.TorchDispatchMode
without_modes = dispatch._disable_current_modes
"""A context in which no mode sees an operation."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def always_recomputed(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep the operations of `function` out of the caches of selective checkpointing.

    Casts write to memory that they use again, and record statistics: a cached result would be overwritten, and a result
    from the cache would leave the rest undone.

    Returns: the function outside of such caches; without one, a call costs one look at an empty stack more.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        modes = dispatch._get_current_dispatch_mode_stack()
        if not any(isinstance(mode, _CACHES) for mode in modes):
            return function(*args, **kwargs)
        # Modes can be removed from the top alone, so all are taken off, and those that are not caches put back.
        for _ in modes:
            dispatch._pop_mode()
        without_caches = [mode for mode in modes if not isinstance(mode, _CACHES)]
        try:
            for mode in without_caches:
                dispatch._push_mode(mode)
            try:
                return function(*args, **kwargs)
            finally:
                for _ in without_caches:
                    dispatch._pop_mode()
        finally:
            for mode in modes:
                dispatch._push_mode(mode)

    return run
