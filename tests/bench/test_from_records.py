"""The block of docs/evidence.md is what the records give, and figures that can be worked out by hand are right."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import from_records
import rival_table

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"


@pytest.mark.slow  # four seconds, most of them bootstrap samples
def test_the_page_has_the_figures_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    from_records.main()
    assert f"```text\n{capsys.readouterr().out.strip()}\n```" in PAGE.read_text()


def test_the_interval_of_a_rank_by_hand() -> None:
    ascending = np.arange(20.0)
    assert rival_table.rank_interval(ascending, ascending**3) == pytest.approx((1, 1))  # ranks alone count
    low, high = rival_table.rank_interval(ascending, np.random.default_rng(1).permutation(20.0 * ascending))
    assert -1 < low < 0.3 and low < high < 1


def test_a_score_that_is_the_kl_saves_what_the_oracle_saves() -> None:
    kl = [4.0, 1.0, 3.0, 2.0]  # four linears of attention: the budget holds one of them
    of_low = {"name": [f"layers.0.self_attn.{name}_proj" for name in "qkvo"], "kl": kl, "mse": kl[::-1]}
    of_low |= {key: kl for key in from_records.SCORES.values() if key != "mse"}
    of_rescue = {key: [0.0] * 4 for key in of_low}
    *as_the_kl, mse = from_records.saved_shares(of_low, of_rescue, "nvfp4")
    assert as_the_kl == [1.0] * 3
    assert mse == 2.0 / 4.0  # it moves the fourth linear, and the oracle the first
