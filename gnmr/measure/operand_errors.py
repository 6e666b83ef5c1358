"""Measure the errors that the paths make in a unit's operands, during its own passes.

Formats. The weight gradient is a sum over tokens t, dW = sum_t dy_t^T x_t. A path that keeps Q(x_t) instead of x_t
changes it by

    D = sum_t dy_t^T (Q(x_t) - x_t)        ||D||^2 = sum_t ||dy_t||^2 ||x_t - Q(x_t)||^2 + terms of pairs of tokens

If the errors of different tokens are uncorrelated and have mean zero, the pairs cancel in expectation. The remaining
sum is `gap_low` (and, with the other path's Q, `gap_recovery`): the gap of corollary 1 from tensors that backward holds
anyway. The error's norms are taken in forward, one float32 per token, and multiply the norms of grad_output in
backward.

    gap_low, gap_recovery   the sum above for Q of the low, of the recovery path (0 where that path is bf16)
    mse                     mean of (x - Q_low(x))^2
    input_std               standard deviation of the elements of x

For a unit of several operators, the gaps are sums over them, because squared norms of gradients of different weights
add up. The means and deviations are those of all their elements together. For the GEMMs of an operator (unit=gemm), the
gaps belong to `wgrad` and mse to `fprop`; they are 0 for the other GEMMs. input_std is the same for all three.

x is the operand as `wgrad` is given it (under autocast: after the cast). Q(x) is the compressed copy converted back to
its dtype. The low path is described whatever path the unit ran on, including a fault in the low path.

Recipes. `wgrad` reads Qx(x_t) and Qg(dy_t), its casts of input and grad_output: errors of two operands, to first order

    gap_low, gap_recovery   sum_t ||dy_t||^2 ||x_t - Qx(x_t)||^2 + ||dy_t - Qg(dy_t)||^2 ||x_t||^2 of either recipe
    mse                     of Q = the low recipe's cast of fprop's input

dy is the gradient that came back, with the effects of casts elsewhere, also in this operator's fprop. The sums contain
no other trace of those casts, so a recovery path that leaves wgrad to the low recipe has a gap of 0. The sums also omit
a weight's error, which is the same for all tokens, and the rounding of wgrad's result. An operand that wgrad keeps has
no error, even if fprop casts it: the effect of that cast is in dy.

A cast takes the scale that a run under its recipe would have taken, also a delayed one, and changes no counter or
history. Readers of a tensor share it. A stride saves casts only if each token has its own scales.

With stochastic rounding, of formats or casts, the probe rounds to nearest, whatever the copy that backward reads. It
therefore draws nothing from the run's generator, and a unit's numbers do not depend on the path that it runs on. The
stochastic copy has a larger expected gap, about twice as large if the remainders are uniform.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnmr.conversion.converted import ConvertedModel
from gnmr.conversion.gemms import GemmContext
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.reads import Read
from gnmr.conversion.shared import Casts, FaultInjection
from gnmr.errors import warn
from gnmr.formats.cast import rotated
from gnmr.formats.number_formats import Format, KeepFormat
from gnmr.formats.recipes import Cast, Recipe
from gnmr.formats.scaling import compress, decompress
from gnmr.measure.per_unit import ByUnit

STATISTICS = ("gap_low", "gap_recovery", "mse", "input_std")
_GEMM = {"gap_low": "wgrad", "gap_recovery": "wgrad", "mse": "fprop"}
"""The GEMM whose operands a statistic describes."""
_SUMS = ("gap_low", "gap_recovery", "square_error", "x", "x_square", "elements")


def measure_errors(model: ConvertedModel, names: Collection[str], tokens: int = 1) -> Probe:
    """Start measuring the statistics `names` of every `tokens`-th row (see `Probe`), replacing an earlier probe.

    `model.shared.probe = None` ends it. Warns if a gap is 0 because both recipes have the same wgrad.

    Raises:
        ValueError: the model has no recovery path for a gap to it, or every weight is frozen. Statistics are measured
            in the weight gradient's backward pass.
    """
    model.check_converted()
    low, recovery = model.low, model.recovery
    if model.frozen:
        raise ValueError(f"{', '.join(names)}: measured where a weight gradient is made, and all weights are frozen")
    if "gap_recovery" in names:
        if recovery is None:
            raise ValueError("gap_recovery: this model has no recovery path")
        if isinstance(low, Recipe) and isinstance(recovery, Recipe) and low.wgrad == recovery.wgrad:
            message = "gap_recovery: both paths have the same wgrad, so no unit has a gap"
            warn(message)
    probe = Probe(model, names, tokens)
    model.shared.forget()  # and the measurements of an earlier probe of the last tensor
    model.shared.probe = probe
    return probe


class Probe:
    """Sums of the statistics over all backward passes since the last `reset`.

    Set `enabled` to False in steps whose numbers are not read: such steps cost nothing.
    """

    def __init__(self, model: ConvertedModel, names: Collection[str], tokens: int) -> None:
        """Prepare the sums.

        Rows 0, tokens, 2 tokens, ... of each (flattened) input are measured. A stride that does not divide the
        sequence's length reaches every position.
        """
        self.names, self.tokens, self.enabled = tuple(names), tokens, True
        self._by_unit = ByUnit(model.units, model.operators, model.device)
        self._operators = {operator.index: operator for operator in model.operators}
        device, groups = model.device, self._by_unit.num_groups
        self._sums = {name: torch.zeros(groups, dtype=torch.float64, device=device) for name in _SUMS}

    def parts(self, share: float) -> Tensor:
        """Return a copy of this rank's part of the sums, (number of sums, groups of operators) float64.

        Args:
            share: this rank's part of the step's loss, from 0 to 1; gaps hold squares of gradients, so it counts
                squared.
        """
        # Gaps hold squares of the gradient, of which this rank has a share; the other sums are of inputs alone.
        factor = {name: share**2 if name.startswith("gap") else 1.0 for name in _SUMS}
        return torch.stack([self._sums[name] * factor[name] for name in _SUMS])

    def read(self, summed: Tensor | None = None) -> dict[str, Tensor]:
        """Return the statistics on the device, in the model's order, without waiting for it.

        Args:
            summed: the sum of `parts` over all ranks; None: this rank's sums.

        Returns:
            {name: (num_units,) float64}. The gaps are sums, scaled up from the measured rows to all rows. The other
            statistics are means over all measured elements of all micro-batches. A unit that was not measured has 0,
            and a unit whose input or grad_output was not finite has NaN or Inf.
        """
        sums = self._sums if summed is None else dict(zip(_SUMS, summed, strict=True))

        def mean(above: Tensor) -> Tensor:
            return torch.where(sums["elements"] > 0, above / sums["elements"], 0.0)

        values = {
            "gap_low": sums["gap_low"].clone(),
            "gap_recovery": sums["gap_recovery"].clone(),
            "mse": mean(sums["square_error"]),
            "input_std": (mean(sums["x_square"]) - mean(sums["x"]).square()).clamp(min=0).sqrt(),
        }
        return {name: self._by_unit(values[name], _GEMM.get(name)) for name in self.names}

    def reset(self) -> None:
        """Forget everything measured so far."""
        for values in self._sums.values():
            values.zero_()

    def measure(
        self,
        index: int,
        read: Read,
        input: Tensor,
        x: Tensor,
        fault: FaultInjection | None,
        copy: tuple[Tensor, ...],
    ) -> PassErrors:
        """Measure the input of an operator whose paths are formats.

        Readers of the same tensor share all measurements except a fault's.

        Args:
            index: index of the operator.
            read: the input's casts, which hold what other readers measured.
            input: the input (..., D), with at least one row.
            x: the same after autocast's cast.
            fault: a fault in force; None: there is none.
            copy: the compressed copy that backward will read: codes and scales of all rows.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        sampled = rows[:: self.tokens]
        errors_by_gap, sums, operator = {}, self._input(read, sampled), self._operators[index]
        low, recovery = operator.low, operator.recovery
        assert isinstance(low, Format) and (recovery is None or isinstance(recovery, Format))
        if "gap_low" in self.names or "mse" in self.names:
            if fault is not None:  # a whole tensor: a sample would have other rows hit
                # On the recovery path, the copy for backward is not the low path's, so a broken one is made.
                copies = (
                    fault.compress(input, low, operator.shared.rounding is not None) if operator.recovering else copy
                )
                errors = _compare(sampled, tuple(tensor[:: self.tokens] for tensor in copies), low)
            else:
                errors = self._error(operator, read, input, sampled, low)
            errors_by_gap["gap_low"] = errors
            sums |= self._mse(errors)
        if "gap_recovery" in self.names:
            assert recovery is not None
            errors_by_gap["gap_recovery"] = self._error(operator, read, input, sampled, recovery)
        return self._measured(index, errors_by_gap, sums, rows, sampled)

    def measure_casts(
        self,
        index: int,
        read: Read,
        fault: FaultInjection | None,
        rows: Tensor,
        context: GemmContext,
        casts: Casts,
    ) -> PassErrors:
        """Measure an operator whose paths are recipes, as `measure` does; `rows` (T, D) are its input.

        `context` is under way and has made the `casts` of the rows.

        Returns:
            The errors of the pass, which `add` weighs with its grad_output and adds to the sums.
        """

        # A dry run of the same kind under the same fault would make the same casts, so it reuses those of the pass.
        def dry_run_of(recipe: Recipe, fault: FaultInjection | None) -> tuple[GemmContext, Casts]:
            dry_run = operator.gemm_context(recipe, fault=fault, dry_run=True)
            same = fault is context.fault and type(dry_run) is type(context)
            return dry_run, casts if same else dry_run.casts_of(read, rows.dtype)

        operator, sampled = self._operators[index], rows[:: self.tokens]
        assert isinstance(operator.low, Recipe)
        paths = {"gap_low": dry_run_of(operator.low, fault)}
        if isinstance(operator.recovery, Recipe):
            paths["gap_recovery"] = dry_run_of(operator.recovery, None)
        errors, dry_runs, sums = {}, {}, self._input(read, sampled)
        for name, (dry_run, own_casts) in paths.items():
            if name in self.names:
                errors[name] = self._error_of(dry_run, read, rows, dry_run.recipe.wgrad.input, 0, own_casts)
                dry_runs[name] = dry_run
        if "mse" in self.names:
            dry_run, own_casts = paths["gap_low"]
            sums |= self._mse(self._error_of(dry_run, read, rows, dry_run.recipe.fprop.input, 1, own_casts))
        # ||x_t||^2 weighs the error of dy_t.
        square = None
        if dry_runs:
            if "square" not in read.measured:
                read.measured["square"] = _squares(sampled, 1)
            square = read.measured["square"]
        return self._measured(index, errors, sums, rows, sampled, dry_runs, square)

    def _measured(
        self, index: int, errors: dict[str, Tensor], sums: dict[str, Tensor], rows: Tensor, sampled: Tensor, *more: Any
    ) -> PassErrors:
        errors = {name: errors_of_gap for name, errors_of_gap in errors.items() if name in self.names}
        scale = rows.shape[0] / sampled.shape[0]
        return PassErrors(self, self._by_unit.group[index], errors, sums, sampled.numel(), scale, *more)

    def _error_of(
        self,
        dry_run: GemmContext,
        read: Read,
        rows: Tensor,
        cast: Cast | None,
        contraction_dim: int,
        casts: Casts,
    ) -> Tensor:
        """Return the error of a cast of the input, computed once for all readers unless only this operator has it."""
        # A fault belongs to one operator, so its errors are not shared.
        measured: dict[Any, Tensor] = {} if dry_run.fault is not None else read.measured
        key = None if cast is None else (type(dry_run), dry_run.key(cast, contraction_dim))
        if key not in measured:
            rows_kept = self.cast_rows(dry_run, "input", rows, cast, contraction_dim, casts)
            measured[key] = _between(rows[:: self.tokens], rows_kept)
        return measured[key]

    def cast_rows(
        self,
        dry_run: GemmContext,
        operand: str,
        rows: Tensor,
        cast: Cast | None,
        contraction_dim: int,
        casts: Casts,
    ) -> Tensor:
        """Cast rows by a dry run, and return the measured ones.

        Args:
            dry_run: a context of the recipe, which records nothing.
            operand: input or grad_output.
            rows: all rows (T, D).
            cast: the cast; None: the rows are kept.
            contraction_dim: the dimension of `rows` that the GEMM contracts.
            casts: casts of the rows that were made already.

        Returns:
            Every `tokens`-th row, (measured rows, D), not rotated.
        """
        if (
            self.tokens > 1
            and cast is not None
            and cast.group(contraction_dim)[0] == 1
            and not (cast.two_levels or cast.hadamard)  # each token has its own scales
            and dry_run.fault is None  # a fault hits a share of all rows
            and dry_run.key(cast, contraction_dim) not in casts
        ):
            return dry_run.values(dry_run.cast(operand, rows[:: self.tokens], cast, contraction_dim))
        # Otherwise all rows are cast: the result depends on the others, or their cast is there already.
        rows_cast = dry_run.cast(operand, rows, cast, contraction_dim, casts)
        # Rotate back, and cut off padding, to compare with rows that were not rotated.
        if cast is not None and cast.hadamard:
            rows_cast = rotated(rows_cast.float(), contraction_dim, back=True)[: rows.shape[0], : rows.shape[1]]
        return dry_run.values(rows_cast, self.tokens)

    def _input(self, read: Read, sampled: Tensor) -> dict[str, Tensor]:
        """Return the sums for input_std, once for all readers of the tensor."""
        if "input_std" not in self.names:
            return {}
        if "input" not in read.measured:
            read.measured["input"] = {
                "x": sampled.sum(dim=1, dtype=torch.float32).sum(dtype=torch.float64),
                "x_square": _squares(sampled, 1).sum(),
            }
        return dict(read.measured["input"])

    def _mse(self, errors: Tensor) -> dict[str, Tensor]:
        return {"square_error": errors.sum(dtype=torch.float64)} if "mse" in self.names else {}

    def _error(self, operator: PathLinear, read: Read, input: Tensor, sampled: Tensor, fmt: Format) -> Tensor:
        """Return the error of a path without a fault, once for all readers of the tensor."""
        if fmt.name not in read.measured:
            if isinstance(fmt, KeepFormat):
                copy: tuple[Tensor, ...] = ()
            elif self.tokens == 1 and operator.shared.rounding is None:
                copy = read.copy_of(input, fmt)  # made already, or useful to the next reader
            else:
                copy = compress(input.detach().reshape(-1, input.shape[-1])[:: self.tokens], fmt)
            read.measured[fmt.name] = _compare(sampled, copy, fmt)
        return read.measured[fmt.name]


def _compare(rows: Tensor, copy: tuple[Tensor, ...], fmt: Format) -> Tensor:
    """Return the errors of a compressed copy, as `_between`."""
    rows_kept = rows if isinstance(fmt, KeepFormat) else decompress(copy[0], copy[1], fmt, rows.shape[1], rows.dtype)
    return _between(rows, rows_kept)


def _between(rows: Tensor, rows_kept: Tensor) -> Tensor:
    """Return ||x_t - Q(x_t)||^2 of rows and their casts, (measured rows,) float32."""
    return (rows.float() - rows_kept.float()).square_().sum(dim=1)


def _squares(x: Tensor, dim: int | None = None) -> Tensor:
    """Return squared norms in float64, accumulated in float32 (float64 for float64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x, dim=dim, dtype=wide).double().square_()


@dataclass(frozen=True)
class PassErrors:
    """One forward pass of a unit, on its way to backward."""

    probe: Probe
    unit: int
    errors: dict[str, Tensor]
    """Errors by gap, (measured rows,) float32."""
    sums: dict[str, Tensor]
    elements: int
    scale: float
    """Number of all rows over the measured rows."""
    dry_runs: dict[str, GemmContext] = field(default_factory=dict)
    """For recipes, the dry run by gap whose cast of grad_output it stands for."""
    square: Tensor | None = None
    """||x_t||^2 for recipes, (measured rows,) float64."""

    def add(self, grad_2d: Tensor, context: GemmContext | None = None, casts: Casts | None = None) -> None:
        """Add the pass to the probe's sums.

        `grad_2d` (rows, out_features) is the grad_output of the pass, of which `context` has made the `casts`.
        """
        totals, sampled = self.probe._sums, grad_2d[:: self.probe.tokens]
        # The input's error: sum_t ||dy_t||^2 ||x_t - Q(x_t)||^2.
        if self.errors:
            square = _squares(sampled, 1)
            for name, errors in self.errors.items():
                totals[name][self.unit].add_(square.dot(errors.double()), alpha=self.scale)
        for name, value in self.sums.items():
            totals[name][self.unit].add_(value)
        totals["elements"][self.unit].add_(self.elements)
        # The gradient's error, of recipes: sum_t ||dy_t - Q(dy_t)||^2 ||x_t||^2.
        casts_by = {type(context): {} if casts is None else casts}
        for name, dry_run in self.dry_runs.items():
            assert self.square is not None
            if (cast := dry_run.recipe.wgrad.grad_output) is None:
                continue
            casts_of_dry_run = casts_by.setdefault(type(dry_run), {})
            rows_kept = self.probe.cast_rows(dry_run, "grad_output", grad_2d, cast, 0, casts_of_dry_run)
            errors = _squares(sampled.float() - rows_kept, 1)
            totals[name][self.unit].add_(errors.dot(self.square), alpha=self.scale)
