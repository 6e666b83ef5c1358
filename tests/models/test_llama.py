"""Against Hugging Face's LlamaForCausalLM with the same weights."""

from __future__ import annotations

import pytest
import torch

from gnmr.lab.models import Decoder

transformers = pytest.importorskip("transformers")


def hugging_face(model: Decoder, dtype: torch.dtype) -> torch.nn.Module:
    config = model.config
    twin = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=model.embed_tokens.num_embeddings,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads or config.num_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_head,
        ),
        dtype=dtype,  # built in it: a cast afterwards would round the rotary frequencies
    )
    weights = {name if name.startswith("lm_head") else f"model.{name}": w for name, w in model.state_dict().items()}
    if config.tied_head:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    twin.load_state_dict(weights, strict=True)
    return twin


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "rope_theta": 500.0, "norm_eps": 0.05},
        {"num_kv_heads": 2, "tied_head": True},
    ],
)
def test_fp32_logits_and_gradients_equal(build, tokens_BT, changes):
    model = build(**changes)
    twin = hugging_face(model, torch.float32)
    ours, theirs = model(tokens_BT), twin(tokens_BT).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_bf16_logits_close(build, tokens_BT):
    model = build(num_kv_heads=2).bfloat16()
    ours = model(tokens_BT)
    assert ours.dtype == torch.bfloat16
    theirs = hugging_face(model, torch.bfloat16)(tokens_BT).logits
    assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()
