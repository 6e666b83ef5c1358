"""The report as one HTML page that opens from disk and loads nothing.

`page.html.j2` holds the text, the tables and the script that draws; the numbers are one block of JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gnmr.errors import plural
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import count, counted
from gnmr.lab.report.recorded_run import Run
from gnmr.lab.report.table import arm_tables, run_table
from gnmr.lab.report.units import bin_width, unit_map
from gnmr.pages import render
from gnmr.records.find import changed
from gnmr.records.schema import OWN

MAP_CHARACTERS = 9_000_000  # room for all unit maps
_TRAIN_POINTS = 400
_DASHES, _FIRST_DASH = ("", "6 3", "2 3"), (0, 0, 1, 2, 1, 2, 0)
"""The first dash of each colour, since thin lines of these colours alone do not stay apart for colour-blind readers.
The colours are variables of the page, `--c0` to `--c6`, after Okabe and Ito."""
Tree = dict[str, Any]


def render_page(comparisons: Sequence[Comparison], runs: Sequence[Run], root: Path) -> str:
    """Return the page, which shows one of the comparisons at a time.

    Args:
        comparisons: the comparisons, the one to be shown first at the beginning.
        runs: all runs, for the table of runs.
        root: the folders of runs are shown relative to it.
    """
    texts, data = list[Tree](), list[Tree]()
    for comparison in comparisons:
        maps, no_room = _maps(comparison, MAP_CHARACTERS // len(comparisons))
        lead, arms = headline(comparison), _arms(comparison)
        apart = ", ".join(f"{name} {here}" for name, (here, _) in comparison.apart().items())
        texts.append(
            {
                "name": f"{comparison.name} ({apart})" if apart else comparison.name,
                "card": _card(comparison),
                "headline": lead,
                "tables": arm_tables([comparison]),
                "colours": {arm["label"]: arm["colour"] for arm in arms},
                "origin": origin(comparison.runs),
                "no_room": no_room,
            }
        )
        tokens = count(comparison.kind.tokens_per_step)
        data.append({"arms": arms, "loss": _losses(comparison), "best": lead.arm, "tokens": tokens, "maps": maps})
    return render(
        "page.html.j2",
        Path(__file__).parent,
        command="report",
        title="gnmr report",
        comparisons=texts,
        data=data,
        runs=run_table(runs, root),
    )


def _maps(comparison: Comparison, room: int) -> tuple[list[Tree], list[str]]:
    """Return the unit maps that fit into so many characters, and the runs for which there was no room.

    The first run of each arm comes before the others, so that no arm is without a map.
    """
    numbered_runs = [(number, run) for number, arm in enumerate(comparison.arms) for run in arm.runs]
    numbered_runs.sort(key=lambda numbered: numbered[1] is not comparison.arms[numbered[0]].first)
    maps: dict[tuple[int, int], Tree] = {}
    no_room: list[str] = []
    for number, run in numbered_runs:
        matrices = run.units()  # one run's at a time: the matrices of a long run are large
        if len(matrices.steps):
            tree = unit_map(comparison.arms[number], run, matrices) | {"origin": origin([run])}
            room -= sum(len(values["data"]) for values in tree["values"].values()) + 64 * len(tree["promotions"])
            if room < 0:
                no_room.append(tree["label"])
            else:
                maps[number, run.seed] = tree
    return [maps[place] for place in sorted(maps)], no_room


def _arms(comparison: Comparison) -> list[Tree]:
    """Return label, short name, colour and dash of each arm. 16-bit arms are grey."""
    styles, number = list[Tree](), 0
    for arm in comparison.arms:
        colour, dash = "var(--grey)", ""
        if not arm.sixteen_bit:
            rounds, hue = divmod(number, len(_FIRST_DASH))
            colour, dash = f"var(--c{hue})", _DASHES[(_FIRST_DASH[hue] + rounds) % 3]
            number += 1
        styles.append({"label": arm.label, "short": comparison.names[arm.label], "colour": colour, "dash": dash})
    return styles


def _card(comparison: Comparison) -> list[tuple[str, str]]:
    kind, first_run = comparison.kind, comparison.runs[0]
    replicate, seeds = counted(comparison.replicate, comparison.seeds).split(" ", 1)
    done = sum(len(arm.done) for arm in comparison.arms)
    times = sorted(time for run in comparison.runs if (time := changed(run.folder)))
    dates = dict.fromkeys(datetime.fromtimestamp(time, tz=UTC).date().isoformat() for time in (*times[:1], *times[-1:]))
    training = plural(first_run.last_step, "step")
    if first_run.scale != OWN:
        data = first_run.data.get("name") or "data"
        steps = "unknown steps" if kind.steps is None else plural(kind.steps, "step")
        training = f"{steps} of {count(kind.tokens_per_step)} tokens, {data}"
    card = [
        ("experiment", kind.experiment),
        ("model", _model(first_run) + (f", base {kind.base}" if kind.base else "")),
        ("training", training),
        ("arms", f"{len(comparison.arms)}, {done} of {plural(len(comparison.runs), 'run')} done"),
        (replicate, seeds),
        ("date", " to ".join(dates)),
    ]
    return [pair for pair in card if pair[1]]


def _model(run: Run) -> str:
    """Return the model in words."""
    number = run.header.get("parameters")
    parameters = [f"{count(number)} parameters"] if isinstance(number, int) else []
    if run.scale == OWN:
        return "".join(parameters)
    name, shape = str(run.settings.get("model.name") or "model"), run.header.get("shape")
    sizes = []
    if isinstance(shape, dict):
        sizes = [f"{shape[key]} {noun}" for key, noun in (("layers", "layers"), ("width", "wide")) if shape.get(key)]
    scale = [] if run.base else [f"scale {run.scale}"]  # a fork's is its base's
    return ", ".join([name, *sizes, *parameters, *scale])


def _losses(comparison: Comparison) -> Tree:
    """Return the lines of training and validation loss, as they are and minus the 16-bit arm's of the same seed."""
    width = bin_width(max(run.last_step for run in comparison.runs), _TRAIN_POINTS)
    curves = {
        "train": {run.folder: binned(run.steps["step"], run.steps["loss"], width) for run in comparison.runs},
        "val": {run.folder: pd.Series(run.evals["val_loss"], run.evals["step"]) for run in comparison.runs},
    }
    plain, relative, references = list[Tree](), list[Tree](), set[str]()
    for number, arm in enumerate(comparison.arms):
        reference = comparison.reference(arm) or arm
        of_seed = {} if reference is arm else {run.seed: run.folder for run in reference.runs}
        for name, curve in curves.items():
            plain += _lines(number, name, [(run, curve[run.folder]) for run in arm.runs])
            # Aligned by step: a step that one of the two lacks becomes NaN, which is dropped.
            pairs = [(run, curve[run.folder] - curve[of_seed[run.seed]]) for run in arm.runs if run.seed in of_seed]
            if lines := _lines(number, name, [(run, difference[np.isfinite(difference)]) for run, difference in pairs]):
                relative += lines
                references.add(reference.label)
    return {"width": width, "plain": plain, "relative": relative, "references": sorted(references)}


def binned(steps: np.ndarray, values: np.ndarray, width: int) -> pd.Series:
    """Return the means of (S,) values over bins of `width` steps, by the bins' centres; NaN without a number.

    A last bin that is less than half full is merged into the one before: the mean of few steps looks like a cliff.
    """
    # Steps count from 1, so that bin b holds b width + 1 to (b + 1) width.
    place = (steps.astype(np.int64) - 1) // width
    number = int(place.max(initial=-1)) + 1
    if number > 1 and 2 * (int(steps.max()) - (number - 1) * width) < width:
        number -= 1
    means = pd.Series(values).groupby(np.minimum(place, number - 1)).mean().reindex(range(number))
    return means.set_axis(np.arange(number) * width + (width + 1) / 2)


def _lines(place: int, name: str, curves: list[tuple[Run, pd.Series]]) -> list[Tree]:
    """Return a line for each run that has a curve, then the mean over the finished seeds at the steps that all have."""
    curves = [(run, curve) for run, curve in curves if len(curve)]
    lines = [_line(place, name, curve) | {"seed": run.seed, "status": run.status} for run, curve in curves]
    done = [curve for run, curve in curves if run.status == "done"]
    mean = pd.concat(done, axis=1, join="inner").mean(axis=1, skipna=False) if done else pd.Series()
    return lines + ([_line(place, name, mean) | {"seeds": len(done)}] if len(mean) else [])


def _line(arm: int, name: str, curve: pd.Series) -> Tree:
    x, y = (
        [float(f"{value:.6g}") if np.isfinite(value) else None for value in values] for values in (curve.index, curve)
    )
    return {"arm": arm, "of": name, "x": x, "y": y}


def origin(runs: Iterable[Run]) -> Tree:
    """Return what the numbers of a figure were made with."""
    runs = list(runs)
    return {
        "seeds": sorted({run.seed for run in runs}),
        "commits": sorted({run.commit for run in runs}),
        "machines": sorted({run.machine for run in runs}),
        "commands": list(dict.fromkeys(run.command for run in runs)),
    }
