"""`gnmr report` as a whole: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gnmr.cli.report import main
from gnmr.console import Terminal
from gnmr.errors import UserError
from gnmr.lab.paper.tables import paper_tables
from gnmr.lab.report import report

Write = Callable[..., Path]


def printed(paths: list[Path], out: Path | None = None, plots: bool = False, width: int = 100, **asked: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    report(paths, out, console, plots=plots, further=paper_tables, **asked)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_prints_and_writes_the_same_tables(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="bf16", val_ppl=40.0)
    write_run(arm="int4", val_ppl=42.0)
    text = printed([tmp_path / "runs"])
    markdown = (tmp_path / "runs" / "report" / "report.md").read_text()
    for needed in ("42.00 ± -", "+5.00 ± - %", "stress, scale cpu: validation", "it has no figures for scale cpu"):
        assert needed in markdown
        assert needed in text or needed.replace(" ", "") in "".join(text.split())
    assert "| int4 | 1 of 1 | 42.00 ± - |" in markdown
    assert "gnmr train precision.low=int4 training.seed=0" in markdown
    assert str(tmp_path) not in markdown, "folders are told from the report's own place"


def test_its_files_are_there_when_the_reader_leaves(write_run: Write, tmp_path: Path) -> None:
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    write_run(arm="bf16")
    page, out = tmp_path / "page.html", tmp_path / "out"
    with pytest.raises(BrokenPipeError):
        report([tmp_path / "runs"], out, Terminal(file=Left()), html=page)
    assert page.is_file() and (out / "report.md").is_file() and len(list(out.glob("*.png"))) == 5


def test_letters_that_a_terminal_lacks_are_question_marks(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="bf16", val_ppl=40.0)
    command = [sys.executable, "-m", "gnmr", "report", str(tmp_path / "runs"), "--no-plots"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert done.returncode == 0 and done.stderr == b"" and b"40.00 ? -" in done.stdout
    assert "40.00 ± -" in (tmp_path / "runs" / "report" / "report.md").read_text(encoding="utf-8")


def test_ends_with_the_pngs(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="bf16")
    out = tmp_path / "out"
    last = [line.strip() for line in printed([tmp_path / "runs"], out, plots=True, width=40).splitlines()[-5:]]
    names = [f"stress-cpu-{name}" for name in ("loss", "saved-bytes", "gnmr-bf16", "mean-gnmr")]
    names.append("stress-loss-by-tokens")
    assert last == [str(out / f"{name}.png") for name in names]
    assert all(Path(line).stat().st_size > 1000 for line in last)
    assert "![stress-cpu-loss](stress-cpu-loss.png)" in (out / "report.md").read_text()


@pytest.mark.slow
def test_no_line_is_wider_than_the_terminal(write_run: Write, tmp_path: Path) -> None:
    for scale in ("60m", "130m", "350m", "1.3b"):
        for alpha in (1.5, 2.0):
            write_run(arm="int4_int8", scale=scale, settings={"controller.alpha": alpha})
    for width in (80, 100, 120):
        text = printed([tmp_path / "runs"], tmp_path / "out", width=width)
        assert max(map(len, text.partition("Report: ")[0].splitlines())) <= width
        assert text.count("40.00 ± -") == 16, "eight in the arms' tables, eight by scale: none is cut off"


def test_the_default_folder_of_several_runs_is_their_common_parents(write_run: Write, tmp_path: Path) -> None:
    printed([write_run(arm="bf16"), write_run(arm="int4")])
    assert (tmp_path / "runs" / "stress" / "report" / "report.md").exists()


def test_a_run_whose_config_is_broken_is_left_out_and_named(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="bf16")
    broken = write_run(arm="int4")
    (broken / "config.yaml").write_text("- not a mapping")
    with pytest.warns(UserWarning, match=rf"{broken.name} left out: config\.yaml: cannot be read \(not a config"):
        printed([tmp_path / "runs"], tmp_path / "out")
    assert "\nLeft out: " in (tmp_path / "out" / "report.md").read_text()
    with pytest.warns(UserWarning), pytest.raises(UserError, match="not a config") as error:
        printed([broken])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("units.arrows", b"PAR1 no such stream", "left out: units.arrows: "),
        ("units.arrows", b"", ""),
        ("header.json", b"\xff\xfe", ""),
        ("header.json", b"[]", ""),
        ("steps.jsonl", b"[]\n", ""),
        ("summary.json", b"[1]", ""),
    ],
)
@pytest.mark.slow
def test_a_damaged_file_costs_no_more_than_its_run(
    file: str, content: bytes, told: str, write_run: Write, tmp_path: Path
) -> None:
    write_run(arm="bf16", seed=0, steps=12, units=2, val_loss={12: 3.0})
    broken = write_run(arm="int4", seed=0, steps=12, units=2, val_loss={12: 3.0})
    (broken / file).write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        printed([tmp_path / "runs"], tmp_path / "out", plots=True, width=300)
    assert [told in str(one.message) for one in caught] == ([True] if told else [])
    assert (tmp_path / "out" / "report.md").exists()


def test_refusals_are_one_line(write_run: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        printed([tmp_path / "absent"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report") as error:
        printed([write_run(arm="bf16")], tmp_path / "file")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_baseline_can_be_chosen(write_run: Write, tmp_path: Path) -> None:
    for arm, ppl in (("int4", 44.0), ("int8", 40.0), ("int4_int8", 42.0)):
        write_run(arm=arm, val_ppl=ppl)
    assert "against int4\n" in printed([tmp_path])
    text = printed([tmp_path], against="int8")
    assert "against int8\n" in text
    assert "+10.00 [-] %" in text
    with pytest.raises(UserError) as error:
        printed([tmp_path], against="int3")
    assert str(error.value) == "--against int3: no such arm; there are int4, int4_int8-gnmr, int8"
    write_run(arm="int4_int8", settings={"controller.max_o": 2})
    with pytest.raises(UserError, match="several arms have this name: int4_int8-gnmr max_o=2, int4_int8-gnmr max_o=4"):
        printed([tmp_path], against="int4_int8-gnmr")
    assert "against int4_int8-gnmr max_o=2\n" in printed([tmp_path], against="int4_int8-gnmr max_o=2")


def test_what_cannot_be_compared_is_refused_where_it_is_asked_for(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="int4", steps=3)
    write_run(arm="int8", steps=2, header={"data": {"fingerprint": "0ther"}})
    write_run(arm="bf16", experiment="another")
    printed([tmp_path])
    differ = "they differ in data (feedbeef and 0ther), steps (3 and 2)"
    swapped = "they differ in data (0ther and feedbeef), steps (2 and 3)"
    with pytest.raises(UserError) as error:
        printed([tmp_path], strict=True)
    assert str(error.value) in [
        f"stress, scale cpu: these runs cannot be compared, {told}" for told in (differ, swapped)
    ]
    with pytest.raises(UserError) as error:
        printed([tmp_path], against="int4")
    assert str(error.value) == (
        f"--against int4: stress, scale cpu has runs that cannot be compared with this arm's, {swapped}"
    )
    printed([tmp_path], against="bf16")
    assert main([str(tmp_path / "runs" / "another"), "--strict", "--against", "bf16", "--no-plots"]) == 0


def test_the_command_line(write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(arm="bf16")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--no-plots"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.md"]
    assert "bf16" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--no-plots" in capsys.readouterr().out


@pytest.mark.slow
def test_imports_no_torch() -> None:
    code = "import sys, gnmr.lab.report, gnmr.lab.report.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
