"""A recoverable unit, which the controller monitors and switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Slice:
    """One slice along dimension 0 of a parameter: an expert's part of a tensor that holds the weights of several.

    It replaces a parameter wherever gradients and weights of a unit are read. For a DTensor it is this rank's part of
    the slice, which may be empty. Attributes that it does not have are the parameter's.

    Args:
        parameter: (E, ...), the parameter that holds the weights of E experts.
        index: 0 to E - 1.
    """

    def __init__(self, parameter: Tensor, index: int) -> None:
        self.parameter, self.index = parameter, index

    @property
    def key(self) -> tuple[int, int]:
        """A key that is equal for equal slices."""
        return id(self.parameter), self.index

    @property
    def grad(self) -> Tensor | None:
        """The slice of the parameter's gradient."""
        return None if self.parameter.grad is None else self.of(self.parameter.grad)

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape[1:]

    @property
    def ndim(self) -> int:
        return self.parameter.ndim - 1

    def numel(self) -> int:
        return self.shape.numel()

    def detach(self) -> Tensor:
        return self.of(self.parameter.detach())

    def of(self, x: Tensor) -> Tensor:
        """Return this slice of a tensor in the parameter's shape.

        Returns: `x[index]`; of a DTensor this rank's part of it, which may be empty, or all of `x` if it is not reduced
        yet.
        """
        # A plain tensor has all slices. A DTensor of sums that are not reduced yet is returned as it is.
        if not hasattr(x, "placements") or any(how.is_partial() for how in x.placements):
            return x if hasattr(x, "placements") else x[self.index]
        # No public function of torch tells where a shard begins; DTensor's own code for it may move.
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)  # type: ignore[attr-defined]
        local: Tensor = x.to_local()  # type: ignore[attr-defined]
        # Outside of this rank's shard the slice belongs to another rank, and is empty here.
        at = self.index - offsets[0]
        return local[at] if 0 <= at < sizes[0] else local.flatten()[:0]

    def __getattr__(self, name: str) -> Any:
        """Return the parameter's attribute, such as dtype, device, requires_grad, sharding or hooks."""
        # Without this, copying an object that has no attributes yet would recurse forever.
        if name.startswith("__") or name in ("parameter", "index"):
            raise AttributeError(name)
        return getattr(self.parameter, name)


def whole_of(parameter: nn.Parameter | Slice) -> Tensor:
    """Return the parameter that a slice belongs to.

    Returns: a parameter itself, if it is not a slice.
    """
    return parameter.parameter if isinstance(parameter, Slice) else parameter


def identity(parameter: nn.Parameter | Slice) -> object:
    """Return a key that is equal for two parameters or slices if and only if they are the same.

    Returns: a hashable object, valid while the parameter exists.
    """
    return parameter.key if isinstance(parameter, Slice) else id(parameter)


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit b of the paper's section 1: an operator, a block or a layer.

    Raises:
        ValueError: if an argument is invalid.
    """

    name: str
    """A name that no other unit of the controller has, for records and messages."""
    parameters: tuple[nn.Parameter | Slice, ...]
    """The norm is taken over the gradients of all of them together.

    Give a module, one parameter, or several in any iterable; they are kept as a tuple without duplicates.
    """
    switch: Callable[[bool], None] | None = None
    """Puts the unit on the recovery path (True) or the low-cost path; None: it is monitored and never routed."""
    cost: float = 1.0
    """Cost of its recovery, in any common unit of measure, which a budget counts."""
    extra_bytes: float | None = None
    """Extra bytes per token on the recovery path (Eq. 5), which signals may read; None: its cost."""

    def __post_init__(self) -> None:
        parameters: Any = self.parameters
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        elif not isinstance(parameters, Iterable) or isinstance(parameters, nn.Parameter):
            parameters = (parameters,)
        # A tied parameter counts once in the norm.
        parameters = tuple({identity(parameter): parameter for parameter in parameters}.values())
        for parameter in parameters:
            if not isinstance(parameter, nn.Parameter | Slice):
                kind = type(parameter).__name__
                raise ValueError(f"unit {self.name!r}: parameters must be nn.Parameters, not {kind}")
        if not parameters:
            raise ValueError(f"unit {self.name!r} has no parameters: there is no gradient to watch")
        if self.switch is not None and not callable(self.switch):
            raise ValueError(f"unit {self.name!r}: switch={self.switch!r} must be a function of one bool, or None")
        object.__setattr__(self, "parameters", parameters)

    @property
    def recoverable(self) -> bool:
        """Whether it can be routed; a unit without a switch is only monitored."""
        return self.switch is not None
