"""Arms: the runs of one setting, one for each seed; the settings in which arms differ, and their names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

from gnmr.lab.report.recorded_run import Run
from gnmr.lab.report.statistics import Losses, Stat, stat
from gnmr.names import RECIPES

_NAMES = ("arm", "precision.name", "controller.name")
_DIVERGED = re.compile(r"had a non-finite|the validation loss after step")
"""Reasons of failure that are a divergence; a full disk or a defect says nothing about the arm."""


@dataclass
class Arm:
    """The runs of one setting, one per seed, in order of seed."""

    name: str
    runs: list[Run]
    duplicates: list[Run] = field(default_factory=list)  # runs that repeat a seed; they are not counted
    label: str = ""  # the name, with the settings that differ if two arms of an experiment share it (`label_arms`)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting; the runs differ in nothing but the seed."""
        return self.settings.get(key, default)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its first run."""
        return self.runs[0].settings

    @property
    def done(self) -> list[Run]:
        """Runs that reached their end."""
        return [run for run in self.runs if run.status == "done"]

    @property
    def first(self) -> Run:
        """The run that stands for the arm in a figure: the first done one, else the first."""
        return (self.done or self.runs)[0]

    @property
    def seeds(self) -> list[int]:
        """The seeds of all its runs, in order."""
        return [run.seed for run in self.runs]

    @cached_property
    def losses(self) -> Losses:
        """The final loss by seed of the runs that ended by themselves, inf for those that diverged.

        A run diverged if it failed for a reason of `_DIVERGED`, or if its final loss is not finite.
        """
        losses = {}
        for run in self.runs:
            loss = run.final("val_loss") if run.status == "done" else None
            if run.status == "failed" and _DIVERGED.search(run.reason or ""):
                loss = math.inf
            if loss is not None:
                losses[run.seed] = float(loss) if math.isfinite(loss) else math.inf
        return losses

    @property
    def signal(self) -> str:
        """Name of the risk signal."""
        return str(self.get("controller.signal", "gnmr_delta"))

    @property
    def ranked(self) -> bool:
        """True if max_o is always filled."""
        return self.get("controller.routing") == "ranked"

    @property
    def promoted(self) -> float | None:
        """Mean share of promoted unit-steps over the seeds that are done or diverged.

        Diverged seeds count because otherwise an arm that lost all its seeds would have no random arm beside it.
        """
        ended = [run for run in self.runs if run.status == "done" or run.seed in self.losses]
        shares = stat(run.summary.get("promotion_frac") for run in ended)
        return None if shares is None else shares.mean

    @property
    def always(self) -> str | None:
        """The one format that every unit has throughout, in static arms and under `always_low` and `always_high`.

        Pins have no such low format. `always_high` counts from 99% promotion on, since its set acts one step
        late; the done seeds decide if there are any, since that step weighs more in a run that diverged early.
        """
        if not self.routed or self.signal == "always_low":
            return None if any(key.startswith("precision.pins.") for key in self.settings) else self.low_path
        in_16_bits = self.get("controller.warmup_path") == "16bit"  # a warm-up on no path of its own
        promoted = self.mean("promotion_frac") or self.promoted or 0
        return self.recovery_path if self.signal == "always_high" and promoted > 0.99 and not in_16_bits else None

    @property
    def compression(self) -> str | None:
        """What is sent in place of whole gradients, as text; None if they are sent whole."""
        if (name := self.get("compression.name")) in (None, "none"):
            return None
        return f"rank {self.get('compression.rank')} by {name}"

    @property
    def low_path(self) -> str | None:
        """The low path: a format or recipe; for compressed gradients the kind of message."""
        return self.compression or self.get("precision.low")

    @property
    def recovery_path(self) -> str | None:
        """The recovery path; None if nothing is routed. Compressed gradients recover to whole ones of one format."""
        return self.get("precision.low" if self.get("compression.name") == "greedylore" else "precision.recovery")

    def bits(self, path: Any) -> int | None:
        """Return the width of a format, or of a recipe's forward input: int4, e2m1 and sim_e2m1 have 4 bits."""
        recipe_key = f"precision.recipes.{path}."  # of a recipe that the config defines
        if any(key.startswith(recipe_key) for key in self.settings):
            path = self.get(f"{recipe_key}fprop.input", "bf16").partition("/")[0]
        elif path in RECIPES:
            path = RECIPES[path].get("fprop", {}).get("input", "bf16").partition("/")[0]
        # A sign bit, exponent and mantissa; else the number at the end of the name.
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
        return self.bits(self.get("precision.low")) == 16 and self.compression is None

    @property
    def plain_adamw(self) -> bool:
        """True if the optimizer is AdamW without gradient clipping or transform."""
        changed = self.get("optim.transform.name") or self.get("optim.clip_norm")
        return self.get("optim.name", "adamw") == "adamw" and not changed

    def final(self, field: str) -> Stat | None:
        """Return mean and spread of `Run.final` over the done seeds."""
        return stat(run.final(field) for run in self.done)

    def mean(self, field: str) -> float | None:
        """Return the mean of a field of the summary over the done seeds; None if no run has it."""
        values = stat(run.summary.get(field) for run in self.done)
        return None if values is None else values.mean

    @property
    def sort_key(self) -> tuple[int, int, str]:
        """The order of table 1: by the width of the low path, static before routed."""
        low = self.bits(self.get("precision.low")) or 99
        return low, self.bits(self.recovery_path) or low, self.label or self.name


def varying(arms: Iterable[Arm]) -> list[str]:
    """Return the keys in which the arms' settings differ, names aside."""
    settings_of_arms = [arm.settings for arm in arms]
    keys = dict.fromkeys(key for settings in settings_of_arms for key in settings if key not in _NAMES)
    return [key for key in keys if len({repr(settings.get(key)) for settings in settings_of_arms}) > 1]


def same(arm: Arm, other: Arm, keys: tuple[str, ...]) -> bool:
    """Return True if two arms agree in all settings whose keys begin with one of `keys`."""
    return not any(key.startswith(keys) for key in varying([arm, other]))


def label_arms(comparisons: Sequence[Sequence[Arm]]) -> None:
    """Give arms of one name the settings in which they differ, with the same keys in every comparison."""
    for name in {arm.name for arms in comparisons for arm in arms}:
        namesakes = [[arm for arm in arms if arm.name == name] for arms in comparisons]
        keys = dict.fromkeys(key for arms in namesakes for key in varying(arms))
        keys.pop("base", None)  # that of the comparison
        for arm in chain.from_iterable(namesakes):
            arm.label = " ".join([name, *_words(arm, keys)])


def _words(arm: Arm, keys: Iterable[str]) -> list[str]:
    """Return the arm's values of these settings as short texts; settings that are not set are left out."""
    texts = []
    for key in keys:
        value = arm.get(key)
        if key in ("controller.signal", "controller.routing"):
            texts.append(str(value))
        elif value is not None or key in ("controller.alpha", "controller.beta"):
            texts.append(f"{key.rsplit('.', 1)[-1]}={'off' if value is None else value}")
    return texts


def short_names(arms: Sequence[Arm]) -> dict[str, str]:
    """Return, by label, what tells each arm from the others: of its name if that is unique, else of its label."""
    names = Counter(arm.name for arm in arms)
    unique = [arm.name if names[arm.name] == 1 else arm.label for arm in arms]
    return dict(zip((arm.label for arm in arms), distinct_parts(unique), strict=True))


def distinct_parts(labels: Sequence[str]) -> list[str]:
    """Return the labels without the words and the leading hyphenated parts that all of them share.

    Return them unchanged if that would leave one empty or two alike.
    """
    words = [label.split() for label in labels]
    of_several_words = [set(label) for label in words if len(label) > 1]
    common = set.intersection(*of_several_words) if len(of_several_words) > 1 else set()
    differing = [[word for word in label if word not in common] or [""] for label in words]
    # The leading hyphenated parts that all first words share, the last part aside.
    heads = [first.split("-")[:-1] for first, *_ in differing if "-" in first]
    levels = zip(*heads, strict=False) if len(heads) > 1 else ()
    shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, levels)))
    short = []
    for first, *more in differing:
        rest_of_first = "-".join(first.split("-")[shared:]) if "-" in first else first
        short.append(" ".join([rest_of_first, *more]))
    return short if all(short) and len(set(short)) == len(set(labels)) else list(labels)
