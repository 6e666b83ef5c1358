"""Corpora -> tokens -> blocks. Names load on first use: importing this package costs neither torch nor datasets."""

from typing import TYPE_CHECKING

from gnmr.lazy import loader

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

__getattr__ = loader(
    __name__,
    {
        "batch": ("Batch", "model_inputs"),
        "blocks": ("TrainBlocks", "validation_blocks"),
        "cache": ("TokenCorpus",),
        "packing": ("PackedBlocks", "PackedCorpus", "packed_validation", "prepare_packed"),
        "tokens": ("prepare",),
    },
)
