"""What earlier versions called things: words of the command line, and the keys of configs that were saved then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gnmr.errors import UserError

_PREFIXES = {
    "controller.signal.name": "controller.signal",
    "controller.signal.options": "controller.options",
    "signal.name": "signal",
    "signal.options": "options",
}
"""Old key -> new key, with the same values; keys below it move with it. The last two are words of `gnmr replay`."""


def new_words(word: str) -> str | None:
    """What this word is called now; None for a word that is none of an earlier version."""
    bare = word.lstrip("+~")
    key, _, value = bare.partition("=")
    if key == "controller/signal":
        return "controller.signal=package.module:Class" if value == "own" else f"controller.signal={value}"
    for old, new in _PREFIXES.items():
        if key == old or key.startswith(f"{old}."):
            return bare.replace(old, new, 1)
    return None


def refuse_old(words: Iterable[str]) -> None:
    """UserError for a word of an earlier version, with the words that say the same now."""
    for word in words:
        if (new := new_words(word)) is not None:
            raise UserError(f"{word}: is now {new}")


_RATIO = {"history": "cumulative", "decay": 0.99, "window": 100, "two_sided": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gnmr_delta": _RATIO,
    "gnmr": _RATIO,
    "delta_gnmr": _RATIO,
    "ema_ratio": _RATIO | {"threshold": 1.05, "clip": 1.05, "history": "ema", "decay": 0.98, "window": 50, "eps": 1e-8},
    "zscore": {"threshold": 2.5, "warmup": 25, "history": "ema", "decay": 0.97, "window": 50, "eps": 1e-6}
    | {"clipped": True},
    "gsnr": {"threshold": 1.5, "history": "ema", "decay": 0.99, "window": 100, "eps": 1e-8},
    "jacobian": _RATIO | {"threshold": 1.05, "history": "ema", "eps": 1e-8},
    "update_norm": _RATIO | {"threshold": 1.5, "eps": 1e-8},
    "gap": {"variant": "absolute", "threshold": 1.0, "every": 1, "history": "cumulative", "decay": 0.99}
    | {"window": 100, "eps": 1e-8},
    "gap_exact": {"threshold": 1.0, "every": 1},
    "grad_norm": {"threshold": 1.0},
    "grad_to_noise": {"threshold": 1.0},
    "mse": {"threshold": 1e-4},
    "oracle": {"threshold": 1.0},
    "spike_share": {"threshold": 0.001},
    "underflow": {"threshold": 0.05},
    "random": {"share": None},
    "round_robin": {"every": 1, "share": None},
    "first_last": {"first": 1, "last": 1, "share": None},
    "static_k": {"calibration_steps": None, "calibration_frac": 0.05, "k": None, "k_frac": None, "share": None}
    | {"eps": 1e-8},
}
"""Options that the files of a signal spelled out, at the values that its class has where nothing is said."""


def is_old(tree: Any) -> bool:
    """Whether this config was saved by a version with other keys."""
    controller = tree.get("controller") if isinstance(tree, dict) else None
    return isinstance(controller, dict) and isinstance(controller.get("signal"), dict)


def translated(tree: Any) -> Any:
    """A saved config under the keys of today; any other tree as it is. What it says does not change: options that
    only repeat their signal's defaults are left out, so that a run reads alike whoever saved it."""
    if not is_old(tree):
        return tree
    signal = tree["controller"]["signal"]
    name, options = signal.get("name", "gnmr_delta"), signal.get("options", {})
    if isinstance(options, dict):
        usual = _DEFAULTS.get(name, {}) if isinstance(name, str) else {}
        options = {key: value for key, value in options.items() if key not in usual or usual[key] != value}
    rest = {key: value for key, value in tree["controller"].items() if key != "signal"}
    return tree | {"controller": {"signal": name, "options": options, **rest}}
