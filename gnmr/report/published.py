"""The paper's figures that the report puts beside ours: tables 1 and 3, as data.

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
