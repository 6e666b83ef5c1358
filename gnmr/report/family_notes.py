"""What a tested family says of itself in words: positive control, assumptions, p."""

from __future__ import annotations

import math

from gnmr.report.family import Family, Fit
from gnmr.report.layout import NOTHING
from gnmr.report.statistics import LEVEL, as_percent


def positive_control(family: Family, low: str, high: str) -> str:
    """Whether always is shown to be better than never; the arms by their names."""
    p, gap = p_text(family.p_gate), family.gap
    size = "" if gap is None else f", a gap of {gap.estimate:.3f} nats ({relative_text(gap.estimate)})"
    shown = f"shown (p = {p})" if family.gate else f"not shown (p = {p}), so no verdict on any arm"
    return f"Positive control, one test before all others: {high} against {low}{size}: {shown}."


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
