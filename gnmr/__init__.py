"""Runtime stability control for low-precision language model training.

    controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
    loss.backward(); controller.step(); optimizer.step()

The names below are the public surface. They are loaded on first use, so that the command line answers without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

__all__ = [
    "Audit",
    "Context",
    "ControlSpec",
    "Controller",
    "Decision",
    "Diagnosis",
    "GnmrSignal",
    "PathSpec",
    "Router",
    "TwoStage",
    "Unit",
    "__version__",
    "attach",
    "audit",
    "convert",
    "diagnose",
]

if TYPE_CHECKING:
    from gnmr.attachment import Router, attach
    from gnmr.auditing.audit import Audit, audit
    from gnmr.control import Context, Controller, ControlSpec, Decision, GnmrSignal, TwoStage, Unit
    from gnmr.conversion import PathSpec, convert
    from gnmr.plan.diagnose import diagnose
    from gnmr.plan.diagnosis import Diagnosis


def loader(package: str, homes: dict[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package's `__init__.py`, which imports the module of a name on its first use.

    Args:
        package: dotted name of the package.
        homes: the names in each module, whose own name is relative to the package.
    """
    where = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{where[name]}"), name)

    return load


__getattr__ = loader(
    __name__,
    {
        "attachment": ("Router", "attach"),
        "control": ("Context", "ControlSpec", "Controller", "Decision", "GnmrSignal", "TwoStage", "Unit"),
        "auditing.audit": ("Audit", "audit"),
        "conversion": ("PathSpec", "convert"),
        "plan.diagnose": ("diagnose",),
        "plan.diagnosis": ("Diagnosis",),
    },
)
