"""Measure what the package costs on one CUDA GPU, in at most ten minutes (`make gpu-check`).

    python benchmarks/gpu.py OUT.json                         all sections
    python benchmarks/gpu.py OUT.json --only control,paths    some sections
    python benchmarks/gpu.py OUT.json --device cpu --tiny     a dry run of this script on small models

The sections:

    control    the step time with the controller off, monitoring and controlling; how often a step waits for the GPU
    paths      the step time and the peak memory of saved formats and recipes against BF16
    compiled   BF16 and FP8 steps at 1.3B under torch.compile, and the controller on them

Rows are written to OUT.json as soon as they are measured. `low` and `high` are the 95% bootstrap interval of a median.
The exit code is 1 if a case failed and 2 if there is no GPU. Whether casts, formats and kernels are right on a GPU is
tested by `pytest -m gpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.lab import models
from gnmr.lab.config import ModelConfig
from gnmr.precision import ConvertedModel, PathSpec, convert
from timing import alternate, clock_of, header, spread

SEQ = 256
SIZES = {"60m": (512, 1376, 8, 8), "350m": (1024, 2736, 24, 16), "1.3b": (2048, 5461, 24, 32)}
"""Hidden width, MLP width, layers and heads of the paper's LLaMA models (conf/sizes.yaml)."""


@dataclass
class Lab:
    """The device and the result file."""

    out: Path
    device: torch.device
    tiny: bool
    section: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def put(self, what: str, **row: Any) -> None:
        """Write one row to the result file and to the terminal."""
        told = (f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}"[:150].replace("\n", " ") for k, v in row.items())
        print(f"  {self.section}: {what} {' '.join(told)}", flush=True)
        self.rows.append({"section": self.section, "what": what, **row})
        self.out.write_text(json.dumps(header(self.device) | {"cuda": torch.version.cuda, "rows": self.rows}, indent=1))

    @contextlib.contextmanager
    def case(self, what: str, **labels: Any) -> Iterator[None]:
        """Record an exception as a row, so that the cases after this one still run.

        A backend that this device cannot run is `refused`, which is no error.
        """
        try:
            yield
        except Exception as error:
            refused = isinstance(error, ValueError) and str(error).startswith("backend=")
            self.put(what, **labels, **{"refused" if refused else "error": f"{type(error).__name__}: {error}"[:600]})

    def rounds(self, most: int, seconds: float) -> Iterator[int]:
        """Yield a warm-up round and up to `most` rounds: at least five, then for as long as `seconds` allow."""
        ends = time.monotonic() + seconds
        yield from range(-1, 1 if self.tiny else 5)
        yield from (number for number in range(5, 0 if self.tiny else most) if time.monotonic() < ends)

    def seconds(self, run: Callable[[], object], times: int = 1) -> float:
        """Return the mean seconds of `run`, the work that it left to the device included."""
        clock = clock_of(self.device)
        began = clock()
        for _ in range(times):
            run()
        return (clock() - began) / times

    def peak(self, run: Callable[[], object]) -> float | None:
        """Return the GiB that `run` allocated at its peak above what was allocated before."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def model(self, size: str, *, wide: bool = False) -> Any:
        """Build a LLaMA of the paper's size; `wide` rounds its MLP width up to a multiple of 128, as FP8 tiles need."""
        width, mlp, layers, heads = (128, 128, 2, 2) if self.tiny else SIZES[size]
        mlp = -(-mlp // 128) * 128 if wide else mlp
        config = ModelConfig(hidden_size=width, intermediate_size=mlp, num_layers=layers, num_heads=heads)
        with self.device:
            model = models.build(config, self.vocab, SEQ).to(torch.bfloat16)
        model.init_weights(torch.Generator(self.device).manual_seed(0))
        return model

    def random_tokens(self, blocks: int) -> Tensor:
        shape = (4, 33) if self.tiny else (blocks, SEQ + 1)
        return torch.randint(self.vocab, shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    @property
    def vocab(self) -> int:
        return 64 if self.tiny else 32000


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    return F.cross_entropy(model(blocks[:, :-1]).flatten(0, 1).float(), blocks[:, 1:].flatten())


class Loop:
    """A training loop over `micro` passes of one batch; a call takes `steps` steps."""

    def __init__(self, model: Any, batch: Tensor, plan: ConvertedModel | None = None, controller: Any = None) -> None:
        self.model, self.batch, self.plan, self.controller = model, batch, plan, controller
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.micro, self.steps = 1, 1

    def step(self) -> None:
        for _ in range(self.micro):
            (loss_of(self.model, self.batch) / self.micro).backward()
        if self.controller is not None:
            self.controller.step()
        elif self.plan is not None:
            self.plan.end_step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.step()


def static(model: Any, batch: Tensor, low: str, **more: Any) -> Loop:
    """Return a loop whose linears stay on one path, without a controller."""
    return Loop(model, batch, convert(model, PathSpec.of(low, None, **more)))


def controlled(model: Any, batch: Tensor, **more: Any) -> Loop:
    controller = gnmr.attach(model, **more)
    return Loop(model, batch, controller.converted, controller)


def timed(lab: Lab, arms: Mapping[str, Loop], seconds: float) -> dict[str, np.ndarray]:
    """Return the seconds of a step of each arm in every round; a turn takes as many steps as fit into 0.4 s."""
    for loop in arms.values():
        loop.steps = 1
        loop()
    took = lab.seconds(next(iter(arms.values())))
    steps = 1 if lab.tiny else min(20, max(1, round(0.4 / took)))
    for loop in arms.values():
        loop.steps = steps
    found = alternate(arms, lab.rounds(11, seconds), clock_of(lab.device))
    return {name: values / steps for name, values in found.items()}


def waits(loop: Loop, steps: int = 3) -> dict[str, Any]:
    """Count how often a step waits for the GPU, and where."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(steps):
                loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(one.filename).name}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)]
    return {"waits_a_step": len(places) / steps, "places": sorted(set(places))}


def control(lab: Lab) -> None:
    """Measure a step with the controller off, monitoring and controlling, on 4-bit and 8-bit saved activations."""
    for size, blocks, micros in (("60m", 128, (1, 4)), ("350m", 64, (1, 4))):
        with lab.case("step", size=size):
            batch, units = lab.random_tokens(blocks), 7 * (2 if lab.tiny else SIZES[size][2])
            calm = {"low": "int4", "recovery": "int8", "alpha": 1e9, "beta": 1e9}
            arms = {
                "off": static(lab.model(size), batch, "int4"),
                "off, again": static(lab.model(size), batch, "int4"),
                "monitoring": controlled(lab.model(size), batch, **calm),
                "controlling": controlled(
                    lab.model(size), batch, **calm | {"alpha": 1.0, "beta": 1.0, "max_o": units // 4}
                ),
                "BF16 without paths": Loop(lab.model(size), batch),
            }
            for micro in micros:
                for loop in arms.values():
                    loop.micro = micro
                found, tokens = timed(lab, arms, 18), batch[:, 1:].numel() * micro
                for name, seconds in found.items():
                    row = {"seconds": spread(seconds), "over_off": spread(seconds / found["off"])}
                    lab.put("step", size=size, arm=name, tokens_a_step=tokens, **row)
            lab.put("units", size=size, units=units, recovered=len(arms["controlling"].controller.active))
            for name, loop in arms.items() if lab.device.type == "cuda" else ():
                loop.micro = 1
                lab.put("waits", size=size, arm=name, **waits(loop))


def paths(lab: Lab) -> None:
    """Measure steps, peak memory and saved bytes of static paths at 350M against BF16."""
    batch = lab.random_tokens(64)
    arms = {"BF16 without paths": Loop(lab.model("350m", wide=True), batch)}
    ways: list[dict[str, Any]] = [{"low": low} for low in ("bf16", "int8", "int4", "e2m1")]
    ways += [{"low": low, "backend": "scaled_mm"} for low in ("fp8_hybrid", "fp8_delayed", "deepseek_v3")]
    ways += [{"low": low, "backend": "simulated"} for low in ("fp8_hybrid", "mxfp8", "nvfp4")]
    for way in ways:
        name = ", ".join(way.values())
        with lab.case("path", arm=name):
            made = static(lab.model("350m", wide=True), batch, **way)
            made.step()
            arms[name] = made
    for name, loop in arms.items():
        with lab.case("memory", arm=name):
            row: dict[str, Any] = {"peak_GiB_above_weights_and_moments": lab.peak(loop.step)}
            if loop.plan is not None:
                loss = loss_of(loop.model, batch)
                row |= {
                    "saved_bytes": loop.plan.cost.saved_bytes(),
                    "predicted_bytes": loop.plan.cost.predicted_bytes(),
                }
                del loss
                loop.plan.end_step()
            lab.put("memory", arm=name, **row)
    found = timed(lab, arms, 30)
    for name, seconds in found.items():
        row = {"seconds": spread(seconds), "over_bf16": spread(seconds / found["BF16 without paths"])}
        lab.put("path", arm=name, **row)


def compiled(lab: Lab) -> None:
    """Measure BF16 and FP8 steps at 1.3B with compiled blocks, and the controller on them."""
    torch._dynamo.config.recompile_limit = 64  # all arms share the code of one block
    batch, how = lab.random_tokens(24), {"backend": "aot_eager"} if lab.tiny else {}
    fp8 = {"low": "fp8_hybrid", "backend": "simulated" if lab.tiny else "scaled_mm"}
    routed: dict[str, Any] = {"recovery": "bf16", "unit": "block", "max_o": 1 if lab.tiny else 6, "alpha": 1, "beta": 1}
    ways: dict[str, Callable[[Any], Loop]] = {
        "BF16": lambda model: Loop(model, batch),
        "BF16, compiled": lambda model: Loop(model, batch),
        "FP8": lambda model: static(model, batch, **fp8),
        "FP8, compiled": lambda model: static(model, batch, **fp8),
        "FP8, compiled, controlling": lambda model: controlled(model, batch, **fp8, **routed),
    }
    arms: dict[str, Loop] = {}
    for name, make in ways.items():
        with lab.case("first steps", arm=name):
            loop = make(lab.model("1.3b", wide=True))
            if "compiled" in name and loop.plan is not None:
                lab.put("graphs", arm=name, operators_between_graphs=loop.plan.compile(loop.model.layers, **how))
            elif "compiled" in name:
                for block in loop.model.layers:
                    block.compile(**how)
            lab.put("first steps", arm=name, mean_seconds_of_three=lab.seconds(loop.step, 3))
            arms[name] = loop
    found = timed(lab, arms, 25)
    for name, seconds in found.items():
        rate = spread(batch[:, 1:].numel() / seconds)
        lab.put("step", arm=name, tokens_a_second=rate, over_bf16=spread(seconds / found["BF16"]))


# ---- the command ----

SECTIONS = {"control": control, "paths": paths, "compiled": compiled}


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", type=torch.device, default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    given = parser.parse_args(argv)
    if given.device.type == "cuda" and not torch.cuda.is_available():
        print("gpu: needs a CUDA GPU; --device cpu --tiny is a dry run without one", file=sys.stderr)
        return 2
    names: list[str] = given.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"gpu: --only {unknown[0]}: there is no such section; use {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lab = Lab(given.out, given.device, given.tiny)
    for name in names:
        lab.section, began = name, time.monotonic()
        with lab.case("section"):
            SECTIONS[name](lab)
        lab.put("ended", seconds=time.monotonic() - began)
        gc.collect()  # a section's models, before the next one allocates its own
        if given.device.type == "cuda":
            torch.cuda.empty_cache()
    return int(any("error" in row for row in lab.rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
