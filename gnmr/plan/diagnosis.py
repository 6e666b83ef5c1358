"""Hold the results of `gnmr.diagnose`: the cost of every GEMM with intervals, the total, a verdict and a plan.

There are two rankings. The cost of `fprop` is the KL in nats per token between the model without and with this GEMM in
low precision. `dgrad` and `wgrad` change the next step, and their score is the squared error of the gradient that they
give, relative to that gradient (docs/price.md). A plan is chosen by fprop alone. If the model gave a loss and no
logits, the nats are the increase of the loss.

The KL of the most expensive fprops is measured one by one; the others are second-order estimates. `interaction` is the
KL of everything in low precision minus the sum of all: a failure that only the assembled model shows. `calibration` is
the ratio of the two. Expected costs are the values times this ratio, which assumes the same ratio for all operators.

`Diagnosis` holds the numbers and chooses among them. The functions below it put them into words: the verdict.
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

from gnmr.errors import first_few, plural
from gnmr.measure.coverage import Coverage
from gnmr.measure.gemm_costs import GemmCost, PathCost, format_nats
from gnmr.names import Pins
from gnmr.plan.checkpoint_names import ModelLinears
from gnmr.plan.knapsack import (
    GUESSES,
    Choice,
    Prices,
    Times,
    as_choice,
    budget_of,
    by_score,
    choose,
    groups_of,
    guessed,
    pin_in_order,
    time_of_all,
    time_to_move,
)
from gnmr.plan.pin_plan import PinPlan

CURVE = (0.03, 0.05, 0.1, 0.2, 0.3)
"""Budgets of further plans whose KL is measured."""
RANDOM_DRAWS = 2
"""Number of random draws whose mean is the guess `random`."""
LITTLE = 0.01
"""Nats per token, below which nothing has to be kept."""
UNREACHED = "no token reached them"
"""The reason why experts have no price although others of their layer have one; a plan puts them with their group."""
RULES = ("mse", "gradient norm")
"""Scores that are also usual rules: operators in their order."""
_NAMED = 4
"""Operators that a verdict names."""
_SCORES = {
    "price": "price",
    "token": "price by token",
    "sequence": "price by sequence",
    "elements": "squares by element",
    "gradient norm": "gradient norm",
    "mse": "squared error of the input",
    "first_last": "first and last blocks",
}
"""What the scores of candidates are called."""
_LABELS = {
    "price": "by price",
    "last": "last blocks",
    "first": "first blocks",
    "first_last": "first and last blocks",
    "random": "operators at random",
    "mse": "by mse of the input",
    "gradient norm": "by gradient norm",
}
"""What choices are called in tables."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """The results of a diagnosis (see the module). Numbers are means over the tokens of all batches."""

    recipe: str
    recovery: str
    operators: dict[str, tuple[int, int]]
    """(inputs, outputs) of each operator, in the model's order."""
    rows: tuple[GemmCost, ...]
    """Every GEMM of every operator, in the model's order."""
    measured: PathCost
    """KL and loss on the batches of the prices."""
    scores: dict[str, dict[str, float]]
    """`mse` (of the input's cast), `gradient norm` (of the weight) and `elements`, each by operator.

    `elements` is the sum of squares by element, which ModelOpt's AutoQuantize uses.
    """
    budget: float
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
    selected: str = "price"
    """The score that the plan is solved by: the one whose plan left least on the batches of the selection."""
    selection: Mapping[str, tuple[PathCost, float, float]] = field(default_factory=dict)
    """The plan of each score on the batches of the selection: (cost, nats more than the price's plan, their error)."""
    held_out: PathCost | None = None
    """Cost of everything low on the held-out batches that no plan was chosen on."""
    remaining: Mapping[str, PathCost] = field(default_factory=dict)
    """Cost that remains on the held-out batches under the `plan` of this budget and each of the `alternatives`."""
    excess: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Extra nats that each alternative leaves compared with the plan, and half the width of the paired interval."""
    curve: tuple[tuple[float, PathCost], ...] = ()
    """(extra time, cost that remains on the held-out batches) of plans of other budgets."""
    unplanned: tuple[GemmCost, ...] = ()
    """The output head, routers and caches that were asked for, each measured alone and in no sum or plan."""
    kv_cast: str | None = None
    """Cast of the keys and values; None: they were not measured together."""
    caches: Mapping[str, PathCost] = field(default_factory=dict)
    """Cost on the held-out batches of all keys and values in `kv_cast`: `alone`, and with the `plan`."""
    limit: float | None = None
    """The detection limit: KL if each operator's output moves by one unit in the last place, nats per token."""
    limit_dtype: str = ""
    """Dtype of the operators' outputs, such as bfloat16."""
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
        return float(sum(nats_on[self.recipe] for nats_on in self.prices.values()))

    @property
    def calibration(self) -> float | None:
        """Return the cost of everything low over `total`; None if the cost is within its noise or `total` is 0."""
        cost = self.measured
        return cost.nats / self.total if cost.above_noise and cost.finite and self.total > 0 else None

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
        rows = ((row, row.by_token, row.by_sequence) for row in self.worst())
        return [row for row, token, sequence in rows if token and sequence and not low <= sequence / token <= high]

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
        cost = self.measured
        bound = self.gate or ((self.limit or 0.0) if self.against else LITTLE)
        return bool((cost.nats if cost.above_noise else max(self.total, cost.nats + cost.noise)) < bound)

    def worst(self, gemm: str = "fprop") -> list[GemmCost]:
        """Return the rows of one GEMM of all operators, the largest value first.

        Args:
            gemm: fprop, whose values are nats per token, or dgrad or wgrad, whose values are relative squared errors.
        """
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

    @cached_property
    def score_prices(self) -> dict[str, Prices]:
        """Return the prices that each score stands for, in nats: all scores have the same sum.

        A rescue leaves the same share of a score as it leaves of the price. What is not finite alone is not finite by
        any score.
        """
        forward = [row for row in self.rows if row.gemm == "fprop"]
        values: dict[str, list[float | None]] = {}
        # The estimate that is not in use. A KL that was measured alone takes the place of either in nats.
        if self.estimate == "sequence":
            values["token"] = [row.by_token if row.measured is None else row.measured for row in forward]
        elif self.estimate == "token":
            values["sequence"] = [row.by_sequence if row.measured is None else row.measured for row in forward]
        values["elements"] = [self.scores.get("elements", {}).get(row.operator) for row in forward]
        norms, errors = (self.scores.get(key, {}) for key in ("gradient norm", "mse"))
        # A squared norm estimates the Fisher information, and inputs times MSE is the squared error of a token.
        values["gradient norm"] = [norms[row.operator] ** 2 if row.operator in norms else None for row in forward]
        values["mse"] = [
            errors[row.operator] * self.operators[row.operator][0] if row.operator in errors else None
            for row in forward
        ]
        total = math.fsum(row.value for row in forward if math.isfinite(row.value))
        prices = {"price": self.prices}
        # Scale each score to the sum of the prices; one with NaN, or without a positive finite sum, is left out.
        for name, of_rows in values.items():
            scores = np.array([math.nan if score is None else score for score in of_rows], dtype=float)
            if np.isnan(scores).any() or not 0 < scores[np.isfinite(scores)].sum() < math.inf:
                continue
            nats = np.where(np.isfinite(scores), scores, 0.0) * total / scores[np.isfinite(scores)].sum()
            prices[name] = {
                (row.operator, row.gemm): self._scaled(row, value)
                for row, value in zip(forward, nats.tolist(), strict=True)
            }
        return prices

    def _scaled(self, row: GemmCost, nats: float) -> dict[str, float]:
        """Return the nats of a row on each recipe if it costs `nats` on the low one."""
        nats_on = {self.recipe: row.value, **row.rescued}
        if not math.isfinite(row.value):
            return nats_on
        # Nats on a rescue are estimates, so their share is one of the estimate, even if the low recipe was measured.
        by_estimate = row.value
        if row.measured is not None:
            by_sequence = row.by_sequence if self.estimate == "sequence" else None
            by_estimate = (row.by_token if by_sequence is None else by_sequence) or 0.0
        share = nats / by_estimate if by_estimate > 0 else 0.0
        return {self.recipe: nats} | {rescue: share * left for rescue, left in row.rescued.items()}

    def candidates(self) -> dict[str, Choice]:
        """Return the plan of this budget by each score, and first and last blocks, by name; the price comes first."""
        names = [*self.score_prices, *([] if self.groups else ["first_last"])]
        return {name: self.choice(score=name) for name in names}

    def choice(
        self,
        budget: float | str | None = None,
        rescue: str | None = None,
        *,
        free: bool = False,
        score: str | None = None,
    ) -> Choice:
        """Return the plan that leaves the fewest nats under a budget of extra time.

        Args:
            budget: extra time as a share of that of the GEMMs that the plan may move. None: this diagnosis's budget, or
                with a gate no budget; the plan is then the cheapest one expected to keep the gate.
            rescue: the only recipe to pin to. None: all rescues.
            free: ignore that a library runs operators as one.
            score: score of `candidates` to solve by. None: the `selected` one. The nats of a choice are by the price.

        Raises ValueError under a plan's pins.
        """
        if self.pins:
            raise ValueError("plan: this is a diagnosis under a plan's pins; a new plan needs one without")
        if budget is None and self.gate is None:
            budget = self.budget
        share = None if budget is None else budget_of(budget)
        score = score or self.selected
        if (key := (share, rescue, free, score)) not in self._choices:
            self._choices[key] = self._solved(share, rescue, () if free else self.groups, score)
        return self._choices[key]

    def _solved(self, share: float | None, rescue: str | None, groups: Sequence[Sequence[str]], score: str) -> Choice:
        if score == "first_last":
            assert share is not None
            # No score, but blocks from both ends until the budget is used.
            order, rescues = guessed(score, self.operators), self.rescues if rescue is None else (rescue,)
            choices = [pin_in_order(order, self.prices, self.costs, self.recipe, on, share) for on in rescues]
            return min(choices, key=lambda choice: choice.after)
        # The gate is a KL; divided by the calibration it is a sum of prices.
        enough = self.gate / (self.calibration or 1.0) if self.gate is not None and share is None else None
        prices = self.score_prices[score]
        if rescue is not None:
            recipes = self.recipe, rescue
            prices = {item: {name: nats_on[name] for name in recipes} for item, nats_on in prices.items()}
        choice = choose(prices, self.costs, self.recipe, share, enough=enough, groups=groups)
        if score == "price":
            return choice
        # Another score chose the pins, but what they leave is given by the price.
        chosen = {(name, gemm): recipe for name, pins in choice.pins.items() for gemm, recipe in pins.items()}
        return as_choice(chosen, self.prices, self.costs, self.recipe)

    @cached_property
    def _choices(self) -> dict[tuple[float | None, str | None, bool, str], Choice]:
        return {}

    def extra_of_all(self, choice: Choice) -> float:
        """Return the extra time of a choice as a share of the time of all GEMMs of a forward and a backward pass.

        Args:
            choice: has its extra time as a share of the time of the GEMMs that a plan may move.
        """
        to_move = time_to_move(self.prices, self.costs, self.recipe)
        return choice.extra * to_move / time_of_all(self.costs, self.recipe, self.rest, self.times)

    @cached_property
    def alternatives(self) -> dict[str, list[Choice]]:
        """Return other choices of the same extra time: plans on each of several rescues alone, and the usual guesses.

        The guesses pin fprop of the last blocks, the first blocks, both ends, random operators (`RANDOM_DRAWS`), or the
        operators with the largest `scores`. They use the rescue that leaves the fewest nats by the values.
        """
        # A gate gives no budget, so the others may take the extra time of the plan.
        budget = self.budget if self.gate is None else max(self.choice().extra, 1e-9)
        alternatives = {} if self.selected == "price" else {"price": [self.choice(score="price")]}
        alternatives |= {f"{rescue} alone": [self.choice(budget, rescue)] for rescue in self.singles}
        draws = dict.fromkeys(GUESSES, 1) | {"random": RANDOM_DRAWS}
        orders = {kind: [guessed(kind, self.operators, seed) for seed in range(n)] for kind, n in draws.items()}
        orders |= {key: [by_score(self.scores[key], self.operators)] for key in RULES if key in self.scores}
        for name, draws_of in orders.items():
            by_rescue = [
                [pin_in_order(order, self.prices, self.costs, self.recipe, rescue, budget) for order in draws_of]
                for rescue in self.rescues
            ]
            alternatives[name] = min(by_rescue, key=lambda choices: sum(choice.after for choice in choices))
        return alternatives

    def compared(self) -> dict[str, dict[str, float | None]]:
        """Return the extra time of the plan and the alternatives, and what they leave, by value and measured.

        `same_top` and `kl_99` are of single tokens (`PathCost`), and measured for the plan alone. The result is empty
        under a plan's pins.
        """
        table: dict[str, dict[str, float | None]] = {}
        for name, choices in ({} if self.pins else {"plan": [self.choice()], **self.alternatives}).items():
            cost = self.remaining.get(name)
            table[name] = {
                "price_left": float(np.mean([choice.after for choice in choices])),
                "extra": float(np.mean([choice.extra for choice in choices])),
                "extra_of_all": float(np.mean([self.extra_of_all(choice) for choice in choices])),
                "kl_left": None if cost is None else cost.kl,
                "loss_left": None if cost is None else cost.cost,
                "noise": None if cost is None else cost.noise,
                "same_top": None if cost is None else cost.same_top,
                "kl_99": None if cost is None else cost.kl_99,
            }
        return table

    def recipes_in_use(self) -> list[tuple[str, float, int]]:
        """Return (recipe, relative time of its fprop, number of GEMMs) of the plan, the low recipe first."""
        pins = self.pins or self.choice().pins
        pinned = Counter(recipe for recipe_of in pins.values() for recipe in recipe_of.values())
        area = sum(self.work.get(name) or math.prod(shape) for name, shape in self.operators.items())
        numbers = {self.recipe: len(self.rows) - pinned.total()} | {name: pinned[name] for name in self.rescues}
        forward = [time_on for (_, gemm), time_on in self.costs.items() if gemm == "fprop"]
        return [(name, math.fsum(time[name] for time in forward) / area, n) for name, n in numbers.items()]

    def expected(self, choice: Choice) -> tuple[float, float]:
        """Return the expected nats per token without and with the pins.

        Returns:
            The values before and after the choice, times `calibration` if that is known, and at least 0.
        """
        factor = self.calibration or 1.0
        return max(0.0, factor * choice.before), max(0.0, factor * choice.after)

    def plan(self, budget: float | str | None = None, provenance: Mapping[str, str] | None = None) -> PinPlan:
        """Return plan.json under a budget.

        Args:
            budget: extra GEMM time, as `budget_of` reads it; None: the diagnosis's own budget, or its gate.
            provenance: further entries of the plan's provenance.

        Raises:
            ValueError: the budget is not a positive share, or the diagnosis is under a plan or has separate recipes of
                operators, which a plan cannot express.
        """
        if self.sides:
            raise ValueError(f"plan: {next(iter(self.sides))} has a recipe of its own, which a plan cannot say")
        choice, cost = self.choice(budget), self.measured
        texts = {
            "batches": f"{cost.batches}",
            "sum": f"{self.total:.6g} nats of all GEMMs alone; expected is that times {self.calibration or 1.0:.4g}",
        }
        if cost.kl is not None:
            texts["kl"] = f"{cost.kl:.6g} nats per token with everything low"
        if cost.cost is not None:
            texts["loss"] = f"{cost.cost:+.6g} nats, {cost.high:.6g} -> {cost.low:.6g}"
        if self.caches:
            texts["keys and values"] = "; ".join(_of_caches(self))
        # Prices of two sides are no prices of recipes. A plan cannot hold a price that is not finite.
        prices: dict[str, dict[str, dict[str, float]]] = {}
        of_score = self.score_prices.get(self.selected, self.prices)
        for (name, gemm), nats_on in of_score.items() if not self.against else ():
            if all(map(np.isfinite, nats_on.values())):
                prices.setdefault(name, {})[gemm] = {on: float(f"{nats:.6g}") for on, nats in nats_on.items()}
        operators, pins, linears = self.operators | dict(self.matched), dict(choice.pins), self.linears
        if linears is not None:  # in the model's order
            operators = {name: operators[name] for name in (*linears.saved, *operators) if name in operators}
        for group in groups_of(operators, self.fused):
            group_pins = next((pins[name] for name in group if name in pins), {})
            if group_pins:  # an expert without a price has the recipe of its group
                pins |= {name: dict(group_pins) for name in group if name in self.matched}
        # The controller's signal measures prices by token, so its threshold is one of these.
        by_token = {row.operator: row.by_token or row.value for row in self.rows if row.gemm == "fprop"}
        trigger = min((by_token[name] for name in choice.pins if by_token[name] > 0), default=None)
        expected = self.expected(choice)
        return PinPlan(
            operators=operators,
            low=self.recipe,
            recovery=self.recovery,
            recipes=self.recipes,
            targets=self.targets,
            exclude=self.exclude,
            modules=dict(self.modules),
            unconverted=None if linears is None else [name for name in linears.saved if name not in operators],
            saved_as={} if linears is None else linears.renamed(),
            unloaded=[] if linears is None else list(linears.unloaded),
            pins=pins,
            times=self.times,
            work=dict(self.work) | dict.fromkeys(self.matched if self.work else (), 0),
            rest=self.rest,
            budget=None if self.against else budget_of(self.budget if budget is None else budget),
            extra=None if self.against else choice.extra,
            extra_of_all=None if self.against else self.extra_of_all(choice),
            fused=list(self.fused),
            prices=prices,
            expected=expected if np.isfinite(expected).all() else None,
            triggers={} if trigger is None else {"price": trigger},
            provenance=texts | dict(provenance or {}),
        )

    def verdict(self) -> str:
        """Return the verdict: one sentence, and the operators and modules that it leaves out."""
        return "; ".join([_sentence(self), *_of_caches(self), *left_out(self)])

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
            "budget": self.budget,
            "rescues": list(self.rescues),
            "times": self.times,
            "fused": list(self.fused),
            "recipes_in_use": self.recipes_in_use() if self.chooses else [],
            "pins": self.pins,
            "covers": self.coverage.share(self.operators),
            "left_out": {product.name: share for product, share in self.coverage.left_out(self.operators).items()},
            "idle": dict(self.idle),
            "partly": dict(self.partly),
            "selected": self.selected,
            "selection": {
                name: {
                    "extra": self.choice(score=name).extra,
                    "more_than_price": {"nats": more, "error": error},
                    **cost.tree(),
                }
                for name, (cost, more, error) in self.selection.items()
            },
            "score_prices": {
                name: {operator: nats_on[self.recipe] for (operator, _), nats_on in prices.items()}
                for name, prices in (self.score_prices.items() if self.chooses else ())
            },
            "choices": self.compared(),
            "curve": [{"extra": extra, **cost.tree()} for extra, cost in self.curve],
            "rows": [vars(row) | {"interval": list(row.interval)} for row in self.rows],
            "kv_cast": self.kv_cast,
            "caches": {name: cost.tree() for name, cost in self.caches.items()},
            "beside": [vars(row) | {"interval": list(row.interval)} for row in self.unplanned],
            "scores": self.scores,
            "operators": {name: list(shape) for name, shape in self.operators.items()},
        }


# ---- words ----


def left_out(diagnosis: Diagnosis) -> list[str]:
    """Return clauses on operators without a price, or without one in some batches, and on other modules."""
    by_reason: dict[str, list[str]] = {}
    for name, why in diagnosis.idle.items():
        by_reason.setdefault(why, []).append(name)
    clauses = [
        f"{'without a price' if why == UNREACHED else 'left out'}, as {why}: {first_few(names)}"
        for why, names in by_reason.items()
    ]
    if diagnosis.partly:
        clauses.append(f"only in some of the batches ran {first_few(list(diagnosis.partly))}")
    if names := diagnosis.without_sequences:
        why = "as rows of theirs belong to several sequences of the logits (S, T, V)"
        clauses.append(f"estimated by token alone, {why}: {first_few(names)}")
    if diagnosis.coverage.left_out(diagnosis.operators):
        clauses.append(diagnosis.coverage.line(diagnosis.operators, "this covers"))
    return clauses


def label(choice: str) -> str:
    """Return what a choice is called in tables; plans on one rescue alone have their own names."""
    return _LABELS.get(choice, choice)


def plan_label(diagnosis: Diagnosis) -> str:
    """Return what the plan is called in tables: by the score that it is solved by."""
    by = "single KLs" if diagnosis.estimate == "measured" and diagnosis.selected == "price" else ""
    return f"the plan, by {by or _SCORES[diagnosis.selected]}"


def token_line(diagnosis: Diagnosis) -> str:
    """Return what low precision and the plan do to single held-out tokens; empty without a KL."""
    without_plan = "between the two sides" if diagnosis.against else f"on {diagnosis.recipe}"
    if diagnosis.pins:
        without_plan = "under the plan"
    clauses = []
    for name, cost in ((without_plan, diagnosis.held_out), ("under the plan", diagnosis.remaining.get("plan"))):
        if cost is not None and cost.same_top is not None and cost.kl_99 is not None:
            clauses.append(f"{cost.same_top:.1%} of tokens and {format_nats(cost.kl_99)} nats {name}")
    return f"top prediction unchanged, and 99th percentile of the KL: {'; '.join(clauses)}" if clauses else ""


def _sentence(diagnosis: Diagnosis) -> str:
    measured, recipe = diagnosis.measured, diagnosis.recipe
    under = "under the plan " if diagnosis.pins else ""
    # NaN and Inf have no cost in nats.
    if not measured.finite:
        worst = f"fprop of {first_few([row.operator for row in diagnosis.worst()[:_NAMED]])}"
        subject, loss = ("the loss is", "") if measured.kl is None else ("the predictions are", "loss ")
        high = "" if measured.high is None else f" ({loss}{measured.high:.4f} on {diagnosis.recovery})"
        return f"{under}{subject} not finite under {recipe}{high}; worst: {worst}"
    if diagnosis.against:
        return _of_two_sides(diagnosis)
    start = f"nothing {'more ' if diagnosis.pins else ''}has to be kept: " if diagnosis.little else ""
    optional = _optional_plan(diagnosis) if start else ""
    unit, batches = "nats" if measured.kl is None else "nats of KL per token", plural(measured.batches, "batch")
    # What these batches cannot show.
    if measured.kl is not None and measured.nats <= (diagnosis.limit or 0.0):
        return (
            f"{start}{under}{recipe} costs {format_nats(measured.nats)} {unit}, no more than the detection limit of "
            f"{format_nats(diagnosis.limit or 0.0)} ({limit_origin(diagnosis)}), so nothing can be told of it{optional}"
        )
    if not measured.above_noise:
        estimate = "single values add up to" if diagnosis.estimate == "measured" else "by estimate"
        estimate = f"{estimate} {diagnosis.total:.2g}"
        spread = f" ± {measured.noise:.1g}" if math.isfinite(measured.noise) else ""  # one sequence has none
        if not start and measured.kl is not None:
            return (
                f"{batches} {'is' if measured.batches == 1 else 'are'} too few to tell what {under}{recipe} costs: "
                f"{measured.nats:.2g}{spread} {unit}, {estimate}; take more batches"
            )
        return (
            f"{start}{under}{recipe} costs nothing here that {batches} can show "
            f"({measured.nats:+.2g}{spread} {unit}, {estimate})"
            f"{optional if start else ': more batches would tell'}"
        )
    # What it costs, and what to do about it.
    losses = "" if measured.high is None else f" (loss {measured.high:.4f} -> {measured.low:.4f})"
    cost = f"{start}{under}{recipe} costs {format_nats(measured.nats)} {unit} against {diagnosis.recovery}{losses}"
    if start:
        return f"{cost}, less than {LITTLE}{optional}"
    if diagnosis.pins:
        return f"{cost}, with {_gemms(diagnosis.pins)} of {len(diagnosis.rows)} GEMMs on {_recipes(diagnosis.pins)}"
    if diagnosis.total <= 0:
        return f"{cost}, and no GEMM alone costs anything"
    choice = diagnosis.choice()
    if not choice.pins:
        return f"{cost}; no GEMM fits a budget of {_time(diagnosis, diagnosis.budget)}"
    clauses = [
        f"{cost}; keeping {_pinned(diagnosis, choice)} on {_recipes(choice.pins)}, for "
        f"{_time(diagnosis, choice.extra)}{_of_all(diagnosis, choice)}, {_remains(diagnosis, choice)}",
        _selection(diagnosis),
        _better_guess(diagnosis),
    ]
    return "; ".join(filter(None, clauses))


def limit_origin(diagnosis: Diagnosis) -> str:
    """Say what KL the detection limit is."""
    return f"the KL if each output moves by one unit in the last place of {diagnosis.limit_dtype or 'its own dtype'}"


def _optional_plan(diagnosis: Diagnosis) -> str:
    """Say that a plan is shown although nothing has to be kept; empty if there is none."""
    if not diagnosis.chooses or not (choice := diagnosis.choice()).pins:
        return ""
    return f"; the plan, for {_time(diagnosis, choice.extra)}, is optional: it {_remains(diagnosis, choice)}"


def _of_caches(diagnosis: Diagnosis) -> list[str]:
    """Return a clause on what keys and values cost, and what is left with them; nothing if they were not measured."""
    if not diagnosis.caches:
        return []
    alone, with_plan = (
        format_nats(cost.nats) + (f" ± {format_nats(cost.noise)}" if cost.noise > 0 else "")
        for cost in (diagnosis.caches["alone"], diagnosis.caches["plan"])
    )
    plan = "the plan" if diagnosis.pins or diagnosis.choice().pins else diagnosis.recipe
    return [f"keys and values in {diagnosis.kv_cast} cost {alone} nats alone, and {plan} leaves {with_plan} with them"]


def _of_two_sides(diagnosis: Diagnosis) -> str:
    """Return the verdict on two sides: whether the gate holds, what makes the difference, and what to change."""
    measured, gate = diagnosis.measured, diagnosis.gate
    width = f" ± {format_nats(measured.noise)}" if measured.noise > 0 else ""
    differ = (
        f"the rollout ({diagnosis.recipe}) and the trainer ({diagnosis.recovery}) differ by "
        f"{format_nats(measured.nats)}{width} nats of KL per token"
    )
    if measured.nats <= (diagnosis.limit or 0.0):
        return f"{'' if gate is None else 'the gate holds: '}{differ}, no more than rounding makes"
    # The gate holds if the whole interval is below it, and fails if the whole interval is above it.
    if gate is not None:
        if measured.nats + (measured.noise if width else 0.0) <= gate:
            return f"the gate holds: {differ}, at most {gate:g}"
        if measured.nats - measured.noise <= gate:
            return f"the gate of {gate:g} cannot be decided: {differ}; more batches would tell"
        differ = f"the gate does not hold: {differ}, more than {gate:g}"
    choice = diagnosis.choice()
    if not choice.pins:
        fits = f"no GEMM fits a budget of {_time(diagnosis, diagnosis.budget)}"
        return f"{differ}, and {fits if diagnosis.total > 0 else 'no GEMM alone makes it'}"
    return (
        f"{differ}; run {_pinned(diagnosis, choice)} in one recipe on both sides (the trainer's in the rollout, or the "
        f"rollout's in the trainer), which {_remains(diagnosis, choice)}"
    )


def _pinned(diagnosis: Diagnosis, choice: Choice) -> str:
    """Return the GEMMs of a choice, the largest first."""
    ordered = sorted(choice.pins, key=lambda name: -diagnosis.prices[name, "fprop"][diagnosis.recipe])
    share, sides = 1 - choice.after / choice.before, diagnosis.sides
    named = first_few([f"{name} ({' | '.join(sides[name])})" if name in sides else name for name in ordered])
    return f"{_gemms(choice.pins)} of {len(diagnosis.rows)} GEMMs ({share:.0%} of the cost: fprop of {named})"


def _remains(diagnosis: Diagnosis, choice: Choice) -> str:
    """Say what the plan leaves: measured on held-out batches, or as expected."""
    if (cost := diagnosis.remaining.get("plan")) is not None and cost.finite:
        width = f" ± {format_nats(cost.noise)}" if np.isfinite(cost.noise) else ""
        return f"leaves {format_nats(cost.nats)}{width} nats on other batches"
    return f"should leave {format_nats(diagnosis.expected(choice)[1])} nats"


def _selection(diagnosis: Diagnosis) -> str:
    """Return a clause on the score that the plan is solved by; empty if there was no choice."""
    if not diagnosis.selection:
        return ""
    score, (by_price, _, _) = diagnosis.selected, diagnosis.selection["price"]
    where = f"on {plural(by_price.batches, 'batch')} for the choice"
    if score == "price":
        others = len(diagnosis.selection) - 1
        return f"the plan is by price: of {plural(others, 'other score')} none left clearly less {where}"
    nats, nats_by_price = format_nats(diagnosis.selection[score][0].nats), format_nats(by_price.nats)
    return f"the plan is by {_SCORES[score]}, which left less than the price {where}: {nats} against {nats_by_price}"


def _better_guess(diagnosis: Diagnosis) -> str:
    """Return a clause if a guess left less than the plan on the held-out batches, or if these are too few to tell."""
    if diagnosis.pins or diagnosis.held_out is None or not diagnosis.excess:
        return ""
    batches = plural(diagnosis.held_out.batches, "held-out batch")
    best = min(diagnosis.excess, key=lambda name: diagnosis.remaining[name].nats)
    more, noise = diagnosis.excess[best]
    if more < 0:
        nats, of_plan = (format_nats(diagnosis.remaining[name].nats) for name in (best, "plan"))
        unsure = "" if -more > noise else ", which is too few batches to be sure"
        return f"{label(best)} left less than the plan on {batches}: {nats} nats against {of_plan}{unsure}"
    verb = "are" if diagnosis.held_out.batches > 1 else "is"
    return "" if diagnosis.held_out.above_noise else f"{batches} {verb} too few to tell the choices apart"


def _time(diagnosis: Diagnosis, extra: float) -> str:
    """Return the extra time of a choice; of two sides the share that is alike on both."""
    if diagnosis.chooses or diagnosis.pins:
        return f"+{100 * extra:.3g}% GEMM time"
    return f"{100 * extra:.3g}% of the GEMM time"


def _of_all(diagnosis: Diagnosis, choice: Choice) -> str:
    """Return what the extra time is of all GEMMs, if recipes have different times."""
    if not diagnosis.chooses:
        return ""
    return f" ({100 * diagnosis.extra_of_all(choice):+.3g}% of all GEMMs, forward and backward)"


def _recipes(pins: Pins) -> str:
    """Return the recipes of these pins, of several with the number of their GEMMs: mxfp8 (80) and bf16 (27)."""
    numbers = Counter(recipe for recipe_of in pins.values() for recipe in recipe_of.values())
    if len(numbers) == 1:
        return next(iter(numbers))
    return " and ".join(f"{recipe} ({number})" for recipe, number in numbers.most_common())


def _gemms(pins: Pins) -> int:
    return sum(map(len, pins.values()))
