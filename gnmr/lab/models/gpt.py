"""GPT: LayerNorm, learned positions, GELU (the tanh form of GPT-2), biases, and a head tied to the embedding.

This is the architecture of GPT-2 with the module names of LLaMA. Queries, keys and values are three linears, so that
one list of name patterns serves both models.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from gnmr.lab.config import ModelConfig
from gnmr.lab.models.layers import GELUMLP, Attention, Block, Decoder


class GPT(Decoder):
    """tokens_BT int64 -> logits_BTV in the weights' dtype, for T up to `max_seq_len`. Does not wait for the device."""

    def __init__(self, config: ModelConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__(config, vocab_size, max_seq_len)
        width, eps = config.hidden_size, config.norm_eps
        self.embed_positions = nn.Embedding(max_seq_len, width)
        self.layers = nn.ModuleList(self.block(index) for index in range(config.num_layers))
        self.norm = nn.LayerNorm(width, eps)

    def block(self, index: int) -> Block:
        """Return the block of layer `index`."""
        width, eps = self.config.hidden_size, self.config.norm_eps
        attn, mlp = Attention(self.config, bias=True), GELUMLP(self.config)
        return Block(nn.LayerNorm(width, eps), attn, nn.LayerNorm(width, eps), mlp)

    def embed(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.embed_tokens(tokens_BT) + self.embed_positions.weight[: tokens_BT.shape[1]], None

    def head(self, x_BTD: Tensor) -> Tensor:
        # The head is not a module: a model built on the meta device would lose the tie when it is materialized.
        return F.linear(x_BTD, self.embed_tokens.weight)

    def residual_std(self) -> float:
        return self.init_std / math.sqrt(2 * self.config.num_layers)
