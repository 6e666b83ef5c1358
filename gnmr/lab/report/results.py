"""Test a file of claims on the table of recorded runs: one page, and the numbers that stand in other texts.

The page holds nothing but what the table says, so the same table gives the same page. A number in another text is
marked and filled in by its name:

    <!--=table11/gap/difference-->-18.7%<!--/-->

Names are CLAIM/ARM/WHAT, or CLAIM/WHAT for what belongs to the whole family (`Tested.numbers`). An arm that is tested
against several controls is `ARM - CONTROL`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gnmr.errors import UserError, nearest, writing
from gnmr.lab.report.claims import Claim, Claims, read
from gnmr.lab.report.family import Family, Row, closed_texts, judge
from gnmr.lab.report.layout import NOTHING, as_markdown, measure, percent, relative, whole_percent
from gnmr.lab.report.statistics import NO_DIFFERENCE, p_text, stat
from gnmr.records import output
from gnmr.records.untrusted import reading

_MARK = re.compile(r"(<!--=([^>\n]+?)-->)(.*?)(<!--/-->)")
_SPENDS = {"sent": "numbers sent", "spent": "GEMM FLOPs recovered", "promoted": "unit-steps recovered"}
"""What an arm spends, by column; a claim shows the first one that its runs have."""
_COMPARABLE = ("experiment", "scale", "data", "tokens_per_step", "steps")
"""Columns in which all runs of a cell agree."""
_HEAD = """\
# Results

Each claim of [claims.yaml](claims.yaml) is tested on the table of recorded runs
([runs/results.parquet](../runs/README.md)). `gnmr report claims=docs/claims.yaml` writes this page; do not edit it.

- *Loss*: validation loss at the end of a run, on the 16-bit path in every arm, in nats per token. The positive control
  tests whether the second of the two bounds is better than the first. If it fails, no arm gets a verdict.
- *Difference*: difference of perplexity to the control, with its 95% confidence interval.
- *p*: Holm-adjusted over the claim. The verdict is - if no difference is shown.
- *Gap closed*: share of the loss gap between the two bounds that the arm closes.
- *Smallest effect*: difference to the control, as a share of the gap, that a test shows with 80% power.
"""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Tested:
    """A claim, its runs by arm, and what came out."""

    claim: Claim
    runs: Mapping[str, list[Record]]
    family: Family

    @property
    def spends(self) -> str:
        """The column of `_SPENDS` that is shown."""
        rows = [row for of_arm in self.runs.values() for row in of_arm]
        return next((name for name in _SPENDS if any(row[name] is not None for row in rows)), "promoted")

    def of_arm(self, arm: str) -> dict[str, str]:
        """Return what is shown of an arm without a test."""
        rows, family = self.runs[arm], self.family
        routed = self.spends == "sent" or any(row["recovery"] for row in rows)
        spent = stat(row[self.spends] for row in rows) if routed else None
        losses = [_loss(row) for row in rows]
        finite = all(map(math.isfinite, losses))
        closed = None
        if family.gate and family.model and arm not in (family.low, family.high) and finite:
            closed = family.model.closed(arm, family.low, family.high)
        return {
            "n": str(len(rows)),
            "spent": percent(None if spent is None else spent.mean),
            "loss": f"{sum(losses) / len(rows):.4f}" if finite else "diverged",
            "perplexity": measure(stat(map(math.exp, losses)), 2) if finite else "diverged",
            **closed_texts(closed),
        }

    def numbers(self) -> dict[str, str]:
        """Return all texts by name: of the family, of each arm and of each test."""
        family, name = self.family, self.claim.name
        gap = None if family.gap is None else family.gap.estimate
        smallest = [one for row in family.rows if (one := family.smallest(row)) is not None]
        found = {
            f"{name}/n": str(family.n),
            f"{name}/cost": NOTHING if gap is None else relative(gap),
            f"{name}/p": p_text(family.p_gate),
            f"{name}/smallest": whole_percent(max(smallest, default=None)),
        }
        for arm in self.runs:
            found |= {f"{name}/{arm}/{key}": text for key, text in self.of_arm(arm).items()}
        arms = [row.arm for row in family.rows]
        for row in family.rows:
            named = [f"{row.arm} - {row.control}", *([row.arm] if arms.count(row.arm) == 1 else [])]
            found |= {f"{name}/{arm}/{key}": text for arm in named for key, text in row.texts().items()}
        return found

    def markdown(self) -> str:
        """Return the section of the claim: a row per test, and above the table what all rows share."""
        family, spent = self.family, _SPENDS[self.spends]
        bounds, tested = (family.low, family.high), {row.arm for row in family.rows}
        untested = [Row(arm, "", len(of), verdict="") for arm, of in self.runs.items() if arm not in {*bounds, *tested}]
        rows: list[dict[str, str]] = []
        for row in (*untested, *family.rows):
            arm, test = self.of_arm(row.arm), row.texts()
            if rows and rows[-1]["arm"] == row.arm:  # the arm's own figures stand in its first row alone
                arm = dict.fromkeys(arm, "")
            rows.append(
                {
                    "arm": row.arm,
                    "against": row.control,
                    "n": test["n"],
                    spent: "" if row.arm in bounds else arm["spent"],
                    "difference": f"{test['difference']} {test['interval']}".strip(),
                    "p": test["p"],
                    "gap closed": arm["closed"],
                    "verdict": row.verdict.replace(NO_DIFFERENCE, NOTHING),
                }
            )
        levels = {column: {row[column] for row in rows} - {"", NOTHING} for column in rows[0]}
        shared = {column: of for column, of in levels.items() if column in ("against", "n", spent) and len(of) == 1}
        columns = [column for column, of in levels.items() if (of or column == "verdict") and column not in shared]
        ruler = ["---", *["---:"] * (len(columns) - 1)]
        table = [columns, ruler, *([as_markdown(row[column]) for column in columns] for row in rows)]
        effects = sorted({one for row in family.rows if (one := family.smallest(row)) is not None})
        ends = dict.fromkeys(whole_percent(effects[place]) for place in (0, -1)) if effects else {}
        runs = [row for of_arm in self.runs.values() for row in of_arm]
        known = [f"{len(runs)} runs of {' or '.join(sorted({str(row['steps']) for row in runs}))} steps"]
        known += [f"{column} {value}" for column, (value,) in shared.items()]
        known += [f"smallest effect {' to '.join(ends)}"] if ends else []
        losses = ", ".join(f"{arm} {self.of_arm(arm)['loss']}" for arm in bounds)
        control = f"positive control {'' if family.gate else 'not '}shown (p = {p_text(family.p_gate)})"
        texts = (
            f"{self.claim.title}. {self.claim.asks}",
            f"{', '.join(known)}. Loss: {losses}; {control}. {family.method_text().capitalize()}.",
        )
        paragraphs = [f"## {self.claim.name}", *map(as_markdown, texts)]
        return "\n\n".join([*paragraphs, "\n".join(f"|{'|'.join(cells)}|" for cells in table)]) + "\n"


def results(file: Path, out: Path, say: Callable[[str], None], *, check: bool = False) -> list[str]:
    """Write the page to `out` and fill in the texts; return a line for each file that is not as it should be.

    With `check` nothing is written, and these are the files that would change. Raises UserError for a mistake in the
    file of claims, for runs that are not in the table or cannot be compared, and for a mark that names no number.
    """
    claims = read(file)
    tested = judged_claims(claims)
    for one in tested:
        say(f"{one.claim.name}: {len(one.family.rows)} tests, {sum(map(len, one.runs.values()))} runs")
    known = {name: text for one in tested for name, text in one.numbers().items()}
    made = {out: "\n".join([_HEAD, *(one.markdown() for one in tested)])}
    made |= {path: _filled(path, known) for path in claims.texts}
    if check:
        return [line for path, text in made.items() if (line := _difference(path, text))]
    for path, text in made.items():
        output.write_text(path, text)
    return []


def judged_claims(claims: Claims) -> list[Tested]:
    """Test every claim."""
    with reading(claims.records):
        table: list[Record] = pq.read_table(claims.records).to_pylist()
    studies: dict[str, list[Record]] = {}
    for row in table:
        if row["state"] in ("done", "diverged"):
            studies.setdefault(row["study"], []).append(row)
    return [_tested(claim, studies) for claim in claims.claims]


def _tested(claim: Claim, studies: Mapping[str, list[Record]]) -> Tested:
    cells: dict[str, list[list[Record]]] = {}
    if isinstance(claim.arms, tuple):
        for row in (row for pattern in claim.arms for row in _matching(claim, pattern, studies)):
            cells.setdefault(row["arm"], [[]])[0].append(row)
    else:
        cells = {arm: [_matching(claim, one, studies) for one in of] for arm, of in claim.arms.items()}
    if len({len(of_arm) for of_arm in cells.values()}) > 1:
        raise UserError(f"claims.{claim.name}.arms: every arm needs as many cells as the others")
    values: dict[str, dict[Any, float]] = {}
    for arm, of_arm in cells.items():
        if any(len({row["config"] for row in cell}) > 1 for cell in of_arm):
            raise UserError(f"claims.{claim.name}.arms.{arm}: runs of several configs")
        rows = [(number, row) for number, cell in enumerate(of_arm) for row in cell]
        values[arm] = {(number, row["base"], row["seed"], row["order"]): _loss(row) for number, row in rows}
        if len(values[arm]) < len(rows):
            raise UserError(f"claims.{claim.name}.arms.{arm}: several runs of one seed")
    for number in range(len(next(iter(cells.values())))):
        rows_of_cell = [row for of_arm in cells.values() for row in of_arm[number]]
        for key in _COMPARABLE:
            if len({row[key] for row in rows_of_cell}) > 1:
                raise UserError(f"claims.{claim.name}: these runs cannot be compared, they differ in {key}")
    family = judge(values, claim.pairs([*cells]), low=claim.low, high=claim.high)
    return Tested(claim, {arm: [row for cell in of_arm for row in cell] for arm, of_arm in cells.items()}, family)


def _loss(row: Record) -> float:
    return math.inf if row["state"] == "diverged" else float(row["loss"])


def _matching(claim: Claim, pattern: str, studies: Mapping[str, list[Record]]) -> list[Record]:
    study, _, run = pattern.partition("/")
    if not (found := [row for row in studies.get(study, ()) if fnmatchcase(row["run"], run)]):
        raise UserError(f"claims.{claim.name}: {pattern}: no such run in the table")
    return found


def _difference(path: Path, text: str) -> str | None:
    """Return where the file differs from the text; None if it does not."""
    if not path.exists():
        return f"{path}: is not there"
    lines, other = path.read_text().splitlines(), text.splitlines()
    for number, (old, new) in enumerate(zip(lines, other, strict=False), 1):
        if old != new:
            at = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
            begin = max(at - 40, 0)
            return f"{path}, line {number}: {old[begin : at + 20]!r}, but the table gives {new[begin : at + 20]!r}"
    return None if len(lines) == len(other) else f"{path}: has other lines than the table gives"


def _filled(path: Path, known: Mapping[str, str]) -> str:
    with writing(path):
        text = path.read_text()

    def fill(found: re.Match[str]) -> str:
        if found[2] not in known:
            raise UserError(f"{path}: {found[2]!r} is no result{nearest(found[2], known)[:200]}")
        return f"{found[1]}{known[found[2]]}{found[4]}"

    return _MARK.sub(fill, text)
