"""Recipes, as `transformer_engine.common.recipe` has them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID


@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3


@dataclass
class DelayedScaling:
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
