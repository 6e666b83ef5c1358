"""The table of a head-to-head of plans, its claims, and its figure, from the rows of `rivals.py` (which see).

The unit is a held-out sequence, and every comparison is paired over sequences. An arm of several draws counts as the
mean of their KLs, sequence by sequence.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

import curve

OURS = ("plan", "price", "price, one recipe", "oracle")
"""These arms are no rivals: they are plans of ours, and an upper bound that has seen the held-out sequences."""
NOTHING = "never"
TAIL = "last 15% in BF16"
TIE = ("nvfp4", "gradient norm", "price")
"""The first claim compares these two arms on this low path."""
DIFFERENT_ERRORS = ("fp8_hybrid",)
"""On these low paths the relative errors of operators differ, because a whole tensor has one scale."""
MARGIN, ALPHA, STRICT = 0.1, 0.05, 0.01
"""Arms tie if the 95% interval of their difference is within this share of the KL; the others are levels of p."""
SINGLE_KL = "KL alone"
"""This column has the nats per token that an operator costs alone in low precision."""
SAMPLES = 2000
"""An interval of a rank correlation is of so many bootstrap samples of operators."""
DRAWN = {
    "plan": "plan",
    "gradient norm": "by gradient norm",
    "AutoQuantize, gradient": "AutoQuantize, gradient",
    "first and last": "first and last blocks",
}
"""The figure shows these arms under these labels."""


def kls_of(rows: Sequence[Mapping[str, Any]]) -> tuple[pd.DataFrame, list[str]]:
    """Return one row per (low, budget, arm) with the mean over its draws, and the plans whose KL is missing.

    `kls` and `same_top` have a number per sequence; `extra` and `pins` (the number of pinned operators) are means.
    """
    measured = {(row["low"], row["key"]): row for row in rows if row["kind"] == "kl"}
    cells: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    missing = []
    for row in (row for row in rows if row["kind"] == "plan"):
        if (of_pins := measured.get((row["low"], row["key"]))) is None:
            missing.append(f"{row['low']} {row['arm']} at {row['budget']:.0%}")
            continue
        both: dict[str, Any] = {key: np.array(of_pins[key]) for key in ("kls", "same_top")}
        both |= {"extra": row["extra"], "pins": len(row["pins"])}
        cells.setdefault((row["low"], row["budget"], row["arm"]), []).append(both)
    frame = pd.DataFrame(
        {
            "low": low,
            "budget": budget,
            "arm": arm,
            "draws": len(draws),
            **{key: np.mean([draw[key] for draw in draws], axis=0) for key in draws[0]},
            "lowest": min(draw["kls"].mean() for draw in draws),
            "highest": max(draw["kls"].mean() for draw in draws),
        }
        for (low, budget, arm), draws in cells.items()
    )
    return frame, missing


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values adjusted over all of them by Holm's method; NaN is left out, as no test.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": math.nan})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    tested = {name: p for name, p in p_values.items() if not math.isnan(p)}
    adjusted, largest = {}, 0.0
    for at, (name, p) in enumerate(sorted(tested.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(tested) - at)))
        adjusted[name] = largest
    return adjusted


def half_width(values: np.ndarray) -> float:
    """Return half the width of the 95% interval of a mean (Student's t)."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def one_sided(differences: np.ndarray, alternative: str) -> float:
    """Return the p-value of a t-test that the mean is above (`greater`) or below 0 (`less`); equal plans have 1."""
    if not differences.any():
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # differences that are all alike, up to rounding
        return float(stats.ttest_1samp(differences, 0.0, alternative=alternative).pvalue)


def table(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return, by low path, budget and arm, the KL that is left, and how many nats more than the plan leaves.

    `p_plan_less` and `p_plan_more` are of one-sided t-tests, Holm-adjusted over the rivals of a low path and budget.
    `removed` is the share of the KL of everything low that is gone, and `of_oracle` that share over the oracle's.
    """
    rows = []
    nothing = {row.low: row.kls for row in frame[frame.arm == NOTHING].itertuples()}
    for (low, budget), cell in frame[frame.arm != NOTHING].groupby(["low", "budget"], sort=False):
        kls = {row.arm: row.kls for row in cell.itertuples()}
        more = {arm: values - kls["plan"] for arm, values in kls.items() if "plan" in kls and arm != "plan"}
        rivals = {arm: values for arm, values in more.items() if arm not in OURS}
        p_less = holm({arm: one_sided(values, "greater") for arm, values in rivals.items()})
        p_more = holm({arm: one_sided(values, "less") for arm, values in rivals.items()})
        saved_by_oracle = (nothing[low] - kls["oracle"]).mean() if "oracle" in kls else math.nan
        for row in cell.itertuples():
            saved = (nothing[low] - row.kls).mean()
            of_arm = {"low": low, "budget": budget, "arm": row.arm, "n": len(row.kls), "draws": row.draws}
            of_arm |= {"extra": row.extra, "pins": row.pins, "kl": row.kls.mean(), "half_width": half_width(row.kls)}
            of_arm |= {"removed": saved / nothing[low].mean(), "same_top": row.same_top.mean()}
            if row.draws > 1:
                of_arm |= {"lowest": row.lowest, "highest": row.highest}
            if "oracle" in kls:
                of_arm["of_oracle"] = saved / saved_by_oracle
            if row.arm in more:
                of_arm |= {"more": more[row.arm].mean(), "more_half_width": half_width(more[row.arm])}
            if row.arm in p_less:
                of_arm |= {"p_plan_less": p_less[row.arm], "p_plan_more": p_more[row.arm]}
            rows.append({key: v.item() if isinstance(v, np.generic) else v for key, v in of_arm.items()})
    return rows


def ranks(of_operators: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return Spearman's correlation of every score with the KL of operators alone, and their number.

    Each comes with its 95% interval: percentiles of `SAMPLES` bootstrap samples of operators.
    """
    kl = np.array(of_operators[SINGLE_KL])
    scores = {name: np.array(of_operators[name]) for name in of_operators if name not in ("name", SINGLE_KL)}
    of_scores = {name: rank_correlation(score, kl) for name, score in scores.items()}
    return {"operators": len(kl), "of_scores": of_scores}


def rank_correlation(score: np.ndarray, kl: np.ndarray) -> tuple[float, float, float]:
    """Return Spearman's correlation of two scores of the same operators, each (operators,), and its `rank_interval`."""
    return float(stats.spearmanr(score, kl)[0]), *rank_interval(score, kl)


def rank_interval(score: np.ndarray, kl: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of the rank correlation of two scores of the same operators, each (operators,)."""
    drawn = np.random.default_rng(0).integers(0, len(kl), (SAMPLES, len(kl)))
    ranks_of_score, ranks_of_kl = (stats.rankdata(values[drawn], axis=1) for values in (score, kl))
    correlations = [np.corrcoef(*pair)[0, 1] for pair in zip(ranks_of_score, ranks_of_kl, strict=True)]
    low, high = np.percentile(correlations, [2.5, 97.5])
    return float(low), float(high)


def claims(frame: pd.DataFrame, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the outcome of each claim of rivals_claims.md: the number of its tests, and those that fail it."""
    low, arm, other = TIE
    tie: dict[str, bool] = {}
    for budget, cell in frame[frame.low == low].groupby("budget"):
        kls = {row.arm: row.kls for row in cell.itertuples()}
        if arm in kls and other in kls:
            apart = kls[arm] - kls[other]
            tie[f"{low} {arm} at {budget:.0%}"] = bool(
                abs(apart.mean()) + half_width(apart) <= MARGIN * kls[other].mean()
            )
    tested = [row for row in rows if "p_plan_more" in row]
    name = "{low} {arm} at {budget:.0%}".format_map
    no_more = {name(row): bool(row["p_plan_more"] >= ALPHA) for row in tested}
    less = {name(row): bool(row["p_plan_less"] < STRICT) for row in tested if row["low"] in DIFFERENT_ERRORS}
    outcomes = {"tie": tie, "no more": no_more, "less": less}
    return {
        claim: {
            "tests": len(held),
            "holds": bool(held) and all(held.values()),
            "fails": [k for k, ok in held.items() if not ok],
        }
        for claim, held in outcomes.items()
    }


def figure(rows: Sequence[Mapping[str, Any]], nothing: Mapping[str, float]) -> str:
    """Return a picture with one panel per low path: the KL that is left against the extra time.

    `nothing` has the KL of everything low.
    """
    panels = []
    for low, start in nothing.items():
        points = {
            arm: [(0.0, start, 0.0)]
            + [(r["extra"], r["kl"], r["half_width"]) for r in rows if (r["low"], r["arm"]) == (low, arm)]
            for arm in DRAWN
        }
        drawn = {DRAWN[arm]: np.array(sorted(of_arm)) for arm, of_arm in points.items() if len(of_arm) > 1}
        told = low.upper().replace("_", " ")
        up = f"{told}: KL that is left, nats per token"
        panels.append(
            curve.svg(drawn, (start, f"everything in {told}", False), across="extra time of the GEMMs", up=up)
        )
    height = 420
    placed = [panel.replace("<svg ", f'<svg y="{height * at}" ', 1) for at, panel in enumerate(panels)]
    size = f'viewBox="0 0 700 {height * len(panels)}" width="700" height="{height * len(panels)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{"".join(placed)}</svg>\n'


def numbers(name: str, record: Path) -> dict[str, str]:
    """Return the texts of a record for `tables.py`, by NAME_LOW/ARM at BUDGET/WHAT and NAME/CLAIM/WHAT."""
    content = json.loads(record.read_text())
    texts = {f"{name}_{low}/nothing": f"{kl:.3g}" for low, kl in content["nothing"].items()}
    for row in content["rows"]:
        arm = f"{name}_{row['low']}/{row['arm']} at {100 * row['budget']:.3g}%"
        texts[f"{arm}/kl"] = f"{row['kl']:.3g} ± {row['half_width']:.1g}"
        texts[f"{arm}/left"] = f"{row['kl']:.2g}" if row["kl"] < 0.01 else f"{row['kl']:.3g}"
        texts[f"{arm}/removed"] = f"{row['removed']:.0%}"
        texts[f"{arm}/same top"] = f"{row['same_top']:.1%}"
        texts[f"{arm}/extra"] = f"+{row['extra']:.1%}"
        texts[f"{arm}/n"] = str(row["n"])
        if "of_oracle" in row:
            texts[f"{arm}/of oracle"] = f"{row['of_oracle']:.0%}"
        if "more" in row:
            texts[f"{arm}/more"] = f"{row['more']:+.2g} ± {row['more_half_width']:.1g}"
        if "p_plan_less" in row:
            texts[f"{arm}/p"] = f"{row['p_plan_less']:.2g}"
    for claim, outcome in content["claims"].items():
        texts[f"{name}/{claim}/tests"] = str(outcome["tests"])
        texts[f"{name}/{claim}/held"] = str(outcome["tests"] - len(outcome["fails"]))
    return texts


def apart(first: Any, second: Any, where: str = "") -> list[str]:
    """Return the places where two contents of JSON differ by more than rounding."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = [*dict.fromkeys([*first, *second])]
        return [line for key in keys for line in apart(first.get(key), second.get(key), f"{where}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [
            line for at, pair in enumerate(zip(first, second, strict=True)) for line in apart(*pair, f"{where}[{at}]")
        ]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second))
    same = math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-300) if numeric else first == second
    return [] if same else [f"{re.sub('^[.]', '', where)}: {first} and {second}"]
