"""Number formats of few bits: their values, and how a number is rounded to the nearest of them.

A format is a finite set of values, one for each code of `bits` bits. Encoding takes numbers that are scaled so that the
largest magnitude of a row equals `max`, and returns codes. Decoding returns the values of codes.

    int2 int3 int4 int8   code = integer + 2^(bits-1), symmetric: -max .. max with max = 2^(bits-1) - 1
    e2m1 e2m3 e3m2        sign, exponent, mantissa; no Inf, no NaN (OCP MX formats, FP4 and FP6)
    e4m3 e5m2             the two FP8 formats (OCP FP8; e4m3 is PyTorch's float8_e4m3fn)
    int2/256 ...          code = integer, 0 .. 2^bits - 1, from the smallest to the largest of that many elements of
                          a row (`RangeFormat`); only for saved inputs, not for recipes

Rounding is to nearest with ties to even: of two equally near values the one with the even code. Stochastic rounding
goes up or down with the probability that makes the expectation exact; the caller supplies the random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnmr import names as vocabulary


@dataclass(frozen=True)
class Format:
    """Base class of the formats. `max` is the largest finite value."""

    name: str
    bits: int
    max: float
    significant_bits: int
    """Binary digits of the most precise values: an integer's without its sign, or a mantissa's plus one."""

    def encode(self, scaled: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the codes of numbers.

        Args:
            scaled: float32, magnitudes up to `max`; overwritten.
            noise: uniform float32 numbers in [0, 1) of the same shape for stochastic rounding; None: round to nearest.

        Returns:
            uint8, below 2^bits, in the same shape. A NaN gets an arbitrary code, because the scale marks its row.
        """
        raise NotImplementedError

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of `codes` (uint8, any shape) in `dtype`.

        Returns: the values, in the same shape. Each floating dtype of 16 bits or more holds all of them exactly.
        """
        raise NotImplementedError

    def round(self, scaled: Tensor, scratch: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Round to the nearest values: `decode(encode(scaled))` without the codes and up to the sign of zero.

        Args:
            scaled: float32, magnitudes up to `max`; overwritten.
            scratch: float32 of the same shape, overwritten; None: allocated.
            noise: uniform float32 numbers between -128 and 128, both excluded, of the same shape for stochastic
                rounding. That many 256ths of a step are added before rounding. None: round to nearest.

        Returns:
            `scaled`; NaN stays NaN.
        """
        raise NotImplementedError

    def step(self, scaled: Tensor) -> Tensor:
        """Return the distance between the neighboring values around `scaled` (float32, magnitudes up to `max`).

        Returns: float32, a new tensor of the same shape.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class IntFormat(Format):
    """Symmetric integers; the lowest code would be -max - 1 and is never produced."""

    def encode(self, scaled: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is None:
            scaled.round_()
        else:
            # With u uniform in [0, 1) the expectation of floor(x + u) is x.
            scaled.add_(noise).floor_().clamp_(-self.max, self.max)
        # Convert through int8, modulo 256: CPUs convert float32 to int8 five times faster than to uint8.
        return scaled.to(torch.int8).view(torch.uint8).add_(int(self.max) + 1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.sub(int(self.max) + 1).view(torch.int8).to(dtype)

    def round(self, scaled: Tensor, scratch: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        # This noise is symmetric around 0, so rounding to nearest takes the place of the floor.
        return (scaled if noise is None else scaled.add_(noise, alpha=2.0**-8)).round_()

    def step(self, scaled: Tensor) -> Tensor:
        return torch.ones_like(scaled)


@dataclass(frozen=True)
class RangeFormat(Format):
    """Integers from 0 to 2^bits - 1 between the smallest and the largest value of a group (`scaling.py`)."""

    group: int
    """Elements of a row that share a range; a row's last group may be shorter."""

    @staticmethod
    def of(name: str, group: int) -> RangeFormat:
        """Return the range format with the bits of an integer format.

        Args:
            name: int2, int3, int4 or int8.
            group: elements of a row that share a range.
        """
        fmt = FORMATS[name]
        return RangeFormat(f"{name}/{group}", fmt.bits, 2.0**fmt.bits - 1, fmt.bits, group)

    def encode(self, scaled: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the codes of numbers.

        Returns: uint8 integers from 0 to `max`, to which numbers outside are clamped.
        """
        if noise is None:
            scaled.round_()
        else:
            scaled.add_(noise).floor_()
        return scaled.clamp_(0, self.max).to(torch.int16).to(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the codes as numbers.

        Returns: whole numbers from 0 to `max` in `dtype`.
        """
        return codes.to(dtype)


@dataclass(frozen=True)
class FloatFormat(Format):
    """Sign, `exponent_bits` and `mantissa_bits`, with subnormals as in IEEE 754 and bias 2^(exponent_bits-1) - 1."""

    exponent_bits: int
    mantissa_bits: int
    """Bits after the leading 1, which is not stored; m in the comments."""
    native: torch.dtype | None = None
    """PyTorch's type with the same codes, whose casts are then used."""
    _tables: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def bias(self) -> int:
        """The number that codes add to exponents; 1 - bias is the exponent of the smallest normal value."""
        return 2 ** (self.exponent_bits - 1) - 1

    def magnitudes(self) -> Tensor:
        """Return the finite values from 0 to max, (n,) float32; a value's index is its code without the sign."""
        bias = self.bias
        values: list[float] = []
        for code in range(2 ** (self.bits - 1)):
            exponent, mantissa = code >> self.mantissa_bits, code & (2**self.mantissa_bits - 1)
            fraction = mantissa / 2**self.mantissa_bits
            # Exponent 0 is subnormal: no leading 1, and the exponent of the smallest normal value.
            value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            # The codes from here on are Inf or NaN.
            if value > self.max:
                break
            values.append(value)
        return torch.tensor(values, dtype=torch.float32, device="cpu")

    def encode(self, scaled: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the codes of numbers.

        Returns: uint8, from the highest of `bits` bits on sign, exponent and mantissa; that of `max` for magnitudes
        beyond.
        """
        if noise is None and self.native is not None:
            return scaled.clamp_(-self.max, self.max).to(self.native).view(torch.uint8)
        # The sign bit of the float32 number becomes the highest bit of the code.
        sign = (scaled.view(torch.int32) >> 31).to(torch.uint8).bitwise_and_(1 << (self.bits - 1))
        magnitude = scaled.abs_()
        index = self._nearest(magnitude) if noise is None else self._stochastic(magnitude, noise)
        return index.to(torch.uint8).add_(sign)

    def _nearest(self, magnitude: Tensor) -> Tensor:
        """Return the index (int32) of the nearest magnitude, ties to the even index; `magnitude` is overwritten.

        Let p be the power of two at or below x, but at least the smallest normal number. The values around x are p *
        2^-m apart, and so are the float32 numbers from M = p * 2^(23-m) on. Therefore x + M is x correctly rounded, and
        its bits minus the bits of M are the number of such steps in x. Each doubling of p adds 2^m codes. All of it
        runs in place and in integers, because new memory, comparisons and selections are slow on CPUs.
        """
        dropped = 23 - self.mantissa_bits
        # 2^(1 - bias) in the bits of float32, whose own bias is 127
        smallest_normal = (128 - self.bias) << 23
        power = magnitude.clamp_(max=self.max).view(torch.int32) & 0x7F800000
        power.clamp_(min=smallest_normal)
        steps = magnitude.add_(power.view(torch.float32), alpha=2**dropped).view(torch.int32).sub_(power)
        behind = power.bitwise_right_shift_(dropped)
        # Taken off: the exponent of M above that of p, and that of the smallest normal number, where doublings begin.
        return steps.add_(behind).sub_((dropped << 23) + (smallest_normal >> dropped))

    def _stochastic(self, magnitude: Tensor, noise: Tensor) -> Tensor:
        """Return the index of one of the two neighbors, the nearer one with the higher probability."""
        grid = self._table("magnitudes", magnitude.device)
        below = (torch.bucketize(magnitude, grid, right=True, out_int32=True) - 1).clamp_(max=len(grid) - 1)
        above = (below + 1).clamp_(max=len(grid) - 1)
        low, high = grid[below], grid[above]
        # Up with probability (x - low) / (high - low); at the last value both are equal, and `below` stays.
        return torch.where(noise * (high - low) < magnitude - low, above, below)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of codes.

        Returns: the values in `dtype`, Inf and NaN included if the format is native.
        """
        table = self._table("values", codes.device).to(dtype)
        return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)

    def round(self, scaled: Tensor, scratch: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Round to the nearest values.

        Returns: `scaled`; magnitudes beyond `max` are rounded as if there were larger exponents.
        """
        # As in `_nearest`, with 1.5 M instead of M: float32 numbers around 1.5 M are equally far apart on both sides,
        # so signs need no special treatment.
        power, shift = self._power(scaled, scratch), 1.5 * 2 ** (23 - self.mantissa_bits)
        if noise is not None:
            # The noise is in 256ths of a step, and the step is p * 2^-m.
            scaled.addcmul_(power, noise, value=2.0 ** -(self.mantissa_bits + 8))
        return scaled.add_(power, alpha=shift).sub_(power, alpha=shift)

    def round_unscaled(self, x: Tensor, smallest_normal: Tensor, scratch: Tensor, out: Tensor) -> None:
        """Write to `out` the values nearest to `x` of the format times powers of two, without dividing by these.

        Args:
            x: bfloat16 or float32; no magnitude exceeds `max` times its power of two.
            smallest_normal: the format's smallest normal value times the power of two, a normal number; broadcast
                against `x`.
            scratch: a tensor like `x`, overwritten.
            out: a tensor like `x`, or `x` itself.
        """
        # As in `round`, with the smallest power of each group. Also in bfloat16 the sums are rounded only once.
        kind, digits = (torch.int16, 7) if x.dtype == torch.bfloat16 else (torch.int32, 23)
        shift = 1.5 * 2 ** (digits - self.mantissa_bits)
        bits = torch.bitwise_and(x.view(kind), 0xFF << digits, out=scratch.view(kind))
        torch.maximum(bits, smallest_normal.view(kind), out=bits)
        torch.add(x, scratch, alpha=shift, out=out).sub_(scratch, alpha=shift)

    def step(self, scaled: Tensor) -> Tensor:
        """Return the distance between the neighboring values around `scaled`.

        Returns: float32, 2^-m times the power of two at or below the magnitude, at least the smallest subnormal value.
        """
        return self._power(scaled).mul_(2.0**-self.mantissa_bits)

    def _power(self, scaled: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Return the power of two at or below each magnitude (float32), at least the smallest normal one."""
        out = None if scratch is None else scratch.view(torch.int32)
        power = torch.bitwise_and(scaled.view(torch.int32), 0x7F800000, out=out)
        return power.clamp_(min=(128 - self.bias) << 23).view(torch.float32)

    def _table(self, name: str, device: torch.device) -> Tensor:
        key = f"{name}@{device}"
        if key not in self._tables:
            table = self.magnitudes()
            if name == "values" and self.native is not None:
                # PyTorch's own type decodes every code, Inf and NaN included.
                table = torch.arange(256, device="cpu").to(torch.uint8).view(self.native).float()
            elif name == "values":
                table = torch.cat([table, -table])
            self._tables[key] = table.to(device)
        return self._tables[key]


@dataclass(frozen=True)
class KeepFormat(Format):
    """The tensor itself, in its own 16 bits (or 32, in an FP32 run): nothing is encoded.

    The cast `bf16/none` rounds a tensor in float32 to bfloat16.
    """

    def round(self, scaled: Tensor, scratch: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Round to bfloat16.

        Returns: `scaled`, float32 with values of bfloat16; `noise` has no effect.
        """
        return scaled.copy_(scaled.bfloat16())


def _format(name: str) -> Format:
    if name == "bf16":
        return KeepFormat(name, 16, float("inf"), 8)
    if name.startswith("int"):
        bits = int(name.removeprefix("int"))
        return IntFormat(name, bits, 2.0 ** (bits - 1) - 1, bits - 1)
    exponent, mantissa = map(int, name.removeprefix("e").split("m"))
    native = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(name)
    # In formats without Inf and NaN every code is a number; PyTorch's own types have some that are not.
    largest = 2.0**2 ** (exponent - 1) * (2 - 2.0**-mantissa) if native is None else torch.finfo(native).max
    return FloatFormat(name, 1 + exponent + mantissa, largest, mantissa + 1, exponent, mantissa, native)


FORMATS: dict[str, Format] = {name: _format(name) for name in vocabulary.FORMATS}


def get_format(name: str) -> Format:
    """Return the format of that name. Raises ValueError, with the known names, for any other."""
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not known: use one of {', '.join(FORMATS)}")
    return FORMATS[name]
