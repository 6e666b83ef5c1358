"""Selecting modules by patterns of dotted names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def listed(what: str, given: object) -> list[str]:
    """`given` as a list of names; a single name is allowed. ValueError for anything else."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{what}={given!r}: must be a list of names")
    return list(names)


def by_end(names: Iterable[str]) -> dict[str, list[str]]:
    """The dotted `names` by each of their ends: what a pattern without * and ? selects, without trying every name.

    >>> by_end(["layers.1.up", "layers.2.up"])["up"]
    ['layers.1.up', 'layers.2.up']
    """
    found: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for i in range(len(parts)):
            found.setdefault(".".join(parts[i:]), []).append(name)
    return found


def select(names: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the dotted `names` that match one of `patterns`, in their order; the patterns that match none)."""
    names = list(names)
    ends, chosen, empty = by_end(names), set(), []
    for pattern in patterns:
        if set(pattern) & set("*?["):
            found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        else:
            found = ends.get(pattern, [])
        chosen.update(found)
        empty += [] if found else [pattern]
    return [name for name in names if name in chosen], empty
