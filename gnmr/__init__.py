"""Runtime stability control for low-precision language model training.

    controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
    loss.backward(); controller.step(); optimizer.step()

The names below are the public surface. They are loaded on first use, so that the command line answers without torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "attach": "gnmr.attachment",
    "AttachedController": "gnmr.attachment",
    "Context": "gnmr.controller",
    "ControlSpec": "gnmr.controller",
    "Controller": "gnmr.controller",
    "Decision": "gnmr.controller",
    "GnmrSignal": "gnmr.controller",
    "TwoStage": "gnmr.controller",
    "Unit": "gnmr.controller",
    "PathSpec": "gnmr.paths",
    "convert": "gnmr.paths",
}

__all__ = [
    "AttachedController",
    "Context",
    "ControlSpec",
    "Controller",
    "Decision",
    "GnmrSignal",
    "PathSpec",
    "TwoStage",
    "Unit",
    "__version__",
    "attach",
    "convert",
]

if TYPE_CHECKING:
    from gnmr.attachment import AttachedController, attach
    from gnmr.controller import Context, Controller, ControlSpec, Decision, GnmrSignal, TwoStage, Unit
    from gnmr.paths import PathSpec, convert


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gnmr' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
