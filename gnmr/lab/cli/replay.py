"""`gnmr replay FILE [key=value ...]`: the sets that Algorithm 2 chooses from recorded norms, without training.

Replay plays the paper's rule alone: the ratios GNMR and dGNMR of the norms, their thresholds, the lock and the cap. It
cannot know how the norms would have changed if other units had been in recovery.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from rich.table import Table
from torch import nn

from gnmr.console import for_tables, tracked
from gnmr.control import Controller, Unit
from gnmr.control.spec import NO_CAP, ControlSpec
from gnmr.control.threshold import TwoStage
from gnmr.errors import UserError, as_user_error
from gnmr.lab.cli.parser import Parser, path, settings_and_places
from gnmr.lab.config import ControllerConfig, one_line, read_tree
from gnmr.lab.views.live import recovery_figures
from gnmr.options import nearest
from gnmr.records import output
from gnmr.records.reader import FILES, calibrated_trigger, read_json, read_units
from gnmr.records.untrusted import exists, opened, reading

KEYS = ("alpha", "beta", "delta", "max_o", "t_lock", "trigger")
_NOT_OF_THE_RULE = {"name", "signal", "options", "observe", "nonfinite", "budget"}
MAX_CELLS = 1 << 28
"""Limit on steps times units, 2 GB of norms: 1e6 steps of 84 units are a third of it."""
_TEXT = """\
FILE is a run folder, or a CSV or Parquet file with the columns step, unit and norm. Steps count from 1; nan and
inf are allowed. A missing row is a unit that was not observed in that step.

Algorithm 2 chooses a set in every step. The figures have the names of gnmr train; those of the run stand beside them.

keys:
  alpha beta delta max_o t_lock trigger
             as in conf/config.yaml; default: the run's own values, for a file those of conf/config.yaml

  gnmr replay runs/act_quant_stress/RUN alpha=2.0 beta=1.5 out=decisions.jsonl
"""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser("replay", "FILE [key=value ...] [out=OUT.jsonl]", _TEXT, keys=True, bare=False)
    about = (
        'one JSON line a step: {"step": t, "candidates": [...], "active": [...]}; active is the set chosen from step t '
    )
    parser.option("out", path, about + "(in force in step t + 1), largest risk first")
    options = parser.parse(argv)
    settings, places = settings_and_places(options.words)
    if len(places) != 1:
        parser.error("name one run folder or file")
    place = Path(places[0])
    if options.out is not None:
        output.check(options.out, f"out={options.out}")
        # Compared as files, because a link or another spelling of the path may lead to the same one.
        read_files = [file for file in (place, *map(place.joinpath, FILES)) if file.exists()]
        if options.out.exists() and any(map(options.out.samefile, read_files)):
            raise UserError(f"out={options.out}: would replace the records that are read; name another file")
    units, norms_TU, observed_TU = read_norms(place)
    words = dict(word.removeprefix("controller.").split("=", 1) for word in settings)
    spec = _spec(place, words, len(norms_TU))

    # The controller needs units with a parameter, whose values it never reads here.
    weightless = (nn.Parameter(torch.empty(0, dtype=torch.float32)),)
    controller = Controller([Unit(name, weightless, lambda _recovering: None) for name in units], spec)
    steps_over, unit_steps_recovered, steps_at_cap = Counter[str](), 0, 0
    with nullcontext() if options.out is None else output.replacing(options.out, f"out={options.out}") as file:
        for norms_U, observed_U in tracked(zip(norms_TU, observed_TU, strict=True), "replaying", len(norms_TU)):
            evidence = {"norm": torch.from_numpy(norms_U), "observed": torch.from_numpy(observed_U)}
            # The recorded norms take the place of measured ones; the rule is the controller's own.
            decision = controller.apply(controller.observe(evidence).to_host())
            num_recovered = int(decision.in_force.sum())
            unit_steps_recovered += num_recovered
            steps_at_cap += num_recovered >= spec.max_o
            steps_over.update({ratio: decision.over(ratio) for ratio in decision.columns})
            if file is not None:
                sets = {"candidates": decision.candidate, "active": decision.active}
                row = {"step": decision.step, **{name: decision.by_risk(members) for name, members in sets.items()}}
                file.write(json.dumps(row).encode() + b"\n")
    summary = {
        "steps": len(norms_TU),
        "promotion_frac": unit_steps_recovered / norms_TU.size,
        "hit_max_o_frac": steps_at_cap / len(norms_TU),
        "over_frac": {ratio: number / norms_TU.size for ratio, number in steps_over.items()},
    }
    for_tables().print(_table(place, len(units), summary))
    if options.out is not None:
        print(f"decisions: {options.out}")
    return 0


def read_norms(place: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the recorded norms of a run folder or a file.

    Returns:
        The names of the U units in the order of their first rows, the norms (T, U) in float64, and whether each unit
        was observed in each step (T, U).

    Raises:
        UserError: the place does not exist, or its rows are not norms of steps and units.
    """
    if not place.exists():
        raise UserError(f"{place}: there is no such file or run folder")
    frame = _rows_of_run(place) if place.is_dir() else _rows_of_file(place)
    if absent := {"step", "unit", "norm"} - {*frame.columns}:
        raise UserError(f"{place}: column {min(absent)!r} is missing; it needs step, unit and norm")
    # Only rows that are norms of units in steps: one that is missing, twice or negative would change the sets.
    try:
        if not frame["unit"].map(type).eq(str).all() or (frame["step"] % 1 != 0).any():
            raise ValueError("a step is not whole, or a unit is not a text")
        frame = frame.astype({"step": "int64", "norm": "float64"})
    except (ValueError, TypeError) as error:
        raise UserError(f"{place}: columns must hold numbers, and unit names ({one_line(error)})") from error
    if frame.empty or frame["step"].min() < 1:
        raise UserError(f"{place}: steps count from 1{'; the file has no rows' if frame.empty else ''}")
    if (frame["norm"] < 0).any():
        raise UserError(f"{place}: a norm is negative (step {frame.loc[frame['norm'] < 0, 'step'].iloc[0]})")
    if frame.duplicated(["step", "unit"]).any():
        raise UserError(f"{place}: a step and unit appear in two rows")
    # Units in the order of their first rows, by which ties of the risk go.
    units, last_step = list(frame["unit"].unique()), int(frame["step"].max())
    if last_step * len(units) > MAX_CELLS:
        raise UserError(f"{place}: step {last_step} is too large: {MAX_CELLS:,} norms are the most that are read")
    # Dense arrays of steps by units; what no row names was not observed.
    rows, columns = frame["step"].to_numpy() - 1, pd.Index(units).get_indexer(frame["unit"])
    norms_TU, observed_TU = np.zeros((last_step, len(units))), np.zeros((last_step, len(units)), bool)
    norms_TU[rows, columns], observed_TU[rows, columns] = frame["norm"], True
    return units, norms_TU, observed_TU


def _rows_of_run(place: Path) -> pd.DataFrame:
    frame = read_units(place).select(["step", "unit", "norm"]).to_pandas()
    if frame.empty:
        runs = [] if exists(place / "config.yaml") else sorted(file.parent for file in place.glob("*/units.arrows"))
        remedy = f"holds {len(runs)} runs; name one, such as {runs[0]}" if runs else ""
        raise UserError(f"{place}: {remedy or 'no recorded norms in this folder (units.arrows is missing or empty)'}")
    return frame.assign(unit=frame["unit"].astype(str))


def _rows_of_file(place: Path) -> pd.DataFrame:
    try:
        with opened(Path(os.path.realpath(place))) as file:
            if place.suffix == ".parquet":
                return pd.read_parquet(file)
            frame = pd.read_csv(file, dtype={"unit": str}, keep_default_na=False, na_values={"norm": ["nan", ""]})
            if repeated := {"step.1", "unit.1", "norm.1"} & {*frame.columns}:  # pandas renames the second column
                raise ValueError(f"column {min(repeated)[:-2]!r} is there more than once")
            return frame
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise UserError(f"{place}: cannot be read as CSV or Parquet ({one_line(error)})") from error


def _spec(place: Path, words: dict[str, str], num_steps: int) -> ControlSpec:
    """Return the rule: the words, over the values of the run in `place`, over the defaults."""
    spec = _spec_of_run(place, num_steps, words) if place.is_dir() and exists(place / "config.yaml") else ControlSpec()
    for key, word in words.items():
        if key not in KEYS:
            raise UserError(f"replay: unknown key {key!r}{nearest(key, KEYS)} (gnmr replay --help)")
        is_whole = key in ("max_o", "t_lock", "delta")
        try:
            value: Any = int(word) if is_whole else float(word)
        except ValueError:
            if word != "null":
                kind = "whole number" if is_whole else "number"
                raise UserError(f"replay: {key}={word}: must be a {kind}") from None
            value = NO_CAP if key == "max_o" else None
        with as_user_error("replay: "):
            before = getattr(spec, key)
            # The word replaces the main value of a two-stage threshold and leaves its other fields.
            if isinstance(before, TwoStage) and value is not None:
                value = replace(before, main=value)
            changed: dict[str, Any] = {key: value}
            spec = replace(spec, **changed)
    return spec


def _spec_of_run(place: Path, num_steps: int, words: dict[str, str]) -> ControlSpec:
    """Return the rule of the run in `place`, and print where the run did not follow it."""
    differences = []
    with reading(place / "config.yaml"), as_user_error(f"{place / 'config.yaml'}: "):
        tree = read_tree(place / "config.yaml")
        recorded = dict(tree.get("controller") or {})
        if (signal := recorded.get("signal", "gnmr_delta")) != "gnmr_delta":
            differences.append(f"the run chose by {signal}; replay chooses by GNMR and dGNMR")
        if (budget := recorded.get("budget")) is not None:
            differences.append(f"the run had budget={budget} too; in replay max_o alone limits the set")
            # Without a cap of its own, only the budget limited the run's set.
            recorded["max_o"] = NO_CAP if recorded.get("max_o") is None else recorded["max_o"]
        own_loop = bool(tree.get("own_loop"))
        # A controller of an own loop records its spec, a run of the lab its config.
        rule = {field.name for field in fields(ControlSpec if own_loop else ControllerConfig)} - _NOT_OF_THE_RULE
        values: dict[str, Any] = {key: value for key, value in recorded.items() if key in rule}
        if own_loop:  # its lengths are in steps, and both values of a two-stage threshold are in one entry
            stages = {key: TwoStage(**value) for key, value in values.items() if isinstance(value, dict)}
            spec = ControlSpec(**values | stages)
        else:
            spec = ControllerConfig(**values).spec((tree.get("training") or {}).get("steps", num_steps))
    if (calibrated := calibrated_trigger(read_json(place / "header.json") or {})) is not None:
        after_step, trigger = calibrated
        spec = replace(spec, trigger=trigger)
        if "trigger" not in words:
            difference = f"the run found trigger={trigger:g} after step {after_step}; replay uses it in all steps"
            differences.append(difference)
    for difference in differences:
        print(f"gnmr: {place}: {difference}", file=sys.stderr)
    return spec


def _table(place: Path, num_units: int, replayed: dict[str, Any]) -> Table:
    """Return the figures of the replay next to those of the run, if `place` is its folder."""
    summaries = {"replay": replayed}
    if recorded := read_json(place / "summary.json") if place.is_dir() else None:
        summaries["run"] = recorded
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("", *summaries):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=bool(heading), min_width=8)
    figures: dict[str, dict[str, str]] = {}  # by label and column
    with reading(place / "summary.json"):
        for heading, summary in summaries.items():
            counts = {"steps": f"{summary['steps']:,}", "units": f"{num_units:,}"}
            for label, figure in (counts | dict(recovery_figures(summary))).items():
                if figure:
                    figures.setdefault(label, {})[heading] = figure
    for label, by_column in figures.items():
        table.add_row(label, *(by_column.get(heading, "–") for heading in summaries))
    return table
