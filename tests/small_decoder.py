"""A decoder of three small blocks, for tests of models whose weights are not in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up_proj, self.down_proj = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down_proj(torch.tanh(self.up_proj(self.norm(hidden))))


class Decoder(nn.Module):
    """Blocks that run one after the other, with something `between` them if they cannot be followed."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers, self.between = nn.ModuleList([Block(), Block(), Block()]), between

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden if self.between is None else self.between(hidden))
        return self.head(hidden)


def token_ids(seed: int) -> Tensor:
    return torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(seed))
