"""Corpora -> tokens -> blocks. Names load on first use: importing this package costs neither torch nor datasets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnmr.data.batch import Batch, model_inputs
    from gnmr.data.blocks import TrainBlocks, validation_blocks
    from gnmr.data.cache import TokenCorpus
    from gnmr.data.packing import PackedBlocks, PackedCorpus, packed_validation, prepare_packed
    from gnmr.data.tokens import prepare

__all__ = [
    "Batch",
    "PackedBlocks",
    "PackedCorpus",
    "TokenCorpus",
    "TrainBlocks",
    "model_inputs",
    "packed_validation",
    "prepare",
    "prepare_packed",
    "validation_blocks",
]

_HOME = {
    "Batch": "batch",
    "PackedBlocks": "packing",
    "PackedCorpus": "packing",
    "TokenCorpus": "cache",
    "TrainBlocks": "blocks",
    "model_inputs": "batch",
    "packed_validation": "packing",
    "prepare": "tokens",
    "prepare_packed": "packing",
    "validation_blocks": "blocks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
