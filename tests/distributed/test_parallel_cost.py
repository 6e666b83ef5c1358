"""What several processes cost: `gnmr bench parallel`, and the packet that the plan on paper counts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnmr.distributed import world
from gnmr.distributed.reduce import Ranks
from gnmr.errors import RunFailed
from gnmr.lab.bench import hook, parallel
from gnmr.lab.config import Config
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
        config = compose(["experiment=act_quant_stress", f"model=llama_{scale}"])
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


def test_figures_of_two_processes(pair: Callable[..., list[Any]], tiny: Callable[..., Config]) -> None:
    config = replace(tiny("training.accumulation=2", "training.batch_size=1"), parallel="ddp")
    ranks = pair("measured", config=config)
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    figures = {figure.name.strip(): figure for figure in (*parallel._shares(ranks), *parallel._sums(ranks))}
    assert all(math.isfinite(figure.value) for figure in figures.values())
    control, own = figures["control, 2 processes"], figures["its sum over ranks, 2 processes"]
    assert control.value > 0 and 0 < own.value <= figures["the same with waiting, 2 processes"].value
    assert own.note.startswith(f"{8 * numbers_of(7, 5, 2):,} bytes"), own.note  # 7 units; embedding, head, 3 norms
    for units in parallel.UNITS:
        figure = figures[f"sum of {units:,} units, 2 processes"]
        assert figure.value > 0 and figure.note.startswith(f"{8 * (2 * units + 4):,} bytes"), figure.note


def test_figures_of_compressed_steps(pair: Callable[..., list[Any]], tiny: Callable[..., Config]) -> None:
    """Of two processes and of virtual workers; of one round, so what is held is the arms and what they send."""
    words = ("training.batch_size=1", "compression.rank=2", "compression.refresh_every=4")
    config = replace(tiny(*words), paths=replace(tiny().paths, low="bf16", recovery=None))
    ranks = pair("measured", config=config, hook=True)
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    alone = hook.measured(config, world.ALONE, 1)
    kinds = ("wall", "cpu", "sent")
    assert alone.keys() == ranks[0].keys() == {f"{kind} {arm}" for kind in kinds for arm in hook.ARMS}
    sent = {arm: alone[f"sent {arm}"][0] for arm in hook.ARMS}
    assert all(ranks[0][f"sent {arm}"][0] == one for arm, one in sent.items())
    assert sent["low"] < 0.9 and sent["PowerSGD"] < 0.9 and sent["refresh"] == sent["dense"] == 1 < sent["recovery"]
    for found, where in ((ranks, "two processes"), ([alone], "virtual workers")):
        figures = {figure.name: figure for figure in hook._figures(found, where, 4)}
        assert all(0 < figure.value < math.inf for figure in figures.values())
        low, refresh = (figures[f"{where}: {arm}, CPU time over dense"].value for arm in ("low", "refresh"))
        assert figures[f"{where}: GreedyLore, CPU time over dense"].value == pytest.approx((3 * low + refresh) / 4)


def test_what_cannot_be_measured_is_told(gnmr: Callable[..., Any], tiny_words: list[str]) -> None:
    assert "clock=cpu: processes wait for each other" in gnmr("bench", "parallel", *tiny_words, "clock=cpu").mistake
    assert (
        "training.device=cuda: it measures gloo" in gnmr("bench", "hook", *tiny_words, "training.device=cuda").mistake
    )
