"""Compare the lists of a trainer and a rollout engine: which linears do they quantize differently?

Everything is decided by names. Each side's lists are read by the rules of their libraries (`gnmr.plan.lists`), so
that neither weights nor these libraries are needed.

A linear is called by its name in the checkpoint, as engines call it. Libraries that change a model in memory may know
it by another name (`gnmr.plan.checkpoint_names`). Their lists are read by that name, and an entry that matches none
of these by the checkpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from gnmr.auditing.audit import Finding
from gnmr.plan.lists import (
    LISTS,
    Entry,
    called,
    entries_of,
    fits_none,
    matches,
    never_quantized,
    read_lists,
    reads_memory,
    repaired,
    suggested,
)

Lists: TypeAlias = Mapping[str, Sequence[object] | str | int]
"""Entries by key of `gnmr.plan.lists.LISTS`."""
Entries: TypeAlias = Mapping[str, Sequence[Entry]]
_PAIR = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


@dataclass(frozen=True)
class Treatment:
    """The treatment of a linear by one side."""

    low: bool
    why: str
    """The entry that decides, or that there is none."""
    remedy: str = ""
    """How this side would do the opposite; empty if it cannot."""

    def __str__(self) -> str:
        return f"{'low precision' if self.low else '16 bits'} ({self.why})"


@dataclass(frozen=True)
class SideComparison:
    """The treatment of each linear by two sides."""

    trainer: dict[str, Treatment]
    rollout: dict[str, Treatment]
    findings: tuple[Finding, ...]
    """Linears that the sides treat differently, and fused linears of which a list names only a part."""
    notes: tuple[Finding, ...]
    """Entries that match nothing, in lists with other entries that match; and linears that one side does not have."""
    unloaded: dict[str, Treatment] = field(default_factory=dict)
    """Treatment by the rollout of linears that are in the checkpoint's file alone, so that no trainer has them."""

    @property
    def sound(self) -> bool:
        """Return True if both sides treat every linear alike."""
        return not self.findings

    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        low = [sum(one.low for one in side.values()) for side in (self.trainer, self.rollout)]
        unlike = sum(one.low != self.rollout[name].low for name, one in self.trainer.items())
        head = f"{len(self.trainer)} linears, {low[0]} quantized by the trainer and {low[1]} by the rollout"
        alone = f"; {len(self.unloaded)} more are in the checkpoint's file alone and were not compared" * bool(
            self.unloaded
        )
        return f"{head}: " + ("both sides agree" if self.sound else f"{unlike} are treated differently") + alone

    def tree(self) -> dict[str, Any]:
        """Return the comparison as a tree for JSON."""
        return {
            "verdict": self.verdict(),
            "findings": [one.tree() for one in self.findings],
            "notes": [one.tree() for one in self.notes],
            "modules": [
                {"module": name, "trainer": asdict(one), "rollout": asdict(self.rollout[name])}
                for name, one in self.trainer.items()
            ],
        }


def compare(
    names: Sequence[str],
    *,
    trainer: Lists,
    rollout: Lists,
    in_memory: Mapping[str, str] | None = None,
    unloaded: Sequence[str] = (),
) -> SideComparison:
    """Return which linears the two sides treat differently, and which entry is responsible.

    Args:
        names: the model's linears under the names of its checkpoint in Hugging Face's layout, with routers and head.
        trainer: the lists of the side that trains, {key: entries}; an empty list leaves nothing out.
        rollout: the lists of the side that generates.
        in_memory: names of these linears in memory where they differ, by the checkpoint's.
        unloaded: linears that the checkpoint has and the model has not. They are compared with nothing, but entries may
            name them.

    Raises ValueError, in one line, if a list is unknown, if an entry is invalid, or if a whole list matches nothing.
    """
    if not names:
        raise ValueError("names=[]: must name the linears of the model")
    every = [*names, *unloaded]
    sides: list[dict[str, Treatment]] = []
    findings: list[Finding] = []
    notes: list[Finding] = []
    for side, given in (("trainer", trainer), ("rollout", rollout)):
        texts = read_lists(given, side)
        if not texts:
            raise ValueError(f"{side}: has no list; give {side}.filter_fqns=[] if nothing is left out")
        if len(lone := [key for key in _PAIR if key in texts]) == 1:
            other = _PAIR[lone[0] == _PAIR[0]]
            raise ValueError(f"{side}.{lone[0]}: name {side}.{other} too; its default is 1 in Megatron-LM")
        entries = {which: _entries(which, own, names, unloaded, in_memory or {}) for which, own in texts.items()}
        notes += _matchless(side, entries, every, in_memory or {})
        findings += _split(side, entries, every)
        sides.append(_treated(side, entries, every, in_memory or {}))
    alone = {name: sides[1][name] for name in unloaded}
    both = [{name: side[name] for name in names} for side in sides]
    notes += _alone(f"rollout.{next(iter(rollout))}", alone)
    return SideComparison(both[0], both[1], (*_differences(*both), *findings), tuple(notes), alone)


def _entries(
    which: str, texts: Sequence[str], names: Sequence[str], unloaded: Sequence[str], in_memory: Mapping[str, str]
) -> list[Entry]:
    """Return the entries of a list with the linears that they match, by the checkpoint's names.

    A count of blocks is of the model's own.
    """
    every = [*names, *(unloaded if LISTS[which].rule not in ("first", "last") else ())]
    entries = entries_of(which, texts, every)
    if not reads_memory(which) or not in_memory:
        return entries
    saved: dict[str, list[str]] = {}
    for name in every:
        saved.setdefault(in_memory.get(name, name), []).append(name)
    found = []
    for entry, by_checkpoint in zip(entries_of(which, texts, list(saved)), entries, strict=True):
        if not (entry.names or LISTS[which].rule == "quantizer"):
            entry = by_checkpoint
        else:
            meant, swept = ([one for name in own for one in saved[name]] for own in (entry.meant, entry.swept))
            entry = replace(entry, meant=tuple(meant), swept=tuple(swept))
        found.append(entry)
    return found


def _treated(side: str, entries: Entries, names: Sequence[str], in_memory: Mapping[str, str]) -> dict[str, Treatment]:
    """Return how a side treats each linear."""
    kept: dict[str, Treatment] = {}
    chosen: dict[str, Treatment] = {}
    for which, own in entries.items():
        for name in names:
            if never_quantized(which, in_memory.get(name, name) if reads_memory(which) else name):
                kept[name] = Treatment(False, f"never quantized under {which}")
        for entry in own:
            better = repaired(entry, names) if entry.trap else None
            remedy = f"{better!r}" if better else f"no {entry.text!r}"
            for name in entry.names:
                one = Treatment(entry.converts, _how(entry, name), f"{remedy} in {side}.{which}")
                (chosen if entry.converts else kept).setdefault(name, one)
    narrow = next((which for which, own in entries.items() if LISTS[which].converts and own), None)
    key = narrow or next(iter(entries))
    rest = Treatment(narrow is None, f"no entry of {', '.join(entries)} names it", f"an entry for it in {side}.{key}")
    return {name: kept.get(name) or chosen.get(name) or rest for name in names}


def _alone(key: str, unloaded: Mapping[str, Treatment]) -> Iterator[Finding]:
    """Yield the linears in the checkpoint's file alone that the rollout, whose list is `key`, quantizes."""
    if names := tuple(name for name, one in unloaded.items() if one.low):
        what = "in the checkpoint's file and not in the model, so no trainer has them; the rollout quantizes them"
        yield Finding("in the file alone", names, what, f"an entry for them in {key}, unless the engine skips them")


def _how(entry: Entry, name: str) -> str:
    """Return the entry, and if its text does not show it, the engine's name or a match within a word."""
    own = LISTS[entry.which]
    built = called(name, own.layout)
    direct = entry.text == name if own.rule == "any" else matches(entry.text, name, own.rule)
    fused = own.layout == "engine" and built != name and not direct
    by = f", by the engine's name {built.rpartition('.')[2]}" if fused else ""
    return f"{entry.which} {entry.text!r}{by}{', within a word' if name in entry.swept else ''}"


def _differences(trainer: Mapping[str, Treatment], rollout: Mapping[str, Treatment]) -> Iterator[Finding]:
    """Yield the linears that only one side quantizes; those with the same entries share a finding."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, one in trainer.items():
        if one.low != rollout[name].low:
            alike.setdefault((_numberless(one), _numberless(rollout[name])), []).append(name)
    for names in alike.values():
        said, remedies = [], []
        for side in (trainer, rollout):
            own = {str(side[name]): side[name].remedy for name in names}
            text, remedy = next(iter(own.items()))
            said.append(text if len(own) == 1 else _numberless(text))
            remedies.append(remedy if len(own) == 1 else _numberless(remedy))
        right = ", or ".join(filter(None, remedies))
        yield Finding("differs", tuple(names), f"trainer {said[0]}, rollout {said[1]}", right)


def _numberless(one: object) -> str:
    """Return the text with * for the numbers between its dots."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", str(one))


def _split(side: str, entries: Entries, names: Sequence[str]) -> Iterator[Finding]:
    """Yield the linears that an engine builds from several, if a list leaves out only some of these."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(called(name, "engine"), []).append(name)
    for which, own in entries.items():
        if LISTS[which].layout != "engine":
            continue
        texts, torn = {entry.text for entry in own}, dict[str, list[str]]()
        hit = {name for entry in own for name in entry.names}
        if LISTS[which].rule == "any":  # whole names come first, and one projection of an expert leaves out all experts
            hit &= {text for text in texts if ".experts." not in text}
        for built, several in parts.items():
            inside = [name for name in several if name in hit]
            if built not in texts and 0 < len(inside) < len(several):
                last = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
                torn.setdefault(f"{last}, {len(inside)} of the {len(several)}", []).append(built)
        for some, where in torn.items():
            what = f"{side}.{which} leaves out {some} that the engine builds as one linear, and it refuses to load them"
            yield Finding("split", tuple(where), what, "all of them in the list, or none")


def _matchless(side: str, entries: Entries, names: Sequence[str], in_memory: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the entries that match nothing. Raises ValueError if no entry of a list matches.

    A list may name a linear both as the checkpoint does and as a model in memory does, for readers of either kind.
    """
    for which, own in entries.items():
        if LISTS[which].rule in ("first", "last"):
            continue
        hit = {name for entry in own for name in entry.names}
        lost: dict[str, list[Entry]] = {}
        as_saved: dict[str, str] = {}
        for entry in (entry for entry in own if fits_none(entry, names)):
            meant = [name for name in names if matches(entry.text, in_memory.get(name, name), LISTS[which].rule)]
            if not meant or not hit.issuperset(meant):
                lost.setdefault(_numberless(entry.text), []).append(entry)
                as_saved.update({_numberless(entry.text): meant[0]} if meant else {})
        for text, several in lost.items():
            right = _right(several[0], [in_memory.get(name, name) for name in names] if reads_memory(which) else names)
            if text in as_saved:
                right = f"{as_saved[text]!r}, as the checkpoint calls it"
            if sum(map(len, lost.values())) == len(own):
                raise ValueError(f"{side}.{which}={several[0].text}: matches no linear of this model; {right}")
            where = tuple(f"{side}.{which} {entry.text!r}" for entry in several)
            yield Finding("no match", where, "matches no linear of this model", right)


def _right(entry: Entry, names: Sequence[str]) -> str:
    """Return the likely intention of an entry that matches nothing."""
    rule = LISTS[entry.which].rule
    if set(entry.text) & set("*?") and not entry.text.startswith("re:") and rule in ("exact", "re:", "part", "weight"):
        return "* is not a wildcard in this list" + (", use re: and a regular expression" if rule == "re:" else "")
    return suggested(entry.text, names, entry.which)
