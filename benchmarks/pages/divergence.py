"""Where low precision diverges, and who survives: docs/results/divergence.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.stats import fisher_exact

from gnmr.lab.report.statistics import LEVEL, holm
from pages.layout import Results, origin, table_head, table_row

DIVERGENCE = ("divergence-search.json", "divergence-language.json", "divergence-survival.json")
RIVALS = {"GNMR, 4 of 8 operators": "random, 4 of 8 operators", "GNMR, fprop of 6": "random, fprop of 6"}
RIVALS |= {name.replace("GNMR", "price"): other for name, other in RIVALS.items()}
"""Arms of the survival table that are tested against random at the same spend too."""


def divergence(results: Results) -> str:
    """docs/results/divergence.md"""
    search, language, survival = records = [results.read(name) for name in DIVERGENCE]
    steps = language["rows"][0]["run"]["steps"]
    text = [
        "# Where low precision diverges",
        "",
        "The student and teacher of 2506.20752 made small (residual blocks, layer norm's parameters cast too), on",
        "fresh Gaussian inputs; benchmarks/divergence.py has the setting. *Diverged*: ten steps in a row that are not",
        "finite, or the mean error of the run's last tenth above three times the lowest mean of any tenth. Formats",
        "cast every operand of every GEMM; mxint3 and mxint2: 3 and 2 bits under MX's scales of 32 elements.",
        "",
        "## Always low, by optimizer, rate and format",
        "",
        "One seed. The error of the last tenth, in brackets over the lowest; or the first step that was not finite.",
        "",
        *_by_rate(search, {"adam": "Adam", "sgd": "SGD, momentum 0.9"}),
        "",
        f"A small LLaMA of `gnmr train` under AdamW, {steps} steps, one seed, perplexity:",
        "",
        *_by_rate(language, {"adam": "AdamW"}),
        "",
        "## Who survives",
        "",
        *survivors(survival["rows"]),
    ]
    return "\n".join([*text, "", *origin(records)])


def _by_rate(record: dict[str, Any], optimizers: dict[str, str]) -> Iterator[str]:
    """A row an optimizer and rate, a column a format."""
    cells = {(row["run"]["optimizer"], row["run"]["rate"], row["run"]["low"]): row for row in record["rows"]}
    lows = list(dict.fromkeys(low for _, _, low in cells))
    yield from table_head(["optimizer", "rate", *lows])
    for optimizer, rate in dict.fromkeys((optimizer, rate) for optimizer, rate, _ in cells):
        told = [_course(cells[optimizer, rate, low]) for low in lows]
        yield table_row([optimizers[optimizer], f"{rate:g}", *told])


def _course(row: dict[str, Any]) -> str:
    errors = row["errors"]
    if row["not_finite"] is not None and row["diverged"]:
        return f"**diverged**, step {row['not_finite']}"
    told = f"{errors[-1]:.3g} ({errors[-1] / min(errors):.1f})"
    return f"**diverged**, {told}" if row["diverged"] else told


def survivors(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row an arm: its spend, how many seeds survive, and p; the bounds first, without which nothing is told."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["run"]["arm"], []).append(row)
    setting, n = rows[0]["run"], len(arms["never"])

    def p(name: str, other: str) -> float:
        lost = [sum(row["diverged"] for row in arms[one]) for one in (name, other)]
        table = [[count, len(arms[one]) - count] for count, one in zip(lost, (name, other), strict=True)]
        return float(fisher_exact(table).pvalue)

    yield f"{setting['low']}, SGD with momentum at {setting['rate']:g}, {setting['steps']} steps, {n} seeds."
    yield "*In 16 bits*: the share of the GEMMs' arithmetic, mean over the steps. *Ends at*: median error of the"
    yield "survivors' last tenth. p: Fisher's exact test against never, Holm over all arms; in brackets against random"
    yield "at the same spend, by itself."
    yield ""
    if p("always", "never") >= LEVEL:
        yield "That low precision diverges here and 16 bits do not is not shown; nothing else is told."
        return
    tested = [name for name in arms if name != "never"]
    told = dict(zip(tested, holm([p(name, "never") for name in tested]), strict=True))
    yield from table_head(["arm", "in 16 bits", "survive", "ends at", "p"])
    for name, runs in arms.items():
        ends = [row["errors"][-1] for row in runs if not row["diverged"]]
        against = f" ({p(name, RIVALS[name]):.1g})" if name in RIVALS else ""
        spent = np.mean([row["spent"] for row in runs])
        end = f"{np.median(ends):.2f}" if ends else ""
        tested_p = f"{told[name]:.1g}{against}" if name in told else ""
        yield table_row([name, f"{spent:.0%}", f"{len(ends)} of {len(runs)}", end, tested_p])
