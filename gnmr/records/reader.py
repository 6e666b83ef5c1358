"""Reading a run folder back; tolerant of a run that was killed while it wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gnmr.records.schema import RATIO_SCHEMA

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decode(value: Any) -> Any:
    """The strings nan, inf and -inf back to floats; anything else as it is."""
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl file; none if it is missing. A last line that a kill cut short is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        rows.append({key: decode(value) for key, value in row.items()})
    return rows


def read_ratios(folder: Path) -> pa.Table:
    """The ratio rows of a run: ratios.parquet, or while it runs (or after a kill) what the stream holds."""
    parquet, stream = folder / "ratios.parquet", folder / "ratios.arrows"
    if stream.exists():
        return read_stream(stream)
    if parquet.exists():
        return pq.read_table(parquet)
    return RATIO_SCHEMA.empty_table()


def read_stream(path: Path) -> pa.Table:
    """All whole batches of an Arrow stream file; a batch that a kill cut short is left out."""
    batches = []
    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                batches.append(batch)
    except (pa.ArrowInvalid, OSError, EOFError):
        pass
    return pa.Table.from_batches(batches, schema=RATIO_SCHEMA) if batches else RATIO_SCHEMA.empty_table()


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if the file is missing or cut short."""
    try:
        return {key: decode(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (FileNotFoundError, json.JSONDecodeError):
        return None
