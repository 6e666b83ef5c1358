"""Rows that a script appends to a file one by one, so that it goes on from there when it is started again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Rows:
    """The rows of a file, one JSON object a line. An incomplete last line is no row, and the next row replaces it."""

    def __init__(self, file: Path) -> None:
        """Read the rows that are there; a missing file has none."""
        self.file = file
        content = file.read_bytes() if file.exists() else b""
        complete, newline, _ = content.rpartition(b"\n")
        self._read, self._end = len(content), len(complete + newline)
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in complete.splitlines()]

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, and write it to the file before anything else happens."""
        with self.file.open("ab") as file:
            if file.tell() == self._read > self._end:  # nobody else has written since
                file.truncate(self._end)
            file.write(json.dumps(row).encode() + b"\n")
        self.rows.append(dict(row))
