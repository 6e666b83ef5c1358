"""Check a CUDA GPU in at most ten minutes: the bits of the casts, the speed of a step, the overhead of the controller.

    python benchmarks/gpu.py OUT.json model=llama_60m data=stdlib     # make gpu-check
    python benchmarks/gpu.py OUT.json --only correctness

Each part is a process of its own under a time limit, so a part that hangs or crashes becomes a row with `failed`, and
the other parts still run. Words without a dash are overrides of the config, as for `gnmr train`.

    correctness  every cast (rounded to nearest) and every saved format against the CPU, element by element; FP8 GEMMs
                 of `F.scaled_mm` against their simulation (SQNR, dB); INT8 GEMMs against the CPU's integers
    speed        BF16, FP8 and saved activations, eager: arms of `paths` in step.py
    compiled     BF16 and FP8 under `torch.compile`
    controller   a step without controller, with monitoring and with the signal of GNMR
    train        200 steps of `gnmr train`
    diagnose     1.3 B parameters, random: the price of every operator from weights on disk, every operator measured,
                 and operator by operator with the whole model in memory (brute force, of a few operators)

A row has `refused` where this hardware or our backend has no such product. The exit status is 1 if a part failed or a
result is worse than `least`. `--device cpu` runs the same code on a CPU, for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import any_size
from gnmr.conversion import PathSpec, convert
from gnmr.formats import FORMATS, RECIPES
from gnmr.formats.cast import quantize
from gnmr.formats.scaling import compress, decompress
from gnmr.lab.models.stored import open_stored
from gnmr.measure.kl import divergence
from gnmr.plan.diagnose import diagnose
from step import HARDWARE
from timing import clock_of, write

STEP = str(Path(__file__).with_name("step.py"))
SPEED, CONTROLLER = r"^(bf16|fp8_hybrid|mxfp8|int8|int4)$|scaled_mm", "^(no controller|monitoring|gnmr_delta)$"
TRAINED = ("training.steps=200", "training.eval_sequences=128", "records.wandb=off", "records.live=off")
PARTS: dict[str, tuple[float, tuple[str, ...]]] = {
    "correctness": (60, (__file__, "{out}", "--here", "correctness")),
    "speed": (100, (STEP, "{out}", "--only", "paths", "--arms", SPEED, "--rounds", "5")),
    "compiled": (150, (STEP, "{out}", "--only", "compiled", "--rounds", "7")),
    "controller": (80, (STEP, "{out}", "--only", "controller", "--arms", CONTROLLER, "--rounds", "11")),
    "train": (110, ("-m", "gnmr", "train", "run_dir={out}", *TRAINED)),
    "diagnose": (100, (__file__, "{out}", "--here", "diagnose")),
}
"""Part: its limit in seconds, and what Python runs."""
ROTATED, DECIBELS = 0.999, 40.0
"""The least share of equal elements behind an FP32 Hadamard rotation, whose sums have another order on a GPU, and the
least SQNR of FP8 GEMMs. One H200 had 49 dB."""
DIAGNOSED, SEQUENCES, TOKENS = "llama-1.3b", 8, 128
"""The model of `diagnose`, the sequences of its estimate, and their tokens. It is measured on one sequence."""
MOST_BYTES = 9 * 2**30
"""Device memory that either way of diagnosing may take."""
BRUTE_FORCE = 8
"""Operators that brute force measures; the time of all is extrapolated."""


def sample(dtype: torch.dtype) -> Tensor:
    """Return random numbers with outlier columns, a row of zeros, tiny, infinite and NaN elements."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    x[:, ::64] *= 20
    x[0] = 0
    x[1] *= 1e-38
    x[2, 1], x[128, 2] = torch.inf, torch.nan
    return x.to(dtype)


def equal_share(here: Tensor, there: Tensor) -> float:
    """Return the share of equal elements; NaN equals NaN."""
    there = there.cpu()
    return float(((here == there) | ((here != here) & (there != there))).double().mean())


def passed(low: str, backend: str, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Return what each GEMM of one linear layer computes on the recipe `low` from fixed random numbers."""
    torch.manual_seed(0)
    net, x, dy = nn.Sequential(nn.Linear(256, 512, bias=False)), torch.randn(tokens, 256), torch.randn(tokens, 512)
    net, x, dy = net.to(device, torch.bfloat16), x.to(device, torch.bfloat16).requires_grad_(), dy.to(device).bfloat16()
    convert(net, PathSpec.of(low, None, targets=["0"], backend=backend), shown=False)
    y = net(x)
    y.backward(dy)
    assert x.grad is not None and net[0].weight.grad is not None
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": net[0].weight.grad}


def sqnr(found: Tensor, true: Tensor) -> float:
    """Return the ratio of the norms of `true` and of the difference, in dB: 980 if equal, -980 if not finite."""
    ratio = true.double().norm() / (found.double() - true.double()).norm()
    return 20 * float(ratio.nan_to_num(1e49 if found.equal(true) else 1e-49).clamp(1e-49, 1e49).log10())


def correctness(device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each kind of result: the number compared, the smallest agreement, and what is below `least`."""
    rows: list[dict[str, Any]] = []

    def add(arm: str, found: dict[str, float], least: float) -> None:
        below = {name: value for name, value in found.items() if not value >= least}
        row = {"arm": arm, "compared": len(found), "smallest": min(found.values()), "least": least, "below": below}
        rows.append({"part": "correctness", **row})

    nearest = [replace(cast, stochastic=False) for recipe in RECIPES.values() for cast in recipe.casts]
    for dtype in (torch.bfloat16, torch.float32):
        x, kind = sample(dtype), str(dtype).removeprefix("torch.")
        both = x, x.where(x.isfinite(), 1)  # one NaN makes a tensor NaN that has one scale
        for turned, least in ((False, 1.0), (True, ROTATED)):
            casts = {(str(cast), dim): cast for cast in nearest for dim in (0, 1) if cast.hadamard == turned}
            shares = {
                f"{name} along {dim}": min(
                    equal_share(quantize(each, cast, dim)[0], quantize(each.to(device), cast, dim)[0]) for each in both
                )
                for (name, dim), cast in casts.items()
            }
            add(f"casts{', rotated' * turned}, {kind}", shares, least)
        finite, codes = x.isfinite().all(1), dict[str, float]()
        for name, fmt in FORMATS.items():
            if name != "bf16":  # which has no codes; codes of rows that are not finite have no meaning
                (here, scale), (there, scale_there) = (compress(each, fmt) for each in (x, x.to(device)))
                values = decompress(here, scale, fmt, 512, dtype), decompress(there, scale_there, fmt, 512, dtype)
                codes[name] = min(equal_share(here[finite], there.cpu()[finite]), equal_share(*values))
        add(f"saved formats, {kind}", codes, 1.0)
    for low in (*HARDWARE, "mxfp8", "llm_int8"):
        arm, found = f"{low} GEMMs", dict[str, float]()
        try:
            for tokens in (1, 16, 17, 100, 256):
                real = passed(low, "int_mm" if low == "llm_int8" else "scaled_mm", tokens, device)
                if low == "llm_int8":
                    same = passed(low, "simulated", tokens, torch.device("cpu"))["fprop"]
                    found[f"{tokens} tokens"] = equal_share(same, real["fprop"])
                    continue
                wanted = passed(low, "simulated", tokens, device)
                found |= {f"{gemm}, {tokens} tokens": sqnr(real[gemm], wanted[gemm]) for gemm in wanted}
            add(arm, found, 1.0 if low == "llm_int8" else DECIBELS)
        except (ValueError, RuntimeError) as error:
            how = "refused" if isinstance(error, ValueError) else "failed"
            rows.append({"part": "correctness", "arm": arm, how: str(error).partition("\n")[0]})
    return rows


def diagnosed(device: torch.device) -> list[dict[str, Any]]:
    """Return time and peak memory of the two ways to diagnose a model from its files, and of brute force."""
    tokens = torch.randint(1000, (SEQUENCES, 1, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    rows: list[dict[str, Any]] = []

    def add(arm: str, work: Callable[[], int]) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        clock = clock_of(device)
        began = clock()
        operators = work()
        row: dict[str, Any] = {"part": "diagnose", "arm": arm, "operators": operators}
        row |= {"wall_s": clock() - began, "peak_bytes": None}
        if device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
            if arm != "brute force" and row["peak_bytes"] > MOST_BYTES:
                row["failed"] = f"takes {row['peak_bytes'] / 2**30:.3g} GiB, more than {MOST_BYTES / 2**30:.3g}"
        rows.append(row)

    with tempfile.TemporaryDirectory(prefix="gnmr-gpu-") as folder:
        any_size.make(DIAGNOSED, checkpoint := Path(folder, "checkpoint"))

        def from_files(measure: str, batches: Tensor) -> int:
            model, weights = open_stored(str(checkpoint), torch.float32, device)
            diagnosis = diagnose(
                model,
                lambda x: model(x).logits,
                batches,
                recipe="nvfp4",
                rescue="bf16",
                measure=measure,
                confirm=0,
                weights=weights.read,
            )
            return len(diagnosis.operators)

        def one_after_the_other() -> int:
            model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device).eval()
            converted = convert(model, PathSpec.of("nvfp4", "bf16", backend="simulated"), shown=False)
            with torch.no_grad():
                for operator in converted.operators:
                    operator.switch(True)
                log_p = model(tokens[0]).logits.log_softmax(-1)
                for operator in converted.operators[:BRUTE_FORCE]:
                    operator.switch(False)
                    divergence(log_p, model(tokens[0]).logits)
                    operator.switch(True)
            return min(BRUTE_FORCE, len(converted.operators))

        add("estimate", lambda: from_files("estimate", tokens))
        add("measured", lambda: from_files("all", tokens[:1]))
        add("brute force", one_after_the_other)
    return rows


HERE = {"correctness": correctness, "diagnose": diagnosed}
"""Parts that are functions of this script."""


def run(part: str, words: list[str], device: str) -> list[dict[str, Any]]:
    """Return the rows of a part, run in its own process; one row with `failed` if it crashes or exceeds its limit."""
    limit, command = PARTS[part]
    with tempfile.TemporaryDirectory(prefix="gnmr-gpu-") as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        own = ["--device", device] if part in HERE else [f"training.device={device}", *words]
        with log.open("w") as file:
            argv = [sys.executable, *(word.format(out=out) for word in command), *own]
            process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = f"longer than {limit} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # and the processes of torch.compile
                    process.wait()
        if code:
            said = log.read_text(errors="replace").strip().rpartition("\n")[2]
            return [{"part": part, "arm": "all", "failed": f"{code}: {said[:300]}"}]
        if part != "train":
            return [{**row, "part": part} for row in json.loads(out.read_text())["rows"]]
        found = json.loads((out / "summary.json").read_text())
    keys = ("steps", "final_val_loss", "step_time_median_s", "tokens_per_s", "peak_memory_bytes", "promotion_frac")
    return [{"part": part, "arm": "gnmr train"} | {key: found[key] for key in keys}]


def figure(row: dict[str, Any]) -> str:
    """Return what the table says of a row."""
    for word in ("refused", "failed"):
        if word in row:
            return f"{word}: {row[word]}"
    if row["part"] == "correctness":
        verdict = f"DIFFERS in {', '.join(row['below'])}" if row["below"] else "ok"
        return f"{verdict}: smallest of {row['compared']} is {row['smallest']:.6g}, least {row['least']:.6g}"
    if row["part"] == "diagnose":
        memory = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 2**30:.3g} GiB"
        return f"{row['operators']} operators in {row['wall_s']:.3g} s{memory}"
    if row["part"] == "train":
        speed = f"{row['step_time_median_s']:.4g} s a step, {row['tokens_per_s']:.5g} tokens/s"
        return f"validation loss {row['final_val_loss']}, {speed}"
    if "seconds" not in row:
        return f"saves {row['saved_bytes'] / 1e9:.4g} GB, peak {row.get('peak_bytes', 0) / 1e9:.4g} GB"
    ratio = row["ratio"]
    return f"{row['seconds']['median']:.4g} s, {ratio['median']:.3f}x [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", help="overrides of the config, as for gnmr train")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part, or several; without it all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--here", choices=HERE, help="run this part in this process")
    asked = parser.parse_intermixed_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device; run this on a machine with one")
    if asked.here:
        write(asked.out, HERE[asked.here](torch.device(asked.device)))
        return
    rows = []
    for part in asked.only or PARTS:
        rows += (found := run(part, asked.overrides, asked.device))
        for row in found:
            print(f"{part:<12} {row['arm']:<28} {figure(row)}", flush=True)
        write(asked.out, rows)  # what is done is kept if the next part takes too long
    if any(row.get("failed") or row.get("below") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
