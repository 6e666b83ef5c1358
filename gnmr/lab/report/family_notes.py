"""What a tested family says of itself in words: positive control, assumptions, p."""

from __future__ import annotations

import math

import numpy as np

from gnmr.lab.report.family import Family, Fit, Row
from gnmr.lab.report.layout import NOTHING
from gnmr.lab.report.statistics import LEVEL, POWER, as_percent


def positive_control(family: Family, low: str, high: str) -> str:
    """Whether always is shown to be better than never; the arms by their names."""
    p, gap = p_text(family.p_gate), family.gap
    size = "" if gap is None else f", a gap of {gap.estimate:.3f} nats ({relative_text(gap.estimate)})"
    shown = f"shown (p = {p})" if family.gate else f"not shown (p = {p}), so no verdict on any arm"
    return f"Positive control, one test before all others: {high} against {low}{size}: {shown}."


def power(family: Family) -> list[str]:
    """The line that says n, the residual and the smallest effect; none without a model."""
    model = family.fit
    if model is None:
        return []
    of_gap = f", {100 * model.sd / family.gap.estimate:.0f} % of the gap" if family.gap and family.gate else ""
    told = f"n = {family.n}; residual sd {model.sd:.3f} nats{of_gap}, {model.freedom} degrees of freedom."
    one, whole = smallest_texts(family)
    if one != NOTHING:
        median = _percent(float(np.median(family.smallest())))
        up, usual = ("", "") if median == one else ("up to ", f" ({median} in the median)")
        told += (
            f" Smallest effect that is shown with {100 * POWER:.0f} % power: {up}{one} of the gap by one test{usual}, "
            f"{up}{whole} as the first of {len(family.rows)} by Holm."
        )
    return [told]


def smallest_texts(family: Family) -> list[str]:
    """By one test, and as the first of the family, the largest over the tests; - where there is no gap."""
    found = [family.smallest(tests) if family.gate else [] for tests in (1, len(family.rows))]
    return [_percent(max(each)) if each else NOTHING for each in found]


def _percent(share: float) -> str:
    return f"{100 * share:z.0f} %"


def assumptions(model: Fit | None) -> list[str]:
    """The line that says what was tested of the model, and what follows; none without a model."""
    if model is None:
        return []
    spread, normal = model.assumptions
    told = (
        f"Equal spread over arms: p = {p_text(spread)} (Brown-Forsythe); arm and block add up: p = "
        f"{p_text(model.additive)} (Tukey); normal residuals: p = {p_text(normal)} (Shapiro-Wilk)."
    )
    if model.own:
        told += " So each contrast is tested by its own differences, not by the pooled residual."
    if normal < LEVEL:
        told += " Normality is refused: p values near the level mean little."
    return [told]


def p_text(value: float | None) -> str:
    """Three decimals, below 0.001 one digit."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.001 else f"{value:.3f}"


def relative_text(difference: float) -> str:
    """A difference of log perplexity as percent of the other's perplexity."""
    return f"{round(as_percent(difference), 1) + 0.0:+.1f} %"  # + 0.0: no -0


def row_numbers(row: Row) -> dict[str, str]:
    """Texts of a row by what they are; empty or - for what there is not."""
    told, one = dict.fromkeys(("difference", "interval", "closed", "closed_interval"), ""), row.difference
    told["difference"] = told["closed"] = NOTHING
    if any(row.diverged):
        told["difference"] = f"diverged {row.diverged[0]} : {row.diverged[1]}"
    if one is not None:
        told["difference"], told["interval"] = relative_text(one.estimate), _between(*map(relative_text, one.interval))
    if row.closed is not None:
        share, interval = row.closed
        told["closed"] = f"{_whole(share)} %"
        told["closed_interval"] = "" if interval is None else _between(*map(_whole, interval))
    return told | {"p": p_text(row.p), "p_equal": p_text(row.p_equal), "verdict": row.verdict, "tested": str(row.n)}


def _whole(share: float) -> str:
    return str(round(100 * share))


def _between(low: str, high: str) -> str:
    return f"({low.removesuffix(' %')} to {high.removesuffix(' %')})"
