"""`gnmr bench fair`: beta2 that changes at a fork, families and their figures, runs that go on where they stopped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.bench import fair
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.rows import read_rows
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config.compose import compose
from gnmr.lab.train.fork import Forks

ADDS = {fair.ALWAYS: -0.1, "random": 0.02, "random held": -0.03, "ranges, stochastic": -0.08, "stochastic": -0.06}


@pytest.fixture
def known() -> fair.Known:
    """Rows of all runs from scratch: an arm's effect, a seed's and noise; held helps under 0.999 alone."""
    noise, rows = np.random.default_rng(0), {}
    for optimizer in (fair.PLAIN, fair.FORGETTING, fair.CLIPPED):
        for seed in range(3):
            for arm in fair.ARMS:
                same = optimizer == fair.FORGETTING and arm == "random"
                effect = ADDS.get("random held" if same else arm, 0.0)
                after = {
                    str(step): 4 - step / 200 + seed / 10 + effect * step / 200 + noise.normal(0, 5e-4)
                    for step in fair.WHOLE
                }
                rows[fair.Cell(optimizer, fair.SCRATCH, arm, seed)] = {"after": after, "second_moments_fell": 0.5}
    return rows


def scratch(known: fair.Known, monkeypatch: pytest.MonkeyPatch, repeats: int) -> dict[str, Figure]:
    monkeypatch.setattr(fair, "_recorded", lambda _setting: known)
    return {figure.name: figure for figure in fair.scratch(Setting(None, [], repeats))}  # type: ignore[arg-type]


def test_families_and_the_difference_of_the_costs(known: fair.Known, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scratch(known, monkeypatch, 3)
    where = "switching, beta2 0.999, 200 steps"
    assert found[f"{where}: gap"].value == pytest.approx(0.1, abs=2e-3) and "shown, p = " in found[f"{where}: gap"].note
    assert found[f"{where}: random held - random"].value == pytest.approx(0.5, abs=0.03)
    assert ", better;" in found[f"{where}: random held - random"].note
    assert ", worse;" in found[f"{where}: random - never"].note
    assert ", better;" not in found["switching, beta2 0.95, 200 steps: random held - random"].note
    assert found["rounding, 200 steps: ranges, stochastic"].value == pytest.approx(0.8, abs=0.03)
    apart = found["cost of switching: beta2 0.999 less 0.95"]
    assert apart.value == pytest.approx(0.05, abs=2e-3) and float(apart.note.split()[-1]) < 1e-3
    told = {figure.name: figure for figure in fair.more(Setting(None, [], 3))}  # type: ignore[arg-type]
    assert told["clip 1.0, 200 steps: second moments that fell, never"].value == 0.5
    assert told["rounding, its parts, 200 steps: stochastic"].value == pytest.approx(0.6, abs=0.03)
    assert not any("random" in name for name in told)


def test_one_seed_tells_losses_and_tests_nothing(known: fair.Known, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scratch(known, monkeypatch, 1)
    assert found["rounding, 200 steps: loss, ranges, stochastic"].n == 1
    assert not any(name.endswith(": gap") or " - " in name for name in found)


def test_another_beta2_leaves_the_corrected_second_moment_as_it_is() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    for scale in (1.0, 2.0, 3.0):
        weight.grad = scale * torch.tensor([1.0, -2.0, 4.0])
        optimizer.step()
    before = optimizer.state[weight]["exp_avg_sq"] / (1 - 0.999**3)
    fair.with_beta2(optimizer, 0.95)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"] / (1 - 0.95**3), before)
    weight.grad = torch.zeros(3)
    optimizer.step()
    now = optimizer.state[weight]["exp_avg_sq"] / (1 - 0.95**4)
    torch.testing.assert_close(now, before * 0.95 * (1 - 0.95**3) / (1 - 0.95**4))


@pytest.mark.slow
def test_forks_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "FORKED", (1, 2))
    monkeypatch.setattr(fair, "RECENT", 2)
    setting = Setting(compose([f"runs_dir={tmp_path}", "training.threads=1"]), [], 1)
    figures = fair.forks(setting)
    file = tmp_path / "bench/fair.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["cell"]["arm"] for row in rows] == ["never", "always"] * 2
    assert [row["promoted"] for row in rows] == [0, 1] * 2 and rows[0]["after"] != rows[1]["after"]
    fell = [row["second_moments_fell"] for row in rows]
    assert max(fell[:2]) < 0.01 and min(fell[2:]) > 0.3, "bfloat16 rounds a thousandth away, and no twentieth"
    assert rows[0]["after"] == forked_plainly()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]) + '{"cell')
    assert [figure.value for figure in fair.forks(setting)] == [figure.value for figure in figures]
    assert len(list(read_rows(file))) == len(rows)


def forked_plainly() -> dict[str, float]:
    """The same fork by `Forks` itself."""
    forks, after = Forks("shipped"), {}
    for steps in (1, 2):
        config = forks.config(
            *fair._SAVED, *fair.ARMS[fair.NEVER], f"training.steps={steps}", "fork.heal=0", "training.threads=1"
        )
        after[str(steps)] = forks(config, phases=("low",)).validation["low"].high
    return after


@pytest.mark.slow
def test_recorded_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout = Path(__file__).parents[2]
    if not (checkout / "runs/reference").is_dir():
        pytest.skip("no checkout: runs/reference is not in the wheel")
    monkeypatch.chdir(checkout)
    found = {figure.name: figure for figure in fair.lengths(Setting(None, [], None))}  # type: ignore[arg-type]
    assert found["recorded, 500 steps: gap"].value == pytest.approx(0.504, abs=1e-3), (
        "that of docs/results/saved_2bit.md"
    )
    assert found["recorded: gap after 500 steps less that after 250"].low > 0
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="lengths reads the packed records of a checkout"):
        fair.CHECKS["lengths"](Setting(None, [], None))  # type: ignore[arg-type]
