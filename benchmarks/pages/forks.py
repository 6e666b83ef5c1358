"""Forks of a scene as one model of all arms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnmr.lab.bench.scenes import EACH, HELD, SCENES
from gnmr.lab.report.family import Family, judge
from gnmr.lab.report.family_notes import assumptions, positive_control, power, row_numbers
from gnmr.lab.report.layout import Table


def family_of(title: str, rows: Sequence[dict[str, Any]]) -> tuple[Family, Table]:
    """One model of all arms, each against never and against random of its kind (anew, held or pinned)."""
    values = losses(rows)
    arms = [arm for arm in values if arm not in ("never", "always")]
    drawn = {arm: "random" + next((end for end in (EACH, HELD) if arm.endswith(end)), "") for arm in arms}
    pairs = [(arm, "never") for arm in arms]
    pairs += [(arm, one) for arm, one in drawn.items() if one in values and one != arm]
    family, table = tested(title, rows, pairs, "always", "share")
    if family.gate and (left := [arm for arm, _ in SCENES[rows[0]["fork"]["low"]].arms() if arm not in values]):
        table.notes.append(f"Arms of the scene that are not made yet: {'; '.join(left)}.")
    return family, table


def losses(rows: Sequence[dict[str, Any]]) -> dict[str, dict[Any, float]]:
    """Of forks, by arm and block."""
    values: dict[str, dict[Any, float]] = {}
    for row in rows:
        fork = row["fork"]
        values.setdefault(fork["arm"], {})[fork["base"], fork["order"]] = row["loss"]
    return values


def tested(
    title: str, rows: Sequence[dict[str, Any]], pairs: Sequence[tuple[str, str]], high: str, spent: str
) -> tuple[Family, Table]:
    """One model of all arms of these forks, `spent` the key of what an arm costs, `high` the upper bound."""
    spends: dict[str, list[float]] = {}
    for fork in rows:
        spends.setdefault(fork["fork"]["arm"], []).append(fork[spent])
    values = losses(rows)
    family = judge(values, [pair for pair in pairs if values.keys() >= set(pair)], low="never", high=high)
    columns = ["arm", "against", "n", "sends" if spent == "sent" else "spends", "difference [95 %]", "p (Holm)"]
    table = Table(title, [*columns, "gap closed [95 %]", "p, equal to 10 %", "verdict"])
    for row in family.rows:
        told = row_numbers(row)
        closed = f"{told['closed']} {told['closed_interval']}".strip()
        cells = [
            f"{sum(spends[row.arm]) / len(spends[row.arm]):.1%}",
            f"{told['difference']} {told['interval']}".strip(),
        ]
        table.rows.append(
            [row.arm, row.control, told["tested"], *cells, told["p"], closed, told["p_equal"], told["verdict"]]
        )
    table.notes = [positive_control(family, "never", high), *power(family), *assumptions(family.fit)]
    table.notes += [f"Commits of the forks: {', '.join(dict.fromkeys(fork['commit'] for fork in rows))}."]
    return family, table
