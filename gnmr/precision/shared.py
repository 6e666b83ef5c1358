"""What all converted operators of a model have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gnmr.precision.cast_stats import AmaxHistory
from gnmr.precision.hooks import Engine, Observer, PriceObserver
from gnmr.precision.memory import seen_by_numpy
from gnmr.precision.reads import Read
from gnmr.precision.recipes import ExecutionPath
from gnmr.precision.rounding import Rounding


class SharedState:
    """Common to all operators of a plan.

    - the compressed copies of the tensor that was read last, so that its other readers find them;
    - `rounding`: what stochastic rounding draws (None: round to nearest);
    - `step`: the optimizer step that runs, from 1;
    - `no_side_effects`: while true, a pass must leave no trace in what faults and casts remember;
    - `high_precision`: while true, every operator is a plain linear (evaluation is always on the 16-bit path);
    - `warmup`: in a warm-up in 16 bits, the path of operators in recovery in place of their own; else None;
    - `probe`: what measures the paths' errors, if anything does;
    - `prices`: what measures the paths' prices, if anything does;
    - `watch`: what looks at operators' outputs in a repeated pass (`gnmr.attachment.blame`), if anything does;
    - `amax`: counts and magnitudes of what recipes cast (None: the paths are formats, or an engine's);
    - `engine`: what runs the recipes in place of our kernels (Transformer Engine), if anything does.
    """

    def __init__(
        self,
        *,
        quantize_forward: bool,
        rounding: Rounding | None = None,
        amax: AmaxHistory | None = None,
        engine: Engine | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.quantize_forward = quantize_forward
        self.rounding = rounding
        self.step = 1
        self.amax = amax
        self.engine = engine
        self.high_precision = False
        self.warmup: ExecutionPath | None = None
        self.no_side_effects = False
        self.probe: Observer | None = None
        self.prices: PriceObserver | None = None
        self.watch: Callable[[Any, Tensor, Tensor], None] | None = None
        self._last: Read | None = None

    @property
    def stays(self) -> bool:
        """Whether it holds tensors on the device on which the operators were converted."""
        return self.amax is not None or self.rounding is not None or self.probe is not None

    def read_of(self, x: Tensor, reader: str, index: int) -> Read:
        """What is known of this very tensor since its first operator read it. Once in each forward pass of `reader`,
        the operator in place `index`.

        The other readers of the tensor that was read last join in. The same operator's next pass does not: the tensor
        may hold something else by then, be it under the same version number (a write through `.data`).
        """
        last = self._last
        if last is None or not last.joins(x, reader):
            last = Read(x, reader, index)
            # These change without a new version number: a parameter (fused optimizers), an inference tensor, an array.
            if not (x.is_leaf and x.requires_grad) and not x.is_inference() and not seen_by_numpy(x):
                self._last = last  # in one assignment: another thread finds all of it or none
        return last

    def forget(self) -> None:
        """Drops the copies of the last tensor (each step's end)."""
        self._last = None

    @contextmanager
    def in_high_precision(self) -> Iterator[None]:
        """Every operator is a plain linear inside; nests."""
        before, self.high_precision = self.high_precision, True
        try:
            yield
        finally:
            self.high_precision = before

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without what belongs to a step."""
        return {**self.__dict__, "_last": None, "probe": None, "prices": None, "watch": None}
