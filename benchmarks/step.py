"""What the controller and the paths cost: ratios of training steps that take turns.

    python benchmarks/step.py OUT.json                                  all parts, some minutes
    python benchmarks/step.py OUT.json --only controller --rounds 40    one part
    python benchmarks/step.py OUT.json model.num_layers=2               overrides as for `gnmr train`

The parts:

    controller   a step under each signal over a step of the same converted model without a controller
    saved        a step with saved activations of few bits over BF16, and the ratio of the bytes that the graph keeps
    recipes      a step under each recipe whose tiles divide the model's widths over BF16

`--clock cpu training.threads=1` counts the CPU time of one thread, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gnmr.lab.config import Config
from gnmr.lab.config.compose import compose
from gnmr.lab.train.build import Parts, assemble, first_batch, train_step
from gnmr.lab.train.step import loss_of, objective_of
from gnmr.precision import RECIPES
from timing import alternate, clock_of, spread, write

SIGNALS = ("gnmr_delta", "price", "mse", "grad_norm", "oracle")
SAVED = ("int4", "int8", "e2m1", "e4m3")
Arm = Callable[[], object]


def static(config: Config, low: str) -> Config:
    """Return the config with every operator on `low` and nothing to recover to."""
    return replace(
        config,
        precision=replace(config.precision, name=low, low=low, recovery=None),
        controller=replace(config.controller, warmup_frac=0.0),
    )


def parts_of(config: Config) -> Parts:
    return assemble(config, Path(), print)


def controlled_step(parts: Parts) -> Arm:
    """Return the step of `gnmr train` on one batch, without records."""
    take_step, batch = train_step(parts), first_batch(parts)
    return lambda: take_step(batch, parts.config.optim.lr)


def bare_step(parts: Parts) -> Arm:
    """Return forward, loss, backward and AdamW on one batch."""
    batch = first_batch(parts)

    def step() -> None:
        losses = []
        for block in batch:
            loss = loss_of(parts.model, block)
            (objective_of(parts.model, loss) / len(batch)).backward()
            losses.append(loss.detach())
        parts.converted.end_step()
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        float(torch.stack(losses).mean())

    return step


def ratios(arms: Mapping[str, Arm], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of the first arm, and the ratio of every other arm to it."""
    found = alternate(arms, range(-2, asked.rounds), clock_of(torch.device("cpu"), asked.clock))
    first, *others = found
    rows = [{"arm": first, "unit": "s", **spread(found[first])}]
    return rows + [{"arm": name, "unit": f"x {first}", **spread(found[name] / found[first])} for name in others]


def controller(config: Config, asked: argparse.Namespace) -> list[dict[str, Any]]:
    arms = {"no controller": bare_step(parts_of(config))}
    for name in SIGNALS:
        own = replace(config, controller=replace(config.controller, signal=name, options={}))
        arms[name] = controlled_step(parts_of(own))
    return ratios(arms, asked)


def saved(config: Config, asked: argparse.Namespace) -> list[dict[str, Any]]:
    rows, arms, sizes = [], {}, {}
    for name in ("bf16", *SAVED):
        parts = parts_of(static(config, name))
        arms[name] = controlled_step(parts)
        result: Any = arms[name]()
        sizes[name] = result.saved_bytes
    for name in SAVED:
        rows.append({"arm": name, "unit": "x bytes of bf16", "value": sizes[name] / sizes["bf16"]})
    return ratios(arms, asked) + rows


def recipes(config: Config, asked: argparse.Namespace) -> list[dict[str, Any]]:
    model = config.model
    keys = model.hidden_size // model.num_heads * (model.num_kv_heads or model.num_heads)
    widths = (model.hidden_size, keys, model.intermediate_size)
    fit = [name for name, one in RECIPES.items() if all(w % d == 0 for d in one.divisors() for w in widths)]
    return ratios(
        {name: controlled_step(parts_of(static(config, name))) for name in dict.fromkeys(("bf16", *fit))}, asked
    )


PARTS = {"controller": controller, "saved": saved, "recipes": recipes}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", help="overrides of the config, as for gnmr train")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    asked = parser.parse_intermixed_args()
    config = compose(asked.overrides)
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    write(
        asked.out,
        [{"part": name} | row for name in PARTS if asked.only in (None, name) for row in PARTS[name](config, asked)],
    )


if __name__ == "__main__":
    main()
