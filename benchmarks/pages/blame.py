"""Verdicts on planted causes and on ordinary spikes: docs/results/blame.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pages.layout import Results, origin, table_head, table_row

BLAME = ("blame-planted-cpu.json", "blame-spikes-cpu.json")


def blame(results: Results) -> str:
    """docs/results/blame.md"""
    planted, spikes = records = results.records(BLAME)
    text = [
        "# Verdicts on planted causes and on ordinary spikes",
        "",
        "Tiny trained runs. A cause is planted in a step that would hardly differ from the one before; what makes",
        "no spike has no verdict. *Single* and *pairs*: of one and of two broken operators, verdicts that name all",
        "that make a spike alone, and none that was not broken. *Not finite*: faults of the forward pass, and steps",
        "that they cost.",
        "",
        *table_head(["run", "spiked", "right verdict", "single", "pairs", "step times, at most", "not finite, lost"]),
    ]
    total: dict[str, list[int]] = {}
    for name, arm in planted["arms"].items():
        figures = arm["figures"]
        right, judged = judged_of(arm)
        told = {
            "spiked": [judged, len(arm["planted"])],
            "right": [right, judged],
            "single": figures["single"],
            "pairs": figures["pairs"],
            "lost": [figures["not finite"]["lost"], figures["not finite"]["n"]],
        }
        for key, (number, of) in told.items():
            total[key] = [a + b for a, b in zip(total.get(key, [0, 0]), (number, of), strict=True)]
        text.append(table_row([name, *_of(told, figures["most step times"])]))
    most = max(arm["figures"]["most step times"] for arm in planted["arms"].values())
    text.append(table_row(["all", *_of(total, most)]))
    causes, steps = causes_of(spikes), sum(arm["figures"]["steps"] for arm in spikes["arms"].values())
    n = sum(causes.values())
    text += [
        "",
        f"{n} ordinary spikes (above 3 standard deviations) of sound runs, in {steps:,} steps: {causes['data']} data,",
        f"{causes['precision']} precision (a false verdict), {causes['not_reproducible']} not reproducible.",
    ]
    return "\n".join([*text, "", *origin(records)])


def judged_of(arm: dict[str, Any]) -> tuple[int, int]:
    """Right verdicts on planted causes, and all."""
    found = [row for row in arm["planted"] if row["verdict"]]
    return sum(row["verdict"] == row["cause"] for row in found), len(found)


def causes_of(spikes: dict[str, Any]) -> dict[str, int]:
    """Verdicts on ordinary spikes, over all arms. KeyError for one that there is not."""
    causes = dict.fromkeys(("data", "precision", "not_reproducible"), 0)
    for arm in spikes["arms"].values():
        for cause, number in arm["figures"]["causes"].items():
            causes[cause] += number
    return causes


def _of(told: dict[str, list[int]], most: float) -> Iterator[str]:
    for key, (number, of) in told.items():
        if key == "lost":
            yield f"{most:.1f}"
        yield f"{number} of {of}"
