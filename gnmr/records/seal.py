"""Size and CRC-32 of a run's files, by which a reader notices lost and changed rows.

DONE holds them for every file of the finished run. Each checkpoint of an unfinished run holds them for the rows up to
its step. DONE of an earlier version is empty; such a run has no such protection.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gnmr.records.append import begins_with, count
from gnmr.records.reader import UNITS, read_json, read_jsonl
from gnmr.records.untrusted import Damaged, content, exists, opened, reading

ROWS = ("steps.jsonl", "eval.jsonl", "events.jsonl", "faults.jsonl", "scores.jsonl", UNITS)
FILES = (*ROWS, "summary.json", "header.json", "config.yaml")

Counts = dict[str, list[int]]  # bytes and CRC-32 of each file, by its name


def sealed(folder: Path) -> str:
    """Return the content of DONE for the files that `folder` holds now."""
    return json.dumps({name: count(folder / name) for name in FILES if (folder / name).exists()}) + "\n"


def check(folder: Path, names: Iterable[str] = FILES) -> bool:
    """Compare files of a run folder with what its DONE or its newest checkpoint counted.

    Rows after the checkpoint of an unfinished run are not compared. Warns if units.arrows is missing: it is by far the
    largest file, so a user may have deleted it on purpose.

    Args:
        folder: the run folder.
        names: the files to compare.

    Returns:
        True if DONE counted the files, which are then whole.

    Raises:
        Damaged: if a file is missing, or its counted part differs.
    """
    # DONE counts whole files. A checkpoint counts their beginnings, because the run may have gone on.
    done = _counts_of_done(folder)
    counts, since = (done, "the run ended") if done is not None else _counts_of_checkpoint(folder)
    for name in names:
        size, crc32 = counts.get(name, (0, 0))
        path = folder / name
        with reading(path):
            if not exists(path):
                if size and name != UNITS:
                    raise Damaged(f"{path}: is missing since {since}; copy the run again")
                if size:
                    warnings.warn(f"{path}: is missing since {since}, so no units are shown", stacklevel=3)
            elif name in counts and not (
                begins_with(path, [size, crc32]) and (done is None or path.lstat().st_size == size)
            ):
                raise Damaged(f"{path}: was changed or lost rows since {since}; copy the run again")
    return done is not None


def check_rows(
    folder: Path, steps: Sequence[float], final_val_loss: float | None, planned: int | None, later: int = 0
) -> None:
    """Compare the rows of a run that DONE does not count with its summary, its length and its end.

    Args:
        folder: the run folder.
        steps: the steps of the rows of steps.jsonl.
        final_val_loss: the last one of eval.jsonl; None without rows.
        planned: the number of steps that the config asks for; None for a user's own loop, which may begin anywhere.
        later: the last step of the other files. A step's own row is written before them.

    Raises:
        Damaged: if rows are missing.
    """
    path, summary, done = folder / "steps.jsonl", read_json(folder / "summary.json") or {}, exists(folder / "DONE")
    if not exists(path):
        return
    # Steps count from 1 without a gap, so the last one is the number of rows.
    last = int(steps[-1]) if len(steps) else 0
    if planned is not None and last != len(steps):
        raise Damaged(f"{path}: {len(steps):,} rows up to step {last:,}, so rows are missing; copy the run again")
    # A kill may cut the row of one step, and the run may have gone on since `steps` were read.
    if planned is not None and later > last + 1 and not any(row["step"] >= later for row in read_jsonl(path)):
        raise Damaged(f"{path}: ends after step {last:,}, and other files reach step {later:,}; copy the run again")
    if (counted := summary.get("steps")) is not None and counted != len(steps):
        raise Damaged(f"{path}: {len(steps):,} rows, and summary.json counts {counted:,}; copy the run again")
    if done and planned is not None and last < planned:
        raise Damaged(
            f"{folder / 'DONE'}: the rows end after step {last:,} of {planned:,}; remove DONE, and the command that "
            "began the run continues it"
        )
    loss_of_summary = summary.get("final_val_loss")
    same_loss = loss_of_summary is None or repr(loss_of_summary) == repr(final_val_loss)
    if exists(folder / "eval.jsonl") and not same_loss:
        raise Damaged(f"{folder / 'eval.jsonl'}: ends with another loss than summary.json; copy the run again")
    # All but the last of `ROWS` are text, and a finished run leaves no line without its end.
    for name in ROWS[:-1] if done else ():
        with suppress(FileNotFoundError), opened(folder / name) as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                raise Damaged(f"{folder / name}: ends within a line, although the run is done; copy the run again")


def _counts_of_done(folder: Path) -> Counts | None:
    try:
        return _counts(json.loads(content(folder / "DONE", 1 << 16)))
    except (FileNotFoundError, ValueError, RecursionError):  # earlier versions wrote an empty file
        return None


def _counts_of_checkpoint(folder: Path) -> tuple[Counts, str]:
    """Return what the newest readable checkpoint counted, and its step in words."""
    for place in sorted((folder / "checkpoints").glob("step-" + "[0-9]" * 8), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # pruned meanwhile, or damaged
            text = content(place / "meta.json")
            if content(place / "meta.sha256").startswith(hashlib.sha256(text).hexdigest().encode()):
                meta = json.loads(text)
                return _counts(meta["host"]["records"]) or {}, f"the checkpoint of step {int(meta['step'])}"
    return {}, ""


def _counts(tree: object) -> Counts | None:
    """Return the tree if it holds two whole numbers for each name, else None."""
    if isinstance(tree, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        for pair in tree.values()
    ):
        return tree
    return None
