"""`gnmr.diagnose`: what low precision costs a model as it is, GEMM by GEMM, and what to keep in 16 bits.

Every operator is put on the recovery path. For each batch, one forward and backward pass gives the price of every GEMM
on the low path (`gnmr.measure.price`), and one forward pass the loss with all operators on the low path. Other batches
then give the loss with the pins of the plan, and with the pins of the usual guesses at the same cost. Nothing is
trained, and the model is afterwards what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.doctor.diagnosis import Diagnosis, Measured, Row, intervals
from gnmr.doctor.guards import as_it_was, refuse_constant, refuse_meta, refuse_not_finite, scalar
from gnmr.doctor.plan import PinPlan, budget_share, read_plan
from gnmr.errors import nearest, require, whole
from gnmr.measure.errors import Probe, measure_errors
from gnmr.measure.price import PRICES, PriceMeter, measure_prices
from gnmr.names import FORMATS, GEMMS, RECIPES, select
from gnmr.precision import ConvertedModel, PathLinear, PathSpec, Recipe, convert
from gnmr.precision.conversion import operator_shapes

Progress = Callable[[int, int | None], None]
"""Called with (passes over batches that are done, of how many; None: nobody knows)."""

_LOW = (*GEMMS, "fprop_input", "fprop_weight", "dgrad_bias", "wgrad_bias")
_NUMBERS = (*_LOW, *(f"{gemm}_recovery" for gemm in GEMMS), "mse", "norm")
"""What is measured of every operator in a batch: prices on both paths, mse of the input, norm of the gradient."""


def diagnose(
    model: nn.Module,
    loss_of_batch: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    recipe: str | Recipe = "nvfp4",
    recovery: str | Recipe = "bf16",
    targets: Sequence[str] | None = None,
    budget: float = 0.10,
    held_out: Iterable[Any] = (),
    plan: PinPlan | str | PathLike[str] | None = None,
    tokens: int = 1,
    terms: Callable[[Any], int] | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Prices every GEMM of the model's linears under `recipe`.

    Args:
        model: with its weights, on its device and in its dtype. It runs in evaluation mode, and is afterwards as it
            was to the bit: weights, gradients, modes, random numbers; after an error too.
        loss_of_batch: the mean loss of a batch, in nats, by `model`: one number with a gradient.
        batches: two at least; the more, the narrower the intervals.
        recipe: the low path; `int8` stands for `sim_int8`, and so on. Numbers are simulated, whatever runs here.
        recovery: the path of higher precision.
        targets: patterns of the linears, as `PathSpec.targets`; None: `*_proj`, or all where there are none of this
            name. Output heads, gates and linears tied to an embedding stay in 16 bits.
        budget: share of the GEMM time that the plan may keep on the recovery path.
        held_out: other batches, on which losses alone are measured: of the plan and of the usual guesses too.
        plan: pins in force, with the plan's own recipes and targets: what is priced is what they leave.
        tokens: one token in so many is priced.
        terms: of a batch, how many terms its mean loss has; None: as many as tokens. A model that says one thing of
            a whole text has one a text.
        progress: see `Progress`.

    ValueError, in one line, for what makes no sense; the model is then as it was.
    """
    budget_share(budget)
    whole(tokens=tokens)
    _check_model(model)
    spec = _spec(model, recipe, recovery, targets, plan)
    with as_it_was(model):
        converted = convert(model, spec)
        try:
            return _Doctor(converted, model, spec, loss_of_batch, tokens=tokens, terms=terms).diagnosis(
                batches, list(held_out), budget, progress or (lambda _done, _total: None)
            )
        finally:
            converted.restore()


def recipe_named(name: str, others: Iterable[str] = (), key: str = "recipe") -> str:
    """The recipe of a name: itself, or of a format the recipe that casts everything to it. ValueError for neither."""
    known = (*RECIPES, *others)
    if name not in known and f"sim_{name}" in RECIPES:
        return f"sim_{name}"
    if name not in known:
        what = "is a format without a recipe of its own" if name in FORMATS else "is no recipe"
        raise ValueError(f"{key}={name}: {what}{nearest(name, known)}")
    return name


def _check_model(model: nn.Module) -> None:
    require(isinstance(model, nn.Module), "model", type(model).__name__, "must be an nn.Module")
    linears = any(isinstance(module, nn.Linear) for module in model.modules())
    require(linears, "model", type(model).__name__, "has no nn.Linear, so no GEMM that a recipe would cast")
    refuse_meta(model)
    require(not torch.is_inference_mode_enabled(), "model", type(model).__name__, "has no gradients in inference mode")


def _spec(
    model: nn.Module,
    recipe: str | Recipe,
    recovery: str | Recipe,
    targets: Sequence[str] | None,
    plan: PinPlan | str | PathLike[str] | None,
) -> PathSpec:
    """The paths of a diagnosis. UserError for a plan of another model."""
    if plan is not None:
        pins, where = (plan, "plan") if isinstance(plan, PinPlan) else (read_plan(plan), f"plan={plan}")
        require(pins.low not in FORMATS, "plan", pins.low, "its low path is a format; recipes alone can be diagnosed")
        spec = PathSpec(backend="simulated", **(pins.paths() | {"recovery": pins.recovery or "bf16"}))
        pins.refuse_other(where, operator_shapes(model, spec))
        return spec
    low = recipe_named(recipe) if isinstance(recipe, str) else recipe
    high = recipe_named(recovery, key="recovery") if isinstance(recovery, str) else recovery
    require(low != high, "recipe", recipe, "is the recovery path too: there is nothing to diagnose")
    if targets is None:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        targets = ["*_proj"] if select(names, ["*_proj"])[0] else ["*"]
    return PathSpec.of(low, high, targets=targets, backend="simulated")


class _Doctor:
    """A converted model and what is measured of it."""

    def __init__(
        self,
        plan: ConvertedModel,
        model: nn.Module,
        spec: PathSpec,
        loss_of_batch: Callable[[Any], Tensor],
        *,
        tokens: int,
        terms: Callable[[Any], int] | None,
    ) -> None:
        self.plan, self.model, self.spec, self.tokens = plan, model, spec, tokens
        self._loss_of_batch, self._terms = loss_of_batch, terms
        for operator in plan.operators:
            operator.weight.requires_grad_()  # a frozen model has prices too
        self._weights = [operator.weight for operator in plan.operators]
        priced = any(isinstance(o.recovery, Recipe) and o.recovery.casts for o in plan.operators)
        self._meter: PriceMeter = measure_prices(plan, PRICES[: 6 if priced else 3], tokens)
        self._probe: Probe = measure_errors(plan, ["mse"], tokens)
        self._measuring(False)
        self._called: set[str] = set()
        self._read: set[str] = set()
        """Operators that were called in any batch, and those whose weight had a gradient."""

    def diagnosis(
        self, batches: Iterable[Any], held_out: Sequence[Any], budget: float, progress: Progress
    ) -> Diagnosis:
        """All of it."""
        number = len(batches) if isinstance(batches, Sized) else None
        total = None if number is None else number + len(held_out)
        high, low, every, ran = [], [], [], []
        for place, batch in enumerate(batches):
            loss, numbers, reached = self._priced(batch, place)
            high.append(loss)
            every.append(numbers)
            ran.append(reached)
            low.append(self._loss(batch, place, recovering=False))
            progress(place + 1, total)
        require(len(high) > 1, "batches", len(high), "needs two at least, for the spread between them")
        times = np.array(ran).sum(axis=0)
        kept = [o for o, number in zip(self.plan.operators, times, strict=True) if number]
        require(kept, "loss_of_batch", "...", "its loss does not run the linears of this model")
        samples = dict(zip(_NUMBERS, np.stack(every, axis=1)[..., times > 0], strict=True))
        shapes = {o.operator_name: (o.in_features, o.out_features) for o in self.plan.operators}
        operators = {o.operator_name: shapes[o.operator_name] for o in kept}
        idle = {name: self._why(name) for name in shapes if name not in operators}
        targets = self._targets(list(operators)) if idle else list(self.spec.targets)
        found = Diagnosis(
            recipe=self.spec.low,
            recovery=self.spec.recovery or "bf16",
            operators=operators,
            rows=self._rows(kept, samples),
            samples=samples["fprop"] - samples["fprop_recovery"],
            measured=Measured.of(np.array(high), np.array(low)),
            scores={
                name: dict(zip(operators, samples[key].mean(axis=0).tolist(), strict=True))
                for name, key in (("mse", "mse"), ("gradient norm", "norm"))
            },
            budget=budget,
            tokens=self.tokens,
            pins={o.operator_name: list(o.pinned) for o in kept if o.pinned},
            targets=targets or list(self.spec.targets),
            recipes={
                name: one.words() if isinstance(one, Recipe) else one
                for name, one in self.spec.recipes.items()
                if name not in RECIPES
            },
            idle=idle,
            matched={} if targets else {name: shapes[name] for name in idle},
            partly={name: int(n) for name, n in zip(shapes, times, strict=True) if 0 < n < len(ran)},
        )
        if not held_out:
            return found
        measured, left = self._held_out(found, held_out, lambda done: progress(len(high) + done, total))
        return replace(
            found,
            held_out=measured,
            left={name: float(own.mean()) for name, own in left.items()},
            guessed={name: Measured.of(left["plan"], own) for name, own in left.items() if name != "plan"},
        )

    def _held_out(
        self, found: Diagnosis, batches: Sequence[Any], progress: Callable[[int], None]
    ) -> tuple[Measured, dict[str, np.ndarray]]:
        """(losses of all high and all low, what is left of each batch under the plan and each guess)."""
        choices = {} if found.pins else {"plan": [found.choice()], **found.guesses()}
        high, low = [], []
        left: dict[str, list[float]] = {name: [] for name in choices}  # of each batch one choice after the other
        for done, batch in enumerate(batches):
            place = len(found.samples) + done
            high.append(self._loss(batch, place, recovering=True))
            refuse_not_finite(high[-1], f"loss_of_batch of held-out batch {done + 1}", self.model)
            low.append(self._loss(batch, place, recovering=False))
            for name, several in choices.items():
                for choice in several:
                    with self._pinned(choice.pins):
                        left[name].append(self._loss(batch, place, recovering=False) - high[-1])
            progress(done + 1)
        each = {name: np.array(own).reshape(len(batches), -1).mean(axis=1) for name, own in left.items()}
        return Measured.of(np.array(high), np.array(low)), each

    def _why(self, name: str) -> str:
        """Why an operator has no price."""
        if name in self._called:
            return "the loss does not depend on what they give"
        if name in self._read:
            return "they never run (their weights are read without calling them, so no path is in force)"
        return "they never run"

    def _targets(self, names: list[str]) -> list[str] | None:
        """Patterns that name these operators alone; None: there are none."""
        for targets in ([name.removeprefix("model.") for name in names], names):
            with suppress(ValueError):
                if list(operator_shapes(self.model, replace(self.spec, targets=targets, pins={}))) == names:
                    return targets
        return None

    def _priced(self, batch: Any, place: int) -> tuple[float, np.ndarray, list[bool]]:
        """(loss of the recovery path, (names, U) numbers of the low path, which operators ran) of one batch."""
        meter = self._meter
        self._put(True)
        for operator in self.plan.operators:
            operator.read = None
        meter.begin_step(place)
        meter.loss_tokens = None if self._terms is None else self._terms(batch)
        self._measuring(True)
        try:
            torch.manual_seed(place)
            loss = scalar(self._loss_of_batch(batch), where := f"loss_of_batch of batch {place + 1}")
            refuse_not_finite(float(loss.detach()), where, self.model)
            gradients = torch.autograd.grad(loss, self._weights, allow_unused=True)
        finally:
            self._measuring(False)
        unused = all(gradient is None for gradient in gradients)
        right = "its loss does not depend on the linears of this model (or reentrant checkpointing hides that it does)"
        require(not unused, "loss_of_batch", "...", right)
        refuse_constant(loss, self._weights, gradients, where, "its linears")
        self._called |= {o.operator_name for o in self.plan.operators if o.read is not None}
        self._read |= {o.operator_name for o, g in zip(self.plan.operators, gradients, strict=True) if g is not None}
        ran = [rows > 0 for rows in meter.rows]
        low, recovery = (meter.by_operator(path) for path in ("low", "recovery"))
        zero = torch.zeros_like(low["fprop"])
        norms = torch.stack([zero[0] if g is None else g.float().norm().double() for g in gradients])
        prices = [low[name] for name in _LOW] + [recovery[gemm] for gemm in GEMMS]
        numbers = torch.stack([*prices, self._probe.read()["mse"], norms]).cpu().numpy()
        meter.reset()
        self._probe.reset()
        self.plan.end_step()
        if not np.isfinite(numbers).all():
            first = self.plan.operators[int(np.argwhere(~np.isfinite(numbers))[0][1])].operator_name
            raise ValueError(f"batch {place + 1}: what {first} reads, or its gradient, is not finite in 16 bits")
        return float(loss.detach()), numbers, ran

    @torch.no_grad()
    def _loss(self, batch: Any, place: int, *, recovering: bool) -> float:
        """Of a forward pass with every operator on one path."""
        self._put(recovering)
        torch.manual_seed(place)
        loss = self._loss_of_batch(batch)
        self.plan.end_step()
        return float(loss)

    def _put(self, recovering: bool) -> None:
        for operator in self.plan.operators:
            operator.switch(recovering)

    def _measuring(self, on: bool) -> None:
        self._meter.enabled = self._probe.enabled = on

    @contextmanager
    def _pinned(self, pins: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Inside, the low path has these GEMMs on the recovery recipe."""
        before = [operator.low for operator in self.plan.operators]
        try:
            for operator in self.plan.operators:
                if gemms := pins.get(operator.operator_name):
                    assert isinstance(operator.low, Recipe) and isinstance(operator.recovery, Recipe)
                    operator.low = operator.low.with_recovered(operator.recovery, gemms)
            yield
        finally:
            for operator, low in zip(self.plan.operators, before, strict=True):
                operator.low = low

    def _rows(self, operators: Sequence[PathLinear], samples: Mapping[str, np.ndarray]) -> tuple[Row, ...]:
        means = {name: values.mean(axis=0).tolist() for name, values in samples.items()}
        ends = {gemm: intervals(samples[gemm]).T.tolist() for gemm in GEMMS}
        return tuple(
            Row(
                operator.operator_name,
                gemm,
                means[gemm][i],
                (ends[gemm][i][0], ends[gemm][i][1]),
                means[f"{gemm}_recovery"][i],
                input=means["fprop_input"][i] if gemm == "fprop" else None,
                weight=means["fprop_weight"][i] if gemm == "fprop" else None,
                bias=None if gemm == "fprop" else means[f"{gemm}_bias"][i],
            )
            for i, operator in enumerate(operators)
            for gemm in GEMMS
        )
