"""`gnmr replay FILE [key=value ...]`: run the controller over recorded norms, without training."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from gnmr.cli.parser import Parser, fraction, fractions, path, settings_and_places
from gnmr.console import for_tables, shown_command, tracked
from gnmr.control.signals import SIGNALS, BlindSignal
from gnmr.errors import UserError, did_you_mean
from gnmr.lab.records.view import recovery_figures
from gnmr.lab.replay import detect
from gnmr.lab.replay.calibrate import Calibration, calibrate, write_arms
from gnmr.lab.replay.replay import Totals, replay, settings_of
from gnmr.lab.replay.trace import read_norms, refuse_gaps
from gnmr.records import output
from gnmr.records.reader import read_json, read_windows
from gnmr.records.untrusted import exists, reading

_T = TypeVar("_T")
_TEXT = """\
FILE is a run folder, or a CSV, Parquet or Arrow file with columns step,unit,norm (steps from 1, nan and inf allowed; a
missing row is a unit that was not observed in that step).

Shown is what would have been on the recovery path, under the names of gnmr train, and beside it what was in the run.

keys:
  alpha beta max_o t_lock hold delta alpha_init beta_init init_frac warmup_frac eps routing trigger, as in
  conf/config.yaml; default: the run's own values, for a file those of conf/config.yaml
  signal     another signal (docs/signals.md), its options as options.KEY=VALUE; the run's trigger and options are not
             those of another signal. What it needs besides norms must have been recorded (records.evidence). With
             calibrate or detect: several with commas between, or all

  gnmr replay runs/act_quant_stress/RUN alpha=2.0 beta=1.5 out=decisions.jsonl
  gnmr replay runs/act_quant_stress/RUN calibrate=0.01,0.05 signal=all
"""


def _parser() -> Parser:
    usage = "FILE... [key=value ...] [calibrate=SHARE,...|detect=SHARE] [out=OUT.jsonl]"
    parser = Parser("replay", usage, _TEXT, keys=True, bare=False)
    parser.option(
        "calibrate",
        fractions,
        "finds the controller.trigger (for random and fixed sets the option active_frac) at which the mean share of "
        "unit-steps on the recovery path is SHARE, over all runs. A line a signal and share: the share that it gives, "
        "and words for gnmr train; with out=FOLDER also their arms, FOLDER/sweep/calibrated.yaml, for gnmr train "
        "-m --config-dir FOLDER sweep=calibrated",
    )
    parser.option(
        "detect",
        fraction,
        "holds the signals against the runs' injected faults (faults.kind), each at the trigger that raises false "
        "alarms in SHARE of the unit-steps outside of them: recall, precision and delay; with out=FILE as JSON",
    )
    parser.option(
        "out",
        path,
        'one JSON line a step: {"step": t, "candidates": [...], "active": [...]}; active is the set chosen from step t '
        "(in force in step t + 1), largest risk first; of a step that was tried again in_force is the set of that try",
    )
    parser.flag("trust", "import the signal too that a run's config names as package.module:Class: its maker's code")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    given = parser.parse(argv)
    words, places = settings_and_places(given.words)
    paths = [Path(place) for place in places]
    if not paths:
        parser.error("name a run folder or a file")
    if given.calibrate and given.detect:
        raise UserError("calibrate and detect: one at a time")
    words, signals = _signals([word.removeprefix("controller.") for word in words])
    if signals and not (given.calibrate or given.detect):
        raise UserError(f"signal={','.join(signals)}: only with calibrate=SHARE or detect=SHARE; name one signal")
    if given.calibrate:
        return _calibrate(paths, words, signals, given)
    if given.out is not None:
        output.check(given.out, f"out={given.out}")
    if given.detect:
        return _detect(paths, words, signals, given)
    if len(paths) > 1:
        raise UserError(f"replay: {paths[1]}: one run folder or file at a time; calibrate= and detect= take several")
    return _replay(paths[0], words, given)


def _signals(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words without those that name several signals, and these names; ["all"] stands for all signals."""
    several = [word for word in words if word.startswith("signal=") and (word == "signal=all" or "," in word)]
    names = [name for word in several for name in word.removeprefix("signal=").split(",")]
    if names and (options := [word for word in words if word.startswith("options.")]):
        raise UserError(f"{options[0]}: of which signal? Name one signal alone, or leave its options out")
    for name in names:
        if name not in (*SIGNALS, "all") and ":" not in name:
            known = f"use one of {', '.join(SIGNALS)}{did_you_mean(name, SIGNALS)}"
            raise UserError(f"signal {name!r} is not known: {known}")
    return [word for word in words if word not in several], names


def _replay(place: Path, words: list[str], given: Any) -> int:
    norms = read_norms(place)
    settings = settings_of(place, norms.settings, words, given.trust)
    if norms.every > 1:
        note = f"it has norms of one step in {norms.every}; in the others no unit counts as observed"
        print(f"gnmr: {place}: {note}, so the sets are not the run's", file=sys.stderr)
    totals = Totals(norms, settings)
    with nullcontext() if given.out is None else output.replacing(given.out, f"out={given.out}") as file:
        for decision in tracked(replay(norms, settings), "replaying", len(norms.norm)):
            totals.add(decision)
            if file is None:
                continue
            line = {"candidates": decision.by_risk(decision.candidate), "active": decision.by_risk(decision.active)}
            if any(event.cause == "retry" for event in decision.events):
                line["in_force"] = decision.by_risk(decision.in_force)
            file.write(json.dumps({"step": decision.step, **line}).encode() + b"\n")
    _show(totals, place)
    if given.out is not None:
        print(f"decisions: {given.out}")
    return 0


def _show(totals: Totals, place: Path) -> None:
    """Print the figures under the names of `gnmr train`, next to the run's own for a run folder."""
    found = {"replay": _figures(totals.summary(), totals.num_units)}
    if own := read_json(place / "summary.json") if place.is_dir() else None:
        with reading(place / "summary.json"):
            found["run"] = _figures(own, totals.num_units)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for column in found:
        table.add_column(column, justify="right", no_wrap=True, min_width=8)
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        table.add_row(name, *(figures.get(name, "–") for figures in found.values()))
    for_tables().print(table)


def _figures(summary: dict[str, Any], units: int) -> dict[str, str]:
    shares = {name: share for name, share in recovery_figures(summary) if share is not None}
    return {"steps": f"{summary['steps']:,}", "units": f"{units:,}", **shares}


def _calibrate(paths: list[Path], words: list[str], signals: list[str], given: Any) -> int:
    """Print one line for each signal and share, with `out` also write the arms of a sweep."""
    out = given.out
    if out is not None and (not out.parent.is_dir() or (exists(out) and not out.is_dir())):
        raise UserError(f"out={out}: must be a folder in a folder that exists")
    if sought := next((word for word in words if word.startswith(("trigger=", "options.active_frac="))), None):
        raise UserError(f"{sought}: calibrate finds this value; leave it out")
    recorded = [replace(read_norms(place), triggers={}) for place in paths]
    plain = [*words, "trigger=1"]  # the words that are found replace the runs' own triggers
    settings = settings_of(paths[0], recorded[0].settings, plain, given.trust)
    for place, norms in zip(paths, recorded, strict=True):
        if settings_of(place, norms.settings, plain, given.trust) != settings:
            raise UserError(f"calibrate: {place}: has other controller settings than {paths[0]}")
        refuse_gaps(place, norms, "calibrate")
    if len({len(norms.units) for norms in recorded}) > 1:
        raise UserError("calibrate: these runs differ in their number of units")

    names = list(SIGNALS) if signals == ["all"] else signals or [settings.signal]
    shared = [f"controller.{word}" for word in words if not word.startswith(("signal=", "options."))]
    own = [f"controller.{word}" for word in words if word.startswith("options.")]
    found: list[tuple[Calibration, float]] = []

    def one(point: tuple[str, float]) -> None:
        name, share = point
        is_own = name == settings.signal
        signal = replace(settings, signal=name, options=settings.options if is_own else {})
        calibration = calibrate(recorded, signal, share)
        overrides = [*calibration.overrides, *(own if is_own else []), *shared]
        if not found:  # on standard error, because other programs may read the lines
            print(f"{'signal':20} {'share':7}  words for gnmr train", file=sys.stderr)
        found.append((replace(calibration, overrides=overrides), share))
        if out is not None:
            write_arms(out, found)
        print(f"{name:20} {calibration.share:.5f}  {shlex.join(overrides)}", flush=True)

    _each([(name, share) for name in names for share in given.calibrate], one, lambda point: point[0], "calibrating")
    if len(found) == 1:
        print(f"use: {shown_command('train', '...', *found[0][0].overrides)}", file=sys.stderr)
    return 0


def _detect(paths: list[Path], words: list[str], signals: list[str], given: Any) -> int:
    """Print a table, and with `out` write the same as JSON."""
    runs: list[detect.FaultyRun] = []
    for place in paths:
        norms = read_norms(place)
        settings = settings_of(place, norms.settings, words, given.trust)
        refuse_gaps(place, norms, "detect")
        if windows := read_windows(place) if place.is_dir() else []:
            runs.append(detect.FaultyRun(place, norms, settings, windows))
        else:
            print(f"gnmr: {place}: no faults, passed over", file=sys.stderr)
    if not runs:
        raise UserError("detect: none of these runs had faults; train with faults.kind=... (conf/config.yaml)")
    names = signals or [runs[0].settings.signal]
    if names == ["all"]:  # those that choose blindly have no detections to compare; random shows what chance catches
        blind = set(BlindSignal.__subclasses__())
        names = [name for name, cls in SIGNALS.items() if name == "random" or (cls.columns and cls not in blind)]
    found: dict[str, detect.Detection] = {}
    _each(names, lambda name: found.update({name: detect.detections(name, runs, given.detect)}), str, "detecting")
    if given.out is not None:
        tree = {"false_alarms": given.detect, "runs": [str(run.folder) for run in runs]}
        figures = {name: asdict(one) for name, one in found.items()}
        output.write_json(given.out, tree | {"signals": figures}, f"out={given.out}")
    for_tables().print(detect.table(found))
    if given.out is not None:
        print(f"figures: {given.out}")
    return 0


def _each(points: Sequence[_T], act: Callable[[_T], None], named: Callable[[_T], str], doing: str) -> None:
    """Act on every point. A signal that raises UserError is left out, and reported; a single one raises it."""
    for point in tracked(points, doing):
        try:
            act(point)
        except UserError as error:
            if len(points) == 1:
                raise
            print(f"{named(point):20} left out: {str(error).removeprefix('replay: ')}", file=sys.stderr)
