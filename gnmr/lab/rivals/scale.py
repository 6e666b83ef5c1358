"""SCALE, stochastic column-normalized last-layer momentum (arXiv 2506.16659): SGD with minimal additional state.

    matrices:     u = g / rms(g over the inputs of each output)              no state
    head:         m <- momentum m + (1 - momentum) g;  u = m / rms(m ...)    the only first moment
    W <- (1 - lr weight_decay) W - lr u
    one dimension (norm gains, biases): AdamW

An output of a linear is a row of its weight (out, in), so the rms is taken along the row. An embedding is a linear that
reads one-hot tokens: its inputs are the tokens and its outputs the channels. So the rms of its weight (tokens,
channels) is taken along each column. The rms is at least 1e-8, so a zero gradient gives no update. Momentum needs no
bias correction, since u does not depend on the scale of m.

Defaults (paper and public code): lr 1e-3 (2e-4 at 1B), momentum 0.9, warm-up over 10%, cosine to 10%. AdamW uses 0.9,
0.999, 1e-8 and the same learning rate.

A head tied to the token embedding is treated as a head (momentum, rms along the rows). The reason is that nearly every
element of its gradient comes from the head. Learned positions are an embedding. Updates are computed in float32 and
rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from gnmr.attachment.ranks.reduce import DistributedRanks, counts, is_sharded, local
from gnmr.lab.config import OptimConfig

_HEAD_MOMENTUM = 0.9


class SCALE(torch.optim.Optimizer):
    """The SCALE optimizer of this module's docstring.

    `momentum` is 0 in all parameter groups except the head. `output_dim` is the dimension of a matrix that indexes its
    outputs (0: linear, 1: embedding). Parameters with one dimension use torch's fused AdamW kernel.

    If the attribute `found_inf` (float scalar on the device, see `optim.skip_where`) is set and not 0, a step leaves
    weights and state unchanged. A step never waits for the device. Each rank updates its own shard of a sharded
    parameter (FSDP2 shards by rows). For a sharded embedding, one collective sums the squares over ranks. State has the
    parameters' dtype. Every parameter has a `step`, because checkpoints need state for every parameter.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        output_dim: int = 0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay, "output_dim": output_dim})
        self.found_inf: Tensor | None = None
        # Before the first step too: a checkpoint includes experts that have received no token.
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self._first_state(p, group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            # Gains and biases have no rows to normalize along.
            self._adamw([p for p in parameters if p.ndim < 2], group)
            for p in parameters:
                if p.ndim >= 2:
                    self._normalized(p, group)

    @staticmethod
    def _first_state(p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), device=p.device)}
        if p.ndim < 2:
            state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        elif group["momentum"] > 0:
            state["exp_avg"] = torch.zeros_like(p)
        return state

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _normalized(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state, weight, direction = self.state[p], local(p), local(p.grad).float()
        if "exp_avg" in state:
            # The head's gradient is the noisiest one, so its direction is averaged.
            average = local(state["exp_avg"])
            direction = torch.lerp(average.float(), direction, 1 - group["momentum"])
            self._replace(average, direction)
        inputs = [d for d in range(p.ndim) if d != group["output_dim"]]
        if group["output_dim"] and is_sharded(p):  # sharded by rows, which are the inputs of an embedding
            # Mean = sum of squares / tokens over the shards of all ranks; a replica is counted by one rank.
            counted = direction if counts(p) else direction[:0]
            squares = counted.square().sum(inputs, keepdim=True, dtype=torch.float64)
            mean = (DistributedRanks().sum({"squares": squares})["squares"] * (p.shape[1] / p.numel())).float()
        else:
            mean = direction.square().mean(inputs, keepdim=True)
        # Every output gets an update of rms 1, whatever the scale of its gradient.
        update = direction / mean.sqrt().clamp(min=1e-8)
        self._replace(weight, (1 - group["lr"] * group["weight_decay"]) * weight.float() - group["lr"] * update)
        self._replace(state["step"], state["step"] + 1)

    def _replace(self, old: Tensor, new: Tensor) -> None:
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0, old, new))


def build_scale(model: nn.Module, config: OptimConfig) -> SCALE:
    """Return SCALE over the trainable parameters of `model`. Norm gains and biases (1-D) are not decayed.

    The momentum applies to the head: the module `lm_head`, or the tied token embedding `embed_tokens` without it.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in named if p.ndim >= 2]
    # The first of the two that exists: beside a separate head, the embedding is not treated as a head.
    below = ({id(p) for name, p in matrices if f".{head}." in f".{name}"} for head in ("lm_head", "embed_tokens"))
    heads = next(filter(None, below), set[int]())
    without_heads = [p for _, p in matrices if id(p) not in heads]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in without_heads if id(p) not in embeddings]},
        {"params": [p for p in without_heads if id(p) in embeddings], "output_dim": 1},
        {"params": [p for _, p in matrices if id(p) in heads], "momentum": _HEAD_MOMENTUM},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    first, second = config.betas
    groups = [group for group in groups if group["params"]]
    return SCALE(groups, config.lr, betas=(first, second), weight_decay=config.weight_decay)
