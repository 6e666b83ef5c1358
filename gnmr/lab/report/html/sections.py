"""What each section of the page shows, as plain trees for JSON. Drawing is the page's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gnmr.lab.report.arms import Arm, bits
from gnmr.lab.report.binning import bin_width, shared_mean
from gnmr.lab.report.comparisons import Comparison, runs_of
from gnmr.lab.report.curves import MANY, Curves, last_step, loss_by_tokens, loss_curves, loss_top, relative_losses
from gnmr.lab.report.faults import FaultWindow
from gnmr.lab.report.headline import headline, short_names
from gnmr.lab.report.html.pack import number, numbers
from gnmr.lab.report.html.unit_map import UnitMap
from gnmr.lab.report.layout import count, counted
from gnmr.lab.report.risk import costs, limit, thresholds
from gnmr.lab.report.runs import Ratios, Run
from gnmr.lab.report.statistics import Paired, as_percent, paired
from gnmr.lab.report.style import Looks, Series, looks
from gnmr.lab.report.tradeoff import ends, signal_curves
from gnmr.records.schema import OWN

_TRAIN_POINTS = 400
_DASH = {"-": "solid", "--": "dash", ":": "dot"}
Tree = dict[str, Any]


def arms(comparison: Comparison) -> list[Tree]:
    """Label, what of it tells it from the others, colour and dash of each arm, as in the PNGs."""
    shared = _looks(comparison.arms)
    short = short_names(comparison.arms)
    return [
        {
            "label": arm.label,
            "short": short[arm.label],
            "colour": shared[arm.label]["color"],
            "dash": _DASH[shared[arm.label]["ls"]],
            "runs": len(arm.runs),
            "done": len(arm.done),
        }
        for arm in comparison.arms
    ]


def _looks(arms: Sequence[Arm]) -> Looks:
    return looks(dict.fromkeys(arm.label for arm in arms), {arm.label for arm in arms if arm.sixteen_bit})


def overview(comparison: Comparison) -> Tree:
    """The card (pairs of what and which), the sentence and the figures of the first screen."""
    told, run = headline(comparison), comparison.runs[0]
    kind = comparison.kind
    seeds = counted("order" if kind.base else "seed", comparison.seeds).split(" ", 1)
    done = sum(len(arm.done) for arm in comparison.arms)
    dates = sorted({date for one in comparison.runs if (date := _date(one))})
    machines = sorted({one.machine for one in comparison.runs})
    card = [
        ["experiment", kind.experiment],
        ["model", _model(run) + (f", base {kind.base}" if kind.base else "")],
        ["training", _training(comparison)],
        ["arms", f"{len(comparison.arms)}, {done} of {len(comparison.runs)} runs done"],
        seeds,
        ["date", " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))],
        ["machine", machines[0] + (f" and {len(machines) - 1} more" if len(machines) > 1 else "")],
    ]
    return {
        "card": [pair for pair in card if pair[1]],
        "arm": told.arm,
        "sentence": told.sentence,
        "figures": [[one.label, one.value, one.detail] for one in told.figures],
    }


def _training(comparison: Comparison) -> str:
    kind, run = comparison.kind, comparison.runs[0]
    if run.scale == OWN:  # its records do not say of what
        return f"{count(run.last_step)} steps"
    return f"{count(kind.steps)} steps of {count(kind.tokens_per_step)} tokens, {run.data.get('name') or 'data'}"


def _model(run: Run) -> str:
    """What the header says of the model; of its layers and width, where it does not, the config. That does not know
    those of a checkpoint."""
    get, number = run.settings.get, run.header.get("parameters")
    parameters = [f"{count(number)} parameters"] if isinstance(number, int) else []
    if run.scale == OWN:
        return "".join(parameters)
    name, shape = str(get("model.name") or "model"), run.header.get("shape")
    if not isinstance(shape, dict):
        known = {} if name == "pretrained" else {"layers": "num_layers", "width": "hidden_size"}
        shape = {told: get(f"model.{key}") for told, key in known.items()}
    size = [f"{shape[key]} {told}" for key, told in (("layers", "layers"), ("width", "wide")) if shape.get(key)]
    return ", ".join([name, *size, *parameters, f"scale {run.scale}"])


def _date(run: Run) -> str:
    """When its records were last written, as a day; empty for a pack, whose files bear no times."""
    if run.place != run.folder:
        return ""
    times = [path.stat().st_mtime for name in ("summary.json", "steps.jsonl") if (path := run.folder / name).is_file()]
    return datetime.fromtimestamp(times[0], tz=UTC).date().isoformat() if times else ""


def losses(comparison: Comparison) -> Tree:
    """Training (mean of bins) and validation loss of every run, and each arm's mean over its done seeds; and the same
    minus the 16-bit arm's of the same seed, where there is one."""
    width = step_width(comparison)
    lines: list[Tree] = []
    every: dict[str, list[Series]] = {"train": [], "val": []}
    for place, arm in enumerate(comparison.arms):
        for name, curves in zip(every, loss_curves(arm, width), strict=True):
            every[name] += curves.values()
            lines += _lines(place, name, arm, curves)
    top = {name: number(loss_top(found)) for name, found in every.items()}
    relative, references = relative_losses(comparison, width)
    apart = [
        line
        for place, arm in enumerate(comparison.arms)
        if arm.label in relative
        for name, curves in zip(every, relative[arm.label], strict=True)
        for line in _lines(place, name, arm, curves)
    ]
    to = references[0].label if len(references) == 1 else "16 bits"
    if len(comparison.arms) > MANY:  # a small panel each, of one line
        lines, apart = _one_each(lines), _one_each(apart)
    tree = {"width": width, "top": top, "lines": lines, "tokens": count(comparison.kind.tokens_per_step)}
    return tree | {"relative": {"lines": apart, "to": to, "references": len(references)} if apart else None}


def _one_each(lines: list[Tree]) -> list[Tree]:
    """Of each arm and loss the last line, which is the mean where there is one."""
    return list({(line["arm"], line["of"]): line for line in lines}.values())


def step_width(comparison: Comparison) -> int:
    """Steps in a bin of the lines over steps."""
    return bin_width(last_step(comparison), _TRAIN_POINTS)


def gnmr(comparison: Comparison, means: Curves) -> Tree | None:
    """GNMR averaged over the units, by run folder in bins of `step_width`; None where there is none."""
    lines = [line for place, arm in enumerate(comparison.arms) for line in _lines(place, "gnmr", arm, means)]
    return {"width": step_width(comparison), "lines": lines} if lines else None


def tokens(comparisons: Sequence[Comparison]) -> Tree | None:
    """Training loss by tokens of every arm and scale of an experiment: the mean of the done seeds, else a run that is
    not done. None where there is none."""
    labels = sorted((arm for comp in comparisons for arm in comp.arms), key=lambda arm: arm.sort_key)
    shared = _looks(labels)
    lines = []
    for comparison in comparisons:
        curves = loss_by_tokens(comparison)
        for arm in comparison.arms:
            runs = [run for run in arm.done or arm.runs[:1] if run.folder in curves]
            if not runs:
                continue
            x, y = shared_mean([curves[run.folder] for run in runs])
            told = f"mean of {len(runs)}" if arm.done else f"seed {runs[0].seed} ({runs[0].status})"
            who = {"label": arm.label, "scale": comparison.kind.scale, "colour": shared[arm.label]["color"], "of": told}
            lines.append(who | {"x": numbers(x, 9), "y": numbers(y)})
    scales = list(dict.fromkeys(line["scale"] for line in lines))
    return {"lines": lines, "scales": scales, "origin": origin(runs_of(comparisons))} if lines else None


def _lines(place: int, name: str, arm: Arm, curves: Curves) -> list[Tree]:
    """A line for each run that has a curve, and their mean over the done seeds."""
    known = [run for run in arm.runs if run.folder in curves]
    lines = [_line(place, name, *curves[run.folder]) | {"seed": run.seed, "status": run.status} for run in known]
    done = [curves[run.folder] for run in known if run.status == "done"]
    steps, mean = shared_mean(done)
    return lines + ([_line(place, name, steps, mean) | {"seeds": len(done)}] if len(steps) else [])


def _line(arm: int, name: str, steps: Iterable[float], values: Iterable[float]) -> Tree:
    return {"arm": arm, "of": name, "x": numbers(steps, 9), "y": numbers(values)}


def promotion(comparison: Comparison) -> Tree:
    """Quality of each routed arm at its mean promotion share, by signal, and of the static ends at 0 and 1.

    Where an arm has no static low arm beside it, only its perplexity is known.
    """
    curves = signal_curves(comparison)
    points = [_point(name, point.arm, point.promoted, point.change) for name, of in curves.items() for point in of]
    shown = {point["label"] for point in points}
    for arm in comparison.arms:
        if arm.always is None and arm.promoted is not None and arm.label not in shown:
            points.append(_point(f"{arm.signal} ranked" if arm.ranked else arm.signal, arm, arm.promoted, Paired(0)))
    lows = {low.label: low for of in curves.values() for point in of if (low := comparison.low(point.arm))}
    points += [_point(None, low, 0.0, paired(low.outcomes, low.outcomes)) for low in lows.values()]
    points += [_point(None, recovery, 1.0, change) for recovery, change in ends(comparison)]
    return {"points": points, "groups": sorted({point["group"] for point in points if point["group"]})}


def _point(group: str | None, arm: Arm, promoted: float, change: Paired) -> Tree:
    """`difference` and `ppl`: mean, lower and upper end of the error bar, n; None where there is no finite mean."""
    ppl = arm.stat("final_val_ppl")
    spread = None if ppl is None or ppl.sd is None else (ppl.mean - ppl.sd, ppl.mean + ppl.sd)
    interval = change.interval and (as_percent(change.interval[0]), as_percent(change.interval[1]))
    return {
        "label": arm.label,
        "group": group,
        "at": number(promoted),
        "difference": None if change.mean is None else _bar(as_percent(change.mean), interval, change.n),
        "ppl": None if ppl is None else _bar(ppl.mean, spread, ppl.n),
        "diverged": len(arm.diverged),
        "runs": len(arm.runs),
    }


def _bar(mean: float, ends: tuple[float, float] | None, n: int) -> Tree | None:
    low, high = ends or (None, None)
    shown = number(mean)
    return None if shown is None else {"mean": shown, "low": number(low), "high": number(high), "n": n}


def run_label(arm: Arm, run: Run) -> str:
    return f"{arm.label}, seed {run.seed}" + ("" if run.status == "done" else f" ({run.status})")


def run_map(arm: Arm, run: Run, ratios: Ratios, made: UnitMap, windows: Iterable[FaultWindow]) -> Tree:
    cut, cut_name = limit(arm, run, ratios)
    name, values_U = costs(ratios)
    return {
        "label": run_label(arm, run),
        "arm": arm.label,
        "routed": arm.always is None,
        "sixteen_bit": bits(arm.always) == 16,
        "limit": cut,
        "limit_name": cut_name,
        "cost": numbers(values_U.tolist()),
        "cost_name": name,
        "thresholds": thresholds(arm, run),
        "faults": [
            {"unit": made.units.index(w.unit), "start": w.start, "end": w.end, "kind": w.kind, "magnitude": w.magnitude}
            for w in windows
            if w.unit in made.units and w.start <= made.last_step
        ],
        "origin": origin([run]),
        **made.tree(),
    }


def origin(runs: Sequence[Run]) -> Tree:
    """What a figure's numbers were made with."""
    return {
        "seeds": sorted({run.seed for run in runs}),
        "commits": sorted({run.commit for run in runs}),
        "machines": sorted({run.machine for run in runs}),
        "commands": list(dict.fromkeys(run.command for run in runs)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        value = str(value) if (short := number(float(value))) is None else short
    return value if isinstance(value, int | float | str | None) else str(value)
