"""`gnmr replay`: the sets that a run chose, from its records alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from gnmr import attach
from gnmr.control.spec import NO_CAP
from gnmr.control.threshold import TwoStage
from gnmr.lab.config import controller
from gnmr.lab.train.step import TrainStep
from gnmr.records.reader import read_json, read_jsonl, read_units

VARIANTS = {
    "plain": [],
    "lock": ["controller.t_lock=3", "controller.max_o=3"],
    "warm_up": ["controller.warmup_frac=0.3"],
    "warm_up_in_16_bits": ["controller.warmup_frac=0.3", "controller.warmup_path=16bit"],
    "two_stages": ["controller.alpha_init=1.4"],
    "one_signal": ["controller.alpha=null", "controller.delta=2"],
    "nonfinite": ["training.seed=5"],
}


def poison(monkeypatch: pytest.MonkeyPatch, unit: str, steps: set[int]) -> None:
    from gnmr.lab.train import run as module

    plain, count = module.assemble, iter(range(1, 1000))

    def assemble(*args):
        parts = plain(*args)
        weight = parts.model.get_submodule(unit).weight
        weight.register_hook(lambda gradient: gradient * (math.nan if next(count) in steps else 1.0))
        return parts

    monkeypatch.setattr(module, "assemble", assemble)


def decisions(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def told(outcome) -> dict[str, dict[str, str]]:
    """The printed figures by column, replay and run, and by their names."""
    head, *lines = outcome.out.splitlines()
    rows = [line.rsplit(maxsplit=len(head.split())) for line in lines if not line.startswith("decisions: ")]
    return {column: {row[0]: row[1 + i] for row in rows} for i, column in enumerate(head.split())}


SLOW = ("plain", "warm_up", "one_signal")


@pytest.mark.parametrize("variant", [pytest.param(v, marks=[pytest.mark.slow] * (v in SLOW)) for v in VARIANTS])
def test_it_reproduces_the_run(variant, train, gnmr, tmp_path, monkeypatch):
    monkeypatch.setattr(controller, "INIT_FRAC", 0.5)
    if variant == "nonfinite":
        poison(monkeypatch, unit="layers.0.mlp.up_proj", steps={3, 7})
    recorded = train(tmp_path / "run", "training.steps=12", "training.checkpoint_every=100", *VARIANTS[variant])
    out = tmp_path / "out.jsonl"
    outcome = gnmr("replay", str(recorded), f"out={out}")
    assert outcome.code == 0 and outcome.err == ""
    lines = decisions(out)
    rows = read_jsonl(recorded / "steps.jsonl")
    assert [line["step"] for line in lines] == [row["step"] for row in rows] == list(range(1, 13))
    assert [len(line["candidates"]) for line in lines] == [row["num_candidates"] for row in rows]

    in_force: list[set[str]] = [set() for _ in range(13)]
    risk: dict[tuple[int, str], float] = {}
    for row in read_units(recorded).to_pylist():
        risk[row["step"], row["unit"]] = row["risk"]
        if row["active"]:
            in_force[row["step"] - 1].add(row["unit"])
    last = set(in_force[11])
    for event in read_jsonl(recorded / "events.jsonl"):
        if event["step"] == 12:
            (last.add if event["event"] == "promote" else last.remove)(event["unit"])
    in_force[12] = last
    for line in lines:
        assert set(line["active"]) == in_force[line["step"]]
    assert any(0 < len(units) < 7 for units in in_force)
    for line in lines[3 if variant.startswith("warm_up") else 0 :]:
        risks = [risk[line["step"], unit] for unit in line["candidates"]]
        assert risks == sorted(risks, reverse=True)
        assert line["active"] == line["candidates"][: len(line["active"])]

    summary, figures = read_json(recorded / "summary.json"), told(outcome)
    assert figures["run"]["steps"] == "12"
    assert figures["run"] == {**figures["replay"], "GEMM FLOPs spent": f"{summary['spent_gemm_frac']:.2%}"}
    for name in ("promotion_frac", "hit_max_o_frac"):
        assert f"{summary[name]:.2%}" in figures["replay"].values()


def test_shares_of_the_steps_are_those_of_the_run_even_if_it_ended_early(train, gnmr, tmp_path, monkeypatch):
    """Two stages of six steps each, of which the run that failed took six and two."""
    plain = TrainStep.__call__

    def call(self, *args):
        if self.router.t == 8:
            raise ZeroDivisionError
        return plain(self, *args)

    words = ["training.steps=12", "controller.alpha_init=9", "controller.beta=null"]
    monkeypatch.setattr(controller, "INIT_FRAC", 0.5)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(TrainStep, "__call__", call)
        train(tmp_path / "run", *words)
    assert gnmr("replay", str(tmp_path / "run"), f"out={tmp_path / 'out.jsonl'}").code == 0
    lines = decisions(tmp_path / "out.jsonl")
    rows = read_jsonl(tmp_path / "run" / "steps.jsonl")
    assert [len(line["candidates"]) for line in lines] == [row["num_candidates"] for row in rows]
    assert [bool(line["active"]) for line in lines] == [False] * 6 + [True] * 2


def test_a_file_of_the_same_norms_gives_the_same_sets(train, gnmr, tmp_path):
    run = train(tmp_path / "run", "training.checkpoint_every=100")
    keys = ["alpha=1.05", "beta=1.02", "max_o=2"]
    table = read_units(run).select(["step", "unit", "norm"])
    pq.write_table(table, tmp_path / "norms.parquet")
    names = table.set_column(1, "unit", table["unit"].cast(pa.string()))
    pyarrow.csv.write_csv(names, tmp_path / "norms.csv")
    outs = []
    for source, words in ((run, []), (tmp_path / "norms.parquet", keys), (tmp_path / "norms.csv", keys)):
        outs.append(tmp_path / f"{len(outs)}.jsonl")
        assert gnmr("replay", str(source), *words, f"out={outs[-1]}").code == 0
    assert decisions(outs[0]) == decisions(outs[1]) == decisions(outs[2])
    assert any(line["active"] for line in decisions(outs[0]))


@pytest.fixture
def replayed(gnmr, tmp_path) -> Callable[..., list[dict]]:
    def replay(rows: str, *words: str) -> list[dict]:
        file, out = tmp_path / "norms.csv", tmp_path / "out.jsonl"
        file.write_text("step,unit,norm\n" + rows)
        outcome = gnmr("replay", str(file), *words, f"out={out}")
        assert outcome.code == 0, outcome.err
        assert sorted(p.name for p in tmp_path.iterdir()) == ["norms.csv", "out.jsonl"]
        return decisions(out)

    return replay


def rows(**norms: list[float | str | None]) -> str:
    """CSV rows of units with one norm a step; None: no row."""
    return "".join(
        f"{t},{unit},{norm}\n"
        for unit, values in norms.items()
        for t, norm in enumerate(values, start=1)
        if norm is not None
    )


def test_by_hand(replayed):
    """GNMR of a: 1, 1, 4, 1/2, 4/7, 5/8; alpha = 2 is exceeded in step 3, the lock holds for two steps more."""
    lines = replayed(rows(a=[1, 1, 4, 1, 1, 1], b=[1, 1, 1, 1, 1, 1]), "alpha=2", "beta=null", "max_o=1", "t_lock=2")
    assert lines == [
        {"step": t, "candidates": units, "active": units}
        for t, units in enumerate([[], [], ["a"], ["a"], ["a"], []], start=1)
    ]


@pytest.mark.parametrize("last", [(3, 5, 4), (3, 3, 3)])
def test_the_cap_and_the_order(last, replayed):
    """The largest norms first; ties go by the unit's first row."""
    norms = {unit: [1, norm] for unit, norm in zip("zam", last, strict=True)}
    lines = replayed(rows(**norms), "alpha=2", "beta=null", "max_o=2")
    order = sorted("zam", key=lambda unit: -last["zam".index(unit)])
    assert lines[1] == {"step": 2, "candidates": order, "active": order[:2]}


def test_norms_that_are_not_finite_or_not_there(replayed):
    lines = replayed(
        rows(a=[1, "nan", 1, 1], b=[1, 9, None, 1], c=[1, 1, "inf", None]),
        "alpha=2",
        "beta=null",
        "max_o=2",
        "t_lock=1",
    )
    assert [line["candidates"] for line in lines] == [[], ["a", "b"], ["c", "a", "b"], ["c"]]
    assert [line["active"] for line in lines] == [[], ["a", "b"], ["c", "a"], ["c"]]


@pytest.mark.parametrize(("alpha", "active"), [(2, ["a"]), (4, [])])
def test_steps_without_any_row(alpha, active, replayed):
    """They leave the history alone: GNMR of step 4 is 3, not 3 over a mean with zeros in it."""
    lines = replayed("1,a,1\n4,a,3\n", f"alpha={alpha}", "beta=null", "max_o=1")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[3]["active"] == active


def test_a_unit_that_is_not_there_is_kept_by_its_lock_and_ranks_last(replayed):
    norms = rows(a=[1, 9, None, 1], b=[1, 1, 3, 1])
    lines = replayed(norms, "alpha=2", "beta=null", "max_o=2", "t_lock=2")
    assert [line["active"] for line in lines] == [[], ["a"], ["b", "a"], ["b", "a"]]


def test_a_folder_whose_name_reads_like_a_setting(gnmr, tmp_path, monkeypatch):
    """Sweeps of other tools name folders so."""
    monkeypatch.chdir(tmp_path)
    (folder := Path("alpha=0.1")).mkdir()
    (folder / "norms.csv").write_text("step,unit,norm\n1,a,1\n2,a,3\n")
    outcome = gnmr("replay", "alpha=0.1/norms.csv", "alpha=4", "max_o=1")
    assert (outcome.code, outcome.err) == (0, "")
    assert told(outcome) == {
        "replay": {
            "steps": "2",
            "units": "1",
            "unit-steps spent": "0.00%",
            "steps at max_o": "0.00%",
            "unit-steps over gnmr's threshold": "0.00%",
            "unit-steps over delta_gnmr's threshold": "0.00%",
        }
    }


def test_a_run_of_another_signal_is_replayed_by_gnmr_and_said_so(train, gnmr, tmp_path):
    run = train(tmp_path / "run", "controller.signal=grad_norm", "controller.routing=ranked")
    outcome = gnmr("replay", str(run), "max_o=1")
    assert outcome.code == 0 and "the run chose by grad_norm; replay chooses by GNMR" in outcome.err


OWN_LOOPS = {
    "two stages": ({"alpha": TwoStage(9.0, 1.1, 10), "beta": TwoStage(9.0, 1.1, 10)}, None),
    "warm-up": ({"warmup_steps": 10}, None),
    "ranked": ({"routing": "ranked"}, None),
    "calibrated": ({}, "the run found trigger="),
    "budget": ({"budget": 0.2}, "the run had budget=0.2 too; in replay max_o alone limits the set"),
    "budget alone": ({"budget": 0.2, "max_o": NO_CAP}, "the run had budget=0.2 too; in replay max_o alone"),
}


@pytest.mark.filterwarnings("ignore:attach covers")
@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_loop_of_the_user_is_replayed_by_its_own_rule(name, gnmr, tmp_path):
    """What replay cannot follow, it says."""
    settings, difference = OWN_LOOPS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    record = tmp_path / "mine-s0"
    controller = attach(model, low="int4", recovery="int8", record=record, **settings)
    if name == "calibrated":
        controller.calibrate(fraction=0.05, steps=10)
    for step in range(20):
        model.zero_grad()
        (model(torch.randn(8, 16) * (6 if step % 7 == 0 else 1)) ** 2).mean().backward()
        controller.step()
    controller.detach()
    outcome = gnmr("replay", str(record), f"out={tmp_path / 'out.jsonl'}")
    assert outcome.code == 0 and (difference or "") in outcome.err and bool(outcome.err) == (difference is not None)
    if difference is None:
        candidates = [row["num_candidates"] for row in read_jsonl(record / "steps.jsonl")]
        assert [len(line["candidates"]) for line in decisions(tmp_path / "out.jsonl")] == candidates and any(candidates)
        assert told(outcome)["run"].items() >= told(outcome)["replay"].items() - {("GEMM FLOPs spent", "–")}


def test_it_does_not_write_over_the_records_that_it_reads(train, gnmr, tmp_path):
    run, file = train(tmp_path / "run"), tmp_path / "norms.csv"
    file.write_text("step,unit,norm\n1,a,1\n")
    for place, out in ((run, run / "steps.jsonl"), (file, file)):
        before = out.read_bytes()
        outcome = gnmr("replay", str(place), f"out={out}")
        assert outcome.code == 2 and "would replace the records that are read" in outcome.err
        assert out.read_bytes() == before
