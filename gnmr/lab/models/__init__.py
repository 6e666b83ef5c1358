"""Model architectures: llama, gpt, moe, and outlier channels. Precision paths are added from outside.

model = models.build(config.model, vocab_size, seq_len)
model.init_weights(torch.Generator().manual_seed(seed))
add_outlier_channels(model, number, gain, generator)    # optional
logits_BTV = model(tokens_BT)
model.auxiliary_loss        # unless None, training adds it to the cross-entropy of these logits
"""

from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from gnmr.lab.config import ModelConfig
from gnmr.lab.models import cpu_products
from gnmr.lab.models.decoders import GPT, Decoder, Llama
from gnmr.lab.models.moe import MoE
from gnmr.lab.models.outliers import OutlierWindow, add_outlier_channels

__all__ = ["GPT", "Decoder", "Llama", "MoE", "OutlierWindow", "add_outlier_channels", "build", "build_empty"]


def build(config: ModelConfig, vocab_size: int, max_seq_len: int) -> Decoder:
    """Build the model of `config.name` on the default device and dtype.

    Its weights are undefined until `init_weights` or `load_state_dict`.
    """
    cpu_products.provide()
    return {"llama": Llama, "pangu": Llama, "gpt": GPT, "moe": MoE}[config.name](config, vocab_size, max_seq_len)


def build_empty(config: ModelConfig, vocab_size: int, max_seq_len: int) -> Decoder:
    """Build the model of `config.name` on the meta device: shapes without numbers, at no cost."""
    with torch.device("meta"), _NoDraws():
        return build(config, vocab_size, max_seq_len)


class _NoDraws(TorchFunctionMode):
    """Leave weights as they are instead of drawing them: to draw on the meta device imports torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == init.__name__:
            return (kwargs or {}).get("tensor", *args[:1])
        return func(*args, **(kwargs or {}))
