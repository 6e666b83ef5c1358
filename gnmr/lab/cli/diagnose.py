"""`gnmr diagnose RUN|CHECKPOINT [key=value ...]`: measure what a recipe costs, and plan the exceptions to it."""

from __future__ import annotations

import hashlib
import math
import shlex
import shutil
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import gnmr
from gnmr.console import for_tables, next_lines, print_plain, say, showing, shown_command
from gnmr.errors import UserError, as_user_error, printable, warn, writing
from gnmr.lab.cli.parser import Parser, names_of, number, one_of, optional, path, recipe_of, text, whole
from gnmr.lab.cli.subject import add_options, asked_of, blocks_for, memory_bound, paths_of, recipe_from
from gnmr.names import BESIDE, KV_CAST
from gnmr.options import one_of as refuse_unless_one_of
from gnmr.plan.knapsack import FUSED, budget_of
from gnmr.plan.pin_plan import PLAN_FILE
from gnmr.records import output
from gnmr.records.untrusted import exists

if TYPE_CHECKING:
    from gnmr.formats import Recipe
    from gnmr.lab.evaluation.blocks import TextBlocks
    from gnmr.lab.evaluation.subjects import Subject
    from gnmr.plan.diagnosis import Diagnosis
    from gnmr.plan.pin_plan import PinPlan

_TEXT = """\
RUN is a run folder (its newest checkpoint, by default on its own validation data); CHECKPOINT is a folder with a
Hugging Face checkpoint (config.json, *.safetensors, tokenizer), or such a checkpoint's name on the hub, with
data=FILE.txt. It is a causal, image-text, encoder-decoder, speech or masked language model; of an image-text or speech
model, data=FOLDER may hold pictures or NAME.wav, each with its text in NAME.txt. Nothing is trained, and nothing
written but what out= and html= name.

  gnmr diagnose runs/act_quant_stress/RUN recipe=nvfp4 rescue=mxfp8,bf16 budget=+10% out=plan/
  gnmr train experiment=act_quant_stress plan=plan/plan.json
  gnmr diagnose my_llama/ data=text.txt recipe=fp8_hybrid exclude=*.o_proj,layers.0.* html=page.html
  gnmr diagnose my_llama/ data=text.txt plan=plan/plan.json
  gnmr diagnose my_llama/ data=prompts.txt recipe=nvfp4 against=fp8_hybrid gate=0.003
  gnmr diagnose my_llama/ data=prompts.txt recipe=fp8_hybrid against=fp8_hybrid,*.down_proj:bf16
"""
NUMBERS = "diagnosis.json"
_LOADING = "diagnose: out of memory while the model was loaded; use dtype=own, a smaller model or a larger machine"
_PATHS = ("recovery", "against", "rescue", "gate", "targets", "times", "fused")
"""Options that `compared_paths` and `gnmr.diagnose` take as they are."""
_MORE = ("budget", "labels", "confirm", "include", "kv_cast")
"""Further options that `gnmr.diagnose` takes as they are."""


def _parser() -> Parser:
    parser = Parser("diagnose", "RUN|CHECKPOINT [key=value ...]", _TEXT, bare=False)
    option = parser.option
    option("recipe", text, "the low path: a recipe, or one of precision.recipes of the run; default: nvfp4")
    option("recovery", text, "the path of higher precision, which errors are against: a recipe", "bf16")
    option("rescue", names_of, "recipes a plan may keep a GEMM on; default: recovery=, and mxfp8 if recipe= has 4 bits")
    option("targets", names_of, "patterns of the linears, as precision.targets; default: the run's, or the blocks'")
    option("exclude", names_of, "patterns of linears that stay in 16 bits; default: the run's")
    option("against", text, "the trainer's recipe, where recipe= is the rollout's: what makes the two differ")
    option("gate", lambda _name, value: number(value), "KL per token, in nats, by which the two sides may differ")
    option(
        "budget",
        lambda _name, value: budget_of(value),
        "extra time of the GEMMs that the plan may move, of their time on recipe=: +10%% or 0.1",
        0.1,
    )
    option("times", _times, "relative GEMM times by bits or recipe, or a file of measured ones; default: 4:1,8:2,16:4")
    option("fused", names_of, "operators that have one recipe together: some of qkv,gate_up,experts,moe", [])
    option("plan", optional, "a plan.json, or its folder: price what it leaves, under its own recipes")
    option("batches", whole(1), "batches that are priced; default: 16 of a run, 8 of a checkpoint")
    option(
        "held_out",
        whole(0),
        "batches to choose the plan on (first half) and to measure it on (second); default: half as many",
    )
    option(
        "measure",
        one_of("estimate", "all"),
        "estimate: price all by a backward pass; all: every operator alone, block by block",
        "estimate",
    )
    option("confirm", whole(0), "measure the N highest of either estimate individually", 20)
    option("include", _kinds, "what else is measured, each alone and off the plan: some of head,router,kv", [])
    option("kv_cast", _kv_cast, "of keys and values, if include= has kv", KV_CAST)
    option("labels", one_of("model", "data"), "of the backward pass: drawn from the model, or the data's", "model")
    option("dtype", one_of("float32", "own"), "dtype of everything that is not cast", "float32")
    add_options(parser, "a batch")
    option("out", path, f"a folder for {PLAN_FILE} and {NUMBERS}")
    option("html", path, "a file for the same as one page")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError in one line, if possible before anything is loaded."""
    options, place, config = asked_of(_parser(), argv, "diagnose")
    _check_places(options)
    if config is not None and config.model.adapter.rank:
        raise UserError(f"{place}: has adapters in addition to its weights; merge them with peft first")
    if options.batches == 1 and options.measure == "estimate":
        raise UserError("batches=1: needs two at least, for the spread between them; or measure=all")
    if options.include and options.measure == "all":
        raise UserError(f"include={','.join(options.include)}: is estimated; leave it out, or measure=all")
    recipes = {} if config is None else config.precision.recipes
    low_of, high_of = (_recipes_of_patterns(options, key) for key in ("recipe", "against"))
    plan, low = paths_of(options, config, "nvfp4")
    recipe: Any = low or "nvfp4"
    if config is not None and plan is None:
        for key in ("targets", "exclude"):
            # A run's own patterns hold unless the command names others.
            if getattr(options, key) is None:
                setattr(options, key, getattr(config.precision, key))
    options.exclude = options.exclude or ()
    # Check everything that needs no model.
    from gnmr.plan.compared_paths import compared_paths

    with as_user_error():
        for kind in options.fused:
            refuse_unless_one_of(FUSED, fused=kind)
        recipe_of("recovery", options.recovery)
        if options.rescue is not None:
            options.rescue = [recipe_from("rescue", word, recipes) for word in options.rescue]
        if low_of:
            # The first recipe is for every linear that no pattern matches.
            recipe = {**low_of, "*": recipe}
        if options.against is not None:
            options.against = {**high_of, "*": recipe_of("against", options.against)}
        path_options = {key: getattr(options, key) for key in (*_PATHS, "exclude")} | {"recipe": recipe, "plan": plan}
        paths = compared_paths(**path_options)
    # Load the model and its text.
    from gnmr.conversion.converting import operator_shapes
    from gnmr.lab.evaluation.blocks import LONGEST, TOKENS
    from gnmr.lab.evaluation.subjects import load_subject
    from gnmr.lab.models.kinds import CAUSAL, MASKED
    from gnmr.lab.train.memory import memory_to_estimate, memory_to_measure
    from gnmr.measure.blocks import NotFollowed
    from gnmr.plan.diagnose import ALONE_BATCHES, models_held_out

    tokens = (options.batch_size or max(1, TOKENS // 2 // (options.block or LONGEST))) * (options.block or LONGEST)
    loading: dict[str, Any] = {"device": options.device, "gradients": False, "tokens": tokens}
    loading["floats"] = options.dtype == "float32"
    with memory_bound(_LOADING):
        subject = load_subject(place, by_blocks=True, **loading)
    if "kv" in options.include and subject.kind is MASKED:
        raise UserError(f"include=kv: {place} is an encoder, which keeps no keys and values for a next token")
    options.batches = options.batches or (16 if config is not None else 8)
    options.held_out = options.batches // 2 if options.held_out is None else options.held_out
    if plan is None and options.targets is None:
        path_options["targets"] = subject.targets
    blocks = blocks_for(subject, options, options.batches, options.held_out)
    size = f"{options.batches} + {options.held_out} batches of {blocks.size} x {blocks.length} tokens"
    say(printable(f"gnmr: {subject.name}: {size} on {subject.device}"), by_words=True)
    if subject.weights is not None:
        with as_user_error():
            operators = len(operator_shapes(subject.model, paths.spec))
        shapes = subject.model, blocks.batches, subject.device, operators
        if options.measure == "all":
            line = memory_to_measure(*shapes, paths.most_measured_alone())
        else:
            alone = min(operators, 2 * options.confirm) + 1, blocks.batches[:ALONE_BATCHES]
            held_out = models_held_out(paths.most_measured_alone()), blocks.held_out
            line = memory_to_estimate(*shapes, [alone, held_out])
        say(line, by_words=True)
    # Measure, write, show.
    began = time.perf_counter()
    state = None
    if options.out is not None and options.measure == "all":
        state = _state_folder(options.out, (argv, path_options), place, subject, blocks)
    try:
        diagnosis = _diagnosed(subject, blocks, options, path_options, state)
    except UserError as error:
        if not isinstance(error.__cause__, NotFollowed):
            raise
        warn(f"{error}, and the whole model is loaded")
        with memory_bound(_LOADING):
            subject = load_subject(place, **loading)
        diagnosis = _diagnosed(subject, blocks, options, path_options, state)
    origin = _origin(subject, options, blocks, shlex.join(["gnmr", "diagnose", *argv]), time.perf_counter() - began)
    lines: list[str] = []
    try:
        lines = _write(diagnosis, origin, options, plan)  # before it is shown, because the reader may have left
    finally:
        _show(diagnosis, plan, options, trains=subject.kind is CAUSAL)
    # Kept until the files are written: if that fails, the same command need not measure again.
    if state is not None:
        shutil.rmtree(state, ignore_errors=True)
    for line in lines:
        print_plain(console := for_tables(), printable(line), console.is_terminal)
    return 0


def _recipes_of_patterns(options: Namespace, key: str) -> dict[str, str | Recipe]:
    """Return {pattern: recipe} of an option such as fp8_hybrid,*.down_proj:bf16, and keep its first word in it."""
    first, *words = (getattr(options, key) or "").split(",")
    recipes: dict[str, str | Recipe] = {}
    for word in words:
        pattern, colon, name = word.partition(":")
        if pattern == "*":
            raise UserError(f"{key}={word}: * is what the first recipe, {first}, is for; leave one of them out")
        if not (pattern and colon and name):
            raise UserError(f"{key}={word}: must be PATTERN:RECIPE after the first recipe, as *.down_proj:bf16")
        with as_user_error():
            recipes[pattern] = recipe_of(key, name)
    if first:
        setattr(options, key, first)
    return recipes


def _times(name: str, value: str) -> dict[str, float]:
    """Read {bits or recipe: relative time} from 8:1.8,mxfp8:1.9, or by shape from a file of measured times."""
    if ":" not in value or Path(value).expanduser().is_file():
        from gnmr.plan.gemm_times import read_gemm_times

        return read_gemm_times(value)
    times = {}
    for word in value.split(","):
        key, colon, factor = word.partition(":")
        if not (key and colon) or not 0 < number(factor) < math.inf:
            raise UserError(f"{name}={word}: must be BITS:TIME or RECIPE:TIME, a time above 0, as 8:1.8,mxfp8:1.9")
        if key in times:
            raise UserError(f"{name}={word}: {key} has a time already")
        times[key] = number(factor)
    return times


def _kinds(name: str, value: str) -> list[str]:
    for kind in names_of(name, value):
        refuse_unless_one_of(BESIDE, **{name: kind})
    return names_of(name, value)


def _kv_cast(_name: str, value: str) -> str:
    if value != KV_CAST:  # only other casts need PyTorch
        from gnmr.measure.unplanned import kv_cast_of

        kv_cast_of(value)
    return value


def _check_places(options: Namespace) -> None:
    """Raise UserError if an output path cannot be written, before anything is computed."""
    if options.html is not None:
        output.check(options.html, f"html={options.html}")
    if (out := options.out) is not None:
        with writing(f"out={out}"):
            if not out.parent.is_dir() or (exists(out) and not out.is_dir()):
                raise UserError(f"out={out}: must be a folder in a folder that exists")
            # Only creating a file shows that a folder can be written; its mode says nothing of a read-only disk.
            with TemporaryFile(dir=out if exists(out) else out.parent):
                pass


def _state_folder(out: Path, command: object, place: str, subject: Subject, blocks: TextBlocks) -> Path:
    """Return the folder in out= for the state of this measurement, which the same command finds again.

    A state is only for the same weights, tokens and arithmetic: hidden states of others would be mixed into it.
    """
    import torch

    from gnmr.lab.models.pretrained import local

    folder = Path(place).expanduser()
    folder = folder if folder.is_dir() else local(place)
    # The date of a folder stays if a file in it is rewritten, and a user may set that of a file.
    files = sorted([*folder.rglob("*.safetensors"), *folder.glob("config.*")])
    dates = [(file.name, file.stat().st_size, file.stat().st_mtime_ns, file.stat().st_ctime_ns) for file in files]
    facts = (command, dates, f"{subject.device}", gnmr.__version__, torch.__version__)
    digest = hashlib.sha256(repr(facts).encode())
    for batch in (*blocks.batches, *blocks.held_out):
        further = [x for x in (batch.inputs or {}).values() if isinstance(x, torch.Tensor)]
        for tensor in (batch.tokens, batch.targets, *further):
            digest.update(tensor.cpu().numpy().tobytes())
    with writing(f"out={out}"):
        out.mkdir(exist_ok=True)
        state: Path = out / f".measuring-{digest.hexdigest()[:16]}"
        # The state of another command, text or version would never be used again.
        for other in out.glob(".measuring-*/"):
            if other != state:
                shutil.rmtree(other, ignore_errors=True)
        if state.is_dir():
            say(f"diagnose: goes on from {state}", by_words=True)
        state.mkdir(exist_ok=True)
    return state


def _diagnosed(
    subject: Subject, blocks: TextBlocks, options: Namespace, path_options: Mapping[str, Any], state: Path | None
) -> Diagnosis:
    from gnmr.lab.train.loss import logits_of
    from gnmr.plan.diagnose import diagnose

    if subject.converted is not None:  # a fine-tuned run's own paths
        subject.converted.restore()
    # What is not cast computes in FP32, so that the measured errors are those of the casts.
    if options.dtype == "float32" and subject.weights is None:
        with memory_bound(_LOADING):
            subject.model.float()
    right = f"diagnose: out of memory at batch_size={blocks.size}: use a smaller one, or block="
    with memory_bound(right), as_user_error(), showing("diagnosing", "forward passes") as progress:
        return diagnose(
            subject.model,
            lambda batch: (logits_of(subject.model, batch), batch.targets),
            blocks.batches,
            held_out=blocks.held_out,
            progress=progress,
            measure=options.measure,
            weights=None if subject.weights is None else subject.weights.read,
            state=state,
            **path_options,
            **{key: getattr(options, key) for key in _MORE},
        )


def _origin(subject: Subject, options: Namespace, blocks: TextBlocks, command: str, seconds: float) -> dict[str, Any]:
    """Return the provenance of the numbers."""
    import torch

    from gnmr.lab.train.provenance import commit, machine, place, portable_command

    return {
        "subject": {"name": place(subject.name), **subject.facts},
        "data": "its own" if options.data is None else Path(options.data).name,
        "block": blocks.length,
        "batch_size": blocks.size,
        "computes_in": options.dtype,
        "seconds": seconds,
        "command": portable_command(command),
        "commit": commit(),
        "machine": machine(subject.device),
        "gnmr": gnmr.__version__,
        "torch": torch.__version__,
    }


def _show(diagnosis: Diagnosis, plan: PinPlan | None, options: Namespace, trains: bool) -> None:
    """Print the diagnosis, and what to do next; `trains` says whether `gnmr train` takes such a model."""
    from gnmr.plan.page import beside, totals
    from gnmr.plan.terminal import story

    console = for_tables()
    by_words = console.is_terminal
    print_plain(console, f"{printable(diagnosis.verdict())}\n", by_words)
    for table in story(diagnosis, console.width):
        console.print(table)
    for line in (*totals(diagnosis)[:2], *beside(diagnosis)):
        print_plain(console, line, by_words)
    if plan is not None and plan.expected is not None:
        expected = f"the plan expected {plan.expected[1]:.4g} nats to be left"
        print_plain(console, f"{expected}; measured here: {diagnosis.measured.nats:.4g}", by_words)
    elif diagnosis.against or diagnosis.sides:
        return
    elif options.out is not None:
        ways = f"{shown_command('train', f'plan={options.out}')}, " if trains else ""
        ways += f"gnmr.attach(model, plan={str(options.out)!r})"
        ways += f", or {shown_command('export', options.out)} for other libraries"
        for line in next_lines(ways):
            print_plain(console, printable(line), by_words)
    elif plan is None and not diagnosis.little:
        print_plain(console, "next: out=FOLDER writes the plan, html=FILE all of this as a page", by_words)


def _write(diagnosis: Diagnosis, origin: dict[str, Any], options: Namespace, plan: PinPlan | None) -> list[str]:
    """Write the files of out= and html= and return the lines about them, without printing.

    Each file is replaced as a whole once the content of all files is known.
    """
    from gnmr.plan.page import page

    files: dict[str, str] = {}
    lines: list[str] = []
    if options.out is not None and diagnosis.sides:
        lines.append(f"not written: {PLAN_FILE}, which cannot say that some operators have recipes of their own")
    elif plan is None and not diagnosis.sides and (options.out is not None or options.html is not None):
        subject = origin["subject"]["name"]
        provenance = {"subject": subject, "command": origin["command"], "commit": f"{origin['commit']}"}
        files[PLAN_FILE] = diagnosis.plan(provenance=provenance).text()
    if options.html is not None:
        title = f"{diagnosis.recipe} on {origin['subject']['name']}"
        output.write_text(options.html, page(diagnosis, title, origin, files.get(PLAN_FILE)), f"html={options.html}")
        lines.append(f"page: {options.html}")
    if options.out is not None:
        with writing(f"out={options.out}"):
            options.out.mkdir(exist_ok=True)
        for name, content in files.items():
            output.write_text(options.out / name, content, f"out={options.out / name}")
        numbers = options.out / NUMBERS
        output.write_json(numbers, origin | diagnosis.tree(), f"out={numbers}")
        lines.append(f"files: {', '.join([*files, NUMBERS])} in {options.out}")
    return lines
