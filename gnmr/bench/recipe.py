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
    """Forward and backward of one mixture against a dense MLP with as many multiplications (k experts wide), and
    against its own experts on rows that lie sorted already: what is left then is the dispatch."""
    config = setting.config.model
    if config.name != "moe":
        config = replace(
            config, name="moe", num_kv_heads=None, tied_head=False, experts=ExpertsConfig(number=8, top_k=2)
        )
    config = replace(config, experts=replace(config.experts, routing_seed=None))  # which would need tokens
    dense = replace(config, intermediate_size=config.intermediate_size * config.experts.top_k)
    training, device = setting.config.training, device_of(setting.config.training.device)
    torch.manual_seed(training.seed)
    dtype = getattr(torch, training.dtype)
    mixture, mlp = MoEMLP(config, 0).to(device, dtype), GELUMLP(dense).to(device, dtype)
    x_BTD = torch.randn(training.batch_size, training.seq_len, config.hidden_size).to(device, dtype).requires_grad_()
    x_ND = x_BTD.detach().flatten(0, 1)
    with torch.no_grad():
        lengths = mixture.route(x_ND, None)[2].tolist()
    rows_RD = x_ND.repeat(config.experts.top_k, 1).requires_grad_()

    def experts() -> Tensor:
        pairs = zip(mixture.experts, rows_RD.split(lengths), strict=True)
        return torch.cat([expert(rows) for expert, rows in pairs])

    def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def once() -> None:
            forward().sum().backward()
            for module in (mixture, mlp):
                module.zero_grad(set_to_none=True)
            x_BTD.grad = rows_RD.grad = None

        return once

    arms = {"mixture": step(lambda: mixture(x_BTD)[0]), "dense": step(lambda: mlp(x_BTD)), "experts": step(experts)}
    experts_are = f"{config.experts.number} experts, top-{config.experts.top_k}"
    rounds = setting.rounds(f"recipe: a mixture of {experts_are}, its experts alone, and a dense MLP", 30, warm_up=3)
    seconds = alternate(arms, rounds, clock_of(device, setting.clock))
    note = f"{experts_are} of width {config.intermediate_size}, {training.batch_size * training.seq_len} tokens"
    return [
        median(
            "mixture over its dense arithmetic",
            seconds["mixture"] / seconds["dense"],
            "x",
            DISPATCH,
            note,
            interval=True,
        ),
        median(
            "mixture over its experts alone", seconds["mixture"] / seconds["experts"], "x", note=note, interval=True
        ),
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
