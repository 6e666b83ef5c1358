"""Compute the operands that the GEMMs of an operator read on any path, for the measured tokens."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from gnmr.conversion.int8 import Int8Linear, Integers
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.shared import FaultInjection
from gnmr.formats.cast import Reference, quantize, rotated
from gnmr.formats.number_formats import Format, KeepFormat
from gnmr.formats.recipes import Cast, ExecutionPath, Gemm, Recipe
from gnmr.formats.scaling import compress, decompress, largest_magnitude
from gnmr.measure.absent_weights import gathered
from gnmr.names import OPERANDS


def inputs_on(
    operator: PathLinear, path: ExecutionPath, gemms: Collection[str], rows: Tensor, chosen: Tensor
) -> dict[str, Tensor]:
    """Return by GEMM the measured tokens of the input `rows` (T, I) as the GEMM reads them, (n, I) float32.

    GEMMs that the path leaves exact are missing.
    """
    # fprop contracts the input over its columns, x W^T, and wgrad over its rows, dy^T x: scales lie along `dim`.
    measured, inputs = rows[chosen], {}
    for gemm, dim in (("fprop", 1), ("wgrad", 0)):
        if gemm not in gemms:
            continue
        if isinstance(path, Format):
            if not isinstance(path, KeepFormat) and (gemm == "wgrad" or operator.shared.quantize_forward):
                inputs[gemm] = decompress(*compress(measured, path), path, measured.shape[1], measured.dtype).float()
        elif (casts := getattr(path, gemm)).casts:
            cast = casts.input
            inputs[gemm] = measured.float() if cast is None else _cast(operator, "input", rows, measured, cast, dim)
            if cast is not None and cast.hadamard and gemm == "fprop":  # sums are over terms without rotation
                inputs[gemm] = rotated(inputs[gemm], 1, back=True)
    return inputs


def broken_inputs(
    operator: PathLinear,
    path: ExecutionPath,
    fault: FaultInjection,
    input: Tensor,
    sound: dict[str, Tensor],
    chosen: Tensor,
) -> dict[str, Tensor]:
    """Return the operands of `inputs_on` under a fault; `sound` are those without it.

    Whole tensors are read, because the fault would hit other rows in a sample.
    """
    if isinstance(path, Format):
        if isinstance(path, KeepFormat):
            return sound
        packed, scale = fault.compress(input, path, operator.shared.rounding is not None)
        copy = decompress(packed[chosen], scale[chosen], path, input.shape[-1], input.dtype).float()
        return dict.fromkeys(sound, copy)
    rows, inputs = input.detach().reshape(-1, input.shape[-1]), dict(sound)
    for gemm, dim in (("fprop", 1), ("wgrad", 0)):
        cast = getattr(path, gemm).input
        if cast is not None and gemm in sound:
            inputs[gemm] = fault.quantize(rows, cast, dim, _reference(operator, "input", cast))[0][chosen].float()
    return inputs


def _reference(operator: PathLinear, operand: str, cast: Cast) -> Reference:
    """Return the source of a delayed scale."""
    amax = operator.shared.amax
    if cast.scale != "delayed" or amax is None or amax.history is None:
        return None
    return partial(amax.delayed, operator.index, OPERANDS.index(operand), cast.history)


def _cast(
    operator: PathLinear,
    operand: str,
    tensor: Tensor,
    rows: Tensor,
    cast: Cast,
    dim: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `rows` (n, D) of a `tensor` (T, D) in `cast`, float32, with their scales in the whole tensor."""
    reference, outlier_columns = _reference(operator, operand, cast), outliers(cast, tensor)
    # Outlier columns stay in 16 bits, so they must not widen the scales of the other columns.
    if outlier_columns is not None:
        tensor, rows, uncast = tensor.masked_fill(outlier_columns, 0), rows.masked_fill(outlier_columns, 0), rows
    # A scale of the whole tensor comes from all rows, not from the measured ones alone.
    if cast.group(dim) == (None, None) or (cast.two_levels and not cast.hadamard):
        reference = partial(_scale_of_whole, largest_magnitude(tensor.float(), (0, 1)), reference)
    values = quantize(rows, cast, dim, reference, generator)[0].float()
    return values if outlier_columns is None else torch.where(outlier_columns, uncast.float(), values)


def _scale_of_whole(largest: Tensor, delayed: Reference, _largest_of_some: Tensor) -> Tensor:
    """Return the magnitude of a whole tensor of which some rows are cast (a `Reference`)."""
    return largest if delayed is None else delayed(largest)


def outliers(cast: Cast | None, rows: Tensor) -> Tensor | None:
    """Return the columns of the input that stay in 16 bits, (I,) bool; None if there cannot be any."""
    if cast is None or cast.outliers is None:
        return None
    return (largest_magnitude(rows, (0,)).float() >= cast.outliers)[0]


def weight_of(operator: PathLinear, dtype: torch.dtype, weight_read: Tensor | None = None) -> Tensor:
    """Return the weight (O, I) as the GEMMs are given it, rounded to `dtype`, in float32.

    `weight_read` is the tensor that a pass used instead of the weight.
    """
    # FSDP2 has not gathered it yet if the operator's output is the output of its module.
    weight = gathered(operator.matrix.detach()) if weight_read is None else weight_read
    if not weight.is_floating_point():
        assert isinstance(operator, Int8Linear)
        return Integers(weight, operator.weight_scale).values(dtype).float()
    return weight.to(dtype).float()


class PathOperands:
    """The operands of the backward GEMMs, and the weight of all GEMMs, as a path reads them, float32."""

    def __init__(
        self, operator: PathLinear, path: ExecutionPath, weight: Tensor, grad_2d: Tensor, dy: Tensor, *, seed: int
    ) -> None:
        """Prepare the casts; stochastic casts draw from `seed`, not from the run's own generator."""
        self._operator, self._path, self._weight, self._seed = operator, path, weight, seed
        self._grad_2d, self._dy = grad_2d, dy
        self._weights: dict[tuple[Cast, int | None], Tensor] = {}

    def of(self, gemm: str) -> Gemm:
        """Return the casts of a GEMM besides the input's; a format has none."""
        return getattr(self._path, gemm) if isinstance(self._path, Recipe) else Gemm()

    def weight(self, gemm: str) -> Tensor:
        """Return the weight (O, I)."""
        cast, dim = self.of(gemm).weight, 1 if gemm == "fprop" else 0
        if cast is None or not self._operator.weight.is_floating_point():
            return self._weight
        # A cast without a direction gives fprop and dgrad the same weight, so it is made once.
        key = cast, dim if cast.directed else None
        if key not in self._weights:
            self._weights[key] = _cast(self._operator, "weight", self._weight, self._weight, cast, dim)
            if cast.hadamard and gemm == "fprop":
                self._weights[key] = rotated(self._weights[key], 1, back=True)
        return self._weights[key]

    def grad_output(self, gemm: str, dim: int) -> Tensor:
        """Return the gradient (n, O)."""
        cast = self.of(gemm).grad_output
        if cast is None:
            return self._dy
        generator = torch.Generator(self._dy.device).manual_seed(self._seed) if cast.stochastic else None
        return _cast(self._operator, "grad_output", self._grad_2d, self._dy, cast, dim, generator)


def result_in(product: Tensor, cast: Cast | None) -> Tensor:
    """Return a GEMM's result in `cast`."""
    return product if cast is None else quantize(product, cast, 1)[0]
