"""Reading a run folder back; tolerant of a run that is still going or was killed while it wrote."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gnmr.errors import UserError
from gnmr.records.ratios import read_stream
from gnmr.records.schema import ratio_schema

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decode(value: Any) -> Any:
    """The strings nan, inf and -inf back to floats, those of mappings too; anything else as it is."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def stored(path: Path) -> Path | None:
    """Where the rows of a .jsonl file are: itself, else its compressed copy (X.jsonl.gz), else None."""
    packed = path.with_name(path.name + ".gz")
    return path if path.exists() else packed if packed.exists() else None


def iter_jsonl(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row of a .jsonl file, as `stored`, and the offset of the byte after it (uncompressed); none without a file.

    Stops at the first line that is not whole: the last one, if a kill cut it short. UserError for a damaged copy.
    """
    found = stored(path)
    if found is None:
        return
    end = 0
    try:
        with found.open("rb") if found == path else gzip.open(found) as file:
            for line in file:
                end += len(line)
                try:
                    row = json.loads(line)
                except ValueError:  # JSONDecodeError, or UnicodeDecodeError of a torn character
                    return
                if not line.endswith(b"\n") or not isinstance(row, dict):
                    return
                yield {key: decode(value) for key, value in row.items()}, end
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{found}: damaged ({error})") from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl file; none if it is missing. A last line that a kill cut short is left out."""
    return [row for row, _ in iter_jsonl(path)]


def read_ratios(folder: Path) -> pa.Table:
    """The ratio rows of a run: ratios.parquet, or while it runs (or after a kill) what ratios.rows holds."""
    parquet, stream = folder / "ratios.parquet", folder / "ratios.rows"
    table = ratio_schema(()).empty_table()
    with suppress(FileNotFoundError):  # a run that ends deletes its stream when the Parquet file is there
        table = read_stream(stream)
    return table if table.num_rows or not parquet.exists() else pq.read_table(parquet, page_checksum_verification=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if the file is missing, cut short or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # JSONDecodeError, or UnicodeDecodeError
        return None
    return {key: decode(value) for key, value in found.items()} if isinstance(found, dict) else None
