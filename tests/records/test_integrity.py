"""Records that are moved, lost, altered or led elsewhere: none becomes a figure without a word."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gnmr.errors import RunFailed, UserError
from gnmr.lab.records.summary import summarize
from gnmr.records import ledger
from gnmr.records import writer as writer_module
from gnmr.records.disk import replacing
from gnmr.records.files import JsonLines, replace_text
from gnmr.records.ledger import check_records, replace_listed
from gnmr.records.reader import read_json, read_jsonl, read_ratios
from gnmr.records.writer import RunWriter

Make = Callable[..., Any]
COUNTED = ("steps.jsonl", "eval.jsonl", "events.jsonl", "scores.jsonl", "ratios.rows")


@pytest.fixture
def run_to(
    step_row: Make, eval_row: Make, event_row: Make, ratio_rows: Make
) -> Callable[[Path, int, int, int | None, Any], RunWriter]:
    """Steps first to last with a row of everything in each."""

    def make(folder: Path, first: int, last: int, resume_step: int | None = None, counted: Any = None) -> RunWriter:
        writer = RunWriter(folder, resume_step, counted)
        writer.write_header("a: 1\n", {"units": ["a"]})
        for step in range(first, last + 1):
            writer.step(step_row(step))
            writer.eval(eval_row(step))
            writer.scores({"step": step, "path": "16bit", "tasks": {}})
            writer.events([event_row(step)])
            writer.ratios(ratio_rows(step))
        return writer

    return make


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, bit: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    bit = len(content) * 4 if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    with path.open("r+b") as file:  # the same file: what holds it open sees it
        file.write(content)


def swap(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


SPOILS = {
    "removed": Path.unlink,
    "moved": lambda path: path.rename(path.with_name("elsewhere")),
    "replaced by its copy": swap,
    "cut": halve,
    "a byte": flip,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", [*COUNTED, "config.yaml", "header.json"])
@pytest.mark.parametrize("how", SPOILS)
def test_a_file_that_is_spoilt_while_the_run_goes_is_no_done(how: str, name: str, tmp_path: Path, run_to: Make) -> None:
    if how == "replaced by its copy" and name in ("config.yaml", "header.json"):
        return  # they are not held open, and hold what was written
    writer = run_to(tmp_path / "run", 1, 4)
    SPOILS[how](tmp_path / "run" / name)
    with pytest.raises(RunFailed, match=rf"{name}|its records") as failure:
        writer.finish("done", None, 4, 2)
    assert "\n" not in str(failure.value)
    writer.finish("failed", str(failure.value), 4, 2)
    assert (tmp_path / "run" / "FAILED").exists() and not (tmp_path / "run" / "DONE").exists()


@pytest.mark.parametrize("name", COUNTED)
def test_a_checkpoint_sees_it_too(name: str, tmp_path: Path, run_to: Make) -> None:
    writer = run_to(tmp_path / "run", 1, 4)
    writer.sync()
    (tmp_path / "run" / name).unlink()
    with pytest.raises(RunFailed, match=f"{name} was removed, moved or replaced while the run was going"):
        writer.sync()


@pytest.mark.parametrize("instead", ["nothing", "an empty folder"])
def test_a_folder_that_is_gone_is_not_made_again(instead: str, tmp_path: Path, run_to: Make) -> None:
    folder = tmp_path / "run"
    writer = run_to(folder, 1, 4)
    folder.rename(tmp_path / "elsewhere")
    if instead == "an empty folder":
        folder.mkdir()
    with pytest.raises(RunFailed, match=r"the run folder .* was removed, moved or replaced") as failure:
        writer.finish("done", None, 4, 2)
    assert writer.finish("failed", str(failure.value), 4, 2)["status"] == "failed"
    assert list(folder.iterdir()) == [] if instead == "an empty folder" else not folder.exists()
    assert not (tmp_path / "elsewhere" / "DONE").exists()


@pytest.mark.parametrize("spoil", [halve, flip, Path.unlink], ids=["halved", "altered", "removed"])
@pytest.mark.parametrize("name", COUNTED)
def test_lost_rows_mark_the_run(name: str, spoil: Make, tmp_path: Path, run_to: Make) -> None:
    first = run_to(tmp_path, 1, 8)
    counted = first.sync()
    first.close()
    spoil(tmp_path / name)
    with pytest.warns(UserWarning, match=rf"{name} lost or changed some of the \d+ rows .* of step 8 counted"):
        second = run_to(tmp_path, 9, 10, 8, counted)
    later = second.sync()
    assert name in later["incomplete"]
    second.close()
    with pytest.warns(UserWarning, match=name):  # the mark is kept by the next checkpoint
        third = run_to(tmp_path, 11, 12, 10, later)
    with pytest.raises(RunFailed, match=f"the records are incomplete, the weights are not: {name}") as failure:
        third.finish("done", None, 4, 2)
    third.finish("failed", str(failure.value), 4, 2)
    summary = read_json(tmp_path / "summary.json")
    assert summary is not None and name in summary["incomplete"] and summary["status"] == "failed"
    assert not (tmp_path / "DONE").exists()
    check_records(tmp_path)


@pytest.mark.parametrize("last", [8, 11])
def test_whole_rows_leave_no_mark(last: int, tmp_path: Path, run_to: Make, recwarn: pytest.WarningsRecorder) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_to(whole, 1, 12).finish("done", None, 4, 2)
    writer = run_to(cut, 1, 8)
    counted = writer.sync()
    writer.close()
    more = run_to(cut, 9, last, 8, counted)
    more.close()
    run_to(cut, 9, 12, 8, counted).finish("done", None, 4, 2)
    assert (cut / "DONE").exists() and not recwarn.list
    assert (cut / "records.sha256").read_bytes() == (whole / "records.sha256").read_bytes()
    check_records(cut)


def test_the_stream_of_a_finished_run_comes_back_to_the_byte(tmp_path: Path, run_to: Make) -> None:
    writer = run_to(tmp_path, 1, 8)
    counted, stream = writer.sync(), (tmp_path / "ratios.rows").read_bytes()
    writer.finish("done", None, 4, 2)
    assert not (tmp_path / "ratios.rows").exists()
    again = RunWriter(tmp_path, 8, counted)
    assert again.incomplete is None and (tmp_path / "ratios.rows").read_bytes() == stream


def test_a_damaged_parquet_file_marks_the_run_that_goes_on(tmp_path: Path, run_to: Make) -> None:
    writer = run_to(tmp_path, 1, 8)
    counted = writer.sync()
    writer.finish("done", None, 4, 2)
    sound = (tmp_path / "ratios.parquet").read_bytes()
    for bit in random.Random(0).sample(range(8 * len(sound)), 40):
        shutil.copytree(tmp_path, copy := tmp_path.with_name(f"copy{bit}"))
        flip(copy / "ratios.parquet", bit)
        try:
            with pytest.warns(UserWarning, match="ratios"):
                assert "ratios" in (RunWriter(copy, 8, counted).incomplete or "")
        except pytest.fail.Exception:  # a flip that no number was read from
            assert RunWriter(copy, 8, counted).incomplete is None


def test_no_flip_in_the_records_of_a_run_that_ended_is_read(tmp_path: Path, run_to: Make) -> None:
    run_to(tmp_path, 1, 8).finish("done", None, 4, 2)
    replace_listed(tmp_path / "scores.json", {"tasks": {}})
    check_records(tmp_path)
    draw, names = random.Random(0), {p.name for p in tmp_path.iterdir()} - {"DONE"}
    assert names > {"steps.jsonl", "eval.jsonl", "events.jsonl", "ratios.parquet", "summary.json", "records.sha256"}
    for name in sorted(names):
        sound = (tmp_path / name).read_bytes()
        for bit in draw.sample(range(8 * len(sound)), min(100, 8 * len(sound))):
            flip(tmp_path / name, bit)
            with pytest.raises(UserError) as caught:
                check_records(tmp_path)
            assert "\n" not in str(caught.value)
            (tmp_path / name).write_bytes(sound)
    check_records(tmp_path)


@pytest.mark.parametrize("name", ["steps.jsonl", "eval.jsonl", "events.jsonl", "ratios.rows"])
def test_of_a_killed_run_the_checkpoint_tells(name: str, tmp_path: Path, run_to: Make) -> None:
    writer = run_to(tmp_path, 1, 8)
    meta = tmp_path / "checkpoints" / "step-00000008" / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"host": {"records": writer.sync()}}))
    check_records(tmp_path)
    flip(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name}: damaged \(it is not what the checkpoint step-00000008 counted\)"):
        check_records(tmp_path)


@pytest.mark.parametrize("name", ["eval.jsonl", "records.sha256", "summary.json"])
def test_a_pipe_keeps_no_reader_waiting(name: str, tmp_path: Path, run_to: Make) -> None:
    run_to(tmp_path, 1, 8).finish("done", None, 4, 2)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: "):
        check_records(tmp_path)


def test_a_file_of_terabytes_is_not_read(tmp_path: Path, run_to: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run_to(tmp_path, 1, 8).finish("done", None, 4, 2)
    monkeypatch.setattr(ledger, "_MOST_BYTES", 1 << 22)
    os.truncate(tmp_path / "ratios.parquet", 1 << 42)
    with pytest.raises(UserError, match=r"ratios\.parquet: cannot be read \(4,398"):
        check_records(tmp_path)


def test_records_of_an_earlier_version_are_read(tmp_path: Path, run_to: Make) -> None:
    run_to(tmp_path, 1, 8).finish("done", None, 4, 2)
    (tmp_path / "records.sha256").unlink()
    check_records(tmp_path)
    assert read_ratios(tmp_path).num_rows == 32


def test_large_files_may_be_left_out_or_packed_of_a_run_that_is_kept(tmp_path: Path, run_to: Make) -> None:
    import gzip

    run_to(tmp_path, 1, 8).finish("done", None, 4, 2)
    (tmp_path / "ratios.parquet").unlink()
    steps = tmp_path / "steps.jsonl"
    (tmp_path / "steps.jsonl.gz").write_bytes(gzip.compress(steps.read_bytes()))
    steps.unlink()
    check_records(tmp_path)
    (tmp_path / "steps.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(UserError, match=r"steps\.jsonl: damaged"):
        check_records(tmp_path)
    (tmp_path / "steps.jsonl.gz").unlink()
    check_records(tmp_path)
    (tmp_path / "eval.jsonl").unlink()
    with pytest.raises(UserError, match=r"eval\.jsonl: missing"):
        check_records(tmp_path)


def test_pages_of_ratios_have_checksums_that_are_verified(tmp_path: Path, run_to: Make) -> None:
    run_to(tmp_path, 1, 8).finish("done", None, 4, 2)
    parquet = tmp_path / "ratios.parquet"
    chunk = pq.ParquetFile(parquet).metadata.row_group(0).column(2)  # norm
    flip(parquet, 8 * (chunk.data_page_offset + chunk.total_compressed_size - 3))
    with pytest.raises(UserError, match="CRC"):
        read_ratios(tmp_path)


def test_rows_reach_the_disk_before_what_names_them(
    tmp_path: Path, run_to: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut is not to be had here: what is synced, renamed and removed, in which order, is."""
    done: list[str] = []
    fsync, replace, unlink, names = os.fsync, os.replace, Path.unlink, "/proc/self/fd/{}"
    monkeypatch.setattr(
        os, "fsync", lambda fd: (done.append(f"sync {Path(os.readlink(names.format(fd))).name}"), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(f"name {Path(b).name}"), replace(a, b)))
    monkeypatch.setattr(
        Path, "unlink", lambda p, missing_ok=False: (done.append(f"remove {p.name}"), unlink(p, missing_ok))
    )
    writer = run_to(tmp_path / "run", 1, 4)
    done.clear()
    writer.sync()
    assert {f"sync {name}" for name in COUNTED} < set(done) and done[-1] == "sync run"
    done.clear()
    writer.finish("done", None, 4, 2)
    order = ["sync ratios.parquet.tmp", "name ratios.parquet", "sync run", "remove ratios.rows"]
    for name in ("summary.json", "records.sha256", "DONE"):
        order += [f"sync {name}.tmp", f"name {name}", "sync run"]
    rest = iter(done)
    assert all(step in rest for step in order), done


# ---- links ----


def test_no_link_is_followed(tmp_path: Path, run_to: Make) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("steps.jsonl", "ratios.rows", "eval.jsonl"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).symlink_to(mine)
        with pytest.raises((RunFailed, UserError)):
            run_to(tmp_path / "run", 1, 1, 0)
    for name in ("summary.json.tmp", "summary.json", "FAILED", "records.sha256.tmp", "ratios.parquet.tmp", ".reserve"):
        shutil.rmtree(tmp_path / "run")
        writer = run_to(tmp_path / "run", 1, 1)
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(mine)
        writer.finish("failed", "why", 4, 2)
        assert not (tmp_path / "run" / name).is_symlink()
        check_records(tmp_path / "run")
    assert mine.read_text() == "mine"


def test_an_error_leaves_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as file:
        file.write(b"half")
        _ = 1 / 0
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"
    replace_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


# ---- rows without sense ----


@pytest.mark.parametrize(
    "row",
    [
        {"loss": 1.0},
        {"step": "nine"},
        {"step": None},
        {"num_active": "two"},
        {"over": [1]},
        {"saturation": {"input": 1}},
        {"monitored": {"norm": None}},
        {"saved_bytes": "much"},
        {"step_time_s": []},
        {"tokens": 10**400},
    ],
    ids=lambda row: "-".join(row),
)
def test_a_row_without_sense(row: dict[str, Any], tmp_path: Path, run_to: Make, step_row: Make) -> None:
    """On resume, and where a summary is made."""
    writer = run_to(tmp_path, 1, 4)
    counted = writer.sync()
    writer.close()
    path = tmp_path / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(row if "loss" in row else step_row(2) | row)
    path.write_text("\n".join(lines) + "\n")
    summary = summarize(tmp_path, 4, 2, "failed", "why")
    read = isinstance(row.get("step", 2), int) and "loss" not in row and row.get("tokens", 0) != 10**400
    wanted = (3, "1 rows of steps.jsonl are damaged") if read else (1, "steps.jsonl, line 2: damaged (")
    assert summary["steps"] == wanted[0] and summary["incomplete"].startswith(wanted[1])
    for count in (None, counted):
        with pytest.warns(UserWarning, match=r"steps\.jsonl") if count or "step" in row or "loss" in row else none():
            RunWriter(tmp_path, 4, count).finish("failed", "why", 4, 2)


class none:
    """No warning is asked for."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None: ...


def test_a_ratio_row_of_no_unit(tmp_path: Path, run_to: Make) -> None:
    writer = run_to(tmp_path, 1, 4)
    counted = writer.sync()
    writer.close()
    stream = tmp_path / "ratios.rows"
    data = stream.read_bytes()
    row = (len(data) - data.index(b"\n") - 1) // 16
    place = len(data) - 6 * row + 4
    stream.write_bytes(data[:place] + (99).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(UserError, match=r"ratios\.rows: damaged \(a row's step or unit\)"):
        read_ratios(tmp_path)
    with pytest.warns(UserWarning, match=r"ratios\.rows lost or changed"):
        writer = RunWriter(tmp_path, 4, counted)
    assert read_ratios(tmp_path).num_rows == 10
    writer.finish("interrupted", "why", 4, 2)
    assert "the records are incomplete: ratios.rows" in (read_json(tmp_path / "summary.json") or {})["reason"]


@pytest.mark.parametrize(
    "head", [b"[]\n", b'{"units": 3, "columns": []}\n', b"{\n", b'{"units": []}\n', b"[" * 100_000 + b"\n"]
)
def test_a_ratio_stream_without_a_head(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "ratios.rows").write_bytes(head)
    with pytest.raises(UserError, match=r"ratios\.rows: damaged \(its first line\)"):
        read_ratios(tmp_path)


def test_what_cannot_be_a_count_is_refused(tmp_path: Path, run_to: Make) -> None:
    writer = run_to(tmp_path, 1, 4)
    counted = writer.sync()
    writer.close()
    rows = read_jsonl(tmp_path / "steps.jsonl")
    for wrong in ({}, [], {"incomplete": None, "files": {"steps.jsonl": {}}}, {**counted, "incomplete": 3}):
        with pytest.raises(UserError, match="count of the records makes no sense"):
            RunWriter(tmp_path, 4, wrong)
    assert read_jsonl(tmp_path / "steps.jsonl") == rows
    assert writer_module.RunWriter(tmp_path, 4, counted).incomplete is None
    assert JsonLines(Path("/dev/null"), ()).count()["rows"] == 0
