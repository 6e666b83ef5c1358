"""A linear operator with two paths: which one is in force, and what its GEMMs read (`gemms.py` runs them).

Under a recipe, operands are cast as the recipe says. Under a format, the forward pass and the input gradient (`dgrad`)
are exact, and only a compressed copy of the input is kept for the weight gradient (`wgrad`): per token, in the format
of the path in force. This is the paper's act-quant stress (5.1, E.1):

    y  = x W^T + b              fprop: x itself              (site "forward": Q(x))
    dx = dy W                   dgrad: exact
    dW = dy^T Q(x)              wgrad: from the compressed copy

Operators that read the same tensor (q, k, v; gate, up) on the same path share its copy and its casts. The format `bf16`
keeps x itself; the arithmetic is then that of `nn.Linear`, to the last bit.

A tensor counts as the same while it is the same object with the same version number. If an operator reads it a second
time, another pass begins. A write between two readers of one pass may change neither object nor version number
(`.data`, DLPack, a custom kernel). Such a write is not noticed, and the second reader reads what the first one did. A
tensor that NumPy can write to, or that a fault broke, is not shared.
"""

from __future__ import annotations

import weakref
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from gnmr.compiler import between_graphs, compiler_loaded
from gnmr.conversion.gemms import GemmContext, LinearFunction, SavedCopyContext, casts_nothing
from gnmr.conversion.passes import Pass, begin, in_backward
from gnmr.conversion.reads import SHARDED, Place, is_sharded, place_of
from gnmr.conversion.scaled_mm import ScaledContext
from gnmr.conversion.shared import FaultInjection, GraphLinear, Measurement, SharedState
from gnmr.formats.dispatch_modes import always_recomputed
from gnmr.formats.number_formats import Format, KeepFormat
from gnmr.formats.recipes import ExecutionPath, Recipe
from gnmr.names import GEMMS, OPERANDS

_INPUT = OPERANDS.index("input")


class Arguments(NamedTuple):
    """Arguments of one forward pass."""

    input: Tensor
    x: Tensor
    """`input` after autocast's cast; weight and bias are cast too."""
    weight: Tensor
    bias: Tensor | None
    keeps: bool
    """Whether wgrad will run."""
    fault: FaultInjection | None
    """A fault of the low path that is in force, whatever the operator's path."""


class Operands(NamedTuple):
    """What `LinearFunction` reads on a path, beside the arguments of the pass."""

    context: GemmContext
    x_fprop: Any
    x_wgrad: Any
    measurement: Measurement | None
    kept_by: str | Place
    """Key of the tensor that is kept for wgrad; see `PathLinear.read`."""


class PathLinear(nn.Linear):
    """`nn.Linear` with two paths; `gnmr.conversion.converting` makes it of an existing linear, in place.

    `recovered` says which path is in force. It is all that a switch changes: nothing is reallocated.
    """

    plain_class = nn.Linear
    """The class that `ConvertedModel.restore` restores; each class of converted linears has its own."""

    operator_name: str
    index: int
    """Index among the converted operators."""
    low: ExecutionPath
    recovery: ExecutionPath | None
    pinned: tuple[str, ...]
    """GEMMs that use one recipe on both paths."""
    recovering: bool
    """Whether the recovery path is in force; for an operator with `gemms`, for any GEMM of it."""
    recovered: frozenset[str]
    """The GEMMs that are on the recovery path; without `gemms` all of them or none."""
    gemms: tuple[str, ...]
    """The GEMMs that are routed individually (unit=gemm); empty otherwise."""
    mixed: dict[frozenset[str], Recipe]
    """The recipe of each set of `gemms` that may be on the recovery path; all operators of a model share it."""
    shared: SharedState
    fault: FaultInjection | None
    """A fault that may break the low path."""
    read: tuple[int, str | Place, torch.dtype] | None
    """(rows, key of the kept tensor, its dtype) of the last forward pass that kept something, or None.

    The key is the name of the first operator that read the same tensor, or the tensor's place if it is kept unchanged.
    """
    _node: weakref.ref[Any] | None
    in_graphs: tuple[tuple[str, GraphLinear], ...] | None
    """The recipes of the low and the recovery path and the functions that run them inside torch.compile's graphs.

    None: the operator runs between the graphs.
    """
    tally: Tensor | None
    """Leaf whose gradient holds the counts of the casts in graphs."""

    @property
    def module(self) -> nn.Module:
        """The module that holds the weight: this one, unless the operator is contained in another module."""
        return self

    @property
    def kind(self) -> str:
        """Kind of the operator, for display."""
        return "Linear"

    @property
    def matrix(self) -> Tensor:
        """The weight as the GEMMs read it, (O, I), a view of the parameter `weight`."""
        return self.weight

    def part(self, x: Tensor) -> Tensor:
        """Return this operator's part of a tensor in the shape of `weight`, such as a gradient.

        Returns: `x` itself, (O, I); operators that are contained in a module have less.
        """
        return x

    @property
    def given(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the current pass if they are not the operator's own; see `gnmr.conversion.adapters`."""
        return None

    def switch(self, recovering: bool, gemm: str | None = None) -> None:
        """Put the operator on one path for later forward passes.

        Args:
            recovering: the recovery path (True) or the low-cost path.
            gemm: one of `gemms`, which alone is moved; None: all of them.
        """
        assert self.recovery is not None or not recovering, f"{self.operator_name} has no recovery path"
        if gemm is None:
            self.put(frozenset(self.gemms or GEMMS) if recovering else frozenset())
        else:
            self.put(self.recovered | {gemm} if recovering else self.recovered - {gemm})

    def put(self, recovered: frozenset[str]) -> None:
        """Put these GEMMs on the recovery path and the others on the low-cost path.

        Args:
            recovered: a set of `gemms`; without `gemms` all GEMMs or none.
        """
        self.recovered, self.recovering = recovered, bool(recovered)

    def path_of(self, recovered: frozenset[str]) -> ExecutionPath:
        """Return the path that is in force with these GEMMs on the recovery path.

        Args:
            recovered: as in `put`. Without `gemms`, any GEMM stands for all.

        Returns:
            A format or a recipe; `low` if there is no recovery path.
        """
        if not recovered or self.recovery is None:
            return self.low
        return self.mixed[recovered] if self.gemms else self.recovery

    @property
    def converted(self) -> bool:
        """Whether the operator has its paths; a user's class may be built before `convert` adds them."""
        return "shared" in self.__dict__

    @property
    def path(self) -> ExecutionPath:
        """The format or recipe in force."""
        warmup = self.shared.warmup if self.recovering else None
        return self.path_of(self.recovered) if warmup is None else warmup

    @property
    def sound(self) -> frozenset[str]:
        """GEMMs that a fault of the low path does not hit: those in recovery (without `gemms` all or none)."""
        if self.gemms and self.shared.warmup is None:
            return self.recovered
        return frozenset(GEMMS) if self.recovering else frozenset()

    @property
    def routable(self) -> bool:
        """Whether there is a recovery path and pins leave something to recover."""
        return self.recovery is not None and not (self.pinned and self.low == self.recovery)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the linear on the path in force. Waits for the device only to find outlier columns (`int8.py`).

        Args:
            input: (..., I), any floating dtype.

        Returns:
            (..., O) in the dtype of input, or autocast's.

        Raises:
            RuntimeError: derivatives of torch.func would go through casts, or checkpointing cannot repeat the pass.
            ValueError: the input is nested, input or weight is a DTensor, or the model was moved.
        """
        if not isinstance(self, PathLinear):  # a wrapper of the instance's forward outlived the paths
            return type(self).forward(self, input)
        in_graph = self.in_graphs is not None and torch.compiler.is_compiling()
        if in_graph and (self.shared.high_precision or (self.recovering and self.shared.warmup is not None)):
            return self.plain(input)
        if in_graph and self._fits_graph(input):
            keeps = torch.is_grad_enabled() and self.weight.requires_grad
            linears, tally = self.in_graphs, self.tally
            assert linears is not None and tally is not None
            # Dynamo of torch 2.11 does not support a bool as index.
            recipe, linear = linears[1] if self.recovering else linears[0]
            return linear(input, self.weight, self.bias, tally, autocast_dtype(input), keeps, recipe)
        return self._between_graphs(input) if compiler_loaded() else self._on_begun_path(input)

    def _fits_graph(self, input: Tensor) -> bool:
        """Return whether no probe or fault is active, and casts can be counted in a backward pass."""
        probe, prices = self.shared.probe, self.shared.prices
        measuring = (probe is not None and probe.enabled) or (prices is not None and prices.enabled)
        disturbed = self.fault is not None or measuring or self.shared.watch is not None
        disturbed = disturbed or input.is_nested or is_sharded(input, self.weight)  # refused between graphs
        counts = not torch.is_grad_enabled() or input.requires_grad or self.weight.requires_grad
        return counts and not disturbed and input.numel() > 0

    def _on_begun_path(self, input: Tensor) -> Tensor:
        begun = self._begin()
        output, prices = self._on_path(input, begun), self.shared.prices
        if prices is not None and prices.enabled and begun.path is not None:
            always_recomputed(prices.watch)(self, input, output)
        if self.shared.watch is not None:
            always_recomputed(self.shared.watch)(self, input, output)
        return output

    # Not in graphs: torch.compile would specialize blocks on combinations of paths, and copies are found by the
    # identity of tensors.
    _between_graphs = between_graphs(_on_begun_path)

    def _begin(self) -> Pass:
        """Return the pass that begins, or the pass that activation checkpointing repeats."""
        shared = self.shared
        path, amax = None if shared.high_precision else self.path, shared.amax
        history, replaced = (None, None) if amax is None else (amax.history, amax.replaced)
        counts = (torch.is_grad_enabled() and not shared.no_side_effects) or shared.repeats_step
        now = Pass(path, self.recovered, self.sound, shared.step, history, replaced, counts)
        return begin(self, self.operator_name, now, side_effects=not shared.no_side_effects)

    def _on_path(self, input: Tensor, begun: Pass) -> Tensor:
        """Run `forward` between graphs."""
        shared, path = self.shared, begun.path
        weight: Tensor = self.matrix
        bias: Tensor | None = self.bias
        keeps = torch.is_grad_enabled() and weight.requires_grad
        quantizes = isinstance(path, Recipe) or (shared.quantize_forward and not isinstance(path, KeepFormat))
        # Without casts in fprop and without wgrad, a path is the plain linear.
        if path is None or not (keeps or quantizes):
            return self.plain(input)
        if transformed():
            if casts_nothing(path):
                return self.plain(input)
            raise RuntimeError(
                f"{self.operator_name}: torch.func's transforms (vmap, jvp, grad, ...) and forward-mode derivatives "
                f"are not defined on the path {path.name}, whose casts have none; run them within "
                "converted.high_precision()"
            )
        self._check(input, weight)
        if input.numel() == 0:  # an expert without tokens: nothing to cast, not even its weight
            self.read, self._node = (0, self.operator_name, input.dtype) if keeps else None, None
            return self.plain(input)
        x = input
        if (dtype := autocast_dtype(x)) is not None:
            # Cast as autocast does for F.linear itself: a cast inside the function would leave the saved dtypes mixed.
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
            weight = weight.to(dtype) if weight.is_floating_point() else weight
        fault = self.fault.for_step(input, remember=not shared.no_side_effects) if self.fault is not None else None
        # The operands that the path makes of the input, and one function for all three GEMMs.
        arguments = Arguments(input, x, weight, bias, keeps, fault)
        if isinstance(path, Recipe):
            operands, kept_dtype = self._cast_operands(path, begun, arguments), x.dtype
        else:
            operands = self._compressed_operands(path, begun, arguments, quantizes)
            kept_dtype = x.dtype if isinstance(path, KeepFormat) else input.dtype
        context, x_fprop, x_wgrad, measurement, kept_by = operands
        output: Tensor = LinearFunction.apply(x, weight, bias, None, context, x_fprop, x_wgrad, measurement)
        if torch.is_grad_enabled() and not output.requires_grad and not in_backward():
            context.end()  # frozen, like everything before it: no backward pass follows
        self.read = (input.numel() // input.shape[-1], kept_by, kept_dtype) if keeps else None
        self._node = weakref.ref(output.grad_fn) if output.grad_fn is not None else None
        return output

    def plain(self, input: Tensor) -> Tensor:
        """Compute as `nn.Linear` does (evaluation).

        Returns: (..., O) of (..., I).
        """
        return F.linear(input, self.matrix, self.bias)

    def _check(self, input: Tensor, weight: Tensor) -> None:
        """Raise ValueError if no path supports these operands."""
        if is_sharded(input, weight):
            raise ValueError(f"{self.operator_name}: its input or weight {SHARDED}")
        if input.is_nested:
            raise ValueError(f"{self.operator_name}: its input is a nested tensor; give it the tensor's values()")
        here = self.shared.device
        if self.shared.stays and weight.device != here:
            raise ValueError(
                f"{self.operator_name} is on {weight.device} and was given its paths on {here}: move the model first, "
                "then attach (or convert)"
            )

    def context_kind(self, recipe: Recipe) -> type[GemmContext]:
        """Return the class that casts and multiplies under `recipe`.

        Returns: a class that `recipe.backend` decides.
        """
        return ScaledContext if recipe.backend == "scaled_mm" else GemmContext

    def gemm_context(
        self,
        recipe: Recipe,
        *,
        fault: FaultInjection | None = None,
        sound: frozenset[str] = frozenset(),
        dry_run: bool = False,
        begun: Pass | None = None,
    ) -> GemmContext:
        """Return the context of a pass under a recipe.

        Args:
            recipe: the casts.
            fault: breaks the casts of the input; None: no fault.
            sound: GEMMs whose casts the fault does not change.
            dry_run: whether casts are only compared, and record no statistics.
            begun: the pass; None: rounding to nearest under the current scales.
        """
        assert self.shared.amax is not None
        return self.context_kind(recipe)(
            recipe,
            self.shared.amax,
            self.index,
            self.operator_name,
            fault=fault,
            sound=sound,
            dry_run=dry_run,
            no_side_effects=self.shared.no_side_effects,
            draws=None if begun is None or self.shared.rounding is None else partial(self._generator, begun),
            begun=begun,
        )

    def _generator(self, begun: Pass, reader: int, operand: int, dim: int) -> torch.Generator:
        """Return the generator of a stochastic cast in the pass; `reader` is `Read.index`, the cast's owner."""
        rounding = self.shared.rounding
        assert rounding is not None
        if begun.key is None:
            begun.key = rounding.next_pass(self.index, begun.step)
        return rounding.generator(*begun.key, reader, operand, dim)

    def _cast_operands(self, recipe: Recipe, begun: Pass, arguments: Arguments) -> Operands:
        """Return the casts of the input under a recipe, shared with the other readers of the input."""
        input, x, _, _, keeps, fault = arguments
        read, probe = self.shared.read_of(input, self.operator_name, self.index), self.shared.probe
        sound: frozenset[str] = frozenset() if fault is None else begun.sound
        broken = None if sound >= {"fprop", "wgrad"} else fault  # the GEMMs that read the input
        context = self.gemm_context(recipe, fault=broken, sound=sound, begun=begun)
        rows, casts = x.detach().reshape(-1, x.shape[-1]), context.casts_of(read, x.dtype)
        x_fprop = context.cast("input", rows, recipe.fprop.input, 1, casts)
        x_wgrad = context.cast("input", rows, recipe.wgrad.input, 0, casts) if keeps else None
        measurement = None
        if keeps and probe is not None and probe.enabled:
            measurement = always_recomputed(probe.measure_casts)(self.index, read, fault, rows, context, casts)
        return Operands(context, x_fprop, x_wgrad, measurement, context.kept_by(read, x_wgrad))

    def _compressed_operands(self, fmt: Format, begun: Pass, arguments: Arguments, quantizes: bool) -> Operands:
        """Return the compressed copy of the input under a format. `quantizes`: fprop reads the copy too."""
        input, x, _, _, keeps, fault = arguments
        shared = self.shared
        copy: tuple[Tensor, ...]
        kept_by: str | Place
        read, draws = shared.read_of(input, self.operator_name, self.index), shared.rounding is not None
        if quantizes and draws and in_backward() and not begun.checkpointed:
            raise RuntimeError(
                f"{self.operator_name}: with site='forward' and rounding='stochastic' this kind of activation "
                "checkpointing cannot be repeated exactly; use use_reentrant=False"
            )
        if fault is not None and not begun.recovered:
            copy, kept_by = always_recomputed(fault.compress)(input, fmt, draws), f"{self.operator_name} (broken)"
        elif isinstance(fmt, KeepFormat):
            copy, kept_by = (x.detach(),), place_of(x)
        else:
            generator = partial(self._generator, begun, read.index, _INPUT, 2) if draws else None
            copy, kept_by = read.copy_of(input, fmt, generator), read.reader
        measurement = None
        if keeps and shared.probe is not None and shared.probe.enabled:
            measurement = always_recomputed(shared.probe.measure)(self.index, read, input, x, fault, copy)
        context = SavedCopyContext(fmt, self.operator_name, quantizes)
        return Operands(context, copy, copy if keeps else None, measurement, kept_by)

    def kept(self) -> tuple[Tensor, ...]:
        """Return the tensors of this operator's input that the graph holds between forward and backward."""
        node = self._holding()
        return () if node is None else node.saved_tensors[node.num_weights :]

    @property
    def holds(self) -> bool:
        """Whether `kept` is not empty."""
        return self._holding() is not None

    def _holding(self) -> Any:
        """Return the node of the last pass while it holds something, else None."""
        node = self._node() if self._node is not None else None
        return node if node is not None and node.holds_copy else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy: complete, but without the last step."""
        return {**self.__dict__, **dict.fromkeys(("_node", "read", "fault", "in_graphs", "tally"))}

    def extra_repr(self) -> str:
        if not self.converted:
            return super().extra_repr()
        recovery = "none" if self.recovery is None else self.recovery.name
        return f"{super().extra_repr()}, low={self.low.name}, recovery={recovery}"


def exchange_class(module: nn.Module, new_class: type[nn.Module]) -> None:
    """Give the module another class. Attributes of the instance that are the old class's forward follow.

    Hooks that replace `module.forward` (accelerate) keep the forward that they call in such an attribute.
    """
    before = type(module).forward
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module and value.__func__ is before:
            vars(module)[name] = MethodType(new_class.forward, module)
    module.__class__ = new_class


def hides_class(module: nn.Module) -> bool:
    """Return whether calls of the module do not reach the forward of its class, and would not after an exchange."""
    names = ("_old_forward",) if hasattr(module, "_hf_hook") else ("forward",)  # `_old_forward` is accelerate's
    held = [vars(module).get(name) for name in names if name in vars(module)]
    return any(getattr(value, "__func__", None) is not type(module).forward for value in held)


def transformed() -> bool:
    """Return whether a transform of torch.func or forward-mode differentiation is active."""
    # Private, because torch has no public question for either, which would replace these.
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast uses for operators on `x`.

    Returns: the dtype; None if autocast is off for the device, or `x` is float64.
    """
    kind = x.device.type
    if x.dtype == torch.float64:
        return None
    # The meta device has no autocast. (Dynamo of 2.11 cannot trace `is_autocast_available`.)
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None
