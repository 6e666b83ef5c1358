"""Which backend runs a recipe.

simulated    operands rounded to the format's values, GEMMs in the tensors' own dtype (`kernels/simulated.py`): anywhere
scaled_mm    `torch._scaled_mm` and `F.scaled_mm` on operands of one byte (`kernels/scaled_mm.py`): GPUs of compute
             capability 8.9 or newer (Ada, Hopper, Blackwell); tiles and blocks need Hopper, mx Blackwell. CPUs have the
             first function too, without being faster: good for testing
int_mm       `torch._int_mm`, for recipes that multiply integers (`kernels/int8.py`)
te           Transformer Engine, for the recipes that it has (`kernels/te.py`); never chosen by auto
auto         a real one where device, recipe and widths allow it, else simulated; the printed plan says which. Warns
             when falling back to simulation, on GPUs or where the plan is not printed (sim_ recipes excepted)
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import nn

from gnmr.errors import users_level
from gnmr.precision.kernels import int8, scaled_mm, te
from gnmr.precision.recipes import Recipe


def with_backend(
    recipe: Recipe, backend: str, linears: dict[str, nn.Linear], device: torch.device, shown: bool = True
) -> Recipe:
    """The recipe as `backend` will run it in these linears on `device`. ValueError names what is missing.

    A GPU that this machine does not have is one that integers run on, and that has FP8 if `backend` says so. Integers
    are tried the first time on a device, which waits for it. `shown`: see `gnmr.precision.conversion`.
    """
    if backend == "simulated" or not recipe.casts:
        return recipe
    kind = backend
    if backend == "auto":
        kind = "int_mm" if recipe.integer else "scaled_mm"
    missing, instead = _missing(kind, recipe, linears, device, backend == "auto")
    if missing is None:
        return replace(recipe, backend=kind)
    if backend != "auto":
        raise ValueError(f"backend={backend!r}: {missing}; use {instead}")
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if (on_gpu or not shown) and not recipe.name.startswith("sim_"):
        warnings.warn(f"recipe {recipe.name} is simulated: {missing}", stacklevel=users_level())
    return recipe


def _missing(
    kind: str, recipe: Recipe, linears: dict[str, nn.Linear], device: torch.device, auto: bool
) -> tuple[str | None, str]:
    """(why `kind` does not run it; None: it does; what to use then). `auto`: `kind` was chosen automatically."""
    if kind == "int_mm":
        return int8.missing(recipe, linears, device), "backend='simulated'" if recipe.integer else "backend='auto'"
    elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    here = torch.device("cpu") if elsewhere else device
    if kind == "te":
        return te.missing(recipe, linears, here), "backend='scaled_mm' or 'simulated'"
    # A GPU of another machine is taken to have FP8 if scaled_mm was asked for.
    return scaled_mm.missing(recipe, linears, None if elsewhere and not auto else here, auto), "backend='auto'"
