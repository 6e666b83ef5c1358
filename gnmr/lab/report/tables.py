"""The report's tables of one comparison: its arms side by side, tested against a baseline and against random."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gnmr.lab.report.arms import Arm, paired_difference
from gnmr.lab.report.casts import casts, watched
from gnmr.lab.report.comparisons import SAME_BUDGET, Comparison, short
from gnmr.lab.report.forks import fork_tables
from gnmr.lab.report.headline import high_precision
from gnmr.lab.report.layout import NOTHING, Table, count, counted, duration, measure, percent, relative, size
from gnmr.lab.report.one_model import against_random as tested_against_random
from gnmr.lab.report.one_model import families, one_model
from gnmr.lab.report.routability import routability_table
from gnmr.lab.report.routing import routing
from gnmr.lab.report.run_states import state_lines
from gnmr.lab.report.runs import Run
from gnmr.lab.report.statistics import FEWEST, FEWEST_DIVERGED, LEVEL, Paired, gap_closed, p_text, paired, verdicts
from gnmr.lab.report.tradeoff import tradeoff
from gnmr.records.reader import stored

_SENT = "numbers\nsent"
_PREDICTED = "predicted\n(Eq. 5)"
Further = Callable[[list[Comparison]], list[Table]]
"""Tables over all comparisons that others make of them, such as the paper's."""
_VERDICT = 4
"""Place of the verdict in a row that begins with the arm and `TESTED`."""
TESTED = ["n", "difference\n[95 % interval]", "p\n(Holm)", "verdict"]
"""Columns of `tested`."""


def tables(comparisons: list[Comparison], further: Further = lambda _: []) -> list[Table]:
    """All tables: those of each comparison, the further ones."""
    found = [table for comparison in comparisons for table in comparison_tables(comparison)]
    return [table for table in [*found, *further(comparisons)] if table.rows]


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Quality, the tested comparisons, quality against promotion, cost, routability, experts' routing, casts and what
    is watched; those that have rows."""
    found = [
        quality(comparison),
        *fork_tables(comparison),
        *one_model(comparison),
        against_random(comparison),
        *against_baseline(comparison, below=True),
        lost(comparison),
    ]
    found += [tradeoff(comparison), control(comparison), routability_table(comparison)]
    found += [routing(comparison), casts(comparison), watched(comparison)]
    return [table for table in found if table.rows]


def quality(comparison: Comparison) -> Table:
    """Final validation loss and perplexity of each arm, and its paired difference to the 16-bit arm."""
    columns = ["arm", "seeds done", "diverged", "val perplexity", "val loss", "vs 16-bit"]
    table = Table(f"{comparison.name}: validation", columns)
    unpaired, partial = [], []
    for arm in comparison.arms:
        reference = high_precision(comparison, arm)
        if reference is arm:
            difference = "reference"
        elif reference is None:
            difference = NOTHING
            unpaired.append(arm.label)
        else:
            change = paired(arm.outcomes, reference.outcomes)
            spread = paired_difference(arm, reference)
            difference = measure(spread, 2, sign=True, unit=" %") if spread else relative(change)
            seeds = sorted(arm.outcomes.keys() & reference.outcomes.keys())
            if seeds != sorted(arm.outcomes):
                partial.append(f"{arm.label} on {counted('seed', seeds)}")
        ppl, loss = arm.stat("final_val_ppl"), arm.stat("final_val_loss")
        done = f"{len(arm.done)} of {len(comparison.seeds)}"
        diverged = str(len(arm.diverged) or NOTHING)
        table.rows.append([arm.label, done, diverged, measure(ppl, 2), measure(loss, 4), difference])
    table = table.without_empty(["diverged", "vs 16-bit"])
    table.notes = [_what(comparison), *_apart(comparison), *state_lines(comparison)]
    if unpaired:
        of = f": {', '.join(unpaired)}" if len(unpaired) < len(comparison.arms) else ""
        table.notes.append(f"No 16-bit arm of the same model and optimizer to compare with{of}.")
    if partial:
        table.notes.append(f"Compared only where both have the seed: {', '.join(partial)}.")
    if keys := comparison.differing_settings():
        table.notes.append(f"Mind: the arms differ in more than their paths and controller: {', '.join(keys)}.")
    meaning = f"± is the sample standard deviation over the done seeds ({NOTHING}: fewer than two)"
    if "vs 16-bit" in table.columns:
        meaning += "; vs 16-bit is the mean of the per-seed differences of log perplexity, as percent"
    table.notes.append(f"{meaning}.")
    return table


def against_baseline(comparison: Comparison, below: bool = False) -> list[Table]:
    """Each arm against its baseline, with the test; one table, and one family of tests, for each baseline.

    `below`: the tables follow the primary test (`gnmr.lab.report.one_model`) as its details. The arms that have it there
    get no second verdict here.
    """
    primary: dict[int, list[Arm]] = {}
    for members in families(comparison) if below else []:
        if len(members) > 2:
            primary[id(members[0])] = members
    found: dict[str, tuple[Arm, list[Arm]]] = {}
    for arm in comparison.arms:
        baseline = comparison.baseline(arm)
        if baseline is not None and baseline is not arm:
            found.setdefault(baseline.label, (baseline, []))[1].append(arm)
    tables = []
    for baseline, arms in found.values():
        table = Table(f"{comparison.name}: against {baseline.label}", ["arm", *TESTED, "gap\nclosed"])
        family = [paired(arm.outcomes, baseline.outcomes) for arm in arms]
        gaps = [_gap(comparison, arm, one.n) for arm, one in zip(arms, family, strict=True)]
        table.rows = [[arm.label, *tested, gap] for arm, tested, gap in zip(arms, _tested(family), gaps, strict=True)]
        table.notes = [_how_tested(family)]
        if told := primary.get(id(baseline)):
            table.title = f"{comparison.name}: details, paired tests against {baseline.label}"
            for row, arm in zip(table.rows, arms, strict=True):
                row[_VERDICT] = NOTHING if arm in told else row[_VERDICT]
            table.notes.insert(0, "The verdicts are those of the one model of all arms, which needs fewer runs.")
        table = table.without_empty(["verdict", "gap\nclosed"])
        if "gap\nclosed" in table.columns:
            table.notes += _unclear_gaps(comparison, arms)
        tables.append(table)
    return tables


def against_random(comparison: Comparison) -> Table:
    """Each routed arm against the arm that picks its units at random at the same mean promotion."""
    columns = ["arm", "spent", "random\nspent", *TESTED]
    table = Table(f"{comparison.name}: against random at the same budget", columns)
    beside = [(arm, other) for arm in comparison.arms if (other := comparison.nearest_random(arm))]
    tests = tested_against_random(comparison)
    tested = {label: [*_compared(one.found), *_told(one.p, one.verdict)] for label, one in tests.items()}
    for arm, other in beside:
        apart = [*_compared(paired(arm.outcomes, other.outcomes)), NOTHING, NOTHING]
        table.rows.append([arm.label, percent(arm.spend), percent(other.spend), *tested.get(arm.label, apart)])
    randoms = ", ".join(dict.fromkeys(other.label for _, other in beside))
    table.notes = [f"The random arm is the one with the nearest promotion: {randoms}."]
    if far := [arm.label for arm, _ in beside if arm.label not in tested]:
        table.notes.append(
            f"No test, since no random arm has their budget to within {100 * SAME_BUDGET:.0f} % of the larger share: "
            f"{', '.join(far)}."
        )
    routed = [arm for arm in comparison.arms if arm.always is None and arm.signal != "random"]
    if alone := [arm.label for arm in routed if not comparison.nearest_random(arm)]:
        table.notes.append(f"Without a random arm that differs in the controller alone: {', '.join(alone)}.")
    if modelled := sum(one.modelled for one in tests.values()):
        table.notes.append(
            "Perplexity relative to the random arm's; below 0 is better. Contrasts of the one model of all arms, p by "
            f"Holm over the {modelled} of them; intervals are of one comparison."
        )
    if family := [one.found for one in tests.values() if not one.modelled]:
        table.notes.append(_how_tested(family))
    return table


def lost(comparison: Comparison) -> Table:
    """What injected faults cost: each disturbed arm against the same arm without them."""
    table = Table(f"{comparison.name}: what the faults cost", ["arm", "fault", *TESTED])
    disturbed = [arm for arm in comparison.arms if arm.disturbance]
    found = [(arm, other) for arm in disturbed if (other := comparison.undisturbed(arm))]
    family = [paired(arm.outcomes, other.outcomes) for arm, other in found]
    cells = zip(found, _tested(family), strict=True)
    table.rows = [[arm.label, arm.disturbance, *tested] for (arm, _), tested in cells]
    table.notes = ["Each against the same arm without faults; the number behind a fault is its magnitude."]
    table.notes.append(_how_tested(family))
    if alone := [arm.label for arm in disturbed if not comparison.undisturbed(arm)]:
        table.notes.append(f"Without such an arm beside them: {', '.join(alone)}.")
    return table


def control(comparison: Comparison) -> Table:
    """What the controller did and what the arm cost; means over the done seeds, of promotion over the diverged too."""
    columns = ["arm", "promoted", "GEMMs\nspent", _PREDICTED, _SENT, "hit\nmax_o", "over threshold", "saved"]
    columns += ["of\n16-bit", "wall\ntime"]
    table = Table(f"{comparison.name}: control and cost", columns)
    for arm in comparison.arms:
        saved, reference = arm.mean("saved_bytes_mean"), high_precision(comparison, arm)
        full = reference.mean("saved_bytes_mean") if reference else None
        over = "\n".join(f"{column} {percent(share)}" for column, share in arm.over_fracs().items())
        spent = [percent(arm.mean("spent_gemm_frac")), size(arm.mean("spent_extra_bytes"))]
        spent.append(percent(arm.mean("numbers_sent_frac")))
        routed = [percent(arm.promoted), *spent, percent(arm.mean("hit_max_o_frac"))]
        routed = routed if arm.routed else [NOTHING, *spent, NOTHING]
        of_full = percent(saved / full if saved is not None and full else None)
        time = duration(arm.mean("wall_time_s"))
        table.rows.append([arm.label, *routed, over or NOTHING, size(saved), of_full, time])
    table = table.without_empty([_SENT])
    sent = "; numbers sent: of its gradients by each worker, share of dense" if _SENT in table.columns else ""
    table.notes = [
        "Means over done seeds, promoted over diverged ones too. Promoted and over the threshold of each of the "
        "signal's columns: shares of unit-steps; GEMMs spent: share of the GEMMs' arithmetic on the recovery path, "
        "pins included; predicted (Eq. 5): bytes kept above the low path, each operator's input by itself, unlike "
        "what is kept where several read one tensor; hit max_o: share of steps; saved: measured bytes that the "
        f"converted linears kept for backward, mean over steps{sent}."
    ]
    table.notes += [_promotions(arm) for arm in comparison.arms if any(run.events for run in arm.done)]
    table.notes += [told for arm in comparison.arms if (told := _verdicts(arm))]
    if skipped := [arm.label for arm in comparison.arms if (arm.mean("nonfinite_total") or 0) > 0]:
        table.notes.append(f"Steps skipped for a non-finite loss or gradient: {', '.join(skipped)}.")
    if len(machines := sorted({run.machine for run in comparison.runs})) > 1:
        table.notes.append(f"Wall times are of different machines: {'; '.join(machines)}.")
    return table


def run_table(runs: list[Run], root: Path) -> Table:
    """Every run with what is needed to make it again; folders as seen from `root`."""
    table = Table("Runs", ["run", "status", "steps", "commit", "machine", "command"])
    for run in runs:
        steps = f"{run.last_step} of {run.planned_steps or '?'}"
        status = "unfinished" if run.status == "running" else run.status
        table.rows.append([os.path.relpath(run.place, root), status, steps, run.commit, run.machine, run.command])
    return table


def _tested(family: Sequence[Paired]) -> list[list[str]]:
    """The cells of `TESTED` for each comparison of one family."""
    rows = []
    for one, (p, verdict) in zip(family, verdicts(family), strict=True):
        rows.append([*_compared(one), *_told(p, verdict)])
    return rows


def _told(p: float | None, verdict: str) -> list[str]:
    return [p_text(p), verdict.replace(" shown", "\nshown")]


def _compared(one: Paired) -> list[str]:
    """The cells of `TESTED` before the test."""
    return [str(one.n), relative(one)]


def _how_tested(family: Sequence[Paired]) -> str:
    tests = sum(one.p is not None for one in family)
    told = (
        "Perplexity relative to the other arm's, same seed; below 0 is better. Two-sided paired t-test on the "
        f"logarithm, p by Holm over the {tests} tests of this table; a verdict needs p < {LEVEL} and {FEWEST} pairs. "
        "Intervals are of one comparison."
    )
    if any(any(one.diverged) for one in family):
        told += (
            " Where a run diverged (the arm's : the other's): exact sign and Fisher's tests, p twice the smaller, "
            f"{FEWEST_DIVERGED} pairs."
        )
    return told


def _gap(comparison: Comparison, arm: Arm, expected: int) -> str:
    """Share of the gap closed; the seeds that it rests on where they are others than the expected number."""
    low, recovery = comparison.low(arm), comparison.recovery(arm)
    if low is None or recovery is None or arm is recovery:
        return NOTHING
    closed = gap_closed(low.outcomes, arm.outcomes, recovery.outcomes)
    if closed is None:
        return NOTHING
    return f"{100 * closed[0]:z.0f} %" + (f" (n={closed[1]})" if closed[1] != expected else "")


def _unclear_gaps(comparison: Comparison, arms: Iterable[Arm]) -> list[str]:
    """What the gap is, and the line that says where it is itself not shown."""
    notes = []
    for arm in arms:
        low, recovery = comparison.low(arm), comparison.recovery(arm)
        if low is None or recovery is None or low is recovery:
            continue
        gap = paired(low.outcomes, recovery.outcomes)
        told = f"Gap closed: share of the way from {low.label} to {recovery.label}, mean log perplexities."
        if gap.p is None or gap.p >= LEVEL or gap.direction < 0:
            told += f" The gap itself is not shown (p = {p_text(gap.p)}), so shares of it mean little."
        if told not in notes:
            notes.append(told)
    return notes


def _promotions(arm: Arm) -> str:
    """Of the runs whose events were kept, which is one at least."""
    kept = [run for run in arm.done if stored(run.folder / "events.jsonl")]
    causes = Counter(str(event.get("cause")) for run in kept for event in run.events if event.get("event") == "promote")
    told = ", ".join(f"{cause} {number:,}" for cause, number in causes.most_common())
    seeds = f"{len(kept)} seeds" if len(kept) == len(arm.done) else f"{len(kept)} of {len(arm.done)} seeds"
    return f"{arm.label}: {causes.total():,} promotions in {seeds}" + (f" ({told})." if told else ".")


def _verdicts(arm: Arm) -> str:
    """What was to blame for spikes and losses that were not finite, over its runs; nothing where there were none."""
    rows = [row for run in arm.done for row in run.events if row.get("event") == "verdict"]
    causes = Counter(str(row.get("cause")).replace("_", " ") for row in rows)
    units = Counter(name for row in rows for name in str(row.get("unit") or "").split())
    of = f"; most often {', '.join(name for name, _ in units.most_common(3))}" if units else ""
    told = ", ".join(f"{cause} {number:,}" for cause, number in causes.most_common())
    return f"{arm.label}: to blame for {causes.total():,} spikes: {told}{of}." if rows else ""


def _what(comparison: Comparison) -> str:
    kind, data = comparison.kind, comparison.runs[0].data
    if kind.steps is None and kind.fingerprint is None:
        steps = sorted({count(run.summary.get("steps")) for run in comparison.runs})
        return f"Loops of one's own, of {', '.join(steps)} steps; their records do not say on which data."
    return (
        f"{count(kind.steps)} steps of {count(kind.tokens_per_step)} tokens ({count(kind.tokens)} in all), blocks of "
        f"{kind.seq_len}, data {data.get('name', 'unknown')} {short(kind.fingerprint)}, commit "
        f"{', '.join(sorted({run.commit for run in comparison.runs}))}."
    )


def _apart(comparison: Comparison) -> list[str]:
    """The line that says what keeps this comparison apart from others of its experiment and scale."""
    differ = [f"{what} ({mine} here, {', '.join(there)} there)" for what, (mine, there) in comparison.apart().items()]
    told = f"Not comparable with the other runs of this experiment and scale: they differ in {', '.join(differ)}."
    return [told] if differ else []
