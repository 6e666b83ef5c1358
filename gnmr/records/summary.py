"""summary.json: the figures of a run, computed from the files that it wrote."""

from __future__ import annotations

import math
from collections import Counter, deque
from pathlib import Path
from statistics import median
from typing import Any

from gnmr.records.reader import iter_sound
from gnmr.records.schema import SUMMARY_FIELDS

_WINDOW, _FEWEST, _DEVIATIONS = 1000, 50, 7.0
"""Of `SpikeScore`: most and fewest earlier values, and the distance of a spike in standard deviations."""


class SpikeScore:
    """The share of the values of a series that lie far from those before them (OLMo 2, arXiv 2501.00656, section 3).

    Every value is compared with the mean of up to `_WINDOW` values before it, so that a spike raises no level that it
    is compared with. Values that are not finite are left out.
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque()
        self._sum = self._sum_of_squares = 0.0
        self._spikes = self._values = 0

    def add(self, value: float) -> None:
        """Take the next value of the series."""
        if not math.isfinite(value):
            return
        number = len(self._window)
        if number >= _FEWEST:
            # The mean and the variance E[x^2] - E[x]^2 of the values before this one.
            mean = self._sum / number
            variance = max(self._sum_of_squares / number - mean**2, 0.0)
            distance = abs(value - mean)
            self._values += 1
            self._spikes += distance > 0 and distance >= _DEVIATIONS * math.sqrt(variance)
        # The sums follow the window: the oldest value leaves, and this one enters.
        if number == _WINDOW:
            oldest = self._window.popleft()
            self._sum, self._sum_of_squares = self._sum - oldest, self._sum_of_squares - oldest**2
            if self._sum_of_squares < oldest**2:  # what is left has lost its last digits beside a huge value
                self._sum, self._sum_of_squares = math.fsum(self._window), math.fsum(x**2 for x in self._window)
        self._window.append(value)
        self._sum, self._sum_of_squares = self._sum + value, self._sum_of_squares + value**2

    def share(self) -> float | None:
        """Return spikes over values that had enough values before them; None if there are none."""
        return _share(self._spikes, self._values)


class _Steps:
    """Totals over the rows of steps.jsonl."""

    def __init__(self, max_o: int) -> None:
        self.max_o = max_o
        self.totals: Counter[str] = Counter()
        self.over: Counter[str] = Counter()
        self.saturation: dict[str, list[int]] = {}
        self.times: list[float] = []
        self.mfus: list[float] = []
        self.spikes = SpikeScore()
        self.last: dict[str, Any] = {"tokens": 0, "nonfinite_total": 0}

    def add(self, row: dict[str, Any]) -> None:
        # Fields that a step does not have are not counted into the number that a mean divides by.
        self.last = row
        self.times.append(row["step_time_s"])
        if (loss := row["loss"]) is not None:  # null in a loop of one's own that does not log it
            self.spikes.add(loss)
        if (mfu := row.get("mfu")) is not None:
            self.mfus.append(mfu)
        self.over.update(row["over"])
        if (active := row["num_active"]) is not None:  # null while a fork heals
            self.totals.update(routed=1, promoted=active, at_max_o=active >= self.max_o)
        if (saved := row["saved_bytes"]) is not None:  # null under activation checkpointing
            self.totals.update(measured=1, saved_bytes=saved)
        if (spent := row.get("spent_gemm_frac")) is not None:
            extra = {name: row[f"spent_{name}"] for name in ("extra_bytes", "extra_time")}
            self.totals.update(spends=1, spent=spent, **extra)
        if (sent := row.get("numbers_sent")) is not None:
            self.totals.update(sendings=1, sent=sent, sent_frac=row["numbers_sent_frac"])
        for operand, counts in row["saturation"].items():
            before = self.saturation.get(operand, (0, 0))
            self.saturation[operand] = [a + b for a, b in zip(before, counts, strict=True)]


def summarize(
    folder: Path,
    num_recoverable: int,
    max_o: int,
    status: str,
    reason: str | None,
    peak_memory_bytes: int | None = None,
) -> dict[str, Any]:
    """Return `SUMMARY_FIELDS` of a run folder.

    A share or a mean over nothing (no step was trained, there are no units) is None. Rows behind one that cannot be
    read are left out.

    Args:
        folder: the run folder.
        num_recoverable: the number of units that the controller watches.
        max_o: the most units on the recovery path.
        status: done, failed or interrupted.
        reason: why the run failed or stopped.
        peak_memory_bytes: as in `SUMMARY_FIELDS`.
    """
    steps = _Steps(max_o)
    for row, _ in iter_sound(folder / "steps.jsonl"):
        steps.add(row)
    evals = [row for row, _ in iter_sound(folder / "eval.jsonl")]
    final = evals[-1] if evals else {}
    last, totals = steps.last, steps.totals
    # The median, because the first step may compile and others may wait.
    step_time_s = median(steps.times) if steps.times else None
    over_frac = {column: _share(over, totals["routed"] * num_recoverable) for column, over in steps.over.items()}
    summary = {
        "status": status,
        "reason": reason,
        "steps": len(steps.times),
        "tokens": last["tokens"],
        "final_val_loss": final.get("val_loss"),
        "final_val_ppl": final.get("val_ppl"),
        "final_val_bits_per_byte": final.get("val_bits_per_byte"),
        "spike_score": steps.spikes.share(),
        "promotion_frac": _share(totals["promoted"], totals["routed"] * num_recoverable),
        "hit_max_o_frac": _share(totals["at_max_o"], totals["routed"]),
        "over_frac": over_frac,
        "saved_bytes_mean": _share(totals["saved_bytes"], totals["measured"]),
        "spent_gemm_frac": _share(totals["spent"], totals["spends"]),
        "spent_extra_bytes": _share(totals["extra_bytes"], totals["spends"]),
        "spent_extra_time": _share(totals["extra_time"], totals["spends"]),
        "numbers_sent_total": totals["sent"] if totals["sendings"] else None,
        "numbers_sent_frac": _share(totals["sent_frac"], totals["sendings"]),
        "peak_memory_bytes": peak_memory_bytes,
        "saturation_total": steps.saturation,
        "nonfinite_total": last["nonfinite_total"],
        "wall_time_s": sum(steps.times),
        "step_time_median_s": step_time_s,
        "tokens_per_s": last["tokens"] / last["step"] / step_time_s if step_time_s else None,
        "mfu": median(steps.mfus) if steps.mfus else None,
    }
    assert summary.keys() == SUMMARY_FIELDS.keys()
    return summary


def _share(total: float, number: int) -> float | None:
    return total / number if number else None
