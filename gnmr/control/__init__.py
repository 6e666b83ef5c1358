"""The paper's controller, for any training loop: which units run in higher precision in the next step.

Of this package it imports only `gnmr.errors` and `gnmr.options`. The names are loaded on first use, because a
`ControlSpec` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnmr import loader

if TYPE_CHECKING:
    from gnmr.control.controller import Controller
    from gnmr.control.decision import Decision
    from gnmr.control.device import HostPacket
    from gnmr.control.norms import OutputGradients
    from gnmr.control.policy import decide
    from gnmr.control.signals import Context, Evidence, GnmrSignal, build_signal
    from gnmr.control.spec import NO_CAP, ControlSpec, TwoStage
    from gnmr.control.unit import Unit

__all__ = [
    "NO_CAP",
    "Context",
    "ControlSpec",
    "Controller",
    "Decision",
    "Evidence",
    "GnmrSignal",
    "HostPacket",
    "OutputGradients",
    "TwoStage",
    "Unit",
    "build_signal",
    "decide",
]

__getattr__ = loader(
    __name__,
    {
        "controller": ("Controller",),
        "decision": ("Decision",),
        "norms": ("OutputGradients",),
        "device": ("HostPacket",),
        "policy": ("decide",),
        "signals": ("Context", "Evidence", "GnmrSignal", "build_signal"),
        "spec": ("NO_CAP", "ControlSpec", "TwoStage"),
        "unit": ("Unit",),
    },
)
