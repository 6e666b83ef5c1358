"""What the controller and the paths cost on this machine.

Nothing here is asserted: a figure that misses its target says so, and the exit code stays 0. Importing this package
costs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gnmr.errors import UserError

if TYPE_CHECKING:
    from gnmr.bench.setting import Setting

# Name: (module, function, what it measures).
BENCHMARKS = {
    "controller": ("gnmr.bench.controller", "step_cost", "norms, signal, policy and records in a training step"),
    "decision": ("gnmr.bench.controller", "decision", "signal and policy alone, for 10,000 units"),
    "saved": ("gnmr.bench.saved", "saved", "steps with saved activations of 4 and 8 bits against 16, and their bytes"),
    "signals": ("gnmr.bench.signals", "signals", "whole steps under signals that look beyond the norms"),
    "recipe": ("gnmr.bench.recipe", "recipe", "steps under recipes against 16 bits, and steps that switch every block"),
    "mixture": (
        "gnmr.bench.mixture",
        "mixture",
        "a mixture of experts against a dense MLP of as many operations",
    ),
    "hf": ("gnmr.bench.hf", "hf", "our 16-bit model against Hugging Face's LLaMA of the same shape"),
    "startup": ("gnmr.bench.process", "startup", "gnmr --help, and gnmr train to its first step"),
    "memory": ("gnmr.bench.process", "memory", "peak memory of gnmr train"),
    "theory": ("gnmr.paper.theory", "theory", "the paper's theorems 1 and 2 as numbers: recovery gaps, false triggers"),
}

_OF_OUR_MODELS = ("saved", "recipe", "mixture", "theory", "hf")


def measurable(names: list[str], setting: Setting) -> list[str]:
    """The named benchmarks, UserError if one cannot be measured here; without names all that can be."""
    chosen = []
    for name in names or BENCHMARKS:
        try:
            if setting.config.model.checkpoint is not None and name in _OF_OUR_MODELS:
                raise UserError(f"bench {name}: is for models of ours, not for model.name=pretrained")
            function(name, "check_")(setting)
        except UserError as error:
            if names:
                raise
            setting.say(f"left out: {error}")
        else:
            chosen.append(name)
    return chosen


def function(name: str, prefix: str = "", otherwise: Callable[..., Any] = lambda _setting: None) -> Callable[..., Any]:
    """A benchmark's function, or with a prefix the one that goes with it; `otherwise` where there is none."""
    module, function, _ = BENCHMARKS[name]
    return getattr(import_module(module), prefix + function, otherwise)
