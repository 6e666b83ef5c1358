"""The packet that a step sums over ranks: its size in docs/distributed.md, and its guard."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gnmr.distributed import world
from gnmr.distributed.reduce import Ranks
from gnmr.errors import RunFailed
from gnmr.lab.config.compose import compose
from gnmr.lab.train.build import empty_model, with_paths

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]


def numbers_of(units: int, others: int, ranks: int) -> int:
    """Of the sum of a step by hand: squared norm and whether there is one, by unit and by parameter outside of them;
    loss, four guards, four signals; a time a rank."""
    return 2 * (units + others) + 1 + 4 + 4 + ranks


@pytest.mark.slow
def test_the_plan_on_paper_counts_what_a_step_sums() -> None:
    text = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    rows = re.findall(r"^\| (\w+|1\.3b) \| (.*) \|$", text, re.M)
    for scale in ("130m", "1.3b"):
        config = compose(["experiment=act_quant_stress", f"scale={scale}"])
        model, _ = empty_model(config)
        plan = with_paths(model, config, torch.device("cuda"))
        inside = {id(p) for unit in plan.units for operator in unit.operators for p in operator.parameters()}
        units, others = len(plan.units), sum(id(p) not in inside for p in model.parameters())
        gradient = 2 * sum(p.numel() for p in model.parameters())
        found = [rest.replace(",", "").split(" | ") for name, rest in rows if name == scale]
        assert [row[2] for row in found] == ["8", "1024"]
        for row in found:
            size = 8 * numbers_of(units, others, int(row[2]))
            want = [units, others, row[2], size, gradient, f"{1e6 * size / gradient:.1f}"]
            assert row == [str(value) for value in want]


@pytest.mark.parametrize("size", [2, 1000, 1024, 8192])
def test_the_guard_is_exact_for_thousands_of_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "size", lambda: size)
    ranks = Ranks()
    for digest in (0xFFFFF, 0xFFFFE, 714_025):
        same = np.array([size * digest, size * digest**2, 0.0, 0.0])
        ranks.check(same, step=1)
        other = np.array([-1.0, (digest - 1) ** 2 - digest**2, 0.0, 0.0])  # of one rank, by one
        with pytest.raises(RunFailed, match="ranks disagree in step 1"):
            ranks.check(same + other, step=1)
