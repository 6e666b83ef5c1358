"""`gnmr replay FILE [key=value ...]`: the controller over recorded norms, without training.

FILE is a run folder, or a CSV or Parquet file with the columns step (from 1), unit and norm (`nan` and `inf` allowed).
A missing row is a unit that was not observed in that step. Ties are ranked in the order of the run's units, in a file
in the order of the units' first rows.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from yaml import YAMLError

from gnmr import output
from gnmr.config import ControllerConfig, from_words, load, one_line
from gnmr.config import read as read_config
from gnmr.config.old_words import refuse_old
from gnmr.controller import Controller, Decision, Unit
from gnmr.controller.evidence import EVIDENCE, missing
from gnmr.controller.signals import SIGNALS
from gnmr.errors import UserError
from gnmr.records.ledger import check_records
from gnmr.records.reader import check_units, read_json, read_ratios
from gnmr.untrusted import Damaged, exists, opened, reading
from gnmr.wiring import build_controller

MOST_GAPS = 1000
"""Steps of which one is recorded at least (records.ratios_every); a hundred more may be missing."""
MAX_CELLS = 1 << 28
"""Steps by units: 2 GB; 1e6 steps of 84 units are a third."""

_HELP = """\
usage: gnmr replay FILE [key=value ...] [out=OUT.jsonl] [--trust]
       gnmr replay RUN... calibrate=SHARE[,SHARE...] [signal=NAME[,NAME...]|all] [key=value ...] [out=FOLDER]
       gnmr replay RUN... detect=SHARE [signal=NAME[,NAME...]|all] [key=value ...] [out=OUT.json]

  FILE       a run folder, or a CSV or Parquet file with columns step,unit,norm (steps from 1, nan and inf allowed;
             a missing row is a unit that was not observed in that step)
  keys       alpha beta max_o t_lock hold delta alpha_init beta_init init_frac warmup_frac eps routing trigger, as in
             conf/controller; default: the run's own values, for a file those of conf/controller/gnmr.yaml
  signal     another signal (docs/signals.md), its options as options.KEY=VALUE; what it needs besides norms must
             have been recorded (records.evidence)
  --trust    imports the signal too that a run folder's config names as package.module:Class: code of its maker's choice
  out        one JSON line a step: {"step": t, "candidates": [...], "active": [...]}; active is the set chosen from step
             t (in force in step t + 1), largest risk first
  calibrate  finds the controller.trigger (for random and fixed sets the option share) at which the mean share of
             unit-steps on the recovery path is SHARE, over all RUNs; signal=all: for every signal whose evidence is
             there. A line a signal and share: the share that it gives, and words for `gnmr train`; with out=FOLDER also
             FOLDER/variant/<signal>_at_<share>.yaml, for gnmr train --config-dir FOLDER variant=...

  detect     holds the signals against the runs' injected faults (stress=...), each at the trigger that raises false
             alarms in SHARE of the unit-steps outside of them: recall, precision and delay

  gnmr replay runs/act_quant_stress/RUN alpha=2.0 beta=1.5 out=decisions.jsonl
  gnmr replay runs/act_quant_stress/RUN calibrate=0.01,0.05 signal=all
"""


@dataclass(frozen=True)
class Norms:
    """Recorded evidence of T steps and U units."""

    units: list[str]
    norm: np.ndarray  # (T, U) float64
    observed: np.ndarray  # (T, U) bool
    more: dict[str, np.ndarray] = field(default_factory=dict)
    """(T, U) float64 each: what was recorded besides the norms, by its name in gnmr.controller.evidence."""
    cost: tuple[float, ...] | None = None
    """What each unit's recovery costs; None: unknown, all the same."""
    settings: ControllerConfig = field(default_factory=ControllerConfig)
    """The run's own, for a file the defaults."""
    steps: int = 0
    """Length of the run, which shares of its steps refer to."""
    seed: int = 0
    every: int = 1
    """Steps between two recorded ones; in the others no unit counts as observed."""

    @property
    def evidence(self) -> set[str]:
        """Names of what was recorded."""
        return {"norm", "observed", *self.more}


@dataclass(frozen=True)
class Asked:
    """The words of the command line, checked."""

    settings: ControllerConfig
    out: Path | None = None
    calibrate: tuple[float, ...] = ()
    detect: float | None = None
    signals: tuple[str, ...] = ()
    """Names, where several were given; ("all",) for all that there are."""
    words: tuple[str, ...] = ()
    """What changes the settings, as it was written."""


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for a file or a value without sense."""
    if not argv or "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0 if argv else 2
    trust = "--trust" in argv
    argv = [word for word in argv if word != "--trust"]
    words = [word for word in argv if "=" in word and not os.path.lexists(word)]
    paths = [Path(word) for word in argv if word not in words]
    if not paths:
        raise UserError("replay: name a run folder or a file (gnmr replay --help)")
    if any(word.startswith("detect=") for word in words):
        return _detect(paths, words, trust)
    asked = _asked(words, paths[0], trust)
    if asked.calibrate:
        return _calibrate(paths, words, asked, trust)
    if len(paths) > 1:
        raise UserError(f"replay: {paths[1]}: one run folder or file at a time; calibrate= and detect= take several")
    path, norms = paths[0], read_norms(paths[0])
    if norms.every > 1:
        note = f"norms stand there for one step in {norms.every}; in the others no unit counts as observed"
        print(f"gnmr: {path}: {note}, so the sets are not the run's", file=sys.stderr)

    from gnmr.terminal import tracked  # rich, which nobody else needs who reads norms

    decisions = replay(norms, asked.settings)
    tally = Tally(len(norms.units), asked.settings.max_o)
    with _lines(asked.out) as write:
        for decision in tracked(decisions, "replaying", len(norms.norm)):
            tally.add(decision)
            line = {"candidates": decision.by_risk(decision.candidate), "active": decision.by_risk(decision.active)}
            write({"step": decision.step, **line})
    for name, value in tally.summary().items():
        print(f"{name:33}{value}")
    if asked.out is not None:
        print(f"{'decisions':33}{asked.out}")
    return 0


def settings_of(path: Path) -> ControllerConfig:
    """conf/controller of a run folder; the defaults of anything else."""
    return read_config(path / "config.yaml").controller if exists(path / "config.yaml") else ControllerConfig()


def _asked(words: list[str], path: Path, trust: bool) -> Asked:
    """`parse` over the settings of `path`. UserError where they name a signal to import and the user does not."""
    asked = parse(words, settings_of(path))
    name = asked.settings.signal
    given = any(word.startswith("signal=") for word in words)
    if ":" in name and not (given or trust):
        raise UserError(
            f"{path / 'config.yaml'}: its signal {name} would be imported, code of its maker's choice; add --trust if "
            "you trust it, or name a signal of your own with signal=NAME"
        )
    return asked


def _all_steps(path: Path, norms: Norms, what: str) -> None:
    """UserError where steps are missing: shares of unit-steps and windows would be of another run."""
    if norms.every > 1:
        raise UserError(f"{path}: {what} needs every step, records.ratios_every={norms.every} kept one in as many")


def _calibrate(paths: list[Path], words: list[str], asked: Asked, trust: bool) -> int:
    from gnmr.calibration import calibrate_and_print

    recorded = []
    for path in paths:
        if _asked(words, path, trust).settings != asked.settings:
            raise UserError(f"calibrate: {path}: has other controller settings than {paths[0]}")
        recorded.append(read_norms(path))
        _all_steps(path, recorded[-1], "calibrate")
    if len({len(norms.units) for norms in recorded}) > 1:
        raise UserError("calibrate: these runs differ in their number of units")
    return calibrate_and_print(recorded, asked)


def _detect(paths: list[Path], words: list[str], trust: bool) -> int:
    from gnmr.detection import detect_and_print, faulty_run

    runs = []
    for path in paths:
        asked, norms = _asked(words, path, trust), read_norms(path)
        _all_steps(path, norms, "detect")
        run = faulty_run(path, norms, asked.settings)
        if run is None:
            print(f"gnmr: {path}: no faults, passed over", file=sys.stderr)
        else:
            runs.append(run)
    if not runs:
        raise UserError("detect: none of these runs had faults; train with stress=... (conf/stress)")
    assert asked.detect is not None
    return detect_and_print(runs, asked.detect, asked.signals, asked.out)


def parse(words: list[str], defaults: ControllerConfig) -> Asked:
    """key=value words over `defaults`, checked as strictly as `gnmr train` checks conf/controller."""
    refuse_old(words)
    known = {field.name for field in fields(ControllerConfig)} - {"name"}
    changes: list[str] = []
    out, signals = None, tuple[str, ...]()
    shares: dict[str, tuple[float, ...]] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if key == "out" and text:
            out = Path(text)
        elif key in ("calibrate", "detect") and text:
            shares[key] = tuple(_share(key, one) for one in text.split(",", -1 if key == "calibrate" else 0))
        elif key == "signal" and text:
            signals = tuple(text.split(",")) if text == "all" or "," in text else ()
            changes += [] if signals else [word]
        elif sign and not text and key in ("out", "calibrate", "detect", "signal"):
            raise UserError(f"replay: {word!r} has no value")
        elif not sign or key.partition(".")[0] not in known:
            more = ", ".join(sorted(known - {"signal", "options"}))
            raise UserError(
                f"replay: {word!r} is not understood; use {more}, signal, options.*, calibrate, detect or "
                "out, as key=value"
            )
        else:
            changes.append(word)
    try:
        values = from_words(changes)
        if values.get("signal", defaults.signal) != defaults.signal:
            defaults = replace(defaults, options={})  # another signal's options are not this one's
        tree = load(OmegaConf.create({"controller": OmegaConf.merge(asdict(defaults), values)}))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"replay: {one_line(error)}") from error
    if out is not None and "calibrate" not in shares:
        output.check(out, f"out={out}")
    elif out is not None and (not out.parent.is_dir() or (exists(out) and not out.is_dir())):
        raise UserError(f"out={out}: must be a folder in a folder that exists")
    if len(shares) > 1:
        raise UserError("calibrate and detect: one at a time")
    if signals and not shares:
        raise UserError(f"signal={','.join(signals)}: only with calibrate=SHARE or detect=SHARE; name one signal")
    if signals and (options := [word for word in changes if word.startswith("options.")]):
        raise UserError(f"{options[0]}: of which signal? Name one signal alone, or leave its options out")
    for name in signals:
        if name not in (*SIGNALS, "all") and ":" not in name:
            raise UserError(f"signal {name!r} is not known: use one of {', '.join(SIGNALS)}")
    settings = replace(tree.controller, name=defaults.name)
    detect = shares.get("detect", (None,))[0]
    return Asked(settings, out, shares.get("calibrate", ()), detect, signals, tuple(changes))


def _share(key: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UserError(f"{key}={text}: must be a share of the unit-steps above 0, at most 1")
    return share


def read_norms(path: Path) -> Norms:
    """Norms of a run folder or a file. UserError names what is missing or wrong."""
    order: list[str] | None = None
    cost: tuple[float, ...] | None = None
    config = read_config(path / "config.yaml") if exists(path / "config.yaml") else None
    if path.is_dir():
        check_records(path)
        order, cost = _units_and_cost(path / "header.json")
        table = read_ratios(path)
        if table.num_rows == 0:
            raise UserError(f"{path}: no recorded norms in this folder (ratios.parquet is missing or empty)")
    elif not path.exists():
        raise UserError(f"{path}: there is no such file or run folder")
    else:
        table = _read_file(path)
    with reading(path):
        norms = _dense(path, table, order, cost)
    if config is None:
        return norms
    training, every = config.training, config.records.ratios_every
    return replace(norms, settings=config.controller, steps=training.steps, seed=training.seed, every=every)


def _units_and_cost(path: Path) -> tuple[list[str] | None, tuple[float, ...] | None]:
    """What header.json says of the units, where it says it."""
    header = read_json(path) or {}
    units, cost = header.get("units"), header.get("cost")
    with reading(path):
        order = None if units is None else check_units(units)
        costs = tuple(float(one) for one in cost or ())
    if costs and (len(costs) != len(order or ()) or not all(math.isfinite(one) and one > 0 for one in costs)):
        raise Damaged(f"{path}: cost must hold a positive number for each of the units")
    return order, costs or None


def _dense(path: Path, table: pa.Table, order: list[str] | None, cost: tuple[float, ...] | None) -> Norms:
    """The rows as matrices."""
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
    step = steps.to_numpy()
    codes, units = _codes(names.to_pylist(), order)
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


def replay(norms: Norms, settings: ControllerConfig) -> Iterator[Decision]:
    """The decision of every step, in order."""

    def ignore(_recovering: bool) -> None:
        """There is no operator to switch."""

    costs = norms.cost or (1.0,) * len(norms.units)
    nothing = (nn.Parameter(torch.empty(0)),)
    units = [Unit(name, nothing, ignore, cost) for name, cost in zip(norms.units, costs, strict=True)]
    controller = build(settings, units, norms)
    columns = {"norm": norms.norm, "observed": norms.observed} | {
        name: values for name, values in norms.more.items() if name in controller.needs
    }
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    for step in range(len(norms.norm)):
        packet = controller.observe({name: values[step] for name, values in tensors.items()})
        yield controller.apply(packet.to_host())


def build(settings: ControllerConfig, units: list[Unit], norms: Norms) -> Controller:
    """The controller, UserError where the signal needs what was not recorded."""
    try:
        controller: Controller = build_controller(settings, units, norms.steps, norms.seed)
    except ValueError as error:
        raise UserError(f"replay: {error}") from error
    if lacking := missing(controller.needs, tuple(norms.evidence)):
        raise UserError(
            f"replay: signal {settings.signal} needs {', '.join(lacking)}, which was not recorded: train with "
            f"records.evidence=[{','.join(lacking)}], or give your own file {'columns' if lacking[1:] else 'a column'} "
            "of that name"
        )
    return controller


def risks(norms: Norms, settings: ControllerConfig) -> np.ndarray:
    """(T, U) float64: what a signal makes of recorded evidence, whatever is routed."""
    return np.array([decision.risk for decision in replay(norms, settings)])


class Tally:
    """What a replay amounts to."""

    def __init__(self, num_units: int, max_o: int) -> None:
        self.num_units, self.max_o = num_units, max_o
        self.steps = self.promoted = self.full = 0
        self.over: Counter[str] = Counter()
        self.ever = np.zeros(num_units, dtype=bool)

    def add(self, decision: Decision) -> None:
        """Counts one step's decision."""
        self.steps += 1
        self.promoted += int(decision.in_force.sum())
        self.full += int(decision.in_force.sum()) >= self.max_o
        self.over.update({column: decision.over(column) for column in decision.columns})
        self.ever |= decision.in_force

    def summary(self) -> dict[str, str]:
        """Shares as in summary.json, for printing."""
        unit_steps = self.steps * self.num_units
        return {
            "steps": f"{self.steps}",
            "units": f"{self.num_units}",
            "promotion_frac": f"{self.promoted / unit_steps:.6f}",
            "hit_max_o_frac": f"{self.full / self.steps:.6f}",
            **{f"{column}_over_frac": f"{number / unit_steps:.6f}" for column, number in self.over.items()},
            "units ever on the recovery path": f"{self.ever.sum()}",
        }


@contextmanager
def _lines(out: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes one JSON object a line; nothing without `out`."""
    if out is None:
        yield lambda _row: None
        return
    with output.json_lines(out, f"out={out}") as file:
        yield lambda row: print(json.dumps(row), file=file)
