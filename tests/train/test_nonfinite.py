"""A number that is not finite reaches neither weights nor moments, and is told of with its place."""

from __future__ import annotations

import math

import pytest
import torch
from everything import differences, everything, same_bits

from gnmr.errors import RunFailed
from gnmr.lab.train import loop
from gnmr.records.reader import read_json, read_jsonl, read_units

LR = 1e-2
UNIT = "layers.1.mlp.up_proj"
TWO_LAYERS = "model.num_layers=2"
MOE_DELAYED = ["model.name=moe", "model.experts.number=4", "precision.low=fp8_delayed", "precision.recovery=bf16"]


def state_of(parts) -> list[torch.Tensor]:
    """Copies of all weights and of everything that the optimizer keeps."""
    kept = [value for state in parts.optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in [*parts.model.parameters(), *kept]]


def spoil(parts, unit: str, at: set[int], value: float = math.nan) -> None:
    """One number of the unit's weight gradient becomes `value` in the backward passes of these steps (from 1)."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if parts.router.t + 1 in at:
            gradient = gradient.clone()
            gradient.view(-1)[3] = value
        return gradient

    parts.model.get_submodule(unit).weight.register_hook(hook)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        pytest.param([], math.nan, id="bf16"),
        pytest.param(["optim.clip_norm=0.1", "training.dtype=float32"], math.inf, id="fp32_clipped"),
        pytest.param(
            ["precision.low=fp8_delayed", "precision.recovery=bf16"], math.inf, id="fp8_delayed", marks=pytest.mark.slow
        ),
        pytest.param(MOE_DELAYED, math.inf, id="moe_fp8_delayed"),
    ],
)
def test_a_gradient(words, value, assembled, blocks_of, step_of):
    parts = assembled(TWO_LAYERS, *words)
    step, blocks = step_of(parts), blocks_of(parts, 6).split(2)
    unit = "layers.1.mlp.experts.0.up_proj" if "model.name=moe" in words else UNIT
    spoil(parts, unit, {2}, value)
    step([blocks[0]], LR)
    before = state_of(parts)
    result = step([blocks[1]], LR)
    assert all(same_bits(a, b) for a, b in zip(before, state_of(parts), strict=True))
    assert result.skipped and result.nonfinite_unit == unit
    assert math.isfinite(result.loss) and not math.isfinite(result.grad_norm_pre_clip)
    place = result.decision.units.index(unit)
    assert result.decision.risk[place] == math.inf and result.decision.active[place]
    assert [(e.event, e.cause) for e in result.decision.events if e.unit == unit] == [("promote", "nonfinite")]

    after = step([blocks[2]], LR)
    assert not after.skipped and after.nonfinite_unit is None
    assert not any(same_bits(a, b) for a, b in zip(before[:5], state_of(parts)[:5], strict=True))
    assert all(t.isfinite().all() for t in state_of(parts))
    assert after.decision.in_force[place]


def test_a_gradient_that_spreads_is_told_where_it_began(assembled, blocks_of, step_of):
    """What lies before it in the network, thus after it in the backward pass, is infected; not what lies behind."""
    parts = assembled(TWO_LAYERS)

    def infect(_module, _inputs, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * math.nan)

    parts.model.get_submodule(UNIT).register_forward_hook(infect)
    result = step_of(parts)([blocks_of(parts, 2)], LR)
    bad = {name for name, norm in zip(result.decision.units, result.decision.norm, strict=True) if math.isnan(norm)}
    assert {UNIT, "layers.0.self_attn.q_proj"} < bad and "layers.1.mlp.down_proj" not in bad
    assert result.nonfinite_unit == UNIT


def test_a_gradient_outside_the_units(assembled, blocks_of, step_of):
    parts = assembled(TWO_LAYERS)
    step, before = step_of(parts), state_of(parts)
    for number, name in enumerate(["embed_tokens", "norm", "lm_head", "layers.0.input_layernorm"], 1):
        spoil(parts, name, {number})
        result = step([blocks_of(parts, 2)], LR)
        assert result.skipped and result.nonfinite_unit == name
        assert all(same_bits(a, b) for a, b in zip(before, state_of(parts), strict=False))


def test_a_loss_is_told_by_the_first_module(assembled, blocks_of, step_of):
    parts = assembled(TWO_LAYERS)
    step, before = step_of(parts), state_of(parts)
    for name in ("layers.0.self_attn.v_proj", "layers.1.post_attention_layernorm", "lm_head"):
        handle = parts.model.get_submodule(name).register_forward_hook(lambda _m, _i, output: output * math.inf)
        result = step([blocks_of(parts, 2)], LR)
        assert result.skipped and result.nonfinite_unit == name and not math.isfinite(result.loss)
        handle.remove()
        assert all(same_bits(a, b) for a, b in zip(before, state_of(parts), strict=False))
    assert not step([blocks_of(parts, 2)], LR).skipped


def test_a_loss_is_told_by_the_weights(assembled, blocks_of, step_of):
    parts = assembled(TWO_LAYERS)
    with torch.no_grad():
        parts.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    result = step_of(parts)([blocks_of(parts, 2)], LR)
    assert result.skipped and result.nonfinite_unit == f"{UNIT}.weight (weights)"


def test_a_loss_in_the_second_micro_batch_alone(assembled, blocks_of, step_of):
    parts = assembled()
    calls = []

    def once(_module, _inputs, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * (math.nan if len(calls) == 2 else 1.0)

    before = state_of(parts)
    parts.model.norm.register_forward_hook(once)
    result = step_of(parts)(list(blocks_of(parts, 4).split(2)), LR)
    assert result.skipped and result.nonfinite_unit == "loss"  # it is finite when looked at again
    assert all(same_bits(a, b) for a, b in zip(before, state_of(parts), strict=False))


def test_records(train, tmp_path, tampered):
    """Counted in a total that stays and a streak that a finite step resets; recorded with the unit."""
    tampered(lambda parts: spoil(parts, UNIT, {1, 3, 4, 8}))
    folder = train(tmp_path / "run", TWO_LAYERS, "training.checkpoint_every=100")
    rows = read_jsonl(folder / "steps.jsonl")
    assert [row["skipped"] for row in rows] == [True, False, True, True, False, False, False, True]
    assert [row["nonfinite_total"] for row in rows] == [1, 1, 2, 3, 3, 3, 3, 4]
    assert [row["nonfinite_streak"] for row in rows] == [1, 0, 1, 2, 0, 0, 0, 1]
    assert [row["nonfinite_unit"] for row in rows] == [UNIT, None, UNIT, UNIT, None, None, None, UNIT]
    assert [math.isfinite(row["grad_norm_pre_clip"]) for row in rows] == [not row["skipped"] for row in rows]
    assert read_json(folder / "summary.json")["nonfinite_total"] == 4
    norms = {row["step"]: row["norm"] for row in read_units(folder).to_pylist() if row["unit"] == UNIT}
    assert [t for t in norms if not math.isfinite(norms[t])] == [1, 3, 4, 8]
    causes = {(e["step"], e["unit"]): e["cause"] for e in read_jsonl(folder / "events.jsonl")}
    assert causes[1, UNIT] == "nonfinite"
    assert (folder / "DONE").exists()


def test_a_streak_ends_the_run_which_can_go_on_when_its_cause_is_gone(train, tmp_path, tampered, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NONFINITE_STREAK", 3)
    folder, words = tmp_path / "run", [TWO_LAYERS, "training.checkpoint_every=4"]
    want = everything(train(tmp_path / "whole", *words))
    tampered(lambda parts: spoil(parts, UNIT, set(range(5, 100))))
    with pytest.raises(RunFailed) as caught:
        train(folder, *words)
    line = (
        "3 steps in a row had a non-finite loss or gradient; it began at step 5 in layers.1.mlp.up_proj; "
        "weights are those of step 4"
    )
    assert str(caught.value) == line
    assert (folder / "FAILED").read_text() == line + "\n" and not (folder / "DONE").exists()
    summary = read_json(folder / "summary.json")
    assert (summary["status"], summary["reason"], summary["steps"]) == ("failed", line, 7)
    assert [row["nonfinite_streak"] for row in read_jsonl(folder / "steps.jsonl")] == [0, 0, 0, 0, 1, 2, 3]

    tampered(lambda parts: None)
    train(folder, *words)  # from the checkpoint of step 4
    assert differences(want, everything(folder)) == []


def test_delayed_scales_outlive_a_skipped_step_of_a_run(train, tmp_path, tampered):
    """Of the step whose loss was Inf their history holds what was finite, and nothing else."""

    def infect(parts) -> None:
        def hook(_module, _inputs, output: torch.Tensor) -> torch.Tensor:
            return output * (math.inf if parts.router.t == 2 else 1.0)

        parts.model.get_submodule("layers.1.input_layernorm").register_forward_hook(hook)

    tampered(infect)
    words = [TWO_LAYERS, *MOE_DELAYED, "controller.signal=always_low", "training.checkpoint_every=100"]
    folder = train(tmp_path / "run", *words)
    rows = read_jsonl(folder / "steps.jsonl")
    assert [row["skipped"] for row in rows] == [row["step"] == 3 for row in rows]
    largest = everything(folder)["state"]["plan"]["largest"]
    assert largest.isfinite().all()
    ran = largest[:, 0, 1:9].flip(1) > 0  # (units, steps) of the input
    gradient = largest[:, 2, 1:9].flip(1) > 0
    assert ran[:, 2].any() and not gradient[:, 2].any(), "the loss had no finite gradient"
    others = [0, 1, 3, 4, 5, 6, 7]
    assert (gradient[:, others] == ran[:, others]).all() and ran[0].all()


def test_a_validation_loss_ends_the_run(train, tmp_path, monkeypatch):
    """Finite steps whose weights evaluate to NaN are no result."""
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: math.nan)
    with pytest.raises(RunFailed, match="the validation loss after step 4 is nan"):
        train(tmp_path / "run")
    assert (tmp_path / "run" / "FAILED").exists() and not read_jsonl(tmp_path / "run" / "eval.jsonl")


def test_the_streak_outlives_a_kill(train, tmp_path, tampered, monkeypatch):
    """Steps 2 and 3 are saved as a streak of two; the continued run fails where the first would have."""
    monkeypatch.setattr(loop, "MAX_NONFINITE_STREAK", 4)
    words = [TWO_LAYERS]
    folder = tmp_path / "run"
    tampered(lambda parts: spoil(parts, UNIT, set(range(2, 100))))
    with pytest.raises(RunFailed, match=r"4 steps in a row .* it began at step 2 in layers"):
        train(folder, *words)
    tampered(lambda parts: spoil(parts, UNIT, set(range(1, 100))))
    with pytest.raises(RunFailed, match=r"4 steps in a row .* began at step 2 in a step before the resumption"):
        train(folder, *words)
    assert [row["nonfinite_streak"] for row in read_jsonl(folder / "steps.jsonl")] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_step_left_out_by_a_transform_is_in_no_streak(train, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NONFINITE_STREAK", 1)
    words = ["optim.transform.name=skip_step", "optim.transform.options.window=4"]
    words += ["optim.transform.options.min_values=3", "optim.transform.options.sigmas=0.3"]
    folder = train(tmp_path / "run", "training.steps=12", *words)
    rows = read_jsonl(folder / "steps.jsonl")
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert 2 <= len(skipped) <= 9 and skipped[0] >= 3  # not before min_values were seen
    for row in rows:
        assert (row["nonfinite_unit"], row["nonfinite_total"], row["nonfinite_streak"]) == (None, 0, 0)
    assert (folder / "DONE").exists()
