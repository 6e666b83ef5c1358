"""What casts and multiplies under a recipe, for each backend. Kernels know numbers and a `GemmContext`, no module."""

from gnmr.precision.kernels.int8 import IntContext
from gnmr.precision.kernels.scaled_mm import ScaledContext
from gnmr.precision.kernels.simulated import GemmContext, casts_nothing, in_backward, owned, recipe_linear, refuse_twice
from gnmr.precision.recipes import Recipe

__all__ = [
    "GemmContext",
    "casts_nothing",
    "context_kind",
    "in_backward",
    "owned",
    "recipe_linear",
    "refuse_twice",
]


def context_kind(recipe: Recipe) -> type[GemmContext]:
    """What casts and multiplies under `recipe`."""
    if recipe.integer:
        return IntContext
    return ScaledContext if recipe.backend == "scaled_mm" else GemmContext
