"""Low-cost and recovery paths of linear operators. Knows nothing of the controller.

The names below are loaded on first use: the config reads `gnmr.precision.spec`, which does without torch.
"""

from typing import TYPE_CHECKING

from gnmr import loader

__all__ = [
    "FORMATS",
    "RECIPES",
    "ConvertedModel",
    "PathLinear",
    "PathSpec",
    "Recipe",
    "convert",
]

if TYPE_CHECKING:
    from gnmr.precision.conversion import convert
    from gnmr.precision.converted import ConvertedModel
    from gnmr.precision.formats import FORMATS
    from gnmr.precision.linear import PathLinear
    from gnmr.precision.recipes import RECIPES, Recipe
    from gnmr.precision.spec import PathSpec


__getattr__ = loader(
    __name__,
    {
        "conversion": ("convert",),
        "formats": ("FORMATS",),
        "linear": ("PathLinear",),
        "converted": ("ConvertedModel",),
        "recipes": ("RECIPES", "Recipe"),
        "spec": ("PathSpec",),
    },
)
