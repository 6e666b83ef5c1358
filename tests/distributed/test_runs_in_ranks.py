"""`gnmr train` in two processes: what it leaves is what one process leaves, and either goes on with the other's."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from everything import SHARDED, differences, everything

from gnmr.attachment.ranks import reduce, world
from gnmr.attachment.ranks.world import ALONE
from gnmr.errors import UserError
from gnmr.records.reader import read_json, read_jsonl

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
WORDS = ("training.accumulation=2", "training.batch_size=1", "training.checkpoint_every=4")
SLOW = pytest.mark.slow
STOPPED = [128 + signal.SIGTERM] * 2


def left(folder: Path) -> dict:
    return everything(folder, "slowest_rank", "weights_digest")


def same(one: dict, two: dict, *parts: str, steps: tuple[str, ...] = ("loss",), parallel: str = "ddp") -> None:
    """These parts of the state, these fields of the steps and the events are equal, in shards but for sums."""
    sums = SHARDED if parallel == "fsdp" else {}
    for part in parts:
        assert differences(one["state"].get(part), two["state"].get(part), **sums) == [], part
    for key in steps:
        assert differences([row[key] for row in one["steps"]], [row[key] for row in two["steps"]], **sums) == [], key
    assert [row["unit"] for row in one["events"]] == [row["unit"] for row in two["events"]]


def digested(folder: Path, run: dict) -> None:
    """The digests of the run's weights were taken in time, and the last is that of its weights in one process."""
    found = {row["step"]: row["weights_digest"] for row in read_jsonl(folder / "steps.jsonl") if row["weights_digest"]}
    assert found.keys() == {4, 8} and found[4] != found[8]
    assert found[8] == reduce.digest(run["state"]["model"], ALONE, 8)


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory) -> dict:
    return left(train(tmp_path_factory.mktemp("alone") / "run", *WORDS))


def test_a_run_of_two_ranks_leaves_what_one_process_leaves(ranks, alone):
    folder = ranks(WORDS, "ddp", slow=1)
    assert differences(alone, left(folder)) == []
    assert read_json(folder / "header.json")["world"] == {"processes": 2, "parallel": "ddp"}
    digested(folder, alone)
    slowest = [row["slowest_rank"] for row in read_jsonl(folder / "steps.jsonl")]
    assert slowest[3:6] == [1, 1, 1]


def test_shards_leave_the_same_weights_and_sets(ranks, alone):
    folder = ranks(WORDS, "fsdp")
    found = left(folder)
    same(alone, found, "model", "optimizer", steps=("num_active",), parallel="fsdp")
    digested(folder, found)
    for part, key in (("steps", "grad_norm_pre_clip"), ("eval", "val_loss")):
        assert differences([row[key] for row in found[part]], [row[key] for row in alone[part]], **SHARDED) == []


def cut_off(folder: Path) -> None:
    """Leave a run of 8 steps as one that was killed behind its checkpoint of step 4."""
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (folder / "DONE").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("ddp", "none"), ("fsdp", "none", "fsdp")], ids="-".join)
def test_a_run_goes_on_with_another_number_of_processes(told, ranks, train, alone, tmp_path, ways):
    folder = tmp_path / "run"
    for way in ways[:-1]:
        if way == "none":
            train(folder, *WORDS)
            cut_off(folder)
        else:
            assert told(WORDS, way, stop=5) == STOPPED
            assert read_jsonl(folder / "steps.jsonl")[-1]["step"] == 5, "both end behind the step in which one got it"
    train(folder, *WORDS) if ways[-1] == "none" else ranks(WORDS, ways[-1])
    same(alone, left(folder), "model", "optimizer", parallel=ways[0])


@pytest.mark.slow
def test_delayed_scales_go_on_with_another_number_of_processes(told, ranks, train, tmp_path):
    """Gradients of two ranks are twice as large as those of one process, what is remembered of them is not."""
    words = [*WORDS, "precision.low=fp8_delayed", "precision.recovery=bf16", "precision.backend=simulated"]
    alone = left(train(tmp_path / "one", *words))
    assert told(words, "ddp", "two", stop=5) == STOPPED
    train(tmp_path / "two", *words)
    cut_off(tmp_path / "one")
    for parallel, found in (("ddp", left(tmp_path / "two")), ("fsdp", left(ranks(words, "fsdp", "one")))):
        assert found["state"]["plan"]["largest"][:, 2].any()
        same(alone, found, "model", "optimizer", "plan", steps=("loss", "saturation"), parallel=parallel)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=SLOW)])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(ranks, parallel):
    steps = read_jsonl(ranks(WORDS, parallel, nan=4) / "steps.jsonl")
    assert [row["skipped"] for row in steps] == [row["step"] == 4 for row in steps]
    assert steps[3]["nonfinite_unit"] == "embed_tokens"
    assert steps[4]["num_active"] == steps[3]["num_active"]


FAULTS = {
    "bit_flip": ["faults.kind=bit_flip", "faults.windows=[[2,3]]", "precision.low=sim_e2m1", "precision.recovery=bf16"],
    "stale_scale": ["faults.kind=stale_scale", "faults.windows=[[4,4]]", "faults.targets=[up_proj]"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "parallel"), [("bit_flip", "ddp"), ("stale_scale", "fsdp")])
def test_faults_hit_what_they_hit_in_one_process(ranks, train, tmp_path, fault, parallel):
    words = [*WORDS, *FAULTS[fault]]
    one, two = left(train(tmp_path / "one", *words)), left(ranks(words, parallel))
    same(one, two, "model", "optimizer", "extras", parallel=parallel)  # extras: what stale_scale remembers
    sound = left(train(tmp_path / "sound", *WORDS, *(w for w in words if w.startswith("precision."))))
    assert differences(one["state"]["optimizer"], sound["state"]["optimizer"], **SHARDED) != [], "it did something"
    rows = [read_jsonl(tmp_path / name / "faults.jsonl") for name in ("one", "run")]
    assert rows[0] == rows[1] != []


@pytest.mark.slow
def test_forks_in_several_processes_of_a_base_that_several_began(ranks, train, tmp_path):
    static = ["precision.low=bf16", "precision.recovery=null", "optim.schedule_steps=20", "training.steps=4", *WORDS]
    arm = [f"base={ranks(static, 'fsdp', 'base')}", "training.steps=4", "fork.heal=2", *WORDS]
    arm += ["precision.low=sim_e2m1", "precision.recovery=bf16", "controller.alpha=1.02", "optim.schedule_steps=20"]
    alone = left(train(tmp_path / "alone", *arm))
    assert [row["phase"] for row in alone["eval"]] == ["base", "low", "healed"]
    for parallel in ("ddp", "fsdp"):
        found = left(ranks(arm, parallel, parallel))
        same(alone, found, "model", "optimizer", parallel=parallel)
        for key in ("val_loss", "val_loss_low"):
            assert (
                differences([row[key] for row in found["eval"]], [row[key] for row in alone["eval"]], **SHARDED) == []
            )


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
def test_random_numbers_are_those_of_a_micro_batch_whoever_has_it(ranks, train, tmp_path, numbered, what, parallel):
    """One process in parallel=ddp draws as two do. The dropout of parallel=none draws in turn, and so others."""
    words = [*WORDS, *RANDOM[what], "training.steps=4"]
    if what == "dropout":
        old = train(tmp_path / "old", "training.steps=1", "training.export_hf=true")
        words += ["model.name=pretrained", f"model.checkpoint={old / 'hf'}", "model.adapter.rank=2"]
        words += ["model.adapter.dropout=0.3", "optim.lr=0.01"]
    two, one = left(ranks(words, parallel)), left(train(tmp_path / "one", *words, *numbered))
    same(one, two, "model", "optimizer", "plan", "rng", parallel=parallel)
    in_turn = left(train(tmp_path / "none", *words))
    sums = SHARDED if parallel == "fsdp" else {}
    assert (differences(in_turn["state"]["model"], two["state"]["model"], **sums) != []) == (what == "dropout")


def test_weights_that_went_apart_end_the_run_on_all_ranks(told, tmp_path):
    line = "ranks disagree after step 4: lm_head.weight of rank 1 is not that of rank 0"
    for answer in told([*WORDS, "training.checkpoint_every=2"], "ddp", nudged=3):
        assert answer.startswith(f"RunFailed: {line}")
    assert (tmp_path / "run" / "FAILED").read_text().startswith(line)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"], "none of step 4"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "parallel"), [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")])
def test_experts_without_tokens_on_a_rank_or_on_all(ranks, train, tmp_path, number, parallel):
    """Of 20 experts some have tokens on one rank alone, some on none; with 4 micro-batches in one before the last."""
    words = ["model.name=moe", "model.experts.number=20", "training.batch_size=1", f"training.accumulation={number}"]
    two, one = left(ranks(words, parallel)), left(train(tmp_path / "one", *words))
    observed = [
        {(row["step"], row["unit"]) for row in found["units"] if row["norm"] is not None} for found in (one, two)
    ]
    units = read_json(tmp_path / "one" / "header.json")["units"]
    assert len(units) < len(observed[0]) < len(units) * 8
    if number == 2:  # saved bytes are of a rank's own micro-batches, in which other experts have tokens
        assert observed[0] == observed[1]
        same(
            one, two, "model", "optimizer", "plan", "rng", steps=("loss", "num_active", "statistics"), parallel=parallel
        )
        if parallel == "ddp":  # else norms are sums over shards
            for part in ("state", "units", "events", "eval"):
                assert differences(one[part], two[part]) == []
    else:
        first = [{unit for step, unit in seen if step == 1} for seen in observed]
        assert first[0] == first[1]
        assert [row["loss"] for row in one["steps"]] == pytest.approx([row["loss"] for row in two["steps"]], rel=1e-2)


@pytest.mark.slow
def test_every_rank_scores_and_the_first_records(ranks, train, tmp_path):
    tasks = pytest.importorskip("lm_eval.tasks")
    (tmp_path / "tasks").mkdir()
    page, rows = " \n = Town = \n \n The town is a town . \n = = History = = \n" * 6, tmp_path / "tasks" / "rows.jsonl"
    rows.write_text("".join(json.dumps({"page": page + str(i)}) + "\n" for i in range(3)))
    own = {"include": str(Path(tasks.__file__).parent / "wikitext" / "wikitext.yaml"), "dataset_path": "json"}
    own |= {"training_split": None, "validation_split": None, "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    (tmp_path / "tasks" / "wikitext.yaml").write_text(json.dumps(own | {"dataset_name": None}))
    words = [*WORDS, "scores.tasks=[wikitext2]", f"scores.data={tmp_path / 'tasks'}", "scores.every=4"]
    words += ["training.seq_len=64", "training.steps=5"]
    scores = [read_jsonl(folder / "scores.jsonl") for folder in (train(tmp_path / "one", *words), ranks(words, "fsdp"))]
    assert [row["step"] for row in scores[1]] == [4, 5]
    one, two = ([row["tasks"]["wikitext2"]["metrics"] for row in rows] for rows in scores)
    assert differences(one, two, **SHARDED) == [] and one[0] != one[1]


MISTAKES = [
    (["training.accumulation=1"], "ddp", "training.accumulation=1: 2 processes need a micro-batch"),
    (["training.accumulation=3"], "fsdp", "training.accumulation=3: under parallel=fsdp"),
    ([*WORDS], "hsdp", "parallel=hsdp: "),
    ([*WORDS], "none", "parallel=none: "),
    ([*WORDS, "controller.signal=gsnr"], "fsdp", "controller: micro_square: "),
]


@pytest.mark.parametrize(("words", "parallel", "line"), MISTAKES, ids=[line.partition(":")[0] for *_, line in MISTAKES])
def test_what_two_processes_cannot_do_is_refused_in_one_line(told, tmp_path, words, parallel, line):
    for answer in told(words, parallel):
        assert answer.startswith(f"UserError: {line}") and "\n" not in answer
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_settings_or_data_are_told(told, text_file, tmp_path):
    (other := tmp_path / "other.txt").write_text(text_file.read_text() + "\nand more")
    for what, options in (("config's hash", {"other_seed": True}), ("fingerprint of", {"other_data": str(other)})):
        for answer in told(WORDS, "ddp", **options):
            assert answer.startswith(f"UserError: the {what}") and "in rank 1" in answer
    assert not (tmp_path / "run").exists()


def test_an_address_in_use_is_told_in_one_line(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"localhost:{port} .*: use a free port") as error, world.joined(cuda=False):
            pass
    assert "\n" not in str(error.value)


def test_several_processes_have_to_be_started(gnmr, tiny, tiny_words):
    assert gnmr("train", *tiny_words, "parallel=fsdp").mistake.startswith("parallel=fsdp: ")
    with pytest.raises(UserError, match=r"^parallel=both: "):
        tiny("parallel=both")
