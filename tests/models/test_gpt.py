"""Against Hugging Face's GPT2LMHeadModel (its default activation, gelu_new) with the same weights."""

from __future__ import annotations

import pytest
import torch

from gnmr.lab import models
from gnmr.lab.config import ModelConfig
from gnmr.lab.models import Decoder

transformers = pytest.importorskip("transformers")

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.up_proj", "mlp.down_proj")


def hugging_face(model: Decoder) -> torch.nn.Module:
    config = model.config
    twin = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=model.embed_tokens.num_embeddings,
            n_positions=model.max_seq_len,
            n_embd=config.hidden_size,
            n_inner=config.intermediate_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            layer_norm_epsilon=config.norm_eps,
            activation_function="gelu_new",
        )
    ).eval()
    ours = model.state_dict()
    theirs = {"transformer.wte.weight": ours["embed_tokens.weight"], "lm_head.weight": ours["embed_tokens.weight"]}
    theirs["transformer.wpe.weight"] = ours["embed_positions.weight"]
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = ours[f"norm.{kind}"]
        for i in range(config.num_layers):
            # Its Conv1D holds transposes.
            layer = {name: ours[f"layers.{i}.{name}.{kind}"].t() for name in ATTENTION + MLP}
            block = f"transformer.h.{i}"
            theirs[f"{block}.ln_1.{kind}"] = ours[f"layers.{i}.input_layernorm.{kind}"]
            theirs[f"{block}.ln_2.{kind}"] = ours[f"layers.{i}.post_attention_layernorm.{kind}"]
            theirs[f"{block}.attn.c_attn.{kind}"] = torch.cat([layer[name] for name in ATTENTION[:3]], dim=-1)
            theirs[f"{block}.attn.c_proj.{kind}"] = layer["self_attn.o_proj"]
            theirs[f"{block}.mlp.c_fc.{kind}"] = layer["mlp.up_proj"]
            theirs[f"{block}.mlp.c_proj.{kind}"] = layer["mlp.down_proj"]
    twin.load_state_dict(theirs, strict=True)
    return twin


def test_fp32_logits_equal(build, tokens_BT):
    model = build("gpt")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT), hugging_face(model)(tokens_BT).logits, rtol=1e-5, atol=1e-5)


def test_residual_projections_start_smaller(build):
    model = build("gpt", hidden_size=128, intermediate_size=256, num_layers=8)
    model.init_weights(torch.Generator().manual_seed(0))
    layer = model.layers[3]
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert linear.weight.std().item() == pytest.approx(0.2 / 4, rel=0.05)
    for linear in (layer.self_attn.v_proj, layer.mlp.up_proj, model.embed_positions):
        assert linear.weight.std().item() == pytest.approx(0.2, rel=0.05)


def test_gpt2_small_counts_its_tied_head_once() -> None:
    sizes = ModelConfig(name="gpt", hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12)
    with torch.device("meta"):
        model = models.build(sizes, 50257, 1024)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
