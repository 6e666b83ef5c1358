"""The audit is silent on sound models: ours, Hugging Face's, trained, under our recipes and torchao's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from audited import audited, batch_of, lines
from torch import nn

from gnmr.lab import models
from gnmr.lab.config.model import ExpertsConfig, ModelConfig
from gnmr.precision import PathSpec, convert

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchao")]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 4}
RECIPES = ["fp8_hybrid", "fp8_delayed", "deepseek_v3", "mxfp8", "nvfp4", "sim_int8", "llm_int8"]


def ours(name: str, **more: object) -> nn.Module:
    model = models.build(ModelConfig(name=name, **SIZES, **more), 96, 65)
    model.init_weights(torch.Generator().manual_seed(0))
    return model.to(torch.bfloat16)


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: ours("llama"),
    "llama, tied": lambda: ours("llama", tied_head=True, num_kv_heads=4),
    "gpt": lambda: ours("gpt"),
    "moe": lambda: ours("moe", experts=ExpertsConfig(number=4)),
    "hugging face": hugging_face,
}


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("name", MODELS)
def test_a_recipe_of_ours(name: str, recipe: str | None) -> None:
    model = MODELS[name]()
    if recipe is not None:
        convert(model, PathSpec(low=recipe, recovery=None))
    found = audited(model, batch_of(tokens=65), recipe=recipe)
    assert found.sound, lines(found)
    assert sum(row.ran for row in found.rows) == len(found.rows)
    low = [row for row in found.rows if "/" in row.precision["fprop"]]
    assert bool(low) == (recipe is not None)
    assert all("input" in row.measured["wgrad"] and "weight" in row.measured["dgrad"] for row in low)


@pytest.mark.parametrize("how", ["tensorwise", "rowwise", "mx"])
@pytest.mark.parametrize("name", MODELS)
def test_a_conversion_of_torchao(name: str, how: str) -> None:
    ao = pytest.importorskip("torchao.float8", reason="torchao is not installed")

    def chosen(module: nn.Module, fqn: str) -> bool:
        return isinstance(module, nn.Linear) and fqn.rpartition(".")[2] not in ("lm_head", "router")

    model = MODELS[name]()
    if how == "mx":
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
        from torchao.quantization import quantize_

        if any(isinstance(module, nn.Linear) and module.bias is not None for module in model.modules()):
            pytest.skip("torchao drops the bias: test_audit_torchao.py")
        if name == "moe":
            pytest.skip("torchao wants a multiple of 32 tokens, and an expert has any number")
        quantize_(model, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL), filter_fn=chosen)
    else:
        config = replace(ao.Float8LinearConfig.from_recipe_name(how), emulate=True)
        ao.convert_to_float8_training(model, config=config, module_filter_fn=chosen)
    found = audited(model, batch_of(tokens=65))
    assert found.sound, lines(found)
    assert sum("/" in row.precision["wgrad"] for row in found.rows) >= 8


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "sim_e4m3", "nvfp4", "sim_int8"])
def test_a_trained_model(recipe: str) -> None:
    """The base that comes with the package, on tokens of chance."""
    from gnmr.lab.config import read
    from gnmr.lab.train.checkpoint import load_model

    folder = Path(models.__file__).parents[1] / "bases" / "shipped"
    config = read(folder / "config.yaml")
    vocab = config.data.vocab_size
    model = models.build(config.model, vocab, config.training.seq_len).to(getattr(torch, config.training.dtype))
    load_model(folder / "checkpoints", model)
    convert(model, PathSpec(low=recipe, recovery=None))
    found = audited(model, batch_of(vocab, 129), recipe=recipe)
    assert found.sound, lines(found)
