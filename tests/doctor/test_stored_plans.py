"""The plans in plans/ load, keep their budgets, and can be exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnmr.plan.export import export
from gnmr.plan.pin_plan import read_plan

PLANS = sorted((Path(__file__).parents[2] / "plans").glob("*.json"))


def test_there_are_plans() -> None:
    assert len(PLANS) >= 3


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_a_stored_plan_loads_and_keeps_its_budget(file: Path) -> None:
    plan = read_plan(file)
    assert plan.text() == file.read_text()
    choice = plan.choice(["fprop"])
    assert plan.pins and plan.budget and plan.extra
    assert choice.extra == pytest.approx(plan.extra) and plan.extra <= plan.budget * (1 + 1e-9)
    before, after = plan.expected or (0.0, 0.0)
    assert after < before
    assert export(plan, "te").files
