"""Outlier channels: the same function, other activations."""

from __future__ import annotations

import json

import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.models import add_outlier_channels
from gnmr.lab.models.outliers import OutlierWindow

MODELS = [("llama", None), ("llama", 2), ("gpt", None), ("moe", None)]
every_model = pytest.mark.parametrize(("name", "num_kv_heads"), MODELS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_model
def test_logits_stay(build, tokens_BT, name, num_kv_heads):
    """For any gain; with a power of two they stay to the last bit, in 16 bits too, as the window below does."""
    model = build(name, num_kv_heads=num_kv_heads)
    before = model(tokens_BT)
    add_outlier_channels(model, 3, 20.0, seeded())
    torch.testing.assert_close(model(tokens_BT), before, rtol=1e-5, atol=1e-5)


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
        if name != "llama" and key.endswith("down_proj"):  # GELU stands between
            assert after[key] == pytest.approx(before[key], rel=1e-4)
        else:
            assert after[key] > 5 * before[key] or after[key] > 10, key


def test_a_tied_head_keeps_its_norm(build, tokens_BT):
    model = build(tied_head=True)
    before, gains = model(tokens_BT), model.norm.weight.detach().clone()
    add_outlier_channels(model, 3, 16.0, seeded())
    assert torch.equal(model(tokens_BT), before) and torch.equal(model.norm.weight, gains)


def test_channels_depend_on_the_seed_alone(build):
    first, again, other = (
        OutlierWindow(build(seed=weights), 2, 20.0, 1, 1, seeded(seed)).state_dict()["channels"]
        for weights, seed in ((0, 5), (1, 5), (0, 6))
    )
    assert first == again != other and all(len(channels) == 2 for channels in first)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_switches_on_and_off_in_the_live_weights(build, tokens_BT, name, num_kv_heads, dtype):
    model, twin = (build(name, num_kv_heads=num_kv_heads).to(dtype) for _ in range(2))
    add_outlier_channels(twin, 3, 16.0, seeded())
    before, logits = [p.detach().clone() for p in model.parameters()], model(tokens_BT)
    window = OutlierWindow(model, 3, 16.0, 4, 6, seeded())
    for step in range(1, 9):
        window.begin_step(step)
        inside = 4 <= step <= 6
        assert window.on == inside
        expected = twin.parameters() if inside else before
        assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True)), step
        assert torch.equal(model(tokens_BT), logits)


@pytest.mark.parametrize("pause", [2, 4, 5])
def test_resuming_before_inside_and_after_the_window_is_exact(build, tokens_BT, pause):
    def begin(seed: int):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, OutlierWindow(model, 2, 16.0, 3, 5, seeded(seed))

    def train(model, optimizer, window, first: int, last: int) -> None:
        for step in range(first, last + 1):
            window.begin_step(step)
            optimizer.zero_grad()
            model(tokens_BT).square().mean().backward()
            optimizer.step()

    whole = begin(0)
    train(*whole, 1, pause)
    weights = {key: value.clone() for key, value in whole[0].state_dict().items()}
    state = json.loads(json.dumps(whole[2].state_dict()))
    train(*whole, pause + 1, 7)

    resumed = begin(1)  # the state brings the channels
    resumed[0].load_state_dict(weights)
    resumed[2].load_state_dict(state)
    train(*resumed, pause + 1, 7)
    assert all(torch.equal(a, b) for a, b in zip(resumed[0].parameters(), whole[0].parameters(), strict=True))


def test_what_is_refused_changes_nothing(build):
    model, untouched = build(num_kv_heads=1), build(num_kv_heads=1)
    with pytest.raises(UserError, match=r"^model\.outlier_channels\.number=9"):
        add_outlier_channels(model, 9, 20.0, seeded())
    with pytest.raises(UserError, match=r"^model\.outlier_channels\.number=9"):
        OutlierWindow(model, 9, 16.0, 1, 2, seeded())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))
