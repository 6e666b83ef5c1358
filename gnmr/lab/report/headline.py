"""A comparison in one sentence and its figures: the cost of low precision, the share recovered, and the spend.

The sentence says no more than the tests of the table (`Comparison.tests`) have shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gnmr.errors import plural
from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Bounds, Comparison
from gnmr.lab.report.layout import interval_text, percent, relative, size, whole_percent
from gnmr.lab.report.statistics import BETTER, EQUAL, FEWEST, LEVEL, NO_DIFFERENCE, WORSE, Result, p_text, paired

_MOST_NAMED = 4
"""Arms that the sentence names one by one."""
_AGAINST = {
    BETTER: "significantly better than",
    WORSE: "significantly worse than",
    EQUAL: "equal to",
    NO_DIFFERENCE: "not significantly different from",
}


class Figure(NamedTuple):
    """A number, its name, and its reference."""

    label: str
    value: str
    detail: str


class Headline(NamedTuple):
    """The sentence, and the figures that are known; of a single arm its loss and its spend."""

    sentence: str
    figures: tuple[Figure, ...]
    arm: str | None = None
    """Label of the arm that the share and the spend refer to."""


def headline(comparison: Comparison) -> Headline:
    """Return the first lines of a report."""
    if len(comparison.arms) == 1:
        return _lone(comparison)
    between = max(comparison.bounds, key=lambda one: len(_routed(one.between)), default=None)
    routed, best = _routed(comparison.arms), None
    if between is not None and (inside := _routed(between.between)):
        routed = sorted(inside, key=lambda arm: -_share(comparison, arm, -math.inf))
        best = routed[0]
    cost, cost_sentence = _cost(comparison, between)
    back, back_sentence = _back(comparison, between, best, routed)
    sentence = " ".join(filter(None, [cost_sentence or _endings(comparison), back_sentence]))
    figures = tuple(figure for figure in (cost, back, _spend(comparison, routed)) if figure is not None)
    return Headline(sentence, figures, best.label if best else None)


def _routed(arms: Sequence[Arm]) -> list[Arm]:
    return [arm for arm in arms if arm.always is None]


def _share(comparison: Comparison, arm: Arm, unknown: float) -> float:
    closed = comparison.tests[arm.label].closed
    return unknown if closed is None else closed.value


def _cost(comparison: Comparison, between: Bounds | None) -> tuple[Figure | None, str]:
    low = between.low if between is not None else next((arm for arm in comparison.arms if arm.always is not None), None)
    reference = None if low is None else comparison.reference(low) or (between.high if between else None)
    if low is None or reference is None or reference is low:
        return None, ""
    what = "low precision" if low.compression is None else "compression"
    change = paired(comparison.values, low.label, reference.label)
    label, arms = f"cost of {what}", f"{comparison.names[low.label]} against {comparison.names[reference.label]}"
    if any(change.diverged):
        lost = f"{change.diverged[0]} of {plural(change.n, 'run')} diverged"
        return Figure(label, lost, arms), f"In low precision {lost} ({arms}: {change.diverged[1]})."
    if change.difference is None:
        return None, ""
    value, of = relative(change.difference.estimate), f"{arms}, n = {change.n}"
    ends = change.difference.interval if change.n >= FEWEST else None
    interval = f", 95% interval {' to '.join(map(relative, ends))}" if ends else ""
    figure = Figure(label, value, f"perplexity, {of}{interval}")
    test = comparison.tests.get(reference.label, change)  # the table's, whose p-value is adjusted
    p = test.p if test.control == low.label else change.p
    shown = p is not None and p < LEVEL
    if between is not None and between.family.tested and reference is between.high:
        shown = between.family.gate
    if change.n < FEWEST:
        few = f"a test needs {FEWEST} {comparison.replicate}s"
        return figure, f"{what.capitalize()} changed the perplexity by {value} ({of}; {few})."
    if not shown:
        return figure, f"{what.capitalize()} did not change the perplexity significantly ({value}, {of})."
    changed = "raised" if change.direction > 0 else "lowered"
    return figure, f"{what.capitalize()} {changed} the perplexity by {value.lstrip('+-')} ({of})."


def _back(
    comparison: Comparison, between: Bounds | None, best: Arm | None, routed: Sequence[Arm]
) -> tuple[Figure | None, str]:
    """`best`: the arm that recovers most of the gap; `routed`: the arms between the bounds, the best first."""
    if between is None or best is None:
        return None, ""
    names, family = comparison.names, between.family
    low, high = names[between.low.label], names[between.high.label]
    if family.tested and not family.gate:
        why = f"{high} is not significantly better than {low} (p = {p_text(family.p_gate)})"
        return None, f"Since {why}, the arms between them are not judged."
    if not between.low.losses.keys() & between.high.losses.keys() & best.losses.keys():
        return None, f"{low}, {high} and {names[best.label]} have no {comparison.replicate} in common."
    if (closed := comparison.tests[best.label].closed) is None:
        return None, f"There is no loss gap between {low} and {high} to recover, or their runs diverged."
    of = f" (the most of {len(routed)} arms)" if len(routed) > 1 else ""
    interval = ""
    if closed.interval is not None and family.tested:
        interval = f", 95% interval {interval_text(closed.interval, whole_percent)}%"
    detail = f"{names[best.label]}{of}, of the gap between {low} and {high}{interval}"
    named = list(routed)
    if len(named) > _MOST_NAMED:
        random = comparison.nearest_random(best)
        named = [best, *([random] if random is not None else [])]
    parts = []
    for arm in named:
        share = _share(comparison, arm, math.nan)
        got = "diverged" if math.isnan(share) else whole_percent(share)
        if arm is best:
            got = f"{of if len(named) < len(routed) else ''} recovered {got}".strip()
        at = f" of the {comparison.spend_of}" if arm is best else ""
        spend = comparison.spend(arm)
        parts.append(f"{names[arm.label]} {got}" + ("" if spend is None else f" with {percent(spend)}{at}"))
    sentence = f"Of the loss gap between {low} and {high}, {', '.join(parts)}. {_verdict(comparison, between, best)}"
    return Figure("gap recovered", whole_percent(closed.value), detail), sentence


def _verdict(comparison: Comparison, between: Bounds, best: Arm) -> str:
    """Say what the table's tests show of the best arm, against the arm that never recovers and against random."""
    if not between.family.tested:
        return f"A test needs {FEWEST} {comparison.replicate}s."
    test, random = comparison.tests[best.label], comparison.random_tests.get(best.label)
    words = _AGAINST.get(test.verdict, _AGAINST[NO_DIFFERENCE])
    verdict = f"{comparison.names[best.label]} is {words} {comparison.names[between.low.label]}{_p(test)}"
    if random is None:
        return verdict + ("." if best.signal == "random" else "; no random arm has the same budget.")
    if random.verdict not in _AGAINST:
        return f"{verdict}; it has too few {comparison.replicate}s in common with random of the same budget."
    again = _AGAINST[random.verdict]
    against = again.rpartition(" ")[2] if again == words else again  # better than never and than random
    return f"{verdict} and {against} random with the same budget{_p(random)}."


def _p(test: Result) -> str:
    return "" if test.p is None else f" (p = {p_text(test.p)})"


def _spend(comparison: Comparison, routed: Sequence[Arm]) -> Figure | None:
    arm = next((one for one in routed if comparison.spend(one) is not None), None)
    if arm is None:
        return None
    parts = [comparison.names[arm.label]]
    saved = [None if one is None else one.mean("saved_bytes_mean") for one in (arm, comparison.low(arm))]
    if saved[0] is not None and saved[1] is not None:
        more, how = saved[0] - saved[1], "measured"
    else:
        more, how = arm.mean("spent_extra_bytes") or 0, "predicted (Eq. 5)"
    if more > 0:
        parts.append(f"{size(more)} more saved for backward, {how}")
    if (sent := arm.mean("numbers_sent_frac")) is not None:
        parts.append(f"sends {percent(sent)} of the numbers")
    return Figure(f"{comparison.spend_of} recovered", percent(comparison.spend(arm)), "; ".join(parts))


def _lone(comparison: Comparison) -> Headline:
    arm, figures = comparison.arms[0], list[Figure]()
    loss, ppl, name = arm.final("val_loss"), arm.final("val_ppl"), comparison.names[arm.label]
    train = [float(run.steps["loss"][-1]) for run in arm.runs if len(run.steps["loss"])]
    if loss is not None and math.isfinite(loss.mean):
        detail = f"perplexity {ppl.mean:.2f}, {name}" if ppl is not None else name
        figures.append(Figure("validation loss", f"{loss.mean:.4f}", f"{detail}, n = {loss.n}"))
    elif train and math.isfinite(mean := sum(train) / len(train)):
        figures.append(Figure("training loss", f"{mean:.4f}", f"of the last step, {name}, n = {len(train)}"))
    if (spend := _spend(comparison, _routed([arm]))) is not None:
        figures.append(spend)
    return Headline(_endings(comparison), tuple(figures))


def _endings(comparison: Comparison) -> str:
    """Return how the runs ended, for arms that cannot be compared."""
    endings = [_ended(comparison, arm) for arm in comparison.arms[:_MOST_NAMED]]
    if (more := len(comparison.arms) - _MOST_NAMED) > 0:
        endings.append(f"and {plural(more, 'more arm')}")
    if all(arm.sixteen_bit for arm in comparison.arms):
        return f"{'; '.join(endings)}. Nothing was in low precision."
    low = next((arm for arm in comparison.arms if arm.always is not None and not arm.sixteen_bit), None)
    if not any(arm.sixteen_bit for arm in comparison.arms):
        missing = "a 16-bit arm"
    elif low is None:
        missing = "a static low-precision arm"
    elif comparison.reference(low) is None:
        missing = f"a 16-bit arm of the model and optimizer of {comparison.names[low.label]}"
    else:
        missing = f"losses of the static arms for one {comparison.replicate}"
    return f"{'; '.join(endings)}. Without {missing} the cost of low precision is not known."


def _ended(comparison: Comparison, arm: Arm) -> str:
    ppl, at, name = arm.final("val_ppl"), "", comparison.names[arm.label]
    if arm.always is None and (spend := comparison.spend(arm)) is not None:
        at = f", with {percent(spend)} of the {comparison.spend_of} on the recovery path"
    if ppl is not None:
        return f"{name} ended at perplexity {ppl.mean:.2f}{at}"
    if diverged := sum(map(math.isinf, arm.losses.values())):
        return f"{name}: {diverged} of {plural(len(arm.runs), 'run')} diverged{at}"
    run = arm.first
    return f"{name} is {'unfinished' if run.status == 'running' else run.status} after step {run.last_step:,}"
