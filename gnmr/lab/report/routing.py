"""How evenly a mixture of experts distributed its tokens, from the statistics of each recorded step."""

from __future__ import annotations

import math

import numpy as np

from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.layout import Table, average
from gnmr.lab.report.runs import Run

_SHOWN = {"max_share": np.max, "min_share": np.min, "entropy": np.min}
"""By name of the statistic: what makes the most uneven layer's of all layers'."""


def routing(comparison: Comparison) -> Table:
    """Largest and smallest share of an expert and the entropy of the shares; no rows for models without experts."""
    heads = ("max share", "min share", "entropy / log E")
    columns = [f"{head}\n{what}" for head in heads for what in ("mean", "last")]
    table = Table(f"{comparison.name}: routing of the experts", ["arm", *columns])
    numbers = set()
    for arm in comparison.arms:
        found = [told for run in arm.done if (told := _of_run(run))]
        if found:
            table.rows.append([arm.label, *(average(values, ".3f") for values in zip(*found, strict=True))])
            numbers.add(int(arm.settings["model.experts.number"]))
    even = ", ".join(f"{1 / number:.3f}" for number in sorted(numbers))
    table.notes = [
        "Of each step's most uneven layer: shares of the assignments that an expert got, and their entropy; mean over "
        f"the steps, and the last step; means over done seeds. Even is {even} and entropy 1."
    ]
    if fixed := [arm.label for arm in comparison.arms if arm.settings.get("model.experts.routing_seed") is not None]:
        table.notes.append(f"Fixed routing, the same in every step and seed: {', '.join(fixed)}.")
    return table


def _of_run(run: Run) -> list[float]:
    """Mean and last of each of `_SHOWN`; empty where the run recorded none or has one expert."""
    number = run.settings.get("model.experts.number") or 0
    told = []
    for name, most_uneven in _SHOWN.items():
        layers = [values for key, values in run.statistics.items() if key.endswith(f".{name}")]
        if not layers or number < 2:
            return []
        worst = most_uneven(layers, axis=0) / (math.log(number) if name == "entropy" else 1)
        known = worst[np.isfinite(worst)]
        if not len(known):
            return []
        told += [float(known.mean()), float(known[-1])]
    return told
