"""The base of a fork as the config names it: its location, and the settings that the fork inherits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gnmr.errors import UserError
from gnmr.lab.config import Config, flatten, read, to_dict
from gnmr.records.untrusted import Damaged, exists, text

SHIPPED = "shipped"
"""The `base` that is part of the package. A folder with this name is ./shipped."""
_BATCH = ("training.seq_len", "training.batch_size", "training.accumulation", "training.dtype")
FROM_BASE = ("model", "data", "optim", *_BATCH)
"""Keys in which a fork and its base agree: model, data, optimizer with its schedule, and the batch."""
OF_THE_ARM = ("data.cache_dir", "optim.transform", "optim.clip_norm")
"""Exceptions to `FROM_BASE`, which an arm chooses."""
PATHS = ("data.path", "data.tokenizer", "model.checkpoint")
"""Keys that are never taken from a base, because they name files of this machine and the base may be untrusted."""


def agreed(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a flat config in which a fork and its base agree. The schedule's length is a number."""
    found = {key: value for key, value in flat.items() if covers(FROM_BASE, key) and not covers(OF_THE_ARM, key)}
    if found.get("optim.schedule_steps") is None:
        found["optim.schedule_steps"] = flat["training.steps"]
    return found


def typed(words: Sequence[str]) -> set[str]:
    """Return the keys and groups that these command-line words set."""
    return {word.lstrip("+~").partition("=")[0] for word in words}


def covers(names: Iterable[str], key: str) -> bool:
    """Return True if the key is one of these keys or lies in one of these groups."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def with_base(composed: DictConfig, words: Sequence[str]) -> None:
    """Merge the settings of a fork's base into the composed config, except those that command-line words set.

    A group that a word chooses (`model=gpt`) is left to the user as a whole. Raises UserError for an invalid base, and
    if the base names a file that the user has not named.
    """
    if (base := composed.get("base")) is None:
        return
    theirs = flatten(to_dict(read_base(str(base))))
    for key in PATHS:
        if theirs[key] is not None and OmegaConf.select(composed, key) is None:
            raise UserError(f"{key}=null: the base {base} has {text(theirs[key])}, which you have to give yourself")
    named = {*PATHS, *typed(words)}
    for key, value in (agreed(theirs) | {"scale_name": theirs["scale_name"]}).items():
        if not covers(named, key):
            OmegaConf.update(composed, key, value)


def place_of_base(base: str) -> tuple[Path, Path]:
    """Return (run folder, folder with its checkpoints or the named one). Raises UserError for an invalid base."""
    folder = Path(__file__).parents[1] / "bases" / SHIPPED if base == SHIPPED else Path(base).expanduser()
    step = re.fullmatch(r"step-\d{8}", folder.name) and folder.parent.name == "checkpoints"
    run, checkpoints = (folder.parents[1], folder) if step else (folder, folder / "checkpoints")
    if not exists(run / "config.yaml") or not exists(checkpoints):
        lacking = "config.yaml" if not exists(run / "config.yaml") else checkpoints.relative_to(run)
        raise UserError(f"base={base}: is not a run with a checkpoint ({lacking} is missing there)")
    return run, checkpoints


def read_base(base: str) -> Config:
    """Return the config of a fork's base. Raises UserError if the base is invalid or cannot be forked."""
    run, _ = place_of_base(base)
    try:
        config = read(run / "config.yaml")
    except Damaged as error:
        raise UserError(f"base={base}: {error}") from error
    if config.base is not None:
        raise UserError(f"base={base}: is a fork itself; fork its base, {config.base}")
    if config.model.outlier_channels.window:
        raise UserError(f"base={base}: a model with a window of outliers cannot be forked")
    return config
