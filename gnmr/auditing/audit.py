"""Check with `gnmr.audit` that the recipe in force is the one that was meant.

Some apparent instabilities of low precision are silent mistakes: the head was converted too, a list of names was never
applied, a pattern matched too many names, or a scale was off by a factor of 2. An audit reads the precision in force
(`in_force`) and compares it with lists of names (`lists`). It measures the operands that the GEMMs really read in one
forward and backward pass (`operands`). Every finding names the problem, its place, and the remedy. A sound model has no
findings.

**Related work**: torchao's SQNR and Transformer Engine's debug statistics measure the casts that a user names, and
msProbe compares two runs. None of them reports which list was not applied or which scale is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from gnmr.auditing.audit_pass import measured_pass, met_not_finite
from gnmr.auditing.causes import Cause
from gnmr.auditing.seen_operands import Measured
from gnmr.conversion.adapters import Found
from gnmr.conversion.targets import KEPT
from gnmr.conversion.unit_names import of_any_expert, unit_of
from gnmr.errors import first_few, plural, require
from gnmr.formats import RECIPES, Recipe
from gnmr.measure.coverage import MUCH, Coverage, percent, routes
from gnmr.measure.guards import not_finite
from gnmr.measure.in_force import READS, Operator, operators_of, packed_in
from gnmr.measure.passes import Progress
from gnmr.names import GEMMS
from gnmr.plan.checkpoint_names import linears_of
from gnmr.plan.diagnose import recipe_named
from gnmr.plan.lists import (
    HEADS,
    LISTS,
    OF_BOTH,
    Entry,
    entries_of,
    fits_none,
    in_memory,
    read_lists,
    reads_memory,
    repaired,
    suggested,
)

Measurements = Mapping[tuple[str, str, str], Measured]
"""Measurements by (operator, GEMM, operand)."""
LOW = 50.0
"""Ratio in dB below which an operator that declares nothing is in low precision.

INT8 gives at most 48.4 dB, for uniform numbers, and products of BF16 operands lie above 51 dB.
"""
_QKV = {"wq", "wk", "wv", "wkv", "wqkv", "qkv_linear"}
"""Names that torchtitan's versions give the linears of an attention's queries, keys and values."""


@dataclass(frozen=True)
class Finding:
    """One problem that the audit found."""

    kind: str
    where: tuple[str, ...]
    """Operators, with GEMM and operand if it is about one (`layers.0.mlp.up_proj fprop input`), or entries of lists."""
    what: str
    right: str

    def line(self) -> str:
        """Return the finding in one line."""
        return f"{self.kind}: {first_few(self.where, 3)}: {self.what}; right would be: {self.right}"

    def tree(self) -> dict[str, Any]:
        """Return the finding as a tree for JSON."""
        return asdict(self) | {"line": self.line()}


@dataclass(frozen=True)
class Row:
    """The precision in force in one operator, and its measurements."""

    operator: str
    kind: str
    """gnmr, plain, torchao float8, torchao mx, Transformer Engine, or the name of a class."""
    precision: dict[str, str]
    """Precision of each GEMM, in words."""
    measured: dict[str, dict[str, tuple[float, float | None]]]
    """(measured dB, possible dB) by GEMM and operand, with fprop's output. Infinite: never quantized."""
    ran: bool
    low: bool
    """True if it is in low precision: as declared, as its weight is kept, or as measured."""
    note: str = ""


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    dynamic: bool
    """True if a batch was run."""
    coverage: Coverage = field(default_factory=Coverage)
    """Products that the model ran in that batch."""

    @property
    def sound(self) -> bool:
        """Return True if there are no findings."""
        return not self.findings

    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        rows = [row for row in self.rows if row.ran] if self.dynamic else self.rows
        low = sum(row.low for row in rows)
        head = f"{len(rows)} linears, {low} in low precision"
        measured = sum(bool(row.measured) for row in rows)
        head += f", {measured} of them measured in one batch" if self.dynamic else ", nothing measured"
        if idle := [row.operator for row in self.rows if row not in rows]:
            head += f"; {first_few(idle, 3)} did not run"
        names = [row.operator for row in rows if not low or row.low]
        if self.coverage.others(names):
            head += f"; {self.coverage.line(names, 'low precision covers' if low else 'linears are')}"
        return f"{head}: " + ("sound" if self.sound else plural(len(self.findings), "finding"))

    def tree(self) -> dict[str, Any]:
        """Return the audit as a tree for JSON."""
        return {
            "verdict": self.verdict(),
            "covers": self.coverage.share([row.operator for row in self.rows if row.ran]),
            "findings": [finding.tree() for finding in self.findings],
            "operators": [asdict(row) for row in self.rows],
        }


def audit(
    model: nn.Module,
    loss_of_batch: Callable[[Any], Tensor] | None = None,
    batch: Any = None,
    *,
    recipe: str | Recipe | None = None,
    lists: Mapping[str, Sequence[str] | str] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Compare the precision in force in the model's linears with the intended precision.

    Args:
        model: a plain model, or one converted by `gnmr.attach`, torchao (float8 and MX training) or Transformer Engine.
            It runs in evaluation mode and without torch.compile. The audit restores weights, gradients, modes, random
            numbers and delayed scales. A controller with observe=input_grad counts the backward pass of the audit: call
            `audit` after a step, then `controller.discard()`.
        loss_of_batch: returns the loss of a batch by `model`, one number with a gradient. None: nothing is run.
        batch: the argument of `loss_of_batch`.
        recipe: the intended recipe of all linears except the output head, routers and linears that a list leaves out.
        lists: entries by list (`gnmr.plan.lists.LISTS`), for example {"filter_fqns": ["output", "layers.1."]}.
        progress: called with the number of passes of linears that are done and the approximate total.

    Raises:
        ValueError: an argument is invalid; the message is one line.
    """
    require(isinstance(model, nn.Module), "model", type(model).__name__, "must be an nn.Module")
    texts = read_lists(lists)
    wanted = RECIPES[recipe_named(recipe)] if isinstance(recipe, str) else recipe
    operators = operators_of(model)
    right = "has no linear, so no GEMM that a recipe would cast"
    if packed := packed_in(model):
        right = f"has no linear that an audit can read, only {', '.join(dict.fromkeys(packed.values()))}"
    require(operators, "model", type(model).__name__, right)
    dynamic = loss_of_batch is not None
    found, ran, read, coverage = measured_pass(model, operators, loss_of_batch, batch, progress)
    saved = names_in_checkpoint(model, texts)
    names = names_in_lists(texts, [operator.name for operator in operators], saved)
    by_list = [one for which, own in texts.items() for one in entries_of(which, own, [*names[which]])]
    entries = [in_memory(entry, names[entry.which]) for entry in by_list]
    findings = [
        *_of_lists(by_list, names, saved, model),
        *_of_conversion(operators, entries, texts, wanted, found),
        *_of_roles(operators, entries, found),
        *_of_parameters(model, found),
        *_of_packed(packed),
        *_of_others(coverage, operators, wanted),
        *(_of_idle(operators, ran, read) if dynamic else ()),
        *_of_passes(operators, found),
    ]
    return Audit(
        tuple(findings), tuple(_row(operator, found, ran, dynamic) for operator in operators), dynamic, coverage
    )


# ---- findings ----


def names_in_checkpoint(model: nn.Module, lists: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Return the checkpoint's names of the model's linears by the name in memory, if any of the lists is read by them.

    The result is empty if none is.
    """
    by_memory = all(reads_memory(which) and which not in OF_BOTH for which in lists)
    return {} if by_memory else linears_of(model).saved


def names_in_lists(
    lists: Iterable[str], names: Iterable[str], saved: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, str]]:
    """Return, for each list, the name in memory of each linear by the name that the list has for it.

    Engines call a linear as its checkpoint does. Lists with readers of either kind may have both names.
    """
    same = {name: name for name in names}
    by_checkpoint = {theirs: name for name in same for theirs in saved.get(name, (name,))}
    of_both = same | by_checkpoint
    return {which: of_both if which in OF_BOTH else same if reads_memory(which) else by_checkpoint for which in lists}


def _modules_in_checkpoint(loaded: Sequence[str], saved: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of modules and parameters, with those of the checkpoint where linears have others."""
    ours = {part for name, theirs in saved.items() if name not in theirs for part in _parts_of(name)}
    theirs = dict.fromkeys(part for several in saved.values() for name in several for part in _parts_of(name))
    gone = ours.difference(theirs)
    same = [name for name in loaded if gone.isdisjoint(_parts_of(name))]
    return [*dict.fromkeys((*same, *theirs))]


def _parts_of(name: str) -> list[str]:
    """Return a name and those of all modules around it."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def _of_lists(
    entries: Sequence[Entry],
    names_of: Mapping[str, Mapping[str, str]],
    saved: Mapping[str, Sequence[str]],
    model: nn.Module,
) -> Iterator[Finding]:
    """Yield entries that match nothing, and entries that match more names than they seem to.

    Entries and `names_of` have the names that the library of each list reads (`names_in_lists`).
    """
    loaded = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    in_file = _modules_in_checkpoint(loaded, saved)
    of_both = [*dict.fromkeys((*loaded, *in_file))]
    for entry in entries:
        names = [*names_of[entry.which]]
        others = of_both if entry.which in OF_BOTH else loaded if reads_memory(entry.which) else in_file
        if entry.trap:
            better = repaired(entry, names)
            first = ", ".join(entry.swept[:2])
            what = f"means {len(entry.meant)} linears between dots, and {len(entry.swept)} more within a word ({first})"
            right = f"{better!r}" if better else "whole names"
            yield Finding("substring", (f"{entry.which} {entry.text!r}",), what, right)
        if not fits_none(entry, names) or _alias(entry, entries):
            continue
        what, right = "matches no module of this model", suggested(entry.text, names, entry.which)
        if matched := entries_of(entry.which, [entry.text], others)[0].names:
            modules = {*others}
            linears = [name for name in names if name in modules]
            inside = [[name for name in linears if name.startswith(f"{module}.")] for module in matched]
            if not all(inside):
                continue  # a module without a GEMM: an embedding, a norm
            what = f"matches {first_few(matched, 2)}, and none of the linears in it"
            right = suggested(f"{inside[0][0]}{':off' if ':' in entry.text else ''}", names, entry.which)
            right = right if right.startswith("their") else f"their names, such as {right}"
        yield Finding("no match", (f"{entry.which} {entry.text!r}",), what, right)


def _alias(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Return True if another entry of the list has the same meaning under a name of another library version."""
    parts = entry.text.strip(".").split(".")
    numbers = [part for part in parts if part.isdigit()]
    for other in entries:
        if other.which != entry.which or not other.names:
            continue
        own = other.text.strip(".").split(".")
        if parts[-1] in HEADS and own[-1] in HEADS:
            return True
        alike = own[-1] == parts[-1] or {own[-1], parts[-1]} <= _QKV
        if len(parts) > 1 and alike and [part for part in own if part.isdigit()] == numbers:
            return True
    return False


def _of_conversion(
    operators: Sequence[Operator],
    entries: Sequence[Entry],
    texts: Mapping[str, Sequence[str]],
    recipe: Recipe | None,
    found: Measurements,
) -> Iterator[Finding]:
    """Yield lists that were not applied, operators that were left out, and recipes other than the intended one."""
    out: dict[str, Entry] = {}
    chosen: dict[str, Entry] = {}
    for entry in entries:
        if entry.which != "pins":
            own = chosen if entry.converts else out
            for name in entry.names:
                own.setdefault(name, entry)
    selects = any(LISTS[which].converts for which in texts)
    listed = any(which != "pins" for which in texts)
    not_applied: dict[str, list[Operator]] = {}
    missing: list[str] = []
    within: list[str] = []
    any_low = False
    for operator in operators:
        low, name = _low(operator, found), operator.name
        any_low |= low
        if low and name in out:
            not_applied.setdefault(f"{out[name].which} {out[name].text!r} leaves it out", []).append(operator)
        elif low and selects and name not in chosen:
            not_applied.setdefault("no entry names it", []).append(operator)
        wanted = name in chosen or (name not in out and not selects)
        if wanted and not low and not operator.role:
            missing.append(name)
            within += [name] if isinstance(operator.module, Found) else []
    if recipe is None and not listed:  # some may be left out on purpose
        missing = within if any_low else []
    for why, several in not_applied.items():
        what = f"{why}, and it is in {_in_words(several[0])}"
        right = "16 bits; hand the list to the conversion itself"
        yield Finding("not applied", tuple(one.name for one in several), what, right)
    if not any_low and missing:
        asked = "the lists leave out others alone" if recipe is None else f"recipe={recipe.name} was to be"
        what = f"no linear is in low precision, {asked}"
        if wrapped := {operator.kind for operator in operators if operator.declared is None}:
            what = f"no GEMM reads low precision, also in linears of {', '.join(sorted(wrapped))}, and {asked}"
        yield Finding("not converted", tuple(missing), what, "convert before training, and audit the trained model")
    elif missing:
        what = "is in 16 bits, and nothing leaves it out"
        yield Finding("not converted", tuple(missing), what, "convert it, or name it in the list (widths may not fit)")
    if recipe is not None:
        yield from _of_recipe(operators, recipe)
    if recipe is None and not listed:
        yield from _odd(operators)


def _of_recipe(operators: Sequence[Operator], recipe: Recipe) -> Iterator[Finding]:
    """Yield GEMMs that are not on this recipe."""
    other: dict[tuple[str, str, str], list[str]] = {}
    for operator in operators:
        for gemm in GEMMS if operator.low and operator.declared is not None else ():
            now = " x ".join(_word(operator.grain(gemm, operand)) for operand in READS[gemm])
            want = " x ".join(_word(getattr(getattr(recipe, gemm), operand)) for operand in READS[gemm])
            if now != want and gemm not in operator.pinned:
                other.setdefault((gemm, now, want), []).append(operator.name)
    for (gemm, now, want), names in other.items():
        yield Finding("another recipe", tuple(names), f"{gemm} is {now}, and recipe={recipe.name} has {want}", want)


def _word(cast: Any) -> str:
    """Return the format and scale of a cast, without its other options."""
    return "16 bits" if cast is None else "/".join(str(cast).replace("/axis", "/row").split("/")[:2])


def _odd(operators: Sequence[Operator]) -> Iterator[Finding]:
    """Yield the few operators of a kind that differ in precision from the rest of their kind and of their block."""
    kinds: dict[str, list[Operator]] = {}
    blocks: dict[str, list[Operator]] = {}
    for operator in operators:
        if not operator.role and operator.declared is not None and not operator.pinned:
            kinds.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", operator.name), []).append(operator)
            blocks.setdefault(unit_of(operator.name, "block"), []).append(operator)
    for own in kinds.values():
        signs: dict[tuple[str, ...], list[Operator]] = {}
        for operator in own:
            signs.setdefault(tuple(operator.words(gemm) for gemm in GEMMS), []).append(operator)
        usual = max(signs.values(), key=len)
        for sign, few in signs.items():
            if few is usual or len(few) * 4 > len(own):
                continue
            alone = [o for o in few if any(other.low != o.low for other in blocks[unit_of(o.name, "block")])]
            if alone or any(o.low for o in few):
                names = tuple(o.name for o in alone or few)
                what = f"is in {sign[0]}, and the {len(usual)} others of its kind in {usual[0].words('fprop')}"
                yield Finding("odd one out", names, what, "the same, or a list that says so")


def _of_roles(operators: Sequence[Operator], entries: Sequence[Entry], found: Measurements) -> Iterator[Finding]:
    """Yield output heads and routers in low precision, and tied heads that are cast or no longer shared."""
    chosen = {name for entry in entries if entry.converts for name in entry.meant}
    for operator in operators:
        low, said = _low(operator, found), _in_words(operator)
        if operator.tied and not operator.shared:
            what = f"lies in the memory of {operator.tied} and is a parameter of its own: two gradients, one weight"
            right = "tie them again after the conversion, or leave the head out of it"
            yield Finding("tied head", (operator.name,), what, right)
        tied = operator.tied and operator.shared
        if low and (tied or (operator.role in KEPT and operator.name not in chosen and not operator.tied)):
            yield head_or_router(operator, f"in {said}")


def head_or_router(operator: Operator, state: str) -> Finding:
    """Return the finding on an output head or a router in low precision; `state` completes "it is"."""
    if operator.tied and operator.shared:
        what = f"shares its weight with {operator.tied}, and is {state}"
        return Finding("tied head", (operator.name,), what, "16 bits: the cast also changes the embedding")
    what = f"the {'output head' if operator.role == 'head' else 'router of experts'} is {state}"
    return Finding(operator.role, (operator.name,), what, "16 bits, as every published recipe has it")


def _of_parameters(model: nn.Module, found: Measurements) -> Iterator[Finding]:
    """Yield non-finite parameters, if a GEMM read NaN or Inf, and one-byte parameters outside linears."""
    if met_not_finite(found) and (wrong := list(not_finite(model))):
        what = f"{wrong[0][1]} of its {wrong[0][2]} elements are not finite{' (the first)' if len(wrong) > 1 else ''}"
        yield Finding("not finite", tuple(name for name, _, _ in wrong), what, "weights from before the loss was NaN")
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.element_size() == 1:
                dtype = str(parameter.dtype).removeprefix("torch.")
                what = f"a parameter of {type(module).__name__} is kept in {dtype}"
                yield Finding("parameter", (f"{path}.{name}".lstrip("."),), what, "16 bits")


def _of_packed(packed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the linears of other classes that keep codes, of which neither precision nor weights are known."""
    by_class: dict[str, list[str]] = {}
    for name, kind in packed.items():
        by_class.setdefault(kind, []).append(name)
    for kind, names in by_class.items():
        what = f"is a {kind}, no nn.Linear, and keeps its weight in codes that an audit cannot read"
        yield Finding("not examined", tuple(names), what, "an audit before that conversion, which shows the rest")


def _of_idle(operators: Sequence[Operator], ran: set[str], read: set[str]) -> Iterator[Finding]:
    """Yield linears that may be in low precision and did not run.

    An expert that no token reached is not reported if other experts of its kind ran.
    """
    reached = {of_any_expert(name) for name in ran}
    maybe = [o for o in operators if o.low or (o.low is None and o.kind != "ParametrizedLinear")]
    idle = [o.name for o in maybe if of_any_expert(o.name) not in reached]
    kernel = "its weight has a gradient, and it is never called (F.linear, a wrapped forward): no precision is in force"
    for other, what, right in (
        (True, kernel, "call the module"),
        (False, "did not run in this batch, so nothing is known of it", "a batch that reaches it"),
    ):
        if names := tuple(name for name in idle if (name in read) == other):
            yield Finding("never ran", names, what, f"{right}, or leave it out of the conversion")


def _of_others(coverage: Coverage, operators: Sequence[Operator], recipe: Recipe | None) -> Iterator[Finding]:
    """Yield the share of GEMMs outside linear operators if the model is in low precision or they are most of it."""
    others = {
        one: share
        for one, share in coverage.others([o.name for o in operators]).items()
        if one.kind != "Linear" and not routes(one)
    }
    share = sum(others.values())
    if share >= (MUCH if recipe is not None or any(o.low for o in operators) else 0.5):
        kinds = ", ".join(dict.fromkeys(one.kind for one in others))
        what = f"{percent(share)} of the GEMMs' arithmetic is in no linear operator ({kinds}) and in 16 bits"
        right = "put linears in its place, or declare its products (gnmr.conversion.adapters.register)"
        yield Finding("not covered", tuple(one.name or one.kind for one in others), what, right)


def unused_recipes(declared: Sequence[str], named: Sequence[str | None]) -> list[Finding]:
    """Return a finding for each declared recipe that no path names."""
    right = f"one of {', '.join(name for name in named if name)}, or a path that names it"
    what = "is declared, and no path is on it"
    return [Finding("unused recipe", (name,), what, right) for name in declared if name not in named]


def _of_passes(operators: Sequence[Operator], found: Measurements) -> Iterator[Finding]:
    """Yield the causes that were measured; those of one kind and operand share one finding."""
    alike: dict[tuple[str, str, str], list[tuple[str, Cause]]] = {}
    for (name, gemm, operand), one in found.items():
        for cause in one.causes:
            alike.setdefault((cause.kind, operand, cause.right), []).append((f"{name} {gemm} {operand}", cause))
    for (kind, _, right), several in alike.items():
        first = several[0][1].text
        same = all(cause.text == first for _, cause in several)
        text = first if same else f"{first} (numbers of the first of {len(several)})"
        yield Finding(kind, tuple(where for where, _ in several), text, right)


def _low(operator: Operator, found: Measurements) -> bool:
    """Return True if the operator declares low precision, or declares nothing and its forward pass shows it.

    The operands show it if their product was seen; otherwise the output does.
    """
    if operator.low is not None:
        return operator.low
    forward = {key: found.get((operator.name, "fprop", key)) for key in ("input", "weight", "output")}
    seen = [one for key, one in forward.items() if one is not None and (key != "output" or one.by == "output")]
    return any(one.noise > 0 and -math.inf < one.snr < LOW for one in seen)


def _in_words(operator: Operator) -> str:
    """Return its precision for a sentence."""
    return operator.words("fprop") if operator.declared is not None else f"low precision ({operator.kind})"


def _row(operator: Operator, found: Measurements, ran: set[str], dynamic: bool) -> Row:
    measured = {
        gemm: {
            operand: (one.snr, one.best)
            for operand in (*READS[gemm], "output")
            if (one := found.get((operator.name, gemm, operand))) is not None
        }
        for gemm in GEMMS
    }
    notes = []
    if dynamic and operator.name not in ran:
        notes.append("did not run in this batch")
    elif dynamic and (out := found.get((operator.name, "fprop", "output"))) is not None and out.by == "output":
        notes.append("judged by its output: its GEMMs run elsewhere")
    elif dynamic and not measured["fprop"] and not isinstance(operator.module, Found):
        notes.append("nothing of it could be measured: its class does not give the weight's values")
    if operator.pinned:
        notes.append(f"pinned: {', '.join(operator.pinned)}")
    return Row(
        operator.name,
        operator.kind,
        {gemm: operator.words(gemm) for gemm in GEMMS},
        {gemm: own for gemm, own in measured.items() if own},
        operator.name in ran,
        _low(operator, found),
        "; ".join(notes),
    )
