"""base and fork.*: a run that goes on from the checkpoint of another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gnmr.errors import fields, require, told_as

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

    @told_as("fork.")
    def __post_init__(self) -> None:
        for key, value in fields(self, "heal", "order").items():
            require(0 <= value < 2**62, key, value, "must lie between 0 and 2^62")


_BATCH = ("training.seq_len", "training.batch_size", "training.accumulation", "training.dtype")
FROM_BASE = ("model.*", "data.*", "optim.*", *_BATCH)
"""Keys in which a fork and its base agree: model, data, optimizer with its schedule, and the batch."""
OF_THE_ARM = ("data.cache_dir", "optim.transform.*", "optim.clip_norm")
"""Of those, what an arm chooses for itself."""
PATHS = ("data.path", "data.tokenizer")
"""Never taken from a base, which somebody else may have made: they name files of this machine."""


def agreed(flat: dict[str, Any]) -> dict[str, Any]:
    """Of a flat config the keys in which a fork and its base agree; the schedule's length as a number."""
    found = {key: value for key, value in flat.items() if _matches(key, FROM_BASE) and not _matches(key, OF_THE_ARM)}
    if found.get("optim.schedule_steps") is None:
        found["optim.schedule_steps"] = flat["training.steps"]
    return found


def taken(flat: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """What a fork takes of its base's flat config, where `words` (of the command line) do not say it themselves.

    A group that is chosen by a word (`model=gpt`) is the user's as a whole.
    """
    named = {word.lstrip("+~").partition("=")[0] for word in words}
    found = agreed(flat) | {"scale_name": flat["scale_name"]}
    return {
        key: value
        for key, value in found.items()
        if key not in PATHS and not any(key == name or key.startswith(f"{name}.") for name in named)
    }


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(key == one or (one.endswith(".*") and key.startswith(one[:-1])) for one in patterns)
