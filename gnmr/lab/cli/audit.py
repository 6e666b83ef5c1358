"""`gnmr audit RUN|CHECKPOINT [key=value ...]`: check that the recipe in force is the one that was meant."""

from __future__ import annotations

import shlex
from argparse import SUPPRESS, Namespace
from collections.abc import Iterable
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
    from gnmr.auditing.audit import Audit, Finding, OperatorRow
    from gnmr.auditing.sides import SideComparison
    from gnmr.conversion.path_spec import PathSpec
    from gnmr.lab.config import Config
    from gnmr.lab.evaluation.subjects import Subject
    from gnmr.plan.checkpoint_names import ModelLinears

SIDES = ("trainer", "rollout")
_TEXT = """\
RUN is a run folder: its newest checkpoint on its own low path, with its pins, on its own validation data. CHECKPOINT is
a folder with a Hugging Face checkpoint, or its name on the hub, with data= as `gnmr diagnose` takes it; with recipe=
its linears are put on that recipe, less what the lists leave out, else they are audited as they are. Nothing is trained
and nothing written but out= and html=. A model that torchao or Transformer Engine converted lives in your own loop:

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
    for name, reading in LISTS.items():
        if reading.library != "gnmr":
            effect = "chosen" if reading.rule == "quantizer" else "converted" if reading.converts else "left out"
            parser.option(name, names_of, f"{reading.library}: {effect}; {RULES[reading.rule]}")
            for side in SIDES:
                parser.option(f"{side}.{name}", names_of, SUPPRESS)
    add_options(parser, "the batch")
    parser.option("out", path, "a file for findings and measurements as JSON")
    parser.option("html", path, "a file for the same as one page")
    parser.flag("table", "show every operator: precision in force, and dB measured of dB possible")
    parser.flag("static", "run no batch: names and precision alone")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError in one line, if possible before anything is loaded."""
    options, place, config = asked_of(_parser(), argv, "audit")
    for key in ("out", "html"):
        if (file := getattr(options, key)) is not None:
            output.check(file, f"{key}={file}")
    # Lists with a side before them compare trainer and rollout; nothing is loaded then.
    two_sides = any(_lists(options, f"{side}.") for side in SIDES)
    if config is not None and options.plan is not None and not two_sides:
        raise UserError(f"plan={options.plan}: {place} is a run, and is audited under its own; use a checkpoint")
    name = place
    rows: tuple[OperatorRow, ...] = ()
    result: Audit | SideComparison
    if two_sides:
        result = _compared(options, place, config)
        findings = (*result.findings, *result.notes)
    else:
        result, name = _audited(options, place, config)
        findings, rows = result.findings, result.rows
    try:  # written before it is shown, because the reader may have left
        _write(options, name, argv, result)
    finally:
        console = for_tables()
        if options.table and rows:
            console.print(_table(rows))
        for finding in findings:
            print_plain(console, printable(finding.line()))
        print_plain(console, f"{printable(name)}: {result.verdict()}")
    if options.html is not None:
        print_plain(console, f"page: {printable(options.html)}")
    return 0 if result.sound else 1


def _write(options: Namespace, subject: str, argv: list[str], result: Audit | SideComparison) -> None:
    from gnmr.auditing.audit_page import page
    from gnmr.lab.train.provenance import commit, portable_command

    if options.out is None and options.html is None:
        return
    origin = {"command": portable_command(shlex.join(["gnmr", "audit", *argv])), "commit": commit()}
    if options.out is not None:
        output.write_json(options.out, {"subject": subject} | origin | result.tree(), f"out={options.out}")
    if options.html is not None:
        output.write_text(options.html, page(result, subject, origin), f"html={options.html}")


def _lists(options: Namespace, start: str = "") -> dict[str, list[str]]:
    """Return the lists whose keys begin with `start`."""
    values = {name: getattr(options, f"{start}{name}", None) for name in LISTS}
    return {name: entries for name, entries in values.items() if entries is not None}


# ---- two sides ----


def _compared(options: Namespace, place: str, config: Config | None) -> SideComparison:
    """Compare the lists of two sides over the names of the model's linears."""
    from gnmr.auditing.sides import compare

    keys = [*_lists(options)]
    keys += [key for key in ("recipe", "plan", "data", "table", "block", "batch_size") if getattr(options, key)]
    if keys:
        raise UserError(f"{keys[0]}: two sides are compared by their own lists and by names alone; leave it out")
    # Engines have the checkpoint's names, and trainers those in memory.
    linears = _linears(place, config)
    in_memory = {saved: name for name, names in linears.saved.items() for saved in names if saved != name}
    saved_names = list(dict.fromkeys(saved for names in linears.saved.values() for saved in names))
    sides = {side: _lists(options, f"{side}.") for side in SIDES}
    with as_user_error():
        return compare(saved_names, **sides, in_memory=in_memory, unloaded=linears.unloaded)


def _linears(place: str, config: Config | None) -> ModelLinears:
    """Return the names of a model's linears and routers, from its config, and of what its checkpoint has besides."""
    import torch
    from torch import nn

    from gnmr.lab import models
    from gnmr.lab.models import pretrained
    from gnmr.plan.checkpoint_names import ModelLinears, linears_of

    # An empty model on the meta device has all the names, so no weights are read.
    checkpoint = place if config is None else config.model.checkpoint
    if checkpoint is not None:
        return linears_of(pretrained.empty(checkpoint, torch.bfloat16, place, causal=False), checkpoint)
    assert config is not None
    model: nn.Module = models.build_empty(config.model, config.data.vocab_size, config.training.seq_len)
    # Our models have the layout of Hugging Face without its prefix, which lists expect.
    names = [f"model.{name}" if name.startswith("layers.") else name for name in linears_of(model).saved]
    return ModelLinears({name: (name,) for name in names})


# ---- one model ----


def _audited(options: Namespace, place: str, config: Config | None) -> tuple[Audit, str]:
    """Load the model, put it on its low path, and audit it on one batch; return (the audit, the model's name)."""
    from gnmr.auditing.audit import audit
    from gnmr.conversion import PathSpec, convert
    from gnmr.conversion.converting import operator_shapes
    from gnmr.lab.evaluation.subjects import load_subject
    from gnmr.lab.train.loss import loss_of

    with as_user_error():
        lists = read_lists(_lists(options))
    plan, recipe = paths_of(options, config)
    with memory_bound("audit: out of memory while the model was loaded; use a smaller model or a larger machine"):
        subject = load_subject(place, device=options.device, gradients=not options.static)
    # The model's low path: a run's own, that of a plan, or a recipe less what the lists leave out.
    of_conversion: list[Finding] = []
    if config is not None:
        of_conversion = _as_trained(subject, config)
        lists |= _lists_of(config.precision)
    elif plan is not None:
        with as_user_error():
            spec = PathSpec(**plan.paths())
            plan.refuse_other(f"plan={options.plan}", operator_shapes(subject.model, spec))
            subject.converted = convert(subject.model, spec)
        lists |= _lists_of(spec)
    elif isinstance(recipe, str):
        of_conversion = _on_recipe(subject, recipe, lists)
    loss, batch = None, None
    if not options.static:
        blocks = blocks_for(subject, options, 1, 0)
        say(printable(f"gnmr: {subject.name}: a batch of {blocks.size} x {blocks.length} tokens on {subject.device}"))
        loss, batch = (lambda tokens: loss_of(subject.model, tokens)), blocks.batches[0]
    right = "audit: out of memory: use a smaller batch_size= or block="
    with memory_bound(right), as_user_error(), showing("auditing", "passes of linears") as progress:
        result = audit(subject.model, loss, batch, recipe=recipe, lists=lists, progress=progress)
    return replace(result, findings=(*of_conversion, *result.findings)), subject.name


def _as_trained(subject: Subject, config: Config) -> list[Finding]:
    """Put a run's model on its low path; return findings on unused declarations in its config."""
    from gnmr.auditing.audit import unused_recipes
    from gnmr.lab.train.build import build_converted
    from gnmr.lab.train.checkpoint import load_model

    if subject.converted is None:
        subject.converted = build_converted(subject.model, config.precision, config.training.seed)
        load_model(Path(subject.name) / "checkpoints", subject.model, subject.converted)
    # Every operator on its low path, whatever the controller chose last: that is the recipe in question.
    for operator in subject.converted.operators:
        operator.switch(False)
    return unused_recipes(list(config.precision.recipes), [config.precision.low, config.precision.recovery])


def _lists_of(spec: PathSpec) -> dict[str, list[str]]:
    """Return the patterns by which a spec names linears, except its defaults."""
    return {key: list(patterns) for key in ("targets", "exclude", "pins") if (patterns := getattr(spec, key))}


def _on_recipe(subject: Subject, recipe: str, lists: dict[str, list[str]]) -> list[Finding]:
    """Put a checkpoint's linears on the recipe, except those that the lists leave out.

    Our recipes leave out output heads and routers. Other libraries convert them if their lists do not leave them out,
    and these are the findings that are returned.
    """
    from gnmr.auditing.audit import head_or_router, match_lists
    from gnmr.conversion import PathSpec, convert
    from gnmr.conversion.targets import KEPT
    from gnmr.measure.in_force import operators_of
    from gnmr.plan.lists import never_quantized

    operators = operators_of(subject.model)
    roles = {operator.name: operator.role for operator in operators}
    matched = match_lists(subject.model, lists, list(roles))
    excluded = {name for entry in matched.entries if not entry.converts for name in entry.names}
    chosen = {name for entry in matched.entries if entry.converts for name in entry.names}
    meant = {name for entry in matched.entries if entry.converts for name in entry.meant}
    selects = any(LISTS[which].converts for which in lists)
    # A list that converts names what is chosen; all other lists name exceptions.
    targets = [name for name in roles if name in chosen - excluded and roles[name] not in KEPT] if selects else None
    if targets == [] or excluded >= {*roles}:
        raise UserError(f"recipe={recipe}: the lists leave no linear to convert")
    exclude = [] if selects else [name for name in roles if name in excluded]
    with as_user_error():
        spec = PathSpec.of(recipe, None, targets=targets, exclude=exclude, backend="simulated")
        subject.converted = convert(subject.model, spec)
    # Linears that the library of a list never quantizes.
    spared = {
        name
        for which, names in matched.names.items()
        for name_in_list, name in names.items()
        if never_quantized(which, name_in_list)
    }
    # Heads and routers in it are what the other library would convert although nobody meant it to.
    forgotten = (chosen if selects else {*roles}) - excluded - meant - spared
    state = f"converted to recipe={recipe}, as {', '.join(lists)} does not leave it out"
    return [
        head_or_router(operator, state)
        for operator in operators
        if lists and operator.role in KEPT and operator.name in forgotten
    ]


def _table(rows: Iterable[OperatorRow]) -> Any:
    """Return a table of the operators: the precision in force, and measured / possible dB of each operand."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from gnmr.auditing.audit_page import operator_lines

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("operator", "GEMM", "in force", "dB measured / possible"):
        table.add_column(heading, overflow="fold")
    shown = ""
    for operator, *cells in operator_lines(rows):
        table.add_row(Text(printable(operator) if operator != shown else ""), *cells)
        shown = operator
    return table
