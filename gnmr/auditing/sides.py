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
_PAIR = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""Lists of Megatron-LM of which both must be given."""


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
        by_trainer, by_rollout = (sum(linear.low for linear in side.values()) for side in (self.trainer, self.rollout))
        unlike = sum(linear.low != self.rollout[name].low for name, linear in self.trainer.items())
        line = f"{len(self.trainer)} linears, {by_trainer} quantized by the trainer and {by_rollout} by the rollout: "
        line += "both sides agree" if self.sound else f"{unlike} are treated differently"
        if self.unloaded:
            line += f"; {len(self.unloaded)} more are in the checkpoint's file alone and were not compared"
        return line

    def tree(self) -> dict[str, Any]:
        """Return the comparison as a tree for JSON."""
        return {
            "verdict": self.verdict(),
            "findings": [finding.tree() for finding in self.findings],
            "notes": [note.tree() for note in self.notes],
            "modules": [
                {"module": name, "trainer": asdict(by_trainer), "rollout": asdict(self.rollout[name])}
                for name, by_trainer in self.trainer.items()
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

    Returns:
        The treatment of each linear by both sides, and what differs.

    Raises:
        ValueError: a list is unknown, an entry is invalid, or a whole list matches nothing; one line.
    """
    if not names:
        raise ValueError("names=[]: must name the linears of the model")
    by_side = {"trainer": trainer, "rollout": rollout}
    sides = [_Side.of(key, lists, names, unloaded, in_memory or {}) for key, lists in by_side.items()]
    treatments = [side.treatments() for side in sides]
    by_trainer, by_rollout = ({name: linears[name] for name in names} for linears in treatments)
    alone = {name: treatments[1][name] for name in unloaded}
    findings, notes = [*_differences(by_trainer, by_rollout)], list[Finding]()
    # Linears that both treat alike may still fail to load: an engine refuses a part of what it fuses.
    for side in sides:
        notes += side.matchless()
        findings += side.split()
    if quantized := tuple(name for name, linear in alone.items() if linear.low):
        problem = "in the checkpoint's file and not in the model, so no trainer has them; the rollout quantizes them"
        right = f"an entry for them in rollout.{next(iter(rollout))}, unless the engine skips them"
        notes.append(Finding("in the file alone", quantized, problem, right))
    return SideComparison(by_trainer, by_rollout, tuple(findings), tuple(notes), alone)


@dataclass(frozen=True)
class _Side:
    """The lists of one side, matched with the model's linears by the checkpoint's names."""

    key: str
    """trainer or rollout."""
    entries: Mapping[str, Sequence[Entry]]
    """Matched entries by list."""
    names: Sequence[str]
    """The linears of the checkpoint, by its names."""
    in_memory: Mapping[str, str]
    """Names in memory where they differ, by the checkpoint's."""

    @classmethod
    def of(
        cls, key: str, lists: Lists, names: Sequence[str], unloaded: Sequence[str], in_memory: Mapping[str, str]
    ) -> _Side:
        """Read the lists and match them; a count of blocks is over the model's own linears."""
        texts = read_lists(lists, key)
        if not texts:
            raise ValueError(f"{key}: has no list; give {key}.filter_fqns=[] if nothing is left out")
        if len(lone := [which for which in _PAIR if which in texts]) == 1:
            other = _PAIR[1 - _PAIR.index(lone[0])]
            raise ValueError(f"{key}.{lone[0]}: name {key}.{other} too; its default is 1 in Megatron-LM")
        entries = {}
        for which, lines in texts.items():
            # The first and last blocks are those of the model, whatever else the file holds.
            of_model = LISTS[which].rule in ("first", "last")
            entries[which] = _matched(which, lines, names if of_model else [*names, *unloaded], in_memory)
        return cls(key, entries, [*names, *unloaded], in_memory)

    def name_for(self, which: str, name: str) -> str:
        """Return the name that the reader of a list has for a linear."""
        return self.in_memory.get(name, name) if reads_memory(which) else name

    def treatments(self) -> dict[str, Treatment]:
        """Return how the side treats each linear: an entry that leaves it out precedes one that converts it."""
        excluded: dict[str, Treatment] = {}
        chosen: dict[str, Treatment] = {}
        for which, entries in self.entries.items():
            for name in self.names:
                if never_quantized(which, self.name_for(which, name)):
                    excluded[name] = Treatment(False, f"never quantized under {which}")
            # The first entry that matches explains the treatment, and is the one to change.
            for entry in entries:
                better = repaired(entry, self.names) if entry.trap else None
                remedy = f"{better!r}" if better else f"no {entry.text!r}"
                for name in entry.names:
                    treatment = Treatment(entry.converts, _why(entry, name), f"{remedy} in {self.key}.{which}")
                    (chosen if entry.converts else excluded).setdefault(name, treatment)
        # A list of linears to convert leaves out all others; without one, everything is quantized.
        selecting = [which for which, entries in self.entries.items() if LISTS[which].converts and entries]
        which = selecting[0] if selecting else next(iter(self.entries))
        why, remedy = f"no entry of {', '.join(self.entries)} names it", f"an entry for it in {self.key}.{which}"
        unnamed = Treatment(not selecting, why, remedy)
        return {name: excluded.get(name) or chosen.get(name) or unnamed for name in self.names}

    def split(self) -> Iterator[Finding]:
        """Yield the linears that an engine builds from several, if a list leaves out only some of these."""
        built_of: dict[str, list[str]] = {}
        for name in self.names:
            built_of.setdefault(called(name, "engine"), []).append(name)
        for which, entries in self.entries.items():
            if LISTS[which].layout != "engine":
                continue
            texts = {entry.text for entry in entries}
            matched = {name for entry in entries for name in entry.names}
            if LISTS[which].rule == "any":  # whole names come first, and one projection of an expert leaves out all
                matched &= {text for text in texts if ".experts." not in text}
            # Blocks with the same missing projections share a finding.
            torn: dict[str, list[str]] = {}
            for built, names in built_of.items():
                inside = [name for name in names if name in matched]
                if built not in texts and 0 < len(inside) < len(names):
                    ends = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
                    torn.setdefault(f"{ends}, {len(inside)} of the {len(names)}", []).append(built)
            for some, where in torn.items():
                problem = f"{self.key}.{which} leaves out {some} that the engine builds as one linear"
                right = "all of them in the list, or none"
                yield Finding("split", tuple(where), f"{problem}, and it refuses to load them", right)

    def matchless(self) -> Iterator[Finding]:
        """Yield the entries that match nothing. Raises ValueError if no entry of a list matches.

        A list may name a linear both as the checkpoint does and as a model in memory does, for readers of either kind.
        """
        for which, entries in self.entries.items():
            rule = LISTS[which].rule
            if rule in ("first", "last"):
                continue
            matched = {name for entry in entries for name in entry.names}
            lost: dict[str, list[Entry]] = {}
            saved_names: dict[str, str] = {}
            for entry in (entry for entry in entries if fits_none(entry, self.names)):
                # An entry by the name in memory is none by the checkpoint's, but says which linear was meant.
                meant = [name for name in self.names if matches(entry.text, self.in_memory.get(name, name), rule)]
                if not meant or not matched.issuperset(meant):
                    lost.setdefault(_numberless(entry.text), []).append(entry)
                    if meant:
                        saved_names[_numberless(entry.text)] = meant[0]
            for pattern, alike in lost.items():
                right = _intention(alike[0], [self.name_for(which, name) for name in self.names])
                if pattern in saved_names:
                    right = f"{saved_names[pattern]!r}, as the checkpoint calls it"
                # A list of which nothing matches was written for another model.
                if sum(map(len, lost.values())) == len(entries):
                    raise ValueError(f"{self.key}.{which}={alike[0].text}: matches no linear of this model; {right}")
                where = tuple(f"{self.key}.{which} {entry.text!r}" for entry in alike)
                yield Finding("no match", where, "matches no linear of this model", right)


def _matched(which: str, texts: Sequence[str], names: Sequence[str], in_memory: Mapping[str, str]) -> list[Entry]:
    """Return the entries of a list with the linears that they match, by the checkpoint's names."""
    by_checkpoint = entries_of(which, texts, names)
    if not reads_memory(which) or not in_memory:
        return by_checkpoint
    # Several linears of the checkpoint may be one in memory: gate and up of all experts.
    saved: dict[str, list[str]] = {}
    for name in names:
        saved.setdefault(in_memory.get(name, name), []).append(name)
    entries = []
    for by_memory, otherwise in zip(entries_of(which, texts, list(saved)), by_checkpoint, strict=True):
        meant = tuple(name for own_name in by_memory.meant for name in saved[own_name])
        swept = tuple(name for own_name in by_memory.swept for name in saved[own_name])
        # An entry that matches nothing by the names in memory is read by the checkpoint's.
        fits = by_memory.names or LISTS[which].rule == "quantizer"
        entries.append(replace(by_memory, meant=meant, swept=swept) if fits else otherwise)
    return entries


def _why(entry: Entry, name: str) -> str:
    """Return the entry, and if its text does not show it, the engine's name or a match within a word."""
    reading = LISTS[entry.which]
    built = called(name, reading.layout)
    direct = entry.text == name if reading.rule == "any" else matches(entry.text, name, reading.rule)
    why = f"{entry.which} {entry.text!r}"
    if reading.layout == "engine" and built != name and not direct:
        why += f", by the engine's name {built.rpartition('.')[2]}"
    return f"{why}, within a word" if name in entry.swept else why


def _differences(trainer: Mapping[str, Treatment], rollout: Mapping[str, Treatment]) -> Iterator[Finding]:
    """Yield the linears that only one side quantizes; those with the same entries share a finding."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, treatment in trainer.items():
        if treatment.low != rollout[name].low:
            alike.setdefault((_numberless(treatment), _numberless(rollout[name])), []).append(name)
    for names in alike.values():
        # Of entries that differ by the block's number, the number is left out.
        texts, remedies = [], []
        for side in (trainer, rollout):
            treatment = side[names[0]]
            same = len({str(side[name]) for name in names}) == 1
            texts.append(str(treatment) if same else _numberless(treatment))
            remedies.append(treatment.remedy if same else _numberless(treatment.remedy))
        right = ", or ".join(filter(None, remedies))
        yield Finding("differs", tuple(names), f"trainer {texts[0]}, rollout {texts[1]}", right)


def _numberless(text: object) -> str:
    """Return the text with * for the numbers between its dots."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", str(text))


def _intention(entry: Entry, names: Sequence[str]) -> str:
    """Return the likely intention of an entry that matches nothing."""
    rule = LISTS[entry.which].rule
    # AMD Quark's lists have globs, and were copied into configs whose readers take whole names.
    if set(entry.text) & set("*?") and not entry.text.startswith("re:") and rule in ("exact", "re:", "part", "weight"):
        return "* is not a wildcard in this list" + (", use re: and a regular expression" if rule == "re:" else "")
    return suggested(entry.text, names, entry.which)
