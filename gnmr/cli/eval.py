"""`gnmr eval CHECKPOINT_OR_RUN [key=value ...]`: scores on language tasks, on the screen and in scores.json."""

from __future__ import annotations

import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.cli.words import Parser, names_of, needs, optional, text, whole
from gnmr.console import for_tables, say
from gnmr.errors import UserError, printable
from gnmr.names import TASKS
from gnmr.records import output
from gnmr.records.untrusted import exists

if TYPE_CHECKING:
    from gnmr.lab.evaluation.progress import Progress

_TEXT = """\
CHECKPOINT_OR_RUN is a run folder (its newest checkpoint), a folder with a Hugging Face checkpoint of a LLaMA-like model
(config.json, *.safetensors, tokenizer), or such a checkpoint's name on the hub.

Prompts, filters and metrics are lm-eval's (the extra finetune), the same from the hub and from local files.

  gnmr eval runs/act_quant_stress/RUN tasks=[wikitext2,hellaswag] data=my_tasks limit=100
  gnmr eval meta-llama/Llama-2-13b-hf tasks=[gsm8k] adapter=my_adapter
"""


def _parser() -> Parser:
    parser = Parser("eval", "CHECKPOINT_OR_RUN [key=value ...]", _TEXT)
    parser.option("tasks", names_of, "[gsm8k,mmlu,hellaswag,wikitext2], or some of them; default: all four")
    parser.option("limit", whole(1), "items of a task at the most, of mmlu of each subject; default: all")
    parser.option("shots", whole(0), "examples in the prompts of gsm8k and mmlu; default: 5")
    parser.option(
        "data",
        optional,
        "a folder with local files in the hub's schema (gsm8k/test.jsonl, mmlu/dev.jsonl, ...; see "
        "gnmr/lab/evaluation/tasks.py); default: the hub",
    )
    parser.option(
        "block",
        whole(1),
        "tokens of a block of wikitext2's token_perplexity; default: 2048, or the model's context if it is shorter",
    )
    parser.option(
        "path",
        text,
        "16bit (of a run with precision.weights=instead: w8a16, weights that are INT8 codes times scale), or low: the "
        "run's own low path, for every operator",
        "16bit",
    )
    parser.option("adapter", optional, "a folder with an adapter of peft's for the checkpoint")
    parser.option("batch_size", whole(1), "inputs a pass", 8)
    parser.option("device", text, "auto, cpu or cuda", "auto")
    parser.option(
        "out", optional, "default: RUN/scores.json (path=low: scores-low.json); of a checkpoint ./scores.json"
    )
    return parser


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError in one line, before anything is loaded where that is possible."""
    parser = _parser()
    if not argv:
        parser.print_help()
        return 2
    asked, place = parser.of_one_place(argv, "checkpoint or run folder")
    asked.tasks = [*TASKS] if asked.tasks is None else asked.tasks
    needs("eval", "lm_eval", "transformers", "peft")
    is_run = exists(Path(place).expanduser() / "config.yaml")
    name = "scores.json" if asked.path == "16bit" else f"scores-{asked.path}.json"
    out = Path(asked.out or (Path(place) / name if is_run else name)).expanduser()
    output.check(out, f"out={out}", follow=asked.out is not None)  # the run's folder may be anybody's
    data = None if asked.data is None else Path(asked.data).expanduser()

    import torch

    from gnmr.lab.evaluation.scoring import check, check_rows, score
    from gnmr.lab.evaluation.subjects import load_subject

    options = {"limit": asked.limit, "shots": asked.shots, "block": asked.block, "batch_size": asked.batch_size}
    check(asked.tasks, **options)
    if data is not None:
        check_rows(asked.tasks, asked.shots, data)
    subject = load_subject(place, asked.path, asked.adapter, asked.device)
    low = f" ({subject.facts['low_path']})" if subject.path == "low" else ""
    in_force = f"path in force: {subject.named_path}{low}"
    say(printable(f"gnmr: {subject.name}: {subject.facts['kind']} on {subject.device}, {in_force}"))
    try:
        with _bar() as progress:
            found = score(subject, asked.tasks, **options, data=data, progress=progress)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(f"eval: out of memory at batch_size={asked.batch_size}: use a smaller one") from error
    tree = _record(subject, asked, found, shlex.join(["gnmr", "eval", *argv]))

    output.write_json(out, tree, f"out={out}", follow=asked.out is not None)
    _show(found)
    print(f"scores: {out}")
    return 0


def _record(subject: Any, asked: Namespace, found: dict[str, Any], command: str) -> dict[str, Any]:
    """scores.json."""
    import torch
    import transformers

    import gnmr
    from gnmr.lab.evaluation.scoring import version
    from gnmr.lab.train.provenance import commit, machine, place, told_command

    return {
        "subject": {"name": place(subject.name), **subject.facts},
        "path": subject.named_path,
        "tasks": found,
        "limit": asked.limit,
        "data": place(asked.data) if asked.data else "hub",
        "batch_size": asked.batch_size,
        "command": told_command(command),
        "commit": commit(),
        "machine": machine(subject.device),
        "gnmr": gnmr.__version__,
        "lm_eval": version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _show(found: dict[str, Any]) -> None:
    from gnmr.lab.report.layout import NOTHING, Table

    table = Table("Scores", ["task", "metric", "value", "stderr", "items", "shots", "tokens scored"])
    for name, task in found.items():
        scored = task["tokens_scored"] or task["tokens_generated"]
        rest = [f"{task['items']} of {task['items_there']}", str(task["shots"]), f"{scored:,}"]
        for metric, row in task["metrics"].items():
            error = NOTHING if row["stderr"] is None else f"{row['stderr']:.4f}"
            table.rows.append([name, metric, _figure(row["value"]), error, *rest])
        table.notes.append(f"{name}: {task['convention']}")
        if task["truncated"]:
            table.notes.append(f"{name}: {task['truncated']} inputs did not fit and lost their beginning")
    table.print(for_tables())


def _figure(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e6 else f"{value:.4g}"


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on a terminal's standard error; anywhere else a line now and then."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from gnmr.lab.evaluation.progress import now_and_then

    console = Console(stderr=True)
    if not console.is_terminal:
        yield now_and_then(lambda text: print(f"gnmr: {text}", file=sys.stderr))
        return
    with Bar(console=console, transient=True) as bar:
        rows: dict[str, Any] = {}

        def tell(task: str, done: int, total: int) -> None:
            if task not in rows:
                rows[task] = bar.add_task(f"scoring {task}", total=total)
            bar.update(rows[task], completed=done, total=total)

        yield tell
