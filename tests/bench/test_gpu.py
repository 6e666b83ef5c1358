"""benchmarks/gpu.py as far as a CPU can run it: every section on tiny models."""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)

sys.path.insert(0, str(BENCHMARKS))
gpu = import_module("gpu")


def rows_of(section: str, out: Path) -> list[dict[str, Any]]:
    """Run a section in this process."""
    gpu.change(out, lambda tree: tree.update(sections={section: {"rows": []}}))
    lab = gpu.Lab(section, out, None, torch.device("cpu"), tiny=True, ends=time.monotonic() + 600)
    gpu.SECTIONS[section][0](lab)
    rows: list[dict[str, Any]] = json.loads(out.read_text())["sections"][section]["rows"]
    assert not [row for row in rows if "error" in row]
    return rows


def test_on_one_device_everything_is_equal(tmp_path: Path) -> None:
    rows = rows_of("correctness", tmp_path / "out.json")
    assert {row["least_share_of_equal_elements"] for row in rows if row["what"] == "cast"} == {1.0}
    assert {row[name] for row in rows if row["what"] == "saved" for name in ("codes", "scales", "values")} == {1.0}
    for row in rows:
        if row["what"] == "linear":
            stochastic = row["path"].startswith("nvfp4") and row["path"] != "nvfp4_no_sr"
            assert stochastic or row["gpu_to_cpu"] == [999.0] * 3, row
    hardware = {row["recipe"]: row for row in rows if row["what"] == "hardware"}
    assert hardware["llm_int8"]["sqnr_to_simulation"] == [999.0] * 3
    assert min(hardware["fp8_hybrid"]["sqnr_to_simulation"]) > 40 and "refused" in hardware["nvfp4"]


@pytest.mark.parametrize(
    ("section", "what", "arms"),
    [
        ("large", "diagnose", 3),
        pytest.param("paths", "path", 11, marks=pytest.mark.slow),
        pytest.param("control", "step", 20, marks=pytest.mark.slow),
        pytest.param("compiled", "step", 5, marks=pytest.mark.slow),
        pytest.param("price", "price", 8, marks=pytest.mark.slow),
    ],
)
def test_sections(section: str, what: str, arms: int, tmp_path: Path) -> None:
    rows = rows_of(section, tmp_path / "out.json")
    assert len([row for row in rows if row["what"] == what]) == arms
    if section == "price":
        assert min(row["spearman_kl"] for row in rows if row["what"] == "price") > 0.5
    if section == "paths":
        saved = {row["arm"]: row for row in rows if row["what"] == "memory" and "saved_bytes" in row}
        assert all(row["saved_bytes"] == row["predicted_bytes"] for row in saved.values())
        assert saved["int4"]["saved_bytes"] < 0.28 * saved["bf16"]["saved_bytes"]


@pytest.mark.slow
def test_a_failed_section_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    (tmp_path / "empty").mkdir()
    words = [str(out), "--device", "cpu", "--tiny", "--text", str(tmp_path / "empty"), "--only", "price,control"]
    monkeypatch.setitem(gpu.SECTIONS, "control", (gpu.control, 1))
    assert gpu.main(words) == 1
    written = json.loads(out.read_text())
    assert written["torch"] == torch.__version__ and written["command"].startswith("python benchmarks/gpu.py")
    assert written["sections"]["price"]["state"] == "failed with exit code 1"
    assert written["sections"]["price"]["rows"][-1]["error"].startswith("ValueError")
    assert written["sections"]["control"]["state"] == "stopped after 1 s"
    assert gpu.main([*words, "--seconds", "5"]) == 0
    assert json.loads(out.read_text())["sections"]["price"]["state"] == "left out: no time"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.json")
    assert gpu.main([out, "--device", "cpu", "--only", "speed"]) == 2
    assert capsys.readouterr().err.startswith("gpu: --only speed: there is no such section; use correctness, control")
    assert gpu.main([out, "--device", "cpu", "--text", f"{tmp_path}/novels"]) == 2
    assert capsys.readouterr().err.endswith("novels: there is no such folder\n")
    if not torch.cuda.is_available():
        assert gpu.main([out]) == 2
        assert capsys.readouterr().err == "gpu: needs a CUDA GPU; --device cpu --tiny is a dry run without one\n"
    assert not Path(out).exists()
