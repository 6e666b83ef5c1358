"""Risk signals, one file each; docs/signals.md has them in a table and says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from gnmr.controller.signals.always import AlwaysHigh, AlwaysLow
from gnmr.controller.signals.base import BlindSignal, Context, Evidence, LevelSignal, RatioSignal, Signal, SignalBase
from gnmr.controller.signals.ema_ratio import EmaRatio
from gnmr.controller.signals.first_last import FirstLast
from gnmr.controller.signals.gap import Gap
from gnmr.controller.signals.gap_exact import GapExact
from gnmr.controller.signals.gnmr import DeltaGnmr, Gnmr, GnmrSignal
from gnmr.controller.signals.grad_norm import GradNorm
from gnmr.controller.signals.grad_to_noise import GradToNoise
from gnmr.controller.signals.gsnr import Gsnr
from gnmr.controller.signals.history import Cumulative, Ema, Window
from gnmr.controller.signals.jacobian import Jacobian
from gnmr.controller.signals.mse import Mse
from gnmr.controller.signals.oracle import Oracle
from gnmr.controller.signals.random import Random
from gnmr.controller.signals.round_robin import RoundRobin
from gnmr.controller.signals.spike_share import SpikeShare
from gnmr.controller.signals.static_k import StaticK
from gnmr.controller.signals.underflow import Underflow
from gnmr.controller.signals.update_norm import UpdateNorm
from gnmr.controller.signals.zscore import ZScore

SIGNALS: dict[str, type[SignalBase]] = {
    "gnmr_delta": GnmrSignal,
    "gnmr": Gnmr,
    "delta_gnmr": DeltaGnmr,
    "ema_ratio": EmaRatio,
    "zscore": ZScore,
    "gsnr": Gsnr,
    "jacobian": Jacobian,
    "grad_norm": GradNorm,
    "grad_to_noise": GradToNoise,
    "underflow": Underflow,
    "mse": Mse,
    "spike_share": SpikeShare,
    "update_norm": UpdateNorm,
    "gap": Gap,
    "gap_exact": GapExact,
    "oracle": Oracle,
    "random": Random,
    "static_k": StaticK,
    "first_last": FirstLast,
    "round_robin": RoundRobin,
    "always_low": AlwaysLow,
    "always_high": AlwaysHigh,
}


def build_signal(name: str, options: Mapping[str, Any], context: Context) -> Signal:
    """The signal `name` (a key of `SIGNALS`, or `package.module:Class` for a third party's) with these options.

    ValueError in one line: an unknown name, a module or class that is not there, an option that the signal does not
    have, a value without sense.
    """
    cls: Any = _third_party(name) if ":" in name else SIGNALS.get(name)
    if cls is None:
        raise ValueError(f"signal {name!r} is not known: use one of {', '.join(SIGNALS)}, or package.module:Class")
    parameters = signature(cls).parameters
    known = [key for key, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY]
    open_ended = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in known and not open_ended:
            raise ValueError(f"signal {name} has no option {option!r}: it has {', '.join(known) or 'none'}")
    try:
        built: Signal = cls(context, **options)
    except TypeError as error:
        raise ValueError(f"signal {name}: cannot be made of (context, **options): {error}") from error
    if not hasattr(built, "observe"):
        raise ValueError(f"signal {name}: a {type(built).__name__} is no signal: it has no observe()")
    return built


def _third_party(name: str) -> Any:
    module_name, _, class_name = name.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"signal {name!r}: {error} (is its folder on PYTHONPATH?)") from error
    except ValueError as error:  # an empty name
        raise ValueError(f"signal {name!r}: must read package.module:Class") from error
    if not callable(cls := getattr(module, class_name, None)):
        raise ValueError(f"signal {name!r}: {module_name} has no class {class_name!r}")
    return cls


__all__ = [
    "SIGNALS",
    "BlindSignal",
    "Context",
    "Cumulative",
    "Ema",
    "Evidence",
    "GnmrSignal",
    "LevelSignal",
    "RatioSignal",
    "Signal",
    "SignalBase",
    "Window",
    "build_signal",
]
