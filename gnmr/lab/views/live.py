"""The live view of a run: a picture on a terminal, plain lines elsewhere, or log.txt for a run of a sweep."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich import box, filesize
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gnmr.console import NARROW, Picture, print_plain, shared
from gnmr.errors import plural
from gnmr.records.disk import no_link
from gnmr.records.schema import UnitRows
from gnmr.streams import unread

LOG = "log.txt"  # in a run's folder, what `mode="log"` writes

_PLAIN_EVERY = 20  # steps between plain lines
_REFRESHES_PER_SECOND = 4
_UNITS_SHOWN = 8
_MOST_SHOWN = 16  # in recovery; the others are counted
_OTHER_LINES = 18  # lines of the picture, on a narrow terminal, besides the units in recovery
_COLUMNS_SHOWN = 3  # of the signal; more do not fit


@dataclass(frozen=True)
class RunInfo:
    """What the views say about a run before its first step."""

    name: str
    """Name of the run, e.g. its folder's."""
    folder: Path
    arm: str
    device: str
    total_steps: int
    num_units: int  # units that the controller watches; 0 for a run without
    max_o: int  # most units on the recovery path at once
    num_parameters: int
    tokens_per_step: int
    start_step: int = 0  # last step of the checkpoint that the run continues from


class LiveView:
    """Shows one run. `step` and `eval` only keep references; the picture is drawn at most four times a second."""

    def __init__(self, mode: str = "auto", console: Console | None = None, folder: Path | None = None) -> None:
        """Show nothing until `start`.

        Args:
            mode: auto (a picture on a terminal, else plain lines), plain, log (plain lines to log.txt in `folder`), or
                off (only what `say` is given).
            console: standard output by default.
            folder: the run's folder.
        """
        self._console = console or shared()
        self._log: TextIO | None = None
        if mode == "log":
            mode, self._console = "plain", Console(quiet=True)  # if it cannot be written: the run does not depend on it
            with suppress(OSError):
                path = (folder or Path()) / LOG
                self._log = open(path, "a", encoding="utf-8", opener=no_link)  # noqa: SIM115 (until `stop`)
                self._console = Console(file=self._log, width=100)
        if mode == "auto":
            mode = "picture" if self._console.is_terminal and not self._console.is_dumb_terminal else "plain"
        self._mode = mode
        self._info: RunInfo | None = None
        self._live: Picture | None = None
        self._row: dict[str, Any] = {}
        self._units: UnitRows | None = None
        self._eval: dict[str, Any] = {}
        self._moves: dict[str, str] = {}
        """What the last step's norms led to: promote or release, by unit."""
        self._promotions_total = 0
        self._first: tuple[int, float] | None = None  # first step seen, and when it ended

    def start(self, info: RunInfo) -> None:
        """Say what begins, or begin to draw the picture."""
        self._info = info
        if self._mode == "plain":
            self.say(_opening(info))
        if self._mode == "picture":
            self._live = Picture(
                get_renderable=self._picture,
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()

    def step(self, row: dict[str, Any], units: UnitRows | None) -> None:
        """Take a row of `STEP_FIELDS`; `units` is None for a run without units."""
        self._row, self._units, self._moves = row, units, {}
        if self._first is None:
            self._first = row["step"], time.monotonic()
        if self._mode == "plain" and (info := self._info) is not None:
            step = row["step"]
            if step % _PLAIN_EVERY == 0 or step == info.total_steps:
                self.say(self._step_line(info, row))

    def eval(self, row: dict[str, Any]) -> None:
        """A row of `EVAL_FIELDS`."""
        self._eval = row
        if self._mode == "plain" and self._info is not None:
            step = f"step {row['step']}/{self._info.total_steps}"
            bits = "" if row["val_bits_per_byte"] is None else f"  {row['val_bits_per_byte']:.4f} bits/byte"
            self.say(f"{step}  val_loss {row['val_loss']:.4f}  val_ppl {row['val_ppl']:.2f}{bits}")

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Rows of `EVENT_FIELDS`; of a resumed run also the earlier ones."""
        self._promotions_total += sum(row["event"] == "promote" for row in rows)
        step = self._row.get("step")
        self._moves = {row["unit"]: row["event"] for row in rows if row["step"] == step and row["unit"] is not None}

    def say(self, text: str, narrow: str | None = None) -> None:
        """Lines, above the picture; shown in every mode. `narrow` replaces them in a terminal with few columns."""
        few = self._console.is_terminal and self._console.width < NARROW
        with self._reader_may_leave():
            print_plain(self._console, text if narrow is None or not few else narrow)

    @contextmanager
    def _reader_may_leave(self) -> Iterator[None]:
        """Go on in silence if nobody reads any more (gnmr train | head, a closed terminal, a full disk)."""
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self._console is shared():
                unread()
            elif not isinstance(error, BrokenPipeError) and self._log is None:
                raise
            self._mode, self._console = "off", Console(quiet=True)  # the files are the truth

    def stop(self, summary: dict[str, Any] | None = None, where: list[str] | None = None) -> None:
        """Ends the picture and shows the summary (`SUMMARY_FIELDS`) and where to look next; may be called twice."""
        live, self._live = self._live, None
        with self._reader_may_leave():
            if live is not None:
                live.stop()
            if summary is not None and self._mode != "off":
                self._console.print(_summary_table(summary))
        for line in (where or []) if self._mode != "off" else []:
            self.say(line)
        if self._log is not None:
            with suppress(OSError):
                self._log.close()
            self._log, self._console = None, Console(quiet=True)

    def _seconds_left(self) -> float:
        """By the mean pace since the first step, which itself (warm-up of the machine) does not count; else nan."""
        if self._info is None or self._first is None or self._row["step"] == self._first[0]:
            return math.nan
        pace = (time.monotonic() - self._first[1]) / (self._row["step"] - self._first[0])
        return pace * (self._info.total_steps - self._row["step"])

    def _step_line(self, info: RunInfo, row: dict[str, Any]) -> str:
        texts = [f"step {row['step']}/{info.total_steps}", f"loss {row['loss']:.4f}"]
        if row["bits_per_byte"] is not None:
            texts.append(f"{row['bits_per_byte']:.4f} bits/byte")
        texts.append(f"lr {row['lr']:.2e}")
        if self._eval:
            texts.append(f"ppl {self._eval['val_ppl']:.2f}")
        if info.num_units:
            healing = row["num_active"] is None
            texts.append("healing" if healing else f"recovery {row['num_active']}/{info.num_units}")
        if row["nonfinite_total"]:
            texts.append(f"skipped {row['nonfinite_total']}")
        if row["tokens_per_s"] is not None:
            texts.append(f"{_si(row['tokens_per_s'])} tokens/s")
        if row["mfu"] is not None:
            texts.append(f"MFU {row['mfu']:.1%}")
        return "  ".join([*texts, f"left {_duration(self._seconds_left())}"])

    def _picture(self) -> RenderableType:
        info, row, units = self._info, self._row, self._units  # the drawing thread's own references
        assert info is not None
        step, narrow = row.get("step", info.start_step), self._console.width < NARROW
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(ratio=1)
        progress.add_column(justify="right", no_wrap=True)
        pace = f"{step}/{info.total_steps}  {_duration(self._seconds_left())} left"
        progress.add_row(ProgressBar(total=info.total_steps, completed=step), pace)
        between = "\n" if narrow else "  "
        title = Text.assemble(
            (info.name, "bold"), (between + _size_text(info), "dim"), overflow="ellipsis", no_wrap=True
        )
        blocks: list[RenderableType] = [title, progress]
        if row:
            blocks.append(self._figures(info, row, 2 if narrow else 3))
        if units is not None and units.observed.any():
            blocks.append(_unit_table(units, self._moves, narrow, self._console.height))
        return Group(*blocks)

    def _figures(self, info: RunInfo, row: dict[str, Any], beside: int) -> Table:
        """Return the figures of the step, so many beside each other."""
        figures = {
            "loss": f"{row['loss']:.4f}",
            "bits/byte": _or_none(row["bits_per_byte"], "{:.4f}"),
            "val ppl": f"{self._eval['val_ppl']:.2f}" if self._eval else "–",
            "tokens": _si(row["tokens"]),
            "lr": f"{row['lr']:.2e}",
            "grad norm": f"{row['grad_norm_pre_clip']:.3g}",
            "tokens/s": None if row["tokens_per_s"] is None else _si(row["tokens_per_s"]),
            "MFU": _or_none(row["mfu"], "{:.1%}"),
            "saved tensors": _bytes(row["saved_bytes"]),
            "by Eq. 5": _bytes(row["saved_bytes_predicted"]),
            "skipped": str(row["nonfinite_total"]),
        }
        if info.num_units:
            healing = row["num_active"] is None
            figures |= {
                "active": "healing" if healing else f"{row['num_active']}/{info.num_units}, max {info.max_o}",
                "candidates": "–" if healing else str(row["num_candidates"]),
                "promotions": str(self._promotions_total),
            }
        grid = Table.grid(expand=True, padding=(0, 1))
        for _ in range(beside):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(ratio=1, no_wrap=True)
        cells = list(chain.from_iterable((name, figure) for name, figure in figures.items() if figure is not None))
        for i in range(0, len(cells), 2 * beside):
            grid.add_row(*map(Text, cells[i : i + 2 * beside]))
        return grid


def _unit_table(rows: UnitRows, moves: dict[str, str], narrow: bool, height: int) -> Table:
    """Return the units in recovery and then the others, riskiest first; marks show which units come and leave next.

    On a low terminal fewer units in recovery are listed, so that the riskiest others stay on it.
    """
    # Unknown risks come last among the observed units, and units that were not observed behind them.
    risk = np.where(rows.observed, np.nan_to_num(rows.risk, nan=-1.0, posinf=np.inf), -np.inf)
    order = [i for i in np.argsort(-risk, kind="stable") if rows.observed[i] or rows.active[i]]
    inside = [i for i in order if rows.active[i]]
    outside = sorted((i for i in order if not rows.active[i]), key=lambda i: moves.get(rows.units[i]) != "promote")
    # At least two of either kind are listed, however low the terminal is.
    most = max(min(_MOST_SHOWN, height - _OTHER_LINES), 2)
    shown = [*inside[:most], *outside[: max(_UNITS_SHOWN - len(inside), 2)]]
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("● in recovery ▲ comes ▽ leaves", ratio=1, no_wrap=True, overflow="ellipsis")
    columns = {} if narrow else {"norm": rows.norm} | dict(list(rows.columns.items())[:_COLUMNS_SHOWN])
    for name in (*columns, "risk", "lock"):
        table.add_column(name, justify="right", no_wrap=True, min_width=4 if name == "lock" else 7)
    for i in shown:
        active, name = bool(rows.active[i]), rows.units[i]
        mark = {"promote": "▲", "release": "▽"}.get(moves.get(name, ""), "●" if active else " ")
        numbers = [f"{values[i]:.3g}" for values in (*columns.values(), rows.risk)]
        table.add_row(Text(f"{mark} {name}", "bold cyan" if active else ""), *numbers, str(int(rows.lock[i]) or ""))
    if hidden := len(inside[most:]):
        table.add_row(Text(f"● and {hidden} more in recovery", "bold cyan"))
    return table


def recovery_figures(summary: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return labels and figures of the units on the recovery path.

    A figure is None if there is nothing to count, or if an older version did not record it.
    """
    over = summary.get("over_frac") or {}
    return [
        ("unit-steps spent", _or_none(summary.get("promotion_frac"), "{:.2%}")),
        ("GEMM FLOPs spent", _or_none(summary.get("spent_gemm_frac"), "{:.2%}")),
        ("numbers sent, of dense", _or_none(summary.get("numbers_sent_frac"), "{:.2%}")),
        ("steps at max_o", _or_none(summary.get("hit_max_o_frac"), "{:.2%}")),
        *((f"unit-steps over {name}'s threshold", _or_none(share, "{:.2%}")) for name, share in over.items()),
    ]


def _summary_table(summary: dict[str, Any]) -> Table:
    saved = summary["saved_bytes_mean"]
    figures = [
        ("status", summary["status"]),
        ("reason", summary["reason"]),
        ("steps", f"{summary['steps']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
        ("final validation loss", _or_none(summary["final_val_loss"], "{:.4f}")),
        ("final validation perplexity", _or_none(summary["final_val_ppl"], "{:.2f}")),
        ("final validation bits per byte", _or_none(summary["final_val_bits_per_byte"], "{:.4f}")),
        ("spike score", _or_none(summary["spike_score"], "{:.2%}")),
        *recovery_figures(summary),
        ("extra GEMM time", _or_none(summary["spent_extra_time"] or None, "{:.2%}")),
        ("kept for backward, mean", _bytes(saved)),
        ("steps skipped (non-finite)", str(summary["nonfinite_total"])),
        ("time in steps", _duration(summary["wall_time_s"])),
        ("tokens/s, median step", None if summary["tokens_per_s"] is None else _si(summary["tokens_per_s"])),
        ("MFU, median step", _or_none(summary["mfu"], "{:.1%}")),
    ]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, figure in figures:
        if figure is not None:
            table.add_row(label, Text(figure))
    return table


def _opening(info: RunInfo) -> str:
    resumed = f" from step {info.start_step + 1}" if info.start_step else ""
    steps = f"{plural(info.total_steps, 'step')}{resumed} of {info.tokens_per_step:,} tokens"
    return f"{info.name}: {steps}, {_size_text(info)}, records in {info.folder}"


def _size_text(info: RunInfo) -> str:
    return f"{_si(info.num_parameters)} parameters, {plural(info.num_units, 'unit')}, {info.device}"


def _or_none(value: float | None, pattern: str) -> str | None:
    return None if value is None else pattern.format(value)


def _duration(seconds: float) -> str:
    """Return 75 as 0:01:15, and nan as -:--."""
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "-:--"


def _si(number: float) -> str:
    """1234567 -> 1.23 M."""
    units = ((1e9, " G"), (1e6, " M"), (1e3, " k"))
    size, letter = next((unit for unit in units if abs(number) >= unit[0]), (1, ""))
    return f"{number / size:.{2 if letter else 0}f}{letter}"


def _bytes(number: float | None) -> str:
    """Return 1572864 as 1.6 MB."""
    return "–" if number is None else filesize.decimal(round(number))
