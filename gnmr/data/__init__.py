"""Corpora -> tokens -> blocks. Names load on first use: importing this package costs neither torch nor datasets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnmr.data.blocks import TrainBlocks, validation_blocks
    from gnmr.data.cache import TokenCorpus
    from gnmr.data.tokens import prepare

__all__ = ["TokenCorpus", "TrainBlocks", "prepare", "validation_blocks"]

_HOME = {"TokenCorpus": "cache", "TrainBlocks": "blocks", "prepare": "tokens", "validation_blocks": "blocks"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
