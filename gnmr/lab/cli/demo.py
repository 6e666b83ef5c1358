"""`gnmr demo`: a minute of forks; the cost of low precision, and the share that each arm recovers."""

from __future__ import annotations

import io
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnmr.console import for_tables, next_lines, print_plain, showing, shown_command
from gnmr.errors import UserError, plural
from gnmr.lab.cli.parser import Parser, path, whole
from gnmr.lab.cli.side_by_side import Call, run_side_by_side

if TYPE_CHECKING:
    from gnmr.lab.config import Config

_TEXT = """\
Continues the small trained model that comes with the package in low precision, in five ways (arms): never recovering;
recovering 10% of the GEMM FLOPs at random, by the paper's controller (GNMR) or by price; and always recovering all. It
takes about a minute on two idle cores. The runs are those of `gnmr train -m sweep=demo`; finished ones are kept.
"""
_ARMS = ("never", "random", "gnmr", "price", "always")
"""Names in conf/sweep/demo.yaml."""
_LOOK_S = 0.5


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser("demo", "[orders=3] [runs_dir=runs]", _TEXT, keys=True)
    parser.option("orders", whole(1), "orders of the data: every arm runs once on each; a test needs three", 3)
    parser.option("runs_dir", path, "where the runs and the report go, in its folder demo/", Path("runs"))
    options = parser.parse(argv)
    runs_dir = options.runs_dir.expanduser()
    if options.words or options.orders is None:
        word = (options.words or ["orders=null"])[0]
        parser.error(f"{word}: it has orders=N and runs_dir=FOLDER; other arms: sweep=fork")
    if runs_dir.exists() and not runs_dir.is_dir():
        raise UserError(f"runs_dir={options.runs_dir}: is a file; name a folder")
    from gnmr.lab.train.folder import run_folder

    began, console = time.monotonic(), for_tables()
    orders = plural(options.orders, "order")
    line = f"gnmr demo: {len(_ARMS)} arms, {orders} of the data: about a minute on two idle cores"
    print_plain(console, line, by_words=console.is_terminal)
    cells = list(_cells(options.orders, runs_dir))
    _run([(words, config) for words, config in cells if not (run_folder(config) / "DONE").exists()])
    _print_result([run_folder(config) for _, config in cells], runs_dir / "demo", options.orders)
    print(f"in {time.monotonic() - began:.0f} s")
    return 0


def _cells(orders: int, runs_dir: Path) -> Iterator[tuple[list[str], Config]]:
    """Yield the words and the config of each run, all arms of one order after the other."""
    from gnmr.lab.config.compose import compose_arms

    # Composed once, which takes a while: the arms of all orders are the same.
    composed = compose_arms(["sweep=demo", f"runs_dir={runs_dir}"], _ARMS)
    for order in range(orders):  # the arms of one order end together, so that an interrupted demo compares them
        for name, config in composed.items():
            config = replace(config, training=replace(config.training, seed=order))
            yield ["sweep=demo", f"arm={name}", f"training.seed={order}"], config


def _run(cells: Sequence[tuple[list[str], Config]]) -> None:
    """Run the cells side by side. Raises RunFailed and UserError as a run does."""
    if not cells:
        return
    from gnmr.lab.train.build import open_data

    # The token files take a while the first time, and all workers read them.
    open_data(cells[0][1], lambda line: print(f"gnmr demo: {line}", flush=True))
    calls: list[Call] = [(_train, (config, words), {}) for words, config in cells]
    with _watched([config for _, config in cells]):
        run_side_by_side(calls, [" ".join(words[1:]) for words, _ in cells])


def _train(config: Config, words: Sequence[str]) -> None:
    """Train one run in a worker, without a word."""
    from gnmr.lab.train.run import run

    # The workers share one terminal, which shows their progress together.
    with redirect_stdout(io.StringIO()):
        run(config, lambda _: None, command=shlex.join(["gnmr", "train", *words]))


@contextmanager
def _watched(configs: Sequence[Config]) -> Iterator[None]:
    """Show how many steps are done, by the runs' records."""
    from gnmr.lab.train.folder import run_folder
    from gnmr.records.find import last_step

    # The workers write records only, so their progress is read from these.
    over = threading.Event()
    total = sum(config.total_steps for config in configs)

    def watch(show: Callable[[int, int | None], None]) -> None:
        show(0, total)
        while not over.wait(_LOOK_S):
            if steps := sum(last_step(run_folder(config)) for config in configs):
                show(steps, total)

    with showing("demo", "steps") as show:
        thread = threading.Thread(target=watch, args=(show,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _print_result(folders: list[Path], folder: Path, orders: int) -> None:
    """Print and write what `gnmr report` does of these runs, and say which claims they do not support."""
    from gnmr.lab.report import report

    console = for_tables()
    print_plain(console, "")
    report(folders, folder / "report", console)
    limits = f"One model, {plural(orders, 'order')} of the data: no evidence about other models or longer runs."
    print_plain(console, f"{limits} See docs/evidence.md.", by_words=console.is_terminal)
    for line in next_lines(shown_command("report", folder, "--all")):
        print_plain(console, line)
