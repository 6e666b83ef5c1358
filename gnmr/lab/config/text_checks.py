"""Checks of texts that name files or folders or are stored. They raise ValueError in one line that names the key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unicodedata import category

from gnmr.options import require

LONGEST_NAME = 255
"""Largest length of a file name in bytes, on current file systems."""
_LONGEST_PATH = 3072
"""Largest length of a folder's path in bytes. Linux allows 4096, and the run's files lie below the folder."""


def folder_name(key: str, value: str | None) -> None:
    """Check that a text can be part of a folder's name, or is None."""
    if value is None:
        return
    _nameable(key, value)
    sound = value != "" and not value.startswith(".") and not set(value) & {"/", "\\"}
    require(sound, key, value, "is part of a folder's name: not empty, no leading dot, no slash")


def place(key: str, value: str | None, homeless: bool = False) -> None:
    """Check that a text can be the path of a file or folder, or is None.

    With `homeless`, ~ may not exist, because nothing is read there.
    """
    if value is None:
        return
    _nameable(key, value)
    require(value.strip() != "", key, repr(value), "must be a path")
    right = f"is a path longer than {_LONGEST_PATH} bytes"
    require(len(os.fsencode(value)) <= _LONGEST_PATH, key, f"{value[:20]}...", right)
    try:
        Path(value).expanduser()
    except RuntimeError as error:
        own = value == "~" or value.startswith("~/")
        if not (own and homeless):
            why = "there is no home folder (HOME is not set); name another one" if own else "there is no such user"
            raise ValueError(f"{key}={value}: {why}") from error


def _nameable(key: str, value: str) -> None:
    control = any(category(letter) == "Cc" for letter in value)
    require(not control, key, ascii(value[:40]), "must have no line breaks or other control characters")
    for part in value.split("/"):
        right = f"is longer than the {LONGEST_NAME} bytes of a file's name"
        require(len(os.fsencode(part)) <= LONGEST_NAME, key, f"{part[:20]}...", right)


def storable(key: str, value: Any) -> None:
    """Check that a value, and all contents of a container, can be written as UTF-8 and as 64-bit integers."""
    if isinstance(value, dict):
        for name, one in value.items():
            storable(key, name)
            storable(f"{key}.{name}" if key else str(name), one)
    elif isinstance(value, list | tuple):
        for one in value:
            storable(key, one)
    elif isinstance(value, str):
        sound = "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)
        require(sound, key, ascii(value[:40]), "must be text (UTF-8) without NUL")
    elif isinstance(value, int):
        shown = f"{value:.3g}" if abs(value) < 10**300 else "..."
        require(-(2**63) <= value < 2**63, key, shown, "must be less than 2^63")
