"""The verdict of a diagnosis: one sentence, and the modules that it leaves out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from gnmr.errors import first_few, plural
from gnmr.measure.gemm_costs import format_nats
from gnmr.names import Pins
from gnmr.plan.knapsack import Choice

if TYPE_CHECKING:
    from gnmr.plan.diagnosis import Diagnosis

_NAMED = 4
"""Operators that a verdict names."""
LITTLE = 0.01
"""Nats per token, below which nothing has to be kept."""
LABELS = {
    "plan": "the plan, by price",
    "last": "last blocks",
    "first": "first blocks",
    "first_last": "first and last blocks",
    "random": "operators at random",
    "mse": "by mse of the input",
    "gradient norm": "by gradient norm",
}
"""What choices are called in tables."""
UNREACHED = "no token reached them"
"""The reason why experts have no price although others of their layer have one; a plan puts them with their group."""


def verdict(found: Diagnosis) -> str:
    """Return one sentence, and the modules that it leaves out."""
    return "; ".join([_sentence(found), *left_out(found)])


def left_out(found: Diagnosis) -> list[str]:
    """Return clauses on operators without a price, or without one in some batches, and on other modules."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.idle.items():
        by_reason.setdefault(why, []).append(name)
    clauses = [
        f"{'without a price' if why == UNREACHED else 'left out'}, as {why}: {first_few(names)}"
        for why, names in by_reason.items()
    ]
    if found.partly:
        clauses.append(f"only in some of the batches ran {first_few(list(found.partly))}")
    if names := found.without_sequences:
        why = "as rows of theirs belong to several sequences of the logits (S, T, V)"
        clauses.append(f"estimated by token alone, {why}: {first_few(names)}")
    if found.coverage.left_out(found.operators):
        clauses.append(found.coverage.line(found.operators, "this covers"))
    return clauses


def _sentence(found: Diagnosis) -> str:
    measured, name = found.measured, found.recipe
    under = "under the plan " if found.pins else ""
    if not measured.finite:
        worst = f"fprop of {first_few([row.operator for row in found.worst()[:_NAMED]])}"
        what = "the loss is" if measured.kl is None else "the predictions are"
        loss = "" if measured.kl is None else "loss "
        high = "" if measured.high is None else f" ({loss}{measured.high:.4f} on {found.recovery})"
        return f"{under}{what} not finite under {name}{high}; worst: {worst}"
    if found.against:
        return _of_two_sides(found)
    start = f"nothing {'more ' if found.pins else ''}has to be kept: " if found.little else ""
    unit = "nats" if measured.kl is None else "nats of KL per token"
    if measured.kl is not None and measured.nats <= (found.limit or 0.0):
        return (
            f"{start}{under}{name} costs {format_nats(measured.nats)} {unit}, no more than rounding of this model "
            f"makes ({format_nats(found.limit or 0.0)}), so nothing can be told of it"
        )
    if not measured.above_noise and not start and measured.kl is not None:
        return (
            f"{plural(measured.batches, 'batch')} are too few to tell what {under}{name} costs: {measured.nats:.2g} ± "
            f"{measured.noise:.1g} {unit}, by estimate {found.total:.2g}; take more batches"
        )
    if not measured.above_noise:
        return (
            f"{start}{under}{name} costs nothing here that {plural(measured.batches, 'batch')} can show "
            f"({measured.nats:+.2g} ± {measured.noise:.1g} {unit}, by estimate {found.total:.2g})"
            f"{'' if start else ': more batches would tell'}"
        )
    losses = "" if measured.high is None else f" (loss {measured.high:.4f} -> {measured.low:.4f})"
    cost = f"{start}{under}{name} costs {format_nats(measured.nats)} {unit} against {found.recovery}{losses}"
    if start:
        return f"{cost}, less than {LITTLE}"
    if found.pins:
        return f"{cost}, with {_gemms(found.pins)} of {len(found.rows)} GEMMs on {on_recipes(found.pins)}"
    if found.total <= 0:
        return f"{cost}, and no GEMM alone costs anything"
    chosen = found.choice()
    if not chosen.pins:
        return f"{cost}; no GEMM fits a budget of {time(found, found.budget)}"
    return (
        f"{cost}; keeping {_pinned(found, chosen)} on {on_recipes(chosen.pins)}, for {time(found, chosen.extra)}, "
        f"{_left(found, chosen)}{'; ' * bool(clause := rival(found))}{clause}"
    )


def _of_two_sides(found: Diagnosis) -> str:
    """Return the verdict on two sides: whether the gate holds, what makes the difference, and what to change."""
    measured, gate = found.measured, found.gate
    width = f" ± {format_nats(measured.noise)}" if measured.noise > 0 else ""
    differ = (
        f"the rollout ({found.recipe}) and the trainer ({found.recovery}) differ by "
        f"{format_nats(measured.nats)}{width} nats of KL per token"
    )
    if measured.nats <= (found.limit or 0.0):
        return f"{'the gate holds: ' * (gate is not None)}{differ}, no more than rounding makes"
    if gate is not None and measured.nats + (measured.noise if width else 0.0) <= gate:
        return f"the gate holds: {differ}, at most {gate:g}"
    if gate is not None and measured.nats - measured.noise <= gate:
        return f"the gate of {gate:g} cannot be decided: {differ}; more batches would tell"
    start = "" if gate is None else "the gate does not hold: "
    more = "" if gate is None else f", more than {gate:g}"
    chosen = found.choice()
    if not chosen.pins:
        fits = f"no GEMM fits a budget of {time(found, found.budget)}"
        return f"{start}{differ}{more}, and {fits if found.total > 0 else 'no GEMM alone makes it'}"
    return (
        f"{start}{differ}{more}; run {_pinned(found, chosen)} in one recipe on both sides (the trainer's in the "
        f"rollout, or the rollout's in the trainer), which {_left(found, chosen)}"
    )


def _pinned(found: Diagnosis, chosen: Choice) -> str:
    """The GEMMs of a choice, the largest first."""
    ordered = sorted(chosen.pins, key=lambda one: -found.prices[one, "fprop"][found.recipe])
    share = 1 - chosen.after / chosen.before
    named = [f"{name} ({' | '.join(found.sides[name])})" if name in found.sides else name for name in ordered]
    return f"{_gemms(chosen.pins)} of {len(found.rows)} GEMMs ({share:.0%} of the cost: fprop of {first_few(named)})"


def _left(found: Diagnosis, chosen: Choice) -> str:
    """Say what the plan leaves: measured on held-out batches, or as expected."""
    if (left := found.left.get("plan")) is not None and left.finite:
        width = f" ± {format_nats(left.noise)}" if np.isfinite(left.noise) else ""
        return f"leaves {format_nats(left.nats)}{width} nats on other batches"
    return f"should leave {format_nats(found.expected(chosen)[1])} nats"


def rival(found: Diagnosis) -> str:
    """A clause where, on the held-out batches, a guess left less than the plan, or these are too few to tell."""
    if found.pins or found.held_out is None or not found.apart:
        return ""
    several = found.held_out.batches > 1
    batches = plural(found.held_out.batches, "held-out batch")
    few = f"{batches} {'are' if several else 'is'} too few to tell the choices apart"
    best = min(found.apart, key=lambda name: found.left[name].nats)
    more, noise = found.apart[best]
    if more < 0:
        both = f"{format_nats(found.left[best].nats)} nats against {format_nats(found.left['plan'].nats)}"
        unsure = "" if -more > noise else ", which is too few batches to be sure"
        return f"{label(best)} left less than the plan on {batches}: {both}{unsure}"
    return "" if found.held_out.above_noise else few


def label(name: str) -> str:
    """Return what a choice is called in tables; plans on one rescue alone have their own names."""
    return LABELS.get(name, name)


def time(found: Diagnosis, extra: float) -> str:
    """Return the extra time of a choice; of two sides the share that is alike on both."""
    return f"+{100 * extra:.3g}% GEMM time" if found.chooses or found.pins else f"{100 * extra:.3g}% of the GEMM time"


def on_recipes(pins: Pins) -> str:
    """Return the recipes of these pins, of several with the number of their GEMMs: mxfp8 (80) and bf16 (27)."""
    numbers = Counter(recipe for own in pins.values() for recipe in own.values())
    if len(numbers) == 1:
        return next(iter(numbers))
    return " and ".join(f"{recipe} ({number})" for recipe, number in numbers.most_common())


def _gemms(pins: Pins) -> int:
    return sum(map(len, pins.values()))
