"""Print the figures of docs/evidence.md that follow from stored records, without a new measurement.

    python benchmarks/from_records.py

`ranks`     Spearman correlation of each score with the KL of single operators, and its 95% interval: percentiles of
            2,000 bootstrap samples of operators. 24 operators include the highest by each estimate.
`oracle`    nats that a plan to MXFP8 saves, over what the best plan saves (sum of single KLs, measured on the
            held-out tokens themselves). Every score fills the same knapsack.
`predicted` KL that plans of SmolLM2 leave, against the sum of the prices that they leave.
`loss`      loss increase minus KL, with all operators in low precision, ± standard error over sequences.
`forks`     fraction of the mean loss gap (nats) that forks recover, over base checkpoints, on each of which a plan was
            made once; ± half the width of the 95% interval over checkpoints (`plans.fieller`).
`english`   nats of loss, times 1,000, that forks of English models gain against those that keep nothing; the same ±.
            `price`, `any` and `GNMR` choose in each step, by price, at random and by GNMR.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from scipy import stats

from gnmr.plan.knapsack import choose
from plans import fieller
from rival_table import rank_correlation

RESULTS = Path(__file__).resolve().parent / "results"
SCORES = {
    "by sequence": "drawn, by sequence",
    "by element": "drawn, by element",
    "gradient norm": "gradient norm",
    "MSE of input": "mse",
}
"""Names of the scores here and in the records of `price.py`. The first is the price."""
RIVAL_SCORES = {
    "by sequence": "estimate",
    "by element": "by element",
    "gradient norm": "gradient norm",
    "MSE of input": "MSE of the input",
    "PrismaQuant": "PrismaQuant",
}
"""The same in the records of `rivals.py`, which have more scores."""
BUDGET = 0.3
"""Extra time of fprop that the plans of `oracle` and `forks` may take: three tenths of the operators' area in MXFP8."""
ARMS = ("plan", "bf16", "by element", "gradient norm", "MSE", "random", "first and last", "last")
"""Arms of `forks`."""

SQUARED = {"gradient norm": "gradient norm squared"}
"""Scores whose squares fill a knapsack; ranks are the same."""

Rows = Iterator[list[str]]


def record(name: str) -> Any:
    """Return the content of a record, a list of rows if it has one row a line."""
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def ranks() -> Rows:
    yield ["ranks", *RIVAL_SCORES]
    of_all = {"SmolLM2": record("rivals-smollm2.json")["ranks"], "Whisper": record("rivals-whisper.json")["ranks"]}
    for name_of_model, model, file in (("0.9 M", "a", "price-kl-bases"), ("SmolLM2", "smollm2", "price-kl-smollm2")):
        for cell in record(f"{file}.json")["cells"]:
            if cell["model"] != model or cell["low"] not in ("nvfp4", "fp8_hybrid", "sim_e2m1"):
                continue
            if cell["low"] in of_all.get(name_of_model, ()):  # the rows below have all of its operators
                continue
            kl = np.array(cell["of_operators"]["kl"])
            scores = {name: np.array(cell["of_operators"][key]) for name, key in SCORES.items()}
            text_of = {name: rank_text(*rank_correlation(score, kl)) for name, score in scores.items()}
            texts = [text_of.get(name, "-") for name in RIVAL_SCORES]
            yield [f"{name_of_model}, {cell['low']}, {len(kl)} operators", *texts]
    for name_of_model, of_lows in of_all.items():
        for low, of_low in of_lows.items():
            texts = [rank_text(*of_low["of_scores"][score]) for score in RIVAL_SCORES.values()]
            yield [f"{name_of_model}, {low}, all {of_low['operators']}", *texts]


def rank_text(value: float, low: float, high: float) -> str:
    """Return a correlation with the ends of its interval."""
    return f"{value:.2f} ({low:.2f}, {high:.2f})"


def oracle() -> Rows:
    yield ["oracle", *(SQUARED.get(score, score) for score in SCORES)]
    cells = {(cell["model"], cell["low"]): cell["of_operators"] for cell in record("price-kl-bases.json")["cells"]}
    for low in ("nvfp4", "mxfp4", "sim_e2m1"):
        shares = [saved_shares(cells[model, low], cells[model, "mxfp8"], low) for model in ("a", "b")]
        yield [
            f"{low}, two models of 0.9 M",
            *(f"{first:.0%}, {second:.0%}" for first, second in zip(*shares, strict=True)),
        ]


def saved_shares(of_low: dict[str, Any], of_rescue: dict[str, Any], low: str) -> list[float]:
    """Return what the plan of each score saves, over what the plan of the single KLs saves."""
    items = [(name, "fprop") for name in of_low["name"]]
    # The linears of an MLP are 128 x 352, those of attention 128 x 128. MXFP8 takes twice the time of 4 bits.
    areas = [128.0 * (352 if ".mlp." in name else 128) for name in of_low["name"]]
    times = {item: {low: area, "mxfp8": 2 * area} for item, area in zip(items, areas, strict=True)}
    saved_kl = dict(zip(items, np.subtract(of_low["kl"], of_rescue["kl"]), strict=True))
    saved = []
    for key in ("kl", *SCORES.values()):
        if key == "gradient norm":
            scores = np.square(of_low[key])  # in proportion to the KL if all relative errors are equal
        elif key == "mse":
            scores = np.array(of_low[key])
        else:
            scores = np.subtract(of_low[key], of_rescue[key])
        prices = {
            item: {low: max(score, 0.0), "mxfp8": 0.0} for item, score in zip(items, scores.tolist(), strict=True)
        }
        saved.append(math.fsum(saved_kl[operator, "fprop"] for operator in choose(prices, times, low, BUDGET).pins))
    return [nats / saved[0] for nats in saved[1:]]


def predicted() -> Rows:
    plans = [plan for plan in record("plans-kl-smollm2.jsonl") if plan["price"]]
    pearson = np.corrcoef([plan["price"] for plan in plans], [plan["kl"] for plan in plans])[0, 1]
    yield ["predicted", "KL that a plan leaves / sum of the prices that it leaves"]
    yield [f"all {len(plans)} plans", f"Pearson {pearson:.3f}"]
    for arm in ("plan", "MSE", "random", "last"):
        ratios = [plan["kl"] / plan["price"] for plan in plans if plan["arm"] == arm]
        yield [arm, f"{min(ratios):.2f} to {max(ratios):.2f}"]
    table = pq.read_table(RESULTS / "diagnosis-smollm2-nvfp4.parquet").to_pandas()
    table, kl = table[table.gemm == "fprop"], record("diagnosis-smollm2-nvfp4.json")["measured"]["kl"]
    measured = f"{table.value.sum() / kl:.2f} if {table.measured.notna().sum()} of them are measured"
    yield [f"all {len(table)} operators", f"sum of prices / KL: {table.by_sequence.sum() / kl:.2f}; {measured}"]


def loss() -> Rows:
    lows = ("nvfp4", "mxfp8_floor", "fp8_hybrid")
    yield ["loss", *lows]
    texts: dict[str, list[str]] = {}
    for cell in record("formats-kl.json")["cells"]:
        if cell["low"] in lows:
            apart = np.subtract(cell["of_sequences"]["loss"], cell["of_sequences"]["kl"])
            texts.setdefault(cell["model"], []).append(f"{apart.mean():+.4f} ± {stats.sem(apart):.4f}")
    yield from (
        [{"A": "0.9 M, seed 0", "B": "0.9 M, seed 1"}.get(model, "SmolLM2"), *row] for model, row in texts.items()
    )


def mean_and_half(values: np.ndarray, of_one: float, digits: int, unit: str = "") -> str:
    """Return the mean of values and half the width of its 95% interval, both in multiples of `of_one`."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{values.mean() / of_one:.{digits}f}{unit} ± {half / of_one:.{digits}f}"


Losses = dict[tuple[str, float], dict[int, list[float]]]
"""Losses of a checkpoint's forks by (arm, budget) and data order, one for each draw of the arm."""


def losses_of(file: str) -> dict[tuple[str, str], Losses]:
    """Return the losses of forks by (low path, base)."""
    losses: dict[tuple[str, str], Losses] = {}
    for row in record(file):
        of_base = losses.setdefault((row["low"], row["base"]), {})
        of_base.setdefault((row["arm"], row["budget"]), {}).setdefault(row["order"], []).append(row["loss"])
    return losses


def gains(losses: Losses, arm: str, budget: float) -> np.ndarray:
    """Return what the forks of an arm gain against those that keep nothing, in nats, (orders,)."""
    return np.array([losses["never", 0.0][order][0] - np.mean(drawn) for order, drawn in losses[arm, budget].items()])


def share_and_half(saved: np.ndarray, gaps: np.ndarray) -> str:
    """Return the ratio of the means of pairs, and half the width of its 95% interval by Fieller's theorem."""
    ratio, low, high = fieller(pd.Series(saved), pd.Series(gaps))
    return "-" if ratio is None or low is None or high is None else f"{ratio:.0%} ± {50 * (high - low):.0f}"


def forks() -> Rows:
    yield ["forks", "gap", *(SQUARED.get(arm, arm) for arm in ARMS)]
    for file, kind in (("plans-checkpoints", "checkpoints"), ("plans-english-checkpoints", "on English")):
        of_checkpoints: dict[str, list[Losses]] = {}
        for (low, _), losses in losses_of(f"{file}.jsonl").items():
            of_checkpoints.setdefault(low, []).append(losses)
        for low, checkpoints in of_checkpoints.items():
            gaps_C = np.array([gains(losses, "always", 0.0).mean() for losses in checkpoints])
            shares = ["-"] * len(ARMS)
            if all((arm, BUDGET) in losses for losses in checkpoints for arm in ARMS):
                saved_AC = np.array([[gains(losses, arm, BUDGET).mean() for losses in checkpoints] for arm in ARMS])
                shares = [share_and_half(saved_C, gaps_C) for saved_C in saved_AC]
            yield [f"{low}, {len(checkpoints)} {kind}", mean_and_half(gaps_C, 1.0, 4), *shares]


def english() -> Rows:
    arms = ("plan", "price", "any", "GNMR")
    names = {"english_1m": "1.2 M", "english_10m": "10 M", "english_10m, CPU": "10 M, again", "smollm2": "SmolLM2"}
    yield ["english", "gap", *arms]
    for (low, base), losses in sorted(losses_of("plans-english.jsonl").items()):
        if base in names:
            texts = [mean_and_half(gains(losses, "always", 0.0), 1e-3, 1)]
            for arm in arms:
                measured = (arm, BUDGET) in losses
                texts.append(mean_and_half(gains(losses, arm, BUDGET), 1e-3, 1) if measured else "-")
            yield [f"{low}, {names[base]}", *texts]


def main() -> None:
    for part in (ranks, oracle, predicted, loss, forks, english):
        rows = list(part())
        # The first column is as wide as the longest label of all parts.
        widths = [35, *(max(len(row[at]) + 2 for row in rows if len(row) > at) for at in range(1, len(rows[0])))]
        for row in rows:
            print("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print()


if __name__ == "__main__":
    main()
