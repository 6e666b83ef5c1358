"""The report as a W&B report: the sentence, the tables, and panels of the project's runs, seeds joined by arm.

Needs W&B's package wandb-workspaces and the runs in the project, where training puts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnmr.errors import UserError
from gnmr.lab.records.wandb_sink import PANELS
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import as_markdown
from gnmr.lab.report.tables import comparison_tables
from gnmr.records.untrusted import first_line


def api(project: str) -> Any:
    """W&B's reports module. UserError, which says how to get it, where it is not there."""
    try:
        from wandb_workspaces.reports import v2
    except ImportError as error:
        raise UserError(
            f"wandb={project}: W&B reports need W&B's own package: pip install wandb-workspaces, and wandb login "
            "(without it html=FILE writes the same as a page)"
        ) from error
    return v2


def write_wandb(comparisons: Sequence[Comparison], project: str, wr: Any) -> str:
    """Saves the report in `project`, NAME or ENTITY/NAME, by the module of `api`; its address. UserError where W&B
    refuses it."""
    entity, _, name = project.rpartition("/")
    title = f"gnmr: {comparisons[0].name}" + (f" and {len(comparisons) - 1} more" if len(comparisons) > 1 else "")
    try:
        where = {"project": name, "entity": entity or wr.Report(project=name).entity}  # else of who is logged in
        blocks = [block for comparison in comparisons for block in _blocks(comparison, where, wr)]
        report = wr.Report(title=title[:120], description="Made by gnmr report.", blocks=blocks, **where)
        report.save()
    except Exception as error:  # of a package of others: no login, no network, no such project
        raise UserError(f"wandb={project}: W&B did not take the report ({first_line(error)})") from error
    return str(report.url)


def _blocks(comparison: Comparison, where: dict[str, str], wr: Any) -> list[Any]:
    """The sentence and its figures, the panels of the project's runs by arm, the tables."""
    told = headline(comparison)
    figures = "\n".join(f"- {one.label}: **{one.value}** ({as_markdown(one.detail)})" for one in told.figures)
    lines = [wr.LinePlot(title=panel, x="step", y=[panel], groupby="arm", groupby_aggfunc="mean") for panel in PANELS]
    runs = wr.Runset(name=comparison.name, query=comparison.kind.experiment, **where)
    return [
        wr.H1(text=comparison.name),
        wr.MarkdownBlock(text=f"**{as_markdown(told.sentence)}**\n\n{figures}"),
        wr.PanelGrid(runsets=[runs], panels=lines),
        *(wr.MarkdownBlock(text=table.markdown()) for table in comparison_tables(comparison)),
    ]
