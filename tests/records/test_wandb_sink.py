"""W&B offline, read back from its own file; and W&B failing in every place."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from gnmr.records import wandb_sink
from gnmr.records.wandb_sink import EVAL_METRICS, STEP_METRICS, WandbSink, _has_key, recovery_totals

Make = Callable[..., Any]
SUMMARY = {"status": "done", "steps": 12}


def start(sink: WandbSink, folder: Path, mode: str = "offline", **more: Any) -> None:
    sink.start("abcd1234", "arm-s0", "experiment", "gnmr", folder, {"model": {"name": "llama"}}, mode, **more)


def read_records(folder: Path) -> Iterator[Any]:
    """Records of the one .wandb file below `folder`: a LevelDB log, since W&B ships no reader."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:  # padding
            position += left_in_block
            continue
        _crc, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield Record.FromString(parts)
            parts = b""


def read_history(folder: Path) -> dict[int, dict[str, Any]]:
    """{step: {metric: value}} of what was logged."""
    steps: dict[int, dict[str, Any]] = {}
    for record in read_records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            steps[row.pop("_step", record.history.step.num)] = row
    return steps


@pytest.mark.slow
def test_offline_file_equals_what_was_given(
    tmp_path: Path, step_row: Make, eval_row: Make, ratio_rows: Make, event_row: Make
) -> None:
    said: list[str] = []
    sink = WandbSink(said.append, wandb_every=5)
    start(sink, tmp_path, recovered=Counter({"layers.1.mlp.down_proj": 100}))
    assert (sink.where() or "").startswith(f"W&B: wandb sync {tmp_path}")
    rows = {step: step_row(step) for step in range(1, 41)}  # more than one block of the log
    rows[7] = step_row(7, loss=math.nan, grad_norm_pre_clip=math.inf, skipped=True, nonfinite_unit="layers.0")
    ratios = {step: ratio_rows(step) for step in rows}
    ratios[10] = ratio_rows(
        10,
        columns={"gnmr": np.ones(4), "delta_gnmr": np.array([math.nan, 1.0, 2.0, 3.0])},
        observed=np.array([True, True, True, False]),
    )
    for step, row in rows.items():
        sink.step(row, ratios[step])
        if step % 6 == 0:
            sink.eval(eval_row(step))
    events = [event_row(2), event_row(3, event="release", cause="lock")]
    sink.finish(SUMMARY, events)
    wandb.teardown()  # as at the end of the process: `finish` alone does not wait until the file is written
    assert said == []

    history = read_history(tmp_path)
    for step, row in rows.items():
        logged = history[step]
        np.testing.assert_equal(
            {name: logged[name] for name in STEP_METRICS.values()}, {n: row[k] for k, n in STEP_METRICS.items()}
        )
        assert set(EVAL_METRICS.values()) <= logged.keys() if step % 6 == 0 else "val/loss" not in logged
        assert any(name.startswith("gnmr/") for name in logged) == (step % 5 == 0)
    assert history[12]["val/loss"] == eval_row(12)["val_loss"]
    for i, unit in enumerate(ratios[5].units):
        assert history[5][f"gnmr/{unit}"] == ratios[5].columns["gnmr"][i]
        assert history[5][f"delta_gnmr/{unit}"] == ratios[5].columns["delta_gnmr"][i]
        assert history[5][f"risk/{unit}"] == ratios[5].risk[i]
        assert history[5][f"recovery_total/{unit}"] == (105 if i == 1 else 0)
        assert history[10][f"recovery_total/{unit}"] == (110 if i == 1 else 0)
    undefined, unobserved = ratios[10].units[0], ratios[10].units[3]
    assert f"delta_gnmr/{undefined}" not in history[10] and f"gnmr/{undefined}" in history[10]
    assert f"gnmr/{unobserved}" not in history[10]

    run = next(record.run for record in read_records(tmp_path) if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.display_name, run.run_group, run.project) == ("abcd1234", "arm-s0", "experiment", "gnmr")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["model"] == {"name": "llama"}
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [list(row.values()) for row in events]


def test_off_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_row: Make) -> None:
    monkeypatch.setattr(wandb_sink, "_wandb", lambda: pytest.fail("W&B was imported"))
    sink = WandbSink(pytest.fail)
    start(sink, tmp_path, "off")
    sink.step(step_row(1))
    sink.finish(SUMMARY, [])
    assert sink.where() is None and not list(tmp_path.iterdir())


class FakeRun:
    """A run whose methods fail when their name is in `broken`."""

    offline, dir, step = True, "x/files", 3

    def __init__(self, broken: str) -> None:
        self._broken = broken
        self.logged: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self._broken == "log":
            raise ConnectionError("no\nnetwork")
        self.logged.append(metrics)

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
    )


@pytest.fixture(autouse=True)
def no_login(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.mark.parametrize(
    ("broken", "place"), [("import", "start"), ("init", "start"), ("log", "log"), ("finish", "finish")]
)
def test_failing_wandb_says_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_row: Make, ratio_rows: Make, broken: str, place: str
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
        sink.step(step_row(step), ratio_rows(step))
    sink.finish(SUMMARY, [])
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


def test_many_units_are_not_sent_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_row: Make, ratio_rows: Make
) -> None:
    monkeypatch.setattr(wandb_sink, "_wandb", lambda: fake_wandb(""))
    sink = WandbSink(pytest.fail, wandb_every=1)
    start(sink, tmp_path)
    sink.step(step_row(1), ratio_rows(1, [f"u{i}" for i in range(wandb_sink.MAX_UNITS + 1)]))
    run = sink._run
    sink.close()
    over = {"recovery/gnmr_over", "recovery/delta_gnmr_over"}
    assert run.logged[0].keys() == set(STEP_METRICS.values()) | over


def test_recovery_totals(event_row: Make) -> None:
    events = [
        event_row(0, "a", cause="warmup"),  # in force in steps 1 to 4
        event_row(4, "a", "release", "warmup"),
        event_row(5, "b"),  # 6 and 7
        event_row(7, "b", "release", "lock"),
        event_row(8, "a"),  # 9 and 10
        event_row(10, "c"),  # from 11 on
    ]
    assert recovery_totals(events, 10) == {"a": 6, "b": 2, "c": 0}
