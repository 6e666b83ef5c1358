"""Arms: the runs of one setting, one a seed, and the settings that tell arms apart."""

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
"""What a path does besides its format."""
_NAMES = ("arm", "precision.name", "controller.name")
_DIVERGED = re.compile(r"had a non-finite|the validation loss after step")
"""FAILED for these is a divergence; for a full disk, memory or a defect the run says nothing about its arm."""
Outcomes = Mapping[int, float]
"""Loss at the end by seed, inf for a run that diverged."""


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
        """Its runs with one of `Run.status`."""
        return [run for run in self.runs if run.status in statuses]

    @property
    def done(self) -> list[Run]:
        """Runs that reached their end."""
        return self.with_status("done")

    @property
    def first(self) -> Run:
        """The run shown where a figure has one an arm: the first done one, else the first."""
        return (self.done or self.runs)[0]

    @property
    def seeds(self) -> list[int]:
        """Of all its runs, in order."""
        return [run.seed for run in self.runs]

    @property
    def settings(self) -> dict[str, Any]:
        """Of its first run: the others differ in the seed alone."""
        return self.runs[0].settings

    @cached_property
    def outcomes(self) -> Outcomes:
        """Of the runs that ended by themselves: log perplexity (the last validation loss), inf where the run diverged.

        A run diverged that is FAILED, the machine's failures aside, or whose last validation loss is not finite.
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
        """Seeds."""
        return [seed for seed, loss in self.outcomes.items() if math.isinf(loss)]

    @property
    def signal(self) -> str:
        """Name of the risk signal; runs from before there was a choice have the paper's."""
        return str(self.settings.get("controller.signal", "gnmr_delta"))

    @property
    def ranked(self) -> bool:
        """Whether max_o is always filled."""
        return self.settings.get("controller.routing") == "ranked"

    @property
    def hold(self) -> int:
        """Steps for which a chosen set stays in force; runs from before there was a choice have 1."""
        return int(self.settings.get("controller.hold") or 1)

    @property
    def promoted(self) -> float | None:
        """Mean promotion share over the seeds that are done or diverged: what diverged had its budget too.

        Without the latter an arm that lost all seeds would meet no random arm and stand on no curve.
        """
        ended = [run for run in self.runs if run.status == "done" or run.seed in self.outcomes]
        found = stat(run.summary.get("promotion_frac") for run in ended)
        return None if found is None else found.mean

    @property
    def spend(self) -> float | None:
        """Mean share of the GEMMs' arithmetic on the recovery path; `promoted` where that was not recorded, and for
        compressed gradients, whose recovery is no GEMM."""
        found = None if self.compression else self.mean("spent_gemm_frac")
        return self.promoted if found is None else found

    @property
    def always(self) -> str | None:
        """The one format that every unit has throughout: a static arm's, or that of the signals that never choose;
        with pins there is no low one.

        `always_high` counts from 99 % promotion on, since its set acts one step late and max_o caps it; the done seeds
        decide where there are any, since in a run that diverged at once that step weighs more.
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
        """What is sent in the place of whole gradients, in words; None: they are sent whole."""
        get = self.settings.get
        if (name := get("compression.name")) in (None, "none"):
            return None
        more = [f"{get('compression.basis')} basis"] if get("compression.basis") == "random" else []
        more += ["no feedback"] if get("compression.feedback") is False else []
        return ", ".join([f"rank {get('compression.rank')} by {name}", *more])

    @property
    def low_path(self) -> str | None:
        """Its low-cost path: of compressed gradients what is sent, else a format or recipe."""
        return self.compression or self.settings.get("precision.low")

    @property
    def recovery_path(self) -> str | None:
        """Its recovery path: of compressed gradients that of whole ones in the same format; None: nothing is routed."""
        if self.settings.get("compression.name") == "greedylore":
            return self.settings.get("precision.low")
        return self.settings.get("precision.recovery")

    def bits(self, path: Any) -> int | None:
        """As the function `bits`, of the arm's own recipes too: those of the forward input."""
        own = f"precision.recipes.{path}."
        if any(key.startswith(own) for key in self.settings):
            return bits(self.settings.get(f"{own}fprop.input", "bf16").partition("/")[0])
        return bits(path)

    @property
    def routed(self) -> bool:
        """Whether the controller can switch units; a static arm is only monitored."""
        return self.recovery_path is not None

    @property
    def sixteen_bit(self) -> bool:
        """Whether its low path is 16 bits: a reference."""
        return self.bits(self.settings.get("precision.low")) == 16 and self.compression is None

    def stat(self, field: str) -> Stat | None:
        """Over the done seeds, of a field of the summary."""
        return stat(run.summary.get(field) for run in self.done)

    def mean(self, field: str) -> float | None:
        """Mean of a field of the summary over the done seeds; None where no run has it."""
        found = self.stat(field)
        return None if found is None else found.mean

    @property
    def sort_key(self) -> tuple[int, int, str]:
        """Table 1's order: by the low path's width, static before routed."""
        low = self.bits(self.settings.get("precision.low")) or 99
        return low, self.bits(self.recovery_path) or low, self.label or self.name


def bits(number_format: Any) -> int | None:
    """Width of a number format or a recipe by its name: int4, e2m1 and sim_e2m1 have 4 bits, bf16 has 16."""
    if number_format in RECIPES:
        number_format = RECIPES[number_format].get("fprop", {}).get("input", "bf16").partition("/")[0]
    if floating := re.fullmatch(r"e(\d+)m(\d+)", str(number_format)):
        return 1 + int(floating[1]) + int(floating[2])
    plain = re.search(r"(\d+)$", str(number_format))
    return int(plain[1]) if plain else None


def plain_adamw(arm: Arm) -> bool:
    """Whether the optimizer is AdamW that neither clips nor transforms the gradient."""
    get = arm.settings.get
    return get("optim.name", "adamw") == "adamw" and not get("optim.transform.name") and not get("optim.clip_norm")


def telling(arms: list[Arm], keys: Iterable[str], above: str = "", alone: tuple[str, ...] = ()) -> list[str]:
    """The keys without those that follow from the ones before them in their group: a stress's rate from its kind.

    `above` belongs to every group, and is the whole group of those `alone`.
    """

    def levels(keys: list[str]) -> int:
        return len({repr([arm.settings.get(key) for key in keys]) for arm in arms})

    kept: list[str] = []
    for key in keys:
        groups = (above,) if key in alone else (key.split(".")[0], above)
        group = [other for other in kept if other.split(".")[0] in groups]
        if levels([*group, key]) > levels(group):
            kept.append(key)
    return kept


def tell(arm: Arm, keys: Iterable[str]) -> list[str]:
    """The arm's values of these settings in few words: a signal is its bare name, what is not set is unsaid."""
    told = []
    for key in keys:
        value = arm.settings.get(key)
        if key in ("controller.signal", "controller.routing"):
            told.append(str(value))
        elif value is not None or key in ("controller.alpha", "controller.beta"):
            told.append(f"{key.rsplit('.', 1)[-1]}={'off' if value is None else value}")
    return told


def varying(arms: Iterable[Arm]) -> list[str]:
    """Keys in which the arms' settings differ, names aside."""
    settings = [arm.settings for arm in arms]
    keys = dict.fromkeys(key for one in settings for key in one if key not in _NAMES)
    return [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]


def same(arm: Arm, other: Arm, keys: tuple[str, ...]) -> bool:
    """Whether two arms agree in all settings whose keys begin so."""
    mine, theirs = arm.settings, other.settings
    return all(mine.get(key) == theirs.get(key) for key in mine.keys() | theirs.keys() if key.startswith(keys))
