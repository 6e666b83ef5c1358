"""`gnmr report` as a whole: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gnmr.console import Terminal
from gnmr.errors import UserError
from gnmr.lab.cli.report import main
from gnmr.lab.report import report

Write = Callable[..., Path]


def printed(paths: list[Path], out: Path | None = None, width: int = 160, **asked: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    report(paths, out, console, **asked)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_prints_and_writes_the_same_table(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="bf16", val_ppl=40.0)
    write_run(arm="int4", val_ppl=42.0)
    told = printed([tmp_path / "runs"])
    markdown = (tmp_path / "runs" / "report" / "report.md").read_text()
    for needed in ("3.6889", "-4.8%", "stress, scale cpu"):
        assert needed in markdown and needed in told
    assert "gnmr train precision.low=int4 training.seed=0" in markdown
    assert str(tmp_path) not in markdown, "folders are relative to the report's own place"
    page = tmp_path / "runs" / "report" / "report.html"
    assert told.splitlines()[-1] == f"Page: {page}" and "3.6889" in page.read_text()


def test_the_first_line_is_the_pages_sentence_and_the_rest_is_asked_for(write_run: Write, tmp_path: Path) -> None:
    for seed in range(3):
        write_run(arm="bf16", seed=seed, val_ppl=40.0 + seed)
        write_run(arm="int4", seed=seed, val_ppl=42.0 + seed)
    write_run(arm="int4", seed=9, steps=2, planned=3, status="failed", reason="disk full")
    write_run(arm="bf16", experiment="a_trial", steps=2)
    short, long = printed([tmp_path]), printed([tmp_path], everything=True)
    page = (tmp_path / "report" / "report.html").read_text()
    lead = short.splitlines()[0]
    assert lead.startswith("Low precision raised the perplexity by 4.9% (int4 against bf16, n = 3)") and lead in page
    assert "All tables and notes, and 1 other comparison: --all" in short and "disk full" in short
    for rest in ("± is the sample standard deviation", "a_trial", "gnmr train precision.low=int4"):
        assert rest in long and rest not in short
    assert long.startswith("stress, scale cpu: Low precision"), "the largest comparison first, whatever its name"
    assert "--all" not in long


def test_a_single_run_has_the_name_of_its_folder(write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(arm="int4")
    assert run.name in printed([run], everything=True).partition("\nRuns\n")[2]
    monkeypatch.chdir(run)
    assert run.name in printed([Path()], everything=True).partition("\nRuns\n")[2]


def test_its_files_are_there_when_the_reader_leaves(write_run: Write, tmp_path: Path) -> None:
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    write_run(arm="bf16")
    page, out = tmp_path / "new" / "page.html", tmp_path / "out"
    with pytest.raises(BrokenPipeError):
        report([tmp_path / "runs"], out, Terminal(file=Left()), html=page)
    assert page.is_file() and (out / "report.md").is_file()


def test_no_line_is_wider_than_the_terminal(write_run: Write, tmp_path: Path) -> None:
    for alpha in (1.5, 2.0):
        write_run(arm="int4_int8", settings={"controller.alpha": alpha})
    for width in (60, 100):
        told = printed([tmp_path / "runs"], tmp_path / "out", width=width)
        table = told.partition("Report: ")[0].splitlines()[1:]  # the sentence is one line where nobody looks
        assert max(map(len, table)) <= width
        assert told.count("3.6889") == 2, "none is cut off"


def test_refusals_are_one_line(write_run: Write, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        printed([tmp_path / "absent"])
    (tmp_path / "file").write_text("")
    run = write_run(arm="bf16")
    for asked in ({"out": tmp_path / "file"}, {"html": tmp_path / "file" / "x.html"}, {"html": tmp_path}):
        with pytest.raises(UserError, match=r"cannot be written|is a folder") as error:
            printed([run], **asked)
        assert "\n" not in str(error.value)
    for name in ("report.md", "report.html"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).symlink_to(tmp_path / "file")
        with pytest.raises(UserError, match="symbolic link"):
            printed([run], tmp_path / "out")
        (tmp_path / "out" / name).unlink()
    assert (tmp_path / "file").read_text() == ""
    (run / "report").symlink_to(tmp_path)
    with pytest.raises(UserError, match="symbolic link"):
        printed([run])


def test_what_cannot_be_compared_is_refused_where_it_is_asked_for(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="int4", steps=3)
    write_run(arm="int8", steps=2, header={"data": {"fingerprint": "0ther"}})
    write_run(arm="bf16", experiment="another")
    printed([tmp_path])
    with pytest.raises(UserError, match="cannot be compared"):
        printed([tmp_path], strict=True)
    assert main([str(tmp_path / "runs" / "another"), "--strict"]) == 0


def test_the_command_line(write_run: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(arm="bf16")
    out = tmp_path / "out"
    other = write_run(arm="int4")
    assert main([str(tmp_path / "runs"), str(other), f"out={out}"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.md"]
    assert "bf16" in capsys.readouterr().out
    for words in ([], ["--strict"]):
        with pytest.raises((SystemExit, UserError)):
            main(words)


@pytest.mark.slow
def test_imports_neither_torch_nor_the_tests_of_statistics() -> None:
    code = "import sys, gnmr.lab.report, gnmr.lab.report.html_page; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "scipy.stats", "statsmodels"} & {*modules}
