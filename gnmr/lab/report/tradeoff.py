"""Quality against promotion: what each signal buys for its mean budget, relative to the static low path."""

from __future__ import annotations

from dataclasses import dataclass

from gnmr.lab.report.arms import BUDGET, Arm, tell, varying
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.layout import NOTHING, Table, percent, relative
from gnmr.lab.report.statistics import Paired, paired


@dataclass(frozen=True)
class Point:
    """One arm of a signal's curve."""

    arm: Arm
    promoted: float
    """Mean promotion share that the arm achieved, over its done and diverged seeds."""
    change: Paired
    """The arm minus the static low path."""


def signal_curves(comparison: Comparison) -> dict[str, list[Point]]:
    """By signal, in order of promotion: the routed arms that have a static low arm beside them.

    A signal is its name, its routing where ranked, the controller's settings in which arms of that name and routing
    differ, and the paths and optimizer settings in which the arms shown differ; along a curve only `BUDGET` changes.
    Arms without a done or diverged seed have no promotion and are left out.
    """
    points = []
    for arm in comparison.arms:
        low = comparison.low(arm)
        if arm.always is None and low is not None and arm.promoted is not None:
            points.append(Point(arm, arm.promoted, paired(arm.outcomes, low.outcomes)))
    shared = [key for key in varying(point.arm for point in points) if not key.startswith(("controller.", "records."))]
    found: dict[str, list[Point]] = {}
    for point in points:
        alike = [o.arm for o in points if (o.arm.signal, o.arm.ranked) == (point.arm.signal, point.arm.ranked)]
        options = [key for key in varying(alike) if key.startswith("controller.") and not key.startswith(BUDGET)]
        words = [point.arm.signal, *(["ranked"] if point.arm.ranked else []), *tell(point.arm, options + shared)]
        found.setdefault(" ".join(words), []).append(point)
    return {name: sorted(found[name], key=lambda point: point.promoted) for name in sorted(found)}


def tradeoff(comparison: Comparison) -> Table:
    """The curves as a table, the two static ends with them; no rows below two routed arms."""
    table = Table(
        f"{comparison.name}: quality against promotion",
        ["signal", "promoted", "hit\nmax_o", "n", "vs static low\n[95 % interval]"],
    )
    found = signal_curves(comparison)
    if sum(map(len, found.values())) < 2:
        return table
    for name, points in found.items():
        for point in points:
            shares = [percent(point.promoted), percent(point.arm.mean("hit_max_o_frac"))]
            table.rows.append([name, *shares, str(point.change.n), relative(point.change)])
    for low in {low.label: low for of in found.values() for point in of if (low := comparison.low(point.arm))}.values():
        change = paired(low.outcomes, low.outcomes)
        table.rows.append([f"static {low.always}", percent(0.0), NOTHING, str(change.n), "reference"])
    for recovery, change in ends(comparison):
        table.rows.append([f"static {recovery.always}", percent(1.0), NOTHING, str(change.n), relative(change)])
    table.notes = ["Perplexity relative to the static low path's, same seed; promoted: mean share of unit-steps."]
    shown = {point.arm.label for of in found.values() for point in of}
    if out := [arm.label for arm in comparison.arms if arm.always is None and arm.label not in shown]:
        table.notes.append(f"Left out, without a static low arm or a seed that ended: {', '.join(out)}.")
    return table


def ends(comparison: Comparison) -> list[tuple[Arm, Paired]]:
    """The static recovery arms between which and static low the curves lie, each minus the static low arm."""
    found: dict[str, tuple[Arm, Paired]] = {}
    for points in signal_curves(comparison).values():
        for point in points:
            low, recovery = comparison.low(point.arm), comparison.recovery(point.arm)
            if low and recovery and low is not recovery:
                found.setdefault(recovery.label, (recovery, paired(recovery.outcomes, low.outcomes)))
    return list(found.values())
