"""The live view of a run: a terminal picture, or plain lines where there is no terminal. A view, never the truth.

A cell of a sweep writes its lines to log.txt in its folder instead: the sweep has a line for it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gnmr.console import NARROW, Picture, print_plain, shared
from gnmr.errors import unread
from gnmr.records.disk import no_link
from gnmr.records.schema import RatioRows

LOG = "log.txt"
"""In a run's folder, what `mode="log"` writes."""

_REFRESHES_PER_SECOND = 4
_UNITS_SHOWN = 8
_MOST_SHOWN = 16  # in recovery, all of whom are shown else
_COLUMNS_SHOWN = 3  # of the signal; more do not fit
_LOSSES_KEPT = 512
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RunInfo:
    """What the views say about a run before its first step."""

    name: str
    """Name of the run, e.g. its folder's."""
    folder: Path
    arm: str
    device: str
    total_steps: int
    num_units: int
    """Units that the controller watches; 0 for a run without."""
    max_o: int
    """Most units on the recovery path at once."""
    num_parameters: int
    tokens_per_step: int
    start_step: int = 0
    """Last step of the checkpoint that the run continues from."""


class View:
    """Shows one run. `step` and `eval` only keep references; the picture is drawn four times a second at the most."""

    def __init__(
        self, mode: str = "auto", plain_every: int = 20, console: Console | None = None, folder: Path | None = None
    ) -> None:
        """mode: auto (a picture on a terminal, else plain lines), plain, log (these lines to log.txt in `folder`), or
        off (only what `say` is given). plain_every: steps between plain lines. console: where to; standard output by
        default.
        """
        self._console = console or shared()
        self._log: TextIO | None = None
        if mode == "log":
            mode, self._console = "plain", self._logging(folder)
        if mode == "auto":
            mode = "picture" if self._console.is_terminal and not self._console.is_dumb_terminal else "plain"
        self._mode = mode
        self._plain_every = plain_every
        self._info: RunInfo | None = None
        self._live: Picture | None = None
        self._row: dict[str, Any] = {}
        self._ratios: RatioRows | None = None
        self._eval: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=_LOSSES_KEPT)
        self._moves: dict[str, str] = {}
        """What the last step's norms led to: promote or release, by unit."""
        self._promotions_total = 0
        self._first: tuple[int, float] | None = None  # first step seen, and when it ended

    def _logging(self, folder: Path | None) -> Console:
        """A console on log.txt; one that is silent where that cannot be written: the run does not depend on it."""
        with suppress(OSError):
            self._log = open((folder or Path()) / LOG, "a", encoding="utf-8", opener=no_link)  # noqa: SIM115 (until `stop`)
            return Console(file=self._log, width=100)
        return Console(quiet=True)

    def start(self, info: RunInfo) -> None:
        self._info = info
        if self._mode == "plain":
            self.say(_opening(info))
        if self._mode == "picture":
            how: dict[str, Any] = {"refresh_per_second": _REFRESHES_PER_SECOND, "transient": True}
            self._live = Picture(get_renderable=self._picture, console=self._console, **how)
            self._live.start()

    def step(self, row: dict[str, Any], ratios: RatioRows | None) -> None:
        """A row of `STEP_FIELDS`; ratios: None for a run without units."""
        self._row, self._ratios, self._moves = row, ratios, {}
        self._losses.append(row["loss"])
        if self._first is None:
            self._first = row["step"], time.monotonic()
        if self._mode == "plain" and self._info is not None:
            step = row["step"]
            if step % self._plain_every == 0 or step == self._info.total_steps:
                self.say(self._step_line(row))

    def eval(self, row: dict[str, Any]) -> None:
        """A row of `EVAL_FIELDS`."""
        self._eval = row
        if self._mode == "plain" and self._info is not None:
            step = f"step {row['step']}/{self._info.total_steps}"
            self.say(f"{step}  val_loss {row['val_loss']:.4f}  val_ppl {row['val_ppl']:.2f}")

    def events(self, rows: list[dict[str, Any]]) -> None:
        """Rows of `EVENT_FIELDS`; of a resumed run also the earlier ones."""
        self._promotions_total += sum(row["event"] == "promote" for row in rows)
        step = self._row.get("step")
        self._moves = {row["unit"]: row["event"] for row in rows if row["step"] == step and row["unit"] is not None}

    def say(self, text: str, narrow: str | None = None) -> None:
        """Lines, above the picture; shown in every mode. narrow: in their place where a terminal has few columns."""
        few = self._console.is_terminal and self._console.width < NARROW
        with self._reader_may_leave():
            print_plain(self._console, text if narrow is None or not few else narrow)

    @contextmanager
    def _reader_may_leave(self) -> Iterator[None]:
        """Nobody reads any more (gnmr train | head, a closed terminal, a full disk): the files are the truth."""
        try:
            yield
        except BrokenPipeError:
            if self._console is shared():
                unread()
            self._mode, self._console = "off", Console(quiet=True)
        except OSError:
            if self._log is None:
                raise
            self._mode, self._console = "off", Console(quiet=True)  # a full disk: the records will say so

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

    def _step_line(self, row: dict[str, Any]) -> str:
        assert self._info is not None
        parts = [f"step {row['step']}/{self._info.total_steps}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}"]
        if self._eval:
            parts.append(f"ppl {self._eval['val_ppl']:.2f}")
        if self._info.num_units:
            healing = row["num_active"] is None
            parts.append("healing" if healing else f"recovery {row['num_active']}/{self._info.num_units}")
        if row["nonfinite_total"]:
            parts.append(f"skipped {row['nonfinite_total']}")
        return "  ".join([*parts, f"left {_duration(self._seconds_left())}"])

    def _picture(self) -> RenderableType:
        info, row, ratios = self._info, self._row, self._ratios  # the drawing thread's own references
        assert info is not None
        step = row.get("step", info.start_step)
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(ratio=1)
        progress.add_column(justify="right", no_wrap=True)
        left = f"{step}/{info.total_steps}  {_duration(self._seconds_left())} left"
        progress.add_row(ProgressBar(total=info.total_steps, completed=step), left)
        wide = self._console.width
        between = "\n" if wide < NARROW else "  "
        title = Text.assemble((info.name, "bold"), (between + _of_what(info), "dim"), overflow="ellipsis", no_wrap=True)
        parts: list[RenderableType] = [title, progress]
        if row:
            if line := _sparkline(list(self._losses), wide - len("loss ")):
                parts.append(Text.assemble(("loss ", "dim"), line))
            parts.append(self._figures(info, row, narrow=wide < NARROW))
        if ratios is not None and ratios.observed.any():
            parts += _unit_tables(ratios, self._moves, narrow=wide < NARROW)
        return Group(*parts)

    def _figures(self, info: RunInfo, row: dict[str, Any], narrow: bool) -> Table:
        ppl = f"{self._eval['val_ppl']:.2f}" if self._eval else "–"
        ppl += f" at {self._eval['step']}" if self._eval and not narrow else ""
        pace = info.tokens_per_step / row["step_time_s"] if row["step_time_s"] > 0 else math.nan
        healing, skipped = row["num_active"] is None, row["nonfinite_total"]
        active = "healing" if healing else f"{row['num_active']}/{info.num_units}, max {info.max_o}"
        cells: list[tuple[str, str, str]] = [  # label, figure, style; three to a line, two in a narrow terminal
            ("loss", f"{row['loss']:.4f}", "bold"),
            ("val ppl", ppl, "bold"),
            ("tokens", _si(row["tokens"]), ""),
            ("lr", f"{row['lr']:.2e}", ""),
            ("grad norm", f"{row['grad_norm_pre_clip']:.3g}", ""),
            ("tokens/s", _si(pace), ""),
            ("saved", _bytes(row["saved_bytes"]), ""),
            ("predicted", _bytes(row["saved_bytes_predicted"]), ""),
            ("skipped", str(skipped), "bold red" if skipped else ""),
        ]
        if info.num_units:
            cells += [
                ("active", active, "bold cyan" if row["num_active"] else ""),
                ("candidates", "–" if healing else str(row["num_candidates"]), ""),
                ("promotions", str(self._promotions_total), ""),
            ]
        grid = Table.grid(expand=True, padding=(0, 1))
        beside = 2 if narrow else 3
        for _ in range(beside):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(ratio=1, no_wrap=True)
        for i in range(0, len(cells), beside):
            grid.add_row(*(part for label, told, style in cells[i : i + beside] for part in (label, Text(told, style))))
        return grid


def _unit_tables(ratios: RatioRows, moves: dict[str, str], narrow: bool) -> list[RenderableType]:
    """Who is in recovery on top, then the riskiest others, riskiest first; marks for who comes and who leaves next."""
    risk = np.where(ratios.observed, np.nan_to_num(ratios.risk, nan=-1.0, posinf=np.inf), -np.inf)
    order = np.argsort(-risk, kind="stable")
    inside = [i for i in order if ratios.active[i]]
    others = [i for i in order if not ratios.active[i] and ratios.observed[i]]
    coming = [i for i in others if moves.get(ratios.units[i]) == "promote"]
    rest = [i for i in others if i not in set(coming)]
    shown = [*inside[:_MOST_SHOWN], *coming[:_MOST_SHOWN]]
    shown += rest[: max(_UNITS_SHOWN - len(shown), 2)]
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("● in recovery ▲ comes ▽ leaves", ratio=1, no_wrap=True, overflow="ellipsis")
    columns = [] if narrow else list(ratios.columns)[:_COLUMNS_SHOWN]
    for name in ([] if narrow else ["norm"]) + [*columns, "risk", "lock"]:
        table.add_column(name, justify="right", no_wrap=True, min_width=4 if name == "lock" else 7)
    for i in shown:
        active, name = bool(ratios.active[i]), ratios.units[i]
        mark = {"promote": "▲", "release": "▽"}.get(moves.get(name, ""), "●" if active else " ")
        table.add_row(
            Text(f"{mark} {name}", "bold cyan" if active else "cyan" if mark == "▲" else ""),
            *([] if narrow else [_norm(ratios, i)]),
            *(_ratio(ratios.columns[column][i]) for column in columns),
            Text(_ratio(ratios.risk[i]), _heat(ratios.risk[i])),
            str(int(ratios.lock[i]) or ""),
        )
    more = len(inside) - len(inside[:_MOST_SHOWN])
    return [table, *([Text(f"● and {more} more in recovery", "bold cyan")] if more else [])]


def _norm(ratios: RatioRows, i: int) -> str:
    return f"{ratios.norm[i]:.2e}" if ratios.observed[i] else "–"


def _heat(risk: float) -> str:
    """Colour of a risk, which is over its threshold above 1."""
    return "bold red" if risk > 1 else "yellow" if risk > 0.8 else "green" if risk >= 0 else "dim"


def _sparkline(values: list[float], width: int) -> str:
    """The values from lowest to highest as blocks of eight heights, means where there are more than fit.

    A step whose loss is not finite is an x. Empty for fewer than two values.
    """
    if len(values) < 2 or width < 2:
        return ""
    pieces = np.array_split(np.array(values, dtype=float), min(width, len(values)))
    with np.errstate(invalid="ignore", over="ignore"):
        heights = np.array([piece.mean() for piece in pieces])
    known = heights[np.isfinite(heights)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((h - low) * scale)] if np.isfinite(h) else "x" for h in heights)


def recovery_figures(summary: dict[str, Any]) -> list[tuple[str, str | None]]:
    """What of a run was on the recovery path: labels and figures; None where there is nothing to count, or where an
    older version left the figure out."""
    over = summary.get("over_frac") or {}
    return [
        ("unit-steps on the recovery path", _or_none(summary.get("promotion_frac"), "{:.2%}")),
        ("GEMMs on the recovery path", _or_none(summary.get("spent_gemm_frac"), "{:.2%}")),
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
        *recovery_figures(summary),
        ("kept for backward, mean", None if saved is None else _bytes(saved)),
        ("steps skipped (non-finite)", str(summary["nonfinite_total"])),
        ("time in steps", _duration(summary["wall_time_s"])),
        ("tokens/s, median step", None if summary["tokens_per_s"] is None else _si(summary["tokens_per_s"])),
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
    steps = f"{info.total_steps} steps{resumed} of {info.tokens_per_step:,} tokens"
    return f"{info.name}: {steps}, {_of_what(info)}, records in {info.folder}"


def _of_what(info: RunInfo) -> str:
    return f"{_si(info.num_parameters)} parameters, {info.num_units} units, {info.device}"


def _or_none(value: float | None, pattern: str) -> str | None:
    return None if value is None else pattern.format(value)


def _ratio(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.1e}"


def _duration(seconds: float) -> str:
    """75 -> 1:15, 3675 -> 1:01:15, nan -> -:--."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _si(number: float) -> str:
    """1234567 -> 1.23 M."""
    size, letter = next((one for one in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if abs(number) >= one[0]), (1, ""))
    return f"{number / size:.{2 if letter else 0}f}{letter}"


def _bytes(number: float) -> str:
    """1572864 -> 1.5 MiB."""
    units = (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")
    size, unit = next((one for one in units if number >= one[0]), (1, "B"))
    return f"{number / size:.{0 if unit == 'B' else 1}f} {unit}"
