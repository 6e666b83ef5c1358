"""Comparisons: the arms that saw the same data for the same steps, each with its tests.

Every arm is tested against the arm that never recovers. The arms between two bounds (a static low arm and its static
recovery arm) are one family with one model (`gnmr.lab.report.statistics`), behind the positive control; any other arm
gets a paired t-test.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from gnmr.errors import UserError
from gnmr.lab.config import hash_of
from gnmr.lab.report.arms import Arm, label_arms, same, short_names, varying
from gnmr.lab.report.recorded_run import Run
from gnmr.lab.report.statistics import Family, Losses, Result, Share, adjusted, gap_closed, judge, paired

_WHAT_AN_ARM_IS = ("precision.", "controller.", "compression.", "records.", "arm")
_OF_CASTS = ("precision.exclude", "precision.backend", "precision.weights")
_QUANTIZER = ("precision.site", "precision.rounding", "precision.targets", *_OF_CASTS)
"""Keys of what a path does besides its format, and of the operators that have it."""
_MODEL = ("model.", "training.dtype", "training.eval_sequences")
_ROUTING = ("controller.", "records.")
SAME_BUDGET = 0.1
"""By how much of the larger one two mean promotion shares may differ and still count as one budget.

Arms that were set to one share end within a few percent of it (a set acts one step late, a lock lasts), while the next
budget of a sweep is a factor away. Quality rises steeply with the budget, so a wider tolerance would test the budget.
"""


class Kind(NamedTuple):
    """What runs must share to stand in one table; None where it is unknown."""

    experiment: str
    scale: str
    fingerprint: str | None
    seq_len: int | None
    tokens_per_step: int | None
    steps: int | None
    base: str | None  # what forks were made of: its name and the beginning of its checksum

    def texts(self) -> dict[str, str]:
        """Return, by name, what keeps comparisons of one experiment and scale apart."""
        return {
            "data": short(self.fingerprint),
            "seq_len": str(self.seq_len),
            "tokens per step": "unknown" if self.tokens_per_step is None else f"{self.tokens_per_step:,}",
            "steps": "unknown" if self.steps is None else f"{self.steps:,}",
            "base": str(self.base),
        }


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
    def replicate(self) -> str:
        """What arms have in common: forks of a base differ in the order of the data."""
        return "order" if self.kind.base else "seed"

    @cached_property
    def names(self) -> dict[str, str]:
        """What tells each arm from the others, by label."""
        return short_names(self.arms)

    @property
    def runs(self) -> list[Run]:
        """Of all arms."""
        return [run for arm in self.arms for run in arm.runs]

    @property
    def seeds(self) -> list[int]:
        """Of all arms, ascending, each once."""
        return sorted({run.seed for run in self.runs})

    @property
    def spend_of(self) -> str:
        """What `spend` is a share of: the GEMM FLOPs if every finished routed arm recorded them, else the unit-steps.

        With compressed gradients recovery is not a GEMM.
        """
        routed = [arm for arm in self.arms if arm.routed and arm.done]
        recorded = [arm.compression is None and arm.mean("spent_gemm_frac") is not None for arm in routed]
        return "GEMM FLOPs" if recorded and all(recorded) else "unit-steps"

    def spend(self, arm: Arm) -> float | None:
        """The mean share of `spend_of` that the arm put on the recovery path; None for a static arm."""
        if not arm.routed:
            return None
        return arm.mean("spent_gemm_frac") if self.spend_of == "GEMM FLOPs" else arm.promoted

    @cached_property
    def by_label(self) -> dict[str, Arm]:
        """The arms by label."""
        return {arm.label: arm for arm in self.arms}

    @property
    def values(self) -> dict[str, Losses]:
        """The losses of the arms by label."""
        return {arm.label: arm.losses for arm in self.arms}

    @cached_property
    def families(self) -> list[Family]:
        """The arms between each pair of bounds; every arm of a family is tested against its low bound."""
        arms_of_bounds: dict[tuple[str, str], list[str]] = {}
        for arm in self.arms:
            low, high = self.low(arm), self.recovery(arm)
            if low is not None and high is not None and low is not high and arm.losses:
                arms_of_bounds.setdefault((low.label, high.label), []).append(arm.label)
        families = []
        for (low_label, high_label), labels in arms_of_bounds.items():
            between = [label for label in labels if label not in (low_label, high_label)]
            values = {label: self.values[label] for label in (low_label, *between, high_label)}
            if values[low_label] and values[high_label]:
                contrasts = [(label, low_label) for label in (*between, high_label)]
                families.append(judge(values, contrasts, low=low_label, high=high_label))
        return families

    @cached_property
    def tests(self) -> dict[str, Result]:
        """Each arm against the arm that never recovers, by label; arms without such an arm have none."""
        tests: dict[str, Result] = {}
        for family in self.families:
            for test in family.results:
                share, value = None, gap_closed(*(self.values[arm] for arm in (family.low, test.arm, family.high)))
                if test.arm != family.high and value is not None:
                    share = Share(value, test.closed.interval if test.closed else None)
                tests.setdefault(test.arm, replace(test, closed=share))
        lows = {arm.label: low.label for arm in self.arms if (low := self.low(arm)) is not None and low is not arm}
        return self._with_paired_tests(tests, lows)

    @cached_property
    def random_tests(self) -> dict[str, Result]:
        """Each arm against the random arm with the same budget, by label; in its family if there is one."""
        tests: dict[str, Result] = {}
        randoms = {arm.label: random.label for arm in self.arms if (random := self.random(arm)) is not None}
        for family in self.families:
            if family.tested:
                pairs = [(arm, randoms[arm]) for arm in family.between if randoms.get(arm) in family.values]
                tests |= {test.arm: test for test in family.test(pairs)}
        return self._with_paired_tests(tests, randoms)

    def _with_paired_tests(self, tests: dict[str, Result], controls: dict[str, str]) -> dict[str, Result]:
        """Return the results with paired t-tests of the other arms that have a control."""
        alone = [paired(self.values, arm, control) for arm, control in controls.items() if arm not in tests]
        return tests | {test.arm: test for test in adjusted(alone)}

    def reference(self, arm: Arm) -> Arm | None:
        """The static 16-bit arm to compare with, else the static recovery arm if its path has 16 bits."""
        sixteen_bit = self._nearest(arm, [other for other in self.arms if other.sixteen_bit])
        if sixteen_bit is not None:
            return sixteen_bit
        recovery = self.recovery(arm)
        return recovery if recovery is not None and recovery.bits(recovery.always) == 16 else None

    def low(self, arm: Arm) -> Arm | None:
        """The static arm on the arm's low path, under the same injected faults."""
        return self._nearest(arm, self._static(arm, 0))

    def recovery(self, arm: Arm) -> Arm | None:
        """The static arm on the arm's recovery path; without injected faults where there is one."""
        return self._nearest(arm, self._static(arm, 1))

    def random(self, arm: Arm) -> Arm | None:
        """Return the `nearest_random` arm if both have the same budget.

        The budget is controller.budget or, without one, the mean promotion to within `SAME_BUDGET`.
        """
        nearest = self.nearest_random(arm)
        if nearest is None or _apart(arm, nearest) <= SAME_BUDGET:
            return nearest
        budget = arm.get("controller.budget")
        return nearest if budget is not None and budget == nearest.get("controller.budget") else None

    def nearest_random(self, arm: Arm) -> Arm | None:
        """The routed arm whose signal is `random` and whose mean promotion is nearest.

        It differs from the arm in nothing but its controller, and holds a set for as many steps. None for static arms
        and random ones, and where one of the two promotes nothing.
        """
        if arm.always or arm.signal == "random":
            return None

        def alike(other: Arm) -> bool:
            same_hold = (arm.get("controller.hold") or 1) == (other.get("controller.hold") or 1)
            return same_hold and all(key.startswith(_ROUTING) for key in varying([arm, other]))

        candidates = [other for other in self.arms if other.signal == "random" and other.routed and alike(other)]
        nearest = min(candidates, key=lambda other: _apart(arm, other), default=None)
        return nearest if nearest and _apart(arm, nearest) < math.inf else None

    def formats(self, arm: Arm) -> tuple[str | None, str | None]:
        """Formats of the low and the recovery path that the arm is measured between.

        A static arm is measured between those of the routed arms beside it, if any; else the narrowest static format
        is low and the widest one below 16 bits, or the widest, is recovery.
        """
        if arm.routed:
            return arm.low_path, arm.recovery_path
        # Arms of the same model; a routed one names both paths, else the widths decide.
        beside = [other for other in self.arms if same(arm, other, _MODEL)]
        pairs = [self.formats(other) for other in beside if other.routed]
        if pairs:
            return next((pair for pair in pairs if pair[0] == arm.always), pairs[0])
        narrowest, *wider = sorted(beside, key=lambda other: other.sort_key)
        wide = [other for other in wider if not other.sixteen_bit] or wider
        return narrowest.always, wide[-1].always if wide else None

    def _static(self, arm: Arm, place: int) -> list[Arm]:
        """The static arms on the arm's low (0) or recovery (1) path."""
        if (wanted := self.formats(arm)[place]) is None:
            return []
        # Settings in which they must agree: those that change what the path computes.
        keys = {f"precision.recipes.{wanted}."} | ({*_QUANTIZER} if place == 0 or arm.bits(wanted) != 16 else set())
        if place == 0:
            keys |= {"faults."} | ({"compression."} if arm.compression else set())
        if arm.sixteen_bit:
            keys -= {*_OF_CASTS}  # without casts they have no effect
        return [other for other in self.arms if other.always == wanted and same(arm, other, tuple(keys))]

    def _nearest(self, arm: Arm, static_arms: Iterable[Arm]) -> Arm | None:
        """The one of the static arms to compare with, of the same model and optimizer.

        Gradient transforms and optimizers are separate arms: plain AdamW stands for all of them, where there is one
        of the same rate if possible. Among equals an arm of one format throughout comes before a routed one (except
        for faults, which spare the recovery path of a routed arm alone), then one of the same low path (always high is
        the same run whatever that is), then the one with most seeds in common.
        """

        # The better candidate has the larger tuple; `True` is above `False`.
        def comparable(other: Arm) -> bool:
            optimizer = same(arm, other, ("optim.",)) or (other.plain_adamw and not arm.plain_adamw)
            return optimizer and same(arm, other, _MODEL)

        def rank(other: Arm) -> tuple[object, ...]:
            faults = other.get("faults.kind") not in (None, "none")
            same_rate, same_low = other.get("optim.lr") == arm.get("optim.lr"), other.low_path == arm.low_path
            common = len(arm.losses.keys() & other.losses.keys())
            return other.plain_adamw, same_rate, not faults, other.routed == faults, other is arm, same_low, common

        return max(filter(comparable, static_arms), key=rank, default=None)

    def apart(self) -> dict[str, tuple[str, list[str]]]:
        """What keeps this comparison apart from its rivals: {name: (here, there)}."""
        rivals = [kind.texts() for kind in self.rivals]
        differing = {name: {rival[name] for rival in rivals} - {here} for name, here in self.kind.texts().items()}
        return {name: (self.kind.texts()[name], sorted(there)) for name, there in differing.items() if there}

    def differing_settings(self) -> list[str]:
        """Keys in which rows differ although they are not what makes an arm."""
        return [key for key in varying(self.arms) if not key.startswith(_WHAT_AN_ARM_IS)]


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Group runs into comparisons.

    Returns:
        Those of most runs first, then by experiment and size. The arms have their labels.
    """
    groups: dict[Kind, dict[tuple[str, str], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        sizes = run.settings.get("training.seq_len"), run.tokens_per_step, run.planned_steps
        kind = Kind(run.experiment, run.scale, run.data.get("fingerprint"), *sizes, run.base)
        settings = {key: value for key, value in run.settings.items() if value is not None}  # as `varying` compares
        groups[kind][run.arm, hash_of(settings)].append(run)
    of_experiment: dict[str, list[Comparison]] = defaultdict(list)
    for kind, runs_by_arm in groups.items():
        arms = [_arm(name, group) for (name, _), group in runs_by_arm.items()]
        of_experiment[kind.experiment].append(Comparison(kind, arms))
    for siblings in of_experiment.values():
        label_arms([comparison.arms for comparison in siblings])
        for comparison in siblings:
            kind = comparison.kind
            comparison.rivals = [c.kind for c in siblings if c is not comparison and c.kind.scale == kind.scale]
            comparison.arms.sort(key=lambda arm: arm.sort_key)
    return sorted((comparison for siblings in of_experiment.values() for comparison in siblings), key=_order)


def refuse_rivals(comparisons: Iterable[Comparison]) -> None:
    """Raise UserError if runs of one experiment and scale cannot be compared, and name what differs."""
    for comparison in comparisons:
        if apart := comparison.apart():
            differing = ", ".join(f"{name} ({here} and {', '.join(there)})" for name, (here, there) in apart.items())
            raise UserError(f"{comparison.name}: these runs cannot be compared, they differ in {differing}")


def short(fingerprint: str | None) -> str:
    """The first digits of a fingerprint."""
    return str(fingerprint or "unknown")[:8]


def _order(comparison: Comparison) -> tuple[object, ...]:
    kind = comparison.kind
    size = (kind.tokens_per_step or 0) * (kind.steps or 0)
    return -len(comparison.runs), kind.experiment, size, kind.scale, f"{kind.fingerprint} {kind.base}"


def _arm(name: str, runs: list[Run]) -> Arm:
    """One run per seed: where a seed was run twice, the done one, else the longer one."""
    best: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: (run.status != "done", -run.last_step, str(run.folder))):
        best.setdefault(run.seed, run)
    chosen = [best[seed] for seed in sorted(best)]
    return Arm(name, chosen, duplicates=[run for run in runs if run not in chosen])


def _apart(arm: Arm, other: Arm) -> float:
    """Difference of the mean promotion shares relative to the larger one; inf where one is 0 or unknown."""
    if not arm.promoted or not other.promoted:
        return math.inf
    return abs(arm.promoted - other.promoted) / max(arm.promoted, other.promoted)
