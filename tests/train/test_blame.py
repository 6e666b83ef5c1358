"""What is to blame for a step that is not finite or spikes: found by the same step again, which leaves no trace."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from everything import differences, everything
from hypothesis import given
from hypothesis import strategies as st

import gnmr
from gnmr.attachment import blame
from gnmr.attachment.blame import Levels, needed
from gnmr.attachment.repeat import StepRepeater
from gnmr.formats.scaling import compress
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.lab.train import run as run_module
from gnmr.records.reader import read_jsonl

LR = 1e-2
TWO = ["model.num_layers=2", "training.steps=6", "controller.alpha=99", "controller.beta=null", "controller.max_o=2"]
TWO += ["training.checkpoint_every=100"]
FORWARD = ["precision.site=forward"]
RECIPE = ["precision.low=fp8_hybrid", "precision.recovery=bf16"]
MOE = ["model.name=moe", "model.experts.number=4"]
UP = "layers.1.mlp.up_proj"


def stress(kind: str, targets: str = UP, at: int = 3, steps: int = 2) -> list[str]:
    return [f"faults.kind={kind}", f"faults.targets=[{targets}]", f"faults.windows=[[{at},{steps}]]"]


def told(folder) -> list[tuple]:
    rows = read_jsonl(folder / "events.jsonl")
    return [(row["step"], row["unit"], row["event"], row["cause"]) for row in rows]


@pytest.mark.parametrize("words", [RECIPE, [*FORWARD, "training.accumulation=2"]], ids=["recipe", "two"])
def test_a_forward_pass_that_is_not_finite_costs_no_step(words, train, tmp_path):
    folder = train(tmp_path / "run", *TWO, *words, *stress("nan"))
    rows = read_jsonl(folder / "steps.jsonl")
    assert [row["skipped"] for row in rows] == [False] * 6 and all(math.isfinite(row["loss"]) for row in rows)
    assert [row["num_active"] for row in rows][:4] == [0, 0, 1, 1]
    assert told(folder)[:2] == [(3, UP, "promote", "retry"), (3, UP, "verdict", "precision")]


def test_more_operators_than_max_o_are_not_recovered(train, tmp_path):
    folder = train(tmp_path / "run", *TWO, *FORWARD, *stress("nan", "layers.0.*", steps=1))
    rows = read_jsonl(folder / "steps.jsonl")
    assert [row["skipped"] for row in rows] == [row["step"] == 3 for row in rows]
    assert all(row["num_active"] <= 2 for row in rows)


def test_keep_promotes_nobody(train, tmp_path):
    folder = train(tmp_path / "run", *TWO, *FORWARD, *stress("nan", steps=1), "controller.nonfinite=keep")
    rows = read_jsonl(folder / "steps.jsonl")
    assert [row["skipped"] for row in rows] == [row["step"] == 3 for row in rows]
    assert not [unit for _, unit, event, _ in told(folder) if event == "promote"]
    assert (3, UP, "verdict", "precision") in told(folder)


def test_what_is_not_finite_in_16_bits_either_blames_nobody(assembled, blocks_of, step_of):
    parts = assembled(*TWO, *FORWARD, "controller.max_o=99")
    handle = parts.model.layers[1].register_forward_hook(lambda _m, _i, output: output * math.nan)
    result = step_of(parts)([blocks_of(parts, 2)], LR)
    assert result.verdict is not None and result.verdict.cause == "data_or_model" and result.skipped
    assert not result.decision.active.any() and not result.decision.events
    handle.remove()
    assert not step_of(parts)([blocks_of(parts, 2)], LR).skipped


def test_a_loss_that_is_finite_again_is_told(assembled, blocks_of, step_of):
    parts, calls = assembled(*TWO, *FORWARD), []

    def race(_module, _inputs, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * (math.nan if len(calls) == 1 else 1.0)

    parts.model.norm.register_forward_hook(race)
    result = step_of(parts)([blocks_of(parts, 2)], LR)
    assert result.verdict is not None and result.verdict.cause == "not_reproducible"
    assert result.skipped and not result.decision.active.any()


def test_units_whose_own_gradients_are_not_finite_are_blamed_and_no_others(train, tmp_path):
    """The fault spoils copies that are saved for backward, so each operator spoils its own gradient."""
    folder = train(tmp_path / "run", *TWO, *stress("nan", "layers.1.*", steps=1))
    (verdict,) = [(unit.split(), cause) for _, unit, event, cause in told(folder) if event == "verdict"]
    names = [f"layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
    names += [f"layers.1.{name}" for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    assert verdict == (names, "precision")


@pytest.mark.parametrize(
    "words",
    [[*FORWARD, "precision.rounding=stochastic"], ["precision.low=fp8_delayed", "precision.recovery=bf16"]],
    ids=["stochastic", "delayed"],
)
def test_the_retried_step_is_the_step_with_the_unit_in_recovery_from_the_start(words, train, tmp_path, tampered):
    """To the last bit: the retry forgets what the first attempt left in histories, generators and locks."""
    words = [*TWO, *words, "controller.t_lock=9"]
    retried = everything(train(tmp_path / "retried", *words, *stress("nan", at=1, steps=1)))
    tampered(lambda parts: parts.router.promote([UP]))
    want = everything(train(tmp_path / "want", *words))
    assert [d for d in differences(want, retried) if not d.startswith((".events", ".files"))] == []


# ---- spikes ----


@pytest.fixture
def spiky(monkeypatch) -> None:
    """Every second step or so of a run is a spike."""
    monkeypatch.setattr(run_module, "Levels", partial(Levels, window=4, least=3, sigmas=0.3))
    monkeypatch.setattr(blame, "SIGMAS", 0.3)


@pytest.mark.parametrize(
    "words",
    [
        [
            "controller.signal=gsnr",
            "training.accumulation=2",
            "precision.rounding=stochastic",
            "optim.clip_norm=1",
        ],
        pytest.param(["precision.low=fp8_delayed", "precision.recovery=bf16"], marks=pytest.mark.slow),
        pytest.param([*MOE, *FORWARD, "optim.transform.name=agc"], marks=pytest.mark.slow),
    ],
    ids=["formats", "delayed", "moe"],
)
def test_verdicts_leave_no_trace(words, train, tmp_path, spiky):
    """Losses, sets, generators, histories and weights are to the last bit those of the run without verdicts."""
    words = ["training.steps=8", "training.checkpoint_every=100", *words]
    want = everything(train(tmp_path / "without", *words, "records.verdicts=false"))
    found = everything(train(tmp_path / "with", *words))
    verdicts = [row for row in found["events"] if row["event"] == "verdict"]
    assert {row["complete"] for row in verdicts} <= {True, False}
    assert verdicts and not any(row["event"] == "verdict" for row in want["events"])
    found["events"] = [row for row in found["events"] if row["event"] != "verdict"]
    found["host"]["levels"] = want["host"]["levels"]
    assert differences(want, found) == []


@pytest.mark.slow
def test_what_is_usual_outlives_a_stop(train, stopped, tmp_path, spiky):
    words = ["training.steps=8", "training.checkpoint_every=4"]
    whole = everything(train(tmp_path / "whole", *words))
    stopped(tmp_path / "run", *words, at=7)
    assert differences(whole, everything(train(tmp_path / "run", *words))) == []


@pytest.fixture
def spiking(assembled, blocks_of, step_of):
    """spiking(words, plant): the verdict on a step in which `plant(parts)` is at work, after steady ones."""

    def verdict(words, plant):
        parts = assembled(*TWO, *words)
        step, batch = step_of(parts), [blocks_of(parts, 2)]
        parts.optimizer.param_groups[0]["lr"] = 0.0
        first = step(batch, 0.0)
        step.levels = Levels()
        step.levels.seen.extend(
            (first.loss * (1 + 1e-4 * (-1) ** i), first.grad_norm_pre_clip * (1 + 1e-3 * (-1) ** i)) for i in range(64)
        )
        undo = plant(parts)
        found = step(batch, 0.0).verdict
        if undo is not None:
            undo()
        assert step(batch, 0.0).verdict is None, "an ordinary step spikes"
        return found

    return verdict


def broken(*units: str, kind: str = "noise", magnitude: float = 1000.0):
    def plant(parts):
        at = parts.router.t + 1
        FaultSchedule(parts.converted, Fault(kind, magnitude), units, at, windows=[[at, 1]]).begin_step(at)

        def undo() -> None:
            for operator in parts.converted.operators:
                operator.fault = None

        return undo

    return plant


def blown_up(times: float):
    """The output of a norm is that many times too large, in its first pass or (times < 0) in all."""

    def plant(parts):
        calls = []

        def hook(_module, _inputs, output):
            calls.append(1)
            return output.flip(1) * abs(times) if times < 0 or len(calls) == 1 else output

        return parts.model.layers[1].post_attention_layernorm.register_forward_hook(hook).remove

    return plant


class Louder:
    """A low path that keeps its input fifty times too large for backward."""

    def for_step(self, input, remember=True):
        return self

    def compress(self, input, fmt, stochastic):
        packed, scale = compress(input.detach().reshape(-1, input.shape[-1]), fmt)
        return packed, scale * 50


def louder(parts):
    operator = next(one for one in parts.converted.operators if one.operator_name == UP)
    operator.fault = Louder()
    return lambda: setattr(operator, "fault", None)


@pytest.mark.parametrize(
    ("words", "plant"),
    [([], louder), (FORWARD, broken(UP)), (RECIPE, broken(UP))],
    ids=["weight_gradient", "forward", "recipe"],
)
def test_precision_names_the_operator(words, plant, spiking):
    verdict = spiking(words, plant)
    assert (verdict.cause, verdict.units, verdict.complete) == ("precision", (UP,), True)
    assert verdict.passes <= 4 and UP in str(verdict)


def test_precision_of_gradients_that_are_not_finite(spiking):
    verdict = spiking([], broken(UP, kind="nan"))
    assert (verdict.cause, verdict.units) == ("precision", (UP,))


@pytest.mark.parametrize("words", [[], pytest.param(MOE + FORWARD, marks=pytest.mark.slow)], ids=["llama", "moe"])
def test_chance_and_data(words, spiking):
    assert spiking(words, blown_up(300.0)).cause == "not_reproducible"
    assert spiking(words, blown_up(-300.0)).cause == "data_or_model"


@given(st.sets(st.integers(0, 30), min_size=1, max_size=3), st.integers(31, 40))
def test_needed_finds_the_few(culprits, units):
    """With enough to spend: exactly those; with little: a set that suffices."""

    repeater = SimpleNamespace(passes=0.0)
    repeater.affords = partial(StepRepeater.affords, repeater)

    def gone(chosen):
        repeater.passes += 0.01
        return culprits <= set(chosen)

    assert needed(repeater, list(range(units)), gone, 0.01) == (sorted(culprits), True)
    repeater.passes = 3.9
    blamed, complete = needed(repeater, list(range(units)), gone, 0.05)
    assert culprits <= set(blamed) and (not complete or set(blamed) == culprits)


def test_from_a_loop_of_ones_own():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    controller = gnmr.attach(model, low="sim_int8", recovery="bf16", targets=["*"], max_o=1)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    loss = (model(x) - y).square().mean()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    usual = loss.item(), norm
    controller.step()
    model.zero_grad()

    broken("1")(SimpleNamespace(converted=controller.converted, router=controller))
    spiked = (model(x) - y).square().mean()
    spiked.backward()
    before = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    verdict = controller.explain(lambda: (model(x) - y).square().mean(), loss=spiked.item(), usual=usual)
    assert (verdict.cause, verdict.units, verdict.step) == ("precision", ("1",), 2)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert torch.equal(state, torch.get_rng_state()) and controller.t == 1 and not controller.active
    model.zero_grad()
    for operator in controller.converted.operators:
        operator.fault = None
    (model(100 * x) - y).square().mean().backward()
    assert controller.explain(lambda: (model(100 * x) - y).square().mean(), usual=usual).cause == "data_or_model"
    verdict = controller.explain(lambda: (model(math.inf * x) - y).square().mean(), loss=math.inf)
    assert (verdict.cause, verdict.passes) == ("data_or_model", pytest.approx(1 / 3))
    assert "to blame: data or model; the loss is not finite in 16 bits either" in str(verdict)
    assert controller.promote(["1"]) and controller.active == ["1"]
    assert not controller.promote(["0", "2"]) and controller.active == ["1"]


def blocks_with_dropout():
    torch.manual_seed(0)
    pairs = [(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 32)) for _ in "ab"]
    return torch.nn.Sequential(*(torch.nn.Sequential(*pair) for pair in pairs))


PATHS = {
    "delayed": {"low": "fp8_delayed", "backend": "simulated"},
    "stochastic": {"low": "nvfp4"},
    "format": {"low": "int2", "site": "forward", "rounding": "stochastic"},
}


@pytest.mark.parametrize("paths", PATHS)
def test_a_repetition_starts_where_the_step_started(paths, monkeypatch):
    """Delayed scales too, when a weight has been replaced: the step's own passes have noticed already."""
    compared = []
    monkeypatch.setattr(blame, "_same", lambda seen, repeated, _: compared.append((seen, repeated)) or True)
    model, x = blocks_with_dropout(), torch.randn(16, 32)
    controller = gnmr.attach(model, **PATHS[paths], targets=["?.?"], recovery="bf16", signal="always_low")

    def loss_of_step():
        return model(x).square().mean() + model(2 * x).square().mean()

    loss_of_step().backward()
    controller.step()
    model.zero_grad()
    with torch.no_grad():
        model[0][3].weight.mul_(4)
    (loss := loss_of_step()).backward()
    controller.explain(loss_of_step, loss=loss.item(), usual=(0.1, 0.1))
    ((seen, repeated),) = compared
    assert repeated.loss == seen.loss and repeated.norm == pytest.approx(seen.norm, rel=1e-6)


def test_all_repetitions_start_with_the_same_buffers():
    model, x, seen = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.ones(4, 8), []
    model.register_buffer("passes", torch.zeros(()))

    def loss_of_step():
        seen.append(model.passes.item())
        model.passes += 1
        return model(x).square().mean()

    controller = gnmr.attach(model, low="sim_int8", recovery="bf16", targets=["0"], signal="always_low")
    (loss := loss_of_step()).backward()
    controller.explain(loss_of_step, loss=loss.item(), usual=(0.01, 0.01))
    assert seen == [0, 1, 1] and model.passes == 1


def test_buffers_that_are_inference_tensors_are_left_alone():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.ones(4, 8)
    with torch.inference_mode():  # as a table that a first evaluation fills
        model.register_buffer("shift", torch.ones(8))
    controller = gnmr.attach(model, low="sim_int8", recovery="bf16", targets=["0"], signal="always_low")
    (loss := (model(x) + model.shift).square().mean()).backward()
    verdict = controller.explain(lambda: (model(x) + model.shift).square().mean(), loss=loss.item(), usual=(0.01, 0.01))
    assert verdict.cause == "data_or_model" and model.shift.is_inference()


def test_gradients_outside_of_the_attached_part_are_left_as_they_are():
    body, head = torch.nn.Sequential(torch.nn.Linear(16, 16)), torch.nn.Linear(16, 16)
    controller = gnmr.attach(body, low="sim_int8", recovery="bf16", targets=["*"], max_o=1, signal="always_low")
    x = torch.randn(8, 16, requires_grad=True)

    def run() -> torch.Tensor:
        return head(body(x)).square().mean()

    run().backward()
    before = [one.grad.clone() for one in (x, *head.parameters(), *body.parameters())]
    assert controller.explain(run, loss=99.0, usual=(1e-3, 1e-3)).passes > 0
    assert controller.explain(run, usual=(1e-3, 1e-3)).passes > 1
    after = [one.grad for one in (x, *head.parameters(), *body.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_unit_that_spoils_the_gradients_before_it_is_blamed_alone(frozen):
    """Its sibling, which runs before it, stays finite; so does a unit that is not trained."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Mlp(), Mlp())
    model[0].gate_proj.requires_grad_(not frozen)
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", alpha=99.0, beta=None, max_o=3)

    def spoil(module, _inputs, output):
        if output.requires_grad:
            output.register_hook(lambda grad: grad if module.recovering else grad * math.inf)

    model[1].up_proj.register_forward_hook(spoil)
    x = torch.randn(8, 16, requires_grad=True)
    model(x).square().mean().backward()
    verdict = controller.explain(lambda: model(x).square().mean())
    assert (verdict.cause, verdict.units, verdict.complete) == ("precision", ("1.up_proj",), True)


MISTAKES = {
    "not a function": (lambda run, loss: (loss, {}), "must be a function"),
    "no scalar": (lambda run, loss: (lambda: run().expand(2), {}), r"a tensor of shape \(2,\)"),
    "no graph": (lambda run, loss: (lambda: run().detach(), {}), "has no graph"),
    "another model": (lambda run, loss: (lambda: torch.ones(1, requires_grad=True).sum(), {}), "reaches no parameter"),
    "no usual": (lambda run, loss: (run, {"usual": None}), "usual"),
    "a norm below 0": (lambda run, loss: (run, {"usual": (1.0, -1.0)}), "usual"),
    "a scale of 0": (lambda run, loss: (run, {"grad_scale": 0.0}), "grad_scale=0.0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_explain_refuses_in_one_line_and_leaves_no_trace(mistake):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    controller = gnmr.attach(model, low="sim_int8", recovery="bf16", targets=["*"], max_o=1)
    x = torch.randn(8, 16)

    def run() -> torch.Tensor:
        return model(x).square().mean()

    run().backward()
    before = [p.grad.clone() for p in model.parameters()]
    make, match = MISTAKES[mistake]
    given, options = make(run, run())
    with pytest.raises(ValueError, match=match) as error:
        controller.explain(given, **{"loss": 99.0, "usual": (1.0, 1.0), **options})
    assert "\n" not in str(error.value)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert not controller.active and not any(one.recovering for one in controller.converted.operators)
    model.zero_grad()
    with pytest.raises(ValueError, match="no gradients: call explain between"):
        controller.explain(run, loss=99.0, usual=(1.0, 1.0))
