"""What `gnmr.diagnose` found: prices of every GEMM with their intervals, measured losses, a verdict, a plan.

Two rankings, not one. What `fprop` costs is in nats a token, on the loss as it is now; `dgrad` and `wgrad` change the
next step, and have the squared error of the gradient that they give, relative to that gradient (docs/price.md). A plan
is chosen by the former alone.

Prices are an estimate to second order. `calibration` is what the recipe costs as a whole, measured, over the sum of the
prices; expected costs are prices times that, and so assume that it is the same for all operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from gnmr.doctor.knapsack import GUESSES, Choice, Item, arithmetic, by_score, choose, guess
from gnmr.doctor.plan import PinPlan

DRAWS = 1000
"""Of a bootstrap."""
_SPLITS = 100
_NAMED = 4
"""Operators that a verdict names."""
LITTLE = 0.01
"""Nats a token: below it nothing has to be kept."""
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
RANDOM_DRAWS = 5
"""Of the guess `random`, whose numbers are the mean of them."""


@dataclass(frozen=True)
class Row:
    """One GEMM of one operator on the low path, the mean over batches."""

    operator: str
    gemm: str
    value: float
    """fprop: nats a token. dgrad, wgrad: ||d||^2 / ||g||^2, the relative squared error of the gradient."""
    interval: tuple[float, float]
    """95 %, by bootstrap over the batches."""
    recovery: float
    """The same on the recovery path."""
    input: float | None
    """Of fprop: the price of the input's cast alone."""
    weight: float | None
    """Of fprop: of the weight's."""
    bias: float | None
    """Of dgrad and wgrad: `<g, d> / ||g||^2`."""


@dataclass(frozen=True)
class Measured:
    """Losses on the same batches, nats a token."""

    batches: int
    high: float
    """Every operator on the recovery path."""
    low: float
    """Every operator on the low path."""
    error: float
    """Standard error of the mean difference, paired by batch; NaN of one batch."""

    @staticmethod
    def of(high: np.ndarray, low: np.ndarray) -> Measured:
        """Of the losses (B,) of each batch."""
        with np.errstate(invalid="ignore"):  # a low path whose loss is Inf
            apart = low - high
            error = float(apart.std(ddof=1) / len(apart) ** 0.5) if len(apart) > 1 else float("nan")
        return Measured(len(apart), float(high.mean()), float(low.mean()), error)

    @property
    def cost(self) -> float:
        """What the low path costs, nats a token."""
        return self.low - self.high

    @property
    def noise(self) -> float:
        """What a difference must exceed to be one: half the width of its 95 % interval (t)."""
        return float(special.stdtrit(self.batches - 1, 0.975)) * self.error if self.batches > 1 else float("nan")

    @property
    def shown(self) -> bool:
        """Whether low precision costs something that these batches can show."""
        return self.cost > self.noise

    def tree(self) -> dict[str, float]:
        """Return all numbers, fit for JSON."""
        return {**vars(self), "cost": self.cost, "noise": self.noise}


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
    """(B, U): what recovering an operator's fprop saves by its price, nats, of each batch."""
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
    left: Mapping[str, float] = field(default_factory=dict)
    """Nats a token that are left on the held-out batches, measured: under the `plan` of this budget, and under each of
    the guesses, fprop alone."""
    guessed: Mapping[str, Measured] = field(default_factory=dict)
    """On these batches what each of the guesses leaves (`low`) beside what the plan leaves (`high`)."""

    # ---- totals ----

    @cached_property
    def saved(self) -> dict[Item, float]:
        """By (operator, GEMM) what recovery saves of the loss now, nats by price: fprop alone has any."""
        return {(row.operator, row.gemm): row.value - row.recovery if row.gemm == "fprop" else 0.0 for row in self.rows}

    @property
    def total(self) -> float:
        """Nats a token by the prices of all operators' fprop, above those of the recovery path."""
        return float(sum(self.saved.values()))

    @property
    def calibration(self) -> float | None:
        """Measured cost over the sum of prices; None where the cost is not above its noise, or nothing has a price."""
        found = self.measured
        return found.cost / self.total if found.shown and np.isfinite(found.cost) and self.total > 0 else None

    @property
    def little(self) -> bool:
        """Whether nothing has to be kept: less than `LITTLE`, by what was measured, or where that shows nothing by the
        price and the upper end of what was measured."""
        found = self.measured
        return bool((found.cost if found.shown else max(self.total, found.cost + found.noise)) < LITTLE)

    def rival(self) -> str:
        """A clause where, on the held-out batches, a guess left less than the plan, or these are too few to tell."""
        if self.pins or self.held_out is None:
            return ""
        batches = f"{self.held_out.batches} held-out batches"
        best = min(self.guessed, key=lambda name: self.left[name])
        if self.left[best] < self.left["plan"]:
            shown = -self.guessed[best].cost > self.guessed[best].noise
            both = f"{nats(self.left[best])} nats against {nats(self.left['plan'])}"
            few = "" if shown else ", which is too few batches to be sure"
            return f"{LABELS[best]} left less than the plan on {batches}: {both}{few}"
        return "" if self.held_out.shown else f"{batches} are too few to tell the choices apart"

    @property
    def above_noise(self) -> list[Row]:
        """fprop of operators that cost more than a loss measured on these batches could show, the worst first."""
        return [row for row in self.worst() if row.interval[0] > self.measured.noise]

    def worst(self, gemm: str = "fprop") -> list[Row]:
        """Return one GEMM of all operators, the largest value first."""
        return sorted((row for row in self.rows if row.gemm == gemm), key=lambda row: -row.value)

    # ---- choices ----

    def choice(self, budget: float | None = None) -> Choice:
        """The pins with the most nats per cost under the budget (None: this diagnosis's), by raw prices."""
        if self.pins:
            raise ValueError("plan: this is a diagnosis under a plan's pins; a new plan needs one without")
        return choose(self.saved, arithmetic(self.operators), self.budget if budget is None else budget)

    def guesses(self, gemms: tuple[str, ...] = ("fprop",)) -> dict[str, list[Choice]]:
        """Make the usual guesses at the same cost: `gemms` of the operators of the last blocks, the first, both ends,
        random ones (`RANDOM_DRAWS`), those of the largest `scores`. Their `after` says what they leave, by prices."""
        given = self.saved, arithmetic(self.operators), self.budget
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
                "measured_left": self.left.get(name),
            }
            for name, found in choices.items()
        }

    def expected(self, choice: Choice) -> tuple[float, float]:
        """Nats a token without and with the pins: prices times `calibration`, where there is one."""
        factor = self.calibration or 1.0
        return max(0.0, factor * choice.before), max(0.0, factor * choice.after)

    def plan(self, budget: float | None = None, provenance: Mapping[str, str] | None = None) -> PinPlan:
        """Return plan.json under that budget, a share of the GEMM time (None: this diagnosis's).

        Raises ValueError for no share, and for a diagnosis that was made under a plan.
        """
        budget = self.budget if budget is None else budget
        chosen = self.choice(budget)
        pinned = [self.saved[name, gemm] for name, gemms in chosen.pins.items() for gemm in gemms]
        factor = self.calibration
        said = {
            "batches": f"{self.measured.batches}",
            "measured": f"{self.measured.cost:.6g} nats, {self.measured.high:.6g} -> {self.measured.low:.6g}",
            "prices": f"{self.total:.6g} nats in all; expected is prices times {factor or 1.0:.4g}",
        }
        return PinPlan(
            operators=self.operators | dict(self.matched),
            low=self.recipe,
            recovery=self.recovery,
            recipes=self.recipes,
            targets=self.targets,
            pins=chosen.pins,
            budget=budget,
            share=chosen.share,
            expected=self.expected(chosen),
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
        if not np.isfinite(found.low):
            worst = f"fprop of {_named([row.operator for row in self.worst()[:_NAMED]])}"
            return f"{under}the loss is not finite under {name} ({found.high:.4f} on {self.recovery}); worst: {worst}"
        start = f"nothing {'more ' if self.pins else ''}has to be kept: " if self.little else ""
        if not found.shown:
            return (
                f"{start}{under}{name} costs nothing here that {found.batches} batches can show "
                f"({found.cost:+.2g} ± {found.noise:.1g} nats, by price {self.total:.2g})"
                f"{'' if start else ': more batches would tell'}"
            )
        cost = f"{start}{under}{name} costs {nats(found.cost)} nats here ({found.high:.4f} -> {found.low:.4f})"
        if start:
            return f"{cost}, less than {LITTLE}"
        if self.pins:
            return f"{cost}, with {_gemms(self.pins)} of {len(self.rows)} GEMMs on {self.recovery}"
        if self.total <= 0:
            return f"{cost}, and no GEMM has a price"
        chosen = self.choice()
        if not chosen.pins:
            return f"{cost}; no GEMM fits a budget of {self.budget:.3g} of the GEMM time"
        ordered = sorted(chosen.pins, key=lambda one: -self.saved[one, "fprop"])
        share = 1 - chosen.after / chosen.before
        return (
            f"{cost}; {share:.0%} of it in {_gemms(chosen.pins)} of {len(self.rows)} GEMMs: fprop of "
            f"{_named(ordered)}; with these on {self.recovery}, {chosen.share:.1%} of the GEMM time, "
            f"{nats(self.expected(chosen)[1])} are expected to be left"
            f"{'; ' * bool(rival := self.rival())}{rival}"
        )

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
            "above_noise": [row.operator for row in self.above_noise],
            "stability": vars(self.stability()),
            "budget": self.budget,
            "price_tokens": self.tokens,
            "pins": self.pins,
            "idle": dict(self.idle),
            "partly": dict(self.partly),
            "choices": self.compared(),
            "rows": [vars(row) | {"interval": list(row.interval)} for row in self.rows],
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
