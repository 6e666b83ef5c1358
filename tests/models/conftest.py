from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gnmr.lab import models
from gnmr.lab.config.model import ExpertsConfig, ModelConfig

VOCAB, SEQ_LEN = 61, 24
Build = Callable[..., models.Decoder]


@pytest.fixture
def build() -> Build:
    """A tiny model whose every parameter is random: gains and biases that stayed 1 and 0 would hide mistakes."""

    def make(name: str = "llama", seed: int = 0, **changes: object) -> models.Decoder:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
        if name == "moe":
            sizes["experts"] = ExpertsConfig(number=4)
        model = models.build(ModelConfig(name=name, **(sizes | changes)), VOCAB, SEQ_LEN)
        model.init_std = 0.2
        generator = torch.Generator().manual_seed(seed)
        model.init_weights(generator)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        return model

    return make


@pytest.fixture
def tokens_BT() -> torch.Tensor:
    return torch.randint(VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def linear_inputs() -> Callable[[nn.Module, torch.Tensor], dict[str, torch.Tensor]]:
    """Runs the model and returns the very tensor that each linear was called with, by the linear's name."""

    def record(model: nn.Module, tokens_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0]))
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        model(tokens_BT)
        for hook in hooks:
            hook.remove()
        return seen

    return record
