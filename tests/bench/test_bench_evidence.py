"""benchmarks/evidence.py: its steps are commands that this version has, and what is done is not done again."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import OmegaConf

from gnmr.lab.bench import BENCHMARKS, parts_of
from gnmr.lab.bench.scenes import SCENES, Scene
from gnmr.lab.config.compose import compose
from gnmr.lab.sweep import combinations_of

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks" / "results").is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evidence", module)
    spec.loader.exec_module(module)
    return module


def test_every_step_is_a_command_of_this_version(evidence: ModuleType, tmp_path: Path) -> None:
    night, quick = ([one for stage in evidence.stages(form, tmp_path) for one in stage] for form in ("night", "quick"))
    scenes = [one.name.removeprefix("spend-") for one in night if one.name.startswith("spend-")]
    assert sorted([*scenes, "regime_quick"]) == sorted(SCENES)
    for step in (*night, *quick):
        if step.name.startswith("divergence"):
            script, out, part = step.words
            assert (
                Path(script).is_file()
                and f'"{part}"' in Path(script).read_text()
                and out == str(tmp_path / f"{step.name}.json")
            )
            continue
        assert step.words[:2] == ("-m", "gnmr")
        command, *words = step.words[2:]
        if command == "report":
            assert words == [str(tmp_path / "scratch"), f"out={tmp_path / 'docs' / 'scratch'}"]
            continue
        if words[0] == "-m":
            config = compose(words[1:])
            assert (config.experiment_name, config.runs_dir) == (step.name, str(tmp_path / "scratch"))
            assert step.seconds == evidence.RUNS * evidence.RUN * config.model.num_layers / 2
            continue
        if command == "train":
            config = compose(words)
            assert evidence.BASES[config.run_dir] == (config.training.seed, config.training.steps)
            continue
        name, given = words[0], dict(word.split("=", 1) for word in words[1:])
        assert set(parts_of([name], given["only"].split(","))) <= set(BENCHMARKS[name].parts)
        assert set(given["run"].split(",")) <= {*evidence.BASES, "shipped"}
        assert given["out"] == str(tmp_path / f"{step.name}.json")


def test_runs_from_scratch_are_counted(evidence: ModuleType, tmp_path: Path) -> None:
    sweeper = OmegaConf.load(ROOT / "conf" / "sweep" / "from_scratch.yaml").hydra.sweeper
    assert len(combinations_of([], sweeper.params, sweeper.arms)) == evidence.RUNS
    run = tmp_path / "scratch" / "from_scratch" / "never-s0"
    run.mkdir(parents=True)
    (run / "DONE").touch()
    two, four = evidence.scratch(tmp_path)
    assert two.seconds == (evidence.RUNS - 1) * evidence.RUN and four.seconds == 2 * evidence.RUNS * evidence.RUN


def test_dry_tells_the_steps_and_runs_none(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("gnmr.precision.half.lacking", lambda: False)
    assert evidence.main(["night", str(out), "--dry", "--jobs", "2"]) == 0
    before = capsys.readouterr().out
    assert re.search(r"32 steps, about \d+\.\d h with 2 side by side", before) and not out.exists()
    (out / "spend-nvfp4" / "bench").mkdir(parents=True)
    arms = len(SCENES["nvfp4"].arms())
    (out / "spend-nvfp4" / "bench" / "spend.jsonl").write_text("{}\n" * (10 * arms - 1))
    (out / "spend-broken.done").touch()
    assert evidence.main(["night", str(out), "--dry", "--jobs", "2"]) == 0
    told = capsys.readouterr().out
    assert "31 steps" in told and "spend-broken" not in told and "31 s  spend-nvfp4" in told


def test_a_cpu_without_16_bit_products_takes_longer(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hours = []
    for lacking in (False, True):
        monkeypatch.setattr("gnmr.precision.half.lacking", lambda lacking=lacking: lacking)
        assert evidence.main(["night", str(tmp_path / "out"), "--dry", "--jobs", "2"]) == 0
        told = capsys.readouterr().out
        assert f"EPYC {'without' if lacking else 'with'} 16-bit products" in told
        hours += [float(re.search(rf"([\d.]+) {unit}", told)[1]) for unit in ("h  spend-sim_e2m1", "h with 2")]
    assert hours[2:] == pytest.approx([evidence.IN_FP32 * one for one in hours[:2]], rel=0.03)


@pytest.mark.slow
def test_the_tiniest_form_to_its_page(
    evidence: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prices of few tokens of the shipped base; a step that fails is named and stops nothing beside it."""
    wrong = evidence.Step("wrong", ("-m", "gnmr", "bench", "unheard-of"), 1.0)
    monkeypatch.setitem(evidence.FORMS, "quick", (lambda out: [wrong, *evidence.quick(out)[1:]],))
    assert evidence.main(["quick", str(tmp_path)]) == 1
    tree = json.loads((tmp_path / "price-sampling.json").read_text())
    page = (tmp_path / "docs" / "price-sampling.md").read_text()
    assert len(re.findall(r"^\| shipped \|", page, re.M)) == len(tree["figures"]) / 2 > 0
    told = capsys.readouterr().out
    assert "done    price-sampling" in told and "failed: wrong" in told
    assert "unknown benchmark 'unheard-of'" in (tmp_path / "wrong.log").read_text()
    assert evidence.main(["quick", str(tmp_path), "--dry"]) == 0 and "1 steps" in capsys.readouterr().out


def test_scenes_of_one_family_have_its_controls() -> None:
    """What a page tests against is there: never, and a random draw of each kind of arm."""
    for name, scene in SCENES.items():
        if name.startswith(("regime", "table11")):
            arms = [arm for arm, _ in scene.arms()]
            assert {"never", "always", "random, each step"} <= set(arms), name
            assert isinstance(scene, Scene) and ("random" in arms) == bool(scene.pins), name
            assert ("random, held" in arms) == bool(scene.held), name
