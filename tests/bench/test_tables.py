from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from gnmr.bench.figures import record

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks" / "results").is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_tables_are_what_the_committed_figures_give(tables: ModuleType) -> None:
    made = tables.made()
    assert {"price-truth.md", "spend.md", "blame.md", "compressed.md"} <= set(made)
    for name, table in made.items():
        assert (tables.DOCS / name).read_text() == table, f"{name}: run python benchmarks/tables.py"
    assert tables.FIGURE.read_bytes() == tables.spend_figure(), "run python benchmarks/tables.py"


def test_what_docs_say_of_compressed_gradients_is_recorded(tables: ModuleType) -> None:
    figures = {one["name"]: one for one in tables._read("compressed.json")["figures"]}
    said = " ".join((ROOT / "docs" / "compressed.md").read_text().split())
    gap, least = figures["gap, never - dense, nats"], figures["smallest effect at 80 % power"]
    closed = figures["gap against random units: gap closed"]["value"]
    assert f"costs {gap['value']:.4f} nats" in said and f"{100 * least['value']:.0f} % of the gap" in said
    assert f"Recovering by `gap` closes {100 * closed:.0f} % of that" in said
    assert f"GNMR's {100 * figures['GNMR against random units: gap closed']['value']:.0f} %" in said
    for name in ("gap against random units", "gap against more rows"):
        assert f"(p = {figures[f'{name}: gap closed']['note'].rpartition(' ')[2]}" in said


def test_numbers_in_texts_are_what_the_committed_figures_give(tables: ModuleType) -> None:
    texts, known = {page: page.read_text() for page in tables.TEXTS}, tables.numbers()
    for page, text in texts.items():
        assert text == tables.filled(text, known), f"{page.name}: run python benchmarks/tables.py"
    named = set(re.findall(r"<!--:(.+?)-->", "".join(texts.values())))
    assert named | {"plan/sim_e2m1"} == set(known), "every number has its place"
    readme = texts[tables.TEXTS[0]]
    wrong = readme.replace("78 %<!--/-->", "79 %<!--/-->")
    assert wrong != readme and tables.filled(wrong, known) == readme


def test_another_figure_is_another_table(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables.price_truth()
    for name in tables.TRUTH:
        tree = json.loads((tables.RESULTS / name).read_text())
        tree["figures"][0]["value"] += 0.01
        (tmp_path / name).write_text(json.dumps(tree))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.price_truth() != before


def test_a_record_names_no_place_of_the_machine() -> None:
    tree = record({}, "gnmr bench price run=/scratch/me/a,/scratch/me/b out=/home/of/me/x.json", {})
    assert tree["command"] == "gnmr bench price run=a,b out=x.json"
