"""Words in, exit code out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gnmr import __version__
from gnmr.lab import config
from gnmr.lab.cli import COMMANDS
from gnmr.lab.config import compose as composing
from gnmr.lab.config.compose import compose, conf_dir
from gnmr.records.reader import read_jsonl

CONF = Path(__file__).parents[1] / "conf"


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def loaded(*words: str) -> tuple[str, set[str]]:
    """What a command prints in a process of its own, and which heavy packages it loads."""
    program = (
        f"import sys; from gnmr.lab.cli import main; main({[*words]});"
        "heavy = {'torch', 'numpy', 'hydra', 'omegaconf', 'pyarrow', 'wandb', 'rich'};"
        "sys.exit(' '.join(heavy & set(sys.modules)))"
    )
    ended = process("-c", program)
    return ended.stdout, {*ended.stderr.splitlines()[-1].split()}


def test_help_loads_nothing_heavy():
    out, heavy = loaded("--help")
    assert heavy == set() and all(command in out for command in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["--cfg job", "unknown=1"])
def test_composing_and_mistakes_load_no_torch(word):
    assert "torch" not in loaded("train", *word.split())[1]


@pytest.mark.slow
def test_a_run_trains_before_it_imports_what_checkpoints_and_compiled_models_need(tiny_words):
    heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.tensor", "sympy"}
    heavy |= {"transformers", "datasets", "huggingface_hub", "wandb", "pandas", "scipy", "statsmodels", "jinja2"}
    # The first checkpoint comes after the first rows, and its module is imported for it.
    program = """
import sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "gnmr.lab.train.state_files":
            print("imported:", *sys.modules)

sys.meta_path.insert(0, Watch())
from gnmr.lab.cli import main

sys.exit(main(sys.argv[1:]))
"""
    done = process("-c", program, "train", *tiny_words, "model.outlier_channels.number=2")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert "gnmr.lab.train.step" in line.split() and not heavy & {*line.split()}


@pytest.mark.slow
def test_a_run_that_is_done_says_so_without_torch(gnmr, tiny_words):
    assert gnmr("train", *tiny_words).code == 0
    out, heavy = loaded("train", *tiny_words)
    assert out.endswith(" is done: skipped\n") and len(out.splitlines()) == 1 and "torch" not in heavy


@pytest.mark.slow
def test_training_keeps_the_kernels_of_every_length_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    """Experts of a mixture read a different number of rows in every step."""
    program = (
        "import os, sys; from gnmr.lab.cli import main; main(['train', '--cfg', 'job']);"
        "sys.exit(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"
    )
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    assert process("-c", program).stderr.split() == ["16384"]
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    assert process("-c", program).stderr.split() == ["7"]


def test_python_m_gnmr_and_its_exit_codes():
    assert process("-m", "gnmr", "--version").stdout == f"gnmr {__version__}\n"
    ended = process("-m", "gnmr", "trian")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "gnmr: unknown command 'trian': did you mean train? (gnmr --help)\n"


@pytest.mark.parametrize(
    "command", ["", *(pytest.param(one, marks=pytest.mark.slow) if one == "train" else one for one in COMMANDS)]
)
def test_each_command_explains_itself(command, gnmr):
    outcome = gnmr(*command.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "") and f"gnmr {command}".strip() in outcome.out


# ---- Hydra behind `gnmr train` ----


@pytest.mark.usefixtures("composed_once")
def test_cfg_job_prints_the_config_of_compose_and_runs_nothing(gnmr, tiny_words, tmp_path):
    words = [*tiny_words, "precision.low=e2m1", "precision.recovery=e4m3", "model=llama_130m", "controller.alpha=2.5"]
    outcome = gnmr("train", *words, "--cfg", "job", "--resolve")
    assert (outcome.code, outcome.err) == (0, "")
    tree = yaml.safe_load(outcome.out)
    assert (tree["controller"]["alpha"], tree["training"]["steps"], tree["scale_name"]) == (2.5, 2, "130m")
    assert compose(words) == config.load({key: value for key, value in tree.items() if key != "arms"})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "flag", ["--config-dir {}", *(pytest.param(flag, marks=pytest.mark.slow) for flag in ("--config-dir={}", "-cd {}"))]
)
@pytest.mark.usefixtures("composed_once")
def test_an_experiment_of_ones_own_wins_over_the_model_and_the_command_line_over_both(flag, gnmr, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - act_quant_stress\n  - _self_\nexperiment_name: mine\n"
        "training: {steps: 5, batch_size: 7}\n"
    )
    words = ["model=llama_60m", *flag.format(tmp_path).split(), "experiment=mine", "--cfg", "job", "training.steps=6"]
    tree = yaml.safe_load(gnmr("train", *words).out)
    training = tree["training"]
    assert (tree["experiment_name"], training["steps"], training["batch_size"]) == ("mine", 6, 7)


# ---- a run, from the words ----


def test_train(gnmr, tiny_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = gnmr("train", *tiny_words, "experiment=act_quant_stress")
    assert (outcome.code, outcome.err) == (0, "")
    (folder,) = tmp_path.glob("runs/*/*")
    assert folder.parent.name == "act_quant_stress" and folder.name.startswith("int4_int8-gnmr-")
    assert folder.name.endswith("-s0") and (folder / "DONE").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]  # Hydra leaves nothing beside it
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert config.load(saved).scale_name == "cpu"
    header = json.loads((folder / "header.json").read_text())
    assert header["command"].split()[:3] == ["gnmr", "train", "debug=smoke"]
    assert header["command"].endswith("experiment=act_quant_stress")


@pytest.mark.usefixtures("composed_once")
def test_a_run_is_trained_reported_and_replayed(gnmr, tiny_words, tmp_path):
    words = [*tiny_words, "experiment=act_quant_stress", "training.steps=8", "records.live=auto"]
    run, page, sets = tmp_path / "run", tmp_path / "page.html", tmp_path / "sets.jsonl"
    trained = gnmr("train", *words, f"run_dir={run}")
    assert trained.code == 0 and trained.out.startswith(f"{run}: 8 steps; loading PyTorch\n")
    assert "step 8/8  loss" in trained.out and "\x1b" not in trained.out, "plain lines for a pipe"
    assert f"next: gnmr report {run}" in trained.out.replace("\n", "")
    rows = read_jsonl(run / "steps.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9)) and rows[-1]["loss"] < rows[0]["loss"]
    reported = gnmr("report", str(run), f"html={page}", "--out", str(tmp_path / "report"))
    assert reported.code == 0
    for text in (reported.out, page.read_text(), (tmp_path / "report/report.md").read_text()):
        assert "int4_int8-gnmr" in text
    assert gnmr("replay", str(run), f"out={sets}").code == 0
    decided = [len(row["active"]) for row in read_jsonl(sets)]  # what step t decides is in force in step t + 1
    assert decided[:-1] == [row["num_active"] for row in rows[1:]] and sum(decided) > 0


@pytest.mark.slow
@pytest.mark.parametrize("error", [ZeroDivisionError, ValueError, KeyboardInterrupt])
def test_a_defect_keeps_its_traceback(error, gnmr, tiny_words, monkeypatch):
    """Only mistakes and failed runs are one line; an error that we did not foresee is not dressed up as one."""
    from gnmr.lab.train import run

    def broken(*_):
        raise error("ours")

    monkeypatch.setattr(run, "assemble", broken)
    if error is KeyboardInterrupt:
        outcome = gnmr("train", *tiny_words)
        assert (outcome.code, outcome.err) == (130, "gnmr: interrupted\n")
    else:
        with pytest.raises(error, match="ours"):
            gnmr("train", *tiny_words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["controller.signal=random", "controller.alpha=2"], "alpha=2.0 has no effect under controller.signal=random"),
        (
            ["controller.routing=ranked", "controller.t_lock=3"],
            "t_lock=3 has no effect under controller.routing=ranked",
        ),
        (["experiment=act_quant_stress_2bit", "controller.signal=random"], None),
    ],
)
@pytest.mark.slow
def test_settings_without_effect_are_told_once(words, told, gnmr, tiny_words, monkeypatch):
    """Those of the command line: the files set alpha and beta for every signal, and nobody asked for them."""
    from gnmr.lab.train import run

    monkeypatch.setattr(run, "run", lambda *_, **__: None)
    outcome = gnmr("train", *tiny_words, *words)
    assert outcome.code == 0 and outcome.err.startswith(f"gnmr: warning: controller.{told}" if told else "")
    assert outcome.err.count("\n") == (1 if told else 0)


def test_the_packaged_tree_is_preferred(tmp_path, monkeypatch):
    """In a wheel conf/ lies in the package, in a checkout beside it."""
    assert conf_dir() == CONF
    package = tmp_path / "site-packages" / "gnmr"
    (package / "conf").mkdir(parents=True)
    (package / "conf" / "config.yaml").touch()
    monkeypatch.setattr(composing, "__file__", str(package / "lab" / "config" / "compose.py"))
    assert conf_dir() == package / "conf"
