"""One training step as a function of explicit inputs.

    micro-batches -> forward, loss (FP32), backward -> norms of all gradients
                  -> `Router.finish_step`: evidence, the controller's choice for the next step
                       between choice and transfer: gradient transform -> clip -> optimizer, selected by "loss and all
                       gradients are finite"

Nothing waits for the device until the single transfer at the end, which brings the loss, the norms and the risks of the
units to the host. If the loss spikes or is not finite, the step is run again to find the cause
(`gnmr.lab.train.retry`).
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment import Router
from gnmr.attachment.blame import NO_LEVEL, Level, Levels, Verdict
from gnmr.attachment.ranks.reduce import DistributedRanks, is_sharded
from gnmr.attachment.ranks.world import ALONE, World
from gnmr.attachment.repeat import Seen, Start
from gnmr.control import Decision, HostPacket
from gnmr.control.device import to_device
from gnmr.control.norms import Distinct, UnitNorms, gradient_norms
from gnmr.control.unit import Slice, identity, whole_of
from gnmr.conversion.cost import Spent
from gnmr.conversion.unit_names import module_of
from gnmr.lab.data.batch import Batch
from gnmr.lab.models import Decoder
from gnmr.lab.rivals.transforms import StepContext, Transform, tensor_norms
from gnmr.lab.train.loss import Draws, Experts, divisors, loss_of, objective_of, statistics_of
from gnmr.lab.train.optim import clip_gradients, skip_where
from gnmr.lab.train.retry import keep_set, look_again, looks_again, nonfinite_place
from gnmr.lab.train.wrap import Wrapped
from gnmr.patterns import select

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""The signals that end a run gracefully (`stopping`)."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step on the host."""

    loss: float
    """Mean cross-entropy over the step's tokens, in nats."""
    grad_norm_pre_clip: float
    """Global 2-norm of the gradient before clipping."""
    skipped: bool
    """True if the optimizer did not step: the loss or a gradient was not finite, or the transform requested it."""
    nonfinite_unit: str | None
    """Where the first non-finite number was found, see `gnmr.lab.train.retry`. None in a finite step."""
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
    verdict: Verdict | None = None
    """The cause of a spike or of a non-finite first attempt. The other fields describe the retried step."""


@dataclass
class Taken:
    """A step after its passes and before the controller's choice takes effect. Tensors are on the device."""

    loss: Tensor
    norms: Tensor
    """Norms of all groups of parameters (`TrainStep`)."""
    of_units: tuple[Tensor, Tensor]
    """(norm, observed) of the units."""
    statistics: dict[str, Tensor]
    saturation: dict[str, Tensor]
    evidence: dict[str, Tensor]
    sums: dict[str, Tensor] | None
    """Sums over ranks if there are several processes."""
    saved: int | None
    predicted: int | None
    spent: Spent | None
    own: dict[str, Tensor] = field(default_factory=dict)
    """Contents of the packet besides the controller's."""
    host: dict[str, np.ndarray] = field(default_factory=dict)
    """The packet on the host."""
    skip: Tensor | None = None
    """Whether to skip the update for other reasons than a spike, which only postpones it."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients as the optimizer reads them, in a step whose update may be postponed; else empty."""

    def to_host(self, packet: HostPacket) -> None:
        """Transfer the controller's choice and the step's values to the host. Waits for the device."""
        for name, value in self.own.items():
            packet.add(name, value)
        self.host = packet.to_host()


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
        if "micro_square" in router.needs and world.size > 1:
            self._wrapped.keep_own()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        others = _others(model, router)
        # The units come first, then every other parameter separately: one batched call returns all norms of a step.
        self._of_units = Distinct(unit.parameters for unit in router.units)
        groups = [*self._of_units.groups, *((p,) for _, p in others)]
        names = [module_of(router.names[i]) for i in self._of_units.first]
        names += [name.removesuffix(".weight") for name, _ in others]
        self._norms = UnitNorms(groups, DistributedRanks() if world.size > 1 else None)
        place = {id(p): len(self._of_units.groups) + i for i, (_, p) in enumerate(others)}
        self._monitored = {name: [place[id(p)] for p in own] for name, own in monitored(model, router, monitor).items()}
        position = {id(p): i for i, p in enumerate(model.parameters())}
        places = [max(position[id(whole_of(p))] for p in group) for group in groups]
        # The backward pass runs from the last module to the first.
        self._backward_order = [(i, names[i]) for i in sorted(range(len(names)), key=lambda i: -places[i])]

    def __call__(self, micro_batches: Sequence[Tensor | Batch], lr: float) -> StepResult:
        """Take one step at learning rate `lr` on `micro_batches`, each (B, T + 1) int64 or a `Batch`, on the device.

        The gradient is the gradient of the mean over all targets of the step. Waits for the device once, and more often
        if the step spikes or is not finite.
        """
        router, levels = self.router, (NO_LEVEL, NO_LEVEL)
        if self.levels is not None and self._wrapped.repeatable:
            levels = self.levels.now()
        start = Start.of(router.converted, self.parameters[0].device)
        self._since = time.perf_counter() if self._since is None else self._since
        self._wrapped.arrived = 0.0
        taken, verdict = self.passes(micro_batches), None

        def between(packet: HostPacket) -> Mapping[str, np.ndarray]:
            nonlocal taken, verdict
            self.update(taken, packet, lr, levels)
            self._since = time.perf_counter()
            if not self._wrapped.repeatable:
                keep_set(self, taken)
            elif looks_again(self, taken, levels):
                taken, verdict = look_again(self, taken, micro_batches, lr, levels, start)
            return taken.host

        decision = router.finish_step(evidence=taken.evidence, norms=taken.of_units, sums=taken.sums, between=between)
        return self._result(taken, decision, lr, verdict, micro_batches)

    def _result(
        self,
        taken: Taken,
        decision: Decision,
        lr: float,
        verdict: Verdict | None,
        micro_batches: Sequence[Tensor | Batch],
    ) -> StepResult:
        host, sends = taken.host, self._wrapped.compressed
        loss, grad_norm = float(host["loss"]), float(host["grad_norm"])
        if self.levels is not None:
            self.levels.add(loss, grad_norm)
        return StepResult(
            loss=loss,
            grad_norm_pre_clip=grad_norm,
            skipped=bool(host["skip"]),
            nonfinite_unit=self._nonfinite(loss, host["norms"], micro_batches) if host["nonfinite"] else None,
            saved_bytes=taken.saved,
            saved_bytes_predicted=taken.predicted,
            lr=lr,
            decision=decision,
            statistics={name: float(host[f"statistic/{name}"]) for name in taken.statistics},
            monitored={
                name: float(torch.from_numpy(host["norms"][own]).norm()) for name, own in self._monitored.items()
            },
            spent=taken.spent,
            saturation={name: host[f"saturation/{name}"].tolist() for name in taken.saturation},
            stop=next((s for s, n in zip(_SIGNALS, host["stop"], strict=True) if n), None) if "stop" in host else None,
            slowest_rank=int(host["times"].argmax()) if "times" in host else None,
            sent=None if sends is None else (sends.sent, sends.sent / sends.dense),
            verdict=verdict,
        )

    def passes(self, micro_batches: Sequence[Tensor | Batch]) -> Taken:
        """Run the step's passes and compute the norms of all gradients over all ranks."""
        evidence: dict[str, Tensor] = {}
        if "true_gap" in self.router.needs:
            evidence["true_gap"] = self.router.true_gap(partial(self._rehearse, micro_batches))
        loss, statistics, saved, predicted, spent = self._backward(micro_batches)
        saturation = {operand: counts.sum(dim=0) for operand, counts in self.router.converted.saturation().items()}
        sums: dict[str, Tensor] | None = None
        if self.world.size > 1:
            sums = self._summed({"loss": loss} | _named("statistic", statistics) | _named("saturation", saturation))
            loss = sums["loss"].float()
            norms, present = sums["squares"].sqrt(), sums["present"] > 0
            if self._experts is not None:
                self._experts.drop(sums["reached"])
                present = self._norms.observed()
            statistics = {name: sums[f"statistic/{name}"] for name in statistics}
            saturation = {name: sums[f"saturation/{name}"].long() for name in saturation}
        else:
            norms, present = self._norms()
        number, of_each = len(self._of_units.groups), self._of_units.of_each
        of_units = of_each(norms[:number]), of_each(present[:number])
        return Taken(loss, norms, of_units, statistics, saturation, evidence, sums, saved, predicted, spent)

    def update(self, taken: Taken, packet: HostPacket, lr: float, levels: tuple[Level, Level]) -> None:
        """Update the weights and transfer the packet to the host.

        The update is masked if the loss or the gradient norm is not finite or above its level.
        """
        loss, grad_norm = taken.loss, taken.norms.square().sum().sqrt()
        nonfinite = ~(loss.isfinite() & grad_norm.isfinite())
        skip, now = nonfinite, grad_norm
        if self.transform is not None:
            context = StepContext(self.router.t, loss, grad_norm, nonfinite, self.optimizer)
            asked = self.transform(context)
            skip = nonfinite if asked is None else nonfinite | asked
        if self.clip_norm is not None:
            if self.transform is not None:  # over all shards, which costs one more collective
                norms_of = tensor_norms if any(map(is_sharded, self.parameters)) else gradient_norms
                now = norms_of(self.parameters).square().sum().sqrt()
            clip_gradients(self.parameters, now, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        off = skip
        if levels[0].limit < math.inf:
            taken.gradients = [p.grad for p in self.parameters]
            off = skip | (loss.double() > levels[0].limit) | (grad_norm > levels[1].limit)
        self._optimize(off)
        taken.skip = skip
        taken.own = {"loss": loss, "grad_norm": grad_norm, "nonfinite": nonfinite, "skip": skip, "norms": taken.norms}
        taken.own |= _named("statistic", taken.statistics) | _named("saturation", taken.saturation)
        taken.own |= {name: taken.sums[name] for name in ("stop", "times")} if taken.sums is not None else {}
        taken.to_host(packet)

    def make_up(self, taken: Taken) -> None:
        """Take the optimizer's step that a spike postponed."""
        if taken.gradients:
            assert taken.skip is not None
            for parameter, gradient in zip(self.parameters, taken.gradients, strict=True):
                parameter.grad = gradient
            self._optimize(taken.skip)

    def _optimize(self, skip: Tensor) -> None:
        skip_where(self.optimizer, skip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _summed(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over ranks of `parts` and of the step's other values, with one collective."""
        assert self.router.controller.ranks is not None
        world, device = self.world, self.parameters[0].device
        squares, present, plain = self._norms.parts()
        times, since = [0.0] * world.size, self._since or 0.0
        times[world.rank] = max(self._wrapped.arrived - since, 0.0)
        flags = [float(number in self._stop) for number in _SIGNALS]
        parts = parts | {"squares": squares, "present": present} | self.router.parts(plain)
        if self._experts is not None:
            parts["reached"] = self._experts.take()
        parts["times"], parts["stop"] = (
            to_device(torch.tensor(numbers, dtype=torch.float64), device) for numbers in (times, flags)
        )
        return self.router.controller.ranks.sum(parts)

    def _backward(
        self, micro_batches: Sequence[Tensor | Batch]
    ) -> tuple[Tensor, dict[str, Tensor], int | None, int | None, Spent | None]:
        """Run the passes; return (mean loss, mean statistics, saved bytes, predicted bytes, spent). Gradients stay."""
        total: Tensor | None = None
        statistics: dict[str, Tensor] = {}
        converted, saved, predicted = self.router.converted, None, None
        spent: Spent | None = None
        packed = any(isinstance(batch, Batch) for batch in micro_batches)
        heals = converted.shared.high_precision  # the operators are plain linears, which nothing measures
        own = self._own(micro_batches)
        for i, (block, divisor) in enumerate(own):
            last = i == len(own) - 1
            with self._drawing(self.world.rank + i * self.world.size):
                with self._wrapped.accumulating(last):
                    loss = loss_of(self.model, block, self._wrapped.call)
                if self._experts is not None:
                    self._experts.add()
                if self.measure_saved and not heals:
                    kept, foreseen, spent = converted.cost.of_pass()
                    saved, predicted = max(saved or 0, kept), max(predicted or 0, foreseen)
                for name, value in statistics_of(self.model).items():
                    part = value.double() / len(micro_batches)
                    statistics[name] = statistics[name] + part if name in statistics else part
                with self._wrapped.accumulating(last):
                    (objective_of(self.model, loss) / (divisor / self._wrapped.workers)).backward()
            self._wrapped.after(last)
            if self._wrapped.own is None:
                self.router.micro_step(1 / divisor if packed else None)
            else:
                self.router.micro_step(self._wrapped.workers / divisor, self._wrapped.own if last else None)
            part = loss.detach() * (len(micro_batches) / divisor)  # equals the loss if all target counts are equal
            total = part if total is None else total + part
        assert total is not None, "a step needs at least one micro-batch"
        if not self.measure_saved and not heals:  # under activation checkpointing recomputed passes show saved tensors
            spent = converted.cost.spent()
        return total / len(micro_batches), statistics, saved, predicted, spent

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """Provide the random numbers of micro-batch `number` of the step."""
        return nullcontext() if self._draws is None else self._draws.of(number)

    def _own(self, micro_batches: Sequence[Tensor | Batch]) -> list[tuple[Tensor | Batch, float]]:
        """Return this process's micro-batches of the step, each with the divisor of its loss."""
        pairs = list(zip(micro_batches, divisors(micro_batches), strict=True))
        return pairs[self.world.rank :: self.world.size]

    def seen(self, micro_batches: Sequence[Tensor | Batch]) -> Seen:
        """Run only the passes and return their results on the host. No gradients remain."""
        loss = self._rehearse(micro_batches)
        norms, _ = self._norms()
        self.optimizer.zero_grad(set_to_none=True)
        units = self._of_units.of_each(norms[: len(self._of_units.groups)])
        host = HostPacket({"loss": loss, "norm": norms.square().sum().sqrt(), "units": units}).to_host()
        return Seen(float(host["loss"]), float(host["norm"]), host["units"])

    def mean_loss(self, micro_batches: Sequence[Tensor | Batch]) -> Tensor:
        """Run only the forward passes and return the mean loss."""
        parts: list[Tensor] = []
        for i, (block, divisor) in enumerate(zip(micro_batches, divisors(micro_batches), strict=True)):
            with self._drawing(i):
                parts.append(loss_of(self.model, block) / divisor)
        return torch.stack(parts).sum()

    def _rehearse(self, micro_batches: Sequence[Tensor | Batch]) -> Tensor:
        """Run this process's passes without measuring, and return its part of the mean loss. Gradients stay."""
        own, total = self._own(micro_batches), torch.zeros((), device=self.parameters[0].device)
        workers = self._wrapped.workers if self.world.size > 1 else 1  # ranks average gradients
        for i, (block, divisor) in enumerate(own):
            number, last = self.world.rank + i * self.world.size, i == len(own) - 1
            with self._drawing(number), self._wrapped.accumulating(last):
                loss = loss_of(self.model, block, self._wrapped.call)
                (objective_of(self.model, loss) / (divisor / workers)).backward()
            total = total + loss.detach() / divisor
        return total

    def _nonfinite(self, loss: float, norms: np.ndarray, micro_batches: Sequence[Tensor | Batch]) -> str:
        """Return the place where the first non-finite number appeared in this step."""
        if not math.isfinite(loss):
            return nonfinite_place(self.model, self.world, [batch for batch, _ in self._own(micro_batches)])
        names = (name for i, name in self._backward_order if not math.isfinite(norms[i]))
        return next(names, "gradient norm")  # all norms are finite, but their sum of squares is not


def _named(group: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": value for name, value in values.items()}


def _others(model: nn.Module, router: Router) -> list[tuple[str, nn.Parameter | Slice]]:
    """Return the trained parameters outside of the units, and free slices of parameters that are partly in units."""
    in_units = {identity(p) for unit in router.units for p in unit.parameters}
    in_part = {id(whole_of(p)) for unit in router.units for p in unit.parameters if isinstance(p, Slice)}
    found: list[tuple[str, nn.Parameter | Slice]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) in in_part:
            parts = [Slice(parameter, i) for i in range(len(parameter))]
            found += [(f"{name}.{part.index}", part) for part in parts if part.key not in in_units]
        elif parameter.requires_grad and id(parameter) not in in_units:
            found.append((name, parameter))
    return found


def monitored(model: nn.Module, router: Router, patterns: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """Return the trainable parameters of each matching module that is not part of a unit, by the module's name.

    Raises ValueError if a pattern matches no module.
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
