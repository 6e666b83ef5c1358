"""`gnmr blame`: the recorded spikes of a run in lines and as a page; mistakes in one line."""

from __future__ import annotations

import json
import shutil
from html import unescape
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "runs" / "reference" / "example"
HOSTILE = "<img src=x onerror='window.owned = 1'>"
UNIT = "layers.0.self_attn.v_proj"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The shipped run, with three spikes."""
    folder = tmp_path / "run"
    shutil.copytree(EXAMPLE, folder)
    spikes = [(17, f"{UNIT} {HOSTILE}", "precision"), (34, UNIT, "precision"), (37, None, "data_or_model")]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    events += [{"step": step, "unit": unit, "event": "verdict", "cause": cause} for step, unit, cause in spikes]
    events[-2]["complete"], events[-1]["complete"] = False, True  # the first is of an older run, without the field
    events.sort(key=lambda row: row["step"])
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    return folder


def test_spikes_are_lines_and_a_page(gnmr, run: Path, tmp_path: Path) -> None:
    ended = gnmr("blame", str(run), f"html={tmp_path / 'page.html'}")
    assert (ended.code, ended.err) == (0, ""), ended.err
    first, second, third, verdict, precision, data, written = ended.out.splitlines()
    assert first.startswith(f"step 17  to blame: precision ({UNIT}, <img") and "(usually " in first
    assert second.startswith(
        f"step 34  to blame: precision ({UNIT}; perhaps fewer); loss 6.646 (usually 5.607), norm 39.63"
    )
    assert third.startswith("step 37  to blame: data or model; loss ")
    assert f"3 spikes in 40 steps: 2 by precision, 1 by data or model; blamed most often: {UNIT}" in verdict
    assert precision.startswith("precision: ") and data.startswith("data or model: look at the batch")
    html = (tmp_path / "page.html").read_text()
    assert written == f"page: {tmp_path / 'page.html'}" and verdict.partition(": ")[2] in unescape(html)
    assert html.count("; perhaps fewer") == 1
    assert HOSTILE not in html and "<script" not in html and "default-src 'none'" in html
    assert html.count("<line ") == 3 and '<path d="M0.0,' in html and "2 of 2" in html


def test_a_run_without_spikes_has_no_table(gnmr, tmp_path: Path) -> None:
    ended = gnmr("blame", str(EXAMPLE), f"html={tmp_path / 'page.html'}")
    assert ended.code == 0 and "no spike with a recorded cause in 40 steps" in ended.out
    assert "<table" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{run}", "html=no/where.html"], "html=no/where.html: must be a file in a folder that exists"),
        (["nobody"], "nobody: no such folder"),
        (["{run}", "htm=page.html"], "unknown option 'htm=page.html': did you mean html"),
        (["{runs}"], "holds 2 runs; name one, such as"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(gnmr, run: Path, words: list[str], line: str) -> None:
    shutil.copytree(run, run.parent / "second")
    places = {"run": run, "runs": run.parent}
    ended = gnmr("blame", *(word.format(**places) for word in words))
    assert ended.code == 2 and line in ended.err and ended.err.count("\n") == 1, ended.err
