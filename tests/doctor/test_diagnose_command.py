"""`gnmr diagnose`: of a run of ours and of a Hugging Face checkpoint, its files, and mistakes in one line."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from gnmr.errors import UserError
from gnmr.lab.cli import main
from gnmr.lab.config.compose import compose
from gnmr.plan.pin_plan import read_plan

pytestmark = pytest.mark.xdist_group("diagnose")

SMALL = ("batches=3", "held_out=2", "batch_size=2", "device=cpu")
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
WORDS = ("recipe=sim_e2m1", "budget=+60%", *SMALL)
LEAST = ("recipe=sim_e2m1", "batches=2", "held_out=0", "confirm=0", "batch_size=2", "device=cpu")


@pytest.fixture(scope="module")
def run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "run", "training.steps=3", "training.dtype=float32")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def digest(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_run_and_its_plan(gnmr, run: Path) -> None:
    before = digest(run)
    ended = gnmr("diagnose", str(run), *WORDS, "out=plan", "html=page.html")
    assert ended.code == 0, ended.err
    assert digest(run) == before, "nothing is written into the run"
    assert {file.name for file in Path("plan").iterdir()} == {"plan.json", "diagnosis.json"}
    assert "gnmr export plan for other libraries" in ended.out and "on bf16 (time 4)" in ended.out
    tree = json.loads(Path("plan/diagnosis.json").read_text())
    assert tree["command"].startswith(f"gnmr diagnose {run} recipe=sim_e2m1 ") and tree["machine"]["device"] == "cpu"
    assert (tree["subject"]["kind"], tree["block"], tree["batch_size"], len(tree["rows"])) == ("run", 16, 2, 21)
    plan = read_plan("plan/plan.json")
    assert plan.low == "sim_e2m1" and plan.extra is not None and plan.extra <= 0.6 and plan.provenance["command"]
    assert tree["rescues"] == ["bf16"], "mxfp8 has no groups of 48 inputs"
    assert plan.prices and {"extra", "kl_left"} <= tree["choices"]["plan"].keys()
    assert tree["verdict"] in ended.out and "by gradient norm" in ended.out and "single values add up to" in ended.out
    page = Path("page.html").read_text()
    assert page.count('<i class="cell') == 7 and "layers.0.mlp.down_proj" in page

    ended = gnmr("diagnose", str(run), *SMALL, "plan=plan/", "out=under")
    assert ended.code == 0 and {file.name for file in Path("under").iterdir()} == {"diagnosis.json"}
    under = json.loads(Path("under/diagnosis.json").read_text())
    assert (under["pins"] == plan.pins and under["total_price"] < tree["total_price"]) or not plan.pins
    assert "under the plan" in ended.out and "everything on" not in ended.out
    assert ended.out.rstrip().endswith("diagnosis.json in under")


@pytest.mark.slow
def test_two_sides_and_what_is_beside(gnmr, run: Path) -> None:
    few = ("batches=2", "held_out=1", "batch_size=2", "device=cpu", "confirm=2")
    words = ("recipe=sim_e2m1,*.v_proj:bf16", "against=fp8_hybrid", "gate=1e-9", "include=head,kv", "kv_cast=int8/row")
    ended = gnmr("diagnose", str(run), *words, *few, "out=sides", "html=page.html")
    assert ended.code == 0, ended.err
    assert "the gate does not hold: the rollout (sim_e2m1) and the trainer (fp8_hybrid) differ by " in ended.out
    assert "(bf16 | fp8_hybrid)" in ended.out and "next: " not in ended.out and "not written: plan.json" in ended.out
    assert {file.name for file in Path("sides").iterdir()} == {"diagnosis.json"}
    tree = json.loads(Path("sides/diagnosis.json").read_text())
    beside = {row["operator"]: row for row in tree["beside"]}
    assert set(beside) == {"lm_head", "layers.0.self_attn.k_cache", "layers.0.self_attn.v_cache"}
    assert tree["gate"] == 1e-9 and all(row["measured"] is not None for row in list(beside.values())[:1])
    assert "layers.0.self_attn.v_cache" in Path("page.html").read_text()

    assert gnmr("diagnose", str(run), "recipe=sim_e2m1", "against=fp8_hybrid", *LEAST[1:], "out=other").code == 0
    assert {file.name for file in Path("other").iterdir()} == {"diagnosis.json", "plan.json"}
    assert read_plan("other").recovery == "fp8_hybrid"
    ended = gnmr("diagnose", str(run), "recipe=sim_e2m1,*.v_proj:bf16", *LEAST[1:], "out=third")
    assert ended.code == 0 and "next: " not in ended.out and not Path("third/plan.json").exists()


@pytest.mark.slow
def test_its_plan_is_trained(gnmr, run: Path, tiny_words: list[str]) -> None:
    assert gnmr("diagnose", str(run), *WORDS, "out=plan").code == 0
    ended = gnmr("train", *tiny_words, "model.num_heads=2", "plan=plan/plan.json", "run_dir=trained")
    assert ended.code == 0, ended.err
    plan = read_plan("plan/plan.json")
    assert plan.pins and all(name in Path("trained/config.yaml").read_text() for name in plan.pins)
    for words, threshold in (([], plan.triggers["price"]), (["controller.options.threshold=2.5"], 2.5)):
        config = compose(["plan=plan/plan.json", "controller.signal=price", *words])
        assert config.controller.options == {"threshold": threshold}
    assert compose(["plan=plan/plan.json"]).controller.options == {}


@pytest.mark.slow
def test_targets_and_exclude(gnmr, train: Callable[..., Path], run: Path, tiny_words: list[str]) -> None:
    """Given as words, or those of the run; the plan takes them along."""
    words = (*LEAST, "out=plan")
    ended = gnmr("diagnose", str(run), "targets=*.mlp.*,q_proj", "exclude=[down_proj]", *words)
    assert ended.code == 0, ended.err
    plan = read_plan("plan")
    assert (plan.targets, plan.exclude) == (["*.mlp.*", "q_proj"], ["down_proj"])
    assert {name.rpartition(".")[2] for name in plan.operators} == {"q_proj", "gate_proj", "up_proj"}
    config = compose(["plan=plan", *tiny_words])
    assert (config.precision.targets, config.precision.exclude) == (plan.targets, plan.exclude)

    own = train(
        Path("own"), "training.steps=1", "precision.targets=['*_proj']", "precision.exclude=[q_proj,k_proj,v_proj]"
    )
    for given, left in (((), ["o_proj", "gate_proj", "up_proj", "down_proj"]), (("exclude=*.mlp.*",), QKVO)):
        ended = gnmr("diagnose", str(own), *given, *words)
        assert ended.code == 0, ended.err
        assert [name.rpartition(".")[2] for name in read_plan("plan").operators] == left


@pytest.mark.slow
def test_a_checkpoint_on_a_text(gnmr, checkpoint: Path, text_file: Path) -> None:
    before = digest(checkpoint)
    ended = gnmr("diagnose", str(checkpoint), f"data={text_file}", "recipe=int4", "held_out=0", *SMALL[:1])
    assert ended.code == 0, ended.err
    assert "3 + 0 batches of 16 x 32 tokens" in ended.out and re.search(r"sim_int4 costs ", ended.out)
    assert ended.out.startswith("gnmr: recipe=int4 is a format: read as the recipe sim_int4, which casts everything")
    assert "self_attn.q_proj" in ended.out and digest(checkpoint) == before
    assert not list(Path().iterdir()), "nothing is written without out= and html="


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["times=8"], "times=8: there is no such file; name a table of times, or BITS:TIME"),
        (
            ["plan=other.json"],
            "plan: was made for another model (1 operator, here 7; no layers.0.up_proj here)",
        ),
        (["batches=90000"], "needs 90002: batches=90000 and 2 held out, of 1 each; use more text, or fewer batches"),
        (["block=17"], "block=17: the model reads at most 16 tokens"),
        (["data=nowhere.txt"], "data=nowhere.txt: there is no such file"),
        (["data=short.txt"], "data=short.txt: has 0 blocks of 16 tokens and needs "),
        (["data=binary.txt"], "is not UTF-8 text (invalid start byte at byte 128); decompress it, or convert it"),
        (["data=pipe.txt"], "data=pipe.txt: is not a file"),
        (["out=other.json"], "out=other.json: must be a folder in a folder that exists"),
        (["second"], "diagnose: name one run folder or checkpoint"),
        (["recipe=nvfp4,*.up_proj"], "recipe=*.up_proj: must be PATTERN:RECIPE after the first recipe"),
        (["recipe=nvfp4,*:bf16"], "recipe=*:bf16: * is what the first recipe, nvfp4, is for"),
        (["targets=[]"], "targets=[]: needs at least one pattern"),
        (["against=fp8_hybrid", "gate=nan"], "gate=nan: must be nats of KL per token, a number above 0"),
        (["kv_cast=no"], "kv_cast=no: format 'no' is not known"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(words: list[str], says: str, gnmr, run: Path) -> None:
    other = {"gnmr_plan": 2, "operators": {"layers.0.up_proj": [8, 16]}, "low": "nvfp4", "recovery": "bf16", "pins": {}}
    Path("other.json").write_text(json.dumps(other))
    Path("short.txt").write_text("a b c")
    Path("binary.txt").write_bytes(bytes(range(256)))
    os.mkfifo("pipe.txt")
    there = sorted(os.listdir())
    default = [word for word in ("held_out=2", "device=cpu") if word.split("=")[0] not in "".join(words)]
    assert says in gnmr("diagnose", str(run), *default, *words).mistake
    assert sorted(os.listdir()) == there


@pytest.mark.slow
def test_checkpoints_without_a_text_or_weights(gnmr, checkpoint: Path, text_file: Path, tmp_path: Path) -> None:
    assert "a checkpoint brings no text: give data=FILE.txt" in gnmr("diagnose", str(checkpoint)).mistake
    mute = shutil.copytree(checkpoint, tmp_path / "mute", ignore=shutil.ignore_patterns("*token*"))
    assert "mute: holds no tokenizer" in gnmr("diagnose", str(mute), f"data={text_file}").mistake
    empty = shutil.copytree(checkpoint, tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    assert "holds no *.safetensors" in gnmr("diagnose", str(empty), f"data={text_file}").mistake


class Left(io.StringIO):
    """A pipe whose reader leaves after the first line."""

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise BrokenPipeError
        return super().write(text)


def test_files_are_there_when_the_reader_leaves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Left())
    assert main(["diagnose", str(run), *LEAST, "out=plan", "html=page.html"]) == 141
    assert read_plan("plan").low == "sim_e2m1"
    assert json.loads(Path("plan/diagnosis.json").read_text())["verdict"] in unescape(Path("page.html").read_text())


def test_a_disk_that_is_full_costs_no_numbers(gnmr, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise UserError("out=plan/plan.json: cannot be written (No space left on device)")

    monkeypatch.setattr("gnmr.lab.cli.diagnose._write", full)
    ended = gnmr("diagnose", str(run), *LEAST, "out=plan")
    assert "single values add up to" in ended.out and "No space left" in ended.mistake
