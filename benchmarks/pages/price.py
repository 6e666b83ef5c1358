"""Prices against the truth, of few tokens, and against what training gains."""

from __future__ import annotations

import math
from typing import Any

from gnmr.lab.bench.price import SCORE_OF
from pages.layout import Results, by_name, origin, table_head, table_row

TRUTH = ("price-truth-early.json", "price-truth-late.json")
SAMPLING, ATLAS = ("price-sampling.json", "price-sampling-shipped.json"), ("price-atlas.json",)
CADENCE = ("price-cadence.json", "price-cadence-shipped.json")
_SCORES = ("price", "price, by elements", "ModelOpt's score", "gap", "gradient norm", "MSE", "underflow", "update norm")
_CHOSEN = ("price", "gap", "gradient norm", "MSE", "the truth itself")
_BY_SCORE = {"price, by elements": "by elements", "ModelOpt's score": "ModelOpt", "the truth itself": "the truth"}


def truth(results: Results) -> str:
    """docs/results/price-truth.md"""
    text = [
        "# Price against the truth",
        "",
        "One operator at a time is put on the low path, the others in 16 bits; its *rise* is what the loss is higher",
        "then, over held-out blocks. Scores are measured on other blocks, in one backward pass. The base's name is its",
        "seed and its age in steps, of a schedule of 1,000. *Found* is the share of all rises in the operators that a",
        "score per cost chooses for 10 % of the GEMMs' arithmetic. *Clear* counts operators whose rise is above two",
        "standard errors: where they are few, rank correlations say nothing, and below ten shares are left out.",
        "Records of mxfp4 have the scale rule that is now named mxfp4_floor; with today's, the shipped base's KL under",
        "mxfp4 is 3% smaller. NVFP4's block scales were rounded twice, which changes its KL by 0.1%.",
    ]
    records = results.records(TRUTH)
    figures = by_name(*records)
    cells = list(dict.fromkeys(name.partition(": ")[0] for name in figures))
    heads = ["base", "low path", "all rises, nats", "clear", *(_BY_SCORE.get(name, name) for name in _SCORES)]
    text += ["", "## Spearman with the rises", "", *table_head(heads)]
    for cell in cells:
        note = figures[f"{cell}: Spearman, price"]["note"].split()
        total = note[note.index("up") + 2]
        values = (f"{figures[f'{cell}: Spearman, {name}']['value']:.2f}" for name in _SCORES)
        text.append(table_row([*cell.split(", "), total, f"{note[0]} of {note[2]}", *values]))
    heads = [
        "base",
        "low path",
        *(_BY_SCORE.get(name, name) for name in _CHOSEN),
        "prices / rises",
        "rises / all at once",
    ]
    text += ["", "## Found in 10 % of the GEMMs, and sums", "", *table_head(heads)]
    for cell in (cell for cell in cells if _clear(figures, cell) >= 10):
        found = (f"{figures[f'{cell}: rises in 10% of the GEMMs, {name}']['value']:.0%}" for name in _CHOSEN)
        sums = (
            f"{figures[f'{cell}: {what}']['value']:.2f}" for what in ("prices over rises", "rises over all at once")
        )
        text.append(table_row([*cell.split(", "), *found, *sums]))
    return "\n".join([*text, "", *origin(records)])


def _clear(figures: dict[str, Any], cell: str) -> int:
    return int(figures[f"{cell}: Spearman, price"]["note"].partition(" ")[0])


def sampling(results: Results) -> str:
    """docs/results/price-sampling.md"""
    records = results.records(SAMPLING)
    text = [
        "# Prices of few tokens against those of all",
        "",
        "Of one batch each operator's price is measured on one token in k, and on all tokens: the rank correlation",
        "of both over operators, and the median of |log ratio|, each a mean over batches.",
        "",
        *table_head(["base", "low path", "one token in", "Spearman", "median factor", "batches"]),
    ]
    figures = by_name(*records)
    for name, figure in figures.items():
        where, _, what = name.rpartition(", ")
        if what.startswith("Spearman"):
            base, low, stride = where.replace(": one token in ", ", ").split(", ")
            factor = math.exp(figures[f"{where}, median |log ratio|"]["value"])
            text.append(table_row([base, low, stride, f"{figure['value']:.2f}", f"{factor:.2f}", str(figure["n"])]))
    steps = results.there(CADENCE)
    text += _cadence(steps) if steps else []
    return "\n".join([*text, "", *origin([*records, *steps])])


def _cadence(records: list[dict[str, Any]]) -> list[str]:
    """Lines: the price that the signal holds, by how often it measures."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for name, figure in by_name(*records).items():
        base, how = name.split(", ")[:2]
        low, every = how.split(": one step in ")
        found.setdefault((base, low), {})[int(every)] = figure
    cadences = sorted({one for figures in found.values() for one in figures})
    return [
        "",
        "## One step in so many",
        "",
        "In a fork on the low path the signal measures its first ten steps and then one step in k. Spearman, over",
        "operators, of the price that it then holds with the mean price of each of the next 20 steps; a mean over",
        "stretches of 20 steps.",
        "",
        *table_head(["base", "low path", *(f"k = {one}" for one in cadences), "stretches"]),
        *(
            table_row([*key, *(f"{figures[one]['value']:.2f}" for one in cadences), str(figures[cadences[0]]["n"])])
            for key, figures in found.items()
        ),
    ]


def atlas(results: Results) -> str:
    """docs/results/price-atlas.md"""
    records = results.records(ATLAS)
    scores = ("gradient norm", "update norm", "gap", "MSE")
    text = [
        "# What training gains of one GEMM in 16 bits, against scores of the base",
        "",
        "Forks of 40 steps with one GEMM of one operator in 16 bits. Its gain: by how much the loss is lower than",
        "without, a mean over orders of the data. Spearman over the operators with scores of the base: its own price,",
        "which is fprop's in nats, the relative squared error of dgrad's gradient, and the squared error of wgrad's",
        "gradient. *Two orders*: how their gains rank alike. *Most*: what a score would have that knew the true gains,",
        "by Spearman and Brown from two orders; where it is near 0 the gains are noise. All gains of an order are",
        "taken from one fork, whose noise they share: it moves their level and not their ranks. Scores are of 16 of",
        "the 64 validation blocks that the loss is of.",
        "",
        *table_head(["base, low path, GEMM", "its own price", *scores, "two orders", "most", "orders", "gains"]),
    ]
    figures = by_name(*records)
    for where in dict.fromkeys(name.partition(": ")[0] for name in figures):
        own = figures[f"{where}: Spearman, {SCORE_OF[where.rpartition(', ')[2]]}"]
        found = [own, *(figures[f"{where}: Spearman, {name}"] for name in scores)]
        found += [
            figures.get(f"{where}: {name}", {}) for name in ("Spearman, two orders", "most that a score can have")
        ]
        ranks = (f"{figure['value']:.2f}" if figure else "-" for figure in found)
        text.append(table_row([where, *ranks, str(own["n"]), own["note"]]))
    return "\n".join([*text, "", *origin(records)])
