"""Hold the results of `gnmr.diagnose`: the cost of every GEMM with intervals, the total, a verdict and a plan.

There are two rankings. The cost of `fprop` is the KL in nats per token between the model without and with this GEMM in
low precision. `dgrad` and `wgrad` change the next step, and their score is the squared error of the gradient that they
give, relative to that gradient (docs/price.md). A plan is chosen by fprop alone. If the model gave a loss and no
logits, the nats are the increase of the loss.

The KL of the most expensive fprops is measured one by one; the others are second-order estimates. `interaction` is the
KL of everything in low precision minus the sum of all: a failure that only the assembled model shows. `calibration` is
the ratio of the two. Expected costs are the values times this ratio, which assumes the same ratio for all operators.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from gnmr.measure.coverage import Coverage
from gnmr.measure.gemm_costs import GemmCost, PathCost, bootstrap_weights, weighted_mean
from gnmr.names import Pins
from gnmr.plan.checkpoint_names import ModelLinears
from gnmr.plan.knapsack import (
    GUESSES,
    Choice,
    Prices,
    Times,
    budget_of,
    by_score,
    choose,
    front,
    groups_of,
    guessed,
    pin_in_order,
)
from gnmr.plan.pin_plan import PinPlan
from gnmr.plan.verdict import LITTLE, verdict

_SPLITS = 100
CURVE = (0.03, 0.05, 0.1, 0.2, 0.3)
"""Budgets of further plans whose KL is measured."""
RANDOM_DRAWS = 2
"""Number of random draws whose mean is the guess `random`."""


@dataclass(frozen=True)
class Stability:
    """How stable the order of the operators by the cost of fprop is under another draw of batches."""

    top: int
    """Number of operators in the top set by price per cost, equal to the number that the plan pins."""
    same: float
    """Share of bootstrap draws in which the top set is the same."""
    halves: float
    """Spearman correlation between the prices of two halves of the batches, averaged over many splits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """The results of a diagnosis (see the module). Numbers are means over the tokens of all batches."""

    recipe: str
    recovery: str
    operators: dict[str, tuple[int, int]]
    """(inputs, outputs) of each operator, in the model's order."""
    rows: tuple[GemmCost, ...]
    """Every GEMM of every operator, in the model's order."""
    samples: np.ndarray
    """(B, U): nats that each operator's fprop costs on the low recipe in each batch, by the estimate in use."""
    terms: np.ndarray | None = None
    """(B,) tokens that count in each batch, the weights of all means over batches; None: equal weights."""
    measured: PathCost
    """KL and loss on the batches of the prices."""
    scores: dict[str, dict[str, float]]
    """`mse` (of the input's cast) and `gradient norm` (of the weight), each by operator."""
    budget: float
    tokens: int
    """One token in every `tokens` was priced."""
    pins: Pins
    """Pins of the plan that was in force."""
    rescues: tuple[str, ...]
    """Recipes that a plan may keep a GEMM on, fastest first. With two sides, the other side's; under a plan, none."""
    costs: Times
    """Time of every GEMM on the low recipe and the rescues. With two sides, its arithmetic, doubled if both agree."""
    targets: list[str] | None
    exclude: list[str] = field(default_factory=list)
    work: Mapping[str, int] = field(default_factory=dict)
    """Multiplications of each operator's fprop in all batches."""
    rest: int = 0
    """Multiplications of all other GEMMs of the model."""
    coverage: Coverage = field(default_factory=Coverage)
    """Products that the model ran in all batches."""
    times: dict[str, float] = field(default_factory=dict)
    """Relative times of GEMMs that the user gave."""
    fused: Sequence[str] = ()
    """Kinds of operators that share one recipe."""
    groups: Sequence[Sequence[str]] = ()
    """Operators of these kinds that share one recipe."""
    recipes: dict[str, Any] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    """Operators that ran in no batch or without an effect on the loss, with the reason.

    They have no price, and no share or budget contains them.
    """
    matched: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(inputs, outputs) of those idle operators that are in the plan.

    They are experts that no token reached, which go with their group, and what no list of names excludes.
    """
    linears: ModelLinears | None = None
    """Every linear of the model, with its names in the checkpoint; None: not known."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Classes of the modules that hold operators and are not nn.Linear, by module name."""
    partly: Mapping[str, int] = field(default_factory=dict)
    """Operators that ran only in some batches, with the number of batches."""
    held_out: PathCost | None = None
    left: Mapping[str, PathCost] = field(default_factory=dict)
    """Cost that remains on the held-out batches under the `plan` of this budget and each of the `alternatives`."""
    apart: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Extra nats that each alternative leaves compared with the plan, and half the width of the paired interval."""
    curve: tuple[tuple[float, PathCost], ...] = ()
    """(extra time, cost that remains on the held-out batches) of plans of other budgets."""
    beside: tuple[GemmCost, ...] = ()
    """The output head, routers and caches that were asked for, each measured alone and in no sum or plan."""
    limit: float | None = None
    """KL from rounding in the model's own dtype, nats per token."""
    against: bool = False
    """True if two sides are compared; `recipe` is then the rollout's and `recovery` the trainer's."""
    sides: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """(rollout recipe, trainer recipe) of operators that have separate recipes."""
    gate: float | None = None
    """KL per token by which two sides may differ."""
    labels: str = "data"
    """Labels of the backward pass: `model` (drawn from its predictions) or `data`."""
    estimate: str = "token"
    """Estimate of fprop in use: `token` or `sequence`."""

    # ---- totals ----

    @cached_property
    def prices(self) -> Prices:
        """Return the nats of every fprop on the low recipe and the rescues; no other GEMM has prices."""
        forward = (row for row in self.rows if row.gemm == "fprop")
        return {(row.operator, row.gemm): {self.recipe: row.value, **row.rescued} for row in forward}

    @property
    def total(self) -> float:
        """Return the sum over operators of the nats per token that each fprop costs alone."""
        return float(sum(own[self.recipe] for own in self.prices.values()))

    @property
    def calibration(self) -> float | None:
        """Return the cost of everything low over `total`; None if the cost is within its noise or `total` is 0."""
        found = self.measured
        return found.nats / self.total if found.above_noise and found.finite and self.total > 0 else None

    @property
    def interaction(self) -> float | None:
        """Return the KL of everything low minus `total`; None without a KL."""
        return None if self.measured.kl is None else self.measured.kl - self.total

    @property
    def interacts(self) -> bool:
        """Return True if the interaction exceeds its noise and half of the KL of everything low."""
        size = abs(self.interaction or 0.0)
        return bool(size > self.measured.nats / 2 and size > self.measured.noise and not self.little)

    @property
    def coherent(self) -> list[GemmCost]:
        """Return the fprops for which products of two tokens matter.

        The two estimates of such an fprop differ by more than a factor of 2. They also differ by more than chance
        explains for this number of sequences of independent tokens.
        """
        number = max(self.measured.sequences, self.measured.batches)
        low, high = (special.chdtri(number, chance) / number for chance in (0.999, 0.001))
        low, high = min(low, 0.5), max(high, 2.0)
        both = ((row, row.by_token, row.by_sequence) for row in self.worst())
        return [row for row, token, sequence in both if token and sequence and not low <= sequence / token <= high]

    @property
    def without_sequences(self) -> list[str]:
        """Return the operators whose estimate is by token because their rows belong to no single sequence."""
        rows = self.worst() if self.estimate == "sequence" else []
        return [row.operator for row in rows if row.by_sequence is None]

    @property
    def little(self) -> bool:
        """Return True if the model needs no pins because its cost is below a bound.

        The bound is `LITTLE`; with two sides it is the gate or the detection limit. The cost is the measured one. If
        the measurement shows nothing, it is the larger of `total` and the upper end of the measured interval.
        """
        found = self.measured
        bound = self.gate or ((self.limit or 0.0) if self.against else LITTLE)
        return bool((found.nats if found.above_noise else max(self.total, found.nats + found.noise)) < bound)

    def left_by_time(self, rescue: str | None = None) -> list[tuple[float, float]]:
        """Return (extra time, nats left by the values) from no pin to all useful pins.

        With `rescue`, pins are to this recipe alone.
        """
        return front(self._prices_on(rescue), self.costs, self.recipe, self.groups)

    def worst(self, gemm: str = "fprop") -> list[GemmCost]:
        """Return the rows of one GEMM of all operators, the largest value first."""
        return sorted((row for row in self.rows if row.gemm == gemm), key=lambda row: row.value, reverse=True)

    # ---- choices ----

    @property
    def chooses(self) -> bool:
        """Return True if the diagnosis recommends recipes with different times: not with two sides or under a plan."""
        return not (self.pins or self.against or self.sides)

    @property
    def singles(self) -> tuple[str, ...]:
        """Return the rescues whose single-recipe plans are compared with the plan, if there are several."""
        return self.rescues if len(self.rescues) > 1 else ()

    def choice(self, budget: float | str | None = None, rescue: str | None = None, *, free: bool = False) -> Choice:
        """Return the plan that leaves the fewest nats under a budget of extra time.

        Args:
            budget: share of extra GEMM time. None: this diagnosis's budget, or with a gate no budget; the plan is then
                the cheapest one expected to keep the gate.
            rescue: the only recipe to pin to. None: all rescues.
            free: ignore that a library runs operators as one.

        Raises ValueError under a plan's pins.
        """
        if self.pins:
            raise ValueError("plan: this is a diagnosis under a plan's pins; a new plan needs one without")
        if budget is None and self.gate is None:
            budget = self.budget
        share = None if budget is None else budget_of(budget)
        if (key := (share, rescue, free)) not in self._choices:
            enough = self.gate / (self.calibration or 1.0) if self.gate is not None and share is None else None
            given = self._prices_on(rescue), self.costs, self.recipe, share
            self._choices[key] = choose(*given, enough=enough, groups=() if free else self.groups)
        return self._choices[key]

    @cached_property
    def _choices(self) -> dict[tuple[float | None, str | None, bool], Choice]:
        return {}

    def _prices_on(self, rescue: str | None) -> Prices:
        if rescue is None:
            return self.prices
        return {item: {name: own[name] for name in (self.recipe, rescue)} for item, own in self.prices.items()}

    @cached_property
    def alternatives(self) -> dict[str, list[Choice]]:
        """Return other choices of the same extra time: plans on each of several rescues alone, and the usual guesses.

        The guesses pin fprop of the last blocks, the first blocks, both ends, random operators (`RANDOM_DRAWS`), or the
        operators with the largest `scores`. They use the rescue that leaves the fewest nats by the values.
        """
        budget = self.budget if self.gate is None else max(self.choice().extra, 1e-9)
        found = {f"{rescue} alone": [self.choice(budget, rescue)] for rescue in self.singles}
        draws = dict.fromkeys(GUESSES, 1) | {"random": RANDOM_DRAWS}
        orders = {
            kind: [guessed(kind, self.operators, seed) for seed in range(number)] for kind, number in draws.items()
        } | {key: [by_score(own, self.operators)] for key, own in self.scores.items()}
        given = self.prices, self.costs, self.recipe
        for name, several in orders.items():
            on = [[pin_in_order(order, *given, rescue, budget) for order in several] for rescue in self.rescues]
            found[name] = min(on, key=lambda choices: sum(one.after for one in choices))
        return found

    def compared(self) -> dict[str, dict[str, float | None]]:
        """Return the extra time of the plan and the alternatives, and the nats that they leave, by value and measured.

        The result is empty under a plan's pins.
        """
        choices = {} if self.pins else {"plan": [self.choice()], **self.alternatives}
        return {
            name: {
                "price_left": float(np.mean([one.after for one in found])),
                "extra": float(np.mean([one.extra for one in found])),
                "kl_left": None if (own := self.left.get(name)) is None else own.kl,
                "loss_left": None if own is None else own.cost,
                "noise": None if own is None else own.noise,
            }
            for name, found in choices.items()
        }

    def recipes_in_use(self) -> list[tuple[str, float, int]]:
        """Return (recipe, relative time of its fprop, number of GEMMs) of the plan, the low recipe first."""
        kept = Counter(recipe for own in (self.pins or self.choice().pins).values() for recipe in own.values())
        (first, _), own = next(iter(self.costs.items()))
        area = self.work.get(first) or math.prod(self.operators[first])
        rest = len(self.rows) - kept.total()
        return [
            (name, own[name] / area, kept[name] if name in self.rescues else rest)
            for name in (self.recipe, *self.rescues)
        ]

    def expected(self, choice: Choice) -> tuple[float, float]:
        """Return the expected nats per token without and with the pins: the values times `calibration`, if known."""
        factor = self.calibration or 1.0
        return max(0.0, factor * choice.before), max(0.0, factor * choice.after)

    def plan(self, budget: float | str | None = None, provenance: Mapping[str, str] | None = None) -> PinPlan:
        """Return plan.json under a budget of extra GEMM time (None: this diagnosis's).

        Raises ValueError if the budget is not a positive share. It also does so for a diagnosis under a plan or with
        separate recipes of operators, which a plan cannot express.
        """
        if self.sides:
            raise ValueError(f"plan: {next(iter(self.sides))} has a recipe of its own, which a plan cannot say")
        chosen = self.choice(budget)
        # Prices by token, as the controller's signal measures them.
        by_token = {row.operator: row.by_token or row.value for row in self.rows if row.gemm == "fprop"}
        pinned = [by_token[name] for name in chosen.pins if by_token[name] > 0]
        found = self.measured
        said = {
            "batches": f"{found.batches}",
            "sum": f"{self.total:.6g} nats of all GEMMs alone; expected is that times {self.calibration or 1.0:.4g}",
        }
        if found.kl is not None:
            said["kl"] = f"{found.kl:.6g} nats per token with everything low"
        if found.cost is not None:
            said["loss"] = f"{found.cost:+.6g} nats, {found.high:.6g} -> {found.low:.6g}"
        expected = self.expected(chosen)
        prices: dict[str, dict[str, dict[str, float]]] = {}
        for (name, gemm), own in self.prices.items() if not self.against else ():
            if all(map(np.isfinite, own.values())):
                prices.setdefault(name, {})[gemm] = {on: float(f"{nats:.6g}") for on, nats in own.items()}
        operators, pins = self.operators | dict(self.matched), dict(chosen.pins)
        if self.linears is not None:  # in the model's order
            operators = {name: operators[name] for name in (*self.linears.saved, *operators) if name in operators}
        for group in groups_of(operators, self.fused):
            of_group = next((pins[name] for name in group if name in pins), {})
            if of_group:  # an expert without a price has the recipe of its group
                pins |= {name: dict(of_group) for name in group if name in self.matched}
        return PinPlan(
            operators=operators,
            low=self.recipe,
            recovery=self.recovery,
            recipes=self.recipes,
            targets=self.targets,
            exclude=self.exclude,
            modules=dict(self.modules),
            unconverted=None if self.linears is None else [one for one in self.linears.saved if one not in operators],
            saved_as={} if self.linears is None else self.linears.renamed(),
            unloaded=[] if self.linears is None else list(self.linears.unloaded),
            pins=pins,
            times=self.times,
            work=dict(self.work) | dict.fromkeys(self.matched if self.work else (), 0),
            rest=self.rest,
            budget=None if self.against else budget_of(self.budget if budget is None else budget),
            extra=None if self.against else chosen.extra,
            fused=list(self.fused),
            prices=prices,
            expected=expected if np.isfinite(expected).all() else None,
            triggers={"price": min(pinned)} if pinned else {},
            provenance=said | dict(provenance or {}),
        )

    def stability(self) -> Stability:
        """Estimate by bootstrap and split halves how often another draw of batches gives the same top set and order."""
        areas = np.array([self.work.get(name) or a * b for name, (a, b) in self.operators.items()], dtype=float)
        top = max(1, len(self.pins or self.choice().pins))
        rng = np.random.default_rng(0)
        weights = np.ones(len(self.samples)) if self.terms is None else self.terms
        means = bootstrap_weights(weights, rng) @ self.samples / areas
        own = _top(weighted_mean(self.samples, weights)[None] / areas, top)
        kept = (_top(means, top) & own).sum(axis=1)
        halves = []
        for _ in range(_SPLITS):
            order = rng.permutation(len(self.samples))
            a, b = (weighted_mean(self.samples[part], weights[part]) for part in np.array_split(order, 2))
            halves.append(_spearman(a, b))
        return Stability(top, float((kept == top).mean()), float(np.mean(halves)))

    def verdict(self) -> str:
        """Return the verdict in one sentence, with its limits."""
        return verdict(self)

    def tree(self) -> dict[str, Any]:
        """Return all numbers as a tree for JSON."""
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
            "rescues": list(self.rescues),
            "times": self.times,
            "fused": list(self.fused),
            "recipes_in_use": self.recipes_in_use() if self.chooses else [],
            "price_tokens": self.tokens,
            "pins": self.pins,
            "covers": self.coverage.share(self.operators),
            "left_out": {product.name: share for product, share in self.coverage.left_out(self.operators).items()},
            "idle": dict(self.idle),
            "partly": dict(self.partly),
            "choices": self.compared(),
            "curve": [{"extra": extra, **one.tree()} for extra, one in self.curve],
            "rows": [vars(row) | {"interval": list(row.interval)} for row in self.rows],
            "beside": [vars(row) | {"interval": list(row.interval)} for row in self.beside],
            "scores": self.scores,
            "operators": {name: list(shape) for name, shape in self.operators.items()},
        }


def _top(values: np.ndarray, k: int) -> np.ndarray:
    """Return an (N, U) bool mask of the k largest values in each row."""
    order = np.argsort(-values, axis=1, kind="stable")
    found = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(found, order[:, :k], True, axis=1)
    return found


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation of two series without many ties; 1 if either is constant."""
    first, second = (np.argsort(np.argsort(x)).astype(float) for x in (a, b))
    if len(a) < 2 or any(np.ptp(x) == 0 for x in (a, b)):
        return 1.0
    return float(np.corrcoef(first, second)[0, 1])
