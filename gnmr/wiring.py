"""From the config to the paths: a mistake in it is the user's."""

from __future__ import annotations

import torch
from torch import nn

from gnmr.config import PathsConfig
from gnmr.errors import UserError
from gnmr.paths import Plan, convert


def build_plan(model: nn.Module, paths: PathsConfig, seed: int, device: torch.device | None = None) -> Plan:
    """Gives the model's linears the paths of conf/paths. UserError: see `gnmr.paths.convert`."""
    try:
        return convert(model, paths, seed=seed, device=device)
    except ValueError as error:
        raise UserError(f"paths: {error}") from error
