"""Arms: the runs of one setting, one for each seed, and the settings in which arms differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gnmr.lab.report.runs import Run
from gnmr.lab.report.statistics import Stat, stat
from gnmr.names import RECIPES

QUANTIZER = ("precision.site", "precision.rounding", "precision.targets")
"""Keys of what a path does besides its format."""
_NAMES = ("arm", "precision.name", "controller.name")
_DIVERGED = re.compile(r"had a non-finite|the validation loss after step")
"""Reasons of failure that are a divergence; a full disk or a defect says nothing about the arm."""
Outcomes = Mapping[int, float]
"""Loss at the end by seed, inf for a run that diverged."""


@dataclass
class Arm:
    """The runs of one setting, one per seed, in order of seed."""

    name: str
    runs: list[Run]
    duplicates: list[Run] = field(default_factory=list)
    """Runs that repeat a seed; they are not counted."""
    label: str = ""
    """The name, with the settings that differ if two arms of an experiment share it."""

    def with_status(self, *statuses: str) -> list[Run]:
        """Return the runs with one of these `Run.status`."""
        return [run for run in self.runs if run.status in statuses]

    @property
    def done(self) -> list[Run]:
        """Runs that reached their end."""
        return self.with_status("done")

    @property
    def first(self) -> Run:
        """The run that stands for the arm in a figure: the first done one, else the first."""
        return (self.done or self.runs)[0]

    @property
    def seeds(self) -> list[int]:
        """The seeds of all its runs, in order."""
        return [run.seed for run in self.runs]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its first run; the others differ in nothing but the seed."""
        return self.runs[0].settings

    @cached_property
    def outcomes(self) -> Outcomes:
        """The last validation loss of the runs that ended by themselves, inf for those that diverged.

        A run diverged if it failed for a reason of `_DIVERGED`, or if its last validation loss is not finite.
        """
        found = {}
        for run in self.with_status("done", "failed"):
            loss = run.summary.get("final_val_loss")
            if run.status == "failed":
                if _DIVERGED.search(run.reason or ""):
                    found[run.seed] = math.inf
            elif loss is not None:
                found[run.seed] = float(loss) if math.isfinite(loss) else math.inf
        return found

    @property
    def diverged(self) -> list[int]:
        """The seeds of its diverged runs."""
        return [seed for seed, loss in self.outcomes.items() if math.isinf(loss)]

    @property
    def signal(self) -> str:
        """Name of the risk signal."""
        return str(self.settings.get("controller.signal", "gnmr_delta"))

    @property
    def ranked(self) -> bool:
        """True if max_o is always filled."""
        return self.settings.get("controller.routing") == "ranked"

    @property
    def hold(self) -> int:
        """Steps for which a chosen set stays in force."""
        return int(self.settings.get("controller.hold") or 1)

    @property
    def promoted(self) -> float | None:
        """Mean share of promoted unit-steps over the seeds that are done or diverged.

        Diverged seeds count because otherwise an arm that lost all its seeds would have no random arm beside it.
        """
        ended = [run for run in self.runs if run.status == "done" or run.seed in self.outcomes]
        found = stat(run.summary.get("promotion_frac") for run in ended)
        return None if found is None else found.mean

    @property
    def spend(self) -> float | None:
        """Mean share of the GEMM FLOPs on the recovery path; `promoted` if that was not recorded, and for compressed
        gradients, whose recovery is no GEMM."""
        found = None if self.compression else self.mean("spent_gemm_frac")
        return self.promoted if found is None else found

    @property
    def always(self) -> str | None:
        """The one format that every unit has throughout, in static arms and under `always_low` and `always_high`.

        With pins there is no such low format. `always_high` counts from 99% promotion on, since its set acts one step
        late; the done seeds decide if there are any, since that step weighs more in a run that diverged early.
        """
        if not self.routed or self.signal == "always_low":
            pinned = any(key.startswith("precision.pins.") for key in self.settings)
            return None if pinned else self.low_path
        in_16_bits = self.settings.get("controller.warmup_path") == "16bit"  # a warm-up on no path of its own
        promoted = self.mean("promotion_frac") or self.promoted or 0
        if self.signal == "always_high" and promoted > 0.99 and not in_16_bits:
            return self.recovery_path
        return None

    @property
    def compression(self) -> str | None:
        """What is sent in place of whole gradients, as text; None if they are sent whole."""
        get = self.settings.get
        if (name := get("compression.name")) in (None, "none"):
            return None
        return f"rank {get('compression.rank')} by {name}"

    @property
    def low_path(self) -> str | None:
        """The low path: a format or recipe; for compressed gradients what is sent."""
        return self.compression or self.settings.get("precision.low")

    @property
    def recovery_path(self) -> str | None:
        """The recovery path; None if nothing is routed. Compressed gradients recover to whole ones of one format."""
        if self.settings.get("compression.name") == "greedylore":
            return self.settings.get("precision.low")
        return self.settings.get("precision.recovery")

    def bits(self, path: Any) -> int | None:
        """Return the width of a format, or of a recipe's forward input: int4, e2m1 and sim_e2m1 have 4 bits."""
        own = f"precision.recipes.{path}."
        if any(key.startswith(own) for key in self.settings):
            path = self.settings.get(f"{own}fprop.input", "bf16").partition("/")[0]
        elif path in RECIPES:
            path = RECIPES[path].get("fprop", {}).get("input", "bf16").partition("/")[0]
        if floating := re.fullmatch(r"e(\d+)m(\d+)", str(path)):
            return 1 + int(floating[1]) + int(floating[2])
        plain = re.search(r"(\d+)$", str(path))
        return int(plain[1]) if plain else None

    @property
    def routed(self) -> bool:
        """True if the controller can switch units; a static arm is only monitored."""
        return self.recovery_path is not None

    @property
    def sixteen_bit(self) -> bool:
        """True for a reference: its low path has 16 bits."""
        return self.bits(self.settings.get("precision.low")) == 16 and self.compression is None

    def stat(self, field: str) -> Stat | None:
        """Return mean and spread of a field of the summary over the done seeds."""
        return stat(run.summary.get(field) for run in self.done)

    def mean(self, field: str) -> float | None:
        """Return the mean of a field of the summary over the done seeds; None if no run has it."""
        found = self.stat(field)
        return None if found is None else found.mean

    @property
    def sort_key(self) -> tuple[int, int, str]:
        """The order of table 1: by the width of the low path, static before routed."""
        low = self.bits(self.settings.get("precision.low")) or 99
        return low, self.bits(self.recovery_path) or low, self.label or self.name


def plain_adamw(arm: Arm) -> bool:
    """Return True if the optimizer is AdamW without gradient clipping or transform."""
    get = arm.settings.get
    return get("optim.name", "adamw") == "adamw" and not get("optim.transform.name") and not get("optim.clip_norm")


def independent(arms: list[Arm], keys: Iterable[str]) -> list[str]:
    """Return the keys without those that follow from earlier keys of their group, as a fault's rate from its kind."""

    def levels(keys: list[str]) -> int:
        return len({repr([arm.settings.get(key) for key in keys]) for arm in arms})

    kept: list[str] = []
    for key in keys:
        group = [other for other in kept if other.split(".")[0] == key.split(".")[0]]
        if levels([*group, key]) > levels(group):
            kept.append(key)
    return kept


def setting_texts(arm: Arm, keys: Iterable[str]) -> list[str]:
    """Return the arm's values of these settings as short texts; settings that are not set are left out."""
    texts = []
    for key in keys:
        value = arm.settings.get(key)
        if key in ("controller.signal", "controller.routing"):
            texts.append(str(value))
        elif value is not None or key in ("controller.alpha", "controller.beta"):
            texts.append(f"{key.rsplit('.', 1)[-1]}={'off' if value is None else value}")
    return texts


def varying(arms: Iterable[Arm]) -> list[str]:
    """Return the keys in which the arms' settings differ, names aside."""
    settings = [arm.settings for arm in arms]
    keys = dict.fromkeys(key for one in settings for key in one if key not in _NAMES)
    return [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]


def same(arm: Arm, other: Arm, keys: tuple[str, ...]) -> bool:
    """Return True if two arms agree in all settings whose keys begin with one of `keys`."""
    mine, theirs = arm.settings, other.settings
    return all(mine.get(key) == theirs.get(key) for key in mine.keys() | theirs.keys() if key.startswith(keys))
