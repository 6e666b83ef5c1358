"""The paper's tables with our runs in them: rows are found by the arms' settings.

Each module holds the tables of one of the paper's settings. The paper's figures stand beside ours only where scale and
settings are the paper's; in tables along the run (2, 13, 15) at other scales too, with theirs in the row's name.
"""

from __future__ import annotations

from gnmr.report.comparisons import Comparison
from gnmr.report.layout import Table
from gnmr.report.paper_tables.act_quant import table_1, table_3, table_5, table_6, table_10, table_11
from gnmr.report.paper_tables.common import ACT_QUANT, FINETUNE, MOE, PANGU, RECIPE, setting
from gnmr.report.paper_tables.fine_tuning import table_7
from gnmr.report.paper_tables.recipe import table_2, table_4, table_9
from gnmr.report.paper_tables.training_loss import table_13, table_15

__all__ = [
    "paper_tables",
    "table_1",
    "table_2",
    "table_3",
    "table_4",
    "table_5",
    "table_6",
    "table_7",
    "table_9",
    "table_10",
    "table_11",
    "table_13",
    "table_15",
]


def paper_tables(experiment: str, comparisons: list[Comparison]) -> list[Table]:
    """Those of the paper's tables for which these runs have rows."""
    of = {
        name: [one for one in comparisons if setting(one) == name] for name in (ACT_QUANT, RECIPE, MOE, PANGU, FINETUNE)
    }
    found = [table_1(experiment, of[ACT_QUANT])]
    found += map(table_2, of[RECIPE])
    found.append(table_3(experiment, comparisons))
    found += map(table_4, [*of[RECIPE], *of[MOE], *of[PANGU]])
    for comparison in comparisons:
        found += [table_5(comparison), table_6(comparison)]
    found += map(table_7, of[FINETUNE])
    found += [table_9(experiment, of[RECIPE]), table_10(experiment, of[ACT_QUANT])]
    found += map(table_11, comparisons)
    found += map(table_13, of[MOE])
    found += map(table_15, of[PANGU])
    return [table for table in found if table.rows]
