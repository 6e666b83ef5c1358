"""What compressing one matrix's gradient in one step does to the loss, in nats, against what could tell it beforehand.

A base goes on with everything on the low path (`never` of `gnmr bench compressed`), weights and moments in float32, so
that a step's difference is no rounding. At `AT` steps one matrix at a time takes the low path and all others dense
means; its *rise* is by how much the loss on held-out blocks is higher after that step than after a dense one. To first
order (docs/compressed.md), with e what the step's mean lacks, m and v Adam's moments, corrected, and lr the rate,

    rise = <gradient of the loss, lr (1 - beta1) e / (sqrt v + eps)>

    fresh gradient    the first order itself: the gradient on the blocks of which the rise is, after the dense step
    momentum          m in the gradient's place, which every worker has: from earlier steps, on other tokens
    own gradient      the step's dense mean in its place, which no worker has
    Adam's gap        e in its place
    gap               mean_i ||E_i||^2 of the workers, what a controller ranks by
    gradient norm     of the mean as it is sent, GNMR's

*Later*: all matrices at once, one step on the low path and then dense ones, against dense ones all along; with what is
held back added in the next step, and with it lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.distributed.compressed import GreedyLore
from gnmr.lab.bench.compressed import PIN_ORDER, WORKERS, Fork, config_of
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.price import bases, spearman
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config import Config
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.build import Parts, training_blocks, validation
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.step import loss_of

AT = (3, 7, 11, 15)
"""Steps, from 1, in which matrices are tried; none of `LATER` behind them brings a new basis."""
HELD_OUT = 32
"""Validation blocks."""
LATER = (0, 1, 2, 4, 8)
"""Dense steps behind the one on the low path."""
SCORES = ("fresh gradient", "momentum", "own gradient", "Adam's gap", "gap", "gradient norm")
IN_NATS = SCORES[:4]


@dataclass(frozen=True)
class Tried:
    """Of one state; (units,) each."""

    rises: np.ndarray
    """nats"""
    errors: np.ndarray
    """Standard errors of these, over the held-out batches."""
    scores: Mapping[str, np.ndarray]
    together: float
    """The rise with all of them on the low path."""
    later: Mapping[str, np.ndarray]
    """Rises after `LATER`: `held back`, `lost`."""


def lacking(error: Tensor, sent: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """By what a weight is off after a step of Adam on `sent` that lacks `error` of its gradient, float64: lr (1 -
    beta1) error / (sqrt v + eps), with the moments' corrections. That v lacks it too is left out: a hundredth of that
    with the usual betas. `state`: before the step."""
    beta1, beta2 = group["betas"]
    t = float(state["step"]) + 1
    second = beta2 * state["exp_avg_sq"].double() + (1 - beta2) * sent.double().square()
    root = (second / (1 - beta2**t)).sqrt()
    return group["lr"] * (1 - beta1) / (1 - beta1**t) * error.double() / (root + group["eps"])


class _Run:
    """The base that goes on, and steps that are tried from where it stands."""

    def __init__(self, forks: Forks, config: Config, held_out: int) -> None:
        parts = forks.parts(config)
        assert isinstance(parts.compressed, GreedyLore)
        self.parts: Parts = parts
        self.lore: GreedyLore = parts.compressed
        self.lore.measuring = True
        self.model, self.optimizer, self.t = parts.model.float().train(False), parts.optimizer, 0
        for state in self.optimizer.state.values():
            state.update({name: one.float() for name, one in state.items()})
        blocks, training = training_blocks(config, parts.corpus, None, parts.branch), config.training
        number = training.steps + max(LATER) + 1
        size, device = training.batch_size, parts.device
        self._batches = [[blocks.next(size).to(device) for _ in range(WORKERS)] for _ in range(number)]
        kept = validation(config, parts.corpus, held_out)
        assert isinstance(kept, Tensor), "a base reads plain text"
        self._held_out = [batch.to(parts.device) for batch in kept.split(training.batch_size)]
        self.names = [f"{unit.name}.weight" for unit in self.lore.units()]

    def state(self) -> dict[str, Any]:
        """All of it, copied."""
        lore = self.lore.state_dict()
        return {
            "t": self.t,
            "model": {name: one.clone() for name, one in self.model.state_dict().items()},
            "moments": {p: {k: v.clone() for k, v in state.items()} for p, state in self.optimizer.state.items()},
            "lore": lore | {"bases": dict(lore["bases"]), "held": dict(lore["held"])},
        }

    def back(self, state: Mapping[str, Any]) -> None:
        self.t = state["t"]
        self.model.load_state_dict(state["model"])
        for p, moments in state["moments"].items():
            self.optimizer.state[p] = {name: one.clone() for name, one in moments.items()}
        self.lore.load_state_dict(state["lore"])

    def gradients(self) -> dict[str, Tensor]:
        """Of the next step, (workers, *shape)."""
        rows: dict[str, list[Tensor]] = {}
        for batch in self._batches[self.t]:
            for name, one in self._gradient([batch]).items():
                rows.setdefault(name, []).append(one)
        return {name: torch.stack(one) for name, one in rows.items()}

    def fresh(self) -> dict[str, Tensor]:
        """The gradient of `losses`."""
        return self._gradient(self._held_out)

    def _gradient(self, batches: Sequence[Tensor | Batch]) -> dict[str, Tensor]:
        self.model.zero_grad(set_to_none=True)
        with self.parts.converted.high_precision():
            for batch in batches:
                (loss_of(self.model, batch) / len(batches)).backward()
        return {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}

    def sent(self, gradients: Mapping[str, Tensor], recovered: bool) -> dict[str, Tensor]:
        """Means, everything on one path; what is held back and the bases go on."""
        for unit in self.lore.units():
            assert unit.switch is not None
            unit.switch(recovered)
        return self.lore.reduce(gradients)

    def update(self, means: Mapping[str, Tensor]) -> None:
        """Adam's step."""
        self.t += 1
        for name, one in self.model.named_parameters():
            one.grad = means[name].clone()
        for group in self.optimizer.param_groups:
            group["lr"] = self.parts.learning_rate(self.t)
        self.optimizer.step()

    @torch.no_grad()
    def losses(self) -> np.ndarray:
        """Of each held-out batch."""
        with self.parts.converted.high_precision():
            return np.array([float(_loss(self.model, batch)) for batch in self._held_out])


def _loss(model: torch.nn.Module, block: Tensor) -> Tensor:
    """As `loss_of`, the mean over tokens in float64."""
    logits = model(block[:, :-1]).float().flatten(0, 1)
    return F.cross_entropy(logits, block[:, 1:].flatten(), reduction="none").double().mean()


def tried(forks: Forks, config: Config, at: Sequence[int] = AT, held_out: int = HELD_OUT) -> Iterator[Tried]:
    """Of each state, in turn."""
    run = _Run(forks, config, held_out)
    for step in range(1, max(at) + 1):
        if step in at:
            start = run.state()
            yield _tried(run, start)
            run.back(start)
        run.update(run.sent(run.gradients(), recovered=False))


def _tried(run: _Run, start: Mapping[str, Any]) -> Tried:
    gradients = run.gradients()
    dense = run.sent(gradients, recovered=True)
    run.back(start)
    low = run.sent(gradients, recovered=False)
    gap = run.lore.gap().numpy()

    def after(means: Mapping[str, Tensor]) -> np.ndarray:
        run.back(start)
        run.update(means)
        return run.losses()

    high = after(dense)
    fresh = run.fresh()
    run.back(start)
    scores = _scores(run, fresh, dense, low) | {"gap": gap}
    each = np.array([after(dense | {name: low[name]}) - high for name in run.names])
    return Tried(
        each.mean(axis=1),
        each.std(axis=1, ddof=1) / each.shape[1] ** 0.5,
        {name: scores[name] for name in SCORES},
        float((after(low) - high).mean()),
        _later(run, start),
    )


def _scores(
    run: _Run, fresh: Mapping[str, Tensor], dense: Mapping[str, Tensor], low: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    group = run.optimizer.param_groups[0] | {"lr": run.parts.learning_rate(run.t + 1)}
    found: dict[str, list[float]] = {}
    for name in run.names:
        state = run.optimizer.state[run.model.get_parameter(name)]
        error = dense[name] - low[name]
        off = lacking(error, low[name], state, group)
        momentum = state["exp_avg"] / (1 - group["betas"][0] ** float(state["step"]))
        given = {"fresh gradient": fresh[name], "momentum": momentum, "own gradient": dense[name], "Adam's gap": error}
        for score, gradient in given.items():
            found.setdefault(score, []).append(float((gradient.double() * off).sum()))
        found.setdefault("gradient norm", []).append(float(low[name].norm()))
    return {score: np.array(values) for score, values in found.items()}


def _later(run: _Run, start: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Rises of all matrices at once, after so many dense steps."""

    def losses(first_low: bool, lost: bool) -> np.ndarray:
        run.back(start)
        means = run.sent(run.gradients(), recovered=not first_low)
        if lost:
            run.lore.load_state_dict(run.lore.state_dict() | {"held": {}})
        found = []
        for step in range(max(LATER) + 1):
            run.update(means)
            if step in LATER:
                found.append(run.losses().mean())
            means = run.sent(run.gradients(), recovered=True)
        return np.array(found)

    dense = losses(False, False)
    return {"held back": losses(True, False) - dense, "lost": losses(True, True) - dense}


def rise(setting: Setting) -> list[Figure]:
    """Spearman of every score with the rises, mean over states, estimates over rises, and what is left later."""
    figures = []
    for base, forks in bases(setting):
        config = config_of(forks, Fork(base, "never", PIN_ORDER), setting)
        setting.say(f"rise: {base}, {len(AT)} states")
        figures += _figures(base, list(tried(forks, config)))
    return figures


def _figures(base: str, states: Sequence[Tried]) -> list[Figure]:
    total, together = sum(one.rises.sum() for one in states), sum(one.together for one in states)
    clear = sum(int((one.rises > 2 * one.errors).sum()) for one in states)
    units = sum(len(one.rises) for one in states)
    note = f"{clear} of {units} are above two standard errors; rises add up to {total / together:.2f} of all at once"
    found = [Figure(f"{base}: rise of all matrices in one step, nats", together / len(states), "", note=note)]
    for score in SCORES:
        ranks = [spearman(one.scores[score], one.rises) for one in states]
        told = f"{min(ranks):.2f} to {max(ranks):.2f} in {len(states)} states"
        found.append(Figure(f"{base}: Spearman, {score}", float(np.mean(ranks)), "", n=units, note=told))
    for score in IN_NATS:
        ratio = sum(one.scores[score].sum() for one in states) / total
        found.append(Figure(f"{base}: {score} over rises", float(ratio), "x", n=units))
    for what in ("held back", "lost"):
        for i, steps in enumerate(LATER):
            left = sum(one.later[what][i] for one in states) / together
            name = f"{base}: left of the rise after {steps} dense steps, {what}"
            found.append(Figure(name, float(left), "%", n=len(states)))
    return found


PARTS = {"rise": rise}
