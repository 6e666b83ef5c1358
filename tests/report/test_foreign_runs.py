"""A folder of others is data: it leads nowhere, runs nothing, has an end, and costs no other run its place."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from gnmr.cli import main
from gnmr.records.reader import read_json, read_jsonl, read_ratios
from gnmr.records.untrusted import Damaged

Write = Callable[..., Path]
SECRET = "of nobody's business"


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SECRET", SECRET)
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return file


@pytest.fixture
def odd(odd_runs: Callable[[], Path]) -> Path:
    """A run to be made odd, beside a sound one."""
    return odd_runs()


@pytest.fixture
def odd_runs(write_run: Write) -> Callable[[], Path]:
    """Makes runs to be made odd, beside one that is sound: odd_runs() is another one with every call."""
    write_run(arm="bf16")
    seed = itertools.count()
    return lambda: write_run(arm="int4", settings={"controller.max_o": 1}, seed=next(seed))


def shown(runs: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, the lines for people, and all that was printed or written."""
    began = time.process_time()
    code = main(["report", str(runs), f"--out={runs}/out", f"--html={runs}/page.html", *(words or ["--no-plots"])])
    assert time.process_time() - began < 60
    printed = capsys.readouterr()
    files = [runs / "out" / "report.md", runs / "page.html"]
    written = [file.read_text().partition('id="data">')[2] or file.read_text() for file in files if file.is_file()]
    assert "Traceback" not in printed.err
    return code, printed.err, "\n".join([printed.out, printed.err, *written])


def left_out(why: dict[Path, str], capsys: pytest.CaptureFixture[str]) -> str:
    """Each of these odd runs is left out with one line and the sound one shown; alone one is refused with one line.

    Returns all that was printed or written.
    """
    odd = next(iter(why))
    code, told, everything = shown(odd.parents[1], capsys)
    lines = told.splitlines()
    assert code == 0 and len(lines) == len(why), told
    for run, words in why.items():
        (line,) = (line for line in lines if f"{run} left out: " in line)
        assert line.startswith("gnmr: warning: ") and words in line, line
    assert "bf16" in everything
    assert main(["report", str(odd), f"--out={odd.parent}/alone", "--no-plots"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2, "the warning and the mistake"
    return everything


# ---- links ----


FILES = ["config.yaml", "header.json", "steps.jsonl", "eval.jsonl", "summary.json", "FAILED", "ratios.parquet"]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_file_that_is_none(kind: str, odd_runs: Callable[[], Path], secret: Path, capsys) -> None:
    why = {}
    for name in FILES[kind == "folder" :]:  # where config.yaml is a folder is no run
        run = odd_runs()
        why[run] = f"{name}: "
        (run / name).unlink(missing_ok=True)
        if kind == "link":
            (run / name).symlink_to(secret)
        elif kind == "fifo":
            os.mkfifo(run / name)
        else:
            (run / name).mkdir()
    assert SECRET not in left_out(why, capsys)


def test_replay_follows_no_link_either(odd: Path, secret: Path, gnmr) -> None:
    for name in ("header.json", "config.yaml", "ratios.parquet"):
        kept = (odd / name).read_bytes()
        (odd / name).unlink()
        (odd / name).symlink_to(secret)
        assert f"{odd / name}: cannot be read (is a symbolic link)" in gnmr("replay", str(odd)).mistake
        (odd / name).unlink()
        (odd / name).write_bytes(kept)
    assert gnmr("replay", str(odd)).code == 0


def test_a_folder_that_the_user_names_may_be_a_link(odd: Path, tmp_path: Path, gnmr) -> None:
    (tmp_path / "link").symlink_to(odd)
    assert gnmr("replay", str(tmp_path / "link")).code == 0
    assert main(["report", str(tmp_path / "link"), f"--out={tmp_path}/out", "--no-plots"]) == 0


def test_the_report_is_not_written_through_a_link(odd: Path, secret: Path, tmp_path: Path, gnmr) -> None:
    runs = odd.parents[1]
    (tmp_path / "elsewhere").mkdir()
    (runs / "report").symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link; name the folder" in gnmr("report", str(runs), "--no-plots").mistake
    assert not list((tmp_path / "elsewhere").iterdir())
    (runs / "report").unlink()
    (runs / "report").mkdir()
    (runs / "report" / "report.md").symlink_to(secret)
    assert "is a symbolic link, and is left as it is" in gnmr("report", str(runs), "--no-plots").mistake
    (runs / "report" / "report.md").unlink()
    (runs / "report" / "stress-cpu-loss.png").symlink_to(secret)
    assert "is a symbolic link, and is left as it is" in gnmr("report", str(runs)).mistake
    assert secret.read_text() == SECRET


# ---- nothing is run or looked up ----


def test_no_interpolation_is_resolved(odd: Path, secret: Path, capsys) -> None:
    config = odd / "config.yaml"
    config.write_text(config.read_text().replace("scale_name: cpu", "scale_name: ${oc.env:SECRET}"))
    assert SECRET not in left_out({odd: "an interpolation"}, capsys)


def test_a_signal_of_the_folders_is_imported_with_trust_alone(
    odd: Path, tmp_path: Path, gnmr, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folders_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom gnmr.control.signals import GnmrSignal as Own\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = yaml.safe_load((odd / "config.yaml").read_text())
    tree["controller"]["signal"] = "folders_own:Own"
    (odd / "config.yaml").write_text(yaml.safe_dump(tree))
    for words in ([], ["calibrate=0.1"], ["detect=0.1"]):
        assert "its signal folders_own:Own would be imported" in gnmr("replay", str(odd), *words).mistake
    assert "folders_own" not in sys.modules and not (tmp_path / "ran").exists()
    assert gnmr("replay", str(odd), "signal=gnmr").code == 0 and not (tmp_path / "ran").exists()
    gnmr("replay", str(odd), "--trust")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../x:Y", ".x:Y", "a b:Y", ":Y", "x:Y.z"])
def test_a_signal_that_is_no_module(name: str, odd: Path, gnmr) -> None:
    assert "give the name, or package.module:Class" in gnmr("replay", str(odd), f"signal={name}").mistake


# ---- odd contents ----


def rows(*changes: dict) -> str:
    return "".join(json.dumps({"step": step, "loss": 1.0} | change) + "\n" for step, change in enumerate(changes, 1))


def sparse(file: Path, start: bytes, size: int) -> None:
    with file.open("wb") as stream:
        stream.write(start)
        stream.truncate(size)


def config_of(odd: Path, **changes: object) -> str:
    """A config of another version, which no check has seen."""
    tree = yaml.safe_load((odd / "config.yaml").read_text()) | {"of_another_version": 1}
    for key, value in changes.items():
        group, _, name = key.partition("__")
        tree[group][name] = value
    return yaml.safe_dump(tree)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
ODD = {
    "a header of a list": ("header.json", '{"units": 5}', "header.json"),
    "a unit that is no text": ("header.json", '{"units": [1, 2]}', "header.json"),
    "70,000 units": ("header.json", json.dumps({"units": [f"u{i}" for i in range(70_000)]}), "at most 65,535"),
    "a machine in words": ("header.json", '{"machine": "mine"}', "machine: must be"),
    "a seed that is a list": ("header.json", '{"seed": [1]}', "seed: must be"),
    "a number without end": ("header.json", '{"seed": 1' + "0" * 400 + "}", "beyond 64 bits"),
    "a deep header": ("header.json", '{"a": ' + "[" * 900 + "]" * 900 + "}", "nested"),
    "a very deep header": ("header.json", '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested"),
    "a figure in words": ("summary.json", '{"status": "done", "steps": "many"}', "is no figure"),
    "a number beyond all": ("summary.json", '{"wall_time_s": 1' + "0" * 400 + "}", "beyond 64 bits"),
    "steps in words": ("steps.jsonl", rows({}, {"step": "two"}), "line 2: damaged (its step is 'two'"),
    "a step that is no number": ("steps.jsonl", rows({"step": float("nan")}), "its step is nan"),
    "a negative step": ("steps.jsonl", rows({"step": -1}), "its step is -1"),
    "a repeated step": ("steps.jsonl", rows({}, {"step": 1}), "step 1 stands behind step 1"),
    "no step": ("steps.jsonl", '{"loss": 1.0}\n', "its step is None"),
    "a huge step": ("steps.jsonl", rows({"step": 10**400}), "beyond 64 bits"),
    "a deep row": ("steps.jsonl", '{"step": 1, "a": ' + "[" * 200_000 + "]" * 200_000 + "}\n", "nested"),
    "a share of text": ("steps.jsonl", rows({"over": {"gnmr": "x"}}), "cannot be read (ValueError"),
    "steps behind each other": ("events.jsonl", rows({"step": 2}, {"step": 1}), "stands behind"),
    "aliases without end": ("config.yaml", BOMB, "an alias"),
    "a deep config": ("config.yaml", "a: " + "[" * 200_000 + "]" * 200_000, "nested"),
    "code in YAML": ("config.yaml", "a: !!python/object/apply:os.getcwd []", "cannot be read"),
    "a large config": ("config.yaml", "a: " + "x" * 600_000, "are the most"),
    "fault windows without units": ("faults.jsonl", '{"step": 1, "end": 2}\n', "not a fault window"),
}


def test_each_odd_run_is_left_out_with_one_line(odd_runs: Callable[[], Path], capsys) -> None:
    why = {}
    for name, content, words in ODD.values():
        run = odd_runs()
        why[run] = words
        (run / name).write_text(content)
    for changes in ({"training__steps": "x"}, {"training__seed": [1]}, {"controller__max_o": -1}):
        run = odd_runs()
        why[run] = "must be a whole number"
        (run / "config.yaml").write_text(config_of(run, **changes))
    left_out(why, capsys)


def test_what_nobody_thought_of_leaves_one_run_out(odd: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last net: the run with which a table stumbles is found among the others."""
    tables = importlib.import_module("gnmr.lab.report.tables")
    control = tables.control

    def stumbles(comparison, *rest):
        if any(run.folder == odd for run in comparison.runs):
            raise ZeroDivisionError("what nobody thought of")
        return control(comparison, *rest)

    monkeypatch.setattr(tables, "control", stumbles)
    left_out({odd: "ZeroDivisionError: what nobody thought of"}, capsys)


def test_a_defect_of_ours_is_no_runs_fault(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback is for us: no single run fails, all together do."""
    from gnmr.lab import report

    def broken(comparisons, *_):
        if len([run for comparison in comparisons for run in comparison.runs]) > 1:
            raise ZeroDivisionError
        return []

    monkeypatch.setattr(report, "tables", broken)
    with pytest.raises(ZeroDivisionError):
        main(["report", str(odd.parents[1]), "--no-plots"])


# ---- sizes ----


def test_a_row_of_sixteen_gigabytes(odd: Path, capsys) -> None:
    sparse(odd / "steps.jsonl", b'{"step": 1, "x": "', 16 << 30)
    left_out({odd: "steps.jsonl: cannot be read ("}, capsys)


def test_a_file_with_holes(tmp_path: Path) -> None:
    sparse(tmp_path / "eval.jsonl", b'{"step": 1}\n', 1 << 30)
    with pytest.raises(Damaged, match=r"has holes|more than .* bytes"):
        read_jsonl(tmp_path / "eval.jsonl")


def test_a_compressed_file_that_expands_without_end(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "events.jsonl.gz", "wb", 9) as file:
        for _ in range(400):
            file.write(b'{"step": 1, "unit": "' + b"a" * 100_000 + b'"}\n')
    with pytest.raises(Damaged, match="expands without end"):
        read_jsonl(tmp_path / "events.jsonl")


def test_a_long_row(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "eval.jsonl.gz", "wb", 9) as file:
        file.write(b'{"step": 1, "x": "' + b"x" * (20 << 20))
    with pytest.raises(Damaged, match=r"more than 16,777,216 bytes|expands without end"):
        read_jsonl(tmp_path / "eval.jsonl")


def test_an_honest_run_of_ten_thousand_units(tmp_path: Path) -> None:
    units = [f"model.layers.{i // 7}.mlp.experts.{i % 7}.down_proj" for i in range(10_000)]
    (tmp_path / "header.json").write_text(json.dumps({"units": units, "cost": [1.0] * 10_000}))
    found = read_json(tmp_path / "header.json")
    assert found is not None and found["units"] == units
    table = pa.table({"step": [1] * 10_000, "unit": units, "norm": np.ones(10_000)})
    pq.write_table(table, tmp_path / "ratios.parquet")
    assert read_ratios(tmp_path).num_rows == 10_000


def table_of(number: int, **columns: pa.Array) -> pa.Table:
    ones = np.ones(number)
    plain = {
        "step": pa.array(np.arange(1, number + 1, dtype=np.int32)),
        "unit": pa.array(["a"] * number).dictionary_encode(),
        "norm": pa.array(ones),
        "risk": pa.array(ones),
        "active": pa.array(ones > 2),
        "lock": pa.array(np.zeros(number, np.int32)),
    }
    return pa.table(plain | columns)


def repeated(value: object, number: int) -> pa.Array:
    return pa.array([value]).take(pa.array(np.zeros(number, np.int32)))


TABLES = {
    "five million equal rows": (lambda: pa.table({"step": repeated(1, 5_000_000)}), "5,000,000 rows in"),
    "70,000 units": (lambda: table_of(70_000, unit=pa.array([f"u{i}" for i in range(70_000)])), "at most 65,535 names"),
    "steps in words": (lambda: table_of(3, step=pa.array(["one", "two", "three"])), "ratios.parquet: cannot be read"),
    "a step of 0": (lambda: table_of(3, step=pa.array([0, 1, 2])), "step 0: steps count from 1"),
    "a step that is no number": (lambda: table_of(3, step=pa.array([1, None, 2])), "has gaps"),
    "a step beyond all": (lambda: table_of(3, step=pa.array([1, 2, 2**62])), "ratios.parquet: cannot be read"),
    "units that are numbers in lists": (lambda: table_of(3, unit=pa.array([[1], [2], [3]])), "cannot be read"),
    "a repeated step": (lambda: table_of(3, step=pa.array([1, 1, 2])), "in two rows"),
    "no risk": (lambda: table_of(3).drop(["risk"]), "no column 'risk'"),
    "a matrix nearly empty": (
        lambda: table_of(30_000, unit=pa.array([f"u{i}" for i in range(30_000)])),
        "too large to be shown",
    ),
}


@pytest.mark.slow
def test_ratios_that_are_none(odd_runs: Callable[[], Path], capsys) -> None:
    why = {}
    for made, words in TABLES.values():
        run = odd_runs()
        why[run] = words
        pq.write_table(made(), run / "ratios.parquet")
    for numbers in ((-1, 0), (1, -1), (1, 7)):  # of a run that goes on, or was killed: step, unit, a unit beyond
        run = odd_runs()
        why[run] = "ratios.rows: damaged (a row's step or unit)"
        row = struct.pack("<iidd?i", *numbers, 1.0, 1.0, False, 0)
        (run / "ratios.rows").write_bytes(b'{"units": ["a"], "columns": []}\n' + row)
    left_out(why, capsys)


@pytest.mark.parametrize("step", [2**31 - 1, 9223372036854775807])
def test_replay_of_a_step_beyond_all(step: int, gnmr, tmp_path: Path) -> None:
    (tmp_path / "norms.csv").write_text(f"step,unit,norm\n1,a,1.0\n{step},a,1.0\n")
    assert f"step {step} is too large" in gnmr("replay", str(tmp_path / "norms.csv")).mistake


# ---- what is shown ----

EVIL = {
    "markup": [
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "a | b ` c",
        "\x1b]0;owned\x07\x1b[31m\u202e",
    ],
    "formulas": ["$\\frac{", "$a$ $\\nothing$"],  # drawn too
    "long": ["a" * 100_000],
}


@pytest.mark.parametrize("case", EVIL)
def test_words_of_a_folder_are_shown_as_words(case: str, write_run: Write, tmp_path: Path, capsys) -> None:
    for seed, evil in enumerate(EVIL[case]):
        header = {"commit": evil, "command": evil, "machine": {"cpu": evil, "device": evil}, "arm": evil}
        folder = write_run(arm="int4", seed=seed, header=header)
        tree = yaml.safe_load((folder / "config.yaml").read_text()) | {"of_another_version": 1, "scale_name": evil}
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        (folder / "DONE").unlink()
        (folder / "FAILED").write_text(evil)
    code, told, everything = shown(tmp_path / "runs", capsys, "--strict" if case == "formulas" else "--no-plots")
    assert (code, told) == (0, "")
    assert "\x1b" not in everything and "\x07" not in everything and "\u202e" not in everything
    markdown = (tmp_path / "runs" / "out" / "report.md").read_text()
    bare = re.sub(r"\\.", "", markdown)  # without what is escaped
    assert "<" not in bare and "](java" not in bare
    runs = markdown[markdown.index("### Runs") :].splitlines()
    cells = [line.count("|") - line.count("\\|") for line in runs if line.startswith("| ")]
    assert cells == [7] * (2 + len(EVIL[case]))
    page = (tmp_path / "runs" / "page.html").read_text()
    assert "<img" not in page.partition('id="data">')[2].partition("</script>")[0]
    assert max(map(len, markdown.splitlines())) < 40_000


def test_a_columns_name_is_no_link() -> None:
    """plotly reads a little HTML: every name that goes to it does so through `plain`."""
    import gnmr.lab.report.html

    page = (Path(gnmr.lab.report.html.__file__).parent / "page.html").read_text()
    unit = page[page.index("function drawUnit") : page.index("// ---- regime map ----")]
    assert "name: plain(name)" in unit and "axis(plain(title)" in unit
    assert "yaxis: `y${id}`, name," not in unit
