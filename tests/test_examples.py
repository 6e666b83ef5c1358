"""The examples run as they stand, and what own_loop.py claims about the controller is true."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gnmr
from gnmr.control import Decision

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate_loop", "hf_trainer", "lightning_loop"])
def test_loops_of_other_libraries(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their sets are those of a loop by hand: tests/integrations/test_same_sets.py."""
    for library in ("accelerate", "peft", *["lightning.pytorch"] * (name == "lightning_loop")):
        pytest.importorskip(library)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](["--steps", "12"])
    losses = [float(loss) for loss in re.findall(r"loss\W+(\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) >= 12 and losses[11] < losses[0] - 0.05


@pytest.mark.slow
def test_own_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The formats in force are noted before each decision of the real `gnmr.attach`."""
    attach, seen = gnmr.attach, dict[str, Any]()
    in_force, decisions = list[set[str]](), list[Decision]()

    def noting(model: nn.Module, **options: Any) -> gnmr.Router:
        controller = attach(model, **options)
        step = controller.step
        seen.update(model=model, options=options)

        def noted_step() -> Decision:
            operators = controller.converted.operators
            in_force.append({o.operator_name for o in operators if o.path.name == options["recovery"]})
            decisions.append(step())
            return decisions[-1]

        controller.step = noted_step  # type: ignore[method-assign]
        return controller

    monkeypatch.setattr(gnmr, "attach", noting)
    runpy.run_path(str(EXAMPLES / "own_loop.py"))["main"](["--steps", str(STEPS)])
    output = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1.0
    assert 0 < max(map(len, in_force)) <= seen["options"]["max_o"] < len(decisions[0].units)
    chosen = [set(decision.by_risk(decision.active)) for decision in decisions]
    assert in_force == [set(), *chosen[:-1]], "the set of a step is in force in the next one"
    events = [event for decision in decisions for event in decision.events if event.event == "promote"]
    told = re.findall(r"(\S+) promoted: (\w+), risk (\S+)", output)
    assert told and told == [(event.unit, event.cause, f"{event.risk:.2f}") for event in events]
    modules = dict(seen["model"].named_modules())
    assert {type(modules[name]) for name in decisions[0].units} == {nn.Linear}, "it leaves plain linears"
