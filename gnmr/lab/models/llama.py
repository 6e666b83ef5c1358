"""LLaMA: RMSNorm, rotary positions, SwiGLU, a separate head (or the embedding with `tied_head`), no biases.

Parameters have the names of Hugging Face's LlamaForCausalLM without its leading "model.", and the logits are equal.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gnmr.lab.config import ModelConfig
from gnmr.lab.models.layers import Attention, Block, Decoder, RMSNorm, Rotary, SwiGLU


class Llama(Decoder):
    """tokens_BT int64 -> logits_BTV in the weights' dtype. Does not wait for the device."""

    def __init__(self, config: ModelConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__(config, vocab_size, max_seq_len)
        width, eps = config.hidden_size, config.norm_eps
        self.rotary = Rotary(width // config.num_heads, max_seq_len, config.rope_theta)
        self.layers = nn.ModuleList(
            Block(RMSNorm(width, eps), Attention(config, bias=False), RMSNorm(width, eps), SwiGLU(config))
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(width, eps)
        if not config.tied_head:
            self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def embed(self, tokens_BT: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x_BTD = self.embed_tokens(tokens_BT)
        return x_BTD, self.rotary(x_BTD)

    def head(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.embed_tokens.weight) if self.config.tied_head else self.lm_head(x_BTD)
