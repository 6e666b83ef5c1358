"""The table of a report: one row per arm with its loss, its difference to never recovering, its spend and its state."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison, short
from gnmr.lab.report.judged import Bounds, Judged, bounds, judged
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
from gnmr.lab.report.runs import Run
from gnmr.lab.report.statistics import p_text, stat

_OPTIONAL = ("diff. [95% CI]", "p (Holm)", "verdict", "gap closed", "vs random (p)", "spent", "promotions", "sent")


def arm_table(comparison: Comparison) -> Table:
    """Return the arms side by side."""
    pairs = bounds(comparison)
    columns = ["arm", "seeds", "val loss", *_OPTIONAL]
    table = Table(comparison.name, columns)
    for one in judged(comparison, pairs):
        table.rows.append(_row(comparison, one))
    table = table.without_empty(_OPTIONAL)
    notes = [_what(comparison), *_apart(comparison), *_states(comparison), *_how(comparison, pairs, table.columns)]
    if keys := comparison.differing_settings():
        notes.append(f"The arms differ in more than their precision and controller: {', '.join(keys)}.")
    table.notes = notes
    return table


def run_table(runs: Iterable[Run], root: Path) -> Table:
    """Return every run with what is needed to repeat it; folders are relative to `root`."""
    table = Table("Runs", ["run", "status", "steps", "commit", "machine", "command"])
    for run in runs:
        steps = f"{run.last_step} of {run.planned_steps or '?'}"
        status = "unfinished" if run.status == "running" else run.status
        table.rows.append([os.path.relpath(run.folder, root), status, steps, run.commit, run.machine, run.command])
    return table


def difference_text(one: Judged) -> str:
    """Return the difference and its interval as percent of perplexity, or how many runs diverged."""
    if any(one.diverged):
        return f"diverged {one.diverged[0]} : {one.diverged[1]}"
    if one.difference is None:
        return NOTHING
    interval = "" if one.interval is None else f" [{interval_text(one.interval, relative, ', ')}]"
    return f"{relative(one.difference)}{interval}"


def closed_text(one: Judged) -> str:
    """Return the share of the gap that the arm closes, and its interval."""
    if one.closed is None:
        return NOTHING
    ends = "" if one.closed_interval is None else f" [{interval_text(one.closed_interval, whole_percent, ', ')}]"
    return f"{whole_percent(one.closed)}{ends}"


def _row(comparison: Comparison, one: Judged) -> list[str]:
    arm, random = one.arm, NOTHING
    if one.random is not None:
        random = one.random[1] if one.random[0] is None else f"{one.random[1]} ({p_text(one.random[0])})"
    return [
        arm.label,
        f"{len(arm.done)} of {len(comparison.seeds)}",
        measure(arm.stat("final_val_loss"), 4),
        difference_text(one),
        p_text(one.p),
        one.verdict or NOTHING,
        closed_text(one),
        random,
        percent(arm.spend) if arm.routed else NOTHING,
        _promotions(arm),
        percent(arm.mean("numbers_sent_frac")),
    ]


def _promotions(arm: Arm) -> str:
    """Return the mean number of promotions per run whose events were kept."""
    kept = [run for run in arm.done if arm.routed and run.events]
    found = stat(sum(event.get("event") == "promote" for event in run.events) for run in kept)
    return NOTHING if found is None else f"{found.mean:,.0f}"


def _what(comparison: Comparison) -> str:
    kind, data = comparison.kind, comparison.runs[0].data
    if kind.steps is None and kind.fingerprint is None:
        steps = sorted({count(run.summary.get("steps")) for run in comparison.runs})
        return f"Training loops of your own, {', '.join(steps)} steps; their records do not say on which data."
    return (
        f"{count(kind.steps)} steps of {count(kind.tokens_per_step)} tokens, sequences of {kind.seq_len}, data "
        f"{data.get('name', 'unknown')} {short(kind.fingerprint)}, commit "
        f"{', '.join(sorted({run.commit for run in comparison.runs}))}."
    )


def _apart(comparison: Comparison) -> list[str]:
    differ = [f"{what} ({mine} here, {', '.join(there)} there)" for what, (mine, there) in comparison.apart().items()]
    note = f"Not comparable with the other runs of this experiment and scale: they differ in {', '.join(differ)}."
    return [note] if differ else []


def _how(comparison: Comparison, pairs: list[Bounds], columns: list[str]) -> list[str]:
    """Return what the columns mean and what was tested."""
    notes = ["± is the sample standard deviation over the finished seeds."]
    if "diff. [95% CI]" in columns:
        names = dict.fromkeys(b.label for arm in comparison.arms if (b := comparison.low(arm)) is not None)
        notes.append(
            f"The difference is that of the perplexity to {' or '.join(names)} with the same seed; below 0 is better. "
            "p is Holm-adjusted over the arms."
        )
    for one in pairs:
        if one.between:
            notes.append(one.family.control_text())
            notes += [one.family.assumptions_text()] if one.tested else []
    if "gap closed" in columns:
        notes.append("Gap closed: share of the loss gap between the two bounds that the arm closes.")
    if "spent" in columns:
        notes.append("Spent: share of the GEMM FLOPs on the recovery path, or of the unit-steps if that is unknown.")
    if len(machines := sorted({run.machine for run in comparison.runs})) > 1:
        notes.append(f"The runs are from several machines: {'; '.join(machines)}.")
    return notes


def _states(comparison: Comparison) -> list[str]:
    """Return one line per arm that has unfinished, failed, missing or repeated runs."""
    lines = []
    for arm in comparison.arms:
        parts = []
        for status, word in (("failed", "failed"), ("interrupted", "interrupted"), ("running", "unfinished")):
            if runs := arm.with_status(status):
                parts.append(f"{len(runs)} {word}: {'; '.join(map(_state, runs))}")
        if missing := [seed for seed in comparison.seeds if seed not in arm.seeds]:
            parts.append(f"missing: {counted('seed', missing)}")
        if arm.duplicates:
            repeated = ", ".join(f"seed {run.seed} in {run.folder}" for run in arm.duplicates)
            parts.append(f"left out because it repeats a seed: {repeated}")
        if parts:
            lines.append(f"{arm.label}: {len(arm.done)} done, {', '.join(parts)}.")
    return lines


def _state(run: Run) -> str:
    parts = [f"seed {run.seed}", f"step {run.last_step}" + (f" of {run.planned_steps}" if run.planned_steps else "")]
    if len(run.evals["step"]):
        parts.append(f"validation perplexity {run.evals['val_ppl'][-1]:.2f} after step {run.evals['step'][-1]:.0f}")
    return ", ".join([*parts, *([run.reason] if run.reason else [])])
