"""Write every marked number of README and docs from the records, or check that they have not changed.

    python benchmarks/tables.py            # fills the numbers in
    python benchmarks/tables.py --check    # writes nothing; exit code 1 if a number differs from the records
    python benchmarks/tables.py --show forks_e2m1    # prints the numbers whose names match, and writes nothing

A number in a text is marked by its name, `<!--=table11/gap/difference-->-18.7%<!--/-->`. In a table a column is marked
once, in its heading: `<!--:table11/*/difference-->`. There `*` stands for the first cell of a row, or for the mark in
it, and a heading with the last part alone repeats the name to its left. Empty cells stay empty.

Names are FAMILY/ARM/WHAT or FAMILY/WHAT. The families of arms are defined in families.yaml: `arms` maps names to
patterns STUDY/RUN of the table of runs, one for each cell (seeds of several cells are pooled); a list of patterns takes
all arms of these runs by their recorded names. `low` and `high` are the bounds, and their contrast is the positive
control. `contrasts` maps an arm, or `*`, to its control or controls; without it every arm is tested against `low`.
Families below `rivals` come from records of rivals.py (`rival_table.numbers`), and those below `plans` from tables of
plans.py; there ARM is `NAME at BUDGET`, and the low path is a part of their name, `NAME_LOW`, after the base if the
table is of each base.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

import rival_table
from gnmr.lab.report.layout import NOTHING, interval_text, measure, percent, relative, whole_percent
from gnmr.lab.report.statistics import Contrast, Family, Share, judge, p_text, stat

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ROOT / "benchmarks" / "families.yaml"
COMPARABLE = ("experiment", "scale", "data", "tokens_per_step", "steps")
"""Columns in which all runs of a cell agree."""
SPENDS = ("sent", "spent", "promoted")
"""Columns of the share that an arm recovers (numbers sent, GEMM FLOPs, unit-steps); the first recorded one counts."""
MARK = re.compile(r"(<!--=([^>\n]+?)-->)(.*?)(<!--/-->)")
COLUMN = re.compile(r"<!--:([^>\n]+?)-->")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)

Row = dict[str, Any]


def runs_by_arm(definition: Row, table: list[Row]) -> dict[str, list[list[Row]]]:
    """Return the runs of each arm, in one list per cell. Raises ValueError for a pattern that no run matches."""

    def matching(pattern: str) -> list[Row]:
        study, _, run = pattern.partition("/")
        rows = [row for row in table if row["study"] == study and fnmatchcase(row["run"], run)]
        if not rows:
            raise ValueError(f"{pattern}: no such run in the table")
        return rows

    patterns = definition["arms"]
    if isinstance(patterns, dict):
        cells = {
            arm: [patterns_of] if isinstance(patterns_of, str) else patterns_of for arm, patterns_of in patterns.items()
        }
        return {arm: [matching(pattern) for pattern in patterns_of] for arm, patterns_of in cells.items()}
    by_name: dict[str, list[list[Row]]] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for row in matching(pattern):
            by_name.setdefault(row["arm"].replace(" %", "%"), [[]])[0].append(row)
    return by_name


def judged(definition: Row, cells: dict[str, list[list[Row]]]) -> Family:
    """Test a family. Raises ValueError if its runs cannot be compared."""
    losses: dict[str, dict[Any, float]] = {}
    for arm, of_arm in cells.items():
        rows = [(number, row) for number, cell in enumerate(of_arm) for row in cell]
        losses[arm] = {(number, row["base"], row["seed"], row["order"]): _loss(row) for number, row in rows}
        if len(losses[arm]) < len(rows) or any(len({row["config"] for row in cell}) > 1 for cell in of_arm):
            raise ValueError(f"arms.{arm}: several runs of one seed, or runs of several configs")
    for of_cell in zip(*cells.values(), strict=True):
        if mixed := [key for key in COMPARABLE if len({row[key] for cell in of_cell for row in cell}) > 1]:
            raise ValueError(f"these runs cannot be compared, they differ in {mixed[0]}")
    return judge(losses, _contrasts(definition, [*cells]), low=definition["low"], high=definition["high"])


def _contrasts(definition: Row, arms: list[str]) -> list[tuple[str, str]]:
    """Return (arm, control) of each test. The first key that fits an arm counts; a key with `*` spares the bounds."""
    low, high = definition["low"], definition["high"]
    controls_by_key = definition.get("contrasts")
    if not controls_by_key:
        return [(arm, low) for arm in arms if arm != low]
    exact = [key for key in controls_by_key if "*" not in key]
    pairs = []
    for arm in exact + [arm for arm in arms if arm not in (*exact, low, high)]:
        key = next((key for key in controls_by_key if arm == key or fnmatchcase(arm, key)), None)
        controls = [] if key is None else controls_by_key[key]
        pairs += [
            (arm, control) for control in ([controls] if isinstance(controls, str) else controls) if control != arm
        ]
    return pairs


def _loss(row: Row) -> float:
    return math.inf if row["state"] == "diverged" else float(row["loss"])


def numbers_of_family(name: str, cells: dict[str, list[list[Row]]], family: Family) -> dict[str, str]:
    """Return the texts of a family, of its arms, and of its tests, by their names."""
    smallest = [effect for result in family.results if (effect := family.smallest(result)) is not None]
    texts = {
        f"{name}/n": str(family.n),
        f"{name}/cost": NOTHING if family.gap is None else relative(family.gap.estimate),
        f"{name}/cost between": _between(family.gap),
        f"{name}/p": _p(family.p_gate),
        f"{name}/smallest": whole_percent(max(smallest, default=None)),
    }
    all_rows = [row for of_arm in cells.values() for cell in of_arm for row in cell]
    spends = next((key for key in SPENDS if any(row[key] is not None for row in all_rows)), "promoted")
    for arm, of_arm in cells.items():
        rows = [row for cell in of_arm for row in cell]
        losses, finite = [_loss(row) for row in rows], all(math.isfinite(_loss(row)) for row in rows)
        share = None
        if family.gate and family.model and arm not in (family.low, family.high) and finite:
            share = family.model.closed(arm, family.low, family.high)
        routed = spends == "sent" or any(row["recovery"] for row in rows)
        spent = stat(row[spends] for row in rows) if routed else None
        perplexity = stat([math.exp(min(loss, 700.0)) for loss in losses])  # e^710 overflows
        of_arm_texts = _share_texts(share) | {
            "n": str(len(rows)),
            "spent": percent(None if spent is None else spent.mean),
            "loss": f"{sum(losses) / len(rows):.4f}" if finite else "diverged",
            "perplexity": measure(perplexity, 2) if finite else "diverged",
        }
        texts |= {f"{name}/{arm}/{what}": text for what, text in of_arm_texts.items()}
    tested = [result.arm for result in family.results]
    for result in family.results:
        difference = NOTHING if result.difference is None else relative(result.difference.estimate)
        if any(result.diverged):
            difference = f"diverged {result.diverged[0]} : {result.diverged[1]}"
        of_test = {"n": str(result.n), "difference": difference, "p": _p(result.p), **_share_texts(result.closed)}
        names = [f"{result.arm} - {result.control}", *([result.arm] if tested.count(result.arm) == 1 else [])]
        texts |= {f"{name}/{arm}/{what}": text for arm in names for what, text in of_test.items()}
    return texts


def numbers_of_plans(name: str, record: Path) -> dict[str, str]:
    """Return the texts of a table of plans.py, by NAME_LOW/ARM at BUDGET/WHAT; p is adjusted, and against the plan.

    The gap and the number of checkpoints are also by NAME_LOW/WHAT, if all rows of this family have the same.
    """
    texts: dict[str, str] = {}
    of_families: dict[str, set[str]] = {}
    for row in json.loads(record.read_text())["rows"]:
        family = "_".join([name, *([row["base"]] if "base" in row else []), row["low"]])
        arm = f"{family}/{row['arm']} at {100 * row['budget']:.3g}%"
        interval = (row["closed_low"], row["closed_high"])
        share = None if row["closed"] is None else Share(row["closed"], interval)
        of_replicates = {"gap": f"{row['gap']:.2g}", "checkpoints": str(row["checkpoints"])}
        of_arm_texts = {"p": _p(row.get("p_adjusted")), **_share_texts(share), **of_replicates}
        texts |= {f"{arm}/{what}": text for what, text in of_arm_texts.items()}
        for what, text in of_replicates.items():
            of_families.setdefault(f"{family}/{what}", set()).add(text)
    return texts | {name: next(iter(same)) for name, same in of_families.items() if len(same) == 1}


def _between(gap: Contrast | None) -> str:
    """Return the 95% interval of the cost of low precision, in perplexity."""
    if gap is None or gap.interval is None:
        return NOTHING
    return " to ".join(map(relative, gap.interval))


def _p(value: float | None) -> str:
    """Return a p-value with two decimals from 0.1 on, and 1 as 1."""
    return p_text(value) if value is None or value < 0.1 else "1" if value >= 0.995 else f"{value:.2f}"


def _share_texts(share: Share | None) -> dict[str, str]:
    """Return the recovered share of the gap, without and with its interval."""
    if share is None:
        return {"closed": NOTHING, "recovered": NOTHING}
    closed = whole_percent(share.value)
    interval = f" ({interval_text(share.interval, whole_percent)})" if share.interval else ""
    return {"closed": closed, "recovered": closed + interval}


def filled(text: str, texts: dict[str, str]) -> str:
    """Return the Markdown text with all marked numbers replaced. Raises KeyError for a mark that names no number."""

    def table(match: re.Match[str]) -> str:
        head, *rows = (line.split("|") for line in match[0].splitlines())
        names, left = list[str](), ""
        for cell in head:
            name = mark[1] if (mark := COLUMN.search(cell)) else ""
            left = name if "/" in name or not name else f"{left.rpartition('/')[0]}/{name}"
            names.append(left)
        for row in rows[1:] if any(names) else []:
            arm = mark[1] if (mark := COLUMN.search(row[1])) else row[1].strip(" `")
            for place, name in enumerate(names):
                if name and row[place].strip() and "<!--" not in row[place]:  # a cell may have its own mark
                    row[place] = f" {texts[name.replace('*', arm)]} "
        return "".join("|".join(cells) + "\n" for cells in (head, *rows))

    return TABLE.sub(table, MARK.sub(lambda match: f"{match[1]}{texts[match[2]]}{match[4]}", text))


def main() -> int:
    """Fill in or compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--show", metavar="REGEX", help="print the numbers whose names match, and write nothing")
    asked = parser.parse_args()
    definitions = yaml.safe_load(FAMILIES.read_text())
    table = pq.read_table(ROOT / definitions["records"]).to_pylist()
    table = [row for row in table if row["state"] in ("done", "diverged")]
    texts: dict[str, str] = {}
    for name, file in definitions["rivals"].items():
        texts |= rival_table.numbers(name, ROOT / file)
    for name, file in definitions["plans"].items():
        texts |= numbers_of_plans(name, ROOT / file)
    for name, definition in definitions["families"].items():
        cells = runs_by_arm(definition, table)
        texts |= numbers_of_family(name, cells, judged(definition, cells))
    if asked.show:
        print("\n".join(f"{name}: {text}" for name, text in texts.items() if re.search(asked.show, name)))
        return 0
    differing = 0
    for page in map(ROOT.joinpath, definitions["texts"]):
        old = page.read_text()
        new = filled(old, texts)
        for number, (line, right) in enumerate(zip(old.splitlines(), new.splitlines(), strict=True), 1):
            if line != right:
                differing += 1
                print(f"{page.relative_to(ROOT)}, line {number}: the records give {right.strip()}")
        if not asked.check:
            page.write_text(new)
    return int(asked.check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
