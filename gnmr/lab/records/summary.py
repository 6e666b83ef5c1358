"""summary.json: the figures of a run, computed from the files that it wrote."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from gnmr.records.reader import iter_sound
from gnmr.records.schema import SUMMARY_FIELDS


@dataclass
class Watched:
    """A monitored module's norms so far: their mean, and the largest GNMR (Eq. 2) among them."""

    number: int = 0
    mean: float = 0.0
    largest: float = 1.0

    def add(self, norm: float) -> None:
        """The next step's norm; one that is not finite is passed over, as in a unit's history."""
        if not math.isfinite(norm):
            return
        if self.mean > 0:
            self.largest = max(self.largest, norm / self.mean)
        self.number += 1
        self.mean += (norm - self.mean) / self.number


class Steps:
    """What is counted of the sound rows of steps.jsonl, row by row."""

    def __init__(self, max_o: int) -> None:
        self.max_o = max_o
        self.totals: Counter[str] = Counter()
        self.over: Counter[str] = Counter()
        self.saturation: dict[str, list[int]] = {}
        self.monitored: dict[str, Watched] = {}
        self.times: list[float] = []
        self.last: dict[str, Any] = {"tokens": 0, "nonfinite_total": 0}

    def add(self, row: dict[str, Any]) -> None:
        """A row of `STEP_FIELDS`; one of other types is counted as damaged."""
        if not _sound(row):
            self.totals["damaged"] += 1
            return
        self.last = row
        self.times.append(row["step_time_s"])
        self.over.update(row["over"])
        saved = row["saved_bytes"]  # null under activation checkpointing
        if (active := row["num_active"]) is not None:  # null while a fork heals
            self.totals.update(routed=1, promoted=active, at_max_o=active >= self.max_o)
        self.totals.update(
            saved_bytes=saved or 0,
            measured=saved is not None,
        )
        if (spent := row.get("spent_gemm_frac")) is not None:  # of older versions there is none
            self.totals.update(spends=1, spent=spent, extra_bytes=row["spent_extra_bytes"])
        if (sent := row.get("numbers_sent")) is not None:
            self.totals.update(sendings=1, sent=sent, sent_frac=row["numbers_sent_frac"])
        for operand, counts in row["saturation"].items():
            before = self.saturation.get(operand, (0, 0))
            self.saturation[operand] = [a + b for a, b in zip(before, counts, strict=True)]
        for name, norm in row["monitored"].items():
            self.monitored.setdefault(name, Watched()).add(norm)


def summarize(
    folder: Path,
    num_recoverable: int,
    max_o: int,
    status: str,
    reason: str | None,
    peak_memory_bytes: int | None = None,
    incomplete: str | None = None,
) -> dict[str, Any]:
    """`SUMMARY_FIELDS` of a run folder.

    num_recoverable: units that the controller watches. status: done, failed or interrupted. A share or mean over
    nothing (no step trained, no units) is null. Reads steps.jsonl row by row; rows of other types are left
    out, and what follows one that cannot be read.
    incomplete: what is known to be missing.
    """
    lost: list[str] = []
    steps = Steps(max_o)
    for row, _ in iter_sound(folder / "steps.jsonl", lost):
        steps.add(row)
    if damaged := steps.totals["damaged"]:
        lost.insert(0, f"{damaged} rows of steps.jsonl are damaged")
    evals = [row for row, _ in iter_sound(folder / "eval.jsonl", lost) if _numbers(row, "val_loss", "val_ppl")]
    final = evals[-1] if evals else {}
    last, totals, number = steps.last, steps.totals, len(steps.times)
    step_time_s = median(steps.times) if number else None
    over_frac = {column: _share(over, totals["routed"] * num_recoverable) for column, over in steps.over.items()}
    summary = {
        "status": status,
        "reason": reason,
        "incomplete": "; ".join(filter(None, [*lost, incomplete])) or None,
        "steps": number,
        "tokens": last["tokens"],
        "final_val_loss": final.get("val_loss"),
        "final_val_ppl": final.get("val_ppl"),
        "promotion_frac": _share(totals["promoted"], totals["routed"] * num_recoverable),
        "hit_max_o_frac": _share(totals["at_max_o"], totals["routed"]),
        "gnmr_over_frac": over_frac.get("gnmr"),
        "delta_gnmr_over_frac": over_frac.get("delta_gnmr"),
        "over_frac": over_frac,
        "saved_bytes_mean": _share(totals["saved_bytes"], totals["measured"]),
        "spent_gemm_frac": _share(totals["spent"], totals["spends"]),
        "spent_extra_bytes": _share(totals["extra_bytes"], totals["spends"]),
        "numbers_sent_total": totals["sent"] if totals["sendings"] else None,
        "numbers_sent_frac": _share(totals["sent_frac"], totals["sendings"]),
        "peak_memory_bytes": peak_memory_bytes,
        "saturation_total": steps.saturation,
        "monitored": {name: {"mean": one.mean, "largest_gnmr": one.largest} for name, one in steps.monitored.items()},
        "nonfinite_total": last["nonfinite_total"],
        "wall_time_s": sum(steps.times),
        "step_time_median_s": step_time_s,
        "tokens_per_s": last["tokens"] / last["step"] / step_time_s if step_time_s else None,
    }
    assert summary.keys() == SUMMARY_FIELDS.keys()
    return summary


def _sound(row: dict[str, Any]) -> bool:
    """Whether a row of `STEP_FIELDS` holds what is counted here."""
    if not _numbers(row, "step", "tokens", "nonfinite_total", "step_time_s") or row["step"] < 1:
        return False
    if row.get("num_active", ()) is not None and not _numbers(row, "num_active"):
        return False
    over, norms, casts = (row.get(key) for key in ("over", "monitored", "saturation"))
    if not (isinstance(over, dict) and isinstance(norms, dict) and isinstance(casts, dict)):
        return False
    pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in casts.values())
    if row.get("spent_gemm_frac") is not None and not _numbers(row, "spent_gemm_frac", "spent_extra_bytes"):
        return False
    if row.get("numbers_sent") is not None and not _numbers(row, "numbers_sent", "numbers_sent_frac"):
        return False
    saved = row.get("saved_bytes", ()) is None or _numbers(row, "saved_bytes")
    return saved and pairs and all(map(_number, chain(over.values(), norms.values(), *casts.values())))


def _numbers(row: dict[str, Any], *keys: str) -> bool:
    return all(_number(row.get(key)) for key in keys)


def _number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None
