"""What all models share: how linears are called, initialisation, checkpointing, the rotary tables, the meta device."""

from __future__ import annotations

import pytest
import torch

from gnmr.lab import models
from gnmr.lab.config.model import ExpertsConfig, ModelConfig

every = pytest.mark.parametrize("name", ["llama", "gpt", "moe"])


@every
def test_linears_that_read_one_activation_get_one_tensor(build, tokens_BT, linear_inputs, name):
    seen = linear_inputs(build(name), tokens_BT)
    for i in range(2):
        attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        assert seen[f"{attn}.q_proj"] is seen[f"{attn}.k_proj"] is seen[f"{attn}.v_proj"]
        if name == "llama":
            assert seen[f"{mlp}.gate_proj"] is seen[f"{mlp}.up_proj"]
    # Every linear is called as a module: 4 of attention; in moe the router and 4 experts.
    assert len(seen) == {"llama": 2 * 7 + 1, "gpt": 2 * 6, "moe": 2 * (4 + 1 + 4 * 2)}[name]


@every
def test_attention_is_causal(build, tokens_BT, name):
    model = build(name)
    changed = tokens_BT.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    before, after = model(tokens_BT), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    assert not torch.equal(before[:, 10:], after[:, 10:])


@every
def test_activation_checkpointing_changes_nothing(build, tokens_BT, name):
    model = build(name)
    gradients = []
    for model.activation_checkpointing in (False, True):
        calls = []
        hook = model.layers[1].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model.zero_grad()
        loss = model(tokens_BT).square().mean()
        (loss if name != "moe" else loss + 100 * model.auxiliary_loss).backward()
        assert name != "moe" or len(model.routings) == 2  # what is recomputed in backward is not counted
        hook.remove()
        assert len(calls) == (2 if model.activation_checkpointing else 1)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@every
def test_sequence_longer_than_built_for(build, tokens_BT, name):
    with pytest.raises(ValueError, match="sequence of 25 tokens: the model was built for 24"):
        build(name)(torch.nn.functional.pad(tokens_BT, (0, 1)))


@every
def test_initialisation_depends_on_the_seed_alone(name):
    experts = ExpertsConfig(number=4) if name == "moe" else ExpertsConfig()
    config = ModelConfig(name=name, hidden_size=64, intermediate_size=96, num_layers=2, experts=experts)

    def initialised(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = models.build(config, 100, 16).to(dtype)
        model.init_weights(torch.Generator().manual_seed(seed))
        return model.state_dict()

    first, other = initialised(3, torch.float32), initialised(4, torch.float32)
    torch.manual_seed(99)
    again, rounded = initialised(3, torch.float32), initialised(3, torch.bfloat16)
    for key, value in first.items():
        assert torch.equal(value, again[key])
        assert torch.equal(value.bfloat16(), rounded[key])
        if key.endswith("bias"):
            assert (value == 0).all()
        elif value.dim() == 1:
            assert (value == 1).all()
        else:
            assert not torch.equal(value, other[key])
            if name == "llama":
                assert value.std().item() == pytest.approx(0.02, rel=0.05)


@every
def test_a_model_built_on_meta_becomes_real(build, tokens_BT, name):
    """Also after a first call in inference mode."""
    real = build(name)
    with torch.device("meta"):
        model = models.build(real.config, 61, 24)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.init_weights(torch.Generator())
    assert model(tokens_BT.to("meta")).shape == (3, 24, 61)
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    with torch.inference_mode():
        model(tokens_BT)
    logits = model(tokens_BT)
    assert torch.equal(logits, real(tokens_BT))
    logits.sum().backward()


def test_rotary_tables_are_rounded_once():
    rotary = models.decoders.Rotary(8, 32, 100.0)
    x_BTD = torch.zeros(1, 20, 8)
    with torch.inference_mode():
        rotary.bfloat16()(x_BTD.bfloat16())
    cos_T1K, sin_T1K = rotary.float()(x_BTD)
    angle = 19 / 100.0 ** (2 / 8)
    assert cos_T1K.shape == sin_T1K.shape == (20, 1, 8)
    assert cos_T1K[19, 0, 5].item() == pytest.approx(torch.tensor(angle).cos().item(), abs=1e-6)
    assert sin_T1K[19, 0, 1].item() == pytest.approx(-torch.tensor(angle).sin().item(), abs=1e-6)
    assert torch.equal(rotary(x_BTD.bfloat16())[0], cos_T1K.bfloat16())
