"""Comparisons: the arms that saw the same data for the same steps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from gnmr.errors import UserError
from gnmr.lab.report.arms import QUANTIZER, Arm, independent, plain_adamw, same, setting_texts, varying
from gnmr.lab.report.runs import Run

_WHAT_AN_ARM_IS = ("precision.", "controller.", "compression.", "records.", "arm")
_MODEL = ("model.", "training.dtype", "training.eval_sequences")
_SCALES = ("cpu", "60m", "130m", "350m", "1.3b", "3b")
_GIVEN = ("budget", "cost")
SAME_BUDGET = 0.1
"""By how much of the larger one two mean promotion shares may differ and still count as one budget.

Arms that were set to one share end within a few percent of it (a set acts one step late, a lock lasts), while the next
budget of a sweep is a factor away. Quality rises steeply with the budget, so a wider tolerance would test the budget.
"""


@dataclass(frozen=True)
class Kind:
    """What runs must share to stand in one table."""

    experiment: str
    scale: str
    fingerprint: str | None
    seq_len: int | None
    tokens_per_step: int | None
    steps: int | None
    base: str | None = None
    """What forks were made of: its name and the beginning of its checksum."""

    @property
    def tokens(self) -> int | None:
        """In all its steps; None where unknown."""
        return None if self.tokens_per_step is None or self.steps is None else self.tokens_per_step * self.steps


@dataclass
class Comparison:
    """Arms of one experiment and scale over the same data, block length, tokens per step and steps."""

    kind: Kind
    arms: list[Arm]
    rivals: list[Kind] = field(default_factory=list)
    """Other comparisons of the same experiment and scale: not to be compared with this one."""

    @property
    def name(self) -> str:
        """Experiment, scale and base, as headings have them."""
        base = f", base {self.kind.base}" if self.kind.base else ""
        return f"{self.kind.experiment}, scale {self.kind.scale}{base}"

    @property
    def runs(self) -> list[Run]:
        """Of all arms."""
        return [run for arm in self.arms for run in arm.runs]

    @property
    def seeds(self) -> list[int]:
        """Of all arms, ascending, each once."""
        return sorted({run.seed for run in self.runs})

    def reference(self, arm: Arm) -> Arm | None:
        """The static 16-bit arm to compare with; None without one."""
        return self._bound(arm, lambda other: other.sixteen_bit)

    def low(self, arm: Arm) -> Arm | None:
        """The static arm on the arm's low path, under the same injected faults."""
        return self._bound(arm, self._on(arm, 0))

    def recovery(self, arm: Arm) -> Arm | None:
        """The static arm on the arm's recovery path; without injected faults where there is one."""
        return self._bound(arm, self._on(arm, 1))

    def random(self, arm: Arm) -> Arm | None:
        """The `nearest_random` arm where both were given one budget (controller.budget), or where its mean promotion is
        the arm's own to within `SAME_BUDGET`."""
        nearest = self.nearest_random(arm)
        if nearest is None or _apart(arm, nearest) <= SAME_BUDGET:
            return nearest
        given, other = ([one.settings.get(f"controller.{key}") for key in _GIVEN] for one in (arm, nearest))
        return nearest if given[0] is not None and given == other else None

    def nearest_random(self, arm: Arm) -> Arm | None:
        """The routed arm whose signal is `random` and whose mean promotion is nearest.

        It differs from the arm in nothing but its controller, and holds a set for as many steps. None for static arms
        and random ones, and where one of the two promotes nothing.
        """
        if arm.always or arm.signal == "random":
            return None
        candidates = [
            other
            for other in self.arms
            if other.signal == "random" and other.routed and other.hold == arm.hold and _same_but_routing(arm, other)
        ]
        nearest = min(candidates, key=lambda other: _apart(arm, other), default=None)
        return nearest if nearest and _apart(arm, nearest) < math.inf else None

    def formats(self, arm: Arm) -> tuple[str | None, str | None]:
        """Formats of the low and the recovery path that the arm is measured between.

        A static arm is measured between those of the routed arms beside it, if any; else the narrowest static format
        is low and the widest one below 16 bits, or the widest, is recovery.
        """
        if arm.routed:
            return arm.low_path, arm.recovery_path
        beside = [other for other in self.arms if same(arm, other, _MODEL)]
        pairs = [self.formats(other) for other in beside if other.routed]
        own = [pair for pair in pairs if pair[0] == arm.always]
        if pairs:
            return (own or pairs)[0]
        narrowest, *wider = sorted(beside, key=lambda other: other.sort_key)
        wide = [other for other in wider if not other.sixteen_bit] or wider
        return narrowest.always, wide[-1].always if wide else None

    def _on(self, arm: Arm, place: int) -> Callable[[Arm], bool]:
        """Whether another arm is the static one on the arm's low (0) or recovery (1) path."""
        wanted = self.formats(arm)[place]
        keys = ("faults.", *QUANTIZER) if place == 0 else QUANTIZER if arm.bits(wanted) != 16 else ()
        keys = *keys, f"precision.recipes.{wanted}."
        return lambda other: wanted is not None and other.always == wanted and same(arm, other, keys)

    def _bound(self, arm: Arm, fits: Callable[[Arm], bool]) -> Arm | None:
        """The static arm that fits, of the same model and optimizer.

        Gradient transforms and optimizers are arms of their own: plain AdamW stands for all of them, where there is one
        of the same rate if possible. Among equals an arm of one format throughout comes before a routed one (except
        for faults, which spare the recovery path of a routed arm alone), then one of the same low path (always high is
        the same run whatever that is), then the one with most seeds in common.
        """
        candidates = [
            other
            for other in self.arms
            if fits(other)
            and same(arm, other, _MODEL)
            and (same(arm, other, ("optim.",)) or (plain_adamw(other) and not plain_adamw(arm)))
        ]

        def rank(other: Arm) -> tuple[bool, bool, bool, bool, bool, bool, int]:
            faults = other.settings.get("faults.kind") not in (None, "none")
            same_rate = other.settings.get("optim.lr") == arm.settings.get("optim.lr")
            same_low = other.low_path == arm.low_path
            common = len(arm.outcomes.keys() & other.outcomes.keys())
            return plain_adamw(other), same_rate, not faults, other.routed == faults, other is arm, same_low, common

        return max(candidates, key=rank, default=None)

    def apart(self) -> dict[str, tuple[str, list[str]]]:
        """What keeps this comparison apart from its rivals: {what: (here, there)}."""
        kinds = [self.kind, *self.rivals]
        columns = zip(*map(_kind_texts, kinds), strict=True)
        named = zip(("data", "seq_len", "tokens per step", "steps", "base"), columns, strict=True)
        return {what: (mine, sorted(set(others) - {mine})) for what, (mine, *others) in named if set(others) - {mine}}

    def differing_settings(self) -> list[str]:
        """Keys in which rows differ although they are not what makes an arm."""
        return [key for key in varying(self.arms) if not key.startswith(_WHAT_AN_ARM_IS)]


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Runs in their comparisons: by experiment, the largest first, then by scale and size."""
    groups: dict[Kind, dict[tuple[str, str], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[_kind(run)][run.arm, run.hash].append(run)
    comparisons = [
        Comparison(kind, [arm for (name, _), group in arms.items() for arm in _arms(name, group)])
        for kind, arms in groups.items()
    ]
    siblings_of: dict[str, list[Comparison]] = defaultdict(list)
    for one in comparisons:
        siblings_of[one.kind.experiment].append(one)
    for siblings in siblings_of.values():
        _label(siblings)
        for one in siblings:
            one.rivals = [other.kind for other in siblings if other is not one and other.kind.scale == one.kind.scale]
            one.arms.sort(key=lambda arm: arm.sort_key)
    return sorted(comparisons, key=lambda one: (one.kind.experiment, -len(one.runs), _order(one.kind)))


def refuse_rivals(comparisons: Iterable[Comparison]) -> None:
    """Raises `UserError` where runs of one experiment and scale cannot be compared, naming what differs."""
    for one in comparisons:
        if apart := one.apart():
            differing = ", ".join(f"{what} ({here} and {', '.join(there)})" for what, (here, there) in apart.items())
            raise UserError(f"{one.name}: these runs cannot be compared, they differ in {differing}")


def short(fingerprint: str | None) -> str:
    """The first digits of a fingerprint."""
    return str(fingerprint or "unknown")[:8]


def _kind_texts(kind: Kind) -> list[str]:
    numbers = ["unknown" if one is None else f"{one:,}" for one in (kind.tokens_per_step, kind.steps)]
    return [short(kind.fingerprint), str(kind.seq_len), *numbers, str(kind.base)]


def _kind(run: Run) -> Kind:
    return Kind(
        run.experiment,
        run.scale,
        run.data.get("fingerprint"),
        run.settings.get("training.seq_len"),
        run.tokens_per_step,
        run.planned_steps,
        run.base,
    )


def _order(kind: Kind) -> tuple[str, int, str, int, str]:
    place = _SCALES.index(kind.scale) if kind.scale in _SCALES else len(_SCALES)
    return kind.experiment, place, kind.scale, kind.tokens or 0, f"{kind.fingerprint} {kind.base}"


def _arms(name: str, runs: list[Run]) -> list[Arm]:
    """One arm; where another commit repeats seeds to their end, as a run beside the reference arms does, one a commit:
    the one with most runs has the name, the others say which they are."""
    of_commit: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        of_commit[run.commit].append(run)
    done = [{run.seed for run in group if run.status == "done"} for group in of_commit.values()]
    if not any(one & other for one, other in combinations(done, 2)):
        return [_arm(name, runs)]
    first, *others = sorted(of_commit.items(), key=lambda found: (-len(found[1]), found[0]))
    return [_arm(name, first[1]), *(_arm(f"{name} at {commit}", group) for commit, group in others)]


def _arm(name: str, runs: list[Run]) -> Arm:
    """One run per seed: where a seed was run twice, the done one, else the longer one."""
    best: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: (run.status != "done", -run.last_step, str(run.folder))):
        best.setdefault(run.seed, run)
    chosen = [best[seed] for seed in sorted(best)]
    return Arm(name, chosen, duplicates=[run for run in runs if run not in chosen])


_MOST_WORDS = 4
"""Settings in a label; where more are needed the hash of the config stands there."""


def _label(comparisons: list[Comparison]) -> None:
    """Gives arms of one name the settings in which they differ; the same keys in every comparison."""
    keys: dict[str, list[str]] = defaultdict(list)
    for comparison in comparisons:
        for name in {arm.name for arm in comparison.arms}:
            for key in varying([arm for arm in comparison.arms if arm.name == name]):
                if key not in keys[name] and key != "base":  # the comparison's
                    keys[name].append(key)
    arms = [arm for comparison in comparisons for arm in comparison.arms]
    places = {id(arm): place for place, comparison in enumerate(comparisons) for arm in comparison.arms}
    for name in {arm.name for arm in arms}:
        mine, shown = [arm for arm in arms if arm.name == name], keys[name]
        if any(len(setting_texts(arm, shown)) > _MOST_WORDS for arm in mine):
            shown = independent(mine, shown)
        texts = [setting_texts(arm, shown) for arm in mine]
        if any(len(words) > _MOST_WORDS for words in texts):
            unusual = [setting_texts(arm, own) for arm, own in zip(mine, _unusual(mine, shown), strict=True)]
            where = [places[id(arm)] for arm in mine]
            texts = (
                unusual if len({(i, *words) for i, words in zip(where, unusual, strict=True)}) == len(mine) else texts
            )
        for arm, words in zip(mine, texts, strict=True):
            arm.label = " ".join([name, *(words if len(words) <= _MOST_WORDS else [arm.runs[0].hash])])


def _unusual(arms: list[Arm], keys: list[str]) -> list[list[str]]:
    """Of each arm the keys in which it is not as most arms are: cells that each leave one setting by a key or two."""
    values = {key: [repr(arm.settings.get(key)) for arm in arms] for key in keys}
    usual = {key: Counter(found).most_common(1)[0][0] for key, found in values.items()}
    return [[key for key in keys if values[key][place] != usual[key]] for place in range(len(arms))]


def _apart(arm: Arm, other: Arm) -> float:
    """Difference of the mean promotion shares relative to the larger one; inf where one is 0 or unknown."""
    if not arm.promoted or not other.promoted:
        return math.inf
    return abs(arm.promoted - other.promoted) / max(arm.promoted, other.promoted)


def _same_but_routing(arm: Arm, other: Arm) -> bool:
    apart = ("controller.", "records.", "precision.probe_tokens")
    return all(key.startswith(apart) for key in varying([arm, other]))
