"""A comparison in one sentence and three figures: the cost of low precision, the share recovered, and the spend.

The sentence says no more than the tests of the table (`gnmr.lab.report.judged`) have shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.family import EQUAL
from gnmr.lab.report.judged import Bounds, Judged, bounds, judged, outcomes
from gnmr.lab.report.layout import NOTHING, interval_text, percent, relative, size, whole_percent
from gnmr.lab.report.statistics import BETTER, FEWEST, LEVEL, WORSE, p_text, paired

_COST, _BACK, _SPEND = "cost of low precision", "share got back", "spend"
_MOST_NAMED = 4
"""Arms that the sentence names one by one."""
Names = Mapping[str, str]
"""The part of an arm's label that differs from the other arms', by label."""


@dataclass(frozen=True)
class Figure:
    """A number, its name, and what it refers to."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Headline:
    """The sentence and the figures; of a single arm its loss and its spend."""

    sentence: str
    figures: tuple[Figure, ...]
    arm: str | None = None
    """Label of the arm that the share and the spend refer to."""


def headline(comparison: Comparison) -> Headline:
    """Return the first lines of a report."""
    names = short_names(comparison.arms)
    if len(comparison.arms) == 1:
        return _lone(comparison, names)
    pairs = bounds(comparison)
    between = max(pairs, key=lambda one: len(_routed(one.between)), default=None)
    routed, best = _routed(comparison.arms), None
    if between is not None and (inside := _routed(between.between)):
        shares = {arm.label: between.closed(arm) for arm in inside}
        routed = sorted(inside, key=lambda arm: math.inf if (share := shares[arm.label]) is None else -share)
        best = next(one for one in judged(comparison, pairs) if one.arm is routed[0])
    cost, cost_sentence = _cost(comparison, names, between)
    back, back_sentence = _back(comparison, names, between, best, routed)
    sentence = " ".join(filter(None, [cost_sentence or _endings(comparison, names), back_sentence]))
    spend = _spend(comparison, names, routed)
    return Headline(sentence, (cost, back, spend), best.arm.label if best is not None else None)


def short_names(arms: Sequence[Arm]) -> dict[str, str]:
    """Return, by label, what tells each arm from the others: of its name if that is unique, else of its label."""
    names = [arm.name for arm in arms]
    unique = [arm.name if names.count(arm.name) == 1 else arm.label for arm in arms]
    return {arm.label: short for arm, short in zip(arms, distinct_parts(unique), strict=True)}


def distinct_parts(labels: Sequence[str]) -> list[str]:
    """Return the labels without the words and the leading hyphenated parts that all of them share.

    Return them unchanged if that would leave one empty or two alike.
    """
    words = [label.split() for label in labels]
    several = [set(one) for one in words if len(one) > 1]
    common = set.intersection(*several) if len(several) > 1 else set()
    kept = [[word for word in one if word not in common] for one in words]
    heads = [one[0].split("-")[:-1] for one in kept if one and "-" in one[0]]
    cut = 0
    while len(heads) > 1 and all(len(head) > cut and head[cut] == heads[0][cut] for head in heads):
        cut += 1
    first = [one[0].split("-") if one else [""] for one in kept]
    short = [" ".join(["-".join(a[cut:] if len(a) > 1 else a), *b[1:]]) for a, b in zip(first, kept, strict=True)]
    return short if all(short) and len(set(short)) == len(set(labels)) else list(labels)


def high_precision(comparison: Comparison, arm: Arm) -> Arm | None:
    """Return the static 16-bit arm, else the static recovery arm if its path has 16 bits."""
    if (reference := comparison.reference(arm)) is not None:
        return reference
    recovery = comparison.recovery(arm)
    return recovery if recovery is not None and recovery.bits(recovery.always) == 16 else None


def _routed(arms: Sequence[Arm]) -> list[Arm]:
    return [arm for arm in arms if arm.always is None]


def _cost(comparison: Comparison, names: Names, between: Bounds | None) -> tuple[Figure, str]:
    low = between.low if between is not None else next((arm for arm in comparison.arms if arm.always is not None), None)
    reference = None if low is None else high_precision(comparison, low) or (between.high if between else None)
    if low is None or reference is None or reference is low:
        return Figure(_COST, NOTHING, "not known: no arm on the low path alone and in 16 bits to compare"), ""
    what = "low precision" if low.compression is None else "compression"
    change, arms = paired(outcomes(low), outcomes(reference)), f"{names[low.label]} against {names[reference.label]}"
    label = f"cost of {what}"
    if any(change.diverged):
        lost = f"{change.diverged[0]} of {change.n} runs diverged"
        return Figure(label, lost, arms), f"In low precision {lost} ({arms}: {change.diverged[1]})."
    if change.mean is None:
        return Figure(label, NOTHING, f"{arms}: no {_replicate(comparison)} in common"), ""
    value, n = relative(change.mean), f"n = {change.n}"
    interval = ""
    if change.interval and change.n >= FEWEST:
        interval = f", 95% interval {' to '.join(relative(end) for end in change.interval)}"
    figure = Figure(label, value, f"perplexity, {arms}, {n}{interval}")
    shown = change.p is not None and change.p < LEVEL
    if between is not None and between.tested and reference is between.high:
        shown = between.family.gate
    if change.n < FEWEST:
        return figure, f"{what.capitalize()} changed the perplexity by {value} ({arms}, {n}: too few for a test)."
    if not shown:
        return figure, f"No significant cost of {what} was found: {value} of perplexity ({arms}, {n})."
    if change.mean > 0:
        return figure, f"{what.capitalize()} cost {value} of perplexity ({arms}, {n})."
    return figure, f"{what.capitalize()} was no worse: {value} of perplexity ({arms}, {n})."


def _back(
    comparison: Comparison, names: Names, between: Bounds | None, best: Judged | None, routed: Sequence[Arm]
) -> tuple[Figure, str]:
    """`best`: the arm that closes most of the gap; `routed`: the arms between the bounds, the best first."""
    if between is None or best is None:
        return Figure(_BACK, NOTHING, "no static arms to measure between" if routed else "no arm routes"), ""
    low, high = names[between.low.label], names[between.high.label]
    if between.tested and not between.family.gate:
        why = f"{high} is not significantly better than {low} (p = {p_text(between.family.p_gate)})"
        return Figure(_BACK, NOTHING, f"no gap to share: {why}"), f"Since {why}, the arms between them are not judged."
    if best.closed is None:
        return Figure(_BACK, NOTHING, f"no gap between {low} and {high}, or runs diverged"), ""
    of = f" (the most of {len(routed)} arms)" if len(routed) > 1 else ""
    interval = ""
    if best.closed_interval is not None and between.tested:
        interval = f", 95% interval {interval_text(best.closed_interval, whole_percent)}%"
    detail = f"{names[best.arm.label]}{of}, of the way from {low} to {high}{interval}"
    named = list(routed)
    if len(named) > _MOST_NAMED:
        random = comparison.nearest_random(best.arm)
        named = [best.arm, *([random] if random is not None else [])]
    parts = []
    for arm in named:
        share = between.closed(arm)
        got = "diverged" if share is None else whole_percent(share)
        more = f"{of if len(named) < len(routed) else ''} got back" if arm is best.arm else ""
        parts.append(f"{names[arm.label]}{more} {got} at {_spent(arm)}")
    sentence = f"Of the way from {low} to {high}, {'; '.join(parts)}. {_verdict(comparison, names, between, best)}"
    return Figure(_BACK, whole_percent(best.closed), detail), sentence


def _verdict(comparison: Comparison, names: Names, between: Bounds, best: Judged) -> str:
    if not between.tested:
        return f"Too few {_replicate(comparison)}s for a test."
    low = names[between.low.label]
    shown = {BETTER: f"significantly better than {low}", WORSE: f"significantly worse than {low}"}
    shown |= {EQUAL: f"equal to {low}"}
    random = "" if best.arm.signal == "random" else "; there is no random arm with that spend"
    if best.random is not None:
        p = "" if best.random[0] is None else f" (p = {p_text(best.random[0])})"
        random = f"; against random with the same budget: {best.random[1]}{p}"
    against_low = shown.get(best.verdict or "", f"not significantly different from {low}")
    return f"{names[best.arm.label]} is {against_low}{random}."


def _spend(comparison: Comparison, names: Names, routed: Sequence[Arm]) -> Figure:
    arm = next((one for one in routed if one.spend is not None), None)
    if arm is None:
        return Figure(_SPEND, NOTHING, "no arm routes")
    parts = [f"{_spent(arm).removeprefix(percent(arm.spend)).strip()}, {names[arm.label]}"]
    low = comparison.low(arm)
    saved = [None if one is None else one.mean("saved_bytes_mean") for one in (arm, low)]
    if saved[0] is not None and saved[1] is not None:
        more, how = saved[0] - saved[1], "measured"
    else:
        more, how = arm.mean("spent_extra_bytes") or 0, "predicted (Eq. 5)"
    if more > 0:
        parts.append(f"{size(more)} more saved for backward, {how}")
    if (sent := arm.mean("numbers_sent_frac")) is not None:
        parts.append(f"sends {percent(sent)} of the numbers")
    return Figure(_SPEND, percent(arm.spend), "; ".join(parts))


def _lone(comparison: Comparison, names: Names) -> Headline:
    arm, figures = comparison.arms[0], list[Figure]()
    loss, ppl, name = arm.stat("final_val_loss"), arm.stat("final_val_ppl"), names[arm.label]
    train = [float(run.steps["loss"][-1]) for run in arm.runs if len(run.steps["loss"])]
    if loss is not None and math.isfinite(loss.mean):
        detail = f"perplexity {ppl.mean:.2f}, {name}" if ppl is not None else name
        figures.append(Figure("validation loss", f"{loss.mean:.4f}", f"{detail}, n = {loss.n}"))
    elif train and math.isfinite(mean := sum(train) / len(train)):
        figures.append(Figure("training loss", f"{mean:.4f}", f"of the last step, {name}, n = {len(train)}"))
    if (spend := _spend(comparison, names, _routed([arm]))).value != NOTHING:
        figures.append(spend)
    return Headline(_endings(comparison, names), tuple(figures))


def _endings(comparison: Comparison, names: Names) -> str:
    """Return how the runs ended, for arms that cannot be compared."""
    endings = [_ended(arm, names[arm.label]) for arm in comparison.arms[:_MOST_NAMED]]
    if (more := len(comparison.arms) - _MOST_NAMED) > 0:
        endings.append(f"and {more} more arms")
    if all(arm.sixteen_bit for arm in comparison.arms):
        return f"{'; '.join(endings)}. Nothing was in low precision."
    return f"{'; '.join(endings)}. Without a 16-bit arm the cost of low precision is not known."


def _ended(arm: Arm, name: str) -> str:
    ppl, at = arm.stat("final_val_ppl"), ""
    if arm.always is None and arm.promoted is not None:
        at = f", with {_spent(arm)} on the recovery path"
    if ppl is not None:
        return f"{name} ended at perplexity {ppl.mean:.2f}{at}"
    if arm.diverged:
        return f"{name}: {len(arm.diverged)} of {len(arm.runs)} runs diverged{at}"
    run = arm.first
    return f"{name} is {'unfinished' if run.status == 'running' else run.status} after step {run.last_step:,}"


def _spent(arm: Arm) -> str:
    """Return `Arm.spend` and what it is a share of."""
    of = "unit-steps" if arm.compression or arm.mean("spent_gemm_frac") is None else "GEMM FLOPs"
    return f"{percent(arm.spend)} of {of}"


def _replicate(comparison: Comparison) -> str:
    return "order" if comparison.kind.base else "seed"
