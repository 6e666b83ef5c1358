"""YAML files that the user brings (--config-dir), checked before Hydra reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import yaml
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, StringNode
from omegaconf._utils import get_yaml_loader

from gnmr.errors import UserError
from gnmr.lab.config.overrides import OPTIONAL, arm_words, node_of
from gnmr.records.untrusted import SMALL, first_line

_MOST_VALUES = 100_000
"""Values that aliases may make of one file; the largest file of ours has some 60."""
_GLOBAL = ("scale", *OPTIONAL)
"""Groups whose files have keys of the whole config."""
_HEADER = 512
"""Letters in which Hydra looks for a file's package."""
_ARMS = "hydra.sweeper.arms"
_SECTIONS = ("hydra", "hydra.sweeper", "hydra.sweeper.params", _ARMS)


def yaml_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a --config-dir that Hydra could read: regular `*.yaml` files, in linked folders too."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(place)
        folders.sort()
        for file in (Path(parent, name) for name in sorted(names) if name.endswith(".yaml")):
            if file.is_file() and file.stat().st_size <= SMALL:
                yield file


def check_yaml(folder: Path, words: Sequence[str] = ()) -> None:
    """Raise UserError for a file in a --config-dir at which Hydra would stumble without its name, line or reason.

    Files that neither these words of the command line nor another file names are foreign: what they hold is no matter,
    unless aliases make values of them without end.
    """
    if not folder.is_dir():
        raise UserError(f"--config-dir {folder}: there is no such folder")
    texts, wrong = [" ".join(words)], {}
    for file in yaml_files(folder):
        try:
            text = file.read_text(encoding="utf-8")
            texts += [text] if "defaults:" in text else []
            _check(text, file.relative_to(folder).parts[0])
        except _Endless:
            raise UserError(f"{file}: its aliases make more than {_MOST_VALUES:,} values of it") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            wrong[file] = f"{file}, line {mark.line + 1 if mark else 1}: {error.problem or error.context}"
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            known = type(error) is ValueError
            wrong[file] = f"{file}{error}" if known else f"{file}: cannot be read as YAML ({first_line(error)})"
    for file, line in wrong.items():
        named = re.compile(rf"(?<![\w.-]){re.escape(file.stem)}(?:\.yaml)?(?![\w.-])")
        if any(named.search(text) for text in texts):
            raise UserError(line)


class _Endless(ValueError):
    """Aliases that make too many values."""


def _check(text: str, group: str) -> None:
    """Raise ValueError or YAMLError for what Hydra cannot read, or would read as something else than is written."""
    loader = get_yaml_loader()
    node = yaml.compose(text, loader)
    known: dict[int, int] = {}
    if _grown(node, known) > max(_MOST_VALUES, 2 * len(known)):
        raise _Endless
    if text.startswith("\ufeff"):
        raise ValueError(": begins with a byte order mark (BOM); save it as UTF-8 without one")
    yaml.load(text, loader)
    package = ConfigSource._get_header_dict(text[:_HEADER])["package"]
    if package is None and group in _GLOBAL:
        what = "is empty" if node is None else "does not begin so"
        raise ValueError(f": its first line must be `# @package _global_`, and it {what}")
    if package == "_global_" and isinstance(node, yaml.MappingNode):
        _check_values(node, "")


def _check_values(node: yaml.MappingNode, section: str) -> None:
    """Raise ValueError for a section or an arm that is none, and for a text that YAML takes for a number."""
    for name, value in node.value:
        key = f"{section}.{name.value}" if section else str(name.value)
        line = f", line {name.start_mark.line + 1}: "
        known = node_of(key)
        if section == _ARMS:
            _check_text(name, f"{line}the arm")
            try:
                arm_words(name.value, _plain(value))
            except ValueError as error:
                raise ValueError(f"{line}{error}") from error
        elif isinstance(known, DictConfig) or key in _SECTIONS:
            if isinstance(value, yaml.SequenceNode):
                raise ValueError(f"{line}{key}={_plain(value)}: must be KEY: VALUE lines, and is a list")
            if isinstance(value, yaml.MappingNode):
                _check_values(value, key)
        elif isinstance(known, StringNode) and isinstance(value, yaml.ScalarNode):
            _check_text(value, f"{line}{key}")


def _check_text(node: yaml.Node, what: str) -> None:
    if node.tag.rpartition(":")[2] in ("int", "float", "bool") and str(read := _plain(node)) != node.value:
        raise ValueError(f'{what}: {node.value} is {read} to YAML; put it in quotes: "{node.value}"')


def _plain(node: yaml.Node) -> object:
    """What YAML makes of a node."""
    return yaml.load(yaml.serialize(node), get_yaml_loader())


def _grown(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Values below a node, those of an alias each time."""
    if node is None:
        return 0
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES  # an alias to what it stands in has no end
        below: Iterable[yaml.Node] = ()
        if isinstance(node, yaml.MappingNode):
            below = chain(*node.value)
        elif isinstance(node, yaml.SequenceNode):
            below = node.value
        known[id(node)] = 1 + sum(_grown(child, known) for child in below)
    return known[id(node)]
