"""Runs -> arms (the seeds of one setting) -> comparisons (the arms that saw the same data for the same steps)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gnmr.report.runs import Run

_WHAT_AN_ARM_IS = ("paths.", "controller.", "records.", "arm")
_EQUAL_IN_A_PAIR = ("model.", "optim.", "training.dtype", "training.eval_blocks")
_SCALES = ("cpu", "60m", "130m", "350m", "1.3b")


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation over n seeds."""

    n: int
    mean: float
    sd: float | None
    """None with fewer than two seeds or a number that is not finite."""


def stat(values: Iterable[float | None]) -> Stat | None:
    """None where there is nothing to average. An inf or nan among the values is not dropped: it is the mean."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if len(known) == 0:
        return None
    spread = len(known) > 1 and np.isfinite(known).all()
    return Stat(len(known), float(known.mean()), float(known.std(ddof=1)) if spread else None)


@dataclass
class Arm:
    """The runs of one setting, one per seed, in order of seed."""

    name: str
    runs: list[Run]
    duplicates: list[Run] = field(default_factory=list)
    """Runs that repeat a seed; they count nowhere."""
    label: str = ""
    """The name, and where two arms of an experiment share it, the settings that tell them apart."""

    def with_status(self, *statuses: str) -> list[Run]:
        return [run for run in self.runs if run.status in statuses]

    @property
    def done(self) -> list[Run]:
        return self.with_status("done")

    @property
    def first(self) -> Run:
        """The run that stands for the arm where one is shown: the first done one, if any."""
        return (self.done or self.runs)[0]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    @property
    def low_bits(self) -> int | None:
        return bits(self.settings.get("paths.low"))

    @property
    def recovery_bits(self) -> int | None:
        return bits(self.settings.get("paths.recovery"))

    @property
    def routed(self) -> bool:
        """Whether the controller can switch units; a static arm is only monitored."""
        return self.settings.get("paths.recovery") is not None

    @property
    def sixteen_bit(self) -> bool:
        return self.low_bits == 16

    def stat(self, field: str) -> Stat | None:
        """Over the done seeds, of a field of the summary."""
        return stat(run.summary.get(field) for run in self.done)

    @property
    def sort_key(self) -> tuple[int, int, str]:
        """Table 1's order: by the low path's width, static before routed."""
        low = self.low_bits or 99
        return low, self.recovery_bits or low, self.label or self.name


@dataclass(frozen=True)
class Kind:
    """What runs must share to stand in one table."""

    experiment: str
    scale: str
    fingerprint: str | None
    seq_len: int | None
    tokens_per_step: int | None
    steps: int | None

    @property
    def tokens(self) -> int | None:
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
        return f"{self.kind.experiment}, scale {self.kind.scale}"

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    def reference(self, arm: Arm) -> Arm | None:
        """The 16-bit arm of the same model and optimizer with the most seeds in common; None without one."""
        candidates = [
            other for other in self.arms if other.sixteen_bit and _pair_settings(other) == _pair_settings(arm)
        ]
        if arm in candidates:
            return arm
        return max(candidates, key=lambda other: len(paired_seeds(arm, other)), default=None)

    def differing_settings(self) -> list[str]:
        """Keys in which rows differ although they are not what makes an arm."""
        return [key for key in _varying(self.arms) if not key.startswith(_WHAT_AN_ARM_IS)]


def bits(number_format: Any) -> int | None:
    """Width of a number format by its name: int4 and e2m1 have 4 bits, bf16 has 16."""
    if floating := re.fullmatch(r"e(\d+)m(\d+)", str(number_format)):
        return 1 + int(floating[1]) + int(floating[2])
    plain = re.search(r"(\d+)$", str(number_format))
    return int(plain[1]) if plain else None


def paired_seeds(arm: Arm, other: Arm) -> list[int]:
    """Seeds done in both."""
    return sorted({run.seed for run in arm.done} & {run.seed for run in other.done})


def paired_difference(arm: Arm, reference: Arm) -> Stat | None:
    """Per-seed difference of the final validation perplexity to the reference's, in percent of the reference's."""
    mine, theirs = ({run.seed: run.summary.get("final_val_ppl") for run in side.done} for side in (arm, reference))
    pairs = [(mine[seed], theirs[seed]) for seed in paired_seeds(arm, reference)]
    return stat(100 * (a / b - 1) for a, b in pairs if a is not None and b)


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Runs in their comparisons, in order of experiment, scale and size."""
    groups: dict[Kind, dict[tuple[str, str], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[_kind(run)][run.arm, run.hash].append(run)
    comparisons = [
        Comparison(kind, [_arm(name, group) for (name, _), group in arms.items()]) for kind, arms in groups.items()
    ]
    for comparison in comparisons:
        kind = comparison.kind
        others = [other.kind for other in comparisons if other is not comparison]
        comparison.rivals = [o for o in others if (o.experiment, o.scale) == (kind.experiment, kind.scale)]
    for experiment in {comparison.kind.experiment for comparison in comparisons}:
        _label([comparison for comparison in comparisons if comparison.kind.experiment == experiment])
    for comparison in comparisons:
        comparison.arms.sort(key=lambda arm: arm.sort_key)
    return sorted(comparisons, key=lambda comparison: _order(comparison.kind))


def _kind(run: Run) -> Kind:
    return Kind(
        run.experiment,
        run.scale,
        run.data.get("fingerprint"),
        run.settings.get("training.seq_len"),
        run.tokens_per_step,
        run.planned_steps,
    )


def _order(kind: Kind) -> tuple[str, int, str, int, str]:
    place = _SCALES.index(kind.scale) if kind.scale in _SCALES else len(_SCALES)
    return kind.experiment, place, kind.scale, kind.tokens or 0, kind.fingerprint or ""


def _arm(name: str, runs: list[Run]) -> Arm:
    """One run per seed: where a seed was run twice, the done one, else the longer one."""
    best: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: (run.status != "done", -run.last_step, str(run.folder))):
        best.setdefault(run.seed, run)
    chosen = [best[seed] for seed in sorted(best)]
    return Arm(name, chosen, duplicates=[run for run in runs if run not in chosen])


def _label(comparisons: list[Comparison]) -> None:
    """Gives arms of one name the settings in which they differ; the same keys in every comparison."""
    keys: dict[str, list[str]] = defaultdict(list)
    for comparison in comparisons:
        for name in {arm.name for arm in comparison.arms}:
            for key in _varying([arm for arm in comparison.arms if arm.name == name]):
                if key not in keys[name]:
                    keys[name].append(key)
    for comparison in comparisons:
        for arm in comparison.arms:
            told = [f"{key.rsplit('.', 1)[-1]}={arm.settings.get(key)}" for key in keys[arm.name]]
            if len(told) > 4:
                told = [arm.runs[0].hash]
            arm.label = " ".join([arm.name, *told])


def _varying(arms: list[Arm]) -> list[str]:
    keys = dict.fromkeys(key for arm in arms for key in arm.settings)
    return [key for key in keys if len({repr(arm.settings.get(key)) for arm in arms}) > 1]


def _pair_settings(arm: Arm) -> dict[str, Any]:
    return {key: value for key, value in arm.settings.items() if key.startswith(_EQUAL_IN_A_PAIR)}
