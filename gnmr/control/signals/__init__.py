"""Risk signals, one idea a file: `levels` holds those of one value against a threshold.

docs/signals.md has them in a table and says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, cast

from gnmr.control.signals.always import AlwaysHigh, AlwaysLow
from gnmr.control.signals.base import BlindSignal, Context, Evidence, LevelSignal, RatioSignal, Signal, SignalBase
from gnmr.control.signals.ema_ratio import EmaRatio
from gnmr.control.signals.first_last import FirstLast
from gnmr.control.signals.gap import Gap
from gnmr.control.signals.gap_exact import GapExact
from gnmr.control.signals.gnmr import DeltaGnmr, Gnmr, GnmrSignal
from gnmr.control.signals.gsnr import Gsnr
from gnmr.control.signals.history import Cumulative, Ema, Window
from gnmr.control.signals.jacobian import Jacobian
from gnmr.control.signals.levels import GradNorm, GradToNoise, Mse, Oracle, SpikeShare, Underflow
from gnmr.control.signals.pin_excess import PinExcess
from gnmr.control.signals.price import Price
from gnmr.control.signals.random import Random
from gnmr.control.signals.round_robin import RoundRobin
from gnmr.control.signals.static_k import StaticK
from gnmr.control.signals.update_norm import UpdateNorm
from gnmr.control.signals.zscore import ZScore
from gnmr.errors import did_you_mean

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
    "price": Price,
    "pin_excess": PinExcess,
    "oracle": Oracle,
    "random": Random,
    "static_k": StaticK,
    "first_last": FirstLast,
    "round_robin": RoundRobin,
    "always_low": AlwaysLow,
    "always_high": AlwaysHigh,
}


def build_signal(signal: str | Signal | Callable[..., Signal], options: Mapping[str, Any], context: Context) -> Signal:
    """The signal that this is, names or makes: a key of `SIGNALS`, `package.module:Class` for a third party's, a class
    or any function of (context, **options), or a signal that is made already.

    ValueError in one line: an unknown name, a module or class that is not there, an option that the signal does not
    have, a value without sense, something that is no signal, one that was made for other units.
    """
    name = signal if isinstance(signal, str) else getattr(signal, "__name__", type(signal).__name__)
    cls: Any = signal
    if isinstance(signal, str):
        cls = _third_party(name) if ":" in name else SIGNALS.get(name)
        if cls is None:
            right = f"use one of {', '.join(SIGNALS)}, or package.module:Class"
            raise ValueError(f"signal {name!r} is not known: {right}{did_you_mean(name, SIGNALS)}")
    built: Any = cls
    if isinstance(cls, type) or (callable(cls) and not hasattr(cls, "observe")):
        parameters = signature(cls).parameters if options else {}
        known = [key for key, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY]
        open_ended = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        for option in options:
            if option not in known and not open_ended:
                raise ValueError(f"signal {name} has no option {option!r}: it has {', '.join(known) or 'none'}")
        try:
            built = cls(context, **options)
        except TypeError as error:
            raise ValueError(f"signal {name}: cannot be made of (context, **options): {error}") from error
    elif options:
        raise ValueError(f"options {', '.join(options)}: {name} is made already; give the class, or its name")
    if lacking := [part for part in _PARTS if not hasattr(built, part)]:
        raise ValueError(f"signal {name}: a {type(built).__name__} is no signal: it has no {', '.join(lacking)}")
    own = getattr(getattr(built, "context", None), "names", context.names)
    if len(own) != len(context.names):
        raise ValueError(f"signal {name}: was made for {len(own)} units, these are {len(context.names)}")
    return cast(Signal, built)


_PARTS = ("observe", "columns", "needs", "thresholds", "state_dict", "load_state_dict")
"""What `Signal` asks for."""


def _third_party(name: str) -> Any:
    module_name, _, class_name = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise ValueError(f"signal {name!r}: must read package.module:Class")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"signal {name!r}: {error} (is its folder on PYTHONPATH?)") from error
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
