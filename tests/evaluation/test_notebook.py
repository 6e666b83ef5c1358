"""The notebook's cells run as they stand, on a tiny checkpoint in the place of SmolLM2."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "where_does_nvfp4_hurt.ipynb"


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "smollm2").symlink_to(checkpoint)
    (tmp_path / "wikitext2-test.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    runpy.run_path(str(EXAMPLES / "run_notebook.py"))["run"](notebook)
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    assert "nvfp4 costs" in printed and "modelopt_quant_cfg.py" in printed
    assert [list(output["data"]) for output in outputs if output["output_type"] == "display_data"] == [
        ["image/svg+xml"],
        *[["text/html"]] * 3,
    ]


def test_the_notebook_is_saved_with_its_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
