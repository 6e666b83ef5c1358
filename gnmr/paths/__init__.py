"""Low-cost and recovery paths of linear operators. Knows nothing of the controller.

The names below are loaded on first use: the config reads `gnmr.paths.spec`, which does without torch.
"""

from typing import TYPE_CHECKING, Any

_WHERE = {
    "FORMATS": "formats",
    "RECIPES": "recipes",
    "STATISTICS": "probe",
    "Fault": "faults",
    "FaultSchedule": "schedule",
    "PathLinear": "linear",
    "PathSpec": "spec",
    "Plan": "plan",
    "Probe": "probe",
    "Recipe": "recipes",
    "Window": "schedule",
    "convert": "conversion",
}

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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gnmr.paths' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"gnmr.paths.{_WHERE[name]}"), name)
