"""Measure a converted model on all batches, and put the results together as a diagnosis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from typing import Any

import numpy as np
import torch

from gnmr.conversion import PathLinear, PathSpec
from gnmr.conversion.adapters import operators_in
from gnmr.conversion.converting import operator_shapes
from gnmr.conversion.cost import gemm_time
from gnmr.conversion.unit_names import of_any_expert, operator_names
from gnmr.formats import Recipe
from gnmr.measure.coverage import Coverage
from gnmr.measure.gemm_costs import (
    GemmCost,
    PathCost,
    bootstrap_intervals,
    format_nats,
    paired_difference,
    weighted_mean,
)
from gnmr.measure.model_passes import IN_USE, NUMBERS, PASSES_PER_BATCH, BatchCosts, ModelPasses
from gnmr.names import GEMMS, RECIPES, Pins
from gnmr.options import require
from gnmr.plan.checkpoint_names import linears_of
from gnmr.plan.diagnosis import CURVE, RANDOM_DRAWS, Diagnosis
from gnmr.plan.knapsack import GUESSES, REST, Choice, Shapes, Times, groups_of, times_of
from gnmr.plan.verdict import UNREACHED

CONFIRMED = 2
"""Number of batches on which single KLs are measured."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """The passes of a diagnosis, and what is asked of it."""

    passes: ModelPasses
    spec: PathSpec
    pins: Pins
    """Pins of the plan in force, by names without `model.`."""
    against: bool
    """As in `Diagnosis`, and so are `sides`, `gate`, `fused` and `budget`."""
    sides: Mapping[str, tuple[str, str]]
    gate: float | None
    fused: Sequence[str]
    budget: float
    asked: bool
    """True if the user named the rescues."""
    confirm: int
    """Number of operators, highest by either estimate, whose KL is measured."""

    def diagnosis(self, batches: Iterable[Any], held_out: Sequence[Any]) -> Diagnosis:
        """Measure everything, and return the diagnosis."""
        self.passes.expect(self._expected(batches, len(held_out)))
        batches = iter(batches)
        first = list(islice(batches, CONFIRMED))
        limit = self._limit(first[0]) if first else None
        priced = self._priced(chain(first, batches))
        rows = np.array([one.rows for one in priced])
        times = (rows > 0).sum(axis=0)
        kept = [o for o, number in zip(self.passes.converted.operators, times, strict=True) if number]
        right = "its loss does not run the linears of this model"
        if self.passes.read:
            right = (
                "its loss reads the weights of the linears without calling them (F.linear, a fused kernel, a forward "
                "that was replaced or wrapped), so no path is in force; call the modules"
            )
        require(kept, "run", "...", right)
        terms = np.array([one.terms for one in priced], dtype=float)
        samples = dict(zip(NUMBERS, np.stack([one.numbers for one in priced], axis=1)[..., times > 0], strict=True))
        estimate, sequences = priced[0].estimate, ~np.isnan(samples["fprop_sequence"]).any(axis=0)
        in_use = np.where(sequences & (estimate == "sequence"), samples["fprop_sequence"], samples["fprop"])
        samples["fprop_sequence"] = np.where(sequences, samples["fprop_sequence"], samples["fprop"])
        by_token, by_sequence = (
            weighted_mean([one.rescued[name] for one in priced], terms)[..., times > 0] for name in IN_USE
        )
        rescued = np.where(sequences & (estimate == "sequence"), by_sequence, by_token)
        normed = ~np.isnan(samples["norm"]).any(axis=1)
        alone = {} if priced[0].kl is None else self._confirmed(kept, samples, first, terms)
        self._measure_beyond(kept, alone, rescued, first)
        beside = self._rows_beside(first, priced[0].labels == "model", terms)
        unpriced = self._rows_without_gradient(first) if priced[0].kl is not None else ()
        shapes = {o.operator_name: (o.in_features, o.out_features) for o in self.passes.converted.operators}
        operators = {o.operator_name: shapes[o.operator_name] for o in kept}
        coverage = Coverage.sum_of(one.coverage for one in priced)
        every = dict(zip(shapes, rows.sum(axis=0).tolist(), strict=True))
        work = {name: every[name] * a * b for name, (a, b) in operators.items()}
        called = coverage.called()
        rest = coverage.total - sum(called.get(name, 0) for name in operators)
        choices = {row.operator for row in unpriced if row.value}
        reached = {of_any_expert(name) for name in operators}
        known = {*operators} | (self.passes.read - self.passes.called)
        unreached = {name for name in shapes if name not in known and of_any_expert(name) in reached}
        idle = {
            name: UNREACHED if name in unreached else self._why(name, choices)
            for name in shapes
            if name not in operators
        }
        in_plan = [name for name in shapes if name in operators or name in unreached]
        narrow = self._targets(in_plan) if {*idle} - unreached else None
        found = Diagnosis(
            recipe=self.spec.low,
            recovery=self.spec.recovery or "bf16",
            operators=operators,
            rows=self._rows(kept, samples, in_use, alone, rescued, terms, sequences),
            beside=(*beside, *unpriced),
            samples=in_use,
            terms=terms,
            measured=PathCost.of(
                [one.kl for one in priced], [one.high for one in priced], [one.low for one in priced], terms
            ),
            scores={
                "mse": dict(zip(operators, weighted_mean(samples["mse"], terms).tolist(), strict=True)),
                "gradient norm": dict(
                    zip(operators, weighted_mean(samples["norm"][normed], terms[normed]).tolist(), strict=True)
                ),
            },
            budget=self.budget,
            gate=self.gate,
            limit=limit,
            labels=priced[0].labels,
            estimate=estimate,
            tokens=self.passes.tokens,
            pins={name: own for name in operators if (own := self.pins.get(name.removeprefix("model.")))},
            rescues=tuple(self._rescues()),
            times=dict(self.spec.times),
            costs=self._costs(operators, work, rest),
            work=work,
            rest=rest,
            coverage=coverage,
            fused=self.fused,
            groups=groups_of(operators, self.fused),
            targets=narrow or self.spec.targets,
            exclude=[] if narrow else self.spec.exclude,
            recipes={
                name: one.words() if isinstance(one, Recipe) else one
                for name, one in self.spec.recipes.items()
                if name not in RECIPES
            },
            idle=idle,
            matched={name: shapes[name] for name in idle if name in unreached or not narrow},
            linears=linears_of(self.passes.model),
            modules=self._modules(),
            partly={name: int(n) for name, n in zip(shapes, times, strict=True) if 0 < n < len(priced)},
            against=self.against,
            sides=self.sides,
        )
        found = self._held_out(found, held_out, len(priced)) if held_out else found
        self.passes.refuse_state(first[0])
        return found

    # ---- the batches of the prices ----

    def _expected(self, batches: Iterable[Any], held_out: int) -> int | None:
        """Return an upper bound on the number of forward passes; None if the number of batches is unknown."""
        if not isinstance(batches, Sized):
            return None
        rescues, confirmed = len(self.passes.rescues), min(2 * self.confirm, len(self.passes.weights))
        choices = 3 + rescues * (rescues > 1) + len(GUESSES) - 1 + RANDOM_DRAWS + 2 + len(CURVE)
        return PASSES_PER_BATCH * len(batches) + 4 + min(CONFIRMED, len(batches)) * (1 + confirmed) + held_out * choices

    def _limit(self, batch: Any) -> float | None:
        """Return the KL from rounding. Raises ValueError if it is unknown or above the gate, and two sides need it."""
        limit = self.passes.rounding(batch)
        if self.against:
            key, given = ("against", self.spec.recovery) if self.gate is None else ("gate", self.gate)
            require(limit is not None, key, given, "is about a KL, and `run` gives a loss alone; have it give logits")
        if self.gate is not None:
            assert limit is not None
            right = f"is below what rounding of this model makes, {limit:.2g} nats; use a larger one"
            plain = all(weight.dtype in (torch.float32, torch.float64) for weight in self.passes.weights)
            require(self.gate > limit, "gate", self.gate, right + ("" if plain else ", or a model in float32"))
        return limit

    def _priced(self, batches: Iterable[Any]) -> list[BatchCosts]:
        """Measure each batch. Raises ValueError if there are fewer than two, or if a rescue is of no use."""
        found: list[BatchCosts] = []
        for place, batch in enumerate(batches):
            found.append(self.passes.priced(batch, place))
            _refuse_other_kind(f"run of batch {place + 1}", found[place].kl is None, found[0].kl is None)
            if place == 0 and self.asked:
                self._refuse_worse(found[0])
        require(len(found) > 1, "batches", len(found), "needs two at least, for the spread between them")
        return found

    def _refuse_worse(self, first: BatchCosts) -> None:
        """Raise ValueError if a rescue is slower than another path and costs as many nats on the first batch."""
        low = self.passes.converted.low
        assert isinstance(low, Recipe)
        recipes = {self.spec.low: low, **self.passes.rescues}
        estimate = first.estimate
        if np.isnan(first.numbers[NUMBERS.index(IN_USE[estimate])]).any():
            estimate = "token"
        of_low = first.numbers[NUMBERS.index(IN_USE[estimate])].sum()
        costs = dict(zip(recipes, [of_low, *first.rescued[estimate].sum(axis=1)], strict=True))
        time = {name: gemm_time(recipe, "fprop", self.spec.times) for name, recipe in recipes.items()}
        for name, other in product(self.passes.rescues, recipes):
            if time[name] > time[other] and costs[name] >= costs[other] and costs[name] > 0:
                right = f"is slower than {other} in fprop (times {time[name]:g} and {time[other]:g}) and costs no less "
                right += f"({format_nats(costs[name])} and {format_nats(costs[other])} nats of all GEMMs alone); "
                right += "leave it out"
                require(False, "rescue", name, right)

    # ---- operators alone ----

    def _confirmed(
        self,
        operators: Sequence[PathLinear],
        samples: Mapping[str, np.ndarray],
        batches: Sequence[Any],
        terms: np.ndarray,
    ) -> dict[str, list[np.ndarray]]:
        """Measure alone the `confirm` operators that are highest by each estimate."""
        chosen: dict[str, PathLinear | None] = {}
        for name in IN_USE.values():
            values = weighted_mean(samples[name], terms)
            if np.isfinite(values).all():
                order = np.argsort(-values, kind="stable")[: self.confirm]
                chosen |= {operators[i].operator_name: operators[i] for i in order if values[i] > 0}
        if chosen:  # both estimates may name the same operators
            self.passes.expect_more(len(batches) * (len(chosen) - min(2 * self.confirm, len(self.passes.weights))))
        return self.passes.alone(chosen, batches)

    def _measure_beyond(
        self,
        operators: Sequence[PathLinear],
        alone: Mapping[str, Sequence[np.ndarray]],
        rescued: np.ndarray,
        batches: Sequence[Any],
    ) -> None:
        """Replace the rescue estimates (rescues, U) by measurements for operators with non-finite predictions.

        Second-order estimates are invalid for these operators.
        """
        finite = {name: np.isfinite(np.concatenate(kls)).all() for name, kls in alone.items()}
        lost = {i: one for i, one in enumerate(operators) if not finite.get(one.operator_name, True)}
        for own, rescue in zip(rescued, self.passes.rescues, strict=True):
            if own.any():
                with self.passes.pinned({one.operator_name: {"fprop": rescue} for one in lost.values()}):
                    kls = self.passes.alone({one.operator_name: one for one in lost.values()}, batches)
                for i, one in lost.items():
                    nats, tokens = np.concatenate(kls[one.operator_name]).sum(axis=0)
                    own[i] = nats / tokens if np.isfinite(nats) else np.inf

    # ---- rows ----

    def _rows(
        self,
        operators: Sequence[PathLinear],
        samples: Mapping[str, np.ndarray],
        in_use: np.ndarray,
        alone: Mapping[str, Sequence[np.ndarray]],
        rescued: np.ndarray,
        terms: np.ndarray,
        sequences: np.ndarray,
    ) -> tuple[GemmCost, ...]:
        means = {name: weighted_mean(values, terms).tolist() for name, values in samples.items() if name != "norm"}
        values = weighted_mean(in_use, terms).tolist()
        ends = {
            gemm: bootstrap_intervals(samples[gemm] if gemm != "fprop" else in_use, terms).T.tolist() for gemm in GEMMS
        }
        rows = []
        for i, operator in enumerate(operators):
            name = operator.operator_name
            by_sequence = means["fprop_sequence"][i] if sequences[i] else None
            ends_of = {gemm: tuple(ends[gemm][i]) for gemm in GEMMS}
            row = GemmCost.of_fprop(name, values[i], ends_of["fprop"], means["fprop"][i], by_sequence, alone.get(name))
            others = dict.fromkeys(self._rescues(), 0.0)
            others |= dict(zip(self.passes.rescues, rescued[:, i].tolist(), strict=True))
            rows.append(replace(row, input=means["fprop_input"][i], weight=means["fprop_weight"][i], rescued=others))
            for gemm in GEMMS[1:]:
                rows.append(GemmCost(name, gemm, means[gemm][i], ends_of[gemm], bias=means[f"{gemm}_bias"][i]))
        return tuple(rows)

    def _rows_beside(self, batches: Sequence[Any], drawn: bool, terms: np.ndarray) -> tuple[GemmCost, ...]:
        """Return the rows of the parts outside the plan, and measure the KL of the `confirm` highest alone.

        The value is the estimate by sequence if labels were `drawn` and sequences are known, else by token.
        """
        batch_by_batch, nothing = self.passes.beside_by_batch, (0.0, 0.0)
        names = dict.fromkeys(name for one in batch_by_batch for name in one)  # some may not run in every batch
        samples = {name: np.array([one.get(name, nothing) for one in batch_by_batch]) for name in names}  # (B, 2)
        known = {name: not np.isnan(values).any() for name, values in samples.items()}
        samples = {name: values if known[name] else values[:, [0, 0]] for name, values in samples.items()}
        means = {name: weighted_mean(values, terms).tolist() for name, values in samples.items()}
        highest = sorted(samples, key=lambda name: -max(means[name]))[: self.confirm]
        self.passes.expect_more(len(batches) * (1 + len(highest)) * bool(highest))
        found = self.passes.alone(dict.fromkeys(highest), batches)
        rows = []
        for name, values in samples.items():
            by_token, by_sequence = means[name]
            value, (low, high) = means[name][int(drawn)], bootstrap_intervals(values, terms)[:, int(drawn)].tolist()
            both = by_token, by_sequence if known[name] else None
            rows.append(GemmCost.of_fprop(name, value, (low, high), *both, found.get(name)))
        return tuple(rows)

    def _rows_without_gradient(self, batches: Sequence[Any]) -> tuple[GemmCost, ...]:
        """Measure the KL alone of the first `confirm` operators whose output has no gradient: it needs none."""
        named = {o.operator_name: o for o in self.passes.converted.operators}
        chosen: dict[str, PathLinear | None] = {
            name: own for name, own in named.items() if name in self.passes.without_gradient
        }
        chosen = dict(islice(chosen.items(), self.confirm))
        self.passes.expect_more(len(batches) * (1 + len(chosen)) * bool(chosen))
        found = self.passes.alone(chosen, batches)
        return tuple(GemmCost.of_fprop(name, 0.0, (0.0, 0.0), None, None, kls) for name, kls in found.items())

    # ---- the model ----

    def _why(self, name: str, choices: Collection[str]) -> str:
        """Return the reason why an operator has no price; `choices` are operators without gradient that have a KL."""
        if name in self.passes.without_gradient and (name in choices or name not in self.passes.graphs):
            return "they run without gradient (frozen, or a choice of tokens)"
        if name in self.passes.called - self.passes.without_gradient:
            return "no token reached them or others of their kind"
        if name in self.passes.called:
            return "the loss does not depend on what they give"
        if name in self.passes.read:
            return "they never run (their weights are read without calling them, so no path is in force)"
        return "they never run"

    def _targets(self, names: list[str]) -> list[str] | None:
        """Return patterns that match these operators alone; None if there are none."""
        for targets in ([name.removeprefix("model.") for name in names], names):
            with suppress(ValueError):
                spec = replace(self.spec, targets=targets, exclude=[], pins={})
                if list(operator_shapes(self.passes.model, spec)) == names:
                    return targets
        return None

    def _modules(self) -> dict[str, str]:
        """Return the class of each module that contains linears, converted or not, by its name."""
        contained = (one for one in operators_in(self.passes.model).values() if one.forward is not None)
        found = {one.path: one.class_name for one in contained if one.path}
        return dict(zip(operator_names([*found]), found.values(), strict=True))

    def _rescues(self) -> list[str]:
        """Return the names of the recipes that a plan may keep a GEMM on; with two sides, the other side's."""
        if not (self.against or self.sides):
            return list(self.passes.rescues)
        high = self.spec.recovery
        return [high if high and high != self.spec.low else "the other side's"]

    def _costs(self, operators: Shapes, work: Mapping[str, int], rest: int) -> Times:
        """Return the time of every GEMM on each recipe.

        With two sides, either may be changed, so a GEMM that is alike on both costs its arithmetic.
        """
        if not (self.against or self.sides):
            assert isinstance(self.passes.converted.low, Recipe)
            recipes = [self.passes.converted.low, *self.passes.rescues.values()]
            return times_of(operators, recipes, self.spec.times, work, rest)
        (alike,) = self._rescues()
        found = {
            (name, gemm): {self.spec.low: float(work[name]), alike: 2.0 * work[name]}
            for name in operators
            for gemm in GEMMS
        }
        return found | ({(REST, gemm): {self.spec.low: float(rest)} for gemm in GEMMS} if rest else {})

    # ---- held-out batches ----

    def _held_out(self, found: Diagnosis, batches: Sequence[Any], before: int) -> Diagnosis:
        """Add the cost of everything low, the plan and the guesses on held-out batches, numbered from `before`."""
        choices: dict[str, list[Choice]] = {"all": [Choice({}, 0.0, 0.0, 0.0)]}
        guesses = {} if found.pins else found.alternatives
        curve: list[Choice] = []
        if not found.pins:
            plan = found.choice()
            choices |= {"plan": [plan], **guesses}
            others = {one.extra: one for one in map(found.choice, CURVE) if one.pins and one.pins != plan.pins}
            curve = [others[extra] for extra in sorted(others)]
            choices |= {f"{one.extra}": [one] for one in curve}
        plans = {repr(one.pins): one.pins for several in choices.values() for one in several}  # some are alike
        self.passes.expect(len(batches) * (1 + len(plans)) + 1)
        high: list[float] = []
        terms: list[int] = []
        low: dict[str, list[float]] = {key: [] for key in plans}
        kls: dict[str, list[Any]] = {key: [] for key in plans}
        for done, batch in enumerate(batches):
            place = before + done
            whole = self.passes.reference(batch, place)
            high.append(whole.loss_value)
            terms.append(max(1, whole.terms))
            whole.refuse_not_finite(f"run of held-out batch {done + 1}", self.passes.model)
            for key, pins in plans.items():
                with self.passes.pinned(pins):
                    own = self.passes.forward(batch, place, recovering=False)
                low[key].append(own.loss_value)
                kls[key].append(whole.kl_to(own))
            _refuse_other_kind(f"run of held-out batch {done + 1}", whole.logits is None, found.measured.kl is None)

        def mean(name: str) -> tuple[list[Any], list[float]]:
            """Return (KLs by batch, losses by batch), averaged over the draws of a guess."""
            keys = [repr(one.pins) for one in choices[name]]
            each = zip(*(kls[key] for key in keys), strict=True)
            kl = [None if draws[0] is None else np.mean(draws, axis=0) for draws in each]
            return kl, np.mean([low[key] for key in keys], axis=0).tolist()

        left = {name: mean(name) for name in choices}
        named = {name: PathCost.of(kl, high, losses, terms) for name, (kl, losses) in left.items()}
        return replace(
            found,
            held_out=named["all"],
            left={name: named[name] for name in choices if name in ("plan", *guesses)},
            apart={name: paired_difference(left[name], left["plan"], terms) for name in guesses},
            curve=tuple((one.extra, named[f"{one.extra}"]) for one in curve),
        )


def _refuse_other_kind(where: str, loss_alone: bool, first_alone: bool) -> None:
    """Raise ValueError unless a batch and the first one both have logits, or both a loss alone."""
    right = f"returns {'no ' * loss_alone}logits, unlike that of batch 1; have it return the same kind for all batches"
    require(loss_alone == first_alone, where, "...", right)
