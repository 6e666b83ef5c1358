"""`gnmr train` in four processes: what two cannot show, replicas of shards and sums of more than two terms."""

from __future__ import annotations

import signal

import pytest
import torch
from everything import differences, everything

from gnmr.attachment.ranks import reduce
from gnmr.attachment.ranks.world import ALONE
from gnmr.records.reader import read_json

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
WORDS = ("training.accumulation=4", "training.batch_size=1", "training.checkpoint_every=4")


@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_a_run_that_was_stopped_and_goes_on_is_the_same(four, tiny, tmp_path, parallel):
    """Weights, moments, records to the last bit; they learn of the signal from the rank that it came to."""
    once, twice = (tiny(f"run_dir={tmp_path / name}", *WORDS) for name in ("once", "twice"))
    assert all(isinstance(told, list) for told in four("train", config=once, parallel=parallel))
    assert four("train", config=twice, parallel=parallel, stop=3) == [128 + signal.SIGTERM] * 4
    assert all(isinstance(told, list) for told in four("train", config=twice, parallel=parallel))
    want, found = (everything(tmp_path / name, "slowest_rank") for name in ("once", "twice"))
    assert differences(want, found) == []
    last = found["steps"][-1]["weights_digest"]
    assert last == reduce.digest(found["state"]["model"], ALONE, 8), "replicas of shards are counted once"


def test_replicas_of_a_shard_that_went_apart_are_named(four, tiny, tmp_path):
    """Rank 1 has the second half of each weight, as rank 3 does: the first that differs from an earlier one is 3."""
    for told in four("train", config=tiny(f"run_dir={tmp_path / 'run'}", *WORDS), parallel="hsdp", nudged=3):
        assert told.startswith("RunFailed: ranks disagree after step 4: ") and "of rank 3 is not that of rank 1" in told


def test_experts_without_tokens_under_replicas_of_shards(four, tiny, train, tmp_path):
    words = ["model.name=moe", "model.experts.number=40", "training.seq_len=8", "training.steps=4", *WORDS]
    told = four("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel="hsdp")
    assert isinstance(told[0], list), told
    both = everything(train(tmp_path / "one", *words)), everything(tmp_path / "run")
    observed = [{(row["step"], row["unit"]) for row in run["units"] if row["norm"] is not None} for run in both]
    units = read_json(tmp_path / "one" / "header.json")["units"]
    assert observed[0] == observed[1] and len(observed[0]) < 0.9 * 4 * len(units)
    stepped = [{name: state["step"] for name, state in run["state"]["optimizer"]["state"].items()} for run in both]
    assert stepped[0] == stepped[1] and 0 < min(filter(None, stepped[0].values())) < 4, "some were left out"
    one, found = ([row["loss"] for row in run["steps"]] for run in both)
    assert found == pytest.approx(one, rel=1e-3)
