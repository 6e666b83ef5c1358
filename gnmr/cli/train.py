"""`gnmr train`: Hydra composes the config, then one run, or a sweep of runs.

Hydra's own flags keep working. Three things are added: overrides and flags may stand in any order; a sweep composes
from a snapshot of the YAML tree, so that editing it changes no later cell; mistakes end in one line, exit code 2.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig, open_dict

from gnmr.cli.words import runs
from gnmr.console import activation, say, shared, shown_command, wiping
from gnmr.distributed.launch import is_first, is_torchrun, launch, started
from gnmr.errors import RunFailed, UserError, told_as, writing
from gnmr.lab.config import Config, ControllerConfig, load
from gnmr.lab.config.compose import choices_of, conf_dir, register, with_base, with_plan
from gnmr.lab.config.meant import GROUPS
from gnmr.lab.config.overrides import as_given, node_of
from gnmr.lab.config.texts import place
from gnmr.lab.config.yaml_files import check_yaml, yaml_files
from gnmr.lab.stopping import never_at_once
from gnmr.records.untrusted import MAX_DEPTH

if TYPE_CHECKING:
    from hydra.conf import HydraConf


def main(argv: list[str]) -> int:
    """The command; raises what Hydra and the runs raise."""
    # oneDNN builds a kernel for every number of rows and keeps 1,024 of them; the experts of a mixture meet
    # thousands. Read when torch multiplies for the first time.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    # DDP's warning, one a process, that its search for unused parameters finds none (gnmr/distributed/wrap.py). Read
    # when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "--groups" in argv:
        _show_groups()
        return 0
    completing = any(word in ("-sc", "--shell-completion") for word in argv)
    if not completing:
        argv = [
            f"base={runs('base', word[5:])}" if word.startswith("base=") else word for word in overrides_first(argv)
        ]
    # Hydra takes --multi for --multirun, and hydra.mode=MULTIRUN; a snapshot too many does no harm.
    sweeping = any(word == "-m" or word.startswith(("--mu", "hydra.mode")) for word in argv)
    if not completing:
        refuse_depth(argv)
        for folder in refuse_flags(argv):
            check_yaml(folder, argv)
        number = sum(map(is_override, argv))
        argv = [*as_given(argv[:number]), *argv[number:]]
    with _snapshot(argv) if sweeping else nullcontext((conf_dir(), argv)) as (conf, words):
        _hydra(words, conf, "gnmr" if completing else "gnmr train")
    return 0


def _show_groups() -> None:
    """What can be chosen as a whole, a line a group."""
    for group in GROUPS:
        print(f"{group}=  {', '.join(choices_of(group))}")


def refuse_depth(argv: list[str]) -> None:
    """UserError for lists within lists without end, at which Hydra's parser gives up."""
    for word in argv:
        depth = deepest = 0
        for letter in word:
            depth += (letter in "[{(") - (letter in "]})")
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            raise UserError(f"{word.partition('=')[0]}: nested {deepest:,} deep, {MAX_DEPTH} at the most")


def refuse_flags(argv: list[str]) -> list[Path]:
    """UserError for what Hydra's own parser does not take; by itself it would show all its flags first. Returns the
    folders of YAML that the user brings."""
    for word in argv:
        name, _, value = word.lstrip("-").partition("=")
        if word.startswith("--") and (name in GROUPS or node_of(name) is not None):
            value = value or next((after for before, after in pairwise(argv) if before == word), "VALUE")
            raise UserError(f"{word}: is written without dashes and with a =: {name}={value}")
    given = hydra_flags().parse_args(argv)
    return [Path(folder) for folder in (given.config_dir, given.config_path) if folder]


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"train: {message} (gnmr train --hydra-help)")


def hydra_flags() -> argparse.ArgumentParser:
    """What Hydra takes besides overrides: its own parser is not public."""
    parser = _Flags(add_help=False)
    parser.add_argument("overrides", nargs="*")
    for names in ("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m"):
        parser.add_argument(*names.split(), action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    for names in ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd", "--experimental-rerun"):
        parser.add_argument(*names.split())
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    shown = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=shown)
    return parser


def overrides_first(argv: list[str]) -> list[str]:
    """Hydra's parser takes the overrides in one piece only; flags and what belongs to them go behind, in order."""
    return sorted(argv, key=lambda word: not is_override(word))


def is_override(word: str) -> bool:
    """Whether it is no flag, and nothing that belongs to one."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _hydra(argv: list[str], conf: Path, program: str) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.types import RunMode

    from gnmr.lab.sweep import Sweep

    register()
    # By the name that conf/hydra/sweeper/gnmr.yaml gives it: Hydra takes plugins of its own namespaces alone, and
    # imports all that lies there into every application of the environment.
    Plugins.instance().class_name_to_class["hydra_plugins.gnmr.Sweep"] = Sweep
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions come to us instead of being printed
    failures: list[Exception] = []
    told: dict[str, int] = {}
    """By why cells failed, the first of them."""

    def cell(composed: DictConfig) -> Exception | None:
        """`run_cell`; a failure is handed back, because Hydra would print all overrides with an exception."""
        try:
            run_cell(composed)
        except Exception as error:
            failures.append(error)
            settings = HydraConfig.get()
            if settings.mode == RunMode.MULTIRUN and isinstance(error, UserError | RunFailed):
                first = told.setdefault(str(error), settings.job.num)
                say(f"#{settings.job.num} failed: {error if first == settings.job.num else f'as #{first}'}")
            return error
        return None

    before, sys.argv = sys.argv, [program, *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(cell)()
    finally:
        sys.argv = before
    if failures:
        raise failures[0]


def run_cell(composed: DictConfig) -> None:
    """One composed config -> one run."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    settings = HydraConfig.get()
    with open_dict(composed):
        if settings.mode == RunMode.MULTIRUN and composed.records.live == "auto":
            composed.records.live = "log"  # the sweep has a line for each cell
    with_plan(composed, settings.overrides.task)
    with_base(composed, settings.overrides.task)
    config = load(composed)
    if settings.mode != RunMode.MULTIRUN and "params" in settings.sweeper and settings.sweeper.params:
        say("this is one run; the sweep's arms and seeds need -m: gnmr train -m ...")
    with told_as():
        place("data.cache_dir", config.data.cache_dir)
    warn_of_unread(config.controller, settings.overrides.task)
    refuse_arm(config, settings)
    refuse_sizes(config, settings.overrides.task)

    if not config.memory_plan:
        from gnmr.lab.train.folder import done_already, run_folder

        tell = say if is_first() else _silent
        if done_already(config, tell):
            if settings.mode != RunMode.MULTIRUN and config.records.live != "off" and is_first():
                _tell_next(config)
            return
        if settings.mode != RunMode.MULTIRUN and config.records.live != "off":
            tell(f"{run_folder(config)}: {config.total_steps:,} steps; loading PyTorch")

    if config.plan is not None:
        from gnmr.lab.train.build import check_plan

        check_plan(config)
    if config.memory_plan:
        from gnmr.lab.train.memory_plan import plan_run

        say(str(plan_run(config)))
        return

    command = shlex.join(["gnmr", "train", *settings.overrides.task])
    if config.parallel == "none" and config.training.processes is None and not is_torchrun():
        folder = _train(config, command)
        if settings.mode != RunMode.MULTIRUN and config.records.live != "off":
            with suppress(UserError, OSError):  # records that cannot be read: the run is done all the same
                _show_beside(folder)
        return
    from gnmr.lab.train.parallel import refuse_processes

    refuse_processes(config)
    if settings.mode == RunMode.MULTIRUN and started() > 1:
        raise UserError(f"-m: torchrun has started {started()} processes; a sweep starts its own: training.processes=N")
    if (processes := config.training.processes) is None:
        _train(config, command)
    else:
        config = replace(config, training=replace(config.training, processes=None))
        launch(processes, rank_of_run, config, command)


def _train(config: Config, command: str) -> Path:
    """The run, by this process or as one of several; its folder."""
    from gnmr.distributed.world import joined
    from gnmr.lab.evaluation.scores import RunScorer
    from gnmr.lab.train.build import device_of
    from gnmr.lab.train.run import run

    if started() > 1:
        never_at_once()  # what started this process sends a signal twice, and the terminal may have sent it too
    with joined(device_of(config.training.device).type == "cuda") as world:
        try:
            return run(config, say if world.first else _silent, command=command, scorer=RunScorer(), world=world)
        except (UserError, RunFailed) as error:
            if world.first or "another process" in str(error):
                raise
            raise SystemExit(2 if isinstance(error, UserError) else 1) from error  # rank 0 tells it


def _silent(_: str) -> None:
    """In the place of `say` in other processes than the first."""


def rank_of_run(config: Config, command: str) -> tuple[str, Any]:
    """One of the processes that a run starts itself: how it ended (`launch`)."""
    if config.records.live in ("off", "log"):
        wiping()  # the bar of a sweep may stand there
    try:
        _train(config, command)
    except UserError as error:
        return "mistake", str(error)
    except RunFailed as error:
        return "failed", str(error)
    except SystemExit as error:
        why = error.__cause__  # of a process that is not the first
        if isinstance(why, (UserError, RunFailed)):
            return ("mistake" if isinstance(why, UserError) else "failed"), str(why)
        return "ended", error.code
    return "done", None


def _tell_next(config: Config) -> None:
    """What there is to do with a run that is done."""
    from gnmr.lab.train.folder import run_folder

    number = config.training.seed + 1
    another = f"order: fork.order={number}" if config.base is not None else f"seed: training.seed={number}"
    say("\n".join([*activation(), f"next: {shown_command('report', run_folder(config))}; another {another}"]))


def _show_beside(folder: Path) -> None:
    """The run beside the arms of runs/reference that are of its experiment, scale and steps; nothing without them."""
    from gnmr.lab.records.find import find_runs
    from gnmr.lab.records.pack import unpacked
    from gnmr.lab.report.brief import beside
    from gnmr.lab.report.runs import load

    run = load(folder)
    pack = conf_dir().parent / "runs" / "reference" / f"{run.experiment}.parquet"
    if not pack.is_file():
        return
    with unpacked([pack]) as found:
        table = beside(run, [load(other) for other in find_runs(found.paths)])
    if table is not None:
        table.print(shared())
        say(f"all tables: {shown_command('report', folder, pack)}")


def refuse_arm(config: Config, settings: HydraConf) -> None:
    """UserError for `arm=NAME` that means an arm of a sweep, without -m: its keys would be missing."""
    arms = settings.sweeper.get("arms") or {}
    if config.arm in arms:
        raise UserError(f"arm={config.arm}: chooses an arm of a sweep: add -m, or give its keys: {arms[config.arm]}")


def refuse_sizes(config: Config, words: Sequence[str]) -> None:
    """UserError for words on model=pretrained that its checkpoint says itself.

    The sizes that a scale brings with it are left alone: it was not asked for them.
    """
    if config.model.checkpoint is None:
        return
    for key, _, value in (word.lstrip("+").partition("=") for word in words):
        if (key, value) == ("model.outlier_channels.number", "0"):  # takes back what a scale brings
            continue
        if key.startswith("model.") and key.split(".")[1] not in ("name", "checkpoint", "adapter"):
            raise UserError(f"{key}: has no effect on model=pretrained, whose checkpoint says it; leave it out")


def warn_of_unread(controller: ControllerConfig, words: Sequence[str]) -> None:
    """Warns of settings of the controller that have no effect.

    Those among the `words` of the command line, and a trigger or a lock that is not 1 wherever it was set: alpha and
    beta are set by files that know nothing of the signal.
    """
    given = {word.lstrip("+").partition("=")[0] for word in words}
    for key, why in controller.unread().items():
        value = getattr(controller, key)
        if f"controller.{key}" in given or (key in ("trigger", "t_lock") and value != 1):
            warnings.warn(f"controller.{key}={value} has no effect under controller.{why}", stacklevel=2)


@contextmanager
def _snapshot(argv: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """Copies of the YAML tree and of every --config-dir, which live as long as the sweep."""
    with tempfile.TemporaryDirectory(prefix="gnmr-sweep-") as folder:
        conf = Path(shutil.copytree(conf_dir(), Path(folder, "conf")))
        words = list(argv)
        for i, word in enumerate(words):
            flag, _, value = word.partition("=")
            if flag not in ("--config-dir", "-cd"):
                continue
            if not value and i + 1 == len(words):
                continue  # Hydra's parser says so
            source = Path(value or words[i + 1])
            if not source.is_dir():
                raise UserError(f"{flag} {source}: there is no such folder")
            copy = Path(folder, f"extra-{i}")
            copy.mkdir()
            for file in yaml_files(source):
                with writing(tempfile.gettempdir()):
                    (to := copy / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, to)
            words[i if value else i + 1] = f"{flag}={copy}" if value else str(copy)
        yield conf, words
