"""A sweep as a whole: about how long it will take, how far it is, how it ended; and workers that end with their parent.

`Sweep` takes the place of Hydra's basic sweeper. What it says comes from the cells' own records, so it holds for any
launcher, and for cells that an earlier sweep has begun.
Other sweepers (hydra/sweeper=...) work as ever and say nothing of this.

Cells side by side (hydra/launcher=joblib) share the cores: each gets `training.threads` = cores / jobs unless it is
set. The number goes into the config as an override, and so into the hash and the folder's name: sums of floats depend
on it, and a run is only continued, and only compared bit by bit, under the number that it began with. It depends on
the cores and on hydra.launcher.n_jobs alone, not on the cells, so adding seeds or arms renames nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import configure_log, run_job, setup_globals
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from gnmr.console import activation, say, shared, shown_command, wiping
from gnmr.errors import RunFailed, UserError, told_as, writing
from gnmr.lab.config import Config
from gnmr.lab.config.compose import load_composed, mistake
from gnmr.lab.config.overrides import arm_words, as_given, parsed
from gnmr.lab.sweep.progress import MEASURED_STEPS, Cell, Cost, Progress
from gnmr.lab.sweep.workers import Workers, how_it_ended
from gnmr.lab.train.folder import run_folder

MOST_CELLS = 100_000
MOST_SHOWN = 200
"""Cells of which a sweep ends with a line an arm; of more reading them takes longer than a few seconds."""


class Sweep(Sweeper):
    """Every combination of the values, as Hydra's basic sweeper, with the lines of `Progress`."""

    def __init__(
        self,
        max_batch_size: int | None,
        params: dict[str, str] | None = None,
        arms: dict[str, str] | None = None,
        table: bool = True,
    ) -> None:
        """conf/hydra/sweeper: cells that the launcher gets at once (None: all), the sweep's axes and its arms; whether
        it ends with a line an arm."""
        self._table = table
        self._max_batch_size, self._params, self._arms = max_batch_size, params or {}, arms or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config, self._task_function = hydra_context, config, task_function
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Raises the first cell's failure, when all cells have ended, or SystemExit where one is not finished."""
        assert self.hydra_context is not None and self.config is not None and self.launcher is not None
        options = getattr(self.launcher, "joblib", None)  # of the joblib launcher: what `joblib.Parallel` takes
        _refuse_tasks(getattr(self.launcher, "params", {}))
        jobs, threads = (1, None) if options is None else _jobs_and_threads(options["n_jobs"])
        cells = self._cells(
            combinations_of(arguments, self._params, self._arms, self.hydra_context.config_loader), threads
        )
        jobs = min(jobs, len(cells))
        if options is not None:
            options["n_jobs"] = jobs
        if jobs > 1:
            _prepare_data(cells)
        with Workers(jobs) if jobs > 1 else nullcontext() as workers:
            progress = Progress(cells, jobs)
            measure = cell_cost if workers is None else partial(_cost_side_by_side, workers, jobs)
            say(progress.opening(measure), by_words=True)
            try:
                with progress:
                    errors = self._run(cells, workers)
            finally:
                say("\n".join(progress.closing()))
        if workers is not None and workers.received:
            raise SystemExit(128 + workers.received[0])
        if self._table:
            _show_arms(cells)
        if errors:
            raise errors[0]
        if unfinished := len(progress.unfinished()):
            print(
                f"gnmr: sweep: {unfinished} of {len(cells)} not finished; the same command continues", file=sys.stderr
            )
            raise SystemExit(1)

    def _cells(self, combinations: list[list[str]], threads: int | None) -> list[Cell]:
        """The sweep's runs, each once. UserError for what is no sweep of runs; nothing is written before."""
        assert self.config is not None
        if self._max_batch_size is not None and self._max_batch_size < 1:
            raise UserError(f"hydra.sweeper.max_batch_size={self._max_batch_size}: must be 1 or more, or null")
        cells: list[Cell] = []
        for words in combinations:
            cell = self._cell(words, len(cells), threads)
            if cell.config is not None and cell.config.memory_plan:
                raise UserError("memory_plan=true: plans one run; leave out -m")
            twin = next((other for other in cells if cell.is_run_of(other)), None)  # no run twice
            if twin is None:
                cells.append(cell)
            elif cell.config != twin.config:
                both = {*cell.words} & {*twin.words}
                mine, its = (" ".join(word for word in one.words if word not in both) for one in (cell, twin))
                say(f"sweep: {mine} makes the run of {its} again: left out")
        folder = self.config.hydra.sweep.dir
        with writing(f"hydra.sweep.dir={folder}"):
            Path(folder).mkdir(parents=True, exist_ok=True)
        return cells

    def _run(self, cells: list[Cell], workers: Workers | None) -> list[Exception]:
        """Runs the cells; why some failed."""
        errors = []
        size = self._max_batch_size or len(cells)
        for batch in (cells[i : i + size] for i in range(0, len(cells), size)):
            for cell, returned in self._launched(batch, workers):
                if isinstance(returned, BrokenProcessPool):
                    cell.lost = how_it_ended(returned)
                    say(f"#{cell.number} not finished: {cell.lost}")
                elif isinstance(returned, Exception):
                    cell.failure = " ".join(str(returned).split())
                    errors.append(returned)
        return errors

    def _launched(self, cells: list[Cell], workers: Workers | None) -> Iterator[tuple[Cell, Any]]:
        """Each cell with what it returned or raised: by Hydra's launcher, or side by side as they end."""
        assert self.launcher is not None and self.config is not None
        if workers is None:
            with _jobs_ended():
                returns = self.launcher.launch([cell.words for cell in cells], cells[0].number)
            yield from zip(cells, (returned.return_value for returned in returns), strict=True)
            return
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        for number, returned in workers.each([self._task(cell) for cell in cells]):
            yield cells[number], returned

    def _task(self, cell: Cell) -> Callable[[], Any]:
        """What a worker is to do for this cell."""
        assert self.hydra_context is not None and self.config is not None
        state = Singleton.get_state()
        return partial(_job, cell.number, cell.words, self.hydra_context, self.config, self._task_function, state)

    def _cell(self, words: list[str], number: int, threads: int | None) -> Cell:
        """What a launcher will make of these overrides; threads: for a cell that does not choose."""
        assert self.hydra_context is not None and self.config is not None
        composed = self.hydra_context.config_loader.load_sweep_config(self.config, words)
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        try:
            config = load_composed(composed)
        except UserError:
            return Cell(words, None, number)
        if threads is None or config.training.threads is not None:
            return Cell(words, config, number)
        config = replace(config, training=replace(config.training, threads=threads))
        return Cell([*words, f"training.threads={threads}"], config, number)


def _refuse_tasks(params: Mapping[str, Any]) -> None:
    """UserError where a cell would be several tasks of a submitit launcher (hydra/launcher=submitit_slurm)."""
    for key in ("nodes", "tasks_per_node"):
        if (params.get(key) or 1) > 1:
            raise UserError(
                f"hydra.launcher.{key}={params[key]}: a cell is one task on one node; training.processes=N starts its "
                "processes there"
            )


@contextmanager
def _jobs_ended() -> Iterator[None]:
    """RunFailed, in one line, for a job of submitit's that ended without an answer: killed, or out of its time."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        line = " ".join(str(error).split("\n")[0].split())
        raise RunFailed(
            f"sweep: a job ended ({line}); the same command continues the cells that are not done"
        ) from error


def _job(
    number: int,
    words: list[str],
    context: HydraContext,
    config: DictConfig,
    task: TaskFunction,
    state: dict[Any, Any],
) -> Any:
    """What `task` returns of a cell, in a worker. UserError for a folder that Hydra cannot make."""
    setup_globals()
    Singleton.set_state(state)
    composed = context.config_loader.load_sweep_config(config, words)
    with open_dict(composed):
        composed.hydra.job.id, composed.hydra.job.num = f"{composed.hydra.job.name}_{number}", number
    HydraConfig.instance().set_config(composed)
    wiping()
    try:
        job = run_job(task, composed, "hydra.sweep.dir", "hydra.sweep.subdir", context)
        return job.return_value
    except Exception as error:
        line = mistake(error, words)
        if line is None:
            raise
        raise UserError(line) from None


@told_as()
def combinations_of(
    words: list[str], axes: Mapping[str, str], arms: Mapping[str, str | None], loader: ConfigLoader | None = None
) -> list[list[str]]:
    """The words of each cell of a sweep: the product of all axes, in each of its arms. What is typed (`words`) wins
    over an arm's words, and those over the sweep's axes. UserError for an arm that there is not."""

    def parse(words: list[str]) -> list[Override]:
        return [parsed(word, loader) for word in as_given(words)]

    given = parse([f"{key}={values}" for key, values in axes.items()]), parse(words)
    asked = [one for half in given for one in half if one.key_or_group == "arm"]
    if not arms or (asked and asked[-1].value() is None):
        return _combinations([*given[0], *given[1]])
    arms = {str(name): words for name, words in arms.items()}
    names = list(arms)
    if asked:
        last = asked[-1]
        values = last.sweep_iterator() if last.is_sweep_override() else [last.value()]
        names = [value.text if isinstance(value, QuotedString) else str(value) for value in values]
    if unknown := [name for name in names if name not in arms]:
        told = "; ".join(f"{name} ({of or 'the defaults'})" for name, of in arms.items())
        raise UserError(f"arm={unknown[0]}: is no arm of this sweep: use one of {told}")
    first, typed = ([one for one in half if one.key_or_group != "arm"] for half in given)
    cells = [cell for name in names for cell in _combinations([*first, *parse(arm_words(name, arms[name])), *typed])]
    firsts = list(dict.fromkeys(tuple(cell[:1]) for cell in cells))  # of the first axis, the seeds: all arms of each
    return sorted(cells, key=lambda cell: firsts.index(tuple(cell[:1])))


def _combinations(overrides: list[Override]) -> list[list[str]]:
    """The overrides of each cell. UserError for a value of which there is none, as of a glob, and for too many."""
    cells = 1
    axes: dict[str, list[str]] = {}  # of a key that is given twice, the last
    for override in overrides:
        if not override.is_sweep_override():
            values = [override.get_value_element_as_str()]
        else:
            values = list(islice(override.sweep_string_iterator(), MOST_CELLS + 1))
            cells *= len(values)
            if not values:
                raise UserError(f"sweep: {override.input_line} matches nothing, so there is no cell")
            if cells > MOST_CELLS:
                raise UserError(f"sweep: {override.input_line} makes more than {MOST_CELLS:,} cells")
        key = override.get_key_element()
        axes[key] = [f"{key}={value}" for value in values]
    return [list(cell) for cell in product(*axes.values())]


def cell_cost(config: Config) -> Cost:
    """What this run takes, by a copy, which is thrown away: the mean of a few steps after a first one; the start-up,
    with data that is there; the validations, by one of them."""
    from gnmr.lab.train.build import assemble, first_batch, train_step, validation
    from gnmr.lab.train.steps import validated

    _open_data(config)
    began = time.perf_counter()
    parts = assemble(config, run_folder(config), say)
    start_s = time.perf_counter() - began
    step, micro_batches = train_step(parts), first_batch(parts)
    times = []
    for _ in range(MEASURED_STEPS):
        began = time.perf_counter()
        step(micro_batches, config.optim.lr)
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    validated(parts, validation(config, parts.corpus, config.training.eval_sequences), 0)
    validation_s = time.perf_counter() - began
    training = config.training
    ends = {training.steps, config.total_steps, *range(training.eval_every, config.total_steps, training.eval_every)}
    return Cost(mean(times[1:]), start_s + validation_s * (len(ends) + (config.base is not None)))


def _show_arms(cells: list[Cell]) -> None:
    """A line an arm of the cells that are done, and the command for the report."""
    folders = [cell.folder for cell in cells if cell.done and cell.folder is not None]
    if not folders:
        return
    from gnmr.lab.report import arm_tables
    from gnmr.lab.report.comparisons import compare
    from gnmr.lab.report.runs import load

    if len(folders) <= MOST_SHOWN:
        with suppress(UserError, OSError):  # records that cannot be read: the report says which
            for table in arm_tables(compare(map(load, folders))):
                table.print(shared())
    say("\n".join([*activation(), f"next: {shown_command('report', os.path.commonpath(folders))}"]))


def _jobs_and_threads(n_jobs: int) -> tuple[int, int | None]:
    """Cells side by side under joblib, and the threads of each; None where there is but one at a time."""
    from joblib import cpu_count, effective_n_jobs

    if n_jobs == 0:
        raise UserError("hydra.launcher.n_jobs=0: must be 1 or more, or -1 for all cores")
    jobs = effective_n_jobs(n_jobs)
    return jobs, max(1, cpu_count() // jobs) if jobs > 1 else None


def _cost_side_by_side(workers: Workers, jobs: int, config: Config) -> Cost:
    """`cell_cost` as it is while all jobs are busy; the same workers then take the cells."""
    costs = [cost for _, cost in workers.each([partial(cell_cost, config)] * jobs) if isinstance(cost, Cost)]
    return Cost(mean(cost.step for cost in costs), mean(cost.beside for cost in costs))


def _prepare_data(cells: list[Cell]) -> None:
    """Makes the token files of all cells, each once: with a cold cache every worker would make its own."""
    asked = {}
    for cell in cells:
        if cell.config is not None and not cell.done:
            tokens = cell.config.training.steps * cell.config.training.tokens_per_step
            asked[repr((cell.config.data, cell.config.model.checkpoint, cell.config.base, tokens))] = cell.config
    for config in asked.values():
        with suppress(UserError):  # which the cells themselves will say
            _open_data(config)


def _open_data(config: Config) -> None:
    """Makes the token files of a run where they are not there; UserError for a run that cannot be."""
    from gnmr.lab.train.build import device_of, open_data
    from gnmr.lab.train.memory_bound import refuse_run

    refuse_run(config, device_of(config.training.device))
    open_data(config, say)
