"""The paper's published figures as data: tables 1 to 6, 9 to 11, 13 and 15.

They are for reading beside results at the paper's scales. No test and no result of ours uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SOURCE = "Kong et al., GNMR, arXiv 2606.00539v1 (CC BY 4.0)"
FAILED = math.inf
"""Stands for the paper's mark of a run that failed to converge."""
Recipes = tuple[str | None, str | None]
"""Of the low and the recovery path, None in the second place of a static arm."""
Control = tuple[int | None, bool]
"""Bits of the low path, and whether GNMR controls it."""
Table1Arm = tuple[int | None, int | None, float | None, float | None]
"""Bits of the low and the recovery path, alpha, beta; of a static arm all but the first None."""

TABLE_1_TOKENS = {"60m": 1.1e9, "130m": 2.2e9, "350m": 6.4e9, "1.3b": 13.1e9}
"""Training tokens at which table 1 gives each scale's perplexity; its keys are the paper's scales."""


TABLE_1: dict[Table1Arm, dict[str, float]] = {
    (4, None, None, None): {"60m": 67.22, "130m": 169.21, "350m": 26.56, "1.3b": FAILED},
    (4, 8, 1.5, 1.3): {"60m": 30.59, "130m": 24.66, "350m": 18.84, "1.3b": 15.71},
    (4, 8, 2.0, 1.5): {"60m": 30.66, "130m": 24.86, "350m": 19.07},
    (4, 8, 3.0, 2.0): {"60m": 30.68, "130m": 25.33, "350m": 18.77},
    (8, None, None, None): {"60m": 30.88, "130m": 25.13, "350m": 18.59, "1.3b": 15.68},
    (16, None, None, None): {"60m": 30.79, "130m": 25.06, "350m": 18.80, "1.3b": 15.56},
}
"""Act-quant stress (section 5.1): arm -> scale -> validation perplexity."""

RATES = {"60m": 2.5e-3, "130m": 2.5e-3, "350m": 1e-3, "1.3b": 6e-4}
"""Scale -> peak learning rate of the act-quant stress (table 8)."""

TABLE_3: dict[tuple[str, float | None, float | None], tuple[float, float]] = {
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
MAX_O, T_LOCK = 4, 1
"""Of the act-quant stress; table 6 varies the first."""
TOKENS_5_AND_6 = (1.3e9, 2.1e9, 2.6e9)

TABLE_10 = {"130m": 215.10, "350m": 88.97}
"""Scale -> validation perplexity of the ADAPT-style static baseline, 4-bit and 8-bit, at table 1's tokens."""
CALIBRATION_10, K_FRAC_10 = 500, 0.25
"""Steps of the static baseline's calibration, which is its warm-up in BF16, and the share of the blocks it chooses."""
RATE_11 = 3e-3
"""Peak learning rate of table 11."""


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


SCALE_2_AND_4 = "1.3b"
TOKENS_2 = (1.3e9, 2.6e9, 3.9e9, 5.2e9, 6.6e9, 7.9e9, 9.2e9, 10.5e9, 13.1e9)
TABLE_2: dict[Recipes, tuple[float, ...]] = {
    ("sim_e3m2", "fp8_hybrid"): (28.52, 21.17, 19.07, 17.88, 17.06, 16.43, 15.93, 15.57, 15.20),
    ("fp8_hybrid", None): (29.54, 21.57, 19.25, 17.96, 17.11, 16.45, 15.94, 15.56, 15.18),
    ("fp8_hybrid", "bf16"): (29.50, 21.48, 19.14, 17.89, 17.04, 16.37, 15.86, 15.48, 15.10),
    ("bf16", None): (29.10, 21.35, 19.08, 17.84, 16.98, 16.33, 15.82, 15.44, 15.06),
}
"""DeepSeek-style (section 5.2), perplexity at `TOKENS_2`; 1.3B."""

THRESHOLDS_2: dict[Recipes, tuple[float | None, ...]] = {
    ("sim_e3m2", "fp8_hybrid"): (1.5, 1.1, 1.5),
    ("fp8_hybrid", "bf16"): (1.5, 1.1, None),
}
"""alpha in the first 2.5 % of the steps, alpha afterwards, beta, of table 2's arms under GNMR."""

TABLE_4: dict[Recipes, tuple[float, float]] = {
    ("fp8_hybrid", None): (1.266, 103532),
    ("fp8_hybrid", "bf16"): (1.264, 103696),
    ("bf16", None): (1.294, 101292),
}
"""Time of a step (s) and tokens per second of table 2's arms."""

TABLE_9 = {"130m": 24.62, "350m": 18.87, "1.3b": 15.20, "3b": 13.93}
"""Model size -> final perplexity of table 2's arm of 6 and 8 bits."""

SCALE_13, SCALE_15 = "3.7b", "1b"
STEPS_13 = (1e3, 2e3, 3e3, 4e3, 6e3, 8e3, 10e3, 12e3, 14e3, 17e3, 20e3, 29e3)
TABLE_13: dict[Control, tuple[float, ...]] = {
    (8, False): (0.223, 0.205, 0.189, 0.312, 0.176, 0.170, 0.167, 0.163, 0.160, 0.159, 0.158, FAILED),
    (8, True): (0.224, 0.201, 0.189, 0.183, 0.173, 0.170, 0.168, 0.164, 0.162, 0.159, 0.159, 0.154),
    (16, False): (0.226, 0.205, 0.187, 0.181, 0.172, 0.171, 0.167, 0.163, 0.159, 0.159, 0.156, 0.152),
}
"""Mixture of experts (E.6), training loss at `STEPS_13`; 3.7B."""

SCALE_7 = "13b"
TABLE_7: dict[tuple[str, str | None], tuple[float, float, float, float]] = {
    ("bf16", None): (15.09, 29.92, 64.62, 5.4503),
    ("llm_int8", None): (14.71, 29.88, 64.55, 5.4519),
    ("llm_int8", "bf16"): (15.01, 29.92, 64.67, 5.4511),
}
"""Fine-tuning (5.3), by the two paths' recipes: GSM8K exact match, MMLU, HellaSwag [%], WikiText-2 perplexity."""

TOKENS_15 = tuple(0.4e9 * place for place in range(11))
TABLE_15: dict[Control, tuple[float, ...]] = {
    (4, False): (12.261, 4.656, 4.177, 3.670, 3.527, 3.348, 3.314, 3.238, 3.170, 3.156, 3.124),
    (4, True): (12.261, 4.650, 3.929, 3.575, 3.564, 3.309, 3.290, 3.215, 3.155, 3.128, 3.076),
    (16, False): (12.261, 4.608, 3.878, 3.526, 3.472, 3.210, 3.160, 3.077, 3.004, 2.978, 2.913),
}
"""PanGu-1B (E.7), training loss at `TOKENS_15`."""
