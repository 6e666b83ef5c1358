"""Rows of a benchmark that takes hours, a line of JSON each, so that a second call goes on where the first stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gnmr.disk import replacing
from gnmr.errors import UserError

Cell = TypeVar("Cell")


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """What is recorded already; a last line that was cut off is not."""
    if not file.exists():
        return
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise UserError(f"{file}: line {number} is no JSON; move the file away to begin anew") from None


def resume(file: Path, cell: Callable[..., Cell], key: str = "fork") -> dict[Cell, dict[str, Any]]:
    """The rows of before, by the cell that stands under `key`; the file is left without a last line that was cut off,
    and its folder is made."""
    known = {cell(**row[key]): row for row in read_rows(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as whole:
        whole.write("".join(json.dumps(row) + "\n" for row in known.values()).encode())
    return known


def put(file: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Writes a row behind the others, and gives it back."""
    with file.open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    return row
