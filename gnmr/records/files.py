"""Text files of a run folder, written so that a kill at any moment leaves them readable."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnmr.records.reader import iter_jsonl, stored


def encode(value: Any) -> Any:
    """The inverse of `reader.decode`: non-finite floats to nan, inf and -inf, inside containers too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def replace_text(path: Path, text: str) -> None:
    """Writes beside and renames, so that a reader finds the old text or the new one, never half of it."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def replace_json(path: Path, tree: dict[str, Any]) -> None:
    """As `replace_text`, of an object; NaN and Inf become words."""
    replace_text(path, json.dumps(encode(tree), indent=2, allow_nan=False) + "\n")


class JsonLines:
    """Appends rows that hold exactly the keys of `fields`; every row is flushed to the operating system."""

    def __init__(self, path: Path, fields: Iterable[str]) -> None:
        self._file = path.open("ab")
        self._fields = tuple(fields)
        self._name = path.name

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Keys in the order of `fields`, floats with all their digits. A missing or unknown key is our own bug."""
        lines = []
        for row in rows:
            assert row.keys() == set(self._fields), f"{self._name}: keys {sorted(row.keys() ^ set(self._fields))}"
            lines.append(json.dumps({key: encode(row[key]) for key in self._fields}, allow_nan=False) + "\n")
        self._file.write("".join(lines).encode())
        self._file.flush()

    def close(self) -> None:
        """Nothing is lost without it: every row was flushed."""
        self._file.close()


def cut_jsonl(path: Path, last_step: int) -> int:
    """Drops the rows after `last_step` and a torn last line. Rows stand in order of their step: that of the last row
    which is left comes back, 0 without one.

    Truncating is one system call and needs no space, so it works on a full disk and cannot be half done. A compressed
    copy is unpacked first.
    """
    found = stored(path)
    if found is None:
        return 0
    if found != path:
        beside = path.with_name(path.name + ".tmp")
        with gzip.open(found) as source, beside.open("wb") as target:
            shutil.copyfileobj(source, target)
        os.replace(beside, path)
        found.unlink()
    end = last = 0
    for row, after in iter_jsonl(path):
        if row["step"] > last_step:
            break
        end, last = after, int(row["step"])
    os.truncate(path, end)
    return last
