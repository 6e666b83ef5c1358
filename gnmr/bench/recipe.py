"""What recipes, mixtures of experts and switching cost in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.steps import same_step
from gnmr.bench.timing import alternate, clock_of
from gnmr.config import ExpertsConfig, SignalConfig
from gnmr.errors import UserError
from gnmr.models.layers import GELUMLP
from gnmr.models.moe import MoEMLP
from gnmr.paths import RECIPES
from gnmr.paths.plan import described
from gnmr.training.parts import assemble, device_of

REFERENCE = "bf16"
SIMULATED, DISPATCH, SWITCHING = 2.0, 1.3, 1.02
"""The most that a simulated step, a mixture and switching should cost."""
SWITCHED = "fp8_hybrid"


def recipe(setting: Setting) -> list[Figure]:
    """Whole steps of static runs that differ in the recipe alone; a mixture by itself; steps that switch every unit."""
    return [*_recipes(setting), *_dispatch(setting), *_switching(setting)]


def _recipes(setting: Setting) -> list[Figure]:
    """Steps under every recipe whose tiles divide the widths of the model, taking turns."""
    model = setting.config.model
    keys = model.hidden_size // model.num_heads * (model.num_kv_heads or model.num_heads)
    widths = tuple(dict.fromkeys((model.hidden_size, keys, model.intermediate_size)))
    names = [name for name, one in RECIPES.items() if all(w % d == 0 for d in one.divisors() for w in widths)]
    if left_out := [name for name in RECIPES if name not in names]:
        setting.say(f"left out, their tiles do not divide {' and '.join(map(str, widths))}: {', '.join(left_out)}")
    arms = {name: assemble(setting.static(name), Path(), setting.say) for name in names}
    clock = clock_of(arms[REFERENCE].device, setting.clock)
    rounds = setting.rounds(f"recipe: steps under {', '.join(names)}", 15, warm_up=2)
    seconds = alternate({name: same_step(parts) for name, parts in arms.items()}, rounds, clock)
    reference = seconds.pop(REFERENCE)
    ratios = {name: own / reference for name, own in seconds.items()}
    return [
        *(
            median(f"step under {name}", ratio, "x", SIMULATED, described(arms[name].plan.low), interval=True)
            for name, ratio in ratios.items()
        ),
        median(f"step under {REFERENCE}", reference, "s"),
    ]


def _dispatch(setting: Setting) -> list[Figure]:
    """Forward and backward of one mixture against a dense MLP with as many multiplications: k experts wide."""
    config = setting.config.model
    if config.name != "moe":
        config = replace(
            config, name="moe", num_kv_heads=None, tied_head=False, experts=ExpertsConfig(number=8, top_k=2)
        )
    config = replace(config, experts=replace(config.experts, routing_seed=None))  # which would need tokens
    dense = replace(config, intermediate_size=config.intermediate_size * config.experts.top_k)
    training, device = setting.config.training, device_of(setting.config.training.device)
    torch.manual_seed(training.seed)
    modules = {"mixture": MoEMLP(config, 0), "dense": GELUMLP(dense)}
    x_BTD = torch.randn(training.batch_size, training.seq_len, config.hidden_size)
    x_BTD = x_BTD.to(device, getattr(torch, training.dtype)).requires_grad_()

    def run(module: torch.nn.Module) -> Callable[[], None]:
        module.to(device, x_BTD.dtype)

        def once() -> None:
            result = module(x_BTD)
            y_BTD: Tensor = result[0] if isinstance(result, tuple) else result
            y_BTD.sum().backward()
            module.zero_grad(set_to_none=True)
            x_BTD.grad = None

        return once

    experts = f"{config.experts.number} experts, top-{config.experts.top_k}"
    rounds = setting.rounds(f"recipe: a mixture of {experts}, and a dense MLP", 30, warm_up=3)
    seconds = alternate(
        {name: run(module) for name, module in modules.items()}, rounds, clock_of(device, setting.clock)
    )
    note = f"{experts} of width {config.intermediate_size}, {training.batch_size * training.seq_len} tokens"
    ratio = seconds["mixture"] / seconds["dense"]
    return [
        median("mixture over its dense arithmetic", ratio, "x", DISPATCH, note, interval=True),
        median("dense MLP, forward and backward", seconds["dense"], "s"),
    ]


def _switching(setting: Setting) -> list[Figure]:
    """Steps before each of which every unit changes its path against steps that change none.

    Both paths of both arms are one recipe, so that what differs is the switching.
    """
    static = setting.static(SWITCHED)
    controller = replace(static.controller, signal=SignalConfig("always_low"))  # it leaves the paths alone
    config = replace(static, paths=replace(static.paths, recovery=SWITCHED), controller=controller)
    arms = {name: assemble(config, Path(), setting.say) for name in ("switching", "still")}
    now = False
    steps = {name: same_step(parts) for name, parts in arms.items()}

    def switching() -> None:
        nonlocal now
        now = not now
        for group in arms["switching"].plan.groups:
            group.switch(now)
        steps["switching"]()

    clock = clock_of(arms["still"].device, setting.clock)
    rounds = setting.rounds("recipe: steps that switch every unit", 30, warm_up=3)
    seconds = alternate({"switching": switching, "still": steps["still"]}, rounds, clock)
    note = f"{len(arms['still'].plan.groups)} units, both paths {SWITCHED}"
    ratio = seconds["switching"] / seconds["still"]
    return [median("step that switches every unit", ratio, "x", SWITCHING, note, interval=True)]


def check_recipe(setting: Setting) -> None:
    """UserError where the setting has nothing to measure."""
    if setting.config.paths.site != "saved" or setting.config.paths.rounding != "nearest":
        raise UserError("bench recipe: recipes need paths.site=saved and paths.rounding=nearest")
