"""One training step as a function of explicit inputs.

    micro-batches -> forward, loss (FP32), backward -> norms of all gradients, evidence that the signal needs
                  -> gradient transform -> clip -> optimizer, selected by "loss and all gradients are finite"
                  -> controller's choice for the next step

Nothing waits for the device until the one transfer at the end, which brings the loss, the norms and the controller's
choice to the host together.

Where they show a loss that is not finite, or a spike, the step is run again to see what is to blame (`gnmr.attachment.blame`). The
optimizer has left the weights alone then, by the same selection on the device, so this is still before its step.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.attachment import AttachedController
from gnmr.attachment.blame import (
    NO_LEVEL,
    Again,
    Level,
    Levels,
    Seen,
    Start,
    Verdict,
    explain,
    find_nonfinite,
    replaying,
)
from gnmr.control import Controller, Decision
from gnmr.control.controller import Mark
from gnmr.control.evidence import UpdateNorms, spike_share
from gnmr.control.norms import Distinct, UnitNorms, gradient_norms, to_device
from gnmr.control.packet import HostPacket
from gnmr.distributed.reduce import Ranks
from gnmr.distributed.shards import is_sharded, local
from gnmr.distributed.world import ALONE, World
from gnmr.distributed.wrap import Wrapped
from gnmr.lab.data.batch import Batch, model_inputs
from gnmr.lab.models import Decoder
from gnmr.lab.train.draws import Draws
from gnmr.lab.train.experts import Experts
from gnmr.lab.train.optim import clip_gradients, skip_where
from gnmr.lab.train.transforms.base import StepContext, Transform, tensor_norms
from gnmr.names import select
from gnmr.precision import ConvertedModel
from gnmr.precision.units import module_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Those that end a run well (`stopping`)."""


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
    """Where the first non-finite number was found, see `first_nonfinite`; None in a finite step."""
    saved_bytes: int | None
    """Read from the graph, largest micro-batch; None under activation checkpointing."""
    saved_bytes_predicted: int | None
    lr: float
    """The rate that the optimizer took, the transform's factor included."""
    decision: Decision
    statistics: dict[str, float]
    """What the model tells of its forward passes (`Decoder.statistics`), mean of the micro-batches."""
    monitored: dict[str, float]
    """Gradient norms of the modules that are watched besides the units."""
    spent: tuple[float, float] | None
    """`ConvertedModel.spent` of the step; None where no path was in force (a fork's healing)."""
    saturation: dict[str, list[int]]
    """Saturated elements, and Inf or NaN, by operand, of all operators (`ConvertedModel.saturation`); empty under formats."""
    stop: int | None = None
    """The signal that came to one of several processes, see `TrainStep`."""
    slowest_rank: int | None = None
    """Which of several processes the others waited for."""
    sent: tuple[int, float] | None = None
    """Numbers that each worker sent of its gradients, and their share of all, where they are compressed."""
    verdict: Verdict | None = None
    """What is to blame, of a step that spiked or was not finite at first; the other fields are those of its retry."""


@dataclass
class _Taken:
    """A step that was taken, before the controller's choice is in force."""

    host: dict[str, np.ndarray]
    loss: Tensor
    statistics: dict[str, Tensor]
    saved: int | None
    predicted: int | None
    spent: tuple[float, float] | None
    saturation: dict[str, Tensor]
    evidence: dict[str, Tensor]
    alone: dict[str, Tensor]
    """What the packet holds besides the controller's own."""
    skip: Tensor
    """Without the spike, which only puts the optimizer off."""
    factor: float
    gradients: list[Tensor | None]
    """As the optimizer reads them, of a step that it may have been put off in; else none."""

    @property
    def nonfinite(self) -> bool:
        return bool(self.host["nonfinite"])


def loss_of(model: nn.Module, batch: Tensor | Batch, call: Callable[..., Any] | None = None) -> Tensor:
    """Mean next-token cross-entropy over the targets of `batch`, a block (B, T + 1) or packed documents, in FP32.

    A scalar on the device. Documents that share a block do not see each other. `call`: what is called in the model's
    place (`Wrapped.call`).
    """
    call = model if call is None else call
    block = batch if isinstance(batch, Batch) else Batch.of_sequences(batch)
    if isinstance(model, Decoder):
        assert block.positions is None, "models of ours read one document a block"
        logits = call(block.tokens)
    else:
        logits = call(**model_inputs(block)).logits
    return F.cross_entropy(logits.float().flatten(0, 1), block.targets.flatten())


def num_targets(batch: Tensor | Batch) -> int:
    """Tokens over which `loss_of` takes the mean."""
    return batch.num_targets if isinstance(batch, Batch) else batch[:, 1:].numel()


def objective_of(model: nn.Module, loss: Tensor) -> Tensor:
    """What backward starts from: `loss` of the last forward pass and what the model adds to it in training."""
    auxiliary = model.auxiliary_loss if isinstance(model, Decoder) else None
    return loss if auxiliary is None else loss + auxiliary


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """`Decoder.statistics`; nothing of a model that is not ours."""
    return model.statistics() if isinstance(model, Decoder) else {}


def monitored(model: nn.Module, controller: Controller, patterns: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of each module that matches and is no part of a unit, by the module's name.

    ValueError for a pattern that matches none.
    """
    in_units = {id(p) for unit in controller.units for p in unit.parameters}
    owners: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in in_units:
            owners.setdefault(name.rpartition(".")[0], []).append(parameter)
    chosen, empty = select(owners, patterns)
    if empty:
        kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in owners)
        raise ValueError(f"{empty}: no module outside of the units has such a name; there are {', '.join(kinds)}")
    return {name: owners[name] for name in chosen}


class TrainStep:
    """The fixed parts of a step: model, controller, optimizer. Calling it takes one step."""

    def __init__(
        self,
        model: nn.Module,
        controller: AttachedController,
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
        self.model, self.controller, self.optimizer = model, controller, optimizer
        self.clip_norm, self.measure_saved, self.transform = clip_norm, measure_saved, transform
        self.levels, self.world, self._stop, self._draws = levels, world, stop, draws
        self._wrapped = Wrapped(model) if wrapped is None else wrapped
        self._experts = Experts(model) if self._wrapped.fills and isinstance(model, Decoder) else None
        self._since: float | None = None
        if "micro_square" in controller.needs and world.size > 1:
            self._wrapped.keep_own()
        self._updates = UpdateNorms(controller.units, controller.ranks) if "update_norm" in controller.needs else None
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        in_units = {id(p) for unit in controller.units for p in unit.parameters}
        others = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in in_units]
        # The units first, then every other parameter by itself: all norms of a step in one batched call.
        self._of_units = Distinct(unit.parameters for unit in controller.units)
        groups = [*self._of_units.groups, *((p,) for _, p in others)]
        names = [module_of(controller.names[i]) for i in self._of_units.first]
        names += [name.removesuffix(".weight") for name, _ in others]
        self._norms = UnitNorms(groups, Ranks() if world.size > 1 else None)
        place = {id(p): len(self._of_units.groups) + i for i, (_, p) in enumerate(others)}
        self._monitored = {
            name: [place[id(p)] for p in own] for name, own in monitored(model, controller, monitor).items()
        }
        position = {id(p): i for i, p in enumerate(model.parameters())}
        places = [max(position[id(p)] for p in group) for group in groups]
        # The backward pass runs from the last module to the first.
        self._backward_order = [(i, names[i]) for i in sorted(range(len(names)), key=lambda i: -places[i])]

    def __call__(self, micro_batches: Sequence[Tensor | Batch], lr: float) -> StepResult:
        """Takes one step at rate `lr` on `micro_batches`, each (B, T + 1) int64 or a `Batch`, on the device.

        The gradient is that of the mean over all targets of the step. Waits for the device once; more often in a step
        that spikes or is not finite.
        """
        controller, levels = self.controller, (NO_LEVEL, NO_LEVEL)
        if self.levels is not None and self._wrapped.repeatable:
            levels = self.levels.now()
        start, mark = Start.of(controller.plan, self.parameters[0].device), controller.mark()
        self._since = time.perf_counter() if self._since is None else self._since
        self._wrapped.arrived = 0.0
        taken, verdict = self._take(micro_batches, lr, levels), None
        self._since = time.perf_counter()
        if not self._wrapped.repeatable:
            self._kept(taken, mark)
        elif self._looks_again(taken, levels):
            taken, verdict = self._blame(taken, micro_batches, lr, levels, start, mark)
        host = taken.host
        loss, grad_norm = float(host["loss"]), float(host["grad_norm"])
        if self.levels is not None:
            self.levels.add(loss, grad_norm)
        where, sends = None, self._wrapped.compressed
        if taken.nonfinite:
            where = self._first_nonfinite(loss, host["norms"], micro_batches)
        return StepResult(
            loss=loss,
            grad_norm_pre_clip=grad_norm,
            skipped=bool(host["skip"]),
            nonfinite_unit=where,
            saved_bytes=taken.saved,
            saved_bytes_predicted=taken.predicted,
            lr=lr * taken.factor,
            decision=controller.apply(host),
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

    def _take(self, micro_batches: Sequence[Tensor | Batch], lr: float, levels: tuple[Level, Level]) -> _Taken:
        """Takes the step; the optimizer is put off where the loss or the gradient norm is above its level."""
        controller, step = self.controller, self.controller.t + 1
        evidence: dict[str, Tensor] = {}
        if "true_gap" in controller.needs:
            passes = self._passes if self.world.size == 1 else self._own_passes
            evidence["true_gap"] = controller.true_gap(partial(passes, micro_batches))
        loss, statistics, saved, predicted, spent = self._backward(micro_batches)
        saturation = {operand: counts.sum(dim=0) for operand, counts in controller.plan.saturation().items()}
        sums: dict[str, Tensor] = {}
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
        evidence |= controller.measure(
            norms=(of_each(norms[:number]), of_each(present[:number])), sums=sums if sums else None
        )
        if "spike_share" in controller.needs:
            evidence["spike_share"] = spike_share(controller.units, self.optimizer, controller.ranks)
        grad_norm = norms.square().sum().sqrt()
        nonfinite = ~(loss.isfinite() & grad_norm.isfinite())

        skip, now, factor = nonfinite, grad_norm, 1.0
        if self.transform is not None:
            context = StepContext(step, loss, grad_norm, nonfinite, self.optimizer)
            asked = self.transform(self.parameters, context)
            skip = nonfinite if asked is None else nonfinite | asked
            factor = self.transform.lr_factor(step)
        if self.clip_norm is not None:
            if self.transform is not None:
                now = self._now().square().sum().sqrt()
            clip_gradients(self.parameters, now, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * factor
        gradients: list[Tensor | None] = []
        off = skip
        if levels[0].limit < math.inf:
            gradients = [p.grad for p in self.parameters]
            off = skip | (loss.double() > levels[0].limit) | (grad_norm > levels[1].limit)
        self._update(evidence, off)

        alone = {"loss": loss, "grad_norm": grad_norm, "nonfinite": nonfinite, "skip": skip, "norms": norms}
        alone |= _named("statistic", statistics) | _named("saturation", saturation)
        alone |= {name: sums[name] for name in ("stop", "times") if name in sums}
        host = self._observed(evidence, alone)
        return _Taken(
            host, loss, statistics, saved, predicted, spent, saturation, evidence, alone, skip, factor, gradients
        )

    def _now(self) -> Tensor:
        """Norm of each parameter's gradient as it is now, float64; over all shards, which is one collective more."""
        return (tensor_norms if any(map(is_sharded, self.parameters)) else gradient_norms)(self.parameters)

    def _summed(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """These and all else that a step sums over ranks, in one collective."""
        assert self.controller.ranks is not None
        world, device = self.world, self.parameters[0].device
        squares, present, plain = self._norms.parts()
        times, since = [0.0] * world.size, self._since or 0.0
        times[world.rank] = max(self._wrapped.arrived - since, 0.0)
        flags = [float(number in self._stop) for number in _SIGNALS]
        parts = parts | {"squares": squares, "present": present} | self.controller.parts(plain)
        if self._experts is not None:
            parts["reached"] = self._experts.take()
        parts["times"], parts["stop"] = (
            to_device(torch.tensor(numbers, dtype=torch.float64), device) for numbers in (times, flags)
        )
        return self.controller.ranks.sum(parts)

    def _kept(self, taken: _Taken, mark: Mark) -> None:
        """Several workers look for no blame: a loss that is not finite leaves the set as it is."""
        if not math.isfinite(taken.host["loss"]) and self.controller.spec.nonfinite == "find":
            self.controller.undo(mark)
            taken.host = self._observed(taken.evidence, taken.alone, keep=True)

    def _update(self, evidence: dict[str, Tensor], skip: Tensor) -> None:
        """The optimizer's step, nothing where `skip`; leaves no gradients."""
        if self._updates is not None:
            self._updates.before()
        skip_where(self.optimizer, skip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._updates is not None:
            evidence["update_norm"] = self._updates.after()

    def _observed(
        self, evidence: dict[str, Tensor], alone: dict[str, Tensor], keep: bool = False
    ) -> dict[str, np.ndarray]:
        """The controller's choice from this evidence, and what goes along, on the host."""
        packet = self.controller.observe(evidence, keep)
        for name, value in alone.items():
            packet.add(name, value)
        return packet.to_host()

    def _looks_again(self, taken: _Taken, levels: tuple[Level, Level]) -> bool:
        """Whether something is to blame for, and it can be looked for."""
        plan, host = self.controller.plan, taken.host
        if plan.shared.engine is not None or plan.shared.high_precision:
            return False
        finds = self.controller.spec.nonfinite == "find" and plan.recovery is not None
        if not math.isfinite(host["loss"]):
            return finds or self.levels is not None
        spikes = levels[0].spike(float(host["loss"])) or levels[1].spike(float(host["grad_norm"]))
        return self.levels is not None and spikes

    def _blame(
        self,
        taken: _Taken,
        micro_batches: Sequence[Tensor | Batch],
        lr: float,
        levels: tuple[Level, Level],
        start: Start,
        mark: Mark,
    ) -> tuple[_Taken, Verdict]:
        """(the step as it counts, what is to blame): it is tried again with the units to blame on the recovery path, or
        the optimizer takes the step that it was put off in."""
        controller, plan, device = self.controller, self.controller.plan, self.parameters[0].device
        loss, norm = float(taken.host["loss"]), float(taken.host["grad_norm"])
        again = Again(plan, start, device, lambda: self._mean_loss(micro_batches), lambda: self._seen(micro_batches))
        with replaying(plan, self.model, controller.unmeasured(), device):
            if not math.isfinite(loss):
                verdict = find_nonfinite(again, mark.t + 1)
            else:
                verdict = explain(again, Seen(loss, norm), levels, mark.t + 1)
        if math.isfinite(loss):
            if taken.gradients:
                for parameter, gradient in zip(self.parameters, taken.gradients, strict=True):
                    parameter.grad = gradient
                self._update(taken.evidence, taken.skip)
            if self._updates is not None:  # the signal may read it
                controller.undo(mark)
                taken.host = self._observed(taken.evidence, taken.alone)
        elif controller.spec.nonfinite == "find":
            controller.undo(mark)
            if verdict.units and controller.promote(verdict.units):
                start.again(plan, device)
                plan.begin_again(start.plan)
                controller.begin_again()
                return self._take(micro_batches, lr, levels), verdict
            taken.host = self._observed(taken.evidence, taken.alone, keep=verdict.cause != "precision")
        return taken, verdict

    def _seen(self, micro_batches: Sequence[Tensor | Batch]) -> Seen:
        """The passes alone, on the host; leaves no gradients."""
        loss = self._passes(micro_batches)
        norms, _ = self._norms()
        self.optimizer.zero_grad(set_to_none=True)
        number = len(self._of_units.groups)
        packet = HostPacket({"loss": loss, "norm": norms.square().sum().sqrt()})
        packet.add("units", self._of_units.of_each(norms[:number]))
        host = packet.to_host()
        return Seen(float(host["loss"]), float(host["norm"]), host["units"])

    def _backward(
        self, micro_batches: Sequence[Tensor | Batch]
    ) -> tuple[Tensor, dict[str, Tensor], int | None, int | None, tuple[float, float] | None]:
        """(mean loss, mean statistics of the model in float64, saved bytes, predicted bytes, what was spent); the
        gradients stay."""
        total: Tensor | None = None
        statistics: dict[str, Tensor] = {}
        plan, saved, predicted = self.controller.plan, None, None
        spent: tuple[float, float] | None = None
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
                    saved = max(saved or 0, plan.saved_bytes())
                    predicted = max(predicted or 0, plan.predicted_bytes())
                    spent = plan.spent()
                for name, value in statistics_of(self.model).items():
                    part = value.double() / len(micro_batches)
                    statistics[name] = statistics[name] + part if name in statistics else part
                with self._wrapped.accumulating(last):
                    (objective_of(self.model, loss) / (divisor / self._wrapped.workers)).backward()
            self._wrapped.after(last)
            if self._wrapped.own is None:
                self.controller.micro_step(1 / divisor if packed else None)
            else:
                self.controller.micro_step(self._wrapped.workers / divisor, self._wrapped.own if last else None)
            part = loss.detach() * (len(micro_batches) / divisor)  # of as many targets as the others: the loss itself
            total = part if total is None else total + part
        assert total is not None, "a step needs at least one micro-batch"
        if not self.measure_saved:  # activation checkpointing: what is kept shows in the recomputed passes alone
            spent = plan.spent()
        if plan.shared.high_precision:
            spent = None
        return total / len(micro_batches), statistics, saved, predicted, spent

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        """Around the passes of micro-batch `number` of the step."""
        return nullcontext() if self._draws is None else self._draws.of(number)

    def _own(self, micro_batches: Sequence[Tensor | Batch]) -> list[tuple[Tensor | Batch, float]]:
        """This process's micro-batches of the step's, each with what its loss is divided by."""
        pairs = list(zip(micro_batches, _divisors(micro_batches), strict=True))
        return pairs[self.world.rank :: self.world.size]

    def _passes(self, micro_batches: Sequence[Tensor | Batch]) -> Tensor:
        """The forward and backward passes alone; the mean loss."""
        total = torch.zeros((), device=self.parameters[0].device)
        for i, (block, divisor) in enumerate(zip(micro_batches, _divisors(micro_batches), strict=True)):
            with self._drawing(i):
                loss = loss_of(self.model, block)
                (objective_of(self.model, loss) / divisor).backward()
            total = total + loss.detach() / divisor
        return total

    def _own_passes(self, micro_batches: Sequence[Tensor | Batch]) -> None:
        """Of several processes each its own, which reduce their gradients; nothing of it is measured."""
        own = self._own(micro_batches)
        for i, (block, divisor) in enumerate(own):
            number, last = self.world.rank + i * self.world.size, i == len(own) - 1
            with self._drawing(number), self._wrapped.accumulating(last):
                loss = loss_of(self.model, block, self._wrapped.call)
                (objective_of(self.model, loss) / (divisor / self._wrapped.workers)).backward()

    def _mean_loss(self, micro_batches: Sequence[Tensor | Batch]) -> Tensor:
        """The forward passes alone."""
        parts: list[Tensor] = []
        for i, (block, divisor) in enumerate(zip(micro_batches, _divisors(micro_batches), strict=True)):
            with self._drawing(i):
                parts.append(loss_of(self.model, block) / divisor)
        return torch.stack(parts).sum()

    def _first_nonfinite(self, loss: float, norms: np.ndarray, micro_batches: Sequence[Tensor | Batch]) -> str:
        """Name of the place where the first non-finite number appeared in this step."""
        if not math.isfinite(loss):
            own = [batch for batch, _ in self._own(micro_batches)]
            found = _first(self.world, nonfinite_weight(self.model))
            return found or _first(self.world, nonfinite_output(self.model, own)) or "loss"
        for index, name in self._backward_order:
            if not math.isfinite(norms[index]):
                return name
        return "gradient norm"  # every norm is finite, their sum of squares is not


def _divisors(micro_batches: Sequence[Tensor | Batch]) -> list[float]:
    """What each micro-batch's mean loss is divided by: their number where all have as many targets."""
    counts = [num_targets(batch) for batch in micro_batches]
    return [sum(counts) / count for count in counts]


def _named(group: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{group}/{name}": value for name, value in values.items()}


def _first(world: World, found: str | None) -> str | None:
    """What the first of the processes that found something did."""
    return next((one for one in world.gather(found) if one is not None), None)


@torch.no_grad()
def nonfinite_weight(model: nn.Module) -> str | None:
    """The first parameter that is not finite in this process's part of it. Waits for the device."""
    for name, parameter in model.named_parameters():
        if not local(parameter).isfinite().all():
            return f"{name} (weights)"
    return None


@torch.no_grad()
def nonfinite_output(model: nn.Module, micro_batches: Sequence[Tensor | Batch]) -> str | None:
    """The first module whose output is not finite, in a new forward pass.

    Only called after a step with a non-finite loss, which left the weights as they were. Waits for the device.
    """
    found: list[str] = []

    def check(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return modules[name].register_forward_hook(hook)

    modules = {name: module for name, module in model.named_modules() if not any(module.children())}
    handles = [check(name) for name in modules]
    try:
        for block in micro_batches:
            loss_of(model, block)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    plan: ConvertedModel,
    blocks: Tensor | Batch,
    batch_size: int,
    low: bool = False,
    world: World = ALONE,
    draws: Draws | None = None,
) -> float:
    """Mean cross-entropy over the targets of `blocks` on the 16-bit path, or with every operator on the `low` one,
    nats. Waits for the device. Of several processes each takes some of the batches."""
    was_training = model.training
    model.eval()
    batches = list(blocks.split(batch_size))
    with plan.on_low_path() if low else plan.high_precision():
        total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
        for i in range(world.rank, len(batches) + -len(batches) % world.size, world.size):
            batch = batches[i] if i < len(batches) else batches[0]  # shards are gathered in passes: all take as many
            with nullcontext() if draws is None else draws.of(i, evaluation=True):
                loss = loss_of(model, batch.to(total.device)).double() * num_targets(batch)
            total += loss if i < len(batches) else 0.0
        if world.size > 1:
            total = Ranks().sum({"total": total})["total"]
    model.train(was_training)
    return float(total) / num_targets(blocks)
