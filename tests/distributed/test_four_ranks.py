"""`gnmr train` in four processes: what two cannot show, replicas of shards and sums of more than two terms."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gnmr.distributed import digests
from gnmr.distributed.world import ALONE
from gnmr.lab.config import Config
from gnmr.lab.train.run import run
from gnmr.records.reader import read_json

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from everything import differences, everything

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
WORDS = ("training.accumulation=4", "training.batch_size=1", "records.check_every=4")
Four = Callable[..., list[Any]]


def left(folder: Path) -> dict[str, Any]:
    found = everything(folder)
    for row in found["steps"]:
        del row["slowest_rank"]
    return found


def assert_close(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        for key in ours:
            assert_close(ours[key], theirs[key])
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)


@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_a_run_that_was_stopped_and_goes_on_is_the_same(
    four: Four, tiny: Callable[..., Config], tmp_path: Path, parallel: str
) -> None:
    """Weights, moments, records to the last bit; they learn of the signal from the rank that it came to."""
    once, twice = (tiny(f"run_dir={tmp_path / name}", *WORDS) for name in ("once", "twice"))
    assert all(isinstance(told, list) for told in four("train", config=once, parallel=parallel))
    assert four("train", config=twice, parallel=parallel, stop=5) == [128 + signal.SIGTERM] * 4
    assert all(isinstance(told, list) for told in four("train", config=twice, parallel=parallel))
    found = left(tmp_path / "twice")
    assert differences(left(tmp_path / "once"), found) == []
    last = found["steps"][-1]["weights_digest"]
    assert last == digests.of_run(found["state"]["model"], ALONE, 8), "replicas of shards are counted once"


def test_replicas_of_a_shard_that_went_apart_are_named(four: Four, tiny: Callable[..., Config], tmp_path: Path) -> None:
    """Rank 1 has the second half of each weight, as rank 3 does: the first that differs from an earlier one is 3."""
    for told in four("nudged", config=tiny(f"run_dir={tmp_path / 'run'}", *WORDS), parallel="hsdp"):
        assert told.startswith("RunFailed: ranks disagree after step 4: ") and "of rank 3 is not that of rank 1" in told


def test_experts_without_tokens_under_replicas_of_shards(
    four: Four, tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    words = ["model.name=moe", "model.experts.number=40", "training.seq_len=8", "training.steps=4", *WORDS]
    told = four("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel="hsdp")
    assert isinstance(told[0], list), told
    one, found = everything(train(tmp_path / "one", *words)), left(tmp_path / "run")
    observed = [
        {(row["step"], row["unit"]) for row in run["ratios"] if row["norm"] is not None} for run in (one, found)
    ]
    units = read_json(tmp_path / "one" / "header.json")["units"]
    assert observed[0] == observed[1] and len(observed[0]) < 0.9 * 4 * len(units)
    stepped = [
        {name: state["step"] for name, state in run["state"]["optimizer"]["state"].items()} for run in (one, found)
    ]
    assert stepped[0] == stepped[1] and 0 < min(filter(None, stepped[0].values())) < 4, "some were left out"
    assert [row["loss"] for row in found["steps"]] == pytest.approx([row["loss"] for row in one["steps"]], rel=1e-3)


def test_four_ranks_send_what_four_virtual_workers_send(
    four: Four, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """Compressed gradients: in float64 the order of sums shows in the last digits alone. Two have one micro-batch more
    than the others."""
    words = ["precision.low=bf16", "precision.recovery=null", "compression.name=greedylore", "compression.workers=4"]
    words += ["compression.rank=3", "compression.refresh_every=4", "compression.dense_steps=1"]
    words += ["controller.signal=recovery_gap", "controller.routing=ranked", "training.accumulation=6", "training.batch_size=1"]
    configs = [tiny(f"run_dir={tmp_path / name}", *words) for name in ("one", "four")]
    for config in configs:
        object.__setattr__(config.training, "dtype", "float64")  # a run has it in tests alone
    run(configs[0], lambda _: None)
    told = four("train", config=configs[1], parallel="ddp")
    assert all(isinstance(each, list) for each in told), told
    one, found = left(tmp_path / "one"), left(tmp_path / "four")
    assert len({row["unit"] for row in one["events"]}) > 2
    assert [row["unit"] for row in one["events"]] == [row["unit"] for row in found["events"]]
    for ours, theirs in zip(one["steps"], found["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6), "it is taken in float32"
        assert ours["numbers_sent"] == theirs["numbers_sent"]
    kept = [state["state"]["extras"]["compression"] for state in (one, found)]
    assert kept[0].keys() == kept[1].keys() >= {f"worker_{number}" for number in range(4)}
    for part in ("model", "extras"):
        assert_close(found["state"][part], one["state"][part])
