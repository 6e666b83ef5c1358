"""The tables of a report: the arms with their losses, tests and spend, and the runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gnmr.errors import printable
from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison, short
from gnmr.lab.report.detection import fault_table
from gnmr.lab.report.layout import (
    NOTHING,
    Table,
    count,
    counted,
    interval_text,
    measure,
    percent,
    relative,
    whole_percent,
)
from gnmr.lab.report.recorded_run import Run
from gnmr.lab.report.statistics import Result, p_text, stat

_OPTIONAL = {
    "diff. [95% CI]": "",
    "verdict (p)": "",
    "gap recovered": "Gap recovered: the share of the loss gap between the two bounds that the arm recovers.",
    "vs random (p)": "",
    "GEMM FLOPs\nspent": "GEMM FLOPs spent: the share of the GEMM FLOPs on the recovery path.",
    "unit-steps\nspent": "Unit-steps spent: the share of the unit-steps on the recovery path.",
    "extra time": "Extra time: the GEMM time that pins and recovery add to that of all GEMMs on the low recipe.",
    "spike score": "Spike score: the share of steps whose loss lies at least 7 standard deviations from the mean of "
    "the 1,000 before it.",
    "promotions": "",
    "sent": "",
}
"""The columns that are left out if no arm has a number in them, and what to say below the table about some of them."""


def arm_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """Return the table of each comparison, and of its injected faults if there were any."""
    tables = [table for comparison in comparisons for table in (arm_table(comparison), fault_table(comparison))]
    return [table for table in tables if table.rows]


def arm_table(comparison: Comparison) -> Table:
    """Return the arms side by side."""
    rows = [_row(comparison, arm) for arm in comparison.arms]
    table = Table(comparison.name, ["arm", "seeds", "val loss", *_OPTIONAL], rows).without_empty(_OPTIONAL)
    table.notes, table.warnings = _notes(comparison, table.columns), _warnings(comparison)
    return table


def run_table(runs: Iterable[Run], root: Path) -> Table:
    """Return every run with the command that repeats it; folders are relative to `root`, a single run has its name."""
    table = Table("Runs", ["run", "status", "steps", "commit", "machine", "command"])
    for run in runs:
        steps = f"{run.last_step} of {run.planned_steps or '?'}"
        status = "unfinished" if run.status == "running" else run.status
        below = os.path.relpath(run.folder, root)
        # A report is written to the run itself, or to a folder in it.
        place = printable(below if {*below.split(os.sep)} - {".", ".."} else run.folder.resolve().name)
        table.rows.append([place, status, steps, run.commit, run.machine, run.command])
    return table


def _row(comparison: Comparison, arm: Arm) -> list[str]:
    test, random = comparison.tests.get(arm.label), comparison.random_tests.get(arm.label)
    # Runs that are not finished would have too few promotions.
    with_events = [run for run in arm.done if arm.routed and run.events]
    promotions = stat(sum(event.get("event") == "promote" for event in run.events) for run in with_events)
    return [
        arm.label,
        f"{len(arm.done)} of {len(comparison.seeds)}",
        measure(arm.final("val_loss"), 4),
        *([NOTHING] * 3 if test is None else _test(test)),
        NOTHING if random is None else _verdict(random),
        percent(comparison.spend(arm)) if comparison.spend_of == "GEMM FLOPs" else NOTHING,
        percent(comparison.spend(arm)) if comparison.spend_of == "unit-steps" else NOTHING,
        percent(arm.mean("spent_extra_time") or None) if arm.routed else NOTHING,
        percent(arm.mean("spike_score") or None),
        NOTHING if promotions is None else f"{promotions.mean:,.0f}",
        percent(arm.mean("numbers_sent_frac")),
    ]


def _test(test: Result) -> list[str]:
    """Return difference, verdict with its p, and share of the gap."""

    def between(ends: tuple[float, float] | None, show: Callable[[float], str]) -> str:
        return "" if ends is None else f" [{interval_text(ends, show, ', ')}]"

    difference = closed = NOTHING
    if any(test.diverged):
        difference = f"diverged {test.diverged[0]} : {test.diverged[1]}"
    elif test.difference is not None:
        difference = relative(test.difference.estimate) + between(test.difference.interval, relative)
    if test.closed is not None:
        closed = whole_percent(test.closed.value) + between(test.closed.interval, whole_percent)
    return [difference, _verdict(test), closed]


def _verdict(test: Result) -> str:
    return test.verdict if test.p is None else f"{test.verdict} ({p_text(test.p)})"


def _notes(comparison: Comparison, columns: list[str]) -> list[str]:
    """Return on what the arms were trained, what the columns mean and how the tests were made."""
    kind, data, runs = comparison.kind, comparison.runs[0].data, comparison.runs
    # What the arms were trained on.
    if kind.steps is None and kind.fingerprint is None:
        steps = sorted({count(run.summary.get("steps")) for run in runs})
        notes = [f"Training loops of your own, {', '.join(steps)} steps; their records do not say on which data."]
    else:
        notes = [
            f"{count(kind.steps)} steps of {count(kind.tokens_per_step)} tokens, sequences of {kind.seq_len}, data "
            f"{data.get('name', 'unknown')} {short(kind.fingerprint)}, commit "
            f"{', '.join(sorted({run.commit for run in runs}))}."
        ]
    if any(run.settings.get("fork.heal") for run in runs):
        notes.append("Losses of forks that heal are those before they heal.")
    if any(len(arm.done) > 1 for arm in comparison.arms):
        notes.append("± is the sample standard deviation over the finished seeds.")
    # A note on each column that the table has.
    if "diff. [95% CI]" in columns:
        names = dict.fromkeys(low.label for arm in comparison.arms if (low := comparison.low(arm)) is not None)
        notes.append(
            f"The difference in perplexity is that to {' or '.join(names)} with the same seed; below 0 is better. "
            "p is Holm-adjusted over the arms."
        )
    for family in comparison.families:
        if family.between:
            notes.append(family.control_text())
            if family.tested:
                notes.append(family.method_text())
    notes += [note for column, note in _OPTIONAL.items() if note and column in columns]
    return notes


def _warnings(comparison: Comparison) -> list[str]:
    """Return notes on missing arms, and on differences that make arms hard to compare."""
    warnings = [state for arm in comparison.arms if (state := _state(comparison, arm))]
    if apart := comparison.apart():
        differ = ", ".join(f"{name} ({here} here, {', '.join(there)} there)" for name, (here, there) in apart.items())
        warnings.append(f"Not comparable with the other runs of this experiment and scale: they differ in {differ}.")
    if len(machines := sorted({run.machine for run in comparison.runs})) > 1:
        warnings.append(f"The runs are from several machines: {'; '.join(machines)}.")
    if keys := comparison.differing_settings():
        warnings.append(f"The arms differ in more than their precision and controller: {', '.join(keys)}.")
    return warnings


def _state(comparison: Comparison, arm: Arm) -> str:
    """Return the arm's unfinished, failed, missing and repeated runs."""
    texts = []
    for status in ("failed", "interrupted", "running"):
        if runs := [run for run in arm.runs if run.status == status]:
            word = "unfinished" if status == "running" else status
            texts.append(f"{len(runs)} {word}: {'; '.join(map(_ending, runs))}")
    if missing := [seed for seed in comparison.seeds if seed not in arm.seeds]:
        texts.append(f"missing: {counted('seed', missing)}")
    if arm.duplicates:
        repeated = ", ".join(f"seed {run.seed} in {run.folder}" for run in arm.duplicates)
        texts.append(f"left out because it repeats a seed: {repeated}")
    return f"{arm.label}: {len(arm.done)} done, {', '.join(texts)}." if texts else ""


def _ending(run: Run) -> str:
    texts = [f"seed {run.seed}", f"step {run.last_step}" + (f" of {run.planned_steps}" if run.planned_steps else "")]
    if len(run.evals["step"]):
        texts.append(f"validation perplexity {run.evals['val_ppl'][-1]:.2f} after step {run.evals['step'][-1]:.0f}")
    return ", ".join([*texts, *([run.reason] if run.reason else [])])
