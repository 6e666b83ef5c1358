"""Text files of a run folder, written so that a kill at any moment leaves them readable."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnmr.errors import UserError
from gnmr.records.appending import AppendFile
from gnmr.records.disk import no_link, replacing, truncate
from gnmr.records.reader import iter_sound, stored

_JSON = json.JSONEncoder(allow_nan=False)


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
    """Writes beside, syncs and renames, so that a reader finds the old text or the new one, never half of it."""
    with replacing(path) as file:
        file.write(text.encode())


def replace_json(path: Path, tree: dict[str, Any]) -> None:
    """As `replace_text`, of an object; NaN and Inf become words."""
    replace_text(path, json.dumps(encode(tree), indent=2, allow_nan=False) + "\n")


class JsonLines(AppendFile):
    """Appends rows that hold exactly the keys of `fields`."""

    def __init__(self, path: Path, fields: Iterable[str]) -> None:
        super().__init__(path)
        self._fields = tuple(fields)
        self._keys = frozenset(self._fields)
        self._name = path.name

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Keys in the order of `fields`, floats with all their digits. A missing or unknown key is our own bug."""
        lines = []
        for row in rows:
            assert row.keys() == self._keys, f"{self._name}: keys {sorted(row.keys() ^ self._keys)}"
            ordered = {key: row[key] for key in self._fields}
            try:
                text = _JSON.encode(ordered)
            except ValueError:  # NaN or Inf
                text = _JSON.encode(encode(ordered))
            lines.append(text + "\n")
        self.append("".join(lines).encode())


def unpack(path: Path) -> None:
    """Puts a .jsonl file in the place of its compressed copy, where there is only that."""
    found = stored(path)
    if found is None or found == path:
        return
    try:
        with open(found, "rb", opener=no_link) as packed, gzip.open(packed) as source, replacing(path) as target:
            shutil.copyfileobj(source, target)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{found}: damaged ({error})") from error
    found.unlink()


def cut_jsonl(path: Path, last_step: int, fields: Iterable[str] = ()) -> int:
    """Drops the rows after `last_step`, the first that is damaged or lacks one of `fields` and what follows it, and a
    torn last line. Rows stand in order of their step: that of the last row which is left comes back, 0 without one.

    Truncating is one system call and needs no space, so it works on a full disk and cannot be half done.
    """
    end = last = 0
    if not path.exists():
        return last
    for row, after in iter_sound(path, []):
        step = row.get("step")
        if type(step) is not int or not last <= step <= last_step or not row.keys() >= set(fields):
            break
        end, last = after, step
    truncate(path, end)
    return last
