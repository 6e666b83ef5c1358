"""The paper's controller, for any training loop: which units run in higher precision in the next step.

Of this package it imports only `gnmr.errors`. The names are loaded on first use: a `ControlSpec` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnmr import loader

if TYPE_CHECKING:
    from gnmr.control.controller import Controller
    from gnmr.control.decision import Decision, Event
    from gnmr.control.device import HostPacket
    from gnmr.control.norms import OutputGradients
    from gnmr.control.policy import Choice, decide
    from gnmr.control.signals import Context, Evidence, GnmrSignal, Signal, build_signal
    from gnmr.control.spec import NO_CAP, OBSERVE, ControlSpec, Rules, Threshold, TwoStage
    from gnmr.control.unit import Unit

__all__ = [
    "NO_CAP",
    "OBSERVE",
    "Choice",
    "Context",
    "ControlSpec",
    "Controller",
    "Decision",
    "Event",
    "Evidence",
    "GnmrSignal",
    "HostPacket",
    "OutputGradients",
    "Rules",
    "Signal",
    "Threshold",
    "TwoStage",
    "Unit",
    "build_signal",
    "decide",
]

__getattr__ = loader(
    __name__,
    {
        "controller": ("Controller",),
        "decision": ("Decision", "Event"),
        "norms": ("OutputGradients",),
        "device": ("HostPacket",),
        "policy": ("Choice", "decide"),
        "signals": ("Context", "Evidence", "GnmrSignal", "Signal", "build_signal"),
        "spec": ("NO_CAP", "OBSERVE", "ControlSpec", "Rules", "Threshold", "TwoStage"),
        "unit": ("Unit",),
    },
)
