"""The paper's controller, for any training loop: which units run in higher precision in the next step.

    norms, output_norms, measurements   what a step is measured by
    signals                             from the measurements to one risk per unit
    policy                              from the risks to the next set of units
    controller                          all of it, once a step

Of this package it imports only `gnmr.errors`, `gnmr.options` and `gnmr.compiler`. The names are loaded on first use,
because a `ControlSpec` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnmr import loader

if TYPE_CHECKING:
    from gnmr.control.controller import Controller
    from gnmr.control.decision import Decision
    from gnmr.control.device import HostPacket
    from gnmr.control.output_norms import OutputGradients
    from gnmr.control.policy import decide
    from gnmr.control.signals import Context, Evidence, GnmrSignal, build_signal
    from gnmr.control.spec import NO_CAP, ControlSpec
    from gnmr.control.threshold import TwoStage
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
        "output_norms": ("OutputGradients",),
        "device": ("HostPacket",),
        "policy": ("decide",),
        "signals": ("Context", "Evidence", "GnmrSignal", "build_signal"),
        "spec": ("NO_CAP", "ControlSpec"),
        "threshold": ("TwoStage",),
        "unit": ("Unit",),
    },
)
