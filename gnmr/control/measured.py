"""What a step shows of the units: their norms, and the evidence that the signal needs, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gnmr.control.evidence import MicroNorms, weight_std
from gnmr.control.norms import UnitNorms
from gnmr.control.observed import OutputGradients
from gnmr.control.ranks import Ranks
from gnmr.control.units import Unit


class Source(Protocol):
    """Measures evidence of a step that is not made of the units' parameters."""

    @property
    def names(self) -> Collection[str]:
        """Names of the evidence."""
        ...

    def parts(self, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Return this rank's terms of sums over ranks."""
        ...

    def read(self, grad_scale: float, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the step's evidence, (U,) each, from the sums of `parts`, if there are several ranks. Begins anew."""
        ...

    def reset(self) -> None:
        """Forget what was measured of the step."""
        ...


class Measured:
    """Norms and evidence of the units, step by step."""

    def __init__(
        self,
        units: Sequence[Unit],
        needs: Collection[str],
        norms: Callable[[], tuple[Tensor, Tensor]] | None,
        ranks: Ranks | None,
    ) -> None:
        """`norms`, `ranks`: see `Controller`."""
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

    def exchange(self, units: Sequence[Unit]) -> None:
        """Watch other parameters of the same units. Raises ValueError if something is read of sharded ones."""
        of_parameters = isinstance(self.norms, UnitNorms)
        if of_parameters or "weight_std" in self._needs:
            self.check_ranks(units)
        self._units = units
        if of_parameters:
            self.norms = UnitNorms([unit.parameters for unit in units], self.ranks)
        if self.micro is not None:
            self.micro = MicroNorms(units)

    def check_ranks(self, units: Sequence[Unit] = ()) -> None:
        """Raises ValueError if ranks could choose different units: each decides for itself, from equal sums."""
        ranks = self.ranks
        sharded = [unit.name for unit in units if any(hasattr(p, "device_mesh") for p in unit.parameters)]
        if sharded and ranks is None:
            raise ValueError(
                f"{sharded[0]} has sharded parameters (DTensor), of whose gradients each rank has a part: give the "
                "controller ranks=gnmr.distributed.reduce.Ranks(), as gnmr.attach does"
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
        """Return this rank's terms of sums over ranks; see `Controller.parts`. `agreement`: of `Ranks`."""
        ranks = self.ranks
        assert ranks is not None, "one process has no parts"
        self.check_ranks()  # there may have been fewer when it was made
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

    @torch.no_grad()
    def read(
        self, grad_scale: float, norms: tuple[Tensor, Tensor] | None, sums: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """Return the step's evidence; see `Controller.measure`. `sums`: of `parts` over ranks, if there are several."""
        if sums is not None and "square" in sums:
            norm, observed = sums["square"].sqrt(), sums["observed"] > 0
        elif norms is not None and isinstance(self.norms, UnitNorms):
            norm, observed = norms
        else:
            norm, observed = self.norms()
        found = {"norm": norm / grad_scale, "observed": observed}
        if sums is not None and "micro" in sums:
            found["micro_square"] = sums["micro"][:-1] / sums["micro"][-1] / grad_scale**2
        elif self.micro is not None:
            found["micro_square"] = self.micro.take() / grad_scale**2
        if "weight_std" in self._needs:
            found["weight_std"] = weight_std(self._units, self.ranks)
        for source in self.sources:
            found |= source.read(grad_scale, sums)
        return found

    def reset(self) -> None:
        """Forget what backward passes brought since the last `read`."""
        for one in (self.micro, self.norms, *self.sources):
            if callable(reset := getattr(one, "reset", None)):
                reset()

    def check_call(self, grad_scale: float) -> None:
        """Raises ValueError if `grad_scale` is no scale, or the model has moved to another device."""
        number = isinstance(grad_scale, (int, float)) and not isinstance(grad_scale, bool)
        if not (number and 0 < grad_scale < math.inf):
            raise ValueError(
                f"grad_scale={grad_scale!r}: must be a positive number; of a GradScaler it is scaler.get_scale()"
            )
        if (here := self._units[0].parameters[0].device) != self._device:
            raise ValueError(
                f"the model is on {here} by now, its controller on {self._device}: move it before attaching"
            )
