"""What is measured of operators, as numbers of units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnmr.conversion.linear import PathLinear
from gnmr.conversion.unit_names import PathUnit
from gnmr.names import GEMMS


class ByUnit:
    """Map numbers of groups of operators, in which they are measured and added up, to numbers of units.

    A group is shared by units: the operators of a unit, or with unit=gemm those of all its GEMMs. An operator without a
    unit is a separate group, whose numbers belong to no unit.
    """

    def __init__(self, units: Sequence[PathUnit], operators: Sequence[PathLinear], device: torch.device) -> None:
        """Find the groups; `device` is that of the numbers."""
        # Groups of units come first, so that an operator is a group of its own only if no unit has it.
        groups = list(dict.fromkeys([*(unit.operators for unit in units), *((o,) for o in operators)]))
        self.group: dict[int, int] = {}
        """The group of each operator, by their indices."""
        for place, group in enumerate(groups):
            for operator in group:
                self.group.setdefault(operator.index, place)
        self.num_groups = len(groups)
        places = [groups.index(unit.operators) for unit in units]
        # Usually every group is one unit, in the same order, and nothing has to be selected.
        self._places = None if places == list(range(len(groups))) else torch.tensor(places, device=device)
        self._gemms = {
            gemm: torch.tensor([unit.gemm == gemm for unit in units], device=device)
            for gemm in GEMMS
            if any(unit.gemm is not None for unit in units)
        }

    def __call__(self, values: Tensor, gemm: str | None) -> Tensor:
        """Map (groups,) to (units,); `gemm` is the GEMM whose operands the numbers describe, None for all GEMMs."""
        by_unit = values if self._places is None else values[self._places]
        if gemm is None or not self._gemms:
            return by_unit
        return torch.where(self._gemms[gemm], by_unit, 0.0)
