"""What can be scored, on which path, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("lm_eval")
pytest.importorskip("peft")

from gnmr.errors import UserError
from gnmr.lab.data.cache import TokenCorpus
from gnmr.lab.data.sequences import validation_sequences
from gnmr.lab.data.tokens import prepare
from gnmr.lab.evaluation.harness import Harness
from gnmr.lab.evaluation.scoring import score
from gnmr.lab.evaluation.subjects import load_subject, of_run
from gnmr.precision import PathSpec, convert
from gnmr.records.reader import read_json, read_jsonl

pytestmark = pytest.mark.xdist_group("evaluation")

SIZES = ["training.seq_len=160", "training.dtype=float32", "training.steps=3"]
KINDS = {
    "llama": [],
    "gpt": ["model.name=gpt"],
    "moe": ["model.name=moe", "model.experts.number=4"],
    "recipe": ["precision.low=sim_int4", "precision.recovery=null"],
}


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A trained tiny run of each kind."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = train(tmp_path_factory.mktemp(kind) / "run", *SIZES, *KINDS[kind])
        return made[kind]

    return get


@pytest.fixture
def corpus(tiny) -> TokenCorpus:
    return prepare(tiny().data, 0, lambda _line: None)


def nll(logits: Callable[[torch.Tensor], torch.Tensor], blocks: torch.Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(logits(blocks[:, :-1]).flatten(0, 1), blocks[:, 1:].flatten()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_what_it_was_when_it_ended(kind, runs, corpus, task_data) -> None:
    run = runs(kind)
    subject = load_subject(str(run), device="cpu")
    assert (subject.max_length, subject.facts["step"], subject.facts["kind"]) == (160, 3, "run")
    blocks = validation_sequences(corpus.val, 160, 2)
    with subject.serving():
        assert nll(subject.logits, blocks) == pytest.approx(read_jsonl(run / "eval.jsonl")[-1]["val_loss"], rel=1e-6)
        # Padding on the right, and what else is in a batch, must not be seen.
        text = "abcdefghij " * 4
        asked = [(None, subject.text.encode(text[:length], False), [5, 6]) for length in (40, 3, 17, 11)]
        together, alone = (Harness(subject, size)._loglikelihood_tokens(asked) for size in (4, 1))
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone], rel=1e-5)
    found = score(subject, ["hellaswag", "wikitext2"], limit=3, data=task_data)
    assert found["wikitext2"]["block"] == 160 and found["wikitext2"]["metrics"]["word_perplexity"]["value"] > 1
    assert found["hellaswag"]["items"] == 3


def test_the_low_path_is_the_runs_own(runs, corpus) -> None:
    run, blocks = runs("recipe"), validation_sequences(corpus.val, 160, 1)
    plain, low = (load_subject(str(run), path, device="cpu") for path in ("16bit", "low"))
    assert low.facts["low_path"] == "sim_int4, simulated"
    with plain.serving(), low.serving():
        exact, found = nll(plain.logits, blocks), nll(low.logits, blocks)
    convert(plain.model, PathSpec.of("sim_int4", None))
    assert found == nll(plain.logits, blocks) != exact


def test_a_model_in_training_is_scored_on_either_path_and_left_alone(tiny, corpus, tmp_path) -> None:
    from gnmr.lab.train.run import assemble

    parts = assemble(
        tiny(*SIZES, "precision.low=sim_int4", "precision.recovery=sim_int8"), tmp_path / "unused", lambda _: None
    )
    parts.model.train()
    parts.converted.operators[2].switch(True)
    blocks = validation_sequences(corpus.val, 160, 1)
    found = {}
    for path in ("16bit", "low"):
        where = {"device": parts.device, "path": path, "plan": parts.converted}
        subject = of_run("now", parts.model, parts.corpus.tokenizer_path, max_length=160, **where)
        with subject.serving():
            found[path] = nll(subject.logits, blocks)
            assert not parts.model.training
    assert parts.model.training and [o.recovering for o in parts.converted.operators].count(True) == 1
    assert not parts.converted.shared.high_precision and not parts.converted.shared.no_side_effects
    mixed = nll(parts.model, blocks)
    parts.converted.operators[2].switch(False)
    assert found["low"] == nll(parts.model, blocks) != mixed
    with parts.converted.high_precision():
        assert found["16bit"] == nll(parts.model, blocks) != found["low"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # within peft and transformers
def test_an_adapter_changes_the_checkpoint_under_it(checkpoint, tmp_path) -> None:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / parameter.numel())
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = adapted(tokens).logits
    subject, plain = (load_subject(str(checkpoint), adapter=a, device="cpu") for a in (str(tmp_path / "adapter"), None))
    with subject.serving(), plain.serving():
        torch.testing.assert_close(subject.logits(tokens), expected, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(plain.logits(tokens), expected, atol=1e-2)
    told = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(told.read_text())
    told.write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(UserError, match=r"4 of its weights have no place in the model .* \(the first is .*down_proj"):
        load_subject(str(checkpoint), adapter=str(tmp_path / "adapter"), device="cpu")
    told.write_text(json.dumps(config))
    # Half of an adapter would leave the other half as it was drawn.
    from safetensors.torch import load_file, save_file

    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "layers.0" in name}, file)
    with pytest.raises(UserError, match=r"adapter=.*: does not fit this checkpoint \(UserWarning: Found missing"):
        load_subject(str(checkpoint), adapter=str(tmp_path / "adapter"), device="cpu")


def broken(folder: Path, how: str) -> None:
    """Damages the copy of a checkpoint."""
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "missing shard":
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif how == "bert":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    elif how == "config":
        (folder / "config.json").write_text("{")
    elif how == "shape":
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    elif how == "layers":
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    elif how == "surplus":
        from safetensors.torch import load_file, save_file

        surplus = {"model.layers.0.self_attn.q_proj.bias": torch.ones(config["hidden_size"])}
        save_file(load_file(weights) | surplus, weights, {"format": "pt"})
    elif how == "adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")
    else:
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("how", "line"),
    {
        "truncated": "model.safetensors: is missing, truncated or no safetensors file (",
        "no weights": "holds no *.safetensors",
        "missing shard": "model-00001-of-00001.safetensors: is missing, truncated or no safetensors file (",
        "no tokenizer": "holds no tokenizer (tokenizer.json or tokenizer.model)",
        "bert": "a bert model, which is not LLaMA-like (it has no model.layers)",
        "config": "cannot be loaded (",
        "shape": "6 weights (model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.gate_proj.weight, ",
        "layers": "9 weights (model.layers.2.input_layernorm.weight, ",
        "surplus": "1 weight (model.layers.0.self_attn.q_proj.bias) is in its files, and the model of config.json has ",
        "adapter": "is an adapter: give its base checkpoint, and adapter=",
        "nothing": "neither a run (config.yaml) nor a Hugging Face checkpoint (config.json)",
    }.items(),
)
def test_checkpoints_that_cannot_be_scored(how, line, checkpoint, tmp_path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    broken(folder, how)
    with pytest.raises(UserError) as caught:
        load_subject(str(folder), device="cpu")
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_that_is_larger_than_its_model(checkpoint, task_data, tmp_path) -> None:
    import transformers

    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(40)
    model.save_pretrained(folder)
    with pytest.raises(UserError, match=r"gives token \d+, the model has 40: they do not belong together"):
        score(load_subject(str(folder), device="cpu"), ["hellaswag"], limit=1, data=task_data)


@pytest.mark.slow
def test_runs_that_cannot_be_scored(runs, tmp_path, monkeypatch) -> None:
    def line(change: Callable[[Path], object], kind: str = "llama", path: str = "16bit") -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(runs(kind), folder)
        change(folder)
        with pytest.raises(UserError) as caught:
            load_subject(str(folder), path, device="cpu")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "checkpoints: holds no checkpoint" in line(lambda run: shutil.rmtree(run / "checkpoints"))
    shard = "checkpoints/step-00000003/__0_0.distcp"
    assert "is corrupt (__0_0.distcp is missing or changed)" in line(lambda run: (run / shard).write_bytes(b""))
    assert "header.json: cannot be read (" in line(lambda run: (run / "header.json").unlink())
    assert "config.yaml: cannot be read (not a config: " in line(lambda run: (run / "config.yaml").write_text("- 1"))

    def wider(run: Path) -> None:
        file = run / "config.yaml"
        file.write_text(file.read_text().replace("intermediate_size: 48", "intermediate_size: 64"))

    assert "does not fit this model (" in line(wider)
    assert line(str, path="low") == (
        "path=low: precision.low=int4 with precision.site=saved touches nothing but what backward keeps: its forward pass is "
        "the 16-bit one; use path=16bit"
    )
    nowhere = tmp_path / "nowhere"
    monkeypatch.setenv("GNMR_CACHE", str(nowhere))

    def forgotten(run: Path) -> None:
        file = run / "config.yaml"
        text = file.read_text()
        start = text.index("cache_dir: ") + len("cache_dir: ")
        file.write_text(f"{text[:start]}{nowhere}{text[text.index(chr(10), start) :]}")

    assert "its tokenizer is missing: no token folder in " in line(forgotten)


@pytest.mark.parametrize(
    ("place", "words", "line"),
    [
        ("nowhere", {}, "nowhere: there is no such run, checkpoint folder or hub name"),
        ("runs/missing", {}, "runs/missing: there is no such run, checkpoint folder or hub name"),
        ("meta-llama/Llama-2-13b-hf", {}, "meta-llama/Llama-2-13b-hf: cannot be read from the hub ("),
        ("", {"in_force": "low"}, "is no run and has no low path; use path=16bit"),
        ("", {"in_force": "8bit"}, "path=8bit: must be one of 16bit, low"),
        ("", {"device": "tpu"}, "device=tpu: must be one of auto, cpu, cuda"),
        ("", {"adapter": "nowhere"}, "adapter=nowhere: holds no adapter of peft's (adapter_config.json)"),
    ],
)
def test_what_is_no_subject(place, words, line, checkpoint, tmp_path, monkeypatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_subject(place or str(checkpoint), **{"device": "cpu", **words})
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["own", "checkpoint"])
def test_a_control_token_in_a_plain_text_is_text(kind, runs, checkpoint) -> None:
    subject = load_subject(str(runs("llama") if kind == "own" else checkpoint), device="cpu")
    ends = subject.text.decode([subject.text.eos], special=True)
    assert subject.text.eos not in subject.text.plain(f"abc{ends}abc", "")
    assert subject.text.plain("abc abc", "") == subject.text.encode("abc abc", False)


# ---- runs that began from a checkpoint ----


@pytest.fixture
def fine_tune(train, checkpoint, tmp_path) -> Callable[..., Path]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a b", "response": f"c d {i}"}) + "\n" for i in range(60)))
    return lambda *more: train(
        tmp_path / "run",
        *("model.name=pretrained", f"model.checkpoint={checkpoint}", "model.adapter.rank=2", "training.dtype=float32"),
        *(
            "data.name=instructions",
            f"data.path={rows}",
            "precision.low=llm_int8",
            "precision.recovery=bf16",
            "precision.unit=block",
        ),
        *("controller.observe=adapter", "optim.lr=0.05", "controller.max_o=1"),
        *more,
    )


@pytest.fixture
def fine_tuned(fine_tune) -> Path:
    return fine_tune()


def test_weights_that_are_codes_alone_are_no_16_bit_path(fine_tune, gnmr, task_data) -> None:
    asked = ["scores.tasks=[hellaswag]", f"scores.data={task_data}", "scores.limit=1"]
    run = fine_tune("precision.weights=instead", "training.steps=1", *asked)
    assert [row["path"] for row in read_jsonl(run / "scores.jsonl")] == ["w8a16"]
    words = ["tasks=[hellaswag]", f"data={task_data}", "limit=1", "device=cpu"]
    assert "path in force: w8a16\n" in gnmr("eval", str(run), *words).out
    assert read_json(run / "scores.json")["path"] == "w8a16"
    low = load_subject(str(run), "low", device="cpu")
    assert low.named_path == "low"


@pytest.mark.slow
def test_a_fine_tuned_run_is_its_base_under_its_adapter(fine_tuned, checkpoint) -> None:
    tokens = torch.arange(3, 40)[None]
    subject, plain = (load_subject(str(place), device="cpu") for place in (fine_tuned, checkpoint))
    again = load_subject(str(checkpoint), adapter=str(fine_tuned / "adapter"), device="cpu")
    low = load_subject(str(fine_tuned), "low", device="cpu")
    with subject.serving(), plain.serving(), again.serving():
        torch.testing.assert_close(subject.logits(tokens), again.logits(tokens), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(subject.logits(tokens), plain.logits(tokens), atol=1e-3)
        sixteen = subject.logits(tokens)
    with low.serving():
        error = (low.logits(tokens) - sixteen).norm() / sixteen.norm()
    assert 0 < error < 0.2
    assert subject.facts["checkpoint"] == str(checkpoint) and subject.facts["step"] == 8
    assert low.facts["low_path"].startswith("llm_int8")


@pytest.mark.slow
def test_a_fine_tuned_run_whose_base_has_changed(fine_tuned, checkpoint, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    config = fine_tuned / "config.yaml"
    config.write_text(config.read_text().replace(str(checkpoint), str(copy)))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"began from other weights than model\.checkpoint="):
        load_subject(str(fine_tuned), device="cpu")


def test_a_pad_token_without_an_embedding_is_not_looked_up(checkpoint: Path, task_data: Path, tmp_path: Path) -> None:
    """A [PAD] that was added to the tokenizer alone; the mask hides what stands there."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(checkpoint, tmp_path / "padded")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    subject, plain = load_subject(str(folder), device="cpu"), load_subject(str(checkpoint), device="cpu")
    assert tokenizer.pad_token_id >= subject.vocab_size
    found, usual = (score(one, ["gsm8k"], limit=3, shots=1, data=task_data)["gsm8k"] for one in (subject, plain))
    assert found["metrics"] == usual["metrics"] and found["tokens_generated"] == usual["tokens_generated"]
