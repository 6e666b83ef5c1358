"""Gradient transforms: stabilizers that change the gradient before the optimizer, one file each.

They are the baselines that routing is compared and combined with. `optim.transform.name` chooses one,
`optim.transform.options` holds the keyword arguments of its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from gnmr.errors import UserError, as_user_error
from gnmr.lab.train.transforms.agc import AGC
from gnmr.lab.train.transforms.gradient_stabilizer import GradientStabilizer
from gnmr.lab.train.transforms.skip_step import SkipStep
from gnmr.lab.train.transforms.stable_spam import StableSPAM
from gnmr.lab.train.transforms.transform import Transform, check_options

TRANSFORMS: dict[str, type[Transform]] = {
    "agc": AGC,
    "stable_spam": StableSPAM,
    "gradient_stabilizer": GradientStabilizer,
    "skip_step": SkipStep,
}


def build_transform(
    name: str | None, options: Mapping[str, Any], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> Transform | None:
    """Return the transform `name` over the trainable parameters, or None for None.

    Raises UserError for an unknown name or option (listing the right ones) or an invalid value.
    """
    if name is None:
        if options:
            raise UserError(
                f"optim.transform.options={dict(options)}: without effect while optim.transform.name is null"
            )
        return None
    if name not in TRANSFORMS:
        raise UserError(f"optim.transform.name={name}: must be null or one of {', '.join(TRANSFORMS)}")
    with as_user_error("optim.transform.options."):
        check_options(TRANSFORMS[name], name, options)
        return TRANSFORMS[name](named_parameters, **options)
