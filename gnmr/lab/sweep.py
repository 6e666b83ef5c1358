"""The progress of a run in a sweep, and the line that reports its end.

Hydra's sweeper creates the cells: the product of the values under `hydra.sweeper.params` and on the command line. A
cell whose folder contains DONE is skipped, so the same command continues a sweep. See `gnmr.lab.config.compose` for
arms.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

_TAIL_BYTES = 1 << 16  # much longer than a row of steps.jsonl


def finished(folder: Path) -> str:
    """Return one line about a run that is done: its folder, perplexity, spend and time."""
    from gnmr.records.reader import read_json  # imported here, because it imports pyarrow

    told = [folder.name]
    with suppress(OSError, ValueError, KeyError, TypeError):  # the report names records that cannot be read
        summary = read_json(folder / "summary.json") or {}
        if (perplexity := summary["final_val_ppl"]) is not None:
            told.append(f"ppl {perplexity:.2f}")
        if (sent := summary.get("numbers_sent_frac")) is not None:  # the cost of recovery with compressed gradients
            told.append(f"sent {sent:.1%}")
        elif (spent := summary["spent_gemm_frac"]) is not None:
            told.append(f"GEMM FLOPs recovered {spent:.1%}")
        told.append(str(timedelta(seconds=round(summary["wall_time_s"]))))
    return "  ".join(told)


def last_step(folder: Path) -> int:
    """Return the step of the last complete row of steps.jsonl, read from its end, or 0 if there is none."""
    try:
        with (folder / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, IndexError, ValueError):
        return 0
