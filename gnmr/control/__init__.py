"""The paper's controller. Imports torch and nothing else of ours, so that it runs in any training loop."""

from gnmr.control.controller import Controller
from gnmr.control.decision import Decision, Event
from gnmr.control.observed import OBSERVE, OutputGradients
from gnmr.control.packet import HostPacket
from gnmr.control.policy import Choice, decide
from gnmr.control.signals import Context, Evidence, GnmrSignal, Signal, build_signal
from gnmr.control.spec import NO_CAP, ControlSpec
from gnmr.control.thresholds import Threshold, TwoStage
from gnmr.control.units import Unit

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
