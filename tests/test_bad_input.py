"""Mistakes in what is asked for: one line, exit code 2, nothing half-written. And a disk that is full."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from gnmr.errors import RunFailed, UserError
from gnmr.lab import config
from gnmr.records.files import JsonLines
from gnmr.records.reader import read_json, read_jsonl, read_ratios

HEAD = "step,unit,norm\n"
CASES = {
    # what is typed behind the words of a sound run -> what the line says
    "unknown=1": "Key 'unknown' not in 'Config'",
    "training.stps=3": "Key 'stps' not in 'TrainingConfig' (key training.stps): did you mean steps?",
    "trainig.steps=3": "Key 'trainig' not in 'Config': did you mean training?",
    "lr=1e-3": "did you mean optim.lr?",
    "training.lr=1": "(key training.lr): did you mean optim.lr?",
    "+unknown=1": "Key 'unknown' not in 'Config'",
    "++controller.alfa=3": "(key controller.alfa): did you mean alpha?",
    "hydra.unknown=1": "Key 'unknown' not in 'HydraConf'",
    "word": "Error parsing override 'word': must be key=value",
    "model=lama": "model=lama: use one of gpt, llama",
    "experiment=act_quant_stres": "pangu_4bit, pretrain; did you mean act_quant_stress?",
    "sweep=paper/table": "did you mean paper/table",
    "training.seed=0,1": "training.seed=0,1: several values are a sweep's: add -m; a list is training.seed=[0,1]",
    "controller.alpha=much": "controller.alpha",
    "training.steps=10e2": "training.steps",
    "records.evidence=mse": "records.evidence",
    f"training.steps={'[' * 500}": "nested 500 deep",
    "--config-dir=nowhere": "nowhere",
    "hydra.run.dir=/proc/x": "/proc/x: No such file or directory",
    "model.num_heads=5": "model.hidden_size=32: model.num_heads=5 does not divide it",
    "model=moe model.experts.top_k=9": "model.experts.top_k=9: there are only model.experts.number=8 experts",
    "model=pretrained model.checkpoint=here": "has no effect on model=pretrain",
    "experiment=moe_stress model=llama": "targets ['experts.*']: no linear has such a name",
    "model.num_layers=99999": "model.num_layers=99999: 50,000 layers are the most",
    "precision.low=llm_int8 precision.recovery=bf16 precision.weights=instead": "self_attn.q_proj is trainable",
    "precision=bf16 faults.kind=noise": "faults: the low path is bf16: there is no quantizer",
    "model.outlier_channels.window=[2,3]": "window=[2, 3]: the run has 2 steps",
    "model.outlier_channels.window=[1,1]": "gain=20.0: a window needs a power of two",
    "controller.signal=gsnr": "controller.signal=gsnr: needs micro-batches",
    "controller.signal=nowhere:It": "No module named 'nowhere'",
    "records.monitor=[nothing]": "records.monitor: ['nothing']: no module outside of the units",
    "optim.transform.name=clip": "optim.transform.name=clip: must be null or one of",
    "optim.name=scale +optim.options.heads=2": "optim.options.heads: scale has no such option",
    "data.path=": "data.path=: data.name=text needs a file or folder",
    "data.path=nowhere": "data.path=nowhere: no such file or folder",
    "data.path=empty_folder": "data.path=empty_folder: the folder holds none of the supported files",
    "data.path=short.txt": "the corpus has 5 training tokens, a sequence needs 17",
    "run_dir=photos": "run_dir=photos: is no run folder",
    "run_dir=empty.txt/run": "empty.txt/run: cannot be written",
}
VALUES = {
    # in a config -> what the line says
    "model.name=moe model.experts.number=-1": "model.experts.number=-1",
    "model.name=moe model.experts.number=8 model.experts.top_k=1": "model.experts.normalized=True",
    "model.name=moe model.experts.number=8 model.experts.balance_coef=inf": "model.experts.balance_coef=inf",
    "model.name=gpt model.tied_head=true": "model.tied_head=True: only llama has the choice",
    "model.experts.number=8": "model.experts.number=8: model.name=llama has no experts",
    "model.outlier_channels.window=[2,1]": "model.outlier_channels.window=[2, 1]",
    "model.outlier_channels.gain=1e39": "model.outlier_channels.gain=1e+39",
    "model.init_std=1e39": "model.init_std=1e+39: must be",
    "model.adapter.targets=[[a]]": "model.adapter.targets=[['a']]",
    "controller.routing=rank": "controller.routing=rank: must be one of thresholded, ranked",
    "controller.trigger=inf": "controller.trigger=inf",
    "controller.warmup_frac=1.0 precision.recovery=null": "controller.warmup_frac=1.0",
    "controller.options.alpha=2": "controller.options.alpha=2: is controller.alpha",
    "controller.signal=os.:It": "controller.signal=os.:It: give the name, or package.module:Class",
    "controller.name=a/b": "controller.name=a/b: is part of a folder's name",
    "faults.kind=quake": "faults.kind=quake: must be one of none, scale_up",
    "faults.kind=noise faults.rate=0": "faults.rate=0.0: give windows, or a rate above 0",
    "faults.kind=noise faults.windows=[[1]]": "faults.windows=[[1]]",
    "faults.kind=noise faults.rate=1 faults.rows_frac=0": "faults.rows_frac=0.0",
    "data.cache_dir=''": "data.cache_dir='': must be a path",
    "run_dir=~nobody-of-this-name/x": "run_dir=~nobody-of-this-name/x: there is no such user",
    "training.steps=99999999999999999999": "training.steps=1e+20: must be less than 2^63",
    "training.steps=9223372036854775807": "training.steps=9223372036854775807: makes more tokens than 2^63",
    "optim.options.momentum=1": "optim.options={'momentum': 1}: adamw has none",
    "experiment_name=../elsewhere": "experiment_name=../elsewhere: is part of a folder's name: not empty",
    "arm=''": "arm=: is part of a folder's name",
    "precision.low=int9": "precision.low=int9: must be one of int2",
    "precision.low=sim_int4": "precision.recovery=int8: must be a recipe, as low=sim_int4 is",
    "precision.recipes.mine=3": "precision.recipes: recipe mine=3",
    "precision.pins.down_proj=[fprop]": "precision.pins.down_proj=['fprop']",
    "precision.outlier_threshold=0": "precision.outlier_threshold=0.0",
    "controller.alpha=null controller.alpha_init=2.0": "controller.alpha_init=2.0",
    "controller.warmup_path=bf16": "controller.warmup_path=bf16",
    "model.name=gpt model.num_kv_heads=2": "model.num_kv_heads=2",
    "data.name=text": "data.path=None",
    "training.seed=10000000000000000000": "training.seed",
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
@settings(max_examples=40, deadline=None)
def test_controller_keys_take_positive_numbers_alone(key, value):
    with pytest.raises(UserError, match=key) as caught:
        config.load({"controller": {key: value}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), zip(POSITIVE_KEYS, ["-1", "nan", "much", "0", "[1]"], strict=True))
def test_replay_checks_as_a_saved_config_does(key, value, gnmr, tmp_path):
    (tmp_path / "norms.csv").write_text(HEAD + "1,a,1\n")
    assert key in gnmr("replay", str(tmp_path / "norms.csv"), f"{key}={value}").mistake


def listing(*folders: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for folder in folders for path in folder.rglob("*"))


@pytest.mark.parametrize("words", VALUES)
def test_values_without_sense(words):
    with pytest.raises(UserError) as caught:
        config.load(OmegaConf.from_dotlist(words.split(" ")))
    assert VALUES[words] in str(caught.value) and "\n" not in str(caught.value)


def around(letter: str) -> str:
    return f"a{letter}b"


NAMES = ["arm", "experiment_name", "scale_name", "precision.name", "controller.name", "controller.signal"]
NAMES += ["run_dir", "runs_dir", "data.path", "data.cache_dir", "data.tokenizer", "scores.data"]
NO_NAMES = st.one_of(
    st.tuples(
        st.sampled_from("aé√𝄞").map(lambda letter: letter * (256 // len(letter.encode()) + 1)),
        st.just("255 bytes of a file's name"),
    ),
    st.tuples(
        (st.just("\0") | st.characters(categories=["Cs"])).map(around), st.just("must be text (UTF-8) without NUL")
    ),
    st.tuples(
        st.characters(categories=["Cc"], exclude_characters="\0").map(around),
        st.just("must have no line breaks or other control characters"),
    ),
)


@given(key=st.sampled_from(NAMES), case=NO_NAMES)
@settings(max_examples=40, deadline=None)
def test_names_that_no_file_can_have(key, case):
    value, told = case
    tree: object = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    with pytest.raises(UserError) as caught:
        config.load(tree)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 200 and line.isprintable()
    assert line.startswith(f"{key}=") and told in line, line


def test_an_arm_that_leaves_no_room_for_its_hash():
    config.load({"arm": "a" * 243})
    with pytest.raises(UserError, match=r"^arm=a{20}\.\.\.: has 244 bytes, 243 at the most"):
        config.load({"arm": "a" * 244})
    with pytest.raises(UserError, match=r"run_dir=x{20}.*is a path longer than 3072 bytes"):
        config.load({"run_dir": "/".join(["x" * 200] * 20)})


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


@pytest.mark.slow
def test_a_model_that_is_too_large_for_the_oracle(gnmr, tiny_words, tmp_path, monkeypatch):
    monkeypatch.setattr("gnmr.lab.train.checks._ORACLE_PARAMETERS", 20_000)
    line = gnmr("train", *tiny_words, "controller.signal=oracle").mistake
    assert line.startswith("controller.signal=oracle: runs both paths in every step, for small models: ")
    number = 2 * 300 * 32 + 4 * 32 * 32 + 3 * 32 * 48 + 3 * 32  # two embeddings, attention, MLP, norms
    assert line.endswith(f"this one has {number:,} parameters, 20,000 at the most")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["report", "runs/custom", "htlm=x"], "report: unknown option 'htlm=x': did you mean html?"),
        (["report", "runs", "strict=true"], "report: strict=true: is written --strict"),
        (["runs", "runs_dir=runs"], "runs: unknown option 'runs_dir=runs': use one of last"),
        (["report", "none/a=b"], "none/a=b: no such folder"),
    ],
)
def test_a_mistyped_option_is_no_folder(words, line, gnmr):
    assert gnmr(*words).mistake.startswith(line)


@pytest.mark.parametrize("words", [[], ["runs", "--agianst", "x"], ["runs", "--out"], ["runs", "out="]])
def test_words_of_report_that_are_none(words, gnmr):
    line = gnmr("report", *words).mistake
    assert line.startswith("report: ") and line.endswith("(gnmr report --help)")


@pytest.mark.parametrize("words", [["--agianst"], ["--cfg", "jobs"]])
def test_flags_of_train_that_are_none(words, gnmr, place):
    line = gnmr("train", *words).mistake
    assert line.startswith("train: ") and words[-1] in line and line.endswith("(gnmr train --hydra-help)")


@pytest.mark.slow
def test_a_page_in_place_of_a_folder(train, gnmr, tmp_path):
    """Refused before anything is printed or written."""
    train(tmp_path / "runs" / "run", "training.steps=2")
    before = listing(tmp_path)
    ended = gnmr("report", str(tmp_path / "runs"), f"html={tmp_path}")
    assert ended.mistake.startswith(f"{tmp_path}: is a folder; the page is a file")
    assert ended.out == "" and listing(tmp_path) == before


@pytest.mark.slow
def test_a_strict_report_of_runs_that_cannot_be_compared(train, gnmr, text_file, tmp_path):
    """Other data under one experiment's name: refused, with nothing written; told of without --strict."""
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text()[::-1])
    train(tmp_path / "runs" / "a", "training.steps=2")
    train(tmp_path / "runs" / "b", "training.steps=2", f"data.path={other}", "precision.recovery=null")
    before = listing(tmp_path)
    line = gnmr("report", str(tmp_path / "runs"), "--strict").mistake
    assert "these runs cannot be compared, they differ in data" in line
    assert listing(tmp_path) == before
    assert gnmr("report", str(tmp_path / "runs")).code == 0


@pytest.mark.slow
def test_a_cap_that_caps_nothing_is_a_warning(gnmr, tiny_words, tmp_path):
    ended = gnmr("train", *tiny_words, "controller.max_o=9")
    assert ended.code == 0 and ended.err.count("\n") == 1
    assert ended.err.startswith("gnmr: warning: max_o=9 caps nothing")
    assert list(tmp_path.glob("runs/*/*/DONE"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("precision.low=fp8_hybrid precision.recovery=sim_e3m2", "the recovery path sim_e3m2 is coarser"),
        ("precision.backend=simulated", "backend='simulated': has no effect"),
        ("precision.outlier_threshold=6", "outlier_threshold=6.0: has no effect"),
    ],
)
@pytest.mark.slow
def test_paths_that_cannot_be_meant_are_a_warning(words, line, gnmr, tiny_words):
    ended = gnmr("train", *tiny_words, *words.split(" "))
    assert ended.code == 0 and line in ended.err and ended.err.count("\n") == 1


@pytest.mark.slow
def test_what_a_cpu_simulates_is_shown_and_no_warning(gnmr, tiny_words):
    ended = gnmr("train", *tiny_words, "precision=fp8_bf16", "records.live=plain")
    assert (ended.code, ended.err) == (0, "") and "fp8_hybrid, simulated" in ended.out


@pytest.mark.slow
def test_fp8_hardware_that_is_not_there(gnmr, tiny_words, tmp_path, monkeypatch):
    from gnmr.precision.kernels import scaled_mm

    missing = "needs a GPU of compute capability 8.9 or newer (Ada, Hopper), this one has 8.0"
    monkeypatch.setattr(scaled_mm, "_device_missing", lambda *_: missing)
    line = gnmr("train", *tiny_words, "precision=fp8_bf16", "precision.backend=scaled_mm").mistake
    assert line == f"paths: backend='scaled_mm': {missing}; use backend='auto'"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_corrupt_token_cache_is_rebuilt_and_said(gnmr, tiny_words, tmp_path):
    words = [*tiny_words, f"data.cache_dir={tmp_path / 'cache'}"]
    assert gnmr("train", *words, f"run_dir={tmp_path / 'a'}").code == 0
    (tokens,) = tmp_path.glob("cache/text-*/train.bin")
    sound = tokens.read_bytes()
    tokens.write_bytes(sound[:1000] + b"\x00\x01" + sound[1002:])
    ended = gnmr("train", *words, f"run_dir={tmp_path / 'b'}")
    assert (ended.code, ended.err) == (0, "")
    assert "token cache is corrupt (train.bin does not match its checksum); rebuilding" in ended.out
    assert tokens.read_bytes() == sound
    losses = [[row["loss"] for row in read_jsonl(tmp_path / name / "steps.jsonl")] for name in "ab"]
    assert losses[0] == losses[1]


@pytest.fixture
def stopped(gnmr, tiny_words, tmp_path) -> Callable[..., list[str]]:
    """Words of a run whose folder holds a checkpoint of step 2 and no DONE, as if it had been killed there."""
    words = [*tiny_words, "optim.lr=0.001", f"run_dir={tmp_path / 'run'}"]
    assert gnmr("train", *words).code == 0
    (tmp_path / "run" / "DONE").unlink()
    return words


@pytest.mark.slow
def test_a_run_folder_that_takes_no_new_file(stopped, gnmr, tmp_path):
    if subprocess.run(["chattr", "+i", tmp_path / "run"], capture_output=True).returncode:
        pytest.skip("no folder can be made immutable here")
    try:
        line = gnmr("train", *stopped).mistake
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "run"], check=True)
    assert line.startswith(f"{tmp_path / 'run'}: cannot be written (Operation not permitted)")


@pytest.mark.slow
def test_a_corrupt_checkpoint(stopped, gnmr, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "__0_0.distcp").write_bytes(b"junk")
    before = [entry for entry in listing(tmp_path / "run") if not entry[0].endswith(".lock")]
    line = gnmr("train", *stopped).mistake
    assert "step-00000002 is corrupt (__0_0.distcp is missing or changed): delete " in line
    assert line.endswith("checkpoints to train from step 1 again, or start again in another run_dir")
    assert [entry for entry in listing(tmp_path / "run") if not entry[0].endswith(".lock")] == before


@pytest.mark.slow
def test_a_foreign_checkpoint(stopped, gnmr, tiny_words, tmp_path):
    assert gnmr("train", *tiny_words, f"run_dir={tmp_path / 'other'}", "training.seed=1").code == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "run" / "checkpoints")
    assert "step-00000002 belongs to another run" in gnmr("train", *stopped).mistake


@pytest.mark.slow
def test_a_run_does_not_go_on_under_another_backend(gnmr, tiny_words, tmp_path, monkeypatch):
    """auto may choose hardware where the machine has it, whose sums are not the simulation's."""
    words = [*tiny_words, f"run_dir={tmp_path / 'run'}", "precision.low=fp8_hybrid", "precision.recovery=bf16"]
    assert gnmr("train", *words).code == 0
    (tmp_path / "run" / "DONE").unlink()
    monkeypatch.setattr("gnmr.lab.train.run.described", lambda path: f"{path.name}, scaled_mm")
    line = gnmr("train", *words).mistake
    assert "belongs to another run" in line and "by fp8_hybrid, simulated and bf16" in line


@pytest.mark.slow
def test_a_run_folder_of_another_config(stopped, gnmr, tmp_path):
    before = listing(tmp_path / "run")
    line = gnmr("train", *stopped, "optim.lr=0.5").mistake
    assert "holds a run of another config: optim.lr is 0.001 there and 0.5 here; choose another run_dir" in line
    assert listing(tmp_path / "run") == before


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached(gnmr, tmp_path, monkeypatch):
    """HF_HUB_OFFLINE=1, see conftest.py."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("GNMR_CACHE", str(tmp_path / "cache"))
    line = gnmr("train", "data.name=c4", "debug=smoke", f"run_dir={tmp_path / 'run'}").mistake
    assert "data.name=c4: allenai/c4 cannot be read from the hub" in line and "data.path=FOLDER" in line
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("cache/*"))


REPLAYS: dict[str, tuple[str, str]] = {
    "no_norm.csv": ("step,unit\n1,a\n", "column 'norm' is missing"),
    "twice.csv": ("step,step,unit,norm\n1,1,a,1\n", "column 'step' stands there 2 times"),
    "negative.csv": (HEAD + "1,a,1\n2,a,-1\n", "a norm is negative (step 2)"),
    "minus_inf.csv": (HEAD + "1,a,-inf\n", "a norm is negative (step 1)"),
    "duplicate.csv": (HEAD + "1,a,1\n1,b,1\n1,a,2\n", "a step and unit stand in two rows"),
    "from_zero.csv": (HEAD + "0,a,1\n", "steps count from 1"),
    "half_step.csv": (HEAD + "1.5,a,1\n", "invalid value '1.5'"),
    "word.csv": (HEAD + "1,a,large\n", "invalid value 'large'"),
    "no_step.csv": (HEAD + ",a,1\n", "a row has no step or no unit"),
    "no_unit.csv": (HEAD + "1,,1\n", "a row has no step or no unit"),
    "far.csv": (HEAD + "1000000000000000,a,1\n", "step 1000000000000000 is too large"),
    "no_rows.csv": (HEAD, "the file has no rows"),
    "empty.csv": ("", "cannot be read as CSV, Parquet or Arrow"),
    "text.parquet": ("hello", "cannot be read as CSV, Parquet or Arrow"),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_replay_of_a_bad_file(name, gnmr, tmp_path):
    content, line = REPLAYS[name]
    (tmp_path / name).write_text(content)
    assert line in gnmr("replay", str(tmp_path / name), f"out={tmp_path / 'out.jsonl'}").mistake
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_replay_of_a_bad_table(gnmr, tmp_path):
    file = tmp_path / "norms.parquet"
    for columns, line in [
        ({"step": [1.5], "unit": ["a"], "norm": [1.0]}, "columns must hold numbers"),
        ({"step": [1], "unit": [["a"]], "norm": [1.0]}, "unit names"),
        ({"step": [1, None], "unit": ["a", "a"], "norm": [1.0, 1.0]}, "a row has no step"),
        ({"step": [1], "unit": ["a"], "norm": ["large"]}, "columns must hold numbers"),
    ]:
        pq.write_table(pa.table(columns), file)
        assert line in gnmr("replay", str(file)).mistake


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "nowhere: there is no such file or run folder"),
        (["empty_folder"], "no recorded norms in this folder"),
        (["norms.csv", "alfa=1"], "unknown key 'alfa=1': did you mean alpha?"),
        (["norms.csv", "alpha"], "replay: alpha: one run folder or file at a time"),
        (["norms.csv", "alpha={"], "alpha={: "),
        (["norms.csv", "calibrate="], "replay: 'calibrate=' has no value"),
        (["norms.csv", "out=nowhere/x"], "out=nowhere/x: must be a file in a folder that exists"),
        (["norms.csv", "out=empty_folder"], "out=empty_folder: must be a file in a folder that exists"),
    ],
)
def test_replay_with_bad_words(words, line, gnmr, place):
    (place / "norms.csv").write_text(HEAD + "1,a,1\n")
    before = listing(place)
    assert line in gnmr("replay", *words).mistake
    assert listing(place) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [("units.arrows", "x" * 100), ("config.yaml", "a: ["), ("config.yaml", "unknown: 1")],
    ids=["ratios", "yaml", "key"],
)
@pytest.mark.slow
def test_replay_of_a_damaged_run(name, content, train, gnmr, tmp_path):
    run = train(tmp_path / "run", "training.steps=2")
    (run / name).write_text(content)
    assert f"{name}" in gnmr("replay", str(run)).mistake


# ---- a full disk ----


def readable(folder: Path, steps: int) -> None:
    """What a run that ended after `steps` steps on a full disk must still say."""
    assert [row["step"] for row in read_jsonl(folder / "steps.jsonl")] == list(range(1, steps + 1))
    assert set(read_ratios(folder)["step"].to_pylist()) == set(range(1, steps + 1))
    reason = (folder / "FAILED").read_text()
    assert reason.startswith("disk full") and reason.count("\n") == 1
    summary = read_json(folder / "summary.json")
    assert (summary["status"], summary["steps"], summary["reason"]) == ("failed", steps, reason.strip())
    assert not (folder / "DONE").exists()


@pytest.mark.slow
def test_a_row_on_a_full_disk(gnmr, tiny_words, tmp_path, monkeypatch):
    """The third row goes to a device that is full."""
    plain = JsonLines.write

    def write(self: JsonLines, rows: list[dict]) -> None:
        if self.path.name == "steps.jsonl" and rows[0]["step"] == 3:
            self._file = Path("/dev/full").open("ab")  # noqa: SIM115
        plain(self, rows)

    words = [*tiny_words, "training.steps=6", f"run_dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", write)
        ended = gnmr("train", *words)
    assert ended.code == 1
    assert ended.err == f"gnmr: run FAILED: disk full while writing steps.jsonl in {tmp_path / 'run'}\n"
    readable(tmp_path / "run", 2)
    assert gnmr("train", *words).code == 0
    assert len(read_jsonl(tmp_path / "run" / "steps.jsonl")) == 6


@pytest.mark.parametrize(("size", "steps"), [("300k", 3), ("500k", 6), ("700k", 8), ("900k", 8)])
@pytest.mark.slow
def test_a_checkpoint_on_a_full_disk(size, steps, small_disk, train, tmp_path):
    folder = small_disk(size) / "run"
    words = ["training.steps=8"]
    with pytest.raises(RunFailed, match=f"disk full while writing the checkpoint of step {steps} in "):
        train(folder, *words)
    readable(folder, steps)
    before = {3: [], 6: ["step-00000003"], 8: ["step-00000003", "step-00000006"]}
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == before[steps]
    small_disk("20m")
    train(folder, *words)
    rows, expected = (read_jsonl(train(f, *words) / "steps.jsonl") for f in (folder, tmp_path / "whole"))
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_very_end(train, tmp_path, monkeypatch):
    """Only the DONE marker finds no room: the run must not count as done."""
    from gnmr.records import writer

    plain = writer.replace_text

    def replace_text(path: Path, text: str) -> None:
        if path.name == "DONE":
            with Path("/dev/full").open("w") as file:
                file.write("x")
        plain(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "replace_text", replace_text)
        with pytest.raises(RunFailed, match="disk full while writing DONE"):
            train(tmp_path / "run")
    readable(tmp_path / "run", 8)
    assert json.loads((tmp_path / "run" / "checkpoints/step-00000008/meta.json").read_text())["step"] == 8
    assert (train(tmp_path / "run") / "DONE").exists()
