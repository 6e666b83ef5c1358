"""The rows of a step and the versions in header.json, built in one place for `gnmr train` and for own loops."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr import __version__
from gnmr.records.schema import STEP_FIELDS, UnitRows

if TYPE_CHECKING:
    from gnmr.control import Decision


def step_row(decision: Decision, *, routed: bool = True, **known: Any) -> dict[str, Any]:
    """Return a row of `STEP_FIELDS`; a field that is not `known` is None.

    Args:
        decision: what the controller saw and did in the step.
        routed: False for a step in which no unit was routed.
        **known: further fields.
    """
    return {
        **dict.fromkeys(STEP_FIELDS),
        "statistics": {},
        "monitored": {},
        "saturation": {},
        "step": decision.step,
        "skipped": False,
        "num_candidates": sum(decision.candidate.tolist()) if routed else None,
        "num_active": sum(decision.in_force.tolist()) if routed else None,
        "over": {column: decision.over(column) for column in decision.columns},
        **known,
    }


def unit_rows(decision: Decision) -> UnitRows:
    """Return the decision as rows of `unit_schema`."""
    return UnitRows(
        step=decision.step,
        units=decision.units,
        observed=decision.observed,
        norm=decision.norm,
        columns=decision.columns | decision.evidence,
        risk=decision.risk,
        active=decision.in_force,
        lock=decision.lock,
    )


def event_rows(decision: Decision) -> list[dict[str, Any]]:
    """Return the decision's events as rows of `EVENT_FIELDS`."""
    return [dict(vars(event)) for event in decision.events]


def versions() -> dict[str, Any]:
    """Return the entries of header.json that name the software and the processor of a run."""
    import torch

    replaced_products = sys.modules.get("gnmr.lab.models.cpu_products")
    machine = {
        "cpu": cpu_name(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "products": "16-bit" if replaced_products is None else replaced_products.kind(),
    }
    return {
        "gnmr": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": machine,
    }


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
