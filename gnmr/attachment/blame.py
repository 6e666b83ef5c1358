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

from gnmr.attachment.repeat import FORWARD, PassNumbers, Start, StepRepeater, repeating
from gnmr.control import Unit
from gnmr.control.norms import UnitNorms, gradient_norms
from gnmr.conversion import ConvertedModel
from gnmr.conversion.linear import PathLinear
from gnmr.errors import first_few
from gnmr.names import SPIKE_WINDOW
from gnmr.options import positive

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
    """Units whose recovery removes the spike, for the cause precision.

    It is empty if recovery does not remove the spike, or if no units could be identified.
    """
    complete: bool = True
    """Whether each of the units is needed; False if a further search would have taken more than `MAX_STEP_TIMES`."""
    passes: float = 0.0
    """Step times that the search took."""
    observation: str = ""
    """Description of the numbers that lead to the cause."""

    def __str__(self) -> str:
        units = ""
        if self.units:
            units = f" ({first_few(self.units)}{'' if self.complete else '; perhaps fewer'})"
        return f"step {self.step}  to blame: {self.cause.replace('_', ' ')}{units}; {self.observation}"


class Level(NamedTuple):
    """The usual level of one number, and the limit above which it is a spike."""

    mean: float
    limit: float

    @property
    def spread(self) -> float:
        """The standard deviation; Inf if no level is known."""
        return (self.limit - self.mean) / SIGMAS

    def spike(self, value: float) -> bool:
        """Return whether `value` is above the limit or not finite.

        Returns: False for any finite value if no level is known (`NO_LEVEL`).
        """
        return not (math.isfinite(value) and value <= self.limit)

    def removed(self, before: float, now: float, better: float | None = None) -> bool:
        """Return whether a spike is gone.

        Args:
            before: the number of the step.
            now: the number of a repetition.
            better: the number with everything on the recovery path, if `now` is with some units on it. The excess over
                `better` must then be less than half of the spike and too small to be a spike alone. None: less than
                half of the excess over the mean must be left.
        """
        if better is None:
            if not math.isfinite(now):
                return False
            # A spike to infinity is gone once the value is finite.
            return not math.isfinite(before) or now - self.mean < (before - self.mean) / 2
        by_itself = max(self.limit - better, (self.limit - self.mean) / 2)  # a hard batch is near the limit already
        half = (before - better) / 2 if math.isfinite(before) else math.inf
        return now - better < (min(half, by_itself) if by_itself > 0 else half)


NO_LEVEL = Level(0.0, math.inf)


@dataclass
class Levels:
    """Loss and gradient norm of the last steps, from which spikes are detected; on the host."""

    window: int = SPIKE_WINDOW
    """Number of steps that are remembered."""
    least: int = 64
    """Number of steps, this one included, before a finite value counts as a spike."""
    sigmas: float = SIGMAS
    """Standard deviations above the mean where a spike begins."""
    seen: deque[tuple[float, float]] = field(default_factory=deque)
    """(loss in nats, gradient norm before clipping) of each step, the last one last."""

    def now(self) -> tuple[Level, Level]:
        """Return the levels of the loss and of the gradient norm for the next step."""
        if len(self.seen) + 1 < self.least:
            return NO_LEVEL, NO_LEVEL
        values = np.array(self.seen)
        means, spreads = values.mean(axis=0), values.std(axis=0, ddof=1)
        loss, norm = (Level(float(m), float(m + self.sigmas * s)) for m, s in zip(means, spreads, strict=True))
        return loss, norm

    def add(self, loss: float, norm: float) -> None:
        """Add a step, unless it is not finite.

        Args:
            loss: mean loss of the step, in nats.
            norm: global gradient norm before clipping.
        """
        # One infinite value would make all later means and spreads useless.
        if math.isfinite(loss) and math.isfinite(norm):
            self.seen.append((loss, norm))
            while len(self.seen) > self.window:
                self.seen.popleft()


# ---- a loss that is not finite ----


def find_nonfinite(repeater: StepRepeater, step: int) -> Verdict:
    """Find the cause of a step whose loss is not finite, by forward passes alone. Waits for the device.

    The cause is data or the model if the loss is not finite in 16 bits either. Otherwise it is precision. The units are
    those whose operators turn finite inputs into non-finite outputs, collected until the loss is finite with all of
    them on the recovery path.

    Args:
        repeater: Repeats the step's passes.
        step: Number of the step, for the verdict.
    """

    def verdict(cause: str, observation: str, units: Sequence[int] = (), complete: bool = True) -> Verdict:
        return Verdict(step, cause, _names(repeater, units), complete, repeater.passes, observation)

    if not math.isfinite(repeater.loss(sixteen=True)):
        return verdict("data_or_model", "the loss is not finite in 16 bits either: the batch or the model")

    # Recover the operators at which numbers stop to be finite, until the loss is finite or they bring in no new unit.
    recovered: list[int] = []
    while True:
        loss, culprits = _first_nonfinite(repeater, recovered)
        if math.isfinite(loss) and not recovered:
            eager = " without torch.compile" if repeater.converted.in_graphs else ""
            return verdict("not_reproducible", f"the loss is {loss:.4g} when the step is repeated{eager}")
        if math.isfinite(loss):
            return verdict("precision", f"the loss is {loss:.4g} with them on the recovery path", recovered)
        of_culprits = dict.fromkeys(unit for operator in culprits for unit in repeater.units_of(operator))
        new_units = [unit for unit in of_culprits if unit not in recovered]
        if not new_units or not repeater.affords(FORWARD):
            break
        # Their NaN hid what comes after them, so look again with these units recovered.
        recovered += new_units

    # No operator's own output is to blame: sums of finite outputs overflow later.
    if repeater.low and math.isfinite(repeater.loss(repeater.low)):
        units, complete = needed(repeater, repeater.low, lambda units: math.isfinite(repeater.loss(units)), FORWARD)
        return verdict("precision", "the loss is finite with them on the recovery path", units, complete)
    first = f", first in {culprits[0].operator_name}" if culprits else ""
    return verdict("precision", f"the loss is finite in 16 bits, and recovery does not make it so{first}")


def _first_nonfinite(repeater: StepRepeater, recover: Sequence[int]) -> tuple[float, list[PathLinear]]:
    """Return (loss, operators that turned a finite input into an output that is not)."""
    operators: list[PathLinear] = []
    flags: list[Tensor] = []

    def watch(operator: PathLinear, input: Tensor, output: Tensor) -> None:
        operators.append(operator)
        # The flags stay on the device and are read once, after the pass.
        flags.append(input.isfinite().all() & ~output.isfinite().all())

    with repeater.watching(watch):
        loss = repeater.loss(recover)
    spoils = torch.stack(flags).tolist() if flags else []
    return loss, list(dict.fromkeys(operator for operator, bad in zip(operators, spoils, strict=True) if bad))


def needed(
    repeater: StepRepeater, order: Sequence[int], gone: Callable[[list[int]], bool], cost: float
) -> tuple[list[int], bool]:
    """Return units whose recovery suffices, and whether each of them is needed.

    The search finds the shortest sufficient prefix of `order`, whose last unit is needed. It repeats with that unit
    already recovered.

    Args:
        repeater: Counts the step times that were spent.
        order: Units, the most suspicious first. Recovery of all of them suffices.
        gone: Says whether recovery of some units suffices.
        cost: Step times of one call of `gone`.

    Returns:
        The units in ascending order, and False if the search ended because `MAX_STEP_TIMES` was spent.
    """
    required: list[int] = []
    candidates = list(order)
    # Known without a pass: recovery of everything suffices, of nothing it does not.
    answers = {frozenset(order): True, frozenset[int](): False}

    def suffices(units: list[int]) -> bool | None:
        """Return the answer, or None if it would cost too much."""
        key = frozenset(units)
        if key not in answers:
            if not repeater.affords(cost):
                return None
            answers[key] = gone(units)
        return answers[key]

    while True:
        # required + candidates[:enough] suffices, required + candidates[:few] does not; `at` doubles, then bisects.
        few, enough, at = 0, len(candidates), 1
        while enough - few > 1:
            answer = suffices(required + candidates[:at])
            if answer is None:
                return sorted(required + candidates[:enough]), False
            if answer:
                enough = at
            else:
                few = at
            at = max(few + 1, min(2 * few, (few + enough) // 2))
        required, candidates = [*required, candidates[enough - 1]], candidates[: enough - 1]
        answer = suffices(required)
        if answer or not candidates:
            return sorted(required), True
        if answer is None:
            return sorted(required + candidates), False


def _names(repeater: StepRepeater, units: Iterable[int]) -> tuple[str, ...]:
    return tuple(repeater.converted.units[i].name for i in sorted(units))


# ---- a spike ----


def explain(
    repeater: StepRepeater, seen: PassNumbers, levels: tuple[Level, Level], step: int, same: float = SAME
) -> Verdict:
    """Find the cause of a step's spike by forward and backward passes. Waits for the device.

    Args:
        repeater: Repeats the step's passes.
        seen: Loss and gradient norm of the step.
        levels: Levels of loss and gradient norm, one of which spikes.
        step: Number of the step, for the verdict.
        same: Relative difference up to which two passes count as equal.
    """

    def verdict(cause: str, observation: str, units: Sequence[int] = (), complete: bool = True) -> Verdict:
        text = f"loss {seen.loss:.4g}, norm {seen.norm:.4g}{observation}"
        return Verdict(step, cause, _names(repeater, units), complete, repeater.passes, text)

    # Does the step give the same numbers twice?
    repeated = repeater.numbers(compiled=True)
    if not _same(seen, repeated, same):
        return verdict("not_reproducible", f"; repeated {repeated.loss:.4g}, {repeated.norm:.4g}")

    # Is the spike gone with everything on the recovery path, or in 16 bits if everything was on it already?
    low = repeater.low
    errors: dict[PathLinear, float] = {}
    if low and repeater.converted.casts_forward:
        with repeater.errors(errors):
            better = repeater.numbers(low)
    else:
        better = repeater.numbers(low, sixteen=not low)
    observation = f"; in higher precision {better.loss:.4g}, {better.norm:.4g}"
    if _gone(levels, seen, better):
        if not low:
            return verdict("precision", observation)
        units, complete = _narrowed(repeater, levels, repeated, better, errors)
        return verdict("precision", observation, units, complete)

    # A recovery path of few bits may have the spike too.
    if low and repeater.converted.recovery is not None and repeater.converted.recovery.name != "bf16":
        exact = repeater.numbers(sixteen=True)
        if _gone(levels, seen, exact):
            observation = f"; in 16 bits {exact.loss:.4g}, {exact.norm:.4g}, and the recovery path does not remove it"
            return verdict("precision", observation)
    return verdict("data_or_model", observation)


def _same(first: PassNumbers, second: PassNumbers, tolerance: float) -> bool:
    """Return whether both are equal up to a relative difference; a non-finite value must be in both."""

    def equal(a: float, b: float) -> bool:
        if math.isfinite(a) and math.isfinite(b):
            return abs(a - b) <= tolerance * abs(a)
        return math.isfinite(a) == math.isfinite(b)

    return equal(first.loss, second.loss) and equal(first.norm, second.norm)


def _gone(
    levels: tuple[Level, Level], before: PassNumbers, now: PassNumbers, better: PassNumbers | None = None
) -> bool:
    """Return True if each spike is `Level.removed`, False if nothing spiked."""
    loss_level, norm_level = levels
    answers = []
    if loss_level.spike(before.loss):
        answers.append(loss_level.removed(before.loss, now.loss, better and better.loss))
    if norm_level.spike(before.norm):
        answers.append(norm_level.removed(before.norm, now.norm, better and better.norm))
    return bool(answers) and all(answers)


def _narrowed(
    repeater: StepRepeater,
    levels: tuple[Level, Level],
    low: PassNumbers,
    better: PassNumbers,
    errors: Mapping[PathLinear, float],
) -> tuple[list[int], bool]:
    """Return the units whose recovery suffices and whether each is needed; all units if the time is too short."""
    units = repeater.low
    loss_level, norm_level = levels

    def error(i: int) -> float:
        unit = repeater.converted.units[i]
        # Errors were measured in forward passes, so that GEMMs of the backward pass have none.
        return max(errors.get(o, 0.0) for o in unit.operators) if unit.gemm in (None, "fprop") else 0.0

    order = sorted(units, key=lambda i: -error(i))
    far = 10 * float(np.median([error(i) for i in units]))

    # Forward passes show the spike: a search costs a third of one over gradients.
    if loss_level.spike(low.loss) or low.loss - better.loss > loss_level.spread:

        def loss_is_better(some: list[int]) -> bool:
            return loss_level.removed(low.loss, repeater.loss(some), better.loss)

        blamed, complete = needed(repeater, order, loss_is_better, FORWARD)
        # One unit may hide another. Units are therefore included whose low path errs as much, and far more than usual.
        least = min(error(i) for i in blamed) / 2
        blamed = sorted({*blamed, *(i for i in units if error(i) > far and error(i) >= least)})
        if norm_level.spike(low.norm) and repeater.affords(1.0):
            now = repeater.numbers(blamed)  # the loss does not show gradients
            if not norm_level.removed(low.norm, now.norm, better.norm):
                more = [i for i in order if error(i) > far and i not in blamed]
                more = more or _by_norm(repeater, norm_level, now, better)
                if len(more) < len(units) / 2:  # otherwise no unit in particular is to blame
                    return sorted({*blamed, *more}), False
        return blamed, complete

    def all_is_better(some: list[int]) -> bool:
        return _gone(levels, low, repeater.numbers(some), better)

    assert low.units is not None and better.units is not None
    if spoiled := [i for i in units if not np.isfinite(low.units[i])]:
        # A non-finite unit affects everything before it in the network; the backward pass meets the last unit first.
        order = [*reversed(spoiled), *(i for i in units if i not in spoiled)]
        # A unit that spoils others spoils the first one that a gradient reaches (a norm of 0: none does).
        first = next(i for i in units if low.units[i] != 0)
        if first not in spoiled and repeater.affords(1.0) and all_is_better(spoiled):
            order = order[: len(spoiled)]
        return needed(repeater, order, all_is_better, 1.0)

    # Finite gradients: suspect the units that err far more than usual, or whose norms make the spike.
    suspects = sorted(i for i in units if error(i) > far) or _by_norm(repeater, norm_level, low, better)
    if len(suspects) < len(units) and repeater.affords(1.0) and all_is_better(suspects):
        return suspects, True
    return units, False


def _by_norm(repeater: StepRepeater, level: Level, low: PassNumbers, better: PassNumbers) -> list[int]:
    """Return the fewest units whose gradient norms make the spike: with their better norms it would be gone."""
    assert low.units is not None and better.units is not None
    excess = {i: float(low.units[i] ** 2 - better.units[i] ** 2) for i in repeater.low}
    square, chosen = low.norm**2, list[int]()
    for i in sorted(excess, key=lambda i: -excess[i]):
        enough = level.removed(low.norm, math.sqrt(max(square, 0.0)), better.norm)
        if enough and (not chosen or excess[i] != excess[chosen[-1]]):
            break
        # GEMMs of one operator have one norm, which counts once.
        if not chosen or repeater.converted.units[i].operators != repeater.converted.units[chosen[-1]].operators:
            square -= excess[i]
        chosen.append(i)
    return sorted(chosen)


# ---- in a loop of the user's ----


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
    """Return the verdict of `Router.explain` on the step with the number `step`, whose passes began at `start`.

    The other arguments are those of `Router.explain` and `Router`. Raises ValueError if one is invalid.
    """
    if not callable(loss_of_batch):
        kind = type(loss_of_batch).__name__
        raise ValueError(
            f"loss_of_batch: must be a function that runs the step's forward passes repeater, not a {kind}"
        )
    positive(grad_scale=grad_scale)
    device = units[0].parameters[0].device
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in parameters]
    norm = float(gradient_norms(parameters).square().sum().sqrt()) / grad_scale
    unit_norms = UnitNorms([unit.parameters for unit in units])

    def run(backward: bool) -> Tensor:
        """Run the step's passes and return the loss of all its parts."""
        total: Tensor | None = None
        for part_loss in _losses(loss_of_batch(), backward):
            if backward:
                # Gradients outside of the attached model must not change either.
                inside = {id(p) for p in parameters}
                with _unchanged(leaf for leaf in _leaves(part_loss) if id(leaf) not in inside):
                    part_loss.backward()
            total = part_loss.detach() if total is None else total + part_loss.detach()
        if total is None:
            raise ValueError("loss_of_batch: gave no loss")
        return total

    def both() -> PassNumbers:
        value = float(run(True))
        if all(parameter.grad is None for parameter in parameters):
            raise ValueError("loss_of_batch: its backward pass reaches no parameter of the attached model")
        global_norm = float(gradient_norms(parameters).square().sum().sqrt())
        numbers = PassNumbers(value, global_norm, unit_norms().norm.cpu().numpy())
        for parameter in parameters:
            parameter.grad = None
        return numbers

    # Repetitions begin without gradients; the step's own come back at the end.
    repeater = StepRepeater(converted, start, lambda: run(False), both, model.buffers())
    for parameter in parameters:
        parameter.grad = None
    try:
        with repeating(converted, model, device):
            seen = PassNumbers(repeater.loss() if loss is None else float(loss), norm)
            if not math.isfinite(seen.loss):
                return find_nonfinite(repeater, step)
            if all(gradient is None for gradient in gradients):
                raise ValueError("no gradients: call explain between the step's last backward pass and step()")
            return explain(repeater, seen, _levels(seen, usual), step, same=0.25)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the backward pass of `loss` gives gradients; reentrant checkpointing hides some."""
    visited, ahead = set[Any](), [loss.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        # The node that accumulates a gradient holds the leaf that gets it.
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        ahead += [next_node for next_node, _ in node.next_functions]


@contextmanager
def _unchanged(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Let these tensors have the same gradients after this context as before."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def _losses(result: object, backward: bool) -> Iterator[Tensor]:
    """Yield the losses of `loss_of_batch`. Raises ValueError if one is not a loss, or has no graph for `backward`."""
    if not isinstance(result, Iterable):
        raise ValueError(f"loss_of_batch: gave a {type(result).__name__}, not the loss that backward started from")
    for loss in [result] if isinstance(result, Tensor) else result:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss_of_batch: gave {kind}, not the scalar loss that backward started from")
        if backward and not loss.requires_grad:
            raise ValueError("loss_of_batch: its loss has no graph (detached, or made under no_grad)")
        yield loss


def _levels(seen: PassNumbers, usual: tuple[float, float] | None) -> tuple[Level, Level]:
    """Return the levels: a value a fifth above `usual` is a spike; if neither is that high, the loss is one."""
    if usual is None:
        if math.isfinite(seen.norm):
            raise ValueError("usual: give loss and gradient norm of ordinary steps, or nothing says what a spike is")
        return NO_LEVEL, NO_LEVEL
    if len(usual) != 2 or not math.isfinite(usual[0]) or not usual[1] > 0:
        raise ValueError(f"usual={usual!r}: must be two numbers, loss and gradient norm of ordinary steps")
    loss, norm = (Level(value, value + abs(value) / 5) for value in usual)
    # The user asks for the cause of this step, so its loss counts as a spike.
    if not loss.spike(seen.loss) and not norm.spike(seen.norm):
        loss = Level(loss.mean, loss.mean)
    return loss, norm
