"""What `gnmr.diagnose` found: what every GEMM costs, with intervals, what was measured of all, a verdict, a plan.

Two rankings, not one. What `fprop` costs is in nats of KL a token, of the model without and with it in low precision;
`dgrad` and `wgrad` change the next step, and have the squared error of the gradient that they give, relative to that
gradient (docs/price.md). A plan is chosen by the former alone. Where the model gave a loss and no logits, nats are
those by which the loss rises.

The highest fprops are measured one by one; the others are estimates to second order. `interaction` is the KL of
everything low less the sum of all: a failure that only the assembled model shows. `calibration` is the one over the
other; expected costs are the values times that, and so assume that it is the same for all operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from gnmr.doctor.knapsack import GUESSES, Choice, Item, arithmetic, by_score, choose, guess, in_order
from gnmr.doctor.plan import PinPlan

DRAWS = 1000
"""Of a bootstrap."""
_SPLITS = 100
_NAMED = 4
"""Operators that a verdict names."""
LITTLE = 0.01
"""Nats a token: below it nothing has to be kept."""
CURVE = (0.05, 0.1, 0.2, 1 / 3)
"""Budgets of plans whose KL is measured too."""
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
RANDOM_DRAWS = 2
"""Of the guess `random`, whose numbers are the mean of them."""


@dataclass(frozen=True)
class Row:
    """One GEMM of one operator on the low path, the mean over batches."""

    operator: str
    gemm: str
    value: float
    """fprop: nats a token, measured or else the estimate in use. dgrad, wgrad: ||d||^2 / ||g||^2, the relative squared
    error of the gradient."""
    interval: tuple[float, float]
    """95%, by bootstrap over the batches, or of the measurement over sequences."""
    by_token: float | None = None
    """Of fprop the estimate from squares by token, nats."""
    by_sequence: float | None = None
    """From squares of sums over a sequence; None: not all tokens were priced."""
    measured: float | None = None
    """KL with this operator alone on the low path."""
    input: float | None = None
    """Of fprop: the price of the input's cast alone, by token."""
    weight: float | None = None
    """Of fprop: of the weight's."""
    bias: float | None = None
    """Of dgrad and wgrad: `<g, d> / ||g||^2`."""


@dataclass(frozen=True)
class Measured:
    """The model on two paths, on the same batches."""

    batches: int
    kl: float | None
    """KL(high || low), nats a token: the mean over sequences of that a token; None: there were no logits."""
    kl_error: float
    """Standard error of its mean over sequences."""
    sequences: int
    high: float | None
    """Mean loss with every operator on the recovery path, nats a token; None: there were no targets."""
    low: float | None
    """Mean loss on the other path."""
    error: float
    """Standard error of the mean difference of losses, paired by batch; NaN of one batch."""

    @staticmethod
    def of(kls: Sequence[np.ndarray | None], high: Sequence[float], low: Sequence[float]) -> Measured:
        """Of each batch the KL of each sequence (S,), or None, and the losses, NaN where there is none."""
        before, after = np.array(high), np.array(low)
        each = None if kls[0] is None else np.concatenate([kl for kl in kls if kl is not None])
        with np.errstate(invalid="ignore"):  # a low path whose loss is Inf
            error = _standard_error(after - before)
            kl_error = float("nan") if each is None else _standard_error(each)
        known = not np.isnan(before).any()
        return Measured(
            len(before),
            None if each is None else float(each.mean()),
            kl_error,
            0 if each is None else len(each),
            float(before.mean()) if known else None,
            float(after.mean()) if known else None,
            error,
        )

    @property
    def cost(self) -> float | None:
        """By how much the loss rises, nats a token."""
        return None if self.high is None or self.low is None else self.low - self.high

    @property
    def nats(self) -> float:
        """What the low path costs, nats a token: the KL, or where there is none the rise of the loss."""
        return self.kl if self.kl is not None else self.cost or 0.0

    @property
    def noise(self) -> float:
        """Half the width of the 95% interval (t) of `nats`."""
        return self.loss_noise if self.kl is None else _half_width(self.sequences, self.kl_error)

    @property
    def loss_noise(self) -> float:
        """Half the width of the 95% interval (t) of `cost`."""
        return _half_width(self.batches, self.error)

    @property
    def shown(self) -> bool:
        """Whether low precision costs something that these batches can show."""
        return self.nats > self.noise

    @property
    def finite(self) -> bool:
        """Whether the low path computes numbers at all."""
        return bool(np.isfinite(self.nats) and (self.low is None or np.isfinite(self.low)))

    def tree(self) -> dict[str, float | None]:
        """Return all numbers, fit for JSON."""
        return {**vars(self), "cost": self.cost, "noise": self.noise, "loss_noise": self.loss_noise}


@dataclass(frozen=True)
class Stability:
    """Whether other batches would give the same order of the operators, by what their fprop costs."""

    top: int
    """Operators in the top set: as many as the plan pins, by price per cost."""
    same: float
    """Share of bootstrap draws in which it is the same set."""
    overlap: float
    """Mean share of it that stays."""
    halves: float
    """Spearman's correlation between the prices of two halves of the batches, the mean of many splits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """See the module. Numbers are means over batches."""

    recipe: str
    recovery: str
    operators: dict[str, tuple[int, int]]
    """(inputs, outputs) of each, in the model's order."""
    rows: tuple[Row, ...]
    """Every GEMM of every operator, in the model's order."""
    samples: np.ndarray
    """(B, U): nats that recovering an operator's fprop saves, by the estimate in use, of each batch."""
    measured: Measured
    """On the batches of the prices."""
    scores: dict[str, dict[str, float]]
    """`mse` (of the input's cast) and `gradient norm` (of the weight) by operator."""
    budget: float
    tokens: int
    """One token in so many was priced."""
    pins: dict[str, list[str]]
    """Of the plan that was in force."""
    targets: list[str]
    recipes: dict[str, Any] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    """Operators that ran in no batch, or without an effect on the loss, and which of these: they have no price and are
    in no share, budget or plan."""
    matched: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(inputs, outputs) of those of them that `targets` name all the same, because no list of names leaves them out."""
    partly: Mapping[str, int] = field(default_factory=dict)
    """Operators that ran in some batches alone, and in how many."""
    held_out: Measured | None = None
    left: Mapping[str, Measured] = field(default_factory=dict)
    """What is left on the held-out batches: under the `plan` of this budget, and under each of the guesses, fprop
    alone."""
    apart: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Nats that each of the guesses leaves more than the plan, and half the width of that interval, paired."""
    curve: tuple[tuple[float, Measured], ...] = ()
    """(share of the GEMM time, what is left on the held-out batches) of plans of other budgets."""
    beside: tuple[Row, ...] = ()
    """The output head, routers and caches of keys and values that were asked for, each alone; in no sum or plan."""
    limit: float | None = None
    """KL that rounding in the model's own dtype makes, nats a token."""
    against: bool = False
    """Whether two sides are compared: `recipe` is the rollout's, `recovery` the trainer's."""
    sides: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """(recipe of the rollout, of the trainer) of operators that have their own."""
    gate: float | None = None
    """KL that two sides may differ by."""
    labels: str = "data"
    """Of the backward pass: `model`, drawn from its own predictions, or `data`."""
    estimate: str = "token"
    """Which estimate of fprop is in use: `token` or `sequence`."""

    # ---- totals ----

    @cached_property
    def saved(self) -> dict[Item, float]:
        """By (operator, GEMM) the nats that its recovery saves: fprop alone has any."""
        return {(row.operator, row.gemm): row.value if row.gemm == "fprop" else 0.0 for row in self.rows}

    @property
    def total(self) -> float:
        """Nats a token of all operators' fprop, each alone, added up."""
        return float(sum(self.saved.values()))

    @property
    def calibration(self) -> float | None:
        """What everything low costs over `total`; None where that is not above its noise, or nothing costs anything."""
        found = self.measured
        return found.nats / self.total if found.shown and found.finite and self.total > 0 else None

    @property
    def interaction(self) -> float | None:
        """KL of everything low less `total`; None without a KL."""
        return None if self.measured.kl is None else self.measured.kl - self.total

    @property
    def interacts(self) -> bool:
        """Whether the interaction is large: more than half of the KL of everything low, and beyond its noise."""
        size = abs(self.interaction or 0.0)
        return bool(size > self.measured.nats / 2 and size > self.measured.noise and not self.little)

    @property
    def coherent(self) -> list[Row]:
        """fprop whose two estimates are more than a factor of 2 apart, and further than chance puts
        those of so many sequences of independent tokens: there the products of two tokens matter."""
        number = max(self.measured.sequences, self.measured.batches)
        low, high = (special.chdtri(number, chance) / number for chance in (0.999, 0.001))
        low, high = min(low, 0.5), max(high, 2.0)
        both = ((row, row.by_token, row.by_sequence) for row in self.worst())
        return [row for row, token, sequence in both if token and sequence and not low <= sequence / token <= high]

    @property
    def little(self) -> bool:
        """Whether nothing has to be kept: less than `LITTLE`, or of two sides than the gate or the detection limit, by
        what was measured, or where that shows nothing by the sum of all and the upper end of what was measured."""
        found = self.measured
        bound = self.gate or ((self.limit or 0.0) if self.against else LITTLE)
        return bool((found.nats if found.shown else max(self.total, found.nats + found.noise)) < bound)

    def rival(self) -> str:
        """A clause where, on the held-out batches, a guess left less than the plan, or these are too few to tell."""
        if self.pins or self.held_out is None or not self.apart:
            return ""
        several = self.held_out.batches > 1
        batches = f"{self.held_out.batches} held-out batch{'es' * several}"
        few = f"{batches} {'are' if several else 'is'} too few to tell the choices apart"
        best = min(self.apart, key=lambda name: self.left[name].nats)
        more, noise = self.apart[best]
        if more < 0:
            both = f"{nats(self.left[best].nats)} nats against {nats(self.left['plan'].nats)}"
            few = "" if -more > noise else ", which is too few batches to be sure"
            return f"{LABELS[best]} left less than the plan on {batches}: {both}{few}"
        return (
            "" if self.held_out.shown else f"{batches} {'are' if several else 'is'} too few to tell the choices apart"
        )

    def left_by_budget(self) -> list[tuple[float, float]]:
        """(share of the GEMM time, nats left by the values) after each pin, the plan's way from no pin to all that
        cost something."""
        costs = arithmetic(self.operators)
        order = in_order(self.saved, costs)
        # From the end, for one that alone is Inf has no difference to the sum.
        left = np.cumsum([0.0, *(self.saved[item] for item in reversed(order))])[::-1]
        spent = np.cumsum([0.0, *(costs[item] for item in order)]) / sum(costs.values())
        return list(zip(spent.tolist(), left.tolist(), strict=True))

    def worst(self, gemm: str = "fprop") -> list[Row]:
        """Return one GEMM of all operators, the largest value first."""
        return sorted((row for row in self.rows if row.gemm == gemm), key=lambda row: row.value, reverse=True)

    # ---- choices ----

    def choice(self, budget: float | None = None) -> Choice:
        """The pins with the most nats per cost under the budget (None: this diagnosis's). With a gate and no budget
        they are as many as keep it, by what is expected to be left."""
        if self.pins:
            raise ValueError("plan: this is a diagnosis under a plan's pins; a new plan needs one without")
        if budget is None and self.gate is not None:
            enough = self.gate / (self.calibration or 1.0)
            return choose(self.saved, arithmetic(self.operators), None, enough)
        return choose(self.saved, arithmetic(self.operators), self.budget if budget is None else budget)

    def guesses(self, gemms: tuple[str, ...] = ("fprop",)) -> dict[str, list[Choice]]:
        """Make the usual guesses at the same cost: `gemms` of the operators of the last blocks, the first, both ends,
        random ones (`RANDOM_DRAWS`), those of the largest `scores`. Their `after` says what they leave, by prices."""
        budget = self.budget if self.gate is None else max(self.choice().share, 1e-9)
        given = self.saved, arithmetic(self.operators), budget
        draws = {kind: RANDOM_DRAWS if kind == "random" else 1 for kind in GUESSES}
        return {
            kind: [guess(kind, *given, gemms=gemms, seed=seed) for seed in range(number)]
            for kind, number in draws.items()
        } | {name: [by_score(score, *given, gemms=gemms)] for name, score in self.scores.items()}

    def compared(self) -> dict[str, dict[str, float | None]]:
        """Return what the plan and the guesses leave, by prices and measured, and their share of the GEMM time; nothing
        under a plan's pins."""
        choices = {} if self.pins else {"plan": [self.choice()], **self.guesses()}
        return {
            name: {
                "price_left": float(np.mean([one.after for one in found])),
                "share": float(np.mean([one.share for one in found])),
                "kl_left": None if (own := self.left.get(name)) is None else own.kl,
                "loss_left": None if own is None else own.cost,
                "noise": None if own is None else own.noise,
            }
            for name, found in choices.items()
        }

    def expected(self, choice: Choice) -> tuple[float, float]:
        """Nats a token without and with the pins: the values times `calibration`, where there is one."""
        factor = self.calibration or 1.0
        return max(0.0, factor * choice.before), max(0.0, factor * choice.after)

    def plan(self, budget: float | None = None, provenance: Mapping[str, str] | None = None) -> PinPlan:
        """Return plan.json under that budget, a share of the GEMM time (None: this diagnosis's).

        Raises ValueError for no share, and for a diagnosis that was made under a plan, or of operators with recipes of
        their own, which a plan cannot say.
        """
        if self.sides:
            raise ValueError(f"plan: {next(iter(self.sides))} has a recipe of its own, which a plan cannot say")
        chosen = self.choice(budget)
        # By token, as the controller's signal measures it.
        by_token = {row.operator: row.by_token or row.value for row in self.rows if row.gemm == "fprop"}
        pinned = [by_token[name] for name in chosen.pins if by_token[name] > 0]
        found = self.measured
        said = {
            "batches": f"{found.batches}",
            "sum": f"{self.total:.6g} nats of all GEMMs alone; expected is that times {self.calibration or 1.0:.4g}",
        }
        if found.kl is not None:
            said["kl"] = f"{found.kl:.6g} nats a token with everything low"
        if found.cost is not None:
            said["loss"] = f"{found.cost:+.6g} nats, {found.high:.6g} -> {found.low:.6g}"
        if budget is None and self.gate is None:
            budget = self.budget
        expected = self.expected(chosen)
        return PinPlan(
            operators=self.operators | dict(self.matched),
            low=self.recipe,
            recovery=self.recovery,
            recipes=self.recipes,
            targets=self.targets,
            pins=chosen.pins,
            budget=budget,
            share=chosen.share,
            expected=expected if np.isfinite(expected).all() else None,
            triggers={"price": min(pinned)} if pinned else {},
            provenance=said | dict(provenance or {}),
        )

    def stability(self) -> Stability:
        """Tell how far another draw of batches would have given the same top set and order."""
        areas = np.array([a * b for a, b in self.operators.values()], dtype=float)
        top = max(1, len(self.pins or self.choice().pins))
        rng = np.random.default_rng(0)
        means = resampled(len(self.samples), rng) @ self.samples / areas
        own = _top(self.samples.mean(axis=0)[None] / areas, top)
        kept = (_top(means, top) & own).sum(axis=1)
        halves = []
        for _ in range(_SPLITS):
            order = rng.permutation(len(self.samples))
            a, b = (self.samples[part].mean(axis=0) for part in np.array_split(order, 2))
            halves.append(_spearman(a, b))
        return Stability(top, float((kept == top).mean()), float(kept.mean() / top), float(np.mean(halves)))

    # ---- words ----

    def verdict(self) -> str:
        """One sentence, with what it is not about."""
        return "; ".join([self._verdict(), *self.left_out()])

    def left_out(self) -> list[str]:
        """Clauses on operators that have no price, or not one of every batch."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.idle.items():
            by_reason.setdefault(why, []).append(name)
        clauses = [f"left out, as {why}: {_named(names)}" for why, names in by_reason.items()]
        if self.partly:
            clauses.append(f"only in some of the batches ran {_named(list(self.partly))}")
        return clauses

    def _verdict(self) -> str:
        found, name = self.measured, self.recipe
        under = "under the plan " if self.pins else ""
        if not found.finite:
            worst = f"fprop of {_named([row.operator for row in self.worst()[:_NAMED]])}"
            what = "the loss is" if found.kl is None else "the predictions are"
            loss = "" if found.kl is None else "loss "
            high = "" if found.high is None else f" ({loss}{found.high:.4f} on {self.recovery})"
            return f"{under}{what} not finite under {name}{high}; worst: {worst}"
        if self.against:
            return self._of_two_sides()
        start = f"nothing {'more ' if self.pins else ''}has to be kept: " if self.little else ""
        unit = "nats" if found.kl is None else "nats of KL a token"
        if not found.shown:
            return (
                f"{start}{under}{name} costs nothing here that {found.batches} batches can show "
                f"({found.nats:+.2g} ± {found.noise:.1g} {unit}, by estimate {self.total:.2g})"
                f"{'' if start else ': more batches would tell'}"
            )
        losses = "" if found.high is None else f" (loss {found.high:.4f} -> {found.low:.4f})"
        cost = f"{start}{under}{name} costs {nats(found.nats)} {unit} against {self.recovery}{losses}"
        if start:
            return f"{cost}, less than {LITTLE}"
        if self.pins:
            return f"{cost}, with {_gemms(self.pins)} of {len(self.rows)} GEMMs on {self.recovery}"
        if self.total <= 0:
            return f"{cost}, and no GEMM alone costs anything"
        chosen = self.choice()
        if not chosen.pins:
            return f"{cost}; no GEMM fits a budget of {self.budget:.3g} of the GEMM time"
        return (
            f"{cost}; keep {self._pinned(chosen)} on {self.recovery}, {chosen.share:.1%} of the GEMM time, and "
            f"{self._left(chosen)}{'; ' * bool(rival := self.rival())}{rival}"
        )

    def _of_two_sides(self) -> str:
        """The verdict on two sides that should agree: whether the gate holds, what makes the difference, what to
        change."""
        found, gate = self.measured, self.gate
        width = f" ± {nats(found.noise)}" if found.noise > 0 else ""
        differ = (
            f"the rollout ({self.recipe}) and the trainer ({self.recovery}) differ by {nats(found.nats)}{width} nats "
            "of KL a token"
        )
        if found.nats <= (self.limit or 0.0):
            return f"{'the gate holds: ' * (gate is not None)}{differ}, no more than rounding makes"
        if gate is not None and found.nats + (found.noise if width else 0.0) <= gate:
            return f"the gate holds: {differ}, at most {gate:g}"
        if gate is not None and found.nats - found.noise <= gate:
            return f"the gate of {gate:g} cannot be decided: {differ}; more batches would tell"
        start = "" if gate is None else "the gate does not hold: "
        more = "" if gate is None else f", more than {gate:g}"
        chosen = self.choice()
        if not chosen.pins:
            fits = f"no GEMM fits a budget of {self.budget:.3g} of the GEMM time"
            return f"{start}{differ}{more}, and {fits if self.total > 0 else 'no GEMM alone makes it'}"
        return (
            f"{start}{differ}{more}; run {self._pinned(chosen)} in one recipe on both sides (the trainer's in the "
            f"rollout, or the rollout's in the trainer), and {self._left(chosen)}"
        )

    def _pinned(self, chosen: Choice) -> str:
        """The GEMMs of a choice, the largest first."""
        ordered = sorted(chosen.pins, key=lambda one: -self.saved[one, "fprop"])
        share = 1 - chosen.after / chosen.before
        named = [f"{name} ({' | '.join(self.sides[name])})" if name in self.sides else name for name in ordered]
        return f"{_gemms(chosen.pins)} of {len(self.rows)} GEMMs ({share:.0%} of it: fprop of {_named(named)})"

    def _left(self, chosen: Choice) -> str:
        """What is left under the plan: measured on held-out batches, or what is expected."""
        if (left := self.left.get("plan")) is not None and left.finite:
            width = f" ± {nats(left.noise)}" if np.isfinite(left.noise) else ""
            return f"{nats(left.nats)}{width} nats are left on other batches"
        return f"{nats(self.expected(chosen)[1])} nats are expected to be left"

    def tree(self) -> dict[str, Any]:
        """All numbers, fit for JSON."""
        return {
            "recipe": self.recipe,
            "recovery": self.recovery,
            "verdict": self.verdict(),
            "measured": self.measured.tree(),
            "held_out": None if self.held_out is None else self.held_out.tree(),
            "total_price": self.total,
            "calibration": self.calibration,
            "interaction": self.interaction,
            "limit": self.limit,
            "gate": self.gate,
            "labels": self.labels,
            "estimate": self.estimate,
            "coherent": [row.operator for row in self.coherent],
            "stability": vars(self.stability()),
            "budget": self.budget,
            "price_tokens": self.tokens,
            "pins": self.pins,
            "idle": dict(self.idle),
            "partly": dict(self.partly),
            "choices": self.compared(),
            "curve": [{"share": share, **one.tree()} for share, one in self.curve],
            "rows": [vars(row) | {"interval": list(row.interval)} for row in self.rows],
            "beside": [vars(row) | {"interval": list(row.interval)} for row in self.beside],
            "scores": self.scores,
            "operators": {name: list(shape) for name, shape in self.operators.items()},
        }


def resampled(batches: int, rng: np.random.Generator) -> np.ndarray:
    """(DRAWS, batches): weights of each batch in the mean of a bootstrap draw."""
    return rng.multinomial(batches, [1 / batches] * batches, size=DRAWS) / batches


def intervals(samples: np.ndarray) -> np.ndarray:
    """(2, U): the 95 % interval of the mean of (B, U) over batches, by bootstrap."""
    ends: np.ndarray = np.percentile(resampled(len(samples), np.random.default_rng(0)) @ samples, [2.5, 97.5], axis=0)
    return ends


def paired(guess: tuple[list[Any], list[float]], plan: tuple[list[Any], list[float]]) -> tuple[float, float]:
    """(nats that a guess leaves more than the plan, half the width of the 95% interval), of their KLs by batch and
    losses, paired."""
    if guess[0][0] is None:
        apart = np.array(guess[1]) - np.array(plan[1])
    else:
        apart = np.concatenate(guess[0]) - np.concatenate(plan[0])
    with np.errstate(invalid="ignore"):
        return float(apart.mean()), _half_width(len(apart), _standard_error(apart))


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def _half_width(number: int, error: float) -> float:
    """Half the width of a mean's 95% interval (t)."""
    return float(special.stdtrit(number - 1, 0.975)) * error if number > 1 else float("nan")


def nats(value: float) -> str:
    """With three digits that count: 0.101, 0.00123.

    >>> nats(0.1012), nats(0.001234), nats(3.2), nats(0.0)
    ('0.101', '0.00123', '3.200', '0')
    """
    if value == 0 or not np.isfinite(value):
        return f"{value:g}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"


def _top(values: np.ndarray, k: int) -> np.ndarray:
    """(N, U) bool: the k largest of each row."""
    order = np.argsort(-values, axis=1, kind="stable")
    found = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(found, order[:, :k], True, axis=1)
    return found


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Of two series without many ties; 1 where one has no spread."""
    first, second = (np.argsort(np.argsort(x)).astype(float) for x in (a, b))
    if len(a) < 2 or any(np.ptp(x) == 0 for x in (a, b)):
        return 1.0
    return float(np.corrcoef(first, second)[0, 1])


def _gemms(pins: Mapping[str, list[str]]) -> int:
    return sum(map(len, pins.values()))


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
