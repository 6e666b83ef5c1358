"""A comparison in one sentence and its figures: the cost of low precision, the share recovered, and the spend.

The sentence says no more than the tests of the table (`Comparison.tests`) have shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich import filesize

from gnmr.errors import plural
from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.layout import interval_text, percent, relative, whole_percent
from gnmr.lab.report.statistics import FEWEST, LEVEL, NO_DIFFERENCE, RELATIONS, Family, Result, p_text, paired
from gnmr.pages import Figure

_MOST_NAMED = 4  # arms that the sentence names one by one


class Headline(NamedTuple):
    """The sentence, and the figures that are known; of a single arm its loss and its spend."""

    sentence: str
    figures: tuple[Figure, ...]
    arm: str | None = None  # label of the arm that the share and the spend refer to


def headline(comparison: Comparison) -> Headline:
    """Return the sentence and the figures that a report begins with."""
    routed = [arm for arm in comparison.arms if arm.always is None]
    # Of several families, the sentence is about the one with the most routed arms between its bounds.
    families = [(family, [arm for arm in routed if arm.label in family.between]) for family in comparison.families]
    family, between = max(families, key=lambda pair: len(pair[1]), default=(None, []))
    if between:
        # The largest share comes first, and arms without a known share come last.
        routed = sorted(between, key=lambda arm: -_share(comparison, arm, -math.inf))
    best = routed[0] if between else None
    if len(comparison.arms) == 1:
        first, sentences = _loss(comparison), [_endings(comparison)]
    else:
        first, cost_sentence = _cost(comparison, family)
        sentences = [cost_sentence or _endings(comparison)]
    recovered = None
    if family is not None and best is not None:
        recovered, recovered_sentence = _recovered(comparison, family, best, routed)
        sentences.append(recovered_sentence)
    figures = [figure for figure in (first, recovered, _spend(comparison, routed)) if figure is not None]
    return Headline(" ".join(sentences), tuple(figures), best.label if best else None)


def _share(comparison: Comparison, arm: Arm, unknown: float) -> float:
    closed = comparison.tests[arm.label].closed
    return unknown if closed is None else closed.value


def _cost(comparison: Comparison, family: Family | None) -> tuple[Figure | None, str]:
    """Return what low precision costs against 16 bits; nothing if the two arms cannot be compared."""
    if family is not None:
        low: Arm | None = comparison.by_label[family.low]
    else:
        low = next((arm for arm in comparison.arms if arm.always is not None), None)
    reference = None if low is None else comparison.reference(low)
    if reference is None and family is not None:
        reference = comparison.by_label[family.high]
    if low is None or reference is None or reference is low:
        return None, ""
    subject = "low precision" if low.compression is None else "compression"
    change = paired(comparison.values, low.label, reference.label)
    label, arms = f"cost of {subject}", f"{comparison.names[low.label]} against {comparison.names[reference.label]}"
    # A run that diverged has no perplexity to compare.
    if any(change.diverged):
        diverged = f"{change.diverged[0]} of {plural(change.n, 'run')} diverged"
        return Figure(label, diverged, arms), f"In low precision {diverged} ({arms}: {change.diverged[1]})."
    if change.difference is None:
        return None, ""
    value, detail = relative(change.difference.estimate), f"{arms}, n = {change.n}"
    ends = change.difference.interval if change.n >= FEWEST else None
    interval = f", 95% interval {' to '.join(map(relative, ends))}" if ends else ""
    figure = Figure(label, value, f"perplexity, {detail}{interval}")
    # The p-value is the table's, which is adjusted; the positive control of a family is its own test.
    test = comparison.tests.get(reference.label, change)
    p = test.p if test.control == low.label else change.p
    significant = p is not None and p < LEVEL
    if family is not None and family.tested and reference.label == family.high:
        significant = family.gate
    if change.n < FEWEST:
        few = f"a test needs {FEWEST} {comparison.replicate}s"
        return figure, f"{subject.capitalize()} changed the perplexity by {value} ({detail}; {few})."
    if not significant:
        return figure, f"{subject.capitalize()} did not change the perplexity significantly ({value}, {detail})."
    changed = "raised" if change.direction > 0 else "lowered"
    return figure, f"{subject.capitalize()} {changed} the perplexity by {value.lstrip('+-')} ({detail})."


def _recovered(comparison: Comparison, family: Family, best: Arm, routed: Sequence[Arm]) -> tuple[Figure | None, str]:
    """`best`: the arm that recovers most of the gap; `routed`: the arms between the bounds, the best first."""
    names, values = comparison.names, comparison.values
    low, high = names[family.low], names[family.high]
    # The positive control: without a gap between the bounds, a share of it means nothing.
    if family.tested and not family.gate:
        why = f"{high} is not significantly better than {low} (p = {p_text(family.p_gate)})"
        return None, f"Since {why}, the arms between them are not judged."
    if not values[family.low].keys() & values[family.high].keys() & values[best.label].keys():
        return None, f"{low}, {high} and {names[best.label]} have no {comparison.replicate} in common."
    if (closed := comparison.tests[best.label].closed) is None:
        return None, f"There is no loss gap between {low} and {high} to recover, or their runs diverged."
    most = f" (the most of {len(routed)} arms)" if len(routed) > 1 else ""
    interval = ""
    if closed.interval is not None and family.tested:
        interval = f", 95% interval {interval_text(closed.interval, whole_percent)}%"
    detail = f"{names[best.label]}{most}, of the gap between {low} and {high}{interval}"
    # Of many arms, the sentence names the best one and the random one with the same budget.
    named = list(routed)
    if len(named) > _MOST_NAMED:
        random = comparison.nearest_random(best)
        named = [best, *([random] if random is not None else [])]
    shares = []
    for arm in named:
        share, spend = _share(comparison, arm, math.nan), comparison.spend(arm)
        text = "diverged" if math.isnan(share) else whole_percent(share)
        if arm is best:
            text = f"{most if len(named) < len(routed) else ''} recovered {text}".strip()
        if spend is not None:
            text += f" with {percent(spend)}" + (f" of the {comparison.spend_of}" if arm is best else "")
        shares.append(f"{names[arm.label]} {text}")
    sentence = f"Of the loss gap between {low} and {high}, {', '.join(shares)}. {_verdict(comparison, family, best)}"
    return Figure("gap recovered", whole_percent(closed.value), detail), sentence


def _verdict(comparison: Comparison, family: Family, best: Arm) -> str:
    """Say what the table's tests show of the best arm, against the arm that never recovers and against random."""
    if not family.tested:
        return f"A test needs {FEWEST} {comparison.replicate}s."
    test, random = comparison.tests[best.label], comparison.random_tests.get(best.label)
    relation = RELATIONS.get(test.verdict, RELATIONS[NO_DIFFERENCE])
    verdict = f"{comparison.names[best.label]} is {relation} {comparison.names[family.low]}{_p(test)}"
    if random is None:
        return verdict + ("." if best.signal == "random" else "; no random arm has the same budget.")
    if random.verdict not in RELATIONS:
        return f"{verdict}; it has too few {comparison.replicate}s in common with random of the same budget."
    relation_to_random = RELATIONS[random.verdict]
    if relation_to_random == relation:  # better than never and than random
        relation_to_random = relation.rpartition(" ")[2]
    return f"{verdict} and {relation_to_random} random with the same budget{_p(random)}."


def _p(test: Result) -> str:
    return "" if test.p is None else f" (p = {p_text(test.p)})"


def _spend(comparison: Comparison, routed: Sequence[Arm]) -> Figure | None:
    """Return what the first routed arm with known spend put on the recovery path."""
    arm = next((arm for arm in routed if comparison.spend(arm) is not None), None)
    if arm is None:
        return None
    details, low = [comparison.names[arm.label]], comparison.low(arm)
    saved, saved_low = arm.mean("saved_bytes_mean"), None if low is None else low.mean("saved_bytes_mean")
    # Measured bytes come before those that Eq. 5 predicts.
    if saved is not None and saved_low is not None:
        extra_bytes, source = saved - saved_low, "measured"
    else:
        extra_bytes, source = arm.mean("spent_extra_bytes") or 0, "predicted"
    if extra_bytes > 0:
        details.append(f"{filesize.decimal(round(extra_bytes))} more saved for backward, {source}")
    if (sent := arm.mean("numbers_sent_frac")) is not None:
        details.append(f"sends {percent(sent)} of the numbers")
    return Figure(f"{comparison.spend_of} spent", percent(comparison.spend(arm)), "; ".join(details))


def _loss(comparison: Comparison) -> Figure | None:
    """Return the loss of the only arm: in validation, else of the last training step."""
    arm = comparison.arms[0]
    loss, ppl, name = arm.final("val_loss"), arm.final("val_ppl"), comparison.names[arm.label]
    if loss is not None and math.isfinite(loss.mean):
        detail = f"perplexity {ppl.mean:.2f}, {name}" if ppl is not None else name
        return Figure("validation loss", f"{loss.mean:.4f}", f"{detail}, n = {loss.n}")
    train = [float(run.steps["loss"][-1]) for run in arm.runs if len(run.steps["loss"])]
    if train and math.isfinite(mean := sum(train) / len(train)):
        return Figure("training loss", f"{mean:.4f}", f"of the last step, {name}, n = {len(train)}")
    return None


def _endings(comparison: Comparison) -> str:
    """Return how the runs ended, for arms that cannot be compared, and which arm is missing."""
    arms, names = comparison.arms, comparison.names
    endings = [_ended(comparison, arm) for arm in arms[:_MOST_NAMED]]
    if (more := len(arms) - _MOST_NAMED) > 0:
        endings.append(f"and {plural(more, 'more arm')}")
    # The first thing that a comparison lacks.
    low = next((arm for arm in arms if arm.always is not None and not arm.sixteen_bit), None)
    if all(arm.sixteen_bit for arm in arms):
        return f"{'; '.join(endings)}. Nothing was in low precision."
    if not any(arm.sixteen_bit for arm in arms):
        missing = "a 16-bit arm"
    elif low is None:
        missing = "a static low-precision arm"
    elif comparison.reference(low) is None:
        missing = f"a 16-bit arm of the model and optimizer of {names[low.label]}"
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
