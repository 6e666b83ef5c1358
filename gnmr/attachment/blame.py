"""Find the cause of a step that spikes or is not finite by repeating the step.

    the step, repeated            differs from the first time        not_reproducible   a race, a faulty device
    with all on the recovery path still there                        data_or_model      the batch, the weights, the lr
                                  gone                               precision          the low path: of which units?

Data, weights and random numbers are those of the step, so only the paths differ. The units to blame are the smallest
set whose recovery leaves no spike, searched from the most suspicious unit on (`needed`). If the loss is not finite,
forward passes alone identify them: operators whose input is finite and whose output is not (`find_nonfinite`).

A step spikes if its loss or gradient norm is more than 6 standard deviations above the mean of the 128 steps before
(SkipStep's rule, gnmr/lab/rivals/transforms.py). A spike is gone if less than half of its excess over the mean is left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment.repeat import FORWARD, Again, Seen, Start, compiles, repeating
from gnmr.control import Unit
from gnmr.control.norms import UnitNorms, gradient_norms
from gnmr.conversion import ConvertedModel
from gnmr.conversion.linear import PathLinear
from gnmr.errors import first_few
from gnmr.options import positive

MOST = 4.0
"""Step times that a verdict may take; beyond them the smallest set that was tried is reported."""
SIGMAS = 6.0
"""A step spikes if it is this many standard deviations above the mean."""
SAME = 1e-3
"""Relative difference up to which two passes count as equal: on GPUs sums have no fixed order."""


@dataclass(frozen=True)
class Verdict:
    """The cause of a step's spike."""

    step: int
    cause: str
    """data_or_model, precision or not_reproducible."""
    units: tuple[str, ...] = ()
    """Units whose recovery removes the spike, for the cause precision; may be empty.

    It is empty if recovery does not remove the spike, or if no units could be identified.
    """
    complete: bool = True
    """Whether each of the units is needed; False if a further search would have taken more than `MOST`."""
    passes: float = 0.0
    """Step times that the search took."""
    told: str = ""
    """Description of the observations."""

    def __str__(self) -> str:
        names = first_few(self.units)
        of = f" ({names}{'' if self.complete else '; perhaps fewer'})" if self.units else ""
        return f"step {self.step}  to blame: {self.cause.replace('_', ' ')}{of}; {self.told}"


class Level(NamedTuple):
    """The usual level of one number, and the limit above which it is a spike."""

    mean: float
    limit: float

    @property
    def spread(self) -> float:
        """The standard deviation; Inf if nothing is known."""
        return (self.limit - self.mean) / SIGMAS

    def spike(self, value: float) -> bool:
        return not (math.isfinite(value) and value <= self.limit)

    def gone(self, before: float, now: float) -> bool:
        """Return whether the spike `before` has disappeared."""
        if not math.isfinite(now):
            return False
        return not math.isfinite(before) or now - self.mean < (before - self.mean) / 2

    def removed(self, before: float, now: float, better: float) -> bool:
        """Return whether recovery has reduced the spike `before` to `now` so far that no spike is left.

        Recovery of everything gives `better`. The rest above `better` must be less than half of the spike, and too
        small to be a spike alone.
        """
        by_itself = max(self.limit - better, (self.limit - self.mean) / 2)  # a hard batch is near the limit already
        half = (before - better) / 2 if math.isfinite(before) else math.inf
        return now - better < (min(half, by_itself) if by_itself > 0 else half)


NO_LEVEL = Level(0.0, math.inf)


@dataclass
class Levels:
    """Loss and gradient norm of the last steps, from which spikes are detected; on the host."""

    window: int = 128
    least: int = 64
    """Number of steps, this one included, before a finite value counts as a spike."""
    sigmas: float = SIGMAS
    seen: deque[tuple[float, float]] = field(default_factory=deque)

    def now(self) -> tuple[Level, Level]:
        """Return the levels of the loss and of the gradient norm for the next step."""
        if len(self.seen) + 1 < self.least:
            return NO_LEVEL, NO_LEVEL
        values = np.array(self.seen)
        means, spreads = values.mean(axis=0), values.std(axis=0, ddof=1)
        loss, norm = (Level(float(m), float(m + self.sigmas * s)) for m, s in zip(means, spreads, strict=True))
        return loss, norm

    def add(self, loss: float, norm: float) -> None:
        """Add a step, unless it is not finite."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.seen.append((loss, norm))
            while len(self.seen) > self.window:
                self.seen.popleft()


def find_nonfinite(again: Again, step: int) -> Verdict:
    """Find the cause of a step whose loss is not finite, by forward passes alone. Waits for the device.

    The cause is data or the model if the loss is not finite in 16 bits either. Otherwise it is precision. The units are
    those whose operators turn finite inputs into non-finite outputs, collected until the loss is finite with all of
    them on the recovery path.
    """
    if not math.isfinite(again.loss(sixteen=True)):
        told = "the loss is not finite in 16 bits either: the batch or the model"
        return Verdict(step, "data_or_model", passes=again.passes, told=told)
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
    if again.low and math.isfinite(again.loss(again.low)):  # no operator's own output: a later overflow
        found, complete = needed(again, again.low, lambda units: math.isfinite(again.loss(units)), FORWARD)
        told = "the loss is finite with them on the recovery path"
        return Verdict(step, "precision", _names(again, found), complete, again.passes, told)
    first = f", first in {culprits[0].operator_name}" if culprits else ""
    told = f"the loss is finite in 16 bits, and recovery does not make it so{first}"
    return Verdict(step, "precision", passes=again.passes, told=told)


def _first_nonfinite(again: Again, recover: Sequence[int]) -> tuple[float, list[PathLinear]]:
    """Return (loss, operators that turned a finite input into an output that is not)."""
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
    """Return (units whose recovery suffices, whether each is needed).

    `gone` says whether recovering some units suffices, and takes `cost` step times per call. It holds for all units of
    `order`. The search finds the shortest sufficient prefix of `order`, whose last unit is needed. It repeats with that
    unit already recovered. The second value is False if `MOST` was spent.
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
    """Find the cause of a step that was `seen`, by forward and backward passes. Waits for the device.

    `levels` are those of loss and gradient norm, one of which spikes. Two passes count as equal up to a relative
    difference of `same`.
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
    return Verdict(step, "data_or_model", passes=again.passes, told=told)


def _same(one: Seen, other: Seen, most: float) -> bool:
    """Return whether both are equal up to a relative difference of `most`; non-finite values must be in both."""
    pairs = (one.loss, other.loss), (one.norm, other.norm)
    return all(
        abs(a - b) <= most * abs(a) if math.isfinite(a) and math.isfinite(b) else math.isfinite(a) == math.isfinite(b)
        for a, b in pairs
    )


def _gone(levels: tuple[Level, Level], before: Seen, now: Seen, better: Seen | None = None) -> bool:
    """Return True if each spike is `Level.gone` (given `better`: `Level.removed`), False if nothing spiked."""
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
    """Return the units whose recovery suffices and whether each is needed; all units if `MOST` is too little."""
    units, usual = again.low, levels[0]

    def error(i: int) -> float:
        unit = again.converted.units[i]
        return max(errors.get(o, 0.0) for o in unit.operators) if unit.gemm in (None, "fprop") else 0.0

    order = sorted(units, key=lambda i: -error(i))
    far = 10 * float(np.median([error(i) for i in units]))
    above = low.loss - better.loss
    if usual.spike(low.loss) or above > usual.spread:  # forward passes show the spike
        found, complete = needed(
            again, order, lambda some: usual.removed(low.loss, again.loss(some), better.loss), FORWARD
        )
        # One unit may hide another. Units are therefore included whose low path errs as much, and far more than usual.
        least = min(error(i) for i in found) / 2
        found = sorted({*found, *(i for i in units if error(i) > far and error(i) >= least)})
        if levels[1].spike(low.norm) and again.passes + 1 <= MOST + 1e-9:
            now = again.seen(found)  # the loss does not show gradients
            if not levels[1].removed(low.norm, now.norm, better.norm):
                more = [i for i in order if error(i) > far and i not in found]
                more = more or _by_norm(again, levels[1], now, better)
                if len(more) < len(units) / 2:  # otherwise no unit in particular is to blame
                    return sorted({*found, *more}), False
        return found, complete
    assert low.units is not None and better.units is not None
    if spoiled := [i for i in units if not np.isfinite(low.units[i])]:
        # A non-finite unit affects everything before it in the network; the backward pass meets the last unit first.
        order = [*reversed(spoiled), *(i for i in units if i not in spoiled)]
        # A unit that spoils others spoils the first one that a gradient reaches (a norm of 0: none does).
        first = next(i for i in units if low.units[i] != 0)
        apart = first not in spoiled and again.passes + 1 <= MOST + 1e-9
        if apart and _gone(levels, low, again.seen(spoiled), better):
            order = order[: len(spoiled)]
        return needed(again, order, lambda some: _gone(levels, low, again.seen(some), better), 1.0)
    suspects = sorted(i for i in units if error(i) > far) or _by_norm(again, levels[1], low, better)
    if len(suspects) == len(units):
        return units, False
    if again.passes + 1 <= MOST + 1e-9 and _gone(levels, low, again.seen(suspects), better):
        return suspects, True
    return units, False


def _by_norm(again: Again, level: Level, low: Seen, better: Seen) -> list[int]:
    """Return the fewest units whose gradient norms make the spike: with their better norms it would be gone."""
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
    start: Start,
) -> Verdict:
    """Return the verdict of `Router.explain` on the step with the number `step`, whose passes began at `start`."""
    if not callable(loss_of_batch):
        kind = type(loss_of_batch).__name__
        raise ValueError(f"loss_of_batch: must be a function that runs the step's forward passes again, not a {kind}")
    if loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        raise ValueError(f"loss: must be a number (loss.item()), not a {type(loss).__name__}")
    positive(grad_scale=grad_scale)
    device = units[0].parameters[0].device
    parameters = [p for p in model.parameters() if p.requires_grad]
    own, kept = {id(p) for p in parameters}, [p.grad for p in parameters]
    norm = float(gradient_norms(parameters).square().sum().sqrt()) / grad_scale
    of_units = UnitNorms([unit.parameters for unit in units])

    def run(backward: bool) -> Tensor:
        total: Tensor | None = None
        for part in _parts(loss_of_batch(), backward):
            if backward:
                with _unchanged(leaf for leaf in _leaves(part) if id(leaf) not in own):
                    part.backward()
            total = part.detach() if total is None else total + part.detach()
        if total is None:
            raise ValueError("loss_of_batch: gave no loss")
        return total

    def both() -> Seen:
        value = float(run(True))
        if all(parameter.grad is None for parameter in parameters):
            raise ValueError("loss_of_batch: its backward pass reaches no parameter of the attached model")
        found = Seen(value, float(gradient_norms(parameters).square().sum().sqrt()), of_units().norm.cpu().numpy())
        for parameter in parameters:
            parameter.grad = None
        return found

    again = Again(converted, start, lambda: run(False), both, model.buffers())
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


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the backward pass of `loss` gives gradients; reentrant checkpointing hides some."""
    seen, ahead = set[Any](), [loss.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        ahead += [one for one, _ in node.next_functions]


@contextmanager
def _unchanged(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Let these tensors have the same gradients after this context as before."""
    kept = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in kept:
            leaf.grad = gradient


def _parts(given: object, backward: bool) -> Iterator[Tensor]:
    """Return the losses of `loss_of_batch`. Raises ValueError if one is not a loss, or has no graph for `backward`."""
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
    """Return the levels: a value a fifth above `usual` is a spike; if neither is that high, the loss is one."""
    if usual is None:
        if math.isfinite(seen.norm):
            raise ValueError("usual: give loss and gradient norm of ordinary steps, or nothing says what a spike is")
        return NO_LEVEL, NO_LEVEL
    sound = isinstance(usual, Sequence) and len(usual) == 2 and all(isinstance(one, int | float) for one in usual)
    if not (sound and math.isfinite(usual[0]) and usual[1] > 0):
        raise ValueError(f"usual={usual!r}: must be two numbers, loss and gradient norm of ordinary steps")
    loss, norm = (Level(value, value + abs(value) / 5) for value in usual)
    return (loss, norm) if loss.spike(seen.loss) or norm.spike(seen.norm) else (Level(usual[0], usual[0]), norm)
