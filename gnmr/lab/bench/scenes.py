"""Scenes of `gnmr bench spend`: a low path, and the arms that are tried on it in forks of a base.

lasting      4-bit paths, whose error is there in every step: pins of the base, and controllers
passing      an FP8 path that costs next to nothing, of which one operator breaks for 20 of 40 steps: another one
             in every block, 1.8 % of the operator-steps
table11      the paper's table 11: all signals at one number of units, a new set in every step, and some held
regimes      further low paths, fine and coarse, each with the few arms that say who gains there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gnmr.doctor.knapsack import GUESSES
from gnmr.names import GEMMS

EACH, HELD = ", each step", ", held"
"""Behind a controller's name: it chooses anew in every step, or every `HOLD` steps."""
HOLD = 20
BOUNDS = {"never": 0.0, "always": 1.0}
PRICE = ("signal=price", "+options.every=10")
"""Of the runs on record, which are older than today's default of `every`."""
WHOLE = {"fprop": 1 / 3, "dgrad": 1 / 3, "wgrad": 1 / 3, "dgrad, wgrad": 2 / 3}
"""One or two GEMMs of all operators, and their budget; of recipes alone."""


@dataclass(frozen=True)
class Scene:
    """A low path and the arms that are tried on it."""

    low: str
    budgets: tuple[float, ...] = (0.025, 0.05, 0.075, 0.10, 0.15, 0.25)
    """Shares of the GEMMs' arithmetic; with `units` what is told of them."""
    recovers: tuple[str, ...] = ("fprop",)
    """GEMMs of an operator that a budget buys."""
    pins: tuple[str, ...] = ("price", "gradient norm", "update norm", "gap", "MSE")
    """Scores of the base."""
    guesses: tuple[str, ...] = GUESSES
    controllers: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"GNMR": ("signal=gnmr_delta",), "price": PRICE}
    )
    """Words for `controller.` by name."""
    held: tuple[str, ...] = ()
    """Controllers that are tried with a set that holds for `HOLD` steps too."""
    whole: bool = True
    """Whether single GEMMs of all operators are tried too."""
    stress: tuple[str, ...] = ()
    """Words for `stress.`; hits one operator, another one in every block."""
    words: tuple[str, ...] = ()
    """Further words of the config, for all arms."""
    units: int | None = None
    """Units that a controller promotes in every step, by risk alone, in place of a budget by risk per cost."""
    ours: str = "price"
    """What the others are tested against."""

    def arms(self) -> list[tuple[str, float]]:
        """(name, budget) of each, the bounds first."""
        anew = [name + EACH for name in self.controllers]
        each = [*self.pins, *self.guesses, *anew, *(name + HELD for name in self.held)]
        fixed = BOUNDS | (WHOLE if self.whole else {})
        return [*fixed.items(), *((arm, budget) for budget in self.budgets for arm in each)]

    def control(self, arm: str) -> list[str] | None:
        """The words for `controller.` of an arm that is a controller."""
        name, hold = (arm.removesuffix(HELD), [f"hold={HOLD}"]) if arm.endswith(HELD) else (arm.removesuffix(EACH), [])
        if name == arm or name not in self.controllers:
            return None
        return [*self.controllers[name], *hold]


_FEW = (0.05, 0.10, 0.25)
"""Budgets of paths whose forks cost more than E2M1's."""
LASTING = {
    "sim_e2m1": Scene("sim_e2m1"),
    "nvfp4": Scene("nvfp4", budgets=(0.10,)),
    "nvfp4_curve": Scene(  # the arms of a figure alone: a gap of 0.03 nats wants blocks rather than arms
        "nvfp4",
        budgets=_FEW,
        pins=("price", "gap", "MSE"),
        guesses=("random",),
        controllers={"GNMR": ("signal=gnmr_delta",)},
        whole=False,
    ),
    "int4": Scene("int4", budgets=_FEW, recovers=GEMMS, whole=False),
}
PASSING = {
    "broken": Scene(
        "fp8_hybrid",
        budgets=(0.025, 0.05, 0.10),
        recovers=("fprop", "wgrad"),  # those that read the input, which breaks
        pins=("price",),
        controllers={
            "price": ("signal=pin_excess", "+options.every=1"),
            "gap": ("signal=gap",),
            "MSE": ("signal=mse",),
            "gradient norm": ("signal=grad_norm",),
            "update norm": ("signal=update_norm",),
            "GNMR": ("signal=gnmr_delta",),
            "random": ("signal=random",),
        },
        whole=False,
        stress=("kind=scale_down", "magnitude=64", "windows=[[21,20]]"),
        ours="price" + EACH,
    )
}
SIGNALS = {
    "random": ("signal=random",),
    "price": PRICE,
    "GNMR": ("signal=gnmr_delta",),
    "gap": ("signal=gap",),
    "MSE": ("signal=mse",),
    "gradient norm": ("signal=grad_norm",),
    "update norm": ("signal=update_norm",),
    "GNMR alone": ("signal=gnmr",),
    "dGNMR": ("signal=delta_gnmr",),
    "EMA ratio": ("signal=ema_ratio",),
    "z-score": ("signal=zscore",),
    "underflow": ("signal=underflow",),
    "gradient to noise": ("signal=grad_to_noise",),
    "spike share": ("signal=spike_share",),
    "Jacobian": ("signal=jacobian",),
    "gap exact": ("signal=gap_exact",),
    "gap relative": ("signal=gap", "+options.variant=relative"),
    "gap per byte": ("signal=gap", "+options.variant=per_byte"),
    "gap times GNMR": ("signal=gap", "+options.variant=times_gnmr"),
    "oracle": ("signal=oracle",),
    "static k": ("signal=static_k",),
    "round robin": ("signal=round_robin",),
    "first": ("signal=first_last", "+options.last=0"),
    "first last": ("signal=first_last",),
}
"""Those of conf/sweep/paper/table11.yaml and the price; not gsnr, which needs micro-batches, and a base has none."""
# "price, 8 %": four of the smallest units, the least that an arm of four units can spend of the arithmetic.
TABLE11 = {
    "table11": Scene(
        "int4",
        budgets=(1 / 7,),  # four of 28 units
        recovers=GEMMS,
        pins=(),
        guesses=(),
        controllers=SIGNALS | {"price, 8 %": (*PRICE, "budget=0.0817", "max_o=null")},
        held=("random", "price", "GNMR", "gap", "MSE", "gradient norm", "update norm"),
        whole=False,
        words=("precision.recovery=int8",),
        units=4,
        ours="random" + EACH,
    )
}
_REGIME = Scene(
    "",
    budgets=(0.10,),
    pins=("price", "MSE"),
    guesses=("random",),
    controllers={name: SIGNALS[name] for name in ("GNMR", "price", "MSE", "random")},
    whole=False,
    ours="random",
)
_SAVED = {"recovers": GEMMS, "words": ("precision.site=saved",), "pins": ("gap", "MSE")}
"""What is saved alone is in few bits: fprop is exact, and has no price."""
REGIMES = {
    f"regime_{name}": replace(_REGIME, low=low, **more)
    for name, low, more in (
        ("mxfp4", "mxfp4", {}),
        ("sim_int4", "sim_int4", {}),
        ("e3m2", "sim_e3m2", {}),
        ("fp8", "fp8_hybrid", {}),
        ("int8", "llm_int8", {}),
        ("int2", "int2", {"recovers": GEMMS}),
        ("int4_saved", "int4", _SAVED),
        ("int2_saved", "int2", _SAVED),
    )
}
QUICK = {
    "regime_quick": replace(
        REGIMES["regime_int2"],
        pins=("price",),
        controllers={name: SIGNALS[name] for name in ("GNMR", "price", "random")},
    )
}
"""Of the shipped base, whose gap under 2 bits shows in minutes."""
SCENES: dict[str, Scene] = LASTING | PASSING | TABLE11 | REGIMES | QUICK
