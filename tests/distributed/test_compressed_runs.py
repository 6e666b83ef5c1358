"""`gnmr train` with compressed gradients: virtual workers against real ranks, resumption, records, what is refused."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from everything import differences, everything

from gnmr.errors import UserError
from gnmr.lab.config import Config
from gnmr.records.reader import read_json, read_jsonl

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
RANKED = ("controller.signal=recovery_gap", "controller.routing=ranked")
TWO = (*WORDS, "compression.workers=2")


def test_numbers_sent_are_recorded_and_the_controller_chooses_among_matrices(train, tmp_path):
    """Steps 2 and 3 of the run refresh and compress; recovery sends whole gradients."""
    folder = train(tmp_path / "run", *TWO, *RANKED, "training.steps=5")
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
    def test_two_ranks_leave_what_virtual_workers_leave_and_either_goes_on(self, pair, tiny, tmp_path):
        """Against virtual workers in float64, where the order of sums shows in the last digits alone."""
        from gnmr.lab.train.run import run

        def config(name: str, dtype: str = "float32") -> Config:
            found = tiny(f"run_dir={tmp_path / name}", *TWO, *RANKED)
            object.__setattr__(found.training, "dtype", dtype)
            return found

        def ranks(name: str, dtype: str = "float32", **more: Any) -> dict[str, Any]:
            told = pair("train", config=config(name, dtype), parallel="ddp", **more)
            assert isinstance(told[0], list) or more, told
            return everything(tmp_path / name, "slowest_rank")

        run(config("one", "float64"), lambda _: None)
        one, two = everything(tmp_path / "one", "slowest_rank"), ranks("two", "float64")
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
        alone = everything(tmp_path / "alone", "slowest_rank")
        assert [row["numbers_sent"] for row in alone["steps"]] == [row["numbers_sent"] for row in whole["steps"]]
        assert alone["steps"][7]["loss"] == pytest.approx(whole["steps"][7]["loss"], rel=1e-6)

    @pytest.mark.parametrize(
        ("more", "parallel", "key"),
        [("compression.workers=3", "ddp", "compression.workers=3"), ("seed=0", "fsdp", "compression.name=greedylore")],
    )
    def test_what_two_processes_cannot_compress(self, told, more, parallel, key):
        words = [*WORDS, more.replace("seed", "training.seed")]
        assert all(answer.startswith(f"UserError: {key}: ") for answer in told(words, parallel))


def test_a_run_does_not_go_on_with_other_workers(train, tmp_path, monkeypatch):
    from gnmr.lab.rivals import compression
    from gnmr.lab.train import run

    monkeypatch.setattr(run, "config_hash", lambda _: "same")  # as under parallel=ddp, where workers are processes
    monkeypatch.setattr("gnmr.lab.train.folder.config_hash", lambda _: "same", raising=False)
    folder = train(tmp_path / "run", *TWO, "training.steps=6")
    for name in ("DONE", "checkpoints/step-00000006"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr(compression, "VirtualWorkers", lambda _, made=compression.VirtualWorkers: made(3))
    with pytest.raises(UserError, match=r"belongs to another run .*in 2 workers, .*in 3 workers"):
        train(folder, *TWO, "training.steps=6")


MISTAKES = {
    "compression.workers=null": "compression.name=greedylore: needs data parallelism",
    "compression.rank=31": "compression.rank=31: ",
    "compression.rank=0": "compression.rank=0: must be a whole number",
    "compression.workers=1": "compression.workers=1: must be a whole number",
    "compression.dense_steps=12": "compression.dense_steps=12: ",
    "compression.workers=4": "training.accumulation=3: 4 workers",
    "precision.recovery=int8": "precision.recovery=int8: ",
    "controller.signal=price": "controller.signal=price: ",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_what_cannot_be_compressed_is_one_line(tiny, tmp_path, word):
    from gnmr.lab.train.run import run

    with pytest.raises(UserError) as told:
        run(tiny(f"run_dir={tmp_path / 'run'}", *TWO, word), lambda _: None)
    assert str(told.value).startswith(MISTAKES[word]) and "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()
