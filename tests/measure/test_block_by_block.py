"""Runs block by block (gnmr/measure/blocks.py, gnmr/lab/models/stored.py) against runs of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from architectures import CAUSAL
from torch import Tensor, nn

from gnmr.conversion import ConvertedModel, PathSpec, convert
from gnmr.errors import UserError
from gnmr.formats import RECIPES
from gnmr.lab.models.stored import open_stored
from gnmr.measure.blocks import BlockByBlock, Blocks, NotFollowed, Variant
from gnmr.measure.model_output import output_of
from gnmr.measure.operand_errors import measure_errors
from gnmr.measure.price import PRICES, Sequences, measure_prices

FAMILIES = [
    *("llama", "qwen3_moe", "gpt_neo"),
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("gemma2", "deepseek_v3", "gpt_oss", "gpt2", "qwen3_next")
    ),
]
"""Blocks that return a tensor or a tuple, experts in one tensor, and two kinds of attention in one model."""


def converted_model(family: str, recipe: str = "nvfp4") -> tuple[nn.Module, ConvertedModel]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CAUSAL[family]()).eval()
    return model, on_recovery(convert(model, PathSpec.of(recipe, "bf16", backend="simulated")))


def on_recovery(converted: ConvertedModel) -> ConvertedModel:
    for operator in converted.operators:
        operator.switch(True)
    return converted


def token_ids(sequences: int = 2) -> Tensor:
    return torch.randint(0, 300, (sequences, 16), generator=torch.Generator().manual_seed(1))


def logits_by_arm(
    runner: BlockByBlock, batches: list[Tensor], variants: dict[str, Variant]
) -> dict[tuple[int, str | None], Tensor]:
    return {(batch, variant): logits for batch, variant, logits in runner.outputs(batches, variants)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_alone_is_as_in_a_pass_of_the_whole_model(family: str) -> None:
    model, converted = converted_model(family)
    batches = [token_ids(), token_ids(3)]

    def run(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False).logits

    runner = BlockByBlock(converted, model, run)
    names = [operator.operator_name for operator in converted.operators]
    some = {name: {"fprop": "mxfp8"} for name in names[::2]}
    runner = BlockByBlock(converted, model, run, recipes={"mxfp8": RECIPES["mxfp8"]})
    variants = {name: Variant([name]) for name in names} | {"all": Variant(names), "plan": Variant(names, some)}
    by_blocks = logits_by_arm(runner, batches, variants)
    changed = 0
    with torch.no_grad():
        for at, tokens in enumerate(batches):
            exact = run(tokens)
            converted.end_step()
            assert torch.equal(by_blocks[at, None], exact)
            for operator in converted.operators:
                operator.switch(False)
                alone = run(tokens)
                converted.end_step()
                operator.switch(True)
                assert torch.equal(by_blocks[at, operator.operator_name], alone), operator.operator_name
                changed += not torch.equal(alone, exact)
            for operator in converted.operators:
                operator.switch(False)
            assert torch.equal(by_blocks[at, "all"], run(tokens))
            converted.end_step()
            for operator in converted.operators:
                if operator.operator_name in some:
                    operator.low = operator.low.with_gemms({"fprop": RECIPES["mxfp8"]})
            assert torch.equal(by_blocks[at, "plan"], run(tokens))
            converted.end_step()
            for operator in converted.operators:
                operator.low = RECIPES["nvfp4"]
            on_recovery(converted)
    assert changed > 1.8 * len(names)  # an expert may have no token


@pytest.mark.parametrize("family", FAMILIES)
def test_prices_block_by_block_are_those_of_one_backward_pass(family: str) -> None:
    model, converted = converted_model(family)
    tokens = token_ids(3)
    candidates = {"mxfp8": RECIPES["mxfp8"]}
    meter = measure_prices(converted, PRICES[:3], 1, against_recovery=True, candidates=candidates)
    probe = measure_errors(converted, ["mse"], 1)
    meter.sequences = sequences = Sequences()

    def objective_of(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        output = output_of(logits, "run")
        meter.loss_tokens = output.terms
        return output.objective("model", torch.Generator().manual_seed(3), "run")

    def numbers() -> dict[str, Tensor]:
        prices = {f"{path} {name}": v for path in ("low", "mxfp8") for name, v in meter.by_operator(path).items()}
        return prices | {"mse": probe.read()["mse"].clone()}

    def run(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False).logits

    objective, by_sequence = objective_of(run(tokens))
    assert by_sequence is not None
    sequences.find(by_sequence)
    torch.autograd.grad(objective, [*dict.fromkeys(o.weight for o in converted.operators)], allow_unused=True)
    at_once = numbers()
    meter.reset()
    probe.reset()
    sequences.begin()
    converted.end_step()
    BlockByBlock(converted, model, run).backward(tokens, 0, objective_of, sequences)
    by_blocks = numbers()
    assert at_once["low fprop_sequence"].gt(0).sum() > len(converted.operators) / 2
    for name, expected in at_once.items():
        assert torch.equal(by_blocks[name], expected), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "gpt_neox", "gpt2")),
    ],
)
def test_blocks_from_disk_compute_as_the_model_in_memory(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CAUSAL[family]()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    in_memory = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    on_disk, weights = open_stored(str(tmp_path), torch.float32, torch.device("cpu"))
    outputs = []
    for model in (in_memory, on_disk):
        converted = on_recovery(convert(model, PathSpec.of("nvfp4", "bf16", backend="simulated")))
        runner = BlockByBlock(
            converted,
            model,
            lambda tokens, model=model: model(tokens, use_cache=False).logits,
            weights=None if model is in_memory else weights.read,
        )
        names = [operator.operator_name for operator in converted.operators]
        variants = {name: Variant([name]) for name in names} | {"all": Variant(names)}
        outputs.append(logits_by_arm(runner, [token_ids()], variants))
    assert outputs[0].keys() == outputs[1].keys()
    for variant, logits in outputs[0].items():
        assert torch.equal(logits, outputs[1][variant]), variant
    blocks = Blocks(on_disk, converted.operators).modules
    assert all(parameter.is_meta for block in blocks for parameter in block.parameters())


def test_a_tensor_that_is_missing_in_the_files_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    transformers.AutoModelForCausalLM.from_config(CAUSAL["llama"]()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight"):
        open_stored(str(tmp_path), torch.float32, torch.device("cpu"))


class Chained(nn.Module):
    """A model whose blocks may be called in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(32, 32)
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
        self.blocks = nn.ModuleList([blocks[0]] * 3 if kind == "one block" else blocks)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        order = [0, 2, 1] if self.kind == "another order" else [0, 1] if self.kind == "left out" else [0, 1, 2]
        for place in order:
            hidden = self.blocks[place](hidden)
            if self.kind == "changed between":
                hidden = hidden * 2
        return self.head(hidden)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("one block", "one block in several places"),
        ("another order", "once a pass and in its order"),
        ("left out", "are not called"),
        ("changed between", "changes hidden states between blocks"),
    ],
)
def test_a_model_that_cannot_be_followed_says_why(kind: str, why: str) -> None:
    model = Chained(kind).eval()
    converted = on_recovery(convert(model, PathSpec.of("mxfp8", "bf16", backend="simulated", targets=["blocks.*"])))
    before = model(torch.arange(8)[None])
    converted.end_step()
    with pytest.raises(NotFollowed, match=why):
        runner = BlockByBlock(converted, model, model)
        list(runner.outputs([torch.arange(8)[None]], {"first": Variant([converted.operators[0].operator_name])}))
    assert torch.equal(model(torch.arange(8)[None]), before)
    assert all("forward" not in vars(block) for block in model.blocks)
