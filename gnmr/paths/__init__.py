"""Low-cost and recovery paths of linear operators. Knows nothing of the controller.

The names below are loaded on first use: the config reads `gnmr.paths.spec`, which does without torch.
"""

from typing import TYPE_CHECKING

from gnmr.lazy import loader

__all__ = [
    "FORMATS",
    "RECIPES",
    "STATISTICS",
    "Fault",
    "FaultSchedule",
    "PathLinear",
    "PathSpec",
    "Plan",
    "Probe",
    "Recipe",
    "Window",
    "convert",
]

if TYPE_CHECKING:
    from gnmr.paths.conversion import convert
    from gnmr.paths.faults import Fault
    from gnmr.paths.formats import FORMATS
    from gnmr.paths.linear import PathLinear
    from gnmr.paths.plan import Plan
    from gnmr.paths.probe import STATISTICS, Probe
    from gnmr.paths.recipes import RECIPES, Recipe
    from gnmr.paths.schedule import FaultSchedule, Window
    from gnmr.paths.spec import PathSpec


__getattr__ = loader(
    __name__,
    {
        "conversion": ("convert",),
        "faults": ("Fault",),
        "formats": ("FORMATS",),
        "linear": ("PathLinear",),
        "plan": ("Plan",),
        "probe": ("STATISTICS", "Probe"),
        "recipes": ("RECIPES", "Recipe"),
        "schedule": ("FaultSchedule", "Window"),
        "spec": ("PathSpec",),
    },
)
