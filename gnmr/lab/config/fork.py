"""base and fork.*: a run that goes on from the checkpoint of another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gnmr.errors import as_user_error, fields, require

SHIPPED = "shipped"
"""The `base` that comes with the package; a folder of that name is ./shipped."""


@dataclass(frozen=True)
class ForkConfig:
    """Of a run with a `base` (gnmr/lab/train/fork.py)."""

    heal: int = 0
    """Steps in 16 bits after the training.steps steps of the arm."""
    order: int = 0
    """Which continuation of the data: 0 is the base's own, any other draws what is left of the epoch anew. A key like
    a seed: outside of the hash, and training.seed is the same number."""

    @as_user_error("fork.")
    def __post_init__(self) -> None:
        for key, value in fields(self, "heal", "order").items():
            require(0 <= value < 2**62, key, value, "must lie between 0 and 2^62")


_BATCH = ("training.seq_len", "training.batch_size", "training.accumulation", "training.dtype")
FROM_BASE = ("model", "data", "optim", *_BATCH)
"""Keys in which a fork and its base agree: model, data, optimizer with its schedule, and the batch."""
OF_THE_ARM = ("data.cache_dir", "optim.transform", "optim.clip_norm")
"""Of those, what an arm chooses for itself."""
PATHS = ("data.path", "data.tokenizer")
"""Never taken from a base, which somebody else may have made: they name files of this machine."""


def agreed(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a flat config in which a fork and its base agree; the schedule's length is a number."""
    found = {key: value for key, value in flat.items() if covers(FROM_BASE, key) and not covers(OF_THE_ARM, key)}
    if found.get("optim.schedule_steps") is None:
        found["optim.schedule_steps"] = flat["training.steps"]
    return found


def typed(words: Sequence[str]) -> set[str]:
    """Return the keys and groups that these words of a command line set."""
    return {word.lstrip("+~").partition("=")[0] for word in words}


def covers(names: Iterable[str], key: str) -> bool:
    """Return whether the key is one of these keys or lies in one of these groups."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
