"""records.sha256: what each record of a run that has ended holds, as `sha256sum -c` reads it.

Who reads a run's figures checks it first. A run of an earlier version has none and is read as it is. Of a run that goes
on or was killed the newest checkpoint tells what its files begin with.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from gnmr.errors import UserError
from gnmr.records.appending import holds
from gnmr.records.disk import no_link, sha256
from gnmr.records.files import replace_json, replace_text
from gnmr.records.reader import stored
from gnmr.records.untrusted import MAX_EXPANSION, SMALL, opened

NAME = "records.sha256"
LEFT_OUT = "left_out.sha256"
"""As `NAME`, of the records that were left out of a pack (gnmr.lab.records.pack) which this folder was read from."""
LISTED = (
    *("config.yaml", "header.json", "faults.jsonl", "steps.jsonl", "eval.jsonl", "events.jsonl", "scores.jsonl"),
    *("ratios.rows", "ratios.parquet", "summary.json", "FAILED"),
)
_MAY_GO = ("steps.jsonl", "ratios.rows", "ratios.parquet", "scores.jsonl", "scores.json", "scores-low.json")
"""The large ones and scores, without which a run that is kept still tells its figures."""
_MOST_BYTES = 1 << 33  # what is hashed of a file that others made
_MOST_META = 1 << 26
_MOST_NAMED = 1 << 16  # bytes of a ledger


def write(folder: Path) -> None:
    """Names every record that is there."""
    names = [*LISTED, *sorted(path.name for path in folder.glob("scores*.json"))]
    _put(folder, {name: sha256(folder / name) for name in names if (folder / name).exists()})


def replace_listed(path: Path, tree: dict[str, Any]) -> None:
    """`replace_json`; the ledger beside the file, if there is one, names it afterwards."""
    named = read(path.parent)
    if named is not None:
        named.pop(path.name, None)
        _put(path.parent, named)
    replace_json(path, tree)
    if named is not None:
        _put(path.parent, named | {path.name: sha256(path)})


def _put(folder: Path, found: dict[str, str]) -> None:
    replace_text(folder / NAME, "".join(f"{digest}  {name}\n" for name, digest in found.items()))


def check_records(folder: Path) -> None:
    """UserError for a record that is not what the run wrote, as far as that is known."""
    wanted = read(folder)
    if wanted is None:
        _check_beginnings(folder)
        return
    for name, digest in wanted.items():
        path = folder / name
        found = stored(path)
        if found is None and (name in _MAY_GO or name in left_out(folder)):
            continue
        if found is None or digest_of(found, found != path) != digest:
            raise UserError(f"{path}: {'missing' if found is None else 'damaged'} (it is not what {NAME} names)")


def left_out(folder: Path) -> set[str]:
    """Names of the records that the pack this folder comes from left out."""
    return set(read(folder, LEFT_OUT) or ())


def read(folder: Path, name: str = NAME) -> dict[str, str] | None:
    """The sha256 of each record by its name; None without a ledger, UserError for one that is damaged."""
    path = folder / name
    try:
        with open(path, "rb", opener=no_link) as file:
            rows = file.read(_MOST_NAMED).decode("ascii").split("\n")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    found = [row for row in (re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", row) for row in rows[:-1]) if row]
    if rows[-1] or not found or len(found) < len(rows) - 1:
        raise UserError(f"{path}: damaged")
    return {row[2]: row[1] for row in found}


def digest_of(path: Path, packed: bool) -> str:
    """The sha256 of a file's content, of X.jsonl.gz that of X.jsonl. UserError for a damaged copy."""
    digest, total = hashlib.sha256(), 0
    try:
        with opened(path, _MOST_BYTES) as raw, gzip.open(raw) if packed else raw as file:
            most = SMALL + MAX_EXPANSION * os.fstat(raw.fileno()).st_size if packed else _MOST_BYTES
            while part := file.read(1 << 20):
                digest.update(part)
                total += len(part)
                if total > most:
                    raise UserError(f"{path}: expands without end")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error})") from error
    return digest.hexdigest()


def _check_beginnings(folder: Path) -> None:
    """The same by what the newest checkpoint counted; nothing where there is none."""
    checkpoints = sorted(folder.glob("checkpoints/step-????????/meta.json"), reverse=True)
    for name, count in (_counted(checkpoints[0]) if checkpoints else {}).items():
        path = folder / name
        try:
            if not path.exists():
                continue
            opened(path, _MOST_BYTES).close()
            if count["bytes"] > _MOST_BYTES or not holds(path, count):
                raise UserError(f"{path}: damaged (it is not what the checkpoint {checkpoints[0].parent.name} counted)")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _counted(meta: Path) -> dict[str, dict[str, Any]]:
    """What a checkpoint counted of the files; nothing if it is unreadable, which is told where it is loaded."""
    try:
        with open(meta, "rb", opener=no_link) as file:
            files = json.loads(file.read(_MOST_META))["host"]["records"]["files"]
        return {str(name): {"bytes": int(c["bytes"]), "sha256": str(c["sha256"])} for name, c in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
