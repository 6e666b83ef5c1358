from __future__ import annotations

import importlib.util
import json
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
    assert {"price-truth.md", "spend.md", "blame.md"} <= set(made)
    for name, table in made.items():
        assert (tables.DOCS / name).read_text() == table, f"{name}: run python benchmarks/tables.py"
    assert tables.FIGURE.read_bytes() == tables.spend_figure(), "run python benchmarks/tables.py"


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
