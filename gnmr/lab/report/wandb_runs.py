"""Recorded runs sent to W&B as their training would have sent them, with what only all of them together tell.

That is the loss minus the 16-bit arm's of the same seed. A run keeps its id, so one that was sent before goes on there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from gnmr.lab.records.wandb_sink import MINUS_16BIT, Labels, WandbSink, group_of, recorded_rows
from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.curves import relative_losses
from gnmr.lab.report.runs import Run
from gnmr.lab.report.style import Series

Say = Callable[[str], None]


def send(
    comparisons: Sequence[Comparison], *, project: str | None, mode: str, folder: Path | None, every: int, say: Say
) -> list[str]:
    """Sends all runs, one after the other; returns where they are to be seen or how to upload them, each line once.

    Args:
        mode: see `WandbSink.start`.
        folder: for W&B's files; None: each run's own folder.
        every: steps between the rows of a unit in its table.
        say: gets a line a run, and one where W&B fails.
    """
    total, sent = sum(len(one.runs) for one in comparisons), 0
    where: dict[str, None] = {}
    for comparison in comparisons:
        relative, _ = relative_losses(comparison, 1)
        for arm in comparison.arms:
            train, val = relative.get(arm.label, ({}, {}))
            for run in arm.runs:
                sent += 1
                say(f"{sent} of {total}: {run.place}")
                minus = (train.get(run.folder), val.get(run.folder))
                place = run.folder if folder is None else folder
                sink = WandbSink(say, every)
                if told := _send(sink, arm, run, minus, project=project, mode=mode, folder=place):
                    where[told] = None
    return list(where)


def _send(
    sink: WandbSink,
    arm: Arm,
    run: Run,
    minus: tuple[Series | None, Series | None],
    *,
    project: str | None,
    mode: str,
    folder: Path,
) -> str | None:
    """One run; where it is to be seen. `minus`: training and validation loss minus 16 bits."""
    name = f"{run.experiment}/{run.folder.name}"
    known = run.hash if run.hash != "unknown" else hashlib.sha256(name.encode()).hexdigest()  # of a loop of one's own
    run_id = str(run.header.get("run_id") or f"{known[:8]}s{run.seed}")
    labels = Labels(run_id, name, arm.name, group_of(name, arm.name), (run.experiment, run.scale))
    sink.start(labels, project=project, folder=folder, config=run.tree, header=run.header, mode=mode)
    where = sink.where()
    losses, evals = (_by_step(one) for one in minus)
    for kind, row, ratios in recorded_rows(run.folder, run.header.get("units") or ()):
        if kind == "step":
            sink.step(row, ratios, _more("loss", losses, row["step"]))
        elif kind == "eval":
            sink.eval(row, _more("val_loss", evals, row["step"]))
        else:
            sink.events(row)
    sink.finish(run.summary | {"status": run.status}, run.events)
    return where


def _by_step(series: Series | None) -> dict[int, float]:
    return {} if series is None else {round(step): float(value) for step, value in zip(*series, strict=True)}


def _more(field: str, values: dict[int, float], step: int) -> dict[str, float]:
    return {MINUS_16BIT[field]: values[step]} if step in values else {}
