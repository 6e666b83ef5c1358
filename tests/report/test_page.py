"""What the page holds: everything, nothing from elsewhere, whatever the names, and not too much."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import HOSTILE, UNITS, fake_run, sweep, unit_matrices

from gnmr.lab.report import html_page as page_module
from gnmr.lab.report import units
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.html_page import binned, render_page
from gnmr.lab.report.recorded_run import Run, UnitMatrices
from gnmr.lab.report.units import costs, limit, thresholds, unit_map

OWN = Path(page_module.__file__).parent


class Page(HTMLParser):
    """Tags with their attributes, what stands inside each script, and all other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)
        self.data: list[dict[str, Any]] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.cdata_elem:
            self.scripts.append(data)
        else:
            self.text += data


def page(runs: list[Run]) -> Page:
    return Page(render_page(compare(runs), runs, Path()))


def unpacked(tree: dict[str, str]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(tree["data"])), tree["type"])


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    made = page(sweep(tmp_path))
    assert not [tag for tag, _ in made.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]
    links = [value for _, attributes in made.tags for key, value in attributes.items() if key in ("src", "href")]
    assert all(str(link).startswith("#") for link in links)
    policies = [a["content"] for _, a in made.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies and "default-src 'none'" in str(policies[0]) and "http" not in str(policies[0])
    own = (OWN / "page.html.j2").read_text() + (OWN / "page.js").read_text().replace("http://www.w3.org/", "")
    assert not re.findall(r"https?:|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(|innerHTML", own)


def test_names_cannot_break_out(tmp_path: Path) -> None:
    runs = sweep(tmp_path)
    for run in runs:
        run.experiment = HOSTILE
    made = page(runs)
    assert [tag for tag, _ in made.tags].count("script") == len(made.scripts) == 2
    assert f"gnmr train {HOSTILE}" in unescape(made.text)
    assert "owned" not in made.scripts[1] and not [tag for tag, _ in made.tags if tag == "img"]


def test_losses_are_of_runs_and_means_of_finished_seeds(tmp_path: Path) -> None:
    """As they are, and minus those of the 16-bit arm; the labels and texts of the page beside them."""
    runs = sweep(tmp_path / "runs")
    runs.append(fake_run(tmp_path / "stopped", "int4_int8", 2, made=runs[2].units(), status="failed"))
    runs += [fake_run(tmp_path / f"bf16{seed}", "bf16", seed, ppl=39) for seed in (0, 1)]
    made = page(runs)
    (comparison,) = made.data
    assert [arm["label"] for arm in comparison["arms"]] == ["int4", "int4_int8", "bf16"]
    assert "stress, scale cpu: injected faults" in made.text and "cpu, Test CPU" in made.text
    lines = [line for line in comparison["loss"]["plain"] if line["arm"] == 1 and line["of"] == "train"]
    assert [(line.get("seed"), line.get("seeds")) for line in lines] == [(0, None), (1, None), (2, None), (None, 2)]
    assert lines[2]["status"] == "failed"
    assert lines[3]["y"][0] == pytest.approx(8.05), "of 8.0 and 8.1; the failed seed's 8.2 is not in it"
    apart = [line for line in comparison["loss"]["relative"] if line["of"] == "val" and line.get("seeds")]
    mean = np.log(np.array([[50, 51], [40, 41]]) / 39).mean(axis=1)
    assert [(line["arm"], line["y"][1]) for line in apart] == [(n, pytest.approx(mean[n], rel=1e-4)) for n in (0, 1)]
    assert comparison["loss"]["references"] == ["bf16"]


def test_a_map_as_the_page_reads_it(tmp_path: Path) -> None:
    (comparison,) = page(sweep(tmp_path)).data
    tree = comparison["maps"][2]
    assert (tree["width"], tree["bins"], list(tree["values"])) == (1, 60, ["norm", "gnmr", "delta_gnmr", "risk"])
    risk_UB = unpacked(tree["values"]["risk"]).reshape(3, 60)
    assert (risk_UB[0, 30], risk_UB[2, 30], risk_UB[2, 0]) == (2.5, np.inf, 0.5)
    assert unpacked(tree["values"]["norm"]).reshape(3, 60)[2, 59] == pytest.approx(3.059, rel=1e-4)
    assert unpacked(tree["active"]).reshape(3, 60)[0].tolist() == [0] * 31 + [1] * 10 + [0] * 19
    assert tree["promotions"] == [[0, 31, 41, "delta_gnmr", "lock", 2.5], [1, 50, 60, "retry", None, None]]
    assert tree["faults"] == [{"unit": 0, "start": 30, "end": 33, "kind": "underflow", "magnitude": 16.0}]
    assert tree["origin"]["commands"] == [f"gnmr train {HOSTILE}"]


def made_map(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> dict[str, Any]:
    monkeypatch.setattr(units, "COLUMNS", columns)
    (comparison,) = compare([run])
    return unit_map(comparison.arms[0], run, run.units())


def test_a_cell_is_the_step_of_highest_risk_in_its_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps in bins of four; unit 1 is not observed in steps 1 to 4, and has no risk yet in 5 to 8."""
    risk_SU = np.array([[1, 9], [3, 9], [2, 9], [1, 9], [5, 9], [6, 9], [7, 9], [8, 9], [2, 1], [2, 2]], float)
    risk_SU[:8, 1] = np.nan
    made = unit_matrices(10, ["a", "b"], risk_SU)
    made.norm_SU[:4, 1] = np.nan
    made.active_SU[2:6, 0] = True
    found = made_map(fake_run(tmp_path / "run", made=made), monkeypatch, 3)
    assert (found["width"], found["last"]) == (4, 10)
    assert unpacked(found["step"]).tolist() == [1, 3, 0, 0, 0, 1]
    np.testing.assert_array_equal(unpacked(found["values"]["risk"]), np.array([3, 8, 2, np.nan, np.nan, 2], np.float32))
    expected = [1.001, 1.007, 1.008, np.nan, 2.004, 2.009]
    np.testing.assert_allclose(unpacked(found["values"]["norm"]), expected, rtol=2**-13)
    assert unpacked(found["active"]).tolist() == [2, 2, 0, 0, 0, 0]
    assert unpacked(found["recorded"]).tolist() == [4, 4, 2]


def test_bins_without_a_recorded_step_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = unit_matrices(3, ["a"], np.array([[2.0], [3.0], [4.0]]), every=5)
    found = made_map(fake_run(tmp_path / "run", made=made), monkeypatch, 8)
    assert found["width"] == 2
    assert unpacked(found["recorded"]).tolist() == [0, 0, 1, 0, 1, 0, 0, 1]
    np.testing.assert_array_equal(unpacked(found["values"]["risk"])[[0, 2, 4, 7]], [np.nan, 2, 3, 4])


def test_a_verdict_ends_no_promotion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = [(10, "a", "promote", "retry"), (10, "a", "verdict", "precision"), (30, None, "verdict", "not_reproducible")]
    what += [(40, "a", "release", "lock"), (70, "a", "verdict", "data")]
    events = [dict(zip(("step", "unit", "event", "cause"), row, strict=True)) for row in what]
    found = made_map(fake_run(tmp_path / "run", made=unit_matrices(60, ["a", "b"]), events=events), monkeypatch, 800)
    assert found["promotions"] == [[0, 10, 40, "retry", "lock", None]]
    assert found["verdicts"] == [(10, "precision", "a"), (30, "not reproducible", "")]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("pretrained", {"layers": 8, "width": 48}, "pretrained, 8 layers, 48 wide, 1.2M parameters, scale cpu"),
        ("pretrained", None, "pretrained, 1.2M parameters, scale cpu"),
        ("llama", "damaged", "llama, 1.2M parameters, scale cpu"),
    ],
)
def test_the_shape_is_that_of_the_model(tmp_path: Path, name: str, shape: object, expected: str) -> None:
    run = fake_run(tmp_path / "run", settings={"model.name": name})
    run.header |= {"shape": shape, "parameters": 1_234_567}
    assert expected in page([run]).text


def test_a_run_without_anything_recorded(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", status="running")
    nothing = np.zeros((0, 0), np.float32)
    run.made = UnitMatrices(np.zeros(0, np.int64), [], nothing, {}, nothing, nothing.astype(bool))
    run.__dict__ |= {"steps": {key: rows[:0] for key, rows in run.steps.items()}, "summary": {}}
    run.__dict__["evals"] = {key: rows[:0] for key, rows in run.evals.items()}
    (comparison,) = page([run]).data
    assert comparison["maps"] == comparison["loss"]["plain"] == []


def test_maps_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for about two of four: every arm's first run comes before the second seeds."""
    runs = sweep(tmp_path)
    sizes = [sum(len(one["data"]) for one in tree["values"].values()) for tree in page(runs).data[0]["maps"]]
    monkeypatch.setattr(page_module, "MAP_CHARACTERS", sizes[0] + sizes[2] + 150)
    made = page(runs)
    assert [one["label"] for one in made.data[0]["maps"]] == ["int4, seed 0", "int4_int8, seed 0"]
    assert "No room for the maps of int4, seed 1; int4_int8, seed 1." in made.text


def test_a_short_last_bin_is_no_cliff() -> None:
    steps = np.arange(1, 42)
    found = binned(steps, np.r_[np.ones(40), 5.0], 10)
    assert len(found) == 4 and found.iloc[-1] == pytest.approx((10 + 5) / 11)
    assert len(binned(np.arange(1, 46), np.ones(45), 10)) == 5, "half full"


def test_units_are_ordered_by_their_price_else_their_risk() -> None:
    made = unit_matrices(3, ["a", "b"], np.array([[1, 2], [np.inf, 2], [np.nan, 2]], float))
    assert costs(made)[0] == "risk"
    np.testing.assert_allclose(costs(made)[1], [1.5, 2.0])
    made.columns["price"] = np.array([[np.nan, np.nan], [3e-3, 1e-3], [np.nan, np.nan]], np.float32)
    name, values = costs(made)
    assert name == "price"
    np.testing.assert_allclose(values, [3e-3, 1e-3], rtol=1e-6)


def test_thresholds_of_two_stages(tmp_path: Path) -> None:
    """The first of them takes 2.5% of the 60 steps."""
    settings = {"controller.alpha": 2.0, "controller.alpha_init": 4.0}
    run = fake_run(tmp_path / "run", settings=settings | {"controller.trigger": 1.5})
    (comparison,) = compare([run])
    assert thresholds(comparison.arms[0], run) == {"gnmr": [(1, 6.0), (3, 3.0)]}
    run.header["calibrated"] = {"after_step": 100, "trigger": 2.5}
    assert thresholds(comparison.arms[0], run) == {"gnmr": [(101, 5.0)]}, "its own trigger, from the step behind"
    run.header["calibrated"] = {"after_step": "1", "trigger": 2.0}
    assert thresholds(comparison.arms[0], run) == {"gnmr": [(1, 6.0), (3, 3.0)]}, "damaged"
    run.settings["fork.heal"] = 40  # stages are shares of the steps before it heals
    assert thresholds(comparison.arms[0], run) == {"gnmr": [(1, 6.0), (3, 3.0)]}


def limit_of(folder: Path, risk_SU: np.ndarray, active: int, **settings: object) -> tuple[float, str]:
    """Of a run in which so many unit-steps were on the recovery path."""
    made = unit_matrices(len(risk_SU), UNITS, risk_SU)
    made.active_SU.ravel()[:active] = True
    run = fake_run(folder / "run", made=made, settings={f"controller.{key}": value for key, value in settings.items()})
    return limit(compare([run])[0].arms[0], run, made)


def test_as_many_unit_steps_are_over_a_rankings_limit_as_it_recovered(tmp_path: Path) -> None:
    risk_SU = np.random.default_rng(0).lognormal(size=(100, 3)).astype(np.float32)
    found, _ = limit_of(tmp_path, risk_SU, 60, routing="ranked", trigger=5.0)
    assert (risk_SU > found).sum() == pytest.approx(60, abs=1)


@pytest.mark.parametrize("risk", [0.0, 1.0, np.nan, np.inf])
def test_risks_that_say_nothing_have_the_limit_1(tmp_path: Path, risk: float) -> None:
    assert limit_of(tmp_path / "a", np.full((10, 3), risk), 6, routing="ranked", trigger=5.0)[0] == 1.0
    assert limit_of(tmp_path / "b", np.full((10, 3), risk), 6, trigger=5.0) == (5.0, "trigger")
