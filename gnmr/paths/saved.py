"""A linear operator that keeps only a compressed copy of its input for backward.

The forward pass and the input gradient (`dgrad`) are exact. Of the operands of the weight gradient (`wgrad`) the saved
input is quantized, per token, in the format of the path in force; that is the paper's act-quant stress (5.1, E.1):

    y  = x W^T + b              fprop: x as it is             (site "forward": Q(x))
    dx = dy W                   dgrad: exact
    dW = dy^T Q(x)              wgrad: from the compressed copy

Operators that read the same tensor (q, k, v; gate, up) on the same path share one compressed copy. The format `bf16`
keeps x itself; the arithmetic is then that of `nn.Linear`, to the last bit.

Two things may look in, on formats and on recipes (`simulated.py`, `fp8.py`), both off by default: a probe that measures
the low path's error (`probe.py`), and faults that break the low path of chosen operators (`faults.py`); what is broken
is never shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnmr.paths.compiled import GraphLinear
from gnmr.paths.formats import Format, KeepFormat
from gnmr.paths.fp8 import scaled_mm_linear
from gnmr.paths.recipes import Recipe
from gnmr.paths.scaling import compress, decompress
from gnmr.paths.simulated import Ledger, in_backward, simulated_linear

if TYPE_CHECKING:
    from gnmr.paths.faults import Injector
    from gnmr.paths.probe import Measured, Probe
    from gnmr.paths.te import Engine

Path = Format | Recipe
"""What an operator does with its operands: of a format, one with a compressed saved input; of a recipe, casts."""


class SharedState:
    """What all converted operators of a model have in common.

    - the compressed copies of the tensor that was read last, so that its other readers find them;
    - the generator of stochastic rounding (None: round to nearest);
    - `rehearsing`: while true, a pass is not the run's own and must leave no trace in what faults and casts remember;
    - `exact`: while true, every operator is a plain linear (evaluation is always on the 16-bit path);
    - `warmup`: in a warm-up in 16 bits, the path of operators in recovery in place of their own; else None;
    - the probe, if there is one;
    - the ledger of what recipes cast (None: the paths are formats, or Transformer Engine's);
    - Transformer Engine's linears, where it runs the recipes.
    """

    def __init__(
        self,
        site: str,
        generator: torch.Generator | None,
        ledger: Ledger | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.quantize_forward = site == "forward"
        self.generator = generator
        self.ledger = ledger
        self.engine = engine
        self.exact = False
        self.warmup: Path | None = None
        self.rehearsing = False
        self.probe: Probe | None = None
        self._last: Read | None = None

    def read_of(self, x: Tensor, reader: str) -> Read:
        """What is known of this very tensor since its first operator read it."""
        last = self._last
        if last is None or not last.is_of(x):
            last = Read(x, reader)
            # A parameter or an inference tensor can change without a new version number (fused optimizers, .data).
            if not (x.is_leaf and x.requires_grad) and not x.is_inference():
                self._last = last  # in one assignment: another thread finds all of it or none
        return last

    def copy_of(self, x: Tensor, fmt: Format, reader: str) -> tuple[tuple[Tensor, ...], str]:
        """(what `reader` keeps of `x` in `fmt`, the first operator that read this very tensor)."""
        read = self.read_of(x, reader)
        if isinstance(fmt, KeepFormat):
            return (x.detach(),), read.reader  # the tensor itself; held here it would outlive its step
        if fmt.name not in read.copies:
            read.copies[fmt.name] = compress(x.detach().reshape(-1, x.shape[-1]), fmt, self.generator)
        return read.copies[fmt.name], read.reader

    def forget(self) -> None:
        """Lets go of the copies of the last tensor (each step's end)."""
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without what belongs to a step."""
        return {**self.__dict__, "_last": None, "probe": None}


class Read:
    """A tensor that was read: its compressed copies and casts so far, and what the probe measured of it."""

    def __init__(self, x: Tensor, reader: str) -> None:
        self._tensor = weakref.ref(x)
        self._version = -1 if x.is_inference() else x._version
        self.reader = reader
        self.copies: dict[str, tuple[Tensor, ...]] = {}
        self.casts: dict[Any, Any] = {}
        self.measured: dict[Any, Any] = {}

    def is_of(self, x: Tensor) -> bool:
        return self._tensor() is x and self._version == x._version


class _Linear(torch.autograd.Function):
    """F.linear whose saved input is `copy`. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fmt: Format,
        quantized: bool,
        measured: Measured | None,
        *copy: Tensor,
    ) -> Tensor:
        ctx.fmt, ctx.x_shape, ctx.x_dtype, ctx.measured = fmt, x.shape, x.dtype, measured
        ctx.holds_copy, ctx.num_weights = ctx.needs_input_grad[1], 1
        ctx.save_for_backward(weight, *(copy if ctx.holds_copy else ()))
        if quantized and not isinstance(fmt, KeepFormat):
            x = decompress(copy[0], copy[1], fmt, x.shape[-1], x.dtype).view(x.shape)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grads
        weight, *copy = ctx.saved_tensors
        ctx.holds_copy = False  # freed when this returns
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_2d = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = (grad_2d @ weight).view(ctx.x_shape) if need_x else None
        grad_weight = None
        if need_weight:
            width = ctx.x_shape[-1]
            if isinstance(ctx.fmt, KeepFormat):
                x_2d = copy[0].reshape(-1, width)
            else:
                x_2d = decompress(copy[0], copy[1], ctx.fmt, width, ctx.x_dtype)
            grad_weight = grad_2d.t() @ x_2d
        grad_bias = grad_2d.sum(dim=0) if need_bias else None
        if ctx.measured is not None:  # here, not in forward: checkpointing runs that twice
            ctx.measured.add(grad_2d)
            ctx.measured = None
        return grad_x, grad_weight, grad_bias, *([None] * (len(ctx.needs_input_grad) - 3))


class PathLinear(nn.Linear):
    """`nn.Linear` with two paths; `gnmr.paths.convert` makes it of an existing linear, in place.

    `recovering` says which path is in force and is all that a switch changes: nothing is reallocated.
    """

    unit_name: str
    index: int
    """Place in the plan."""
    low: Path
    recovery: Path | None
    recovering: bool
    shared: SharedState
    fault: Injector | None
    """What may break the low path."""
    read: tuple[int, str, torch.dtype] | None
    """(rows, first reader of the same tensor, dtype of what was kept) of the last forward pass that kept something."""
    _node: weakref.ref[Any] | None
    in_graphs: tuple[GraphLinear, ...] | None
    """What runs the low and the recovery path within graphs of torch.compile's; None: between them."""
    tally: Tensor | None
    """Leaf whose gradient counts what the casts in graphs met."""

    def switch(self, recovering: bool) -> None:
        """Puts the operator on the recovery (True) or low-cost path from its next forward pass on."""
        assert self.recovery is not None or not recovering, f"{self.unit_name} has no recovery path"
        self.recovering = recovering

    @property
    def path(self) -> Path:
        """The format or recipe in force."""
        if not self.recovering or self.recovery is None:
            return self.low
        return self.recovery if self.shared.warmup is None else self.shared.warmup

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), as `nn.Linear`. Does not wait for the device."""
        in_graph = self.in_graphs is not None and torch.compiler.is_compiling()
        if in_graph and (self.shared.exact or (self.recovering and self.shared.warmup is not None)):
            return self.plain(input)
        if in_graph and self._fits_graph(input):
            keeps = torch.is_grad_enabled() and self.weight.requires_grad
            linears, tally = self.in_graphs, self.tally
            assert linears is not None and tally is not None
            linear = linears[1] if self.recovering else linears[0]  # Dynamo of 2.11 has no index that is a bool
            return linear(input, self.weight, self.bias, tally, autocast_dtype(input), keeps)
        return self._between_graphs(input)

    def _fits_graph(self, input: Tensor) -> bool:
        """Whether nothing looks on or breaks in, and there is a backward pass in which to tell of the casts."""
        disturbed = self.fault is not None or (self.shared.probe is not None and self.shared.probe.enabled)
        tells = not torch.is_grad_enabled() or input.requires_grad or self.weight.requires_grad
        return tells and not disturbed and input.numel() > 0

    # Where switching would make torch.compile specialise blocks on combinations of paths, and where copies are found by
    # the identity of tensors.
    @torch.compiler.disable
    def _between_graphs(self, input: Tensor) -> Tensor:
        shared, path = self.shared, self.path
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        keeps = torch.is_grad_enabled() and weight.requires_grad
        quantizes = isinstance(path, Recipe) or (shared.quantize_forward and not isinstance(path, KeepFormat))
        if shared.exact or not (keeps or quantizes):
            return self.plain(input)
        if input.numel() == 0:  # an expert without tokens: nothing to cast, least of all its weight
            self.read, self._node = (0, self.unit_name, input.dtype) if keeps else None, None
            return self.plain(input)
        if shared.engine is not None and isinstance(path, Recipe):
            self.read = (
                (input.numel() // input.shape[-1], self.unit_name, autocast_dtype(input) or input.dtype)
                if keeps
                else None
            )
            self._node = None  # its graph is not ours to read
            return shared.engine(self, path, input)
        x = input
        if (dtype := autocast_dtype(x)) is not None:
            # As autocast does for F.linear itself: inside the function it would leave the saved dtypes mixed.
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
            weight = weight.to(dtype) if weight.is_floating_point() else weight
        fault = self.fault.for_step(input, remember=not shared.rehearsing) if self.fault is not None else None
        if isinstance(path, Recipe):
            output, first_reader = self.runner(path)(self, path, input, x, weight, bias, keeps, fault)
        else:
            output, first_reader = self._saved(path, input, x, weight, bias, keeps, quantizes, fault)
        kept = input if isinstance(path, Format) and not isinstance(path, KeepFormat) else x
        self.read = (input.numel() // input.shape[-1], first_reader, kept.dtype) if keeps else None
        self._node = weakref.ref(output.grad_fn) if output.grad_fn is not None else None
        return output

    def plain(self, input: Tensor) -> Tensor:
        """As `nn.Linear` (evaluation)."""
        return F.linear(input, self.weight, self.bias)

    def runner(self, path: Recipe) -> Callable[..., tuple[Tensor, str]]:
        """What runs `path`: see `simulated.simulated_linear`."""
        return scaled_mm_linear if path.backend == "scaled_mm" else simulated_linear

    def _saved(
        self,
        fmt: Format,
        input: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keeps: bool,
        quantizes: bool,
        fault: Injector | None,
    ) -> tuple[Tensor, str]:
        """(output, first reader of the same copy) under a format; `x`, `weight`, `bias`: after autocast's cast."""
        shared = self.shared
        copy: tuple[Tensor, ...]
        if quantizes and shared.generator is not None and in_backward():
            raise RuntimeError(
                f"{self.unit_name}: with site='forward' and rounding='stochastic' a forward pass that activation "
                "checkpointing recomputes differs from the first; use rounding='nearest'"
            )
        if fault is not None and not self.recovering:
            copy, first_reader = fault.compress(input, fmt, shared), f"{self.unit_name} (broken)"
        else:
            copy, first_reader = shared.copy_of(x if isinstance(fmt, KeepFormat) else input, fmt, self.unit_name)
        measured = None
        if keeps and shared.probe is not None and shared.probe.enabled:
            measured = shared.probe.measure(self, input, x, fault, copy)
        return _Linear.apply(x, weight, bias, fmt, quantizes, measured, *copy), first_reader

    def kept(self) -> tuple[Tensor, ...]:
        """What the autograd graph holds of this operator's input between forward and backward; nothing afterwards."""
        node = self._node() if self._node is not None else None
        return node.saved_tensors[node.num_weights :] if node is not None and node.holds_copy else ()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without the graph of the last step, whole."""
        return {**self.__dict__, "_node": None, "fault": None, "in_graphs": None, "tally": None}

    def extra_repr(self) -> str:
        recovery = "none" if self.recovery is None else self.recovery.name
        return f"{super().extra_repr()}, low={self.low.name}, recovery={recovery}"


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast has operators on `x` compute in; None where it is off, and for float64, which it leaves alone."""
    kind = x.device.type
    if x.dtype == torch.float64:
        return None
    # Of the devices that there are, meta has no autocast. (Dynamo of 2.11 cannot trace `is_autocast_available`.)
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


@contextmanager
def exact(shared: SharedState) -> Iterator[None]:
    """Every operator is a plain linear inside; nests."""
    before, shared.exact = shared.exact, True
    try:
        yield
    finally:
        shared.exact = before
