"""Measure the time of every GEMM of a model's operators on this device, for `gnmr diagnose ... times=FILE`.

    python benchmarks/gemm_times.py OUT.txt --plan plan/plan.json --tokens 4096
    python benchmarks/gemm_times.py OUT.txt --shapes 576x576,576x1536,1536x576 --tokens 512 --device cpu

OUT has the form of Transformer Engine's benchmarks/gemm/benchmark_gemm.py, which measures MXFP8 and NVFP4 on GPUs that
have them, with or without casts (`--pre-quantize`). This script needs PyTorch alone. It times products without casts:

    BF16            torch.matmul
    FP8Current      torch._scaled_mm with one scale a tensor
    llm_int8        torch._int_mm, in fprop

What the device has no kernel for is N/A. A time is the median of `--repeats` calls, each of as many products as take
10 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gnmr.names import GEMMS
from gnmr.plan.pin_plan import read_plan
from gnmr.records import output

CALL_SECONDS = 0.01
"""Time of a call that is timed."""


def bf16(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function of the product of (m, k) and (k, n) in BF16."""
    a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
    return lambda: a @ b.t()


def fp8(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function of the same product of E4M3 operands with one scale each, into BF16."""
    a, b = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def int8(m: int, k: int, n: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function of the same product of INT8 codes, into INT32."""
    a, b = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    return lambda: torch._int_mm(a, b.t())


PRODUCTS = {"BF16": bf16, "FP8Current": fp8, "llm_int8": int8}
"""Makes the product of a column."""
OF_GEMM = {"llm_int8": ("fprop",)}
"""The GEMMs of a column, if it has not all."""


def milliseconds(product: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """Return the median time of a product in ms."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None

    def seconds(number: int) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(number):
            product()
        synchronize()
        return time.perf_counter() - begin

    seconds(1)  # chooses kernels
    number = max(1, round(CALL_SECONDS / max(seconds(1), 1e-7)))
    return 1000 * statistics.median(seconds(number) / number for _ in range(repeats))


def cell(name: str, gemm: str, sizes: tuple[int, int, int], device: torch.device, repeats: int) -> str:
    """Return the time of a product on one precision as text, or N/A if this device has no such kernel."""
    if gemm not in OF_GEMM.get(name, GEMMS):
        return "N/A"
    try:
        return f"{milliseconds(PRODUCTS[name](*sizes, device), device, repeats):.5f}"
    except (RuntimeError, NotImplementedError, ValueError):
        return "N/A"


def table(shapes: Iterable[tuple[int, int]], tokens: int, device: torch.device, repeats: int) -> list[str]:
    """Return the lines of the tables of fprop, dgrad and wgrad."""
    shapes, lines = dict.fromkeys(shapes), []
    for gemm in GEMMS:
        lines += ["", f"{gemm.capitalize()} Shapes:", f"{'Op':<22} {'Shape':<24}"]
        lines[-1] += "".join(f" {name + ' ms':>14}" for name in PRODUCTS)
        for inputs, outputs in shapes:
            sizes = {
                "fprop": (tokens, inputs, outputs),
                "dgrad": (tokens, outputs, inputs),
                "wgrad": (inputs, tokens, outputs),
            }[gemm]
            cells = [cell(name, gemm, sizes, device, repeats) for name in PRODUCTS]
            lines.append(f"{f'{inputs} to {outputs}':<22} {'x'.join(map(str, sizes)):<24}")
            lines[-1] += "".join(f" {text:>14}" for text in cells)
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", help="a plan.json, or its folder: the shapes of its operators")
    parser.add_argument("--shapes", default="", help="INPUTSxOUTPUTS, with commas")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    shapes = [] if asked.plan is None else [*read_plan(asked.plan).operators.values()]
    for word in filter(None, asked.shapes.split(",")):
        inputs, _, outputs = word.partition("x")
        if not (inputs.isdecimal() and outputs.isdecimal() and int(inputs) and int(outputs)):
            parser.error(f"--shapes: {word}: must be INPUTSxOUTPUTS, as 576x1536")
        shapes.append((int(inputs), int(outputs)))
    if not shapes:
        parser.error("name shapes, with --plan or --shapes")
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    lines = table(shapes, asked.tokens, device, asked.repeats)
    output.write_text(asked.out, "\n".join([f"GEMM times on {name}, products alone", *lines, ""]), str(asked.out))


if __name__ == "__main__":
    main()
