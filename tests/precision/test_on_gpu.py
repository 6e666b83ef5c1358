"""Casts and saved formats on a GPU are the CPU's; kernels are held against their simulation elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnmr.precision import FORMATS, RECIPES
from gnmr.precision.cast import quantize
from gnmr.precision.scaling import compress, decompress

CASTS = {str(cast): cast for recipe in RECIPES.values() for cast in recipe.casts if not cast.stochastic}


def sample(dtype: torch.dtype) -> Tensor:
    """Return random numbers with outlier columns, a row of zeros, tiny, infinite and NaN elements."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    x[:, ::64] *= 20
    x[0] = 0
    x[1] *= 1e-38
    x[2, 1], x[128, 2] = torch.inf, torch.nan
    return x.to(dtype)


def equal_share(here: Tensor, there: Tensor) -> float:
    """Return the share of equal elements; NaN equals NaN."""
    there = there.cpu()
    return float(((here == there) | ((here != here) & (there != there))).double().mean())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_and_saved_formats_are_the_cpus(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x, shares = sample(dtype), dict[str, float]()
    for name, cast in CASTS.items():
        for dim in (0, 1):
            here, there = (quantize(each, cast, dim, None, None)[0] for each in (x, x.cuda()))
            shares[f"{name} along {dim}"] = equal_share(here, there)
    for name, fmt in FORMATS.items():
        if name != "bf16":
            here, there = (decompress(*compress(each, fmt), fmt, 512, dtype) for each in (x, x.cuda()))
            shares[name] = equal_share(here, there)
    assert min(shares.values()) > 0.999, {name: share for name, share in shares.items() if share <= 0.999}
