"""Runs under recipes: every one trains, evaluates in 16 bits, and goes on exactly where it was stopped."""

from __future__ import annotations

import math

import pytest
import torch
from everything import differences, everything

from gnmr.conversion import PathLinear, PathSpec, convert
from gnmr.formats import RECIPES
from gnmr.lab import models
from gnmr.lab.config import config_hash, read
from gnmr.lab.config.model import ExpertsConfig, ModelConfig
from gnmr.lab.train.loss import evaluate
from gnmr.records.reader import read_jsonl

WIDE = ["model.hidden_size=128", "model.intermediate_size=256"]


@pytest.mark.parametrize("low", RECIPES)
@pytest.mark.filterwarnings("ignore:the recovery path", "ignore:recovers")
def test_a_llama_trains_two_steps(low, assembled, step_of, blocks_of):
    parts = assembled(
        *WIDE, f"precision.low={low}", "precision.recovery=fp8_hybrid", "precision.recovers=[fprop,wgrad]"
    )
    step, blocks = step_of(parts), blocks_of(parts, 2)
    plain = evaluate(parts.model, parts.converted, blocks, 2)
    first, ran = step([blocks], 1e-3), set()
    for operator in parts.converted.operators:
        operator.register_forward_hook(lambda module, *_: ran.add(module.path.name))
    for group in parts.converted.units:
        group.switch(True)
    second = step([blocks], 1e-3)
    assert ran == {parts.converted.recovery.name}
    assert second.saved_bytes == second.saved_bytes_predicted > 0
    assert not first.skipped and not second.skipped and second.loss < first.loss
    assert abs(first.loss - plain) < 0.05 and (first.loss == pytest.approx(plain, abs=1e-6)) == low.endswith("bf16")
    assert first.saved_bytes == first.saved_bytes_predicted > 0


def declared(name: str, like: str) -> list[str]:
    """The words that declare a recipe with the casts of a built-in one."""
    gemms = RECIPES[like].words().items()
    return [
        f"precision.recipes.{name}.{gemm}.{operand}={cast}" for gemm, casts in gemms for operand, cast in casts.items()
    ]


@pytest.mark.slow
def test_a_recipe_of_ones_own_runs_as_the_built_in_one_with_its_casts(train, stopped, tiny, tmp_path, gnmr):
    words = [
        *declared("mine", "sim_e2m1"),
        *declared("wider", "fp8_delayed"),
        "precision.low=mine",
        "precision.recovery=wider",
    ]
    built_in = ["precision.low=sim_e2m1", "precision.recovery=fp8_delayed"]
    theirs = train(tmp_path / "runs" / "theirs", *built_in)
    stopped(tmp_path / "runs" / "ours", *words)
    ours = train(tmp_path / "runs" / "ours", *words)
    assert any(row["num_active"] for row in read_jsonl(ours / "steps.jsonl"))
    found, wanted = everything(ours), everything(theirs)
    assert "e2m1/row" in found["state"]["plan"].pop("paths") != wanted["state"]["plan"].pop("paths")
    assert differences(wanted, found) == []
    assert config_hash(tiny(*words)) != config_hash(tiny(*built_in))
    assert read(ours / "config.yaml").precision == tiny(*words).precision  # what the run saved can be read again
    assert "mine" in gnmr("report", str(tmp_path / "runs")).out


@pytest.mark.slow
def test_a_compiled_run_is_the_run_that_is_not_and_goes_on_to_the_last_bit(train, stopped, tmp_path, monkeypatch):
    plain = torch.nn.Module.compile  # without Inductor, which rounds otherwise and takes a minute
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: plain(block, backend="aot_eager"))
    sizes = ["model.intermediate_size=64", "model.num_layers=2"]
    words = [*sizes, "precision.low=mxfp8", "precision.recovery=bf16", "precision.unit=block", "controller.max_o=1"]
    wanted = everything(train(tmp_path / "plain", *words))
    assert any(row["num_active"] for row in wanted["steps"])
    compiled = [*words, "training.compile=true"]
    stopped(tmp_path / "run", *compiled)
    found = everything(train(tmp_path / "run", *compiled))
    for row in wanted["steps"]:
        assert row["saved_bytes"] == row["saved_bytes_predicted"] > 0
        row |= {"saved_bytes": None, "saved_bytes_predicted": None}
    for name in ("steps", "eval", "events", "units", "state"):
        assert differences(wanted[name], found[name]) == [], name


# ---- what a recipe leaves in 16 and 32 bits ----

ATTENTION = ["input_layernorm", "post_attention_layernorm"]
KEPT = {
    # DeepSeek-V3's list: embedding, head, norms, gate; the attention core has no parameters
    "llama": ["embed_tokens", "norm", "lm_head", *(f"layers.{i}.{name}" for i in range(2) for name in ATTENTION)],
    "gpt": ["embed_tokens", "embed_positions", "norm", *(f"layers.{i}.{name}" for i in range(2) for name in ATTENTION)],
    "moe": [
        *("embed_tokens", "embed_positions", "norm"),
        *(f"layers.{i}.{name}" for i in range(2) for name in (*ATTENTION, "mlp.router")),
    ],
    "huggingface": [
        *("lm_head", "model.embed_tokens", "model.norm"),
        *(f"model.layers.{i}.{name}" for i in range(2) for name in ATTENTION),
    ],
}


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "huggingface":
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))
    experts = ExpertsConfig(number=4) if name == "moe" else ExpertsConfig()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "num_heads": 2, "experts": experts}
    model = models.build(ModelConfig(name=name, **sizes), 64, 16)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("name", KEPT)
def test_deepseek_v3_leaves_exactly_its_list_in_16_bits(name):
    model = model_of(name).to(torch.bfloat16)
    plan = convert(model, PathSpec.of("deepseek_v3", None))
    owners = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    kept = [name for name, module in owners.items() if not isinstance(module, PathLinear)]
    assert sorted(kept) == sorted(KEPT[name])
    assert {operator.path.name for operator in plan.operators} == {"deepseek_v3"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# ---- what is recorded of casts, and units of several operators ----


def test_saturation_is_told_by_operand(assembled, step_of, blocks_of):
    """Delayed scales saturate what has grown: a weight becomes 1.09 times as large, in two micro-batches."""
    parts = assembled("precision.low=fp8_delayed", "precision.recovery=null", "training.accumulation=2")
    step, blocks = step_of(parts), list(blocks_of(parts, 4).split(2))
    quiet = step(blocks, 1e-9).saturation
    assert set(quiet) == {"input", "weight", "grad_output", "result"}
    assert quiet["weight"] == quiet["result"] == [0, 0] and all(nonfinite == 0 for _, nonfinite in quiet.values())
    weight = parts.model.layers[0].mlp.up_proj.weight.data
    largest = weight.abs().max().float()
    weight.mul_(1.09)
    grown = int((weight.float() / (largest / 448)).abs().gt(448 * (1 + 1e-6)).sum())
    assert step(blocks, 1e-9).saturation["weight"] == [2 * grown, 0] and grown > 1
    assert step(blocks, 1e-9).saturation["weight"] == [0, 0]
    parts.model.layers[0].mlp.up_proj.weight.data[0, 0] = math.nan
    assert step(blocks, 1e-9).saturation["weight"][1] == 2, "the element itself, in two micro-batches"
