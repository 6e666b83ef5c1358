"""Divergence in low precision and its prevention: a small version of the student and teacher of arXiv 2506.20752.

    python benchmarks/divergence.py OUT.json search      every format, optimizer and learning rate, one seed each
    python benchmarks/divergence.py OUT.json survival    ten seeds of every arm in the setting `SURVIVAL`

A student of residual blocks, x + down(gelu(up(norm(x)))), learns a teacher of linears and GELU from Gaussian inputs,
with a fresh batch in every step. Its linears are attached (`gnmr.attach`). The gain and bias of a layer norm are cast
as the input of the forward GEMM that reads it, so they recover together with that GEMM.

A run has diverged if `LOST` steps in a row have a loss or gradient that is not finite. It has also diverged if the mean
squared error of its last tenth is above `FACTOR` times the lowest mean of any tenth. A step that is not finite is
skipped, as in `gnmr train`. OUT.json is written after each run, and the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.control.spec import NO_CAP
from gnmr.formats.cast import quantize
from gnmr.formats.recipes import Recipe
from gnmr.lab.rivals.transforms import StepContext, build_transform
from gnmr.lab.train.provenance import commit
from gnmr.names import GEMMS
from gnmr.records import output
from timing import header

FACTOR, LOST, TENTHS = 3.0, 10, 10
BATCH, WARMUP, NOISE = 64, 20, 0.005
"""Inputs per step, warmup steps of the learning rate, and standard deviation of the labels' noise (the paper's)."""
FORMATS = ("bf16", "mxfp8", "mxfp4", "sim_e2m1", "mxint3", "mxint2")


def integers(bits: int) -> dict[str, dict[str, str]]:
    """Return a recipe that is not built in: every operand in `bits`, with a power of two as scale of 32 elements."""
    operands = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
    return {gemm: dict.fromkeys(names, f"int{bits}/mx") for gemm, names in operands.items()}


@dataclass(frozen=True)
class Setting:
    """The training task, without its arm and seed."""

    low: str
    rate: float
    optimizer: str = "sgd"
    """sgd (momentum 0.9) or adam (0.9, 0.999)."""
    width: int = 32
    depth: int = 4
    steps: int = 150


@dataclass(frozen=True)
class Arm:
    """A measure against divergence."""

    pins: dict[str, list[str]] = field(default_factory=dict)
    """GEMMs that stay in 16 bits, by pattern of operators, after the fraction `after` of the run."""
    after: float = 0.0
    keeps_norms: bool = False
    """Whether layer norm's parameters are not cast."""
    control: dict[str, Any] = field(default_factory=dict)
    """Options of a controller, which moves operators to 16 bits; empty: no controller."""
    transform: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """A transform of the gradient and its options."""
    clip_norm: float | None = None


def pinned(*patterns: str, gemms: Sequence[str] = GEMMS, after: float = 0.0) -> Arm:
    """Return an arm that keeps these operators in 16 bits."""
    return Arm({pattern: [*gemms] for pattern in patterns}, after)


def ranked(signal: str, budget: float, *recovers: str) -> Arm:
    """Return an arm with a controller that fills the budget in every step, with these GEMMs of the operators or all."""
    options = {"signal": signal, "routing": "ranked", "budget": budget, "max_o": NO_CAP, "recovers": recovers or GEMMS}
    return Arm(control=options)


BOUNDS = {"never": Arm(), "always": pinned("*_proj")}
ARMS = {
    **BOUNDS,
    "layer norm's parameters": Arm(keeps_norms=True),
    "fprop": pinned("*_proj", gemms=["fprop"]),
    "dgrad, wgrad": pinned("*_proj", gemms=["dgrad", "wgrad"]),
    "first block": pinned("layers.0.*"),
    "last block": pinned("layers.3.*"),
    "first two blocks": pinned("layers.0.*", "layers.1.*"),
    "last two blocks": pinned("layers.2.*", "layers.3.*"),
    "GNMR, 4 of 8 operators": ranked("gnmr_delta", 0.5),
    "price, 4 of 8 operators": ranked("price", 0.5),
    "random, 4 of 8 operators": ranked("random", 0.5),
    "GNMR, fprop of 6": ranked("gnmr_delta", 0.25, "fprop"),
    "price, fprop of 6": ranked("price", 0.25, "fprop"),
    "random, fprop of 6": ranked("random", 0.25, "fprop"),
    "GNMR, thresholds": Arm(control={"signal": "gnmr_delta", "max_o": 4}),
    "fprop from a tenth on": pinned("*_proj", gemms=["fprop"], after=0.1),
    "fprop from a quarter on": pinned("*_proj", gemms=["fprop"], after=0.25),
    "fprop from the half on": pinned("*_proj", gemms=["fprop"], after=0.5),
    "clip 1": Arm(clip_norm=1.0),
    "GradientStabilizer": Arm(transform="gradient_stabilizer"),
    "SkipStep": Arm(transform="skip_step", options={"min_values": 10}),
}
"""A block is a quarter of the arithmetic. SkipStep begins after 10 values instead of 64, which would be too late."""


class Norm(nn.LayerNorm):
    """Layer norm whose gain and bias are cast as the input of `reader`'s forward GEMM; the gradient passes through."""

    keeps = False

    def __init__(self, width: int, reader: nn.Linear) -> None:
        super().__init__(width)
        self._reader = (reader,)  # not a submodule of this one

    def forward(self, x: Tensor) -> Tensor:
        path = getattr(self._reader[0], "path", None)
        cast = path.fprop.input if isinstance(path, Recipe) and not self.keeps else None
        if cast is None:
            return super().forward(x)
        gain, bias = (p + (quantize(p.detach()[None], cast, 1)[0][0] - p).detach() for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, gain, bias, self.eps)


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), with four times the width inside."""

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
        self.layers = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def teacher(width: int, depth: int) -> nn.Sequential:
    """Return alternating linears and GELU, as in the paper's code: no residual, no norm, never trained."""
    layers = list[nn.Module]()
    for _ in range(depth):
        layers += [nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, width, bias=False)]
    return nn.Sequential(*layers).requires_grad_(False)


def lost(errors: Sequence[float]) -> bool:
    """Return True if a run whose last steps are all not finite ends here."""
    return len(errors) >= LOST and not any(map(math.isfinite, errors[-LOST:]))


def outcome(errors: Sequence[float], steps: int) -> dict[str, Any]:
    """Return the record of a run of `steps` steps with these errors, inf where a step was not finite."""
    length = max(1, steps // TENTHS)
    tenths = [float(np.mean(errors[i : i + length])) for i in range(0, len(errors), length)]
    return {
        "diverged": len(errors) < steps or not tenths[-1] <= FACTOR * min(tenths),
        "errors": [float(f"{x:.5g}") if math.isfinite(x) else None for x in tenths],
        "steps": len(errors),
        "not_finite": next((i for i, x in enumerate(errors, 1) if x == math.inf), None),
    }


def attached(student: Student, setting: Setting, arm: Arm, seed: int, *, pins: bool = True) -> gnmr.Router:
    """Give the student's linears two paths and return their router."""
    recipes = {f"mxint{bits}": integers(bits) for bits in (2, 3) if setting.low == f"mxint{bits}"}
    return gnmr.attach(
        student,
        low=setting.low,
        recovery="bf16" if arm.control else None,
        recipes=recipes,
        pins=arm.pins if pins else {},
        steps=setting.steps,
        seed=seed,
        **arm.control,
    )


def trained(setting: Setting, arm: Arm, seed: int) -> dict[str, Any]:
    """Train a student and return its outcome. `seed` determines teacher, student, data and a random signal."""
    torch.manual_seed(seed)
    taught, student = teacher(setting.width, setting.depth), Student(setting.width, setting.depth)
    for layer in student.layers:
        assert isinstance(layer, Block)
        layer.norm.keeps = arm.keeps_norms
    controller = attached(student, setting, arm, seed, pins=not arm.after)
    parameters, errors, spent = [*student.parameters()], list[float](), list[float]()
    if setting.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=setting.rate, betas=(0.9, 0.999))
    else:
        optimizer = torch.optim.SGD(parameters, lr=setting.rate, momentum=0.9)
    transform = build_transform(arm.transform, arm.options, student.named_parameters())
    draws = torch.Generator().manual_seed(seed)
    for step in range(1, setting.steps + 1):
        if arm.after and step == round(arm.after * setting.steps) + 1:
            controller.detach()
            controller = attached(student, setting, arm, seed)
        x = torch.randn(BATCH, setting.width, generator=draws)
        y = taught(x) + NOISE * torch.randn(x.shape, generator=draws)
        loss = (student(x) - y).square().sum(dim=1).mean() / 2
        loss.backward()
        spent.append(controller.converted.cost.spent()[0])
        controller.step()
        norm = torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm()
        context = StepContext(step, loss, norm, ~(loss.isfinite() & norm.isfinite()), optimizer)
        if arm.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, arm.clip_norm)
        skips = None if transform is None else transform(context)
        if not (context.nonfinite or (skips is not None and skips)):
            for group in optimizer.param_groups:
                group["lr"] = setting.rate * min(1.0, step / WARMUP)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        errors.append(math.inf if context.nonfinite else float(loss))
        if lost(errors):
            break
    return {**outcome(errors, setting.steps), "spent": round(float(np.mean(spent)), 4)}


SURVIVAL = Setting("mxint2", 0.05, steps=120)
RATES = {"adam": (0.003, 0.03, 0.1), "sgd": (0.03, 0.06, 0.09)}
PARTS = {
    "search": [(Setting(low, rate, name), "never", 0) for name in RATES for rate in RATES[name] for low in FORMATS],
    "survival": [
        (SURVIVAL, arm, seed)
        for arms in (BOUNDS, [arm for arm in ARMS if arm not in BOUNDS])  # the positive control comes first
        for seed in range(10)
        for arm in arms
    ],
}


def main() -> None:
    """Run the arms that OUT.json lacks and write the file after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT.json", type=Path)
    parser.add_argument("part", choices=PARTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # attach warns of paths that diverge, which this script looks for
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    known = [row["run"] for row in rows]
    for setting, arm, seed in PARTS[asked.part]:
        run = {**asdict(setting), "arm": arm, "seed": seed}
        if run not in known:
            rows.append({"run": run, **trained(setting, ARMS[arm], seed), "commit": commit()})
            print(json.dumps(rows[-1]), flush=True)
            output.write_json(asked.out, header() | {"rows": rows}, str(asked.out))


if __name__ == "__main__":
    main()
