"""The cells of a sweep, seen through their records, and what there is to say of them."""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import mean

from gnmr.config import Config, config_hash, identity
from gnmr.terminal import say
from gnmr.training.folder import run_folder

MEASURED_STEPS = 3
_LOOK_S = 1.0  # between two looks at the cells' records
_SAY_S = 60.0  # between two lines while no cell ends
_TAIL_BYTES = 1 << 16  # holds a row of steps.jsonl many times over


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
        if not by_arm and config is not None and left > 10 * MEASURED_STEPS:
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
        """How it ended, and a line for each cell that failed or was begun and not finished."""
        unfinished = self.unfinished()
        rest = f", {len(unfinished)} not finished (the same command continues)" if unfinished else ""
        told = [(cell, cell.failure) for cell in self.cells if cell.failure is not None]
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


def _cells(number: int) -> str:
    return f"{number} cell" if number == 1 else f"{number} cells"


def _hms(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
