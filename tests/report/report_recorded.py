"""Runs as they would be read, without their files: for tests of what is made of many results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gnmr.lab.report.comparisons import Comparison, compare
from gnmr.lab.report.runs import Run

PATHS = {
    "int4_int8": ("int4", "int8"),
    "int8_bf16": ("int8", "bf16"),
    "sim_e3m2_fp8_hybrid": ("sim_e3m2", "fp8_hybrid"),
    "fp8_hybrid_bf16": ("fp8_hybrid", "bf16"),
    "sim_int4_sim_int8": ("sim_int4", "sim_int8"),
}
SETTINGS = {
    "model.hidden_size": 256,
    "model.intermediate_size": 704,
    "optim.lr": 1e-3,
    "faults.kind": "none",
    "faults.rate": 0.0,
    "training.seq_len": 256,
    "training.batch_size": 8,
    "training.accumulation": 1,
    "training.steps": 100,
    "controller.signal": "gnmr_delta",
    "controller.routing": "thresholded",
    "controller.trigger": 1.0,
    "controller.alpha": 1.5,
    "controller.beta": 1.3,
    "controller.max_o": 4,
    "controller.t_lock": 1,
    "precision.site": "saved",
}


class Recorded:
    """Collects runs of one experiment."""

    def __init__(self, experiment: str = "stress", scale: str = "cpu") -> None:
        self.experiment, self.scale = experiment, scale
        self.runs: list[Run] = []

    def add(
        self,
        paths: str,
        *losses: float | None,
        promoted: float = 0.01,
        summary: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """One run a seed with these final log perplexities, None where it diverged; settings: keys with __ for dots."""
        low, recovery = PATHS.get(paths, (paths, None))
        given = {key.replace("__", "."): value for key, value in settings.items()}
        merged = SETTINGS | {"precision.name": paths, "precision.low": low, "precision.recovery": recovery} | given
        parts = [paths]
        if recovery:
            parts.append(str(merged["controller.signal"]).replace("gnmr_delta", "gnmr"))
            parts += ["ranked"] if merged["controller.routing"] == "ranked" else []
        parts += [str(given["optim.transform.name"])] if given.get("optim.transform.name") else []
        for seed, loss in enumerate(losses):
            run = Run(
                folder=Path(f"no-such-folder/{len(self.runs)}"),
                settings=merged,
                header={"data": {"fingerprint": "feedbeef"}},
                experiment=self.experiment,
                scale=self.scale,
                arm="-".join(parts),
                hash=str(sorted(map(repr, merged.items()))),
                seed=seed,
                status="failed" if loss is None else "done",
                reason="the validation loss after step 3 is nan" if loss is None else None,
            )
            value = loss or 9.0
            told = {"final_val_loss": value, "final_val_ppl": math.exp(value), "promotion_frac": promoted}
            run.__dict__["summary"] = told | (summary or {})
            self.runs.append(run)

    def comparisons(self) -> list[Comparison]:
        return compare(self.runs)
