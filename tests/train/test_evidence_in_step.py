"""Evidence as a step measures it, against what plain loops find by themselves; and that measuring only looks on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from everything import differences, everything
from torch import Tensor

from gnmr.control.evidence import EVIDENCE
from gnmr.control.signals import SIGNALS
from gnmr.lab.train.build import Parts, train_step
from gnmr.lab.train.loss import loss_of
from gnmr.lab.train.step import StepResult, TrainStep
from gnmr.records.reader import read_json, read_jsonl, read_ratios

LR = 1e-2
FP32 = "training.dtype=float32"
SUMS = ("gap_low", "gap_recovery", "gap_exact")
PATHS = (*SUMS, "underflow", "mse", "input_std")
ALL = [name for name in EVIDENCE if name not in ("norm", "observed")]
UNITS = 7
WGRAD = ["precision.recipes.coarse.wgrad.input=int4/row", "precision.recipes.fine.wgrad.input=int8/row"]
WGRAD += ["precision.low=coarse", "precision.recovery=fine"]
"""Two recipes that differ in what wgrad reads alone."""


def gradients(parts: Parts, batches: list[Tensor]) -> dict[str, Tensor]:
    """Of the mean loss over all batches, by unit, float64; nothing but forward and backward."""
    for batch in batches:
        (loss_of(parts.model, batch) / len(batches)).backward()
    parts.converted.shared.forget()
    found = {op.operator_name: op.weight.grad.double() for op in parts.converted.operators}
    parts.model.zero_grad(set_to_none=True)
    return found


def shown(result: StepResult, name: str) -> dict[str, float]:
    return dict(zip(result.decision.units, result.decision.evidence[name].tolist(), strict=True))


def squares(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {unit: float(tensor.square().sum()) for unit, tensor in tensors.items()}


# ---- the two paths ----


@pytest.fixture
def one_path(assembled) -> Callable[..., Parts]:
    """A static run in one of the formats, with the weights of another."""

    def make(like: Parts, fmt: str, *words: str) -> Parts:
        parts = assembled(*words, f"precision.low={fmt}", "precision.recovery=null")
        parts.model.load_state_dict(like.model.state_dict())
        return parts

    return make


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision.site=forward", "training.accumulation=2"],
        ["controller.warmup_frac=1.0"],  # every unit runs on the recovery path
        ["controller.warmup_frac=1.0", "controller.warmup_path=16bit"],  # or on neither of the two
        ["precision.rounding=stochastic"],  # both paths draw what the step's own pass will draw
        ["training.dtype=bfloat16"],
    ],
    ids=["plain", "forward", "recovering", "in_16_bits", "stochastic", "bf16"],
)
def test_true_gap_is_the_squared_distance_of_two_runs_gradients(words, assembled, one_path, blocks_of):
    words = [FP32, *words]
    parts = assembled(*words, "records.evidence=[true_gap]")
    batches = list(blocks_of(parts, 4).split(2))
    static = [word for word in words if "warmup" not in word]
    low, high = (gradients(one_path(parts, fmt, *static), batches) for fmt in ("int4", "int8"))
    expected = squares({unit: low[unit] - high[unit] for unit in low})
    assert min(expected.values()) > 0
    assert shown(train_step(parts)(batches, LR), "true_gap") == pytest.approx(expected, rel=1e-6)


def test_true_gap_whatever_is_in_force(assembled, one_path, blocks_of):
    """In a step in which some units are on the recovery path, and the others not."""
    parts = assembled(FP32, "records.evidence=[true_gap]", "controller.signal=random")
    step, batches = train_step(parts), blocks_of(parts, 4).split(2)
    step([batches[0]], LR)
    low, high = (gradients(one_path(parts, fmt, FP32), [batches[1]]) for fmt in ("int4", "int8"))
    result = step([batches[1]], LR)
    assert 0 < result.decision.in_force.sum() < UNITS
    expected = squares({unit: low[unit] - high[unit] for unit in low})
    assert shown(result, "true_gap") == pytest.approx(expected, rel=1e-6)
    mixed = {unit: (high if on else low)[unit] for unit, on in zip(low, result.decision.in_force, strict=True)}
    assert result.decision.norm == pytest.approx([float(g.norm()) for g in mixed.values()], rel=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["controller.warmup_frac=1.0"],
        ["controller.warmup_frac=1.0", "controller.warmup_path=16bit"],
        ["controller.warmup_frac=1.0", "controller.warmup_path=16bit", *WGRAD],
        ["precision.low=e2m1", "precision.recovery=bf16"],
        ["training.batch_size=1"],
    ],
    ids=["low", "recovering", "in_16_bits", "recipes_in_16_bits", "to_16_bit", "short"],
)
def test_gap_exact_is_the_true_gap_where_only_the_saved_copy_differs(words, assembled, blocks_of):
    parts = assembled(FP32, "records.evidence=[true_gap,gap_exact,gap_low,gap_recovery]", *words)
    result = train_step(parts)([blocks_of(parts, parts.config.training.batch_size)], LR)
    exact = shown(result, "gap_exact")
    assert exact == pytest.approx(shown(result, "true_gap"), rel=1e-4)
    estimate = {unit: gap - shown(result, "gap_recovery")[unit] for unit, gap in shown(result, "gap_low").items()}
    assert estimate != pytest.approx(exact, rel=1e-2)  # which leaves out the pairs of tokens
    assert estimate == pytest.approx(exact, rel=0.9)


def test_gap_exact_of_a_path_that_is_broken(assembled, blocks_of):
    """Both ways of measuring see the fault; the gap of the unit that is hit grows, those of the others stay."""
    found = {}
    for kind in ("none", "scale_up"):
        fault = [f"faults.kind={kind}", "faults.magnitude=8", "faults.windows=[[1,1]]", "faults.targets=[up_proj]"]
        parts = assembled(FP32, "records.evidence=[true_gap,gap_exact]", *fault)
        for stress in parts.stress:
            stress.begin_step(1)
        result = train_step(parts)([blocks_of(parts, 2)], LR)
        found[kind] = shown(result, "gap_exact")
        assert found[kind] == pytest.approx(shown(result, "true_gap"), rel=1e-4)
    hit = {unit for unit, gap in found["scale_up"].items() if gap > 1.5 * found["none"][unit]}
    assert hit == {"layers.0.mlp.up_proj"}


def test_gap_exact_of_several_micro_batches_is_the_sum_of_their_own(assembled, blocks_of):
    """Each enters the mean gradient with the weight 1/n, so its squared gap with 1/n^2."""
    words = [FP32, "records.evidence=[gap_exact]"]
    parts = assembled(*words)
    batches = list(blocks_of(parts, 6).split(2))
    singles = [shown(train_step(assembled(*words))([batch], LR), "gap_exact") for batch in batches]
    expected = {unit: sum(single[unit] for single in singles) / 9 for unit in singles[0]}
    assert shown(train_step(parts)(batches, LR), "gap_exact") == pytest.approx(expected, rel=1e-4)


# ---- micro-batches, updates, moments ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_square_is_the_mean_of_the_micro_batches_own_squares(dtype, assembled, blocks_of):
    words = [f"training.dtype={dtype}", "training.accumulation=2"]
    parts, twin = assembled(*words, "records.evidence=[micro_square]"), assembled(*words)
    step, batches = train_step(parts), list(blocks_of(parts, 8).split(2))
    for pair in (batches[:2], batches[2:]):  # in the second step nothing of the first one is left
        twin.model.load_state_dict(parts.model.state_dict())
        for op, switched in zip(twin.plan.operators, parts.converted.operators, strict=True):
            op.switch(switched.recovering)
        own = [squares(gradients(twin, [batch])) for batch in pair]
        expected = {unit: (own[0][unit] + own[1][unit]) / 2 for unit in own[0]}
        result = step(pair, LR)
        rel = 1e-5 if dtype == "float32" else 3e-2  # halved and accumulated in bf16
        assert shown(result, "micro_square") == pytest.approx(expected, rel=rel)
        assert (result.decision.norm**2 < result.decision.evidence["micro_square"]).all()  # the mean is shorter


@pytest.mark.parametrize("words", [[FP32], [], ["optim.name=scale"]], ids=["fp32", "bf16", "scale"])
def test_update_norm_is_what_the_weights_moved(words, assembled, blocks_of):
    parts = assembled("records.evidence=[update_norm]", *words)
    step = train_step(parts)
    for batch in blocks_of(parts, 4).split(2):
        before = {op.operator_name: op.weight.detach().double() for op in parts.converted.operators}
        result = step([batch], LR)
        with torch.no_grad():
            moved = {
                op.operator_name: float((op.weight - before[op.operator_name]).norm())
                for op in parts.converted.operators
            }
        assert min(moved.values()) > 0
        assert shown(result, "update_norm") == pytest.approx(moved, rel=1e-5)


def test_a_skipped_step_moves_nothing(assembled, blocks_of):
    parts = assembled("records.evidence=[update_norm]")
    parts.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * torch.nan)
    result = train_step(parts)([blocks_of(parts, 2)], LR)
    assert result.skipped and set(shown(result, "update_norm").values()) == {0.0}


@pytest.mark.parametrize("transform", [[], ["optim.transform.name=norm_clip", "optim.transform.options.max_norm=1e-6"]])
def test_spike_share_is_of_the_gradient_that_backward_left(transform, assembled, blocks_of):
    """Second moments made small in one unit, so that some of its coordinates spike; clipping comes after."""
    words = [FP32, "controller.signal=always_low"]
    parts, twin = assembled(*words, *transform, "records.evidence=[spike_share]"), assembled(*words)
    step, batches = train_step(parts), blocks_of(parts, 4).split(2)
    assert set(shown(step([batches[0]], LR), "spike_share").values()) == {0.0}  # no moments yet
    moments = {}
    for index, op in enumerate(parts.converted.operators):
        raw = [1e-15, 1e-13, 1.0][index % 3]
        parts.optimizer.state[op.weight]["exp_avg_sq"].fill_(raw)
        moments[op.operator_name] = raw / (1 - 0.999)  # after one step
    twin.model.load_state_dict(parts.model.state_dict())
    found = gradients(twin, [batches[1]])
    expected = {u: float((g.float().square() > 5000 * moments[u]).double().mean()) for u, g in found.items()}
    assert len(set(expected.values())) > 3 and min(expected.values()) == 0
    assert shown(step([batches[1]], LR), "spike_share") == pytest.approx(expected, abs=2e-3)  # a coordinate or two


# ---- in a run ----


def columns(folder, step: int) -> dict[str, dict[str, float]]:
    """{name: {unit: value}} of ratios.parquet in this step."""
    rows = [row for row in read_ratios(folder).to_pylist() if row["step"] == step]
    return {name: {row["unit"]: row[name] for row in rows} for name in rows[0] if name not in ("step", "unit")}


@pytest.mark.parametrize("words", [[], ["training.activation_checkpointing=true"]], ids=["plain", "checkpointing"])
def test_path_statistics_reach_the_records(words, train, assembled, blocks_of, tmp_path):
    """Those of step 1 as a probe by itself finds them; recomputing the forward pass measures nothing twice."""
    names = [name for name in PATHS if not words or name != "gap_exact"]  # which keeps what checkpointing drops
    evidence = f"records.evidence=[{','.join(names)},weight_std]"
    folder = train(tmp_path / "run", evidence, "training.steps=2", *words)
    parts = assembled("training.steps=2")
    probe = parts.converted.probe(names)
    gradients(parts, [blocks_of(parts, 2)])
    wanted = {
        name: dict(zip(parts.controller.names, values.tolist(), strict=True)) for name, values in probe.read().items()
    }
    found = columns(folder, 1)
    for name in names:
        assert found[name] == pytest.approx(wanted[name], rel=1e-6), name
        assert name == "underflow" or min(found[name].values()) > 0
    stds = {op.operator_name: float(op.weight.detach().double().std(correction=0)) for op in parts.converted.operators}
    assert found["weight_std"] == pytest.approx(stds, rel=1e-5)


def test_a_sample_of_the_tokens(assembled, blocks_of):
    """precision.probe_tokens=3 measures the rows 0, 3, 6, ...; gap_exact takes them all."""
    results = {}
    for tokens in (1, 3):
        parts = assembled(FP32, f"records.evidence=[{','.join(PATHS)}]", f"precision.probe_tokens={tokens}")
        results[tokens] = train_step(parts)([blocks_of(parts, 2)], LR)
    for name in PATHS:
        whole, sample = shown(results[1], name), shown(results[3], name)
        assert (sample == whole) == (name == "gap_exact")
        assert sample == pytest.approx(whole, rel=1.0, abs=0.3), name


def test_a_signal_that_measures_every_third_step(assembled, blocks_of):
    """Its column stands still in between, unless the records ask for the evidence in every step."""
    words = ["controller.signal=gap", "controller.options.every=3"]
    for more in ([], ["records.evidence=[gap_low]"]):
        parts = assembled(*words, *more)
        step = train_step(parts)
        results = [step([batch], LR).decision for batch in blocks_of(parts, 8).split(2)]
        gaps = [result.columns["gap"].tolist() for result in results]
        assert gaps[0] == gaps[1] == gaps[2] != gaps[3] and min(gaps[0]) > 0
        if more:
            low = [result.evidence["gap_low"].tolist() for result in results]
            assert all(a != b for a, b in pairwise(low)) and min(map(min, low)) > 0


LOOKING_ON = {
    "nearest": [],
    "stochastic": ["precision.rounding=stochastic"],
    "forward": ["precision.site=forward", "optim.clip_norm=0.1"],
    "checkpointing": ["training.activation_checkpointing=true"],
    "transform": ["optim.transform.name=spam", "optim.transform.options.grace=1"],
    "faults": ["faults.kind=bit_flip", "faults.windows=[[2,3]]"],
    "stale": ["faults.kind=stale_scale", "faults.windows=[[3,3]]", "precision.rounding=stochastic"],
    "stale_forward": [
        "faults.kind=stale_scale",
        "faults.windows=[[2,5]]",
        "precision.site=forward",
        "model.num_layers=2",
    ],
}


@pytest.mark.parametrize("name", LOOKING_ON)
@pytest.mark.slow
def test_recording_everything_changes_no_bit(name, train, tmp_path):
    """The same losses, sets, saved bytes, weights, moments and generators as without."""
    words = ["training.accumulation=2", "training.steps=6", *LOOKING_ON[name]]
    names = [each for each in ALL if name != "checkpointing" or each != "gap_exact"]
    evidence = f"records.evidence=[{','.join(names)}]"
    plain, watched = (
        everything(train(tmp_path / kind, *words, *more)) for kind, more in (("a", []), ("b", [evidence]))
    )
    assert plain["events"]
    for row in watched["ratios"]:
        for each in names:
            assert row.pop(each) >= 0
    assert differences(plain, watched) == []


@pytest.mark.slow
def test_the_oracle_leaves_no_trace(train, tmp_path):
    """What a signal needs is measured as what is recorded is: a run whose sets are fixed does not depend on it."""
    words = ["training.steps=5", "precision.rounding=stochastic", "controller.signal=always_low"]
    plain, watched = (
        train(tmp_path / kind, *words, *more) for kind, more in (("a", []), ("b", ["records.evidence=[true_gap]"]))
    )
    losses = [[row["loss"] for row in read_jsonl(folder / "steps.jsonl")] for folder in (plain, watched)]
    assert losses[0] == losses[1]
    a, b = everything(plain)["state"], everything(watched)["state"]
    assert differences(a, b) == []
    ranked = train(tmp_path / "c", *words[:2], "controller.signal=oracle", "controller.routing=ranked")
    assert read_json(ranked / "summary.json")["promotion_frac"] == pytest.approx(2 / 7 * 4 / 5)
    first = columns(ranked, 1)["true_gap"]
    assert first == columns(watched, 1)["true_gap"]  # nothing was in force yet
    chosen = {unit for unit, active in columns(ranked, 2)["active"].items() if active}
    assert chosen == set(sorted(first, key=lambda unit: -first[unit])[:2])


HISTORIES = {
    "gsnr": ["training.accumulation=2"],
    "update_norm": [],
    "static_k": ["controller.options.calibration_steps=4"],
    "gap": ["controller.options.variant=times_gnmr", "controller.options.every=2"],
}


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.slow
def test_what_was_measured_outlives_a_stop(name, train, tmp_path, monkeypatch):
    """Signals whose history is made of evidence go on after a checkpoint as if nothing had happened."""
    plain = TrainStep.__call__

    def call(self, *args):
        if self.controller.t == 4:
            raise ZeroDivisionError
        return plain(self, *args)

    words = ["training.steps=6", f"controller.signal={name}", "controller.routing=ranked", *HISTORIES[name]]
    want = everything(train(tmp_path / "whole", *words))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(TrainStep, "__call__", call)
        train(tmp_path / "run", *words)
    assert differences(want, everything(train(tmp_path / "run", *words))) == []
    assert want["events"]


@pytest.mark.parametrize("name", [*HISTORIES, "jacobian", "random"])
@pytest.mark.slow
def test_what_was_recorded_gives_the_sets_again(name, train, gnmr, tmp_path):
    """`gnmr replay` of a run whose signal reads more than norms, or the seed."""
    needs = ",".join(SIGNALS[name].needs)
    words = ["training.steps=8", "training.seed=3", f"controller.signal={name}", f"records.evidence=[{needs}]"]
    folder = train(tmp_path / "run", *words, "controller.routing=ranked", *HISTORIES.get(name, []))
    out = tmp_path / "out.jsonl"
    assert gnmr("replay", str(folder), f"out={out}").code == 0
    replayed = [set(row["active"]) for row in read_jsonl(out)]
    real = [{unit for unit, on in columns(folder, t)["active"].items() if on} for t in range(1, 9)]
    assert replayed[:-1] == real[1:] and any(real)
