"""`gnmr demo` on a few steps of the shipped base."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from gnmr.cli import demo
from gnmr.errors import RunFailed
from gnmr.lab.records.find import find_runs
from gnmr.lab.records.pack import unpacked
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.family_notes import p_text
from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import size
from gnmr.lab.report.runs import load
from gnmr.lab.report.tables import comparison_tables
from gnmr.lab.sweep.progress import Cell

ROOT = Path(__file__).parents[1]


def test_its_arms_are_those_of_the_sweep_and_spend_alike(tmp_path):
    cells = list(demo._cells(2, tmp_path))
    configs = [cell.config for cell in cells]
    assert [config.controller.name for config in configs] == [*demo._ARMS] * 2
    assert {config.controller.budget for config in configs[1:4]} == {0.1}
    assert all((config.precision, config.training.steps) == (configs[0].paths, 20) for config in configs)
    assert [config.fork.order for config in configs] == [0] * 5 + [1] * 5
    assert len({cell.folder for cell in cells}) == 10 and cells[0].folder.parent == tmp_path / "demo"


@pytest.mark.parametrize("words", [["orders=0"], ["orders=null"], ["steps=3"], ["orders=x"]])
def test_its_mistakes_are_a_line(words, gnmr, tmp_path):
    (tmp_path / "file").touch()
    assert gnmr("demo", f"runs_dir={tmp_path / 'file'}").mistake.endswith("file: is a file; name a folder")
    assert gnmr("demo", *words).mistake.startswith("demo: " if words[0] in ("orders=null", "steps=3") else "orders=")


def test_a_workers_failure_is_the_commands():
    with pytest.raises(RunFailed, match="disk full"):
        demo._raise(RunFailed("disk full"))
    demo._raise(None)


def test_what_the_docs_show_is_what_its_records_say():
    """Of the packed records of a demo; ... in the text stands for what is left out."""
    if not (pack := ROOT / "runs" / "reference" / "demo.parquet").exists():
        pytest.skip("no checkout: records and docs are not in the wheel")
    with unpacked([pack]) as packed:
        found = demo.found_in(find_runs(packed.paths))
        out = io.StringIO()
        demo.show(found, "20 steps from a trained model of 0.3 M parameters; cpu", Console(file=out, width=200))
        narrow = Console(file=io.StringIO(), width=50, force_terminal=True, _environ={})
        demo.show(found, "20 steps", narrow)
    lines = Text.from_ansi(narrow.file.getvalue()).plain.splitlines()
    assert all(len(line.rstrip()) <= 50 for line in lines) and "…" not in "".join(lines)
    assert any(re.fullmatch(r"price +25% +16% to 33% +9.2%", line.strip()) for line in lines), lines
    said = " ".join(out.getvalue().split())
    for page in ("README.md", "docs/quickstart.md"):
        (block,) = re.findall(r"^```text\n(2-bit inputs.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
        at = 0
        for piece in block.split("..."):
            words = " ".join(piece.split()).removesuffix(";").strip(") ")
            at = said.find(words, at)
            assert at >= 0, f"{page}: {words}"
            at += len(words)


def test_terminal_and_page_show_one_test_and_one_spend():
    """Of the packed records of a demo."""
    if not (pack := ROOT / "runs" / "reference" / "demo.parquet").exists():
        pytest.skip("no checkout")
    with unpacked([pack]) as packed:
        folders = find_runs(packed.paths)
        found = demo.found_in(folders)
        (comparison,) = compare(map(load, folders))
        made = comparison_tables(comparison)
        told = headline(comparison)
        saved = {arm.settings["controller.name"]: arm.mean("saved_bytes_mean") for arm in comparison.arms}
    shown = {row.arm.partition(",")[0].lower(): row for row in found.family.rows}
    spent = {line.name.partition(",")[0].lower(): f"{100 * line.spent:.1f} %" for line in found.lines}
    tables = {table.title.partition(": ")[2]: table.tree() for table in made}
    rows = {
        title: {
            cells[0].removeprefix("int2-"): dict(zip(table["columns"], cells, strict=True)) for cells in table["rows"]
        }
        for title, table in tables.items()
    }
    for name, row in shown.items():
        random = rows["against random at the same budget"][name]
        assert (random["p (Holm)"], random["verdict"].replace("\n", " ")) == (p_text(row.p), row.verdict)
        assert (random["spent"], random["random spent"]) == (spent[name], spent["random"])
        assert rows["gap closed after the arm's steps"][name]["spent"] == spent[name]
        assert rows["control and cost"][name]["GEMMs spent"] == spent[name]
    assert "verdict" not in rows["details, paired tests against int2-never"]["price"]
    assert list(tables).index("gap closed after the arm's steps") < list(tables).index(
        "details, paired tests against int2-never"
    )
    assert f"price got back 25 % at {spent['price']} of the GEMMs' arithmetic" in told.sentence
    assert (
        f"random {round(100 * found.lines[1].closed)} % at {spent['random']} of the GEMMs' arithmetic" in told.sentence
    )
    verdict = rows["gap closed after the arm's steps"]["price"]["verdict"]
    assert f"price is shown to be {verdict} than never" in told.sentence
    assert told.sentence.endswith(f"against random under the same budget: better (p = {p_text(shown['price'].p)}).")
    card = told.figures[2]
    assert card.value == spent["price"]
    assert f"{size(saved['price'] - saved['never'])} more saved for backward, measured" in card.detail
    assert rows["validation"]["never"]["vs 16-bit"].startswith("+51.36"), "everything recovered is bf16"
    assert not [note for table in tables.values() for note in table["notes"] if "No 16-bit arm" in note]


@pytest.mark.slow
def test_the_demo_from_command_to_page(gnmr, tmp_path, monkeypatch):
    """One order of two steps; a second call runs nothing."""
    cells = demo._cells

    def short(orders, runs_dir):
        for cell in cells(orders, runs_dir):
            training = replace(cell.config.training, steps=2, eval_sequences=2)
            yield Cell(cell.words, replace(cell.config, training=training), cell.number)

    monkeypatch.setattr(demo, "_cells", short)
    first = gnmr("demo", "orders=1", f"runs_dir={tmp_path}")
    assert first.code == 0, first.err
    lines = first.out.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in demo._ARMS.values())
    assert "One order of the data: what is chance cannot be told, so nothing is shown" in first.out
    assert all((tmp_path / "demo" / "report" / f"demo.{kind}").exists() for kind in ("svg", "html"))
    ran = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("demo/*/steps.jsonl"))
    monkeypatch.setattr("gnmr.lab.sweep.workers.Workers", None)
    assert gnmr("demo", "orders=1", f"runs_dir={tmp_path}").code == 0
    assert ran == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("demo/*/steps.jsonl"))
