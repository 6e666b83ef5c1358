"""What a run watches of its units, against plain loops; and that the default is what it was.

Stops and replays of such runs: test_kill_and_resume.py and test_evidence_in_step.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from gnmr.lab.train.build import Parts, train_step
from gnmr.lab.train.loss import loss_of

LR = 1e-3
OUTPUTS = ["controller.observe=input_grad", "training.dtype=float32", "model.num_layers=2"]


def output_norms(parts: Parts, batches: Tensor) -> dict[str, float]:
    """By retained gradients of the units' outputs, micro-batch by micro-batch."""
    outputs: dict[str, Tensor] = {}
    for name in parts.router.names:
        keep = partial(outputs.__setitem__, name)
        parts.model.get_submodule(name).register_forward_hook(lambda _m, _i, y, keep=keep: keep(y))
    squares = dict.fromkeys(parts.router.names, 0.0)
    for batch in batches:
        loss = loss_of(parts.model, batch)
        for y in outputs.values():
            y.retain_grad()
        (loss / len(batches)).backward()
        for name, y in outputs.items():
            squares[name] += y.grad.double().square().sum().item()
    return {name: square**0.5 for name, square in squares.items()}


@pytest.mark.parametrize("unit", ["operator", pytest.param("layer", marks=pytest.mark.slow), "block"])
def test_input_grad_is_that_of_the_units_outputs(unit: str, assembled: Callable, blocks_of: Callable) -> None:
    """Two micro-batches; an oracle that rehearses both paths, and checkpointing, change nothing."""
    words = [*OUTPUTS, f"precision.unit={unit}"]
    plain = assembled(*words)
    batches = blocks_of(plain, 4).view(2, 2, -1)
    want = output_norms(plain, batches)
    assert min(want.values()) > 0
    for more in ([], ["records.evidence=[true_gap]"], ["training.activation_checkpointing=true"]):
        parts = assembled(*words, *more)
        decision = train_step(parts)(list(batches), LR).decision
        assert dict(zip(decision.units, decision.norm.tolist(), strict=True)) == pytest.approx(want, rel=1e-5)
        assert decision.observed.all()


def test_an_expert_without_tokens_is_not_observed(assembled: Callable, blocks_of: Callable) -> None:
    words = ["model.name=moe", "model.experts.number=16", "model.experts.top_k=1"]
    words += ["training.dtype=float32", "precision.unit=expert"]
    parts = assembled(*words, "controller.observe=input_grad")
    same = assembled(*words)
    batch = blocks_of(parts, 1)[:, :6]
    decision, by_parameters = (train_step(p)([batch], LR).decision for p in (parts, same))
    assert 0 < (~decision.observed).sum() < len(decision.units)
    assert (decision.observed == by_parameters.observed).all()


def test_adapter_is_everything_trainable_below_the_unit(assembled: Callable, blocks_of: Callable) -> None:
    """Of an operator that is its own weight, bit for bit as `parameters`; of a block its norms too."""
    kinds = {}
    for unit in ("operator", "block"):
        for observe in ("parameters", "adapter"):
            parts = assembled(f"controller.observe={observe}", f"precision.unit={unit}", "training.dtype=float32")
            kinds[unit, observe] = train_step(parts)([blocks_of(parts, 2)], LR)
    alike = [kinds["operator", observe].decision.norm.tolist() for observe in ("parameters", "adapter")]
    assert alike[0] == alike[1]
    whole, own = (kinds["block", observe].decision.norm.item() for observe in ("adapter", "parameters"))
    parts = assembled("training.dtype=float32")
    loss_of(parts.model, blocks_of(parts, 2)).backward()
    block = torch.cat([p.grad.flatten() for p in parts.model.layers[0].parameters()])
    assert whole == pytest.approx(block.norm().item(), rel=1e-5) and whole > own * (1 + 5e-5)
    assert len({result.grad_norm_pre_clip for result in kinds.values()}) <= 2  # sums in another order
