"""Low-cost and recovery paths of linear operators. Knows nothing of the controller."""

from gnmr.paths.backends import BACKENDS
from gnmr.paths.convert import convert
from gnmr.paths.faults import Fault, FaultSchedule, Window
from gnmr.paths.formats import FORMATS
from gnmr.paths.groups import UNITS
from gnmr.paths.int8 import WEIGHTS
from gnmr.paths.plan import Plan
from gnmr.paths.probe import STATISTICS, Probe
from gnmr.paths.recipes import RECIPES, Recipe
from gnmr.paths.saved import PathLinear

__all__ = [
    "BACKENDS",
    "FORMATS",
    "RECIPES",
    "STATISTICS",
    "UNITS",
    "WEIGHTS",
    "Fault",
    "FaultSchedule",
    "PathLinear",
    "Plan",
    "Probe",
    "Recipe",
    "Window",
    "convert",
]
