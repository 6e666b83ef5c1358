"""What several processes cost: `gnmr bench parallel`, and the packet that the plan on paper counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gnmr.bench import parallel
from gnmr.config import Config

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]


def numbers_of(units: int, others: int, ranks: int) -> int:
    """Of the sum of a step by hand: squared norm and whether there is one, by unit and by parameter outside of them;
    loss, four guards, four signals; a time a rank."""
    return 2 * (units + others) + 1 + 4 + 4 + ranks


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


def test_what_cannot_be_measured_is_told(gnmr: Callable[..., Any], tiny_words: list[str]) -> None:
    assert "clock=cpu: processes wait for each other" in gnmr("bench", "parallel", *tiny_words, "clock=cpu").mistake
