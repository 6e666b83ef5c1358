"""`gnmr audit RUN|CHECKPOINT [key=value ...]`: check that the recipe in force is the one that was meant."""

from __future__ import annotations

import math
import shlex
from argparse import SUPPRESS, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.console import for_tables, print_plain, say, showing
from gnmr.errors import UserError, as_user_error, printable
from gnmr.lab.cli.parser import Parser, names_of, optional, path, text
from gnmr.lab.cli.subject import add_options, asked_of, blocks_for, memory_bound, paths_of
from gnmr.plan.lists import LISTS, RULES, read_lists
from gnmr.records import output

if TYPE_CHECKING:
    from gnmr.auditing.audit import Audit, Finding
    from gnmr.conversion.path_spec import PathSpec
    from gnmr.lab.config import Config
    from gnmr.lab.evaluation.subjects import Subject
    from gnmr.plan.checkpoint_names import ModelLinears
    from gnmr.plan.pin_plan import PinPlan

SIDES = ("trainer", "rollout")
_TEXT = """\
RUN is a run folder: its newest checkpoint on its own low path, with its pins, on its own validation data. CHECKPOINT is
a folder with a Hugging Face checkpoint of a causal model, or its name on the hub, with data=FILE.txt; with recipe=
its linears are put on that recipe, less what the lists leave out, else they are audited as they are. Nothing is trained
and nothing written but out=. A model that torchao or Transformer Engine converted lives in your own loop:

  gnmr.audit(model, lambda batch: model(**batch).loss, batch, lists={"filter_fqns": ["output", "layers.1"]})

  gnmr audit runs/act_quant_stress/RUN
  gnmr audit my_llama/ data=text.txt recipe=fp8_hybrid filter_fqns=[lm_head,layers.1]

With trainer. and rollout. before lists, the two sides are compared by names alone, and each difference is a finding:

  gnmr audit my_llama/ trainer.filter_fqns=[lm_head] rollout.ignore=[lm_head,re:.*down_proj]

exit codes: 0 sound, 1 with findings, 2 a mistake in what was asked for
"""


def _parser() -> Parser:
    parser = Parser("audit", "RUN|CHECKPOINT [key=value ...]", _TEXT, bare=False)
    parser.option("recipe", text, "what a checkpoint's linears are put on, or what a run's should be on")
    parser.option("plan", optional, "a plan.json, or its folder: what a checkpoint's linears are put on, with its pins")
    for name, own in LISTS.items():
        if own.library != "gnmr":
            does = "chosen" if own.rule == "quantizer" else "converted" if own.converts else "left out"
            parser.option(name, names_of, f"{own.library}: {does}; {RULES[own.rule]}")
            for side in SIDES:
                parser.option(f"{side}.{name}", names_of, SUPPRESS)
    add_options(parser, "the batch")
    parser.option("out", path, "a file for findings and measurements as JSON")
    parser.flag("table", "show every operator: precision in force, and dB measured of dB possible")
    parser.flag("static", "run no batch: names and precision alone")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError in one line, if possible before anything is loaded."""
    parser = _parser()
    asked, place, config = asked_of(parser, argv, "audit")
    if asked.out is not None:
        output.check(asked.out, f"out={asked.out}")
    if any(_given(asked, f"{side}.") for side in SIDES):
        return _compare(asked, place, config, argv)
    if config is not None and asked.plan is not None:
        raise UserError(f"plan={asked.plan}: {place} is a run, and is audited under its own; use a checkpoint")
    found, subject = _audited(asked, place, config)
    try:  # written before it is shown, because the reader may have left
        _write(asked, subject.name, argv, found.tree())
    finally:
        _show(found, subject.name, asked.table)
    return 0 if found.sound else 1


def _write(asked: Namespace, subject: str, argv: list[str], tree: dict[str, Any]) -> None:
    from gnmr.lab.train.provenance import commit, portable_command

    if asked.out is not None:
        origin = {"subject": subject, "command": portable_command(shlex.join(["gnmr", "audit", *argv]))}
        output.write_json(asked.out, origin | {"commit": commit()} | tree, f"out={asked.out}")


def _given(asked: Namespace, start: str = "") -> dict[str, list[str]]:
    """Return the given lists whose keys begin with `start`."""
    found = {name: getattr(asked, f"{start}{name}", None) for name in LISTS}
    return {name: own for name, own in found.items() if own is not None}


def _compare(asked: Namespace, place: str, config: Config | None, argv: list[str]) -> int:
    """Compare the lists of two sides over the names of the model's linears; return the exit code."""
    from gnmr.auditing.sides import compare

    other = [
        *_given(asked),
        *(key for key in ("recipe", "plan", "data", "table", "block", "batch_size") if getattr(asked, key)),
    ]
    if other:
        raise UserError(f"{other[0]}: two sides are compared by their own lists and by names alone; leave it out")
    linears = _linears(place, config)
    in_memory = {one: name for name, saved in linears.saved.items() for one in saved if one != name}
    names = list(dict.fromkeys(one for saved in linears.saved.values() for one in saved))
    sides = {side: _given(asked, f"{side}.") for side in SIDES}
    with as_user_error():
        found = compare(names, **sides, in_memory=in_memory, unloaded=linears.unloaded)
    console = for_tables()
    try:
        _write(asked, place, argv, found.tree())
    finally:
        for finding in (*found.findings, *found.notes):
            print_plain(console, printable(finding.line()))
        print_plain(console, f"{printable(place)}: {found.verdict()}")
    return 0 if found.sound else 1


def _linears(place: str, config: Config | None) -> ModelLinears:
    """Return the names of a model's linears and routers, from its config, and of what its checkpoint has besides."""
    import torch
    from torch import nn

    from gnmr.lab import models
    from gnmr.lab.models import pretrained
    from gnmr.plan.checkpoint_names import ModelLinears, linears_of

    checkpoint = place if config is None else config.model.checkpoint
    if checkpoint is not None:
        return linears_of(pretrained.empty(checkpoint, torch.bfloat16, place), checkpoint)
    assert config is not None
    with torch.device("meta"):
        model: nn.Module = models.build(config.model, config.data.vocab_size, config.training.seq_len)
    names = [f"model.{name}" if name.startswith("layers.") else name for name in linears_of(model).saved]
    return ModelLinears({name: (name,) for name in names})


def _audited(asked: Namespace, place: str, config: Config | None) -> tuple[Audit, Subject]:
    from gnmr.auditing.audit import audit
    from gnmr.lab.evaluation.subjects import load_subject
    from gnmr.lab.train.loss import loss_of

    with as_user_error():
        lists = read_lists(_given(asked))
    plan, recipe = paths_of(asked, config)
    with memory_bound("audit: out of memory while the model was loaded; use a smaller model or a larger machine"):
        subject = load_subject(place, device=asked.device, gradients=not asked.static)
    extra: list[Finding] = []
    if config is not None:
        extra = _as_trained(subject, config, lists)
    elif plan is not None:
        _on_plan(subject, plan, lists, asked.plan)
    elif isinstance(recipe, str):
        extra = _planned(subject, recipe, lists)
    loss, batch = None, None
    if not asked.static:
        blocks = blocks_for(subject, asked, 1, 0)
        say(printable(f"gnmr: {subject.name}: a batch of {blocks.size} x {blocks.length} tokens on {subject.device}"))
        loss, batch = (lambda own: loss_of(subject.model, own)), blocks.batches[0]
    right = "audit: out of memory: use a smaller batch_size= or block="
    with memory_bound(right), as_user_error(), showing("auditing", "passes of linears") as progress:
        found = audit(subject.model, loss, batch, recipe=recipe, lists=lists, progress=progress)
    return replace(found, findings=(*extra, *found.findings)), subject


def _as_trained(subject: Subject, config: Config, lists: dict[str, list[str]]) -> list[Finding]:
    """Put a run's model on its low path and add its lists; return findings on unused declarations in its config."""
    from gnmr.auditing.audit import unused_recipes
    from gnmr.lab.train.checkpoint import load_model
    from gnmr.lab.train.model import build_converted

    if subject.converted is None:
        subject.converted = build_converted(subject.model, config.precision, config.training.seed)
        load_model(Path(subject.name) / "checkpoints", subject.model, subject.converted)
    for operator in subject.converted.operators:
        operator.switch(False)
    lists |= _lists_of(config.precision)
    return unused_recipes(list(config.precision.recipes), [config.precision.low, config.precision.recovery])


def _on_plan(subject: Subject, plan: PinPlan, lists: dict[str, list[str]], where: str) -> None:
    """Put a checkpoint's linears on the paths of a plan.json, and add its pins to the lists."""
    from gnmr.conversion import PathSpec, convert
    from gnmr.conversion.converting import operator_shapes

    with as_user_error():
        spec = PathSpec(**plan.paths())
        plan.refuse_other(f"plan={where}", operator_shapes(subject.model, spec))
        subject.converted = convert(subject.model, spec)
    lists |= _lists_of(spec)


def _lists_of(spec: PathSpec) -> dict[str, list[str]]:
    """Return the patterns by which a spec names linears, except its defaults."""
    return {key: list(own) for key in ("targets", "exclude", "pins") if (own := getattr(spec, key))}


def _planned(subject: Subject, recipe: str, lists: dict[str, list[str]]) -> list[Finding]:
    """Put a checkpoint's linears on the recipe, except those that the lists leave out.

    Our recipes leave out output heads and routers. Other libraries convert them if their lists do not leave them out,
    and these are the findings that are returned.
    """
    from gnmr.auditing.audit import head_or_router, names_in_checkpoint, names_in_lists
    from gnmr.conversion import PathSpec, convert
    from gnmr.conversion.targets import KEPT
    from gnmr.measure.in_force import operators_of
    from gnmr.plan.lists import entries_of, in_memory, never_quantized

    operators = operators_of(subject.model)
    roles = {operator.name: operator.role for operator in operators}
    names = list(roles)
    by_list = names_in_lists(lists, names, names_in_checkpoint(subject.model, lists))
    entries = [
        in_memory(entry, by_list[which])
        for which, own in lists.items()
        for entry in entries_of(which, own, [*by_list[which]])
    ]
    out = {name for entry in entries if not entry.converts for name in entry.names}
    chosen = {name for entry in entries if entry.converts for name in entry.names}
    named = any(LISTS[which].converts for which in lists)
    targets = [name for name in names if name in chosen - out and roles[name] not in KEPT] if named else None
    if targets == [] or out >= {*names}:
        raise UserError(f"recipe={recipe}: the lists leave no linear to convert")
    exclude = [] if named else [name for name in names if name in out]
    with as_user_error():
        spec = PathSpec.of(recipe, None, targets=targets, exclude=exclude, backend="simulated")
        subject.converted = convert(subject.model, spec)
    wanted = {name for entry in entries if entry.converts for name in entry.meant}
    converted = (chosen if named else {*names}) - out - wanted
    return [
        head_or_router(operator, f"converted to recipe={recipe}, as {', '.join(lists)} does not leave it out")
        for operator in operators
        if operator.role in KEPT and operator.name in converted and lists
        if not any(
            never_quantized(which, theirs)
            for which, own in by_list.items()
            for theirs, name in own.items()
            if name == operator.name
        )
    ]


def _show(found: Audit, name: str, table: bool) -> None:
    console = for_tables()
    if table:
        console.print(_table(found))
    for finding in found.findings:
        print_plain(console, printable(finding.line()))
    print_plain(console, f"{printable(name)}: {found.verdict()}")


def _table(found: Audit) -> Any:
    """Return a table of the operators: the precision in force, and measured / possible dB of each operand."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("operator", "GEMM", "in force", "dB measured / possible"):
        table.add_column(heading, overflow="fold")
    for row in found.rows:
        for i, (gemm, words) in enumerate(row.precision.items()):
            cells = [f"{key} {_db(*own)}" for key, own in row.measured.get(gemm, {}).items()]
            seen = ", ".join(cells) or ("-" if not (i == 0 and row.note) else row.note)
            table.add_row(Text(printable(row.operator) if i == 0 else ""), gemm, words, seen)
    return table


def _db(measured: float, possible: float | None) -> str:
    def short(value: float) -> str:
        return (
            f"{value:.0f}"
            if math.isfinite(value)
            else ("inf" if value > 0 else "zeros" if math.isnan(value) else "NaN")
        )

    return short(measured) if possible is None else f"{short(measured)}/{short(possible)}"
