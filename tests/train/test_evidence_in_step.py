"""Evidence as a step measures it, against what plain loops find by themselves; and that measuring only looks on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from everything import differences, everything
from torch import Tensor

from gnmr.control.evidence import EVIDENCE
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.build import Parts, train_step
from gnmr.lab.train.loss import loss_of
from gnmr.lab.train.step import StepResult
from gnmr.measure.operand_errors import measure_errors
from gnmr.records.reader import read_jsonl, read_units

LR = 1e-2
FP32 = "training.dtype=float32"
PATHS = ("gap_low", "gap_recovery", "mse", "input_std")
ALL = [name for name in EVIDENCE if name not in ("norm", "observed")]
UNITS = 7


def gradients(parts: Parts, batches: list[Batch]) -> dict[str, Tensor]:
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
        ["controller.warmup_frac=1.0", "controller.warmup_path=16bit"],  # on neither of the two paths
        ["precision.rounding=stochastic"],  # both paths draw what the step's own pass will draw
    ],
    ids=["plain", "forward", "in_16_bits", "stochastic"],
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


# ---- in a run ----


def columns(folder, step: int) -> dict[str, dict[str, float]]:
    """{name: {unit: value}} of units.arrows in this step."""
    rows = [row for row in read_units(folder).to_pylist() if row["step"] == step]
    return {name: {row["unit"]: row[name] for row in rows} for name in rows[0] if name not in ("step", "unit")}


@pytest.mark.parametrize("words", [[], ["training.activation_checkpointing=true"]], ids=["plain", "checkpointing"])
def test_path_statistics_reach_the_records(words, train, assembled, blocks_of, tmp_path):
    """Those of step 1 as a probe by itself finds them; recomputing the forward pass measures nothing twice."""
    evidence = f"records.evidence=[{','.join(PATHS)},weight_std]"
    folder = train(tmp_path / "run", evidence, "training.steps=2", *words)
    parts = assembled("training.steps=2")
    probe = measure_errors(parts.converted, PATHS)
    gradients(parts, [blocks_of(parts, 2)])
    wanted = {
        name: dict(zip(parts.router.names, values.tolist(), strict=True)) for name, values in probe.read().items()
    }
    found = columns(folder, 1)
    for name in PATHS:
        assert found[name] == pytest.approx(wanted[name], rel=1e-6), name
        assert min(found[name].values()) > 0
    stds = {op.operator_name: float(op.weight.detach().double().std(correction=0)) for op in parts.converted.operators}
    assert found["weight_std"] == pytest.approx(stds, rel=1e-5)


LOOKING_ON = {
    "stochastic": ["precision.rounding=stochastic"],
    "forward": ["precision.site=forward", "optim.clip_norm=0.1"],
    "checkpointing": ["training.activation_checkpointing=true"],
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
    evidence = f"records.evidence=[{','.join(ALL)}]"
    plain, watched = (
        everything(train(tmp_path / kind, *words, *more)) for kind, more in (("a", []), ("b", [evidence]))
    )
    assert plain["events"]
    for row in watched["units"]:
        for each in ALL:
            assert row.pop(each) >= 0
    assert differences(plain, watched) == []


BUSY_LAYERS = ["precision.unit=layer", "model.num_layers=2", "controller.alpha=1", "controller.beta=1"]
REPLAYED = {
    "input_grad": ["controller.observe=input_grad", *BUSY_LAYERS],
    "adapter": ["controller.observe=adapter", *BUSY_LAYERS],
}


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.slow
def test_what_was_recorded_gives_the_sets_again(name, train, gnmr, tmp_path):
    """`gnmr replay` of a run whose norms are not those of parameters."""
    folder = train(tmp_path / "run", "training.steps=8", "training.seed=3", *REPLAYED[name])
    out = tmp_path / "out.jsonl"
    assert gnmr("replay", str(folder), f"out={out}").code == 0
    replayed = [set(row["active"]) for row in read_jsonl(out)]
    real = [{unit for unit, on in columns(folder, t)["active"].items() if on} for t in range(1, 9)]
    assert replayed[:-1] == real[1:] and any(real)
