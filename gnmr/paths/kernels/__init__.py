"""What casts and multiplies under a recipe, for each backend. Kernels know numbers and a `GemmContext`, no module."""

from gnmr.paths.kernels.int8 import IntContext
from gnmr.paths.kernels.scaled_mm import ScaledContext
from gnmr.paths.kernels.simulated import GemmContext, in_backward, recipe_linear
from gnmr.paths.recipes import Recipe

__all__ = ["GemmContext", "context_kind", "in_backward", "recipe_linear"]


def context_kind(recipe: Recipe) -> type[GemmContext]:
    """What casts and multiplies under `recipe`."""
    if recipe.integer:
        return IntContext
    return ScaledContext if recipe.backend == "scaled_mm" else GemmContext
