"""Measure with `gnmr.diagnose` what low precision costs a model, and which recipe each GEMM should run on.

The cost is a KL divergence per token. It compares the model with every operator on the recovery path to the same model
with some operators on the low path. On each batch, one forward and backward pass gives two estimates of the KL of every
operator alone (`gnmr.measure.price`). Its labels are drawn by the model itself. The estimates cover the low recipe and
the recipes on which a plan may keep a GEMM. Another forward pass measures the KL of all operators together.

The KL of the operators that are highest by either estimate is then measured, with one forward pass per batch each. The
plan is solved by every score that these passes give. The first half of the held-out batches chooses among the plans.
The other half gives the KL that remains under the chosen plan and under other choices: plans with only one other
recipe, and the usual guesses at the same cost. Nothing is trained, and the model is restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from gnmr.compiler import compiled_code_eagerly
from gnmr.conversion import ConvertedModel, PathLinear, convert
from gnmr.conversion.adapters import operators_in
from gnmr.conversion.converting import operator_shapes
from gnmr.conversion.reads import is_sharded
from gnmr.conversion.unit_names import of_any_expert, operator_names
from gnmr.formats import Recipe
from gnmr.formats.recipes import Cast
from gnmr.measure.absent_weights import is_offloaded, refuse_other_batches, refuse_tensor_parallel, settle
from gnmr.measure.blocks import Variant
from gnmr.measure.coverage import Coverage
from gnmr.measure.forward_passes import BatchCosts, ForwardPasses, Progress
from gnmr.measure.gemm_costs import (
    GemmCost,
    PathCost,
    bootstrap_intervals,
    paired_difference,
    paired_mean,
    weighted_mean,
)
from gnmr.measure.guards import as_it_was, refuse_without_gradients
from gnmr.measure.model_output import Output
from gnmr.measure.model_passes import ESTIMATES, PASSES_PER_BATCH, ModelPasses
from gnmr.measure.stored_weights import weights_in
from gnmr.measure.unplanned import UnplannedParts, kv_cast_of
from gnmr.names import BESIDE, GEMMS, KV_CAST, RECIPES
from gnmr.options import one_of, require, whole_number
from gnmr.patterns import listed
from gnmr.plan.checkpoint_names import linears_of
from gnmr.plan.compared_paths import ComparedPaths, Side, compared_paths
from gnmr.plan.diagnosis import CURVE, RANDOM_DRAWS, RULES, UNREACHED, Diagnosis
from gnmr.plan.knapsack import GUESSES, Choice, Shapes, Times, budget_of, check_fused, groups_of, times_of
from gnmr.plan.pin_plan import PinPlan

ALONE_BATCHES = 2
"""Number of batches on which the KL of single operators is measured."""


def models_held_out(rescues: int) -> int:
    """Return the number of models, at most, whose outputs on a held-out batch are measured.

    Args:
        rescues: the number of recipes on which a plan may keep a GEMM.
    """
    # Exact, everything low, the plan, the plan by price; a plan on each rescue alone; guesses and rules; other budgets.
    return 4 + rescues + len(GUESSES) - 1 + RANDOM_DRAWS + len(RULES) + len(CURVE)


def diagnose(
    model: nn.Module,
    run: Callable[[Any], Any],
    batches: Iterable[Any],
    *,
    recipe: str | Recipe | Side = "nvfp4",
    recovery: str | Recipe = "bf16",
    rescue: str | Recipe | Sequence[str | Recipe] | None = None,
    targets: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    budget: float | str = 0.10,
    times: Mapping[str, float] | str | PathLike[str] | None = None,
    fused: Sequence[str] = (),
    held_out: Iterable[Any] = (),
    plan: PinPlan | str | PathLike[str] | None = None,
    against: str | Recipe | Side | None = None,
    gate: float | None = None,
    labels: str = "model",
    measure: str = "estimate",
    confirm: int = 20,
    include: Sequence[str] = (),
    kv_cast: str = KV_CAST,
    terms: Callable[[Any], int] | None = None,
    weights: Callable[[str], Tensor] | str | PathLike[str] | None = None,
    state: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure what every GEMM of the model's linears costs under `recipe`.

    Args:
        model: a model with weights, on its device and in its dtype. In float32, rounding does not hide small KLs. It
            runs in evaluation mode. Weights, gradients, modes and random numbers are restored to the bit, also after an
            error.
        run: runs `model` on a batch. It returns one of the following: the logits (..., V); the logits and the targets
            (...), in which -100 excludes a position; an output of transformers with `logits` and perhaps `loss`, of
            which the positions count that have a gradient of this loss, or without one all of them, padding too; or,
            for a model without logits, the mean loss in nats, one number with a gradient. In the last case no KL is
            measured.
        batches: at least two; more batches give narrower intervals.
        recipe: the low path, where `int8` stands for `sim_int8`, and so on. Several recipes are given as {pattern of
            operators: recipe}: "*" is the recipe of all others, and the last pattern that matches counts. Casts are
            simulated on any hardware.
        recovery: the path of higher precision, against which all errors are measured.
        rescue: recipes on which the plan may keep a GEMM. None: the recovery recipe, and also mxfp8 if recovery is
            bf16, fprop of the low path reads at most 4 bits, and the model's widths allow it.
        targets: patterns of the linears, as in `PathSpec`. None: those of the blocks. Output heads, routers and linears
            that are tied to an embedding stay in 16 bits.
        exclude: patterns of linears to leave out.
        budget: extra time that the plan may take, as a share of the time of the GEMMs that it may move (fprop of its
            operators) on the low path: 0.1 or "+10%". Between two sides, it is the share of their arithmetic that may
            be in one recipe on both.
        times: relative times of GEMMs by the bits of their widest operand, or by recipe, as `PathSpec.times`; or a file
            of times that were measured by shape (`gnmr.plan.gemm_times`).
        fused: kinds of operators that share one recipe because a library runs them as one: qkv, gate_up, experts (each
            projection of all experts), moe (all of their projections).
        held_out: other batches. The first half of them chooses among the plans of several scores; on the other half the
            KL of the plan and of the usual guesses is measured. A single batch is for the latter.
        plan: a plan whose pins, recipes and targets are in force; the cost that remains under it is measured.
        against: the recipe or recipes of the trainer, if two sides should agree; `recipe` is then the rollout's. It
            replaces `recovery`, and needs logits.
        gate: KL per token by which two sides may differ. The plan is then the cheapest one expected to keep it.
        labels: labels of the backward pass. "model" draws them from the model's predictions; "data" uses the targets or
            the loss.
        measure: "estimate" prices every GEMM by a backward pass, and measures the `confirm` operators that are highest
            by either estimate. "all" measures the KL of every fprop alone, on the low recipe and on each rescue, by
            forward passes; there is then no backward pass, and no score of dgrad and wgrad. It is the choice if
            memory is short: a model of blocks is run block by block.
        confirm: number of operators, highest by either estimate, whose KL is measured.
        include: parts to measure alone and outside the plan: head, router, kv (`gnmr.measure.unplanned`). With kv and
            held-out batches, what all keys and values cost is measured too, alone and under the plan.
        kv_cast: cast of the cache of keys and values: a number format and the group that shares a scale.
        terms: returns the number of terms in the mean loss of a batch, if `run` returns a loss alone. None: it is
            counted in the gradient of the linear that is called last, where positions without a target have none.
        weights: returns the tensor of a parameter or buffer by its name. It is for a model whose blocks have their
            parameters on the meta device; they are then read one after the other. `run` gives logits, or these and
            targets. A checkpoint's folder is for a model that has none of its weights.
        state: with measure="all", a folder in which the measurement keeps its state, and goes on from there if it is
            interrupted. What is there of other recipes, batches or weights is not used. A model that is run whole keeps
            the KLs of single operators there, and not those of plans. Not for a model that is sharded over processes.
        progress: see `Progress`.

    Raises:
        ValueError: an argument is invalid; the message is one line, and the model is restored.
    """
    # Refuse invalid arguments before anything is converted.
    budget = budget_of(budget)
    whole_number(0, confirm=confirm)
    one_of(("model", "data"), labels=labels)
    one_of(("estimate", "all"), measure=measure)
    fused, include = listed("fused", fused), listed("include", include)
    for kind in include:
        one_of(BESIDE, include=kind)
    cast = kv_cast_of(kv_cast)
    if measure == "all":
        require(not include, "include", ",".join(include), "is estimated; leave it out, or measure=all")
    else:
        require(state is None, "state", f"{state}", "is for measure='all'")
    require(state is None or isinstance(state, str | PathLike), "state", state, "must be a folder")
    readable = weights is None or callable(weights) or isinstance(weights, str | PathLike)
    require(readable, "weights", weights, "must be a checkpoint's folder, or a function from a name to its tensor")
    _check_model(model, stored=weights is not None)
    paths = compared_paths(
        recipe=recipe,
        recovery=recovery,
        against=against,
        plan=plan,
        rescue=rescue,
        gate=gate,
        targets=targets,
        exclude=exclude,
        times=times,
        fused=fused,
    )
    paths.check(model)
    held_out = list(held_out)
    if any(map(is_sharded, model.parameters())):
        require(state is None, "state", f"{state}", "the processes of a sharded model cannot share one")
        # Each process measures everything, and gathers weights with others.
        batches = list(batches)
        refuse_other_batches(model, batches)
        refuse_other_batches(model, held_out, "held_out")
    stored = nullcontext(weights) if weights is None or callable(weights) else weights_in(weights, model)
    with (
        stored as read,
        as_it_was(model),
        # Passes that are compared, and passes in which products are counted, must run the same kernels. The stance is
        # in force from the call on, so nothing may fail between the call and this block.
        compiled_code_eagerly(),
        _converted(model, paths, include, cast) as (converted, unplanned),
    ):
        sides = paths.give_recipes(converted)
        check_fused([operator.operator_name for operator in converted.operators], fused)
        common: dict[str, Any] = {
            "converted": converted,
            "model": model,
            "run": run,
            "progress": progress or (lambda _done, _total: None),
            "rescues": paths.rescues_of(converted),
        }
        passes: ForwardPasses
        if measure == "all":
            passes = ForwardPasses(**common)
            batches = [*batches]
            require(batches, "batches", 0, "needs one at least")
            passes.follow_blocks(read, batches[0])
        else:
            passes = ModelPasses(**common, unplanned=unplanned, labels=labels, terms=terms, with_recipes=sides)
            # A graph of the whole model would keep all weights in memory.
            if weights is not None or any(map(is_offloaded, model.modules())):
                batches = [*batches]
                require(batches, "batches", 0, "needs two at least, for the spread between them")
                passes.follow_blocks(read, batches[0])
        measurement = _Measurement(
            passes=passes,
            paths=paths,
            sides=sides,
            gate=gate,
            fused=fused,
            budget=budget,
            confirm=confirm,
            state=None if state is None else Path(state),
        )
        return measurement.diagnosis(batches, held_out)


def _check_model(model: nn.Module, stored: bool) -> None:
    """Raise ValueError if this is no model whose linears can be measured; `stored` weights may be missing."""
    require(isinstance(model, nn.Module), "model", type(model).__name__, "must be an nn.Module")
    right = "has no linear operator, so no GEMM that a recipe would cast (others: gnmr.conversion.adapters.register)"
    require(operators_in(model), "model", type(model).__name__, right)
    if not stored:
        refuse_without_gradients(model)
    refuse_tensor_parallel(model)


@contextmanager
def _converted(
    model: nn.Module, paths: ComparedPaths, include: Sequence[str], kv_cast: Cast
) -> Iterator[tuple[ConvertedModel, UnplannedParts]]:
    """Convert the model, and the parts to `include`; restore both afterwards."""
    with ExitStack() as stack:
        with warnings.catch_warnings():
            if paths.two_sides:  # two sides may be alike, and either may be the coarser
                warnings.simplefilter("ignore")
            converted = convert(model, paths.spec)
        stack.callback(converted.restore)
        settle(converted, model)
        assert isinstance(converted.low, Recipe)
        unplanned = UnplannedParts(model, include, converted.low, kv_cast)
        stack.callback(unplanned.restore)
        yield converted, unplanned


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """What the batches of a diagnosis say. Arrays have B batches and U operators that ran."""

    costs: list[BatchCosts]
    operators: list[PathLinear]
    """Operators that ran."""
    batches_run: np.ndarray
    """Number of batches in which each operator of the model ran."""
    terms: np.ndarray
    """(B,) tokens that count."""
    rows: tuple[GemmCost, ...]
    unplanned: tuple[GemmCost, ...] = ()
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    limit: float | None = None
    limit_dtype: str = ""
    choices: Collection[str] = ()
    """Operators without a gradient whose KL alone is not 0."""
    first_batch: Any = None


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    """The passes of a diagnosis, and what it is about. Arrays have B batches, U operators that ran and R rescues."""

    passes: ForwardPasses
    paths: ComparedPaths
    sides: Mapping[str, tuple[str, str]]
    """As in `Diagnosis`, and so are `gate`, `fused` and `budget`."""
    gate: float | None
    fused: Sequence[str]
    budget: float
    confirm: int
    """Number of operators, highest by either estimate, whose KL is measured."""
    state: Path | None
    """Folder for the state of a long measurement."""

    def diagnosis(self, batches: Iterable[Any], held_out: Sequence[Any]) -> Diagnosis:
        """Measure everything, and return the diagnosis."""
        passes, spec = self.passes, self.paths.spec
        if isinstance(passes, ModelPasses):
            findings = self._estimated(passes, batches, len(held_out))
        else:
            findings = self._measured_alone([*batches])
        costs, operators, terms = findings.costs, findings.operators, findings.terms
        # What was measured on the batches of the prices.
        diagnosis = Diagnosis(
            recipe=spec.low,
            recovery=spec.recovery or "bf16",
            rows=findings.rows,
            unplanned=findings.unplanned,
            measured=PathCost.of(
                [batch.kl for batch in costs], [batch.high for batch in costs], [batch.low for batch in costs], terms
            ),
            scores=findings.scores,
            budget=self.budget,
            gate=self.gate,
            limit=findings.limit,
            limit_dtype=findings.limit_dtype,
            labels=costs[0].labels,
            estimate=costs[0].estimate,
            pins={
                o.operator_name: pins
                for o in operators
                if (pins := self.paths.pins.get(o.operator_name.removeprefix("model.")))
            },
            rescues=tuple(self._rescues()),
            times=dict(spec.times),
            fused=self.fused,
            recipes={
                name: recipe.words() if isinstance(recipe, Recipe) else recipe
                for name, recipe in spec.recipes.items()
                if name not in RECIPES
            },
            linears=linears_of(passes.model),
            modules=self._modules(),
            against=self.paths.against,
            sides=self.sides,
            **self._covered(costs, operators, findings.batches_run, findings.choices),
        )
        # The plan is chosen by these prices, so the held-out batches come after them.
        if held_out:
            diagnosis = self._with_held_out(diagnosis, held_out, len(costs))
            if isinstance(passes, ModelPasses) and passes.kv_cast is not None:
                assert diagnosis.held_out is not None
                # The batches that the plan was chosen on say nothing of what it leaves.
                chosen_on = len(held_out) - diagnosis.held_out.batches
                diagnosis = self._with_caches(passes, diagnosis, held_out[chosen_on:], len(costs) + chosen_on)
        # Batch 1 has to give its first output again; a model that keeps state would have mixed up all passes.
        if isinstance(passes, ModelPasses):
            passes.refuse_state(findings.first_batch)
        return diagnosis

    def _estimated(self, passes: ModelPasses, batches: Iterable[Any], held_out: int) -> _Findings:
        """Price every GEMM, and measure the operators that are highest alone."""
        passes.expect(self._expected(batches, held_out))
        batches = iter(batches)
        # Single operators are measured on the first batches, which are kept for that; the others pass by once.
        first_batches = list(islice(batches, ALONE_BATCHES))
        limit = self._limit(passes, first_batches[0]) if first_batches else None
        costs = self._measured_batches(passes, chain(first_batches, batches))
        # The operators that ran, and the numbers of each batch: `samples` has (B, U) by name.
        batches_run, operators = self._operators_run(costs)
        ran = batches_run > 0
        terms = np.array([batch.terms for batch in costs], dtype=float)
        by_batch = np.stack([np.stack([*batch.numbers.values()]) for batch in costs], axis=1)
        samples = dict(zip(costs[0].numbers, by_batch[..., ran], strict=True))
        # The estimate in use: by sequence if all batches have it, else by token.
        by_sequence = ~np.isnan(samples["fprop_sequence"]).any(axis=0)
        in_use = by_sequence & (costs[0].estimate == "sequence")
        nats = np.where(in_use, samples["fprop_sequence"], samples["fprop"])
        samples["fprop_sequence"] = np.where(by_sequence, samples["fprop_sequence"], samples["fprop"])
        rescued_by = {
            name: weighted_mean([batch.rescued[name] for batch in costs], terms)[..., ran] for name in ESTIMATES
        }
        rescued = np.where(in_use, rescued_by["sequence"], rescued_by["token"])  # (R, U)
        # The KL of single operators.
        has_kl = costs[0].kl is not None
        alone = self._confirmed(passes, operators, samples, first_batches, terms) if has_kl else {}
        self._replace_infinite(passes, rescued, operators, alone, first_batches)
        unplanned = self._unplanned_rows(passes, costs, first_batches, terms)
        without_gradient = self._rows_without_gradient(passes, first_batches) if has_kl else ()
        # Norms on the data's labels are measured on the first batches only.
        normed = ~np.isnan(samples["norm"]).any(axis=1)
        scores = {
            "mse": weighted_mean(samples["mse"], terms),
            "gradient norm": weighted_mean(samples["norm"][normed], terms[normed]),
            "elements": weighted_mean(samples["fprop_elements"], terms),
        }
        return _Findings(
            costs=costs,
            operators=operators,
            batches_run=batches_run,
            terms=terms,
            rows=self._rows(operators, samples, nats, by_sequence, alone, rescued, terms),
            unplanned=(*unplanned, *without_gradient),
            scores={
                key: {o.operator_name: score for o, score in zip(operators, values.tolist(), strict=True)}
                for key, values in scores.items()
            },
            limit=limit,
            limit_dtype=passes.rounded_in,
            choices={row.operator for row in without_gradient if row.value},
            first_batch=first_batches[0],
        )

    def _measured_alone(self, batches: Sequence[Any]) -> _Findings:
        """Measure the KL of every operator alone."""
        passes = self.passes
        costs, alone = passes.measure_alone(batches, self._state_file("batches"))
        batches_run, operators = self._operators_run(costs)
        ran = batches_run > 0
        terms = np.array([batch.terms for batch in costs], dtype=float)
        rescued = weighted_mean([batch.rescued["measured"] for batch in costs], terms)[..., ran]  # (R, U)
        rows = []
        for column, operator in enumerate(operators):
            name = operator.operator_name
            row = GemmCost.of_fprop(name, 0.0, (0.0, 0.0), None, None, alone[name])
            rows.append(replace(row, rescued=self._on_rescues(rescued[:, column])))
        return _Findings(
            costs=costs,
            operators=operators,
            batches_run=batches_run,
            terms=terms,
            rows=tuple(rows),
        )

    def _state_file(self, name: str) -> Path | None:
        """Return a file for the state of a part of the measurement, if there is a folder for it."""
        if self.state is None:
            return None
        with suppress(OSError):  # whoever writes the file warns, and goes on without it
            self.state.mkdir(parents=True, exist_ok=True)
        return self.state / f"{name}.safetensors"

    # ---- the batches of the prices ----

    def _expected(self, batches: Iterable[Any], held_out: int) -> int | None:
        """Return an upper bound on the number of forward passes, those of single operators aside; None: unknown."""
        if not isinstance(batches, Sized):
            return None
        return PASSES_PER_BATCH * len(batches) + 4 + held_out * models_held_out(len(self.passes.rescues))

    def _limit(self, passes: ModelPasses, batch: Any) -> float | None:
        """Return the KL from rounding. Raises ValueError if it is unknown or above the gate, and two sides need it."""
        limit = passes.rounding(batch)
        if self.paths.against:
            key, value = ("against", self.paths.spec.recovery) if self.gate is None else ("gate", self.gate)
            require(limit is not None, key, value, "is about a KL, and `run` gives a loss alone; have it give logits")
        if self.gate is not None:
            assert limit is not None
            right = f"is below what rounding of this model makes, {limit:.2g} nats; use a larger one"
            if not self.passes.in_floats:
                right += ", or a model in float32"
            require(self.gate > limit, "gate", self.gate, right)
        return limit

    def _measured_batches(self, passes: ModelPasses, batches: Iterable[Any]) -> list[BatchCosts]:
        """Measure each batch. Raises ValueError if there are fewer than two."""
        costs: list[BatchCosts] = []
        for place, batch in enumerate(batches):
            costs.append(passes.measure(batch, place))
            _refuse_other_kind(f"run of batch {place + 1}", costs[place].kl is None, costs[0].kl is None)
        require(len(costs) > 1, "batches", len(costs), "needs two at least, for the spread between them")
        return costs

    def _operators_run(self, costs: Sequence[BatchCosts]) -> tuple[np.ndarray, list[PathLinear]]:
        """Return the number of batches in which each operator of the model ran, and the operators that ran at all.

        Raises ValueError if none did.
        """
        batches_run = (np.array([batch.rows for batch in costs]) > 0).sum(axis=0)
        operators = [o for o, number in zip(self.passes.converted.operators, batches_run, strict=True) if number]
        right = "its loss does not run the linears of this model"
        if self.passes.read:
            right = (
                "its loss reads the weights of the linears without calling them (F.linear, a fused kernel, a forward "
                "that was replaced or wrapped), so no path is in force; call the modules"
            )
        require(operators, "run", "...", right)
        return batches_run, operators

    # ---- operators alone ----

    def _confirmed(
        self,
        passes: ModelPasses,
        operators: Sequence[PathLinear],
        samples: Mapping[str, np.ndarray],
        batches: Sequence[Any],
        terms: np.ndarray,
    ) -> dict[str, list[np.ndarray]]:
        """Measure alone the `confirm` operators that are highest by each estimate."""
        chosen: dict[str, PathLinear | None] = {}
        for name in ESTIMATES.values():
            values = weighted_mean(samples[name], terms)
            # An estimate that is not finite everywhere gives no order.
            if np.isfinite(values).all():
                order = np.argsort(-values, kind="stable")[: self.confirm]
                chosen |= {operators[i].operator_name: operators[i] for i in order if values[i] > 0}
        return passes.alone(chosen, batches)

    def _replace_infinite(
        self,
        passes: ModelPasses,
        rescued: np.ndarray,
        operators: Sequence[PathLinear],
        alone: Mapping[str, Sequence[np.ndarray]],
        batches: Sequence[Any],
    ) -> None:
        """Measure the nats on rescues (R, U) of the operators that alone make the predictions NaN or Inf.

        Second-order estimates are invalid for these operators.
        """
        infinite: dict[int, PathLinear] = {}
        for column, operator in enumerate(operators):
            kls = alone.get(operator.operator_name)
            if kls is not None and not np.isfinite(np.concatenate(kls)).all():
                infinite[column] = operator
        # A rescue with 0 nats everywhere is as exact as the recovery recipe.
        for nats, rescue in zip(rescued, passes.rescues, strict=True):
            if nats.any():
                with passes.pinned({o.operator_name: {"fprop": rescue} for o in infinite.values()}):
                    kls_of = passes.alone({o.operator_name: o for o in infinite.values()}, batches)
                for column, operator in infinite.items():
                    kl, tokens = np.concatenate(kls_of[operator.operator_name]).sum(axis=0)
                    nats[column] = kl / tokens if np.isfinite(kl) else np.inf

    # ---- rows ----

    def _rows(
        self,
        operators: Sequence[PathLinear],
        samples: Mapping[str, np.ndarray],
        nats: np.ndarray,
        by_sequence: np.ndarray,
        alone: Mapping[str, Sequence[np.ndarray]],
        rescued: np.ndarray,
        terms: np.ndarray,
    ) -> tuple[GemmCost, ...]:
        """Return the rows of all GEMMs; `nats` (B, U) are those of the estimate in use."""
        means = {name: weighted_mean(values, terms).tolist() for name, values in samples.items() if name != "norm"}
        values = weighted_mean(nats, terms).tolist()
        intervals = {
            gemm: bootstrap_intervals(nats if gemm == "fprop" else samples[gemm], terms).T.tolist() for gemm in GEMMS
        }
        rows = []
        for i, operator in enumerate(operators):
            name = operator.operator_name
            sequence = means["fprop_sequence"][i] if by_sequence[i] else None
            interval = tuple(intervals["fprop"][i])
            row = GemmCost.of_fprop(name, values[i], interval, means["fprop"][i], sequence, alone.get(name))
            input, weight = means["fprop_input"][i], means["fprop_weight"][i]
            rows.append(replace(row, input=input, weight=weight, rescued=self._on_rescues(rescued[:, i])))
            # dgrad and wgrad have relative squared errors of gradients, and no KL.
            for gemm in GEMMS[1:]:
                interval = tuple(intervals[gemm][i])
                rows.append(GemmCost(name, gemm, means[gemm][i], interval, bias=means[f"{gemm}_bias"][i]))
        return tuple(rows)

    def _unplanned_rows(
        self, passes: ModelPasses, costs: Sequence[BatchCosts], batches: Sequence[Any], terms: np.ndarray
    ) -> tuple[GemmCost, ...]:
        """Return the rows of the parts outside the plan, and measure the KL of the `confirm` highest alone.

        The value is the estimate by sequence if labels were drawn and sequences are known, else by token.
        """
        column = 1 if costs[0].labels == "model" else 0
        samples: dict[str, np.ndarray] = {}  # (B, 2), by token and by sequence
        has_sequences: dict[str, bool] = {}
        for name in dict.fromkeys(name for batch in costs for name in batch.unplanned):  # not every one runs always
            values = np.array([batch.unplanned.get(name, (0.0, 0.0)) for batch in costs])
            has_sequences[name] = not np.isnan(values).any()
            # Without known sequences, the estimate by token takes the place of the other.
            samples[name] = values if has_sequences[name] else values[:, [0, 0]]
        means = {name: weighted_mean(values, terms).tolist() for name, values in samples.items()}
        highest = sorted(samples, key=lambda name: -max(means[name]))[: self.confirm]
        alone = passes.alone(dict.fromkeys(highest), batches)
        rows = []
        for name, values in samples.items():
            by_token, by_sequence = means[name]
            low, high = bootstrap_intervals(values, terms)[:, column].tolist()
            sequence = by_sequence if has_sequences[name] else None
            rows.append(GemmCost.of_fprop(name, means[name][column], (low, high), by_token, sequence, alone.get(name)))
        return tuple(rows)

    def _rows_without_gradient(self, passes: ModelPasses, batches: Sequence[Any]) -> tuple[GemmCost, ...]:
        """Measure the KL alone of the first `confirm` operators whose output has no gradient: it needs none."""
        chosen: dict[str, PathLinear | None] = {
            o.operator_name: o for o in passes.converted.operators if o.operator_name in passes.without_gradient
        }
        alone = passes.alone(dict(islice(chosen.items(), self.confirm)), batches)
        return tuple(GemmCost.of_fprop(name, 0.0, (0.0, 0.0), None, None, kls) for name, kls in alone.items())

    # ---- what the plan is about ----

    def _covered(
        self,
        costs: Sequence[BatchCosts],
        operators: Sequence[PathLinear],
        batches_run: np.ndarray,
        choices: Collection[str],
    ) -> dict[str, Any]:
        """Return the fields of `Diagnosis` that say which operators a plan is about, and which work they do.

        Args:
            costs: measurements of all batches.
            operators: operators that ran.
            batches_run: number of batches in which each operator of the model ran.
            choices: operators without a gradient whose KL alone is not 0.
        """
        passes = self.passes
        shapes = {o.operator_name: (o.in_features, o.out_features) for o in passes.converted.operators}
        planned = {o.operator_name: shapes[o.operator_name] for o in operators}
        rows = dict(zip(shapes, np.array([batch.rows for batch in costs]).sum(axis=0).tolist(), strict=True))
        # Multiplications of the forward passes: rows times inputs times outputs.
        work = {name: rows[name] * a * b for name, (a, b) in planned.items()}
        coverage = Coverage.sum_of(batch.coverage for batch in costs)
        called = coverage.called()
        # The others stay in 16 bits, and count in the time of the whole model alone.
        rest = coverage.total - sum(called.get(name, 0) for name in planned)
        # Experts that no token reached have no price, and go with others of their kind.
        kinds = {of_any_expert(name) for name in planned}
        used = {*planned} | (passes.read - passes.called)
        unreached = {name for name in shapes if name not in used and of_any_expert(name) in kinds}
        idle = {
            name: UNREACHED if name in unreached else self._why_idle(name, choices)
            for name in shapes
            if name not in planned
        }
        # If others are idle, the plan names its operators.
        in_plan = [name for name in shapes if name in planned or name in unreached]
        targets = self._targets(in_plan) if {*idle} - unreached else None
        return {
            "operators": planned,
            "costs": self._times(planned, work),
            "work": work,
            "rest": rest,
            "coverage": coverage,
            "groups": groups_of(planned, self.fused),
            "targets": targets or self.paths.spec.targets,
            "exclude": [] if targets else self.paths.spec.exclude,
            "idle": idle,
            "matched": {name: shapes[name] for name in idle if name in unreached or not targets},
            "partly": {name: int(n) for name, n in zip(shapes, batches_run, strict=True) if 0 < n < len(costs)},
        }

    def _why_idle(self, name: str, choices: Collection[str]) -> str:
        """Return the reason why an operator has no price; `choices` are operators without gradient that have a KL."""
        passes = self.passes
        if name in passes.without_gradient and (name in choices or name not in passes.graphs):
            return "they run without gradient (frozen, or a choice of tokens)"
        if name in passes.called - passes.without_gradient:
            return "no token reached them or others of their kind"
        if name in passes.called:
            return "the loss does not depend on what they give"
        if name in passes.read:
            return "they never run (their weights are read without calling them, so no path is in force)"
        return "they never run"

    def _targets(self, names: list[str]) -> list[str] | None:
        """Return patterns that match these operators alone; None if there are none."""
        # Names without the outer prefix fit a model with and without its head, so they come first.
        for targets in ([name.removeprefix("model.") for name in names], names):
            with suppress(ValueError):
                spec = replace(self.paths.spec, targets=targets, exclude=[], pins={})
                if list(operator_shapes(self.passes.model, spec)) == names:
                    return targets
        return None

    def _modules(self) -> dict[str, str]:
        """Return the class of each module that contains linears, converted or not, by its name."""
        containing = (module for module in operators_in(self.passes.model).values() if module.forward is not None)
        classes = {module.path: module.class_name for module in containing if module.path}
        return dict(zip(operator_names([*classes]), classes.values(), strict=True))

    def _on_rescues(self, nats: np.ndarray) -> dict[str, float]:
        """Return the nats (R,) of one fprop by recipe: 0 on the other side's, where both sides are then alike."""
        return dict.fromkeys(self._rescues(), 0.0) | dict(zip(self.passes.rescues, nats.tolist(), strict=True))

    def _rescues(self) -> list[str]:
        """Return the names of the recipes that a plan may keep a GEMM on; with two sides, the other side's."""
        if not self.paths.two_sides:
            return list(self.passes.rescues)
        high = self.paths.spec.recovery
        return [high if high and high != self.paths.spec.low else "the other side's"]

    def _times(self, operators: Shapes, work: Mapping[str, int]) -> Times:
        """Return the time of every GEMM on each recipe.

        With two sides, either may be changed, so a GEMM that is alike on both costs its arithmetic.
        """
        low = self.passes.converted.low
        assert isinstance(low, Recipe)
        if not self.paths.two_sides:
            return times_of(operators, [low, *self.passes.rescues.values()], self.paths.spec.times, work)
        # A GEMM that is alike takes its arithmetic as extra time, so the budget is a share of the arithmetic.
        (alike,), name_of_low = self._rescues(), self.paths.spec.low
        return {
            (name, gemm): {name_of_low: float(work[name]), alike: 2.0 * work[name]}
            for name in operators
            for gemm in GEMMS
        }

    # ---- held-out batches ----

    def _with_held_out(self, diagnosis: Diagnosis, batches: Sequence[Any], before: int) -> Diagnosis:
        """Choose the plan on the first half of the held-out batches, and measure what it leaves on the other half.

        The batches are numbered from `before`. The half that a plan was chosen on says nothing of what it leaves,
        because the best of several choices is partly the luckiest. So without a choice all batches are for the latter.
        """
        number = len(batches) // 2
        candidates = diagnosis.candidates() if number and diagnosis.chooses else {}
        if len({repr(choice.pins) for choice in candidates.values()}) > 1:
            diagnosis = self._with_selection(diagnosis, candidates, batches[:number], before)
            batches, before = batches[number:], before + number
        return self._with_remaining(diagnosis, batches, before)

    def _with_selection(
        self, diagnosis: Diagnosis, candidates: Mapping[str, Choice], batches: Sequence[Any], before: int
    ) -> Diagnosis:
        """Measure the candidates, and choose the one that leaves least.

        Another score replaces the price only if its plan leaves less by more than the paired standard error, or if the
        price's plan leaves predictions that are not finite.
        """
        left = self._left(
            diagnosis, {name: [choice] for name, choice in candidates.items()}, batches, before, "selection"
        )
        costs = {name: left.cost(name) for name in candidates}
        differences = {
            name: paired_mean(left.by_batch[name], left.by_batch["price"], left.terms) for name in candidates
        }
        price_is_finite = costs["price"].finite
        better = [
            name
            for name, (mean, error, _) in differences.items()
            if costs[name].finite and (mean < -error or not price_is_finite)
        ]
        return replace(
            diagnosis,
            selected=min(better, key=lambda name: costs[name].nats, default="price"),
            selection={name: (costs[name], *differences[name][:2]) for name in candidates},
        )

    def _with_remaining(self, diagnosis: Diagnosis, batches: Sequence[Any], before: int) -> Diagnosis:
        """Add the cost of everything low, of the plan, of plans of other budgets, and of the guesses."""
        # The choices by name; a guess may have several draws, and some choices are alike.
        choices: dict[str, list[Choice]] = {"all": [Choice({}, 0.0, 0.0, 0.0)]}
        curve: list[Choice] = []
        # Under the pins of a plan there is nothing to choose.
        guesses = {} if diagnosis.pins else diagnosis.alternatives
        if not diagnosis.pins:
            plan = diagnosis.choice()
            further = (choice for choice in map(diagnosis.choice, CURVE) if choice.pins and choice.pins != plan.pins)
            # Budgets that lead to the same extra time are one point of the curve.
            by_extra = {choice.extra: choice for choice in further}
            curve = [by_extra[extra] for extra in sorted(by_extra)]
            choices |= {"plan": [plan], **guesses}
            choices |= {f"{choice.extra}": [choice] for choice in curve}
        left = self._left(diagnosis, choices, batches, before, "held_out", of_tokens=("all", "plan"))
        return replace(
            diagnosis,
            held_out=left.cost("all"),
            remaining={name: left.cost(name) for name in choices if name in ("plan", *guesses)},
            excess={
                name: paired_difference(left.by_batch[name], left.by_batch["plan"], left.terms) for name in guesses
            },
            curve=tuple((choice.extra, left.cost(f"{choice.extra}")) for choice in curve),
        )

    def _left(
        self,
        diagnosis: Diagnosis,
        choices: Mapping[str, Sequence[Choice]],
        batches: Sequence[Any],
        before: int,
        state: str,
        of_tokens: Collection[str] = (),
    ) -> _Left:
        """Measure what choices leave; choices with the same pins are measured once.

        Args:
            diagnosis: what was measured before.
            choices: the draws of each choice, by its name.
            batches: batches, numbered from `before`.
            before: number of batches that were run before these.
            state: name of the file for the state of a long measurement.
            of_tokens: names of choices whose numbers of single tokens are measured too.
        """
        pins_of = {repr(choice.pins): choice.pins for draws in choices.values() for choice in draws}
        variants = {key: Variant(self.passes.all_low, pins) for key, pins in pins_of.items()}
        keys_of = {name: [repr(choice.pins) for choice in draws] for name, draws in choices.items()}
        with_tokens = {key for name in of_tokens for key in keys_of.get(name, ())}
        self.passes.expect(self.passes.passes_of(len(batches), variants) + 1)
        # The losses and KLs of each set of pins on each batch.
        high: list[float] = []
        terms: list[int] = []
        low: dict[str, list[float]] = {key: [] for key in variants}
        kls: dict[str, list[Any]] = {key: [] for key in variants}
        tokens: dict[str, list[Any]] = {key: [] for key in with_tokens}
        reference: Output | None = None
        for number, key, output in self.passes.outputs(batches, variants, before, self._state_file(state)):
            if key is None:
                reference = output
                high.append(reference.loss_value)
                terms.append(max(1, reference.terms))
                where = f"run of held-out batch {number + 1}"
                reference.refuse_not_finite(where, self.passes.model)
                _refuse_other_kind(where, reference.logits is None, diagnosis.measured.kl is None)
                continue
            assert reference is not None
            low[key].append(output.loss_value)
            kls[key].append(reference.kl_to(output))
            if key in with_tokens:
                tokens[key].append(reference.tokens_to(output))
        # The means over the draws of a choice.
        by_batch: dict[str, tuple[list[Any], list[float]]] = {}
        for name, keys in keys_of.items():
            kls_by_batch = zip(*(kls[key] for key in keys), strict=True)
            mean_kls = [None if of_draws[0] is None else np.mean(of_draws, axis=0) for of_draws in kls_by_batch]
            by_batch[name] = mean_kls, np.mean([low[key] for key in keys], axis=0).tolist()
        of_names = {name: tokens[keys_of[name][0]] for name in of_tokens if name in keys_of}
        return _Left(by_batch=by_batch, high=high, terms=terms, tokens=of_names)

    def _with_caches(self, passes: ModelPasses, diagnosis: Diagnosis, batches: Sequence[Any], before: int) -> Diagnosis:
        """Add what all keys and values cost on held-out batches, numbered from `before`: alone, and under the plan."""
        pins = {} if diagnosis.pins else diagnosis.choice().pins  # pins of a plan in force are on the low path
        passes.expect_more(3 * len(batches))
        high: list[float] = []
        terms: list[int] = []
        low: dict[str, list[float]] = {"alone": [], "plan": []}
        kls: dict[str, list[Any]] = {"alone": [], "plan": []}
        for place, batch in enumerate(batches, before):
            reference, alone, under_plan = passes.with_caches(batch, place, pins)
            high.append(reference.loss_value)
            terms.append(max(1, reference.terms))
            for name, output in (("alone", alone), ("plan", under_plan)):
                low[name].append(output.loss_value)
                kls[name].append(reference.kl_to(output))
        caches = {name: PathCost.of(kls[name], high, low[name], terms) for name in low}
        return replace(diagnosis, caches=caches, kv_cast=passes.kv_cast)


@dataclass(frozen=True, kw_only=True)
class _Left:
    """What choices leave on some batches."""

    by_batch: dict[str, tuple[list[Any], list[float]]]
    """(KLs by batch, losses by batch) of each choice, as `PathCost.of` takes them."""
    high: list[float]
    """Losses on the recovery path."""
    terms: list[int]
    """Numbers of terms in the losses."""
    tokens: dict[str, list[Any]]
    """`Output.tokens_to` by batch, of some choices."""

    def cost(self, name: str) -> PathCost:
        """Return the cost of a choice."""
        kls, losses = self.by_batch[name]
        return PathCost.of(kls, self.high, losses, self.terms).with_tokens(self.tokens.get(name, ()))


def _refuse_other_kind(where: str, loss_alone: bool, first_alone: bool) -> None:
    """Raise ValueError unless a batch and the first one both have logits, or both a loss alone."""
    which = "no logits" if loss_alone else "logits"
    right = f"returns {which}, unlike that of batch 1; have it return the same kind for all batches"
    require(loss_alone == first_alone, where, "...", right)
