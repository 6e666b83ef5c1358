"""Select dotted names of modules by patterns with * and ?."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def listed(option: str, value: object) -> list[str]:
    """Return the value of an option as a list of names; a single name is allowed. Raises ValueError for others."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{option}={value!r}: must be a list of names")
    return list(names)


def exact(pattern: str) -> bool:
    """Return True if the pattern is a plain name, without * and ?."""
    return not set(pattern) & set("*?[")


def by_end(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the dotted `names` by each of their ends, which a pattern without * and ? selects.

    >>> by_end(["layers.1.up", "layers.2.up"])["up"]
    ['layers.1.up', 'layers.2.up']
    """
    names_by_end: dict[str, list[str]] = {}
    for name in names:
        for end in ends_of(name):
            names_by_end.setdefault(end, []).append(name)
    return names_by_end


def ends_of(name: str) -> list[str]:
    """Return the ends of a dotted name, the longest first.

    >>> ends_of("layers.1.up")
    ['layers.1.up', '1.up', 'up']
    """
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def matches(name: str, pattern: str) -> bool:
    """Return True if the pattern, with * and ?, matches the dotted name or an end of it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def select(names: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the dotted `names` that match a pattern, in their order, and the patterns that match none."""
    names = list(names)
    # Plain names are looked up, because plan.json may name each of thousands of experts.
    names_by_end, chosen, unmatched = by_end(names), set[str](), []
    for pattern in patterns:
        if exact(pattern):
            matching = names_by_end.get(pattern, [])
        else:
            matching = [name for name in names if matches(name, pattern)]
        chosen.update(matching)
        if not matching:
            unmatched.append(pattern)
    return [name for name in names if name in chosen], unmatched
