"""The examples under Accelerate and in a Trainer run as they stand, and do what a loop by hand does."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.control import Decision

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS, ACCUMULATION = 10, 2


def by_hand(model: nn.Module, options: dict[str, Any], batches: list[Tensor], adamw: dict[str, Any]) -> list[Decision]:
    controller = gnmr.attach(model, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2, **adamw)
    decisions, clipped = [], 0
    for step in range(STEPS):
        for batch in batches[step * ACCUMULATION : (step + 1) * ACCUMULATION]:
            logits = model(input_ids=batch).logits
            total = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            (total / (ACCUMULATION * batch[:, 1:].numel())).backward()
        decisions.append(controller.step())
        clipped += nn.utils.clip_grad_norm_(trained, 1.0).item() > 1
        optimizer.step()
        optimizer.zero_grad()
    assert clipped > 0
    return decisions


ADAMW: dict[str, dict[str, Any]] = {"accelerate_loop": {}, "hf_trainer": {"weight_decay": 0.0, "fused": True}}


@pytest.mark.parametrize("name", ADAMW)
def test_the_same_as_by_hand(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, Any] = {"batches": [], "decisions": []}
    attach = gnmr.attach

    @functools.wraps(attach)
    def noting(model: nn.Module, **options: Any) -> gnmr.Router:
        seen.update(start=copy.deepcopy(model), options=options, model=model)
        model.register_forward_pre_hook(
            lambda _m, _args, kwargs: seen["batches"].append(kwargs["input_ids"].clone()), with_kwargs=True
        )
        controller = attach(model, **options)
        step = controller.step

        def noted_step(*args: Any, **kwargs: Any) -> Decision:
            seen["decisions"].append(step(*args, **kwargs))
            return seen["decisions"][-1]

        controller.step = noted_step  # type: ignore[method-assign]
        return controller

    monkeypatch.setattr(gnmr, "attach", noting, raising=False)
    monkeypatch.setattr("gnmr.integrations.trainer.attach", noting)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--steps", str(STEPS)])

    assert len(seen["decisions"]) == STEPS and len(seen["batches"]) == STEPS * ACCUMULATION
    assert not any(isinstance(m, gnmr.precision.PathLinear) for m in seen["model"].modules())
    losses = [float(loss) for loss in re.findall(r"loss\W+(\d+\.\d+)", capsys.readouterr().out)]
    assert losses[STEPS - 1] < losses[0] - 0.05
    monkeypatch.undo()
    wanted = by_hand(seen["start"].train(), seen["options"], seen["batches"], ADAMW[name])
    for decision, want in zip(seen["decisions"], wanted, strict=True):
        np.testing.assert_allclose(decision.norm, want.norm, rtol=1e-4)
        np.testing.assert_array_equal(decision.active, want.active)
    assert {int(decision.active.sum()) for decision in wanted} == {0, 1}
