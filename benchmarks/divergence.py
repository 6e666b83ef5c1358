"""Where does low precision diverge, and what prevents it: the student and teacher of arXiv 2506.20752, made small.

    python benchmarks/divergence.py OUT.json search      every format, optimizer and learning rate, one seed each
    python benchmarks/divergence.py OUT.json survival    ten seeds of every arm in the setting `SURVIVAL`

A student of residual blocks, x + down(gelu(up(norm(x)))), learns a teacher of linears and GELU from Gaussian inputs,
with a fresh batch in every step. Its linears are attached (`gnmr.attach`). The gain and bias of a layer norm are cast
as the input of the forward GEMM that reads it, so they recover together with that GEMM.

A run has diverged if `LOST` steps in a row have a loss or gradient that is not finite, or if the mean squared error of
its last tenth is above `FACTOR` times the lowest mean of any tenth. A step that is not finite is skipped, as in
`gnmr train`. OUT.json is written after each run, and the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.control.spec import NO_CAP
from gnmr.lab.train.provenance import commit
from gnmr.lab.train.transforms import StepContext, build_transform
from gnmr.names import GEMMS
from gnmr.precision.cast import quantize
from gnmr.precision.recipes import Recipe
from gnmr.records import output
from timing import header

FACTOR, LOST, TENTHS = 3.0, 10, 10
BATCH, WARMUP, NOISE = 64, 20, 0.005
"""Inputs of a step, steps over which the rate rises, and standard deviation of the labels' noise (the paper's)."""


def alike(cast: str) -> dict[str, dict[str, str]]:
    """A recipe that casts every operand of every GEMM so."""
    return {
        "fprop": {"input": cast, "weight": cast},
        "dgrad": {"grad_output": cast, "weight": cast},
        "wgrad": {"grad_output": cast, "input": cast},
    }


OWN = {"mxint3": alike("int3/mx"), "mxint2": alike("int2/mx")}
"""Recipes that the package does not name: 3 and 2 bits under a power of two for 32 elements."""
FORMATS = ("bf16", "mxfp8", "mxfp4", "sim_e2m1", "mxint3", "mxint2")


@dataclass(frozen=True)
class Setting:
    """What is trained, without its arm and seed."""

    low: str
    rate: float
    optimizer: str = "sgd"
    """sgd (momentum 0.9) or adam (0.9, 0.999)."""
    width: int = 32
    depth: int = 4
    steps: int = 150


@dataclass(frozen=True)
class Arm:
    """What is done against divergence."""

    pins: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """GEMMs that are always in 16 bits, by pattern of operators."""
    keeps_norms: bool = False
    """Layer norm's parameters are not cast."""
    control: tuple[tuple[str, Any], ...] = ()
    """Words of a controller, which moves operators to 16 bits; none: there is none."""
    late: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pins from step `after` on."""
    after: float = 0.0
    """As a share of the run."""
    transform: tuple[str, tuple[tuple[str, Any], ...]] | None = None
    """Of the gradient, with its options."""
    clip_norm: float | None = None


def pinned(*patterns: str, gemms: Sequence[str] = GEMMS) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Pins of these operators."""
    return tuple((pattern, tuple(gemms)) for pattern in patterns)


def ranked(signal: str, budget: float, *recovers: str) -> Arm:
    """A controller that fills the budget anew in every step, with these GEMMs of the operators or with all."""
    words = {"signal": signal, "routing": "ranked", "budget": budget, "max_o": NO_CAP, "recovers": recovers or GEMMS}
    return Arm(control=tuple(words.items()))


FPROP = pinned("*_proj", gemms=["fprop"])
ARMS = {
    "never": Arm(),
    "always": Arm(pins=pinned("*_proj")),
    "layer norm's parameters": Arm(keeps_norms=True),
    "fprop": Arm(pins=FPROP),
    "dgrad, wgrad": Arm(pins=pinned("*_proj", gemms=["dgrad", "wgrad"])),
    "first block": Arm(pins=pinned("layers.0.*")),
    "last block": Arm(pins=pinned("layers.3.*")),
    "first two blocks": Arm(pins=pinned("layers.0.*", "layers.1.*")),
    "last two blocks": Arm(pins=pinned("layers.2.*", "layers.3.*")),
    "GNMR, 4 of 8 operators": ranked("gnmr_delta", 0.5),
    "price, 4 of 8 operators": ranked("price", 0.5),
    "random, 4 of 8 operators": ranked("random", 0.5),
    "GNMR, fprop of 6": ranked("gnmr_delta", 0.25, "fprop"),
    "price, fprop of 6": ranked("price", 0.25, "fprop"),
    "random, fprop of 6": ranked("random", 0.25, "fprop"),
    "GNMR, thresholds": Arm(control=(("signal", "gnmr_delta"), ("max_o", 4))),
    "fprop from a tenth on": Arm(late=FPROP, after=0.1),
    "fprop from a quarter on": Arm(late=FPROP, after=0.25),
    "fprop from the half on": Arm(late=FPROP, after=0.5),
    "clip 1": Arm(clip_norm=1.0),
    "GradientStabilizer": Arm(transform=("gradient_stabilizer", ())),
    "SkipStep": Arm(transform=("skip_step", (("min_values", 10),))),
}
"""A block is a quarter of the arithmetic. SkipStep begins after 10 values and not 64, or it would come too late."""
BOUNDS = ("never", "always")


class Norm(nn.LayerNorm):
    """Layer norm whose gain and bias are cast as the input of `reader`'s forward GEMM; the gradient passes through."""

    keeps = False

    def __init__(self, width: int, reader: nn.Linear) -> None:
        super().__init__(width)
        self._reader = (reader,)  # no part of this module

    def forward(self, x: Tensor) -> Tensor:
        path = getattr(self._reader[0], "path", None)
        cast = path.fprop.input if isinstance(path, Recipe) and not self.keeps else None
        if cast is None:
            return super().forward(x)
        gain, bias = (p + (quantize(p.detach()[None], cast, 1)[0][0] - p).detach() for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, gain, bias, self.eps)


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width)
        self.norm = Norm(width, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.gelu(self.up_proj(self.norm(x))))


class Student(nn.Module):
    """Residual blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def teacher(width: int, depth: int) -> nn.Sequential:
    """Linears and GELU in turn, as the paper's code has them: no residual, no norm, never trained."""
    layers = list[nn.Module]()
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, width, bias=False)]
    return nn.Sequential(*layers).requires_grad_(False)


@dataclass
class Course:
    """The error of a run, step by step, and what it spent; inf where a step was not finite."""

    errors: list[float]
    spent: list[float]
    steps: int
    """That it was to have."""

    def add(self, error: float, spent: float) -> bool:
        """Whether it goes on."""
        self.errors.append(error if math.isfinite(error) else math.inf)
        self.spent.append(spent)
        return len(self.errors) < LOST or any(map(math.isfinite, self.errors[-LOST:]))

    def tenths(self) -> list[float]:
        """Mean errors of the tenths that were begun."""
        length = max(1, self.steps // TENTHS)
        return [float(np.mean(self.errors[i : i + length])) for i in range(0, len(self.errors), length)]

    def row(self) -> dict[str, Any]:
        """As recorded; an error that is not finite is null."""
        tenths = self.tenths()
        ended = len(self.errors) < self.steps
        diverged = ended or not tenths[-1] <= FACTOR * min(tenths)
        told = [float(f"{x:.5g}") if math.isfinite(x) else None for x in tenths]
        ends = next((i for i, x in enumerate(self.errors, 1) if x == math.inf), None)
        spent = round(float(np.mean(self.spent)), 4)
        return {"diverged": diverged, "errors": told, "steps": len(self.errors), "not_finite": ends, "spent": spent}


def optimizer_of(student: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """As the setting names it."""
    if setting.optimizer == "adam":
        return torch.optim.Adam(student.parameters(), lr=setting.rate, betas=(0.9, 0.999))
    return torch.optim.SGD(student.parameters(), lr=setting.rate, momentum=0.9)


def attached(student: Student, setting: Setting, arm: Arm, seed: int, pins: Any = None) -> gnmr.Router:
    """The student's linears with two paths, and what routes them."""
    recipes = {setting.low: OWN[setting.low]} if setting.low in OWN else {}
    words = dict(arm.control) | {"recovery": "bf16" if arm.control else None}
    pins = {name: [*gemms] for name, gemms in (arm.pins if pins is None else pins)}
    return gnmr.attach(student, low=setting.low, recipes=recipes, pins=pins, steps=setting.steps, seed=seed, **words)


def trained(setting: Setting, arm: Arm, seed: int) -> Course:
    """One student, from its first step on. Seeds are of the teacher, the student, the data and a random signal."""
    torch.manual_seed(seed)
    taught, student = teacher(setting.width, setting.depth), Student(setting.width, setting.depth)
    for layer in student.layers:
        assert isinstance(layer, Block)
        layer.norm.keeps = arm.keeps_norms
    controller = attached(student, setting, arm, seed)
    optimizer, course = optimizer_of(student, setting), Course([], [], setting.steps)
    parameters = [*student.parameters()]
    name, options = arm.transform or (None, ())
    transform = build_transform(name, dict(options), student.named_parameters())
    draws = torch.Generator().manual_seed(seed)
    for step in range(1, setting.steps + 1):
        if arm.late and step == round(arm.after * setting.steps) + 1:
            controller.detach()
            controller = attached(student, setting, arm, seed, arm.late)
        x = torch.randn(BATCH, setting.width, generator=draws)
        y = taught(x) + NOISE * torch.randn(x.shape, generator=draws)
        loss = (student(x) - y).square().sum(dim=1).mean() / 2
        loss.backward()
        spent = controller.converted.cost.spent()[0]
        controller.step()
        norm = torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm()
        context = StepContext(step, loss, norm, ~(loss.isfinite() & norm.isfinite()), optimizer)
        if arm.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, arm.clip_norm)
        asked = None if transform is None else transform(context)
        if not (context.nonfinite or (asked is not None and asked)):
            for group in optimizer.param_groups:
                group["lr"] = setting.rate * min(1.0, step / WARMUP)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not course.add(math.inf if context.nonfinite else float(loss), spent):
            break
    return course


SEARCH = [Setting(low, rate, "adam") for rate in (0.003, 0.03, 0.1) for low in FORMATS]
SEARCH += [Setting(low, rate) for rate in (0.03, 0.06, 0.09) for low in FORMATS]
SURVIVAL = Setting("mxint2", 0.05, steps=120)
SEEDS = range(10)


def work(part: str) -> Iterator[tuple[Setting, str, int]]:
    """Yield (setting, arm, seed) of each run; of `survival` the positive control, never against always, comes first."""
    if part == "search":
        yield from ((one, "never", 0) for one in SEARCH)
    else:
        others = [name for name in ARMS if name not in BOUNDS]
        yield from ((SURVIVAL, name, seed) for names in (BOUNDS, others) for seed in SEEDS for name in names)


def main() -> None:
    """Run what is missing in OUT.json and write the file after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT.json", type=Path)
    parser.add_argument("part", choices=["search", "survival"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # attach warns of paths that diverge, which this script looks for
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    known = [row["run"] for row in rows]
    for setting, arm, seed in work(asked.part):
        what = {**asdict(setting), "arm": arm, "seed": seed}
        if what in known:
            continue
        row = {"run": what, **trained(setting, ARMS[arm], seed).row(), "commit": commit()}
        rows.append(row)
        print(f"{json.dumps(what)}: {json.dumps(row['errors'])} {'DIVERGED' * row['diverged']}", flush=True)
        output.write_json(asked.out, header() | {"rows": rows}, str(asked.out))


if __name__ == "__main__":
    main()
