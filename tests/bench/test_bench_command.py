"""`gnmr bench` at a tiny size: what it refuses and what it writes. How long anything takes is never asserted."""

from __future__ import annotations

import io
import json
import math
import sys
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from gnmr.errors import UserError
from gnmr.lab.bench import BENCHMARKS, RENAMED, parts_of, paths, process, scenes
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config.compose import compose
from gnmr.names import RECIPES

MACHINE = {"cpu", "cores", "threads", "products", "load_average", "gpu"}


@pytest.fixture
def measure(gnmr, tiny_words, tmp_path):
    """measure("paths", "only=saved", ...) -> the JSON tree of that tiny benchmark with one measurement."""

    def run(*words: str) -> dict:
        out = tmp_path / "figures.json"
        outcome = gnmr("bench", *words, *tiny_words, "repeats=1", f"out={out}")
        assert outcome.code == 0, outcome.err
        tree = json.loads(out.read_text())
        for figure in tree["figures"]:
            assert math.isfinite(figure["value"]) and figure["value"] >= 0, figure
            assert figure["n"] == 1
            assert figure["met"] == (None if figure["target"] is None else figure["value"] <= figure["target"])
        assert [file.name for file in tmp_path.glob("*figures*")] == ["figures.json"]
        return tree

    return run


def named(tree: dict) -> dict[str, dict]:
    return {figure["name"].strip(): figure for figure in tree["figures"]}


def test_help_names_every_benchmark(gnmr):
    outcome = gnmr("bench", "--help")
    assert outcome.code == 0 and all(f"  {name} " in outcome.out for name in BENCHMARKS)


def test_the_table_of_benchmarks_names_the_parts_that_they_have() -> None:
    for name, bench in BENCHMARKS.items():
        assert sorted(bench.parts) == sorted(import_module(bench.module).PARTS), name
    groups = {
        "lasting": scenes.LASTING,
        "passing": scenes.PASSING,
        "table11": scenes.TABLE11,
        "regimes": scenes.REGIMES,
        "quick": scenes.QUICK,
    }
    assert {name: list(parts) for name, parts in BENCHMARKS["spend"].groups.items()} == {
        name: list(found) for name, found in groups.items()
    }
    assert list(BENCHMARKS["spend"].parts) == list(scenes.SCENES)


def test_scenes_are_chosen_by_name_and_by_group() -> None:
    assert parts_of(["spend"], ["passing", "nvfp4"]) == ["broken", "nvfp4"]
    assert parts_of(["spend", "price"], ["lasting", "atlas"]) == ["sim_e2m1", "nvfp4", "nvfp4_curve", "int4", "atlas"]
    with pytest.raises(UserError, match=r"^only=nvfp5: must be of lasting, .*did you mean nvfp4"):
        parts_of(["spend"], ["nvfp5"])
    with pytest.raises(UserError, match=r"^only=lasting: must be of truth, sampling, cadence, shares, atlas$"):
        parts_of(["price"], ["lasting"])


@pytest.mark.parametrize("word", RENAMED)
def test_old_names_are_told_the_new_words(gnmr, word):
    new = RENAMED[word].split()
    assert f"is now gnmr bench {' '.join(new)}" in gnmr("bench", word).mistake
    assert new[1].removeprefix("only=") in BENCHMARKS[new[0]].parts


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["unheard-of"], "unknown benchmark 'unheard-of': use one of step"),
        (["--verbose"], "unknown option '--verbose': use one of only, repeats, clock, run, out"),
        (["-x=1"], "unknown option '-x=1'"),
        (["paths", "hierarchy=6/8"], "hierarchy=6/8: is now preset=6/8"),
        (["decision", "model.width=1"], "width"),
        (["decision", "controller.alpha=0"], "controller.alpha=0"),
        (["decision", "repeats=0"], "repeats=0"),
        (["decision", "repeats=many"], "repeats=many"),
        (["decision", "clock=sun"], "clock=sun"),
        (["decision", "out="], "out="),
        (["decision", "out=missing/figures.json"], "must be a file in a folder that exists"),
        (["decision", "out=."], "and is a folder"),
        (["step", "only=hf", "model=gpt"], "model.name=gpt"),
        (["step", "only=saved"], "only=saved: must be of controller, signals, mixture, hf"),
    ],
)
def test_mistakes_are_one_line(gnmr, words, says):
    assert says in gnmr("bench", *words).mistake


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(gnmr, monkeypatch, tmp_path):
    def refused(dir):
        raise PermissionError(13, "Permission denied", dir)

    monkeypatch.setattr("gnmr.records.output.TemporaryFile", refused)
    out = tmp_path / "figures.json"
    assert f"out={out}: cannot be written (Permission denied)" in gnmr("bench", "decision", f"out={out}").mistake


def test_hf_without_transformers(gnmr, monkeypatch, tiny_words):
    monkeypatch.setattr("gnmr.lab.bench.step.find_spec", lambda _name: None)
    assert "pip install transformers" in gnmr("bench", "step", "only=hf").mistake
    outcome = gnmr("bench", "only=decision,hf", *tiny_words, "repeats=1")
    assert outcome.code == 0 and "left out: bench step: hf" in outcome.err and "10,000 units" in outcome.out


def test_controller_and_decision(measure):
    tree = measure("step", "decision", "only=controller,decision")
    assert tree["command"].startswith("gnmr bench step decision only=controller,decision debug=smoke")
    assert tree.keys() >= {"commit", "date", "gnmr", "python", "torch"} and tree["machine"].keys() == MACHINE
    assert tree["machine"]["threads"] == 1
    assert [figure["bench"] for figure in tree["figures"]] == ["step"] * 7 + ["decision"] * 2
    figures = named(tree)
    parts = [figures[name]["value"] for name in ("norms", "signal and policy", "switching", "records")]
    assert all(part > 0 for part in parts)  # every part was found inside the step
    total = figures["controller and records, share of a step"]
    assert total["value"] == pytest.approx(sum(parts)) and total["target"] == 0.02
    assert figures["step with over step without"]["spread"] == "95 % bootstrap interval of the median"
    assert figures["signal and policy, 10,000 units"]["target"] == 2.0


def test_saved_bytes_follow_the_format(measure):
    figures = named(measure("paths", "only=saved", "precision.targets=[down_proj]"))
    assert {name for name in figures if name.startswith("step with")} == {
        "step with bf16",
        *(f"step with {fmt} over bf16" for fmt in ("int4", "int8", "e2m1", "e4m3")),
    }
    width = 48  # of the MLP: 4 or 8 bits an element and a 16-bit scale a row, against 16 bits an element
    for fmt, bits in (("int4", 4), ("int8", 8), ("e2m1", 4), ("e4m3", 8)):
        share = figures[f"bytes with {fmt} over bf16"]
        assert share["value"] == pytest.approx((width * bits / 8 + 2) / (width * 2))
        assert share["low"] is share["high"] is share["spread"] is None


def test_signals_are_held_against_gnmr(measure):
    figures = named(measure("step", "only=signals"))
    assert {"step under gap", "step under gap, every 8th token", "step under oracle", "step under gnmr_delta"} < set(
        figures
    )
    assert all(figure["unit"] == ("s" if name == "step under gnmr_delta" else "x") for name, figure in figures.items())


@pytest.mark.slow
def test_recipes_and_switching(measure, gnmr):
    """Recipes whose tiles do not divide 32 and 48 are left out."""
    figures = named(measure("paths", "only=recipes"))
    steps = {name.removeprefix("step under ") for name in figures if name.startswith("step under ")}
    assert steps == set(RECIPES) - {
        "deepseek_v3",
        "deepseek_v3_blocks",
        *(name for name in RECIPES if name.startswith("mx")),
    }
    assert (
        figures["step under sim_e3m2"]["target"] == 2.0
        and figures["step under sim_e3m2"]["note"] == "sim_e3m2, simulated"
    )
    for preset, pair in (("6/8", "sim_e3m2 and fp8_hybrid"), ("8/16", "fp8_hybrid and bf16")):
        switching = figures[f"step that switches every block, {preset}"]
        assert switching["note"].startswith(f"1 blocks, {pair} in turn") and switching["target"] == 1.02
    assert (
        "recipes need precision.site=saved" in gnmr("bench", "paths", "only=recipes", "precision.site=forward").mistake
    )


@pytest.mark.parametrize("preset", paths.SWITCHED)
@pytest.mark.slow
def test_switching_is_between_the_paths_of_the_preset(preset, tiny_words, monkeypatch):
    """The arm takes a step on each path and changes every block before it; the others stay where they are."""
    config = compose([*tiny_words, "model.num_layers=2"])
    theirs = compose([f"preset={preset}"]).paths
    assert paths.SWITCHED[preset] == (theirs.low, theirs.recovery)
    taken, plain = [], paths.same_step

    def same_step(parts):
        assert (parts.config.precision.low, parts.config.precision.recovery) == paths.SWITCHED[preset]
        step = plain(parts)
        return lambda: (
            taken.append((id(parts), [operator.recovering for operator in parts.converted.operators])),
            step(),
        )

    monkeypatch.setattr(paths, "same_step", same_step)
    figure = paths._switching(Setting(config, [], 1, console=Console(file=io.StringIO())), preset)
    assert figure.note.startswith("2 blocks")
    arms = [[path for arm, path in taken if arm == which] for which in dict.fromkeys(arm for arm, _ in taken)]
    low, high = [False] * 14, [True] * 14
    rounds = 4  # one measured, three that warm up
    assert sorted(arms) == sorted([[low] * rounds, [high] * rounds, [high, low] * rounds])


@pytest.mark.slow
def test_a_mixture(measure):
    figures = named(measure("step", "only=mixture"))
    assert "8 experts, top-2 of width 48, 32 tokens" in figures["mixture over its dense arithmetic"]["note"]
    assert "mixture over its experts alone" in figures


@pytest.mark.slow
def test_hf_compares_equal_models(measure):
    pytest.importorskip("transformers")
    figures = named(measure("step", "only=hf"))
    note = figures["our plain step over Hugging Face's"]["note"]
    ours, theirs = (float(part.split()[0]) for part in note.split("loss ")[1].split(", "))
    assert ours == pytest.approx(theirs, rel=1e-3)


FAKE_TRAIN = """
import pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv[2:])
if sys.argv[1] == "train":
    folder = pathlib.Path(words["run_dir"])
    folder.mkdir()
    pathlib.Path(LOG).open("a").write(" ".join(sys.argv[2:-1]) + "\\n")
    if words.get("model.num_layers") == "7":
        sys.exit("gnmr: seven is too many")
    print("runs/a: 1 step", flush=True)
    time.sleep(0.1)
    (folder / "steps.jsonl").write_text("{}\\n")
"""


@pytest.fixture
def fake_train(monkeypatch, tmp_path) -> Path:
    """A program in place of gnmr that writes a row, and the file in which it notes the words it was given."""
    log, program = tmp_path / "log", tmp_path / "fake.py"
    program.write_text(FAKE_TRAIN.replace("LOG", repr(str(log))))
    monkeypatch.setattr(process, "GNMR", (sys.executable, str(program)))
    return log


@pytest.mark.slow
def test_startup_and_memory_of_fresh_processes(measure, fake_train, monkeypatch):
    monkeypatch.setattr("gnmr.lab.bench.memory.POLL_S", 0.0)
    figures = named(measure("startup", "memory"))
    assert len(figures) == 4 and all(figure["value"] > 0 for figure in figures.values())
    line, row = (
        figures[f"gnmr train to its first {what}"]["value"] for what in ("line", "row in steps.jsonl, warm cache")
    )
    assert line < row
    assert figures["peak resident memory of gnmr train and its helpers"]["unit"] == "MiB"
    warm_up, measured, memory = fake_train.read_text().splitlines()
    assert warm_up == measured
    for words, steps in ((measured, 1), (memory, 2)):
        config = compose(words.split())  # words that `gnmr train` understands, the user's over our own
        assert config.training.steps == steps and config.records.wandb == "off" and config.model.num_layers == 1


@pytest.mark.slow
def test_a_run_that_fails_is_no_measurement(gnmr, fake_train, tmp_path):
    outcome = gnmr("bench", "startup", "model.num_layers=7", f"out={tmp_path / 'figures.json'}", "repeats=1")
    assert outcome.code == 1 and "seven is too many" in outcome.err
    assert not (tmp_path / "figures.json").exists()
