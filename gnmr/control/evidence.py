"""Evidence of a step besides the units' gradient norms; only what a signal needs is measured.

The evidence of one step maps names to tensors over the U units, (U,) float64 on their device; `observed` is bool.
Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.control.device import all_set, to_device
from gnmr.control.norms import Distinct, OutputGradients, UnitNorms
from gnmr.control.ranks import Ranks
from gnmr.control.unit import Slice, Unit

EVIDENCE: dict[str, str] = {
    "norm": "2-norm of the unit's gradient after accumulation, before clipping; always there",
    "observed": "the unit had a gradient in this step, and not one of exact zeros (bool); always there",
    "micro_square": "mean over the step's micro-batches of the squared norm of that micro-batch's own gradient",
    "gap_low": "sum over tokens of ||grad_output||^2 ||x - Q(x)||^2 with the low-cost path's Q: its expected squared "
    "error of the weight gradient; of a recipe that casts grad_output the same of that operand besides",
    "gap_recovery": "the same with the recovery path's Q",
    "mse": "mean of (x - Q(x))^2 on the low-cost path; of a recipe the forward pass's cast",
    "price": "what recovery saves: price_fprop - price_fprop_recovery, nats, where a path casts what fprop reads; "
    "elsewhere the squared error that it takes off the weight gradient, as a share of all units' squared gradient",
    "price_fprop": "by how much the loss is higher because fprop is on the low-cost path, nats, by the empirical "
    "Fisher matrix; the sum of the unit's operators",
    "price_dgrad": "||d||^2 / ||g||^2 of the gradient that dgrad hands on from the low-cost path; the operators' mean",
    "price_wgrad": "the same of the weight gradient, of the measured tokens",
    "price_fprop_recovery": "price_fprop of the recovery path",
    "price_dgrad_recovery": "price_dgrad of the recovery path",
    "price_wgrad_recovery": "price_wgrad of the recovery path",
    "input_std": "standard deviation of the elements of the unit's input",
    "weight_std": "standard deviation of the elements of the unit's weights",
    "true_gap": "squared distance of the gradients of both paths, run on the same batch",
}
PATH_EVIDENCE = ("gap_low", "gap_recovery", "mse", "input_std")
"""Measured by the paths themselves, for the low-cost path, whichever path the unit ran on."""
PRICE_EVIDENCE = (
    "price",
    *(f"price_{gemm}{path}" for path in ("", "_recovery") for gemm in ("fprop", "dgrad", "wgrad")),
)
"""Measured by price meters for both paths, whichever path the unit ran on."""


def missing(needs: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the needs that are not given. Raises ValueError if a name is not evidence."""
    for name in needs:
        if name not in EVIDENCE:
            raise ValueError(f"evidence {name!r} is not known: use one of {', '.join(EVIDENCE)}")
    return [name for name in needs if name not in given]


def without_zeros(evidence: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the evidence with every unit whose gradient is exactly 0 marked as unobserved.

    A module that did not run leaves zeros or None, depending on `zero_grad(set_to_none=...)`, empty batches, masked
    labels and the reduction over processes. The difference carries no information about the unit. Evidence measured
    during its passes becomes 0 as well; `weight_std` is measured without a gradient. Does not wait for the device.
    """
    norm, observed = evidence["norm"], evidence["observed"]
    if all_set(norm):
        return evidence
    zeros = observed & (norm == 0)
    return {
        name: values if name in ("norm", "weight_std") else values.masked_fill(zeros, 0)
        for name, values in evidence.items()
    }


def _own(parameter: nn.Parameter | Slice, gradients: Mapping[int, Tensor]) -> Tensor | None:
    if not isinstance(parameter, Slice):
        return gradients.get(id(parameter))
    whole = gradients.get(id(parameter.parameter))
    return None if whole is None else parameter.of(whole)


class MicroNorms:
    """Squared gradient norms of single micro-batches, from gradients that accumulate. Keeps one copy of these."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._distinct = Distinct(unit.parameters for unit in units)
        self._groups = self._distinct.groups
        self._before: list[list[Tensor | None]] = [[None] * len(group) for group in self._groups]
        self._sum: Tensor | None = None
        self._weighted = False
        self.count = self._empty = 0

    @torch.no_grad()
    def add(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """Record a micro-batch; call it after each micro-batch's backward pass.

        Args:
            fraction: the part of the step's mean loss that the micro-batch contributes; None: equal parts. With 0 (all
                of its labels are masked) it is in no mean.
            gradients: this process's own gradients by parameter id, if the parameters already hold the mean over
                processes.

        Raises ValueError if some micro-batches of a step have a fraction and others have none.
        """
        if self.count and self._weighted is not (fraction is not None):
            raise ValueError("micro_step: give all micro-batches of a step their fraction of the loss, or none of them")
        self._weighted = fraction is not None
        self.count += 1
        if fraction == 0:
            self._empty += 1
            return
        squares = []
        for group, before in zip(self._groups, self._before, strict=True):
            square = torch.zeros((), dtype=torch.float64, device=group[0].device)
            for i, parameter in enumerate(group):
                gradient = parameter.grad if gradients is None else _own(parameter, gradients)
                if gradient is None:
                    continue
                earlier = before[i]
                own = gradient.float() if earlier is None else gradient.float() - earlier.float()
                square = square + own.square().sum(dtype=torch.float64)
                before[i] = gradient.clone()
            squares.append(square if fraction is None else square / fraction**2)
        now = torch.stack(squares)
        self._sum = now if self._sum is None else self._sum + now

    def parts(self) -> Tensor:
        """Return (U + 1,): this process's terms of the sum, and its number of micro-batches; start a new step.

        All micro-batches must have been added with their `fraction`.
        """
        total, count = self._sum, float(self.count - self._empty)
        assert total is not None and self._weighted
        self.reset()
        return torch.cat([self._distinct.of_each(total), torch.full_like(total[:1], count)])

    def take(self) -> Tensor:
        """Return the step's mean (U,) and start a new step.

        It is 0 if fewer than two micro-batches contribute to the loss, because nothing can be compared then. Raises
        ValueError after fewer than two micro-batches.
        """
        came, count, total = self.count, self.count - self._empty, self._sum
        self.reset()
        if came < 2:
            raise ValueError(
                f"micro_square needs two or more micro-batches a step, {came} came: call micro_step() after each "
                "backward"
            )
        if count < 2 or total is None:
            total, count = torch.zeros(len(self._groups), dtype=torch.float64, device=self._groups[0][0].device), 1
        # Each backward pass ran on a part of the mean loss, so its gradient is 1/count of the micro-batch's own.
        return self._distinct.of_each(total / count if self._weighted else total * count)

    def reset(self) -> None:
        """Forget the micro-batches since the last `take`."""
        self._before = [[None] * len(group) for group in self._groups]
        self._sum, self.count, self._empty = None, 0, 0


def of_shards(groups: Sequence[Sequence[Tensor | Slice]], ranks: Ranks | None) -> Ranks | None:
    """Return `ranks` if they hold parts of these parameters, else None."""
    return ranks if ranks is not None and any(ranks.is_sharded(p) for group in groups for p in group) else None


def part_of(x: Tensor, of: Tensor | Slice, ranks: Ranks | None) -> Tensor:
    """Return this rank's term in a sum of `x`, a tensor of the parameter `of`; zero if another rank adds the same."""
    if ranks is None:
        return x
    own = ranks.local(x)
    return own if ranks.counts(of) else own.flatten()[:0]


def summed(values: Tensor, ranks: Ranks | None) -> Tensor:
    """Return the sum of `values` over ranks: one collective."""
    return values if ranks is None else ranks.sum({"values": values})["values"]


@torch.no_grad()
def weight_std(units: Sequence[Unit], ranks: Ranks | None = None) -> Tensor:
    """Return the standard deviation (U,) of each unit's weights: its parameters of at least two dimensions, else all.

    If `ranks` hold parts of the weights, sums and squares are reduced over ranks in a separate collective.
    """
    distinct = Distinct(unit.parameters for unit in units)
    weights = [[p for p in group if p.ndim >= 2] or list(group) for group in distinct.groups]
    if (holders := of_shards(weights, ranks)) is None:
        elements = [torch.cat([p.detach().float().flatten() for p in group]) for group in weights]
        return distinct.of_each(torch.stack([one.std(correction=0).double() for one in elements]))
    sums = []
    for group in weights:
        own = torch.cat([part_of(p.detach(), p, holders).double().flatten() for p in group])
        sums.append(torch.stack([own.sum(), own.square().sum()]))
    numbers = torch.tensor([sum(p.numel() for p in group) for group in weights], dtype=torch.float64, device="cpu")
    mean, square = (summed(torch.stack(sums), holders) / to_device(numbers, sums[0].device)[:, None]).unbind(1)
    return distinct.of_each((square - mean.square()).clamp(min=0).sqrt())


class Source(Protocol):
    """Measures evidence of a step that does not come from the units' parameters."""

    @property
    def names(self) -> Collection[str]:
        """Names of the evidence."""

    def parts(self, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Return this rank's terms of sums over ranks."""

    def read(self, grad_scale: float, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the step's evidence, (U,) each, from the sums of `parts` over several ranks; start a new step."""

    def reset(self) -> None:
        """Forget the measurements of the step."""


class Measured:
    """Norms and evidence of the units, step by step."""

    def __init__(
        self,
        units: Sequence[Unit],
        needs: Collection[str],
        norms: Callable[[], tuple[Tensor, Tensor]] | None,
        ranks: Ranks | None,
    ) -> None:
        """Prepare the measurements; for `norms` and `ranks` see `Controller`."""
        self.ranks, self.sources, self._units = ranks, list[Source](), units
        self._needs, self._device = needs, units[0].parameters[0].device
        self.norms = UnitNorms([unit.parameters for unit in units], ranks) if norms is None else norms
        self.micro = MicroNorms(units) if "micro_square" in needs else None
        self.check_ranks(units)

    @property
    def together(self) -> bool:
        """True if several processes train this model."""
        return self.ranks is not None and self.ranks.size > 1

    @property
    def names(self) -> set[str]:
        """The evidence that `read` returns."""
        found = {"norm", "observed"} | ({"micro_square", "weight_std"} & set(self._needs))
        return found.union(*(source.names for source in self.sources))

    def own_norms(self) -> np.ndarray | None:
        """Return which units have a norm that is not also an earlier unit's, (U,) bool; None: all have."""
        if not isinstance(self.norms, UnitNorms | OutputGradients) or len(self.norms.first) == len(self._units):
            return None
        found = np.zeros(len(self._units), dtype=bool)
        found[self.norms.first] = True
        return found

    def exchange(self, units: Sequence[Unit]) -> None:
        """Monitor other parameters of the same units. Raises ValueError if something is read of sharded ones."""
        of_parameters = isinstance(self.norms, UnitNorms)
        if of_parameters or "weight_std" in self._needs:
            self.check_ranks(units)
        self._units = units
        if of_parameters:
            self.norms = UnitNorms([unit.parameters for unit in units], self.ranks)
        if self.micro is not None:
            self.micro = MicroNorms(units)

    def check_ranks(self, units: Sequence[Unit] = ()) -> None:
        """Raise ValueError if ranks could choose different units, although each decides from equal sums."""
        ranks = self.ranks
        sharded = [unit.name for unit in units if any(hasattr(p, "device_mesh") for p in unit.parameters)]
        if sharded and ranks is None:
            raise ValueError(
                f"{sharded[0]} has sharded parameters (DTensor), of whose gradients each rank has a part: give the "
                "controller ranks=gnmr.attachment.ranks.reduce.DistributedRanks(), as gnmr.attach does"
            )
        if ranks is None or ranks.size == 1:
            return
        if not ranks.tells_own and "micro_square" in self._needs:
            raise ValueError(
                f"micro_square: needs each micro-batch's own gradient, and {ranks.size} processes have the mean of "
                "theirs alone; use a signal of gradient norms, of the paths' errors or of their prices "
                "(docs/distributed.md)"
            )
        if not isinstance(self.norms, (UnitNorms, OutputGradients)):
            raise ValueError(
                f"norms: of one's own are those of one process, here are {ranks.size}; reduce them, and hand "
                "them to observe()"
            )

    def parts(self, plain: Tensor | None, agreement: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return this rank's terms of sums over ranks; see `Controller.parts` and `Ranks.agreement`."""
        ranks = self.ranks
        assert ranks is not None, "one process has no parts"
        self.check_ranks()  # earlier there may have been fewer ranks
        found: dict[str, Tensor] = {}
        if isinstance(self.norms, OutputGradients):
            square, observed = self.norms.parts()
            found = {"square": square * ranks.share**2, "observed": observed}
        elif plain is None:
            assert isinstance(self.norms, UnitNorms)
            square, observed, plain = self.norms.parts()
            found = {"square": square, "observed": observed}
        if plain is None:
            plain = torch.zeros((), dtype=torch.float64, device=self._device)
        if self.micro is not None:
            found["micro"] = self.micro.parts()
        for source in self.sources:
            found |= source.parts(ranks, self._device)
        return found | {"agreement": agreement(plain)}

    def read(
        self,
        grad_scale: float,
        loss_scale: float | None,
        norms: tuple[Tensor, Tensor] | None,
        sums: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Return the step's evidence; see `Controller.measure`. `sums`: of `parts` over ranks, if there are several."""
        of_passes = grad_scale if loss_scale is None else loss_scale
        of_norms = of_passes if isinstance(self.norms, OutputGradients) else grad_scale
        if sums is not None and "square" in sums:
            norm, observed = sums["square"].sqrt(), sums["observed"] > 0
        elif norms is not None and isinstance(self.norms, UnitNorms):
            norm, observed = norms
        else:
            with torch.no_grad():
                norm, observed = self.norms()
        found = {"norm": norm.detach() / of_norms, "observed": observed}  # a new tensor: the loop uses the other one
        if sums is not None and "micro" in sums:
            found["micro_square"] = sums["micro"][:-1] / sums["micro"][-1] / of_passes**2
        elif self.micro is not None:
            found["micro_square"] = self.micro.take() / of_passes**2
        if "weight_std" in self._needs:
            found["weight_std"] = weight_std(self._units, self.ranks)
        for source in self.sources:
            found |= source.read(of_passes, sums)
        return found

    def reset(self) -> None:
        """Forget the backward passes since the last `read`."""
        for one in (self.micro, self.norms, *self.sources):
            if callable(reset := getattr(one, "reset", None)):
                reset()

    def check_call(self, grad_scale: float, loss_scale: float | None) -> None:
        """Raise ValueError if a scale is not valid, or if the model has moved to another device."""
        for name, scale in (("grad_scale", grad_scale), ("loss_scale", 1.0 if loss_scale is None else loss_scale)):
            number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
            if not (number and 0 < scale < math.inf):
                raise ValueError(
                    f"{name}={scale!r}: must be a positive number; of a GradScaler it is scaler.get_scale()"
                )
        if (here := self._units[0].parameters[0].device) != self._device:
            raise ValueError(
                f"the model is on {here} by now, its controller on {self._device}: move it before attaching"
            )
