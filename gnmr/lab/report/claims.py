"""Claims: what is compared with what, written down in a file; each a family of contrasts over packed records.

    records: ../runs/reference        # folder of the packs, as seen from this file
    texts: [../README.md]             # files in which numbers of results stand (`gnmr.lab.report.results`)
    claims:
      table11:
        title: All signals at one budget
        asks: Which signal is better than never recovering?
        arms:                         # name: PACK/RUN, `*` and `?` allowed; or a list; the runs of one config, by seed
          never: table11/int2_int8-always_low-*
          always: table11/int2_int8-always_high-*
          gap: table11/int2_int8-gap-ranked-*
          random: table11/int2_int8-random-ranked-*
        low: never                    # the bounds, never and always on the recovery path; always is the control
        high: always
        contrasts:                    # arm: control, or a list of controls
          gap: [never, random]
        phase: end                    # end of the run; of a fork low (its arm's steps) or healed
      both:
        title: The same over two machines
        asks: ...
        pools: [table11, table11_again]    # claims whose arms of one name are pooled, a cell each

`contrasts` may be left out: all other arms against `low`. A claim that pools has the bounds and names of the first of
its claims, and only those cells in which the positive control is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gnmr.errors import UserError, nearest
from gnmr.records.untrusted import content, reading

PHASES = ("end", "low", "healed")
_MOST = 1 << 20
_KEYS = ("title", "asks", "arms", "low", "high", "contrasts", "phase", "pools")


@dataclass(frozen=True)
class Claim:
    """One family of contrasts."""

    name: str
    title: str
    asks: str
    arms: Mapping[str, tuple[str, ...]]
    """Patterns of runs by the arm's name; empty where claims are pooled."""
    low: str
    high: str
    contrasts: tuple[tuple[str, str], ...]
    """Arm and control."""
    phase: str
    pools: tuple[str, ...]


@dataclass(frozen=True)
class Claims:
    """A file of them."""

    file: Path
    records: Path
    texts: tuple[Path, ...]
    claims: Mapping[str, Claim]


def read(file: Path) -> Claims:
    """UserError, with the claim and the key, for what the file should not say."""
    with reading(file):
        tree = yaml.safe_load(content(file, _MOST))
    _known(tree, ("records", "texts", "claims"), str(file))
    found: dict[str, Claim] = {}
    for name, told in _mapping(tree.get("claims"), f"{file}: claims").items():
        found[name] = _claim(name, told, found, f"{file}: claims.{name}")
    texts = tuple(file.parent / text for text in _texts(tree.get("texts", []), f"{file}: texts"))
    return Claims(file, file.parent / _text(tree, "records", str(file)), texts, found)


def _claim(name: str, told: Any, before: Mapping[str, Claim], where: str) -> Claim:
    _known(told, _KEYS, where)
    pools = tuple(_texts(told.get("pools", []), f"{where}.pools"))
    for one in pools:
        if one not in before:
            raise UserError(f"{where}.pools: {one!r} is no claim above it{nearest(one, before)}")
    if pools and (wrong := {"arms", "low", "high", "phase"} & set(told)):
        raise UserError(f"{where}.{min(wrong)}: a claim that pools has those of the claims that it pools")
    if pools:
        first = before[pools[0]]
        arms, low, high, phase = dict[str, tuple[str, ...]](), first.low, first.high, first.phase
        names = [arm for arm in first.arms if all(arm in before[one].arms for one in pools)]
    else:
        patterns = _mapping(told.get("arms"), f"{where}.arms")
        arms = {arm: tuple(_texts(pattern, f"{where}.arms.{arm}")) for arm, pattern in patterns.items()}
        low, high, phase, names = (
            _text(told, "low", where),
            _text(told, "high", where),
            told.get("phase", "end"),
            [*arms],
        )
    if phase not in PHASES:
        raise UserError(f"{where}.phase: {phase!r} must be one of {', '.join(PHASES)}")
    every = {arm: low for arm in names if arm != low}
    pairs = [
        (arm, control)
        for arm, controls in _mapping(told.get("contrasts", every), f"{where}.contrasts").items()
        for control in _texts(controls, f"{where}.contrasts.{arm}")
    ]
    for arm in (low, high, *(arm for pair in pairs for arm in pair)):
        if arm not in names:
            raise UserError(f"{where}: {arm!r} is none of its arms{nearest(arm, names)}")
    return Claim(
        name, _text(told, "title", where), _text(told, "asks", where), arms, low, high, tuple(pairs), phase, pools
    )


def _known(tree: Any, keys: tuple[str, ...], where: str) -> None:
    for key in _mapping(tree, where):
        if key not in keys:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, keys)}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: must be a mapping with names as keys")
    return value


def _text(tree: Mapping[str, Any], key: str, where: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}.{key}: must be a text")
    return value


def _texts(value: Any, where: str) -> list[str]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{where}: must be a text or a list of texts")
    return value
