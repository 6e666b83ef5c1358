"""What a mixture of experts costs beside its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.timing import alternate, clock_of
from gnmr.config import ExpertsConfig
from gnmr.models.layers import GELUMLP
from gnmr.models.moe import MoEMLP
from gnmr.training.build import device_of

DISPATCH = 1.3
"""The most that it should cost against its dense arithmetic."""


def mixture(setting: Setting) -> list[Figure]:
    """Forward and backward of one mixture against a dense MLP with as many multiplications (k experts wide), and
    against its own experts on rows that lie sorted already: what is left then is the dispatch."""
    config = setting.config.model
    if config.name != "moe":
        config = replace(
            config, name="moe", num_kv_heads=None, tied_head=False, experts=ExpertsConfig(number=8, top_k=2)
        )
    config = replace(config, experts=replace(config.experts, routing_seed=None))  # which would need tokens
    dense = replace(config, intermediate_size=config.intermediate_size * config.experts.top_k)
    training, device = setting.config.training, device_of(setting.config.training.device)
    torch.manual_seed(training.seed)
    dtype = getattr(torch, training.dtype)
    moe, mlp = MoEMLP(config, 0).to(device, dtype), GELUMLP(dense).to(device, dtype)
    x_BTD = torch.randn(training.batch_size, training.seq_len, config.hidden_size).to(device, dtype).requires_grad_()
    x_ND = x_BTD.detach().flatten(0, 1)
    with torch.no_grad():
        lengths = moe.route(x_ND, None)[2].tolist()
    rows_RD = x_ND.repeat(config.experts.top_k, 1).requires_grad_()

    def experts() -> Tensor:
        pairs = zip(moe.experts, rows_RD.split(lengths), strict=True)
        return torch.cat([expert(rows) for expert, rows in pairs])

    def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def once() -> None:
            forward().sum().backward()
            for module in (moe, mlp):
                module.zero_grad(set_to_none=True)
            x_BTD.grad = rows_RD.grad = None

        return once

    arms = {"mixture": step(lambda: moe(x_BTD)[0]), "dense": step(lambda: mlp(x_BTD)), "experts": step(experts)}
    experts_are = f"{config.experts.number} experts, top-{config.experts.top_k}"
    rounds = setting.rounds(f"mixture: {experts_are}, its experts alone, and a dense MLP", 30, warm_up=3)
    seconds = alternate(arms, rounds, clock_of(device, setting.clock))
    note = f"{experts_are} of width {config.intermediate_size}, {training.batch_size * training.seq_len} tokens"
    return [
        median(
            "mixture over its dense arithmetic",
            seconds["mixture"] / seconds["dense"],
            "x",
            DISPATCH,
            note,
            interval=True,
        ),
        median(
            "mixture over its experts alone", seconds["mixture"] / seconds["experts"], "x", note=note, interval=True
        ),
        median("dense MLP, forward and backward", seconds["dense"], "s"),
    ]
