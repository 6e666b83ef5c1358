"""Forks: runs that go on from the checkpoint of another one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from everything import differences, everything, in_child
from test_kill_and_resume import at_file, in_step

from gnmr.errors import UserError
from gnmr.lab.config import config_hash, to_dict
from gnmr.lab.config.base import place_of_base
from gnmr.lab.config.compose import compose
from gnmr.lab.train import base as base_module
from gnmr.lab.train.build import training_blocks
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.steps import Steps
from gnmr.records.disk import sha256
from gnmr.records.reader import read_json, read_jsonl, read_ratios

STATIC = ["precision.low=bf16", "precision.recovery=null"]
BASE = [*STATIC, "training.steps=6", "optim.schedule_steps=20", "model.outlier_channels.number=1"]
FORK = [
    "training.steps=4",
    "fork.heal=2",
    "precision.low=sim_e2m1",
    "precision.recovery=bf16",
    "training.eval_every=100",
]
FORK += ["model.outlier_channels.number=1", "training.checkpoint_every=2"]
ARMS = {
    "gnmr": [],
    "random": ["controller.signal=random", "controller.options.share=0.3", "fork.order=1", "training.seed=1"],
    "price of the input": ["controller.signal=recovery_gap", "controller.routing=ranked", "precision.low=int4"],
    "stochastic": [
        "precision.low=int4",
        "precision.recovery=int8",
        "precision.site=forward",
        "precision.rounding=stochastic",
    ],
    "delayed": ["precision.low=fp8_delayed", "precision.recovery=null", "fork.heal=0"],
    "gemms": ["precision.unit=gemm", "controller.routing=ranked", "controller.signal=random"],
    "pins": ["precision.pins.down_proj=[fprop]", "precision.recovery=null"],
    "warm-up": ["controller.warmup_frac=0.5", "controller.warmup_path=16bit", "optim.clip_norm=0.5"],
    "transform": ["optim.transform.name=zclip", "faults.kind=noise", "faults.windows=[[2,2]]"],
}


@pytest.fixture(scope="module")
def old(train, tmp_path_factory) -> Path:
    """A base of six steps of a schedule of twenty."""
    return train(tmp_path_factory.mktemp("fork") / "base", *BASE)


@pytest.fixture(scope="module")
def words(old: Path) -> list[str]:
    return [f"base={old}", *FORK]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "steps.jsonl")]


def phases(folder: Path) -> dict[str, tuple[float, float]]:
    return {row["phase"]: (row["val_loss"], row["val_loss_low"]) for row in read_jsonl(folder / "eval.jsonl")}


def told(result) -> dict[str, tuple[float, float]]:
    return {name: (found.high, found.low) for name, found in result.validation.items()}


def test_the_bases_own_arm_goes_on_as_the_base_would_have(tmp_path, train, old):
    """Weights, moments, place in the data, rate: to the last bit. Healing is what this arm does anyway."""
    longer = train(tmp_path / "longer", *BASE, "training.steps=12")
    fork = train(tmp_path / "fork", f"base={old}", *FORK, *STATIC)
    rows, want = (read_jsonl(folder / "steps.jsonl") for folder in (fork, longer))
    for key in ("loss", "lr", "grad_norm_pre_clip"):
        assert [row[key] for row in rows] == [row[key] for row in want[6:]]
    assert rows[0]["lr"] != want[0]["lr"]
    evals = read_jsonl(fork / "eval.jsonl")
    assert [(row["step"], row["phase"]) for row in evals] == [(0, "base"), (4, "low"), (6, "healed")]
    assert evals[0]["val_loss"] == evals[0]["val_loss_low"] == read_jsonl(old / "eval.jsonl")[-1]["val_loss"]
    assert evals[2]["val_loss"] == read_jsonl(longer / "eval.jsonl")[-1]["val_loss"]


@pytest.mark.parametrize("arm", [arm if arm == "random" else pytest.param(arm, marks=pytest.mark.slow) for arm in ARMS])
def test_a_fork_in_this_process_is_the_run_of_its_config(arm, tmp_path, tiny, train, words):
    """Whatever was forked before, each twice."""
    forks, configs = Forks(words[0].removeprefix("base=")), {name: tiny(*words, *more) for name, more in ARMS.items()}
    first = forks(configs[arm])
    other = forks(configs["stochastic" if arm == "gnmr" else "gnmr"])
    again = forks(configs[arm])
    assert first == again and first.losses != other.losses
    folder = train(tmp_path / "run", *words, *ARMS[arm])
    assert first.losses == losses(folder)
    assert told(first) == phases(folder)
    assert first.promotion_frac == pytest.approx(read_json(folder / "summary.json")["promotion_frac"], abs=1e-12)


@pytest.mark.slow
def test_two_forks_of_one_process_are_two_processes(tmp_path, tiny, words):
    forks = Forks(words[0].removeprefix("base="))
    found = [forks(tiny(*words, *ARMS[arm])).losses for arm in ("random", "gnmr")]
    for arm, want in zip(("random", "gnmr"), found, strict=True):
        config = tiny(*words, *ARMS[arm], f"run_dir={tmp_path / arm}")
        code = "import sys, json; from gnmr.lab.config import load; from gnmr.lab.train.run import run; "
        code += "run(load(json.loads(sys.argv[1])), lambda _: None)"
        subprocess.run([sys.executable, "-c", code, json.dumps(to_dict(config))], check=True, capture_output=True)
        assert losses(tmp_path / arm) == want


def test_a_base_is_read_once(tiny, words, monkeypatch):
    forks = Forks(words[0].removeprefix("base="))
    first = forks(tiny(*words), phases=("low",))
    assert list(first.validation) == ["low"]

    def refused(*_):
        raise AssertionError("reads the base again")

    for name in ("load_training", "find"):
        monkeypatch.setattr(base_module, name, refused)
    torch.manual_seed(99)  # the generators of this process are no part of a fork
    assert forks(tiny(*words), phases=("low",)) == first


def test_the_parts_can_be_changed_before_the_first_step(tiny, words):
    """One operator's recovery by hand, under a controller that chooses nothing."""
    forks, config = Forks(words[0].removeprefix("base=")), tiny(*words, "controller.signal=always_low")
    low = forks(config)
    changed = forks(config, prepare=lambda parts: parts.converted.operators[0].switch(True))
    assert low.losses[0] != changed.losses[0] and forks(config) == low
    assert low.validation["base"] == changed.validation["base"]


def test_orders_are_continuations_of_the_data(tiny, words):
    forks = Forks(words[0].removeprefix("base="))

    def seen(order: int) -> list[int]:
        parts = forks.parts(tiny(*words, f"fork.order={order}", f"training.seed={order}"))
        blocks = training_blocks(parts.config, parts.corpus, None, parts.branch)
        return blocks.take(40, 16)

    assert seen(1) == seen(1) and len({tuple(seen(order)) for order in range(3)}) == 3
    results = [forks(tiny(*words, *arm)) for arm in ([], STATIC)]
    assert results[0].losses[0] != results[1].losses[0], "the same batch on two paths"


@pytest.mark.slow
def test_the_last_steps_heal(tmp_path, train, words):
    """In 16 bits, with nothing routed, and counted in no share."""
    always = ["controller.signal=always_high", "controller.warmup_frac=1.0", "controller.max_o=7"]
    healed = train(tmp_path / "healed", *words, *always)
    rows = read_jsonl(healed / "steps.jsonl")
    assert [row["num_active"] for row in rows] == [7, 7, 7, 7, None, None]
    assert {row["step"] for row in read_ratios(healed).to_pylist()} == {1, 2, 3, 4}
    assert read_json(healed / "summary.json")["promotion_frac"] == 1
    low, high = (train(tmp_path / name, *words, *arm) for name, arm in (("low", []), ("16", STATIC)))
    assert losses(healed) == losses(high) and losses(low)[4:] != losses(high)[4:]
    longer = train(tmp_path / "longer", *words, "training.steps=6", "fork.heal=0")
    assert losses(longer)[:4] == losses(low)[:4] and losses(longer)[4] != losses(low)[4]
    assert losses(longer)[4] == pytest.approx(losses(low)[4], rel=0.01)


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(in_step(2), marks=pytest.mark.slow),
        pytest.param(in_step(4), marks=pytest.mark.slow),
        at_file("open", ".writing-step-00000006/.metadata"),
    ],
)
@pytest.mark.parametrize("arm", ["random", pytest.param("stochastic", marks=pytest.mark.slow)])
def test_a_killed_fork_continues_to_the_last_bit(hook, arm, tmp_path, train, words):
    """Before its first checkpoint, between two, and while it heals."""
    mine = [*words, *ARMS[arm]]
    want = everything(train(tmp_path / "want", *mine))

    def doomed() -> None:
        hook()
        train(tmp_path / "run", *mine)

    assert in_child(doomed) == -9
    assert differences(want, everything(train(tmp_path / "run", *mine))) == []


@pytest.mark.slow
def test_a_fork_stopped_while_it_heals(tmp_path, train, words, monkeypatch):
    """Its checkpoint of step 5 lies in the healing; the warm-up in 16 bits is over there."""
    mine = [*words, *ARMS["warm-up"], "training.checkpoint_every=1"]
    want = everything(train(tmp_path / "want", *mine))
    plain = Steps.__call__

    def stopped(self: Steps, step: int):
        if step == 6:
            raise KeyboardInterrupt
        return plain(self, step)

    monkeypatch.setattr(Steps, "__call__", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", *mine)
    monkeypatch.undo()
    assert differences(want, everything(train(tmp_path / "run", *mine))) == []


@pytest.mark.slow
def test_a_base_that_changed_is_told(tmp_path, train, words, old):
    base = tmp_path / "base"
    shutil.copytree(old, base)
    mine = [f"base={base}", *words[1:]]
    train(tmp_path / "run", *mine)
    (tmp_path / "run" / "DONE").unlink()
    shutil.rmtree(base / "checkpoints/step-00000006")
    with pytest.raises(UserError, match=r"base=.*: its checkpoint changed since the run began"):
        train(tmp_path / "run", *mine)


def test_a_bases_batch_may_be_cut_into_other_micro_batches(tiny, words):
    """Which several processes need: the tokens of a step are the same, and so are its losses but for rounding."""
    forks = Forks(words[0].removeprefix("base="))
    cuts = ["training.batch_size=2"], ["training.batch_size=1", "training.accumulation=2"]
    whole, cut = (forks(tiny(*words, *more)).losses for more in cuts)
    assert whole[0] == pytest.approx(cut[0], rel=1e-6) and whole == pytest.approx(cut, rel=1e-2)


def test_an_earlier_checkpoint_is_a_base_too(tiny, words, old):
    early = Forks(old / "checkpoints/step-00000003")
    assert (early.base.step, Forks(old).base.step) == (3, 6)
    assert early(tiny(*words)).losses != Forks(old)(tiny(*words)).losses


# ---- what is refused ----

REFUSED = {
    "model.hidden_size=64": r"model.hidden_size=64: the base .* has 32, and a fork goes on under the same",
    "optim.lr=0.5": r"optim.lr=0.5: the base .* has 0.001",
    "optim.schedule_steps=21": r"optim.schedule_steps=21: the base .* has 20",
    "training.batch_size=3": r"training.batch_size=3: the base .* has 2",
    "training.accumulation=2": r"training.accumulation=2: the base .* has 1",
    "training.dtype=float32": r"training.dtype=float32: the base .* has bfloat16",
    "data.vocab_size=290": r"data.vocab_size=290: the base .* has 300",
    "training.seed=3": r"training.seed=3: a fork draws by its order: leave it, or use 0",
    "fork.heal=-1": r"fork.heal=-1: must lie between 0 and 2\^62",
    "fork.order=-1": r"fork.order=-1: must lie between 0 and 2\^62",
    "base=nowhere": r"base=nowhere: is no run with a checkpoint \(config.yaml is missing there\)",
    "base=null": r"fork.heal=2: needs base=RUN",
    "base=''": r"base='': must be a path",
    "model.outlier_channels.window=[1,2]": r"model.outlier_channels.window=\[1, 2\]: a fork has none",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_forked(word, tmp_path, train, words):
    with pytest.raises(UserError, match=f"^{REFUSED[word]}") as refused:
        train(tmp_path / "run", *words, word)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_other_data_is_refused(tmp_path, train, words):
    other = tmp_path / "other.txt"
    other.write_text("another text, in other words; " * 2000)
    with pytest.raises(UserError, match=r"^data.path=.*other.txt: the base .* has .*babble.txt"):
        train(tmp_path / "run", *words, f"data.path={other}")


def damaged(folder: Path, kind: str) -> None:
    checkpoint = max((folder / "checkpoints").iterdir())
    if kind == "weights":
        file = checkpoint / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-7] + b"\0" * 7)
    elif kind == "link":
        moved = folder.parent / "meta.json"
        shutil.move(checkpoint / "meta.json", moved)
        (checkpoint / "meta.json").symlink_to(moved)
    elif kind == "config":
        (folder / "config.yaml").write_text("model: {hidden_size: ${oc.env:HOME}}")
    elif kind == "header":
        (folder / "header.json").write_text('{"data": 1}')
    elif kind == "fork":
        text = (folder / "config.yaml").read_text().replace("base: null", "base: elsewhere")
        (folder / "config.yaml").write_text(text)
    elif kind == "empty":
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize("kind", ["weights", "link", "config", "header", "fork", "empty"])
def test_a_damaged_base_is_one_line(kind, tmp_path, train, words, old):
    shutil.copytree(old, tmp_path / "base")
    for extra in sorted((tmp_path / "base/checkpoints").iterdir())[:-1]:
        shutil.rmtree(extra)
    damaged(tmp_path / "base", kind)
    with pytest.raises(UserError, match=r"^base=") as refused:
        train(tmp_path / "run", f"base={tmp_path / 'base'}", *words[1:])
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_the_hash_covers_base_and_healing_and_no_order(tiny, words):
    plain, config = tiny(), tiny(*words)
    seen = {config_hash(replace(config, base=other)) for other in ("a", "b")}
    seen |= {config_hash(config), config_hash(replace(config, fork=replace(config.fork, heal=3)))}
    assert len(seen) == 4
    assert config_hash(tiny(*words, "fork.order=2", "training.seed=2")) == config_hash(config)
    assert config_hash(plain) == config_hash(tiny("fork.heal=0", "optim.schedule_steps=null"))


# ---- the base that comes with the package ----

SHIPPED = place_of_base("shipped")[0]


def test_the_shipped_base_is_what_its_sums_say():
    lines = [line.split("  ") for line in (SHIPPED / "SHA256SUMS").read_text().splitlines()]
    named = {name: digest for digest, name in lines}
    files = {str(file.relative_to(SHIPPED)) for file in SHIPPED.rglob("*") if file.is_file()} - {"SHA256SUMS"}
    assert named == {name: sha256(SHIPPED / name) for name in files}
    assert sum((SHIPPED / name).stat().st_size for name in files) < 2_000_000
    header = read_json(SHIPPED / "header.json")
    assert "experiment=fork_base scale=fork_small" in header["command"] and "dirty" not in header["commit"]
    base = base_module.open_base("shipped")
    assert (base.step, base.schedule_steps, base.fingerprint) == (600, 1000, header["data"]["fingerprint"])


def test_another_checkpoint_in_its_place_is_refused(monkeypatch):
    monkeypatch.setattr(base_module, "SHIPPED_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"^base=shipped: .*is not the base that this version ships"):
        base_module.open_base("shipped")


def test_what_a_fork_takes_of_its_base():
    """Model, data, optimizer and batch, but for what is typed; an arm's own keys stay."""
    config = compose(["experiment=fork", "fork.order=2", "optim.clip_norm=1.0", "training.steps=7"])
    base = base_module.open_base("shipped")
    base.check(config)
    assert (config.model, config.training.seq_len, config.optim.lr) == (base.config.model, 256, 2e-3)
    assert (config.scale_name, config.optim.schedule_steps, config.optim.clip_norm) == ("fork_small", 1000, 1.0)
    assert (config.training.seed, config.training.steps, config.data.tokenizer) == (2, 7, None)
    typed = compose(["experiment=fork", "optim.lr=0.5"])
    assert typed.optim.lr == 0.5 and typed.optim.schedule_steps == 1000
    with pytest.raises(UserError, match=r"optim.lr=0.5: the base shipped has 0.002"):
        base.check(typed)


def test_a_bases_paths_are_not_followed(old, text_file):
    """Who forks somebody's base says himself which files are read."""
    with pytest.raises(UserError, match=r"^data.path=null: the base .* has .*babble.txt, which you have to give"):
        compose(["experiment=fork", f"base={old}"])
    config = compose(["experiment=fork", f"base={old}", f"data.path={text_file}"])
    base_module.open_base(str(old)).check(config)
    assert config.data.vocab_size == 300


@pytest.mark.slow
def test_the_shipped_base_is_forked_by_its_own_tokenizer(tmp_path):
    """On the library of this Python, whichever it is; a step costs what the model can."""
    said: list[str] = []
    forks = Forks(say=said.append)
    config = forks.config("training.steps=2", "training.eval_sequences=4", "training.threads=1", "precision.low=bf16")
    config = replace(config, precision=replace(config.precision, recovery=None))
    result = forks(config)
    assert 2.0 < result.losses[0] < 4.0, "it knows the tokens"
    assert 2.5 < result.validation["base"].high < 3.6


@pytest.mark.slow
def test_a_sweep_of_forks_says_how_long_resumes_and_is_reported(gnmr, tmp_path, old, text_file):
    words = [f"base={old}", f"data.path={text_file}", f"runs_dir={tmp_path / 'runs'}", "fork.order=0,1", "fork.heal=1"]
    words += ["training.steps=20", "training.eval_sequences=2", "training.threads=1", "records.live=off"]
    first = gnmr("train", "-m", "sweep=fork", "arm=never,always", *words)
    assert first.code == 0 and "4 cells, 0 done already, 84 of 84 steps to do: about 0:0" in first.out, first.err
    again = gnmr("train", "-m", "sweep=fork", "arm=never,always", *words)
    assert again.code == 0 and "4 cells, 4 done already, 0 of 84 steps to do" in again.out
    told = gnmr("report", str(tmp_path / "runs"), "--no-plots")
    written = (tmp_path / "runs/report/report.md").read_text()
    assert told.code == 0 and "gap closed after the arm's steps" in written and "after healing in 16 bits" in written
    assert {row["phase"] for run in (tmp_path / "runs/fork").iterdir() for row in read_jsonl(run / "eval.jsonl")} == {
        *("base", "low", "healed"),
    }
