"""Recorded evidence as matrices: of a run folder, or of a CSV or Parquet file.

A file has the columns step (from 1), unit and norm (`nan` and `inf` allowed); further columns are further evidence. A
missing row is a unit that was not observed in that step. Ties are ranked in the order of the run's units, in a file in
the order of the units' first rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from gnmr.control.evidence import EVIDENCE
from gnmr.errors import UserError
from gnmr.lab.config import ControllerConfig, load, one_line, read_tree
from gnmr.lab.config import read as read_config
from gnmr.records.reader import check_units, read_json, read_jsonl, read_ratios
from gnmr.records.untrusted import Damaged, exists, opened, reading

MOST_GAPS = 1000
"""Steps of which one is recorded at least (records.ratios_every); a hundred more may be missing."""
MAX_CELLS = 1 << 28
"""Steps by units: 2 GB; 1e6 steps of 84 units are a third."""


@dataclass(frozen=True)
class Norms:
    """Recorded evidence of T steps and U units."""

    units: list[str]
    norm: np.ndarray  # (T, U) float64
    observed: np.ndarray  # (T, U) bool
    more: dict[str, np.ndarray] = field(default_factory=dict)
    """(T, U) float64 each: what was recorded besides the norms, by its name in gnmr.control.evidence."""
    cost: tuple[float, ...] | None = None
    """Extra bytes of each unit's recovery (Eq. 5); None: unknown, all the same."""
    spend: tuple[float, ...] | None = None
    """What each unit takes of a budget, as a share; None: unknown, all the same."""
    spend_pinned: float = 0.0
    """What pins take of it."""
    pinned: frozenset[str] = frozenset()
    """Units that pins left nothing to recover: never routed."""
    settings: ControllerConfig = field(default_factory=ControllerConfig)
    """The run's own, for a file the defaults."""
    steps: int = 0
    """Length of the run, which shares of its steps refer to."""
    seed: int = 0
    every: int = 1
    """Steps between two recorded ones; in the others no unit counts as observed."""
    retried: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By step the units that were promoted in it because the loss was not finite by their low paths; its evidence is
    that of the step tried again."""
    blameless: frozenset[int] = frozenset()
    """Steps whose loss was not finite by no unit's low path: set and locks stayed."""

    @property
    def evidence(self) -> set[str]:
        """Names of what was recorded."""
        return {"norm", "observed", *self.more}


def read_norms(path: Path) -> Norms:
    """Norms of a run folder or a file. UserError names what is missing or wrong."""
    order: list[str] | None = None
    spend, spend_pinned = None, 0.0
    cost: tuple[float, ...] | None = None
    pinned: frozenset[str] = frozenset()
    own_loop = own_loop_of(path)
    config = read_config(path / "config.yaml") if own_loop is None and exists(path / "config.yaml") else None
    if path.is_dir():
        order, cost, pinned = _units_and_cost(path / "header.json")
        spend, spend_pinned = _spend(path / "header.json")
        table = read_ratios(path)
        if table.num_rows == 0:
            raise UserError(f"{path}: no recorded norms in this folder (units.arrows is missing or empty)")
    elif not path.exists():
        raise UserError(f"{path}: there is no such file or run folder")
    else:
        table = _read_file(path)
    with reading(path):
        norms = replace(_dense(path, table, order, cost), pinned=pinned, spend_pinned=spend_pinned)
        norms = replace(norms, spend=spend if spend is not None and len(spend) == len(norms.units) else None)
    if own_loop is not None:
        norms = replace(norms, settings=own_loop, steps=len(norms.norm))
    if config is None:
        return norms
    training, every = config.training, config.records.ratios_every
    norms = replace(norms, settings=config.controller, steps=training.steps, seed=training.seed, every=every)
    retried, blameless = _verdicts(path, norms.units)
    return replace(norms, retried=retried, blameless=blameless)


def own_loop_of(path: Path) -> ControllerConfig | None:
    """Return the settings of the controller that recorded this folder in a loop of the user's own (`gnmr.attach`); None
    for any other place.

    Its two-stage thresholds are those of the second stage.
    """
    if not exists(path / "config.yaml"):
        return None
    tree = read_tree(path / "config.yaml")
    given: Any = tree.get("controller")
    if tree.get("own_loop") is not True or not isinstance(given, dict):
        return None
    known = {field.name for field in fields(ControllerConfig)}
    given = {
        key: value.get("main") if isinstance(value, dict) and key != "options" else value
        for key, value in given.items()
    }
    steps = (read_json(path / "summary.json") or {}).get("steps") or 0
    warmup = given.get("warmup_steps") or 0
    own = {key: value for key, value in given.items() if key in known}
    return load({"controller": own | {"warmup_frac": min(warmup / steps, 1.0) if steps else 0.0}}).controller


def refuse_gaps(path: Path, norms: Norms, what: str) -> None:
    """UserError where steps are missing: shares of unit-steps and windows would be of another run."""
    if norms.every > 1:
        raise UserError(f"{path}: {what} needs every step, records.ratios_every={norms.every} kept one in as many")


def _verdicts(path: Path, units: list[str]) -> tuple[dict[int, tuple[str, ...]], frozenset[int]]:
    """`Norms.retried` and `Norms.blameless` of a run folder."""
    retried: dict[int, tuple[str, ...]] = {}
    blameless = set[int]()
    for row in read_jsonl(path / "events.jsonl"):
        if row.get("event") == "promote" and row.get("cause") == "retry":
            if row.get("unit") not in units:
                raise Damaged(f"{path / 'events.jsonl'}: step {row['step']} promotes a unit that the run does not have")
            retried[row["step"]] = (*retried.get(row["step"], ()), row["unit"])
        elif row.get("event") == "verdict" and row.get("cause") != "precision":
            blameless.add(row["step"])
    if blameless:  # of a spike that is finite a verdict changes nothing
        lost = {row["step"] for row in read_jsonl(path / "steps.jsonl") if not math.isfinite(_number(row.get("loss")))}
        blameless &= lost
    return retried, frozenset(blameless)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _units_and_cost(path: Path) -> tuple[list[str] | None, tuple[float, ...] | None, frozenset[str]]:
    """What header.json says of the units, where it says it: all, their costs, those that are pinned."""
    header = read_json(path) or {}
    units, cost = header.get("units"), header.get("cost")
    with reading(path):
        order = None if units is None else check_units(units)
        costs = tuple(float(one) for one in cost or ())
        pinned = frozenset(check_units(header["pinned"]) if header.get("pinned") else ())
    if costs and (len(costs) != len(order or ()) or not all(math.isfinite(one) and one > 0 for one in costs)):
        raise Damaged(f"{path}: cost must hold a positive number for each of the units")
    return order, costs or None, pinned


def _spend(path: Path) -> tuple[tuple[float, ...] | None, float]:
    """What header.json says of a budget: the units' shares of the cost, that of pins."""
    header = read_json(path) or {}
    with reading(path):
        costs = tuple(float(one) for one in header.get("spend") or ())
        pinned = float(header.get("spend_pinned") or 0)
    if not all(math.isfinite(one) and one >= 0 for one in (*costs, pinned)):
        raise Damaged(f"{path}: spend must hold shares of 0 or more")
    return costs or None, pinned


def _dense(path: Path, table: pa.Table, order: list[str] | None, cost: tuple[float, ...] | None) -> Norms:
    """The rows as matrices."""
    step, names, norm = _columns(path, table)
    codes, units = _codes(names, order)
    if len(step) == 0 or step.min() < 1:
        raise UserError(f"{path}: steps count from 1" + ("" if len(step) else "; the file has no rows"))
    if (norm < 0).any():
        raise UserError(f"{path}: a norm is negative (step {step[np.argmax(norm < 0)]})")
    last, recorded = int(step.max()), len(np.unique(step))
    if last > MOST_GAPS * (recorded + 100) or last * len(units) > MAX_CELLS:
        raise UserError(
            f"{path}: step {last} is too large: {recorded} steps of {len(units)} units are recorded, and a step of all "
            f"in {MOST_GAPS:,}, {MAX_CELLS:,} norms in all, are the most that are read"
        )
    dense = np.zeros((last, len(units)))
    observed = np.zeros(dense.shape, dtype=bool)
    dense[step - 1, codes], observed[step - 1, codes] = norm, True
    if observed.sum() < len(step):
        raise UserError(f"{path}: a step and unit stand in two rows")
    more = {}
    for name in sorted(EVIDENCE.keys() & set(table.column_names) - {"norm", "observed"}):
        more[name] = np.zeros(dense.shape)
        try:
            more[name][step - 1, codes] = table[name].cast(pa.float64()).to_numpy()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UserError(f"{path}: column {name!r} must hold numbers ({one_line(error)})") from error
    return Norms(units, dense, observed, more, None if cost is None or len(cost) != len(units) else cost, steps=last)


def _columns(path: Path, table: pa.Table) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Step, unit and norm of every row."""
    for name in ("step", "unit", "norm"):
        if (count := table.column_names.count(name)) != 1:
            there = f"stands there {count} times" if count else "is missing"
            raise UserError(f"{path}: column {name!r} {there}; needed are step, unit, norm")
    try:
        steps, names = table["step"].cast(pa.int64()), table["unit"].cast(pa.string())
        norm = table["norm"].cast(pa.float64()).fill_null(np.nan).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{path}: step must hold whole numbers, unit names and norm numbers ({error})") from error
    if steps.null_count or names.null_count:
        raise UserError(f"{path}: a row has no step or no unit")
    return steps.to_numpy(), names.to_pylist(), norm


def _read_file(path: Path) -> pa.Table:
    try:
        with opened(Path(os.path.realpath(path))) as file:
            return _table_of(file, path.suffix == ".parquet")
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: cannot be read as CSV or Parquet ({one_line(error)})") from error


def _table_of(file: BinaryIO, parquet: bool) -> pa.Table:
    if parquet:
        return pq.read_table(file)
    options = pyarrow.csv.ConvertOptions(
        column_types={"unit": pa.string(), "norm": pa.float64(), "step": pa.int64()},
        null_values=[""],
        strings_can_be_null=True,
    )
    return pyarrow.csv.read_csv(file, convert_options=options)


def _codes(names: list[str], order: list[str] | None) -> tuple[np.ndarray, list[str]]:
    place = {name: i for i, name in enumerate(order or [])}
    codes = np.array([place.setdefault(name, len(place)) for name in names], dtype=np.int64)
    return codes, list(place)
