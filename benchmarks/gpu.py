"""Check the package on one CUDA GPU and measure what it costs there, in at most ten minutes (`make gpu-check`).

    python benchmarks/gpu.py OUT.json                             every section that the time allows
    python benchmarks/gpu.py OUT.json --only control,paths        some sections
    python benchmarks/gpu.py OUT.json --text FOLDER               train on this text instead of Python's own sources
    python benchmarks/gpu.py OUT.json --device cpu --tiny         a dry run of this script on small models

The sections, in the order in which they run; the last ones are left out when the time is over:

    correctness   casts, saved formats and linears on the GPU against the CPU; FP8 hardware against its simulation
    control       the step time with the controller off, monitoring and controlling; how often a step waits for the GPU
    paths         the step time and the peak memory of saved formats and recipes against BF16
    price         a 60M model is trained; the price of every operator against its measured KL divergence
    large         `gnmr.diagnose` at 1.3B: time and peak memory
    tests         the tests that need a GPU, and those of tests/precision and tests/control
    compiled      BF16 and FP8 steps at 1.3B under torch.compile, and the controller on them

Each section runs in a process of its own, so that a crash, a hang or a full GPU ends that section only. Every row is
written to OUT.json as soon as it is measured. `low` and `high` are the 95% bootstrap interval of a median. The exit
code is 1 if a section failed and 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.lab import models
from gnmr.lab.bench.figures import describe_machine, median, record
from gnmr.lab.bench.timing import alternate, clock_of
from gnmr.lab.config import ModelConfig, OptimConfig
from gnmr.lab.train.optim import clip_gradients, learning_rate
from gnmr.precision import FORMATS, RECIPES, ConvertedModel, PathSpec, convert
from gnmr.precision.cast import quantize, rotated
from gnmr.precision.formats import RangeFormat
from gnmr.precision.recipes import Cast
from gnmr.precision.scaling import compress, decompress

SEQ, STEPS = 256, 800
SIZES = {"60m": (512, 1376, 8, 8), "350m": (1024, 2736, 24, 16), "1.3b": (2048, 5461, 24, 32)}
"""Hidden width, MLP width, layers and heads of the paper's LLaMA models (conf/scale)."""
RATE = OptimConfig(lr=1e-3, warmup_frac=0.1, min_lr_frac=0.1)
Shape = tuple[int, int, int]
"""Tokens, inputs and outputs of a linear."""


def change(out: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the result file. It is replaced as a whole, so that a kill leaves the old or the new one."""
    tree = json.loads(out.read_text()) if out.exists() else {}
    edit(tree)
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps(tree, indent=1) + "\n")
    part.replace(out)


def ended(out: Path, section: str, state: str, seconds: float) -> None:
    """Write how a section ended."""
    new: dict[str, Any] = {"rows": []}
    change(out, lambda tree: tree["sections"].setdefault(section, new).update(state=state, seconds=seconds))


@dataclass
class Lab:
    """The device, the time and the result file of one section."""

    section: str
    out: Path
    text: Path | None
    device: torch.device
    tiny: bool
    ends: float

    def put(self, what: str, **row: Any) -> None:
        """Write one row to the result file and to the terminal."""
        told = (f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}"[:150].replace("\n", " ") for k, v in row.items())
        print(f"  {self.section}: {what} {' '.join(told)}", flush=True)
        change(self.out, lambda tree: tree["sections"][self.section]["rows"].append({"what": what, **row}))

    @contextlib.contextmanager
    def case(self, what: str, **labels: Any) -> Iterator[None]:
        """Record an exception as a row, so that the cases after this one still run.

        A backend that this device cannot run is `refused`, which is no error.
        """
        try:
            yield
        except Exception as error:
            told = f"{type(error).__name__}: {error}"[:600]
            if isinstance(error, ValueError) and str(error).startswith("backend="):
                self.put(what, **labels, refused=told)
            else:
                self.put(what, **labels, error=told, traceback=traceback.format_exc()[-2000:])

    def rounds(self, most: int, seconds: float) -> Iterator[int]:
        """Yield a warm-up round and up to `most` rounds: at least five, then for as long as `seconds` allow."""
        ends = min(time.monotonic() + seconds, self.ends - 5)
        yield from range(-1, 1 if self.tiny else 5)
        yield from (number for number in range(5, 0 if self.tiny else most) if time.monotonic() < ends)

    def seconds(self, run: Callable[[], object], times: int = 1) -> float:
        """Return the mean seconds of `run`, the work that it left to the device included."""
        clock = clock_of(self.device, "wall")
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

    def model(self, size: str, vocab: int, *, wide: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Build a LLaMA of the paper's size; `wide` rounds its MLP width up to a multiple of 128, as FP8 tiles need."""
        width, mlp, layers, heads = (128, 128, 2, 2) if self.tiny else SIZES[size]
        mlp = -(-mlp // 128) * 128 if wide else mlp
        config = ModelConfig(hidden_size=width, intermediate_size=mlp, num_layers=layers, num_heads=heads)
        with self.device:
            model = models.build(config, vocab, SEQ).to(dtype)
        model.init_weights(torch.Generator(self.device).manual_seed(0))
        return model

    def random_tokens(self, blocks: int, vocab: int) -> Tensor:
        shape = (4, 33) if self.tiny else (blocks, SEQ + 1)
        return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    @property
    def vocab(self) -> int:
        return 64 if self.tiny else 32000


def spread(samples: Any) -> dict[str, Any]:
    """Return the median and its 95% bootstrap interval."""
    found = median("", np.asarray(samples, dtype=float), "", interval=True)
    return {"median": found.value, "low": found.low, "high": found.high, "n": found.n}


def sqnr(found: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Return the signal-to-quantization-noise ratios in dB; 999 stands for equal tensors."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, reference, strict=True)]
    return [999.0 if a.equal(b) else float(10 * (b.square().sum() / (a - b).square().sum()).log10()) for a, b in pairs]


# ---- correctness ----


def sample(rows: int, columns: int, dtype: torch.dtype, seed: int, special: bool = False) -> Tensor:
    """Return random numbers with outlier columns and a row of zeros; `special` adds tiny, infinite and NaN elements."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[:, :: columns // 8] *= 20
    x[0] = 0
    if special:
        x[1] *= 1e-38
        x[2, 1], x[rows // 2, 2] = torch.inf, torch.nan
    return x.to(dtype)


def equal_share(a: Tensor, b: Tensor) -> float:
    """Return the share of equal elements; NaN equals NaN."""
    b = b.cpu()
    return float(((a == b) | ((a != a) & (b != b))).double().mean())


def of_cast(lab: Lab, cast: Cast, dtype: torch.dtype, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Compare a cast on both devices: the bits, and for a stochastic cast the noise and its mean."""
    shares, noise = [], []
    for tokens, inputs, _ in shapes:
        for dim, special in ((0, False), (1, False), (0, True), (1, True)):
            x, found = sample(tokens, inputs, dtype, dim, special and not cast.stochastic), []
            for device in (torch.device("cpu"), lab.device):
                draws = torch.Generator(device).manual_seed(1) if cast.stochastic else None
                found.append(quantize(x.to(device), cast, dim, None, draws)[0].cpu())
            shares.append(equal_share(*found))
            errors = [each.double() - (rotated(x, dim) if cast.hadamard else x).double() for each in found]
            noise.append([float(e.square().mean().sqrt()) for e in errors] + [float(e.mean()) for e in errors])
    row: dict[str, Any] = {"cases": len(shares), "least_share_of_equal_elements": min(shares)}
    if cast.stochastic:
        cpu, gpu, mean_cpu, mean_gpu = np.mean(noise, axis=0)
        row |= {
            "noise_over_cpu": gpu / cpu,
            "bias_over_noise_cpu": mean_cpu / cpu,
            "bias_over_noise": mean_gpu / gpu,
        }
    return row


def of_format(lab: Lab, fmt: Any, dtype: torch.dtype, shapes: Sequence[Shape]) -> dict[str, float]:
    """Compare a compressed copy on both devices: the least shares of equal codes, scales and values."""
    found = {"codes": 1.0, "scales": 1.0, "values": 1.0}
    for tokens, inputs, _ in shapes:
        for special in (False, True):
            x = sample(tokens, inputs, dtype, 3, special)
            here, there = compress(x, fmt), compress(x.to(lab.device), fmt)
            values = tuple(decompress(*each, fmt, inputs, dtype) for each in (here, there))
            pairs = {"values": values, "scales": (here[1], there[1])}
            if not special:  # the code of a NaN is arbitrary
                pairs["codes"] = here[0], there[0]
            found |= {name: min(found[name], equal_share(*pair)) for name, pair in pairs.items()}
    return found


def linear(path: str | None, dtype: torch.dtype, device: torch.device, shape: Shape, **more: Any) -> list[Tensor]:
    """Return the output, the input gradient and the weight gradient of one linear; without a path in float64."""
    tokens, inputs, outputs = shape
    net: Any = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    weight = sample(outputs, inputs, dtype, 6) / inputs**0.5
    net[0].weight.data = weight.to(device, torch.float64 if path is None else dtype)
    x: Any = sample(tokens, inputs, dtype, 5).to(device, net[0].weight.dtype).requires_grad_()
    if path is not None:
        convert(net, PathSpec.of(path, None, targets=["0"], **more))
    y = net(x)
    y.backward(sample(tokens, outputs, dtype, 7).to(device, y.dtype))
    return [each.detach().cpu() for each in (y, x.grad, net[0].weight.grad)]


def correctness(lab: Lab) -> None:
    """Compare casts, saved formats and linears with the CPU, and hardware with its simulation."""
    torch.set_num_threads(min(4, torch.get_num_threads()))  # more are slower on matrices of this size
    cpu, shapes = torch.device("cpu"), [(100, 128, 256)] + ([] if lab.tiny else [(256, 512, 640)])
    casts = {str(cast): cast for recipe in RECIPES.values() for cast in recipe.casts}
    formats = [fmt for name, fmt in FORMATS.items() if name != "bf16"]
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        for word, cast in casts.items():
            with lab.case("cast", cast=word, dtype=kind):
                lab.put("cast", cast=word, dtype=kind, **of_cast(lab, cast, dtype, shapes))
        for fmt in (*formats, RangeFormat.of("int2", 64), RangeFormat.of("int4", 128)):
            with lab.case("saved", format=fmt.name, dtype=kind):
                lab.put("saved", format=fmt.name, dtype=kind, **of_format(lab, fmt, dtype, shapes))
        exact_of = {shape: linear(None, dtype, cpu, shape) for shape in shapes}
        for path in (*RECIPES, *(fmt.name for fmt in formats)):
            more = {"backend": "simulated"} if path in RECIPES else {"site": "forward"}
            for shape in shapes:
                with lab.case("linear", path=path, dtype=kind, shape=shape):
                    here, there = (linear(path, dtype, device, shape, **more) for device in (cpu, lab.device))
                    exact = exact_of[shape]
                    row = {"gpu_to_cpu": sqnr(there, here), "cpu": sqnr(here, exact), "gpu": sqnr(there, exact)}
                    lab.put("linear", path=path, dtype=kind, shape=shape, **row)
    for name, recipe in RECIPES.items():
        if not recipe.casts:
            continue
        net, backend = nn.Sequential(nn.Linear(512, 640)), "int_mm" if recipe.integer else "scaled_mm"
        with lab.case("backend", recipe=name), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            plan = convert(net.to(lab.device, torch.bfloat16), PathSpec.of(name, None, targets=["0"]))
            chosen: Any = plan.operators[0].low
            lab.put("backend", recipe=name, auto=chosen.backend, told=[str(one.message) for one in seen])
        for shape in shapes:
            with lab.case("hardware", recipe=name, backend=backend, shape=shape):
                found = linear(name, torch.bfloat16, lab.device, shape, backend=backend)
                reference = linear(name, torch.bfloat16, lab.device, shape, backend="simulated")
                row = {"sqnr_to_simulation": sqnr(found, reference)}
                lab.put("hardware", recipe=name, backend=backend, shape=shape, **row)


# ---- step time ----


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
    return Loop(model, batch, controller.plan, controller)


def timed(lab: Lab, arms: Mapping[str, Loop], seconds: float) -> dict[str, np.ndarray]:
    """Return the seconds of a step of each arm in every round; a turn takes as many steps as fit into 0.4 s."""
    for loop in arms.values():
        loop.steps = 1
        loop()
    took = lab.seconds(next(iter(arms.values())))
    steps = 1 if lab.tiny else min(20, max(1, round(0.4 / took)))
    for loop in arms.values():
        loop.steps = steps
    found = alternate(arms, lab.rounds(11, seconds), clock_of(lab.device, "wall"))
    return {name: values / steps for name, values in found.items()}


def waits(loop: Loop, steps: int = 3) -> dict[str, Any]:
    """Count how often a step waits for the GPU, where, and the CUDA calls of a step."""
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
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        loop.step()
    calls = {event.key: event.count for event in profile.key_averages()}
    kept = {key: count for key, count in calls.items() if key.startswith(("cuda", "cuLaunch", "Memcpy"))}
    return {"waits_a_step": len(places) / steps, "places": sorted(set(places)), "calls": kept}


def control(lab: Lab) -> None:
    """Measure a step with the controller off, monitoring and controlling, on 4-bit and 8-bit saved activations."""
    for size, blocks, micros in (("60m", 128, (1, 4)), ("350m", 64, (1, 4))):
        with lab.case("step", size=size):
            batch, units = lab.random_tokens(blocks, lab.vocab), 7 * (2 if lab.tiny else SIZES[size][2])
            calm = {"low": "int4", "recovery": "int8", "alpha": 1e9, "beta": 1e9}
            arms = {
                "off": static(lab.model(size, lab.vocab), batch, "int4"),
                "off, again": static(lab.model(size, lab.vocab), batch, "int4"),
                "monitoring": controlled(lab.model(size, lab.vocab), batch, **calm),
                "controlling": controlled(
                    lab.model(size, lab.vocab), batch, **calm | {"alpha": 1.0, "beta": 1.0, "max_o": units // 4}
                ),
                "BF16 without paths": Loop(lab.model(size, lab.vocab), batch),
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


def ceilings(lab: Lab) -> None:
    """Measure a BF16 and an FP8 matrix product of random data, and a copy."""
    side, fp8 = 64 if lab.tiny else 8192, torch.float8_e4m3fn
    a, b = (torch.randn(side, side, device=lab.device, dtype=torch.bfloat16) for _ in range(2))
    a8, b8, one = a.to(fp8), b.to(fp8), torch.ones((), device=lab.device)
    runs: dict[str, Callable[[], object]] = {
        "BF16 product": lambda: a @ b.t(),
        "FP8 product": lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        "copy": lambda: b.copy_(a),
    }
    for name, run in runs.items():
        with lab.case("ceiling", of=name):
            run()
            seconds = [lab.seconds(run, 10) for _ in range(7)]
            amount = 2 * a.nbytes if name == "copy" else 2 * side**3
            lab.put("ceiling", of=name, giga_a_second=spread(amount / np.array(seconds) / 1e9))


def paths(lab: Lab) -> None:
    """Measure steps, peak memory and saved bytes of static paths at 350M against BF16."""
    ceilings(lab)
    batch = lab.random_tokens(64, lab.vocab)
    arms = {"BF16 without paths": Loop(lab.model("350m", lab.vocab, wide=True), batch)}
    ways: list[dict[str, Any]] = [{"low": low} for low in ("bf16", "int8", "int4", "e2m1")]
    ways += [{"low": low, "backend": "scaled_mm"} for low in ("fp8_hybrid", "fp8_delayed", "deepseek_v3")]
    ways += [{"low": low, "backend": "simulated"} for low in ("fp8_hybrid", "mxfp8", "nvfp4")]
    for way in ways:
        name = ", ".join(way.values())
        with lab.case("path", arm=name):
            made = static(lab.model("350m", lab.vocab, wide=True), batch, **way)
            made.step()
            arms[name] = made
    for name, loop in arms.items():
        with lab.case("memory", arm=name):
            row: dict[str, Any] = {"peak_GiB_above_weights_and_moments": lab.peak(loop.step)}
            if loop.plan is not None:
                loss = loss_of(loop.model, batch)
                row |= {"saved_bytes": loop.plan.cost.saved_bytes(), "predicted_bytes": loop.plan.cost.predicted_bytes()}
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
    batch, how = lab.random_tokens(24, lab.vocab), {"backend": "aot_eager"} if lab.tiny else {}
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
        if arms and lab.ends - time.monotonic() < 45:
            break
        with lab.case("first steps", arm=name):
            loop = make(lab.model("1.3b", lab.vocab, wide=True))
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


# ---- prices ----


def documents(text: Path | None) -> list[str]:
    """Read the .json.gz, .txt and .py files of a folder; without one, Python's own sources."""
    folder, found = text or Path(sysconfig.get_paths()["stdlib"]), list[str]()
    for file in sorted(folder.glob("*.json.gz")):
        with gzip.open(file, "rt") as lines:
            found += [json.loads(line)["text"] for line in lines]
    return found + [
        file.read_text(errors="replace") for kind in ("*.txt", "*.py") for file in sorted(folder.glob(kind))
    ]


def trained(lab: Lab) -> tuple[Any, int, Tensor]:
    """Train a 60M model; return its weights, the size of its vocabulary and held-out blocks."""
    from gnmr.lab.data.tokenizer import train

    began, texts = time.monotonic(), documents(lab.text)[: 8 if lab.tiny else None]
    tokenizer = train(iter(texts[:: max(1, len(texts) // 200)]), 300 if lab.tiny else 8192)
    ids = np.concatenate([[0, *each.ids] for each in tokenizer.encode_batch(texts)])
    lab.put("text", seconds=time.monotonic() - began, documents=len(texts), tokens=len(ids))
    length, count, steps = (32, 2, 4) if lab.tiny else (SEQ, 64, STEPS)
    tokens, vocab = torch.from_numpy(ids.astype(np.int64)).to(lab.device), tokenizer.get_vocab_size()
    held = tokens[-(12 if lab.tiny else 192) * (length + 1) :].view(-1, length + 1)
    tokens, model = tokens[: -held.numel()], lab.model("60m", vocab)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE.lr, fused=True)

    def run() -> None:
        for step in range(1, steps + 1):
            starts = torch.randint(len(tokens) - length - 1, (count, 1), generator=torch.Generator().manual_seed(step))
            loss_of(model, tokens[(starts + torch.arange(length + 1)).to(lab.device)]).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            clip_gradients(parameters, norm, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, RATE)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    seconds = lab.seconds(run)
    with torch.no_grad():
        loss = float(torch.stack([loss_of(model, part) for part in held.split(16)]).mean())
    lab.put("base", steps=steps, tokens_a_step=count * length, seconds=seconds, held_out_loss=loss)
    return model.state_dict(), vocab, held


@torch.no_grad()
def measured_kl(model: Any, low: str, parts: Sequence[Tensor]) -> dict[str, Any]:
    """Measure the KL divergence and the loss increase, in nats a token, of each operator alone, and of all at once."""
    plan = convert(model, PathSpec.of(low, "bf16", backend="simulated"))
    kl, rise = np.zeros((2, len(plan.operators) + 1, len(parts)))
    for operator in plan.operators:
        operator.switch(True)
    for column, part in enumerate(parts):
        targets, high = part[:, 1:].flatten(), F.log_softmax(model(part[:, :-1]).flatten(0, 1).float(), -1)
        for row in range(len(kl)):
            alone = plan.operators[row : row + 1] or plan.operators
            for operator in alone:
                operator.switch(False)
            found = F.log_softmax(model(part[:, :-1]).flatten(0, 1).float(), -1)
            for operator in alone:
                operator.switch(True)
            kl[row, column] = float((high.exp() * (high - found)).sum(-1).double().mean())
            rise[row, column] = float(F.nll_loss(found, targets) - F.nll_loss(high, targets))
            plan.end_step()
    names = [operator.operator_name for operator in plan.operators]
    plan.restore()
    return {"operators": names, "kl": kl.mean(1), "kl_error": kl.std(1) / len(parts) ** 0.5, "rise": rise.mean(1)}


def price(lab: Lab) -> None:
    """Compare the prices of `gnmr.diagnose` with the KL divergence of single operators on other tokens."""
    state, vocab, held = trained(lab)
    for dtype in (torch.float32, torch.bfloat16):
        for low in ("nvfp4", "fp8_hybrid", "mxfp4", "sim_int4"):
            labels = {"recipe": low, "dtype": str(dtype).removeprefix("torch.")}
            with lab.case("price", **labels):
                model = lab.model("60m", vocab, dtype=dtype)
                model.load_state_dict(state)
                priced, others = (part.split(len(held) // 12) for part in held.tensor_split([len(held) // 3]))
                began = time.monotonic()
                found = gnmr.diagnose(model, partial(loss_of, model), priced, recipe=low, held_out=others[:3])
                took, truth = time.monotonic() - began, measured_kl(model, low, others)
                own = {row.operator: row.value for row in found.rows if row.gemm == "fprop"}
                prices, kl, rise = np.array([own[n] for n in truth["operators"]]), truth["kl"][:-1], truth["rise"][:-1]
                row: dict[str, Any] = {"diagnose_seconds": took, "spearman_kl": float(spearmanr(prices, kl)[0])}
                row |= {"spearman_rise": float(spearmanr(prices, rise)[0]), "prices_over_kl": prices.sum() / kl.sum()}
                row |= {"kl_of_all": truth["kl"][-1], "rise_of_all": truth["rise"][-1]}
                row |= {"held_out_cost": found.held_out and found.held_out.cost, "left_by_choice": dict(found.left)}
                each = {name: np.array(values).tolist() for name, values in truth.items()}
                lab.put("price", **labels, **row, prices=prices.tolist(), **each)


def large(lab: Lab) -> None:
    """Measure `gnmr.diagnose` at 1.3B with random weights."""
    model, batches = lab.model("1.3b", lab.vocab, wide=True), lab.random_tokens(24, lab.vocab).chunk(2)

    def plain() -> None:
        loss_of(model, batches[0]).backward()
        model.zero_grad(set_to_none=True)

    plain()
    seconds = spread([lab.seconds(plain) for _ in range(5)])
    lab.put("plain passes", tokens=batches[0][:, 1:].numel(), seconds=seconds, peak_GiB=lab.peak(plain))
    for low, tokens in (("nvfp4", 1), ("nvfp4", 16), ("fp8_hybrid", 1)):
        with lab.case("diagnose", recipe=low, one_token_in=tokens):

            def run(low: str = low, tokens: int = tokens) -> object:
                return gnmr.diagnose(model, partial(loss_of, model), batches, recipe=low, tokens=tokens)

            first, peak = lab.seconds(run), lab.peak(run)
            each = lab.seconds(run) / len(batches)
            row = {"first_call_seconds": first, "seconds_a_batch": each, "over_plain": each / seconds["median"]}
            lab.put("diagnose", recipe=low, one_token_in=tokens, **row, peak_GiB=peak)


def tests(lab: Lab) -> None:
    """Run the tests that need a GPU, and the quick tests of paths and controller."""
    workers = [] if lab.tiny else ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "loadgroup"]
    quick = ["tests/precision/test_formats.py"] if lab.tiny else ["tests/precision", "tests/control"]
    gpu = ["-m", "gpu", *quick] + ([] if lab.tiny else ["tests/train/test_step.py"])
    for name, words in (("gpu", gpu), ("quick", [*workers, *quick])):
        with lab.case("tests", of=name):
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfE", *words]
            limit, root = max(5, lab.ends - time.monotonic() - 3), Path(__file__).resolve().parents[1]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit)
            lines = done.stdout.splitlines() or ["no output"]
            bad = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
            ended = next((line for line in reversed(lines) if " in " in line), lines[-1])
            tail = (done.stdout + done.stderr)[-8000:] if done.returncode else ""
            lab.put("tests", of=name, code=done.returncode, ended=ended, failed=bad, tail=tail)


# ---- the command ----

SECTIONS: dict[str, tuple[Callable[[Lab], None], int]] = {
    "correctness": (correctness, 120),
    "control": (control, 150),
    "paths": (paths, 160),
    "price": (price, 150),
    "large": (large, 80),
    "tests": (tests, 90),
    "compiled": (compiled, 170),
}
"""Each section and the most seconds that it may take."""


def of_section(lab: Lab) -> int:
    """Run one section in this process, which was started for it."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if lab.tiny and lab.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        SECTIONS[lab.section][0](lab)
    except BaseException as error:
        lab.put("section", error=f"{type(error).__name__}: {error}"[:600], traceback=traceback.format_exc()[-3000:])
        return 1
    return 0


def started(argv: Sequence[str], name: str, seconds: float) -> str:
    """Run a section in a process of its own and return how it ended."""
    words = [sys.executable, __file__, *argv, "--section", name, "--seconds", str(seconds)]
    process = subprocess.Popen(words, start_new_session=True)
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the workers that it may have left
        process.wait()
    return "done" if code == 0 else f"failed with exit code {code}"


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=540, help="for all sections together (540)")
    parser.add_argument("--device", type=torch.device, default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--text", type=Path, help="a folder of .json.gz, .txt or .py files")
    parser.add_argument("--commit", help="the commit, where there is no .git folder")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    given, began = parser.parse_args(argv), time.monotonic()
    if given.device.type == "cuda" and not torch.cuda.is_available():
        print("gpu: needs a CUDA GPU; --device cpu --tiny is a dry run without one", file=sys.stderr)
        return 2
    if given.section:
        return of_section(Lab(given.section, given.out, given.text, given.device, given.tiny, began + given.seconds))
    if given.text is not None and not given.text.is_dir():
        print(f"gpu: --text {given.text}: there is no such folder", file=sys.stderr)
        return 2
    names: list[str] = given.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"gpu: --only {unknown[0]}: there is no such section; use {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    tree = record({}, shlex.join(["python", "benchmarks/gpu.py", *argv]), describe_machine())
    tree |= {"commit": given.commit or tree["commit"], "cuda": torch.version.cuda, "sections": {}}
    if given.device.type == "cuda":
        of = torch.cuda.get_device_properties(given.device)
        tree["device"] = {"name": of.name, "capability": f"{of.major}.{of.minor}", "GiB": of.total_memory / 2**30}
    given.out.unlink(missing_ok=True)
    change(given.out, lambda whole: whole.update({k: v for k, v in tree.items() if k != "figures"}))
    for name in names:
        start, left = time.monotonic(), given.seconds - (time.monotonic() - began)
        ended(given.out, name, state := "left out: no time", 0.0)
        print(f"{name}: {left:.0f} s left", flush=True)
        if left >= 20:
            state = started(argv, name, min(SECTIONS[name][1], left))
            ended(given.out, name, state, round(time.monotonic() - start, 1))
        print(f"{name}: {state}, {time.monotonic() - start:.0f} s", flush=True)
    found = json.loads(given.out.read_text())["sections"]
    errors = {name: sum("error" in row for row in one["rows"]) for name, one in found.items()}
    print({name: f"{one['state']}, {len(one['rows'])} rows, {errors[name]} errors" for name, one in found.items()})
    sound = all(one["state"].startswith(("done", "left out")) for one in found.values())
    return 0 if sound and not any(errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
