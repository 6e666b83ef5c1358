"""Low-cost and recovery paths of linear operators. Knows nothing of the controller."""

from gnmr.paths.backends import BACKENDS
from gnmr.paths.conversion import WEIGHTS, convert
from gnmr.paths.faults import Fault
from gnmr.paths.formats import FORMATS
from gnmr.paths.linear import PathLinear
from gnmr.paths.plan import Plan
from gnmr.paths.probe import STATISTICS, Probe
from gnmr.paths.recipes import RECIPES, Recipe
from gnmr.paths.schedule import FaultSchedule, Window
from gnmr.paths.units import UNITS

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
