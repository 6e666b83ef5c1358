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

import heapq
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from gnmr.config import Config, config_hash, identity
from gnmr.errors import UserError
from gnmr.launch import load_composed, say
from gnmr.training.folder import run_folder

_LOOK_S = 1.0  # between two looks at the cells' records
_SAY_S = 60.0  # between two lines while no cell ends
_WATCH_S = 0.25  # between a worker's looks at its parent
_MEASURED_STEPS = 3
_TAIL_BYTES = 1 << 16  # holds a row of steps.jsonl many times over

T = TypeVar("T")


class Cell:
    """One run of the sweep, seen through its folder."""

    def __init__(self, words: list[str], config: Config | None, number: int) -> None:
        """words: its overrides. config: None if they make no sense, which the run itself will say."""
        self.words, self.config, self.number = words, config, number
        self.folder = None if config is None else run_folder(config)
        self.steps = 0 if config is None else config.training.steps
        self.made = 0
        """Steps in its records when last looked at."""
        self.done = False
        self.failure: str | None = None
        """Why it failed in this sweep; an earlier FAILED does not count, the cell runs again."""
        self._earlier = self._failed_at()
        self.look()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to run of it."""
        return self.done or self.failure is not None

    def is_run_of(self, other: Cell) -> bool:
        """Whether both are one run, which may be kept or watched in two ways. Two in one folder may be different."""
        if self.config is None or other.config is None:
            return False
        seeds = self.config.training.seed, other.config.training.seed
        return self.folder == other.folder and seeds[0] == seeds[1] and identity(self.config) == identity(other.config)

    def look(self) -> int:
        """Reads the folder again; returns the steps made since the last look."""
        if self.folder is None or self.ended:
            return 0
        before = self.made
        self.done = (self.folder / "DONE").exists()
        self.made = self.steps if self.done else last_step(self.folder)
        if self._failed_at() not in (None, self._earlier):
            self.failure = (self.folder / "FAILED").read_text().strip()
        return max(0, self.made - before)  # a cell that continues drops the rows after its checkpoint first

    def step_seconds(self) -> float | None:
        """Mean time of its recorded steps; None before its first end."""
        from gnmr.records.reader import read_json

        summary = None if self.folder is None else read_json(self.folder / "summary.json")
        return summary["wall_time_s"] / summary["steps"] if summary and summary["steps"] else None

    def _failed_at(self) -> int | None:
        with suppress(OSError):
            return (self.folder / "FAILED").stat().st_mtime_ns if self.folder else None
        return None


def last_step(folder: Path) -> int:
    """Step of the last whole row of steps.jsonl, read from its end; 0 if there is none."""
    try:
        with (folder / "steps.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def makespan(pieces: Sequence[float], jobs: int) -> float:
    """When the last of `jobs` workers is free if they take the pieces (seconds) in this order, each when it can."""
    free_at = [0.0] * jobs
    for piece in pieces:
        heapq.heapreplace(free_at, free_at[0] + piece)
    return max(free_at)


def step_seconds(config: Config) -> float:
    """Seconds that a step of this run takes: mean of a few steps of a copy, which is thrown away, after a first one."""
    from gnmr.bench.steps import batch
    from gnmr.training.parts import assemble, train_step

    parts = assemble(config, run_folder(config), say)
    step, micro_batches = train_step(parts), batch(parts)
    times = []
    for _ in range(_MEASURED_STEPS):
        began = time.perf_counter()
        step(micro_batches, config.optim.lr)
        times.append(time.perf_counter() - began)
    return mean(times[1:])


class Progress:
    """Says how far the cells are: once a minute and whenever one ends, while it is entered as a context."""

    def __init__(self, cells: list[Cell], jobs: int) -> None:
        """jobs: cells side by side."""
        self.cells, self.jobs = cells, jobs
        self._done_before = sum(cell.done for cell in cells)
        self.began = self._looked = time.monotonic()
        self._made, self._busy_s = 0, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def opening(self, measure: Callable[[Config], float]) -> str:
        """What there is to do and about how long it will take.

        By the recorded steps of cells of the same arm, else of all arms. Where there are none, by `measure` of the
        first cell to do, unless so few steps are left that measuring would take as long.
        """
        todo, steps = self._todo(), sum(cell.steps for cell in self.cells)
        left = sum(cell.steps - cell.made for cell in todo)
        line = f"sweep: {_cells(len(self.cells))}, {self._done_before} done already, {left:,} of {steps:,} steps to do"
        line += f", {self.jobs} cells side by side" if self.jobs > 1 else ""
        recorded: dict[str, list[float]] = {}
        for cell in self.cells:
            seconds = cell.step_seconds()
            if seconds is not None and cell.config is not None:
                recorded.setdefault(config_hash(cell.config), []).append(seconds)
        source, by_arm = "recorded", {arm: mean(times) for arm, times in recorded.items()}
        config = next((cell.config for cell in todo if cell.config is not None), None)
        if not by_arm and config is not None and left > 10 * _MEASURED_STEPS:
            with suppress(Exception):  # the cell itself will say what is wrong with it
                source, by_arm = "measured", {config_hash(config): measure(config)}
        if not by_arm or left == 0:
            return line
        usual = mean(by_arm.values())
        pieces = [
            (cell.steps - cell.made) * by_arm.get(config_hash(cell.config), usual) for cell in todo if cell.config
        ]
        return f"{line}: about {_hms(makespan(pieces, self.jobs))} ({usual:.3g} s a step, {source})"

    def look(self, now: float) -> None:
        """Reads all cells again; now: `time.monotonic()`."""
        self._busy_s += (now - self._looked) * self._running()
        self._looked = now
        self._made += sum(cell.look() for cell in self.cells)

    def line(self) -> str:
        """How far it is; time left by the steps that all cells made since the start."""
        todo = self._todo()
        made, left = sum(cell.made for cell in self.cells), [cell.steps - cell.made for cell in todo]
        total = made + sum(left)
        line = (
            f"sweep: {self._count()}, {self._running()} running, {made:,} of {total:,} steps "
            f"({made / max(total, 1):.0%})"
        )
        if not self._made:
            return line
        return f"{line}, about {_hms(makespan(left, self.jobs) * self._busy_s / self._made)} left"

    def closing(self) -> list[str]:
        """How it ended, and a line for each cell that failed."""
        unfinished = len(self._todo())
        rest = f", {unfinished} not finished (the same command continues)" if unfinished else ""
        return [
            f"sweep: {self._count()}{rest}, in {_hms(time.monotonic() - self.began)}",
            *(f"  {c.folder or f'#{c.number}'}: {c.failure}" for c in self.cells if c.failure is not None),
        ]

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look(time.monotonic())

    def _watch(self) -> None:
        said, ended = time.monotonic(), len(self.cells) - len(self._todo())
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            self.look(now)
            before, ended = ended, len(self.cells) - len(self._todo())
            if ended != before or now - said >= _SAY_S:
                said = now
                with suppress(BrokenPipeError):  # nobody reads any more
                    say(self.line())

    def _todo(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.ended]

    def _running(self) -> int:
        return min(self.jobs, len(self._todo()))

    def _count(self) -> str:
        done = sum(cell.done for cell in self.cells)
        failed = sum(cell.failure is not None for cell in self.cells)
        before = f" ({self._done_before} before)" if self._done_before else ""
        return f"{done} of {_cells(len(self.cells))} done{before}, {failed} failed"


class Sweep(Sweeper):
    """Every combination of the values, as Hydra's basic sweeper, with the lines of `Progress`."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None) -> None:
        """Hydra's options: cells that the launcher gets at once (None: all), and the config's own axes."""
        self._max_batch_size, self._params = max_batch_size, params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Raises the first cell's failure, when all cells have ended, or SystemExit where it was stopped."""
        assert self.hydra_context is not None and self.config is not None and self.launcher is not None
        parser = OverridesParser.create(self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*(f"{key}={values}" for key, values in self._params.items()), *arguments])
        sweep_dir = Path(self.config.hydra.sweep.dir)
        sweep_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, sweep_dir / "multirun.yaml")

        options = getattr(self.launcher, "joblib", None)  # of the joblib launcher: what `joblib.Parallel` takes
        jobs, threads = (1, None) if options is None else _jobs_and_threads(options["n_jobs"])
        cells: list[Cell] = []
        for words in BasicSweeper.split_arguments(overrides, None)[0]:
            cell = self._cell(words, len(cells), threads)
            twin = next((other for other in cells if cell.is_run_of(other)), None)  # no run twice
            if twin is None:
                cells.append(cell)
            elif cell.config != twin.config:
                both = {*cell.words} & {*twin.words}
                mine, its = (" ".join(word for word in one.words if word not in both) for one in (cell, twin))
                say(f"sweep: {mine} makes the run of {its} again: left out")
        jobs = min(jobs, len(cells))
        measure = step_seconds
        if options is not None:
            # No worker without a cell, and no cells in one parcel, which joblib makes of those that end at once.
            options |= {"n_jobs": jobs, "batch_size": 1, "backend": "loky"}
            if jobs > 1:
                measure = lambda config: _step_seconds_side_by_side(config, options)
                _prepare_data(cells)

        errors, received = [], list[int]()
        with _stoppable() if jobs > 1 else nullcontext(received) as received:
            progress = Progress(cells, jobs)
            say(progress.opening(measure))
            try:
                with progress:
                    size = self._max_batch_size or len(cells)
                    for batch in (cells[i : i + size] for i in range(0, len(cells), size)):
                        returns = self.launcher.launch([cell.words for cell in batch], batch[0].number)
                        for cell, returned in zip(batch, returns, strict=True):
                            if isinstance(returned._return_value, Exception):
                                cell.failure = " ".join(str(returned._return_value).split())
                                errors.append(returned._return_value)
            finally:
                say("\n".join(progress.closing()))
        if received:
            raise SystemExit(128 + received[0])
        if errors:
            raise errors[0]

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


def _jobs_and_threads(n_jobs: int) -> tuple[int, int | None]:
    """Cells side by side under joblib, and the threads of each; None where there is but one at a time."""
    from joblib import cpu_count, effective_n_jobs

    jobs = effective_n_jobs(n_jobs)
    return jobs, max(1, cpu_count() // jobs) if jobs > 1 else None


def _step_seconds_side_by_side(config: Config, options: dict[str, Any]) -> float:
    """`step_seconds` as it is while all jobs are busy; the same workers then take the cells."""
    from joblib import Parallel, delayed

    measure = delayed(in_worker)(partial(step_seconds, config), os.getpid())
    return mean(Parallel(**options)([measure] * options["n_jobs"]))


def _prepare_data(cells: list[Cell]) -> None:
    """Makes the token files of all cells, each once: with a cold cache every worker would make its own."""
    from gnmr.training.parts import open_data

    asked = {}
    for cell in cells:
        if cell.config is not None and not cell.done:
            tokens = cell.config.training.steps * cell.config.training.tokens_per_step
            asked[repr((cell.config.data, cell.config.model.checkpoint, tokens))] = cell.config
    for config in asked.values():
        with suppress(UserError):  # which the cells themselves will say
            open_data(config, say)


def _cells(number: int) -> str:
    return f"{number} cell" if number == 1 else f"{number} cells"


def _hms(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


# ---- stopping: the sweep's process and its workers ----


def _stop_file(parent: int) -> Path:
    """Where the sweep of process `parent` tells its workers to stop."""
    return Path(tempfile.gettempdir(), f"gnmr-stop-{os.getuid()}-{parent}")


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Collects Ctrl-C or SIGTERM and tells the workers; a second one of either kind acts as usual.

    Dying at once would not do: joblib kills its workers then, and what they made since their checkpoints is lost.
    """
    stop = _stop_file(os.getpid())
    stop.unlink(missing_ok=True)  # of a process of the same number, which was killed
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
        restore()
        stop.touch()
        say("sweep: stopping, each cell that runs saves a checkpoint first")

    def restore() -> None:
        for number, old in before.items():
            signal.signal(number, old)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        restore()
        stop.unlink(missing_ok=True)


def in_worker(work: Callable[[], T], parent: int) -> T | None:
    """`work()` in a worker of the sweep of process `parent`.

    When that is gone, or stops, the worker sends itself SIGTERM, at which a run saves a checkpoint and ends: None.
    Without its parent the worker ends too.
    """
    watch = _watch(parent)
    if watch.stop_file.exists():
        return None
    before = signal.signal(signal.SIGTERM, watch.end)  # for the time before the run's own handler
    watch.begin()
    try:
        return work()
    except SystemExit:
        if not watch.told:
            raise
        return None
    finally:
        watch.finish()
        signal.signal(signal.SIGTERM, before)


class _Watch(threading.Thread):
    """A worker's look at its parent, four times a second for as long as it lives: nothing else tells a loky worker
    that its parent was killed."""

    def __init__(self, parent: int) -> None:
        super().__init__(daemon=True)
        self.stop_file = _stop_file(parent)
        self._parent = parent
        self._lock = threading.Lock()
        self._busy = False
        self.told = False
        """SIGTERM was sent: once, because a second one would end the run without its checkpoint."""

    def begin(self) -> None:
        with self._lock:
            self._busy, self.told = True, False

    def finish(self) -> None:
        with self._lock:
            self._busy = False
            self._end_if_orphaned()

    def end(self, number: int, _frame: object) -> None:
        """Handler of SIGTERM."""
        if self._busy:
            raise SystemExit(128 + number)

    def run(self) -> None:
        while True:
            with self._lock:
                if not self._busy:
                    self._end_if_orphaned()
                elif not self.told and (os.getppid() != self._parent or self.stop_file.exists()):
                    self.told = True
                    os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_WATCH_S)

    def _end_if_orphaned(self) -> None:
        if os.getppid() != self._parent:
            os._exit(128 + signal.SIGTERM)


@cache
def _watch(parent: int) -> _Watch:
    with suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the parent, which tells the workers
    watch = _Watch(parent)
    watch.start()
    return watch
