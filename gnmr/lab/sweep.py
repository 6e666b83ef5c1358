"""How far a run of a sweep is, and the line that it leaves.

Hydra's own sweeper makes the cells: the product of the values under `hydra.sweeper.params` and on the command line. A
cell whose folder holds DONE is skipped, so the same command continues a sweep. Arms: `gnmr.lab.config.compose`.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

_TAIL_BYTES = 1 << 16  # holds a row of steps.jsonl many times over


def finished(folder: Path) -> str:
    """Return one line about a run that is done: its folder, perplexity, spend and time."""
    from gnmr.records.reader import read_json  # with pyarrow, which only this needs

    told = [folder.name]
    with suppress(OSError, ValueError, KeyError, TypeError):  # records that cannot be read: the report says which
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
    """Return the step of the last whole row of steps.jsonl, read from its end; 0 if there is none."""
    try:
        with (folder / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, IndexError, ValueError):
        return 0
