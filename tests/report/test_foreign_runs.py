"""A run folder of somebody else is data: nothing is followed, imported or resolved, and sizes are bounded."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gnmr.lab.cli import main

Write = Callable[..., Path]
SECRET = "of nobody's business"


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SECRET", SECRET)
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return file


@pytest.fixture
def odd_runs(write_run: Write) -> Callable[[], Path]:
    """Makes runs to be made odd, beside one that is sound: odd_runs() is another one with every call."""
    write_run(arm="bf16")
    seed = itertools.count()
    return lambda: write_run(arm="int4", settings={"controller.max_o": 1}, seed=next(seed))


@pytest.fixture
def odd(odd_runs: Callable[[], Path]) -> Path:
    return odd_runs()


def shown(runs: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, the lines for people, and all that was printed or written."""
    code = main(["report", str(runs), f"--out={runs}/out", f"--html={runs}/page.html", *words])
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
    assert "| bf16 |" in everything and everything.count("\nLeft out: ") == len(why)
    assert main(["report", str(odd), f"--out={odd.parent}/alone"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2, "the warning and the mistake"
    return everything


FILES = ["config.yaml", "header.json", "steps.jsonl", "eval.jsonl", "summary.json", "FAILED"]


def test_a_file_that_is_none(odd_runs: Callable[[], Path], secret: Path, capsys) -> None:
    why = {}
    for name, kind in itertools.product(FILES, ("link", "fifo")):
        run = odd_runs()
        why[run] = f"{name}: "
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret) if kind == "link" else os.mkfifo(run / name)
    assert SECRET not in left_out(why, capsys)


def test_no_interpolation_is_resolved(odd: Path, secret: Path, capsys) -> None:
    config = odd / "config.yaml"
    config.write_text(config.read_text().replace("scale_name: cpu", "scale_name: ${oc.env:SECRET}"))
    assert SECRET not in left_out({odd: "no interpolations"}, capsys)


def rows(*changes: dict) -> str:
    return "".join(json.dumps({"step": step, "loss": 1.0} | change) + "\n" for step, change in enumerate(changes, 1))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
ODD = {
    "a header of a list": ("header.json", '{"units": 5}', "header.json"),
    "70,000 units": ("header.json", json.dumps({"units": [f"u{i}" for i in range(70_000)]}), "at most 65,535"),
    "a number without end": ("header.json", '{"seed": 1' + "0" * 400 + "}", "beyond 64 bits"),
    "a very deep header": ("header.json", '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested"),
    "a figure in words": ("summary.json", '{"status": "done", "steps": "many"}', "is not a number"),
    "a step that is not a number": ("steps.jsonl", rows({}, {"step": "two"}), "line 2: cannot be read"),
    "a repeated step": ("steps.jsonl", rows({}, {"step": 1}), "step 1 comes after step 1"),
    "aliases without end": ("config.yaml", BOMB, "aliases are not supported"),
    "code in YAML": ("config.yaml", "a: !!python/object/apply:os.getcwd []", "cannot be read"),
    "rows of another format": ("units.arrows", "PAR1 no such stream", "units.arrows: "),
    "a large config": ("config.yaml", "a: " + "x" * 600_000, "are the most"),
}


def test_each_odd_run_is_left_out_with_one_line(odd_runs: Callable[[], Path], capsys) -> None:
    why = {}
    for name, content, words in ODD.values():
        run = odd_runs()
        why[run] = words
        (run / name).write_text(content)
    left_out(why, capsys)


def test_a_long_row_and_one_of_sixteen_gigabytes(odd_runs: Callable[[], Path], capsys) -> None:
    why = {}
    for name, size, words in (
        ("eval.jsonl", 20 << 20, "more than 16,777,216 bytes"),
        ("steps.jsonl", 16 << 30, "the most"),
    ):
        run = odd_runs()
        why[run] = words
        with (run / name).open("wb") as stream:
            stream.write(b'{"step": 1, "x": "')
            stream.truncate(size)
    left_out(why, capsys)


EVIL = {
    "markup": [
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "a | b ` c",
        "\x1b]0;owned\x07\x1b[31m\u202e",
    ],
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
        folder.rename(folder.with_name(f"{folder.name}\u202e"))
    code, told, everything = shown(tmp_path / "runs", capsys)
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
