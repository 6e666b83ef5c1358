"""Rows of a benchmark that takes hours, a line of JSON each, so that a second call goes on where the first stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gnmr.errors import UserError
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.provenance import commit
from gnmr.records.disk import replacing

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


class Rows(dict[Cell, dict[str, Any]]):
    """Rows by their cell, those of before first; a row is in the file when `put` returns."""

    def __init__(
        self, file: Path, cell: Callable[..., Cell], bases: Mapping[str, Forks] | None = None, key: str = "fork"
    ) -> None:
        """Reads the file, leaves it without a last line that was cut off, and makes its folder.

        `key`: where a row has its cell. UserError where a row is of another checkpoint than the base of its name.
        """
        self._file, self._key = file, key
        self._of = {name: forks.base.found.sha256[:12] for name, forks in (bases or {}).items()}
        super().__init__({cell(**row[key]): row for row in read_rows(file)})
        for row in self.values():
            name, there = row[key].get("base"), row.get("checkpoint")
            if there is not None and self._of.get(name, there) != there:
                raise UserError(
                    f"{file}: its rows of {name} are of checkpoint {there}, and {name} is {self._of[name]} here: "
                    "give that base, or another runs_dir"
                )
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as whole:
            whole.write("".join(json.dumps(row) + "\n" for row in self.values()).encode())

    def put(self, cell: Cell, row: dict[str, Any]) -> None:
        """Writes a row behind the others, with the cell, the checkpoint that its base is, and the commit."""
        tree = asdict(cell)  # type: ignore[call-overload]
        of = {"checkpoint": self._of[tree["base"]]} if tree.get("base") in self._of else {}
        self[cell] = {self._key: tree} | row | of | {"commit": commit()}
        with self._file.open("a") as rows:
            rows.write(json.dumps(self[cell]) + "\n")
