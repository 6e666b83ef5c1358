"""`gnmr demo`: a minute of forks; what low precision costs, and what each way of recovering gets back of it."""

from __future__ import annotations

import io
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnmr.cli.progress import showing
from gnmr.cli.words import Parser, path, whole
from gnmr.console import NARROW, activation, for_tables, print_plain, shown_command
from gnmr.errors import RunFailed, UserError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from gnmr.lab.config import Config
    from gnmr.lab.report.recovered import Recovered

_TEXT = """\
Forks of the small trained model that comes with the package, all on the same low path: never recovering; recovering a
tenth of the arithmetic at random, by the paper's controller (GNMR) or by price; and recovering everything. About a
minute on two idle cores. The runs are those of `gnmr train -m sweep=demo`; what is done already is not run again.
"""
_ARMS = {
    "never": "never recovering",
    "random": "random",
    "gnmr": "GNMR, the paper's",
    "price": "price",
    "everything": "everything recovered",
}
"""Name in conf/sweep/demo.yaml: what it is shown as."""
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
    from gnmr.lab.train.folder import run_folder

    began = time.monotonic()
    told = f"gnmr demo: {len(_ARMS)} arms, {given.orders} orders of the data: about a minute on two idle cores"
    print_plain(console := for_tables(), told, by_words=console.is_terminal)
    cells = list(_cells(given.orders, given.runs_dir.expanduser()))
    _run([(words, config) for words, config in cells if not (run_folder(config) / "DONE").exists()])
    _tell([run_folder(config) for _, config in cells], given.runs_dir.expanduser() / "demo", given.orders)
    print(f"in {time.monotonic() - began:.0f} s")
    return 0


def _cells(orders: int, runs_dir: Path) -> Iterator[tuple[list[str], Config]]:
    """Yield the words and the config of each run, all arms of one order after the other."""
    from gnmr.lab.config.compose import compose

    composed = {name: compose(["sweep=demo", f"arm={name}", f"runs_dir={runs_dir}"]) for name in _ARMS}
    for order in range(orders):
        for name, config in composed.items():
            config = replace(
                config, training=replace(config.training, seed=order), fork=replace(config.fork, order=order)
            )
            yield ["sweep=demo", f"arm={name}", f"fork.order={order}"], config


def _run(cells: Sequence[tuple[list[str], Config]]) -> None:
    """Run the cells side by side. Raises RunFailed and UserError as a run does."""
    import joblib
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    if not cells:
        return
    jobs = min(os.cpu_count() or 1, len(cells))
    _prepare(cells[0][1])
    try:
        with _watched([config for _, config in cells]):
            joblib.Parallel(jobs)(joblib.delayed(_run_one)(config, words) for words, config in cells)
    except TerminatedWorkerError as error:
        raise RunFailed("a worker process was ended; the same command continues") from error


def _prepare(config: Config) -> None:
    """Make the token files, which takes a while the first time."""
    from gnmr.lab.train.build import open_data

    open_data(config, lambda line: print(f"gnmr demo: {line}", flush=True))


def _run_one(config: Config, words: Sequence[str]) -> None:
    """Train one run in a worker, without a word."""
    from gnmr.lab.train.run import run

    with redirect_stdout(io.StringIO()):
        run(config, lambda _: None, command=shlex.join(["gnmr", "train", *words]))


@contextmanager
def _watched(configs: Sequence[Config]) -> Iterator[None]:
    """Show how many steps are done, by the runs' records."""
    from gnmr.lab.sweep import last_step
    from gnmr.lab.train.folder import run_folder

    over = threading.Event()
    total = sum(config.total_steps for config in configs)

    def watch(show: Callable[[int, int | None], None]) -> None:
        while not over.wait(_LOOK_S):
            if made := sum(last_step(run_folder(config)) for config in configs):
                show(made, total)

    with showing("demo", "steps") as show:
        thread = threading.Thread(target=watch, args=(show,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _tell(folders: list[Path], folder: Path, orders: int) -> None:
    """Five lines, a verdict, a picture and a page, from the records."""
    from gnmr.console import Terminal
    from gnmr.lab.paper.tables import paper_tables
    from gnmr.lab.report import report
    from gnmr.lab.report.recovered import draw
    from gnmr.lab.report.runs import load

    run = load(folders[0])
    found = found_in(folders)
    if found is None:
        raise UserError(
            f"{folder}: no gap between never and always, so there is nothing to get back: gnmr report {folder}"
        )
    page, picture = folder / "report" / "demo.html", folder / "report" / "demo.svg"
    quiet = Terminal(file=io.StringIO())
    report(folders, folder / "report", quiet, plots=False, html=page, further=paper_tables)
    steps = run.planned_steps
    draw(found, picture, _title(found), f"{orders} orders of the data, {steps} steps · commit {run.commit}")
    console = for_tables()
    number = run.header.get("parameters")
    size = f" of {number / 1e6:.1f} M parameters" if isinstance(number, int) else ""
    show(found, f"{steps} steps from a trained model{size}; {run.machine}", console)
    for what, place in (("picture", picture), ("page", page), ("tables", shown_command("report", folder))):
        if what == "tables" and (first := activation()):
            print_plain(console, first[0])
        print_plain(console, printable(f"{what + ':':9}{place}"))


def found_in(folders: Iterable[Path]) -> Recovered | None:
    """What the arms got back; None where an arm is missing, or where there is no gap."""
    from gnmr.lab.report.comparisons import compare
    from gnmr.lab.report.recovered import by_name, recovered
    from gnmr.lab.report.runs import load

    comparisons = compare(map(load, folders))
    arms = by_name(comparisons[0].arms, _ARMS)
    if len(comparisons) > 1 or len(arms) < len(_ARMS):
        return None
    return recovered(arms, control=_ARMS["random"])


def show(found: Recovered, of: str, console: Console) -> None:
    """What it cost, a line an arm, what these few runs can show. of: which runs."""
    from gnmr.lab.report.recovered import shown

    print_plain(console, f"\n{_title(found)} ({of}).", by_words=console.is_terminal)
    console.print(shown(found, narrow=console.width < NARROW))
    print_plain(console, f"\n{_words(found)}", by_words=console.is_terminal)


def _title(found: Recovered) -> str:
    return f"2-bit inputs cost {found.cost}"


def _words(found: Recovered) -> str:
    return (
        f"{found.verdict} One base, {found.orders} order{'s' * (found.orders > 1)} of the data: it says nothing of "
        "other models, of longer runs or of the paper's scales (docs/evidence.md)."
    )
