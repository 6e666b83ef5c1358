"""`gnmr demo`: a minute of forks; what low precision costs, and what each way of recovering gets back of it."""

from __future__ import annotations

import io
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.cli.progress import showing
from gnmr.cli.words import Parser, path, whole
from gnmr.console import Terminal, activation, for_tables, print_plain, shown_command
from gnmr.errors import RunFailed, UserError, printable

if TYPE_CHECKING:
    from gnmr.lab.config import Config
    from gnmr.lab.sweep.progress import Cell

_TEXT = """\
Forks of the small trained model that comes with the package, all on the same low path: never recovering; recovering a
tenth of the arithmetic at random, by the paper's controller (GNMR) or by price; and recovering everything. About a
minute on two idle cores. The runs are those of `gnmr train -m sweep=demo`; what is done already is not run again.
"""
_ARMS = ("never", "random", "gnmr", "price", "everything")
"""Names in conf/sweep/demo.yaml."""
_LOOK_S = 0.5


def main(argv: list[str]) -> int:
    """The command; returns its exit code."""
    parser = Parser("demo", "[orders=3] [runs_dir=runs]", _TEXT, keys=True)
    parser.option(
        "orders", whole(1), "orders of the data, each a run of every arm; three are the least that can show", 3
    )
    parser.option("runs_dir", path, "where the runs and the report go, in its folder demo/", Path("runs"))
    given = parser.parse(argv)
    if given.words or given.orders is None:
        parser.error(
            f"{(given.words or ['orders=null'])[0]}: it has orders=N and runs_dir=FOLDER; other arms: sweep=fork"
        )
    if given.runs_dir.expanduser().exists() and not given.runs_dir.expanduser().is_dir():
        raise UserError(f"runs_dir={given.runs_dir}: is a file; name a folder")
    began = time.monotonic()
    told = f"gnmr demo: {len(_ARMS)} arms, {given.orders} orders of the data: about a minute on two idle cores"
    print_plain(console := for_tables(), told, by_words=console.is_terminal)
    cells = list(_cells(given.orders, given.runs_dir.expanduser()))
    _run([cell for cell in cells if not cell.done])
    _tell(cells, given.runs_dir.expanduser() / "demo", given.orders)
    print(f"in {time.monotonic() - began:.0f} s")
    return 0


def _cells(orders: int, runs_dir: Path) -> Iterator[Cell]:
    """The runs, all arms of an order after the other."""
    from omegaconf import OmegaConf

    from gnmr.lab.config.compose import compose, conf_dir
    from gnmr.lab.config.overrides import arm_words
    from gnmr.lab.sweep.progress import Cell

    arms = OmegaConf.load(conf_dir() / "sweep" / "demo.yaml").hydra.sweeper.arms
    composed = {name: compose(["sweep=demo", *arm_words(name, arms[name])]) for name in _ARMS}
    for order in range(orders):
        for name, config in composed.items():
            of_order = replace(config.training, seed=order)
            config = replace(config, training=of_order, fork=replace(config.fork, order=order), runs_dir=str(runs_dir))
            yield Cell(["sweep=demo", *arm_words(name, arms[name]), f"fork.order={order}"], config, order)


def _run(cells: Sequence[Cell]) -> None:
    """Runs them side by side. RunFailed and UserError as a run; SystemExit where a signal came."""
    from gnmr.lab.sweep.workers import Workers

    if not cells:
        return
    jobs = min(os.cpu_count() or 1, len(cells))
    with Workers(jobs) as workers:
        configs = [cell.config for cell in cells if cell.config is not None]
        warm_up: list[Callable[[], None]] = [partial(_prepare, configs[0]), *[_load_torch] * (jobs - 1)]
        for _, error in workers.each(warm_up):
            _raise(error)
        with _watched(cells):
            runs = [partial(_run_one, config, cell.words) for config, cell in zip(configs, cells, strict=True)]
            for _, error in workers.each(runs):
                _raise(error)
    if workers.received:
        raise SystemExit(128 + workers.received[0])


def _raise(returned: Any) -> None:
    """What a worker raised; its death is a RunFailed."""
    from concurrent.futures.process import BrokenProcessPool

    from gnmr.lab.sweep.workers import how_it_ended

    if isinstance(returned, BrokenProcessPool):
        raise RunFailed(f"{how_it_ended(returned)}; the same command continues")
    if isinstance(returned, BaseException):
        raise returned


def _prepare(config: Config) -> None:
    """In a worker: makes the token files, which takes a while the first time."""
    from gnmr.lab.train.build import open_data

    open_data(config, lambda line: print(f"gnmr demo: {line}", flush=True))


def _load_torch() -> None:
    """In a worker, while another one prepares the data."""
    import gnmr.lab.train.run  # noqa: F401


def _run_one(config: Config, words: Sequence[str]) -> None:
    """In a worker: one run, without a word."""
    from gnmr.lab.train.run import run

    with redirect_stdout(io.StringIO()):
        run(config, lambda _: None, command=shlex.join(["gnmr", "train", *words]))


@contextmanager
def _watched(cells: Sequence[Cell]) -> Iterator[None]:
    """Shows how many steps are done, by their records."""
    over = threading.Event()
    total = sum(cell.steps for cell in cells)

    def watch(show: Callable[[int, int | None], None]) -> None:
        while not over.wait(_LOOK_S):
            for cell in cells:
                cell.look()
            if made := sum(cell.made for cell in cells):
                show(made, total)

    with showing("demo", "steps") as show:
        thread = threading.Thread(target=watch, args=(show,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _tell(cells: Sequence[Cell], folder: Path, orders: int) -> None:
    """Print the sentence and the table of `gnmr report`, and write its files."""
    from gnmr.lab.report import arm_tables, report
    from gnmr.lab.report.comparisons import compare
    from gnmr.lab.report.headline import headline
    from gnmr.lab.report.runs import load

    folders = [cell.folder for cell in cells if cell.folder is not None]
    report(folders, folder / "report", Terminal(file=io.StringIO()))
    console = for_tables()
    (comparison,) = compare(map(load, folders))
    print_plain(console, f"\n{headline(comparison).sentence}\n", by_words=console.is_terminal)
    for table in arm_tables([comparison]):
        table.print(console)
    of = f"{orders} order{'s' * (orders > 1)} of the data"
    limits = f"One model, {of}: no evidence about other models or longer runs. See docs/evidence.md."
    print_plain(console, limits, by_words=console.is_terminal)
    print_plain(console, printable(f"page: {folder / 'report' / 'report.html'}"))
    for line in (*activation(), shown_command("report", folder)):
        print_plain(console, line)
