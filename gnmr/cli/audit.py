"""`gnmr audit RUN|CHECKPOINT [key=value ...]`: is the recipe what you think it is?"""

from __future__ import annotations

import math
import shlex
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.cli.words import Parser, names_of, needs, optional, path, recipe_of, text, whole
from gnmr.console import for_tables, print_plain, say, showing
from gnmr.errors import UserError, printable, told_as
from gnmr.records import output
from gnmr.records.untrusted import exists

if TYPE_CHECKING:
    from gnmr.doctor.audit import Audit, Finding
    from gnmr.doctor.plan import PinPlan
    from gnmr.lab.config import Config
    from gnmr.lab.evaluation.subjects import Subject
    from gnmr.precision import Recipe

_TEXT = """\
RUN is a run folder: its newest checkpoint on its own low path, with its pins, on its own validation data. CHECKPOINT is
a folder with a Hugging Face checkpoint of a LLaMA-like model, or its name on the hub, with data=FILE.txt; with recipe=
its linears are put on that recipe, less what the lists leave out, else they are audited as they are. Nothing is trained
and nothing written but out=. A model that torchao or Transformer Engine converted lives in your own loop:

  gnmr.audit(model, lambda batch: model(**batch).loss, batch, lists={"filter_fqns": ["output", "layers.1"]})

  gnmr audit runs/act_quant_stress/RUN
  gnmr audit my_llama/ data=text.txt recipe=fp8_hybrid filter_fqns=[lm_head,layers.1]

exit codes: 0 sound, 1 with findings, 2 a mistake in what was asked for
"""
_LISTS = {
    "filter_fqns": "torchao, torchtitan: parts of names that are left out",
    "fqns": "torchtitan (MX, NVFP4): parts of names that are converted",
    "modules_to_not_convert": "transformers: names that are left out",
    "modules_to_ignore": "Automodel, accelerate: modules that are left out",
}


def _parser() -> Parser:
    parser = Parser("audit", "RUN|CHECKPOINT [key=value ...]", _TEXT)
    parser.option("recipe", text, "what a checkpoint's linears are put on, or what a run's should be on")
    parser.option("plan", optional, "a plan.json, or its folder: what a checkpoint's linears are put on, with its pins")
    for name, about in _LISTS.items():
        parser.option(name, names_of, about)
    parser.option("data", path, "a file of text, of which the model's own tokens are read")
    parser.option("batch_size", whole(1), "blocks of the batch; default: as many as make 1,024 tokens")
    parser.option("block", whole(2), "tokens of a block; default: as the run was trained, of a checkpoint 512 at most")
    parser.option("device", text, "auto, cpu or cuda", "auto")
    parser.option("out", path, "a file for findings and measurements as JSON")
    parser.flag("table", "show every operator: precision in force, and dB measured of dB possible")
    parser.flag("static", "run no batch: names and precision alone")
    return parser


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError in one line, before anything is loaded where that is possible."""
    parser = _parser()
    if not argv:
        parser.print_help()
        return 2
    asked, place = parser.of_one_place(argv, "run folder or checkpoint")
    if asked.plan is not None and asked.recipe is not None:
        raise UserError("recipe: the plan says which; leave one of them out")
    if asked.out is not None:
        output.check(asked.out, f"out={asked.out}")
    run = exists(Path(place).expanduser() / "config.yaml")
    if run and asked.plan is not None:
        raise UserError(f"plan={asked.plan}: {place} is a run, and is audited under its own; use a checkpoint")
    if not run:
        needs("audit", "transformers")
    found, subject = _audited(asked, place, run)
    try:  # written before it is shown: whoever reads that may have left
        if asked.out is not None:
            from gnmr.lab.train.provenance import commit, told_command

            origin = {"subject": subject.name, "command": told_command(shlex.join(["gnmr", "audit", *argv]))}
            output.write_json(asked.out, origin | {"commit": commit()} | _finite(found.tree()), f"out={asked.out}")
    finally:
        _show(found, subject.name, asked.table)
    return 0 if found.sound else 1


def _audited(asked: Namespace, place: str, run: bool) -> tuple[Audit, Subject]:
    import torch

    from gnmr.doctor.lists import read_lists
    from gnmr.doctor.plan import read_plan
    from gnmr.lab.evaluation.blocks import blocks_of
    from gnmr.lab.evaluation.subjects import load_subject
    from gnmr.precision import Recipe

    config = _run_config(Path(place).expanduser()) if run else None
    own = {} if config is None else dict(config.precision.recipes)
    recipe: str | Recipe | None = None
    with told_as():
        lists = read_lists({name: given for name in _LISTS if (given := getattr(asked, name)) is not None})
        plan = None if asked.plan is None else read_plan(asked.plan)
        if asked.recipe is not None:
            recipe = recipe_of("recipe", asked.recipe, own)
            recipe = Recipe.of(recipe, own[recipe]) if recipe in own else recipe
    subject = load_subject(place, device=asked.device)
    extra: list[Finding] = []
    if config is not None:
        extra = _as_trained(subject, config, lists)
    elif plan is not None:
        _on_plan(subject, plan, lists, asked.plan)
    elif isinstance(recipe, str):
        _planned(subject, recipe, lists)
    blocks = None
    if not asked.static:
        data = None if asked.data is None else asked.data.expanduser()
        blocks = blocks_of(subject, data, batches=1, held_out=0, length=asked.block, size=asked.batch_size)
        about = f"{blocks.size} x {blocks.length} tokens on {subject.device}"
        say(printable(f"gnmr: {subject.name}: a batch of {about}"))
    try:
        return _found(subject, None if blocks is None else blocks.batches[0], recipe, lists, extra), subject
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError("audit: out of memory: use a smaller batch_size= or block=") from error


def _found(
    subject: Subject, batch: Any, recipe: str | Recipe | None, lists: dict[str, list[str]], extra: list[Finding]
) -> Audit:
    from dataclasses import replace

    from gnmr.doctor.audit import audit
    from gnmr.lab.train.loss import loss_of

    with told_as(), showing("auditing", "passes of linears") as progress:
        loss = None if batch is None else lambda own: loss_of(subject.model, own)
        found = audit(subject.model, loss, batch, recipe=recipe, lists=lists, progress=progress)
    return replace(found, findings=(*extra, *found.findings))


def _run_config(folder: Path) -> Config:
    from gnmr.lab.config import read
    from gnmr.records.untrusted import reading

    with reading(folder):
        return read(folder / "config.yaml")


def _as_trained(subject: Subject, config: Config, lists: dict[str, list[str]]) -> list[Finding]:
    """Puts a run's model on its low path and adds its own lists; what its config declares in vain."""
    from gnmr.doctor.audit import unused_recipes
    from gnmr.lab.train.checkpoint import load_model
    from gnmr.lab.train.model import build_converted

    if subject.plan is None:
        subject.plan = build_converted(subject.model, config.precision, config.training.seed)
        load_model(Path(subject.name) / "checkpoints", subject.model, subject.plan)
    for operator in subject.plan.operators:
        operator.switch(False)
    lists |= {"targets": list(config.precision.targets)} | (
        {"pins": list(config.precision.pins)} if config.precision.pins else {}
    )
    return unused_recipes(list(config.precision.recipes), [config.precision.low, config.precision.recovery])


def _on_plan(subject: Subject, plan: PinPlan, lists: dict[str, list[str]], where: str) -> None:
    """Puts a checkpoint's linears on the paths of a plan.json, and adds its pins to the lists."""
    from gnmr.precision import PathSpec, convert
    from gnmr.precision.conversion import operator_shapes

    with told_as():
        spec = PathSpec(**plan.paths())
        plan.refuse_other(f"plan={where}", operator_shapes(subject.model, spec))
        subject.plan = convert(subject.model, spec)
    lists |= {"targets": list(spec.targets)} | ({"pins": list(spec.pins)} if spec.pins else {})


def _planned(subject: Subject, recipe: str, lists: dict[str, list[str]]) -> None:
    """Puts a checkpoint's linears on the recipe, less those that the lists leave out."""
    from torch import nn

    from gnmr.doctor.lists import CONVERTS, entries_of
    from gnmr.precision import PathSpec, convert
    from gnmr.precision.recipes import KEPT

    names = [name for name, module in subject.model.named_modules() if isinstance(module, nn.Linear)]
    out = {
        name
        for which in lists
        if which not in CONVERTS
        for e in entries_of(which, lists[which], names)
        for name in e.names
    }
    chosen = [which for which in lists if which in CONVERTS]
    named = {name for which in chosen for e in entries_of(which, lists[which], names) for name in e.names}
    targets = [n for n in names if n not in out and (not chosen or n in named) and n.rpartition(".")[2] not in KEPT]
    if not targets:
        raise UserError(f"recipe={recipe}: the lists leave no linear to convert")
    with told_as():
        subject.plan = convert(subject.model, PathSpec.of(recipe, None, targets=targets, backend="simulated"))


def _show(found: Audit, name: str, table: bool) -> None:
    console = for_tables()
    if table:
        console.print(_table(found))
    for finding in found.findings:
        print_plain(console, printable(finding.line()))
    print_plain(console, f"{printable(name)}: {found.verdict()}")


def _table(found: Audit) -> Any:
    """Operators: what is in force, and dB measured / possible of each operand."""
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


def _finite(tree: Any) -> Any:
    """JSON has no infinity: written as text."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return str(tree) if isinstance(tree, float) and not math.isfinite(tree) else tree
