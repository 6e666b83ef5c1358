"""One training step as a function of explicit inputs.

    micro-batches -> forward, loss (FP32), backward -> norms of all gradients
                  -> `Router.finish_step`: evidence, the controller's choice for the next step
                       between choice and transfer: gradient transform -> clip -> optimizer, selected by "loss and all
                       gradients are finite"

Nothing waits for the device until the one transfer at the end, which brings the loss, the norms and the units'
risks to the host together. If they show a loss that is not finite, or a spike, the step is run again to see what is to
blame (`gnmr.lab.train.retry`).
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
from gnmr.attachment.repeat import Seen, Start
from gnmr.control import Decision, HostPacket
from gnmr.control.device import to_device
from gnmr.control.norms import Distinct, UnitNorms, gradient_norms
from gnmr.control.unit import Slice, identity, whole_of
from gnmr.distributed.reduce import Ranks
from gnmr.distributed.shards import is_sharded
from gnmr.distributed.world import ALONE, World
from gnmr.distributed.wrap import Wrapped
from gnmr.lab.data.batch import Batch
from gnmr.lab.models import Decoder
from gnmr.lab.train.loss import Draws, Experts, divisors, loss_of, objective_of, statistics_of
from gnmr.lab.train.optim import clip_gradients, skip_where
from gnmr.lab.train.retry import keep_set, look_again, looks_again, nonfinite_place
from gnmr.lab.train.transforms import StepContext, Transform, tensor_norms
from gnmr.names import select
from gnmr.precision.cost import Spent
from gnmr.precision.units import module_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that end a run well (`stopping`)."""


@dataclass(frozen=True)
class StepResult:
    """What a step left on the host."""

    loss: float
    """Mean cross-entropy over the step's tokens, nats."""
    grad_norm_pre_clip: float
    """Global 2-norm of the gradient before clipping."""
    skipped: bool
    """The optimizer did not step: the loss or a gradient was not finite, or the transform asked for it."""
    nonfinite_unit: str | None
    """Where the first non-finite number was found, see `gnmr.lab.train.retry`; None in a finite step."""
    saved_bytes: int | None
    """Read from the graph, largest micro-batch; None under activation checkpointing."""
    saved_bytes_predicted: int | None
    lr: float
    """The rate that the optimizer took."""
    decision: Decision
    statistics: dict[str, float]
    """What the model tells of its forward passes (`Decoder.statistics`), mean of the micro-batches."""
    monitored: dict[str, float]
    """Gradient norms of the modules that are watched besides the units."""
    spent: Spent | None
    """`ConvertedModel.cost.spent` of the step; None where no path was in force (a fork's healing)."""
    saturation: dict[str, list[int]]
    """Saturated elements, and Inf or NaN, by operand (`ConvertedModel.saturation`); empty for formats."""
    stop: int | None = None
    """The signal that came to one of several processes, see `TrainStep`."""
    slowest_rank: int | None = None
    """Which of several processes the others waited for."""
    sent: tuple[int, float] | None = None
    """Numbers that each worker sent of its gradients, and their share of all, where they are compressed."""
    verdict: Verdict | None = None
    """What is to blame, of a step that spiked or was not finite at first; the other fields are those of its retry."""


@dataclass
class Taken:
    """A step whose passes are over, before the controller's choice is in force. Tensors are on the device."""

    loss: Tensor
    norms: Tensor
    """Of all groups of parameters (`TrainStep`)."""
    of_units: tuple[Tensor, Tensor]
    """(norm, observed) of the units."""
    statistics: dict[str, Tensor]
    saturation: dict[str, Tensor]
    evidence: dict[str, Tensor]
    sums: dict[str, Tensor] | None
    """Over ranks, of several processes."""
    saved: int | None
    predicted: int | None
    spent: Spent | None
    own: dict[str, Tensor] = field(default_factory=dict)
    """What the packet holds besides the controller's own."""
    host: dict[str, np.ndarray] = field(default_factory=dict)
    """The packet on the host."""
    skip: Tensor | None = None
    """Without the spike, which only puts the optimizer off."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """As the optimizer reads them, of a step that it may have been put off in; else none."""

    def to_host(self, packet: HostPacket) -> None:
        """Bring the controller's choice, and what goes along, to the host. Waits for the device."""
        for name, value in self.own.items():
            packet.add(name, value)
        self.host = packet.to_host()


class TrainStep:
    """The fixed parts of a step: model, router, optimizer. Calling it takes one step."""

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
        """`monitor`: patterns of modules outside of the units whose norms every result shall hold. `levels`: of the
        steps before; given, a step that spikes or is not finite gets a verdict. `world`, `wrapped`: the processes that
        take the step together, each some of its micro-batches, and the model as they run it. `stop`: signals that came
        to this process; of several processes all learn of them in the same step (`StepResult.stop`). `draws`: what
        gives each micro-batch random numbers of its own, begun for the step by the caller; None: they draw in turn."""
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
        # The units first, then every other parameter by itself: all norms of a step in one batched call.
        self._of_units = Distinct(unit.parameters for unit in router.units)
        groups = [*self._of_units.groups, *((p,) for _, p in others)]
        names = [module_of(router.names[i]) for i in self._of_units.first]
        names += [name.removesuffix(".weight") for name, _ in others]
        self._norms = UnitNorms(groups, Ranks() if world.size > 1 else None)
        place = {id(p): len(self._of_units.groups) + i for i, (_, p) in enumerate(others)}
        self._monitored = {name: [place[id(p)] for p in own] for name, own in monitored(model, router, monitor).items()}
        position = {id(p): i for i, p in enumerate(model.parameters())}
        places = [max(position[id(whole_of(p))] for p in group) for group in groups]
        # The backward pass runs from the last module to the first.
        self._backward_order = [(i, names[i]) for i in sorted(range(len(names)), key=lambda i: -places[i])]

    def __call__(self, micro_batches: Sequence[Tensor | Batch], lr: float) -> StepResult:
        """Take one step at rate `lr` on `micro_batches`, each (B, T + 1) int64 or a `Batch`, on the device.

        The gradient is that of the mean over all targets of the step. Waits for the device once; more often in a step
        that spikes or is not finite.
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
        """Run the step's passes and take the norms of all gradients, over all ranks."""
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
        """Take the optimizer's step, unless the loss or the gradient norm is not finite or above its level, and bring
        the packet to the host."""
        loss, grad_norm = taken.loss, taken.norms.square().sum().sqrt()
        nonfinite = ~(loss.isfinite() & grad_norm.isfinite())
        skip, now = nonfinite, grad_norm
        if self.transform is not None:
            context = StepContext(self.router.t, loss, grad_norm, nonfinite, self.optimizer)
            asked = self.transform(context)
            skip = nonfinite if asked is None else nonfinite | asked
        if self.clip_norm is not None:
            if self.transform is not None:  # over all shards, which is one collective more
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
        """Take the optimizer's step that a spike put off."""
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
        """Return the sums of these and of all else that a step sums over ranks: one collective."""
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
        """Return (mean loss, mean statistics of the model, saved bytes, predicted bytes, what was spent); the gradients
        stay."""
        total: Tensor | None = None
        statistics: dict[str, Tensor] = {}
        converted, saved, predicted = self.router.converted, None, None
        spent: Spent | None = None
        packed = any(isinstance(batch, Batch) for batch in micro_batches)
        own = self._own(micro_batches)
        for i, (block, divisor) in enumerate(own):
            last = i == len(own) - 1
            with self._drawing(self.world.rank + i * self.world.size):
                with self._wrapped.accumulating(last):
                    loss = loss_of(self.model, block, self._wrapped.call)
                if self._experts is not None:
                    self._experts.add()
                if self.measure_saved:
                    saved = max(saved or 0, converted.cost.saved_bytes())
                    predicted = max(predicted or 0, converted.cost.predicted_bytes())
                    spent = converted.cost.spent()
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
            part = loss.detach() * (len(micro_batches) / divisor)  # of as many targets as the others: the loss itself
            total = part if total is None else total + part
        assert total is not None, "a step needs at least one micro-batch"
        if not self.measure_saved:  # activation checkpointing: what is kept shows in the recomputed passes alone
            spent = converted.cost.spent()
        if converted.shared.high_precision:
            spent = None
        return total / len(micro_batches), statistics, saved, predicted, spent

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """Around the passes of micro-batch `number` of the step."""
        return nullcontext() if self._draws is None else self._draws.of(number)

    def _own(self, micro_batches: Sequence[Tensor | Batch]) -> list[tuple[Tensor | Batch, float]]:
        """Return this process's micro-batches of the step's, each with what its loss is divided by."""
        pairs = list(zip(micro_batches, divisors(micro_batches), strict=True))
        return pairs[self.world.rank :: self.world.size]

    def seen(self, micro_batches: Sequence[Tensor | Batch]) -> Seen:
        """Run the passes alone and return what they show, on the host; leaves no gradients."""
        loss = self._rehearse(micro_batches)
        norms, _ = self._norms()
        self.optimizer.zero_grad(set_to_none=True)
        units = self._of_units.of_each(norms[: len(self._of_units.groups)])
        host = HostPacket({"loss": loss, "norm": norms.square().sum().sqrt(), "units": units}).to_host()
        return Seen(float(host["loss"]), float(host["norm"]), host["units"])

    def mean_loss(self, micro_batches: Sequence[Tensor | Batch]) -> Tensor:
        """Run the forward passes alone."""
        parts: list[Tensor] = []
        for i, (block, divisor) in enumerate(zip(micro_batches, divisors(micro_batches), strict=True)):
            with self._drawing(i):
                parts.append(loss_of(self.model, block) / divisor)
        return torch.stack(parts).sum()

    def _rehearse(self, micro_batches: Sequence[Tensor | Batch]) -> Tensor:
        """Run this process's passes; nothing of them is measured. Return its part of the mean loss; gradients stay."""
        own, total = self._own(micro_batches), torch.zeros((), device=self.parameters[0].device)
        workers = self._wrapped.workers if self.world.size > 1 else 1  # ranks take the mean of gradients
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
        return next(names, "gradient norm")  # every norm is finite, their sum of squares is not


def _named(group: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": value for name, value in values.items()}


def _others(model: nn.Module, router: Router) -> list[tuple[str, nn.Parameter | Slice]]:
    """The trained parameters that no unit has, and slices that no unit has of those that units have in part."""
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
    """The trainable parameters of each module that matches and is no part of a unit, by the module's name.

    ValueError for a pattern that matches none.
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
