"""Explain why the signal-to-noise ratio of an operand or an output is poor.

Equally poor ratios can have different causes. Further casts distinguish them:

    scale        q is a multiple of the ideal cast, or the cast under a scale that is k times the right one
    saturated    without the elements at the largest value of q, the ratio is as good as it can be
    outlier      the ratio is as good as it can be, and a few channels cost all others half of the decibels that they
                 would have if the few were zero (under scales of several tokens, also a few tokens)
    noise        none of these
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gnmr.errors import first_few
from gnmr.measure.in_force import Grain

TOLERANCE = 3.0
"""Allowed distance from the possible ratio, in dB, for other scale rules (powers of two) and ties."""
PRODUCT = 30.0
"""Minimum ratio, in dB, between an output and the product of its operands."""
_FEW = 256
"""Number of elements below which stochastic rounding is noisy, so that `TOLERANCE` is doubled."""
_RISEN = 8.0
"""Multiple of the median channel's magnitude above which a channel may be an outlier."""


@dataclass(frozen=True)
class Cause:
    """The problem of one operand or output, and its remedy."""

    kind: str
    text: str
    right: str


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise)."""
    if not math.isfinite(signal + noise):
        return -math.inf
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def energy(x: Tensor) -> float:
    """Return the sum of squares, computed in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def explained(x: Tensor, q: Tensor, grain: Grain | None, contracted: int, ideal: Tensor | None) -> Cause | None:
    """Return the problem of `q`, which a GEMM reads for the tensor `x` (N, D) cast in `grain`, or None."""
    x, q = x.float(), q.float()
    signal, noise = energy(x), energy(q - x)
    if not math.isfinite(signal):
        return Cause("not finite", "the tensor itself is not finite", "look for the operator before it")
    if not math.isfinite(noise):
        return Cause("not finite", "is not finite, the tensor that was cast is", "look at its scale")
    if signal == 0:
        return None
    if grain is None:
        return None if noise == 0 else _undeclared(x, q, signal, noise)
    assert ideal is not None
    possible = energy(ideal.float() - x)
    if noise == 0:
        said = f"is the tensor itself (infinite dB); {grain} can give {decibels(signal, possible):.0f} dB"
        return None if possible == 0 else Cause("never quantized", said, f"cast it to {grain}, or say that it is not")
    allowed = TOLERANCE * (2 if x.numel() < _FEW else 1)
    if decibels(signal, noise) < decibels(signal, possible) - allowed:
        return _poor(x, q, grain, contracted, ideal.float())
    return _outlier(x, q, grain, contracted)


def _undeclared(x: Tensor, q: Tensor, signal: float, noise: float) -> Cause:
    gain = float((q.double() * x.double()).sum()) / signal
    said = f"is cast to {decibels(signal, noise):.0f} dB, and nothing says that it is"
    if abs(gain - 1) > 0.1:
        said = f"is {gain:.3g} times the tensor that the operator was given"
    return Cause("undeclared cast", said, "look at what wraps this linear")


def _poor(x: Tensor, q: Tensor, grain: Grain, contracted: int, ideal: Tensor) -> Cause:
    """Return the reason why the noise of q is far above that of the ideal cast."""
    signal, noise, possible = energy(x), energy(q - x), energy(ideal - x)
    head = f"{decibels(signal, noise):.1f} dB where {grain} can give {decibels(signal, possible):.1f}"
    enough = possible * 10 ** (TOLERANCE / 10)
    for dim, what in ((None, "the tensor"), (1, "its rows"), (0, "its columns")):
        gain = _gain(ideal, q, dim)
        if energy(q / gain - x) <= enough and float((gain - 1).abs().max()) > 0.1:
            off = gain[(gain - 1).abs() > 0.1]
            part = "" if dim is None else f" in {off.numel()} of {gain.numel()} of {what}"
            text = f"{head}: the GEMM reads {float(off.flatten()[0]):.3g} times the tensor{part}"
            return Cause("scale", text, "the scale that is multiplied back must be the one that was divided by")
    largest = float(q.abs().max())
    beyond = x.abs() > 1.03 * largest
    share = float(beyond.double().mean())
    said = f"{head}: {share:.2g} of its elements are beyond {largest:.3g}, the largest that the GEMM reads"
    clamped = Cause("saturated", said, "look for a clamp, or a scale of another tensor")
    small = f", so that {share:.2g} of its elements saturate" if share else ""
    delayed = grain.cast.scale == "delayed"
    for factor in (2.0, 0.5, largest / float(x.abs().max()), 4.0, 0.25, 8.0, 0.125, 16.0, 0.0625):
        if factor <= 0 or abs(factor - 1) < 0.05 or energy(q - grain.under(x, contracted, factor)) >= 0.1 * noise:
            continue
        if delayed and factor < 1:
            said = f"{head}: saturated: its delayed scale is of {factor:.2g} times its largest value{small}"
            return Cause("saturated", said, "a shorter history, or a scale of the tensor at hand")
        power = abs(math.log2(factor) - round(math.log2(factor))) < 0.05
        if share and not power and not delayed:
            return clamped
        said = f"{head}: cast under {factor:.3g} times the right scale{small}"
        return Cause("scale", said, "the scale of a group is its largest magnitude over the format's")
    if share and energy((q - x)[~beyond]) <= enough:
        return clamped
    return Cause("noise", f"{head}, and no scale, saturation or outlier explains it", "look at how it is cast")


def _gain(x: Tensor, q: Tensor, dim: int | None) -> Tensor:
    """Return the factor between x and q by least squares, for all, each row or each column; 1 for zeros."""
    x, q = x.double(), q.double()
    own, both = x.square(), x * q
    own, both = (own.sum(), both.sum()) if dim is None else (own.sum(dim, keepdim=True), both.sum(dim, keepdim=True))
    gain = torch.where(own > 0, both / own, 1.0)
    return torch.where(gain.abs() > 1e-6, gain, 1.0).float()


def _outlier(x: Tensor, q: Tensor, grain: Grain, contracted: int) -> Cause | None:
    """Return a cause if a few channels or tokens cost the others half of their decibels."""
    dims = [0] if x.shape[1] > 4 else []
    if grain.cast.scale in ("tensor", "delayed", "block") and x.shape[0] > 4:
        dims.append(1)
    for dim in dims:
        peaks = x.abs().amax(dim)
        few = peaks > _RISEN * peaks.median()
        if not 0 < int(few.sum()) <= max(1, few.numel() // 32):
            continue
        others = ~few.unsqueeze(dim).expand_as(x)
        without = grain.ideal(torch.where(others, x, 0.0), contracted).float()
        signal = energy(x[others])
        now, then = (decibels(signal, energy((each - x)[others])) for each in (q, without))
        if now < then / 2:
            numbers = first_few([str(number) for number in few.nonzero().flatten().tolist()], 3)
            what, times = "channel" if dim == 0 else "row", float(peaks[few].max() / peaks.median())
            subject, it = f"{what} {numbers} is", "it"
            if int(few.sum()) > 1:
                subject, it = f"{what}s {numbers} are up to", "them"
            said = (
                f"{subject} {times:.3g} times as large as the median {what}: beside {it} the other {what}s have "
                f"{now:.1f} dB, without {it} they would have {then:.1f} dB"
            )
            return Cause("outlier", said, "smaller groups with a scale, a rotation, or 16 bits for this operator")
    return None


def is_multiple(y: Tensor, exact: Tensor) -> bool:
    """Return True if `y` is a multiple of `exact` but for a tenth of its energy, or if one is 0 or not finite."""
    return not alignment(y, exact) < 0.9


def alignment(y: Tensor, exact: Tensor) -> float:
    """Return the squared cosine between two tensors; NaN if one is 0 or not finite."""
    norms = energy(y.float()) * energy(exact.float())
    return float((y.double() * exact.double()).sum()) ** 2 / norms if math.isfinite(norms) and norms else math.nan


def of_output(exact: Tensor, y: Tensor, ideal: Tensor | None, bias: Tensor | None) -> Cause | None:
    """Return the problem of an output that should be `exact`, or None; `ideal` is the best possible output."""
    exact, y = exact.float(), y.float()
    signal, noise = energy(exact), energy(y - exact)
    if not math.isfinite(noise):
        finite = math.isfinite(signal)
        return Cause("not finite", "its output is not finite", "look at its scales") if finite else None
    if signal == 0:
        return None
    floor = signal * 10 ** (-PRODUCT / 10)
    if ideal is None:  # nothing is declared, so only a wrong multiple is a problem; ternary weights leave 0.8 of it
        floor = signal * 0.1
        if 0.25 < alignment(y, exact) < 0.9:
            return None
    possible = max(floor, 0.0 if ideal is None else energy(ideal.float() - exact) * 10 ** (TOLERANCE / 10))
    if noise <= possible:
        return None
    if bias is not None and energy(y + bias - exact) <= possible:
        return Cause("output", "its output lacks the bias", "the bias must be added after the product")
    gain = float((y.double() * exact.double()).sum()) / signal
    said = f"its output is {decibels(signal, noise):.1f} dB from what its operands give"
    if abs(gain - 1) > 0.1:
        said += f", {gain:.3g} times it"
    return Cause("output", said, "look at the scales that multiply the product")
