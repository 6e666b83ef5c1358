"""A comparison in one sentence and three figures: what low precision cost, the share that was got back, at what spend.

The bounds are the static low path and its static recovery path with the most routed arms between them; the sentence
says no more than the report's own tests of them (`gnmr.lab.report.one_model`, its table against random) have shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.family import EQUAL, Family
from gnmr.lab.report.layout import NOTHING, percent, size
from gnmr.lab.report.one_model import against_random, families, judged
from gnmr.lab.report.statistics import BETTER, FEWEST, LEVEL, WORSE, gap_closed, p_text, paired, relative_text
from gnmr.lab.report.style import telling_apart

COST, BACK, SPEND, LOSS = "cost of low precision", "share got back", "spend", "validation loss"
_MOST_NAMED = 4
"""Arms that the sentence names one by one."""


@dataclass(frozen=True)
class Figure:
    """A number with what it is and what it is of, as text."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Headline:
    """The sentence and the figures: cost, share got back and spend; of one arm alone its loss and its spend."""

    sentence: str
    figures: tuple[Figure, ...]
    arm: str | None = None
    """Label of the arm that the share and the spend are of."""


Names = Mapping[str, str]
"""What of an arm's label tells it from the others, by label."""


@dataclass(frozen=True)
class _Between:
    """Two static arms and the routed arms between them, those that got most back first."""

    low: Arm
    high: Arm
    arms: tuple[Arm, ...]
    family: Family | None
    """None where there are too few pairs for a test."""

    def closed(self, arm: Arm) -> float | None:
        found = gap_closed(self.low.outcomes, arm.outcomes, self.high.outcomes)
        return None if found is None else found[0]


def headline(comparison: Comparison) -> Headline:
    """What the first lines of a report say of the comparison; arms by what tells them apart."""
    names = short_names(comparison.arms)
    if len(comparison.arms) == 1:
        return _lone(comparison, names)
    between = _between(comparison)
    low, reference = _ends(comparison, between)
    cost, told_cost = _cost(comparison, names, (low, reference), between)
    back, told_back = _back(comparison, names, between)
    sentence = " ".join(filter(None, [told_cost or _alone(comparison, names), told_back]))
    best = between.arms[0].label if between is not None and between.arms else None
    return Headline(sentence, (cost, back, _spend(comparison, names, between)), best)


def short_names(arms: Sequence[Arm]) -> dict[str, str]:
    """What tells each arm from the others, by label: of its name where that is its own, else of its label."""
    names = [arm.name for arm in arms]
    told = [arm.name if names.count(arm.name) == 1 else arm.label for arm in arms]
    return {arm.label: short for arm, short in zip(arms, telling_apart(told), strict=True)}


def high_precision(comparison: Comparison, arm: Arm) -> Arm | None:
    """The arm that says what 16 bits give: the static one, else that of the recovery path where it is 16 bits."""
    if (reference := comparison.reference(arm)) is not None:
        return reference
    recovery = comparison.recovery(arm)
    return recovery if recovery is not None and recovery.bits(recovery.always) == 16 else None


def _between(comparison: Comparison) -> _Between | None:
    found = [arms for arms in families(comparison) if arms[0].outcomes and arms[-1].outcomes]
    if not found:
        return None
    low, *arms, high = max(found, key=lambda arms: sum(map(_routes, arms)))
    tested = len(low.outcomes.keys() & high.outcomes.keys()) >= FEWEST
    made = _Between(
        low, high, tuple(arm for arm in arms if _routes(arm)), judged([low, *arms, high]) if tested else None
    )
    best = sorted(made.arms, key=lambda arm: -math.inf if (share := made.closed(arm)) is None else share, reverse=True)
    return replace(made, arms=tuple(best))


def _routes(arm: Arm) -> bool:
    """Whether units move in it, or some are pinned: it lies between the bounds by more than its format."""
    return arm.always is None


def _ends(comparison: Comparison, between: _Between | None) -> tuple[Arm | None, Arm | None]:
    """The static low arm, and what its cost is told against: 16 bits, else the recovery path."""
    if between is not None:
        return between.low, high_precision(comparison, between.low) or between.high
    for arm in comparison.arms:
        reference = high_precision(comparison, arm)
        if arm.always is not None and reference is not None and reference is not arm and arm.outcomes:
            return arm, reference
    return None, None


def _cost(
    comparison: Comparison, names: Names, ends: tuple[Arm | None, Arm | None], between: _Between | None
) -> tuple[Figure, str]:
    """The figure and its part of the sentence, which is empty where nothing is known."""
    low, reference = ends
    if low is None or reference is None:
        return Figure(COST, NOTHING, "not known: no arm on the low path alone and in 16 bits to compare"), ""
    what = "low precision" if low.compression is None else "compression"
    label = f"cost of {what}"
    change, arms = paired(low.outcomes, reference.outcomes), f"{names[low.label]} against {names[reference.label]}"
    if any(change.diverged):
        told = f"{change.diverged[0]} of {change.n} runs diverged"
        return Figure(label, told, arms), f"In low precision {told} ({arms}: {change.diverged[1]})."
    if change.mean is None:
        return Figure(label, NOTHING, f"{arms}: no {_blocks(comparison, 1)} in common"), ""
    value, n = relative_text(change.mean), f"n = {change.n}"
    interval = ""
    if change.interval and change.n >= FEWEST:
        interval = f", 95 % interval {' to '.join(relative_text(end) for end in change.interval)}"
    figure = Figure(label, value, f"perplexity, {arms}, {n}{interval}")
    shown = change.p is not None and change.p < LEVEL
    if between is not None and between.family is not None and reference is between.high:
        shown = between.family.gate
    if change.n < FEWEST:
        return figure, f"{what.capitalize()} cost {value} of perplexity ({arms}, {n}: too few for a test)."
    if shown and change.mean > 0:
        return figure, f"{what.capitalize()} cost {value} of perplexity ({arms}, {n})."
    if shown:
        return figure, f"{what.capitalize()} was no worse: {value} of perplexity ({arms}, {n})."
    return figure, f"That {what} cost anything is not shown: {value} of perplexity ({arms}, {n})."


def _back(comparison: Comparison, names: Names, between: _Between | None) -> tuple[Figure, str]:
    if between is None or not between.arms:
        routed = any(arm.always is None for arm in comparison.arms)
        why = "no static arms beside it to measure between" if routed else "no arm routes"
        return Figure(BACK, NOTHING, why), ""
    low, high = names[between.low.label], names[between.high.label]
    family, best = between.family, between.arms[0]
    if family is not None and not family.gate:
        why = f"{high} is not shown to be better than {low} (p = {p_text(family.p_gate)})"
        return Figure(BACK, NOTHING, f"no gap to share: {why}"), f"Since {why}, nothing is said of arms between them."
    share = between.closed(best)
    if share is None:
        return Figure(BACK, NOTHING, f"no gap between {low} and {high}, or runs diverged"), ""
    rows = {} if family is None else {row.arm: row for row in family.rows}
    interval, verdict = "", ""
    if (row := rows.get(str(id(best)))) is not None:
        interval, verdict = row.texts()["closed_interval"].strip("()"), row.verdict
    of = f"{names[best.label]}{_of_arms(between.arms)}"
    over = f"of the way from {low} to {high}{f', 95 % interval {interval} %' if interval else ''}"
    return Figure(BACK, f"{100 * share:z.0f} %", f"{of}, {over}"), _told_back(comparison, names, between, verdict)


def _told_back(comparison: Comparison, names: Names, between: _Between, verdict: str) -> str:
    """`verdict`: on the arm that got most back against the low path; empty where there was no test."""
    best, low = between.arms[0], names[between.low.label]
    named = between.arms
    if len(named) > _MOST_NAMED:
        random = comparison.nearest_random(best)
        named = (best, *([random] if random is not None and random is not best else []))
    parts: list[str] = []
    for arm in named:
        share = between.closed(arm)
        got = "diverged" if share is None else f"{100 * share:z.0f} %"
        parts.append(f"{names[arm.label]}{'' if parts else ' got back'} {got} at {_spent(arm)}")
        if arm is best and len(named) < len(between.arms):
            parts[0] += _of_arms(between.arms)
    told = f"Of the way from {low} to {names[between.high.label]}, {'; '.join(parts)}."
    if not verdict:
        return f"{told} Too few {_blocks(comparison, 2)} for a test."
    shown = {BETTER: f"shown to be better than {low}", WORSE: f"shown to be worse than {low}", EQUAL: f"equal to {low}"}
    it = "It" if len(parts) == 1 else f"{names[best.label]}"
    return f"{told} {it} is {shown.get(verdict, f'not shown to differ from {low}')}{_against_random(comparison, best)}."


def _against_random(comparison: Comparison, arm: Arm) -> str:
    """The verdict of the report's table, in which all arms with a random one at their budget are one family."""
    if (found := against_random(comparison).get(arm.label)) is not None:
        p = "" if found.p is None else f" (p = {p_text(found.p)})"
        return f"; against random under the same budget: {found.verdict}{p}"
    return "" if arm.signal == "random" else "; no random arm at that spend"


def _spend(comparison: Comparison, names: Names, between: _Between | None) -> Figure:
    routed = between.arms if between and between.arms else [arm for arm in comparison.arms if arm.always is None]
    arm = next((one for one in routed if one.spend is not None), None)
    if arm is None:
        return Figure(SPEND, NOTHING, "no arm routes")
    sent, what = arm.mean("numbers_sent_frac"), _spent(arm).removeprefix(percent(arm.spend)).strip()
    parts = [f"{what}, {names[arm.label]}", *_more_bytes(comparison, arm)]
    if sent is not None:
        parts.append(f"sends {percent(sent)} of the numbers")
    return Figure(SPEND, percent(arm.spend), "; ".join(parts))


def _more_bytes(comparison: Comparison, arm: Arm) -> list[str]:
    """What the arm keeps for backward above the low path: measured where that path's arm stands beside it."""
    low = comparison.low(arm)
    saved = [None if one is None else one.mean("saved_bytes_mean") for one in (arm, low)]
    if saved[0] is not None and saved[1] is not None:
        more = saved[0] - saved[1]
        return [f"{size(more)} more saved for backward, measured"] if more > 0 else []
    more = arm.mean("spent_extra_bytes") or 0
    return [f"{size(more)} more saved for backward, predicted (Eq. 5)"] if more else []


def _alone(comparison: Comparison, names: Names) -> str:
    """Where nothing can be compared: how the runs ended."""
    told = [_ended(arm, names[arm.label]) for arm in comparison.arms[:_MOST_NAMED]]
    more = f"; and {len(comparison.arms) - _MOST_NAMED} more arms" if len(comparison.arms) > _MOST_NAMED else ""
    if all(arm.sixteen_bit for arm in comparison.arms):
        return f"{'; '.join(told)}{more}. Nothing was in low precision."
    return f"{'; '.join(told)}{more}. Without a 16-bit arm beside it what low precision cost is not known."


def _lone(comparison: Comparison, names: Names) -> Headline:
    """One arm alone: its loss and its spend, since there is nothing to compare."""
    arm, figures = comparison.arms[0], list[Figure]()
    loss, ppl, name = arm.stat("final_val_loss"), arm.stat("final_val_ppl"), names[arm.label]
    train = [float(run.steps["loss"][-1]) for run in arm.runs if len(run.steps["loss"])]
    if loss is not None and math.isfinite(loss.mean):
        told = f"perplexity {ppl.mean:.2f}, {name}" if ppl is not None else name
        figures.append(Figure(LOSS, f"{loss.mean:.4f}", f"{told}, n = {loss.n}"))
    elif train and math.isfinite(mean := sum(train) / len(train)):
        figures.append(Figure("training loss", f"{mean:.4f}", f"of the last step, {name}, n = {len(train)}"))
    if (spend := _spend(comparison, names, None)).value != NOTHING:
        figures.append(spend)
    return Headline(_alone(comparison, names), tuple(figures))


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
    """`Arm.spend` with what it is a share of."""
    of = "unit-steps" if arm.compression or arm.mean("spent_gemm_frac") is None else "the GEMMs' arithmetic"
    return f"{percent(arm.spend)} of {of}"


def _of_arms(arms: Sequence[Arm]) -> str:
    return f" (the most of {len(arms)} arms)" if len(arms) > 1 else ""


def _blocks(comparison: Comparison, number: int) -> str:
    return ("order" if comparison.kind.base else "seed") + ("s" if number > 1 else "")
