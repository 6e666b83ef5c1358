"""What a word of the command line was meant to be: a key without its section, a word without a =, a section off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

GROUPS = ("experiment", "scale", "preset", "sweep", "debug", "model")
"""What is chosen as a whole, most used first: folders of conf/."""
_SECTIONS = (
    *("training", "optim", "records", "controller", "precision", "data", "model", "scores", "faults", "fork"),
    "compression",
)
"""Most used first: a key that stands in several is most likely that of the first."""
_OFF = ("off", "none", "null", "false", "no", "0")
_SWITCHED_OFF = {
    "controller": "never to recover is controller.signal=always_low, to have no recovery path precision.recovery=null",
    "records": "no live view is records.live=off, no W&B records.wandb=off",
    "fork": "to train from new weights leave base=... out",
    "compression": "to send gradients whole is compression.name=none",
}


def key(word: str, known: Sequence[str], everywhere: Iterable[str], at_root: bool) -> str:
    """The end of a message about the unknown key `word` of a section with the keys `known`.

    everywhere: all keys with their sections, dots between. at_root: the word stands in no section.
    """
    own = [*known, *(GROUPS if at_root else ())]
    elsewhere: dict[str, list[str]] = {}
    for whole in sorted(everywhere, key=_rank):
        if "." in whole:
            elsewhere.setdefault(whole.rpartition(".")[2], []).append(whole)
    if word in elsewhere:
        return f": did you mean {' or '.join(elsewhere[word][:2])}?"
    close = get_close_matches(word, [*own, *elsewhere], 1)
    if not close:
        return f": use one of {', '.join(known)}"
    return f": did you mean {close[0] if close[0] in own else elsewhere[close[0]][0]}?"


def _rank(whole: str) -> tuple[int, int]:
    section = whole.partition(".")[0]
    return whole.count("."), _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)


def no_equals_sign(words: Sequence[str], choices: Mapping[str, Sequence[str]]) -> str | None:
    """One line for the first word without a = that was meant to have one; None where there is none.

    choices: by group, what can be chosen.
    """
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word in choices and following and "=" not in following and not following.startswith("-"):
            return f"{word} {following}: is written with a =: {word}={following}"
        if group := next((group for group in GROUPS if word in choices.get(group, ())), None):
            return f"{word}: did you mean {group}={word}?"
        if word in choices:
            return f"{word}: needs a value: {word}={choices[word][0]}{_or(choices[word][1:])}"
    return None


def switched_off(section: str, value: str) -> str | None:
    """How a section that has no switch is turned off."""
    return _SWITCHED_OFF.get(section) if value.lower() in _OFF else None


def _or(others: Sequence[str]) -> str:
    return f", or one of {', '.join(others)}" if others else ""
