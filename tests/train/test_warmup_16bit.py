"""A warm-up in 16 bits, and the static baseline of appendix E.4 that needs one (the arm adapt of table 10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import gnmr
from gnmr.control import Controller
from gnmr.lab.config.compose import compose, conf_dir
from gnmr.lab.report.runs import load
from gnmr.lab.train.build import Parts, assemble
from gnmr.lab.train.memory_plan import plan_run
from gnmr.lab.train.step import TrainStep
from gnmr.records.reader import read_json, read_jsonl, read_ratios

WARM = ["controller.warmup_frac=0.4", "controller.warmup_path=16bit"]
"""Three steps of eight."""
STATIC = ["controller.signal=static_k", "controller.routing=ranked", "controller.max_o=2147483647"]
STATIC += ["controller.options.calibration_frac=0.4", "controller.options.k_frac=0.25"]
BLOCKS = ["model.num_layers=4", "precision.unit=block", *WARM, *STATIC]
SIXTEEN = ["precision.low=bf16", "precision.recovery=null"]
LOW = ["controller.signal=always_low"]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "steps.jsonl")]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision.site=forward", "training.accumulation=2"],
        ["precision.low=sim_e2m1", "precision.recovery=fp8_hybrid"],
        ["training.dtype=bfloat16", "training.activation_checkpointing=true", "precision.site=forward"],
        ["precision.site=forward", "faults.kind=noise", "faults.windows=[[1,8]]"],  # of which 16 bits know nothing
    ],
    ids=["saved", "forward", "recipes", "checkpointing", "faults"],
)
@pytest.mark.slow
def test_it_is_the_16_bit_run_until_it_ends_and_the_low_path_from_there(words, train, tmp_path) -> None:
    warm = train(tmp_path / "warm", *LOW, *WARM, *words)
    undisturbed = [word for word in words if "stress" not in word and "site" not in word]
    sixteen = train(tmp_path / "sixteen", *undisturbed, *SIXTEEN)
    on_recovery = train(tmp_path / "recovery", *LOW, WARM[0], *words)
    assert losses(warm)[:3] == losses(sixteen)[:3], "to the last bit"
    assert losses(warm)[1:3] != losses(on_recovery)[1:3]
    assert losses(warm)[4:] != losses(sixteen)[4:]
    ours, theirs = (read_jsonl(folder / "steps.jsonl") for folder in (warm, sixteen))
    assert [row["num_active"] for row in ours] == [len(read_json(warm / "header.json")["units"])] * 3 + [0] * 5
    if "recipes" not in str(words) and "checkpointing" not in str(words):
        assert [row["saved_bytes"] for row in ours[:3]] == [row["saved_bytes"] for row in theirs[:3]]
    assert [row["saved_bytes_predicted"] for row in ours] == [row["saved_bytes"] for row in ours]


def paths_of(parts: Parts) -> dict[str, set[str]]:
    """By unit the names of its operators' paths in force."""
    return {group.name: {operator.path.name for operator in group.operators} for group in parts.converted.units}


NORMS = np.array(
    # GNMR of step t is norm / mean of the norms before; 1 in step 1
    [
        [1.0, 4.0, 1.0, 2.0],
        [2.0, 4.0, 1.0, 2.0],  # 2, 1, 1, 1
        [1.5, 8.0, 4.0, 2.0],  # 1, 2, 4, 1: means over the three 1.333, 1.333, 2, 1
        [90.0, 90.0, 0.1, 90.0],  # after the choice nothing counts
        [0.1, 0.1, 0.1, 900.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
    ]
)


def test_the_quarter_of_the_blocks_with_the_highest_mean_gnmr_stays_for_good(assembled) -> None:
    parts = assembled(*BLOCKS)
    controller: Controller = parts.controller.controller
    assert controller.names == [f"layers.{i}" for i in range(4)] and controller.spec.warmup_steps == 3
    for step, norms in enumerate(NORMS, start=1):
        parts.converted.begin_step(step)
        in_force = paths_of(parts)
        if step <= 3:
            assert set(map(frozenset, in_force.values())) == {frozenset({"bf16"})}
        else:
            assert in_force == {"layers.2": {"int8"}} | {f"layers.{i}": {"int4"} for i in (0, 1, 3)}
        evidence = {"norm": torch.tensor(norms, dtype=torch.float64), "observed": torch.ones(4, dtype=torch.bool)}
        decision = controller.apply(controller.observe(evidence).to_host())
        assert set(decision.by_risk(decision.active)) == (set(controller.names) if step < 3 else {"layers.2"})
        if step == 3:
            assert decision.columns["mean_gnmr"] == pytest.approx([4 / 3, 4 / 3, 2, 1])
            released = {event.unit for event in decision.events if event.event == "release"}
            assert released == {"layers.0", "layers.1", "layers.3"}
        else:
            assert not decision.events or step == 1  # whose events put all of them there


def test_the_arm_is_the_papers_at_the_papers_scale(text_file) -> None:
    sweep = OmegaConf.load(conf_dir() / "sweep" / "paper" / "table10.yaml")
    adapt = sweep.hydra.sweeper.arms.adapt.split()
    made = compose(["sweep=paper/table10", *adapt, "scale=130m"])
    assert (made.precision.unit, made.precision.low, made.precision.recovery) == ("block", "int4", "int8")
    assert made.controller.warmup_steps(made.training.steps) == 500
    assert made.controller.warmup_path == "16bit"
    longer = compose(["sweep=paper/table10", *adapt, "scale=350m", "controller.warmup_frac=0.0084"])
    assert longer.controller.warmup_steps(longer.training.steps) == 500
    small = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=8", "model.num_heads=2"]
    data = ["data.name=text", f"data.path={text_file}", "data.vocab_size=300", "training.seq_len=16"]
    length = ["training.batch_size=2", "training.steps=200", "training.threads=1"]
    parts = assemble(compose([*adapt, *small, *data, *length]), Path("unused"), lambda _: None)
    assert (parts.controller.controller.signal.calibration_steps, parts.controller.spec.warmup_steps) == (5, 5)
    assert (parts.controller.controller.signal.k, len(parts.controller.units), parts.converted.warmup_steps) == (2, 8, 5)


def test_a_run_of_it_keeps_one_set_and_replays(train, gnmr, tmp_path) -> None:
    folder = train(tmp_path / "run", *BLOCKS)
    rows = read_jsonl(folder / "steps.jsonl")
    assert [row["num_active"] for row in rows] == [4, 4, 4, 1, 1, 1, 1, 1]
    active: list[set[str]] = [set() for _ in rows]
    for row in read_ratios(folder).to_pylist():
        if row["active"]:
            active[row["step"] - 1].add(row["unit"])
    assert active[2] == {f"layers.{i}" for i in range(4)} and len({frozenset(units) for units in active[3:]}) == 1
    events = [(event["step"], event["event"], event["cause"]) for event in read_jsonl(folder / "events.jsonl")]
    assert events == [(0, "promote", "warmup")] * 4 + [(3, "release", "warmup")] * 3
    assert gnmr("replay", str(folder), f"out={tmp_path / 'out.jsonl'}").code == 0
    replayed = [set(line["active"]) for line in read_jsonl(tmp_path / "out.jsonl")]
    assert replayed[:-1] == active[1:]
    run = load(folder)
    assert run.settings["controller.warmup_path"] == "16bit"


@pytest.mark.parametrize("path", ["recovery", "16bit"])
def test_the_memory_plan_counts_the_warm_up(tiny, path: str) -> None:
    """Kept for backward and the row of recovery together: what a run keeps whose every unit is on that path."""
    own = ["data.vocab_size=300", "training.batch_size=4", "training.seq_len=64"]

    def kept(*words: str) -> int:
        rows = {what: size for what, size, _ in plan_run(tiny(*own, *words)).rows}
        return rows["kept for backward"] + rows["recovery"]

    static = ["precision.low=bf16" if path == "16bit" else "precision.low=int8", "precision.recovery=null"]
    assert kept(*WARM, f"controller.warmup_path={path}") == kept(*static)
    assert kept("controller.warmup_path=16bit") < kept(*static), "without one it is max_o units"


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_attach_warms_up_in_16_bits(stop: int) -> None:
    """And goes on from a state as if it had never stopped: within the warm-up, at its end and after it."""

    def attached(path: str = "16bit") -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        given: dict[str, Any] = {"signal": "static_k", "routing": "ranked", "options": {"calibration_steps": 3, "k": 1}}
        return model, gnmr.attach(
            model,
            low="int4",
            recovery="int8",
            max_o=4,
            warmup_steps=3,
            warmup_path=path,
            targets=["*"],
            site="forward",
            **given,
        )

    def trained(model: torch.nn.Module, controller: Any, steps: range) -> list[float]:
        found = []
        for step in steps:
            loss = model(torch.randn(5, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            controller.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
            found.append(loss.item())
        return found

    model, controller = attached()
    whole = trained(model, controller, range(8))
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    assert whole[:3] == trained(plain, type("None", (), {"step": lambda self: None})(), range(3))
    assert whole[:3] != trained(*attached("recovery"), range(3))
    first, early = attached()
    trained(first, early, range(stop))
    state, weights = early.state_dict(), first.state_dict()
    second, late = attached()
    second.load_state_dict(weights)
    late.load_state_dict(state)
    assert trained(second, late, range(stop, 8)) == whole[stop:]


def test_attach_refuses_a_path_without_a_warm_up_and_an_unknown_one() -> None:
    def attach(**words: Any) -> None:
        gnmr.attach(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), targets=["*"], **words)

    with pytest.raises(ValueError, match="warmup_path='16bit': there is no warm-up; give warmup_steps"):
        attach(warmup_path="16bit")
    with pytest.raises(ValueError, match="warmup_path='bf16': must be one of recovery, 16bit"):
        attach(warmup_path="bf16", warmup_steps=2)


@pytest.mark.slow
def test_compiled_blocks_warm_up_in_16_bits() -> None:
    """Where operators are in the graphs too: the paths in force are the runs' own."""
    torch._dynamo.reset()

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = torch.nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up_proj(x)

    def outputs(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([Block(), Block()])
        words: dict[str, Any] = {"unit": "block", "signal": "always_low", "warmup_steps": 1, "warmup_path": "16bit"}
        controller = gnmr.attach(model, low="sim_e2m1", recovery="fp8_hybrid", max_o=2, **words)
        if compiled:
            assert controller.converted.compile(model.layers, backend="aot_eager") is None
        found = []
        for _ in range(2):
            x = torch.ones(4, 16).cumsum(1).requires_grad_()
            for block in model.layers:
                x = block(x)
            found.append(x.detach())
            x.square().mean().backward()
            controller.step()
            model.zero_grad()
        return found

    (first, second), (plain_first, plain_second) = outputs(True), outputs(False)
    assert torch.equal(first, plain_first) and torch.equal(second, plain_second)
    assert not torch.equal(first, second)


def test_evaluation_and_rehearsals_are_what_they_were(assembled, blocks_of) -> None:
    parts = assembled(*WARM, "precision.site=forward")
    step = TrainStep(parts.model, parts.controller, parts.optimizer)
    step([blocks_of(parts, 2)], 0.0)
    assert paths_of(parts)["layers.0.mlp.up_proj"] == {"bf16"}
    with parts.converted.no_side_effects():
        assert paths_of(parts)["layers.0.mlp.up_proj"] == {"int8"}
    assert paths_of(parts)["layers.0.mlp.up_proj"] == {"bf16"}
