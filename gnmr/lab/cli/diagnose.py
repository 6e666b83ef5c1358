"""`gnmr diagnose RUN|CHECKPOINT [key=value ...]`: measure what a recipe costs, and plan the exceptions to it."""

from __future__ import annotations

import math
import shlex
import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from gnmr import options as checks
from gnmr.console import for_tables, next_lines, print_plain, say, showing, shown_command
from gnmr.conversion.path_spec import PathSpec
from gnmr.errors import UserError, as_user_error, printable, writing
from gnmr.lab.cli.parser import Parser, names_of, number, one_of, optional, path, recipe_of, text, whole
from gnmr.lab.cli.subject import add_options, asked_of, blocks_for, memory_bound, paths_of, recipe_from
from gnmr.names import BESIDE, KV_CAST
from gnmr.plan.knapsack import FUSED, budget_of
from gnmr.plan.pin_plan import PLAN_FILE
from gnmr.records import output
from gnmr.records.untrusted import exists

if TYPE_CHECKING:
    from gnmr.formats import Recipe
    from gnmr.lab.evaluation.blocks import Blocks
    from gnmr.lab.evaluation.subjects import Subject
    from gnmr.plan.diagnosis import Diagnosis
    from gnmr.plan.pin_plan import PinPlan

_TEXT = """\
RUN is a run folder (its newest checkpoint, by default on its own validation data); CHECKPOINT is a folder with a
Hugging Face checkpoint of a causal model (config.json, *.safetensors, tokenizer), or such a checkpoint's name on
the hub, with data=FILE.txt. Nothing is trained, and nothing written but what out= and html= name.

  gnmr diagnose runs/act_quant_stress/RUN recipe=nvfp4 rescue=mxfp8,bf16 budget=+10% out=plan/
  gnmr train experiment=act_quant_stress plan=plan/plan.json
  gnmr diagnose my_llama/ data=text.txt recipe=fp8_hybrid exclude=*.o_proj,layers.0.* html=page.html
  gnmr diagnose my_llama/ data=text.txt plan=plan/plan.json
  gnmr diagnose my_llama/ data=prompts.txt recipe=nvfp4 against=fp8_hybrid gate=0.003
  gnmr diagnose my_llama/ data=prompts.txt recipe=fp8_hybrid against=fp8_hybrid,*.down_proj:bf16
"""
NUMBERS = "diagnosis.json"
_LOADING = "diagnose: out of memory while the model was loaded; use dtype=own, a smaller model or a larger machine"
_SAME = (
    *("recovery", "rescue", "targets", "budget", "times", "fused", "against", "gate"),
    *("labels", "confirm", "include", "kv_cast", "tokens"),
)
"""Options that `gnmr.diagnose` takes as they are."""


def _parser() -> Parser:
    parser = Parser("diagnose", "RUN|CHECKPOINT [key=value ...]", _TEXT, bare=False)
    parser.option(
        "recipe",
        text,
        "the low path: a recipe, or one of precision.recipes of the run; int8 means sim_int8; default: nvfp4",
    )
    parser.option("recovery", text, "the path of higher precision, which errors are against: a recipe", "bf16")
    parser.option(
        "rescue", names_of, "recipes a plan may keep a GEMM on; default: recovery=, and mxfp8 if recipe= has 4 bits"
    )
    parser.option(
        "targets", names_of, "patterns of the linears, as precision.targets; default: the run's, or the blocks'"
    )
    parser.option(
        "exclude", names_of, "patterns of linears that stay in 16 bits, as precision.exclude; default: the run's"
    )
    parser.option("against", text, "the trainer's recipe, where recipe= is the rollout's: what makes the two differ")
    parser.option("gate", _nats, "KL per token, in nats, by which the two sides may differ")
    parser.option(
        "budget",
        lambda _name, value: budget_of(value),
        "extra GEMM time that the plan may take, of the time of all on recipe=: +10%% or 0.1",
        0.1,
    )
    parser.option("times", _times, "relative GEMM times by bits or recipe; default: 4:1,8:2,16:4")
    parser.option("fused", names_of, "operators that have one recipe together: some of qkv,gate_up,experts,moe", [])
    parser.option("plan", optional, "a plan.json, or its folder: price what it leaves, under its own recipes")
    parser.option("batches", whole(2), "batches that are priced; default: 16 of a run, 8 of a checkpoint")
    parser.option(
        "held_out", whole(0), "batches on which the plan and the usual guesses are measured; default: a quarter as many"
    )
    parser.option("confirm", whole(0), "measure the N highest of either estimate individually", 20)
    parser.option("include", _kinds, "what else is measured, each alone and off the plan: some of head,router,kv", [])
    parser.option("kv_cast", _kv_cast, "of keys and values, if include= has kv", KV_CAST)
    parser.option(
        "labels", one_of("model", "data"), "of the backward pass: drawn from the model, or the data's", "model"
    )
    parser.option("tokens", whole(1), "price every Nth token", 1)
    parser.option("dtype", one_of("float32", "own"), "dtype of everything that is not cast", "float32")
    add_options(parser, "a batch")
    parser.option("out", path, f"a folder for {PLAN_FILE} and {NUMBERS}")
    parser.option("html", path, "a file for the same as one page")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError in one line, if possible before anything is loaded."""
    parser = _parser()
    asked, place, config = asked_of(parser, argv, "diagnose")
    _check_places(asked)
    if config is not None and config.model.adapter.rank:
        raise UserError(f"{place}: has adapters in addition to its weights; merge them with peft first")
    other = next((key for key in ("targets", "exclude", "against", "gate") if getattr(asked, key) is not None), None)
    if asked.plan is not None and (other or asked.recovery != "bf16"):
        raise UserError(f"{other or 'recovery'}: cannot be asked for under plan=; leave one of them out")
    if asked.against is not None and asked.recovery != "bf16":
        raise UserError(f"recovery={asked.recovery}: cannot be combined with against=; leave one of them out")
    parts = {key: _parted(asked, key) for key in ("recipe", "against")}
    plan, low = paths_of(asked, config, "nvfp4")
    if config is not None and plan is None:
        for key in ("targets", "exclude"):
            if getattr(asked, key) is None:
                setattr(asked, key, getattr(config.precision, key))
    with as_user_error():
        recipe_of("recovery", asked.recovery)
        for kind in asked.fused:
            checks.one_of(FUSED, fused=kind)
        own = {} if config is None else config.precision.recipes
        PathSpec(low="bf16", recipes=own, times=asked.times or {})  # before anything is loaded
        if asked.rescue is not None:
            asked.rescue = [recipe_from("rescue", word, own) for word in asked.rescue]
        if asked.against is not None:
            asked.against = parts["against"] | {"*": recipe_of("against", asked.against)}
    sides = low if low is None or not parts["recipe"] else parts["recipe"] | {"*": low}
    if asked.gate is not None and asked.against is None:
        raise UserError(f"gate={asked.gate}: is between two sides; give against=RECIPE, the trainer's")

    from gnmr.lab.evaluation.blocks import LONGEST, TOKENS
    from gnmr.lab.evaluation.subjects import load_subject

    tokens = (asked.batch_size or max(1, TOKENS // 2 // (asked.block or LONGEST))) * (asked.block or LONGEST)
    with memory_bound(_LOADING):
        subject = load_subject(place, device=asked.device, floats=asked.dtype == "float32", tokens=tokens)
    asked.batches = asked.batches or (16 if config is not None else 8)
    asked.held_out = asked.batches // 4 if asked.held_out is None else asked.held_out
    blocks = blocks_for(subject, asked, asked.batches, asked.held_out)
    size = f"{asked.batches} + {asked.held_out} batches of {blocks.size} x {blocks.length} tokens"
    say(printable(f"gnmr: {subject.name}: {size} on {subject.device}"), by_words=True)
    began = time.perf_counter()
    found = _diagnosed(subject, blocks, asked, plan, sides)
    origin = _origin(subject, asked, blocks, shlex.join(["gnmr", "diagnose", *argv]), time.perf_counter() - began)
    lines: list[str] = []
    try:
        lines = _write(found, origin, asked, plan)  # before it is shown, because the reader may have left
    finally:
        _show(found, plan, asked)
    for line in lines:
        print_plain(console := for_tables(), printable(line), console.is_terminal)
    return 0


def _parted(asked: Namespace, key: str) -> dict[str, str | Recipe]:
    """Return {pattern: recipe} of a word such as fp8_hybrid,*.down_proj:bf16, and keep only its first part."""
    first, *parts = (getattr(asked, key) or "").split(",")
    found: dict[str, str | Recipe] = {}
    for part in parts:
        pattern, colon, name = part.partition(":")
        if pattern == "*":
            raise UserError(f"{key}={part}: * is what the first recipe, {first}, is for; leave one of them out")
        if not (pattern and colon and name):
            raise UserError(f"{key}={part}: must be PATTERN:RECIPE after the first recipe, as *.down_proj:bf16")
        with as_user_error():
            found[pattern] = recipe_of(key, name)
    if first:
        setattr(asked, key, first)
    return found


def _nats(name: str, value: str) -> float:
    if not 0 < (nats := number(value)) < math.inf:
        raise UserError(f"{name}={value}: must be nats of KL per token, above 0 (0.003)")
    return nats


def _times(name: str, value: str) -> dict[str, float]:
    """Read {bits or recipe: relative time} from 8:1.8,mxfp8:1.9."""
    found = {}
    for part in value.split(","):
        key, colon, time = part.partition(":")
        if not (key and colon) or not 0 < number(time) < math.inf:
            raise UserError(f"{name}={part}: must be BITS:TIME or RECIPE:TIME, a time above 0, as 8:1.8,mxfp8:1.9")
        if key in found:
            raise UserError(f"{name}={part}: {key} has a time already")
        found[key] = number(time)
    return found


def _kinds(name: str, value: str) -> list[str]:
    kinds = names_of(name, value)
    for kind in kinds:
        checks.one_of(BESIDE, **{name: kind})
    return kinds


def _kv_cast(_name: str, value: str) -> str:
    if value != KV_CAST:  # only other casts need PyTorch
        from gnmr.measure.unplanned import kv_cast_of

        kv_cast_of(value)
    return value


def _check_places(asked: Namespace) -> None:
    """Raise UserError if an output path cannot be written, before anything is computed."""
    if asked.html is not None:
        output.check(asked.html, f"html={asked.html}")
    if (out := asked.out) is None:
        return
    with writing(f"out={out}"):
        if not out.parent.is_dir() or (exists(out) and not out.is_dir()):
            raise UserError(f"out={out}: must be a folder in a folder that exists")
        if exists(out):
            with TemporaryFile(dir=out):
                pass
        else:
            out.mkdir()
            out.rmdir()


def _diagnosed(subject: Subject, blocks: Blocks, asked: Namespace, plan: PinPlan | None, low: Any) -> Diagnosis:
    from gnmr.lab.train.loss import logits_of
    from gnmr.plan.diagnose import diagnose

    if subject.converted is not None:  # a fine-tuned run's own paths
        subject.converted.restore()
    if asked.dtype == "float32":
        with memory_bound(_LOADING):
            subject.model.float()
    right = f"diagnose: out of memory at batch_size={blocks.size}: use a smaller one, or block="
    with memory_bound(right), as_user_error(), showing("diagnosing", "forward passes") as progress:
        return diagnose(
            subject.model,
            lambda batch: (logits_of(subject.model, batch), batch.targets),
            blocks.batches,
            recipe=low or "nvfp4",
            exclude=asked.exclude or (),
            held_out=blocks.held_out,
            plan=plan,
            progress=progress,
            **{key: getattr(asked, key) for key in _SAME},
        )


def _origin(subject: Subject, asked: Namespace, blocks: Blocks, command: str, seconds: float) -> dict[str, Any]:
    """Return the provenance of the numbers."""
    import torch

    import gnmr
    from gnmr.lab.train.provenance import commit, machine, place, portable_command

    return {
        "subject": {"name": place(subject.name), **subject.facts},
        "data": "its own" if asked.data is None else Path(asked.data).name,
        "block": blocks.length,
        "batch_size": blocks.size,
        "computes_in": asked.dtype,
        "seconds": seconds,
        "command": portable_command(command),
        "commit": commit(),
        "machine": machine(subject.device),
        "gnmr": gnmr.__version__,
        "torch": torch.__version__,
    }


def _show(found: Diagnosis, plan: PinPlan | None, asked: Namespace) -> None:
    from gnmr.plan.page import totals
    from gnmr.plan.terminal import story

    console = for_tables()
    by_words = console.is_terminal
    print_plain(console, f"{printable(found.verdict())}\n", by_words)
    for part in story(found, console.width):
        console.print(part)
    for line in totals(found)[:2]:
        print_plain(console, line, by_words)
    if plan is not None and plan.expected is not None:
        expected = f"the plan expected {plan.expected[1]:.4g} nats to be left"
        print_plain(console, f"{expected}; measured here: {found.measured.nats:.4g}", by_words)
    elif found.against or found.sides:
        return
    elif asked.out is not None:
        ways = f"{shown_command('train', f'plan={asked.out}')}, gnmr.attach(model, plan={str(asked.out)!r})"
        ways += f", or {shown_command('export', asked.out)} for other libraries"
        for line in next_lines(ways):
            print_plain(console, printable(line), by_words)
    elif plan is None and not found.little:
        print_plain(console, "next: out=FOLDER writes the plan, html=FILE all of this as a page", by_words)


def _write(found: Diagnosis, origin: dict[str, Any], asked: Namespace, plan: PinPlan | None) -> list[str]:
    """Write the files of out= and html= and return the lines about them, without printing.

    Each file is replaced as a whole once the content of all files is known.
    """
    from gnmr.plan.page import page

    files: dict[str, str] = {}
    lines: list[str] = []
    if asked.out is not None and found.sides:
        lines.append(f"not written: {PLAN_FILE}, which cannot say that some operators have recipes of their own")
    elif plan is None and not found.sides and (asked.out is not None or asked.html is not None):
        subject = origin["subject"]["name"]
        made = {"subject": subject, "command": origin["command"], "commit": f"{origin['commit']}"}
        files[PLAN_FILE] = found.plan(provenance=made).text()
    if asked.html is not None:
        title = f"{found.recipe} on {origin['subject']['name']}"
        output.write_text(asked.html, page(found, title, origin, files.get(PLAN_FILE)), f"html={asked.html}")
        lines.append(f"page: {asked.html}")
    if asked.out is not None:
        with writing(f"out={asked.out}"):
            asked.out.mkdir(exist_ok=True)
        for name, content in files.items():
            output.write_text(asked.out / name, content, f"out={asked.out / name}", follow=False)
        numbers = asked.out / NUMBERS
        output.write_json(numbers, origin | found.tree(), f"out={numbers}", follow=False)
        lines.append(f"files: {', '.join([*files, NUMBERS])} in {asked.out}")
    return lines
