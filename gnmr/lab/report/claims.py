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
against several controls is `ARM - CONTROL`. In a table a column is marked once, in its heading, and `*` stands for the
first cell of each row, or for the mark in it. A heading with WHAT alone repeats the name to its left. Empty cells stay.

    | signal | difference<!--:table11/*/difference--> | p<!--:p--> |
    |---|---|---|
    | GNMR | +9.9% | 1 |
    | recovery gap<!--:gap--> | -18.7% | 0.051 |
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
from gnmr.lab.report.statistics import BETTER, EQUAL, WORSE, Family, Result, Share, judge, p_text, stat
from gnmr.records import output
from gnmr.records.untrusted import content, reading

_MOST_BYTES = 1 << 20
_MARK = re.compile(r"(<!--=([^>\n]+?)-->)(.*?)(<!--/-->)")
_COLUMN = re.compile(r"<!--:([^>\n]+?)-->")
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_SPENDS = {"sent": "numbers sent", "spent": "GEMM FLOPs", "promoted": "unit-steps"}
"""What an arm spends, by column; a claim shows the first one that its runs have."""
_AT_BUDGET = re.compile(r"(.+) at ([\d.]+%)")
_MOST_CONTROLS = 3
"""With more of them a test is a row, and not a pair of columns."""
_COMPARABLE = ("experiment", "scale", "data", "tokens_per_step", "steps")
"""Columns in which all runs of a cell agree."""
_HEAD = """\
# All tests

This page is for readers who check a number of [results and evidence](evidence.md). It has every statistical test of
[claims.yaml](claims.yaml) on the [table of recorded runs](../runs/README.md). That file also has the question and the
runs of each family of arms. The command below writes the page; do not edit.

    gnmr report claims=docs/claims.yaml

- *Loss*: mean validation loss of the two bounds at the end of a run, in nats per token, on the 16-bit path. The p-value
  behind it is of the positive control, which tests that the second bound is better than the first.
- *GEMM FLOPs* or *unit-steps* (pairs of unit and step): percent that is recovered. Arms on one path have none.
- *Recovered*: percent of the loss gap between the two bounds that the arm recovers.
- *Against*: difference of perplexity to this control in percent, with its 95% confidence interval.
- *p*: p-value, Holm-adjusted over the family. Below 0.05 the arm is better (negative difference) or worse (positive).
  A "=" marks arms that are shown to be equal: the difference is within 10% of the gap.
- *Smallest effect*: the difference that each test finds with 80% power, as a fraction of the gap.
- *Pooled sd*: residual of one model of all arms, with its degrees of freedom. Families without it have paired t-tests.
- *Forks* continue two base checkpoints. A cell under a budget has recovered, the interval of the difference, and p.
"""
_NO_COST_COLUMNS = ["family", "setting", "runs", "difference"]
_NO_COST = """\
## No measurable cost

The positive control fails in these settings, so no arm gets a verdict. Differences are to the first bound, in percent.

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
        """Return the cells of an arm without a test."""
        rows, family = self.runs[arm], self.family
        routed = self.spends == "sent" or any(row["recovery"] for row in rows)
        spent = stat(row[self.spends] for row in rows) if routed else None
        losses = [_loss(row) for row in rows]
        perplexities = [math.exp(min(loss, 700.0)) for loss in losses]  # e^710 overflows
        finite = all(map(math.isfinite, losses))
        closed = None
        if family.gate and family.model and arm not in (family.low, family.high) and finite:
            closed = family.model.closed(arm, family.low, family.high)
        return _recovered(closed) | {
            "n": str(len(rows)),
            "spent": percent(None if spent is None else spent.mean),
            "loss": f"{sum(losses) / len(rows):.4f}" if finite else "diverged",
            "perplexity": measure(stat(perplexities), 2) if finite else "diverged",
        }

    def numbers(self) -> dict[str, str]:
        """Return all texts by name: of the family, of each arm and of each test."""
        family, name = self.family, self.claim.name
        found = {
            f"{name}/n": str(family.n),
            f"{name}/cost": NOTHING if family.gap is None else relative(family.gap.estimate),
            f"{name}/p": _p(family.p_gate),
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
        """Return the section of the claim: what all arms share, and a table of its tests."""
        family, counts = self.family, Counter(one.verdict for one in self.family.results)
        once = len({one.arm for one in family.results}) == len(family.results)
        equal = all(_budget(one.arm) == _budget(one.control) for one in family.results)
        budgets = once and equal and all(map(_budget, self._arms()))
        table, shared = self._by_budget() if budgets else self._by_control()
        known = [self.claim.title, self._runs(), shared]
        if family.model is None:
            known.append(family.method_text().removesuffix("."))
        elif not family.model.own_differences:
            known.append(f"Pooled sd {family.model.sd:.3f} nats ({family.model.freedom} df)")
        known.append(f"Smallest effect {whole_percent(max(self.effects))}" if self.effects else "")
        verdicts = ", ".join(f"{counts[one]} {one}" for one in (BETTER, WORSE, EQUAL) if counts[one])
        known.append(f"Of {counts.total()} tests, {verdicts or 'none shows a difference'}.")
        return f"## {self.claim.name}\n\n{as_markdown('. '.join(filter(None, known)))}\n\n{_grid(table)}"

    def no_cost(self) -> list[str]:
        """Return the row of a claim without verdicts."""
        tests = [(one.arm, *_test(one)) for one in self.family.results if one.control == self.family.low]
        shown = "; ".join(f"{arm} {difference}" for arm, difference, _ in tests)
        return [self.claim.name, self.claim.title, self._runs(), shown]

    def _arms(self) -> list[str]:
        """Return the arms besides the bounds."""
        return [arm for arm in self.runs if arm not in (self.family.low, self.family.high)]

    def _runs(self) -> str:
        """Return the number of runs, and the losses of the bounds with the positive control."""
        bounds, runs = (self.family.low, self.family.high), [row for of_arm in self.runs.values() for row in of_arm]
        steps, levels = sorted({str(row["steps"]) for row in runs}), {one.n for one in self.family.results}
        losses = ", ".join(f"{arm} {self.of_arm(arm)['loss']}" for arm in bounds)
        of = f"{len(runs)} runs of {' or '.join(steps)} steps" + (f", n = {levels.pop()}" if len(levels) == 1 else "")
        return f"{of}. Loss: {losses} (p = {_p(self.family.p_gate)})"

    def _by_budget(self) -> tuple[list[list[str]], str]:
        """Return a row for each choice and a column for each budget; and the controls, which have the same budget."""
        tests = {one.arm: _test(one) for one in self.family.results}
        controls = dict.fromkeys(_AT_BUDGET.sub(r"\1", one.control) for one in self.family.results)
        cells: dict[str, dict[str, str]] = {}
        spent: dict[str, set[float]] = {}
        for arm in self._arms():
            budget, own = _budget(arm), self.of_arm(arm)
            spent.setdefault(budget, set()).update(map(float, filter(None, [_plain(own["spent"])])))
            difference, p = tests.get(arm, ("", ""))
            shown = [_plain(own["closed"]), difference[difference.find("(") :] if "(" in difference else difference, p]
            cells.setdefault(_AT_BUDGET.sub(r"\1", arm), {})[budget] = " ".join(filter(None, shown))
        budgets = sorted(spent, key=lambda budget: float(_plain(budget)))
        ends = [" to ".join(map(str, sorted({min(of), max(of)}))) if (of := spent[one]) else "-" for one in budgets]
        heads = ["arm", *(f"{one} (spent: {of})" for one, of in zip(budgets, ends, strict=True))]
        rows = [[name, *(of.get(one, "") for one in budgets)] for name, of in cells.items()]
        return [heads, *rows], f"Against {' or '.join(controls)} at the same budget"

    def _by_control(self) -> tuple[list[list[str]], str]:
        """Return a row for each arm, or for each test if there are many controls; and what nearly all rows spend."""
        tests = {(one.arm, one.control): _test(one) for one in self.family.results}
        tested, controls = (list(dict.fromkeys(pair[k] for pair in tests)) for k in (0, 1))
        wide = len(controls) <= _MOST_CONTROLS
        heads = ["arm", "n", f"{_SPENDS[self.spends]}, %", "recovered, %"]
        heads += [head for one in controls for head in (f"against {one}", "p")] if wide else []
        rows = [heads if wide else [*heads, "against", "difference", "p"]]
        for arm in (*(one for one in self._arms() if one not in tested), *tested):
            own = self.of_arm(arm)
            spent = "" if arm in (self.family.low, self.family.high) else own["spent"]
            first = [arm, *map(_plain, (own["n"], spent, own["closed"]))]
            found = {one: tests[arm, one] for one in controls if (arm, one) in tests}
            if wide:
                rows.append([*first, *(text for one in controls for text in found.get(one, ("", "")))])
            for k, (control, texts) in enumerate([] if wide else found.items() or [("", ("", ""))]):
                rows.append([*(first if not k else [arm, "", "", ""]), control, *texts])
        shared, spends = "", Counter(row[2] for row in rows[1:] if row[2])
        for usual, times in spends.most_common(1):
            if 2 * times > spends.total():
                others = " (others below)" if len(spends) > 1 else ""
                shared = f"{heads[2][0].upper()}{heads[2][1:]}: {usual}{others}"
                rows[1:] = [[*row[:2], "" if row[2] == usual else row[2], *row[3:]] for row in rows[1:]]
        same_n = len({row[1] for row in rows[1:]} - {""}) == 1
        keep = [k for k, column in enumerate(zip(*rows[1:], strict=True)) if any(column) and not (k == 1 and same_n)]
        return [[row[k] for k in keep] for row in rows], shared


def _budget(arm: str) -> str:
    """Return the budget in the name of an arm, which is "" if there is none."""
    return found[2] if (found := _AT_BUDGET.fullmatch(arm)) else ""


def _test(result: Result) -> tuple[str, str]:
    """Return the difference with its interval, and p; an equal arm has a "=" there, and a diverged one its verdict."""
    test, found = _texts_of(result), result.difference
    sign = " =" if result.verdict == EQUAL else f" {result.verdict}" if any(result.diverged) else ""
    ends = [100 * math.expm1(min(end, 700.0)) for end in (found and found.interval) or ()]
    shown = [f"{end:z.{int(max(map(abs, ends)) < 10)}f}" for end in ends]
    return _plain(test["difference"]) + (f" ({' to '.join(shown)})" if shown else ""), _plain(test["p"]) + sign


def _p(value: float | None) -> str:
    """Return a p-value with two decimals from 0.1 on, and 1 as 1."""
    return p_text(value) if value is None or value < 0.1 else "1" if value >= 0.995 else f"{value:.2f}"


def _plain(text: str) -> str:
    return "" if text == NOTHING else text.removesuffix("%")


def _grid(table: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as Markdown; the first row has the headings."""
    lines = [map(as_markdown, cells) for cells in table]
    lines.insert(1, map(str, ["-", *["-:"] * (len(table[0]) - 1)]))
    return "".join(f"|{'|'.join(cells)}|\n" for cells in lines)


def _texts_of(result: Result) -> dict[str, str]:
    """Return the numbers of a test as text; - where there is none."""
    difference = NOTHING if result.difference is None else relative(result.difference.estimate)
    if any(result.diverged):
        difference = f"diverged {result.diverged[0]} : {result.diverged[1]}"
    return {"n": str(result.n), "difference": difference, "p": _p(result.p), **_recovered(result.closed)}


def _recovered(found: Share | None) -> dict[str, str]:
    """Return the recovered share of the gap, without and with its interval."""
    if found is None:
        return {"closed": NOTHING, "recovered": NOTHING}
    closed, ends = whole_percent(found.value), found.interval
    return {"closed": closed, "recovered": closed + (f" ({interval_text(ends, whole_percent)})" if ends else "")}


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
    rows = [one.no_cost() for one in tested if not one.family.gate]
    no_cost = [_NO_COST + _grid([_NO_COST_COLUMNS, *rows])] if rows else []
    made = {out: "\n".join([_HEAD, *(one.markdown() for one in tested if one.family.gate), *no_cost])}
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

    def value(name: str) -> str:
        if name not in known:
            raise UserError(f"{path}: {name!r} is not a result{nearest(name, known)[:200]}")
        return known[name]

    def table(found: re.Match[str]) -> str:
        """Fill in the columns that are marked."""
        head, *rows = (line.split("|") for line in found[0].splitlines())
        names, last = list[str](), ""
        for cell in head:
            name = mark[1] if (mark := _COLUMN.search(cell)) else ""
            last = name if "/" in name or not name else f"{last.rpartition('/')[0]}/{name}"
            names.append(last)
        for row in rows[1:] if any(names) else []:
            of = mark[1] if (mark := _COLUMN.search(row[1])) else row[1].strip(" `")
            for k, name in enumerate(names):
                if name and row[k].strip() and "<!--" not in row[k]:  # a cell may have its own mark
                    row[k] = f" {value(name.replace('*', of))} "
        return "".join("|".join(cells) + "\n" for cells in (head, *rows))

    text = _MARK.sub(lambda found: f"{found[1]}{value(found[2])}{found[4]}", text)
    return _TABLE.sub(table, text)
