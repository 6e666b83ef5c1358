"""Forks: runs that go on from the checkpoint of another one."""

from __future__ import annotations

import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from everything import differences, everything, in_child, losses
from test_kill_and_resume import at_file, in_step

from gnmr.errors import UserError
from gnmr.lab.config.compose import compose, place_of_base
from gnmr.lab.train import fork_base as base_module
from gnmr.lab.train.build import training_blocks
from gnmr.records.disk import sha256
from gnmr.records.reader import read_json, read_jsonl, read_units

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
Forks = pytest.importorskip("forks").Forks

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
    "random": ["controller.signal=random", "controller.options.active_frac=0.3", "training.seed=1"],
    "price of the input": ["controller.signal=recovery_gap", "controller.routing=ranked", "precision.low=int4"],
    "stochastic": [
        "precision.low=int4",
        "precision.recovery=int8",
        "precision.site=forward",
        "precision.rounding=stochastic",
    ],
    "resets": ["optim.transform.name=stable_spam", "optim.transform.options.reset_every=3"],
    "saved": ["precision.low=int4", "precision.recovery=int8"],
    "warm-up": ["controller.warmup_frac=0.5", "controller.warmup_path=16bit", "optim.clip_norm=0.5"],
    "transform": ["optim.transform.name=agc", "faults.kind=noise", "faults.windows=[[2,2]]"],
}


@pytest.fixture(scope="module")
def old(train, tmp_path_factory) -> Path:
    """A base of six steps of a schedule of twenty."""
    return train(tmp_path_factory.mktemp("fork") / "base", *BASE)


@pytest.fixture(scope="module")
def words(old: Path) -> list[str]:
    return [f"base={old}", *FORK]


@pytest.fixture(scope="module")
def forks(old: Path) -> Forks:
    return Forks(old)


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
def test_a_fork_in_this_process_is_the_run_of_its_config(arm, tmp_path, tiny, train, words, forks):
    """Whatever was forked before, each twice."""
    configs = {name: tiny(*words, *more) for name, more in ARMS.items() if name in (arm, "gnmr", "stochastic")}
    first = forks(configs[arm])
    other = forks(configs["stochastic" if arm == "gnmr" else "gnmr"])
    again = forks(configs[arm])
    assert first == again and first.losses != other.losses
    folder = train(tmp_path / "run", *words, *ARMS[arm])
    assert first.losses == losses(folder)
    assert told(first) == phases(folder)
    shares = first.promotion_frac, first.spent, first.extra_time
    summary = read_json(folder / "summary.json")
    keys = ("promotion_frac", "spent_gemm_frac", "spent_extra_time")
    assert shares == pytest.approx([summary[key] for key in keys], abs=1e-12)


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


def test_the_parts_can_be_changed_before_the_first_step(tiny, words, forks):
    """One operator's recovery by hand, under a controller that chooses nothing."""
    config = tiny(*words, "controller.signal=always_low")
    low = forks(config)
    changed = forks(config, prepare=lambda parts: parts.converted.operators[0].switch(True))
    assert low.losses[0] != changed.losses[0] and forks(config) == low
    assert low.validation["base"] == changed.validation["base"]


def test_orders_are_continuations_of_the_data(tiny, words, forks):
    def seen(order: int) -> list[int]:
        parts = forks.parts(tiny(*words, f"training.seed={order}"))
        blocks = training_blocks(parts.config, parts.corpus, parts.branch)
        return blocks.take(40, 16)

    of = [seen(order) for order in range(3)]
    assert of[1] == seen(1) and len(set(map(tuple, of))) == 3


@pytest.mark.slow
def test_the_last_steps_heal(tmp_path, train, words):
    """In 16 bits, with nothing routed, and counted in no share."""
    always = ["controller.signal=always_high", "controller.warmup_frac=1.0", "controller.max_o=7"]
    healed = train(tmp_path / "healed", *words, *always)
    rows = read_jsonl(healed / "steps.jsonl")
    assert [row["num_active"] for row in rows] == [7, 7, 7, 7, None, None]
    assert {row["step"] for row in read_units(healed).to_pylist()} == {1, 2, 3, 4}
    assert read_json(healed / "summary.json")["promotion_frac"] == 1
    kept = [row["saved_bytes"] for row in rows]
    assert None not in kept[:4] and kept[4:] == [None, None]
    assert read_json(healed / "summary.json")["saved_bytes_mean"] == sum(kept[:4]) / 4
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
        pytest.param(at_file("open", ".writing-step-00000008/.metadata"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arm", ["random", "saved", "resets", pytest.param("stochastic", marks=pytest.mark.slow)])
def test_a_killed_fork_continues_to_the_last_bit(hook, arm, tmp_path, train, words):
    """Before its first checkpoint, between two, and while it heals."""
    mine = [*words, "fork.heal=4", *ARMS[arm]]
    want = everything(train(tmp_path / "want", *mine))

    def doomed() -> None:
        hook()
        train(tmp_path / "run", *mine)

    assert in_child(doomed) == -9
    assert differences(want, everything(train(tmp_path / "run", *mine))) == []


def test_a_base_that_changed_is_told(tmp_path, train, words, old):
    """Whether the fork is done or has only begun."""
    base = tmp_path / "base"
    shutil.copytree(old, base)
    mine = [f"base={base}", *words[1:]]
    done = train(tmp_path / "run", *mine) / "DONE"
    shutil.rmtree(base / "checkpoints/step-00000006")
    for begun in (done.exists, done.unlink):
        begun()
        with pytest.raises(UserError, match=r"^base=.*: its checkpoint changed since the run in"):
            train(tmp_path / "run", *mine)


def test_a_base_whose_newest_checkpoint_is_damaged_has_not_changed(tmp_path, train, words, old):
    """A fork takes the one before, and the same command finds it done."""
    base, said = tmp_path / "base", list[str]()
    shutil.copytree(old, base)
    (base / "checkpoints/step-00000006/__0_0.distcp").unlink()
    mine = [f"base={base}", *words[1:]]
    with pytest.warns(UserWarning, match="step-00000006 is corrupt .*: step 3 is taken"):
        train(tmp_path / "run", *mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path / "run", *mine, say=said.append)
    assert said == [f"{tmp_path / 'run'} is done: skipped"]


def test_a_bases_batch_may_be_cut_into_other_micro_batches(tiny, words, forks):
    """Which several processes need: the tokens of a step are the same, and so are its losses but for rounding."""
    cuts = ["training.batch_size=2"], ["training.batch_size=1", "training.accumulation=2"]
    whole, cut = (forks(tiny(*words, *more)).losses for more in cuts)
    assert whole[0] == pytest.approx(cut[0], rel=1e-6) and whole == pytest.approx(cut, rel=1e-2)


def test_an_earlier_checkpoint_is_a_base_too(tiny, words, old, forks):
    early, config = Forks(old / "checkpoints/step-00000003"), tiny(*words)
    assert (early.base.step, forks.base.step) == (3, 6)
    assert early(config, phases=("low",)).losses != forks(config, phases=("low",)).losses


# ---- what is refused ----

REFUSED = [
    *("model.hidden_size=64", "optim.schedule_steps=21", "training.accumulation=2", "training.dtype=float32"),
    *("fork.heal=-1", "base=nowhere"),
]


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_forked(word, tmp_path, train, words):
    with pytest.raises(UserError, match=f"^{word}: ") as refused:
        train(tmp_path / "run", *words, word)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


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
    config = compose(["experiment=fork", "training.seed=2", "optim.clip_norm=1.0", "training.steps=7"])
    base = base_module.open_base("shipped")
    base.check(config)
    assert (config.model, config.training.seq_len, config.optim.lr) == (base.config.model, 256, 2e-3)
    assert (config.scale_name, config.optim.schedule_steps, config.optim.clip_norm) == ("fork_small", 1000, 1.0)
    assert (config.training.seed, config.training.steps, config.data.tokenizer) == (2, 7, None)
    typed = compose(["experiment=fork", "optim.lr=0.5"])
    assert typed.optim.lr == 0.5 and typed.optim.schedule_steps == 1000
    with pytest.raises(UserError, match=r"optim.lr=0.5: the base shipped has 0.002"):
        base.check(typed)


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


def link(folder: Path) -> None:
    checkpoint = max((folder / "checkpoints").iterdir())
    shutil.move(checkpoint / "meta.json", folder.parent / "meta.json")
    (checkpoint / "meta.json").symlink_to(folder.parent / "meta.json")


def spoil(folder: Path) -> None:
    file = max((folder / "checkpoints").iterdir()) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-7] + b"\0" * 7)


DAMAGE = {
    "weights": spoil,
    "link": link,
    "config": lambda folder: (folder / "config.yaml").write_text("model: {hidden_size: ${oc.env:HOME}}"),
    "header": lambda folder: (folder / "header.json").write_text('{"data": 1}'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_base_is_one_line(kind, tmp_path, train, words, old):
    shutil.copytree(old, tmp_path / "base")
    for extra in sorted((tmp_path / "base/checkpoints").iterdir())[:-1]:
        shutil.rmtree(extra)
    DAMAGE[kind](tmp_path / "base")
    with pytest.raises(UserError, match=r"^base=") as refused:
        train(tmp_path / "run", f"base={tmp_path / 'base'}", *words[1:])
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()
