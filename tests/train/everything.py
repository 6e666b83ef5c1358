"""All that a run leaves which must not depend on how often it was stopped, and processes that die on cue."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from close import EIGHT_BITS, apart
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.overrides import TorchFunctionMode

from gnmr.records.reader import read_json, read_jsonl, read_units

WAITING = {"cpu", "item", "tolist", "numpy", "nonzero", "masked_select", "equal", "allclose", "unique"}
WAITING |= {"__bool__", "__float__", "__int__", "__index__"}
MEASURED = ("wall_time_s", "step_time_median_s", "tokens_per_s", "mfu", "peak_memory_bytes")
"""What the summary says of the machine."""


def weights(folder: Path) -> dict[str, Any]:
    """The newest checkpoint as it was saved: model, optimizer, controller, plan and generators."""
    newest = max((folder / "checkpoints").glob("step-*"))
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(newest, file)
    return torch.load(file, weights_only=False)


def everything(folder: Path, *fields: str) -> dict[str, Any]:
    """Every record of a run but its times and these `fields` of its steps, and its last state."""
    newest = max((folder / "checkpoints").glob("step-*"))
    summary = read_json(folder / "summary.json")
    return {
        "files": sorted(p.name for p in folder.iterdir()),
        "checkpoints": sorted(p.name for p in (folder / "checkpoints").iterdir()),
        "steps": [without(row, "step_time_s", "tokens_per_s", *fields) for row in read_jsonl(folder / "steps.jsonl")],
        "eval": read_jsonl(folder / "eval.jsonl"),
        "events": read_jsonl(folder / "events.jsonl"),
        "units": read_units(folder).to_pylist(),
        "summary": summary and without(summary, *MEASURED),
        "host": without(json.loads((newest / "meta.json").read_text())["host"], "records"),
        "state": weights(folder),
    }


SHARDED: dict[str, Any] = {"terms": 48, "products": 60, "recast": EIGHT_BITS}
"""For `differences` between a tiny run in shards and one in whole tensors: a shard begins at another address, so that a
kernel may add in another order. Ranks of parallel=ddp have whole tensors and leave the bits of one process."""


def losses(folder: Path) -> list[float]:
    """The loss of every step."""
    return [row["loss"] for row in read_jsonl(folder / "steps.jsonl")]


def without(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in keys}


def differences(a: Any, b: Any, where: str = "", **sums: Any) -> list[str]:
    """Places where two trees differ in any bit; NaN equals NaN. With `sums`, by more than `close.apart` allows."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys(), key=str)
        return [line for key in keys for line in differences(a.get(key), b.get(key), f"{where}.{key}", **sums)]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        both = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in both for line in differences(x, y, f"{where}[{i}]", **sums)]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if same_bits(a, b) or (sums and not apart(a, b, **sums)) else [where]
    same = a == b or (a != a and b != b)
    if sums and not same and isinstance(a, float) and isinstance(b, float):
        same = not apart(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), **sums)
    return [] if same else [f"{where}: {a!r} != {b!r}"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit, type and shape included."""
    raw_a, raw_b = (t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_a, raw_b)


def in_child(task: Callable[[], object]) -> int:
    """Exit status of `task` in a child process: its exit code, or minus the signal that killed it.

    Forked, so that a test can put a hook into the child alone and need not wait for the imports again.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
            task()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Waits(TorchFunctionMode):
    """Notes the calls that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := getattr(func, "__name__", "")) in WAITING:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
