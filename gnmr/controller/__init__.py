"""The paper's controller. Imports torch and nothing else of ours, so that it runs in any training loop."""

from gnmr.controller.controller import Controller
from gnmr.controller.decision import Decision, Event
from gnmr.controller.observed import OBSERVE, OutputGradients
from gnmr.controller.packet import HostPacket
from gnmr.controller.policy import Choice, decide
from gnmr.controller.signals import Context, Evidence, GnmrSignal, Signal, build_signal
from gnmr.controller.spec import NO_CAP, ControlSpec
from gnmr.controller.thresholds import Threshold, TwoStage
from gnmr.controller.units import Unit

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
    "Signal",
    "Threshold",
    "TwoStage",
    "Unit",
    "build_signal",
    "decide",
]
