"""Outlier channels: the same function, other activations."""

from __future__ import annotations

import pytest
import torch

from gnmr.errors import UserError
from gnmr.models import add_outlier_channels

MODELS = [("llama", None), ("llama", 2), ("llama", 1), ("gpt", None)]
every_model = pytest.mark.parametrize(("name", "num_kv_heads"), MODELS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_model
def test_logits_stay(build, tokens_BT, name, num_kv_heads):
    model = build(name, num_kv_heads=num_kv_heads)
    before = model(tokens_BT)
    add_outlier_channels(model, 3, 20.0, seeded())
    torch.testing.assert_close(model(tokens_BT), before, rtol=1e-5, atol=1e-5)


@every_model
def test_logits_stay_to_the_last_bit_with_a_power_of_two(build, tokens_BT, name, num_kv_heads):
    for dtype in (torch.float32, torch.bfloat16):
        model = build(name, num_kv_heads=num_kv_heads).to(dtype)
        before = model(tokens_BT)
        add_outlier_channels(model, 3, 16.0, seeded())
        assert torch.equal(model(tokens_BT), before)


@every_model
def test_saved_activations_get_outliers(build, tokens_BT, linear_inputs, name, num_kv_heads):
    def peak(x: torch.Tensor) -> float:
        """Largest channel over the median channel."""
        channel_max = x.abs().flatten(0, -2).amax(0)
        return (channel_max.max() / channel_max.median()).item()

    model = build(name, num_kv_heads=num_kv_heads)
    before = {key: peak(x) for key, x in linear_inputs(model, tokens_BT).items()}
    add_outlier_channels(model, 1, 20.0, seeded())
    after = {key: peak(x) for key, x in linear_inputs(model, tokens_BT).items()}
    for key in before:
        if name == "gpt" and key.endswith("down_proj"):  # GELU stands between
            assert after[key] == pytest.approx(before[key], rel=1e-4)
        else:
            assert after[key] > 5 * before[key] or after[key] > 10, key


def test_channels_depend_on_the_seed_alone(build):
    def scaled(weights_seed: int, seed: int) -> list[list[int]]:
        model = build(seed=weights_seed)
        before = [norm.weight.clone() for norm in norms(model)]
        add_outlier_channels(model, 2, 20.0, seeded(seed))
        return [(n.weight != b).nonzero().flatten().tolist() for n, b in zip(norms(model), before, strict=True)]

    def norms(model):
        return [n for b in model.layers for n in (b.input_layernorm, b.post_attention_layernorm)] + [model.norm]

    first = scaled(0, seed=5)
    assert all(len(channels) == 2 for channels in first)
    assert scaled(1, seed=5) == first
    assert scaled(0, seed=6) != first


def test_zero_channels_change_nothing(build):
    model, untouched = build(), build()
    add_outlier_channels(model, 0, 20.0, seeded())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))


def test_more_channels_than_there_are(build):
    model, untouched = build(num_kv_heads=1), build(num_kv_heads=1)
    with pytest.raises(UserError, match=r"outlier_channels\.number=9: the narrowest activation has 8 channels"):
        add_outlier_channels(model, 9, 20.0, seeded())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))
