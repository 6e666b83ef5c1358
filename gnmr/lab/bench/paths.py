"""What the paths cost: saved activations of few bits in time and bytes, recipes, switching between recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gnmr.control import NO_CAP
from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.steps import compare, same_step
from gnmr.lab.bench.timing import alternate, clock_of
from gnmr.lab.train.build import assemble
from gnmr.precision import RECIPES
from gnmr.precision.recipes import described

REFERENCE = "bf16"
# Format: the most that time and bytes should be against 16-bit.
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "int4": (1.25, 0.28),
    "int8": (None, 0.53),
    "e2m1": (None, 0.28),
    "e4m3": (None, 0.53),
}
SIMULATED, SWITCHING = 2.0, 1.02
"""The most that a simulated step and switching should cost."""
SWITCHED = {"6/8": ("sim_e3m2", "fp8_hybrid"), "8/16": ("fp8_hybrid", "bf16")}
"""Preset: its low and its recovery path (conf/preset)."""


def saved(setting: Setting) -> list[Figure]:
    """Whole training steps of static runs that differ in the format alone."""
    found = compare(setting, "saved: steps with", {fmt: setting.static(fmt) for fmt in (REFERENCE, *TARGETS)})
    times, sizes = [], []
    whole = found.last[REFERENCE].saved_bytes
    for fmt, (most_time, most_bytes) in TARGETS.items():
        times.append(
            median(f"step with {fmt} over {REFERENCE}", found.ratios[fmt], "x", target=most_time, interval=True)
        )
        own = found.last[fmt].saved_bytes
        if own is not None and whole:
            note = f"{own / 2**20:.2f} of {whole / 2**20:.2f} MiB, read from the autograd graph"
            sizes.append(Figure(f"bytes with {fmt} over {REFERENCE}", own / whole, "x", target=most_bytes, note=note))
    return [*times, *sizes, median(f"step with {REFERENCE}", found.seconds, "s")]


def recipes(setting: Setting) -> list[Figure]:
    """Whole steps of static runs that differ in the recipe alone; steps that switch every block."""
    return [*_static(setting), *(_switching(setting, preset) for preset in SWITCHED)]


def _static(setting: Setting) -> list[Figure]:
    """Steps under every recipe whose tiles divide the widths of the model."""
    model = setting.config.model
    keys = model.hidden_size // model.num_heads * (model.num_kv_heads or model.num_heads)
    widths = tuple(dict.fromkeys((model.hidden_size, keys, model.intermediate_size)))
    names = [name for name, one in RECIPES.items() if all(w % d == 0 for d in one.divisors() for w in widths)]
    if left_out := [name for name in RECIPES if name not in names]:
        setting.say(f"left out, their tiles do not divide {' and '.join(map(str, widths))}: {', '.join(left_out)}")
    names = [REFERENCE, *(name for name in names if name != REFERENCE)]
    found = compare(setting, "recipe: steps under", {name: setting.static(name) for name in names})
    return [
        *(
            median(
                f"step under {name}",
                ratio,
                "x",
                target=SIMULATED,
                note=described(found.parts[name].converted.low),
                interval=True,
            )
            for name, ratio in found.ratios.items()
        ),
        median(f"step under {REFERENCE}", found.seconds, "s"),
    ]


def _switching(setting: Setting, preset: str) -> Figure:
    """A step on each path, before each of which every block changes its path, against a step of a run that stays on the
    low and one of a run that stays on the recovery path."""
    low, recovery = SWITCHED[preset]
    static = setting.static(low)
    paths = replace(static.precision, name=f"{low}_{recovery}", recovery=recovery, unit="block")
    # Its controller leaves the paths alone.
    controller = replace(static.controller, signal="always_low", options={}, max_o=NO_CAP)
    config = replace(static, precision=paths, controller=controller)
    arms = {name: assemble(config, Path(), setting.say) for name in ("switching", "low", "recovery")}
    steps = {name: same_step(parts) for name, parts in arms.items()}

    def switch(arm: str, recovering: bool) -> None:
        for group in arms[arm].converted.units:
            group.switch(recovering)

    def switching() -> None:
        for recovering in (True, False):
            switch("switching", recovering)
            steps["switching"]()

    switch("recovery", True)
    clock = clock_of(arms["low"].device, setting.clock)
    rounds = setting.rounds(f"recipe: steps that switch every block, {preset}", 30, warm_up=3)
    seconds = alternate({**steps, "switching": switching}, rounds, clock)
    note = f"{len(arms['low'].converted.units)} blocks, {low} and {recovery} in turn, over the mean of staying on each"
    ratio = seconds["switching"] / (seconds["low"] + seconds["recovery"])
    return median(f"step that switches every block, {preset}", ratio, "x", target=SWITCHING, note=note, interval=True)


def check_recipes(setting: Setting) -> None:
    """UserError where the setting has nothing to measure."""
    if setting.config.precision.site != "saved" or setting.config.precision.rounding != "nearest":
        raise UserError("bench paths: recipes need precision.site=saved and precision.rounding=nearest")


PARTS = {"saved": saved, "recipes": recipes}
CHECKS = {"recipes": check_recipes}
