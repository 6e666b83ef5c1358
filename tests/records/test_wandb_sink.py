"""W&B offline, read back from its own file; and W&B failing in every place."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb
from made_rows import eval_row, event_row, step_row, unit_rows
from wandb_files import history_of, parts_of, records_of

from gnmr.lab.views import wandb_sink
from gnmr.lab.views.live import RunInfo
from gnmr.lab.views.wandb_sink import WandbSink, _has_key, series_of
from gnmr.records.schema import UnitRows
from gnmr.records.unit_stream import UnitStream
from gnmr.records.writer import RunWriter

SUMMARY = {"status": "done", "steps": 12}


HEADER = {"commit": "0123", "command": "gnmr train", "machine": {"cpu": "Test"}, "units": ["a", "b"]}
HEADER |= {"run_id": "abcd1234", "experiment": "experiment", "scale": "cpu"}


def info(folder: Path) -> RunInfo:
    return RunInfo("experiment/arm-0123abcd-s0", folder, "arm", "cpu", 40, 4, 2, 1000, 2048)


def start(sink: WandbSink, folder: Path, mode: str = "offline") -> None:
    config = {"model": {"name": "llama"}, "controller": {"trigger": 2.0}}
    sink.start(info(folder), config, HEADER, mode)


def made(sink: WandbSink) -> None:
    """Wait until the queued calls were made."""
    sink._calls.put(None)
    sink._thread.join()


SERIES = {
    "train/loss": "loss",
    "train/skipped": "skipped",
    "recovery/num_active": "num_active",
    "recovery/spent_gemm_frac": "spent_gemm_frac",
    "memory/saved_bytes": "saved_bytes",
}
"""The field of steps.jsonl that each of these series has."""


def test_every_number_of_a_row_is_a_series() -> None:
    row = step_row(3, slowest_rank=1, nonfinite_unit="layers.0", weights_digest=None)
    series = series_of(row)
    assert {name: series[name] for name in SERIES} == {name: row[field] for name, field in SERIES.items()}
    assert series["train/slowest_rank"] == 1
    assert {name.partition("/")[2] for name in series} == {
        field for field, value in row.items() if field != "step" and isinstance(value, (int, float))
    }


@pytest.mark.slow
def test_offline_file_equals_what_was_given(tmp_path: Path) -> None:
    said: list[str] = []
    sink = WandbSink(said.append)
    start(sink, tmp_path)
    assert (sink.where() or "").startswith(f"W&B: wandb sync {tmp_path}")
    rows = {step: step_row(step) for step in range(1, 41)}  # more than one block of the log
    rows[7] = step_row(7, loss=math.nan, grad_norm_pre_clip=math.inf, skipped=True, nonfinite_unit="layers.0")
    of_units = {step: unit_rows(step) for step in rows}
    for units in of_units.values():
        units.columns["price"] = np.full(4, math.nan)
    columns = {"gnmr": np.ones(4), "delta_gnmr": np.array([math.nan, 1.0, 2.0, 3.0]), "price": np.full(4, 0.25)}
    of_units[10] = unit_rows(10, columns=columns, observed=np.array([True, True, True, False]))
    for step, row in rows.items():
        sink.step(row, of_units[step])
        if step in (2, 9):
            sink.events([event_row(step), event_row(step, unit=of_units[1].units[2]), event_row(step, event="release")])
        if step % 6 == 0:
            sink.eval(eval_row(step))
    events = [event_row(2), event_row(2, unit=of_units[1].units[2]), event_row(3, event="release", cause="lock")]
    events += [event_row(4, unit=None, event="verdict", cause="data")]
    recorded(tmp_path, of_units.values())
    sink.finish(SUMMARY, events, tmp_path)
    wandb.teardown()  # as at the end of the process: `finish` alone does not wait until the file is written
    assert said == []

    (path,) = parts_of(tmp_path)
    history = history_of(path)
    records: dict[str, list[Any]] = {kind: [] for kind in ("metric", "run", "config")}
    for record in records_of(path):
        if (kind := record.WhichOneof("record_type")) in records:
            records[kind].append(getattr(record, kind))
    for step, row in rows.items():
        logged = history[step]
        np.testing.assert_equal(
            {name: logged[name] for name in SERIES}, {name: row[field] for name, field in SERIES.items()}
        )
        assert logged["step"] == step
        assert {"val/loss", "val/ppl"} <= logged.keys() if step % 6 == 0 else "val/loss" not in logged
        assert any(name.startswith("traces/") for name in logged) == (step == 40)
        assert logged["recovery/promotions"] == 2 * (step >= 2) + 2 * (step >= 9)
    assert history[12]["val/loss"] == eval_row(12)["val_loss"]
    assert history[5]["risk/highest"] == of_units[5].risk.max()
    assert history[5]["risk/mean_gnmr"] == of_units[5].columns["gnmr"].mean()
    assert history[10]["price/total_nats"] == 1.0 and "price/total_nats" not in history[5]

    assert any((one.glob_name, one.step_metric) == ("*", "step") for one in records["metric"])

    run = records["run"][0]
    assert (run.run_id, run.display_name) == ("abcd1234", "experiment/arm-0123abcd-s0")
    assert (run.project, run.run_group) == ("gnmr", "experiment/arm-0123abcd")
    assert (run.job_type, list(run.tags)) == ("arm", ["arm", "experiment", "cpu"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["model"], config["arm"]) == ({"name": "llama"}, "arm")
    assert config["header"] == {key: value for key, value in HEADER.items() if key != "units"}
    assert any('"wandb/lineseries/v0"' in item.value_json for later in records["config"] for item in later.update)
    assert table_of(tmp_path, history[40]["events/path"])["data"] == [list(row.values()) for row in events]
    points = table_of(tmp_path, history[40]["traces/gnmr_table/path"])["data"]
    assert {unit for _, unit, _ in points} == {*of_units[1].units}
    assert [step for step, unit, _ in points if unit == of_units[1].units[0]] == [10, 20, 30, 40]


def recorded(folder: Path, rows: Iterable[UnitRows]) -> None:
    """Write units.arrows, of which the charts are made."""
    stream = UnitStream(folder)
    for units in rows:
        stream.write(units)
    stream.close()


def table_of(folder: Path, name: str) -> Any:
    (path,) = folder.glob(f"wandb/offline-run-*/files/{name}")
    return json.loads(path.read_text())


def test_off_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_sink, "_wandb", lambda: pytest.fail("W&B was imported"))
    sink = WandbSink(pytest.fail)
    start(sink, tmp_path, "off")
    sink.step(step_row(1))
    sink.finish(SUMMARY, [], tmp_path)
    assert sink.where() is None and not list(tmp_path.iterdir())


class FakeRun:
    """A run whose methods fail when their name is in `broken`."""

    offline, dir, step = True, "x/files", 3

    def __init__(self, broken: str) -> None:
        self._broken = broken
        self.logged: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.summary: dict[str, Any] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self._broken == "log":
            raise ConnectionError("no\nnetwork")
        self.logged.append(metrics)
        self.steps.append(step)

    def define_metric(self, name: str, **how: Any) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        if self._broken == "finish":
            raise ConnectionError("no\nnetwork")


def fake_wandb(broken: str, key: str | None = None) -> Any:
    modes: list[str] = []

    def init(mode: str, **arguments: Any) -> FakeRun:
        modes.append(mode)
        if broken in ("init", mode):
            raise ConnectionError("no\nnetwork")
        return FakeRun(broken)

    return SimpleNamespace(
        init=init,
        modes=modes,
        teardown=lambda: None,
        setup=lambda: SimpleNamespace(
            settings=SimpleNamespace(api_key=key, identity_token_file=None, base_url="https://api.wandb.ai")
        ),
        Settings=type("Settings", (SimpleNamespace,), {"model_fields": {"silent"}}),
        Table=type("Table", (SimpleNamespace,), {"MAX_ROWS": 10}),
        plot=SimpleNamespace(line_series=lambda xs, ys, **named: SimpleNamespace(xs=xs, ys=ys, **named)),
    )


@pytest.fixture(autouse=True)
def no_login(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*filter(lambda name: name.startswith("WANDB_"), list(os.environ)), "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A W&B in which everything works."""
    fake = fake_wandb("")
    monkeypatch.setattr(wandb_sink, "_wandb", lambda: fake)
    return fake


@pytest.mark.parametrize(
    ("broken", "place"), [("import", "start"), ("init", "start"), ("log", "log"), ("finish", "finish")]
)
def test_failing_wandb_says_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, place: str
) -> None:
    def load() -> Any:
        if broken == "import":
            raise ImportError("no\nnetwork")
        return fake_wandb(broken)

    monkeypatch.setattr(wandb_sink, "_wandb", load)
    said: list[str] = []
    sink = WandbSink(said.append)
    start(sink, tmp_path)
    for step in (1, 2, 3):
        sink.step(step_row(step), unit_rows(step))
    sink.finish(SUMMARY, [], tmp_path)
    assert len(said) == 1 and "\n" not in said[0]
    assert f"its {place} failed" in said[0] and "no network" in said[0] and "the run goes on" in said[0]
    assert sink.where() is None


@pytest.mark.parametrize(
    ("mode", "environment", "key", "broken", "expected"),
    [
        ("auto", None, None, "", ["offline"]),
        ("auto", None, "k" * 40, "", ["online"]),
        ("auto", None, "k" * 40, "online", ["online", "offline"]),  # logged in, but no network
        ("auto", "offline", "k" * 40, "", ["offline"]),
        ("auto", "disabled", None, "", ["disabled"]),
        ("auto", "online", None, "", []),  # would ask for a key
        ("online", None, None, "", []),
        ("online", None, "k" * 40, "online", ["online"]),
        ("offline", None, "k" * 40, "", ["offline"]),
    ],
)
def test_modes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    environment: str | None,
    key: str | None,
    broken: str,
    expected: list[str],
) -> None:
    fake = fake_wandb(broken, key)
    monkeypatch.setattr(wandb_sink, "_wandb", lambda: fake)
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    said: list[str] = []
    start(WandbSink(said.append), tmp_path, mode)
    assert fake.modes == expected
    assert len(said) == (1 if broken or not expected else 0)


def test_a_login_in_netrc_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(path))
    for text, expected in (
        ("machine api.wandb.ai login user password 0123", True),
        ("machine elsewhere.org login user password 0123", False),
        ("not a netrc file", False),
    ):
        path.write_text(text + "\n")
        path.chmod(0o600)
        assert _has_key(fake_wandb("")) == expected
    path.unlink()
    assert not _has_key(fake_wandb(""))


@pytest.mark.parametrize("there", [0, 2])
def test_a_resumed_run_sends_first_what_wandb_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any, there: int
) -> None:
    """`there`: W&B has the steps before it; offline it has none."""
    monkeypatch.setattr(FakeRun, "step", there)
    writer = RunWriter(tmp_path, None)
    for step in (1, 2, 3):
        writer.step(step_row(step))
        writer.units(unit_rows(step))
        writer.events([event_row(step)])
    writer.eval(eval_row(3))
    writer.close()
    sink = WandbSink(pytest.fail)
    start(sink, tmp_path)
    sink.resume(tmp_path, 3)
    sink.step(step_row(4), unit_rows(4))
    made(sink)
    merged: dict[int, dict[str, Any]] = {}  # as W&B does
    for step, metrics in zip(sink._run.steps, sink._run.logged, strict=True):
        merged.setdefault(step, {}).update(metrics)
    assert list(merged) == [step for step in (1, 2, 3, 4) if step >= there]
    assert [merged[step]["recovery/promotions"] for step in merged] == [min(step, 3) for step in merged]
    assert merged[3]["val/loss"] == eval_row(3)["val_loss"]


def test_the_most_promoted_units_have_lines(tmp_path: Path, fake: Any) -> None:
    sink = WandbSink(pytest.fail)
    start(sink, tmp_path)
    units, values = [f"u{i}" for i in range(70)], np.arange(70.0)
    columns = {"gnmr": np.where(values > 67, np.inf, values), "norm_low": np.ones(70)}
    sink.step(step_row(2, over={"gnmr": 0}), unit_rows(2, units, columns=columns))
    recorded(tmp_path, [unit_rows(2, units, columns=columns)])
    run = sink._run
    sink.finish(SUMMARY, [event_row(1, unit=unit) for unit in ("u9", "u4", "u9")], tmp_path)
    chart = run.logged[-1]["traces/gnmr"]
    assert chart.keys == ["u9", "u4", "u67", "u66", "u65"], "of equally promoted units those with the highest values"
    assert (chart.xs, chart.ys) == ([[2]] * 5, [[9.0], [4.0], [67.0], [66.0], [65.0]])


@pytest.mark.parametrize("every, most, interval", [(10, 3, 13), (10, 1, 10), (1, 2, 8)])
def test_a_chart_is_drawn_in_full_and_has_a_spike_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any, every: int, most: int, interval: int
) -> None:
    """W&B draws at most `MAX_ROWS` points, 10 of this one."""
    monkeypatch.setattr(wandb_sink, "_CHART_STEPS", every)
    monkeypatch.setattr(wandb_sink, "_CHART_UNITS", most)
    sink = WandbSink(pytest.fail)
    start(sink, tmp_path)
    rows = [unit_rows(step, columns={"gnmr": np.full(4, 99.0 if step == 13 else 1.0)}) for step in range(1, 38)]
    for units in rows:
        sink.step(step_row(units.step, over={"gnmr": 0}), units)
    recorded(tmp_path, rows)
    run = sink._run
    sink.finish(SUMMARY, [], tmp_path)
    chart = run.logged[-1]["traces/gnmr"]
    assert sum(map(len, chart.xs)) <= 10
    spike = -(-13 // interval) * interval
    assert dict(zip(chart.xs[0], chart.ys[0], strict=True)) == {
        min(step, 37): 99.0 if step == spike else 1.0 for step in range(interval, 37 + interval, interval)
    }


def test_wandbs_variables_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    arguments, plain = dict[str, Any](), fake.init
    monkeypatch.setattr(fake, "init", lambda mode, **given: (arguments.update(given), plain(mode))[1])
    for name, value in {"PROJECT": "theirs", "ENTITY": "them", "NAME": "mine", "TAGS": "a, b"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    WandbSink(pytest.fail).start(info(tmp_path), {}, HEADER, "offline")
    assert arguments["project"] == "theirs" and "entity" not in arguments
    assert arguments["name"] == "mine" and arguments["group"] == "experiment/arm-0123abcd"
    assert arguments["tags"] == ["arm", "experiment", "cpu", "a", "b"]


def test_rows_that_cannot_be_read_back_stop_wandb_alone(tmp_path: Path, fake: Any) -> None:
    said: list[str] = []
    sink = WandbSink(said.append)
    start(sink, tmp_path)

    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n')
    sink.resume(tmp_path, 3)
    made(sink)
    assert len(said) == 1 and "its resume failed" in said[0] and sink.where() is None


@pytest.mark.parametrize("hangs", ["log", "finish", "teardown"])
def test_a_service_that_never_answers_is_left_after_a_limit(
    hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(wandb_sink, "_LIMIT_S", 0.2)
    monkeypatch.setattr(wandb_sink, "_TEARDOWN_S", 0.1)
    if hangs == "teardown":
        monkeypatch.setattr(fake, "teardown", answers.wait)
    monkeypatch.setattr(FakeRun, "log" if hangs == "log" else "finish", lambda *_, **__: answers.wait())
    said: list[str] = []
    sink = WandbSink(said.append)
    start(sink, tmp_path)
    began = time.monotonic()
    sink.step(step_row(1), unit_rows(1))
    sink.finish(SUMMARY, [], tmp_path)
    sink.close()
    assert time.monotonic() - began < 5
    assert said == ["W&B is off from here, its service did not answer within 0 s; the run goes on"]
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    answers.set()


def test_after_a_failure_wandbs_own_end_is_unhooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []

    def teardown() -> None:
        ended.append(True)
        raise BrokenPipeError("the service was killed")

    fake = fake_wandb("log")
    fake.teardown = teardown
    monkeypatch.setattr(wandb_sink, "_wandb", lambda: fake)
    sink = WandbSink(lambda _: None)
    start(sink, tmp_path)
    sink.step(step_row(1))
    sink.finish(SUMMARY, [], tmp_path)
    assert ended == [True]
