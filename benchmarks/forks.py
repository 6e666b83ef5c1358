"""Forks in one process: many arms from one base, without run folders.

    forks = Forks("shipped")                                        # or a run folder, checked and read once
    config = forks.config("precision.low=sim_e2m1", "training.steps=40", "training.seed=1")
    result = forks(config)
    result.losses, result.validation["low"].high                    # nats

Every fork has separate parts. It starts from the base's weights, optimizer moments, data position and learning rate. It
equals the run of `gnmr train experiment=fork` with the same config bit for bit, whatever was forked before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.errors import RunFailed
from gnmr.lab.config import Config
from gnmr.lab.config.compose import SHIPPED, compose
from gnmr.lab.data.cache import TokenCorpus
from gnmr.lab.train.build import Parts, build_parts, open_data, training_blocks, validation
from gnmr.lab.train.fork_base import open_base
from gnmr.lab.train.loop import Steps, heals, phase, validated

PHASES = ("base", "low", "healed")
"""When a fork is validated: before its first step, after training.steps, and after fork.heal more steps."""


@dataclass(frozen=True)
class Validation:
    """Losses over the validation blocks, in nats."""

    high: float
    """On the 16-bit path."""
    low: float
    """With every operator on the low path."""


@dataclass(frozen=True)
class ForkResult:
    """The results of a fork."""

    losses: list[float]
    """Training loss of each step in nats, including the healing steps."""
    validation: dict[str, Validation]
    """Validation losses by phase (`PHASES`)."""
    promotion_frac: float
    """Fraction of the (unit, step) pairs of the arm's steps in which the unit is active."""
    spent: float
    """Fraction of GEMM FLOPs on the recovery path (`ConvertedModel.cost.spent`), mean over the arm's steps."""
    extra_time: float
    """Extra GEMM time (`ConvertedModel.cost.spent`), mean over the arm's steps."""
    sent: float = 1.0
    """Fraction of its gradient elements that a worker sent, mean over the arm's steps."""


@dataclass
class Forks:
    """Forks of one base. Call the object with a config to run a fork."""

    base_name: str | Path = SHIPPED
    """The base: `shipped`, or a run folder (gnmr/lab/train/fork_base.py)."""
    say: Callable[[str], None] = lambda _: None
    """Called with a line of text if the data must be prepared first."""
    _corpora: dict[Any, Any] = field(default_factory=dict, repr=False)
    _before: dict[Any, Validation] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Open the base. Raises UserError if it cannot be forked."""
        self.base = open_base(str(self.base_name))

    def config(self, *words: str) -> Config:
        """Return the config of `gnmr train experiment=fork base=... WORDS`.

        A call takes a tenth of a second. For arms that differ in one key, `dataclasses.replace` is faster.
        """
        return compose(["experiment=fork", f"base={self.base.name}", *words])

    def parts(self, config: Config) -> Parts:
        """Build new parts in the base's state. Raises UserError if model, data, optimizer or batch differs."""
        config = replace(config, base=self.base.name)
        self.base.check(config)
        corpus = self._corpus(config)
        branch = self.base.branch(config.training.seed, corpus.fingerprint, lambda _: None)
        # The base is read from disk for the first fork; later ones copy it from memory.
        return build_parts(config, Path(), corpus, self.say, base=self.base, branch=branch, keep=True)

    def __call__(
        self,
        config: Config,
        *,
        prepare: Callable[[Parts], None] | None = None,
        phases: Sequence[str] = PHASES,
    ) -> ForkResult:
        """Run a fork. Raises UserError like `parts`, and RunFailed if a loss is not finite.

        Args:
            config: The fork's config, usually from `config`.
            prepare: Called with the parts before the first step, to change paths or the controller.
            phases: When to validate. The base's losses are kept for later forks with the same paths.
        """
        parts = self.parts(config)
        held_out = self._held_out(config, parts.corpus)
        validations: dict[str, Validation] = {}
        if "base" in phases:
            # Before step 1, the losses depend on the paths and on how they are computed, not on the arm.
            key = repr(
                (config.precision, config.training.eval_sequences, config.training.threads, config.training.device)
            )
            if key not in self._before:
                self._before[key] = _validation(parts, held_out, 0)
            validations["base"] = self._before[key]
        # After the base's validation, which other forks share and `prepare` must not change.
        if prepare is not None:
            prepare(parts)
        steps = Steps(parts, training_blocks(config, parts.corpus, parts.branch))
        losses, active, spent, extra_time = [], 0, 0.0, 0.0
        for step in range(1, config.total_steps + 1):
            result = steps(step)
            if result.nonfinite_unit is not None:
                raise RunFailed(f"the loss or a gradient of step {step} is not finite, in {result.nonfinite_unit}")
            losses.append(result.loss)
            # No unit is routed while a fork heals, so these steps count in no mean of the arm.
            active += 0 if heals(parts, step) else int(np.count_nonzero(result.decision.in_force))
            if result.spent is not None:
                spent, extra_time = spent + result.spent.share, extra_time + result.spent.extra_time
            if (name := phase(parts, step)) is not None and name in phases:
                validations[name] = _validation(parts, held_out, step)
        arm = config.training.steps
        sent = 1.0 if parts.compressed is None else parts.compressed.sent_total / (arm * parts.compressed.dense)
        promoted = active / (arm * len(parts.router.units))
        return ForkResult(losses, validations, promoted, spent / arm, extra_time / arm, sent)

    def _corpus(self, config: Config) -> TokenCorpus:
        return _cached(self._corpora, repr(config.data), lambda: open_data(config, self.say, self.base))

    def _held_out(self, config: Config, corpus: Any) -> Any:
        blocks = config.training.eval_sequences
        return _cached(self._corpora, (repr(config.data), blocks), lambda: validation(config, corpus, blocks))


def _validation(parts: Parts, held_out: Any, step: int) -> Validation:
    losses = validated(parts, held_out, step)
    return Validation(losses["val_loss"], losses["val_loss_low"])


def _cached(values: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key not in values:
        values[key] = make()
    return values[key]
