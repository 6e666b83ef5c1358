"""What to blame for a step that spikes or is not finite: the same step again.

    the step, again               differs from the first time        not_reproducible   a race, a device that errs
    with all on the recovery path still there                        data               the batch, or the model itself
                                  gone                               precision          the low path: of which units?

Data, weights and random numbers are those of the step, so nothing but the paths differs. The units to blame are the
fewest whose recovery leaves no spike, looked for from the most suspicious on (`needed`). A forward pass whose loss is
not finite names them itself, for the price of forward passes: operators whose input is finite and whose output is not
(`find_nonfinite`).

A step spikes if its loss or gradient norm is more than 6 standard deviations above the mean of the 128 steps before
(SkipStep's rule, gnmr/lab/train/transforms.py). A spike is gone if less than half of what lies above the mean
is left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment.repeat import FORWARD, Again, Seen, Start, compiles, repeating
from gnmr.control import Unit
from gnmr.control.norms import UnitNorms, gradient_norms
from gnmr.errors import first_few, positive
from gnmr.precision import ConvertedModel
from gnmr.precision.linear import PathLinear

MOST = 4.0
"""Step times that a verdict may take; where the units would take more, the smallest set that was tried is told."""
SIGMAS = 6.0
"""Standard deviations above the mean from which a step spikes."""
SAME = 1e-3
"""Relative difference of two passes that are called equal: on GPUs sums have no fixed order."""


@dataclass(frozen=True)
class Verdict:
    """What a step's spike comes from."""

    step: int
    cause: str
    """data, precision or not_reproducible."""
    units: tuple[str, ...] = ()
    """Whose recovery removes it, under precision; empty where recovery does not, or none could be told."""
    complete: bool = True
    """Whether each of the units is needed; False where looking further would have taken more than `MOST`."""
    passes: float = 0.0
    """Step times that it took."""
    told: str = ""
    """What was seen, in words."""

    def __str__(self) -> str:
        names = first_few(self.units)
        of = f" ({names}{'' if self.complete else '; perhaps fewer'})" if self.units else ""
        return f"step {self.step}  to blame: {self.cause.replace('_', ' ')}{of}; {self.told}"


class Level(NamedTuple):
    """What is usual of one number, and from where on it is a spike."""

    mean: float
    limit: float

    @property
    def spread(self) -> float:
        """Its standard deviation; Inf where nothing is known."""
        return (self.limit - self.mean) / SIGMAS

    def spike(self, value: float) -> bool:
        return not (math.isfinite(value) and value <= self.limit)

    def gone(self, before: float, now: float) -> bool:
        """Whether the spike `before` is no longer there."""
        if not math.isfinite(now):
            return False
        return not math.isfinite(before) or now - self.mean < (before - self.mean) / 2

    def removed(self, before: float, now: float, better: float) -> bool:
        """Whether of the spike `before`, of which recovery of everything leaves `better`, so little is left `now` that
        it is no spike any more: less than half, and not enough for one by itself."""
        by_itself = max(self.limit - better, (self.limit - self.mean) / 2)  # a hard batch is near the limit already
        half = (before - better) / 2 if math.isfinite(before) else math.inf
        return now - better < (min(half, by_itself) if by_itself > 0 else half)


NO_LEVEL = Level(0.0, math.inf)


@dataclass
class Levels:
    """Loss and gradient norm of the last steps, from which a spike is told; on the host."""

    window: int = 128
    least: int = 64
    """Steps before anything finite is a spike, the present one included."""
    sigmas: float = SIGMAS
    seen: deque[tuple[float, float]] = field(default_factory=deque)

    def now(self) -> tuple[Level, Level]:
        """Of the loss and of the gradient norm, for the next step."""
        if len(self.seen) + 1 < self.least:
            return NO_LEVEL, NO_LEVEL
        values = np.array(self.seen)
        means, spreads = values.mean(axis=0), values.std(axis=0, ddof=1)
        loss, norm = (Level(float(m), float(m + self.sigmas * s)) for m, s in zip(means, spreads, strict=True))
        return loss, norm

    def add(self, loss: float, norm: float) -> None:
        """A step; one that is not finite never enters."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.seen.append((loss, norm))
            while len(self.seen) > self.window:
                self.seen.popleft()


def find_nonfinite(again: Again, step: int) -> Verdict:
    """What to blame for a step whose loss is not finite, by forward passes alone.

    data: it is not finite in 16 bits either. precision: the units whose operators turn finite inputs into outputs that
    are not, until with all of them on the recovery path the loss is finite. Waits for the device.
    """
    if not math.isfinite(again.loss(sixteen=True)):
        told = "the loss is not finite in 16 bits either: the batch or the model"
        return Verdict(step, "data", passes=again.passes, told=told)
    chosen: list[int] = []
    while True:
        loss, culprits = _first_nonfinite(again, chosen)
        told = f"the loss is {loss:.4g} with them on the recovery path"
        if math.isfinite(loss):
            if not chosen:
                told = f"the loss is {loss:.4g} when the step is repeated{' without torch.compile' * compiles()}"
                return Verdict(step, "not_reproducible", passes=again.passes, told=told)
            return Verdict(step, "precision", _names(again, chosen), passes=again.passes, told=told)
        new = [i for i in dict.fromkeys(i for o in culprits for i in again.units_of(o)) if i not in chosen]
        if not new or again.passes + FORWARD > MOST:
            break
        chosen += new
    if again.low and math.isfinite(again.loss(again.low)):  # no operator's own output: an overflow behind it
        found, complete = needed(again, again.low, lambda units: math.isfinite(again.loss(units)), FORWARD)
        told = "the loss is finite with them on the recovery path"
        return Verdict(step, "precision", _names(again, found), complete, again.passes, told)
    first = f", first in {culprits[0].operator_name}" if culprits else ""
    told = f"the loss is finite in 16 bits, and recovery does not make it so{first}"
    return Verdict(step, "precision", passes=again.passes, told=told)


def _first_nonfinite(again: Again, recover: Sequence[int]) -> tuple[float, list[PathLinear]]:
    """(loss, operators that turned a finite input into an output that is not)."""
    found: list[tuple[PathLinear, Tensor]] = []

    def watch(operator: PathLinear, input: Tensor, output: Tensor) -> None:
        found.append((operator, input.isfinite().all() & ~output.isfinite().all()))

    with again.watching(watch):
        loss = again.loss(recover)
    hit = torch.stack([flag for _, flag in found]).tolist() if found else []
    return loss, list(dict.fromkeys(o for (o, _), on in zip(found, hit, strict=True) if on))


def needed(
    again: Again, order: Sequence[int], gone: Callable[[list[int]], bool], cost: float
) -> tuple[list[int], bool]:
    """(units whose recovery suffices, whether each of them is needed), by `gone`, which takes `cost` step times a call.

    With all of `order` it is gone. The fewest from the front are looked for; the last of them is needed; then the same
    with it recovered already. False where `MOST` was spent.
    """
    kept: list[int] = []
    rest = list(order)
    known = {frozenset(order): True, frozenset[int](): False}

    def ask(units: list[int]) -> bool | None:
        key = frozenset(units)
        if key not in known:
            if again.passes + cost > MOST + 1e-9:
                return None
            known[key] = gone(units)
        return known[key]

    while True:
        few, enough, at = 0, len(rest), 1  # kept + rest[:enough] suffices, kept + rest[:few] does not
        while enough - few > 1:
            answer = ask(kept + rest[:at])
            if answer is None:
                return sorted(kept + rest[:enough]), False
            few, enough = (few, at) if answer else (at, enough)
            at = max(few + 1, min(2 * few, (few + enough) // 2))
        kept, rest = [*kept, rest[enough - 1]], rest[: enough - 1]
        answer = ask(kept)
        if answer or not rest:
            return sorted(kept), True
        if answer is None:
            return sorted(kept + rest), False


def _names(again: Again, units: Iterable[int]) -> tuple[str, ...]:
    return tuple(again.converted.units[i].name for i in sorted(units))


def explain(again: Again, seen: Seen, levels: tuple[Level, Level], step: int, same: float = SAME) -> Verdict:
    """What to blame for a step that was `seen`, by forward and backward passes. Waits for the device.

    `levels`: of loss and gradient norm; one of them spikes. `same`: relative difference up to which two passes are
    called equal.
    """
    repeated = again.seen(compiled=True)
    if not _same(seen, repeated, same):
        told = f"loss {seen.loss:.4g}, norm {seen.norm:.4g}; repeated {repeated.loss:.4g}, {repeated.norm:.4g}"
        return Verdict(step, "not_reproducible", passes=again.passes, told=told)
    low = again.low
    errors: dict[PathLinear, float] = {}
    if low and again.converted.casts_forward:
        with again.errors(errors):
            better = again.seen(low)
    else:
        better = again.seen(low, sixteen=not low)
    told = f"loss {seen.loss:.4g}, norm {seen.norm:.4g}; in higher precision {better.loss:.4g}, {better.norm:.4g}"
    if _gone(levels, seen, better):
        if not low:
            return Verdict(step, "precision", passes=again.passes, told=told)
        units, complete = _narrowed(again, levels, repeated, better, errors)
        return Verdict(step, "precision", _names(again, units), complete, again.passes, told)
    if low and again.converted.recovery is not None and again.converted.recovery.name != "bf16":
        sixteen = again.seen(sixteen=True)
        if _gone(levels, seen, sixteen):
            told = f"loss {seen.loss:.4g}, norm {seen.norm:.4g}; in 16 bits {sixteen.loss:.4g}, {sixteen.norm:.4g}, "
            told += "and the recovery path does not remove it"
            return Verdict(step, "precision", passes=again.passes, told=told)
    return Verdict(step, "data", passes=again.passes, told=told)


def _same(one: Seen, other: Seen, most: float) -> bool:
    """Up to a relative difference of `most`; what is not finite is in both."""
    pairs = (one.loss, other.loss), (one.norm, other.norm)
    return all(
        abs(a - b) <= most * abs(a) if math.isfinite(a) and math.isfinite(b) else math.isfinite(a) == math.isfinite(b)
        for a, b in pairs
    )


def _gone(levels: tuple[Level, Level], before: Seen, now: Seen, better: Seen | None = None) -> bool:
    """Return True if what spiked of loss and norm is `Level.gone` (given `better`: `Level.removed`); False if nothing
    spiked."""
    of_each = zip(levels, before[:2], now[:2], (None, None) if better is None else better[:2], strict=True)
    spiked = [
        level.gone(a, b) if least is None else level.removed(a, b, least)
        for level, a, b, least in of_each
        if level.spike(a)
    ]
    return bool(spiked) and all(spiked)


def _narrowed(
    again: Again, levels: tuple[Level, Level], low: Seen, better: Seen, errors: Mapping[PathLinear, float]
) -> tuple[list[int], bool]:
    """The units whose recovery suffices, and whether each is needed; all of them where `MOST` is too little."""
    units, usual = again.low, levels[0]

    def error(i: int) -> float:
        unit = again.converted.units[i]
        return max(errors.get(o, 0.0) for o in unit.operators) if unit.gemm in (None, "fprop") else 0.0

    order = sorted(units, key=lambda i: -error(i))
    far = 10 * float(np.median([error(i) for i in units]))
    above = low.loss - better.loss
    if usual.spike(low.loss) or above > usual.spread:  # forward passes tell it
        found, complete = needed(
            again, order, lambda some: usual.removed(low.loss, again.loss(some), better.loss), FORWARD
        )
        # One may hide another: those are told too whose low path errs as much, and far more than is usual.
        least = min(error(i) for i in found) / 2
        found = sorted({*found, *(i for i in units if error(i) > far and error(i) >= least)})
        if levels[1].spike(low.norm) and again.passes + 1 <= MOST + 1e-9:
            now = again.seen(found)  # the loss does not tell of gradients
            if not levels[1].removed(low.norm, now.norm, better.norm):
                more = [i for i in order if error(i) > far and i not in found]
                more = more or _by_norm(again, levels[1], now, better)
                if len(more) < len(units) / 2:  # else it is nobody's in particular
                    return sorted({*found, *more}), False
        return found, complete
    assert low.units is not None and better.units is not None
    if spoiled := [i for i in units if not np.isfinite(low.units[i])]:
        # One spoils what lies before it in the network; the backward pass meets the last first.
        order = [*reversed(spoiled), *(i for i in units if i not in spoiled)]
        return needed(again, order, lambda some: _gone(levels, low, again.seen(some), better), 1.0)
    suspects = sorted(i for i in units if error(i) > far) or _by_norm(again, levels[1], low, better)
    if len(suspects) == len(units):
        return units, False
    if again.passes + 1 <= MOST + 1e-9 and _gone(levels, low, again.seen(suspects), better):
        return suspects, True
    return units, False


def _by_norm(again: Again, level: Level, low: Seen, better: Seen) -> list[int]:
    """The units whose gradient norms make the spike: the fewest with whose better norms it would be none."""
    assert low.units is not None and better.units is not None
    more = {i: float(low.units[i] ** 2 - better.units[i] ** 2) for i in again.low}
    order, square, chosen = sorted(more, key=lambda i: -more[i]), low.norm**2, list[int]()
    for i in order:
        if level.removed(low.norm, math.sqrt(max(square, 0.0)), better.norm) and (
            not chosen or more[i] != more[chosen[-1]]
        ):
            break
        if not chosen or again.converted.units[i].operators != again.converted.units[chosen[-1]].operators:
            square -= more[i]  # GEMMs of one operator have one norm
        chosen.append(i)
    return sorted(chosen)


def explain_step(
    converted: ConvertedModel,
    model: nn.Module,
    units: Sequence[Unit],
    loss_of_batch: Callable[[], Tensor | Iterable[Tensor]],
    step: int,
    loss: float | None,
    usual: tuple[float, float] | None,
    grad_scale: float,
) -> Verdict:
    """See `Router.explain`; the verdict bears the number `step`."""
    if not callable(loss_of_batch):
        kind = type(loss_of_batch).__name__
        raise ValueError(f"loss_of_batch: must be a function that runs the step's forward passes again, not a {kind}")
    if loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        raise ValueError(f"loss: must be a number (loss.item()), not a {type(loss).__name__}")
    positive(grad_scale=grad_scale)
    device = units[0].parameters[0].device
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in parameters]
    norm = float(gradient_norms(parameters).square().sum().sqrt()) / grad_scale
    of_units = UnitNorms([unit.parameters for unit in units])

    def run(backward: bool) -> Tensor:
        total: Tensor | None = None
        for part in _parts(loss_of_batch(), backward):
            if backward:
                part.backward()
            total = part.detach() if total is None else total + part.detach()
        if total is None:
            raise ValueError("loss_of_batch: gave no loss")
        return total

    def both() -> Seen:
        value = float(run(True))
        if all(parameter.grad is None for parameter in parameters):
            raise ValueError("loss_of_batch: its backward pass reaches no parameter of the attached model")
        found = Seen(value, float(gradient_norms(parameters).square().sum().sqrt()), of_units()[0].cpu().numpy())
        for parameter in parameters:
            parameter.grad = None
        return found

    again = Again(converted, Start.of(converted, device), lambda: run(False), both)
    for parameter in parameters:
        parameter.grad = None
    try:
        with repeating(converted, model, device):
            seen = Seen(again.loss() if loss is None else loss, norm)
            if not math.isfinite(seen.loss):
                return find_nonfinite(again, step)
            if all(gradient is None for gradient in kept):
                raise ValueError("no gradients: call explain between the step's last backward pass and step()")
            return explain(again, seen, _levels(seen, usual), step, same=0.25)
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _parts(given: object, backward: bool) -> Iterator[Tensor]:
    """The losses that `loss_of_batch` gave. ValueError for what is none, or has no graph for `backward`."""
    if not isinstance(given, Iterable):
        raise ValueError(f"loss_of_batch: gave a {type(given).__name__}, not the loss that backward started from")
    for part in [given] if isinstance(given, Tensor) else given:
        if not isinstance(part, Tensor) or part.numel() != 1:
            what = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise ValueError(f"loss_of_batch: gave {what}, not the scalar loss that backward started from")
        if backward and not part.requires_grad:
            raise ValueError("loss_of_batch: its loss has no graph (detached, or made under no_grad)")
        yield part


def _levels(seen: Seen, usual: tuple[float, float] | None) -> tuple[Level, Level]:
    """From a fifth above what is `usual` on it is a spike; where neither is that far, the loss is one."""
    if usual is None:
        if math.isfinite(seen.norm):
            raise ValueError("usual: give loss and gradient norm of ordinary steps, or nothing says what a spike is")
        return NO_LEVEL, NO_LEVEL
    sound = isinstance(usual, Sequence) and len(usual) == 2 and all(isinstance(one, int | float) for one in usual)
    if not (sound and math.isfinite(usual[0]) and usual[1] > 0):
        raise ValueError(f"usual={usual!r}: must be two numbers, loss and gradient norm of ordinary steps")
    loss, norm = (Level(value, value + abs(value) / 5) for value in usual)
    return (loss, norm) if loss.spike(seen.loss) or norm.spike(seen.norm) else (Level(usual[0], usual[0]), norm)
