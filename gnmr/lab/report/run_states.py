"""Failed, interrupted, unfinished, missing and repeated runs of each arm, as lines of text."""

from __future__ import annotations

from collections.abc import Callable

from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.layout import counted
from gnmr.lab.report.runs import Run


def state_lines(comparison: Comparison) -> list[str]:
    """One line for each arm that has anything but done seeds, or not all the seeds of its comparison."""
    lines = []
    for arm in comparison.arms:
        parts = [f"{len(arm.done)} done"]
        for status, title, tell in _STATES:
            if runs := arm.with_status(status):
                parts.append(f"{len(runs)} {title}: " + "; ".join(tell(run) for run in runs))
        if missing := [seed for seed in comparison.seeds if seed not in arm.seeds]:
            parts.append(f"missing: {counted('seed', missing)}")
        if arm.duplicates:
            repeated = ", ".join(f"seed {run.seed} in {run.place}" for run in arm.duplicates)
            parts.append(f"left out because it repeats a seed: {repeated}")
        if len(parts) > 1:
            lines.append(f"{arm.label}: {', '.join(parts)}.")
    return lines


def _failed(run: Run) -> str:
    return f"{run.reason} (seed {run.seed}, {_progress(run)})"


def _stopped(run: Run) -> str:
    return f"seed {run.seed}, {_progress(run)}" + (f", {run.reason}" if run.reason else "")


def _progress(run: Run) -> str:
    text = f"step {run.last_step}" + (f" of {run.planned_steps}" if run.planned_steps else "")
    if len(run.evals["step"]):
        text += f", validation perplexity {run.evals['val_ppl'][-1]:.2f} after step {run.evals['step'][-1]:.0f}"
    return text


_STATES: tuple[tuple[str, str, Callable[[Run], str]], ...] = (
    ("failed", "failed", _failed),
    ("interrupted", "interrupted", _stopped),
    ("running", "unfinished (running or killed)", _stopped),
)
