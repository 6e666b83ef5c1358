"""`gnmr train` in two processes: what it leaves is what one process leaves, and either goes on with the other's."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gnmr.distributed import shards, world
from gnmr.distributed.world import ALONE
from gnmr.errors import UserError
from gnmr.lab.config import Config
from gnmr.records.reader import read_json, read_jsonl

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from everything import differences, everything

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
WORDS = ("training.accumulation=2", "training.batch_size=1", "records.check_every=4")
SLOW = pytest.mark.slow


def left(folder: Path) -> dict[str, Any]:
    found = everything(folder)
    for row in found["steps"]:
        del row["slowest_rank"], row["weights_digest"]
    return found


def digested(folder: Path, alone: dict[str, Any]) -> None:
    """The digests of the run's weights were taken in time, and the last is that of one process."""
    found = {row["step"]: row["weights_digest"] for row in read_jsonl(folder / "steps.jsonl") if row["weights_digest"]}
    assert found.keys() == {4, 8} and found[4] != found[8]
    assert found[8] == shards.digest(alone["state"]["model"], ALONE, 8)


@pytest.fixture(scope="module")
def alone(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return left(train(tmp_path_factory.mktemp("alone") / "run", *WORDS))


def test_a_run_of_two_ranks_leaves_what_one_process_leaves(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], alone: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny(f"run_dir={tmp_path / 'run'}", *WORDS)
    said, other = pair("train", config=config, parallel="ddp", slow=1)
    assert isinstance(said, list) and isinstance(other, list), (said, other)
    assert any("verdicts: none in several processes" in line for line in said)
    assert differences(alone, left(tmp_path / "run")) == []
    assert read_json(tmp_path / "run" / "header.json")["world"] == {"processes": 2, "parallel": "ddp"}
    digested(tmp_path / "run", alone)
    slowest = [row["slowest_rank"] for row in read_jsonl(tmp_path / "run" / "steps.jsonl")]
    assert slowest[3:6].count(1) >= 2, slowest  # on a machine with much else to do one may be another's


def test_shards_leave_the_same_weights_and_sets(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], alone: dict[str, Any], tmp_path: Path
) -> None:
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *WORDS), parallel="fsdp")
    assert isinstance(told[0], list), told
    found = left(tmp_path / "run")
    assert differences(alone["state"]["model"], found["state"]["model"]) == []
    assert differences(alone["state"]["optimizer"], found["state"]["optimizer"]) == []
    digested(tmp_path / "run", alone)
    assert [row["num_active"] for row in found["steps"]] == [row["num_active"] for row in alone["steps"]]
    assert [row["unit"] for row in found["events"]] == [row["unit"] for row in alone["events"]]
    for ours, theirs in zip(found["steps"], alone["steps"], strict=True):
        assert ours["grad_norm_pre_clip"] == pytest.approx(theirs["grad_norm_pre_clip"], rel=1e-6)
    assert [row["val_loss"] for row in found["eval"]] == pytest.approx(
        [row["val_loss"] for row in alone["eval"]], rel=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("ddp", "none"), ("fsdp", "none", "fsdp")], ids="-".join)
def test_a_run_goes_on_with_another_number_of_processes(
    pair: Callable[..., list[Any]],
    tiny: Callable[..., Config],
    train: Callable[..., Path],
    alone: dict[str, Any],
    tmp_path: Path,
    ways: tuple[str, ...],
) -> None:
    folder = tmp_path / "run"
    config = tiny(f"run_dir={folder}", *WORDS)
    for way in ways[:-1]:
        if way == "none":
            train(folder, *WORDS)
            cut_off(folder)
        else:
            assert pair("train", config=config, parallel=way, stop=5) == [128 + signal.SIGTERM] * 2
            assert read_jsonl(folder / "steps.jsonl")[-1]["step"] == 5, "both end behind the step in which one got it"
    if ways[-1] == "none":
        train(folder, *WORDS)
    else:
        assert isinstance(pair("train", config=config, parallel=ways[-1])[0], list)
    found = left(folder)
    assert differences(alone["state"]["model"], found["state"]["model"]) == []
    assert differences(alone["state"]["optimizer"], found["state"]["optimizer"]) == []
    assert [row["loss"] for row in found["steps"]] == [row["loss"] for row in alone["steps"]]
    assert [row["unit"] for row in found["events"]] == [row["unit"] for row in alone["events"]]


def cut_off(folder: Path) -> None:
    """Leaves a run of 8 steps as one that was killed behind its checkpoint of step 6."""
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (folder / "DONE").unlink()


@pytest.mark.slow
def test_delayed_scales_go_on_with_another_number_of_processes(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    """Gradients of two ranks are twice as large as those of one process, what is remembered of them is not."""
    words = [*WORDS, "precision.low=fp8_delayed", "precision.recovery=bf16", "precision.backend=simulated"]
    alone = left(train(tmp_path / "one", *words))
    assert pair("train", config=tiny(f"run_dir={tmp_path / 'two'}", *words), parallel="ddp", stop=5)[0] == 143
    train(tmp_path / "two", *words)
    cut_off(tmp_path / "one")
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'one'}", *words), parallel="fsdp")
    assert isinstance(told[0], list), told
    for found in (left(tmp_path / "two"), left(tmp_path / "one")):
        assert found["state"]["plan"]["largest"][:, 2].any()
        for part in ("model", "optimizer", "plan"):
            assert differences(alone["state"][part], found["state"][part]) == []
        assert [row["loss"] for row in found["steps"]] == [row["loss"] for row in alone["steps"]]
        assert [row["saturation"] for row in found["steps"]] == [row["saturation"] for row in alone["steps"]]


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=SLOW)])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], tmp_path: Path, parallel: str
) -> None:
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *WORDS), parallel=parallel, nan=4)
    assert isinstance(told[0], list), told
    steps = read_jsonl(tmp_path / "run" / "steps.jsonl")
    assert [row["skipped"] for row in steps] == [row["step"] == 4 for row in steps]
    assert steps[3]["nonfinite_unit"] == "embed_tokens"
    assert steps[4]["num_active"] == steps[3]["num_active"]


FAULTS = {
    "bit_flip": ["faults.kind=bit_flip", "faults.windows=[[2,3]]", "precision.low=sim_e2m1", "precision.recovery=bf16"],
    "stale_scale": ["faults.kind=stale_scale", "faults.windows=[[4,4]]", "faults.targets=[up_proj]"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "parallel"), [("bit_flip", "ddp"), ("stale_scale", "fsdp")])
def test_faults_hit_what_they_hit_in_one_process(
    pair: Callable[..., list[Any]],
    tiny: Callable[..., Config],
    train: Callable[..., Path],
    tmp_path: Path,
    fault: str,
    parallel: str,
) -> None:
    words = [*WORDS, *FAULTS[fault]]
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel=parallel)
    assert isinstance(told[0], list), told
    one, two = left(train(tmp_path / "one", *words)), left(tmp_path / "run")
    sound = left(train(tmp_path / "sound", *WORDS, *(w for w in words if w.startswith("precision."))))
    for part in ("model", "optimizer", "extras"):  # extras: what stale_scale remembers
        assert differences(one["state"].get(part), two["state"].get(part)) == []
    assert [row["loss"] for row in one["steps"]] == [row["loss"] for row in two["steps"]]
    assert differences(one["state"]["model"], sound["state"]["model"]) != [], "the fault did something"
    rows = [read_jsonl(tmp_path / name / "faults.jsonl") for name in ("one", "run")]
    assert rows[0] == rows[1] != []


@pytest.mark.slow
def test_forks_in_several_processes_of_a_base_that_several_began(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    old = tmp_path / "base"
    static = ["precision.low=bf16", "precision.recovery=null", "optim.schedule_steps=20", "training.steps=4", *WORDS]
    assert isinstance(pair("train", config=tiny(f"run_dir={old}", *static), parallel="fsdp")[0], list)
    arm = [
        f"base={old}",
        "training.steps=4",
        "fork.heal=2",
        "precision.low=sim_e2m1",
        "precision.recovery=bf16",
        *WORDS,
    ]
    arm += ["controller.alpha=1.02", "optim.schedule_steps=20"]
    alone = left(train(tmp_path / "alone", *arm))
    assert [row["phase"] for row in alone["eval"]] == ["base", "low", "healed"]
    for parallel in ("ddp", "fsdp"):
        told = pair("train", config=tiny(f"run_dir={tmp_path / parallel}", *arm), parallel=parallel)
        assert isinstance(told[0], list), told
        found = left(tmp_path / parallel)
        for part in ("model", "optimizer"):
            assert differences(alone["state"][part], found["state"][part]) == []
        assert [row["loss"] for row in found["steps"]] == [row["loss"] for row in alone["steps"]]
        for key in ("val_loss", "val_loss_low"):
            want = [row[key] for row in alone["eval"]]
            assert [row[key] for row in found["eval"]] == pytest.approx(want, rel=1e-12)


RANDOM = {
    "rounding, forward": ["precision.site=forward", "precision.rounding=stochastic"],
    "nvfp4": ["precision.low=nvfp4", "precision.recovery=bf16", "precision.backend=simulated"],
    "dropout": ["precision.low=sim_int8", "precision.recovery=bf16", "controller.observe=adapter"],
}


@pytest.mark.parametrize(
    ("what", "parallel"),
    [
        ("rounding, forward", "ddp"),
        *(pytest.param(*case, marks=SLOW) for case in (("nvfp4", "fsdp"), ("dropout", "ddp"))),
    ],
)
def test_random_numbers_are_those_of_a_micro_batch_whoever_has_it(
    pair: Callable[..., list[Any]],
    tiny: Callable[..., Config],
    train: Callable[..., Path],
    tmp_path: Path,
    numbered: list[str],
    what: str,
    parallel: str,
) -> None:
    """One process in parallel=ddp draws as two do. The dropout of parallel=none draws in turn, and so others."""
    words = [*WORDS, *RANDOM[what], "training.steps=4"]
    if what == "dropout":
        old = train(tmp_path / "old", "training.steps=1", "training.export_hf=true")
        words += ["model.name=pretrained", f"model.checkpoint={old / 'hf'}", "model.adapter.rank=2"]
        words += ["model.adapter.dropout=0.3", "optim.lr=0.01"]
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel=parallel)
    assert isinstance(told[0], list), told
    two, one = left(tmp_path / "run"), left(train(tmp_path / "one", *words, *numbered))
    for part in ("model", "optimizer", "plan", "rng"):
        assert differences(one["state"][part], two["state"][part]) == []
    assert [row["loss"] for row in one["steps"]] == [row["loss"] for row in two["steps"]]
    in_turn = left(train(tmp_path / "none", *words))
    assert (differences(in_turn["state"]["model"], two["state"]["model"]) != []) == (what == "dropout")


def test_weights_that_went_apart_end_the_run_on_all_ranks(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], tmp_path: Path
) -> None:
    line = "ranks disagree after step 4: lm_head.weight of rank 1 is not that of rank 0; continue from a checkpoint"
    for told in pair("nudged", config=tiny(f"run_dir={tmp_path / 'run'}", *WORDS, "training.checkpoint_every=2")):
        assert told.startswith(f"RunFailed: {line}")
    assert (tmp_path / "run" / "FAILED").read_text().startswith(line)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"], "none of step 4"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "parallel"), [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")])
def test_experts_without_tokens_on_a_rank_or_on_all(
    pair: Callable[..., list[Any]],
    tiny: Callable[..., Config],
    train: Callable[..., Path],
    tmp_path: Path,
    number: int,
    parallel: str,
) -> None:
    """Of 20 experts some have tokens on one rank alone, some on none; with 4 micro-batches in one before the last."""
    words = ["model.name=moe", "model.experts.number=20", "training.batch_size=1", f"training.accumulation={number}"]
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel=parallel)
    assert isinstance(told[0], list), told
    one, two = left(train(tmp_path / "one", *words)), left(tmp_path / "run")
    observed = [
        {(row["step"], row["unit"]) for row in found["ratios"] if row["norm"] is not None} for found in (one, two)
    ]
    units = read_json(tmp_path / "one" / "header.json")["units"]
    assert len(units) < len(observed[0]) < len(units) * 8
    if number == 2:  # saved bytes are of a rank's own micro-batches, in which other experts have tokens
        assert observed[0] == observed[1]
        for part in ("model", "optimizer", "plan", "rng"):
            assert differences(one["state"][part], two["state"][part]) == []
        for key in ("loss", "num_active", "statistics"):
            assert [row[key] for row in one["steps"]] == [row[key] for row in two["steps"]]
        if parallel == "ddp":  # else norms are sums over shards
            for part in ("state", "ratios", "events", "eval"):
                assert differences(one[part], two[part]) == []
            key = "grad_norm_pre_clip"
            assert [row[key] for row in one["steps"]] == [row[key] for row in two["steps"]]
    else:
        first = [{unit for step, unit in seen if step == 1} for seen in observed]
        assert first[0] == first[1]
        assert [row["loss"] for row in one["steps"]] == pytest.approx([row["loss"] for row in two["steps"]], rel=1e-2)


@pytest.mark.slow
def test_every_rank_scores_and_the_first_records(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    tasks = pytest.importorskip("lm_eval.tasks")
    (tmp_path / "tasks").mkdir()
    page, rows = " \n = Town = \n \n The town is a town . \n = = History = = \n" * 6, tmp_path / "tasks" / "rows.jsonl"
    rows.write_text("".join(json.dumps({"page": page + str(i)}) + "\n" for i in range(3)))
    own = {"include": str(Path(tasks.__file__).parent / "wikitext" / "wikitext.yaml"), "dataset_path": "json"}
    own |= {"training_split": None, "validation_split": None, "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    (tmp_path / "tasks" / "wikitext.yaml").write_text(json.dumps(own | {"dataset_name": None}))
    words = [*WORDS, "scores.tasks=[wikitext2]", f"scores.data={tmp_path / 'tasks'}", "scores.every=4"]
    words += ["training.seq_len=64", "training.steps=5"]
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel="fsdp")
    assert isinstance(told[0], list), told
    scores = [read_jsonl(folder / "scores.jsonl") for folder in (train(tmp_path / "one", *words), tmp_path / "run")]
    assert [row["step"] for row in scores[1]] == [4, 5]
    one, two = ([row["tasks"]["wikitext2"]["metrics"] for row in rows] for rows in scores)
    assert one == two and one[0] != one[1]


MISTAKES = [
    (["training.accumulation=1"], "ddp", "training.accumulation=1: 2 processes need a micro-batch of a step each"),
    (["training.accumulation=3"], "fsdp", "training.accumulation=3: under parallel=fsdp it must be a multiple of"),
    ([*WORDS], "hsdp", "parallel=hsdp: needs an even number of processes, 4 or more, here are 2; use fsdp"),
    ([*WORDS], "none", "parallel=none: here are 2 processes; use parallel=ddp, fsdp or hsdp"),
    ([*WORDS, "controller.signal=gsnr"], "fsdp", "controller: micro_square: needs each micro-batch's own gradient"),
]


@pytest.mark.parametrize(("words", "parallel", "line"), MISTAKES, ids=[line.partition(":")[0] for *_, line in MISTAKES])
def test_what_two_processes_cannot_do_is_refused_in_one_line(
    pair: Callable[..., list[Any]],
    tiny: Callable[..., Config],
    tmp_path: Path,
    words: list[str],
    parallel: str,
    line: str,
) -> None:
    for told in pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel=parallel):
        assert told.startswith(f"UserError: {line}") and "\n" not in told
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_settings_or_data_are_told(
    pair: Callable[..., list[Any]], tiny: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny(f"run_dir={tmp_path / 'run'}", *WORDS)
    for told in pair("train", config=config, parallel="ddp", other_seed=True):
        assert told.startswith("UserError: the config's hash is ") and "in rank 1: start all of them alike" in told
    (other := tmp_path / "other.txt").write_text(Path(str(config.data.path)).read_text() + "\nand more")
    for told in pair("train", config=config, parallel="ddp", other_data=str(other)):
        assert told.startswith("UserError: the fingerprint of the data is ") and "in rank 1: start all of" in told
    assert not (tmp_path / "run").exists()


def test_an_address_in_use_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as error, world.joined(cuda=False):
            pass
    line = str(error.value)
    assert line.startswith(f"2 processes do not find each other at localhost:{port} (") and "\n" not in line
    assert line.endswith("): use a free port")


def test_several_processes_have_to_be_started(gnmr: Callable[..., Any], tiny_words: list[str]) -> None:
    told = gnmr("train", *tiny_words, "parallel=fsdp").mistake
    assert told.startswith("parallel=fsdp: needs several processes: torchrun --nproc-per-node N -m gnmr train ...")
    told = gnmr("train", *tiny_words, "parallel=both").mistake
    assert told.startswith("parallel=both: must be one of none, ddp, fsdp, hsdp")
