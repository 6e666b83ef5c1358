"""Finding run folders and reading one: what it was, how it ended, what it measured.

Nothing here needs a run to be whole. A run that is in progress, was killed or failed gives what its files hold.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.errors import UserError
from gnmr.lab import config
from gnmr.records.ledger import check_records
from gnmr.records.reader import check_parquet, check_units, iter_jsonl, read_json, read_jsonl, read_ratios
from gnmr.records.schema import EVAL_FIELDS, STEP_FIELDS, SUMMARY_FIELDS, ratio_schema
from gnmr.records.untrusted import Damaged, content, exists, first_line, opened, reading, text

_FOLDER_NAME = re.compile(r"(?P<arm>.+)-(?P<hash>[0-9a-f]{8})-s(?P<seed>\d+)")
_SHOWN = ("step", "unit", "norm", "risk", "active")
_NO_NUMBERS = ("nonfinite_unit", "over", "statistics")
_PATHS = ("data.path", "data.tokenizer", "model.checkpoint", "base")
"""Of which a header's command may have the last part alone (gnmr/lab/train/provenance.py)."""
_MOST_WORDS = 4000
"""Characters of a command or a reason."""
_MOST_STATISTICS = 1 << 28
"""Numbers: 2 GB; 1e6 steps with four of each of 60 layers fit."""
_MOST_NUMBERS = 1 << 29
"""Of the matrices of `Ratios` together: 2 GB; 1e6 recorded steps of 84 units and three columns fit."""
_MOST_UNOBSERVED = 64
"""Cells for each recorded row: an expert has tokens in more than one step of so many."""

Columns = dict[str, np.ndarray]
"""One float64 array per field, NaN where a row has no number."""


@dataclass(frozen=True)
class Ratios:
    """`ratios.parquet` as matrices: S recorded steps by U units, NaN where a unit was not observed."""

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
    hash: str
    seed: int
    status: str
    """done, failed, interrupted, or running: neither marker nor summary, so it runs or was killed."""
    reason: str | None
    """Why it failed or stopped, one line."""
    place: Path
    """Where it is for the user: the folder, or PACK/RUN."""

    @cached_property
    def _step_rows(self) -> tuple[Columns, Columns, Counter[str]]:
        """Of steps.jsonl: `steps`, `statistics`, and the unit-steps over each threshold. Read once, kept as columns."""
        fields = [name for name in STEP_FIELDS if name not in _NO_NUMBERS]
        steps, statistics = {name: array("d") for name in fields}, dict[str, "array[float]"]()
        over: Counter[str] = Counter()
        for number, (row, _) in enumerate(iter_jsonl(self.folder / "steps.jsonl"), 1):
            for name, column in steps.items():
                column.append(_number(row.get(name)))
            for name, value in _mapping(row.get("statistics")).items():
                if name not in statistics:
                    statistics[name] = array("d", [math.nan]) * (number - 1)
                statistics[name].append(_number(value))
            if len(statistics) * number > _MOST_STATISTICS:
                raise Damaged(f"{self.folder / 'steps.jsonl'}: {len(statistics):,} statistics in {number:,} steps")
            for column in statistics.values():
                if len(column) < number:
                    column.append(math.nan)
            for name, value in _mapping(row.get("over")).items():
                over[name] += int(value)
        as_arrays = [{name: np.array(column) for name, column in of.items()} for of in (steps, statistics)]
        return as_arrays[0], as_arrays[1], over

    @cached_property
    def steps(self) -> Columns:
        """`STEP_FIELDS` as columns, one row a recorded step."""
        return self._step_rows[0]

    @cached_property
    def statistics(self) -> Columns:
        """The model's statistics of each step's forward passes, by name; empty for a model without any."""
        return self._step_rows[1]

    @cached_property
    def evals(self) -> Columns:
        """`EVAL_FIELDS` as columns, one row an evaluation."""
        rows = read_jsonl(self.folder / "eval.jsonl")
        return {field: np.array([_number(row.get(field)) for row in rows]) for field in EVAL_FIELDS}

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """`EVENT_FIELDS` rows."""
        return read_jsonl(self.folder / "events.jsonl")

    @cached_property
    def scores(self) -> dict[str, Any]:
        """`SCORE_FIELDS` of its last scoring; empty: none."""
        rows = read_jsonl(self.folder / "scores.jsonl")
        return rows[-1] if rows else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`SUMMARY_FIELDS`: what summary.json says, the rest counted from the rows; None where nothing is known."""
        written = _summary(self.folder)
        return self._counted() | {key: value for key, value in written.items() if value is not None}

    @property
    def tree(self) -> dict[str, Any]:
        """Its config.yaml, read anew."""
        return config.read_tree(self.folder / "config.yaml")

    def check(self) -> Run:
        """Itself, with everything read that a table shows but for the ratios; `Damaged` where that cannot be."""
        with reading(self.folder):
            _ = self.summary, self.events, self.scores
        return self

    def _counted(self) -> dict[str, Any]:
        steps, evals = self.steps, self.evals
        number = len(steps["step"])
        routed = np.isfinite(steps["num_active"])  # not while a fork heals
        unit_steps = int(routed.sum()) * len(self.header.get("units") or [])
        max_o = self.settings.get("controller.max_o")

        def share(field: str) -> float | None:
            return float(np.nansum(steps[field]) / unit_steps) if unit_steps else None

        return {
            "steps": number,
            "tokens": _last(steps["tokens"]),
            "final_val_loss": _last(evals["val_loss"]),
            "final_val_ppl": _last(evals["val_ppl"]),
            "promotion_frac": share("num_active"),
            "hit_max_o_frac": float(np.mean(steps["num_active"][routed] >= max_o)) if routed.any() and max_o else None,
            "over_frac": {name: over / unit_steps for name, over in self._step_rows[2].items()} if unit_steps else {},
            "saved_bytes_mean": _mean(steps["saved_bytes"]),
            "spent_gemm_frac": _mean(steps["spent_gemm_frac"]),
            "spent_extra_bytes": _mean(steps["spent_extra_bytes"]),
            "numbers_sent_frac": _mean(steps["numbers_sent_frac"]),
            "nonfinite_total": _last(steps["nonfinite_total"]),
            "wall_time_s": float(np.nansum(steps["step_time_s"])) if number else None,
        }

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
        """Of a fork its base: the last part of its path and the beginning of its checksum."""
        if (name := self.settings.get("base")) is None:
            return None
        base = self.header.get("base")
        digest = str(base.get("sha256", ""))[:8] if isinstance(base, dict) else ""
        return f"{Path(str(name)).name} {digest}".rstrip()

    @property
    def tokens_per_step(self) -> int | None:
        """Of an optimizer step; None where the settings do not say."""
        sizes = [self.settings.get(key) for key in _OF_A_STEP]
        return None if None in sizes else int(np.prod(np.array(sizes)))

    @property
    def data(self) -> dict[str, Any]:
        """What the header says of the data."""
        return self.header.get("data") or {}

    @property
    def machine(self) -> str:
        """Device and processor, in words."""
        machine = self.header.get("machine") or {}
        told = [str(machine[key]) for key in ("device", "cpu") if machine.get(key)] or ["unknown machine"]
        return ", ".join([*told, *(["16-bit products in FP32"] if machine.get("products") == "in FP32" else [])])

    @property
    def command(self) -> str:
        """What made it, from its header. A path of which that has the last part alone is marked, as .../gsm: the words
        do not run as they stand."""
        told = str(self.header.get("command") or "-")
        try:
            words = shlex.split(told)
        except ValueError:
            return told
        for key in _PATHS:
            path = Path(str(self.settings.get(key) or ""))
            if path.is_absolute() and (word := f"{key}={path.name}") in words:
                words[words.index(word)] = f"{key}=.../{path.name}"
        return shlex.join(words) if "=.../" in " ".join(words) else told

    @property
    def commit(self) -> str:
        """The first ten digits of it."""
        return str(self.header.get("commit") or "unknown")[:10]

    def ratios(self) -> Ratios:
        """Read anew at each call: too large to keep for every run of a sweep."""
        table = read_ratios(self.folder).unify_dictionaries()
        if table.num_rows == 0:
            empty = np.zeros((0, 0), np.float32)
            return Ratios(np.zeros(0, np.int64), [], empty, {}, empty, empty.astype(bool))
        if missing := [name for name in _SHOWN if name not in table.column_names]:
            raise Damaged(f"{self.folder}: its ratios have no column {missing[0]!r}")
        unit = table["unit"].combine_chunks()
        names = unit.dictionary.to_pylist()
        there = set(names)
        known = [name for name in self.header.get("units") or [] if name in there]
        place = {name: number for number, name in enumerate(dict.fromkeys([*known, *names]))}
        column = np.array([place[name] for name in names])[unit.indices.to_numpy()]
        steps, row = np.unique(table["step"].to_numpy(), return_inverse=True)
        columns = [name for name in table.column_names if name not in ratio_schema(()).names]
        self._check_cells(table.num_rows, len(steps), len(place), len(columns))
        if len(np.unique(row.astype(np.int64) * len(place) + column)) < table.num_rows:
            raise Damaged(f"{self.folder}: the ratios of a step and unit stand in two rows")

        def matrix(field: str, missing: Any, dtype: Any) -> np.ndarray:
            dense = np.full((len(steps), len(place)), missing, dtype)
            dense[row, column] = table[field].to_numpy()
            return dense

        return Ratios(
            steps.astype(np.int64),
            list(place),
            matrix("norm", np.nan, np.float32),
            {name: matrix(name, np.nan, np.float32) for name in columns},
            matrix("risk", np.nan, np.float32),
            matrix("active", False, bool),
        )

    def _check_cells(self, rows: int, steps: int, units: int, columns: int) -> None:
        """`Damaged` for matrices that are larger than a machine has memory, or nearly empty."""
        cells = steps * units
        if cells * (columns + 3) > _MOST_NUMBERS or cells > 2**24 + _MOST_UNOBSERVED * rows:
            told = f"{rows:,} rows are of {steps:,} steps and {units:,} units"
            raise Damaged(f"{self.folder}: its ratios are too large to be shown ({told})")


def load(folder: Path, place: Path | None = None) -> Run:
    """A run, checked and without its rows, which are read when they are first asked for. `place`: see `Run`.

    A config of another version of this project, which no longer passes its checks, is taken as it is written.
    Raises `UserError` where a file is not what it should be (`gnmr.records.untrusted`).
    """
    tree = config.read_tree(folder / "config.yaml")
    header = _header(folder / "header.json")
    name = _FOLDER_NAME.fullmatch(folder.name)
    try:
        parsed = _parsed(tree)
        settings = config.identity(parsed)
        arm, digest, seed = parsed.arm_name, config.config_hash(parsed), parsed.training.seed
    except UserError:
        with reading(folder / "config.yaml"):
            settings = {"controller.hold": 1} | _settings(config.flatten(tree))
            arm = str(header.get("arm") or (name["arm"] if name else folder.name))
            digest = name["hash"] if name else "unknown"
            seed = settings.pop("training.seed", None)
            seed = int(seed if seed is not None else header.get("seed") or (name["seed"] if name else 0))
    status, reason = _status(folder)
    _check_ratios(folder)
    check_records(folder)
    return Run(
        folder=folder,
        settings={key: text(value) if isinstance(value, str) else value for key, value in settings.items()},
        header=header,
        experiment=text(settings.get("experiment_name") or header.get("experiment") or "custom"),
        scale=text(settings.get("scale_name") or header.get("scale") or "custom"),
        arm=text(arm),
        hash=digest,
        seed=seed,
        status=status,
        reason=reason,
        place=place or folder,
    )


def _parsed(tree: dict[str, Any]) -> config.Config:
    """The runs of an arm differ in their seed; the rest, most of the time that a report takes, is checked once."""
    training: Any = tree.get("training")
    seed = training.get("seed") if isinstance(training, dict) else None
    if type(seed) is not int or tree.get("base"):  # a fork's seed is checked against its order
        return config.load(tree)
    arm = _of_arm(json.dumps(tree | {"training": training | {"seed": 0}}, default=str))
    return replace(arm, training=replace(arm.training, seed=seed))


@lru_cache(maxsize=512)
def _of_arm(tree: str) -> config.Config:
    return config.load(json.loads(tree))


_OF_A_STEP = ("training.seq_len", "training.batch_size", "training.accumulation")
_SIZES = (*_OF_A_STEP, "training.steps", "training.seed", "controller.max_o", "controller.hold")


def _settings(flat: dict[str, Any]) -> dict[str, Any]:
    """The flat keys of a config that no check has seen: ValueError for a size that is no number."""
    for key in _SIZES:
        if (value := flat.get(key)) is not None and (type(value) is not int or not 0 <= value < 2**48):
            raise ValueError(f"{key}={value!r:.40}: must be a whole number")
    return flat


_HEADER: dict[str, type] = {
    "data": dict,
    "machine": dict,
    "units": list,
    "cost": list,
    "seed": int,
    **dict.fromkeys(("command", "commit", "arm", "experiment", "scale"), str),
}


def _header(path: Path) -> dict[str, Any]:
    """header.json, its words in short printable lines; empty without it."""
    header = read_json(path) or {}
    with reading(path):
        for key, kind in _HEADER.items():
            if header.get(key) is not None and not isinstance(header[key], kind):
                raise ValueError(f"{key}: must be a {kind.__name__}")
        check_units(header.get("units") or [])
        header = {key: _told(value) for key, value in header.items()}
        fingerprint = header.get("data", {}).get("fingerprint")
        if not isinstance(fingerprint, str | None):
            raise ValueError("data.fingerprint: must be a str")
    return header


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {text(key): _told(item) for key, item in value.items()}
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


_WORDS, _MAPPINGS = ("status", "reason", "incomplete"), ("over_frac", "saturation_total", "monitored")


def _summary(folder: Path) -> dict[str, Any]:
    """What summary.json says; `Damaged` where it gives no number for a figure."""
    path = folder / "summary.json"
    summary = read_json(path) or {}
    for key, value in summary.items():
        kind = str | float if key in _WORDS else dict if key in _MAPPINGS else int | float  # "nan" is read as a number
        if key in SUMMARY_FIELDS and not isinstance(value, kind | None):
            raise Damaged(f"{path}: {key}={value!r:.40} is no figure")
    return summary


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def _check_ratios(folder: Path) -> None:
    """UserError for ratios that were cut off or are no Parquet at all; reads no more than their end."""
    path = folder / "ratios.parquet"
    with suppress(FileNotFoundError), opened(path) as file:
        try:
            check_parquet(file)
        except Exception as error:
            raise Damaged(f"{path}: damaged ({first_line(error)})") from error


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
