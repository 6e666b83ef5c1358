"""Finding run folders and reading one: what it was, how it ended, what it measured.

Nothing here needs a run to be whole. A run that is in progress, was killed or failed gives what its files hold.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gnmr import config
from gnmr.errors import UserError
from gnmr.records.ledger import check_records
from gnmr.records.reader import iter_jsonl, read_json, read_jsonl, read_ratios
from gnmr.records.schema import EVAL_FIELDS, STEP_FIELDS, ratio_schema

_FOLDER_NAME = re.compile(r"(?P<arm>.+)-(?P<hash>[0-9a-f]{8})-s(?P<seed>\d+)")
_NO_NUMBERS = ("nonfinite_unit", "over", "statistics")

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

    @cached_property
    def steps(self) -> Columns:
        """`STEP_FIELDS` as columns, one row a recorded step."""
        return _columns(read_jsonl(self.folder / "steps.jsonl"), STEP_FIELDS)

    @cached_property
    def statistics(self) -> Columns:
        """What the model told of each step's forward passes, by name; empty for a model that tells nothing."""
        rows = [row.get("statistics") or {} for row, _ in iter_jsonl(self.folder / "steps.jsonl")]
        return _columns(rows, dict.fromkeys(name for row in rows for name in row))

    @cached_property
    def evals(self) -> Columns:
        """`EVAL_FIELDS` as columns, one row an evaluation."""
        return _columns(read_jsonl(self.folder / "eval.jsonl"), EVAL_FIELDS)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """`EVENT_FIELDS` rows."""
        return read_jsonl(self.folder / "events.jsonl")

    @cached_property
    def scores(self) -> dict[str, Any]:
        """`SCORE_FIELDS` of its last scoring, in training or, where there was none, by `gnmr eval`; empty: none."""
        rows = read_jsonl(self.folder / "scores.jsonl")
        return rows[-1] if rows else read_json(self.folder / "scores.json") or {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`SUMMARY_FIELDS`: what summary.json says, the rest counted from the rows; None where nothing is known."""
        written = read_json(self.folder / "summary.json") or {}
        return self._counted() | {key: value for key, value in written.items() if value is not None}

    def _counted(self) -> dict[str, Any]:
        steps, evals = self.steps, self.evals
        number = len(steps["step"])
        unit_steps = number * len(self.header.get("units") or [])
        max_o = self.settings.get("controller.max_o")

        def share(field: str) -> float | None:
            return float(np.nansum(steps[field]) / unit_steps) if unit_steps else None

        return {
            "steps": number,
            "tokens": _last(steps["tokens"]),
            "final_val_loss": _last(evals["val_loss"]),
            "final_val_ppl": _last(evals["val_ppl"]),
            "promotion_frac": share("num_active"),
            "hit_max_o_frac": float(np.mean(steps["num_active"] >= max_o)) if number and max_o else None,
            "over_frac": {column: number / unit_steps for column, number in self._over().items()} if unit_steps else {},
            "saved_bytes_mean": _mean(steps["saved_bytes"]),
            "nonfinite_total": _last(steps["nonfinite_total"]),
            "wall_time_s": float(np.nansum(steps["step_time_s"])) if number else None,
        }

    def _over(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for row, _ in iter_jsonl(self.folder / "steps.jsonl"):
            total.update(row.get("over") or {})
        return total

    @property
    def last_step(self) -> int:
        """Newest recorded step, 0 before the first; the summary's number of steps where the rows are not kept."""
        return int(_last(self.steps["step"]) or self.summary.get("steps") or 0)

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps that were asked for."""
        return self.settings.get("training.steps")

    @property
    def tokens_per_step(self) -> int | None:
        """Of an optimizer step; None where the settings do not say."""
        sizes = [self.settings.get(f"training.{key}") for key in ("seq_len", "batch_size", "accumulation")]
        return None if None in sizes else int(np.prod([size for size in sizes if size is not None]))

    @property
    def data(self) -> dict[str, Any]:
        """What the header says of the data."""
        return self.header.get("data") or {}

    @property
    def machine(self) -> str:
        """Device and processor, in words."""
        machine = self.header.get("machine") or {}
        return ", ".join(str(machine[key]) for key in ("device", "cpu") if machine.get(key)) or "unknown machine"

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
        unit = table["unit"].combine_chunks()
        names = unit.dictionary.to_pylist()
        known = [name for name in self.header.get("units") or [] if name in set(names)]
        order = known + [name for name in names if name not in set(known)]
        column = np.array([order.index(name) for name in names])[unit.indices.to_numpy()]
        steps, row = np.unique(table["step"].to_numpy(), return_inverse=True)

        columns = [name for name in table.column_names if name not in ratio_schema(()).names]

        def matrix(field: str, missing: Any, dtype: Any) -> np.ndarray:
            dense = np.full((len(steps), len(order)), missing, dtype)
            dense[row, column] = table[field].to_numpy()
            return dense

        return Ratios(
            steps.astype(np.int64),
            order,
            matrix("norm", np.nan, np.float32),
            {name: matrix(name, np.nan, np.float32) for name in columns},
            matrix("risk", np.nan, np.float32),
            matrix("active", False, bool),
        )


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run folders at or below the paths, each once, in order of name; hidden folders below a path are passed over.

    Raises `UserError` for a path that does not exist or has no run in it.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}")
        inside = []
        for parent, folders, files in os.walk(path):
            if "config.yaml" in files and ("steps.jsonl" in files or "header.json" in files):
                inside.append(Path(parent))
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith("."))
        if not inside:
            raise UserError(f"{path}: no run in it (a run folder holds config.yaml and steps.jsonl or header.json)")
        for folder in inside:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def load(folder: Path) -> Run:
    """A run without its rows, which are read when they are first asked for.

    A config of another version of this project, which no longer passes its checks, is taken as it is written.
    Raises `UserError` where config.yaml is not readable at all.
    """
    tree = _read_config(folder / "config.yaml")
    header = read_json(folder / "header.json") or {}
    name = _FOLDER_NAME.fullmatch(folder.name)
    try:
        parsed = config.load(tree)
        settings = config.identity(parsed)
        arm, digest, seed = parsed.arm_name, config.config_hash(parsed), parsed.training.seed
    except UserError:
        settings = {"controller.hold": 1} | config.flatten(tree)
        arm = str(header.get("arm") or (name["arm"] if name else folder.name))
        digest = name["hash"] if name else "unknown"
        seed = settings.pop("training.seed", None)
        seed = int(seed if seed is not None else header.get("seed") or (name["seed"] if name else 0))
    status, reason = _status(folder)
    _check_ratios(folder)
    check_records(folder)
    return Run(
        folder=folder,
        settings=settings,
        header=header,
        experiment=str(settings.get("experiment_name") or header.get("experiment") or "custom"),
        scale=str(settings.get("scale_name") or header.get("scale") or "custom"),
        arm=arm,
        hash=digest,
        seed=seed,
        status=status,
        reason=reason,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: cannot be read ({config.one_line(error)})") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a config (a mapping was expected)")
    return {str(key): value for key, value in tree.items()}


def _status(folder: Path) -> tuple[str, str | None]:
    """The markers decide; FAILED first, so that a run counts as done only where nothing says otherwise."""
    summary = read_json(folder / "summary.json") or {}
    failed = folder / "FAILED"
    if failed.exists():
        text = " ".join(failed.read_text(encoding="utf-8", errors="replace").split())
        return "failed", text or summary.get("reason") or "no reason given"
    if (folder / "DONE").exists():
        return "done", None
    if summary.get("status") in ("failed", "interrupted"):
        return summary["status"], summary.get("reason")
    return "running", None


def _columns(rows: list[dict[str, Any]], fields: Iterable[str]) -> Columns:
    return {field: np.array([_number(row.get(field)) for row in rows]) for field in fields if field not in _NO_NUMBERS}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def _check_ratios(folder: Path) -> None:
    """UserError for ratios that were cut off or are no Parquet at all; reads no more than their end."""
    file = folder / "ratios.parquet"
    try:
        pq.read_metadata(file)
    except FileNotFoundError:
        return
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{file}: damaged ({str(error).splitlines()[0]})") from error
