"""Results: the claims of a file tested on their records, as pages, and as numbers that stand in other texts.

A page a claim and README.md, an overview; nothing in them but what the records say, so that the same records give the
same files. A number in another text is marked, and is filled in by its name:

    <!--=table11/gap/difference-->-18.7 %<!--/-->

Names are CLAIM/ARM/WHAT, or CLAIM/WHAT for what is the family's: `numbers` has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from gnmr.errors import UserError, nearest, writing
from gnmr.lab.records.find import find_runs
from gnmr.lab.records.pack import Unpacked, unpacked
from gnmr.lab.report.arms import Arm
from gnmr.lab.report.claims import Claim, Claims, read
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.family import MARGIN, Family, Values, alike, judge, pooled
from gnmr.lab.report.family_notes import (
    assumptions,
    p_text,
    positive_control,
    power,
    relative_text,
    row_numbers,
    smallest_texts,
)
from gnmr.lab.report.forks import losses_after
from gnmr.lab.report.layout import NOTHING, Table, as_markdown, measure, percent
from gnmr.lab.report.routability import routability_of
from gnmr.lab.report.runs import Run, load
from gnmr.lab.report.statistics import stat
from gnmr.records import output

_MARK = re.compile(r"(<!--=([^>\n]+?)-->)(.*?)(<!--/-->)")
_HEAD = "<!-- made from the records by gnmr report claims=...; do not edit -->"
_SENT = "numbers_sent_frac"
_PHASES = {"end": "at the end", "low": "after the arm's steps", "healed": "after healing in 16 bits"}


@dataclass(frozen=True)
class Tested:
    """A claim, its records and what came out."""

    claim: Claim
    values: Mapping[str, Values]
    arms: Mapping[str, list[Arm]]
    """By name; several where claims are pooled."""
    family: Family
    cells: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    """Of a claim that pools: the cells that count."""
    left_out: tuple[str, ...] = ()
    """Cells in which the positive control is not shown."""

    @property
    def runs(self) -> list[Run]:
        """All that it rests on."""
        return [run for arms in self.arms.values() for arm in arms for run in arm.runs]


def results(file: Path, out: Path, say: Callable[[str], None], *, check: bool = False) -> list[str]:
    """Writes the pages to `out` and fills the texts; returns a line for each file that is not as it should be.

    `check`: writes nothing, and such are all files that it would change. Else pages that belong to no claim.
    UserError for a mistake in the file of claims, for records that it names and that are not there or cannot be
    compared, and for a mark that names no number.
    """
    claims = read(file)
    if not check:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
    made = made_of(claims, out, say)
    wrong = [line for path, text in made.items() if (line := _difference(path, text))] if check else []
    if not check:
        for path, text in made.items():
            output.write_text(path, text)
    pages = sorted(path for path in out.glob("*.md") if path not in made)
    wrong += [f"{path}: belongs to no claim; remove it" for path in pages if _HEAD in path.read_text()]
    if not wrong:
        say(f"{len(made)} files are {'what the records give' if check else 'written'}.")
    return wrong


def made_of(claims: Claims, out: Path, say: Callable[[str], None]) -> dict[Path, str]:
    """Text by file: the pages and the filled texts."""
    tested: dict[str, Tested] = {}
    with _records(claims) as found:
        for claim in claims.claims.values():
            tested[claim.name] = one = _tested(claim, found, tested)
            say(f"{claim.name}: {len(one.family.rows)} contrasts, {len(one.runs)} runs")
        made = {out / f"{one.claim.name}.md": _page(one) for one in tested.values()}
        made[out / "README.md"] = _overview(tested)
    known = {name: text for one in tested.values() for name, text in numbers(one).items()}
    return made | {text: _filled(text, known) for text in claims.texts}


def _difference(path: Path, text: str) -> str | None:
    """Where the file has something else; None where it has not."""
    if not path.exists():
        return f"{path}: is not there"
    there = path.read_text()
    for number, (old, new) in enumerate(zip(there.splitlines(), text.splitlines(), strict=False), 1):
        if old != new:
            at = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            begin = max(at - 40, 0)
            here, right = old[begin : at + 20], new[begin : at + 20]
            return f"{path}, line {number}: {here!r} where the records give {right!r}"
    return None if there == text else f"{path}: has other lines than the records give"


class _Found:
    """The runs of packs, read when they are first asked for."""

    def __init__(self, folders: Mapping[str, Path], told: Unpacked) -> None:
        self._named = {f"{pack}/{one.relative_to(at)}": one for pack, at in folders.items() for one in find_runs([at])}
        self._told, self._read = told, dict[str, Run]()

    def matching(self, pattern: str, where: str) -> list[Run]:
        """UserError where there is none."""
        names = [name for name in self._named if fnmatchcase(name, pattern)]
        if not names:
            raise UserError(f"{where}: {pattern}: no such run in the records")
        for name in names:
            if name not in self._read:
                folder = self._named[name]
                self._read[name] = load(folder, Path(self._told.told(folder))).check()
        return [self._read[name] for name in names]


@contextmanager
def _records(claims: Claims) -> Iterator[_Found]:
    patterns = {pattern for one in claims.claims.values() for of_arm in one.arms.values() for pattern in of_arm}
    packs = {name: claims.records / f"{name}.parquet" for name in sorted({one.partition("/")[0] for one in patterns})}
    for name, pack in packs.items():
        if not pack.exists():
            raise UserError(f"{claims.file}: {name}: no such pack ({pack})")
    with unpacked(packs.values()) as found:
        folders = {pack: folder for folder, pack in found.packs.items()}
        yield _Found({name: folders[pack] for name, pack in packs.items()}, found)


def _tested(claim: Claim, found: _Found, before: Mapping[str, Tested]) -> Tested:
    bounds = {"low": claim.low, "high": claim.high}
    if not claim.pools:
        arms = {name: _arm(claim, name, patterns, found) for name, patterns in claim.arms.items()}
        _check_comparable(claim, arms)
        by_seed = {name: _values(arm, claim.phase) for name, arm in arms.items()}
        judged = judge(by_seed, claim.contrasts, **bounds)
        return Tested(claim, by_seed, {name: [arm] for name, arm in arms.items()}, judged)
    parts = {name: before[name] for name in claim.pools}
    counted = {name: one for name, one in parts.items() if one.family.gate}
    if not counted:
        raise UserError(f"claims.{claim.name}: in none of the cells that it pools the positive control is shown")
    names = {claim.low, claim.high} | {arm for pair in claim.contrasts for arm in pair}
    cells = {name: {arm: one.values[arm] for arm in one.values if arm in names} for name, one in counted.items()}
    values = pooled(cells)
    together = {name: [arm for one in counted.values() for arm in one.arms[name]] for name in values}
    lost = tuple(name for name in parts if name not in counted)
    return Tested(claim, values, together, judge(values, claim.contrasts, **bounds), cells, lost)


def _arm(claim: Claim, name: str, patterns: tuple[str, ...], found: _Found) -> Arm:
    where = f"claims.{claim.name}.arms.{name}"
    runs = [run for pattern in patterns for run in found.matching(pattern, where)]
    if len({run.hash for run in runs}) > 1:
        raise UserError(f"{where}: runs of several configs: {', '.join(sorted({run.place.name for run in runs}))}")
    if len({run.seed for run in runs}) < len(runs):
        raise UserError(f"{where}: several runs of one seed: {', '.join(sorted(str(run.place) for run in runs))}")
    return Arm(name, sorted(runs, key=lambda run: run.seed), label=name)


def _check_comparable(claim: Claim, arms: Mapping[str, Arm]) -> None:
    kinds = compare([run for arm in arms.values() for run in arm.runs])
    if len(kinds) > 1:
        told = kinds[0].told_apart() or "their experiment or scale"
        raise UserError(f"claims.{claim.name}: these runs cannot be compared, they differ in {told}")


def _values(arm: Arm, phase: str) -> Values:
    if phase == "end":
        return arm.outcomes
    return losses_after(arm, phase, "val_loss") | dict.fromkeys(arm.diverged, math.inf)


def _page(one: Tested) -> str:
    claim, family = one.claim, one.family
    columns = ["arm", "against", "n", _share(one), "perplexity", "difference [95 %]", "p (Holm)"]
    columns += ["gap closed [95 %]", f"p, equal to {100 * MARGIN:.0f} %", "verdict"]
    table = Table(claim.title, columns)
    named = {arm: cells for arm in (claim.low, claim.high) if (cells := _of_arm(one, arm))}
    table.rows = [[arm, NOTHING, *cells, *[NOTHING] * 5] for arm, cells in named.items()]
    for row in family.rows:
        told = row_numbers(row)
        shown = [told[key] for key in ("difference", "p", "closed", "p_equal", "verdict")]
        shown[0], shown[2] = f"{shown[0]} {told['interval']}".strip(), f"{shown[2]} {told['closed_interval']}".strip()
        cells = _of_arm(one, row.arm)
        table.rows.append([row.arm, row.control, str(row.n), *cells[1:], *shown])
    table.notes = [*_power(one), *assumptions(family.fit), *_provenance(one)]
    asked = f"{as_markdown(claim.asks)}\n"
    return f"{_HEAD}\n\n{asked}\n{table.markdown()}"


def _of_arm(one: Tested, name: str) -> list[str]:
    """n, `_share`, perplexity; of pooled cells no perplexity, which is of one cell."""
    arms, values = one.arms[name], one.values[name]
    sent = [found for arm in arms if (found := arm.mean(_SENT)) is not None]
    shares = sent or [arm.promoted for arm in arms if arm.promoted is not None and arm.routed]
    shown = stat(math.exp(value) if value < 700 else math.inf for value in values.values())
    return [
        str(len(values)),
        percent(sum(shares) / len(shares)) if shares else NOTHING,
        NOTHING if one.cells else measure(shown, 2),
    ]


def _share(one: Tested) -> str:
    """What an arm spends: promoted unit-steps, or numbers that it sends where gradients are compressed."""
    sends = any(arm.mean(_SENT) is not None for arms in one.arms.values() for arm in arms)
    return "sends" if sends else "promoted"


def numbers(one: Tested) -> dict[str, str]:
    """Texts by name: of the family and of each arm, behind " - CONTROL" where it is tested against several."""
    name, family = one.claim.name, one.family
    controls = [row.arm for row in family.rows]
    found = {f"{name}/{key}": text for key, text in _family_numbers(one).items()}
    for arm in one.arms:
        of_arm = dict(zip(("n", _share(one), "perplexity"), _of_arm(one, arm), strict=True))
        found |= {f"{name}/{arm}/{key}": text for key, text in of_arm.items()}
    for row in family.rows:
        arm = row.arm if controls.count(row.arm) == 1 else f"{row.arm} - {row.control}"
        found |= {f"{name}/{arm}/{key}": text for key, text in row_numbers(row).items()}
    return found


def _family_numbers(one: Tested) -> dict[str, str]:
    family = one.family
    model, gap = family.fit, family.gap
    first, whole = smallest_texts(family)
    return {
        "n": str(family.n),
        "gap": NOTHING if gap is None else f"{gap.estimate:.3f} nats",
        "cost": NOTHING if gap is None else relative_text(gap.estimate),
        "p": p_text(family.p_gate),
        "sd": NOTHING if model is None else f"{model.sd:.3f} nats",
        "smallest": first,
        "smallest_in_family": whole,
        "control": "shown" if family.gate else "not shown",
    }


def _power(one: Tested) -> list[str]:
    notes = [positive_control(one.family, one.claim.low, one.claim.high), *power(one.family)]
    if one.cells:
        same = alike(one.cells)
        notes.append(
            f"Cells, each with blocks of its own: {', '.join(one.cells)}. That all arms differ alike in "
            f"them: p = {p_text(same)} (F-test)."
        )
    if one.left_out:
        notes.append(f"Left out, since their positive control is not shown: {', '.join(one.left_out)}.")
    return notes


def _provenance(one: Tested) -> list[str]:
    runs = one.runs
    packs = sorted({run.place.parent.name for run in runs})
    of = sorted({f"{one.kind.steps:,} steps of {one.kind.tokens_per_step:,} tokens" for one in compare(runs)})
    commits, machines = sorted({run.commit for run in runs}), sorted({run.machine for run in runs})
    return [
        f"Loss {_PHASES[one.claim.phase]}; {len(runs)} runs; {'; '.join(of)}; records {', '.join(packs)}; commits "
        f"{', '.join(commits)}; machines: {'; '.join(machines)}."
    ]


def _routability(one: Tested) -> str:
    """What there is to route, by the first arm that recorded it, the never-recovering one before others."""
    order = [one.claim.low, *(arm for arm in one.arms if arm != one.claim.low)]
    for run in (run for name in order for arm in one.arms[name] for run in arm.done):
        if (run.folder / "units.arrows").exists() and (found := routability_of(run)) is not None:
            return f"{found[2] - found[3]:.2f} ({found[0]}, k = {found[1]})"
    return NOTHING


def _overview(tested: Mapping[str, Tested]) -> str:
    columns = [
        "claim",
        "positive control",
        "cost of the low path",
        "n",
        "residual sd",
        "smallest effect",
        "routability",
    ]
    table = Table("Claims", [*columns, "better", "worse", "equal", "not shown"])
    lines = []
    for name, one in tested.items():
        told = _family_numbers(one)
        verdicts = [row.verdict for row in one.family.rows]
        counts = [str(verdicts.count(verdict)) for verdict in ("better", "worse", "equal", "no difference shown")]
        cells = [told[key] for key in ("control", "cost", "n", "sd", "smallest")]
        table.rows.append([name, *cells, _routability(one), *counts])
        lines.append(f"- [{name}]({name}.md): {as_markdown(one.claim.title)}. {as_markdown(one.claim.asks)}")
    table.notes = [
        "Smallest effect: share of the gap that one test shows with 80 % power, the largest over the tests. "
        "Routability: share of all units' total in each step's k largest less that in the best fixed k, of the first "
        "run that recorded it; near 0 a fixed set does as well as any controller. Where the positive control is not "
        "shown no arm has a verdict."
    ]
    head = "# Results\n\nMade from the records by `gnmr report claims=...`; a test compares. Do not edit.\n"
    return f"{head}\n" + "\n".join(lines) + f"\n\n{table.markdown()}"


def _filled(path: Path, known: Mapping[str, str]) -> str:
    with writing(path):
        text = path.read_text()

    def fill(found: re.Match[str]) -> str:
        if found[2] not in known:
            raise UserError(f"{path}: {found[2]!r} is no result{nearest(found[2], known)[:200]}")
        return f"{found[1]}{known[found[2]]}{found[4]}"

    return _MARK.sub(fill, text)
