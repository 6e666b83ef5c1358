"""Read a file of claims: which recorded arms are compared with which, written down before they are tested.

    records: ../runs/results.parquet      # the table of runs, as seen from this file
    texts: [../README.md]                 # files with marked numbers (`gnmr.lab.report.results`)
    claims:
      table11:
        title: All signals at one budget
        asks: Which signal is better than never recovering?
        arms:                             # name: STUDY/RUN; `*` and `?` are allowed
          never: table11/int2_int8-always_low-*
          always: table11/int2_int8-always_high-*
          gap: table11/int2_int8-gap-ranked-*
          random: table11/int2_int8-random-ranked-*
        low: never                        # the bounds; always against never is the positive control
        high: always
        contrasts:                        # arm: control, or a list of controls
          gap: [never, random]

Seeds of several cells are pooled if every arm is a list of patterns, one for each cell. `arms: STUDY/RUN`, or a list of
these, takes all arms of these runs by the names that they have in the table. In `contrasts` the first key that fits an
arm counts, and a key with `*` leaves the bounds out. Without `contrasts` every arm is tested against `low`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from gnmr.errors import UserError, nearest
from gnmr.records.untrusted import content, reading

_MOST_BYTES = 1 << 20
_TOP = ("records", "texts", "claims")
_KEYS = ("title", "asks", "arms", "low", "high", "contrasts")


@dataclass(frozen=True)
class Claim:
    """One family of contrasts."""

    name: str
    title: str
    asks: str
    arms: Mapping[str, tuple[str, ...]] | tuple[str, ...]
    """Patterns of runs by arm, one for each cell; or the patterns of all arms together."""
    low: str
    high: str
    contrasts: Mapping[str, tuple[str, ...]]
    """Controls by arm; empty: all against `low`."""

    def pairs(self, arms: Sequence[str]) -> list[tuple[str, str]]:
        """Return (arm, control) of each test. Raises UserError if an arm is not there."""
        exact = [key for key in self.contrasts if "*" not in key]
        for name in (self.low, self.high, *exact, *(one for of in self.contrasts.values() for one in of)):
            if name not in arms:
                raise UserError(f"claims.{self.name}: {name!r} is none of its arms{nearest(name, arms)}")
        if not self.contrasts:
            return [(arm, self.low) for arm in arms if arm != self.low]
        order = exact + [arm for arm in arms if arm not in (*exact, self.low, self.high)]
        keys = {
            arm: next((key for key in self.contrasts if arm == key or fnmatchcase(arm, key)), None) for arm in order
        }
        return [(arm, one) for arm, key in keys.items() if key for one in self.contrasts[key] if one != arm]


@dataclass(frozen=True)
class Claims:
    """A file of claims."""

    file: Path
    records: Path
    texts: tuple[Path, ...]
    claims: tuple[Claim, ...]


def read(file: Path) -> Claims:
    """Read the file. Raises UserError, with the claim and the key, if it is invalid."""
    with reading(file):
        tree = yaml.safe_load(content(file, _MOST_BYTES))
    _known(tree, _TOP, str(file))
    claims = tuple(
        _claim(name, given, f"{file}: claims.{name}") for name, given in _mapping(tree, "claims", str(file)).items()
    )
    texts = tuple(file.parent / text for text in _texts(tree.get("texts", []), f"{file}: texts"))
    return Claims(file, file.parent / _text(tree, "records", str(file)), texts, claims)


def _claim(name: str, given: Any, where: str) -> Claim:
    _known(given, _KEYS, where)
    arms: Mapping[str, tuple[str, ...]] | tuple[str, ...]
    if isinstance(given.get("arms"), dict):
        arms = {arm: _texts(one, f"{where}.arms.{arm}") for arm, one in _mapping(given, "arms", where).items()}
    else:
        arms = _texts(given.get("arms"), f"{where}.arms")
    contrasts = _mapping(given, "contrasts", where) if "contrasts" in given else {}
    pairs = {arm: _texts(controls, f"{where}.contrasts.{arm}") for arm, controls in contrasts.items()}
    title, asks, low, high = (_text(given, key, where) for key in ("title", "asks", "low", "high"))
    return Claim(name, title, asks, arms, low, high, pairs)


def _known(tree: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(tree, dict):
        raise UserError(f"{where}: must be a mapping")
    for key in tree:
        if key not in keys:
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), keys)}")


def _mapping(tree: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = tree.get(key)
    if not isinstance(value, dict) or not value or not all(isinstance(one, str) for one in value):
        raise UserError(f"{where}.{key}: must be a mapping with names as keys")
    return value


def _text(tree: Mapping[str, Any], key: str, where: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}.{key}: must be a text")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{where}: must be a text or a list of texts")
    return tuple(value)
