"""Runs that fine-tune a checkpoint: adapters on a frozen base, packed examples, what is left at the end."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from everything import differences, everything

from gnmr.errors import UserError
from gnmr.lab.config.compose import compose
from gnmr.lab.models.pretrained import load
from gnmr.lab.train.build import Parts, assemble, training_blocks
from gnmr.lab.train.loss import loss_of
from gnmr.lab.train.step import TrainStep
from gnmr.records.reader import read_json, read_jsonl

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
Forks = pytest.importorskip("forks").Forks

pytestmark = pytest.mark.slow

Words = list[str]


@pytest.fixture
def assembled(tiny, tmp_path: Path, lora: Words) -> Callable[..., Parts]:
    return lambda *more: assemble(tiny(*lora, *more), tmp_path / "unused", lambda _: None)


def test_a_run_trains_the_adapters_and_leaves_the_base_as_it_was(
    train, tmp_path: Path, lora: Words, base: Path
) -> None:
    folder = train(tmp_path / "run", *lora)
    header = read_json(folder / "header.json")
    assert header["units"] == [f"model.layers.{i}" for i in range(3)]
    assert header["shape"] == {"layers": 3, "width": 32}, "the checkpoint's, not the config's defaults"
    assert header["trained_parameters"] == 3 * 2 * (4 * 64 + 3 * 80) < header["parameters"]
    steps = read_jsonl(folder / "steps.jsonl")
    assert max(row["num_active"] for row in steps) == 1 and not any(row["skipped"] for row in steps)
    names = set(everything(folder)["state"]["model"])
    assert names and all(".lora_" in name for name in names)
    model = peft.PeftModel.from_pretrained(load(str(base), torch.float32, torch.device("cpu")), folder / "adapter")
    added = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(added) == 21 and all(p.abs().max() > 0 for p in added)


def test_frozen_weights_have_no_gradient_in_the_flops(assembled) -> None:
    parts = assembled()
    linears = [m for m in parts.model.modules() if isinstance(m, torch.nn.Linear)]
    forward = sum(linear.weight.numel() for linear in linears)
    config = parts.model.config
    attention = 2 * parts.config.training.seq_len * config.hidden_size * config.num_hidden_layers
    assert parts.flops_per_token == pytest.approx(2 * (2 * forward + 3 * attention))


def test_a_stopped_run_goes_on_to_the_last_bit(train, tmp_path: Path, lora: Words, stopped) -> None:
    """Dropout and the order of the examples included."""
    whole = everything(train(tmp_path / "whole", *lora))
    stopped(tmp_path / "run", *lora)
    assert differences(whole, everything(train(tmp_path / "run", *lora))) == []


@pytest.mark.parametrize("done", [False, True])
def test_a_run_is_not_taken_for_one_of_another_base(
    done: bool, train, tmp_path: Path, lora: Words, base: Path, stopped
) -> None:
    """One weight in the middle of the file, as of a merged adapter; nor of another tokenizer."""
    mine = copied(base, tmp_path / "base")
    words = [word.replace(str(base), str(mine)) for word in lora]
    (train if done else stopped)(tmp_path / "run", *words)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    def line() -> str:
        with pytest.raises(UserError) as told:
            train(tmp_path / "run", *words)
        assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        return str(told.value)

    weights, tokenizer = mine / "model.safetensors", mine / "tokenizer.json"
    sound = weights.read_bytes(), tokenizer.read_text()
    doubled(weights)
    assert line().startswith(f"model.checkpoint={mine}: its weights changed since the run in")
    weights.write_bytes(sound[0])
    tokenizer.write_text(sound[1].replace('"a"', '"A"'))
    assert line().startswith(f"model.checkpoint={mine}: its tokenizer changed since the run in")
    tokenizer.write_text(sound[1])
    train(tmp_path / "run", *words)


@pytest.fixture
def opt(base: Path, tmp_path: Path) -> Path:
    """A checkpoint of OPT, which ignores positions, so that each example has its own sequence."""
    config = transformers.OPTConfig(
        vocab_size=16,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        dropout=0.0,
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "opt" / name)
    return tmp_path / "opt"


@pytest.mark.parametrize(("kind", "rank"), [("llama", 0), ("llama", 2), ("opt", 0)])
def test_a_fine_tuned_checkpoint_is_a_base_of_forks(
    kind: str, rank: int, train, tiny, tmp_path: Path, lora: Words, base: Path, opt: Path
) -> None:
    """Its own arm goes on as the base would have, to the last bit, and only from the same weights."""
    mine = copied({"llama": base, "opt": opt}[kind], tmp_path / "mine")
    words = [word.replace(str(base), str(mine)) for word in lora] + [f"model.adapter.rank={rank}"]
    words += ["model.adapter.dropout=0.0", "precision.low=bf16", "precision.recovery=null", "optim.schedule_steps=40"]
    if rank == 0:
        words.remove("controller.observe=adapter")
    steps = 30 if kind == "opt" else 6  # 120 sequences, more than there are packed ones
    longer = train(tmp_path / "longer", *words, f"training.steps={steps + 6}")
    old = train(tmp_path / "base", *words, f"training.steps={steps}")
    fork = [*words, f"base={old}", "training.steps=6", f"model.checkpoint={copied(mine, tmp_path / 'elsewhere')}"]
    rows, want = (read_jsonl(folder / "steps.jsonl") for folder in (train(tmp_path / "fork", *fork), longer))
    for key in ("loss", "lr", "grad_norm_pre_clip"):
        assert [row[key] for row in rows] == [row[key] for row in want[steps:]]
    other = Forks(old)
    config = tiny(*fork, "training.seed=1")
    first, again = other(config, phases=()), other(config, phases=())
    assert first == again and first.losses != [row["loss"] for row in rows]
    assert not any(".base_layer." in name for name in other.base.trainable_state[0]), "frozen weights are not kept"
    with pytest.raises(UserError, match=r"^model\.checkpoint=null: the base"):
        compose(["experiment=fork", f"base={old}", "data.path=rows"])
    doubled(tmp_path / "elsewhere" / "model.safetensors")
    with pytest.raises(UserError, match="its weights are not those that the base "):
        train(tmp_path / "changed", *fork)
    assert not (tmp_path / "changed").exists()


def test_a_step_s_gradient_is_that_of_the_mean_over_all_its_targets(assembled) -> None:
    """Micro-batches hold unequal numbers of targets."""
    parts = assembled(
        "model.adapter.dropout=0.0", "precision.low=bf16", "precision.recovery=null", "controller.warmup_frac=0"
    )
    blocks = training_blocks(parts.config, parts.corpus, None)
    batches = [blocks.next(2), blocks.next(2)]
    counts = [batch.num_targets for batch in batches]
    assert counts[0] != counts[1]
    total = sum(loss_of(parts.model, batch) * count for batch, count in zip(batches, counts, strict=True)) / sum(counts)
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(total, trained)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected))
    result = TrainStep(parts.model, parts.router, parts.optimizer)(batches, 1e-3)
    assert result.loss == pytest.approx(float(total.detach()), rel=1e-6)
    assert result.grad_norm_pre_clip == pytest.approx(norm, rel=1e-5)


def doubled(weights: Path) -> None:
    """Double one tensor of a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    tensors[sorted(tensors)[-1]] *= 2
    save_file(tensors, weights, {"format": "pt"})


def copied(base: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_tokenizer_of_another_model_is_refused(tiny, tmp_path: Path, lora: Words, base: Path) -> None:
    from gnmr.lab.data.tokens import prepare

    copy = copied(base, tmp_path / "base")
    own = prepare(tiny().data, 1000, lambda _: None).tokenizer_path
    (copy / "tokenizer.json").write_bytes(own.read_bytes())
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"has embeddings for 16 tokens, its tokenizer has 300"):
        assemble(tiny(*lora, f"model.checkpoint={copy}"), tmp_path / "unused", lambda _: None)


@pytest.mark.parametrize(
    "word",
    [
        *("controller.observe=parameters", "precision.low=int4", "training.seq_len=80", "training.export_hf=True"),
        "data.tokenizer=mine.json",
    ],
)
def test_what_a_frozen_base_cannot_have(train, tmp_path: Path, lora: Words, word: str) -> None:
    recovery = ["precision.recovery=int8"] if word == "precision.low=int4" else []
    with pytest.raises(UserError, match=f"^{word}: "):
        train(tmp_path / "run", *lora, word, *recovery)
    assert not (tmp_path / "run").exists()


def test_a_llama_of_ours_is_exported_and_fine_tuned(train, tmp_path: Path, lora: Words, rows: Path) -> None:
    """Pre-training, export, fine-tuning: the whole path, and weights that arrive unchanged."""
    first = train(tmp_path / "first", "training.export_hf=true", "model.num_layers=2")
    own = [f"model.checkpoint={first / 'hf'}" if word.startswith("model.checkpoint") else word for word in lora]
    second = train(
        tmp_path / "second", *own, "training.export_hf=true", "model.adapter.rank=0", "controller.observe=parameters"
    )
    assert (second / "DONE").exists() and not (second / "adapter").exists()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in (second / "hf").iterdir()}
    trained = everything(second)["state"]["model"]
    again = load(str(second / "hf"), torch.float32, torch.device("cpu")).state_dict()
    assert differences(dict(trained), {name: again[name] for name in trained}) == []


def test_a_run_that_is_done_is_exported_from_its_last_checkpoint(train, tmp_path: Path) -> None:
    folder, told = train(tmp_path / "run"), list[str]()
    losses = (folder / "steps.jsonl").read_bytes()
    train(folder, "training.export_hf=true", say=told.append)
    assert f"exported {folder / 'hf'}" in told and (folder / "steps.jsonl").read_bytes() == losses
    whole = train(tmp_path / "whole", "training.export_hf=true")
    ours, theirs = (load(str(place / "hf"), "auto", torch.device("cpu")).state_dict() for place in (folder, whole))
    assert differences(dict(ours), dict(theirs)) == []
    for left in (folder / "checkpoints").iterdir():
        shutil.rmtree(left)
    shutil.rmtree(folder / "hf")
    with pytest.raises(UserError, match=r"training.export_hf=true: .* is done, and its last checkpoint is gone"):
        train(folder, "training.export_hf=true")
    assert (folder / "DONE").exists()
