"""A small model with a head, an embedding and routers by name, audited in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.auditing.audit import Audit

WIDTH, VOCAB = 64, 96


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.silu(self.up_proj(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 3, bias: bool = False, tied: bool = False, router: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(bias) for _ in range(blocks))
        if router:
            self.router = nn.Linear(WIDTH, 16, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        if hasattr(self, "router"):
            x = x * self.router(x).softmax(-1).amax(-1, keepdim=True)
        return self.lm_head(x)


def net(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def batch_of(vocab: int = VOCAB, tokens: int = 33) -> Tensor:
    return torch.randint(0, vocab, (4, tokens), generator=torch.Generator().manual_seed(1))


def audited(model: nn.Module, tokens_BT: Tensor | None = None, **options: Any) -> Audit:
    """With a batch."""

    def loss(tokens: Tensor) -> Tensor:
        out = model(tokens[:, :-1])
        logits: Tensor = getattr(out, "logits", out)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return gnmr.audit(model, loss, batch_of() if tokens_BT is None else tokens_BT, **options)


def said(found: Audit) -> list[tuple[str, str]]:
    """(kind, first place) of each finding."""
    return [(finding.kind, finding.where[0]) for finding in found.findings]


def lines(found: Audit) -> str:
    return "\n".join(finding.line() for finding in found.findings)
