"""The examples run as they stand, and what they claim about the controller is true."""

from __future__ import annotations

import importlib.util
import io
import re
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gnmr
from gnmr.control import Decision

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("own_loop")]  # one run for all of these tests

OWN_LOOP = Path(__file__).parent.parent / "examples" / "own_loop.py"
STEPS = 16


@dataclass
class Seen:
    """What one run of the example did; `in_force`: units on the recovery path, step by step."""

    output: str = ""
    model: nn.Module | None = None
    options: dict[str, Any] = field(default_factory=dict)
    in_force: list[set[str]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)


@pytest.fixture(scope="module")
def own_loop() -> Seen:
    """Runs the example's `main` on the real `gnmr.attach`, noting the formats in force before each decision."""
    seen, attach = Seen(), gnmr.attach

    def noting(model: nn.Module, **options: Any) -> gnmr.Router:
        controller = attach(model, **options)
        seen.model, seen.options = model, options
        step = controller.step

        def noted_step() -> Decision:
            operators = controller.converted.operators
            seen.in_force.append({o.operator_name for o in operators if o.path.name == options["recovery"]})
            seen.decisions.append(step())
            return seen.decisions[-1]

        controller.step = noted_step  # type: ignore[method-assign]
        return controller

    spec = importlib.util.spec_from_file_location("own_loop", OWN_LOOP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        patch.setattr(gnmr, "attach", noting)
        module.main(["--steps", str(STEPS)])
    seen.output = output.getvalue()
    return seen


def test_own_loop_learns(own_loop: Seen) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", own_loop.output)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1.0


def test_own_loop_never_has_more_than_max_o_units_in_recovery(own_loop: Seen) -> None:
    sizes = [len(units) for units in own_loop.in_force]
    assert 0 < max(sizes) <= own_loop.options["max_o"] < len(own_loop.decisions[0].units)


def test_own_loop_set_of_a_step_is_in_force_in_the_next(own_loop: Seen) -> None:
    chosen = [set(decision.by_risk(decision.active)) for decision in own_loop.decisions]
    assert own_loop.in_force == [set(), *chosen[:-1]]


def test_own_loop_prints_every_promotion_and_why(own_loop: Seen) -> None:
    told = re.findall(r"(\S+) promoted: (\w+), risk (\S+)", own_loop.output)
    events = [event for decision in own_loop.decisions for event in decision.events if event.event == "promote"]
    assert told == [(event.unit, event.cause, f"{event.risk:.2f}") for event in events]
    assert told


def test_own_loop_leaves_plain_linears(own_loop: Seen) -> None:
    assert own_loop.model is not None
    modules = dict(own_loop.model.named_modules())
    assert {type(modules[name]) for name in own_loop.decisions[0].units} == {nn.Linear}
