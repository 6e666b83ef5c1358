"""`gnmr train`: Hydra composes the config, then runs one cell, or a sweep with its own sweeper and launchers.

Hydra's own flags keep working. Mistakes end in one line with exit code 2.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, open_dict

from gnmr.attachment.ranks.torchrun import is_first, started
from gnmr.console import next_lines, say, shown_command
from gnmr.errors import RunFailed, UserError, as_user_error, plural
from gnmr.lab.cli.parser import runs
from gnmr.lab.cli.side_by_side import Call, run_side_by_side
from gnmr.lab.config import Config, ControllerConfig, to_dict
from gnmr.lab.config.base_run import typed
from gnmr.lab.config.compose import conf_dir, load_composed, register
from gnmr.lab.config.text_checks import place
from gnmr.lab.stopping import Stopped, is_bypassed, never_at_once, seen
from gnmr.records.find import SMOKE, TRIAL, finished
from gnmr.records.untrusted import MAX_DEPTH


def main(argv: list[str]) -> int:
    """Run the command; raises what Hydra and the runs raise."""
    # oneDNN builds a kernel for every number of rows and keeps 1,024 of them; the experts of a mixture meet
    # thousands of numbers. torch reads this variable at its first multiplication.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    # Silence DDP's warning, one per process, that its search for unused parameters finds none
    # (gnmr/lab/train/wrap.py). torch reads this variable when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = [f"base={runs('base', word[5:])}" if word.startswith("base=") else word for word in argv]
    words.sort(key=lambda word: word.startswith("-") or not ("=" in word or word.startswith("~")))  # Hydra's parser
    # takes the overrides in one piece; flags and what belongs to them go behind, in their order.
    _refuse_flags(words)
    for word in words:
        if _depth(word) > MAX_DEPTH:  # Hydra's parser would end in a RecursionError
            raise UserError(f"{word.partition('=')[0]}: nested {_depth(word)} deep; use at most {MAX_DEPTH} levels")
    _hydra(words)
    return 0


def _depth(word: str) -> int:
    """Return how deep the lists and mappings of a word are nested."""
    steps = ((letter in "[{") - (letter in "]}") for letter in word)
    return max(accumulate(steps), default=0)


def _refuse_flags(words: list[str]) -> None:
    """Raise UserError for words that Hydra's parser refuses; on its own it would first print all its flags."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        if "unrecognized arguments" in message:
            _refuse_dashes(words)
        raise UserError(f"train: {message} (gnmr train --hydra-help)")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    if again := parser.parse_args(words).experimental_rerun:  # what --experiment abbreviates
        refuse(f"--experiment {again}: write experiment={again}")


def _refuse_dashes(words: list[str]) -> None:
    """Raise UserError for a key of the config that was typed as an option: --steps 10, --training.steps=10."""
    known = sorted(_keys(to_dict(Config())), key=lambda key: not key.startswith("training."))
    for i, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        keys = [key for key in known if name in (key, key.rpartition(".")[2])]
        if word.startswith("-") and keys:
            if not equals:
                value = next((after for after in words[i + 1 :] if "=" not in after), "...")
            raise UserError(
                f"{word}: settings have no dashes; write {' or '.join(f'{key}={value}' for key in keys[:4])}"
            )


def _keys(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield above + key
        if isinstance(value, dict):
            yield from _keys(value, f"{above}{key}.")


def _hydra(words: list[str]) -> None:
    """Let Hydra call `run_cell` for each config that it composes of these words."""
    import hydra

    register()
    if any(word.startswith(("-m", "--multirun", "hydra.mode=")) for word in words):
        from hydra_plugins.hydra_joblib_launcher import _core  # imports joblib (0.3 s)

        _core.Parallel = _parallel
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions come to us instead of being printed
    _failures.clear()
    _swept.clear()
    before, sys.argv = sys.argv, ["gnmr train", *words]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(cell)()
    except Exception:
        _tell_swept()
        raise
    finally:
        sys.argv = before
    _tell_swept()
    if _failures:
        raise _failures[0]


def _parallel(n_jobs: int = -1, **_: object) -> Callable[[Iterable[Call]], list[Any]]:
    """Take the place of `joblib.Parallel` in Hydra's launcher, whose calls are (number, words, ...) of each cell."""
    if n_jobs == 0:
        raise UserError("hydra.launcher.n_jobs=0: must be a number of processes, or -1 for one on each CPU")

    def run(calls: Iterable[Call]) -> list[Any]:
        cells = list(calls)
        shared = set[str].intersection(*(set(arguments[1]) for _, arguments, _ in cells))
        names = [
            " ".join([f"#{arguments[0]}", *(word for word in arguments[1] if word not in shared)])
            for _, arguments, _ in cells
        ]
        results = run_side_by_side(cells, names, n_jobs)
        _swept.extend(result._return_value for result in results if isinstance(result._return_value, Path))
        return results

    return run


_failures: list[Exception] = []
"""The exception of a run. Hydra would print all overrides with it, so it is not raised through Hydra."""


_swept: list[Path] = []
"""The folders of a sweep's cells that are done, if they print."""


def _tell_swept() -> None:
    """Print where the cells of a sweep are, and the next command."""
    if _swept:
        folder = Path(os.path.commonpath([cell_folder.parent for cell_folder in _swept]))
        say(f"{plural(len(_swept), 'cell')} done in {folder}")
        say("\n".join(next_lines(shown_command("report", folder))))


def cell(composed: DictConfig) -> Path | None:
    """Run one composed config, and return the folder of a sweep's cell that prints.

    A failed cell of a sweep prints its own line and does not stop the others; Hydra raises its error after all cells.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    job, sweeping = HydraConfig.get().job, HydraConfig.get().mode == RunMode.MULTIRUN
    signals = len(seen)
    try:
        folder = run_cell(composed)
        if sweeping and len(seen) > signals and not is_bypassed(seen[-1]):  # in its last step, after which it was done
            raise Stopped(seen[-1])
        if not sweeping or composed.records.live == "off":
            return None
        _swept.append(folder)
        return folder
    except Exception as error:
        if not sweeping:
            _failures.append(error)
            return None
        if isinstance(error, UserError | RunFailed):
            say(f"#{job.num} failed: {error}")
        raise


def run_cell(composed: DictConfig) -> Path:
    """Run one composed config, unless its folder says that it is done, and return the folder."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    settings = HydraConfig.get()
    with open_dict(composed):
        if settings.mode == RunMode.MULTIRUN and composed.records.live == "auto":
            composed.records.live = "log"  # the sweep has a line for each cell
    config = load_composed(composed, settings.overrides.task)
    config = _apart(config, settings.overrides.task)
    if settings.mode != RunMode.MULTIRUN and settings.sweeper.get("params"):
        say("this is one run; the sweep's arms and seeds need -m: gnmr train -m ...")
    with as_user_error():
        place("data.cache_dir", config.data.cache_dir)
    warn_of_unread(config.controller, settings.overrides.task)
    refuse_sizes(config, settings.overrides.task)

    from gnmr.lab.train.folder import done_already, run_folder

    tell = say if is_first() else _silent
    if done_already(config, tell):
        if settings.mode != RunMode.MULTIRUN and config.records.live != "off" and is_first():
            _tell_next(config)
        return run_folder(config)
    if settings.mode != RunMode.MULTIRUN and config.records.live != "off":
        tell(f"{run_folder(config)}: {plural(config.total_steps, 'step')}; loading PyTorch")

    if config.plan is not None:
        from gnmr.lab.train.build import check_plan

        check_plan(config)

    command = shlex.join(["gnmr", "train", *settings.overrides.task])
    if settings.mode == RunMode.MULTIRUN and started() > 1:
        raise UserError(f"-m: torchrun has started {started()} processes; run one cell at a time by torchrun")
    folder = _train(config, command)
    if settings.mode == RunMode.MULTIRUN:
        say(f"#{settings.job.num} {finished(folder)}")
    return folder


def _apart(config: Config, words: Sequence[str]) -> Config:
    """Keep a trial, of few steps that the `words` ask for, out of its experiment's folder.

    A fork always has few steps, and a run that was begun there goes on there.
    """
    from gnmr.lab.train.folder import run_folder

    given, below = typed(words), Path(config.runs_dir)
    asked = "training.steps" in given and config.training.steps < TRIAL and config.base is None
    if not asked or given & {"runs_dir", "run_dir"} or below.name == SMOKE or run_folder(config).exists():
        return config
    return replace(config, runs_dir=str(below / SMOKE))


def _train(config: Config, command: str) -> Path:
    """Run the config in this process alone or as one of several, and return its folder."""
    from gnmr.attachment.ranks.world import joined
    from gnmr.lab.evaluation.scores import RunScorer
    from gnmr.lab.train.build import device_of
    from gnmr.lab.train.run import run

    if started() > 1:
        never_at_once()  # the launcher sends a signal twice, and the terminal may have sent it too
    if config.precision.backend == "scaled_mm" and device_of(config.training.device).type == "cpu":
        raise UserError("precision.backend=scaled_mm: takes minutes a step on a CPU; use auto or simulated")
    with joined(device_of(config.training.device).type == "cuda") as world:
        try:
            return run(config, say if world.first else _silent, command=command, scorer=RunScorer(), world=world)
        except (UserError, RunFailed) as error:
            if world.first or "another process" in str(error):
                raise
            raise SystemExit(2 if isinstance(error, UserError) else 1) from error  # rank 0 reports it


def _silent(_: str) -> None:
    """Replace `say` in processes other than the first."""


def _tell_next(config: Config) -> None:
    """Print the next possible commands after a finished run."""
    from gnmr.lab.train.folder import run_folder

    number = config.training.seed + 1
    another = f"order: fork.order={number}" if config.base is not None else f"seed: training.seed={number}"
    say("\n".join(next_lines(f"{shown_command('report', run_folder(config))}; another {another}")))


def refuse_sizes(config: Config, words: Sequence[str]) -> None:
    """Raise UserError for words on model=pretrained that its checkpoint sets itself."""
    if config.model.checkpoint is None:
        return
    for key in typed(words):
        if key.startswith("model.") and key.split(".")[1] not in ("name", "checkpoint", "adapter"):
            raise UserError(f"{key}: has no effect on model=pretrained, whose checkpoint says it; leave it out")


def warn_of_unread(controller: ControllerConfig, words: Sequence[str]) -> None:
    """Warn of settings of the controller that have no effect.

    Only the `words` of the command line are checked, and a trigger or a lock that is not 1, wherever it was set. The
    reason is that alpha and beta may come from files that know nothing of the signal.
    """
    given = typed(words)
    for key, why in controller.unread().items():
        value = getattr(controller, key)
        if f"controller.{key}" in given or (key in ("trigger", "t_lock") and value != 1):
            warnings.warn(f"controller.{key}={value} has no effect under controller.{why}", stacklevel=2)
