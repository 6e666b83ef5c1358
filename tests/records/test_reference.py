"""The packs of runs/reference: what their checksums say, and readable by today's code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gnmr.lab.records.pack import ABOUT, unpacked
from gnmr.lab.report.runs import load
from gnmr.records.disk import sha256
from gnmr.records.reader import read_ratios

PLACE = Path(__file__).parents[2] / "runs" / "reference"
PACKS = sorted(PLACE.glob("*.parquet"))


def test_every_pack_is_what_its_checksum_says() -> None:
    lines = dict(reversed(line.split("  ")) for line in (PLACE / "SHA256SUMS").read_text().splitlines())
    assert lines == {path.name: sha256(path) for path in PACKS}
    readme = (PLACE / "README.md").read_text()
    for path in PACKS:
        about = json.loads(pq.read_schema(path).metadata[ABOUT])
        assert f"| {path.name} | {about['runs']} |" in readme
        assert f"`{about['about']['commit']}`" in readme


def test_every_pack_and_run_that_the_docs_name_is_there() -> None:
    named = set()
    root = PLACE.parents[1]
    for document in (root / "README.md", root / "benchmarks" / "README.md", *(root / "docs").rglob("*.md")):
        text = document.read_text()
        named |= set(re.findall(r"runs/reference/(\w+\.parquet)", text))
        assert not re.findall(r"runs/reference/\w+/", text.replace("runs/reference/example/", "")), document
    assert named == {path.name for path in PACKS}


@pytest.mark.parametrize("name", ["operands", "table4", "faults_spikes"])
def test_runs_of_a_pack_load(name: str) -> None:
    with unpacked([PLACE / f"{name}.parquet"]) as found:
        runs = [load(folder) for folder in found.paths]
    assert {run.status for run in runs} == {"done"}


def test_the_example_is_a_whole_run() -> None:
    folder = PLACE / "example"
    run = load(folder)
    assert (run.status, run.last_step) == ("done", 40)
    assert len(run.evals["step"]) and run.events and read_ratios(folder).num_rows
