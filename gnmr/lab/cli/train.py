"""`gnmr train`: Hydra composes the config, then runs one cell, or a sweep with its own sweeper and launchers.

Hydra's own flags keep working. Mistakes end in one line with exit code 2.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, open_dict

from gnmr.attachment.ranks import torchrun
from gnmr.attachment.ranks.torchrun import is_first, processes_started
from gnmr.console import next_lines, say, shown_command
from gnmr.errors import RunFailed, UserError, plural
from gnmr.lab.cli.parser import runs
from gnmr.lab.cli.side_by_side import Call, run_side_by_side
from gnmr.lab.config import Config, ControllerConfig, to_dict
from gnmr.lab.config.compose import conf_dir, load_composed, register, typed
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
    # Hydra's parser takes the overrides in one piece; flags and what belongs to them go behind, in their order.
    words.sort(key=lambda word: word.startswith("-") or not ("=" in word or word.startswith("~")))
    _refuse_flags(words)
    for word in words:
        # Hydra's parser would end in a RecursionError.
        depth = max(accumulate((letter in "[{") - (letter in "]}") for letter in word), default=0)
        if depth > MAX_DEPTH:
            raise UserError(f"{word.partition('=')[0]}: nested {depth} deep; use at most {MAX_DEPTH} levels")
    _hydra(words)
    torchrun.command_done = True
    return 0


def _refuse_flags(words: list[str]) -> None:
    """Raise UserError for words that Hydra's parser refuses; on its own it would first print all its flags."""

    def refuse(message: str) -> NoReturn:
        if "unrecognized arguments" in message:
            _refuse_dashes(words)
        raise UserError(f"train: {message} (gnmr train --hydra-help)")

    # Hydra's documented flags, whose meaning is Hydra's.
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?")
    for flag, short in (("--help", "-h"), ("--run", "-r"), ("--multirun", "-m"), ("--shell-completion", "-sc")):
        parser.add_argument(flag, short, action="store_true")
    for flag in ("--hydra-help", "--version", "--resolve"):
        parser.add_argument(flag, action="store_true")
    for flag, short in (
        ("--package", "-p"),
        ("--config-path", "-cp"),
        ("--config-name", "-cn"),
        ("--config-dir", "-cd"),
    ):
        parser.add_argument(flag, short)
    parser.parse_args(words)


def _refuse_dashes(words: list[str]) -> None:
    """Raise UserError for a key of the config that was typed as an option: --steps 10, --training.steps=10."""
    groups = [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]
    settings = sorted(_settings(to_dict(Config())), key=lambda key: not key.startswith("training."))
    for i, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        keys = [key for key in (*groups, *settings) if name in (key, key.rpartition(".")[2])]
        if word.startswith("-") and keys:
            if not equals:
                value = next((following for following in words[i + 1 :] if "=" not in following), "...")
            remedy = " or ".join(f"{key}={value}" for key in list(dict.fromkeys(keys))[:4])
            raise UserError(f"{word}: settings have no dashes; write {remedy}")


def _settings(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{key}.")


def _hydra(words: list[str]) -> None:
    """Let Hydra call `run_cell` for each config that it composes of these words."""
    import hydra

    register()
    if any(word.startswith(("-m", "--multirun", "hydra.mode=")) for word in words):
        # The launcher has no option for how its cells run, and joblib's own pools lose the runs of a killed worker.
        from hydra_plugins.hydra_joblib_launcher import _core

        _core.Parallel = _parallel
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions come to us instead of being printed
    _failures.clear()
    _swept.clear()
    # Hydra takes its words from sys.argv alone.
    before, sys.argv = sys.argv, ["gnmr train", *words]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(cell)()
    except Exception:
        _print_swept()
        raise
    finally:
        sys.argv = before
    _print_swept()
    if _failures:
        raise _failures[0]


def _parallel(n_jobs: int = -1, **_: object) -> Callable[[Iterable[Call]], list[Any]]:
    """Take the place of `joblib.Parallel` in Hydra's launcher, whose calls are (number, words, ...) of each cell."""
    if n_jobs == 0:
        raise UserError("hydra.launcher.n_jobs=0: must be a number of processes, or -1 for one on each CPU")

    def run(calls: Iterable[Call]) -> list[Any]:
        cells = list(calls)
        shared = set[str].intersection(*(set(arguments[1]) for _, arguments, _ in cells))
        names = []  # the cell's number, and the words that not all cells have
        for _, (number, words, *_), _ in cells:
            names.append(" ".join([f"#{number}", *(word for word in words if word not in shared)]))
        results = run_side_by_side(cells, names, n_jobs)
        returned = [result._return_value for result in results]
        _swept.extend(value for value in returned if isinstance(value, Path))
        _failures.extend(value for value in returned if isinstance(value, UserError | RunFailed))
        return results

    return run


_failures: list[Exception] = []
"""The exceptions of a run, or of cells on this machine. Hydra would print all overrides with them if it raised them."""


_RETURNING = (".BasicLauncher", ".JoblibLauncher")
"""Launchers of cells in this process, or whose returned values `_parallel` reads."""


_swept: list[Path] = []
"""The folders of a sweep's cells that are done, if they print."""


def _print_swept() -> None:
    """Print where the cells of a sweep are, and the next command."""
    if _swept:
        folder = Path(os.path.commonpath([cell_folder.parent for cell_folder in _swept]))
        say(f"{plural(len(_swept), 'cell')} done in {folder}")
        say("\n".join(next_lines(shown_command("report", folder))))


def cell(composed: DictConfig) -> Path | Exception | None:
    """Run one composed config, and return the folder of a sweep's cell that prints, or how the cell failed.

    A failed cell of a sweep prints its own line and does not stop the others, on another machine those of its batch.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    settings = HydraConfig.get()
    sweeping = settings.mode == RunMode.MULTIRUN
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
        if sweeping and not isinstance(error, UserError | RunFailed):
            raise  # Hydra raises it again after all cells
        if sweeping:
            say(f"#{settings.job.num} failed: {error}")
            if not settings.launcher["_target_"].endswith(_RETURNING):
                # An exception is all that comes back from another machine.
                raise type(error)(f"#{settings.job.num} failed: {error}") from error
        _failures.append(error)
        return error


def run_cell(composed: DictConfig) -> Path:
    """Run one composed config, unless its folder says that it is done, and return the folder."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    settings = HydraConfig.get()
    with open_dict(composed):
        if settings.mode == RunMode.MULTIRUN and composed.records.live == "auto":
            composed.records.live = "log"  # the sweep has a line for each cell
    config = load_composed(composed, settings.overrides.task)
    config = _among_trials(config, settings.overrides.task)
    sweeping = settings.mode == RunMode.MULTIRUN
    if not sweeping and settings.sweeper.get("params"):
        say("this is one run; the sweep's arms and seeds need -m: gnmr train -m ...")
    warn_of_unread(config.controller, settings.overrides.task)
    refuse_sizes(config, settings.overrides.task)

    from gnmr.lab.train.folder import done_already, run_folder

    report_line = say if is_first() else _silent
    alone = not sweeping and config.records.live != "off"
    if done_already(config, report_line):
        if alone and is_first():
            _print_next(config)
        return run_folder(config)
    if alone:
        report_line(f"{run_folder(config)}: {plural(config.total_steps, 'step')}; loading PyTorch")

    if config.plan is not None:
        from gnmr.lab.train.build import check_plan

        check_plan(config)

    command = shlex.join(["gnmr", "train", *settings.overrides.task])
    if sweeping and processes_started() > 1:
        raise UserError(f"-m: torchrun has started {processes_started()} processes; run one cell at a time by torchrun")
    folder = _train(config, command)
    if sweeping:
        say(f"#{settings.job.num} {finished(folder)}")
    return folder


def _among_trials(config: Config, words: Sequence[str]) -> Config:
    """Keep a trial, of few steps that the `words` ask for, out of its experiment's folder.

    A fork always has few steps, and a run that was begun there goes on there.
    """
    from gnmr.lab.train.folder import run_folder

    keys, runs_dir = typed(words), Path(config.runs_dir)
    is_trial = "training.steps" in keys and config.training.steps < TRIAL and config.base is None
    if not is_trial or keys & {"runs_dir", "run_dir"} or runs_dir.name == SMOKE or run_folder(config).exists():
        return config
    return replace(config, runs_dir=str(runs_dir / SMOKE))


def _train(config: Config, command: str) -> Path:
    """Run the config in this process alone or as one of several, and return its folder."""
    from gnmr.attachment.ranks.world import joined
    from gnmr.lab.evaluation.scores import RunScorer
    from gnmr.lab.train.build import device_of
    from gnmr.lab.train.run import run

    if processes_started() > 1:
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


def _print_next(config: Config) -> None:
    """Print the next possible commands after a finished run."""
    from gnmr.lab.train.folder import run_folder

    number = config.training.seed + 1
    repetition = f"{'seed' if config.base is None else 'order'}: training.seed={number}"
    say("\n".join(next_lines(f"{shown_command('report', run_folder(config))}; another {repetition}")))


def refuse_sizes(config: Config, words: Sequence[str]) -> None:
    """Raise UserError for words on model=pretrained that its checkpoint sets itself."""
    for key in typed(words) if config.model.checkpoint is not None else ():
        if key.startswith("model.") and key.split(".")[1] not in ("name", "checkpoint", "adapter"):
            raise UserError(f"{key}: has no effect on model=pretrained, whose checkpoint says it; leave it out")


def warn_of_unread(controller: ControllerConfig, words: Sequence[str]) -> None:
    """Warn of settings of the controller that have no effect.

    Only the `words` of the command line are checked, and a trigger or a lock that is not 1, wherever it was set. The
    reason is that alpha and beta may come from files that know nothing of the signal.
    """
    keys = typed(words)
    for key, reason in controller.unread().items():
        value = getattr(controller, key)
        if f"controller.{key}" in keys or (key in ("trigger", "t_lock") and value != 1):
            warnings.warn(f"controller.{key}={value} has no effect under controller.{reason}", stacklevel=2)
