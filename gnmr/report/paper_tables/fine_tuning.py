"""Fine-tuning of a frozen model (5.3, E.3): the paper's table 7."""

from __future__ import annotations

from typing import Any

from gnmr.report import published
from gnmr.report.arms import Arm, stat
from gnmr.report.comparisons import Comparison
from gnmr.report.layout import Table, measure
from gnmr.report.paper_tables.common import THEIRS, shown, size_of

_FIGURES = (
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
        f"{comparison.name}: scores (the paper's table 7)", ["arm", "val PPL", *(heading for heading, *_ in _FIGURES)]
    )
    paths, items = set(), dict[str, set[int]]()
    both = [
        (arm, path)
        for arm in filter(shown, comparison.arms)
        for path in sorted({r.scores["path"] for r in arm.done if r.scores})
    ]
    for arm, path in both:
        scored = [run for run in arm.done if run.scores and run.scores["path"] == path]
        paths.add(path)
        for run in scored:
            for name, task in run.scores["tasks"].items():
                items.setdefault(name, set()).add(task["items"])
        label = arm.label if path == "16bit" else f"{arm.label}, scored on its {path} path"
        cells = [label, measure(stat(run.summary.get("final_val_ppl") for run in arm.done), 3)]
        for _, task, metric, factor, digits in _FIGURES:
            values = [_value(run.scores, task, metric) for run in scored]
            cells.append(measure(stat(None if value is None else factor * value for value in values), digits))
        table.rows.append(cells)
        if size_of(comparison) == published.SCALE_7 and (theirs := published.TABLE_7.get(_recipes(arm))):
            rest = [""] * (len(_FIGURES) - len(theirs))
            percents = [f"{score:.2f}" for score in theirs[:3]]
            table.rows.append([THEIRS, "", *percents, f"{theirs[3]:.4f}", *rest])
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


def _value(scores: dict[str, Any], task: str, metric: str) -> float | None:
    found = scores["tasks"].get(task, {}).get("metrics", {}).get(metric)
    return None if found is None else found["value"]


def _recipes(arm: Arm) -> tuple[str, str | None]:
    return arm.settings["paths.low"], arm.settings.get("paths.recovery")
