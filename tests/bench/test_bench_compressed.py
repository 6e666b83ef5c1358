"""Arms of compressed gradients: what the forks are, and what the figures say of numbers made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gnmr.lab.bench import compressed
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config import Config
from gnmr.lab.train.fork import Forks

SHARES = {"never": 0.0, "dense": 1.0, "random basis": 0.2, "no feedback": 0.1, "GNMR": 0.5, "gap": 0.8}
SHARES |= {"random units": 0.4, "more rows": 0.6, "pin": 0.7, "pin and excess": 0.9, "PowerSGD": 0.3}


def test_figures_are_shares_of_the_gap() -> None:
    assert SHARES.keys() == compressed.ARMS.keys()
    draw = np.random.default_rng(0)
    rows = [
        {
            "fork": {"base": base, "arm": arm, "order": order},
            "sent": 0.25,
            "loss": 3 + order + 0.1 * (1 - share) + 1e-4 * draw.standard_normal(),
        }
        for base in ("a", "b")
        for order in range(3)
        for arm, share in SHARES.items()
    ]
    found = {figure.name: figure for figure in compressed.figures(rows)}
    assert found["gap, never - dense, nats"].value == pytest.approx(0.1, rel=0.01)
    for arm, control in compressed.CONTRASTS:
        figure = found[f"{arm} against {control}: gap closed"]
        assert figure.value == pytest.approx(SHARES[arm], abs=0.01) and figure.n == 6
        told = "better" if SHARES[arm] > SHARES[control] else "worse"
        assert figure.note.startswith(f"sends 25.0%; {told} against {control}, p ")


def test_a_fork_cuts_the_bases_batch_and_more_rows_cost_the_budget() -> None:
    forks = Forks("shipped")
    setting = Setting(replace(Config(), training=replace(Config().training, threads=1)), [], None)
    made = compressed.config_of(forks, compressed.Fork("shipped", "more rows", 2), setting)
    forks.base.check(made)
    assert (made.training.accumulation, made.training.seed, made.compression.name) == (2, 2, "greedylore")
    rows = made.compression.rank - compressed.RANK
    gap = compressed.config_of(forks, compressed.Fork("shipped", "gap", 2), setting)
    assert gap.controller.budget == compressed.BUDGET and gap.controller.signal == "gap"
    # Its matrices, four blocks: four of 64 x 64, three of 64 x 176.
    row, whole = 4 * (4 * 64 + 3 * 176), 4 * (4 * 64 * 64 + 3 * 64 * 176)
    assert rows == int(0.1 * (whole - row) / row) > 1
    # PowerSGD: two dense steps, then both sides of every matrix, embedding and head (512 x 64) too.
    power = compressed.config_of(forks, compressed.Fork("shipped", "PowerSGD", 2), setting).compression
    dense, norms = whole + 2 * 512 * 64 + 9 * 64, 9 * 64
    row_of_all = 4 * (4 * 128 + 3 * 240) + 2 * 576
    others, flags = dense - whole, 28 * 1 + 4 * 7 * 64
    most = 24 * others + whole + 23 * (row + flags + 0.1 * (whole - row))
    assert power.rank == int(((most - 2 * dense) / 22 - norms) / row_of_all) > 1
    assert (power.name, power.dense_steps, power.workers) == ("powersgd", 2, 2)


@pytest.mark.slow
def test_a_pin_fills_the_budget_by_what_gradients_lack_and_is_sent_whole() -> None:
    forks = Forks("shipped")
    setting = Setting(replace(Config(), training=replace(Config().training, threads=1)), [], None)
    never = compressed.config_of(forks, compressed.Fork("shipped", "never", compressed.PIN_ORDER), setting)
    short = replace(never, training=replace(never.training, steps=2))
    pins = compressed.pinned(forks, short)
    costs = {unit.name: unit.cost for unit in forks.parts(short).compressed.units()}
    left = 0.1 * sum(costs.values()) - sum(costs[name] for name in pins)
    assert 0 <= left < min(costs[name] for name in costs if name not in pins)
    sent = [forks(config, phases=()).sent for config in (short, compressed.sent_whole(short, pins))]
    dense = sum(one.numel() for one in forks.parts(short).model.parameters())
    saved = sum(costs[name] - 64 - 1 for name in pins)  # no scores, no flag
    assert sent[1] - sent[0] == pytest.approx(saved / (2 * dense))
