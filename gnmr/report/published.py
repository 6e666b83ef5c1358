"""The paper's figures that the report puts beside ours: tables 1, 3, 5, 6, 10 and 11, as data.

They stand beside a run only where its scale is the paper's, and no test asserts that a run of ours reaches them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SOURCE = "Kong et al., GNMR, arXiv 2606.00539v1 (CC BY 4.0)"
FAILED = math.inf
"""Stands for the paper's mark of a run that failed to converge."""

TABLE_1_TOKENS = {"60m": 1.1e9, "130m": 2.2e9, "350m": 6.4e9, "1.3b": 13.1e9}
"""Training tokens at which table 1 gives each scale's perplexity; its keys are the paper's scales."""


@dataclass(frozen=True)
class Table1Row:
    """One arm of table 1: widths of the two paths in bits, thresholds, validation perplexity by scale."""

    low: int
    recovery: int | None
    alpha: float | None
    beta: float | None
    val_ppl: dict[str, float]


TABLE_1 = (
    Table1Row(4, None, None, None, {"60m": 67.22, "130m": 169.21, "350m": 26.56, "1.3b": FAILED}),
    Table1Row(4, 8, 1.5, 1.3, {"60m": 30.59, "130m": 24.66, "350m": 18.84, "1.3b": 15.71}),
    Table1Row(4, 8, 2.0, 1.5, {"60m": 30.66, "130m": 24.86, "350m": 19.07}),
    Table1Row(4, 8, 3.0, 2.0, {"60m": 30.68, "130m": 25.33, "350m": 18.77}),
    Table1Row(8, None, None, None, {"60m": 30.88, "130m": 25.13, "350m": 18.59, "1.3b": 15.68}),
    Table1Row(16, None, None, None, {"60m": 30.79, "130m": 25.06, "350m": 18.80, "1.3b": 15.56}),
)
"""Act-quant stress (section 5.1), validation perplexity."""

TABLE_3 = {
    ("60m", 2.0, 1.5): (0.070e-2, 0.081e-2),
    ("60m", 3.0, 2.0): (0.019e-2, 0.033e-2),
    ("350m", 2.0, 1.5): (0.141e-2, 0.067e-2),
    ("350m", 3.0, 2.0): (0.019e-2, 0.016e-2),
}
"""(scale, alpha, beta) -> shares of unit-steps with GNMR > alpha and with dGNMR > beta; 4/8-bit act-quant stress."""

TABLE_5 = {(1.1, 1.1): (26.53, 23.95, 23.57), (1.5, 1.1): (26.49, 23.92, 23.54), (1.5, 1.5): (26.56, 23.98, 23.60)}
"""(alpha in the first stage, alpha afterwards) -> validation perplexity at `TOKENS_5_AND_6`; 130M."""

TABLE_6 = {2: (26.56, 23.97, 23.59), 4: (26.49, 23.92, 23.54), 6: (26.50, 23.94, 23.56), 8: (26.56, 24.01, 23.63)}
"""max_o -> validation perplexity at `TOKENS_5_AND_6`; 130M. Its row 4 is table 5's 1.5 then 1.1."""

SCALE_5_6_11 = "130m"
TOKENS_5_AND_6 = (1.3e9, 2.1e9, 2.6e9)

TABLE_10 = {"130m": 215.10, "350m": 88.97}
"""Scale -> validation perplexity of the ADAPT-style static baseline, 4-bit and 8-bit, at table 1's tokens."""


@dataclass(frozen=True)
class Table11Row:
    """One signal of table 11; None where the paper has a dash: a ranked signal always fills max_o."""

    val_ppl: float
    promotion_frac: float | None
    hit_max_o_frac: float | None
    step_time_s: float
    peak_memory_mb: float


TABLE_11 = {
    "gnmr_delta": Table11Row(23.685, 0.0040, 0.0043, 0.9972, 3732),
    "gsnr": Table11Row(23.729, None, None, 1.2775, 4009),
    "jacobian": Table11Row(23.750, None, None, 1.0167, 3682),
}
"""Matched triggers (E.5): 130M, 4-bit and 8-bit, max_o 4, t_lock 1, 2.6B tokens. By our name of the signal; the paper's
GNMR is thresholded, the other two are ranked."""


def val_ppl(scale: str, low: int | None, recovery: int | None, alpha: float | None, beta: float | None) -> float | None:
    """Table 1's perplexity of an arm; None where the paper has none. A static arm's thresholds do not matter."""
    for row in TABLE_1:
        if (row.low, row.recovery) == (low, recovery) and (recovery is None or (row.alpha, row.beta) == (alpha, beta)):
            return row.val_ppl.get(scale)
    return None


def over_fracs(
    scale: str, low: int | None, recovery: int | None, alpha: float | None, beta: float | None
) -> tuple[float, float] | None:
    """Table 3's shares (GNMR > alpha, dGNMR > beta) of an arm; None where the paper has none."""
    if (low, recovery) != (4, 8) or alpha is None or beta is None:
        return None
    return TABLE_3.get((scale, alpha, beta))
