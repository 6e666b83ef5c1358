"""Words `key=value` of the command line, and of a sweep's arms, as Hydra is to get them.

Hydra reads numbers, lists and functions in every value. A key whose values are texts keeps what was typed: `arm=10e2`
is no 1000.0. What Hydra cannot read is refused with its key, its reason and words that work.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import Container, DictConfig, StringNode
from omegaconf.base import Node

from gnmr.errors import UserError
from gnmr.lab.config import meant, schema

OPTIONAL = ("experiment", "preset", "sweep", "debug")
"""Groups of conf/ of which nothing is chosen by default."""
_SIMPLE = (ValueType.ELEMENT, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.CHOICE_SWEEP)
_PIECE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:^|(?<=[,(]))\s*([^\s,()'"\[\]{}]+)\s*(?=[,)]|$)""")
"""What is in quotes, or (a group) one value without them."""


def as_given(words: Sequence[str]) -> list[str]:
    """Return the words with the spelling of texts kept, and without those that choose no file of an optional group.

    Raises UserError for a word that Hydra cannot read, and for one that deletes a part of the config.
    """
    kept: list[str] = []
    for word in words:
        if "=" not in word and not word.startswith("~"):
            kept.append(word)  # which Hydra refuses, and `mistake` explains
            continue
        name, _, value = word.partition("=")
        if not name.strip():
            raise UserError(f"{word}: must be key=value, without spaces beside the =")
        if value.strip("'\"") == "???":  # OmegaConf's word for a value that is missing
            raise UserError(f"{word}: has no value; give one ({name}=VALUE) or leave it out")
        override = parsed(word)
        key, choice = override.key_or_group, override.get_key_element()
        if override.is_delete():
            _refuse_deletion(word, key)
        if key in OPTIONAL and override.value_type == ValueType.ELEMENT and override.value() is None:
            kept = [other for other in kept if other.partition("=")[0] != choice]
        elif not override.is_delete():
            kept.append(_spelled(word, override))
        else:
            kept.append(word)
    return kept


def parsed(word: str, loader: ConfigLoader | None = None) -> Override:
    """Return what Hydra reads in the word. Raises UserError, which names the key, where it can read nothing."""
    try:
        (override,) = OverridesParser.create(loader).parse_overrides([word])
    except (HydraException, ValueError) as error:
        lines = str(error).splitlines()
        reason = lines[1] if lines[0].startswith("Error parsing override") and len(lines) > 1 else lines[0]
        raise UserError(_unreadable(word, reason.partition(" expecting ")[0])) from error
    except AttributeError as error:
        if __debug__:
            raise
        raise UserError(f"{word}: Hydra cannot read this under python -O (PYTHONOPTIMIZE): run without it") from error
    if override.is_interval_sweep():
        key, low, high = override.key_or_group, *(f"{end:g}" for end in (override._value.start, override._value.end))  # type: ignore[union-attr]
        right = f"{key}={low},{high} or {key}=range({low},{high})"
        raise UserError(f"{word}: an interval has no values to run one by one; name them, as {right}")
    return override


def arm_words(name: object, words: object) -> list[str]:
    """Return the words of an arm of a sweep, which are written as in a shell; an arm without words has none.

    Raises ValueError where they are no words.
    """
    key = f"hydra.sweeper.arms.{name}"
    if not isinstance(words, str | None):
        given = dict(words) if isinstance(words, Mapping) else list(words) if isinstance(words, Sequence) else words
        raise ValueError(f"{key}={given}: must be words in one text, as {name}: controller.signal=random optim.lr=1e-3")
    try:
        return shlex.split(words or "")
    except ValueError as error:
        raise ValueError(f"{key}={words}: a quotation mark is not closed ({error})") from error


def in_quotes(word: str) -> str:
    """Return the word for a shell's command line."""
    plain = not set(word) & set("$`\\!")
    return '"{}"'.format(word.replace('"', '\\"')) if plain else shlex.quote(word)


def as_text(key: str, value: str) -> str | None:
    """Return how the value is typed in a shell so that Hydra reads it as this text; None where no quoting does that."""
    for quote in (Quote.single, Quote.double):
        if quote == Quote.single and "'" in value and '"' not in value:
            continue
        word = f"{key}={QuotedString(value, quote).with_quotes()}"
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except (HydraException, AttributeError):
            continue
        if override.value() == value:
            return in_quotes(word)
    return None


def is_text(key: str) -> bool:
    """Return whether the values of this key of the config are texts."""
    return isinstance(node_of(key), StringNode)


def node_of(key: str) -> Node | None:
    """Return what the schema has at the key; None for a key that it has not, as for a signal's options."""
    node: Node | None = schema()
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            return None
        node = node._get_node(part, validate_access=False)
    return node


def _spelled(word: str, override: Override) -> str:
    """The word with numbers and truth values of a text in quotes."""
    key, _, value = word.partition("=")
    node = node_of(override.key_or_group)
    if not isinstance(node, StringNode) or override.value_type not in _SIMPLE:
        return word
    if isinstance(override.value(), list | dict):
        raise UserError(_needs_quotes(key, value, as_text(key, value)))
    if override.value_type == ValueType.CHOICE_SWEEP and not value.strip().startswith("choice("):
        return word
    parse = OverridesParser.create().parse_rule

    def keep(piece: re.Match[str]) -> str:
        if piece[1] is None:
            return piece[0]
        read = parse(piece[1], "primitive")
        changed = isinstance(read, int | float) or (read is None and not node._is_optional())
        return f"'{piece[1]}'" if changed else piece[0]

    if (kept := _PIECE.sub(keep, value)) == value:
        return word
    if override.value_type == ValueType.CHOICE_SWEEP:  # whose quotes Hydra takes off
        kept = kept.strip().removeprefix("choice(").removesuffix(")")
    return f"{key}={kept}"


def _refuse_deletion(word: str, key: str) -> None:
    if key in OPTIONAL or key.startswith(("hydra.", "hydra/")):
        return
    parent = node_of(key.rpartition(".")[0]) if "." in key else None
    if isinstance(parent, Container) and parent._get_flag("struct") is False:
        return  # an option, a recipe or a pin
    if key in meant.GROUPS:
        raise UserError(f"{word}: a run needs one; choose another: {key}=NAME")
    off = meant.switched_off(key, "off") or "leave the word out, or give the key another value"
    raise UserError(f"{word}: no part of the config can be deleted: {off}")


def _unreadable(word: str, reason: str) -> str:
    """Why Hydra cannot read the word, and what to type."""
    key, _, value = word.partition("=")
    bare = f"{key.strip()}={value.strip()}"
    if bare != word and _readable(bare):
        return f"{word}: has spaces beside its =: {bare if bare == shlex.quote(bare) else in_quotes(bare)}"
    known = node_of(key.lstrip("+~"))
    text = as_text(key, value) if known is None or isinstance(known, StringNode) else None
    if text is not None:
        return _needs_quotes(key, value, text)
    if any(value.count(one) != value.count(other) for one, other in ("[]", "{}", "()")):
        return f"{word}: its brackets do not match"
    return f"{word}: cannot be read as a value ({reason})"


def _needs_quotes(key: str, value: str, right: str | None) -> str:
    return f"{key}={value}: has letters that Hydra takes in quotes only" + (f": {right}" if right else "")


def _readable(word: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([word])
    except (HydraException, AttributeError):
        return False
    return True
