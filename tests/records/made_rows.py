"""Rows as the training loop would hand them over."""

from __future__ import annotations

from typing import Any

import numpy as np

from gnmr.records.schema import STEP_FIELDS, UnitRows

UNITS = [f"layers.{i}.mlp.down_proj" for i in range(4)]


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    assert changes.keys() <= STEP_FIELDS.keys()
    return dict.fromkeys(STEP_FIELDS) | {
        "step": step,
        "tokens": step * 2048,
        "loss": 10.0 / (step + 0.1),
        "bits_per_byte": 5.0 / (step + 0.1),
        "lr": 1e-3 / 3,
        "grad_norm_pre_clip": 0.1 + step,
        "num_candidates": 3,
        "num_active": 2,
        "over": {"gnmr": 1, "delta_gnmr": 0},
        "statistics": {},
        "monitored": {},
        "saturation": {},
        "saved_bytes": 1_000_000 + step,
        "saved_bytes_predicted": 1_000_000,
        "spent_gemm_frac": 0.25,
        "spent_extra_bytes": 512.0,
        "spent_extra_time": 0.5,
        "skipped": False,
        "nonfinite_total": 0,
        "nonfinite_streak": 0,
        "step_time_s": 0.25,
        "tokens_per_s": 8192.0,
        "mfu": 0.375,
        **changes,
    }


BITS = {"val_bits_per_byte": 1.25}


def eval_row(step: int) -> dict[str, Any]:
    no_fork = {"val_loss_low": None, "phase": None}
    return {
        "step": step,
        "tokens": step * 2048,
        "val_loss": 2.0 + 1 / step,
        "val_ppl": 8.0 + 1 / step,
        **BITS,
        **no_fork,
    }


def event_row(step: int, unit: str | None = UNITS[0], event: str = "promote", cause: str = "gnmr") -> dict[str, Any]:
    return {"step": step, "unit": unit, "event": event, "cause": cause, "risk": 3.5 if event == "promote" else None}


def unit_rows(step: int, units: list[str] = UNITS, **changes: Any) -> UnitRows:
    """Different numbers in every step; the second unit is active."""
    numbers = np.random.default_rng(step).lognormal(size=(3, len(units)))
    fields = {
        "step": step,
        "units": units,
        "observed": np.ones(len(units), bool),
        "norm": numbers[0],
        "columns": {"gnmr": numbers[1], "delta_gnmr": numbers[2]},
        "risk": numbers[1] + numbers[2],
        "active": np.arange(len(units)) == 1,
        "lock": np.arange(len(units)),
    }
    return UnitRows(**(fields | changes))
