"""`gnmr eval CHECKPOINT_OR_RUN [key=value ...]`: scores on language tasks, on the screen and in scores.json."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gnmr import output
from gnmr.config import from_words
from gnmr.errors import UserError, writing
from gnmr.extras import install
from gnmr.untrusted import exists

if TYPE_CHECKING:
    from gnmr.evaluation.progress import Progress

_HELP = """\
usage: gnmr eval CHECKPOINT_OR_RUN [key=value ...]

  CHECKPOINT_OR_RUN  a run folder (its newest checkpoint), a folder with a Hugging Face checkpoint of a LLaMA-like model
                     (config.json, *.safetensors, tokenizer), or such a checkpoint's name on the hub
  tasks       [gsm8k,mmlu,hellaswag,wikitext2] (default: all four)
  limit       items of a task at the most, of mmlu of each subject; default: all
  shots       examples in the prompts of gsm8k and mmlu; default: 5
  data        a folder with local files in the hub's schema (gsm8k/test.jsonl, mmlu/dev.jsonl, ...; see
              gnmr/evaluation/tasks.py); default: the hub
  block       tokens of a block of wikitext2's token_perplexity; default: 2048, or the model's context if it is shorter
  path        16bit (default; of a run with paths.weights=instead: w8a16, weights that are INT8 codes times scale), or
              low: the run's own low path, for every operator
  adapter     a folder with an adapter of peft's for the checkpoint
  batch_size  inputs a pass; default: 8
  device      auto (default), cpu or cuda
  out         default: RUN/scores.json (path=low: scores-low.json), for a checkpoint ./scores.json

Prompts, filters and metrics are lm-eval's (the extra finetune), the same from the hub and from local files.

  gnmr eval runs/act_quant_stress/RUN tasks=[wikitext2,hellaswag] data=my_tasks limit=100
  gnmr eval meta-llama/Llama-2-13b-hf tasks=[gsm8k] adapter=my_adapter
"""


@dataclass
class Asked:
    """The words of the command line."""

    tasks: list[str] = field(default_factory=lambda: ["gsm8k", "mmlu", "hellaswag", "wikitext2"])
    limit: int | None = None
    shots: int | None = None
    data: str | None = None
    block: int | None = None
    path: str = "16bit"
    adapter: str | None = None
    batch_size: int = 8
    device: str = "auto"
    out: str | None = None


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError in one line, before anything is loaded where that is possible."""
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0 if argv else 2
    places = [word for word in argv if "=" not in word]
    if len(places) != 1:
        raise UserError("eval: name one checkpoint or run folder (gnmr eval --help)")
    asked = parse([word for word in argv if "=" in word])
    if missing := [name for name in ("lm_eval", "transformers", "peft") if find_spec(name) is None]:
        raise UserError(f"eval: {', '.join(missing)} not installed: {install('finetune')}")
    is_run = exists(Path(places[0]).expanduser() / "config.yaml")
    name = "scores.json" if asked.path == "16bit" else f"scores-{asked.path}.json"
    out = Path(asked.out or (Path(places[0]) / name if is_run else name)).expanduser()
    output.check(out, f"out={out}", follow=asked.out is not None)  # the run's folder may be anybody's
    data = None if asked.data is None else Path(asked.data).expanduser()

    import torch

    from gnmr.evaluation.scoring import check, check_rows, score
    from gnmr.evaluation.subjects import load_subject

    check(asked.tasks, asked.limit, asked.shots, asked.block, asked.batch_size)
    if data is not None:
        check_rows(asked.tasks, asked.shots, data)
    subject = load_subject(places[0], asked.path, asked.adapter, asked.device)
    low = f" ({subject.facts['low_path']})" if subject.path == "low" else ""
    in_force = f"path in force: {subject.named_path}{low}"
    print(f"gnmr: {subject.name}: {subject.facts['kind']} on {subject.device}, {in_force}")
    try:
        with _bar() as progress:
            found = score(subject, asked.tasks, asked.limit, asked.shots, data, asked.block, asked.batch_size, progress)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(f"eval: out of memory at batch_size={asked.batch_size}: use a smaller one") from error
    tree = _record(subject, asked, found, shlex.join(["gnmr", "eval", *argv]))

    if is_run and asked.out is None:
        from gnmr.records.ledger import replace_listed

        with writing(f"out={out}"):
            replace_listed(out, tree)
    else:
        output.write_json(out, tree, f"out={out}", follow=asked.out is not None)
    _show(found)
    print(f"scores: {out}")
    return 0


def parse(words: list[str]) -> Asked:
    """key=value words, strictly typed. UserError for an unknown key and a value of the wrong type."""
    from gnmr.config import one_line

    known = [one.name for one in fields(Asked)]
    for word in words:
        if word.partition("=")[0] not in known:
            raise UserError(f"eval: {word!r} is not understood; use {', '.join(known)}, as key=value")
    try:
        asked = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Asked), from_words(words)))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"eval: {one_line(error)}") from error
    assert isinstance(asked, Asked)
    return asked


def _record(subject: Any, asked: Asked, found: dict[str, Any], command: str) -> dict[str, Any]:
    """scores.json."""
    import torch
    import transformers

    import gnmr
    from gnmr.evaluation.scoring import version
    from gnmr.training.provenance import commit, machine, place, told_command

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
    from gnmr.report.layout import NOTHING, Table
    from gnmr.terminal import for_tables

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

    from gnmr.evaluation.progress import now_and_then

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
