"""What the paper's tables share: which arms stand in them, perplexity along the run, the paper's rows and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gnmr.config import FORMATS
from gnmr.report import published
from gnmr.report.arms import Arm, plain_adamw, stat
from gnmr.report.comparisons import Comparison
from gnmr.report.layout import NOTHING, Table, count, measure

GNMR = ("gnmr_delta", "gnmr", "delta_gnmr")
THEIRS = "  the paper's"
"""First cell of the row that holds the paper's figures for the row above it."""
ACT_QUANT, RECIPE, MOE, PANGU, FINETUNE = "act_quant", "recipe", "moe", "pangu", "finetune"
_EXPERIMENTS = {"deepseek_recipe": RECIPE, "moe_stress": MOE, "pangu_4bit": PANGU, "finetune": FINETUNE}


def setting(comparison: Comparison) -> str:
    """Which of the paper's settings a comparison is in: by its experiment, else by what its arms are made of."""
    if named := _EXPERIMENTS.get(comparison.kind.experiment):
        return named
    settings = [arm.settings for arm in comparison.arms]
    if any(one.get("model.name") == "moe" for one in settings):
        return MOE
    paths = {one.get(key) for one in settings for key in ("paths.low", "paths.recovery")}
    return RECIPE if paths - {None, *FORMATS} else ACT_QUANT


def size_of(comparison: Comparison) -> str:
    """The paper's name of the scale's model size: 1.3b of 1.3b and of any other scale that ends in _1.3b."""
    return comparison.kind.scale.rpartition("_")[2]


def shown(arm: Arm) -> bool:
    """Whether the arm is of a kind that the paper compares: static, or under GNMR over thresholds."""
    return arm.always is not None or (arm.signal in GNMR and not arm.ranked)


def undisturbed(arm: Arm, outliers: bool = False) -> bool:
    """Whether the optimizer is plain AdamW and no injected faults are at work, nor outlier channels, unless `outliers`
    are no matter."""
    get = arm.settings.get
    without = outliers or not get("model.outlier_channels.number")
    return get("stress.kind") in (None, "none") and plain_adamw(arm) and without


def plain(arm: Arm) -> bool:
    """Whether the signal is the paper's GNMR over the thresholds as they are set, with a new choice in every step."""
    get = arm.settings.get
    return (
        arm.signal in ("gnmr_delta", "gnmr")
        and not arm.ranked
        and get("controller.trigger", 1.0) == 1.0
        and get("controller.observe", "parameters") == "parameters"
        and get("controller.options.history", "cumulative") == "cumulative"
        and not get("controller.options.two_sided")
        and arm.hold == 1
    )


def marks(comparison: Comparison, shares: Iterable[float]) -> list[str]:
    """Headings of the perplexities at these shares of the run."""
    tokens = comparison.kind.tokens
    return [f"PPL at\n{count(tokens * share) if tokens else f'{share:.0%}'}" for share in shares]


_WITHIN = 0.05
"""Share of the run that an evaluation may be away from where the paper has one."""
ALONG = f"At the nearest evaluation; {NOTHING}: none within {_WITHIN:.0%} of the run."
"""The note of a table made by `along`."""


def along(arm: Arm, shares: Iterable[float]) -> list[str]:
    """Validation perplexity over the done seeds at the evaluations nearest to these shares of the run.

    A run that has none within `_WITHIN` is left out of that mark.
    """
    cells = []
    for share in shares:
        values = []
        for run in arm.done:
            steps = run.evals["step"]
            if len(steps):
                planned = run.planned_steps or steps[-1]
                away = np.abs(steps - share * planned)
                if away.min() <= _WITHIN * planned:
                    values.append(run.evals["val_ppl"][away.argmin()])
        cells.append(measure(stat(values), 2))
    return cells


def add_row(table: Table, cells: list[str], theirs: Sequence[str] | None, scale: str | None = None) -> None:
    """The cells, and under the last of them the paper's where there are any; `scale`: theirs, where ours is another."""
    table.rows.append(cells)
    if theirs is not None:
        whose = THEIRS if scale is None else f"{THEIRS}, {scale}"
        table.rows.append([whose, *[""] * (len(cells) - len(theirs) - 1), *theirs])


def note(table: Table, comparison: Comparison, at: str, same: str = ", at the same shares of the run") -> Table:
    """The table with what there is to know of the paper's rows; `at`: where the paper made them; `same`: what rows of
    another scale have in common with ours."""
    if whose := {cells[0] for cells in table.rows if cells[0].startswith(THEIRS)}:
        other = f"{same}: another model and other data, which nothing of ours is to equal"
        told = f"The paper's are at {at}, on its own machines{'' if THEIRS in whose else other}."
        table.notes += [told, source([comparison])]
    else:
        table.notes.append(f"The paper has this table at {at}; none of its rows fits these arms.")
    return table


def source(comparisons: Iterable[Comparison]) -> str:
    """Where the paper's figures come from."""
    names = {comparison.runs[0].data.get("name", "unknown") for comparison in comparisons}
    data = f"; the paper's data is C4, ours {', '.join(sorted(names))}" if names != {"c4"} else ""
    return f"The paper's figures: {published.SOURCE}{data}."


def names(comparisons: list[Comparison]) -> list[str]:
    """The scales; where several comparisons have one, numbered."""
    scales = [comparison.kind.scale for comparison in comparisons]
    return [
        f"{scale} ({scales[: place + 1].count(scale)})" if scales.count(scale) > 1 else scale
        for place, scale in enumerate(scales)
    ]


def final_perplexity(arm: Arm | None) -> str:
    if arm is None:
        return NOTHING
    if len(arm.with_status("failed")) == len(arm.runs):
        return "x"
    return measure(arm.stat("final_val_ppl"), 2)
