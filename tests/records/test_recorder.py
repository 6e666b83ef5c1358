from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_rows import eval_row, event_row, step_row, unit_rows

from gnmr.errors import RunFailed
from gnmr.lab.config import RecordsConfig
from gnmr.lab.views import wandb_sink
from gnmr.lab.views.live import RunInfo
from gnmr.lab.views.recorder import Recorder
from gnmr.records import writer
from gnmr.records.reader import read_json, read_jsonl, read_units


def info(folder: Path, start_step: int = 0) -> RunInfo:
    return RunInfo("run", folder, "int4", "cpu", 10, 4, 2, 1000, 2048, start_step)


@pytest.fixture
def wandb_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What W&B would have been started with; it then fails, and the run goes on."""
    calls: list[dict[str, Any]] = []

    def refuse(wandb: Any, mode: str, arguments: dict[str, Any]) -> None:
        calls.append(arguments)
        raise ConnectionError("no network")

    monkeypatch.setattr(wandb_sink, "_wandb", lambda: None)
    monkeypatch.setattr(wandb_sink, "_has_key", lambda wandb: False)
    monkeypatch.setattr(wandb_sink, "_open", refuse)
    return calls


def test_fans_out_resumes_and_finishes(
    tmp_path: Path, wandb_calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = RecordsConfig(units_every=2, live="plain", wandb="offline")
    with Recorder(info(tmp_path), settings, None) as recorder:
        recorder.start("a: 1\n", {"a": 1}, {"units": ["u"], "experiment": "group"})
        for step in range(1, 7):
            recorder.step(step_row(step), unit_rows(step))
        recorder.events([event_row(3)])
        recorder.say("killed here")
    assert capsys.readouterr().out.count("W&B is off from here") == 1

    with Recorder(info(tmp_path, 4), settings, 4) as recorder:
        recorder.start("a: 1\n", {"a": 1}, {"units": ["u"], "experiment": "group"})
        for step in range(5, 11):
            recorder.step(step_row(step), unit_rows(step))
        recorder.eval(eval_row(10))
        summary = recorder.finish("done")
    first, second = wandb_calls
    assert first["id"] == second["id"] == (read_json(tmp_path / "header.json") or {})["run_id"]
    assert first["dir"] == tmp_path and first["group"] == "run/int4"
    assert first["config"]["a"] == 1 and first["tags"] == ["int4", "group"]
    assert [row["step"] for row in read_jsonl(tmp_path / "steps.jsonl")] == list(range(1, 11))
    assert read_units(tmp_path)["step"].unique().to_pylist() == [2, 4, 6, 8, 10]
    assert len(read_jsonl(tmp_path / "events.jsonl")) == 1
    assert summary["steps"] == 10 and (tmp_path / "DONE").exists()
    out = capsys.readouterr().out
    assert "step 10/10  loss" in out and out.rstrip().endswith(f"next: gnmr report {tmp_path}")


CPU = {"device": "cpu", "cpu": "Xeon", "threads": 1, "kernels": "AVX512", "products": "16-bit"}
GPU = CPU | {"device": "H100"}


@pytest.mark.parametrize(
    "began, now, says",
    [
        (
            CPU,
            CPU | {"threads": 2},
            "began with 1 thread, continues with 2 threads: the result is not equal",
        ),
        (CPU, CPU | {"cpu": "EPYC"}, "began with cpu Xeon, continues with cpu EPYC: the result"),
        (CPU, CPU | {"products": "in FP32"}, "began with products 16-bit, continues with products in FP32: the result"),
        (GPU, GPU | {"device": "H200"}, "began with device H100, continues with device H200: the result"),
        (CPU, CPU, None),
        (GPU, GPU | {"threads": 2, "cpu": "EPYC"}, None),
        ({}, CPU, None),  # an earlier version's header
    ],
)
def test_a_run_that_continues_on_another_machine_says_so(tmp_path: Path, capsys, began, now, says) -> None:
    settings = RecordsConfig(live="off", wandb="off")
    with Recorder(info(tmp_path), settings, None) as recorder:
        recorder.start("a: 1\n", {}, {"machine": began})
        recorder.step(step_row(1), None)
    with Recorder(info(tmp_path, 1), settings, 1) as recorder:
        recorder.start("a: 1\n", {}, {"machine": now})
    out = capsys.readouterr().out
    words = " ".join(out.split())  # a console wraps lines
    assert words == "" if says is None else words.startswith(says)


def test_an_end_that_cannot_be_written_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(info(tmp_path), RecordsConfig(live="off", wandb="off"), None)
    recorder.start("a: 1\n", {}, {})
    recorder.step(step_row(1), None)

    def full(path: Path, tree: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "replace_json", full)
        with pytest.raises(RunFailed, match=r"disk full while writing summary\.json"):
            recorder.finish("done")
    assert (tmp_path / "FAILED").read_text().startswith("disk full") and not (tmp_path / "DONE").exists()


def test_what_happens_after_done_changes_nothing_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C or a closed pipe while the views close must not turn a finished run into a failed one."""

    def interrupted(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    settings = RecordsConfig(live="off", wandb="off")
    with Recorder(info(tmp_path), settings, None) as recorder:
        recorder.start("a: 1\n", {"a": 1}, {})
        recorder.step(step_row(1), unit_rows(1))
        monkeypatch.setattr(wandb_sink.WandbSink, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorder.finish("done")
        assert recorder.finish("failed", "too late")["status"] == "done"
    assert (tmp_path / "DONE").exists() and not (tmp_path / "FAILED").exists()
    assert read_json(tmp_path / "summary.json")["status"] == "done"  # type: ignore[index]
