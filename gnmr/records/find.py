"""Which folders are runs, which of them is the latest, and how far a run is."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from gnmr.errors import UserError

LATEST = "latest"  # the word for the run below runs/ whose records were written last, wherever a run's folder is named
SMOKE = "smoke"
"""The folder of runs/ with trials: runs of debug=smoke, and of fewer than `TRIAL` steps that the command line asks for.
A trial that the command line puts elsewhere (runs_dir=, run_dir=) is one too. No trial is the latest run while there is
another run."""
TRIAL = 100
_RECORDS = ("DONE", "FAILED", "summary.json", "steps.jsonl", "eval.jsonl", "header.json")
_TAIL_BYTES = 1 << 16  # much longer than a row of steps.jsonl


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders at or below the paths, each once, in order of name.

    Hidden folders below a path are passed over.

    Raises:
        UserError: a path does not exist or has no run in it.
    """
    runs: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            trial = path.parent / SMOKE / path.name
            meant = f"; did you mean {trial}?" if trial.is_dir() else ""
            raise UserError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}{meant}")
        inside = []
        for parent, folders, files in os.walk(path):
            names = {*folders, *files}  # of any kind: a reader refuses all but regular files
            if "config.yaml" in names and names & {"steps.jsonl", "header.json"}:
                inside.append(Path(parent))
                # There is no run inside a run.
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith("."))
        if not inside:
            raise UserError(f"{path}: no run in it (a run folder holds config.yaml and steps.jsonl or header.json)")
        for folder in inside:
            # Two paths may lead to one run, which counts once.
            runs.setdefault(folder.resolve(), folder)
    return list(runs.values())


def changed(run: Path) -> float:
    """Return when a run's records were written last.

    Returns:
        Seconds since the epoch; 0 if the run has no records.
    """
    times = [0.0]
    for name in _RECORDS:
        with suppress(OSError):
            times.append((run / name).lstat().st_mtime)
    return max(times)


def named(place: str, root: str | Path = "runs") -> str:
    """Return the place, or for the word `latest` the latest run below `root`, trials aside if there are other runs.

    Raises:
        UserError: there is no run below `root`.
    """
    # A folder of the user that has this name comes before the word.
    if place != LATEST or os.path.lexists(place):
        return place
    if not Path(root).is_dir():
        raise UserError(f"{LATEST}: there is no folder {root}/ here, so no run; name a run's folder")
    runs = sorted(find_runs([Path(root)]), key=changed, reverse=True)
    return str(next((run for run in runs if not _is_trial(run, Path(root))), runs[0]))


def _is_trial(run: Path, root: Path) -> bool:
    """Return True for a trial: by its folder below `root`, or by the command in its header."""
    from gnmr.records.reader import read_json  # imported here, because it imports pyarrow

    if SMOKE in run.relative_to(root).parts:
        return True
    with suppress(OSError, UserError, ValueError):  # what cannot be read is a run all the same
        header = read_json(run / "header.json") or {}
        settings = dict(word.partition("=")[::2] for word in shlex.split(str(header.get("command"))))
        # A fork of a base always has few steps.
        few_steps = int(settings.get("training.steps", TRIAL)) < TRIAL
        return header.get("base") is None and (few_steps or settings.get("debug") == SMOKE)
    return False


def finished(folder: Path) -> str:
    """Return one line about a run that is done.

    Returns:
        The folder's name, perplexity, the share of numbers sent or of GEMM FLOPs spent, and the wall time. Figures
        are left out if summary.json has none, or cannot be read.
    """
    from gnmr.records.reader import read_json  # imported here, because it imports pyarrow

    figures = [folder.name]
    with suppress(OSError, ValueError, KeyError, TypeError):  # the report names records that cannot be read
        summary = read_json(folder / "summary.json") or {}
        if (perplexity := summary["final_val_ppl"]) is not None:
            figures.append(f"ppl {perplexity:.2f}")
        if (sent := summary.get("numbers_sent_frac")) is not None:  # the cost of recovery with compressed gradients
            figures.append(f"sent {sent:.1%}")
        elif (spent := summary["spent_gemm_frac"]) is not None:
            figures.append(f"GEMM FLOPs spent {spent:.1%}")
        figures.append(str(timedelta(seconds=round(summary["wall_time_s"]))))
    return "  ".join(figures)


def last_step(folder: Path) -> int:
    """Return the step of the last complete row of steps.jsonl, read from its end.

    Returns:
        The step; 0 if there is no such row.
    """
    try:
        with (folder / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            # The last piece is empty or a row that a kill cut short, so the last complete row is the one before.
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, IndexError, ValueError):
        return 0
