"""One training step as a function of explicit inputs.

    forward and backward of every micro-batch    loss in FP32
    norms of all gradients                       in one batched call
    `Router.measure`                             evidence and risks of the units
    transform, clipping, optimizer               selected by "loss and all gradients are finite"
    `HostPacket.to_host`                         loss, norms and risks in one transfer
    `Router.decide`                              the units of the next step

Nothing waits for the device until the single transfer. If the loss spikes or is not finite, the step is run again to
find the cause (`gnmr.attachment.blame`).
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment import Router
from gnmr.attachment.blame import NO_LEVEL, Level, Levels, Verdict, explain, find_nonfinite
from gnmr.attachment.ranks.reduce import DistributedRanks, is_sharded
from gnmr.attachment.ranks.world import ALONE, World
from gnmr.attachment.repeat import PassNumbers, Start, StepRepeater, repeating
from gnmr.control import Decision, HostPacket
from gnmr.control.device import to_device
from gnmr.control.norms import GradientNorms, UnitNorms, gradient_norms
from gnmr.control.unit import Slice, identity, whole_of
from gnmr.conversion.cost import Spent
from gnmr.conversion.unit_names import module_of
from gnmr.lab.data.batch import Batch
from gnmr.lab.models import Decoder
from gnmr.lab.rivals.transforms import StepContext, Transform, tensor_norms
from gnmr.lab.train.loss import Draws, Experts, divisors, loss_of, objective_of, statistics_of
from gnmr.lab.train.nonfinite import nonfinite_place
from gnmr.lab.train.optim import clip_gradients, skip_where
from gnmr.lab.train.wrap import Wrapped
from gnmr.patterns import select

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""The signals that end a run gracefully (`stopping`)."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step on the host.

    A field that `records.schema.STEP_FIELDS` has too is recorded, and sent to W&B if it is a number.
    """

    loss: float
    """Mean cross-entropy over the step's tokens, in nats."""
    grad_norm_pre_clip: float
    """Global 2-norm of the gradient before clipping."""
    skipped: bool
    """True if the optimizer did not step: the loss or a gradient was not finite, or the transform requested it."""
    nonfinite_unit: str | None
    """Where the first non-finite number was found, see `gnmr.lab.train.nonfinite`. None in a finite step."""
    saved_bytes: int | None
    """Saved tensors read from the graph, of the largest micro-batch. None under activation checkpointing and while a
    fork heals."""
    saved_bytes_predicted: int | None
    lr: float
    """The learning rate of the optimizer."""
    decision: Decision
    statistics: dict[str, float]
    """Statistics of the model's forward passes (`Decoder.statistics`), mean over the micro-batches."""
    monitored: dict[str, float]
    """Gradient norms of the monitored modules outside of the units."""
    spent: Spent | None
    """`ConvertedModel.cost.spent` of the step. None if no path was in force (a fork's healing)."""
    saturation: dict[str, list[int]]
    """Saturated elements and Inf or NaN by operand (`ConvertedModel.saturation`). Empty for formats."""
    stop: int | None = None
    """The signal that one of several processes received, see `TrainStep`."""
    slowest_rank: int | None = None
    """The rank that the other processes waited for."""
    sent: tuple[int, float] | None = None
    """How many numbers each worker sent and their share of its gradient, if gradients are compressed."""
    bits_per_byte: float | None = None
    """The loss in bits per byte of the step's text. `TrainStep` leaves it None, because only the tokenizer knows."""
    verdict: Verdict | None = None
    """The cause of a spike or of a non-finite first attempt. The other fields describe the retried step."""


@dataclass
class Attempt:
    """One attempt at a step: its numbers, and what an update that a spike postpones needs."""

    packet: HostPacket
    """Loss, norms, statistics and the numbers of the router."""
    cost: PassCost
    skip: Tensor
    """() bool on the device: skip the update for other reasons than a spike, which only postpones it."""
    gradients: list[Tensor | None]
    """Gradients as the optimizer reads them, if the update may be postponed; else empty."""


class PassCost(NamedTuple):
    """What the forward passes of a step took; None if it was not measured."""

    saved_bytes: int | None
    saved_bytes_predicted: int | None
    spent: Spent | None


class TrainStep:
    """The fixed parts of a step: model, router, optimizer. Call it to take one step."""

    def __init__(
        self,
        model: nn.Module,
        router: Router,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        measure_saved: bool = True,
        transform: Transform | None = None,
        monitor: Sequence[str] = (),
        levels: Levels | None = None,
        world: World = ALONE,
        wrapped: Wrapped | None = None,
        stop: Sequence[int] = (),
        draws: Draws | None = None,
    ) -> None:
        """Set up the step.

        Args:
            model: The model to train.
            router: Routes the units of the model.
            optimizer: Updates the parameters; it must support `skip_where`.
            clip_norm: Largest global gradient norm, or None for no clipping.
            measure_saved: Measure the bytes of saved tensors.
            transform: Changes the gradients before clipping.
            monitor: Patterns of modules outside of the units whose gradient norms every result contains.
            levels: Loss and gradient norm of earlier steps. If given, a spike or a non-finite step gets a verdict.
            world: The processes that take the step together, each with some of its micro-batches.
            wrapped: The model as the processes run it.
            stop: Signals that this process received. All processes learn of them in the same step (`StepResult.stop`).
            draws: Seeds the random numbers of each micro-batch; the caller calls `begin_step`. If None, micro-batches
                draw in turn.
        """
        self.model, self.router, self.optimizer = model, router, optimizer
        self.clip_norm, self.measure_saved, self.transform = clip_norm, measure_saved, transform
        self.levels, self.world, self._stop, self._draws = levels, world, stop, draws
        self._wrapped = Wrapped(model) if wrapped is None else wrapped
        self._experts = Experts(model) if self._wrapped.fills and isinstance(model, Decoder) else None
        self._since: float | None = None
        # This evidence reads each rank's gradient from before the reduction, which overwrites it.
        if "micro_square" in router.needs and world.size > 1:
            self._wrapped.keep_own()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # One batched call returns all norms of a step: of the units, and of every other parameter separately.
        outside = _outside_of_units(model, router)
        ranks = DistributedRanks() if world.size > 1 else None
        self._norms = UnitNorms([unit.parameters for unit in router.units], [p for _, p in outside], ranks)
        first_outside = len(self._norms.groups) - len(outside)
        index_of = {id(p): first_outside + i for i, (_, p) in enumerate(outside)}
        self._monitored = {
            name: [index_of[id(p)] for p in parameters]
            for name, parameters in monitored(model, router, monitor).items()
        }
        """Indices of the norms of each monitored module."""
        self._backward_order = _backward_order(model, router, self._norms, [name for name, _ in outside])

    def __call__(self, micro_batches: Sequence[Batch], lr: float) -> StepResult:
        """Take one step.

        The gradient is the gradient of the mean over all targets of the step. Waits for the device once, and more often
        if the step spikes or is not finite.

        Args:
            micro_batches: on the device.
            lr: learning rate of the step.
        """
        router, levels = self.router, (NO_LEVEL, NO_LEVEL)
        if self.levels is not None and self._wrapped.repeatable:
            levels = self.levels.now()
        start = Start.of(router.converted, self.parameters[0].device)
        self._since = time.perf_counter() if self._since is None else self._since
        self._wrapped.arrived = 0.0
        # The whole step, up to the transfer to the host
        attempt, verdict, keep = self.attempt(micro_batches, lr, levels), None, False
        self._since = time.perf_counter()
        if not self._wrapped.repeatable:
            # Several workers do not search for a cause, so no unit is to blame.
            keep = not math.isfinite(attempt.packet.host["loss"]) and router.spec.nonfinite == "find"
        elif self._looks_again(attempt, levels):
            attempt, verdict, keep = self._look_again(attempt, micro_batches, lr, levels, start)
        # The units of the next step
        decision = router.decide(attempt.packet, keep)
        return self._result(attempt, decision, lr, verdict, micro_batches)

    def attempt(self, micro_batches: Sequence[Batch], lr: float, levels: tuple[Level, Level]) -> Attempt:
        """Run the step up to the transfer to the host.

        The update is masked on the device if the loss or the gradient norm is not finite or above its level.
        """
        router, evidence = self.router, dict[str, Tensor]()
        if "true_gap" in router.needs:
            evidence["true_gap"] = router.true_gap(partial(self._rehearse, micro_batches))

        # Forward and backward
        numbers, cost = self._backward(micro_batches)
        saturation = router.converted.saturation()
        numbers |= {f"saturation/{operand}": counts.sum(dim=0) for operand, counts in saturation.items()}

        # Norms of all gradients, over all ranks
        sums: dict[str, Tensor] | None = None
        if self.world.size > 1:
            numbers, norms, sums = self._over_ranks(numbers)
        else:
            norms = self._norms()

        # Evidence and risks
        packet = router.measure(evidence=evidence, norms=(norms.norm, norms.observed), sums=sums)

        # Optimizer
        loss, grad_norm = numbers["loss"], norms.total
        # The device itself decides whether to update, so that nothing waits for the host.
        nonfinite = ~(loss.isfinite() & grad_norm.isfinite())
        skip = self._transform(loss, grad_norm, nonfinite)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        off, gradients = skip, list[Tensor | None]()
        if levels[0].limit < math.inf:
            # A spike only postpones the update, which needs the gradients then.
            gradients = [p.grad for p in self.parameters]
            off = skip | (loss.double() > levels[0].limit) | (grad_norm > levels[1].limit)
        self._optimize(off)

        packet.add(**numbers, grad_norm=grad_norm, nonfinite=nonfinite, skip=skip, norms=norms.groups)
        packet.to_host()
        return Attempt(packet, cost, skip, gradients)

    def _transform(self, loss: Tensor, grad_norm: Tensor, nonfinite: Tensor) -> Tensor:
        """Apply the gradient transform and clip; return whether to skip the update, () bool on the device."""
        skip, norm = nonfinite, grad_norm
        if self.transform is not None:
            requested = self.transform(StepContext(self.router.t, loss, grad_norm, nonfinite, self.optimizer))
            skip = nonfinite if requested is None else nonfinite | requested
        if self.clip_norm is not None:
            if self.transform is not None:  # over all shards, which costs one more collective
                norms_of = tensor_norms if any(map(is_sharded, self.parameters)) else gradient_norms
                norm = norms_of(self.parameters).square().sum().sqrt()
            clip_gradients(self.parameters, norm, self.clip_norm)
        return skip

    def _result(
        self,
        attempt: Attempt,
        decision: Decision,
        lr: float,
        verdict: Verdict | None,
        micro_batches: Sequence[Batch],
    ) -> StepResult:
        host, sends = attempt.packet.host, self._wrapped.compressed
        loss, grad_norm = float(host["loss"]), float(host["grad_norm"])
        if self.levels is not None:
            self.levels.add(loss, grad_norm)
        # Only a step that is not finite is searched for the place, which may take another pass.
        nonfinite_unit = None
        if host["nonfinite"]:
            nonfinite_unit = self._nonfinite_place(loss, host["norms"].tolist(), micro_batches)
        # A signal counts once any process has received it.
        stop = None
        if "stop" in host:
            stop = next((number for number, count in zip(_SIGNALS, host["stop"], strict=True) if count), None)
        norms = torch.from_numpy(host["norms"])
        return StepResult(
            loss=loss,
            grad_norm_pre_clip=grad_norm,
            skipped=bool(host["skip"]),
            nonfinite_unit=nonfinite_unit,
            **attempt.cost._asdict(),
            lr=lr,
            decision=decision,
            statistics={name: float(value) for name, value in _named("statistic", host).items()},
            monitored={name: float(norms[indices].norm()) for name, indices in self._monitored.items()},
            saturation={name: counts.tolist() for name, counts in _named("saturation", host).items()},
            stop=stop,
            slowest_rank=int(host["times"].argmax()) if "times" in host else None,
            sent=None if sends is None else (sends.sent, sends.sent / sends.dense),
            verdict=verdict,
        )

    def _looks_again(self, attempt: Attempt, levels: tuple[Level, Level]) -> bool:
        """Return True if the step needs a verdict and its cause can be determined."""
        converted, host = self.router.converted, attempt.packet.host
        # A step in 16 bits has no low path that could be to blame.
        if converted.shared.high_precision:
            return False
        if not math.isfinite(host["loss"]):
            finds = self.router.spec.nonfinite == "find" and converted.recovery is not None
            return finds or self.levels is not None
        spikes = levels[0].spike(float(host["loss"])) or levels[1].spike(float(host["grad_norm"]))
        return self.levels is not None and spikes

    def _look_again(
        self,
        attempt: Attempt,
        micro_batches: Sequence[Batch],
        lr: float,
        levels: tuple[Level, Level],
        start: Start,
    ) -> tuple[Attempt, Verdict, bool]:
        """Find the cause of a spike or a non-finite loss.

        A non-finite step is retried with the blamed units on the recovery path. After a spike, the optimizer takes the
        update that was postponed.

        Returns:
            (the attempt that counts, the verdict, whether set and locks stay unchanged).
        """
        router, number, host = self.router, self.router.t, attempt.packet.host
        loss, norm = float(host["loss"]), float(host["grad_norm"])
        repeater = StepRepeater(
            router.converted,
            start,
            lambda: self.mean_loss(micro_batches),
            lambda: self.seen(micro_batches),
            self.model.buffers(),
        )
        # A loss that is not finite has a place; a spike is explained by comparing paths.
        with router.unmeasured(), repeating(router.converted, self.model, start.device):
            if math.isfinite(loss):
                verdict = explain(repeater, PassNumbers(loss, norm), levels, number)
            else:
                verdict = find_nonfinite(repeater, number)
        # The update of a spike was only postponed, whatever the cause.
        if math.isfinite(loss):
            self.make_up(attempt)
            return attempt, verdict, False
        if router.spec.nonfinite != "find":
            return attempt, verdict, False
        # Take the step again with the blamed units in recovery; else nobody is to blame, and the set stays.
        if router.retry(verdict.units, start):
            return self.attempt(micro_batches, lr, levels), verdict, False
        return attempt, verdict, verdict.cause != "precision"

    def make_up(self, attempt: Attempt) -> None:
        """Take the optimizer's step that a spike postponed."""
        if attempt.gradients:
            for parameter, gradient in zip(self.parameters, attempt.gradients, strict=True):
                parameter.grad = gradient
            self._optimize(attempt.skip)

    def _optimize(self, skip: Tensor) -> None:
        skip_where(self.optimizer, skip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _over_ranks(self, numbers: dict[str, Tensor]) -> tuple[dict[str, Tensor], GradientNorms, dict[str, Tensor]]:
        """Return (numbers, norms, all sums) over ranks, with one collective."""
        assert self.router.controller.ranks is not None
        world, device = self.world, self.parameters[0].device
        # Everything a step sums travels together; what is of one rank has a place of its own in a vector of zeros.
        terms, plain = self._norms.parts()
        terms |= numbers | self.router.parts(plain)
        if self._experts is not None:
            terms["reached"] = self._experts.take()
        times, since = [0.0] * world.size, self._since or 0.0
        # The rank that took longest to arrive is the one that all others waited for.
        times[world.rank] = max(self._wrapped.arrived - since, 0.0)
        stop = [float(number in self._stop) for number in _SIGNALS]
        for name, values in (("times", times), ("stop", stop)):
            terms[name] = to_device(torch.tensor(values, dtype=torch.float64), device)

        sums = self.router.controller.ranks.sum(terms)
        norms = self._norms.of_sums(sums["squares"], sums["present"])
        if self._experts is not None:
            self._experts.drop(sums["reached"])
            norms = norms._replace(observed=self._norms.observed())
        # Counts and the loss get the dtypes that they have in a single process.
        dtypes = {name: torch.long for name in numbers if name.startswith("saturation/")} | {"loss": torch.float32}
        summed = {name: sums[name].to(dtypes.get(name, torch.float64)) for name in numbers}
        return summed | {name: sums[name] for name in ("stop", "times")}, norms, sums

    def _backward(self, micro_batches: Sequence[Batch]) -> tuple[dict[str, Tensor], PassCost]:
        """Run the passes; return the mean loss, the mean statistics (`statistic/...`) and the cost. Gradients stay."""
        loss_parts: list[Tensor] = []
        statistics: dict[str, Tensor] = {}
        converted, saved, predicted = self.router.converted, None, None
        spent: Spent | None = None
        heals = converted.shared.high_precision  # the operators are plain linears, which nothing measures
        local = self._local_batches(micro_batches)
        uneven = len({batch.num_targets for batch in micro_batches}) > 1
        for i, (block, divisor) in enumerate(local):
            last = i == len(local) - 1
            with self._drawing(self.world.rank + i * self.world.size):
                # Forward, with the bytes that it saves
                with self._wrapped.accumulating(last):
                    loss = loss_of(self.model, block, self._wrapped.call)
                if self._experts is not None:
                    self._experts.add()
                if self.measure_saved and not heals:
                    pass_saved, pass_predicted, spent = converted.cost.of_pass()
                    saved, predicted = max(saved or 0, pass_saved), max(predicted or 0, pass_predicted)
                for name, value in statistics_of(self.model).items():
                    share = value.double() / len(micro_batches)
                    statistics[name] = statistics[name] + share if name in statistics else share
                # Backward
                with self._wrapped.accumulating(last):
                    # The wrapper averages over W workers, so each starts from W times its part of the loss.
                    (objective_of(self.model, loss) / (divisor / self._wrapped.workers)).backward()
            self._wrapped.after(last)
            if self._wrapped.own is None:
                self.router.micro_step(1 / divisor if uneven else None)
            else:
                self.router.micro_step(self._wrapped.workers / divisor, self._wrapped.own if last else None)
            loss_parts.append(loss.detach() * (len(micro_batches) / divisor))  # the loss, if target counts are equal
        assert loss_parts, "a step needs at least one micro-batch"
        if not self.measure_saved and not heals:  # under activation checkpointing recomputed passes show saved tensors
            spent = converted.cost.spent()
        numbers = {f"statistic/{name}": value for name, value in statistics.items()}
        numbers["loss"] = reduce(torch.add, loss_parts) / len(micro_batches)
        return numbers, PassCost(saved, predicted, spent)

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """Provide the random numbers of micro-batch `number` of the step."""
        return nullcontext() if self._draws is None else self._draws.of(number)

    def _local_batches(self, micro_batches: Sequence[Batch]) -> list[tuple[Batch, float]]:
        """Return this process's micro-batches of the step, each with the divisor of its loss."""
        pairs = list(zip(micro_batches, divisors(micro_batches), strict=True))
        return pairs[self.world.rank :: self.world.size]

    def seen(self, micro_batches: Sequence[Batch]) -> PassNumbers:
        """Run only the passes and return their results on the host. No gradients remain."""
        loss = self._rehearse(micro_batches)
        norms = self._norms()
        self.optimizer.zero_grad(set_to_none=True)
        host = HostPacket({"loss": loss, "norm": norms.total, "units": norms.norm}).to_host()
        return PassNumbers(float(host["loss"]), float(host["norm"]), host["units"])

    def mean_loss(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Run only the forward passes and return the mean loss."""
        losses: list[Tensor] = []
        for i, (block, divisor) in enumerate(zip(micro_batches, divisors(micro_batches), strict=True)):
            with self._drawing(i):
                losses.append(loss_of(self.model, block) / divisor)
        return torch.stack(losses).sum()

    def _rehearse(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Run this process's passes without measuring, and return its part of the mean loss. Gradients stay."""
        local, total = self._local_batches(micro_batches), torch.zeros((), device=self.parameters[0].device)
        workers = self._wrapped.workers if self.world.size > 1 else 1  # ranks average gradients
        for i, (block, divisor) in enumerate(local):
            number, last = self.world.rank + i * self.world.size, i == len(local) - 1
            with self._drawing(number), self._wrapped.accumulating(last):
                loss = loss_of(self.model, block, self._wrapped.call)
                (objective_of(self.model, loss) / (divisor / workers)).backward()
            total = total + loss.detach() / divisor
        return total

    def _nonfinite_place(self, loss: float, norms: Sequence[float], micro_batches: Sequence[Batch]) -> str:
        """Return the place where the first non-finite number appeared in this step."""
        if not math.isfinite(loss):
            return nonfinite_place(self.model, self.world, [batch for batch, _ in self._local_batches(micro_batches)])
        names = (name for i, name in self._backward_order if not math.isfinite(norms[i]))
        return next(names, "gradient norm")  # all norms are finite, but their sum of squares is not


def _named(group: str, host: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with `group/`, without this prefix."""
    return {name.removeprefix(f"{group}/"): value for name, value in host.items() if name.startswith(f"{group}/")}


def _outside_of_units(model: nn.Module, router: Router) -> list[tuple[str, nn.Parameter | Slice]]:
    """Return the trained parameters outside of the units, and free slices of parameters that are partly in units."""
    in_units = {identity(p) for unit in router.units for p in unit.parameters}
    sliced = {id(whole_of(p)) for unit in router.units for p in unit.parameters if isinstance(p, Slice)}
    outside: list[tuple[str, nn.Parameter | Slice]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) in sliced:
            slices = [Slice(parameter, i) for i in range(len(parameter))]
            outside += [(f"{name}.{piece.index}", piece) for piece in slices if piece.key not in in_units]
        elif parameter.requires_grad and id(parameter) not in in_units:
            outside.append((name, parameter))
    return outside


def _backward_order(
    model: nn.Module, router: Router, norms: UnitNorms, outside: Sequence[str]
) -> list[tuple[int, str]]:
    """Return (index, name) of all groups of parameters from the last module to the first, as backward reaches them."""
    names = [module_of(router.names[i]) for i in norms.first] + [name.removesuffix(".weight") for name in outside]
    position = {id(p): i for i, p in enumerate(model.parameters())}
    # The backward pass reaches the last parameter of a group first.
    last = [max(position[id(whole_of(p))] for p in group) for group in norms.groups]
    return [(i, names[i]) for i in sorted(range(len(names)), key=lambda i: -last[i])]


def monitored(model: nn.Module, router: Router, patterns: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """Return the trainable parameters of each matching module that is not part of a unit, by the module's name.

    Raises:
        ValueError: if a pattern matches no module.
    """
    in_units = {id(whole_of(p)) for unit in router.units for p in unit.parameters}
    owners: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in in_units:
            owners.setdefault(name.rpartition(".")[0], []).append(parameter)
    chosen, empty = select(owners, patterns)
    if empty:
        kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in owners)
        raise ValueError(f"{empty}: no module outside of the units has such a name; there are {', '.join(kinds)}")
    return {name: owners[name] for name in chosen}
