"""Linear operators on two paths: a low-precision path and a recovery path. Knows nothing of the controller.

`convert` replaces linears in place; `linear` is what runs then, and `gemms`, `scaled_mm` and `int8` run its GEMMs;
`adapters` finds and runs linears in other modules; `cost` counts what each path takes. The names below are loaded on
first use: the config reads `gnmr.conversion.path_spec`, which does without torch.
"""

from typing import TYPE_CHECKING

from gnmr import loader

__all__ = ["ConvertedModel", "PathLinear", "PathSpec", "convert"]

if TYPE_CHECKING:
    from gnmr.conversion.converted import ConvertedModel
    from gnmr.conversion.converting import convert
    from gnmr.conversion.linear import PathLinear
    from gnmr.conversion.path_spec import PathSpec

__getattr__ = loader(
    __name__,
    {
        "converting": ("convert",),
        "converted": ("ConvertedModel",),
        "linear": ("PathLinear",),
        "path_spec": ("PathSpec",),
    },
)
