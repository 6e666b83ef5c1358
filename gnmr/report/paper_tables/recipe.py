"""DeepSeek-style recipes (5.2, E.2): the paper's tables 2, 4 and 9."""

from __future__ import annotations

import numpy as np

from gnmr.config import FORMATS, GEMMS
from gnmr.report import published
from gnmr.report.arms import Arm, stat
from gnmr.report.comparisons import Comparison
from gnmr.report.layout import NOTHING, Table, count, measure
from gnmr.report.paper_tables.common import (
    ALONG,
    RECIPE,
    add_row,
    along,
    final_perplexity,
    marks,
    names,
    note,
    plain,
    setting,
    shown,
    size_of,
    source,
    undisturbed,
)
from gnmr.report.runs import Run

_EVALUATED_AT = tuple(tokens / published.TOKENS_2[-1] for tokens in published.TOKENS_2)
_AT = f"{published.SCALE_2_AND_4}, {count(published.TOKENS_2[-1])} tokens"
_SIX_BIT = ("sim_e3m2", "fp8_hybrid")


def table_2(comparison: Comparison) -> Table:
    """Perplexity along the run by the recipes of the two paths."""
    columns = ["arm", *marks(comparison, _EVALUATED_AT)]
    table = Table(f"{comparison.name}: perplexity along the run (the paper's table 2)", columns)
    scale = _another_scale(comparison)
    for arm in filter(shown, comparison.arms):
        theirs = published.TABLE_2.get(_recipes(arm, outliers=scale is not None))
        cells = [arm.label, *along(arm, _EVALUATED_AT)]
        add_row(table, cells, None if theirs is None else [f"{ppl:.2f}" for ppl in theirs], scale)
    table.notes = [ALONG]
    return note(table, comparison, _AT)


def table_4(comparison: Comparison) -> Table:
    """Time of a step and tokens per second; of other settings than the paper's 5.2 too, where it has no such table."""
    of_theirs = setting(comparison) == RECIPE
    which = " (the paper's table 4)" if of_theirs else ""
    table = Table(f"{comparison.name}: speed{which}", ["arm", "step [s]", "tokens/s"])
    tokens = comparison.kind.tokens_per_step
    scale, timed = _another_scale(comparison), list[Run]()
    for arm in filter(shown, comparison.arms):
        speeds = {run: found for run in arm.done if (found := _speed(run, tokens))}
        if not speeds:
            continue
        timed += speeds
        times, speed = (stat(values) for values in zip(*speeds.values(), strict=True))
        theirs = published.TABLE_4.get(_recipes(arm, outliers=scale is not None)) if of_theirs else None
        paper = None if theirs is None else [f"{theirs[0]:.3f}", f"{theirs[1]:.0f}"]
        add_row(table, [arm.label, measure(times, 3), measure(speed, 0)], paper, scale)
    table.notes = ["Median over a run's steps, evaluation and checkpoints left out; mean over done seeds."]
    if len(machines := sorted({run.machine for run in timed})) > 1:
        table.notes.append(f"Times are of different machines: {'; '.join(machines)}.")
    if sharing := [run for run in timed if _on_a_share(run)]:
        table.notes.append(
            f"{len(sharing)} of {len(timed)} runs had a part of their machine's cores, as cells of a sweep that run "
            "side by side; what ran beside them is in their times."
        )
    if simulated := sorted({name for run in timed for name in _simulated(run)}):
        table.notes.append(
            f"Simulated: {', '.join(simulated)}, which takes more arithmetic than the 16-bit path: these times say "
            "nothing of hardware that has the formats."
        )
    return note(table, comparison, _AT, same="") if of_theirs else table


def table_9(experiment: str, comparisons: list[Comparison]) -> Table:
    """Final perplexity of the arms of 6 and 8 bits by size of the model."""
    columns = ["arm", "scale", "parameters", "tokens", "final PPL", "the paper's"]
    table = Table(f"{experiment}: 6-bit and 8-bit by size (the paper's table 9)", columns)
    found = [
        (int(arm.first.header.get("parameters") or 0), name, comparison, arm)
        for comparison, name in zip(comparisons, names(comparisons), strict=True)
        for arm in comparison.arms
        if shown(arm) and arm.always is None and (arm.low_bits, arm.recovery_bits) == (6, 8)
    ]
    for parameters, name, comparison, arm in sorted(found, key=lambda one: (one[0], one[1], one[3].label)):
        theirs = published.TABLE_9.get(size_of(comparison)) if _recipes(arm) == _SIX_BIT else None
        told = [name, count(parameters or None), count(comparison.kind.tokens), final_perplexity(arm)]
        table.rows.append([arm.label, *told, NOTHING if theirs is None else f"{theirs:.2f}"])
    table = table.without_empty(columns[-1:])
    sizes = ", ".join(published.TABLE_9)
    fits = columns[-1] in table.columns
    table.notes.append(source(comparisons) if fits else f"The paper's sizes are {sizes}; no arm of ours is its own.")
    return table


def _speed(run: Run, tokens: int | None) -> tuple[float, float | None] | None:
    """Median seconds of a step and tokens per second, from the rows, else the summary; None where neither has them."""
    if len(run.steps["step"]):
        time = float(np.median(run.steps["step_time_s"]))
        return time, tokens / time if tokens else None
    told, speed = run.summary.get("step_time_median_s"), run.summary.get("tokens_per_s")
    return None if told is None or speed is None else (float(told), float(speed))


def _another_scale(comparison: Comparison) -> str | None:
    """The paper's scale, where ours is another."""
    return None if size_of(comparison) == published.SCALE_2_AND_4 else published.SCALE_2_AND_4


def _recipes(arm: Arm, outliers: bool = False) -> published.Recipes:
    """Those of the arm where it is set as the paper's are, but for `outliers`; (None, None) of any other."""
    get, other = arm.settings.get, (None, None)
    if not undisturbed(arm, outliers):
        return other
    if arm.always is not None:
        return arm.always, None
    pair = get("paths.low"), get("paths.recovery")
    beta = None if arm.signal == "gnmr" else get("controller.beta")
    stages = get("controller.alpha_init"), get("controller.alpha"), beta
    one_length = get("controller.init_frac", 0.025) == 0.025 and not get("controller.warmup_frac")
    whole = set(get("paths.recovers") or GEMMS) == set(GEMMS)
    return pair if plain(arm) and one_length and whole and published.THRESHOLDS_2.get(pair) == stages else other


def _on_a_share(run: Run) -> bool:
    """Whether the run computed on fewer threads than its machine has cores."""
    machine = run.header.get("machine") or {}
    threads, cores = machine.get("threads"), machine.get("cores")
    return machine.get("device") == "cpu" and bool(threads and cores and threads < cores)


def _simulated(run: Run) -> list[str]:
    """Its recipes that were simulated; the header has them as "llm_int8, int_mm"."""
    if (paths := run.header.get("paths")) is None:  # an older run: CPUs did nothing else
        on_cpu, low = (run.header.get("machine") or {}).get("device") == "cpu", run.settings.get("paths.low")
        return [low] if on_cpu and low not in (None, *FORMATS) else []
    return [name for name, *rest in (path.split(", ") for path in paths) if "simulated" in rest]
