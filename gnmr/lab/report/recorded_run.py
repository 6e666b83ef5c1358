"""Read run folders: the config, the end and the measurements of a run.

Nothing here needs a run to be whole. A run that is in progress, was killed or failed gives what its files hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.lab import config
from gnmr.records.reader import (
    MAX_UNITS,
    FaultWindow,
    calibrated_trigger,
    check_rows,
    check_units,
    read_json,
    read_jsonl,
    read_units,
    read_windows,
)
from gnmr.records.schema import EVAL_FIELDS, STEP_FIELDS, SUMMARY_FIELDS, unit_schema
from gnmr.records.summary import summarize
from gnmr.records.untrusted import Damaged, content, exists, reading, text

_FOLDER_NAME = re.compile(r"(?P<arm>.+)-[0-9a-f]{8}-s(?P<seed>\d+)")
_STEP_NUMBERS = [name for name in STEP_FIELDS if name not in ("nonfinite_unit", "over", "statistics")]
_MOST_WORDS = 4000  # characters of a command or a reason
_MOST_NUMBERS = 1 << 29
"""Of the matrices of `UnitMatrices` together: 2 GB; 1e6 recorded steps of 84 units and three columns fit."""
_MOST_UNOBSERVED = 64  # cells for each recorded row: an expert has tokens in more than one step of so many

Columns = dict[str, np.ndarray]  # one float64 array per field, NaN where a row has no number


@dataclass(frozen=True)
class UnitMatrices:
    """`units.arrows` as matrices: S recorded steps by U units, NaN where a unit was not observed."""

    steps: np.ndarray  # (S,) int64, ascending
    units: list[str]
    norm_SU: np.ndarray  # float32
    columns: dict[str, np.ndarray]  # (S, U) float32 each: the signal's statistics, then recorded evidence
    risk_SU: np.ndarray  # float32, inf for a non-finite norm
    active_SU: np.ndarray  # bool, on the recovery path during the step


@dataclass(eq=False)
class Run:
    """One run folder. `settings` are the flat keys of its config that decide its numbers, the seed aside."""

    folder: Path
    settings: dict[str, Any]
    header: dict[str, Any]
    experiment: str
    scale: str
    arm: str
    seed: int
    status: str  # done, failed, interrupted, or running: neither marker nor summary, so it runs or was killed
    reason: str | None  # why it failed or stopped, one line

    @cached_property
    def steps(self) -> Columns:
        """Return `STEP_FIELDS` as columns, one row per recorded step."""
        return _columns(read_jsonl(self.folder / "steps.jsonl"), _STEP_NUMBERS)

    @cached_property
    def evals(self) -> Columns:
        """`EVAL_FIELDS` as columns, one row an evaluation."""
        return _columns(read_jsonl(self.folder / "eval.jsonl"), EVAL_FIELDS)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """`EVENT_FIELDS` rows."""
        return read_jsonl(self.folder / "events.jsonl")

    @cached_property
    def windows(self) -> list[FaultWindow]:
        """The windows of injected faults."""
        return read_windows(self.folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Return `SUMMARY_FIELDS`: the fields of summary.json; missing ones are counted from the rows."""
        written = {key: value for key, value in _summary(self.folder).items() if value is not None}
        if self.status == "done" and written.get("promotion_frac") is not None:
            return dict.fromkeys(SUMMARY_FIELDS) | written
        units, max_o = len(self.header.get("units") or []), self.settings.get("controller.max_o")
        counted = summarize(self.folder, units, max_o or MAX_UNITS, self.status, self.reason)
        if self.status == "done" or not len(self.steps["step"]):
            return counted | written
        # The rows of an unfinished run go on after its summary.
        return counted | written | {key: value for key, value in counted.items() if value is not None}

    def check(self) -> Run:
        """Itself, with everything read that a table shows but for the per-unit rows; `Damaged` where that cannot be."""
        with reading(self.folder):
            _ = self.steps, self.evals, self.summary, self.events, self.windows
            check_rows(self.folder, self.steps["step"].tolist(), self.planned_steps)
        return self

    def final(self, field: str) -> float | None:
        """Return its last `val_loss` or `val_ppl`, of a fork that heals that before it heals; None if not measured."""
        if not self.settings.get("fork.heal"):
            return self.summary.get(f"final_{field}")
        return _last(self.evals[field][self.evals["step"] == self.settings.get("training.steps")])

    @property
    def last_step(self) -> int:
        """Newest recorded step, 0 before the first; the summary's number of steps where the rows are not kept."""
        return int(_last(self.steps["step"]) or self.summary.get("steps") or 0)

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps that were asked for, a fork's healing counted."""
        steps = self.settings.get("training.steps")
        return None if steps is None else steps + (self.settings.get("fork.heal") or 0)

    @property
    def base(self) -> str | None:
        """Of a fork its base: the last part of its path and the beginning of its checksum, or all of its path."""
        if (name := self.settings.get("base")) is None:
            return None
        return f"{name} {_base_digest(self.header)}".rstrip()

    @property
    def tokens_per_step(self) -> int | None:
        """Of an optimizer step; None where the settings do not say."""
        sizes = [self.settings.get(key) for key in _OF_A_STEP]
        return None if None in sizes else int(np.prod(np.array(sizes)))

    @property
    def trigger(self) -> tuple[float, int]:
        """The factor of all thresholds and its first step; a loop that calibrated it itself has both in its header."""
        if (calibrated := calibrated_trigger(self.header)) is not None:
            return calibrated[1], calibrated[0] + 1
        return float(self.settings.get("controller.trigger") or 1.0), 1

    @property
    def data(self) -> dict[str, Any]:
        """What the header says of the data."""
        return self.header.get("data") or {}

    @property
    def machine(self) -> str:
        """Device and processor, in words."""
        machine = self.header.get("machine") or {}
        names = [str(machine[key]) for key in ("device", "cpu") if machine.get(key)] or ["unknown machine"]
        if machine.get("products") == "in FP32":
            names.append("16-bit products in FP32")
        return ", ".join(names)

    @property
    def command(self) -> str:
        """The command that made it, from its header."""
        return str(self.header.get("command") or "-")

    @property
    def commit(self) -> str:
        """The first ten digits of it."""
        return str(self.header.get("commit") or "unknown")[:10]

    def units(self) -> UnitMatrices:
        """Read anew at each call: too large to keep for every run of a sweep."""
        table = read_units(self.folder).unify_dictionaries()
        # Columns are units in the order of the header; each row of the table becomes one cell.
        unit = table["unit"].combine_chunks()
        names = unit.dictionary.to_pylist()
        rank = {name: number for number, name in enumerate(self.header.get("units") or [])}
        place = {name: number for number, name in enumerate(sorted(names, key=lambda name: rank.get(name, len(rank))))}
        column = np.array([place[name] for name in names], np.int64)[unit.indices.to_numpy()]
        steps, row = np.unique(table["step"].to_numpy(), return_inverse=True)
        columns = [name for name in table.column_names if name not in unit_schema(()).names]
        cells, rows = len(steps) * len(place), table.num_rows
        # The matrices are dense, so a few rows of many steps and units could fill the memory.
        if cells * (len(columns) + 3) > _MOST_NUMBERS or cells > 2**24 + _MOST_UNOBSERVED * rows:
            size = f"{rows:,} rows are of {len(steps):,} steps and {len(place):,} units"
            raise Damaged(f"{self.folder}: units.arrows is too large to be shown ({size})")
        # Of two rows of one cell, the second would hide the first.
        if len(np.unique(row.astype(np.int64) * len(place) + column)) < rows:
            raise Damaged(f"{self.folder}: units.arrows has two rows of a step and unit")

        def matrix(field: str, missing: float = np.nan, dtype: type = np.float32) -> np.ndarray:
            dense: np.ndarray = np.full((len(steps), len(place)), missing, dtype)
            dense[row, column] = table[field].to_numpy()
            return dense

        evidence = {name: matrix(name) for name in columns}
        active = matrix("active", False, bool)
        return UnitMatrices(steps.astype(np.int64), list(place), matrix("norm"), evidence, matrix("risk"), active)


def load(folder: Path) -> Run:
    """Return a run, checked and without its rows, which are read when they are first asked for.

    The config is taken as it is written, whatever version of this project wrote it.

    Args:
        folder: the run folder.

    Raises:
        UserError: a file is not valid (`gnmr.records.untrusted`).
    """
    path = folder / "config.yaml"
    flat, header = config.flatten(config.read_tree(path)), _header(folder / "header.json")
    settings = config.decisive({"controller.hold": 1} | flat)  # a loop of one's own does not write its hold
    name = _FOLDER_NAME.fullmatch(folder.name)
    named = name.groupdict() if name else {}
    with reading(path):
        seeds = flat.get("training.seed"), header.get("seed"), named.get("seed"), 0
        seed = int(next(seed for seed in seeds if seed is not None))
        # The report computes with these, so they have to be numbers whatever version wrote them.
        for key in _SIZES:
            if not isinstance(settings.get(key), int | None):
                raise ValueError(f"{key}={settings[key]!r:.40}: must be a whole number")
    arm = header.get("arm") or named.get("arm") or folder.name
    experiment = settings.get("experiment_name") or header.get("experiment") or "custom"
    scale = settings.get("scale_name") or header.get("scale") or "custom"
    settings = {key: text(value) if isinstance(value, str) else value for key, value in settings.items()}
    if (base := settings.get("base")) is not None and _base_digest(header):
        settings["base"] = Path(str(base)).name  # wherever it lies: its checksum tells it from others
    return Run(folder, settings, header, text(experiment), text(scale), text(arm), seed, *_status(folder))


_OF_A_STEP = ("training.seq_len", "training.batch_size", "training.accumulation")
_SIZES = (*_OF_A_STEP, "training.steps", "controller.max_o", "controller.hold")


def _header(path: Path) -> dict[str, Any]:
    """Return header.json; empty without it."""
    header = read_json(path)
    if header is None and exists(path) and content(path).strip():  # it is replaced as a whole, so no kill cuts it
        raise Damaged(f"{path}: not a JSON object; copy the run again")
    header = header or {}
    with reading(path):
        check_units(header.get("units") or [])
        for key in ("data", "machine"):
            if not isinstance(header.get(key), dict | None):
                raise ValueError(f"{key}: must be a mapping")
    return {key: _printable(value) for key, value in header.items()}


def _base_digest(header: dict[str, Any]) -> str:
    """Return the beginning of the checksum of a fork's base, empty where the header has none."""
    base = header.get("base")
    return str(base.get("sha256") or "")[:8] if isinstance(base, dict) else ""


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {text(key): _printable(item) for key, item in value.items()}
    return text(value, _MOST_WORDS) if isinstance(value, str) else value


def _status(folder: Path) -> tuple[str, str | None]:
    """The markers decide; FAILED first, so that a run counts as done only where nothing says otherwise."""
    summary = _summary(folder)
    failed = folder / "FAILED"
    if exists(failed):
        line = " ".join(content(failed).decode("utf-8", errors="replace").split())
        return "failed", text(line or summary.get("reason") or "no reason given", _MOST_WORDS)
    if exists(folder / "DONE"):
        return "done", None
    if summary.get("status") in ("failed", "interrupted"):
        return str(summary["status"]), summary.get("reason") and text(summary["reason"], _MOST_WORDS)
    return "running", None


_WORDS, _MAPPINGS = ("status", "reason"), ("over_frac", "saturation_total")


def _summary(folder: Path) -> dict[str, Any]:
    """What summary.json says; `Damaged` where it gives no number for a figure."""
    path = folder / "summary.json"
    summary = read_json(path) or {}
    for key, value in summary.items():
        kind = str | float if key in _WORDS else dict if key in _MAPPINGS else int | float  # "nan" is read as a number
        if key in SUMMARY_FIELDS and not isinstance(value, kind | None):
            raise Damaged(f"{path}: {key}={value!r:.40} is not a number")
    return summary


def _columns(rows: list[dict[str, Any]], fields: Iterable[str]) -> Columns:
    def number(value: Any) -> float:
        return float(value) if isinstance(value, int | float) else np.nan

    return {name: np.array([number(row.get(name)) for row in rows]) for name in fields}


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None
