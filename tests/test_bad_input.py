"""Mistakes in what is asked for: one line, exit code 2, nothing half-written."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from gnmr.errors import UserError
from gnmr.lab import config

HEAD = "step,unit,norm\n"
CASES = {
    # what is typed behind the words of a sound run -> what the line says
    "unknown=1": "Key 'unknown' not in 'Config'",
    "training.stps=3": "Key 'stps' not in 'TrainingConfig' (key training.stps): did you mean steps?",
    "++controller.alfa=3": "(key controller.alfa): did you mean alpha?",
    "word": "Error parsing override 'word': must be key=value",
    "run_dir=~/x": "Error parsing override 'run_dir=~/x': must be key=value",
    "model=lama": "model=lama: use one of gpt, llama",
    "sweep=paper/table": "did you mean paper/table",
    "training.seed=0,1": "training.seed=0,1: several values are a sweep's: add -m; a list is training.seed=[0,1]",
    "training.steps=10e2": "training.steps",
    "optim.warmup_frac=2.5%": "(key optim.warmup_frac); write 0.025",
    f"training.steps={'[' * 500}": "nested 500 deep",
    "--config-dir=nowhere": "nowhere",
    "hydra.run.dir=/proc/x": "/proc/x: No such file or directory",
    "model.num_heads=5": "model.hidden_size=32: model.num_heads=5 does not divide it",
    "model=moe model.experts.top_k=9": "model.experts.top_k=9: there are only model.experts.number=8 experts",
    "model.num_layers=99999": "model.num_layers=99999: 50,000 layers are the most",
    "precision=bf16 faults.kind=noise": "faults: the low path is bf16: there is no quantizer",
    "model.outlier_channels.window=[2,3]": "window=[2, 3]: the run has 2 steps",
    "controller.signal=gsnr": "controller.signal=gsnr: needs micro-batches",
    "records.monitor=[nothing]": "records.monitor: ['nothing']: no module outside of the units",
    "data.path=": "data.path=: data.name=text needs a file or folder",
    "data.path=empty_folder": "data.path=empty_folder: the folder holds none of the supported files",
    "data.path=short.txt": "the corpus has 5 training tokens, a sequence needs 17",
    "run_dir=photos": "run_dir=photos: is not a run folder",
    "run_dir=a\x00b": "run_dir=a\\x00b: has a NUL",
    "\x1b]0;owned\x07=1": "\\x1b]0;owned",
    "data.path=${oc.env:HOME}/x": "data.path",
    "plan=short.txt": "short.txt",
    "run_dir=empty.txt/run": "empty.txt/run: cannot be written",
}
VALUES = {
    # in a config -> what the line says
    "model.outlier_channels.window=[2,1]": "model.outlier_channels.window=[2, 1]",
    "controller.options.alpha=2": "controller.options.alpha=2: is controller.alpha",
    "faults.kind=noise faults.rate=0": "faults.rate=0.0: give windows, or a rate above 0",
    "run_dir=~nobody-of-this-name/x": "run_dir=~nobody-of-this-name/x: Could not determine home",
    "training.steps=9223372036854775807": "training.steps=9223372036854775807: makes more tokens than 2^63",
    "experiment_name=../elsewhere": "experiment_name=../elsewhere: is part of a folder's name: not empty",
    "precision.low=int9": "precision.low=int9: must be one of int2",
    "precision.low=sim_int4": "precision.recovery=int8: must be a recipe, as low=sim_int4 is",
    "precision=bf16 precision.pins.down_proj.fprop=mxfp9": "precision.pins.down_proj",
    "controller.warmup_path=bf16": "controller.warmup_path=bf16",
    "data.name=text": "data.path=None",
    "training.activation_checkpointing=true precision.site=forward precision.rounding=stochastic": "training.act",
    "optim.lr=0.5 optim.weight_decay=10": "optim.weight_decay=10.0: times lr=0.5 must be 1 at most",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a command, with things that are in the way."""
    folder = tmp_path / "place"
    for name in ("empty_folder", "photos"):
        (folder / name).mkdir(parents=True)
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("a b c")
    for name in ("photo.jpg", "photos/cat.jpg"):
        (folder / name).write_text("miaow")
    monkeypatch.chdir(folder)
    return folder


POSITIVE_KEYS = ["alpha", "beta", "delta", "max_o", "t_lock"]
NOT_POSITIVE = st.one_of(
    st.floats(max_value=0), st.integers(max_value=0), st.booleans(), st.lists(st.integers(), max_size=2),
    st.sampled_from([math.inf, math.nan, "much", "1e400", ""]),
)  # fmt: skip


@given(key=st.sampled_from(POSITIVE_KEYS), value=NOT_POSITIVE)
@settings(max_examples=25)
def test_controller_keys_take_positive_numbers_alone(key, value):
    with pytest.raises(UserError, match=key) as caught:
        config.load({"controller": {key: value}})
    assert "\n" not in str(caught.value)


def listing(*folders: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for folder in folders for path in folder.rglob("*"))


@pytest.mark.parametrize("words", VALUES)
def test_values_without_sense(words):
    with pytest.raises(UserError) as caught:
        config.load(OmegaConf.from_dotlist(words.split(" ")))
    assert VALUES[words] in str(caught.value) and "\n" not in str(caught.value)


NAMES = ["arm", "experiment_name", "scale_name", "precision.name", "controller.name", "controller.signal"]
NAMES += ["run_dir", "runs_dir", "data.path", "data.tokenizer", "scores.data"]


@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize("value", ["a\0b", "a\nb", "a\udc80b", "\x1b[31m"], ids=ascii)
def test_names_that_no_file_can_have(key, value):
    tree: object = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    with pytest.raises(UserError) as caught:
        config.load(tree)
    line = str(caught.value)
    assert line.isprintable() and len(line) < 200 and line.startswith(f"{key}=")


@pytest.mark.parametrize(("words", "told"), CASES.items())
@pytest.mark.slow
@pytest.mark.usefixtures("composed_once")
def test_one_line_and_nothing_written(words, told, gnmr, tiny_words, place, cache, tmp_path):
    before = listing(place)
    line = gnmr("train", *tiny_words, *words.split(" ")).mistake
    assert told in line, line
    assert listing(place) == before
    assert not (tmp_path / "runs").exists()
    assert not list(cache.glob(".*"))  # no half-built token files either


@pytest.mark.parametrize(
    "words",
    [
        "experiment=deepseek_recipe precision.low=fp8_hybrid precision.recovery=null",
        "-m sweep=paper/table2 arm=gnmr_6_8 precision.low=sim_e2m1 controller.signal=random training.seed=0",
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("composed_once")
def test_what_an_experiment_or_sweep_chooses_may_be_overridden(words, gnmr, tiny_words, place):
    """The data, which come last, are what is refused."""
    ended = gnmr("train", *tiny_words, *words.split(" "), "data.path=nowhere")
    assert ended.code == 2 and ended.err.splitlines()[-1].startswith("gnmr: data.path=nowhere:")


def test_a_config_of_ones_own_that_is_no_yaml(gnmr, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptim: {lr: 1\n")
    assert "experiment/mine.yaml, line " in gnmr("train", f"--config-dir={tmp_path}", "experiment=mine").mistake


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["report", "runs/custom", "htlm=x"], "report: unknown option 'htlm=x': did you mean html?"),
        (["report", "runs", "all=true"], "report: all=true: is written --all"),
        (["report"], "(gnmr report --help)"),
        (["report", "runs", "--agianst", "x"], "(gnmr report --help)"),
        (["report", "none/a=b"], "none/a=b: no such folder"),
        (["report", "photo.jpg"], "photo.jpg"),
        (["audit", "x", "nonsense=1"], " more (gnmr audit --help)"),
        (["runs", "runs_dir=runs"], "runs: unknown option 'runs_dir=runs': use one of last"),
        (["train", "--cfg", "jobs"], "(gnmr train --hydra-help)"),
        (["train", "--steps", "10"], "--steps: settings have no dashes; write training.steps=10"),
        (["train", "--training.steps=10"], "--training.steps=10: settings have no dashes; write training.steps=10"),
        (["train", "a=1", "--batch-size", "4"], "write training.batch_size=4"),
        (["train", "--epochs", "4"], "unrecognized arguments: --epochs (gnmr train --hydra-help)"),
        (["train", "--experiment", "act_quant_stress"], "settings have no dashes; write experiment=act_quant_stress"),
        (["diagnose", "photo.jpg"], "photo.jpg"),
    ],
)
def test_words_of_a_command_that_are_none(words, line, gnmr, place):
    assert line in gnmr(*words).mistake


def test_gemms_that_a_cpu_emulates_are_refused(gnmr, tiny_words, tmp_path):
    ended = gnmr("train", *tiny_words, "precision=fp8_bf16", "precision.backend=scaled_mm", "training.device=cpu")
    assert ended.mistake == "precision.backend=scaled_mm: takes minutes a step on a CPU; use auto or simulated"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_page_in_place_of_a_folder(train, gnmr, tmp_path):
    """Refused before anything is printed or written."""
    train(tmp_path / "runs" / "run", "training.steps=2")
    before = listing(tmp_path)
    ended = gnmr("report", str(tmp_path / "runs"), f"html={tmp_path}")
    assert ended.mistake.startswith(f"{tmp_path}: is a folder; the page is a file")
    assert ended.out == "" and listing(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("controller.max_o=9", "max_o=9 caps nothing"),
        ("precision.low=fp8_hybrid precision.recovery=sim_e3m2", "the recovery path sim_e3m2 is coarser"),
    ],
)
@pytest.mark.slow
def test_a_doubtful_choice_is_a_warning(words, line, gnmr, tiny_words, tmp_path):
    ended = gnmr("train", *tiny_words, *words.split(" "))
    assert ended.code == 0 and line in ended.err and ended.err.count("\n") == 1
    assert list(tmp_path.glob("runs/*/*/DONE"))


@pytest.mark.slow
def test_a_run_does_not_go_on_under_another_backend(gnmr, tiny_words, tmp_path, monkeypatch):
    """auto may choose hardware where the machine has it, whose sums are not the simulation's."""
    words = [*tiny_words, f"run_dir={tmp_path / 'run'}", "precision.low=fp8_hybrid", "precision.recovery=bf16"]
    assert gnmr("train", *words).code == 0
    (tmp_path / "run" / "DONE").unlink()
    monkeypatch.setattr("gnmr.lab.train.run.described", lambda path: f"{path.name}, scaled_mm")
    line = gnmr("train", *words).mistake
    assert "belongs to another run" in line and "by fp8_hybrid, simulated and bf16" in line


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("step,unit\n1,a\n", "column 'norm' is missing"),
        ("step,unit,norm,norm\n1,a,1,7\n", "column 'norm' is there more than once"),
        (HEAD + "1,a,1\n2,a,-1\n", "a norm is negative (step 2)"),
        (HEAD + "1,a,1\n1,b,1\n1,a,2\n", "a step and unit appear in two rows"),
        (HEAD + "0,a,1\n", "steps count from 1"),
        (HEAD + "1,a,large\n", "columns must hold numbers"),
        (HEAD + ",a,1\n", "columns must hold numbers"),
        (HEAD + "1000000000000000,a,1\n", "step 1000000000000000 is too large"),
        ("", "cannot be read as CSV or Parquet"),
        ({"step": [1.5], "unit": ["a"], "norm": [1.0]}, "columns must hold numbers"),
        ({"step": [1], "unit": [["a"]], "norm": [1.0]}, "unit names"),
        ({"step": [1, None], "unit": ["a", "a"], "norm": [1.0, 1.0]}, "columns must hold numbers"),
    ],
)
def test_replay_of_a_bad_file(rows, line, gnmr, tmp_path):
    file = tmp_path / ("norms.parquet" if isinstance(rows, dict) else "norms.csv")
    pq.write_table(pa.table(rows), file) if isinstance(rows, dict) else file.write_text(rows)
    assert line in gnmr("replay", str(file), f"out={tmp_path / 'out.jsonl'}").mistake
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "nowhere: there is no such file or run folder"),
        (["empty_folder"], "no recorded norms in this folder"),
        (["study"], "study: holds 2 runs; name one, such as study/a"),
        (["norms.csv", "alfa=1"], "unknown key 'alfa': did you mean alpha?"),
        (["norms.csv", "alpha"], "replay: name one run folder or file"),
        (["norms.csv", "alpha={"], "replay: alpha={: must be a number"),
        (["norms.csv", "max_o=1e9"], "max_o=1e9: must be a whole number"),
        (["norms.csv", "alpha=-1"], "replay: alpha=-1.0: must be a positive number or null"),
        (["norms.csv", "out=nowhere/x"], "out=nowhere/x: must be a file in a folder that exists"),
        (["norms.csv", "out=empty_folder"], "out=empty_folder: must be a file in a folder that exists"),
    ],
)
def test_replay_with_bad_words(words, line, gnmr, place):
    (place / "norms.csv").write_text(HEAD + "1,a,1\n")
    for name in ("a", "b"):
        (place / "study" / name).mkdir(parents=True)
        (place / "study" / name / "units.arrows").touch()
    before = listing(place)
    assert line in gnmr("replay", *words).mistake
    assert listing(place) == before
