"""Checkpoints in Hugging Face's layout: written and loaded again, adapters, and what cannot be used."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from close import apart, assert_close
from safetensors.torch import load_file, save_file

from gnmr.conversion import PathLinear, PathSpec, convert
from gnmr.errors import UserError
from gnmr.lab.config.model import AdapterConfig, ModelConfig
from gnmr.lab.data.batch import Batch, model_inputs
from gnmr.lab.models import Llama, pretrained
from gnmr.lab.models.pretrained import add_adapter, as_hugging_face, empty, fingerprint, load, max_length, save
from gnmr.measure.blocks import named_blocks

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
TOKENS = torch.arange(32).view(2, 16) % 61
SUMS: dict[str, Any] = {"terms": 128, "products": 24}
"""Of the longest sums of these models, and the products in a row. Weights in a mapped file begin at any address."""


def llama(**changes: object) -> Llama:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4} | changes
    model = Llama(ModelConfig(**shape), 61, 32)  # type: ignore[arg-type]
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save(llama(), folder := tmp_path_factory.mktemp("saved") / "hf")
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "hf")


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"tied_head": True}, {"name": "pangu"}])
def test_what_is_written_gives_equal_logits_when_it_is_loaded(tmp_path: Path, changes: dict[str, object]) -> None:
    ours = llama(**changes)
    save(ours, tmp_path / "hf")
    theirs = load(str(tmp_path / "hf"), torch.float32, CPU)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=TOKENS).logits, ours(TOKENS), rtol=1e-5, atol=1e-6)


def load_frozen(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load(str(folder), dtype, CPU).requires_grad_(False)


def test_only_the_adapters_are_trained_and_they_start_as_nothing(checkpoint: Path) -> None:
    plain, model = load_frozen(checkpoint), load_frozen(checkpoint)
    add_adapter(model, AdapterConfig(rank=2), seed=0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2 and all(".lora_" in name for name in trained)
    with torch.no_grad():
        assert_close(model(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits, **SUMS)


def test_adapters_are_drawn_from_their_seed_alone(checkpoint: Path) -> None:
    def drawn(seed: int) -> torch.Tensor:
        model, ours = load_frozen(checkpoint), llama()
        before = torch.get_rng_state()
        add_adapter(model, AdapterConfig(rank=2), seed)
        as_hugging_face(ours)
        assert torch.equal(torch.get_rng_state(), before), "an adapter or an export drew from the run"
        return model.state_dict()["model.layers.1.self_attn.q_proj.lora_A.default.weight"]

    first = drawn(1)
    assert torch.equal(first, drawn(1)) and not torch.equal(first, drawn(2))


def test_adapters_keep_32_bits_and_compute_in_16(checkpoint: Path) -> None:
    model = load_frozen(checkpoint, torch.bfloat16)
    add_adapter(model, AdapterConfig(rank=2, dropout=0.0), seed=0)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    down, up = layer.lora_A["default"], layer.lora_B["default"]
    assert down.weight.dtype == up.weight.dtype == torch.float32
    with torch.no_grad():
        up.weight.normal_()
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    hidden = torch.nn.functional.linear(x, down.weight.bfloat16())
    added = torch.nn.functional.linear(hidden, up.weight.bfloat16()) * 8.0  # scaling 16 over rank 2
    expected = layer.base_layer(x) + added
    assert_close(layer(x), expected, terms=32, products=3)
    assert expected.dtype == torch.bfloat16 and apart(layer.base_layer(x), expected, terms=32, products=3)


def test_adapters_are_saved_as_peft_loads_them(checkpoint: Path, tmp_path: Path) -> None:
    import peft

    model = load_frozen(checkpoint)
    convert(model, PathSpec.of("sim_int8", "bf16", unit="block"))
    add_adapter(model, AdapterConfig(rank=2, dropout=0.0), seed=0)
    assert sum(isinstance(module, PathLinear) for module in model.modules()) == 14
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    save(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load_frozen(checkpoint), tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(load_frozen(checkpoint), tmp_path / "adapter").merge_and_unload()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PathLinear):
                module.shared.switches.high_precision = True
        expected = model(input_ids=TOKENS).logits
        torch.testing.assert_close(theirs(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


def test_the_fingerprint_is_of_every_byte_of_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    """A merged adapter changes the middle of a file alone."""
    first, file = fingerprint(str(checkpoint)), checkpoint / "model.safetensors"
    save(llama(), tmp_path / "again")
    assert fingerprint(str(tmp_path / "again")) == first
    with file.open("ab") as stream:
        stream.truncate(5 * 2**20)  # its middle is farther than a MiB from both ends
    padded = fingerprint(str(checkpoint))
    with file.open("r+b") as stream:
        stream.seek(5 * 2**19)
        stream.write(b"\1")
    assert len({first, padded, fingerprint(str(checkpoint))}) == 3


def refused(checkpoint: str) -> str:
    with pytest.raises(UserError) as told:
        load(checkpoint, torch.float32, CPU)
    assert "\n" not in str(told.value)
    return str(told.value)


def damaged(damage: Callable[[Path], Any], checkpoint: Path) -> str:
    damage(checkpoint)
    return refused(str(checkpoint))


def edit(**changes: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        tree = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(tree | changes))

    return write


@pytest.mark.parametrize(
    "damage, message",
    [
        (shutil.rmtree, "there is no such folder or hub name"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded ("),
        (lambda folder: os.truncate(folder / "model.safetensors", 3000), "model.safetensors: is missing, truncated"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no *.safetensors"),
        (lambda folder: (folder / INDEX).write_text("[" * 100_000), f"{INDEX}: is missing, truncated"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'), "b.safetensors: is mis"),
        (edit(num_hidden_layers=10**9), "1,000,000,000 layers"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(damage: Callable, message: str, checkpoint: Path) -> None:
    assert message in damaged(damage, checkpoint)


SEPARATES = {
    "gemma2": True,
    "mixtral": True,
    "gpt2": True,
    "gpt_oss": False,
    "mpt": False,
    "bloom": False,
    "opt": False,
    "falcon": False,
    "mamba": False,
    "jamba": False,
}
"""Whether documents of a sequence do not see each other, by family."""


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[pytest.mark.slow] * (one in ("mpt", "bloom", "falcon"))) for one in SEPARATES]
)
def test_a_causal_model_of_any_family_is_read(family: str, tmp_path: Path) -> None:
    theirs = ARCHITECTURES[family]().model
    save(theirs, tmp_path / "hf", weights=theirs.state_dict())
    before = torch.get_rng_state()
    ours = load(str(tmp_path / "hf"), torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before), "it drew from the run"
    with torch.no_grad():
        expected = theirs.eval()(input_ids=TOKENS).logits
        assert ours.training
        assert_close(ours.eval()(input_ids=TOKENS).logits, expected, **SUMS)
    shapes = {name: p.shape for name, p in empty(str(tmp_path / "hf"), torch.float32).named_parameters()}
    assert shapes == {name: p.shape for name, p in ours.named_parameters()}
    assert all(p.is_meta for p in empty(str(tmp_path / "hf"), torch.float32).parameters())
    assert len(named_blocks(ours)[1]) == 2 and max_length(ours) >= 128
    positions, other = torch.arange(16) % 8, TOKENS[:1].clone()  # two documents
    other[0, 0] += 1  # of the first document
    with torch.no_grad():
        first, second = (ours(**model_inputs(Batch(x, x, positions[None]))).logits for x in (TOKENS[:1], other))
    seen = apart(first[0, 8:], second[0, 8:], terms=128)  # tokens that other experts get are multiplied in other groups
    assert (not seen) == ours.separates_documents
    assert ours.separates_documents == SEPARATES[family]


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_what_is_no_causal_language_model_is_refused(family: str, tmp_path: Path) -> None:
    ARCHITECTURES[family]().model.save_pretrained(tmp_path)
    assert f"a {family} model is not a causal language model" in refused(str(tmp_path))


def test_linears_that_peft_takes_for_experts_are_refused() -> None:
    model = ARCHITECTURES["qwen3_next"]().model
    with pytest.raises(UserError, match=r"^model\.adapter\.rank=2: peft [^\n]*$"):
        add_adapter(model, AdapterConfig(rank=2), 0)


HEADS = {"layers.0.self_attn.rotary_emb.inv_freq": (4,), "layers.1.self_attn.masked_bias": (1,)}
SURPLUS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, object], str | None]] = {
    # name -> weights beside those of two layers, keys of config.json, what the line says
    "bias": (
        {f"layers.{i}.self_attn.{p}_proj.bias": (32,) for i in (0, 1) for p in "qkv"},
        {},
        r"files alone.*and 3 more",
    ),
    "scales": ({f"layers.{i}.mlp.up_proj.weight_scale": () for i in (0, 1)}, {}, r"files alone.*\(.*weight_scale"),
    "fewer layers": ({}, {"num_hidden_layers": 1}, r"files alone.*\(model\.layers\.1\..* and 6 more"),
    "more layers": ({}, {"num_hidden_layers": 3}, r"missing in its files \(model\.layers\.2\."),
    "shape": ({}, {"intermediate_size": 40}, r"down_proj\.weight is \[32, 48\] in the file, \[32, 40\]"),
    "buffers": (HEADS, {}, None),
}


@pytest.mark.parametrize("name", SURPLUS)
def test_the_weights_are_exactly_those_of_the_model(name: str, tmp_path: Path) -> None:
    more, changes, message = SURPLUS[name]
    as_hugging_face(llama()).save_pretrained(tmp_path, max_shard_size="20KB" if name in ("bias", "buffers") else "1GB")
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    added = {f"model.{key}": torch.ones(shape) for key, shape in more.items()}
    save_file({**load_file(file), **added}, file, {"format": "pt"})
    edit(**changes)(tmp_path)
    if message is None:
        load(str(tmp_path), torch.float32, CPU)
    else:
        assert re.search(message, refused(str(tmp_path)))


@pytest.mark.parametrize("dtype, named", [(torch.int8, "I8"), (torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_weights_that_need_scales_are_refused(dtype: torch.dtype, named: str, checkpoint: Path) -> None:
    file, name = checkpoint / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    save_file(weights | {name: weights[name].to(dtype)}, file, {"format": "pt"})
    assert f"{name} is {named} in model.safetensors" in refused(str(checkpoint))
    edit(quantization_config={"quant_method": "modelopt"})(checkpoint)
    assert f"{name} is {named} in model.safetensors" in refused(str(checkpoint)), "transformers does not know it"
    as_hugging_face(llama()).save_pretrained(checkpoint / "parts", max_shard_size="20KB")
    for part in (checkpoint / "parts").glob("model*"):
        part.rename(checkpoint / part.name)
    assert "in model.safetensors" in refused(str(checkpoint)), "transformers reads it in place of the parts beside it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_in_fp8_is_dequantized(checkpoint: Path, dtype: torch.dtype, monkeypatch, tmp_path: Path) -> None:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    def where_a_gpu_multiplies_it(self, *_: object, **__: object) -> None:
        assert self.quantization_config.dequantize

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", where_a_gpu_multiplies_it)
    file, tree = checkpoint / "model.safetensors", dict[str, torch.Tensor]()
    for name, weight in load_file(file).items():
        tree[name] = weight.to(torch.float8_e4m3fn) if "proj" in name else weight.bfloat16()
        tree |= {f"{name}_scale_inv": torch.full((1, 1), 0.5)} if "proj" in name else {}
    save_file(tree, file, {"format": "pt"})
    edit(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})(checkpoint)
    model = load(str(checkpoint), dtype, CPU)
    found = dict(model.named_parameters())
    assert {weight.dtype for weight in found.values()} == {dtype}
    assert all(torch.equal(found[name].float(), tree[name].float() / 2) for name in found if "proj" in name)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_dequantized_experts_are_saved_under_names_that_load(method: str, tmp_path: Path) -> None:
    """Those of FP8 are merged when they are loaded, and those of MXFP4 have other names with scales."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32, "num_experts_per_tok": 1}
    if method == "fp8":
        config: Any = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=32, num_experts=2)
    else:
        config = transformers.GptOssConfig(**sizes, num_local_experts=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "given")
    file, tree = tmp_path / "given" / "model.safetensors", dict[str, torch.Tensor]()
    names, scale = set(load_file(file)), torch.full((2, 1, 1), 120, dtype=torch.uint8)
    for name, weight in load_file(file).items():
        if ".experts." not in name or name.endswith("bias"):
            tree[name] = weight
        elif method == "fp8":
            tree |= {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1, 1), 0.5)}
        else:
            outputs = weight.shape[2]
            packed = torch.randint(256, (2, outputs, 1, 16), dtype=torch.uint8)
            tree |= {f"{name}_blocks": packed, f"{name}_scales": scale.expand(2, outputs, 1).contiguous()}
    save_file(tree, file, {"format": "pt"})
    edit(
        quantization_config={
            "quant_method": method,
            "modules_to_not_convert": ["lm_head", "self_attn", "gate", "router"],
        }
    )(tmp_path / "given")
    model = load(str(tmp_path / "given"), torch.float32, CPU)
    save(model, tmp_path / "plain")
    assert set(load_file(tmp_path / "plain" / "model.safetensors")) == names
    again = load(str(tmp_path / "plain"), "auto", CPU)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


def test_a_checkpoint_that_stays_quantized_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(quant_type=Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "int8")
    assert "transformers keeps it quantized (torchao), so no other casts" in refused(str(tmp_path / "int8"))


def test_a_head_beside_a_tie_is_read(tmp_path: Path) -> None:
    save(llama(tied_head=True), tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    for head in (weights["model.embed_tokens.weight"].clone(), weights["model.embed_tokens.weight"] + 1):
        save_file(weights | {"lm_head.weight": head}, file, {"format": "pt"})
        assert torch.equal(load(str(tmp_path / "hf"), torch.float32, CPU).lm_head.weight, head)


def test_a_tokenizer_of_sentencepiece_names_the_package(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None if name == "sentencepiece" else True)
    with pytest.raises(UserError, match=r"tokenizer\.model: needs sentencepiece"):
        pretrained.open_tokenizer(str(checkpoint))


def test_no_code_of_a_checkpoints_is_run_or_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (checkpoint / "own.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    edit(auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, model_type="own")(checkpoint)
    for use in (lambda: load(str(checkpoint), torch.float32, CPU), lambda: empty(str(checkpoint), torch.float32)):
        with pytest.raises(UserError, match=r"brings Python code of its own \(auto_map\), which is never run"):
            use()
    assert not ran.exists()
