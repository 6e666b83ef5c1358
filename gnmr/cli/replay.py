"""`gnmr replay FILE [key=value ...]`: the controller over recorded norms, without training."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from gnmr.cli.words import Parser, fraction, fractions, path, settings_and_places
from gnmr.console import for_tables, shown_command, tracked
from gnmr.errors import UserError
from gnmr.lab.records.find import find_runs
from gnmr.lab.records.view import recovery_figures
from gnmr.lab.replay.calibrate import Calibration, calibrate_each, write_arms
from gnmr.lab.replay.detect import FaultyRun, as_tree, detect_each, faulty_run, tables
from gnmr.lab.replay.engine import Totals, replay
from gnmr.lab.replay.request import Request, request
from gnmr.lab.replay.trace import read_norms, refuse_gaps
from gnmr.records import output
from gnmr.records.reader import read_json, read_jsonl
from gnmr.records.untrusted import exists, reading

_TEXT = """\
FILE is a run folder, or a CSV or Parquet file with columns step,unit,norm (steps from 1, nan
and inf allowed; a missing row is a unit that was not observed in that step).

Shown is what would have been on the recovery path, under the names of gnmr train, and beside it what was in the run.

keys:
  alpha beta max_o t_lock hold delta alpha_init beta_init init_frac warmup_frac eps routing trigger, as in
  conf/config.yaml; default: the run's own values, for a file those of conf/config.yaml
  signal     another signal (docs/signals.md), its options as options.KEY=VALUE; what it needs besides norms must have
             been recorded (records.evidence). With calibrate or detect: several with commas between, or all

  gnmr replay runs/act_quant_stress/RUN alpha=2.0 beta=1.5 out=decisions.jsonl
  gnmr replay runs/act_quant_stress/RUN calibrate=0.01,0.05 signal=all
"""


def _parser() -> Parser:
    usage = "FILE... [key=value ...] [calibrate=SHARE,...|detect=SHARE] [out=OUT.jsonl]"
    parser = Parser("replay", usage, _TEXT, keys=True)
    parser.option(
        "calibrate",
        fractions,
        "finds the controller.trigger (for random and fixed sets the option share) at which the mean share of "
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
    """The command; returns its exit code. UserError for a file or a value without sense."""
    parser = _parser()
    if not argv:
        parser.print_help()
        return 2
    given = parser.parse(argv)
    words, places = settings_and_places(given.words)
    paths = [Path(place) for place in places]
    if not paths:
        parser.error("name a run folder or a file")
    if given.calibrate and given.detect:
        raise UserError("calibrate and detect: one at a time")
    asked = request(words, several=bool(given.calibrate or given.detect), trust=given.trust)
    if given.out is not None and not given.calibrate:
        output.check(given.out, f"out={given.out}")
    for place in paths:
        _refuse_several(place)
    if given.calibrate:
        return _calibrate(paths, asked, given.calibrate, given.out)
    if given.detect:
        return _detect(paths, asked, given.detect, given.out)
    if len(paths) > 1:
        raise UserError(f"replay: {paths[1]}: one run folder or file at a time; calibrate= and detect= take several")
    return _replay(paths[0], asked, given.out)


def _refuse_several(place: Path) -> None:
    """UserError for a folder above run folders."""
    if place.is_dir() and not exists(place / "config.yaml"):
        runs: list[Path] = []
        with suppress(UserError):  # there is none
            runs = find_runs([place])
        if runs:
            number = f"{len(runs)} run{'s' * (len(runs) > 1)}"
            raise UserError(f"{place}: holds {number}; name one: {shown_command('replay', runs[0])}")


def _replay(place: Path, asked: Request, out: Path | None) -> int:
    settings = asked.settings(place)
    norms = read_norms(place)
    if norms.every > 1:
        note = f"norms stand there for one step in {norms.every}; in the others no unit counts as observed"
        print(f"gnmr: {place}: {note}, so the sets are not the run's", file=sys.stderr)
    totals = Totals(norms, settings)
    with _lines(out) as write:
        for decision in tracked(replay(norms, settings), "replaying", len(norms.norm)):
            totals.add(decision)
            line = {"candidates": decision.by_risk(decision.candidate), "active": decision.by_risk(decision.active)}
            if any(event.cause == "retry" for event in decision.events):
                line["in_force"] = decision.by_risk(decision.in_force)
            write({"step": decision.step, **line})
    _show(totals, place)
    if out is not None:
        print(f"decisions: {out}")
    return 0


def _show(totals: Totals, place: Path) -> None:
    """The figures under the names that `gnmr train` ends with; of a run folder beside what the run itself came to."""
    found = [_figures(totals.summary(), totals.num_units, int(totals.ever.sum()))]
    if own := read_json(place / "summary.json") if place.is_dir() else None:
        with reading(place / "summary.json"):
            found.append(_figures(own, totals.num_units, _ever(place, totals.steps)))
    names = list(dict.fromkeys(name for figures in found for name in figures))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for of in ("replay", "run")[: len(found)]:
        table.add_column(of, justify="right", no_wrap=True, min_width=8)
    for name in names:
        table.add_row(name, *(figures.get(name, "–") for figures in found))
    for_tables().print(table)


def _figures(summary: dict[str, Any], units: int, ever: int | None) -> dict[str, str]:
    shares = {name: share for name, share in recovery_figures(summary) if share is not None}
    of_all = {} if ever is None else {"units ever on the recovery path": f"{ever:,}"}
    return {"steps": f"{summary['steps']:,}", "units": f"{units:,}", **shares, **of_all}


def _ever(run: Path, steps: int) -> int | None:
    """Units that the run itself had on the recovery path in any of its steps; None where that was not kept."""
    if not exists(run / "events.jsonl"):
        return None
    promoted = (row for row in read_jsonl(run / "events.jsonl") if row.get("event") == "promote")
    return len({row["unit"] for row in promoted if row["step"] < steps or row.get("cause") == "retry"})


def _calibrate(paths: list[Path], asked: Request, wanted: tuple[float, ...], out: Path | None) -> int:
    """One line a signal and share, with `out` also the arms of a sweep."""
    if out is not None and (not out.parent.is_dir() or (exists(out) and not out.is_dir())):
        raise UserError(f"out={out}: must be a folder in a folder that exists")
    settings, recorded = asked.settings(paths[0]), []
    for place in paths:
        if asked.settings(place) != settings:
            raise UserError(f"calibrate: {place}: has other controller settings than {paths[0]}")
        recorded.append(read_norms(place))
        refuse_gaps(place, recorded[-1], "calibrate")
    if len({len(norms.units) for norms in recorded}) > 1:
        raise UserError("calibrate: these runs differ in their number of units")

    arms: list[tuple[Calibration, float]] = []
    used: list[list[str]] = []

    def found(name: str, share: float, calibration: Calibration) -> None:
        if not used:  # beside the lines, which other programs may read
            print(f"{'signal':20} {'share':7}  words for gnmr train", file=sys.stderr)
        used.append(calibration.overrides)
        if out is not None:
            arms.append((calibration, share))
            write_arms(out, arms)
        print(f"{name:20} {calibration.share:.5f}  {shlex.join(calibration.overrides)}", flush=True)

    calibrate_each(recorded, settings, asked, wanted, found=found, left_out=_left_out)
    if len(used) == 1:
        print(f"use: {shown_command('train', '...', *used[0])}", file=sys.stderr)
    return 0


def _detect(places: list[Path], asked: Request, share: float, out: Path | None) -> int:
    """Two tables, and with `out` the same as JSON."""
    runs: list[FaultyRun] = []
    for place in places:
        settings, norms = asked.settings(place), read_norms(place)
        refuse_gaps(place, norms, "detect")
        run = faulty_run(place, norms, settings)
        if run is None:
            print(f"gnmr: {place}: no faults, passed over", file=sys.stderr)
        else:
            runs.append(run)
    if not runs:
        raise UserError("detect: none of these runs had faults; train with faults.kind=... (conf/config.yaml)")
    found = detect_each(runs, share, asked.signals, _left_out)
    if out is not None:
        output.write_json(out, as_tree(found, runs, share), f"out={out}")
    shown = for_tables()
    for table in tables(found, runs, share):
        table.print(shown)
    if out is not None:
        print(f"figures: {out}")
    return 0


def _left_out(name: str, error: UserError) -> None:
    print(f"{name:20} left out: {str(error).removeprefix('replay: ')}", file=sys.stderr)


@contextmanager
def _lines(out: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes one JSON object a line; nothing without `out`."""
    if out is None:
        yield lambda _row: None
        return
    with output.json_lines(out, f"out={out}") as file:
        yield lambda row: print(json.dumps(row), file=file)
