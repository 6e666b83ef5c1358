from __future__ import annotations

import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_rows import eval_row, step_row, unit_rows
from rich.console import Console

from gnmr.lab.views import live as view_module
from gnmr.lab.views.live import LiveView, RunInfo
from gnmr.records.schema import UnitRows
from gnmr.records.summary import summarize

INFO = RunInfo("int4-abc-s0", Path("runs/x"), "int4", "cpu", 40, 4, 2, 1_234_567, 2048)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The view's clock, which stands still until a test sets `now`."""
    standing = SimpleNamespace(now=100.0)
    monkeypatch.setattr(view_module, "time", SimpleNamespace(monotonic=lambda: standing.now))
    return standing


def drive(view: LiveView, folder: Path) -> None:
    view.start(INFO)
    for step in range(1, 41):
        loss = math.nan if step == 39 else 3.25
        row = step_row(step, loss=loss, nonfinite_total=int(step >= 39))
        view.step(
            row,
            unit_rows(
                step,
                columns={"gnmr": np.ones(4), "delta_gnmr": np.full(4, math.nan)},
                risk=np.array([1.0, 9.0, math.inf, math.nan]),
            ),
        )
        if step % 20 == 0:
            view.eval(eval_row(step))
    view.say("a [bold]message[/bold]")
    if view._live is not None:
        view._live.refresh()
    summary = summarize(folder, 4, 2, "failed", "why it failed") | {"tokens_per_s": 5461.3}
    view.stop(summary, ["next: gnmr report runs/x"])
    view.stop()


def shown(console_text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console_text)


def test_picture_on_a_terminal(tmp_path: Path) -> None:
    file = io.StringIO()
    view = LiveView("auto", Console(force_terminal=True, file=file, width=80, _environ={"TERM": "xterm"}))
    drive(view, tmp_path)
    text = shown(file.getvalue())
    assert "40/40" in text and "0:00:00 left" in text
    assert "1.23 M parameters, 4 units, cpu" in text
    assert re.search(r"loss\s+3\.2500", text) and re.search(r"lr\s+3\.33e-04", text)
    assert re.search(r"val ppl\s+8\.03", text)
    assert re.search(r"active\s+2/4, max 2\s+candidates\s+3", text)
    units = re.findall(r"^([●▲▽ ]) layers\.(\d)", text[text.rindex("in recovery") :], re.MULTILINE)
    assert units == [("●", "1"), (" ", "2"), (" ", "0"), (" ", "3")]  # in recovery on top; then inf first, NaN last
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "a [bold]message[/bold]" in text
    assert re.search(r"reason\s+why it failed", text) and re.search(r"tokens/s, median step\s+5\.46 k", text)
    assert text.rstrip().endswith("next: gnmr report runs/x")
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_plain_lines_without_a_terminal(tmp_path: Path, mode: str) -> None:
    file = io.StringIO()
    drive(LiveView(mode, Console(file=file, width=80, force_terminal=mode == "plain", no_color=True)), tmp_path)
    lines = shown(file.getvalue()).splitlines()
    assert lines[0] == ("int4-abc-s0: 40 steps of 2,048 tokens, 1.23 M parameters, 4 units, cpu, records in runs/x")
    speed = "8.19 k tokens/s  MFU 37.5%  left 0:00:00"
    assert lines[1] == f"step 20/40  loss 3.2500  0.2488 bits/byte  lr 3.33e-04  recovery 2/4  {speed}"
    assert lines[2] == "step 20/40  val_loss 2.0500  val_ppl 8.05  1.2500 bits/byte"
    figures = "loss 3.2500  0.1247 bits/byte  lr 3.33e-04  ppl 8.05  recovery 2/4  skipped 1"
    assert lines[3] == f"step 40/40  {figures}  {speed}"
    assert lines[5] == "a [bold]message[/bold]"
    assert lines[-1] == "next: gnmr report runs/x"


def picture(width: int, rows: Any, row: dict[str, Any], events: list[dict[str, Any]], height: int = 40) -> str:
    size: dict[str, Any] = {"width": width, "height": height, "_environ": {"TERM": "xterm"}}
    console = Console(force_terminal=True, file=io.StringIO(), **size)
    view = LiveView("auto", console)
    view._info = INFO
    for loss in (4.0, 3.0, 2.0):
        view.step(row | {"loss": loss}, rows)
    view.events(events)
    view._eval = {"val_ppl": 238.61, "step": 1040}
    plain = Console(width=width, file=io.StringIO())
    plain.print(view._picture())
    return plain.file.getvalue()


@pytest.mark.parametrize("width", [50, 80])
def test_it_fits_and_marks_who_comes_and_who_leaves(width: int) -> None:
    rows = unit_rows(5, columns={"gnmr": np.ones(4)}, risk=np.array([0.2, 0.1, 3.0, 0.9]))
    active = [name for name, on in zip(rows.units, rows.active, strict=True) if on]
    moved = [(5, rows.units[2], "promote"), (4, rows.units[3], "promote"), (5, active[0], "release")]
    events = [{"step": step, "unit": unit, "event": event} for step, unit, event in moved]
    text = picture(width, rows, step_row(5), events)
    assert all(len(line) <= width for line in text.splitlines()), text
    marks = re.findall(r"^([●▲▽ ]) (layers\.\d)", text, re.MULTILINE)
    assert [mark for mark, _ in marks][:2] == ["▽", "▲"] and marks[1][1] == rows.units[2][:8]
    assert ("gnmr" in text) == (width == 80) and re.search(r" 3 +2 ", text)
    assert "1.23 M parameters, 4 units, cpu" in text and "…" not in text


@pytest.mark.parametrize("width", [80, 50])
def test_what_is_long_has_a_form_for_few_columns(width: int) -> None:
    file = io.StringIO()
    view = LiveView("plain", console=Console(file=file, width=width, force_terminal=True, _environ={"TERM": "xterm"}))
    view.say("one\ntwo", narrow="less")
    view.say("always")
    assert shown(file.getvalue()).split() == (["one", "two", "always"] if width == 80 else ["less", "always"])


def test_all_who_are_in_recovery_are_shown_or_counted() -> None:
    def rows(units: int, inside: int) -> UnitRows:
        flags, numbers = np.ones(units, dtype=bool), np.linspace(1, 0, units)
        names = [f"layers.{i}" for i in range(units)]
        return UnitRows(1, names, flags, numbers, {}, numbers, np.arange(units) >= units - inside, np.zeros(units, int))

    text = picture(80, rows(30, 12), step_row(1), [])
    assert (
        len(re.findall("^● layers", text, re.MULTILINE)) == 12 and len(re.findall("^  layers", text, re.MULTILINE)) == 2
    )
    text = picture(80, rows(30, 30), step_row(1), [])
    assert len(re.findall("^● layers", text, re.MULTILINE)) == 16 and "● and 14 more in recovery" in text
    for width in (80, 50):
        text = picture(
            width, rows(30, 30), step_row(1), [{"step": 1, "unit": "layers.3", "event": "release"}], height=24
        )
        assert len(text.splitlines()) < 24 and "● and 24 more in recovery" in text
        text = picture(width, rows(30, 20), step_row(1), [], height=24)
        assert len(text.splitlines()) < 24 and "layers.0 " in text, "the riskiest that may come stay in sight"


def test_off_only_says_what_it_is_told(tmp_path: Path) -> None:
    file = io.StringIO()
    drive(LiveView("off", Console(force_terminal=True, file=file, width=80)), tmp_path)
    assert shown(file.getvalue()) == "a [bold]message[/bold]\n"


def test_a_resumed_run_measures_its_own_pace(clock: SimpleNamespace) -> None:
    file = io.StringIO()
    view = LiveView("plain", Console(file=file, width=80))
    view.start(RunInfo("n", Path("x"), "a", "cpu", 100, 0, 4, 10, 2048, start_step=59))
    view.step(step_row(60), None)
    assert "from step 60" in file.getvalue()
    assert file.getvalue().splitlines()[-1].endswith("left -:--")  # nothing to go by yet
    assert "recovery" not in file.getvalue().splitlines()[-1]  # a run without units
    clock.now += 20.0
    view.step(step_row(80), None)
    assert file.getvalue().splitlines()[-1].endswith("left 0:00:20")


def test_lines_of_a_sweeps_cell_go_to_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive(LiveView("log", folder=tmp_path), tmp_path)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0].startswith("int4-abc-s0: 40 steps of 2,048 tokens") and lines[-1] == "next: gnmr report runs/x"
    assert lines[1].startswith("step 20/40  loss 3.2500")
    (tmp_path / "log.txt").unlink()
    (tmp_path / "log.txt").symlink_to(tmp_path / "elsewhere")
    drive(LiveView("log", folder=tmp_path), tmp_path)  # a log that cannot be written stops nothing
    assert not (tmp_path / "elsewhere").exists() and capsys.readouterr().out == ""
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            view = LiveView("log", folder=tmp_path)
            view._console, view._log = Console(file=full), full
            drive(view, tmp_path)
        assert capsys.readouterr().out == ""
