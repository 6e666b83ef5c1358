"""What the page holds: everything, nothing from elsewhere, whatever the names, and not too much."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_runs import UNITS, fake_run, ratios

from gnmr.errors import UserError
from gnmr.lab.report import html
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.html import write_html
from gnmr.lab.report.html.pack import number, packed, script_json, shortened
from gnmr.lab.report.html.unit_map import unit_map
from gnmr.lab.report.layout import Table
from gnmr.lab.report.runs import Ratios, Run

HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags with their attributes, and what stands inside each script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[1])


def unpacked(tree: dict[str, str]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(tree["data"])), tree["type"])


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Page]:
    """page(runs) -> the page of these runs, without plotly's five million characters."""
    monkeypatch.setattr(html, "get_plotlyjs", lambda: "/* plotly */")

    def make(runs: list[Run], title: str = "gnmr report", **more: Any) -> Page:
        monkeypatch.setattr(html, "TITLE", title)
        path = tmp_path / "new folder" / "report.html"
        write_html(compare(runs), runs, path, **more)
        return Page(path)

    return make


def sweep(root: Path) -> list[Run]:
    """Two seeds of a static and a routed arm; the routed one promotes unit 0 for steps 11 to 20, unit 1 from 51 on."""
    risk_SU = np.full((60, 3), 0.5)
    risk_SU[9, 0] = 1.5
    risk_SU[49, 1] = np.inf
    made = ratios(60, UNITS, risk_SU)
    made.active_SU[10:20, 0] = made.active_SU[50:, 1] = True
    events = [
        {"step": 10, "unit": UNITS[0], "event": "promote", "cause": "gnmr", "risk": 1.5},
        {"step": 20, "unit": UNITS[0], "event": "release", "cause": "lock", "risk": 0.5},
        {"step": 50, "unit": UNITS[1], "event": "promote", "cause": "nonfinite", "risk": float("inf")},
    ]
    windows = [{"step": 10, "end": 12, "unit": UNITS[0], "kind": "underflow", "magnitude": 16}]
    runs: list[Run] = []
    for seed in (0, 1):
        runs.append(fake_run(root / f"low{seed}", "int4", seed, ppl=50 + seed, command=f"gnmr train low {HOSTILE}"))
        routed = {"made": made, "ppl": 40 + seed, "events": events, "windows": windows}
        runs.append(fake_run(root / f"routed{seed}", "int4_int8", seed, **routed))
    return runs


def test_nothing_is_loaded_from_elsewhere(page: Callable[..., Page], tmp_path: Path) -> None:
    made = page(sweep(tmp_path / "runs"))
    assert not [tag for tag, _ in made.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]
    assert not [attributes for _, attributes in made.tags if "src" in attributes or "href" in attributes]
    (policy,) = [
        attributes["content"]
        for _, attributes in made.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None and "default-src 'none'" in policy and "http" not in policy and "*" not in policy
    own = (Path(html.__file__).parent / "page.html").read_text()
    assert not re.findall(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", own)


def test_names_cannot_break_out(page: Callable[..., Page], tmp_path: Path) -> None:
    made = page(sweep(tmp_path / "runs"), title=HOSTILE)
    assert [tag for tag, _ in made.tags].count("script") == len(made.scripts) == 3
    (comparison,) = made.data["comparisons"]
    assert f"gnmr train low {HOSTILE}" in comparison["origin"]["commands"]
    assert "owned" not in made.scripts[2]


def test_every_section_has_its_data(page: Callable[..., Page], tmp_path: Path) -> None:
    further = Table("Further", ["arm", "x"], [["int4", "1"]])
    data = page(sweep(tmp_path / "runs"), tables=[further, Table("Empty", ["arm"])]).data
    (comparison,) = data["comparisons"]
    assert [arm["label"] for arm in comparison["arms"]] == ["int4", "int4_int8"]
    assert [table["title"] for table in data["tables"]] == ["Further"]
    assert comparison["tables"][0]["rows"][0][0] == "int4"
    assert [row[1] for row in data["runs"]["rows"]] == ["done"] * 4
    assert comparison["origin"]["seeds"] == [0, 1]
    assert comparison["origin"]["machines"] == ["cpu, Test CPU"]
    labels = [one["label"] for one in comparison["maps"]]
    assert labels == ["int4, seed 0", "int4, seed 1", "int4_int8, seed 0", "int4_int8, seed 1"]
    windows = next(table for table in comparison["faults"] if "who caught" in table["title"])
    assert windows["rows"] == [[UNITS[0], "10-12", "underflow", "16", seed, "after 0"] for seed in "01"]
    assert data["regimes"] == {}


def test_losses_are_of_runs_and_means_of_done_seeds(page: Callable[..., Page], tmp_path: Path) -> None:
    runs = sweep(tmp_path / "runs")
    runs.append(fake_run(tmp_path / "stopped", "int4_int8", 2, made=runs[1].ratios(), status="failed"))
    (comparison,) = page(runs).data["comparisons"]
    lines = [line for line in comparison["losses"]["lines"] if line["arm"] == 1 and line["of"] == "train"]
    assert [(line.get("seed"), line.get("seeds")) for line in lines] == [(0, None), (1, None), (2, None), (None, 2)]
    assert lines[2]["status"] == "failed"
    assert lines[3]["y"][0] == pytest.approx(8.05), "of 8.0 and 8.1; the failed seed's 8.2 is not in it"
    assert comparison["losses"]["top"]["train"] == pytest.approx(1.03 * 8.2)


def test_mean_gnmr_of_runs_and_of_done_seeds(page: Callable[..., Page], tmp_path: Path) -> None:
    (comparison,) = page(sweep(tmp_path / "runs")).data["comparisons"]
    low = [line for line in comparison["gnmr"]["lines"] if line["arm"] == 0]
    assert [(line.get("seed"), line.get("seeds")) for line in low] == [(0, None), (1, None), (None, 2)]
    assert set(low[0]["y"]) == {0.25}
    routed = next(line for line in comparison["gnmr"]["lines"] if line["arm"] == 1)
    assert routed["y"][9] == pytest.approx((0.75 + 0.25 + 0.25) / 3, rel=1e-4)
    assert routed["y"][49] == 0.25, "the infinite one is left out"
    assert [one["sixteen_bit"] for one in comparison["maps"]] == [False] * 4


def test_loss_by_tokens_has_one_line_an_arm(page: Callable[..., Page], tmp_path: Path) -> None:
    runs = sweep(tmp_path / "runs")
    runs.append(fake_run(tmp_path / "going", "bf16", 3, status="running"))
    tokens = page(runs).data["tokens"]["stress"]
    told = [(line["label"], line["scale"], line["of"]) for line in tokens["lines"]]
    assert told == [
        ("int4", "cpu", "mean of 2"),
        ("int4_int8", "cpu", "mean of 2"),
        ("bf16", "cpu", "seed 3 (running)"),
    ]
    assert (tokens["lines"][0]["x"][0], tokens["lines"][0]["y"][0]) == (512, pytest.approx(8.05))
    assert tokens["scales"] == ["cpu"]
    assert tokens["origin"]["seeds"] == [0, 1, 3]


def test_quality_against_promotion(page: Callable[..., Page], tmp_path: Path) -> None:
    (comparison,) = page(sweep(tmp_path / "runs")).data["comparisons"]
    routed, low = comparison["promotion"]["points"]
    assert (routed["group"], routed["at"]) == ("gnmr_delta", pytest.approx(20 / 180, rel=1e-4))
    change = np.mean([np.log(40 / 50), np.log(41 / 51)])
    assert routed["difference"]["mean"] == pytest.approx(100 * np.expm1(change), rel=1e-4)
    assert routed["difference"]["low"] < routed["difference"]["mean"] < routed["difference"]["high"]
    assert routed["ppl"] == {"mean": 40.5, "low": number(40.5 - 0.5**0.5), "high": number(40.5 + 0.5**0.5), "n": 2}
    assert (low["group"], low["at"], low["difference"]["mean"], low["label"]) == (None, 0, 0, "int4")


def test_a_map_as_the_page_reads_it(page: Callable[..., Page], tmp_path: Path) -> None:
    (comparison,) = page(sweep(tmp_path / "runs")).data["comparisons"]
    tree = comparison["maps"][2]
    assert (tree["width"], tree["bins"], tree["names"]) == (1, 60, ["norm", "gnmr", "delta_gnmr", "risk"])
    risk_UB = unpacked(tree["values"]["risk"]).reshape(3, 60)
    assert (risk_UB[0, 9], risk_UB[1, 49], risk_UB[2, 0]) == (1.5, np.inf, 0.5)
    assert unpacked(tree["values"]["norm"]).reshape(3, 60)[2, 59] == pytest.approx(3.059, rel=1e-4)
    cause_UB = unpacked(tree["cause"]).reshape(3, 60)
    assert [tree["causes"][place] for place in cause_UB[0, 8:21]] == ["", *["gnmr"] * 11, ""]
    assert [tree["causes"][place] for place in cause_UB[1, [48, 49, 59]]] == ["", "nonfinite", "nonfinite"]
    assert unpacked(tree["active"]).reshape(3, 60)[0].tolist() == [0] * 10 + [1] * 10 + [0] * 40
    promotions = {name: unpacked(array).tolist() for name, array in tree["promotions"].items()}
    assert (promotions["unit"], promotions["step"], promotions["end"]) == ([0, 1], [10, 50], [20, 60])
    assert [tree["causes"][place] for place in promotions["released"]] == ["lock", ""]
    assert tree["faults"] == [{"unit": 0, "start": 10, "end": 12, "kind": "underflow", "magnitude": 16.0}]
    assert tree["origin"]["commands"] == ["gnmr train"]


def test_a_cell_is_the_step_of_highest_risk_in_its_bin(tmp_path: Path) -> None:
    """Ten steps in bins of four; unit 1 is not observed in steps 1 to 4, and has no risk yet in 5 to 8."""
    risk_SU = np.array([[1, 9], [3, 9], [2, 9], [1, 9], [5, 9], [6, 9], [7, 9], [8, 9], [2, 1], [2, 2]], float)
    risk_SU[:8, 1] = np.nan
    made = ratios(10, ["a", "b"], risk_SU)
    made.norm_SU[:4, 1] = np.nan
    made.active_SU[2:6, 0] = True
    found = unit_map(fake_run(tmp_path / "run", made=made), made, columns=3)
    assert (found.width, found.last_step) == (4, 10)
    assert found.step_UB.tolist() == [[1, 3, 0], [0, 0, 1]]
    np.testing.assert_array_equal(found.values["risk"], np.array([[3, 8, 2], [np.nan, np.nan, 2]], np.float32))
    expected = np.array([[1.001, 1.007, 1.008], [np.nan, 2.004, 2.009]], np.float32)
    np.testing.assert_array_equal(found.values["norm"], expected)
    assert found.active_UB.tolist() == [[2, 2, 0], [0, 0, 0]]
    assert found.recorded_B.tolist() == [4, 4, 2]


def test_a_verdict_ends_no_promotion(tmp_path: Path) -> None:
    made = ratios(60, ["a", "b"])
    what = [(10, "a", "promote", "retry"), (10, "a", "verdict", "precision"), (30, None, "verdict", "not_reproducible")]
    what += [(40, "a", "release", "lock"), (70, "a", "verdict", "data")]
    events = [dict(zip(("step", "unit", "event", "cause"), row, strict=True)) for row in what]
    found = unit_map(fake_run(tmp_path / "run", made=made, events=events), made)
    assert found.promotions["end"].tolist() == [40] and found.causes == ["", "retry", "lock"]
    assert found.verdicts == [(10, "precision", "a"), (30, "not reproducible", "")]


def test_bins_without_a_recorded_step_are_empty(tmp_path: Path) -> None:
    made = ratios(3, ["a"], np.array([[2.0], [3.0], [4.0]]), every=5)
    found = unit_map(fake_run(tmp_path / "run", made=made), made, columns=8)
    assert found.width == 2
    assert found.recorded_B.tolist() == [0, 0, 1, 0, 1, 0, 0, 1]
    assert found.step_UB.tolist() == [[0, 0, 0, 0, 1, 0, 0, 0]]
    np.testing.assert_array_equal(found.values["risk"][0, [0, 2, 4, 7]], np.array([np.nan, 2, 3, 4], np.float32))


def test_regime_cells(page: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"verdict": "part of the gap", "vs_low": "better", "vs_random": "better", "difference": -3.25, "p": 0.004}
    told |= {"p_random": 0.03, "gap_closed": 0.61, "promoted": 0.012, "diverged": 1, "seeds": 5}
    cell = {"cell": {"optim.lr": 1e-3}, "low": "hurt", "low_difference": 4.2, "seeds": 5, "arms": {"gap": told}}
    monkeypatch.setattr(html, "regime_maps", lambda _: {"stress": [cell]})
    data = page(sweep(tmp_path / "runs")).data
    assert [comparison["experiment"] for comparison in data["comparisons"]] == ["stress"]
    regime = data["regimes"]["stress"]
    assert regime["summary"].startswith("In 1 of 1 cells the static low path is hurt.")
    assert regime["axes"] == ["optim.lr", "arm"]
    low, arm = regime["squares"]
    assert (low["at"], low["verdict"]) == ({"optim.lr": 0.001, "arm": "static low path"}, "hurt")
    assert low["facts"] == [["perplexity relative to static recovery", "+4.20 %"], ["seeds", "5"]]
    assert (arm["at"], arm["verdict"]) == ({"optim.lr": 0.001, "arm": "gap"}, "part of the gap")
    assert ["against random", "better (p = 0.03)"] in arm["facts"]
    assert ["gap closed", "61 %"] in arm["facts"] and ["diverged", "1"] in arm["facts"]
    assert all(square["verdict"] in regime["colours"] for square in regime["squares"])


@pytest.mark.parametrize(
    ("name", "header", "expected"),
    [
        ("pretrained", {}, "pretrained, scale cpu"),  # recorded before the shape was
        ("pretrained", {"parameters": 1_234_567}, "pretrained, 1.2M parameters, scale cpu"),
        ("pretrained", {"shape": {"layers": 8, "width": 48}}, "pretrained, 8 layers, 48 wide, scale cpu"),
        ("pretrained", {"shape": {"width": 48}}, "pretrained, 48 wide, scale cpu"),
        ("llama", {}, "llama, 4 layers, 256 wide, scale cpu"),
        ("llama", {"shape": {"layers": 3, "width": 32}}, "llama, 3 layers, 32 wide, scale cpu"),
        ("llama", {"shape": "damaged"}, "llama, 4 layers, 256 wide, scale cpu"),
    ],
)
def test_the_shape_is_that_of_the_model(
    page: Callable[..., Page], tmp_path: Path, name: str, header: dict[str, Any], expected: str
) -> None:
    """The config's layers and width are not a checkpoint's."""
    settings = {"model.name": name, "model.num_layers": 4, "model.hidden_size": 256}
    run = fake_run(tmp_path / "run", settings=settings)
    run.header |= header
    card = dict(page([run]).data["comparisons"][0]["overview"]["card"])
    assert card["model"] == expected


def test_a_command_that_does_not_run_as_it_stands_is_marked(page: Callable[..., Page], tmp_path: Path) -> None:
    command = "gnmr train data.name=text data.path=gsm 'model.checkpoint=my model' data.tokenizer=t/t.json optim.lr=0.1"
    settings = {"data.path": "/data/gsm", "model.checkpoint": "/far/my model", "data.tokenizer": "t/t.json"}
    run = fake_run(tmp_path / "run", command=command, settings=settings)
    plain = fake_run(tmp_path / "other", seed=1, command="gnmr train data.path=gsm", settings={"data.path": "gsm"})
    (commands,) = (page([run]).data["comparisons"][0]["origin"]["commands"],)
    assert commands == [command.replace("=gsm", "=.../gsm").replace("=my model", "=.../my model")]
    assert plain.command == "gnmr train data.path=gsm"


def test_a_run_without_anything_recorded(page: Callable[..., Page], tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", status="running")
    nothing = np.zeros((0, 0), np.float32)
    run.made = Ratios(np.zeros(0, np.int64), [], nothing, {}, nothing, nothing.astype(bool))
    run.__dict__ |= {"steps": {key: rows[:0] for key, rows in run.steps.items()}, "summary": {}}
    run.__dict__["evals"] = {key: rows[:0] for key, rows in run.evals.items()}
    (comparison,) = page([run]).data["comparisons"]
    assert comparison["maps"] == comparison["faults"] == []
    assert comparison["losses"]["top"] == {"train": None, "val": None}
    assert comparison["gnmr"] is None


def test_maps_that_do_not_fit_are_named(
    page: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for about two of four: every arm's first run comes before the second seeds."""
    runs = sweep(tmp_path / "runs")
    whole = page(runs).data["comparisons"][0]["maps"]
    monkeypatch.setattr(html, "MAP_CHARACTERS", len(script_json(whole[0])) + len(script_json(whole[2])) + 50)
    (comparison,) = page(runs).data["comparisons"]
    assert [one["label"] for one in comparison["maps"]] == ["int4, seed 0", "int4_int8, seed 0"]
    assert comparison["left_out"] == ["int4, seed 1", "int4_int8, seed 1"]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written") as error:
        write_html([], [], tmp_path / "file" / "report.html")
    assert "\n" not in str(error.value)


def test_packing() -> None:
    values = np.array([0.0, 1.0, -2.5, 1 / 3, 3.4e38, np.inf, -np.inf, 1e-40], np.float32)
    back = unpacked(packed(values))
    np.testing.assert_allclose(back, values, rtol=2**-13, atol=1e-41)
    assert np.isnan(shortened(np.array([np.nan], np.float32))).all()
    assert unpacked(packed(np.array([[1, 2], [3, 65535]], np.uint16))).tolist() == [1, 2, 3, 65535]
    with pytest.raises(ValueError, match="float64"):
        packed(np.zeros(2))
    assert [number(value) for value in (1.0, 0.123456789, float("nan"), float("inf"))] == [1, 0.12346, None, None]


def test_a_large_run_fits(tmp_path: Path) -> None:
    """200 units by 20,000 steps: under 10 MB with plotly and all."""
    draw = np.random.default_rng(0)
    risk_SU = np.exp(0.3 * draw.standard_normal((20_000, 200), dtype=np.float32))
    made = ratios(20_000, [f"model.layers.{place // 7}.mlp.unit{place}" for place in range(200)], risk_SU)
    made.norm_SU[:] = risk_SU[::-1]
    made.columns["gnmr"] = np.roll(risk_SU, 7, axis=0)
    made.columns["delta_gnmr"] = np.roll(risk_SU, 11, axis=0)
    events = []
    for step in range(10, 19_990, 10):
        unit = made.units[step % 200]
        made.active_SU[step : step + 10, step % 200] = True
        events.append({"step": step, "unit": unit, "event": "promote", "cause": "gnmr", "risk": 1.5})
        events.append({"step": step + 10, "unit": unit, "event": "release", "cause": "lock", "risk": 0.5})
    run = fake_run(tmp_path / "run", made=made, events=events)
    write_html(compare([run]), [run], tmp_path / "report.html")
    size = (tmp_path / "report.html").stat().st_size
    assert 5e6 < size < 10e6, f"{size:,} bytes"
    (one,) = Page(tmp_path / "report.html").data["comparisons"][0]["maps"]
    assert (one["width"], one["bins"]) == (25, 800)
