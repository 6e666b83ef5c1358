"""`gnmr train` with compressed gradients: virtual workers against real ranks, resumption, records, what is refused."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.config import Config
from gnmr.records.reader import read_json, read_jsonl

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from everything import differences, everything

WORDS = (
    "precision.low=bf16",
    "precision.recovery=null",
    "compression.name=greedylore",
    "compression.rank=4",
    "compression.refresh_every=4",
    "compression.dense_steps=1",
    "training.accumulation=3",
    "training.batch_size=1",
    "training.steps=12",
)
TWO = (*WORDS, "compression.workers=2")


def left(folder: Path) -> dict[str, Any]:
    found = everything(folder)
    for row in found["steps"]:
        del row["slowest_rank"]
    return found


def test_numbers_sent_are_recorded_and_the_controller_chooses_among_matrices(
    train: Callable[..., Path], tmp_path: Path
) -> None:
    """Steps 2 and 3 of the run refresh and compress; recovery sends whole gradients."""
    folder = train(tmp_path / "run", *TWO, "controller.signal=recovery_gap", "controller.routing=ranked", "training.steps=5")
    rows, header = read_jsonl(folder / "steps.jsonl"), read_json(folder / "header.json")
    sent = [row["numbers_sent"] for row in rows]
    dense = header["trained_parameters"]
    assert sent[:2] == [dense, dense] and max(sent[2:]) < dense, "a dense step, one that refreshes, low ones"
    assert [row["numbers_sent_frac"] for row in rows] == [one / dense for one in sent]
    assert [row["num_active"] for row in rows] == [0, 2, 2, 2, 2], (
        "of the first step all gaps are 0: ranked all the same"
    )
    summary = read_json(folder / "summary.json")
    assert summary["numbers_sent_total"] == sum(sent)
    assert summary["numbers_sent_frac"] == pytest.approx(sum(sent) / dense / 5)
    assert header["recoverable"] and sum(header["spend"]) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.xdist_group("pair")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
class TestRanks:
    def test_two_ranks_leave_what_virtual_workers_leave_and_either_goes_on(
        self, pair: Callable[..., list[Any]], tiny: Callable[..., Config], tmp_path: Path
    ) -> None:
        """Against virtual workers in float64, where the order of sums shows in the last digits alone."""
        from gnmr.lab.train.run import run

        def config(name: str, dtype: str = "float32") -> Config:
            found = tiny(f"run_dir={tmp_path / name}", *TWO, "controller.signal=recovery_gap", "controller.routing=ranked")
            object.__setattr__(found.training, "dtype", dtype)
            return found

        def ranks(name: str, dtype: str = "float32", **more: Any) -> dict[str, Any]:
            told = pair("train", config=config(name, dtype), parallel="ddp", **more)
            assert isinstance(told[0], list) or more, told
            return left(tmp_path / name)

        run(config("one", "float64"), lambda _: None)
        one, two = left(tmp_path / "one"), ranks("two", "float64")
        assert len({row["unit"] for row in one["events"]}) > 2
        assert [row["unit"] for row in one["events"]] == [row["unit"] for row in two["events"]]
        for ours, theirs in zip(one["steps"], two["steps"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-7), "it is taken in float32"
            assert ours["numbers_sent"] == theirs["numbers_sent"]
        for key, weight in one["state"]["model"].items():
            torch.testing.assert_close(two["state"]["model"][key], weight, rtol=0, atol=1e-9)

        whole = ranks("undisturbed")
        assert ranks("killed", stop=7)["steps"][-1]["step"] == 7
        shutil.copytree(tmp_path / "killed", tmp_path / "alone")
        assert differences(whole, ranks("killed")) == [], "killed and resumed: to the last bit"
        run(config("alone"), lambda _: None)
        alone = left(tmp_path / "alone")
        assert [row["numbers_sent"] for row in alone["steps"]] == [row["numbers_sent"] for row in whole["steps"]]
        assert alone["steps"][7]["loss"] == pytest.approx(whole["steps"][7]["loss"], rel=1e-6)

    def test_powersgd_runs_and_is_not_continued(
        self, pair: Callable[..., list[Any]], tiny: Callable[..., Config], tmp_path: Path
    ) -> None:
        words = [*WORDS, "compression.name=powersgd", "compression.dense_steps=3"]
        config = tiny(f"run_dir={tmp_path / 'run'}", *words)
        assert pair("train", config=config, parallel="ddp", stop=7) == [128 + signal.SIGTERM] * 2
        fracs = [row["numbers_sent_frac"] for row in read_jsonl(tmp_path / "run" / "steps.jsonl")]
        assert fracs[:3] == [1, 1, 1] and max(fracs[3:]) < 0.9
        for told in pair("train", config=config, parallel="ddp"):
            assert told.startswith("UserError: compression.name=powersgd: a run cannot be continued")

    def test_other_numbers_of_workers(
        self, pair: Callable[..., list[Any]], tiny: Callable[..., Config], tmp_path: Path
    ) -> None:
        config = tiny(f"run_dir={tmp_path / 'run'}", *WORDS, "compression.workers=3")
        for told in pair("train", config=config, parallel="ddp"):
            assert told == "UserError: compression.workers=3: here are 2 processes, each a worker; leave it out"
        config = tiny(f"run_dir={tmp_path / 'run'}", *WORDS)
        for told in pair("train", config=config, parallel="fsdp"):
            assert told.startswith("UserError: compression.name=greedylore: gradients are compressed whole, which")


def test_a_run_goes_on_with_other_workers_and_says_what_is_lost(
    train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnmr.lab.train import compression, run

    monkeypatch.setattr(run, "config_hash", lambda _: "same")  # as under parallel=ddp, where workers are processes
    monkeypatch.setattr("gnmr.lab.train.folder.config_hash", lambda _: "same", raising=False)
    folder = train(tmp_path / "run", *TWO, "training.steps=6")
    for name in ("DONE", "checkpoints/step-00000006"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr(compression, "VirtualWorkers", lambda _, made=compression.VirtualWorkers: made(3))
    with pytest.warns(UserWarning, match="is of 2 workers, here are 3: the bases of compressed gradients are kept"):
        train(folder, *TWO, "training.steps=6")
    assert (folder / "DONE").exists()


MISTAKES = {
    "compression.workers=null": "compression.name=greedylore: needs data parallelism: parallel=ddp",
    "compression.rank=31": "compression.rank=31: layers.0.self_attn.q_proj is 32 wide, above",
    "compression.dense_steps=12": "compression.dense_steps=12: the run has 12 steps: nothing is compressed",
    "compression.workers=4": "training.accumulation=3: 4 workers need a micro-batch of a step each",
    "precision.recovery=int8": "precision.recovery=int8: compression.name=greedylore: the controller routes gradients",
    "controller.signal=price": "controller.signal=price: price is measured of operators",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_what_cannot_be_compressed_is_one_line(tiny: Callable[..., Config], tmp_path: Path, word: str) -> None:
    from gnmr.lab.train.run import run

    with pytest.raises(UserError) as told:
        run(tiny(f"run_dir={tmp_path / 'run'}", *TWO, word), lambda _: None)
    assert str(told.value).startswith(MISTAKES[word]) and "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()
