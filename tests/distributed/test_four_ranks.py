"""`gnmr train` in four processes: what two cannot show, replicas of shards and sums of more than two terms."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gnmr.distributed import shards
from gnmr.distributed.world import ALONE
from gnmr.lab.config import Config
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
    assert last == shards.digest(found["state"]["model"], ALONE, 8), "replicas of shards are counted once"


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
