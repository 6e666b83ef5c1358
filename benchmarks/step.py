"""Time of a training step under several paths or controllers, on CPUs or on one CUDA GPU.

    python benchmarks/step.py OUT.json --only linear --only casts --size 2048 768 768
    python benchmarks/step.py OUT.json --only controller --clock cpu training.threads=1
    python benchmarks/step.py OUT.json --only paths --arms '^(bf16|int4|nvfp4)$' model=llama_350m data=stdlib

The arms of a part take turns, and each is compared with the part's first one. An arm is a list of arguments of `gnmr
train`; overrides for all arms follow the options. In `linear` and `casts` the arms are libraries, on random numbers of
`--size`. compressed-tensors comes from the folder that `make test-libraries` fills: PYTHONPATH=.libraries.

    linear       forward and backward of one linear under our recipes and torchao's emulation, against BF16 and FP32
    casts        one cast of its input by us, torchao and compressed-tensors, with the share of values equal to ours
    controller   a bare loop over the low path; the router with thresholds that no unit reaches; each signal
    paths        every format and recipe against BF16, with the bytes kept for backward and the peak memory of a GPU
    compiled     BF16 and FP8 under torch.compile, and the controller on them; minutes of compilation
    share        the step of `gnmr train` with its records against the bare loop, and the bare loop against itself (on
                 CPUs). Beside these ratios the time of norms, decision and records, measured inside the step, over the
                 median step of the bare loop. A loop that clips gradients needs the norms anyway, and `gnmr train`
                 computes them once: there only `all but norms` is extra.

An arm that this model or machine cannot run is a row with `refused`. `--clock cpu training.threads=1` counts the CPU
time of one thread, which depends least on other work on the machine.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment import Router
from gnmr.control import Controller
from gnmr.control.norms import UnitNorms
from gnmr.conversion import PathSpec, convert
from gnmr.conversion.cost import Cost
from gnmr.errors import UserError
from gnmr.formats.cast import quantize
from gnmr.formats.recipes import Cast
from gnmr.lab.config.compose import compose
from gnmr.lab.models import cpu_products
from gnmr.lab.train import rows
from gnmr.lab.train.build import Parts, assemble, first_batch, train_step
from gnmr.lab.train.step import loss_of, objective_of
from gnmr.lab.views.recorder import Recorder
from gnmr.names import FORMATS, RECIPES
from gnmr.records.schema import event_rows, unit_rows
from timing import alternate, clock_of, spread, write

SIGNALS = ("gnmr_delta", "price", "mse", "grad_norm", "oracle")
HARDWARE = ("fp8_hybrid", "fp8_delayed", "deepseek_v3")
"""Recipes that run on the FP8 hardware of a GPU."""
BARE = "no controller"


def static(low: str, *words: str) -> tuple[str, ...]:
    """Return the arguments of an arm with every operator on `low` and no recovery path."""
    return (f"precision.low={low}", "precision.recovery=null", "controller.warmup_frac=0", *words)


PEERED = ("fp8_hybrid", "mxfp8", "nvfp4")
CASTS = ("e4m3/tensor", "e4m3/mx", "e2m1/mx", "e2m1/nv")
"""Casts that other libraries have too."""
EAGER, COMPILED = "training.compile=false", "training.compile=true"
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "controller": {
        BARE: (),
        "monitoring": ("controller.alpha=1e9", "controller.beta=1e9"),
        **{name: (f"controller.signal={name}",) for name in SIGNALS},
    },
    "paths": {name: static(name) for name in dict.fromkeys(("bf16", *FORMATS, *RECIPES))}
    | {f"{name}, scaled_mm": static(name, "precision.backend=scaled_mm") for name in HARDWARE},
    "compiled": {
        "BF16": static("bf16", EAGER),
        "BF16, compiled": static("bf16", COMPILED),
        "FP8": static("fp8_hybrid", EAGER),
        "FP8, compiled": static("fp8_hybrid", COMPILED),
        "FP8, compiled, controlling": (
            *("precision.low=fp8_hybrid", "precision.recovery=bf16", "precision.unit=block", COMPILED),
            *("controller.max_o=1", "controller.alpha=1", "controller.beta=null"),
        ),
    },
}


def bare_step(parts: Parts) -> Callable[[], object]:
    """Return forward, loss, backward, clipping and AdamW on one batch, without controller and records."""
    batch, clip = first_batch(parts), parts.config.optim.clip_norm

    def step() -> None:
        losses = []
        for block in batch:
            loss = loss_of(parts.model, block)
            (objective_of(parts.model, loss) / len(batch)).backward()
            losses.append(loss.detach())
        parts.converted.end_step()
        if clip is not None:
            nn.utils.clip_grad_norm_(parts.model.parameters(), clip)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        float(torch.stack(losses).mean())

    return step


def run_step(parts: Parts) -> Callable[[], Any]:
    """Return the step of `gnmr train` on one batch."""
    take_step, batch = train_step(parts), first_batch(parts)
    return lambda: take_step(batch, parts.config.optim.lr)


INSIDE = (
    (UnitNorms, "__call__", "norms"),
    *((Controller, name, "decision") for name in ("measure", "mark", "observe", "apply")),
    *((Router, name, "decision") for name in ("follow", "_begin")),
    *((Cost, name, "records") for name in ("of_pass", "spent")),
)
"""(owner, function, part) of the code in a step that serves the controller and its records."""


def share(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the time of both steps, the share of a step that each part of the controller takes, and two sums."""
    config = compose([*asked.overrides, "records.wandb=off", "records.live=off"])
    clock, taken = clock_of(torch.device("cpu"), asked.clock), dict[str, list[float]]()

    def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            began = clock()
            try:
                return work(*given, **named)
            finally:
                taken[part][-1] += clock() - began

        return run

    with tempfile.TemporaryDirectory(prefix="gnmr-step-") as folder, ExitStack() as stack:
        parts = assemble(config, Path(folder), print)
        bare, take_step, counters = bare_step(parts), run_step(parts), rows.Counters()
        recorder = stack.enter_context(Recorder(rows.run_info(parts, "step"), config.records, None))
        recorder.start("", {}, {})
        for owner, name, part in INSIDE:
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))

        def record(result: Any) -> None:
            recorder.step(rows.step_row(result, counters, 0.0), unit_rows(result.decision))
            recorder.events(event_rows(result.decision))

        record = timed("records", record)

        def controlled() -> None:
            for part in ("norms", "decision", "records"):
                taken.setdefault(part, []).append(0.0)
            counters.step += 1
            record(take_step())

        arms = {BARE: bare, f"{BARE}, again": bare, "with records": controlled}
        seconds = alternate(arms, range(-2, asked.rounds), clock)
    usual = float(np.median(seconds[BARE]))
    shares = {part: np.array(each[2:]) / usual for part, each in taken.items()}
    shares["all but norms"] = shares["decision"] + shares["records"]
    shares["all"] = shares["norms"] + shares["all but norms"]
    return [
        {"part": "share", "arm": arm, "seconds": spread(values), "ratio": spread(values / seconds[BARE])}
        for arm, values in seconds.items()
    ] + [{"part": "share", "arm": part, "share": spread(values)} for part, values in shares.items()]


def memory(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Take a step and return the bytes kept for backward, and a GPU's peak above the previous allocation."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    result = step()
    found = {"saved_bytes": result.saved_bytes, "saved_bytes_predicted": result.saved_bytes_predicted}
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def measure(part: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of the part's first arm, the ratio of every other arm to it, and what each arm keeps."""
    steps: dict[str, Callable[[], object]] = {}
    found: list[dict[str, Any]] = []
    device = torch.device("cpu")
    for arm, words in PARTS[part].items():
        if not re.search(asked.arms, arm):
            continue
        try:
            parts = assemble(compose([*asked.overrides, *words]), Path(), print)
        except UserError as error:
            found.append({"part": part, "arm": arm, "refused": str(error)})
            continue
        device, step = parts.device, bare_step(parts) if arm == BARE else run_step(parts)
        if part == "paths":
            found.append({"part": part, "arm": arm, **memory(step, device)})
        steps[arm] = step
    seconds = alternate(steps, range(-2, asked.rounds), clock_of(device, asked.clock))
    first = next(iter(seconds.values()), None)
    for arm, values in seconds.items():
        found.append({"part": part, "arm": arm, "seconds": spread(values), "ratio": spread(values / first)})
    return found


def our_cast(word: str, x: Tensor) -> Tensor:
    """Return `x` in our cast `word` along the columns."""
    cast = Cast.of(word)
    assert cast is not None
    return quantize(x, cast, 1)[0]


def torchao_linear(recipe: str, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return torchao's emulation of `recipe` with the weight of `linear`."""
    from torchao.float8.config import CastConfig, Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    if recipe == "fp8_hybrid":
        gradients = CastConfig(target_dtype=torch.float8_e5m2)
        return Float8Linear.from_float(linear, Float8LinearConfig(emulate=True, cast_config_grad_output=gradients))
    how = KernelPreference.EMULATED, ScaleCalculationMode.RCEIL
    return lambda x: _to_mxfp8_then_scaled_mm(x, linear.weight, *how)


def torchao_cast(word: str, x: Tensor) -> Tensor:
    """Return `x` in torchao's cast `word` along the columns."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if word == "e4m3/tensor":
        return hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, None).to_original_precision()
    if word == "e2m1/nv":
        whole = per_tensor_amax_to_scale(x.abs().amax().float())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole).dequantize(x.dtype)
    kind = torch.float8_e4m3fn if word == "e4m3/mx" else torch.float4_e2m1fn_x2
    return MXTensor.to_mx(x, kind, 32, ScaleCalculationMode.RCEIL).dequantize(x.dtype)


def compressed_tensors_cast(word: str, x: Tensor) -> Tensor:
    """Return `x` in compressed-tensors' cast `word` along the columns, with scales of `x` itself."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp, generate_gparam

    strategy, size, dtype = {
        "tensor": ("tensor", None, None),
        "mx": ("group", 32, torch.uint8),
        "nv": ("tensor_group", 16, torch.float8_e4m3fn),
    }[word.split("/")[1]]
    how = {"strategy": strategy, "group_size": size, "scale_dtype": dtype, "zp_dtype": dtype}
    dynamic = "local" if size == 16 else True
    args = QuantizationArgs(num_bits=8 if "e4m3" in word else 4, type="float", dynamic=dynamic, **how)
    whole = generate_gparam(*torch.aminmax(x)) if size == 16 else None
    return fake_quantize(x, *compute_dynamic_scales_and_zp(x, args, None, whole), args, global_scale=whole)


def linear_steps(size: tuple[int, int, int], missing: list[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the arms of `linear`: forward and backward of a linear, by name."""
    tokens, inputs, outputs = size
    wide = torch.randn(tokens, inputs), torch.randn(tokens, outputs)

    def step(run: Callable[[Tensor], Tensor], ends: list[Callable[[], object]], x: Tensor, dy: Tensor) -> None:
        run(x.detach().requires_grad_()).backward(dy)
        for end in ends:
            end()

    for arm in ("BF16", "FP32", *(f"{recipe}, {whose}" for recipe in PEERED for whose in ("ours", "torchao"))):
        recipe, _, whose = arm.partition(", ")
        dtype = torch.float32 if arm == "FP32" else torch.bfloat16
        linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        model = nn.Sequential(linear)
        run: Callable[[Tensor], Tensor] = model
        ends: list[Callable[[], object]] = [model.zero_grad]
        if whose == "ours":
            ends.append(convert(model, PathSpec(low=recipe, recovery=None, backend="simulated"), shown=False).end_step)
        elif whose in missing or arm == "nvfp4, torchao":  # torchao's NVFP4 needs Triton
            continue
        elif whose:
            run = torchao_linear(recipe, linear)
        yield arm, partial(step, run, ends, *(one.to(dtype) for one in wide))


def peers(part: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of every arm of `linear` or `casts`, and their ratios to BF16 and FP32, or to our cast."""
    cpu_products.provide()
    torch.manual_seed(0)
    x, makers = torch.randn(asked.size[:2]), {"ours": our_cast, "torchao": torchao_cast}
    makers["compressed-tensors"] = compressed_tensors_cast
    missing = [name for name in makers if name != "ours" and find_spec(name.replace("-", "_")) is None]
    casts = {f"{w}, {whose}": partial(makers[whose], w) for w in CASTS for whose in makers if whose not in missing}
    steps: dict[str, Callable[[], object]] = {arm: partial(cast, x.bfloat16()) for arm, cast in casts.items()}
    if part == "linear":
        steps = dict(linear_steps(asked.size, missing))
    seconds = alternate(steps, range(-2, asked.rounds), clock_of(x.device, asked.clock))
    rows: list[dict[str, Any]] = [{"part": part, "arm": name, "refused": "is not installed"} for name in missing]
    for arm, values in seconds.items():
        ours = f"{arm.split(',')[0]}, ours"
        firsts = ("BF16", "FP32") if part == "linear" else (ours,)
        row = {"part": part, "arm": arm, "seconds": spread(values), "threads": torch.get_num_threads()}
        row |= {f"ratio to {first}": spread(values / seconds[first]) for first in firsts}
        if part == "casts":
            pairs = [(casts[arm](one), casts[ours](one)) for one in (x.bfloat16(), x)]
            row["equal in BF16"], row["equal in FP32"] = (float((a == b).double().mean()) for a, b in pairs)
        rows.append(row)
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", help="overrides of the config, as for gnmr train")
    parser.add_argument(
        "--only",
        choices=(*PARTS, "linear", "casts", "share"),
        action="append",
        help="a part, or several; without it controller and paths",
    )
    parser.add_argument("--size", type=int, nargs=3, default=(2048, 768, 768), metavar=("TOKENS", "INPUTS", "OUTPUTS"))
    parser.add_argument("--arms", metavar="REGEX", default="", help="only the arms whose names match (re.search)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    asked = parser.parse_intermixed_args()
    torch._dynamo.config.recompile_limit = 64  # compiled arms share the code of one block
    if asked.only == ["share"]:
        write(asked.out, share(asked))
        return
    measured = dict.fromkeys(PARTS, measure) | {"linear": peers, "casts": peers}
    write(asked.out, [row for part in asked.only or ("controller", "paths") for row in measured[part](part, asked)])


if __name__ == "__main__":
    main()
