"""Test a file of claims on the table of recorded runs: one page, and the numbers that stand in other texts.

A claim says which recorded arms are compared with which, and is written down before they are tested:

    records: ../runs/results.parquet      # the table of runs, as seen from this file
    texts: [../README.md]                 # files with marked numbers
    claims:
      table11:
        title: All signals at one budget
        asks: Which signal is better than never recovering?
        arms:                             # name: STUDY/RUN; `*` and `?` are allowed
          never: table11/int2_int8-always_low-*
          always: table11/int2_int8-always_high-*
          gap: table11/int2_int8-gap-ranked-*
          random: table11/int2_int8-random-ranked-*
        low: never                        # the bounds; always against never is the positive control
        high: always
        contrasts:                        # arm: control, or a list of controls
          gap: [never, random]

Seeds of several cells are pooled if every arm is a list of patterns, one for each cell. `arms: STUDY/RUN`, or a list of
these, takes all arms of these runs by the names that they have in the table. In `contrasts` the first key that fits an
arm counts, and a key with `*` leaves the bounds out. Without `contrasts` every arm is tested against `low`.

The page holds nothing but what the table says, so the same table gives the same page. A number in another text is
marked and filled in by its name:

    <!--=table11/gap/difference-->-18.7%<!--/-->

Names are CLAIM/ARM/WHAT, or CLAIM/WHAT for what belongs to the whole family (`Tested.numbers`). An arm that is tested
against several controls is `ARM - CONTROL`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from gnmr.errors import UserError, nearest, writing
from gnmr.lab.report.layout import NOTHING, as_markdown, interval_text, measure, percent, relative, whole_percent
from gnmr.lab.report.statistics import (
    BETTER,
    EQUAL,
    NO_DIFFERENCE,
    WORSE,
    Contrast,
    Family,
    Result,
    Share,
    judge,
    p_text,
    stat,
)
from gnmr.records import output
from gnmr.records.untrusted import content, reading

_MOST_BYTES = 1 << 20
_MARK = re.compile(r"(<!--=([^>\n]+?)-->)(.*?)(<!--/-->)")
_SPENDS = {"sent": "numbers sent", "spent": "GEMM FLOPs recovered", "promoted": "unit-steps recovered"}
"""What an arm spends, by column; a claim shows the first one that its runs have."""
_SHARED = {"against": "control:", **{name: f"{name}:" for name in _SPENDS.values()}}
"""What a value that all rows share follows above the table, by column."""
_COMPARABLE = ("experiment", "scale", "data", "tokens_per_step", "steps")
"""Columns in which all runs of a cell agree."""
_HEAD = """\
# All tests

This page is for readers who check a number of [results and evidence](evidence.md). It has every statistical test of
[claims.yaml](claims.yaml) on the [table of recorded runs](../runs/README.md). The command below writes it; do not edit.

    gnmr report claims=docs/claims.yaml

- *Loss*: validation loss at the end of a run, in nats per token. Every arm is validated on the 16-bit path.
- *Unit-steps recovered*: fraction of (unit, step) pairs on the recovery path.
- *Positive control*: the test that the second of the two bounds is better than the first. If it fails, no arm gets a
  verdict.
- *Difference*: difference of perplexity to the control, with its 95% confidence interval.
- *p*: p-value, Holm-adjusted over the claim. The verdict is "-" if no difference is shown.
- *Gap recovered*: fraction of the loss gap between the two bounds that the arm recovers.
- *Smallest effect*: the difference to the control that a test finds with 80% power, as a fraction of the gap.
"""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """One family of contrasts."""

    name: str
    title: str
    asks: str
    arms: Mapping[str, tuple[str, ...]] | tuple[str, ...]
    """Patterns of runs by arm, one for each cell; or the patterns of all arms together."""
    low: str
    high: str
    contrasts: Mapping[str, tuple[str, ...]]
    """Controls by arm; empty: all against `low`."""

    def pairs(self, arms: Sequence[str]) -> list[tuple[str, str]]:
        """Return (arm, control) of each test. Raises UserError if an arm is not there."""
        exact = [key for key in self.contrasts if "*" not in key]
        for name in (self.low, self.high, *exact, *(one for of in self.contrasts.values() for one in of)):
            if name not in arms:
                raise UserError(f"claims.{self.name}: {name!r} is not one of its arms{nearest(name, arms)}")
        if not self.contrasts:
            return [(arm, self.low) for arm in arms if arm != self.low]
        order = exact + [arm for arm in arms if arm not in (*exact, self.low, self.high)]
        keys = {arm: next((key for key in self.contrasts if fnmatchcase(arm, key) or arm == key), "") for arm in order}
        return [(arm, one) for arm, key in keys.items() if key for one in self.contrasts[key] if one != arm]


@dataclass(frozen=True)
class Claims:
    """A file of claims."""

    records: Path
    texts: tuple[Path, ...]
    claims: tuple[Claim, ...]


def read(file: Path) -> Claims:
    """Read the file. Raises UserError, with the claim and the key, if it is invalid."""
    with reading(file):
        tree = yaml.safe_load(content(file, _MOST_BYTES))
    _mapping(tree, str(file), Claims.__dataclass_fields__)
    claims = [
        _claim(name, given, f"{file}: claims.{name}")
        for name, given in _mapping(tree.get("claims"), f"{file}: claims").items()
    ]
    texts = tuple(file.parent / text for text in _texts(tree.get("texts", []), f"{file}: texts"))
    return Claims(file.parent / _text(tree, "records", str(file)), texts, tuple(claims))


def _claim(name: str, given: Any, where: str) -> Claim:
    _mapping(given, where, [key for key in Claim.__dataclass_fields__ if key != "name"])
    title, asks, low, high = (_text(given, key, where) for key in ("title", "asks", "low", "high"))

    def by_arm(key: str) -> dict[str, tuple[str, ...]]:
        of = _mapping(given[key], f"{where}.{key}")
        return {arm: _texts(one, f"{where}.{key}.{arm}") for arm, one in of.items()}

    arms = by_arm("arms") if isinstance(given.get("arms"), dict) else _texts(given.get("arms"), f"{where}.arms")
    return Claim(name, title, asks, arms, low, high, by_arm("contrasts") if "contrasts" in given else {})


def _mapping(value: Any, where: str, known: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: must be a mapping with names as keys")
    for key in value:
        if known and key not in known:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, known)}")
    return value


def _text(tree: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(value := tree.get(key), str) or not value:
        raise UserError(f"{where}.{key}: must be a text")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{where}: must be a text or a list of texts")
    return tuple(value)


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

    @property
    def effects(self) -> list[float]:
        """The smallest effect of each test that has one."""
        return [one for result in self.family.results if (one := self.family.smallest(result)) is not None]

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
        share, interval = _with_interval(closed, whole_percent)
        return {
            "n": str(len(rows)),
            "spent": percent(None if spent is None else spent.mean),
            "loss": f"{sum(losses) / len(rows):.4f}" if finite else "diverged",
            "perplexity": measure(stat(map(math.exp, losses)), 2) if finite else "diverged",
            "closed": share,
            "closed_interval": interval,
        }

    def numbers(self) -> dict[str, str]:
        """Return all texts by name: of the family, of each arm and of each test."""
        family, name = self.family, self.claim.name
        found = {
            f"{name}/n": str(family.n),
            f"{name}/cost": NOTHING if family.gap is None else relative(family.gap.estimate),
            f"{name}/p": p_text(family.p_gate),
            f"{name}/smallest": whole_percent(max(self.effects, default=None)),
        }
        for arm in self.runs:
            found |= {f"{name}/{arm}/{key}": text for key, text in self.of_arm(arm).items()}
        arms = [one.arm for one in family.results]
        for one in family.results:
            named = [f"{one.arm} - {one.control}", *([one.arm] if arms.count(one.arm) == 1 else [])]
            found |= {f"{name}/{arm}/{key}": text for arm in named for key, text in _texts_of(one).items()}
        return found

    def markdown(self) -> str:
        """Return the section of the claim: a row per test, and above the table what all rows share."""
        family, spent = self.family, _SPENDS[self.spends]
        bounds, tested = (family.low, family.high), {one.arm for one in family.results}
        untested = [
            Result(arm, "", len(of), verdict="") for arm, of in self.runs.items() if arm not in {*bounds, *tested}
        ]
        rows: list[dict[str, str]] = []
        for one in (*untested, *family.results):
            arm, test = self.of_arm(one.arm), _texts_of(one)
            again = bool(rows) and rows[-1]["arm"] == one.arm  # the arm's own figures stand in its first row alone
            rows.append(
                {
                    "arm": one.arm,
                    "against": one.control,
                    "n": test["n"],
                    spent: "" if again or one.arm in bounds else arm["spent"],
                    "difference": f"{test['difference']} {test['interval']}".strip(),
                    "p": test["p"],
                    "gap recovered": "" if again else arm["closed"],
                    "verdict": one.verdict.replace(NO_DIFFERENCE, NOTHING),
                }
            )
        levels = {column: {row[column] for row in rows} - {"", NOTHING} for column in rows[0]}
        shared = {column: of for column, of in levels.items() if column in ("against", "n", spent) and len(of) == 1}
        columns = [column for column, of in levels.items() if (of or column == "verdict") and column not in shared]
        ruler = ["---", *["---:"] * (len(columns) - 1)]
        table = [columns, ruler, *([as_markdown(row[column]) for column in columns] for row in rows)]
        ends = dict.fromkeys(whole_percent(find(self.effects)) for find in (min, max)) if self.effects else {}
        runs = [row for of_arm in self.runs.values() for row in of_arm]
        known = [f"{len(runs)} runs of {' or '.join(sorted({str(row['steps']) for row in runs}))} steps"]
        known += [f"{_SHARED.get(column, f'{column} =')} {value}" for column, (value,) in shared.items()]
        known += [f"smallest effect: {' to '.join(ends)}"] if ends else []
        losses = ", ".join(f"{arm} {self.of_arm(arm)['loss']}" for arm in bounds)
        control = f"The positive control {'passes' if family.gate else 'fails'} (p = {p_text(family.p_gate)})"
        texts = (
            f"{self.claim.title}. {self.claim.asks} {self._shown()}",
            f"{', '.join(known)}. Loss: {losses}. {control}. {family.method_text()}",
        )
        paragraphs = [f"## {self.claim.name}", *map(as_markdown, texts)]
        return "\n\n".join([*paragraphs, "\n".join(f"|{'|'.join(cells)}|" for cells in table)]) + "\n"

    def _shown(self) -> str:
        """Return the sentence that says what the table shows."""
        if not self.family.gate:
            return "The runs do not show that the low path costs anything, so no arm gets a verdict."
        counts = Counter(one.verdict for one in self.family.results)
        found = [f"{counts[verdict]} {verdict}" for verdict in dict.fromkeys((BETTER, WORSE, EQUAL, *counts))]
        return f"Verdicts of the tests: {', '.join(one for one in found if not one.startswith('0 '))}."


def _texts_of(result: Result) -> dict[str, str]:
    """Return the numbers of a test as text; - where there is none."""
    difference, interval = _with_interval(result.difference, relative)
    if any(result.diverged):
        difference = f"diverged {result.diverged[0]} : {result.diverged[1]}"
    closed, closed_interval = _with_interval(result.closed, whole_percent)
    return {
        "n": str(result.n),
        "difference": difference,
        "interval": interval,
        "p": p_text(result.p),
        "p_equal": p_text(result.p_equal),
        "verdict": result.verdict,
        "closed": closed,
        "closed_interval": closed_interval,
    }


def _with_interval(found: Contrast | Share | None, show: Callable[[float], str]) -> tuple[str, str]:
    if found is None:
        return NOTHING, ""
    return show(found[0]), "" if found.interval is None else f"({interval_text(found.interval, show)})"


def results(file: Path, out: Path, say: Callable[[str], None], *, check: bool = False) -> list[str]:
    """Write the page to `out` and fill in the texts; return a line for each file that is not as it should be.

    With `check` nothing is written, and these are the files that would change. Raises UserError for a mistake in the
    file of claims, for runs that are not in the table or cannot be compared, and for a mark that names no number.
    """
    claims = read(file)
    tested = judged_claims(claims)
    for one in tested:
        say(f"{one.claim.name}: {len(one.family.results)} tests, {sum(map(len, one.runs.values()))} runs")
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
    where = f"claims.{claim.name}"
    cells: dict[str, list[list[Record]]] = {}
    if isinstance(claim.arms, tuple):
        for row in (row for pattern in claim.arms for row in _matching(where, pattern, studies)):
            arm = row["arm"].replace(" %", "%")  # one arm was recorded as "price, 8 %, each step"
            cells.setdefault(arm, [[]])[0].append(row)
    else:
        cells = {arm: [_matching(where, one, studies) for one in of] for arm, of in claim.arms.items()}
    if len({len(of_arm) for of_arm in cells.values()}) > 1:
        raise UserError(f"{where}.arms: every arm needs as many cells as the others")
    values: dict[str, dict[Any, float]] = {}
    for arm, of_arm in cells.items():
        if any(len({row["config"] for row in cell}) > 1 for cell in of_arm):
            raise UserError(f"{where}.arms.{arm}: runs of several configs")
        rows = [(number, row) for number, cell in enumerate(of_arm) for row in cell]
        values[arm] = {(number, row["base"], row["seed"], row["order"]): _loss(row) for number, row in rows}
        if len(values[arm]) < len(rows):
            raise UserError(f"{where}.arms.{arm}: several runs of one seed")
    for of_cell in zip(*cells.values(), strict=True):
        for key in _COMPARABLE:
            if len({row[key] for cell in of_cell for row in cell}) > 1:
                raise UserError(f"{where}: these runs cannot be compared, they differ in {key}")
    family = judge(values, claim.pairs([*cells]), low=claim.low, high=claim.high)
    return Tested(claim, {arm: [row for cell in of_arm for row in cell] for arm, of_arm in cells.items()}, family)


def _loss(row: Record) -> float:
    return math.inf if row["state"] == "diverged" else float(row["loss"])


def _matching(where: str, pattern: str, studies: Mapping[str, list[Record]]) -> list[Record]:
    study, _, run = pattern.partition("/")
    if not (found := [row for row in studies.get(study, ()) if fnmatchcase(row["run"], run)]):
        raise UserError(f"{where}: {pattern}: no such run in the table")
    return found


def _difference(path: Path, text: str) -> str | None:
    """Return where the file differs from the text; None if it does not."""
    if not path.exists():
        return f"{path}: is not there"
    lines, other = path.read_text().splitlines(), text.splitlines()
    for number, (old, new) in enumerate(zip(lines, other, strict=False), 1):
        if old != new:
            begin = max(next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0) - 40, 0)
            shown, given = old[begin : begin + 60], new[begin : begin + 60]
            return f"{path}, line {number}: {shown!r}, but the table gives {given!r}"
    return None if len(lines) == len(other) else f"{path}: has other lines than the table gives"


def _filled(path: Path, known: Mapping[str, str]) -> str:
    with writing(path):
        text = path.read_text()

    def fill(found: re.Match[str]) -> str:
        if found[2] not in known:
            raise UserError(f"{path}: {found[2]!r} is not a result{nearest(found[2], known)[:200]}")
        return f"{found[1]}{known[found[2]]}{found[4]}"

    return _MARK.sub(fill, text)
