"""Runtime stability control for low-precision language model training.

    controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
    loss.backward(); controller.step(); optimizer.step()

The names below are the public surface. They are loaded on first use, so that the command line answers without torch.
"""

from typing import TYPE_CHECKING

from gnmr.lazy import loader

__version__ = "0.1.0"

__all__ = [
    "AttachedController",
    "Audit",
    "Context",
    "ControlSpec",
    "Controller",
    "Decision",
    "Diagnosis",
    "GnmrSignal",
    "PathSpec",
    "TwoStage",
    "Unit",
    "__version__",
    "attach",
    "audit",
    "convert",
    "diagnose",
]

if TYPE_CHECKING:
    from gnmr.attachment import AttachedController, attach
    from gnmr.controller import Context, Controller, ControlSpec, Decision, GnmrSignal, TwoStage, Unit
    from gnmr.doctor.audit import Audit, audit
    from gnmr.doctor.diagnose import diagnose
    from gnmr.doctor.diagnosis import Diagnosis
    from gnmr.paths import PathSpec, convert


__getattr__ = loader(
    __name__,
    {
        "attachment": ("AttachedController", "attach"),
        "controller": ("Context", "ControlSpec", "Controller", "Decision", "GnmrSignal", "TwoStage", "Unit"),
        "doctor.audit": ("Audit", "audit"),
        "doctor.diagnose": ("diagnose",),
        "doctor.diagnosis": ("Diagnosis",),
        "paths": ("PathSpec", "convert"),
    },
)
