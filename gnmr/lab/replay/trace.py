"""Recorded evidence as matrices, from a run folder or from a CSV, Parquet or Arrow file.

A file has the columns step (from 1), unit and norm (`nan` and `inf` allowed). Further columns are further evidence. A
missing row means that the unit was not observed in that step. Ties are ranked in the order of the run's units, or in a
file in the order of the units' first rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from gnmr.control.calibration import NO_TRIGGER
from gnmr.control.evidence import EVIDENCE
from gnmr.control.signals import SIGNALS, SignalBase
from gnmr.errors import UserError, plural
from gnmr.lab.config import ControllerConfig, load, one_line, read_tree
from gnmr.lab.config import read as read_config
from gnmr.records import seal
from gnmr.records.reader import calibrated_trigger, calibration_steps, check_units, read_json, read_jsonl, read_units
from gnmr.records.untrusted import Damaged, exists, opened, reading

MOST_GAPS = 1000
"""Largest interval between recorded steps (records.units_every); a hundred more may be missing."""
MAX_CELLS = 1 << 28
"""Limit on steps times units: 2 GB. 1e6 steps of 84 units are a third of it."""


@dataclass(frozen=True)
class Norms:
    """Recorded evidence of T steps and U units."""

    units: list[str]
    norm: np.ndarray  # (T, U) float64
    observed: np.ndarray  # (T, U) bool
    more: dict[str, np.ndarray] = field(default_factory=dict)
    """Evidence besides the norms, (T, U) float64 each, by its name in gnmr.control.evidence."""
    cost: tuple[float, ...] | None = None
    """Extra bytes of each unit's recovery (Eq. 5). If unknown, it is None, and all units are equal."""
    spend: tuple[float, ...] | None = None
    """Cost of each unit as a share of a budget. If unknown, it is None, and all units are equal."""
    spend_pinned: float = 0.0
    """Cost of the pins as a share of a budget."""
    gemms: bool = True
    """Whether these are shares of the arithmetic of all GEMMs."""
    pinned: frozenset[str] = frozenset()
    """Units that are never routed, because pins left nothing to recover."""
    settings: ControllerConfig = field(default_factory=ControllerConfig)
    """The run's settings, or the defaults for a file."""
    steps: int = 0
    """Length of the run, to which fractions of its steps refer."""
    seed: int = 0
    triggers: Mapping[int, float] = field(default_factory=dict)
    """Triggers of a loop that calibrated that of `settings`, by the first step of each."""
    every: int = 1
    """Interval between recorded steps. In the other steps no unit counts as observed."""
    retried: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Units promoted by step, because their low paths made the loss non-finite. Evidence is from the retried step."""
    blameless: frozenset[int] = frozenset()
    """Steps in which no unit's low path caused the non-finite loss: set and locks stayed unchanged."""


def read_norms(path: Path) -> Norms:
    """Return the evidence of a run folder or a file. Raises UserError if something is missing or wrong."""
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path}: there is no such file or run folder")
        with reading(path):
            return _dense(path, _read_file(path), [])
    seal.check(path)
    table, header = read_units(path), read_json(path / "header.json") or {}
    if table.num_rows == 0:
        inside = [] if exists(path / "config.yaml") else sorted(one.parent for one in path.glob("*/units.arrows"))
        if inside:
            raise UserError(f"{path}: holds {plural(len(inside), 'run')}; name one, such as {inside[0]}")
        raise UserError(f"{path}: no recorded norms in this folder (units.arrows is missing or empty)")
    with reading(path / "header.json"):
        units, pinned = (check_units(header.get(key) or []) for key in ("units", "pinned"))
        bytes_, shares = (header.get(key) or [] for key in ("cost", "spend"))
        cost = () if None in bytes_ else tuple(map(float, bytes_))  # compressed gradients have no activations
        spend = tuple(map(float, shares))
        sized = all(len(costs) in (0, len(units)) for costs in (cost, spend))
        if not sized or not all(map(math.isfinite, cost + spend)):
            raise ValueError("cost and spend: must hold a number for each of the units")
        spend_pinned = float(header.get("spend_pinned") or 0)
    with reading(path):
        norms = replace(_dense(path, table, units), pinned=frozenset(pinned), spend_pinned=spend_pinned)
        if norms.units == units:
            norms = replace(norms, cost=cost or None, spend=spend or None)
    if (own := _own_loop(path, norms, header)) is not None:
        return own
    if not exists(path / "config.yaml"):
        return norms
    config = read_config(path / "config.yaml")
    retried, blameless = _verdicts(path, norms.units)
    return replace(
        norms,
        gemms=config.controller.cost == "gemm" and not config.compression.routes,
        more=_evidence(norms.more, config.controller.signal, config.records.evidence),
        settings=config.controller,
        steps=config.training.steps,
        seed=config.training.seed,
        every=config.records.units_every,
        retried=retried,
        blameless=blameless,
    )


def _evidence(columns: Mapping[str, np.ndarray], signal: str, recorded: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Return the columns that are evidence; the signal `price` records its mean under the name of what it reads."""
    cls = SIGNALS.get(signal, SignalBase)
    own = {*cls.columns} - {getattr(cls, "value", None), *recorded}
    return {name: values for name, values in columns.items() if name not in own}


def _own_loop(path: Path, norms: Norms, header: Mapping[str, Any]) -> Norms | None:
    """Return the evidence with the settings of a loop of the user's own, which `gnmr.attach` recorded; else None.

    Raises UserError if alpha and beta have first stages of different lengths, which a run cannot have.
    """
    if not exists(path / "config.yaml"):
        return None
    tree = read_tree(path / "config.yaml")
    given: Any = tree.get("controller")
    if tree.get("own_loop") is not True or not isinstance(given, dict):
        return None
    own = {key: value for key, value in given.items() if key in {field.name for field in fields(ControllerConfig)}}
    if not (gemms := given.get("cost") == "gemm"):
        own.pop("cost", None)  # perhaps a table
    own.pop("nonfinite", None)  # in such a loop it has no effect; `keep` leaves out its own promotions in replays
    found = calibrated_trigger(header)
    with reading(path / "config.yaml"):
        own["warmup_frac"] = min((given.get("warmup_steps") or 0) / norms.steps, 1.0)
        stages = {key: own[key] for key in ("alpha", "beta") if isinstance(own.get(key), dict)}
        for key, stage in stages.items():
            own |= {key: stage["main"], f"{key}_init": stage["init"]}
            own["init_frac"] = min(stage["init_steps"] / norms.steps, 1.0)
        if len({stage["init_steps"] for stage in stages.values()}) > 1:
            raise UserError(
                f"{path}: the first stages of its alpha and beta differ in length; give its units.arrows and settings"
            )
        seed = int(header.get("signal_seed") or 0)
    settings, triggers = load({"controller": own}).controller, dict[int, float]()
    if ran := calibration_steps(header) or (found and (1, found[0])):  # earlier records have its last step only
        after = settings.trigger if found is None else found[1]
        triggers = {1: settings.trigger, ran[0]: NO_TRIGGER, sum(ran): after}
        settings = replace(settings, trigger=after)
    return replace(
        norms,
        more=_evidence(norms.more, settings.signal),
        gemms=gemms,
        settings=settings,
        seed=seed,
        triggers=triggers,
        retried=_verdicts(path, norms.units)[0],
    )


def refuse_gaps(path: Path, norms: Norms, what: str) -> None:
    """Raise UserError if steps are missing, because shares of unit-steps and windows would be wrong."""
    if norms.every > 1:
        raise UserError(f"{path}: {what} needs every step, records.units_every={norms.every} kept one in as many")


def _verdicts(path: Path, units: list[str]) -> tuple[dict[int, tuple[str, ...]], frozenset[int]]:
    """Return `Norms.retried` and `Norms.blameless` of a run folder."""
    retried: dict[int, tuple[str, ...]] = {}
    blameless = set[int]()
    for row in read_jsonl(path / "events.jsonl"):
        if row.get("event") == "promote" and row.get("cause") == "retry":
            if row.get("unit") not in units:
                raise Damaged(f"{path / 'events.jsonl'}: step {row['step']} promotes a unit that the run does not have")
            retried[row["step"]] = (*retried.get(row["step"], ()), row["unit"])
        elif row.get("event") == "verdict" and row.get("cause") != "precision":
            blameless.add(row["step"])
    if blameless:  # a verdict on a finite spike changes nothing
        steps = read_jsonl(path / "steps.jsonl")
        finite = {row["step"] for row in steps if isinstance(row.get("loss"), float) and math.isfinite(row["loss"])}
        blameless -= finite
    return retried, frozenset(blameless)


def _dense(path: Path, table: pa.Table, order: list[str]) -> Norms:
    """Return the rows as matrices. Units have the order of `order`, followed by further units."""
    for name in ("step", "unit", "norm"):
        if (count := table.column_names.count(name)) != 1:
            there = f"appears {count} times" if count else "is missing"
            raise UserError(f"{path}: column {name!r} {there}; it needs step, unit and norm")
    try:
        steps, names = table["step"].cast(pa.int64()), table["unit"].cast(pa.string())
        columns = {
            name: table[name].cast(pa.float64()).fill_null(np.nan).to_numpy()
            for name in table.column_names
            if name == "norm" or (name in EVIDENCE and name != "observed")
        }
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{path}: columns must hold numbers, and unit names ({one_line(error)})") from error
    if steps.null_count or names.null_count:
        raise UserError(f"{path}: a row has no step or no unit")
    step = steps.to_numpy()
    place = {name: number for number, name in enumerate(dict.fromkeys([*order, *names.to_pylist()]))}
    codes = np.array([place[name] for name in names.to_pylist()], dtype=np.int64)
    if len(step) == 0 or step.min() < 1:
        raise UserError(f"{path}: steps count from 1" + ("" if len(step) else "; the file has no rows"))
    if (columns["norm"] < 0).any():
        raise UserError(f"{path}: a norm is negative (step {step[np.argmax(columns['norm'] < 0)]})")
    last, recorded = int(step.max()), len(np.unique(step))
    if last > MOST_GAPS * (recorded + 100) or last * len(place) > MAX_CELLS:
        raise UserError(
            f"{path}: step {last} is too large: {recorded} steps of {len(place)} units are recorded, and a step of all "
            f"in {MOST_GAPS:,}, {MAX_CELLS:,} norms in all, are the most that are read"
        )
    observed = np.zeros((last, len(place)), dtype=bool)
    observed[step - 1, codes] = True
    if observed.sum() < len(step):
        raise UserError(f"{path}: a step and unit appear in two rows")
    dense = {name: np.zeros(observed.shape) for name in sorted(columns)}
    for name, values in columns.items():
        dense[name][step - 1, codes] = values
    return Norms(list(place), dense.pop("norm"), observed, dense, steps=last)


def _read_file(path: Path) -> pa.Table:
    try:
        with opened(Path(os.path.realpath(path))) as file:
            if path.suffix == ".parquet":
                return pq.read_table(file)
            if path.suffix == ".arrows":
                return pa.ipc.open_stream(file).read_all()
            types = {"unit": pa.string(), "norm": pa.float64(), "step": pa.int64()}
            options = pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
            return pyarrow.csv.read_csv(file, convert_options=options)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: cannot be read as CSV, Parquet or Arrow ({one_line(error)})") from error
