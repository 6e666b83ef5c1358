"""Files of a run folder, written so that a kill at any moment leaves them readable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from gnmr.records.disk import no_link, replacing, truncate
from gnmr.records.reader import iter_jsonl

_JSON = json.JSONEncoder(allow_nan=False)


def encode(value: Any) -> Any:
    """Return the value with non-finite floats as the strings nan, inf and -inf; `reader.decode` is the inverse."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def replace_text(path: Path, text: str) -> None:
    """Replace the file atomically: a reader finds the old text or the new one, never a part."""
    with replacing(path) as file:
        file.write(text.encode())


def as_json(tree: dict[str, Any]) -> str:
    """Return an indented JSON object, in which non-finite numbers are strings."""
    return json.dumps(encode(tree), indent=2, allow_nan=False) + "\n"


def replace_json(path: Path, tree: dict[str, Any]) -> None:
    """Replace the file atomically by a JSON object."""
    replace_text(path, as_json(tree))


class AppendFile:
    """A file that only grows. Every piece is flushed to the operating system; `sync` brings it to the disk."""

    def __init__(self, path: Path) -> None:
        """Open the file to append to it. Raises OSError for a link."""
        self.path = path
        self._file: BinaryIO = open(path, "ab", opener=no_link)  # noqa: SIM115 (open until `close`)

    def append(self, data: bytes) -> None:
        """Write the data with one system call."""
        self._file.write(data)
        self._file.flush()

    def sync(self) -> None:
        """Bring the rows to the disk; does nothing after `close`."""
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; every row was flushed before."""
        self._file.close()


class JsonLines(AppendFile):
    """A JSONL file whose rows hold exactly the keys of `fields`, and some of them those of `further` too."""

    def __init__(self, path: Path, fields: Iterable[str], further: Iterable[str] = ()) -> None:
        super().__init__(path)
        self._fields = dict.fromkeys(fields)
        self._all_fields = self._fields | dict.fromkeys(further)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows, their keys in the order of `fields`. A missing or unknown key is a bug in gnmr.

        Args:
            rows: the rows, each of which is a line of the file.

        Raises:
            OSError: they cannot be written.
        """
        lines = []
        for row in rows:
            fields = self._fields if len(row) == len(self._fields) else self._all_fields
            assert row.keys() == fields.keys(), f"{self.path.name}: keys {sorted(row.keys() ^ fields.keys())}"
            ordered = row if [*row] == [*fields] else {key: row[key] for key in fields}
            try:
                text = _JSON.encode(ordered)
            except ValueError:  # NaN or Inf
                text = _JSON.encode(encode(ordered))
            lines.append(text + "\n")
        self.append("".join(lines).encode())


def cut_jsonl(path: Path, last_step: int) -> int:
    """Truncate the file after the rows of `last_step` and return the last step that is left, 0 if there is none.

    A torn last line is dropped as well. Truncating needs no space, so it works on a full disk. Raises `Damaged` if a
    row up to that step is damaged.
    """
    end = last = 0
    if path.exists():
        for row, after in iter_jsonl(path):
            if row["step"] > last_step:
                break
            end, last = after, row["step"]
        truncate(path, end)
    return last
