"""Number formats, casts and recipes: what a tensor is rounded to, with which scales, and for which operand of a GEMM.

Nothing here knows modules or models. The names below are loaded on first use.
"""

from typing import TYPE_CHECKING

from gnmr import loader

__all__ = ["FORMATS", "RECIPES", "Recipe"]

if TYPE_CHECKING:
    from gnmr.formats.number_formats import FORMATS
    from gnmr.formats.recipes import RECIPES, Recipe

__getattr__ = loader(__name__, {"number_formats": ("FORMATS",), "recipes": ("RECIPES", "Recipe")})
