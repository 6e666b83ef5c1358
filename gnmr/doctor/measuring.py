"""Run the passes of a diagnosis, and measure a converted model batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain, islice, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.doctor.beside import Beside
from gnmr.doctor.diagnosis import CURVE, RANDOM_DRAWS, Diagnosis
from gnmr.doctor.guards import refuse_constant, refuse_not_finite, refuse_reentrant
from gnmr.doctor.knapsack import GUESSES, REST, Choice, Pins, Shapes, Times, groups_of, times_of
from gnmr.doctor.measured import Measured, Row, intervals, nats, paired
from gnmr.doctor.output import Output, output_of
from gnmr.errors import require
from gnmr.measure.coverage import Counting, Coverage
from gnmr.measure.errors import Probe, measure_errors
from gnmr.measure.price import PRICES, PriceMeter, measure_prices
from gnmr.names import GEMMS, RECIPES
from gnmr.precision import ConvertedModel, PathLinear, PathSpec, Recipe
from gnmr.precision.contained import Contained
from gnmr.precision.conversion import operator_shapes
from gnmr.precision.cost import gemm_time
from gnmr.precision.recipes import Gemm
from gnmr.precision.units import operator_names

Progress = Callable[[int, int | None], None]
"""Called with the number of finished forward passes and the total (None: unknown); a priced batch is `PRICED`."""

PRICED = 8
"""Forward passes that take as long as a priced batch, most of whose time is its backward pass and casts."""
CONFIRMED = 2
"""Number of batches on which single KLs are measured."""
_NORMED = 2
"""Number of batches on which gradient norms are measured, on the data's labels."""
_LOW = ("fprop", "fprop_sequence", "fprop_input", "fprop_weight", "dgrad", "wgrad", "dgrad_bias", "wgrad_bias")
_IN_USE = {"token": "fprop", "sequence": "fprop_sequence"}
"""Name of each estimate among them."""
_NUMBERS = (*_LOW, "mse", "norm")
"""Numbers per operator and batch: prices, mse of the input, norm of the gradient."""


class Doctor:
    """A converted model and its measurements."""

    def __init__(
        self,
        converted: ConvertedModel,
        model: nn.Module,
        spec: PathSpec,
        run: Callable[[Any], Any],
        *,
        tokens: int,
        labels: str,
        terms: Callable[[Any], int] | None,
        gate: float | None,
        against: bool,
        sides: Mapping[str, tuple[str, str]],
        beside: Beside | None,
        pins: Pins,
        rescues: Mapping[str, Recipe],
        asked: bool,
        fused: Sequence[str],
    ) -> None:
        """Prepare the meters of a converted model.

        `against` and `sides` are those of `Diagnosis`. `pins` are the pins of the plan in force. `rescues` are the
        recipes, by name, on which a plan may keep a GEMM; `asked` is True if the user named them. The other arguments
        are those of `gnmr.diagnose`.
        """
        self.converted, self.model, self.spec, self.tokens, self.gate = converted, model, spec, tokens, gate
        self._run, self._labels, self._terms = run, labels, terms
        self._against, self._sides, self.beside = against, sides, beside
        for operator in converted.operators:
            operator.weight.requires_grad_()  # a frozen model has prices too
        self._weights = [operator.weight for operator in converted.operators]
        self._pins = {name.removeprefix("model."): own for name, own in pins.items()}
        self._rescues, self._asked, self._fused = rescues, asked, fused
        for operator in converted.operators:  # scores come from what forward computes, without pins
            recovery = operator.recovery if operator.operator_name in sides else converted.recovery
            assert isinstance(recovery, Recipe)
            operator.recovery = replace(recovery, dgrad=Gemm(), wgrad=Gemm())
        assert isinstance(converted.recovery, Recipe)
        exact = converted.recovery.fprop
        candidates = {f"rescue {name}": recipe for name, recipe in rescues.items() if recipe.fprop != exact}
        self._meter: PriceMeter = measure_prices(
            converted, PRICES[:3], tokens, against_recovery=True, candidates=candidates
        )
        self._probe: Probe = measure_errors(converted, ["mse"], tokens)
        self._measuring(False)
        self._draw = torch.Generator(self._weights[0].device).manual_seed(0)
        self._called: set[str] = set()
        self._read: set[str] = set()
        """Operators that were called in any batch, and operators whose weight had a gradient."""
        self._beside: list[dict[str, tuple[float, float]]] = []
        """Measurements of `beside` in each batch."""
        self._coverage = Coverage()
        self._done = 0
        self._total: int | None = None
        self._tell: Progress = lambda _done, _total: None

    def diagnosis(
        self, batches: Iterable[Any], held_out: Sequence[Any], budget: float, confirm: int, progress: Progress
    ) -> Diagnosis:
        """Measure everything, and return the diagnosis."""
        self._tell = progress
        confirmed = min(2 * confirm, len(self.converted.operators))
        self._total = _passes(batches, len(held_out), confirmed, len(self._rescues))
        batches = iter(batches)
        first = list(islice(batches, CONFIRMED))
        limit = self._limit(first[0]) if first else None
        high, low, kls, every, rescued, ran = [], [], [], [], [], []
        for place, batch in enumerate(chain(first, batches)):
            before, numbers, others, reached, after, kl = self._priced(batch, place)
            drawn = self._labels == "model" and kl is not None
            estimate = "sequence" if drawn and self.tokens == 1 else "token"
            high.append(before)
            low.append(after)
            kls.append(kl)
            every.append(numbers)
            rescued.append(others[int(estimate == "sequence")])
            ran.append(reached)  # rows
            if place == 0 and self._asked:
                self._refuse_worse(numbers[_NUMBERS.index(_IN_USE[estimate])], rescued[0])
        require(len(high) > 1, "batches", len(high), "needs two at least, for the spread between them")
        times = (np.array(ran) > 0).sum(axis=0)
        kept = [o for o, number in zip(self.converted.operators, times, strict=True) if number]
        require(kept, "run", "...", "its loss does not run the linears of this model")
        samples = dict(zip(_NUMBERS, np.stack(every, axis=1)[..., times > 0], strict=True))
        samples["norm"] = samples["norm"][~np.isnan(samples["norm"]).any(axis=1)]
        shapes = {o.operator_name: (o.in_features, o.out_features) for o in self.converted.operators}
        operators = {o.operator_name: shapes[o.operator_name] for o in kept}
        work, rest = self._work(operators, np.array(ran), list(shapes))
        idle = {name: self._why(name) for name in shapes if name not in operators}
        narrow = self._targets(list(operators)) if idle else None
        in_use = samples[_IN_USE[estimate]]
        of_rescues = np.mean(rescued, axis=0)[..., times > 0]
        alone = {} if kls[0] is None else self._confirmed(kept, samples, confirm, first)
        self._measure_beyond(kept, alone, of_rescues, first)
        found = Diagnosis(
            recipe=self.spec.low,
            recovery=self.spec.recovery or "bf16",
            operators=operators,
            rows=self._rows(kept, samples, in_use, alone, of_rescues),
            beside=self._rows_beside(confirm, first, drawn),
            samples=in_use,
            measured=Measured.of(kls, high, low),
            scores={
                name: dict(zip(operators, samples[key].mean(axis=0).tolist(), strict=True))
                for name, key in (("mse", "mse"), ("gradient norm", "norm"))
            },
            budget=budget,
            gate=self.gate,
            limit=limit,
            labels="model" if drawn else "data",
            estimate=estimate,
            tokens=self.tokens,
            pins={name: own for name in operators if (own := self._pins.get(name.removeprefix("model.")))},
            rescues=tuple(self._labels_of_rescues()),
            times=dict(self.spec.times),
            costs=self._costs(operators, work, rest),
            work=work,
            rest=rest,
            coverage=self._coverage,
            fused=self._fused,
            groups=groups_of(operators, self._fused),
            targets=narrow or self.spec.targets,
            exclude=[] if narrow else self.spec.exclude,
            recipes={
                name: one.words() if isinstance(one, Recipe) else one
                for name, one in self.spec.recipes.items()
                if name not in RECIPES
            },
            idle=idle,
            matched={} if narrow else {name: shapes[name] for name in idle},
            modules=self._modules(),
            partly={name: int(n) for name, n in zip(shapes, times, strict=True) if 0 < n < len(ran)},
            against=self._against,
            sides=self._sides,
        )
        return self._held_out(found, held_out, len(high)) if held_out else found

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
        if self._total is not None:
            self._total = self._done + len(batches) * (1 + len(plans))
        high: list[float] = []
        low: dict[str, list[float]] = {key: [] for key in plans}
        kls: dict[str, list[Any]] = {key: [] for key in plans}
        for done, batch in enumerate(batches):
            place = before + done
            whole = self._forward(batch, place, recovering=True)
            high.append(whole.loss_value)
            refuse_not_finite(whole.worth, f"run of held-out batch {done + 1}", self.model)
            for key, pins in plans.items():
                with self._pinned(pins):
                    own = self._forward(batch, place, recovering=False)
                low[key].append(own.loss_value)
                kls[key].append(whole.kl_to(own))

        def mean(name: str) -> tuple[list[Any], list[float]]:
            """Return (KLs by batch, losses by batch), averaged over the draws of a guess."""
            keys = [repr(one.pins) for one in choices[name]]
            each = zip(*(kls[key] for key in keys), strict=True)
            kl = [None if draws[0] is None else np.mean(draws, axis=0) for draws in each]
            return kl, np.mean([low[key] for key in keys], axis=0).tolist()

        left = {name: mean(name) for name in choices}
        of_all = Measured.of(left["all"][0], high, left["all"][1])
        if found.pins:
            return replace(found, held_out=of_all)
        named = {name: Measured.of(kl, high, losses) for name, (kl, losses) in left.items()}
        return replace(
            found,
            held_out=of_all,
            left={name: named[name] for name in ("plan", *guesses)},
            apart={name: paired(left[name], left["plan"]) for name in guesses},
            curve=tuple((one.extra, named[f"{one.extra}"]) for one in curve),
        )

    def _confirmed(
        self, operators: Sequence[PathLinear], samples: Mapping[str, np.ndarray], number: int, batches: Sequence[Any]
    ) -> dict[str, list[np.ndarray]]:
        """Measure alone (`_alone`) the `number` operators that are highest by each estimate."""
        chosen: dict[str, PathLinear | None] = {}
        for name in ("fprop", "fprop_sequence"):
            values = samples[name].mean(axis=0)
            if np.isfinite(values).all():
                order = np.argsort(-values, kind="stable")[:number]
                chosen |= {operators[i].operator_name: operators[i] for i in order if values[i] > 0}
        if chosen and self._total is not None:  # both estimates may name the same operators
            self._total -= len(batches) * (min(2 * number, len(self.converted.operators)) - len(chosen))
        return self._alone(chosen, batches)

    def _alone(self, chosen: Mapping[str, PathLinear | None], batches: Sequence[Any]) -> dict[str, list[np.ndarray]]:
        """Return {name: KLs (S,) by batch} with each operator alone in low precision; None: a part of `beside`."""
        found: dict[str, list[np.ndarray]] = {name: [] for name in chosen}
        for place, batch in enumerate(batches if chosen else ()):
            whole = self._forward(batch, place, recovering=True)
            for name, operator in chosen.items():
                beside = name if operator is None else None
                own = self._forward(batch, place, recovering=True, low=operator, beside=beside)
                if (kl := whole.kl_to(own)) is not None:
                    found[name].append(kl)
        return found

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
        lost = {i: one for i, one in enumerate(operators) if not np.isfinite(alone.get(one.operator_name, [0.0])).all()}
        for own, rescue in zip(rescued, self._rescues, strict=True):
            if own.any():
                with self._pinned({one.operator_name: {"fprop": rescue} for one in lost.values()}):
                    kls = self._alone({one.operator_name: one for one in lost.values()}, batches)
                for i, one in lost.items():
                    kl = np.concatenate(kls[one.operator_name]).mean()
                    own[i] = kl if np.isfinite(kl) else np.inf

    def _rows_beside(self, number: int, batches: Sequence[Any], drawn: bool) -> tuple[Row, ...]:
        """Return the rows of the parts of `beside`, and measure the KL of the `number` highest alone.

        The value is the estimate by sequence if labels were `drawn`, else by token.
        """
        if not self._beside:
            return ()
        names = dict.fromkeys(name for one in self._beside for name in one)  # some may not run in every batch
        samples = {name: np.array([one.get(name, (0.0, 0.0)) for one in self._beside]) for name in names}  # (B, 2)
        highest = sorted(samples, key=lambda name: -samples[name].mean(axis=0).max())[:number]
        if highest and self._total is not None:
            self._total += len(batches) * (1 + len(highest))
        found = self._alone(dict.fromkeys(highest), batches)
        rows = []
        for name, values in samples.items():
            by_token, by_sequence = values.mean(axis=0).tolist()
            interval = tuple(intervals(values)[:, int(drawn)].tolist())
            value = by_sequence if drawn else by_token
            rows.append(_forward_row(name, value, interval, by_token, by_sequence, found.get(name)))
        return tuple(rows)

    @torch.no_grad()
    def _limit(self, batch: Any) -> float | None:
        """Return the KL from rounding: the model against itself with each operator's output moved by one rounding."""
        draw = torch.Generator(self._weights[0].device).manual_seed(0)

        def apart(_operator: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            sign = torch.empty_like(output).bernoulli_(0.5, generator=draw) * 2 - 1
            return torch.nextafter(output, torch.inf * sign)

        counting = Counting(self.model, self.converted.operators)
        with counting.all():
            whole = self._forward(batch, 0, recovering=True)
        self._coverage = counting.found
        refuse_not_finite(whole.worth, "run of batch 1", self.model)
        handles = [operator.register_forward_hook(apart) for operator in self.converted.operators]
        try:
            kl = whole.kl_to(self._forward(batch, 0, recovering=True))
        finally:
            for handle in handles:
                handle.remove()
        limit = None if kl is None else float(kl.mean())
        if self._against:
            key, given = ("against", self.spec.recovery) if self.gate is None else ("gate", self.gate)
            require(limit is not None, key, given, "is about a KL, and `run` gives a loss alone; have it give logits")
        if self.gate is not None:
            assert limit is not None
            right = f"is below what rounding of this model makes, {limit:.2g} nats; use a larger one"
            plain = all(weight.dtype in (torch.float32, torch.float64) for weight in self._weights)
            require(self.gate > limit, "gate", self.gate, right + ("" if plain else ", or a model in float32"))
        return limit

    def _why(self, name: str) -> str:
        """Return the reason why an operator has no price."""
        if name in self._called:
            return "the loss does not depend on what they give"
        if name in self._read:
            return "they never run (their weights are read without calling them, so no path is in force)"
        return "they never run"

    def _targets(self, names: list[str]) -> list[str] | None:
        """Return patterns that match these operators alone; None if there are none."""
        for targets in ([name.removeprefix("model.") for name in names], names):
            with suppress(ValueError):
                if list(operator_shapes(self.model, replace(self.spec, targets=targets, exclude=[], pins={}))) == names:
                    return targets
        return None

    def _priced(
        self, batch: Any, place: int
    ) -> tuple[float, np.ndarray, np.ndarray, list[int], float, np.ndarray | None]:
        """Measure one batch.

        Returns:
            The loss of the recovery path; (names, U) numbers; the estimates of the rescues; the rows of each operator;
            and the loss and KLs of everything low.
        """
        meter, where, mark = self._meter, f"run of batch {place + 1}", self.converted.mark()
        self._put(True)
        for operator in self.converted.operators:
            operator.read = None
        meter.begin_step(place)
        self._measuring(True)
        try:
            with nullcontext() if self.beside is None else self.beside.priced(place):
                torch.manual_seed(place)
                whole = output_of(self._run(batch), where)
                refuse_not_finite(whole.worth, where, self.model)
                objective, meter.loss_tokens = whole.objective(self._labels, self._draw, where)
                if meter.loss_tokens is None and self._terms is not None:
                    meter.loss_tokens = self._terms(batch)
                reached = [*self._weights, *([] if self.beside is None else self.beside.weights)]
                refuse_reentrant(objective)
                gradients = torch.autograd.grad(objective, reached, allow_unused=True)[: len(self._weights)]
        finally:
            self._measuring(False)
        unused = all(gradient is None for gradient in gradients)
        right = "its loss does not depend on the linears of this model (or reentrant checkpointing hides that it does)"
        require(not unused, "run", "...", right)
        refuse_constant(objective, self._weights, gradients, where, "its linears")
        self._called |= {o.operator_name for o in self.converted.operators if o.read is not None}
        both = zip(self.converted.operators, gradients, strict=True)
        self._read |= {o.operator_name for o, gradient in both if gradient is not None}
        ran = list(meter.rows)
        of_data = self._labels == "data" or whole.logits is None
        norms = self._norms_of(gradients) if of_data or place < _NORMED else None
        del objective, gradients
        if not of_data and place < _NORMED:
            norms = self._norms(batch, place, norms)
        if self.beside is not None:
            self._beside.append(self.beside.take(meter.loss_tokens or max(meter.rows)))
        rescued = self._rescued()
        numbers = self._numbers(norms, place)
        self.converted.end_step()
        self.converted.back_to(mark)  # all passes of a batch use the same delayed scales
        low = self._forward(batch, place, recovering=False)
        self._advance(PRICED - 1)
        return whole.loss_value, numbers, rescued, ran, low.loss_value, whole.kl_to(low)

    def _rescued(self) -> np.ndarray:
        """Return the meter's estimates of fprop on each rescue, (by token and by sequence, rescues, U)."""
        found = np.zeros((2, len(self._rescues), len(self.converted.operators)))
        for at, name in enumerate(self._rescues):
            if (candidate := f"rescue {name}") in self._meter.candidates:  # else it is the reference of all errors
                own = self._meter.by_operator(candidate)
                found[:, at] = torch.stack([own[one] for one in _IN_USE.values()]).cpu().numpy()
        return found

    def _refuse_worse(self, low: np.ndarray, rescued: np.ndarray) -> None:
        """Raise ValueError if a rescue is slower than another path and costs as many nats on the first batch."""
        assert isinstance(self.converted.low, Recipe)
        recipes = {self.spec.low: self.converted.low, **self._rescues}
        costs = dict(zip(recipes, [low.sum(), *rescued.sum(axis=1)], strict=True))
        time = {name: gemm_time(recipe, "fprop", self.spec.times) for name, recipe in recipes.items()}
        for name, other in product(self._rescues, recipes):
            if time[name] > time[other] and costs[name] >= costs[other] and costs[name] > 0:
                right = f"is slower than {other} in fprop (times {time[name]:g} and {time[other]:g}) and costs no less "
                right += f"({nats(costs[name])} and {nats(costs[other])} nats of all GEMMs alone); leave it out"
                require(False, "rescue", name, right)

    def _labels_of_rescues(self) -> list[str]:
        """Return the names of the recipes that a plan may keep a GEMM on; with two sides, the other side's."""
        if not (self._against or self._sides):
            return list(self._rescues)
        high = self.spec.recovery
        return [high if high and high != self.spec.low else "the other side's"]

    def _work(self, operators: Shapes, rows: np.ndarray, names: list[str]) -> tuple[dict[str, int], int]:
        """Return the multiplications of each operator in all batches, and those of all other GEMMs.

        The latter follow from their share in the first batch. `rows` is (B, U), of the operators with these `names`.
        """
        every = dict(zip(names, rows.sum(axis=0).tolist(), strict=True))
        work = {name: every[name] * a * b for name, (a, b) in operators.items()}
        share = self._coverage.share(operators)
        return work, round(sum(work.values()) * (1 / share - 1)) if share else 0

    def _modules(self) -> dict[str, str]:
        """Return the class of each module that contains operators, by its name."""
        held = {one.owner: one.kind for one in self.converted.operators if isinstance(one, Contained)}
        found = {name: held[module] for name, module in self.model.named_modules() if name and module in held}
        return dict(zip(operator_names([*found]), found.values(), strict=True))

    def _costs(self, operators: Shapes, work: Mapping[str, int], rest: int) -> Times:
        """Return the time of every GEMM on each recipe.

        With two sides, either may be changed, so a GEMM that is alike on both costs its arithmetic.
        """
        if not (self._against or self._sides):
            assert isinstance(self.converted.low, Recipe)
            return times_of(operators, [self.converted.low, *self._rescues.values()], self.spec.times, work, rest)
        (alike,) = self._labels_of_rescues()
        found = {
            (name, gemm): {self.spec.low: float(work[name]), alike: 2.0 * work[name]}
            for name in operators
            for gemm in GEMMS
        }
        return found | ({(REST, gemm): {self.spec.low: float(rest)} for gemm in GEMMS} if rest else {})

    def _numbers(self, norms: Tensor | None, place: int) -> np.ndarray:
        """Return the (names, U) numbers of a batch from the meter and the probe, and reset both."""
        low = self._meter.by_operator()
        if self.tokens > 1:
            low["fprop_sequence"] = low["fprop"]
        known = torch.zeros_like(low["fprop"]) if norms is None else norms
        prices = [low[name] for name in _LOW]
        numbers: np.ndarray = torch.stack([*prices, self._probe.read()["mse"], known]).cpu().numpy()
        self._meter.reset()
        self._probe.reset()
        if not np.isfinite(numbers).all():
            first = self.converted.operators[int(np.argwhere(~np.isfinite(numbers))[0][1])].operator_name
            raise ValueError(f"batch {place + 1}: what {first} reads, or its gradient, is not finite in 16 bits")
        if norms is None:
            numbers[-1] = np.nan
        return numbers

    def _norms(self, batch: Any, place: int, drawn: Tensor | None) -> Tensor | None:
        """Return the weights' gradient norms on the data's labels, (U,) float64; without such labels, `drawn`."""
        self.converted.end_step()
        self._put(True)
        torch.manual_seed(place)
        loss = output_of(self._run(batch), f"run of batch {place + 1}").loss
        if loss is None or not loss.requires_grad:
            return drawn
        return self._norms_of(torch.autograd.grad(loss, self._weights, allow_unused=True))

    def _norms_of(self, gradients: Iterable[Tensor | None]) -> Tensor:
        own = zip(self.converted.operators, gradients, strict=True)
        norms = [0.0 if gradient is None else o.part(gradient).float().norm().double() for o, gradient in own]
        return torch.stack([torch.as_tensor(norm, dtype=torch.float64) for norm in norms])

    @torch.no_grad()
    def _forward(
        self, batch: Any, place: int, *, recovering: bool, low: PathLinear | None = None, beside: str | None = None
    ) -> Output:
        """Run a forward pass with every operator on one path, except the operator `low` or the part `beside`."""
        self._put(recovering)
        if low is not None:
            low.switch(False)
        with nullcontext() if self.beside is None else self.beside.running(beside):
            torch.manual_seed(place)
            found = output_of(self._run(batch), f"run of batch {place + 1}", trained=False)
        self.converted.end_step()
        self._advance(1)
        return found

    def _advance(self, passes: int) -> None:
        self._done += passes
        self._tell(self._done, self._total)

    def _put(self, recovering: bool) -> None:
        for operator in self.converted.operators:
            operator.switch(recovering)

    def _measuring(self, on: bool) -> None:
        self._meter.enabled = self._probe.enabled = on

    @contextmanager
    def _pinned(self, pins: Pins) -> Iterator[None]:
        """Put these GEMMs of the low path on other recipes: a rescue, or the operator's own recovery recipe."""
        before = [operator.low for operator in self.converted.operators]
        try:
            for operator in self.converted.operators:
                for gemm, name in pins.get(operator.operator_name, {}).items():
                    recipe = self._rescues.get(name, operator.recovery)
                    assert isinstance(operator.low, Recipe) and isinstance(recipe, Recipe)
                    operator.low = operator.low.with_gemms({gemm: recipe})
            yield
        finally:
            for operator, low in zip(self.converted.operators, before, strict=True):
                operator.low = low

    def _rows(
        self,
        operators: Sequence[PathLinear],
        samples: Mapping[str, np.ndarray],
        in_use: np.ndarray,
        alone: Mapping[str, Sequence[np.ndarray]],
        rescued: np.ndarray,
    ) -> tuple[Row, ...]:
        means = {name: values.mean(axis=0).tolist() for name, values in samples.items()}
        means["fprop_in_use"] = in_use.mean(axis=0).tolist()
        ends = {gemm: intervals(samples[gemm]).T.tolist() for gemm in GEMMS[1:]} | {
            "fprop": intervals(in_use).T.tolist()
        }
        rows = []
        for i, operator in enumerate(operators):
            name = operator.operator_name
            row = _forward_row(
                name,
                means["fprop_in_use"][i],
                tuple(ends["fprop"][i]),
                means["fprop"][i],
                means["fprop_sequence"][i] if self.tokens == 1 else None,
                alone.get(name),
            )
            others = dict.fromkeys(self._labels_of_rescues(), 0.0)
            others |= dict(zip(self._rescues, rescued[:, i].tolist(), strict=True))
            more = {"input": means["fprop_input"][i], "weight": means["fprop_weight"][i], "rescued": others}
            rows.append(replace(row, **more))
            for gemm in GEMMS[1:]:
                rows.append(Row(name, gemm, means[gemm][i], tuple(ends[gemm][i]), bias=means[f"{gemm}_bias"][i]))
        return tuple(rows)


def _forward_row(
    name: str,
    value: float,
    interval: tuple[float, ...],
    by_token: float,
    by_sequence: float | None,
    kls: Sequence[np.ndarray] | None,
) -> Row:
    """Return the row of an fprop: its value is the mean of its measured KLs, if there are any.

    The value is Inf if this fprop alone makes the predictions NaN or Inf.
    """
    measured = None
    if kls:
        single = Measured.of(kls, [np.nan], [np.nan])
        assert single.kl is not None
        measured = value = single.kl if np.isfinite(single.kl) else np.inf
        interval = max(0.0, value - single.noise), value + single.noise
        if not np.isfinite(value):
            interval = value, value
    both = interval[0], interval[1]
    return Row(name, "fprop", value, both, by_token=by_token, by_sequence=by_sequence, measured=measured)


def _passes(batches: Iterable[Any], held_out: int, confirmed: int, rescues: int) -> int | None:
    """Return an upper bound on the number of forward passes; None if the number of batches is unknown."""
    if not isinstance(batches, Sized):
        return None
    choices = 3 + rescues * (rescues > 1) + len(GUESSES) - 1 + RANDOM_DRAWS + 2 + len(CURVE)
    return PRICED * len(batches) + 2 + min(CONFIRMED, len(batches)) * (1 + confirmed) + held_out * choices
