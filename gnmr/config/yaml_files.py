"""YAML files that the user brings (--config-dir), checked before Hydra reads them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import yaml

from gnmr.errors import UserError
from gnmr.untrusted import first_line

_MOST_VALUES = 100_000
"""In one file; the largest of ours has some 60."""


def check_yaml(folder: Path) -> None:
    """UserError for a file in a --config-dir that is no YAML, brings a Python object, or grows without end by its
    aliases, at all of which Hydra stumbles later and without its name."""
    if not folder.is_dir():
        raise UserError(f"--config-dir {folder}: there is no such folder")
    for file in sorted(folder.rglob("*.yaml")):
        try:
            with file.open(encoding="utf-8") as source:
                grown = _grown(yaml.compose(source, yaml.SafeLoader), {})
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(f"{file}: cannot be read as YAML ({first_line(error)})") from error
        if grown > _MOST_VALUES:
            raise UserError(f"{file}: its aliases make more than {_MOST_VALUES:,} values of it")


def _grown(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Values below a node, those of an alias each time. ValueError for a tag that makes a Python object."""
    if node is None:
        return 0
    if "python" in node.tag:
        raise ValueError(f"the tag {node.tag} makes a Python object")
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES  # an alias to what it stands in has no end
        below: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.MappingNode):
            below = chain(*node.value)
        elif isinstance(node, yaml.SequenceNode):
            below = node.value
        known[id(node)] = 1 + sum(_grown(child, known) for child in below)
    return known[id(node)]
