"""Words in, exit code out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gnmr import __version__
from gnmr.cli import COMMANDS
from gnmr.lab import config
from gnmr.lab.config import compose as composing
from gnmr.lab.config.compose import compose, conf_dir

CONF = Path(__file__).parents[1] / "conf"


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def test_help_loads_nothing_heavy():
    program = (
        "import sys; from gnmr.cli import main; code = main(['--help']);"
        "heavy = {'torch', 'numpy', 'hydra', 'omegaconf', 'pyarrow', 'wandb', 'rich'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy} {len(sys.modules)}')"
    )
    ended = process("-c", program)
    code, heavy, modules = ended.stderr.split(maxsplit=1)[0], *ended.stderr.split(maxsplit=1)[1].rsplit(maxsplit=1)
    assert (code, heavy) == ("0", "set()") and int(modules) < 250  # start-up is the interpreter's own
    assert all(command in ended.stdout for command in COMMANDS)


@pytest.mark.slow
def test_training_keeps_the_kernels_of_every_length_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    """Experts of a mixture read a different number of rows in every step."""
    program = (
        "import os, sys; from gnmr.cli import main; main(['train', '--cfg', 'job']);"
        "sys.exit(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"
    )
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    assert process("-c", program).stderr.split() == ["16384"]
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    assert process("-c", program).stderr.split() == ["7"]


@pytest.mark.slow
def test_composing_loads_no_torch():
    """What `--help`, `--cfg job` and a mistake cost."""
    program = (
        "import sys; from gnmr.cli import main;"
        "code = main(['train', 'controller.alpha=-1', '--cfg', 'job']) or main(['train', 'unknown=1']);"
        "sys.exit(f'{code} {\"torch\" in sys.modules}')"
    )
    ended = process("-c", program)
    assert ended.stderr.splitlines()[-1] == "2 False", ended.stderr


@pytest.mark.slow
def test_a_run_that_is_done_says_so_without_torch(gnmr, tiny_words, tmp_path):
    assert gnmr("train", *tiny_words).code == 0
    words = ["train", *tiny_words]
    program = f"import sys; from gnmr.cli import main; main({words}); sys.exit(str('torch' in sys.modules))"
    ended = process("-c", program)
    assert ended.stdout.endswith(" is done: skipped\n") and ended.stderr == "False\n"


def test_python_m_gnmr_and_its_exit_codes():
    assert process("-m", "gnmr", "--version").stdout == f"gnmr {__version__}\n"
    ended = process("-m", "gnmr", "trian")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "gnmr: unknown command 'trian': did you mean train? (gnmr --help)\n"


def test_help_in_all_its_forms(gnmr):
    outcomes = [gnmr(word) for word in ("--help", "-h", "help")]
    assert len({outcome.out for outcome in outcomes}) == 1 and outcomes[0].out.startswith("gnmr: ")
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]
    assert gnmr().code == 2 and gnmr().out == outcomes[0].out
    assert gnmr("-V").out == f"gnmr {__version__}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["gnmr train -m sweep=", "hydra/launcher=joblib", "experiment: act_quant_stress, "]),
        ("report", ["usage: gnmr report", "RUN"]),
        ("replay", ["usage: gnmr replay FILE", "step,unit,norm", "out=OUT.jsonl"]),
        ("diagnose", ["usage: gnmr diagnose RUN|CHECKPOINT", "plan.json"]),
    ],
)
def test_each_command_explains_itself(command, words, gnmr):
    outcome = gnmr(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert all(word in outcome.out for word in words), outcome.out


# ---- Hydra behind `gnmr train` ----


def composed(out: str) -> dict:
    return yaml.safe_load(out)


def test_cfg_job_prints_the_config_and_runs_nothing(gnmr, tiny_words, tmp_path):
    outcome = gnmr("train", *tiny_words, "controller.alpha=2.5", "--cfg", "job", "--resolve")
    assert (outcome.code, outcome.err) == (0, "")
    tree = composed(outcome.out)
    assert tree["controller"]["alpha"] == 2.5 and tree["training"]["steps"] == 2 and tree["scale_name"] == "cpu"
    assert not (tmp_path / "runs").exists()


def test_flags_may_stand_anywhere(gnmr, tiny_words):
    words = [*tiny_words[:3], "--cfg", "job", *tiny_words[3:], "controller.max_o=3"]
    assert composed(gnmr("train", *words).out)["controller"]["max_o"] == 3


def test_an_experiment_of_ones_own(gnmr, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - act_quant_stress\n  - _self_\nexperiment_name: mine\noptim: {lr: 0.25}\n"
    )
    for words in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        outcome = gnmr("train", *words, "experiment=mine", "--cfg", "job")
        tree = composed(outcome.out)
        assert (tree["experiment_name"], tree["optim"]["lr"]) == ("mine", 0.25), outcome.err


def test_an_experiments_values_win_over_the_models_and_the_command_line_over_both(gnmr, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntraining: {steps: 5, batch_size: 7}\n")
    words = ["model=llama_60m", f"--config-dir={tmp_path}", "experiment=mine", "training.steps=6", "--cfg", "job"]
    training = composed(gnmr("train", *words).out)["training"]
    assert (training["steps"], training["batch_size"], training["accumulation"]) == (6, 7, 1)


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
    again = gnmr("train", *tiny_words, "experiment=act_quant_stress")
    assert again.out == f"{folder} is done: skipped\n"
    words = [*(word for word in tiny_words if word != "records.live=off"), "experiment=act_quant_stress"]
    *_, following = gnmr("train", *words).out.splitlines()
    assert following == f"next: gnmr report {folder}; another seed: training.seed=1"


@pytest.mark.slow
def test_one_run_of_a_sweep_says_what_is_missing(gnmr, tiny_words, tmp_path):
    outcome = gnmr("train", *tiny_words, "sweep=act_quant_stress", f"run_dir={tmp_path / 'run'}")
    assert outcome.code == 0
    assert outcome.out.startswith("this is one run; the sweep's arms and seeds need -m: gnmr train -m ...\n")


def test_a_live_view_for_a_terminal_plain_lines_for_a_pipe(gnmr, tiny_words, tmp_path):
    outcome = gnmr("train", *tiny_words, "records.live=auto", f"run_dir={tmp_path / 'run'}")
    assert outcome.out.startswith(f"{tmp_path / 'run'}: 2 steps; loading PyTorch\n")
    assert "step 2/2  loss" in outcome.out and "\x1b" not in outcome.out
    assert f"next: gnmr report {tmp_path / 'run'}" in outcome.out.replace("\n", "")


@pytest.mark.slow
def test_a_defect_keeps_its_traceback(gnmr, tiny_words, monkeypatch):
    """Only mistakes and failed runs are one line; an error that we did not foresee is not dressed up as one."""
    from gnmr.lab.train import run

    for error in (ZeroDivisionError("ours"), ValueError("ours")):

        def broken(*_, error=error):
            raise error

        monkeypatch.setattr(run, "assemble", broken)
        with pytest.raises(type(error), match="ours"):
            gnmr("train", *tiny_words)


def test_ctrl_c_before_the_first_step(gnmr, tiny_words, monkeypatch):
    from gnmr.lab.train import run

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "assemble", interrupted)
    outcome = gnmr("train", *tiny_words)
    assert (outcome.code, outcome.err) == (130, "gnmr: interrupted\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["controller.signal=random", "controller.alpha=2"],
            "alpha=2.0 has no effect under controller.signal=random",
        ),
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
    assert (outcome.code, outcome.err) == (0, f"gnmr: warning: controller.{told}\n" if told else "")


def test_compose_gives_what_the_command_gives(gnmr, tiny_words):
    words = [*tiny_words, "precision.low=e2m1", "precision.recovery=e4m3", "model=llama_130m", "debug=smoke"]
    tree = composed(gnmr("train", *words, "--cfg", "job", "--resolve").out)
    assert compose(words) == config.load({key: value for key, value in tree.items() if key != "arms"})


def test_the_packaged_tree_is_preferred(tmp_path, monkeypatch):
    """In a wheel conf/ lies in the package, in a checkout beside it."""
    assert conf_dir() == CONF
    package = tmp_path / "site-packages" / "gnmr"
    (package / "conf").mkdir(parents=True)
    (package / "conf" / "config.yaml").touch()
    monkeypatch.setattr(composing, "__file__", str(package / "lab" / "config" / "compose.py"))
    assert conf_dir() == package / "conf"
