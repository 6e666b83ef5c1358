"""Risk signals: they turn the measurements of a step into one risk per unit.

    signal, history   the interface, its base classes, and means of the past
    gnmr              the paper's signal
    levels            one value of the step against a fixed level
    ratios            one value of the step against its own past
    gains             what recovering a unit saves
    blind             choices that read nothing, which a signal has to beat

docs/signals.md lists them in a table and says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, cast

from gnmr.control.signals.blind import AlwaysHigh, AlwaysLow, BlindSignal, Random, StaticK
from gnmr.control.signals.gains import PinExcess, Price, RecoveryGap
from gnmr.control.signals.gnmr import GnmrSignal
from gnmr.control.signals.levels import GradNorm, Mse, Oracle
from gnmr.control.signals.ratios import Gsnr, Jacobian
from gnmr.control.signals.signal import Context, Evidence, LevelSignal, RatioSignal, Signal, SignalBase
from gnmr.options import did_you_mean

SIGNALS: dict[str, type[SignalBase]] = {
    "gnmr_delta": GnmrSignal,
    "recovery_gap": RecoveryGap,
    "price": Price,
    "pin_excess": PinExcess,
    "grad_norm": GradNorm,
    "mse": Mse,
    "gsnr": Gsnr,
    "jacobian": Jacobian,
    "oracle": Oracle,
    "static_k": StaticK,
    "random": Random,
    "always_low": AlwaysLow,
    "always_high": AlwaysHigh,
}


def build_signal(signal: str | Signal | Callable[..., Signal], options: Mapping[str, Any], context: Context) -> Signal:
    """Return the signal that `signal` is, names or makes.

    Args:
        signal: a key of `SIGNALS`, `package.module:Class` for a third party's signal, a class or function of (context,
            **options), or a signal object.
        options: options of its constructor.
        context: the run that the signal is made for.

    Raises:
        ValueError: in one line, if a name, module, class or option is unknown, a value is invalid, the object is not a
            signal, or the signal was made for other units.
    """
    name = signal if isinstance(signal, str) else getattr(signal, "__name__", type(signal).__name__)
    cls: Any = signal
    if isinstance(signal, str):
        cls = _third_party(name) if ":" in name else SIGNALS.get(name)
        if cls is None:
            raise ValueError(
                f"signal {name!r} is not known: use one of {', '.join(SIGNALS)}, or package.module:Class"
                f"{did_you_mean(name, SIGNALS)}"
            )
    # A class or a function is called with the context; an object that observes is a signal already.
    built: Any = cls
    if isinstance(cls, type) or (callable(cls) and not hasattr(cls, "observe")):
        parameters = signature(cls).parameters if options else {}
        keywords = [key for key, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY]
        open_ended = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        for option in options:
            if option not in keywords and not open_ended:
                raise ValueError(f"signal {name} has no option {option!r}: it has {', '.join(keywords) or 'none'}")
        try:
            built = cls(context, **options)
        except TypeError as error:
            raise ValueError(f"signal {name}: cannot be made of (context, **options): {error}") from error
    elif options:
        raise ValueError(f"options {', '.join(options)}: {name} is made already; give the class, or its name")
    if absent := [attribute for attribute in _ATTRIBUTES if not hasattr(built, attribute)]:
        raise ValueError(f"signal {name}: is not a signal: {type(built).__name__} has no {', '.join(absent)}")
    # A signal made elsewhere may hold a history of other units.
    names = getattr(getattr(built, "context", None), "names", context.names)
    if len(names) != len(context.names):
        raise ValueError(f"signal {name}: was made for {len(names)} units, these are {len(context.names)}")
    if len(built.thresholds(1)) != len(built.columns):
        raise ValueError(
            f"{type(built).__name__}: thresholds() gives {len(built.thresholds(1))}, its columns are "
            f"{', '.join(built.columns) or 'none'}: one each"
        )
    return cast(Signal, built)


_ATTRIBUTES = ("observe", "columns", "needs", "thresholds", "state_dict", "load_state_dict")
"""Attributes that `Signal` requires."""


def _third_party(name: str) -> Any:
    module_name, _, class_name = name.partition(":")
    if not all(name.isidentifier() for name in [*module_name.split("."), class_name]):
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
    "Evidence",
    "GnmrSignal",
    "LevelSignal",
    "RatioSignal",
    "Signal",
    "SignalBase",
    "build_signal",
]
