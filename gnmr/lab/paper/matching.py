"""Which of our runs are set as the paper's: conditions on recorded settings.

A condition is {config key: the values that fit}; a tuple holds several, and None among them fits where a record from
before the key existed has none. Arms are found by their settings, never by their names.
"""

from __future__ import annotations

import math
from typing import Any

from gnmr.lab.paper import published
from gnmr.lab.report.arms import Arm, bits
from gnmr.lab.report.comparisons import Comparison, Kind
from gnmr.names import FORMATS, GEMMS

Where = dict[str, Any]

GNMR = ("gnmr_delta", "gnmr", "delta_gnmr")
STATIC_BASELINE = "static_k"
ACT_QUANT, RECIPE, MOE, PANGU, FINETUNE = "act_quant", "recipe", "moe", "pangu", "finetune"
_EXPERIMENTS = {"deepseek_recipe": RECIPE, "moe_stress": MOE, "pangu_4bit": PANGU, "finetune": FINETUNE}

OFF = (None, False, "")
"""Fits 0 too."""
UNDISTURBED: Where = {
    "faults.kind": (None, "none"),
    "optim.name": (None, "adamw"),
    "optim.transform.name": OFF,
    "optim.clip_norm": OFF,
}
"""Plain AdamW, no injected faults."""
NO_OUTLIERS: Where = {"model.outlier_channels.number": OFF}
ONE_STAGE: Where = {"controller.alpha_init": OFF, "controller.beta_init": OFF}
FROM_THE_FIRST_STEP: Where = {"controller.warmup_frac": OFF}
FIRST_STAGE: Where = {"controller.init_frac": (None, 0.025)}
PLAIN: Where = {
    "controller.signal": (None, "gnmr_delta", "gnmr"),
    "controller.routing": (None, "thresholded"),
    "controller.trigger": (None, 1.0),
    "controller.observe": (None, "parameters"),
    "controller.options.history": (None, "cumulative"),
    "controller.options.two_sided": OFF,
    "controller.hold": (*OFF, 1),
}
"""The paper's GNMR over the thresholds as they are set, with a new choice in every step."""
STEADY = PLAIN | FROM_THE_FIRST_STEP | {"controller.t_lock": (None, published.T_LOCK)}
"""The paper's controller, its cap and thresholds aside."""
BOTH_THRESHOLDS = STEADY | ONE_STAGE | {"controller.signal": (None, "gnmr_delta"), "controller.max_o": published.MAX_O}
"""The paper's controller, cap and lock too: GNMR and dGNMR at the thresholds as set, one stage."""
RANKED_TRIGGER: Where = FROM_THE_FIRST_STEP | {
    "controller.routing": "ranked",
    "controller.max_o": published.MAX_O,
    "controller.t_lock": published.T_LOCK,
    "controller.hold": (*OFF, 1),
}
"""E.5's other signals."""
ADAPT: Where = {
    "controller.signal": STATIC_BASELINE,
    "controller.options.k_frac": published.K_FRAC_10,
    "controller.options.k": None,
    "controller.options.share": None,
}
"""E.4's static baseline, its calibration aside."""


def meets(arm: Arm, *conditions: Where) -> bool:
    """Whether the arm's settings fit all the conditions."""
    return all(
        arm.settings.get(key) in (fits if isinstance(fits, tuple) else (fits,))
        for where in conditions
        for key, fits in where.items()
    )


def setting(comparison: Comparison) -> str:
    """Which of the paper's settings a comparison is in: by its experiment, else by what its arms are made of."""
    if named := _EXPERIMENTS.get(comparison.kind.experiment):
        return named
    settings = [arm.settings for arm in comparison.arms]
    if any(one.get("model.name") == "moe" for one in settings):
        return MOE
    paths = {one.get(key) for one in settings for key in ("precision.low", "precision.recovery")}
    return RECIPE if paths - {None, *FORMATS} else ACT_QUANT


def size_of(comparison: Comparison) -> str:
    """The paper's name of the scale's model size: 1.3b of 1.3b and of any other scale that ends in _1.3b."""
    return comparison.kind.scale.rpartition("_")[2]


def compared(arm: Arm) -> bool:
    """Whether the arm is of a kind that the paper compares: static, or under GNMR over thresholds."""
    return arm.always is not None or (arm.signal in GNMR and not arm.ranked)


def undisturbed(arm: Arm, outliers: bool = False) -> bool:
    """Whether the optimizer is plain AdamW, nothing is pinned and nothing disturbs the run; outlier channels may, where
    `outliers`."""
    return not arm.pinned and meets(arm, UNDISTURBED, *(() if outliers else (NO_OUTLIERS,)))


def max_o(arm: Arm) -> int:
    """The controller's cap."""
    return int(arm.settings.get("controller.max_o") or 0)


def stages(arm: Arm) -> tuple[float, float]:
    """alpha in the first stage and afterwards; NaN where GNMR has no threshold."""
    then, first = (arm.settings.get(f"controller.{key}") for key in ("alpha", "alpha_init"))
    first, then = (math.nan if value is None else float(value) for value in (then if first is None else first, then))
    return first, then


def saved_activations(kind: Kind, arm: Arm, rate: float | None = None, unit: str = "operator") -> bool:
    """Whether the arm quantizes and trains as the paper's act-quant stress does, and nothing disturbs it.

    `rate`: where it is not table 8's of the scale. `unit`: E.4 has its own. Integer and floating-point grids both
    count: the paper has either.
    """
    return undisturbed(arm) and meets(
        arm,
        {
            "precision.low": tuple(FORMATS),
            "precision.site": "saved",
            "precision.rounding": (None, "nearest"),
            "precision.group": None,
            "precision.unit": (None, unit),
            "precision.targets": (None, ["*_proj"]),
            "optim.lr": rate or published.RATES.get(kind.scale),
        },
    )


def four_eight(arm: Arm) -> bool:
    """Whether its paths are of 4 and 8 bits."""
    return (arm.low_bits, arm.recovery_bits) == (4, 8)


def table_1_arm(arm: Arm) -> published.Table1Arm:
    """Its widths and thresholds."""
    if arm.always is not None:
        return bits(arm.always), None, None, None
    return arm.low_bits, arm.recovery_bits, arm.settings.get("controller.alpha"), arm.settings.get("controller.beta")


def two_stages(kind: Kind, arm: Arm) -> bool:
    """Whether the arm is one of tables 5 and 6, alpha and max_o aside: 4 and 8 bits, dGNMR off, 2.5 % first stage."""
    get = arm.settings.get
    off = arm.signal == "gnmr" or (get("controller.beta") is None and get("controller.beta_init") is None)
    own = kind.scale == published.SCALE_5_6_11 and saved_activations(kind, arm) and four_eight(arm)
    return own and off and meets(arm, STEADY, FIRST_STAGE)


def adapt(kind: Kind, arm: Arm) -> bool:
    """Whether the arm is the static baseline of E.4: its share of the blocks, ranked over its steps, for good."""
    get, steps = arm.settings.get, kind.steps or 0
    option = "controller.options.calibration_"
    calibration = get(f"{option}steps") or round(steps * (get(f"{option}frac") or 0.05))
    warmup = round(steps * (get("controller.warmup_frac") or 0))
    blocks = saved_activations(kind, arm, unit="block") and four_eight(arm) and arm.routed and of_blocks_in_16_bits(arm)
    return blocks and meets(arm, ADAPT) and calibration == warmup == published.CALIBRATION_10


def of_blocks_in_16_bits(arm: Arm) -> bool:
    """Whether its units are blocks and it warms up in 16 bits."""
    get = arm.settings.get
    in_16_bits = get("controller.warmup_path") == "16bit" or arm.recovery_bits == 16
    return get("precision.unit") == "block" and bool(get("controller.warmup_frac")) and in_16_bits


def matched_trigger(kind: Kind, arm: Arm) -> bool:
    """Whether the arm is one of E.5, cap and lock too: GNMR over a pair of table 1's thresholds, others ranked."""
    own = kind.scale == published.SCALE_5_6_11 and saved_activations(kind, arm, published.RATE_11) and four_eight(arm)
    if arm.signal not in GNMR:
        return own and meets(arm, RANKED_TRIGGER)
    thresholds = arm.settings.get("controller.alpha"), arm.settings.get("controller.beta")
    return own and meets(arm, BOTH_THRESHOLDS) and thresholds in {key[2:] for key in published.TABLE_1}


def recipes(arm: Arm, outliers: bool = False) -> published.Recipes:
    """Those of table 2's arms, where the arm is set as the paper's are, but for `outliers`; else (None, None)."""
    get, other = arm.settings.get, (None, None)
    if not undisturbed(arm, outliers):
        return other
    if arm.always is not None:
        return arm.always, None
    pair = get("precision.low"), get("precision.recovery")
    beta = None if arm.signal == "gnmr" else get("controller.beta")
    thresholds = get("controller.alpha_init"), get("controller.alpha"), beta
    whole = set(get("precision.recovers") or GEMMS) == set(GEMMS)
    fits = whole and meets(arm, PLAIN, FIRST_STAGE, FROM_THE_FIRST_STEP)
    return pair if fits and published.THRESHOLDS_2.get(pair) == thresholds else other


def control(arm: Arm, gnmr: Where, recovery_bits: int | None = None) -> published.Control:
    """Bits of the low path and whether GNMR controls it, as `gnmr` says; (None, True) under other control."""
    if arm.always is not None:
        return bits(arm.always), False
    fits = meets(arm, PLAIN, {"controller.alpha_init": OFF}, gnmr) and recovery_bits in (None, arm.recovery_bits)
    return (arm.low_bits if fits else None), True
