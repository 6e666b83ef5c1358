"""Reading a run folder back; tolerant of a run that is still going or was killed while it wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gnmr.records.ratios import read_stream
from gnmr.records.schema import ratio_schema

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decode(value: Any) -> Any:
    """The strings nan, inf and -inf back to floats, those of mappings too; anything else as it is."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def iter_jsonl(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row of a .jsonl file and the offset of the byte after it; none if the file is missing.

    Stops at the first line that is not whole: the last one, if a kill cut it short.
    """
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                row = json.loads(line)
            except ValueError:  # JSONDecodeError, or UnicodeDecodeError of a torn character
                return
            if not line.endswith(b"\n"):
                return
            yield {key: decode(value) for key, value in row.items()}, end


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl file; none if it is missing. A last line that a kill cut short is left out."""
    return [row for row, _ in iter_jsonl(path)]


def read_ratios(folder: Path) -> pa.Table:
    """The ratio rows of a run: ratios.parquet, or while it runs (or after a kill) what ratios.rows holds."""
    parquet, stream = folder / "ratios.parquet", folder / "ratios.rows"
    if stream.exists():
        return read_stream(stream)
    if parquet.exists():
        return pq.read_table(parquet)
    return ratio_schema(()).empty_table()


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if the file is missing or cut short."""
    try:
        return {key: decode(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (FileNotFoundError, json.JSONDecodeError):
        return None
