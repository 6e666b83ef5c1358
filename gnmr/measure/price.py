"""The price of a path: what each GEMM of each operator costs on it, measured in the passes of training.

`fprop`, in nats. On a path an operator gives y_t + D_t in place of y_t at token t. dy_t is the gradient of the mean
loss over T tokens with respect to y_t. To second order, with the empirical Fisher matrix in place of the Hessian, the
mean loss is higher by

    price_fprop = T/2 * sum_t u_t^2        u_t = <dy_t, D_t>

With Q the path's casts and W the weight (O, I)

    u_t = <dy_t W, Q(x_t) - x_t>                 the input's error
        + <dy_t (Q(W) - W), Q(x_t)>              the weight's error

so it needs one product dy W, which dgrad makes too, and one dy (Q(W) - W), of the tokens that are measured. With labels
that the model draws itself in place of the data's, the expectation of the price is the KL divergence per token between
the model without and with the error, to second order, but for the products of two tokens. Two more forms are summed of
the same inner products:

    sequence    T/2 * sum over sequences of (sum_t u_t)^2: with drawn labels the KL with the products of two tokens of a
                sequence, which matter where the error is coherent over tokens. One sample a sequence, so it is noisier.
                Rows of an operator that is given no sequences, (T, I), are each their own
    elements    squares of the elements of the inner products one by one: where errors are large they grow together, and
                the square of their sum loses the order of the operators; the sum of their squares keeps it

Errors are against the exact product. With `against_recovery` the low path's are against the recovery path's result:
Q(x), Q(W) of that path stand in the place of x and W. So are those of `candidates`: recipes that no operator is on, of
which the same backward pass gives the price of fprop.

`dgrad` and `wgrad` change the next step, not the loss now. Their price is the squared error of the gradient that they
give, relative to that gradient, ||d||^2 / ||g||^2, and its bias <g, d> / ||g||^2; both without unit. For dgrad g is
dy W, for wgrad dy^T x of the measured tokens. An operator that several tokens reach only in part (an expert) has the
loss's T all the same: the largest number of rows of any operator of the step, or `loss_tokens`.

What is measured is the path's own numbers, whatever path is in force and whatever kernels run it: the casts of
`gnmr.precision.cast`, in float32, with the scales that the whole tensors have, delayed scales as they are, a fault that
is in force in the low path. dy is the one that came back. One token in `tokens` is measured, or one group of tokens
where some share a scale; which ones depends on the step's number alone.

Prior art: second-order sensitivities and Fisher-weighted quantization error (HAWQ; FIT, ICLR 2023), ModelOpt's
AutoQuantize, which sums (grad_output * output error)^2 for inference. docs/price.md derives it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gnmr.measure.operands import Casts, broken_inputs, inputs_on, outliers, result_in, weight_of
from gnmr.measure.units import ByUnit
from gnmr.names import GEMMS
from gnmr.precision.converted import ConvertedModel
from gnmr.precision.formats import Format, KeepFormat
from gnmr.precision.linear import PathLinear, autocast_dtype
from gnmr.precision.recipes import Cast, ExecutionPath, Recipe
from gnmr.precision.scaling import TINY

PATHS = ("low", "recovery")
_FPROP = ("fprop", "fprop_sequence", "fprop_elements", "fprop_input", "fprop_weight")
"""`fprop_input`, `fprop_weight`: of each operand's error alone."""
_OF_PATH = (*_FPROP, "dgrad", "dgrad_bias", "wgrad", "wgrad_bias")
"""Sums of each path."""
_SHARED = ("dgrad_square", "wgrad_square")

PRICES = (*(f"price_{gemm}{path}" for path in ("", "_recovery") for gemm in GEMMS), "price")
"""What is measured, as `gnmr.control.evidence` describes it."""


def measure_prices(
    model: ConvertedModel,
    names: Collection[str] = PRICES[:3],
    tokens: int = 16,
    *,
    against_recovery: bool = False,
    candidates: Mapping[str, Recipe] | None = None,
) -> PriceMeter:
    """Start measuring the prices `names` of every `tokens`-th token (see `PriceMeter`), in place of an earlier meter.

    `against_recovery`: errors of the low path's fprop are against the recovery path's result; those of the fprop of
    `candidates`, which have other names than the paths, are too.

    `model.shared.prices = None` ends it. Raises ValueError for an unknown name, a stride below 1, and a price of the
    recovery path of a model without one.
    """
    model.check_converted()
    of_recovery = [name for name in names if name == "price" or name.endswith("recovery") or against_recovery]
    if of_recovery and model.recovery is None:
        raise ValueError(f"{', '.join(of_recovery)}: this model has no recovery path")
    model.shared.prices = meter = PriceMeter(model, names, tokens, against_recovery, candidates)
    return meter


class PriceMeter:
    """Sums over all backward passes since the last `reset`.

    Set `enabled` to False in steps whose prices are not read: they cost nothing then.
    """

    def __init__(
        self,
        model: ConvertedModel,
        names: Collection[str],
        tokens: int,
        against_recovery: bool = False,
        candidates: Mapping[str, Recipe] | None = None,
    ) -> None:
        """`names`: of `PRICES`; `price` is of both paths. Of a unit that is a GEMM that GEMM's price is measured, 0 for
        the others. `tokens`: one token in so many is measured. `candidates`: see `measure_prices`."""
        unknown = [name for name in names if name not in PRICES]
        if unknown or not names:
            raise ValueError(f"price {unknown}: use some of {', '.join(PRICES)}")
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: the stride of the measured tokens must be 1 or more")
        self.names, self.tokens, self.enabled = tuple(names), tokens, True
        self._against_recovery = against_recovery
        operators, units = model.operators, model.units
        self.loss_tokens: int | None = None
        """Tokens in the mean of a step's loss; None: rows of the operator with the most."""
        self._step = 0
        self._operators = list(operators)
        self._place = {operator.index: i for i, operator in enumerate(operators)}
        device = operators[0].weight.device
        self._by_unit = ByUnit(units, operators)
        self._group = torch.tensor([self._by_unit.group[operator.index] for operator in operators], device=device)
        self._members = torch.tensor([len(unit.operators) for unit in units], device=device)
        paths_of = [path for operator in operators for path in (operator.low, operator.recovery)]
        saving = "fprop" if any(_casts_fprop(path, operators[0]) for path in paths_of) else "wgrad"
        asked = {(name.split("_")[1], PATHS[name.endswith("recovery")]) for name in names if name != "price"}
        self._asked = asked | ({(saving, path) for path in PATHS} if "price" in names else set())
        """(GEMM, path)."""
        self.gemms = {gemm for gemm, _ in self._asked}
        self.paths = [path for path in PATHS if any(path == one for _, one in self._asked) or against_recovery]
        self._saving = saving
        """The GEMM of which `price` is."""
        self.candidates = {name: Recipe(name, fprop=recipe.fprop) for name, recipe in (candidates or {}).items()}
        self._columns = [(path, name) for path in PATHS for name in _OF_PATH]
        self._columns += [(path, name) for path in self.candidates for name in _FPROP]
        self._columns += [("", name) for name in _SHARED]
        """(path, candidate or neither, name) of each sum."""
        self._sums = torch.zeros(len(self._operators), len(self._columns), dtype=torch.float64, device=device)
        self.rows = [0] * len(self._operators)
        """Of each operator, those that were not measured too."""

    @property
    def operators(self) -> list[str]:
        """Names, in the order of `by_operator`."""
        return [operator.operator_name for operator in self._operators]

    def begin_step(self, step: int) -> None:
        """Step `step` begins: it says which tokens are measured."""
        self._step = step

    def reset(self) -> None:
        """Forgets everything measured so far."""
        self._sums.zero_()
        self.rows = [0] * len(self._operators)

    def parts(self, share: float) -> Tensor:
        """What a rank adds to the sums of all, (num_operators, columns) float64; `share`: what part of the step's loss
        its own is. A copy. `rows` add up by themselves."""
        return self._sums * share**2

    def by_operator(self, path: str = "low", summed: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """{name: (num_operators,) float64} on the device: `fprop`, `fprop_sequence`, `fprop_elements`, `fprop_input`,
        `fprop_weight` in nats, `dgrad`, `wgrad` (||d||^2/||g||^2) and their `_bias` (<g, d>/||g||^2). `path`: low,
        recovery, or a candidate, which has those of fprop alone.

        `fprop_sequence` is NaN if tokens were left out, for then the products of two of them are unknown. 0 for an
        operator that was not measured; NaN or Inf for one whose operands were not finite. `summed`: of `parts` and of
        `rows` over all ranks. Does not wait for the device.
        """
        totals, rows = (self._sums, None) if summed is None else summed
        sums = {name: totals[:, at] for at, (of, name) in enumerate(self._columns) if of in (path, "")}
        loss_tokens = self.loss_tokens or (max(self.rows) if rows is None else rows.max())
        found = {name: loss_tokens / 2 * sums[name] for name in _FPROP}
        for gemm in ("dgrad", "wgrad") if path in PATHS else ():
            for name in (gemm, f"{gemm}_bias"):
                square = sums[f"{gemm}_square"]
                found[name] = torch.where(square != 0, sums[name] / square, 0.0)
        return found

    def read(self, grad_scale: float = 1.0, summed: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """{name: (num_units,) float64} on the device, in the model's order. `grad_scale`: the loss scale that the
        gradients carry; `summed`: as `by_operator`. Does not wait for the device."""
        found, both = {}, {path: self.by_operator(path, summed) for path in self.paths}
        for gemm, path in self._asked:
            value = self._of_units(both[path][gemm], gemm)
            name = f"price_{gemm}{'' if path == 'low' else '_recovery'}"
            found[name] = value / (grad_scale**2 if gemm == "fprop" else self._members)
        if "price" in self.names and self._saving == "fprop":
            found["price"] = (found["price_fprop"] - found["price_fprop_recovery"]).clamp(min=0)
        elif "price" in self.names:
            squares = (self._sums if summed is None else summed[0])[:, -1]
            saved = (both["low"]["wgrad"] - both["recovery"]["wgrad"]) * squares
            found["price"] = self._of_units(saved, "wgrad").clamp(min=0) / squares.sum().clamp(min=TINY)
        return {name: found[name] for name in self.names}

    def _of_units(self, values: Tensor, gemm: str) -> Tensor:
        """(num_units,): the sums of a GEMM's (num_operators,)."""
        groups = values.new_zeros(self._by_unit.num_groups).index_add_(0, self._group, values)
        return self._by_unit(groups, gemm)

    def watch(self, operator: PathLinear, input: Tensor, output: Tensor) -> None:
        """Has the backward pass of this forward pass measured. Keeps the measured tokens of `input` until then.

        Without a graph, or without rows, there is nothing to measure.
        """
        if not output.requires_grad or input.numel() == 0 or operator.index not in self._place:
            return
        dtype = autocast_dtype(input) or input.dtype
        rows = input.detach().reshape(-1, input.shape[-1]).to(dtype)
        paths = {name: path for name in self.paths if (path := getattr(operator, name)) is not None} | self.candidates
        chosen = self._chosen(len(rows), paths.values(), rows.device)
        inputs = {name: inputs_on(operator, path, self.gemms, rows, chosen) for name, path in paths.items()}
        fault = None if operator.fault is None else operator.fault.for_step(input, remember=False)
        if fault is not None and "low" in paths:
            inputs["low"] = broken_inputs(operator, operator.low, fault, input, inputs["low"], chosen)
        columns = {
            name: kept
            for name, path in paths.items()
            if isinstance(path, Recipe) and (kept := outliers(path.fprop.input, rows)) is not None
        }
        length = input.shape[-2] if input.dim() > 2 else 1
        weight, bias = operator.given or (None, operator.bias)
        given = None if weight is None else weight.detach()
        found = _Pass(
            operator, paths, given, bias, rows[chosen].float(), inputs, columns, dtype, chosen, len(rows), length
        )
        output.register_hook(partial(self._measure, found))

    def _chosen(self, count: int, paths: Collection[ExecutionPath], device: torch.device) -> Tensor:
        """Indices of the tokens that are measured, of `count`: groups of tokens that share a scale stay together."""
        length = min(count, max((_group_rows(path) for path in paths), default=1))
        stride = min(self.tokens, -(-count // length))
        # A hash of the step's number: no period of the data meets the same tokens again and again.
        first = (self._step * 2654435761 >> 8) % stride
        starts = torch.arange(first * length, count, stride * length, device=device)
        indices = (starts[:, None] + torch.arange(length, device=device)).flatten()
        return indices if count % length == 0 else indices[indices < count]

    @torch.no_grad()
    def _measure(self, found: _Pass, grad: Tensor) -> None:
        """Adds up one pass; `grad` (..., O) is the gradient of its output."""
        operator, x = found.operator, found.x
        grad_2d = grad.reshape(-1, grad.shape[-1]).to(found.dtype)
        dy, weight = grad_2d[found.chosen].float(), weight_of(operator, found.dtype, found.weight)
        dx = dy @ weight
        gradient = dy.t() @ x if "wgrad" in self.gemms and operator.weight.requires_grad else None
        nothing = torch.zeros((), dtype=torch.float64, device=dy.device)
        casts = {
            name: Casts(operator, path, weight, grad_2d, dy, seed=self._step << 20 | operator.index)
            for name, path in found.paths.items()
        }
        exact = _Operands(x, weight, None)
        operands = {name: _fprop_operands(found, name, one, exact) for name, one in casts.items()}
        parts: list[Tensor] = []
        for name in (*PATHS, *self.candidates):
            sums = {column: nothing for of, column in self._columns if of == name}
            if (own := casts.get(name)) is not None:
                high = operands.get("recovery", exact) if self._against_recovery and name != "recovery" else exact
                if "fprop" in self.gemms and not (operands[name] is high is exact):
                    of_high = dx if high.weight is weight else dy @ high.weight
                    sums |= _fprop(found, operands[name], high, dy, of_high)
                if "dgrad" in self.gemms and own.of("dgrad").casts:
                    product = own.grad_output("dgrad", 1) @ own.weight("dgrad")
                    sums |= _relative("dgrad", result_in(product, own.of("dgrad").result), dx)
                if gradient is not None and "wgrad" in found.inputs[name]:
                    product = own.grad_output("wgrad", 0).t() @ found.inputs[name]["wgrad"]
                    sums |= _relative("wgrad", result_in(product, own.of("wgrad").result), gradient)
            parts += sums.values()
        parts += [_square(dx), nothing if gradient is None else _square(gradient)]
        scale = found.count / len(found.chosen)
        place = self._place[operator.index]
        self._sums[place].add_(torch.stack(parts), alpha=scale)
        self.rows[place] += found.count


@dataclass(frozen=True)
class _Pass:
    """One forward pass of an operator, until its backward pass."""

    operator: PathLinear
    paths: dict[str, ExecutionPath]
    weight: Tensor | None
    """(O, I), where the pass was given one."""
    bias: Tensor | None
    x: Tensor
    """(n, I) float32: the measured tokens of the input."""
    inputs: dict[str, dict[str, Tensor]]
    """By path and GEMM: them as that reads them, float32."""
    columns: dict[str, Tensor]
    """By path: (I,) bool, columns of input and weight that fprop leaves in 16 bits (outliers)."""
    dtype: torch.dtype
    """What the GEMMs compute in."""
    chosen: Tensor
    """(n,): their rows."""
    count: int
    """All rows."""
    length: int
    """Rows of a sequence."""


class _Operands(NamedTuple):
    """What fprop reads on a path, float32, and the cast of its result."""

    x: Tensor
    """(n, I)"""
    weight: Tensor
    """(O, I)"""
    result: Cast | None


def _casts_fprop(path: ExecutionPath | None, operator: PathLinear) -> bool:
    """Whether fprop is not exact on that path."""
    if isinstance(path, Recipe):
        return bool(path.fprop.casts)
    return path is not None and not isinstance(path, KeepFormat) and operator.shared.quantize_forward


def _group_rows(path: ExecutionPath) -> int:
    """Tokens that share a scale, 1 where that is each token's own or the tensor's."""
    if isinstance(path, Format):
        return 1
    casts = [(path.fprop.input, 1), (path.wgrad.input, 0), (path.dgrad.grad_output, 1), (path.wgrad.grad_output, 0)]
    return max((cast.group(dim)[0] or 1 for cast, dim in casts if cast is not None), default=1)


def _fprop_operands(found: _Pass, path: str, casts: Casts, exact: _Operands) -> _Operands:
    """What fprop reads on `path`: `exact` itself where that casts nothing."""
    if (x := found.inputs[path].get("fprop")) is None:
        return exact
    weight, columns = casts.weight("fprop"), found.columns.get(path)
    if columns is not None and weight is not exact.weight:
        weight = torch.where(columns, exact.weight, weight)
    return _Operands(x, weight, casts.of("fprop").result)


def _fprop(found: _Pass, low: _Operands, high: _Operands, dy: Tensor, dx: Tensor) -> dict[str, Tensor]:
    """Sums of the error that `low` makes against `high`, see the module; dx is dy times the weight of `high`."""
    by_input = dx * (low.x - high.x)
    sums = {"fprop_input": _square(by_input.sum(dim=1))}
    terms = by_input
    if low.weight is not high.weight:
        by_weight = (dy @ (low.weight - high.weight)) * low.x
        sums["fprop_weight"], terms = _square(by_weight.sum(dim=1)), by_input + by_weight
    u, elements = terms.sum(dim=1), _square(terms)
    if low.result is not None or high.result is not None:
        by_result = dy * (_result_error(found.bias, low) - _result_error(found.bias, high))
        u, elements = u + by_result.sum(dim=1), elements + _square(by_result)
    whole = len(found.chosen) == found.count
    sequence = _square(u.view(-1, found.length).sum(dim=1)) if whole else elements.new_full((), torch.nan)
    return sums | {"fprop": _square(u), "fprop_sequence": sequence, "fprop_elements": elements}


def _result_error(bias: Tensor | None, operands: _Operands) -> Tensor | float:
    """What the cast of the result changes of it, (n, O)."""
    if operands.result is None:
        return 0.0
    weight = operands.weight.t()
    y = operands.x @ weight if bias is None else torch.addmm(bias.detach().float(), operands.x, weight)
    return result_in(y, operands.result) - y


def _relative(gemm: str, low: Tensor, exact: Tensor) -> dict[str, Tensor]:
    """||low - exact||^2 and <exact, low - exact>."""
    error = low - exact
    return {gemm: _square(error), f"{gemm}_bias": (exact * error).sum(dtype=torch.float64)}


def _square(x: Tensor) -> Tensor:
    """The squared norm, accumulated in float32, as float64."""
    return torch.linalg.vector_norm(x).double().square_()
