"""What W&B wrote offline, read back: W&B ships no reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record


def parts_of(folder: Path) -> list[Path]:
    """The .wandb files below `folder`, one for each process of a resumed run, the newest last."""
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def records_of(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: a LevelDB log."""
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:  # padding
            position += left_in_block
            continue
        _crc, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield Record.FromString(parts)
            parts = b""


def history_of(path: Path) -> dict[int, dict[str, Any]]:
    """{step: {metric: value}} of a .wandb file."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records_of(path):
        if record.WhichOneof("record_type") == "history":
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            steps[row.pop("_step", record.history.step.num)] = row
    return steps
