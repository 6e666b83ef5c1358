"""What a training step leaves: on the device before its choice is in force, and on the host afterwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from gnmr.attachment import Router
from gnmr.attachment.blame import Verdict
from gnmr.control import Decision, HostPacket
from gnmr.names import select


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
    spent: tuple[float, float] | None
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
    spent: tuple[float, float] | None
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


def monitored(model: nn.Module, router: Router, patterns: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of each module that matches and is no part of a unit, by the module's name.

    ValueError for a pattern that matches none.
    """
    in_units = {id(p) for unit in router.units for p in unit.parameters}
    owners: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in in_units:
            owners.setdefault(name.rpartition(".")[0], []).append(parameter)
    chosen, empty = select(owners, patterns)
    if empty:
        kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in owners)
        raise ValueError(f"{empty}: no module outside of the units has such a name; there are {', '.join(kinds)}")
    return {name: owners[name] for name in chosen}
