"""The cells of a sweep, seen through their records, and what there is to say of them."""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean

from rich.progress_bar import ProgressBar
from rich.table import Table

from gnmr.console import Picture, say, shared
from gnmr.lab.config import Config, config_hash, identity
from gnmr.lab.train.folder import run_folder

MEASURED_STEPS = 3
_LOOK_S = 1.0  # between two looks at the cells' records
_SAY_S = 60.0  # between two lines while no cell ends
_TAIL_BYTES = 1 << 16  # holds a row of steps.jsonl many times over


@dataclass(frozen=True)
class Cost:
    """What a cell takes, in seconds."""

    step: float
    """A step of it."""
    beside: float = 0.0
    """All of it that is no step: start-up and validations."""


class Cell:
    """One run of the sweep, seen through its folder."""

    def __init__(self, words: list[str], config: Config | None, number: int) -> None:
        """words: its overrides. config: None if they make no sense, which the run itself will say."""
        self.words, self.config, self.number = words, config, number
        self.folder = None if config is None else run_folder(config)
        self.steps = 0 if config is None else config.total_steps
        self.made = 0
        """Steps in its records when last looked at."""
        self.done = False
        self.failure: str | None = None
        """Why it failed in this sweep; an earlier FAILED does not count, the cell runs again."""
        self.lost: str | None = None
        """What became of its worker, which ended in the middle of it."""
        self._earlier = self._failed_at()
        self.look()
        self._told = self.done

    @property
    def ended(self) -> bool:
        """Whether nothing is left to run of it in this sweep."""
        return self.done or self.failure is not None or self.lost is not None

    @property
    def unfinished(self) -> bool:
        """Neither done nor failed, by its records."""
        return not self.done and self.failure is None

    def is_run_of(self, other: Cell) -> bool:
        """Whether both are one run, which may be kept or watched in two ways. Two in one folder may be different."""
        if self.config is None or other.config is None:
            return False
        seeds = self.config.training.seed, other.config.training.seed
        return self.folder == other.folder and seeds[0] == seeds[1] and identity(self.config) == identity(other.config)

    def look(self) -> int:
        """Reads the folder again; returns the steps made since the last look."""
        if self.folder is None or self.failure is not None:
            return 0
        before = self.made
        self.done = os.path.exists(self.folder / "DONE")  # also of a folder that cannot be read: the run will say so
        self.made = self.steps if self.done else last_step(self.folder)
        if self._failed_at() not in (None, self._earlier):
            self.failure = (self.folder / "FAILED").read_text().strip()
        return max(0, self.made - before)  # a cell that continues drops the rows after its checkpoint first

    def step_seconds(self) -> float | None:
        """Mean time of its recorded steps; None before its first end, and where its summary cannot be read."""
        from gnmr.records.reader import read_json  # with pyarrow, which only this needs

        summary = None
        with suppress(OSError, ValueError):
            summary = None if self.folder is None else read_json(self.folder / "summary.json")
        return summary["wall_time_s"] / summary["steps"] if summary and summary["steps"] else None

    def line(self) -> str | None:
        """How a cell that is done has ended, once; None before, and of one that was done before this sweep."""
        if not self.done or self._told or self.folder is None:
            return None
        self._told = True
        return f"#{self.number} {'  '.join([self.folder.name, *_figures(self.folder)])}"

    def _failed_at(self) -> int | None:
        with suppress(OSError):
            return (self.folder / "FAILED").stat().st_mtime_ns if self.folder else None
        return None


def _figures(folder: Path) -> list[str]:
    """What the summary of a run that is done says in a few words; nothing where it cannot be read."""
    from gnmr.records.reader import read_json

    told = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        summary = read_json(folder / "summary.json") or {}
        if (ppl := summary["final_val_ppl"]) is not None:
            told.append(f"ppl {ppl:.2f}")
        if (sent := summary.get("numbers_sent_frac")) is not None:  # what recovery costs where gradients are compressed
            told.append(f"sent {sent:.1%}")
        elif (spent := summary["spent_gemm_frac"]) is not None:
            told.append(f"spent {spent:.1%}")
        told.append(_hms(summary["wall_time_s"]))
    return told


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


class Progress:
    """Says how far the cells are, while it is entered as a context: a line for each that is done; the whole, on a
    terminal, by a bar below the lines, elsewhere behind these lines and once a minute between them."""

    def __init__(self, cells: list[Cell], jobs: int) -> None:
        """jobs: cells side by side."""
        self.cells, self.jobs = cells, jobs
        self._done_before = sum(cell.done for cell in cells)
        self.began = self._looked = time.monotonic()
        self._made, self._busy_s = 0, 0.0
        self._cost: Cost | None = None  # expected beforehand
        self._whole_step_s: float | None = None  # a step's share of whole cells, of those that ended here
        self._first: tuple[int, float] | None = None  # steps made and time spent when the first ones were seen
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._picture: Picture | None = None

    def opening(self, measure: Callable[[Config], Cost]) -> str:
        """What there is to do and about how long it will take.

        By the recorded steps of cells of the same arm, else of all arms; what is beside the steps has no record. Where
        there are none, by `measure` of the first cell to do, unless so few steps are left that measuring would take as
        long.
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
        source, by_arm = "in steps alone, as recorded", {arm: Cost(mean(times)) for arm, times in recorded.items()}
        config = next((cell.config for cell in todo if cell.config is not None), None)
        if not by_arm and config is not None and left > 10 * MEASURED_STEPS:
            with suppress(Exception):  # the cell itself will say what is wrong with it
                source, by_arm = "measured", {config_hash(config): measure(config)}
        if not by_arm or left == 0:
            return line
        costs = by_arm.values()
        usual = self._cost = Cost(mean(cost.step for cost in costs), mean(cost.beside for cost in costs))
        pieces = [_left(cell, by_arm.get(config_hash(cell.config), usual)) for cell in todo if cell.config]
        return f"{line}: about {_hms(makespan(pieces, self.jobs))} ({usual.step:.3g} s a step, {source})"

    def look(self, now: float) -> None:
        """Reads all cells again; now: `time.monotonic()`."""
        self._busy_s += (now - self._looked) * self._running()
        self._looked = now
        done = self._done()
        self._made += sum(cell.look() for cell in self.cells)
        if self._made and self._first is None:
            self._first = self._made, self._busy_s
        if self._done() > done and self._made >= max(cell.steps for cell in self.cells):  # not the rest of one alone
            self._whole_step_s = self._busy_s / self._made

    def seconds_left(self) -> float | None:
        """By what whole cells took here, start-up and validations and all.

        Before the first of them is done by the time of steps, from the first one seen on, so without the preparing of
        data, and what was expected beside them; before that by what was expected alone. None where nothing was, and
        where all steps are made.
        """
        cost = self._cost
        if self._whole_step_s is not None:
            cost = Cost(self._whole_step_s)
        elif self._first is not None and self._made - self._first[0] >= MEASURED_STEPS:
            step = (self._busy_s - self._first[1]) / (self._made - self._first[0])
            cost = Cost(step, 0.0 if cost is None else cost.beside)
        made, total = self._steps()
        if cost is None or made == total:
            return None
        return makespan([_left(cell, cost) for cell in self._todo()], self.jobs)

    def line(self) -> str:
        """How far it is, and the time left."""
        made, total = self._steps()
        line = (
            f"sweep: {self._count()}, {self._running()} running, {made:,} of {total:,} steps "
            f"({made / max(total, 1):.0%})"
        )
        seconds = self.seconds_left()
        return line if seconds is None else f"{line}, about {_hms(seconds)} left"

    def bar(self) -> Table:
        """The same as a bar: steps, cells and the time left, in one line of any terminal from 50 columns on."""
        made, total = self._steps()
        seconds, failed = self.seconds_left(), sum(cell.failure is not None for cell in self.cells)
        told = f"{self._done()}/{len(self.cells)} cells{f', {failed} failed' if failed else ''}"
        told += "" if seconds is None else f"  {_hms(seconds)} left"
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row("sweep", ProgressBar(total=max(total, 1), completed=made), told)
        return grid

    def closing(self) -> list[str]:
        """How it ended, and a line for each cell that failed or was begun and not finished."""
        unfinished = self.unfinished()
        rest = f", {len(unfinished)} not finished (the same command continues)" if unfinished else ""
        first: dict[str, int] = {}  # by why cells failed
        told = []
        for cell in (cell for cell in self.cells if cell.failure is not None):
            number = first.setdefault(str(cell.failure), cell.number)
            told.append((cell, cell.failure if number == cell.number else f"as #{number}"))
        for cell in unfinished:
            if cell.lost or cell.made:
                told.append((cell, f"not finished: {cell.lost or f'stopped after step {cell.made}'}"))
        return [
            f"sweep: {self._count()}{rest}, in {_hms(time.monotonic() - self.began)}",
            *(f"  {cell.folder or f'#{cell.number}'}: {why}" for cell, why in told),
        ]

    def unfinished(self) -> list[Cell]:
        """The cells that the same command would go on with."""
        return [cell for cell in self.cells if cell.unfinished]

    def __enter__(self) -> Progress:
        self._looked = time.monotonic()  # measuring, and the data that it prepared, are no cell's time
        if shared().is_terminal and not shared().is_dumb_terminal:
            self._picture = Picture(get_renderable=self.bar, console=shared(), refresh_per_second=4, transient=True)
            with suppress(BrokenPipeError):  # the terminal is gone
                self._picture.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._picture is not None:
            with suppress(BrokenPipeError):
                self._picture.stop()
        self.look(time.monotonic())
        self._say_done()

    def _watch(self) -> None:
        said = time.monotonic()
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            self.look(now)
            if self._say_done():
                said = now
            elif self._picture is None and now - said >= _SAY_S:
                said = now
                say(self.line(), by_words=True)

    def _say_done(self) -> bool:
        """A line for each cell that is done now; whether there was any."""
        lines = [line for cell in self.cells if (line := cell.line()) is not None]
        if lines and self._picture is None and self._todo():
            lines[-1] += f"; {self.line()}"
        for line in lines:
            say(line, by_words=True)
        return bool(lines)

    def _todo(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.ended]

    def _running(self) -> int:
        return min(self.jobs, len(self._todo()))

    def _done(self) -> int:
        return sum(cell.done for cell in self.cells)

    def _steps(self) -> tuple[int, int]:
        """Made, and in all; what a failed cell will not do is in neither."""
        made = sum(cell.made for cell in self.cells)
        return made, made + sum(cell.steps - cell.made for cell in self._todo())

    def _count(self) -> str:
        failed = sum(cell.failure is not None for cell in self.cells)
        before = f" ({self._done_before} before)" if self._done_before else ""
        return f"{self._done()} of {_cells(len(self.cells))} done{before}, {failed} failed"


def _left(cell: Cell, cost: Cost) -> float:
    """Seconds of a cell that are left; of what is beside the steps, as much as of these."""
    left = cell.steps - cell.made
    return left * cost.step + cost.beside * left / max(cell.steps, 1)


def _cells(number: int) -> str:
    return f"{number} cell" if number == 1 else f"{number} cells"


def _hms(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
