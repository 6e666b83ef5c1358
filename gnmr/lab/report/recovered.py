"""What recovery gets back, a line an arm: forks of one base from never to always on the recovery path.

The arms stand in one model (`gnmr.lab.report.family`), with the orders of the data as its blocks. Below three orders, or
where always is not shown to be better than never, no arm gets a verdict, and the words say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.family import Family, judge
from gnmr.lab.report.family_notes import p_text
from gnmr.lab.report.forks import losses_after
from gnmr.lab.report.statistics import BETTER, FEWEST, WORSE

_BAR = 24
"""Characters of all of the gap."""


@dataclass(frozen=True)
class Line:
    """An arm."""

    name: str
    closed: float
    """Share of the gap, mean over the orders."""
    by_order: tuple[float, ...]
    interval: tuple[float, float] | None
    """95 %; of the bounds none."""
    spent: float
    """Share of the GEMMs' arithmetic on the recovery path, mean."""


@dataclass(frozen=True)
class Recovered:
    """What the arms of forks got back."""

    lines: tuple[Line, ...]
    """Never first, everything last."""
    orders: int
    gap: float
    """Nats a token."""
    ppl: tuple[float, float]
    """Perplexity of never and of everything, over the mean losses."""
    family: Family
    """Its contrasts are of each arm against the control."""
    control: str

    @property
    def cost(self) -> str:
        """What low precision cost, in words."""
        never, always = self.ppl
        return f"{self.gap:.3f} nats a token, perplexity {never:.1f} in place of {always:.1f}"

    @property
    def verdict(self) -> str:
        """What these few runs can show, in words."""
        family = self.family
        if self.orders < FEWEST:
            number = "One order" if self.orders == 1 else f"{self.orders} orders"
            return f"{number} of the data: what is chance cannot be told, so nothing is shown; {FEWEST} are the least."
        if not family.gate:
            return (
                "Recovering everything is not shown to be better than never recovering "
                f"(p = {p_text(family.p_gate)}), so nothing is said of the arms between."
            )
        told = [
            f"{_named(row.arm)} {_VERDICTS.get(row.verdict, row.verdict)} (p = {p_text(row.p)})" for row in family.rows
        ]
        return (
            f"That low precision costs something here is shown (p = {p_text(family.p_gate)}). Against {self.control} "
            f"under the same budget: {', '.join(told)}. These are Holm-adjusted p-values of one model of all arms, the "
            "primary test of the page too."
        )


_VERDICTS = {BETTER: "is better", WORSE: "is worse"}


def _named(arm: str) -> str:
    return arm.partition(",")[0]


def recovered(arms: Mapping[str, Arm], *, control: str) -> Recovered | None:
    """`arms`: by the name to be shown, never first, everything last. `control`: which one the others, but for these
    two, are tested against. None where there is no gap."""
    losses = {name: losses_after(arm, "low", "val_loss") for name, arm in arms.items()}
    low, *between, high = arms
    orders = sorted(set.intersection(*map(set, losses.values())))
    means = {name: float(np.mean([losses[name][order] for order in orders])) for name in arms} if orders else {}
    if not orders or not (gap := means[low] - means[high]) > 0:
        return None
    values = {name: {order: losses[name][order] for order in orders} for name in arms}
    family = judge(values, [(name, control) for name in between if name != control], low=low, high=high)

    def line(name: str) -> Line:
        found = None
        if family.fit is not None and name in between:
            found = family.fit.closed(name, low, high)
        closed = (means[low] - means[name]) / gap
        by_order = tuple((values[low][order] - values[name][order]) / gap for order in orders)
        return Line(
            name, closed, by_order, None if found is None else found[1], arms[name].mean("spent_gemm_frac") or 0.0
        )

    ppl = float(np.exp(means[low])), float(np.exp(means[high]))
    return Recovered(tuple(map(line, arms)), len(orders), gap, ppl, family, control)


def shown(found: Recovered, narrow: bool = False) -> RenderableType:
    """A line an arm, with a bar, for the terminal; `narrow`: without bars."""
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    table.add_column("", no_wrap=not narrow)
    table.add_column("back" if narrow else "got back", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("", no_wrap=True)
    table.add_column(f"95 %{'' if narrow else ' interval'}" if found.orders > 1 else "", justify="right", no_wrap=True)
    table.add_column("spent", justify="right", no_wrap=True)
    for line in found.lines:
        between = "" if line.interval is None else f"{line.interval[0]:z.0%} to {line.interval[1]:z.0%}"
        bar = [] if narrow else [Text(_bar(line.closed), "cyan")]
        table.add_row(line.name, f"{line.closed:z.0%}", *bar, between, f"{line.spent:.1%}")
    return Group(table)


def _bar(share: float) -> str:
    eighths = round(8 * _BAR * min(max(share, 0.0), 1.0))
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")


def by_name(arms: Sequence[Arm], names: Mapping[str, str]) -> dict[str, Arm]:
    """The arms whose controller.name is one of `names`, by what they are shown as, in that order."""
    known = {str(arm.settings.get("controller.name")): arm for arm in arms}
    return {told: known[name] for name, told in names.items() if name in known}
