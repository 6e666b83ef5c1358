"""Lists of names that say which linears are in low precision: what they match, as the library that reads them does.

    filter_fqns               torchao, torchtitan (float8)    left out; an entry is any part of a name
    fqns                      torchtitan (MX, NVFP4)          converted, by the same rule
    modules_to_not_convert    transformers                    left out; the beginning of a name up to a dot, as a
                                                              regular expression, or any end of a name
    modules_to_ignore         NeMo Automodel, accelerate      left out; a module's name, or one of its parents'
    targets                   gnmr                            converted; * and ?, at the end of a dotted name
    pins                      gnmr                            kept on the recovery recipe, by the same rule

Written after the libraries' sources: pytorch/ao 0.18 (float8_linear_utils), pytorch/torchtitan
(components/quantization), huggingface/transformers 5.23 (quantizers_utils.should_convert_module).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate

from gnmr.errors import one_of
from gnmr.names import listed, select

LISTS = {
    "filter_fqns": "part",
    "fqns": "part",
    "modules_to_not_convert": "regex",
    "modules_to_ignore": "module",
    "targets": "end",
    "pins": "end",
}
"""The rule by which an entry of each list is held against a name."""
CONVERTS = ("fqns", "targets")
"""The lists that name what is converted; `pins` names what is kept in part, the others what is left out."""
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True)
class Entry:
    """One entry of a list, and what it matches."""

    which: str
    """The list's name: one of `LISTS`."""
    text: str
    meant: tuple[str, ...]
    """Names that it matches as whole words between dots."""
    swept: tuple[str, ...]
    """Names that it matches in the midst of a word: layers.10 by layers.1."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that it matches."""
        return self.meant + self.swept

    @property
    def trap(self) -> bool:
        """Whether it matches more than it seems to: whole words and parts of others, or the beginning of a number."""
        cut = any(_cuts_number(self.text, name) for name in self.swept)
        return bool(self.swept) and (bool(self.meant) or cut)


def read_lists(lists: Mapping[str, Sequence[str] | str] | None) -> dict[str, list[str]]:
    """The lists, each of texts. ValueError for an unknown list and for an entry that is none."""
    found = {}
    for which, texts in (lists or {}).items():
        one_of(tuple(LISTS), lists=which)
        found[which] = listed(which, texts)
        if "" in found[which]:
            raise ValueError(f"{which}={found[which]}: has an empty entry, which is part of every name")
        if LISTS[which] == "regex":
            for text in found[which]:
                try:
                    re.compile(text)
                except re.error as error:
                    raise ValueError(f"{which}={text}: is no regular expression ({error})") from error
    return found


def entries_of(which: str, texts: Iterable[str], names: Sequence[str]) -> list[Entry]:
    """What each entry of a list matches of the `names`."""
    rule, found = LISTS[which], []
    for text in texts:
        matched = [name for name in names if matches(text, name, rule)]
        meant = [name for name in matched if _whole(text, name, rule)]
        found.append(Entry(which, text, tuple(meant), tuple(name for name in matched if name not in meant)))
    return found


def matches(text: str, name: str, rule: str) -> bool:
    """Whether an entry means a name, by the rule of its library.

    >>> matches("layers.1", "layers.10.mlp.up_proj", "part"), matches("layers.1", "layers.10.mlp.up_proj", "regex")
    (True, False)
    """
    if rule == "part":
        return text in name
    if rule == "regex":
        return bool(re.match(rf"(?:{text}){_BOUNDARY}", name)) or name.endswith(text)
    if rule == "module":
        return name == text or name.startswith(f"{text}.")
    return bool(select([name], [text])[0])


def nearest_to(text: str, names: Sequence[str]) -> str | None:
    """The name, end or part of a name that `text` may have been meant to be; None: nothing is like it."""
    words: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for i in range(len(parts)):
            for j in range(i + 1, len(parts) + 1):
                words[".".join(parts[i:j])] = None
    bare = text.strip("*.")
    if len(short := [word for word in words if word.casefold() == bare.casefold()]):
        return short[0]
    close = get_close_matches(bare, words, 1, cutoff=0.7)
    return close[0] if close else None


def repaired(entry: Entry, names: Sequence[str]) -> str | None:
    """The entry as it would mean the whole words alone; None: no such text is known."""
    rule = LISTS[entry.which]
    for text in (f"{entry.text}.", f".{entry.text}", f".{entry.text}.", f"{entry.text.rstrip('*')}.*"):
        try:
            now = tuple(name for name in names if matches(text, name, rule))
        except re.error:
            continue
        if now == entry.meant:
            return text
    return None


def _whole(text: str, name: str, rule: str) -> bool:
    """Whether a text that matches a name does so between dots."""
    if rule == "part":
        return _between_dots(text, name)
    if rule == "regex":
        return bool(re.match(rf"(?:{text}){_BOUNDARY}", name)) or name == text or name.endswith(f".{text}")
    if rule == "end" and re.search(r"\d\*", text):
        guarded = re.sub(r"(?<=\d)\.\*", r"(?!\\d).*", translate(text))
        return any(re.match(guarded, name[i:]) for i in range(len(name)) if i == 0 or name[i - 1] == ".")
    return True


def _between_dots(text: str, name: str) -> bool:
    """Whether the text stands in the name with a dot, or nothing, on both of its sides.

    >>> _between_dots("layers.1", "layers.1.mlp"), _between_dots("layers.1", "layers.10.mlp")
    (True, False)
    """
    before = r"(?:^|(?<=\.))" if not text.startswith(".") else ""
    after = r"(?=\.|$)" if not text.endswith(".") else ""
    return bool(re.search(before + re.escape(text) + after, name))


def _cuts_number(text: str, name: str) -> bool:
    """Whether a text that ends in a digit stands before another digit in the name, or begins within a number."""
    bare = text.rstrip("*")
    after = bare[-1:].isdigit() and bool(re.search(re.escape(bare) + r"\d", name))
    return after or (bare[:1].isdigit() and bool(re.search(r"\d" + re.escape(bare), name)))
