"""Compare what two kernels made of the same numbers: they may differ by the order of a sum, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Results = Tensor | Sequence[Tensor | None] | Mapping[str, Tensor]
EIGHT_BITS, FOUR_BITS = 1e-2, 4e-2
"""Parts of a norm that a few codes of eight or four bits change, in tensors of a thousand elements, by falling on the
other side of a tie. The cast itself changes a product by 4% or by 10% and more."""


def apart(ours: Results, theirs: Results, terms: int, products: int = 1, recast: float = 0.0) -> dict[str, str]:
    """Return, by name or number, how far those of these results differ that the order of sums does not explain.

    Bits are compared (`torch.equal`) only where one operation ran twice on the same strides and alignments in one
    process. Another kernel, layout, number of threads or library adds the products of a sum in another order, and which
    one runs depends on the CPU. A kernel may also do so for views into a larger buffer and tensors in a mapped file.

    A sum of K terms in FP32 makes K roundings of independent sign, each of at most eps/2 of a partial sum. The result
    is off by about e = eps * sqrt(K) of its norm, on either side. Norms of whole tensors are compared, because terms
    cancel in single elements. They cancel in whole tensors too (the gradient of a key's bias is 0), so that the error
    in FP32 is a part of the largest norm among the results. A scalar, such as a loss, counts for itself alone.

    A result of 16 bits is rounded once more, by eps16. Two FP32 sums that differ by e fall on different sides of a
    rounding boundary in a share e / eps16 of the elements, which adds sqrt(e * eps16) of the norm. The next product
    starts from this error, and so on. A single such element may be the largest one.

    Other recipes differ by percents of the norm, which this bound never allows in FP32.

    Args:
        ours: a tensor, or several in a list or by name; None stands for a gradient that does not exist.
        theirs: the same of the other computation.
        terms: number of products in the longest sum.
        products: number of matrix products in a row, forward and backward.
        recast: `EIGHT_BITS` or `FOUR_BITS` if a product is cast again. Operands that differ in their last bits then
            have other codes here and there.
    """
    named, expected = _named(ours), _named(theirs)
    assert named.keys() == expected.keys()
    norms = {name: 0.0 if tensor is None else _norm(tensor) for name, tensor in expected.items()}
    order = 2 * torch.finfo(torch.float32).eps * terms**0.5
    tensors = {name for name, tensor in expected.items() if tensor is not None and tensor.dim() > 0}
    largest = max((norms[name] for name in tensors), default=0.0)
    found = {}
    for name, tensor in named.items():
        other = expected[name]
        if tensor is None or other is None:
            if tensor is not other:
                found[name] = "one of them does not exist"
            continue
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        allowed = products * order * (largest if name in tensors else norms[name]) + recast * norms[name]
        if other.dtype in (torch.float16, torch.bfloat16) and other.numel():
            eps = torch.finfo(other.dtype).eps
            allowed += eps * (order / eps) ** 0.5**products * norms[name] + eps * float(other.detach().abs().max())
        distance = _norm(tensor.double() - other.double())
        if not distance <= allowed:  # NaN too
            found[name] = f"{distance:.3g} of a norm of {norms[name]:.3g}, where {allowed:.3g} is allowed"
    return found


def assert_close(ours: Results, theirs: Results, terms: int, products: int = 1, recast: float = 0.0) -> None:
    """Assert that nothing is `apart`."""
    assert apart(ours, theirs, terms, products, recast) == {}


def _named(results: Results) -> dict[str, Tensor | None]:
    if isinstance(results, Tensor):
        return {"it": results}
    return dict(results) if isinstance(results, Mapping) else {f"{i}": each for i, each in enumerate(results)}


def _norm(x: Tensor) -> float:
    return float(x.detach().double().norm())
