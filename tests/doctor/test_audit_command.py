"""`gnmr audit`: of a run of ours and of a Hugging Face checkpoint; findings, exit codes, JSON, mistakes in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("diagnose")

SMALL = ("batch_size=2", "device=cpu")


@pytest.fixture(scope="module")
def run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = (
        "training.steps=3",
        "precision.low=fp8_hybrid",
        "precision.recovery=bf16",
        "precision.pins={layers.0.*: [fprop]}",
    )
    return train(tmp_path_factory.mktemp("runs") / "run", *keys)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_is_audited_on_its_low_path(gnmr, run: Path) -> None:
    before = {str(file): file.read_bytes() for file in sorted(run.rglob("*")) if file.is_file()}
    ended = gnmr("audit", str(run), *SMALL, "--table", "out=audit.json")
    assert ended.code == 0 and ended.err == "", ended.err + ended.out
    assert {str(file): file.read_bytes() for file in sorted(run.rglob("*")) if file.is_file()} == before
    assert "in low precision" in ended.out and ended.out.rstrip().endswith("lm_head 52.4%: sound")
    assert "e5m2/tensor x e4m3/tensor" in ended.out and "input inf" in ended.out, "pinned, and so never quantized"
    tree = json.loads(Path("audit.json").read_text())
    assert tree["findings"] == [] and tree["command"].startswith("gnmr audit ")
    rows = {row["operator"]: row for row in tree["operators"]}
    assert rows["layers.0.mlp.up_proj"]["note"] == "pinned: fprop"
    assert rows["layers.0.mlp.up_proj"]["measured"]["fprop"]["input"][0] == "inf"
    assert 20 < rows["layers.0.mlp.up_proj"]["measured"]["wgrad"]["input"][0] < 40


def test_findings_are_lines_and_exit_code_1(gnmr, run: Path) -> None:
    ended = gnmr("audit", str(run), *SMALL, "recipe=mxfp8", "filter_fqns=[lm_haed,mlp]", "html=a.html")
    assert ended.code == 1 and ended.err == "", ended.err
    _, *findings, verdict, written = ended.out.strip().splitlines()
    assert [line.split(":")[0] for line in findings][:2] == ["no match", "not applied"], ended.out
    assert "another recipe" in ended.out and "right would be: 'lm_head'" in findings[0]
    assert verdict.endswith(f"{len(findings)} findings") and written == "page: a.html"
    shown = unescape(re.sub(r"<[^>]*>", "", Path("a.html").read_text()))
    for finding in findings:
        kind, _, (problem, right) = *finding.split(": ", 2)[:2], finding.split(": ", 2)[2].split("; right would be: ")
        assert kind in shown and problem in shown and right in shown, finding
    assert verdict.partition(": ")[2] in shown and "layers.*.mlp.up_proj" in shown
    ended = gnmr("audit", str(run), "--static", "device=cpu", "filter_fqns=[lm_head]", "out=a.json")
    assert ended.code == 0 and "nothing measured" in ended.out
    assert all(not row["measured"] for row in json.loads(Path("a.json").read_text())["operators"])


def test_two_sides_are_compared_by_names_alone(gnmr, run: Path) -> None:
    words = ("audit", str(run), "trainer.filter_fqns=[lm_head,mlp.down_proj]")
    ended = gnmr(*words, "rollout.ignore=[lm_head,re:.*down_proj$]", "out=a.json")
    assert ended.code == 0 and ended.err == "" and ended.out.rstrip().endswith("both sides agree"), ended.err
    assert {one["module"] for one in json.loads(Path("a.json").read_text())["modules"]} > {"lm_head"}
    fused = "rollout.ignored_layers=[model.layers.0.mlp.gate_up_proj,model.layers.0.mlp.gate]"
    ended = gnmr(*words, fused, "out=b.json", "html=b.html")
    assert ended.code == 1 and ended.err == "", ended.err
    *lines, verdict, _written = ended.out.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["differs", "differs", "no match"], ended.out
    assert "mlp.gate_proj, model.layers.0.mlp.up_proj" in lines[0] and "engine's name gate_up_proj" in lines[0]
    assert verdict.endswith("3 are treated differently")
    tree = json.loads(Path("b.json").read_text())
    assert "3 are treated differently" in Path("b.html").read_text()
    assert len(tree["findings"]) == 2 and tree["command"].startswith("gnmr audit ")


@pytest.mark.slow
def test_a_checkpoint_as_it_is_and_on_a_recipe(gnmr, checkpoint: Path) -> None:
    Path("t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    words = (str(checkpoint), "data=t.txt", "block=16", *SMALL)
    ended = gnmr("audit", *words)
    assert ended.code == 0 and "0 in low precision" in ended.out, ended.err + ended.out
    ended = gnmr("audit", *words, "recipe=fp8_hybrid", "modules_to_not_convert=[lm_head,up_proj]", "--table")
    assert ended.code == 0 and "e4m3/tensor x e4m3/tensor" in ended.out, ended.err + ended.out
    ended = gnmr("audit", str(checkpoint), "trainer.filter_fqns=[]", "rollout.ignored_layers=[]")
    assert ended.code == 1 and ended.out.startswith("differs: lm_head: "), "vLLM never quantizes it to FP8"


def test_a_list_that_forgets_the_head_is_found_on_a_checkpoint(gnmr, checkpoint: Path) -> None:
    """As on the model that the list's library converts; a library that never converts the head is no finding."""
    words = ("audit", str(checkpoint), "--static", "device=cpu", "recipe=fp8_hybrid")
    for which, kinds in (
        ("filter_fqns=[]", ["head"]),
        ("filter_fqns=[output]", ["head", "no match"]),
        ("filter_fqns=[lm_head]", []),
        ("fqns=[wq,lm_head]", []),
        ("ignored_layers=[]", []),
        ("num_first_layers_in_bf16=0", []),
    ):
        ended = gnmr(*words, which)
        *lines, _verdict = ended.out.strip().splitlines()
        assert [line.split(":")[0] for line in lines] == kinds and ended.code == bool(kinds), ended.out + ended.err
        assert "no match" not in kinds or lines[1].endswith("right would be: 'lm_head'")
    assert gnmr(*words).code == 0, "without a list, our own rule leaves out the head"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{run}", "recpie=mxfp8"], "unknown option 'recpie=mxfp8': did you mean recipe"),
        (["{run}", "recipe=mxfp9"], "recipe=mxfp9: is not a recipe: did you mean mxfp8"),
        (["{run}", "out=no/where.json"], "out=no/where.json"),
        (["{run}", "html=no/where.html"], "html=no/where.html"),
        (["{run}", "filter_fqns="], "'filter_fqns=' has no value"),
        (["{run}", "rollout.filter_fqn=[]"], "did you mean rollout.filter_fqns"),
        (["{run}", "trainer.fqns=[wo]", "rollout.ignore=[head]"], "rollout.ignore=head: matches no linear"),
        (["{run}", "trainer.fqns=[wo]", "recipe=mxfp8"], "recipe: two sides are compared by"),
        (["nobody", "trainer.fqns=[wo]", "rollout.ignore=[]"], "nobody: there is no such"),
        (["nobody"], "nobody: there is no such run, checkpoint folder or hub name"),
        ([], "usage: gnmr audit"),
        (["{run}", "{run}"], "name one run folder or checkpoint"),
        (["{run}", "block=100000"], "block=100000: the model reads"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(gnmr, run: Path, words: list[str], line: str) -> None:
    ended = gnmr("audit", *(word.replace("{run}", str(run)) for word in words))
    assert ended.code == 2 and re.search(re.escape(line), ended.err + ended.out), ended.err + ended.out
    assert not words or ended.err.count("\n") == 1
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_checkpoint_on_a_plan(gnmr, checkpoint: Path) -> None:
    Path("t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    ended = gnmr(
        "diagnose", str(checkpoint), "data=t.txt", "block=16", "batches=2", "held_out=0", "device=cpu", "out=p"
    )
    assert ended.code == 0, ended.err
    words = (str(checkpoint), "plan=p/plan.json", "data=t.txt", "block=16", *SMALL)
    ended = gnmr("audit", *words, "--table", "out=a.json")
    assert ended.code in (0, 1) and "e2m1/nv x e2m1/nv2d" in ended.out, ended.err + ended.out
    rows = json.loads(Path("a.json").read_text())["operators"]
    pins = json.loads(Path("p/plan.json").read_text())["pins"]
    assert {row["operator"] for row in rows if "pinned" in row["note"]} == set(pins)
    assert len({row["operator"].rpartition(".")[2] for row in rows}) == 8, "seven linears of a block, and the head"
    ended = gnmr("audit", *words, "recipe=nvfp4")
    assert ended.code == 2 and ended.err == "gnmr: recipe: the plan says which; leave one of them out\n"
