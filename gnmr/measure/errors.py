"""Measures what the paths do to a unit's operands, during its own passes.

Formats. The weight gradient is a sum over tokens t, dW = sum_t dy_t^T x_t. A path that keeps Q(x_t) instead of x_t
changes it by

    D = sum_t dy_t^T (Q(x_t) - x_t)        ||D||^2 = sum_t ||dy_t||^2 ||x_t - Q(x_t)||^2 + terms of pairs of tokens

Where the errors of different tokens are uncorrelated and have mean zero, the pairs cancel in expectation. What is left
is `gap_low` (and, with the other path's Q, `gap_recovery`): the gap of corollary 1 from what backward holds anyway. The
error's norms are taken in forward, one float32 a token, and meet the norms of grad_output in backward.

    gap_low, gap_recovery   the sum above for Q of the low, of the recovery path (0 where that path is bf16)
    gap_exact               ||sum_t dy_t^T (Q_low(x_t) - Q_recovery(x_t))||^2, the pairs of tokens included: one more
                            product of wgrad's size a unit; of all tokens whatever the stride, and summed over
                            micro-batches, whose pairs it leaves out. Until backward it holds the recovery path's copy
                            of every input besides the low one: what recovery would keep, which saved_bytes leaves out
    underflow               share of the x != 0 with Q_low(x) = 0
    mse                     mean of (x - Q_low(x))^2
    input_std               standard deviation of the elements of x

Of a unit of several operators: the gaps are sums over them (squared norms of gradients of different weights add up),
the shares, means and deviations those of all their elements together. Of the GEMMs of an operator (unit=gemm) the gaps
are those of `wgrad`, underflow and mse those of `fprop`, 0 for the others; input_std is that of each.

x is the operand as `wgrad` is given it (under autocast: after the cast), Q(x) the compressed copy brought back to its
dtype. The low path is described whatever path the unit ran on, a fault in it included.

Recipes. `wgrad` reads Qx(x_t) and Qg(dy_t), its casts of input and grad_output: errors of two operands, to first order

    gap_low, gap_recovery   sum_t ||dy_t||^2 ||x_t - Qx(x_t)||^2 + ||dy_t - Qg(dy_t)||^2 ||x_t||^2 of either recipe
    gap_exact               ||wgrad_low - wgrad_recovery||^2: the product that the path in force makes anyway and one
                            under the other recipe, as they would reach the parameter, so with the cast of the result;
                            the true gap where recovery takes over wgrad alone. Until backward it holds the input as the
                            other recipe's wgrad reads it
    underflow, mse          of Q = the low recipe's cast of fprop's input

dy is the one that came back, with all that casts elsewhere did to it, in this operator's fprop too; no sum above has
anything else of them. So recovery that leaves wgrad to the low recipe has a gap of 0. A weight's error is not in the
sums either (it is the same for all tokens), nor, in gap_low and gap_recovery, the rounding of wgrad's result.
**Choice 53**: an operand that wgrad keeps has no error, even where fprop casts it: what that does is in dy.

A cast takes the scale that a run under its recipe would have taken, delayed ones too, and leaves no trace in what is
counted and remembered; readers of a tensor share it. A stride saves casts only where each token has its own scales.

**Choice 54**: with stochastic rounding, of formats and of casts, the probe rounds to nearest, whatever the copy that
backward reads: so it draws nothing from the run's generator, and a unit's numbers do not depend on the path that it
runs on (but for gap_exact of casts, which takes the gradient that was made). The stochastic copy's expected gap is
larger, about twice where the remainders are uniform.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnmr.precision.cast import rotated
from gnmr.precision.formats import Format, KeepFormat
from gnmr.precision.hooks import Casts, FaultInjection
from gnmr.precision.kernels import GemmContext
from gnmr.precision.linear import PathLinear
from gnmr.precision.reads import Read
from gnmr.precision.recipes import Cast, Recipe
from gnmr.precision.scaling import compress, decompress
from gnmr.precision.units import EVIDENCE_OF, ByUnit, PathUnit

STATISTICS = ("gap_low", "gap_recovery", "gap_exact", "underflow", "mse", "input_std")
_SUMS = ("gap_low", "gap_recovery", "gap_exact", "zeroed", "nonzero", "square_error", "x", "x_square", "elements")


class Probe:
    """Sums of the statistics over all backward passes since the last `reset`; made by `ConvertedModel.probe`.

    Set `enabled` to False in steps whose numbers are not read: they cost nothing then.
    """

    def __init__(
        self, operators: Sequence[PathLinear], units: Sequence[PathUnit], names: Collection[str], tokens: int = 1
    ) -> None:
        """`operators`: all of the plan. `units`: what their operators add up to is theirs.

        `tokens`: the rows 0, tokens, 2 tokens, ... of each (flattened) input are measured. A stride that does not
        divide the sequence's length meets every position. ValueError for an unknown name and a stride below 1.
        """
        unknown = [name for name in names if name not in STATISTICS]
        if unknown or not names:
            raise ValueError(f"probe {unknown}: use some of {', '.join(STATISTICS)}")
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: the stride of the measured rows must be 1 or more")
        self.names, self.tokens, self.enabled = tuple(names), tokens, True
        self._by_unit = ByUnit(units, operators)
        self._index = self._by_unit.group
        self._operators = {operator.index: operator for operator in operators}
        device, groups = operators[0].weight.device, self._by_unit.num_groups
        self._sums = {name: torch.zeros(groups, dtype=torch.float64, device=device) for name in _SUMS}

    def parts(self, share: float) -> Tensor:
        """What a rank adds to the sums of all, float64; `share`: what part of the step's loss its own is. A copy."""
        factor = {name: share**2 if name.startswith("gap") else 1.0 for name in _SUMS}
        return torch.stack([self._sums[name] * factor[name] for name in _SUMS])

    def read(self, summed: Tensor | None = None) -> dict[str, Tensor]:
        """{name: (num_units,) float64} on the device, in the plan's order. Does not wait for it.

        The gaps are sums, scaled up from the measured rows to all; the others are shares and means of all that was
        measured, over all micro-batches.
        0 for a unit that was not measured; NaN or Inf for one whose input or grad_output was not finite. `summed`: of
        `parts` over all ranks.
        """
        sums = self._sums if summed is None else dict(zip(_SUMS, summed, strict=True))

        def ratio(above: Tensor, below: Tensor) -> Tensor:
            return torch.where(below > 0, above / below, 0.0)

        mean = ratio(sums["x"], sums["elements"])
        values = {
            "gap_low": sums["gap_low"].clone(),
            "gap_recovery": sums["gap_recovery"].clone(),
            "gap_exact": sums["gap_exact"].clone(),
            "underflow": ratio(sums["zeroed"], sums["nonzero"]),
            "mse": ratio(sums["square_error"], sums["elements"]),
            "input_std": (ratio(sums["x_square"], sums["elements"]) - mean.square()).clamp(min=0).sqrt(),
        }
        return {name: self._by_unit(values[name], EVIDENCE_OF.get(name)) for name in self.names}

    def reset(self) -> None:
        """Forgets everything measured so far."""
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
    ) -> Measured:
        """Measures `input`, which was `read`: x is it after autocast's cast, `copy` what backward will read,
        `fault` one in force.

        Readers of the same tensor share all of it but a fault's. It has a row at least.
        """
        rows = x.detach().reshape(-1, x.shape[-1])
        sampled = rows[:: self.tokens]
        errors: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        operator = self._operators[index]
        low, recovery = operator.low, operator.recovery
        assert isinstance(low, Format) and (recovery is None or isinstance(recovery, Format))
        if "gap_low" in self.names or "underflow" in self.names or "mse" in self.names:
            if fault is not None:  # whole, for a sample would not have the same rows hit
                whole = (
                    fault.compress(input, low, operator.shared.rounding is not None) if operator.recovering else copy
                )
                found = self._compare(sampled, tuple(part[:: self.tokens] for part in whole), low)
            else:
                found = self._error(operator, read, input, sampled, low)
            errors["gap_low"] = found.rows
            sums |= found.sums
        if "gap_recovery" in self.names:
            assert recovery is not None
            errors["gap_recovery"] = self._error(operator, read, input, sampled, recovery).rows
        both: tuple[_Copy, ...] = ()
        if "gap_exact" in self.names:
            both = self._both(operator, read, input, rows, fault, copy)
        sums |= self._input(read, sampled)
        errors = {name: rows for name, rows in errors.items() if name in self.names}
        return Measured(
            self,
            self._index[index],
            errors,
            sums,
            sampled.numel(),
            rows.shape[0] / sampled.shape[0],
            both,
        )

    def measure_casts(
        self,
        index: int,
        read: Read,
        fault: FaultInjection | None,
        rows: Tensor,
        context: GemmContext,
        made: Casts,
    ) -> MeasuredCasts:
        """As `measure`, of an operator whose paths are recipes; `rows` (T, D) are its input.

        `context` is under way and has `made` casts of them.
        """

        def dry_run_of(recipe: Recipe, fault: FaultInjection | None) -> tuple[GemmContext, Casts]:
            dry_run = operator.gemm_context(recipe, fault=fault, dry_run=True)
            same = fault is context.fault and type(dry_run) is type(context)
            return dry_run, made if same else dry_run.casts_of(read, rows.dtype)

        operator = self._operators[index]
        assert isinstance(operator.low, Recipe)
        paths = {"low": dry_run_of(operator.low, fault)}
        if isinstance(operator.recovery, Recipe):
            paths["recovery"] = dry_run_of(operator.recovery, None)
        errors, dry_runs, sums = {}, {}, self._input(read, rows[:: self.tokens])
        for name, (dry_run, own) in paths.items():
            if f"gap_{name}" in self.names:
                errors[f"gap_{name}"] = self._error_of(dry_run, read, rows, dry_run.recipe.wgrad.input, 0, own).rows
                dry_runs[f"gap_{name}"] = dry_run
        if "underflow" in self.names or "mse" in self.names:
            dry_run, own = paths["low"]
            sums |= self._error_of(dry_run, read, rows, dry_run.recipe.fprop.input, 1, own).sums
        square = None
        if dry_runs:
            if "square" not in read.measured:
                read.measured["square"] = _squares(rows[:: self.tokens], 1)
            square = read.measured["square"]
        others: list[tuple[GemmContext, Any]] = []
        if "gap_exact" in self.names:
            for dry_run, own in paths.values():
                if dry_run.recipe is not context.recipe:
                    others.append((dry_run, dry_run.cast("input", rows, dry_run.recipe.wgrad.input, 0, own)))
        count, width = rows[:: self.tokens].shape
        return MeasuredCasts(
            self,
            self._index[index],
            errors,
            sums,
            count * width,
            rows.shape[0] / count,
            dry_runs=dry_runs,
            square=square,
            others=tuple(others),
        )

    def _error_of(
        self,
        dry_run: GemmContext,
        read: Read,
        rows: Tensor,
        cast: Cast | None,
        contraction_dim: int,
        made: Casts,
    ) -> _Error:
        """Of a cast of the input, once for all its readers where it is not an operator's own."""
        known: dict[Any, _Error] = {} if dry_run.fault is not None else read.measured
        key = None if cast is None else (type(dry_run), dry_run.key(cast, contraction_dim))
        if key not in known:
            kept = self._kept(dry_run, "input", rows, cast, contraction_dim, made)
            known[key] = self._between(rows[:: self.tokens], kept)
        return known[key]

    def _kept(
        self,
        dry_run: GemmContext,
        operand: str,
        rows: Tensor,
        cast: Cast | None,
        contraction_dim: int,
        made: Casts,
    ) -> Tensor:
        """The measured rows of `rows` in `cast`, float32."""
        if (
            self.tokens > 1
            and cast is not None
            and cast.group(contraction_dim)[0] == 1
            and not (cast.two_levels or cast.hadamard)  # each token has its own scales
            and dry_run.fault is None  # which hits a share of all rows
            and dry_run.key(cast, contraction_dim) not in made
        ):
            return dry_run.values(dry_run.cast(operand, rows[:: self.tokens], cast, contraction_dim))
        found = dry_run.cast(operand, rows, cast, contraction_dim, made)
        if cast is not None and cast.hadamard:
            found = rotated(found.float(), contraction_dim, back=True)[: rows.shape[0], : rows.shape[1]]
        return dry_run.values(found, self.tokens)

    def _input(self, read: Read, sampled: Tensor) -> dict[str, Tensor]:
        """What input_std needs, once for all readers of the tensor."""
        if "input_std" not in self.names:
            return {}
        if "input" not in read.measured:
            read.measured["input"] = {
                "x": sampled.sum(dim=1, dtype=torch.float32).sum(dtype=torch.float64),
                "x_square": _squares(sampled, 1).sum(),
            }
        found: dict[str, Tensor] = read.measured["input"]
        return found

    def _both(
        self,
        operator: PathLinear,
        read: Read,
        input: Tensor,
        rows: Tensor,
        fault: FaultInjection | None,
        copy: tuple[Tensor, ...],
    ) -> tuple[_Copy, ...]:
        """The copies of both paths, packed; the one that backward keeps anyway is that very one."""
        low, recovery, shared = operator.low, operator.recovery, operator.shared
        assert isinstance(low, Format) and isinstance(recovery, Format)

        def packed(fmt: Format, broken: FaultInjection | None) -> tuple[Tensor, ...]:
            if isinstance(fmt, KeepFormat):
                return (rows,)
            if broken is not None:
                return broken.compress(input, fmt, shared.rounding is not None) if operator.recovering else copy
            if shared.rounding is None:
                return read.copy_of(input, fmt)
            return compress(rows, fmt)

        return tuple(_Copy(fmt, packed(fmt, broken), rows.shape[1]) for fmt, broken in ((low, fault), (recovery, None)))

    def _error(self, operator: PathLinear, read: Read, input: Tensor, sampled: Tensor, fmt: Format) -> _Error:
        """Of a path without a fault, once for all readers of the tensor."""
        if fmt.name not in read.measured:
            shared = operator.shared
            if isinstance(fmt, KeepFormat):
                copy: tuple[Tensor, ...] = ()
            elif self.tokens == 1 and shared.rounding is None:
                copy = read.copy_of(input, fmt)  # made already, or of use to the next reader
            else:
                copy = compress(input.detach().reshape(-1, input.shape[-1])[:: self.tokens], fmt)
            read.measured[fmt.name] = self._compare(sampled, copy, fmt)
        return read.measured[fmt.name]

    def _compare(self, rows: Tensor, copy: tuple[Tensor, ...], fmt: Format) -> _Error:
        kept = rows if isinstance(fmt, KeepFormat) else decompress(copy[0], copy[1], fmt, rows.shape[1], rows.dtype)
        return self._between(rows, kept)

    def _between(self, rows: Tensor, kept: Tensor) -> _Error:
        """Of measured rows and what became of them."""
        errors = (rows.float() - kept.float()).square_().sum(dim=1)
        sums = {}
        if "underflow" in self.names:
            zeroed = ((kept == 0) & (rows != 0)).sum()
            # A NaN is not counted as zeroed: it would pass for a value that survived.
            sums["zeroed"] = torch.where(errors.isnan().any(), torch.nan, zeroed.double())
            sums["nonzero"] = (rows != 0).sum()
        if "mse" in self.names:
            sums["square_error"] = errors.sum(dtype=torch.float64)
        return _Error(errors, sums)


def _squares(x: Tensor, dim: int | None = None) -> Tensor:
    """Squared norms in float64, accumulated in float32 (float64 for float64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x, dim=dim, dtype=wide).double().square_()


@dataclass(frozen=True)
class _Error:
    """Of a path on one tensor."""

    rows: Tensor
    """(measured rows,) float32: ||x_t - Q(x_t)||^2."""
    sums: dict[str, Tensor]
    """Scalars on the device."""


@dataclass(frozen=True)
class _Copy:
    """A tensor as one path keeps it."""

    fmt: Format
    tensors: tuple[Tensor, ...]
    width: int

    def rows(self, dtype: torch.dtype) -> Tensor:
        """(rows, D)."""
        if isinstance(self.fmt, KeepFormat):
            return self.tensors[0]
        return decompress(self.tensors[0], self.tensors[1], self.fmt, self.width, dtype)


@dataclass(frozen=True)
class Measured:
    """One forward pass of a unit, on its way to backward."""

    probe: Probe
    unit: int
    errors: dict[str, Tensor]
    sums: dict[str, Tensor]
    elements: int
    scale: float
    """All rows over the measured ones."""
    both: tuple[_Copy, ...] = ()
    """The low and the recovery path's copy, for gap_exact."""

    def add(self, grad_2d: Tensor) -> None:
        """Adds it to the probe's sums; `grad_2d` (rows, out_features) is the grad_output of that pass."""
        totals = self.probe._sums
        if self.errors:
            square = _squares(grad_2d[:: self.probe.tokens], 1)
            for name, errors in self.errors.items():
                totals[name][self.unit].add_(square.dot(errors.double()), alpha=self.scale)
        if self.both:
            low, recovery = (each.rows(grad_2d.dtype) for each in self.both)
            totals["gap_exact"][self.unit].add_(_squares(grad_2d.t() @ (low - recovery)))
        for name, value in self.sums.items():
            totals[name][self.unit].add_(value)
        totals["elements"][self.unit].add_(self.elements)


@dataclass(frozen=True)
class MeasuredCasts(Measured):
    """One forward pass of a unit whose paths are recipes."""

    dry_runs: dict[str, GemmContext] = field(default_factory=dict)
    """By the gap for whose cast of grad_output each stands."""
    square: Tensor | None = None
    """(measured rows,) float64: ||x_t||^2."""
    others: tuple[tuple[GemmContext, Any], ...] = ()
    """Of the path that is not in force, of both in a warm-up in 16 bits, for gap_exact: the pass, and the input as its
    wgrad reads it."""

    def add_backward(self, grad_2d: Tensor, grad_weight: Tensor, context: GemmContext, made: Casts) -> None:
        """As `add`; `context` made `grad_weight` and has `made` casts of `grad_2d` (rows, out_features)."""
        self.add(grad_2d)
        totals, sampled = self.probe._sums, grad_2d[:: self.probe.tokens]
        made_by = {type(context): made}
        for name, dry_run in self.dry_runs.items():
            assert self.square is not None
            if (cast := dry_run.recipe.wgrad.grad_output) is None:
                continue
            own = made_by.setdefault(type(dry_run), {})
            kept = self.probe._kept(dry_run, "grad_output", grad_2d, cast, 0, own)
            errors = _squares(sampled.float() - kept, 1)
            totals[name][self.unit].add_(errors.dot(self.square), alpha=self.scale)
        if self.others:
            found = [
                dry_run.wgrad(grad_2d, x, grad_weight.dtype, made_by.setdefault(type(dry_run), {}))
                for dry_run, x in self.others
            ]
            in_force = [grad_weight] if len(found) == 1 else []
            first, second = in_force + found
            totals["gap_exact"][self.unit].add_(_squares(first - second))
