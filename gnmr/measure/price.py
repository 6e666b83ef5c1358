"""Measure the price of a path: the cost of each GEMM of each operator on it, from the passes of training.

`fprop`, in nats. On a path an operator gives y_t + D_t instead of y_t at token t. dy_t is the gradient of the mean loss
over T tokens with respect to y_t. To second order, with the empirical Fisher matrix for the Hessian, the mean loss
increases by

    price_fprop = T/2 * sum_t u_t^2        u_t = <dy_t, D_t>

With Q the path's casts and W the weight (O, I)

    u_t = <dy_t W, Q(x_t) - x_t>                 the input's error
        + <dy_t (Q(W) - W), Q(x_t)>              the weight's error

This needs one product dy W, which dgrad computes too, and one dy (Q(W) - W), for the measured tokens. Let the model
draw the labels itself. The expectation of the price is then, to second order, the KL divergence per token between the
model without and with the error, except for the products of two tokens. Two more sums of the same inner products are
taken:

    sequence    T/2 * sum over sequences of (sum_t u_t)^2: with drawn labels the KL with the products of two tokens of a
                sequence, which matter where the error is coherent over tokens. One sample a sequence, so it is noisier.
                `Sequences` finds the sequence of every row, whatever the layout. Without it, a sequence is the last but
                one dimension of an input (S, T, I), and rows (T, I) are each their own
    elements    squares of the elements of the inner products one by one: where errors are large they grow together, and
                the square of their sum loses the order of the operators; the sum of their squares keeps it

An operator that runs several times in one pass makes one error, so u is added up over its calls before it is squared:
by sequence over all calls, by token over calls of the same number of rows. Its weight gradient is that of all calls.

Errors are relative to the exact product. With `against_recovery`, errors of the low path are relative to the recovery
path's result, so Q(x) and Q(W) of that path replace x and W. The same holds for `candidates`: recipes that no operator
is on, whose fprop is priced by the same backward pass.

`dgrad` and `wgrad` change the next step, not the current loss. Their price is the squared error of the gradient that
they give, relative to that gradient, ||d||^2 / ||g||^2. Their bias is <g, d> / ||g||^2. Both have no unit. For dgrad, g
is dy W; for wgrad, it is dy^T x of the measured tokens. So no price reads a weight's gradient as autograd makes it.
With `frozen`, weights need none, and only what enters the first operators needs a gradient.

T is `loss_tokens`, or else the number of nonzero rows in the gradient of the operator that was called last, experts
aside: tokens without a target have no gradient there, and of a classifier only the rows that it reads have one. If this
operator runs on the tokens in parts (chunks), T is that of all of its calls.

The measured numbers are those of the path itself, whatever path is in force and whatever kernels run it. They use the
casts of `gnmr.formats.cast` in float32, with the scales of whole tensors, current delayed scales, and a fault in
force on the low path. dy is the gradient that came back. One token in `tokens` is measured, or one group of tokens if
some share a scale. The choice depends only on the step's number.

Prior art: second-order sensitivities and Fisher-weighted quantization error (HAWQ; FIT, ICLR 2023), ModelOpt's
AutoQuantize, which sums (grad_output * output error)^2 for inference. docs/price.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gnmr.conversion.converted import ConvertedModel
from gnmr.conversion.linear import PathLinear, autocast_dtype
from gnmr.conversion.passes import graph_task, in_backward
from gnmr.conversion.unit_names import of_any_expert
from gnmr.formats.number_formats import Format, KeepFormat
from gnmr.formats.recipes import Cast, ExecutionPath, Recipe
from gnmr.formats.scaling import TINY
from gnmr.measure.absent_weights import is_offloaded
from gnmr.measure.gemm_operands import PathOperands, broken_inputs, inputs_on, outliers, result_in, weight_of
from gnmr.measure.guards import leaves_of
from gnmr.measure.per_unit import ByUnit
from gnmr.names import GEMMS

PATHS = ("low", "recovery")
_FPROP = ("fprop", "fprop_sequence", "fprop_elements", "fprop_input", "fprop_weight")
"""`fprop_input`, `fprop_weight`: the error of one operand alone."""
_OF_PATH = (*_FPROP, "dgrad", "dgrad_bias", "wgrad", "wgrad_bias")
"""Sums of each path."""
_SHARED = ("square_error", "gradient_square", "dgrad_square", "wgrad_square")
"""Sums of no path: of the low path's cast of the input, (x - Q(x))^2, and of gradients. The first two are of frozen
models alone; `gradient_square` is of all tokens, not of the measured ones."""
_OF_ALL_CALLS = ("fprop_sequence", "wgrad", "wgrad_square", "gradient_square")
"""Errors that add up over the calls of an operator whatever their numbers of rows."""
_CODES = 32
"""Powers of two that tell sequences apart in one backward pass: float32 and bfloat16 hold the products exactly."""
_CODES_FP16 = 8
"""The same if a gradient is in float16, which has a smaller range."""

PRICES = (*(f"price_{gemm}{path}" for path in ("", "_recovery") for gemm in GEMMS), "price")
"""Prices that can be measured, as `gnmr.control.evidence` describes them."""


def measure_prices(
    model: ConvertedModel,
    names: Collection[str] = PRICES[:3],
    tokens: int = 16,
    *,
    against_recovery: bool = False,
    candidates: Mapping[str, Recipe] | None = None,
    frozen: bool = False,
) -> PriceMeter:
    """Start measuring the prices `names` of every `tokens`-th token (see `PriceMeter`), replacing an earlier meter.

    Args:
        model: a converted model.
        names: some of `PRICES`.
        tokens: one token in every `tokens` is measured.
        against_recovery: measure errors of the low path's fprop against the recovery path's result.
        candidates: recipes under names other than the paths', whose fprop is priced against the recovery path too.
        frozen: the weights require no gradient, and nothing writes to an input before its backward pass. Inputs are
            kept by reference and cast when they are measured; `mse` and the norms of gradients are measured too.

    `model.shared.prices = None` ends it. Raises ValueError if the model has no recovery path for a price of it.
    """
    model.check_converted()
    of_recovery = [name for name in names if name == "price" or name.endswith("recovery") or against_recovery]
    if of_recovery and model.recovery is None:
        raise ValueError(f"{', '.join(of_recovery)}: this model has no recovery path")
    model.shared.prices = meter = PriceMeter(model, names, tokens, against_recovery, candidates, frozen)
    return meter


class PriceMeter:
    """Sums over all backward passes since the last `reset`.

    Set `enabled` to False in steps whose prices are not read: such steps cost nothing.
    """

    def __init__(
        self,
        model: ConvertedModel,
        names: Collection[str],
        tokens: int,
        against_recovery: bool = False,
        candidates: Mapping[str, Recipe] | None = None,
        frozen: bool = False,
    ) -> None:
        """Prepare the sums; the arguments are those of `measure_prices`.

        `price` needs both paths. If a unit is a GEMM, the price of that GEMM is measured, and is 0 for the others.
        """
        self.names, self.tokens, self.enabled = tuple(names), tokens, True
        self._against_recovery, self._frozen = against_recovery, frozen
        self.gradients_only = False
        """With `frozen`: measure the norms of gradients and nothing else."""
        operators, units = model.operators, model.units
        self.loss_tokens: int | None = None
        """Tokens in the mean of a step's loss; None: they are counted in the gradients (see the module)."""
        self.sequences: Sequences | None = None
        """Finds the sequence of each row; None: it follows from the shape of the input."""
        self._step = 0
        self._operators = list(operators)
        self._place = {operator.index: i for i, operator in enumerate(operators)}
        device = model.device
        self._by_unit = ByUnit(units, operators, device)
        self._group = torch.tensor([self._by_unit.group[operator.index] for operator in operators], device=device)
        self._members = torch.tensor([len(unit.operators) for unit in units], device=device)
        # `price` is what recovery saves of fprop. If no path casts fprop, it is exact, and only wgrad has an error.
        paths_of = [path for operator in operators for path in (operator.low, operator.recovery)]
        saving = "fprop" if any(_casts_fprop(path, operators[0]) for path in paths_of) else "wgrad"
        # price_wgrad -> (wgrad, low), price_wgrad_recovery -> (wgrad, recovery).
        gemms_by_path = {(name.split("_")[1], PATHS[name.endswith("recovery")]) for name in names if name != "price"}
        self._measured_gemms = gemms_by_path | ({(saving, path) for path in PATHS} if "price" in names else set())
        """(GEMM, path) of each price."""
        self.gemms = {gemm for gemm, _ in self._measured_gemms}
        measured = {path for _, path in self._measured_gemms}
        self.paths = [path for path in PATHS if path in measured or against_recovery]
        self._saving = saving
        """The GEMM that `price` is about."""
        self.candidates = {name: Recipe(name, fprop=recipe.fprop) for name, recipe in (candidates or {}).items()}
        # The columns: every number of both paths, fprop of the candidates, and the sums of no path.
        self._columns = [(path, name) for path in PATHS for name in _OF_PATH]
        self._columns += [(path, name) for path in self.candidates for name in _FPROP]
        self._columns += [("", name) for name in _SHARED]
        """(path or candidate, name) of each sum; "" for sums of neither."""
        self._sums = torch.zeros(len(self._operators), len(self._columns), dtype=torch.float64, device=device)
        self.rows = [0] * len(self._operators)
        """Rows of each operator, including those that were not measured."""
        self._weight_norms: dict[int, Tensor] = {}
        """Norm of each measured weight by place, with `frozen`."""
        self._open: dict[int, _SummedCalls] = {}
        """Calls of operators that ran several times, by place, until the backward pass of all is measured."""
        self._calls = [0] * len(self._operators)
        """Calls of each operator since its last backward pass, which `_measured` has."""
        self._measured: set[int] = set()
        self._called = 0
        """Calls of all operators, by which the last one is known."""
        self._terms: dict[int, _Last] = {}
        """The operator that was called last in each backward pass."""
        self._most: dict[int, int] = {}
        """Rows of the largest call in each backward pass."""

    @property
    def operators(self) -> list[str]:
        """Return the names, in the order of `by_operator`."""
        return [operator.operator_name for operator in self._operators]

    def begin_step(self, step: int) -> None:
        """Begin a step.

        Args:
            step: its number, which alone determines the measured tokens and the draws of stochastic casts.
        """
        self._step = step

    def reset(self) -> None:
        """Forget everything measured so far."""
        self._sums.zero_()
        self.rows = [0] * len(self._operators)
        self._open.clear()
        self._terms.clear()
        self._most.clear()

    @property
    def terms(self) -> Tensor:
        """Return the number of terms in the mean of the step's loss, () float64 on the device."""
        if self.loss_tokens is not None:
            return self._sums.new_tensor(self.loss_tokens)
        if self._terms:
            # All calls count if each has a part of the tokens (chunks of a head), else only the last one.
            most = self._most
            terms = [
                last_call.together if last_call.rows <= most[task] else last_call.terms
                for task, last_call in self._terms.items()
            ]
            return torch.stack(terms).sum().to(self._sums)
        return self._sums.new_tensor(max(self.rows))

    def parts(self, share: float) -> Tensor:
        """Return a copy of this rank's part of the sums, (num_operators, columns) float64.

        Args:
            share: the rank's part of the step's loss, from 0 to 1, which counts squared as gradients do. `terms` add up
                over ranks without a factor.
        """
        # The sums hold squares of gradients, so a gradient that is `share` of the step's counts with its square.
        self._close_all()
        return self._sums * share**2

    def by_operator(self, path: str = "low", summed: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """Return {name: (num_operators,) float64} on the device, without waiting for it.

        The names are `fprop`, `fprop_sequence`, `fprop_elements`, `fprop_input` and `fprop_weight` in nats, `dgrad` and
        `wgrad` (||d||^2/||g||^2), and their `_bias` (<g, d>/||g||^2). With `frozen`, `mse` is the mean of (x - Q(x))^2
        of the low path's cast of the input, and `norm` is ||g|| of wgrad over all tokens. An operator that was not
        measured has 0; an operator whose operands were not finite has NaN or Inf. `fprop_sequence` is NaN if tokens
        were left out, because their products are unknown, or if rows of the operator belong to no single sequence.

        Args:
            path: low, recovery, or a candidate, which has only the names of fprop.
            summed: sums of `parts` and of `terms` over all ranks.
        """
        self._close_all()
        totals, loss_tokens = (self._sums, self.terms) if summed is None else summed
        # price_fprop = T/2 * sum of u^2, and for the backward GEMMs ||d||^2 / ||g||^2.
        sums = {name: totals[:, at] for at, (of, name) in enumerate(self._columns) if of in (path, "")}
        prices = {name: loss_tokens / 2 * sums[name] for name in _FPROP}
        for gemm in ("dgrad", "wgrad") if path in PATHS else ():
            for name in (gemm, f"{gemm}_bias"):
                square = sums[f"{gemm}_square"]
                prices[name] = torch.where(square != 0, sums[name] / square, 0.0)
        # The sums were scaled up to all rows, so the mean is over the elements of all rows.
        if self._frozen and path in PATHS:
            elements = [rows * o.in_features for rows, o in zip(self.rows, self._operators, strict=True)]
            prices["mse"] = sums["square_error"] / totals.new_tensor(elements).clamp(min=1)
            prices["norm"] = sums["gradient_square"].sqrt()
        return prices

    def reach(self) -> Tensor:
        """Return how far the n measured weights move the loss, (n,) float64: see `guards.reach_of`.

        They are measured with `frozen` alone.
        """
        norms = self.by_operator()["norm"]
        measured = [place for place, rows in enumerate(self.rows) if rows]
        if not measured:
            return norms[:0]
        weights = torch.stack([self._weight_norms[place] for place in measured])
        return norms[measured] * weights.to(norms).clamp(min=1)

    def read(self, grad_scale: float = 1.0, summed: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the prices on the device, in the model's order, without waiting for it.

        Args:
            grad_scale: the loss scale in the gradients; nats are divided by its square.
            summed: that of `by_operator`; None: this rank's sums.

        Returns:
            {name: (num_units,) float64}. Over the operators of a unit, nats of fprop are added up, and relative squared
            errors of dgrad and wgrad are averaged. `price` is what recovery saves of fprop, or else of wgrad
            (docs/price.md).
        """
        # Nats are of second order in the gradient, relative errors of order 0: those do not see the loss scale.
        prices, by_path = {}, {path: self.by_operator(path, summed) for path in self.paths}
        for gemm, path in self._measured_gemms:
            value = self._of_units(by_path[path][gemm], gemm)
            name = f"price_{gemm}{'' if path == 'low' else '_recovery'}"
            prices[name] = value / (grad_scale**2 if gemm == "fprop" else self._members)
        if "price" in self.names and self._saving == "fprop":
            prices["price"] = (prices["price_fprop"] - prices["price_fprop_recovery"]).clamp(min=0)
        elif "price" in self.names:
            # What recovery saves of wgrad's squared error, as a share of the squared gradient of all operators.
            squares = (self._sums if summed is None else summed[0])[:, -1]
            saved = (by_path["low"]["wgrad"] - by_path["recovery"]["wgrad"]) * squares
            prices["price"] = self._of_units(saved, "wgrad").clamp(min=0) / squares.sum().clamp(min=TINY)
        return {name: prices[name] for name in self.names}

    def _of_units(self, values: Tensor, gemm: str) -> Tensor:
        """Return the sums by unit, (num_units,), of a GEMM's values (num_operators,)."""
        groups = values.new_zeros(self._by_unit.num_groups).index_add_(0, self._group, values)
        return self._by_unit(groups, gemm)

    def watch(self, operator: PathLinear, input: Tensor, output: Tensor) -> None:
        """Measure the backward pass of this forward pass.

        There is nothing to measure without a graph or without rows.

        Args:
            operator: an operator of the model.
            input: its input (..., in_features); the measured tokens are kept until the backward pass.
            output: its result (..., out_features), on whose gradient the measurement waits.
        """
        if not output.requires_grad or input.numel() == 0 or operator.index not in self._place:
            return
        # The operands of the forward GEMM on each path, for the measured tokens alone.
        dtype = autocast_dtype(input) or input.dtype
        count = input.numel() // input.shape[-1]
        paths = {name: path for name in self.paths if (path := getattr(operator, name)) is not None} | self.candidates
        chosen = self._chosen(count, paths.values(), input.device)
        version = input._version if self._frozen else None
        inputs: Callable[[], _Inputs] = partial(self._read, operator, paths, input.detach(), chosen, dtype, version)
        if not self._frozen:  # the operator itself may keep less than its input
            inputs = partial(lambda measured: measured, inputs())
        # Which rows belong together, and which call of the operator this is.
        length = input.shape[-2] if input.dim() > 2 else 1
        marks = [] if self.sequences is None else self.sequences.watch(output)
        self._called += 1
        # Reentrant checkpointing repeats the forward pass inside the backward pass that its own ones belong to.
        around = graph_task() if in_backward() else None
        place = self._place[operator.index]
        if around is None:
            self._calls[place] = 1 if place in self._measured else self._calls[place] + 1
            self._measured.discard(place)
        # A weight that is no parameter was made for this pass: pruned, or put there by functional_call. An offloaded
        # one is gone when backward comes.
        stays = isinstance(operator.weight, nn.Parameter) and not is_offloaded(operator.module)
        weight_of_pass = None if stays else operator.matrix
        weight, bias = operator.given or (weight_of_pass, operator.bias)
        weight_read = None if weight is None else weight.detach()
        forward_pass = _Pass(
            operator,
            paths,
            weight_read,
            bias,
            inputs,
            dtype,
            chosen,
            count,
            length,
            marks,
            self._called,
            around,
        )
        output.register_hook(partial(self._backward, forward_pass))

    def _read(
        self,
        operator: PathLinear,
        paths: Mapping[str, ExecutionPath],
        input: Tensor,
        chosen: Tensor,
        dtype: torch.dtype,
        version: int | None,
    ) -> _Inputs:
        """Return the measured tokens of `input` (..., I), which must still have this version number (None: any)."""
        if version is not None and input._version != version:
            raise ValueError(
                f"{operator.operator_name}: its input is changed in place before the backward pass, which needs it"
            )
        rows = input.reshape(-1, input.shape[-1]).to(dtype)
        if self.gradients_only:
            return _Inputs(rows, rows[:0], {}, {})
        on_paths = {name: inputs_on(operator, path, self.gemms, rows, chosen) for name, path in paths.items()}
        # A fault in force changes what the GEMMs of the low path read.
        fault = None if operator.fault is None else operator.fault.for_step(input, remember=False)
        if fault is not None and "low" in paths:
            on_paths["low"] = broken_inputs(operator, operator.low, fault, input, on_paths["low"], chosen)
        # Columns of outliers stay in 16 bits in fprop, in the input and in the weight.
        outlier_columns = {
            name: columns_kept
            for name, path in paths.items()
            if isinstance(path, Recipe) and (columns_kept := outliers(path.fprop.input, rows)) is not None
        }
        return _Inputs(rows if self._frozen else rows[:0], rows[chosen].float(), on_paths, outlier_columns)

    def _chosen(self, count: int, paths: Collection[ExecutionPath], device: torch.device) -> Tensor:
        """Return the indices of the measured tokens among `count`; tokens that share a scale stay together."""
        # Tokens are chosen in groups of `length` rows, the most that share a scale on any path.
        length = min(count, max((_group_rows(path) for path in paths), default=1))
        stride = min(self.tokens, -(-count // length))
        # A hash of the step's number, so that no period of the data meets the same tokens repeatedly.
        first = (self._step * 2654435761 >> 8) % stride
        starts = torch.arange(first * length, count, stride * length, device=device)
        indices = (starts[:, None] + torch.arange(length, device=device)).flatten()
        return indices if count % length == 0 else indices[indices < count]

    @torch.no_grad()
    def _backward(self, forward_pass: _Pass, grad: Tensor) -> None:
        """Measure one pass, or mark its rows if the backward pass is one of `Sequences.find`."""
        if self.sequences is None or not self.sequences.takes(forward_pass.marks, grad):
            self._measure(forward_pass, grad)

    def _measure(self, forward_pass: _Pass, grad: Tensor) -> None:
        """Add up one pass; `grad` (..., O) is the gradient of its output."""
        operator, inputs = forward_pass.operator, forward_pass.inputs()
        place, x = self._place[operator.index], inputs.x
        task = graph_task() if forward_pass.around is None else forward_pass.around
        grad_2d = grad.reshape(-1, grad.shape[-1]).to(forward_pass.dtype)
        self._count_terms(forward_pass, task, grad_2d)
        if self.gradients_only:
            self._add_call(forward_pass, task, {}, {("", "gradient_square"): grad_2d.float().t() @ inputs.rows.float()})
            return
        # What is exact: dx = dy W, and the weight's gradient dy^T x.
        dy, weight = grad_2d[forward_pass.chosen].float(), weight_of(operator, forward_pass.dtype, forward_pass.weight)
        dx = dy @ weight
        trained = operator.weight.is_floating_point() if self._frozen else operator.weight.requires_grad
        gradient = dy.t() @ x if "wgrad" in self.gemms and trained else None
        sequence = self._sequence_of(forward_pass, grad)
        casts = {
            name: PathOperands(operator, path, weight, grad_2d, dy, seed=self._step << 20 | operator.index)
            for name, path in forward_pass.paths.items()
        }
        # The operands of fprop, exact and on each path.
        exact = _Operands(x, weight, None)
        operands = {name: _fprop_operands(inputs, name, operands_of, exact) for name, operands_of in casts.items()}
        squares: dict[tuple[str, str], Tensor] = {("", "dgrad_square"): _square(dx)}
        errors: dict[tuple[str, str], Tensor] = {} if gradient is None else {("", "wgrad_square"): gradient}
        # The measured tokens stand for all, so sums of squares grow by this factor, and errors by its root.
        scale = forward_pass.count / len(forward_pass.chosen)
        # Numbers of frozen models: the error of the input, and the norms of the gradient and the weight.
        if self._frozen:
            if (x_low := inputs.on_paths.get("low", {}).get("fprop")) is not None:
                squares["", "square_error"] = _inner(x - x_low, x - x_low)
            if gradient is not None:
                # This gradient is of all tokens already, so the root that it is multiplied by later is taken out.
                whole = gradient if scale == 1 else grad_2d.float().t() @ inputs.rows.float() / scale**0.5
                errors["", "gradient_square"] = whole
            if place not in self._weight_norms:
                self._weight_norms[place] = torch.linalg.vector_norm(weight)
        for name, operands_of in casts.items():
            # fprop: the inner products of dy with the error of the output.
            high = operands.get("recovery", exact) if self._against_recovery and name != "recovery" else exact
            if "fprop" in self.gemms and not (operands[name] is high is exact):
                of_high = dx if high.weight is weight else dy @ high.weight
                terms, elements = _fprop(forward_pass, sequence, operands[name], high, dy, of_high)
                errors |= {(name, key): value for key, value in terms.items()}
                squares[name, "fprop_elements"] = elements
            if name in self.candidates:
                continue
            # dgrad: d = Q(dy) Q(W) - dy W.
            if "dgrad" in self.gemms and operands_of.of("dgrad").casts:
                product = operands_of.grad_output("dgrad", 1) @ operands_of.weight("dgrad")
                error = result_in(product, operands_of.of("dgrad").result) - dx
                squares |= {(name, "dgrad"): _square(error), (name, "dgrad_bias"): _inner(dx, error)}
            # wgrad: d = Q(dy)^T Q(x) - dy^T x. It stays a matrix until all calls of the operator are added up.
            if gradient is not None and "wgrad" in inputs.on_paths[name]:
                product = operands_of.grad_output("wgrad", 0).t() @ inputs.on_paths[name]["wgrad"]
                errors[name, "wgrad"] = result_in(product, operands_of.of("wgrad").result) - gradient
        self._add_call(forward_pass, task, squares, errors, scale)

    def _add_call(
        self,
        forward_pass: _Pass,
        task: int,
        squares: dict[tuple[str, str], Tensor],
        errors: dict[tuple[str, str], Tensor],
        scale: float = 1.0,
    ) -> None:
        """Add the sums of a call, and its errors or their squares, to those of its operator.

        Args:
            forward_pass: the call.
            task: the backward pass.
            squares: sums of squares by (path, name), which add up over calls.
            errors: errors that are added up over calls before they are squared.
            scale: the number of all tokens over that of the measured ones.
        """
        place = self._place[forward_pass.operator.index]
        self.rows[place] += forward_pass.count
        self._measured.add(place)
        # Another backward pass has begun, so the calls of the one before are complete.
        if place in self._open and self._open[place].task != task:
            self._close(place)
        # A single call: its errors are squared at once.
        if place not in self._open and self._calls[place] <= 1:
            self._add(place, squares | _squared(errors), scale)
            return
        # Several calls in one backward pass: their errors are one error, and are squared together.
        self._add(place, squares, scale)
        calls = self._open.setdefault(place, _SummedCalls(task, {}))
        for key, error in errors.items():
            # Errors by token add up only between calls that have the same tokens.
            rows = 0 if key[1] in _OF_ALL_CALLS else forward_pass.count
            before = calls.errors.get((*key, rows))
            error = error * scale**0.5
            calls.errors[*key, rows] = error if before is None else before + error

    def _add(self, place: int, sums: dict[tuple[str, str], Tensor], scale: float = 1.0) -> None:
        """Add the sums of a call to those of its operator."""
        zero = self._sums.new_zeros(())
        in_columns = torch.stack([sums.get(column, zero).to(self._sums) for column in self._columns])
        self._sums[place].add_(in_columns, alpha=scale)

    def _close(self, place: int) -> None:
        """Square and add the errors of an operator that ran several times."""
        by_rows: dict[int, dict[tuple[str, str], Tensor]] = {}
        for (path, name, rows), error in self._open.pop(place).errors.items():
            by_rows.setdefault(rows, {})[path, name] = error
        for errors in by_rows.values():
            self._add(place, _squared(errors))

    def _close_all(self) -> None:
        for place in list(self._open):
            self._close(place)

    def _count_terms(self, forward_pass: _Pass, task: int, grad_2d: Tensor) -> None:
        """Count the terms of the loss in the gradient of the last call, which backward meets first."""
        if self.loss_tokens is not None or of_any_expert(name := forward_pass.operator.operator_name) != name:
            return
        last = self._terms.get(task)
        # Checkpointed parts are repeated from the last to the first, so that the number of a call means nothing.
        later = last is None or (forward_pass.around is None and forward_pass.call > last.call)
        self._most[task] = max(self._most.get(task, 0), forward_pass.count)
        if not later and last is not None and last.operator is not forward_pass.operator:
            return
        # Tokens without a target have no gradient here, so the rows with one are the terms of the loss.
        terms = (grad_2d != 0).any(dim=1).sum()
        if last is None or last.operator is not forward_pass.operator:
            self._terms[task] = _Last(forward_pass.operator, forward_pass.call, forward_pass.count, terms, terms)
            return
        # Another call of the same operator, such as a head that runs on the tokens in chunks.
        together = last.together + terms
        first = (forward_pass.call, terms) if later else (last.call, last.terms)
        self._terms[task] = _Last(forward_pass.operator, first[0], last.rows + forward_pass.count, first[1], together)

    def _sequence_of(self, forward_pass: _Pass, grad: Tensor) -> tuple[Tensor, int] | None:
        """Return (the sequence of each row, their number); None: unknown."""
        if len(forward_pass.chosen) < forward_pass.count:
            return None
        if self.sequences is not None:
            return self.sequences.of(forward_pass.marks, grad)
        # Rows (S, T) in this order: row i belongs to sequence i // T.
        rows = torch.arange(forward_pass.count, device=grad.device)
        return rows // forward_pass.length, forward_pass.count // forward_pass.length


class Sequences:
    """Finds which sequence each row of a tensor belongs to, whatever the tensor's layout.

    A row belongs to the sequence whose loss its gradient comes from. `find` runs backward passes in which the loss of
    every sequence has a weight of its own, a power of two, so that it multiplies the gradient of each of its rows.
    If weights are frozen, none of their gradients is computed. A sequence's number has digits of base `_CODES` (or
    `_CODES_FP16`), and each digit takes one pass.
    """

    def __init__(self) -> None:
        self._marking = False
        """True during the backward passes of `find`."""
        self._passing = False
        self._number = 0
        """Number of sequences; 0: unknown."""
        self._watched = 0
        """Number of tensors whose rows are watched."""
        self._codes = _CODES

    def begin(self) -> None:
        """Forget the pass before."""
        self._number, self._codes, self._watched = 0, _CODES, 0

    def watch(self, output: Tensor) -> list[Tensor]:
        """Return a list for the sizes of the rows of this tensor's gradient in each pass of `find` (`_sizes`)."""
        self._watched += 1
        if output.dtype == torch.float16:
            self._codes = _CODES_FP16
        return []

    def find(self, losses: Tensor) -> None:
        """Run the backward passes of `losses` (S,), whose sum is the loss, and keep the graph."""
        if not self._watched:
            return
        leaves = leaves_of(losses)
        self.mark(
            len(losses),
            losses.device,
            lambda weights: torch.autograd.grad(
                (losses * weights.to(losses)).sum(), leaves, retain_graph=True, allow_unused=True
            ),
        )

    def mark(self, number: int, device: torch.device, backward: Callable[[Tensor], object]) -> None:
        """Run the backward passes in which each of `number` sequences has a weight of its own.

        `backward` runs one with these weights (S,) float32 on `device` of the sequences' losses, and keeps the graph.
        """
        self._number = number
        self._marking = True
        try:
            # In the pass of a digit, the gradient of each sequence is multiplied by 2 to the power of its digit.
            for digit in range(self._digits):
                codes = torch.arange(number, device=device) // self._codes**digit % self._codes
                backward(torch.exp2(codes.float()))
        finally:
            self._marking, self._watched = False, 0

    @property
    def _digits(self) -> int:
        return math.ceil(math.log(max(1, self._number), self._codes) - 1e-9)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let backward passes inside measure and mark nothing."""
        self._passing = True
        try:
            yield
        finally:
            self._passing = False

    def takes(self, marks: list[Tensor], grad: Tensor) -> bool:
        """Return True if this backward pass is not the one to measure; mark the rows if it is one of `find`."""
        if self._marking:
            marks.append(_sizes(grad))
        return self._marking or self._passing

    def of(self, marks: list[Tensor], grad: Tensor) -> tuple[Tensor, int] | None:
        """Return (the sequence of each row, the number of sequences).

        Returns None if `find` did not run, or if rows have a gradient from several sequences. Waits for the device.

        Args:
            marks: (rows,) the sizes of the gradient in the passes of `find`.
            grad: the gradient (..., O) of the loss.
        """
        if not self._number or len(marks) != self._digits:
            return None
        sizes = _sizes(grad)
        sequence = torch.zeros_like(sizes, dtype=torch.int64)
        # Tiny rows have lost digits, and add nothing to any sum.
        counts = sizes > 1e-6 * sizes.amax()
        # mark / size is 2 to the power of the digit if all of the row's gradient comes from one sequence.
        for digit, mark in enumerate(marks):
            code = torch.where(counts, mark / sizes, 1.0).log2()
            digits = code.round()
            sound = ((code - digits).abs() <= 0.05) & (digits >= 0) & (digits < self._codes)  # NaN is not
            if not bool(sound.all()):
                return None
            sequence += digits.long() * self._codes**digit
        return (sequence, self._number) if bool((sequence < self._number).all()) else None


def _sizes(grad: Tensor) -> Tensor:
    """Return the largest magnitude of each row of a gradient (..., O), (rows,) float32."""
    return grad.abs().amax(dim=-1).flatten().float()


class _Last(NamedTuple):
    """The operator that was called last in one forward pass."""

    operator: PathLinear
    call: int
    """Number of its last call among those of all operators."""
    rows: int
    """Rows of all of its calls."""
    terms: Tensor
    """Rows with a gradient in its last call."""
    together: Tensor
    """Those in all of its calls, which count if the calls are parts of the tokens: no more rows than another call."""


@dataclass(frozen=True)
class _SummedCalls:
    """Errors of several calls of one operator in one backward pass."""

    task: int
    """The backward pass."""
    errors: dict[tuple[str, str, int], Tensor]
    """Sums over calls by path, name, and number of rows (0: calls of any number)."""


@dataclass(frozen=True)
class _Pass:
    """One forward pass of an operator, until its backward pass."""

    operator: PathLinear
    paths: dict[str, ExecutionPath]
    weight: Tensor | None
    """(O, I), if the pass was given one."""
    bias: Tensor | None
    inputs: Callable[[], _Inputs]
    """Returns the measured tokens of the input."""
    dtype: torch.dtype
    """Dtype in which the GEMMs compute."""
    chosen: Tensor
    """Indices of the measured tokens, (n,)."""
    count: int
    """Number of all rows."""
    length: int
    """Number of rows per sequence by the shape of the input."""
    marks: list[Tensor]
    """As in `Sequences.of`."""
    call: int
    """Number of the call among those of all operators."""
    around: int | None
    """The backward pass in which checkpointing repeated this pass, if it did."""


class _Inputs(NamedTuple):
    """The measured tokens of an operator's input."""

    rows: Tensor
    """All tokens, (T, I), in the dtype in which the GEMMs compute; none if weights are not frozen."""
    x: Tensor
    """The measured tokens, (n, I) float32."""
    on_paths: dict[str, dict[str, Tensor]]
    """These tokens by path and GEMM as that reads them, float32."""
    columns: dict[str, Tensor]
    """By path, the columns of input and weight that fprop leaves in 16 bits (outliers), (I,) bool."""


class _Operands(NamedTuple):
    """The operands of fprop on a path, float32, and the cast of its result."""

    x: Tensor
    """(n, I)"""
    weight: Tensor
    """(O, I)"""
    result: Cast | None


def _casts_fprop(path: ExecutionPath | None, operator: PathLinear) -> bool:
    """Return True if fprop is not exact on that path."""
    if isinstance(path, Recipe):
        return bool(path.fprop.casts)
    return path is not None and not isinstance(path, KeepFormat) and operator.shared.quantize_forward


def _group_rows(path: ExecutionPath) -> int:
    """Return the number of tokens that share a scale; 1 if the scale is per token or per tensor."""
    if isinstance(path, Format):
        return 1
    # wgrad contracts over tokens, so its groups hold several; tiles and blocks do so in any GEMM.
    casts = [(path.fprop.input, 1), (path.wgrad.input, 0), (path.dgrad.grad_output, 1), (path.wgrad.grad_output, 0)]
    return max((cast.group(dim)[0] or 1 for cast, dim in casts if cast is not None), default=1)


def _fprop_operands(inputs: _Inputs, path: str, casts: PathOperands, exact: _Operands) -> _Operands:
    """Return the operands of fprop on `path`: `exact` itself if nothing is cast."""
    if (x := inputs.on_paths[path].get("fprop")) is None:
        return exact
    weight, columns = casts.weight("fprop"), inputs.columns.get(path)
    if columns is not None and weight is not exact.weight:
        weight = torch.where(columns, exact.weight, weight)
    return _Operands(x, weight, casts.of("fprop").result)


def _fprop(
    forward_pass: _Pass, sequence: tuple[Tensor, int] | None, low: _Operands, high: _Operands, dy: Tensor, dx: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the error of `low` against `high` as inner products to be squared, and the squares of their elements.

    The inner products are (n,) by token and (S,) by sequence; dx is dy times the weight of `high`.
    """
    # The input's error: <dy W, Q(x) - x>, element by element.
    by_input = dx * (low.x - high.x)
    errors = {"fprop_input": by_input.sum(dim=1)}
    terms = by_input
    # The weight's error, for the input that is in force: <dy (Q(W) - W), Q(x)>.
    if low.weight is not high.weight:
        by_weight = (dy @ (low.weight - high.weight)) * low.x
        errors["fprop_weight"], terms = by_weight.sum(dim=1), by_input + by_weight
    u, elements = terms.sum(dim=1), _square(terms)
    # The error of a result that is cast itself: <dy, Q(y) - y>.
    if low.result is not None or high.result is not None:
        by_result = dy * (_result_error(forward_pass.bias, low) - _result_error(forward_pass.bias, high))
        u, elements = u + by_result.sum(dim=1), elements + _square(by_result)
    # Errors of the tokens of a sequence are added up before they are squared; NaN where sequences are unknown.
    if sequence is None:
        by_sequence = u.new_full((1,), torch.nan)
    else:
        by_sequence = u.new_zeros(sequence[1], dtype=torch.float64).index_add_(0, sequence[0], u.double())
    return errors | {"fprop": u, "fprop_sequence": by_sequence}, elements


def _result_error(bias: Tensor | None, operands: _Operands) -> Tensor | float:
    """Return the change of the result by its cast, (n, O)."""
    if operands.result is None:
        return 0.0
    weight = operands.weight.t()
    y = operands.x @ weight if bias is None else torch.addmm(bias.detach().float(), operands.x, weight)
    return result_in(y, operands.result) - y


def _squared(errors: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return the squared norms of errors by (path, name), and the bias of wgrad against the exact gradient."""
    squares = {key: _square(error) for key, error in errors.items()}
    exact = errors.get(("", "wgrad_square"))
    for (path, name), error in errors.items():
        if name == "wgrad":
            assert exact is not None
            squares[path, "wgrad_bias"] = _inner(exact, error)
    return squares


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two matrices, () float64."""
    return (a * b).sum(dtype=torch.float64)


def _square(x: Tensor) -> Tensor:
    """Return the squared norm, accumulated in float32, as float64."""
    return torch.linalg.vector_norm(x).double().square_()
