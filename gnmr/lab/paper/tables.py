"""The paper's tables with our runs in them.

A `PaperTable` declares one: which of our arms stand in it, what is shown of them, and which of the paper's figures
(published.py) stand below an arm that is set as the paper's (matching.py). The tables by scale (1, 3, 9, 10) span
comparisons. In tables along the run (2, 13, 15) the paper's figures stand at other scales too, with theirs in the row's
name; its marks (tokens, steps) become the same shares of our run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from gnmr.lab.paper import matching, published
from gnmr.lab.paper.matching import ACT_QUANT, FINETUNE, GNMR, MOE, PANGU, RECIPE, compared, meets, setting, size_of
from gnmr.lab.report.arms import NAMES, Arm, bits
from gnmr.lab.report.comparisons import Comparison, Kind, by_experiment
from gnmr.lab.report.layout import NOTHING, Table, count, measure, numbered, percent
from gnmr.lab.report.runs import Run
from gnmr.lab.report.statistics import stat
from gnmr.names import FORMATS
from gnmr.records.schema import OWN

Figures = Sequence[str] | None

THEIRS = "  the paper's"
"""First cell of the row that holds the paper's figures for the row above it."""
SMOOTHED = 0.01
"""Share of the run over which a training loss at a step is the mean."""
_WITHIN = 0.05
"""Share of the run that an evaluation may be away from where the paper has one."""
_ALONG = f"At the nearest evaluation; {NOTHING}: none within {_WITHIN:.0%} of the run."
_LOSS = (
    f"Mean over the steps within {SMOOTHED / 2:.1%} of the run, at 0 the first step alone; then over the seeds that "
    "are done or not yet diverged. x: diverged before."
)


def paper_tables(comparisons: list[Comparison]) -> list[Table]:
    """Of every experiment those of the paper's tables for which these runs have rows; none of loops of one's own."""
    ours = by_experiment([one for one in comparisons if one.kind.scale != OWN])
    made = (table for name, mine in ours.items() for table in _of_experiment(name, mine))
    return [table for table in made if table.rows]


def _of_experiment(experiment: str, comparisons: list[Comparison]) -> list[Table]:
    def of(*settings: str) -> list[Comparison]:
        return [one for name in settings for one in comparisons if setting(one) == name]

    return [
        table_1(experiment, of(ACT_QUANT)),
        *map(table_2, of(RECIPE)),
        table_3(experiment, comparisons),
        *map(table_4, of(RECIPE)),
        *map(speed, of(MOE, PANGU)),
        *(table(comparison) for comparison in comparisons for table in (table_5, table_6)),
        *map(table_7, of(FINETUNE)),
        table_9(experiment, of(RECIPE)),
        table_10(experiment, of(ACT_QUANT)),
        *map(table_11, comparisons),
        *map(table_13, of(MOE)),
        *map(table_15, of(PANGU)),
    ]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of one comparison; called with it, it makes the `Table`."""

    number: int | None
    """None: the paper has no such table of this setting."""
    title: str
    arms: Callable[[Comparison], Iterable[Arm]] = lambda comparison: filter(compared, comparison.arms)
    heads: Callable[[Comparison], list[str]]
    """Columns behind the arm's."""
    cells: Callable[[Comparison, Arm], Figures]
    """What they hold; None: no row."""
    theirs: Callable[[Comparison, Arm], Figures]
    """The paper's figures of the last columns, where the arm is set as its own."""
    scale: str
    """The paper's."""
    length: str
    """Of the paper's runs."""
    elsewhere: str | None = None
    """What the paper's figures have in common with ours at other scales; None: they do not stand there."""
    notes: Callable[[Comparison], list[str]]

    def __call__(self, comparison: Comparison) -> Table:
        """Our arms, and below each of them the paper's."""
        which = "" if self.number is None else f" (the paper's table {self.number})"
        table = Table(f"{comparison.name}: {self.title}{which}", ["arm", *self.heads(comparison)])
        whose = THEIRS if self.elsewhere is None or size_of(comparison) == self.scale else f"{THEIRS}, {self.scale}"
        for arm in self.arms(comparison):
            if (ours := self.cells(comparison, arm)) is None:
                continue
            table.rows.append([arm.label, *ours])
            if (theirs := self.theirs(comparison, arm)) is not None:
                table.rows.append([whose, *[""] * (len(ours) - len(theirs)), *theirs])
        table.notes = self.notes(comparison)
        if self.number is not None:
            table.notes += self._about_theirs(comparison, {cells[0] for cells in table.rows})
        return table

    def _about_theirs(self, comparison: Comparison, names: set[str]) -> list[str]:
        at = f"{self.scale}, {self.length}"
        if not any(name.startswith(THEIRS) for name in names):
            return [f"The paper has this table at {at}; none of its rows fits these arms."]
        apart = f"{self.elsewhere or ''}: another model and other data, which nothing of ours is to equal"
        told = f"The paper's are at {at}, on its own machines{'' if THEIRS in names else apart}."
        return [told, _source([comparison])]


# Act-quant stress (5.1, E.1, E.4, E.5).


def table_1(experiment: str, comparisons: list[Comparison]) -> Table:
    """Static and GNMR arms by scales: validation perplexity, the paper's beside it at the paper's scales."""

    def theirs(kind: Kind, arm: Arm) -> float | None:
        if not matching.saved_activations(kind, arm) or not (arm.always or meets(arm, matching.BOTH_THRESHOLDS)):
            return None
        row = published.TABLE_1.get(matching.table_1_arm(arm), {})
        return row.get(kind.scale)

    title = f"{experiment}: validation perplexity by scale (the paper's table 1)"
    return _by_scale(title, comparisons, arms=compared, theirs=theirs)


def table_10(experiment: str, comparisons: list[Comparison]) -> Table:
    """The static baseline (`static_k`, E.4) by scales, between the static low path and GNMR."""

    def chosen_once(arm: Arm) -> bool:
        return arm.routed and arm.signal == matching.STATIC_BASELINE

    def between(arm: Arm) -> bool:
        if arm.always is not None:
            return bits(arm.always) != 16
        return chosen_once(arm) or (arm.signal == "gnmr_delta" and not arm.ranked)

    def theirs(kind: Kind, arm: Arm) -> float | None:
        return published.TABLE_10.get(kind.scale) if matching.adapt(kind, arm) else None

    title = f"{experiment}: static baseline, validation perplexity by scale (the paper's table 10)"
    having = [one for one in comparisons if any(map(chosen_once, one.arms))]
    table = _by_scale(title, having, arms=between, theirs=theirs)
    baselines = [arm for one in having for arm in filter(chosen_once, one.arms)]
    if others := dict.fromkeys(arm.label for arm in baselines if not matching.of_blocks_in_16_bits(arm)):
        table.notes.append(
            f"The paper's baseline is {100 * published.K_FRAC_10:.0f} % of the blocks for good, ranked over a warm-up "
            f"in 16 bits (the arm adapt). Another one, chosen of other units or on another path: {', '.join(others)}."
        )
    return table


def _by_scale(
    title: str,
    comparisons: list[Comparison],
    *,
    arms: Callable[[Arm], bool],
    theirs: Callable[[Kind, Arm], float | None],
) -> Table:
    """One row an arm's label, one column a comparison, and one of the paper's beside each of its scales."""
    table = Table(title, ["arm"])
    found = sorted((arm for one in comparisons for arm in one.arms if arms(arm)), key=lambda arm: arm.sort_key)
    rows = {label: [label] for label in dict.fromkeys(arm.label for arm in found)}
    beside = False
    for comparison, name in zip(comparisons, _names(comparisons), strict=True):
        kind, labelled = comparison.kind, {arm.label: arm for arm in comparison.arms}
        table.columns.append(f"{name}\n{count(kind.tokens)} tokens")
        for label, cells in rows.items():
            cells.append(_final_perplexity(labelled.get(label)))
        if kind.scale not in published.TABLE_1_TOKENS:
            continue
        beside = True
        table.columns.append(f"paper,\n{name}\n{count(published.TABLE_1_TOKENS[kind.scale])}")
        for label, cells in rows.items():
            ppl = theirs(kind, labelled[label]) if label in labelled else None
            cells.append(_figure(ppl, 2))
    table.rows = list(rows.values())
    if any("x" in cells[1:] for cells in table.rows):
        table.notes.append("x: every run of ours failed, or the paper's failed to converge.")
    table.notes += _beside_the_paper(comparisons, beside)
    return table


def table_3(experiment: str, comparisons: list[Comparison]) -> Table:
    """Shares of unit-steps over the thresholds, the paper's beside them where scale and thresholds are the paper's."""
    theirs = ["paper,\nGNMR > α", "paper,\ndGNMR > β"]
    columns = ["arm", "scale", "α", "β", "GNMR > α", theirs[0], "dGNMR > β", theirs[1]]
    table = Table(f"{experiment}: shares of unit-steps over threshold (the paper's table 3)", columns)
    for comparison, name in zip(comparisons, _names(comparisons), strict=True):
        kind = comparison.kind
        for arm in comparison.arms:
            over = arm.over_fracs()
            ours = [over.get(column) for column in ("gnmr", "delta_gnmr")]
            if arm.signal not in GNMR or ours == [None, None]:
                continue
            alpha, beta = (arm.settings.get(f"controller.{key}") for key in ("alpha", "beta"))
            trigger = arm.settings.get("controller.trigger", 1.0)  # a share is of what exceeds trigger times threshold
            own = matching.saved_activations(kind, arm) and meets(arm, matching.BOTH_THRESHOLDS)
            paper = published.TABLE_3.get((kind.scale, alpha, beta)) if own and matching.four_eight(arm) else None
            shares = [percent(share) for pair in zip(ours, paper or (None, None), strict=True) for share in pair]
            thresholds = [NOTHING if value is None else str(round(value * trigger, 3)) for value in (alpha, beta)]
            table.rows.append([arm.label, name, *thresholds, *shares])
    table = table.without_empty(theirs)
    if set(theirs) & set(table.columns):
        table.notes += _beside_the_paper(comparisons, True)
    else:
        table.notes.append("The paper has no shares for these scales and thresholds, so none stand beside ours.")
    return table


def _beside_the_paper(comparisons: list[Comparison], figures: bool) -> list[str]:
    notes = []
    if others := sorted({one.kind.scale for one in comparisons} - set(published.TABLE_1_TOKENS)):
        scales, here = ", ".join(published.TABLE_1_TOKENS), ", ".join(others)
        notes.append(f"The paper's scales are {scales}; it has no figures for scale {here}, so none stand beside ours.")
    return [*notes, _source(comparisons)] if figures else notes


def _siblings(
    comparison: Comparison, free: tuple[str, ...], fixed: tuple[str, ...] = (), *, any_signal: bool = False
) -> list[list[Arm]]:
    """Routed arms in groups of two and more that differ in settings of these keys alone.

    Args:
        free: beginnings of the keys.
        fixed: keys that are none of them.
        any_signal: False: those under GNMR over thresholds alone.
    """
    groups: dict[str, list[Arm]] = {}
    free = (*free, *NAMES, "records.")
    for arm in comparison.arms:
        if arm.routed and (any_signal or (arm.signal in GNMR and not arm.ranked)):
            kept = [pair for pair in arm.settings.items() if pair[0] in fixed or not pair[0].startswith(free)]
            groups.setdefault(repr(sorted(kept)), []).append(arm)
    return [group for group in groups.values() if len(group) > 1]


def _with_stages(comparison: Comparison) -> list[Arm]:
    """Arms that differ in nothing but alpha and its first stage, which one of them has."""
    groups = _siblings(comparison, ("controller.alpha", "controller.beta_init", "controller.init_frac"))
    staged = [group for group in groups if any(arm.settings.get("controller.alpha_init") for arm in group)]
    return sorted((arm for group in staged for arm in group), key=matching.stages)


def _with_caps(comparison: Comparison) -> list[Arm]:
    """Arms that differ in nothing but max_o."""
    groups = _siblings(comparison, ("controller.max_o",))
    return sorted((arm for group in groups for arm in group), key=matching.max_o)


def _with_signals(comparison: Comparison) -> list[Arm]:
    """Arms on one actuator under different signals."""
    actuator = ("controller.max_o", "controller.t_lock", "controller.hold")
    groups = _siblings(comparison, ("controller.", "precision.probe_tokens"), actuator, any_signal=True)
    return [arm for group in groups if len({(arm.signal, arm.ranked) for arm in group}) > 1 for arm in group]


def _theirs_5(comparison: Comparison, arm: Arm) -> Figures:
    fits = matching.two_stages(comparison.kind, arm) and matching.max_o(arm) == published.MAX_O
    return _figures(published.TABLE_5.get(matching.stages(arm)), 2) if fits else None


def _theirs_6(comparison: Comparison, arm: Arm) -> Figures:
    fits = matching.two_stages(comparison.kind, arm) and matching.stages(arm) == (1.5, 1.1)
    return _figures(published.TABLE_6.get(matching.max_o(arm)), 2) if fits else None


def _cells_11(_: Comparison, arm: Arm) -> list[str]:
    steps, time, peak = (arm.mean(field) for field in ("steps", "wall_time_s", "peak_memory_bytes"))
    step = time / steps if time is not None and steps else None
    shares = [_figure(share, 4) for share in (arm.promoted, arm.mean("hit_max_o_frac"), step)]
    return [measure(arm.stat("final_val_ppl"), 3), *shares, _figure(None if peak is None else peak / 1e6, 0)]


def _theirs_11(comparison: Comparison, arm: Arm) -> Figures:
    row = published.TABLE_11.get(arm.signal)
    if row is None or not matching.matched_trigger(comparison.kind, arm):
        return None
    return [_figure(value, digits) for value, digits in zip(astuple(row), (3, 4, 4, 4, 0), strict=True)]


_SHARES_5 = tuple(tokens / published.TOKENS_5_AND_6[-1] for tokens in published.TOKENS_5_AND_6)
_LENGTH_5 = f"{count(published.TOKENS_5_AND_6[-1])} tokens"
table_5 = PaperTable(
    number=5,
    title="two-stage thresholds",
    arms=_with_stages,
    heads=lambda comparison: ["α first", "α then", *_marks(comparison, _SHARES_5)],
    cells=lambda _, arm: [*map(str, matching.stages(arm)), *_along(arm, _SHARES_5)],
    theirs=_theirs_5,
    scale=published.SCALE_5_6_11,
    length=_LENGTH_5,
    notes=lambda _: [_ALONG],
)
table_6 = replace(
    table_5,
    number=6,
    title="max_o",
    arms=_with_caps,
    heads=lambda comparison: ["max_o", *_marks(comparison, _SHARES_5)],
    cells=lambda _, arm: [str(matching.max_o(arm)), *_along(arm, _SHARES_5)],
    theirs=_theirs_6,
)
table_11 = PaperTable(
    number=11,
    title="matched triggers",
    arms=_with_signals,
    heads=lambda _: ["final PPL", "promotion\nratio", "hit-max_o\nrate", "step [s]", "peak [MB]"],
    cells=_cells_11,
    theirs=_theirs_11,
    scale=published.SCALE_5_6_11,
    length=_LENGTH_5,
    notes=lambda _: [
        "Means over done seeds, promotion over diverged ones too. Peak memory: the process on a CPU, PyTorch on a GPU; "
        "1 MB = 10⁶ B."
    ],
)


# DeepSeek-style recipes (5.2, E.2).

_SIX_BIT = ("sim_e3m2", "fp8_hybrid")
_SHARES_2 = tuple(tokens / published.TOKENS_2[-1] for tokens in published.TOKENS_2)


def _recipes(comparison: Comparison, arm: Arm) -> published.Recipes:
    """At other scales than the paper's the outlier channels of ours count as theirs."""
    return matching.recipes(arm, outliers=size_of(comparison) != published.SCALE_2_AND_4)


def _cells_4(comparison: Comparison, arm: Arm) -> Figures:
    speeds = [found for run in arm.done if (found := _speed(run, comparison.kind.tokens_per_step))]
    if not speeds:
        return None
    times, tokens = (stat(values) for values in zip(*speeds, strict=True))
    return [measure(times, 3), measure(tokens, 0)]


def _theirs_4(comparison: Comparison, arm: Arm) -> Figures:
    row = published.TABLE_4.get(_recipes(comparison, arm))
    return None if row is None else [f"{row[0]:.3f}", f"{row[1]:.0f}"]


def _speed(run: Run, tokens: int | None) -> tuple[float, float | None] | None:
    """Median seconds of a step and tokens per second, from the rows, else the summary; None where neither has them."""
    if len(run.steps["step"]):
        time = float(np.median(run.steps["step_time_s"]))
        return time, tokens / time if tokens else None
    told, speed = run.summary.get("step_time_median_s"), run.summary.get("tokens_per_s")
    return None if told is None or speed is None else (float(told), float(speed))


def _notes_4(comparison: Comparison) -> list[str]:
    tokens = comparison.kind.tokens_per_step
    timed = [run for arm in filter(compared, comparison.arms) for run in arm.done if _speed(run, tokens)]
    notes = ["Median over a run's steps, evaluation and checkpoints left out; mean over done seeds."]
    if len(machines := sorted({run.machine for run in timed})) > 1:
        notes.append(f"Times are of different machines: {'; '.join(machines)}.")
    if sharing := [run for run in timed if _on_a_share(run)]:
        notes.append(
            f"{len(sharing)} of {len(timed)} runs had a part of their machine's cores, as cells of a sweep that run "
            "side by side; what ran beside them is in their times."
        )
    if simulated := sorted({name for run in timed for name in _simulated(run)}):
        notes.append(
            f"Simulated: {', '.join(simulated)}, which takes more arithmetic than the 16-bit path: these times say "
            "nothing of hardware that has the formats."
        )
    return notes


def _on_a_share(run: Run) -> bool:
    """Whether the run computed on fewer threads than its machine has cores."""
    machine = run.header.get("machine") or {}
    threads, cores = machine.get("threads"), machine.get("cores")
    return machine.get("device") == "cpu" and bool(threads and cores and threads < cores)


def _simulated(run: Run) -> list[str]:
    """Its recipes that were simulated; the header has them as "llm_int8, int_mm"."""
    if (paths := run.header.get("paths")) is None:  # an older run: CPUs did nothing else
        on_cpu, low = (run.header.get("machine") or {}).get("device") == "cpu", run.settings.get("precision.low")
        return [low] if on_cpu and low not in (None, *FORMATS) else []
    return [name for name, *rest in (path.split(", ") for path in paths) if "simulated" in rest]


table_2 = PaperTable(
    number=2,
    title="perplexity along the run",
    heads=lambda comparison: _marks(comparison, _SHARES_2),
    cells=lambda _, arm: _along(arm, _SHARES_2),
    theirs=lambda comparison, arm: _figures(published.TABLE_2.get(_recipes(comparison, arm)), 2),
    scale=published.SCALE_2_AND_4,
    length=f"{count(published.TOKENS_2[-1])} tokens",
    elsewhere=", at the same shares of the run",
    notes=lambda _: [_ALONG],
)
table_4 = replace(
    table_2,
    number=4,
    title="speed",
    heads=lambda _: ["step [s]", "tokens/s"],
    cells=_cells_4,
    theirs=_theirs_4,
    elsewhere="",  # steps have nothing in common
    notes=_notes_4,
)
speed = replace(table_4, number=None, theirs=lambda *_: None)


def table_9(experiment: str, comparisons: list[Comparison]) -> Table:
    """Final perplexity of the arms of 6 and 8 bits by size of the model."""
    columns = ["arm", "scale", "parameters", "tokens", "final PPL", "the paper's"]
    table = Table(f"{experiment}: 6-bit and 8-bit by size (the paper's table 9)", columns)
    found = [
        (int(arm.first.header.get("parameters") or 0), name, comparison, arm)
        for comparison, name in zip(comparisons, _names(comparisons), strict=True)
        for arm in comparison.arms
        if compared(arm) and arm.always is None and (arm.low_bits, arm.recovery_bits) == (6, 8)
    ]
    for parameters, name, comparison, arm in sorted(found, key=lambda one: (one[0], one[1], one[3].label)):
        theirs = published.TABLE_9.get(size_of(comparison)) if matching.recipes(arm) == _SIX_BIT else None
        told = [name, count(parameters or None), count(comparison.kind.tokens), _final_perplexity(arm)]
        table.rows.append([arm.label, *told, _figure(theirs, 2)])
    table = table.without_empty(columns[-1:])
    sizes = ", ".join(published.TABLE_9)
    fits = columns[-1] in table.columns
    table.notes.append(_source(comparisons) if fits else f"The paper's sizes are {sizes}; no arm of ours is its own.")
    return table


# Training loss along the run: a mixture of experts (E.6) and PanGu-1B (E.7).


def loss_at(run: Run, share: float) -> float | None:
    """Training loss at a share of the run: the mean of the finite ones within half of `SMOOTHED` of it, at 0 that of
    the first step. None where there are none."""
    steps, losses = run.steps["step"], run.steps["loss"]
    planned = run.planned_steps or run.last_step
    around = np.abs(steps - max(1, round(share * planned))) <= (SMOOTHED / 2 * planned if share > 0 else 0)
    found = losses[around & np.isfinite(losses)]
    return float(found.mean()) if len(found) else None


def _loss(arm: Arm, share: float) -> str:
    losses = {run.seed: loss_at(run, share) for run in arm.runs if run.status == "done" or run.seed in arm.diverged}
    known = [loss for loss in losses.values() if loss is not None]
    lost = sum(losses.get(seed) is None for seed in arm.diverged)
    if not known:
        return "x" if lost else NOTHING
    return measure(stat(known), 3) + (f", {lost} x" if lost else "")


def _loss_figures(
    paper: dict[published.Control, tuple[float, ...]],
    scale: str,
    gnmr: matching.Where,
    recovery_bits: int | None = None,
) -> Callable[[Comparison, Arm], Figures]:
    """The paper's losses of an arm by its control; GNMR set as `gnmr` says, its recovery path of so many bits."""

    def theirs(comparison: Comparison, arm: Arm) -> Figures:
        if not matching.undisturbed(arm, outliers=size_of(comparison) != scale):
            return None
        return _figures(paper.get(matching.control(arm, gnmr, recovery_bits)), 3)

    return theirs


_SHARES_13 = tuple(step / published.STEPS_13[-1] for step in published.STEPS_13)
_SHARES_15 = tuple(tokens / published.TOKENS_15[-1] for tokens in published.TOKENS_15)
table_13 = PaperTable(
    number=13,
    title="training loss by steps",
    heads=lambda comparison: _heads(_SHARES_13, comparison.kind.steps, "step\n{:,.0f}".format),
    cells=lambda _, arm: [_loss(arm, share) for share in _SHARES_13],
    theirs=_loss_figures(
        published.TABLE_13, published.SCALE_13, {"controller.alpha": 0.9, "controller.warmup_frac": 0.05}, 16
    ),
    scale=published.SCALE_13,
    length=f"{published.STEPS_13[-1]:,.0f} steps",
    elsewhere=", at the same shares of the run",
    notes=lambda _: [_LOSS],
)
table_15 = replace(
    table_13,
    number=15,
    title="training loss by tokens",
    heads=lambda comparison: _heads(_SHARES_15, comparison.kind.tokens, lambda tokens: f"at\n{count(tokens)}"),
    cells=lambda _, arm: [_loss(arm, share) for share in _SHARES_15],
    theirs=_loss_figures(
        published.TABLE_15, published.SCALE_15, {"controller.alpha": 0.4, "controller.warmup_frac": matching.OFF}
    ),
    scale=published.SCALE_15,
    length=f"{count(published.TOKENS_15[-1])} tokens",
)


# Fine-tuning of a frozen model (5.3, E.3).

_SCORES = (
    ("GSM8K\nexact match", "gsm8k", "exact_match,strict-match", 100, 2),
    ("MMLU\nacc", "mmlu", "acc", 100, 2),
    ("HellaSwag\nacc", "hellaswag", "acc", 100, 2),
    ("WikiText-2\ntoken PPL", "wikitext2", "token_perplexity", 1, 4),
    ("GSM8K\nlast number", "gsm8k", "exact_match,flexible-extract", 100, 2),
    ("HellaSwag\nacc_norm", "hellaswag", "acc_norm", 100, 2),
    ("WikiText-2\nword PPL", "wikitext2", "word_perplexity", 1, 2),
)
"""(heading, task, lm-eval's metric, factor, digits); the first four as the paper has them."""


def table_7(comparison: Comparison) -> Table:
    """The four scores by the paths' recipes; no rows where no run was scored."""
    table = Table(
        f"{comparison.name}: scores (the paper's table 7)", ["arm", "val PPL", *(head for head, *_ in _SCORES)]
    )
    paths, items = set(), dict[str, set[int]]()
    both = [
        (arm, path)
        for arm in filter(compared, comparison.arms)
        for path in sorted({run.scores["path"] for run in arm.done if run.scores})
    ]
    for arm, path in both:
        scored = [run.scores["tasks"] for run in arm.done if run.scores and run.scores["path"] == path]
        paths.add(path)
        for tasks in scored:
            for name, task in tasks.items():
                items.setdefault(name, set()).add(task["items"])
        label = arm.label if path == "16bit" else f"{arm.label}, scored on its {path} path"
        cells = [label, measure(arm.stat("final_val_ppl"), 3)]
        for _, task, metric, factor, digits in _SCORES:
            values = [tasks.get(task, {}).get("metrics", {}).get(metric) for tasks in scored]
            cells.append(measure(stat(None if one is None else factor * one["value"] for one in values), digits))
        table.rows.append(cells)
        pair = arm.settings["precision.low"], arm.settings.get("precision.recovery")
        if size_of(comparison) == published.SCALE_7 and (theirs := published.TABLE_7.get(pair)):
            figures = [_figure(score, digits) for score, (*_, digits) in zip(theirs, _SCORES, strict=False)]
            table.rows.append([THEIRS, "", *figures, *[""] * (len(_SCORES) - len(theirs))])
    numbers = ", ".join(f"{name} {' or '.join(map(str, sorted(own)))}" for name, own in items.items())
    table.notes = [
        f"Scores in percent, perplexities as they are; mean over the seeds that were scored, on the "
        f"{' and the '.join(sorted(paths))} path; items: {numbers}. The paper does not say which of HellaSwag's two "
        "accuracies it has, nor the block length of its perplexity."
    ]
    if any(cells[0] == THEIRS for cells in table.rows):
        table.notes.append(f"The paper's are of LLaMA-2 13B: {published.SOURCE}.")
    else:
        table.notes.append("The paper has this table for LLaMA-2 13B; none of its rows fits these arms.")
    return table


# What the tables share.


def _heads(shares: Iterable[float], whole: int | None, told: Callable[[float], str], unknown: str = "at") -> list[str]:
    """Headings of what is shown at these shares of the run, whose steps or tokens are `whole`."""
    return [told(share * whole) if whole else f"{unknown}\n{share:.0%}" for share in shares]


def _marks(comparison: Comparison, shares: Iterable[float]) -> list[str]:
    return _heads(shares, comparison.kind.tokens, lambda tokens: f"PPL at\n{count(tokens)}", "PPL at")


def _along(arm: Arm, shares: Iterable[float]) -> list[str]:
    """Validation perplexity over the done seeds at the evaluations nearest to these shares of the run.

    A run that has none within `_WITHIN` is left out of that mark.
    """
    cells = []
    for share in shares:
        values = []
        for run in arm.done:
            steps = run.evals["step"]
            if not len(steps):
                continue
            planned = run.planned_steps or steps[-1]
            away = np.abs(steps - share * planned)
            if away.min() <= _WITHIN * planned:
                values.append(run.evals["val_ppl"][away.argmin()])
        cells.append(measure(stat(values), 2))
    return cells


def _figure(value: float | None, digits: int) -> str:
    return NOTHING if value is None else "x" if math.isinf(value) else f"{value:.{digits}f}"


def _figures(values: Iterable[float] | None, digits: int) -> Figures:
    return None if values is None else [_figure(value, digits) for value in values]


def _final_perplexity(arm: Arm | None) -> str:
    if arm is None:
        return NOTHING
    if len(arm.with_status("failed")) == len(arm.runs):
        return "x"
    return measure(arm.stat("final_val_ppl"), 2)


def _names(comparisons: list[Comparison]) -> list[str]:
    """The scales; where several comparisons have one, numbered."""
    return numbered([comparison.kind.scale for comparison in comparisons], "{} ({})")


def _source(comparisons: Iterable[Comparison]) -> str:
    """Where the paper's figures come from."""
    names = {comparison.runs[0].data.get("name", "unknown") for comparison in comparisons}
    data = f"; the paper's data is C4, ours {', '.join(sorted(names))}" if names != {"c4"} else ""
    return f"The paper's figures: {published.SOURCE}{data}."
