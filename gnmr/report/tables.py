"""The report's tables: arms side by side, and the paper's tables 1 and 3 with our runs in them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gnmr.report import published
from gnmr.report.arms import Arm, Comparison, Kind, paired_difference, paired_seeds
from gnmr.report.cells import cell_lines
from gnmr.report.layout import NOTHING, Table, count, duration, measure, percent, size
from gnmr.report.runs import Run

_Figure = TypeVar("_Figure")


def tables(comparisons: list[Comparison]) -> list[Table]:
    """All tables: two for each comparison, then the paper's two for each experiment."""
    found = []
    for comparison in comparisons:
        found += [quality(comparison), control(comparison)]
    for experiment in dict.fromkeys(comparison.kind.experiment for comparison in comparisons):
        of_experiment = [comparison for comparison in comparisons if comparison.kind.experiment == experiment]
        found += [table_1(experiment, of_experiment), table_3(experiment, of_experiment)]
    return [table for table in found if table.rows]


def quality(comparison: Comparison) -> Table:
    """Final validation loss and perplexity of each arm, and its paired difference to the 16-bit arm."""
    table = Table(f"{comparison.name}: validation", ["arm", "seeds done", "val perplexity", "val loss", "vs 16-bit"])
    unpaired, partial = [], []
    for arm in comparison.arms:
        reference = comparison.reference(arm)
        if reference is arm:
            difference = "reference"
        elif reference is None:
            difference = NOTHING
            unpaired.append(arm.label)
        else:
            difference = measure(paired_difference(arm, reference), 2, sign=True, unit=" %")
            seeds = paired_seeds(arm, reference)
            if seeds != sorted(run.seed for run in arm.done):
                partial.append(f"{arm.label} on {_seeds(seeds)}")
        ppl, loss = arm.stat("final_val_ppl"), arm.stat("final_val_loss")
        done = f"{len(arm.done)} of {len(comparison.seeds)}"
        table.rows.append([arm.label, done, measure(ppl, 2), measure(loss, 4), difference])
    table.notes = [_what(comparison), *_apart(comparison), *cell_lines(comparison)]
    if unpaired:
        table.notes.append(f"No 16-bit arm of the same model and optimizer to compare with: {', '.join(unpaired)}.")
    if partial:
        table.notes.append(f"Compared only where both have the seed: {', '.join(partial)}.")
    if keys := comparison.differing_settings():
        table.notes.append(f"Mind: the arms differ in more than their paths and controller: {', '.join(keys)}.")
    table.notes.append(
        f"± is the sample standard deviation over seeds ({NOTHING}: fewer than two); vs 16-bit is the mean of the "
        "per-seed differences of perplexity. No test of significance was made."
    )
    return table


def control(comparison: Comparison) -> Table:
    """What the controller did and what the arm cost; means over the done seeds."""
    columns = ["arm", "promoted", "hit\nmax_o", "GNMR\n> α", "dGNMR\n> β", "saved", "of\n16-bit", "wall\ntime"]
    table = Table(f"{comparison.name}: control and cost", columns)
    for arm in comparison.arms:
        saved, reference = _mean(arm, "saved_bytes_mean"), comparison.reference(arm)
        full = _mean(reference, "saved_bytes_mean") if reference else None
        table.rows.append(
            [
                arm.label,
                percent(_mean(arm, "promotion_frac")) if arm.routed else NOTHING,
                percent(_mean(arm, "hit_max_o_frac")) if arm.routed else NOTHING,
                percent(_mean(arm, "gnmr_over_frac")),
                percent(_mean(arm, "delta_gnmr_over_frac")),
                size(saved),
                percent(saved / full) if saved is not None and full else NOTHING,
                duration(_mean(arm, "wall_time_s")),
            ]
        )
    table.notes = [
        "Means over done seeds. Promoted and over the thresholds: shares of unit-steps; hit max_o: share of steps; "
        "saved: bytes kept for backward by the converted linears, mean over steps."
    ]
    table.notes += [_promotions(arm) for arm in comparison.arms if any(run.events for run in arm.done)]
    if skipped := [arm.label for arm in comparison.arms if (_mean(arm, "nonfinite_total") or 0) > 0]:
        table.notes.append(f"Steps skipped for a non-finite loss or gradient: {', '.join(skipped)}.")
    if len(machines := sorted({run.machine for run in comparison.runs})) > 1:
        table.notes.append(f"Wall times are of different machines: {'; '.join(machines)}.")
    return table


def table_1(experiment: str, comparisons: list[Comparison]) -> Table:
    """Arms by scales: validation perplexity, the paper's beside it at the paper's scales."""
    table = Table(f"{experiment}: validation perplexity by scale (the paper's table 1)", ["arm"])
    theirs: list[str] = []
    labels = _labels(comparisons)
    rows: dict[str, list[str]] = {label: [label] for label in labels}
    for comparison, name in zip(comparisons, _names(comparisons), strict=True):
        arms = {arm.label: arm for arm in comparison.arms}
        scale = comparison.kind.scale
        table.columns.append(f"{name}\n{count(comparison.kind.tokens)} tokens")
        for label in labels:
            rows[label].append(_perplexity(arms.get(label)))
        if scale not in published.TABLE_1_TOKENS:
            continue
        theirs.append(f"paper,\n{name}\n{count(published.TABLE_1_TOKENS[scale])}")
        table.columns.append(theirs[-1])
        for label in labels:
            ppl = _published(published.val_ppl, comparison.kind, arms.get(label))
            rows[label].append(NOTHING if ppl is None else "x" if math.isinf(ppl) else f"{ppl:.2f}")
    table.rows = list(rows.values())
    if any(row[place] == "x" for row in table.rows for place in range(1, len(row))):
        table.notes.append("x: every run of ours failed, or the paper's failed to converge.")
    table.notes += _beside_the_paper(comparisons, bool(theirs))
    return table


def table_3(experiment: str, comparisons: list[Comparison]) -> Table:
    """Shares of unit-steps over the thresholds, the paper's beside them where scale and thresholds are the paper's."""
    theirs = ["paper,\nGNMR > α", "paper,\ndGNMR > β"]
    columns = ["arm", "scale", "α", "β", "GNMR > α", theirs[0], "dGNMR > β", theirs[1]]
    table = Table(f"{experiment}: shares of unit-steps over threshold (the paper's table 3)", columns)
    for comparison, name in zip(comparisons, _names(comparisons), strict=True):
        for arm in comparison.arms:
            ours = [_mean(arm, field) for field in ("gnmr_over_frac", "delta_gnmr_over_frac")]
            if ours == [None, None]:
                continue
            alpha, beta = (arm.settings.get(f"controller.{key}") for key in ("alpha", "beta"))
            paper = _published(published.over_fracs, comparison.kind, arm) or (None, None)
            shown = [percent(share) for pair in zip(ours, paper, strict=True) for share in pair]
            thresholds = [NOTHING if value is None else str(value) for value in (alpha, beta)]
            table.rows.append([arm.label, name, *thresholds, *shown])
    table = table.without_empty(theirs)
    if not set(theirs) & set(table.columns):
        table.notes.append("The paper has no shares for these scales and thresholds, so none stand beside ours.")
    else:
        table.notes += _beside_the_paper(comparisons, True)
    return table


def run_table(runs: list[Run], root: Path) -> Table:
    """Every run with what is needed to make it again; folders as seen from `root`."""
    table = Table("Runs", ["run", "status", "steps", "commit", "machine", "command"])
    for run in runs:
        steps = f"{run.last_step} of {run.planned_steps or '?'}"
        command = str(run.header.get("command") or NOTHING)
        status = "unfinished" if run.status == "running" else run.status
        table.rows.append([os.path.relpath(run.folder, root), status, steps, run.commit, run.machine, command])
    return table


def _promotions(arm: Arm) -> str:
    causes = Counter(
        str(event.get("cause")) for run in arm.done for event in run.events if event.get("event") == "promote"
    )
    told = ", ".join(f"{cause} {number:,}" for cause, number in causes.most_common())
    return f"{arm.label}: {causes.total():,} promotions in {len(arm.done)} seeds" + (f" ({told})." if told else ".")


def _what(comparison: Comparison) -> str:
    kind, data = comparison.kind, comparison.runs[0].data
    return (
        f"{count(kind.steps)} steps of {count(kind.tokens_per_step)} tokens ({count(kind.tokens)} in all), blocks of "
        f"{kind.seq_len}, data {data.get('name', 'unknown')} {_short(kind.fingerprint)}, commit "
        f"{', '.join(sorted({run.commit for run in comparison.runs}))}."
    )


def _apart(comparison: Comparison) -> list[str]:
    """The line that says what keeps this comparison apart from others of its experiment and scale."""
    kinds = [comparison.kind, *comparison.rivals]
    told = {
        "data": [_short(kind.fingerprint) for kind in kinds],
        "seq_len": [str(kind.seq_len) for kind in kinds],
        "tokens per step": [count(kind.tokens_per_step) for kind in kinds],
        "steps": [count(kind.steps) for kind in kinds],
    }
    differ = [
        f"{what} ({mine} here, {', '.join(sorted(set(others) - {mine}))} there)"
        for what, (mine, *others) in told.items()
        if set(others) - {mine}
    ]
    if not differ:
        return []
    return [f"Not comparable with the other runs of this experiment and scale: they differ in {', '.join(differ)}."]


def _beside_the_paper(comparisons: list[Comparison], shown: bool) -> list[str]:
    notes = []
    kinds = [comparison.kind for comparison in comparisons]
    if others := sorted({kind.scale for kind in kinds if kind.scale not in published.TABLE_1_TOKENS}):
        scales, here = ", ".join(published.TABLE_1_TOKENS), ", ".join(others)
        notes.append(f"The paper's scales are {scales}; it has no figures for scale {here}, so none stand beside ours.")
    if shown:
        names = {comparison.runs[0].data.get("name", "unknown") for comparison in comparisons}
        data = f"; the paper's data is C4, ours {', '.join(sorted(names))}" if names != {"c4"} else ""
        notes.append(f"The paper's figures: {published.SOURCE}{data}.")
    return notes


def _published(look_up: Callable[..., _Figure | None], kind: Kind, arm: Arm | None) -> _Figure | None:
    """The paper's figure for an arm of its act-quant stress setting; none for a two-stage or warmed-up arm."""
    if arm is None or arm.settings.get("paths.site") != "saved":
        return None
    get = arm.settings.get
    if arm.routed and (
        get("controller.name") != "gnmr" or get("controller.alpha_init") or get("controller.warmup_frac")
    ):
        return None
    return look_up(kind.scale, arm.low_bits, arm.recovery_bits, get("controller.alpha"), get("controller.beta"))


def _perplexity(arm: Arm | None) -> str:
    if arm is None:
        return NOTHING
    if len(arm.with_status("failed")) == len(arm.runs):
        return "x"
    return measure(arm.stat("final_val_ppl"), 2)


def _labels(comparisons: list[Comparison]) -> list[str]:
    arms = sorted((arm for comparison in comparisons for arm in comparison.arms), key=lambda arm: arm.sort_key)
    return list(dict.fromkeys(arm.label for arm in arms))


def _names(comparisons: list[Comparison]) -> list[str]:
    """The scales; where several comparisons have one, numbered."""
    scales = [comparison.kind.scale for comparison in comparisons]
    return [
        f"{scale} ({scales[: place + 1].count(scale)})" if scales.count(scale) > 1 else scale
        for place, scale in enumerate(scales)
    ]


def _mean(arm: Arm, field: str) -> float | None:
    found = arm.stat(field)
    return None if found is None else found.mean


def _short(fingerprint: str | None) -> str:
    return str(fingerprint or "unknown")[:8]


def _seeds(seeds: list[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}" if seeds else "no seed"
