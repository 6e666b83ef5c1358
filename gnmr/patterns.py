"""Select dotted names of modules by patterns with * and ?."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase


def listed(option: str, value: object) -> list[str]:
    """Return the value of an option as a list of names; a single name is allowed.

    Raises:
        ValueError: the value is anything else; the message begins with the option.
    """
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{option}={value!r}: must be a list of names")
    return list(names)


def exact(pattern: str) -> bool:
    """Return True if the pattern is a plain name.

    Args:
        pattern: a name, in which *, ? and [...] stand for other letters.
    """
    return not set(pattern) & set("*?[")


def matches(name: str, pattern: str) -> bool:
    """Return True if the pattern, with * and ?, matches the dotted name or an end of it.

    >>> matches("layers.1.up", "layers.*"), matches("layers.1.up", "1.up"), matches("layers.1.up", "p")
    (True, True, False)
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


class NameIndex:
    """Dotted names in which patterns are looked up.

    A pattern without * and ? is looked up in a table of the names' ends, because plan.json may name each of thousands
    of experts.
    """

    def __init__(self, names: Iterable[str], aliases: Mapping[str, str] | None = None) -> None:
        """Index the names; `aliases` has a second name for some of them, which patterns may match too."""
        self.names, self._aliases = list(names), aliases or {}
        self._by_end: dict[str, dict[str, None]] = {}
        for name in self.names:
            # All ends: up_proj, mlp.up_proj, layers.0.mlp.up_proj.
            for words in (name.split("."), self._alias(name).split(".")):
                for i in range(len(words)):
                    self._by_end.setdefault(".".join(words[i:]), {})[name] = None

    def matching(self, pattern: str) -> list[str]:
        """Return the names that match the pattern, in their order.

        Args:
            pattern: a name or the end of one from a dot on, with or without * and ?; see `matches`.
        """
        if exact(pattern):
            return list(self._by_end.get(pattern, ()))
        return [name for name in self.names if matches(name, pattern) or matches(self._alias(name), pattern)]

    def _alias(self, name: str) -> str:
        return self._aliases.get(name, name)


def select(names: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Select dotted names by patterns.

    Returns:
        The names that match a pattern, in their order, and the patterns that match none.
    """
    index = NameIndex(names)
    matching = {pattern: index.matching(pattern) for pattern in patterns}
    chosen = {name for names_of_pattern in matching.values() for name in names_of_pattern}
    return [name for name in index.names if name in chosen], [pattern for pattern in patterns if not matching[pattern]]
