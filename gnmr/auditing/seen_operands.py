"""Measure the signal-to-noise ratios of the operands that the GEMMs of linears really read.

One forward and backward pass is measured; `causes` explains poor ratios. No recipe is trusted. A dispatch mode sees
each product of matrices (`aten.mm`, `addmm`, `linear`) that runs within a linear: during its forward call, or in the
autograd nodes that this call made. The operands may be plain tensors or of any subclass that gives its values in high
precision (`in_force.values_of`). If several products resemble a GEMM of the linear, the one whose two operands resemble
it most is that GEMM. An operand is compared, in its dtype, with the tensor that the linear was given:

    measured    ||x||^2 / ||q - x||^2, of q as the GEMM reads it; infinite: never quantized
    possible    the same of an ideal cast of that very x: the declared format under scales of its own magnitudes

GEMMs of some operators run elsewhere (integer codes, Transformer Engine). Their outputs are compared with an exact
linear on the same inputs, and with an ideal cast if a recipe is declared. Their backward passes are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gnmr.auditing.causes import Cause, decibels, energy, explained, is_multiple, of_output
from gnmr.conversion.kernels.simulated import in_backward
from gnmr.formats.cast import rotated
from gnmr.formats.recipes import HADAMARD
from gnmr.measure.guards import refuse_transformed
from gnmr.measure.in_force import CONTRACTS, Operator, values_of

_ROWS = 256
"""Number of rows by which an operand is recognized."""
_CERTAIN = 1.9
"""Sum of the cosines of two operands with their tensors from which on no other product can be the GEMM."""
_CLAIMED = "gnmr.auditing.seen_operands"
"""Key in the metadata of an autograd node, for the pass that made the node."""
_NODES = 64
"""Largest number of autograd nodes that one call of a linear makes."""


@dataclass
class Measured:
    """One operand of one GEMM (or fprop's `output`), over all passes of an operator."""

    signal: float = 0.0
    noise: float = 0.0
    possible: float | None = None
    """Noise of the ideal cast; None: nothing is declared."""
    by: str = "gemm"
    """gemm: seen as a GEMM read it; output: of a linear whose GEMM was not seen."""
    causes: list[Cause] = field(default_factory=list)

    @property
    def snr(self) -> float:
        """Return the ratio in dB; inf if never quantized, NaN if there are only zeros."""
        return decibels(self.signal, self.noise)

    @property
    def best(self) -> float | None:
        """Return the possible ratio in dB."""
        return None if self.possible is None else decibels(self.signal, self.possible)

    def add(self, x: Tensor, q: Tensor, ideal: Tensor | None) -> None:
        """Add one pass."""
        self.signal += energy(x)
        self.noise += energy(q.float() - x.float())
        if ideal is not None:
            self.possible = (self.possible or 0.0) + energy(ideal.float() - x.float())


@dataclass(eq=False)
class _Pass:
    """One forward pass of an operator, until its backward pass is over."""

    operator: Operator
    x: Tensor
    weight: Tensor
    """The weight (O, I) as it was during the forward pass (adapters may change it there), of any class."""
    origin: Any
    """The autograd node of the input."""
    grad: Tensor | None = None
    candidates: dict[str, tuple[float, dict[str, Tensor]]] = field(default_factory=dict)
    """By GEMM: the product that resembles it most, as the sum of its operands' cosines and the operands."""
    seen: set[str] = field(default_factory=set)
    """GEMMs that were measured."""


class Watch(TorchDispatchMode):
    """A mode that measures the operands of the linears' GEMMs; use `watching`."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        """Call `progress` with the number of finished forward and backward passes of linears."""
        super().__init__()
        self._progress, self._done = progress, 0
        self.found: dict[tuple[str, str, str], Measured] = {}
        """Measurements by operator, GEMM and operand."""
        self.ran: set[str] = set()
        self._running: list[_Pass | None] = []
        """Passes whose forward call or autograd node runs now, from the outside in; None: a call that is ignored."""
        self._open: dict[_Pass, None] = {}
        """Passes with a candidate that is not certain."""
        self._draw = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        running = self._running[-1] if self._running else None
        if running is not None and (pair := _pair(func, args)) is not None:
            with _aside():
                self._gemm(running, *pair)
        return result

    def before(self, operator: Operator, x: Any) -> None:
        """Begin a forward pass of `operator` on `x`; passes that checkpointing runs again are ignored."""
        refuse_transformed(operator.name)
        with _aside():
            begun: _Pass | None = None
            if isinstance(x, Tensor) and x.numel() and not in_backward():
                begun = _Pass(operator, x.detach().reshape(-1, x.shape[-1]), operator.raw_weight, x.grad_fn)
            self._running.append(begun)

    def after(self, output: Any) -> None:
        """End the forward pass with this output; None: the call raised an exception."""
        ended = self._running.pop() if self._running else None
        output = output[0] if isinstance(output, tuple) else output
        if ended is None or not isinstance(output, Tensor):
            return
        self.ran.add(ended.operator.name)
        self._report()
        with _aside():
            if ended.operator.stored and not self._explains(ended, output):
                ended.candidates.clear()
                ended.seen |= {"fprop", "dgrad"}  # codes, whose sums are scaled
            operands = self._decide(ended, "fprop")
            judged = self._output(ended, output.detach().reshape(-1, output.shape[-1]), operands)
        if judged and output.requires_grad:
            output.register_hook(lambda grad: self._gradient(ended, grad))
            for node in _nodes_between(output.grad_fn, ended.origin):
                if node.metadata.setdefault(_CLAIMED, ended) is not ended:
                    continue  # a node of a linear within this one
                node.register_prehook(lambda _grads: self._running.append(ended))
                node.register_hook(lambda _inputs, _outputs: self._leave())

    def _explains(self, ended: _Pass, output: Tensor) -> bool:
        """Return True if the output is the product that was seen, but for a tenth of its energy and a bias."""
        _, operands = ended.candidates.get("fprop", (0.0, None))
        if operands is None:
            return True
        product = F.linear(operands["input"].float(), operands["weight"].float(), ended.operator.bias)
        y = output.detach().reshape(product.shape).float()
        return energy(y - product) <= 0.1 * energy(product)

    def _leave(self) -> None:
        self._running.pop()

    def _report(self) -> None:
        self._done += 1
        self._progress(self._done)

    def _gradient(self, ended: _Pass, grad: Tensor) -> None:
        self._report()
        with _aside():
            ended.grad = grad.detach().reshape(-1, grad.shape[-1])

    def finish(self) -> None:
        """Measure the products that resembled a GEMM most, where none was certain."""
        with _aside():
            for ended in [*self._open]:
                for gemm in [*ended.candidates]:
                    self._decide(ended, gemm)

    # ---- operands ----

    def _gemm(self, now: _Pass, a: Tensor, b: Tensor) -> None:
        """Compare a product of a (M, K) and b (K, N) with the GEMMs that `now` may run; keep it for the nearest."""
        first, second = values_of(a), values_of(b)
        if first is None or second is None:
            return
        nearest: tuple[float, str, dict[str, Tensor]] | None = None
        for gemm in ("fprop",) if now.grad is None else ("dgrad", "wgrad"):
            if gemm in now.seen or now.operator.multiplies_codes(gemm):
                continue
            for operands in _as_operands(gemm, first, second):
                if any(not self._fits(now, gemm, operand, q) for operand, q in operands.items()):
                    continue
                likeness = [self._likeness(now, gemm, operand, q) for operand, q in operands.items()]
                if max(likeness) > 0.5 and (nearest is None or sum(likeness) > nearest[0]):
                    nearest = sum(likeness), gemm, operands
        if nearest is None or nearest[0] <= now.candidates.get(nearest[1], (0.0, {}))[0]:
            return
        likeness_sum, gemm, operands = nearest
        now.candidates[gemm] = likeness_sum, operands
        if gemm == "fprop":
            return  # it is decided when the call ends
        self._open[now] = None
        if likeness_sum >= _CERTAIN:
            self._decide(now, gemm)

    def _decide(self, now: _Pass, gemm: str) -> dict[str, Tensor] | None:
        """Measure the product that resembles the GEMM most, and return its operands; None: there is none."""
        _, operands = now.candidates.pop(gemm, (0.0, None))
        if operands is None:
            return None
        now.seen.add(gemm)
        for operand, q in operands.items():
            self._operand(now, gemm, operand, q)
        if not now.candidates:
            self._open.pop(now, None)
        return operands

    def _fits(self, now: _Pass, gemm: str, operand: str, q: Tensor) -> bool:
        """Return True if a tensor has the shape of this operand; a rotated one may be padded."""
        x = {"weight": now.weight, "input": now.x, "grad_output": now.grad}[operand]
        assert x is not None
        have, want = tuple(q.shape), tuple(x.shape)
        if gemm == "wgrad" and have[0] == -(-want[0] // HADAMARD) * HADAMARD:
            return have[1] == want[1]
        return have == want

    def _likeness(self, now: _Pass, gemm: str, operand: str, q: Tensor) -> float:
        """Return the cosine between q and its reference tensor; 1 if q is not finite, 0 for zeros."""
        x = self._turned(now, gemm, operand)
        if x is None or x.shape != q.shape:
            return 0.0
        every = max(1, len(x) // _ROWS)
        a, b = q[::every].double().flatten(), x[::every].double().flatten()
        norms = float(a.norm() * b.norm())
        if not math.isfinite(norms):
            return 1.0
        return abs(float(a @ b)) / norms if norms else 0.0

    def _reference(self, now: _Pass, operand: str) -> Tensor | None:
        """Return the tensor (N, D) that the operator was given; None if the weight's class does not give its values."""
        if operand == "weight":
            return now.operator.values(now.weight)
        return now.x if operand == "input" else now.grad

    def _turned(self, now: _Pass, gemm: str, operand: str) -> Tensor | None:
        """Return the reference, rotated if that is declared."""
        x, grain = self._reference(now, operand), now.operator.grain(gemm, operand)
        if x is None or grain is None or not grain.cast.hadamard:
            return x
        return rotated(x, CONTRACTS[gemm, operand])

    def _operand(self, now: _Pass, gemm: str, operand: str, q: Tensor) -> None:
        operator = now.operator
        grain, reference = operator.grain(gemm, operand), self._turned(now, gemm, operand)
        if reference is None:
            return
        x = reference.to(q.dtype)
        one = self.found.setdefault((operator.name, gemm, operand), Measured())
        ideal = None if grain is None else grain.ideal(x, CONTRACTS[gemm, operand], self._generator(x))
        one.add(x, q, ideal)
        if one.causes or operator.declared is None:
            return
        if (cause := explained(x, q, grain, CONTRACTS[gemm, operand], ideal)) is not None:
            one.causes.append(cause)

    def _generator(self, x: Tensor) -> torch.Generator:
        if self._draw.device != x.device:
            self._draw = torch.Generator(x.device).manual_seed(0)
        return self._draw

    # ---- outputs ----

    def _output(self, now: _Pass, y: Tensor, operands: dict[str, Tensor] | None) -> bool:
        """Compare the output with the product of the seen operands, or of the given tensors.

        A class that declares nothing may do more after the product that was seen, as a router does. Then its output is
        no multiple of the product, it and the backward pass say nothing about precision, and False is returned.
        """
        operator = now.operator
        bias, weight = operator.bias, operator.values(now.weight)
        if weight is None or now.x.shape[1] != weight.shape[1] or y.shape != (now.x.shape[0], weight.shape[0]):
            return True  # packed weights, or a parallel shard
        if operands is None:
            exact = F.linear(now.x.to(y.dtype).float(), weight.to(y.dtype).float(), bias)  # as autocast rounds them
        else:
            exact = F.linear(operands["input"].float(), operands["weight"].float(), bias)
        if operands is not None and operator.declared is None:
            products = [exact] if bias is None else [exact, exact - bias.float()]  # it may lack the bias
            if not any(is_multiple(y, product) for product in products):
                return False
        one = self.found.setdefault((operator.name, "fprop", "output"), Measured())
        ideal: Tensor | None = None
        if operands is None:
            one.by = "output"
            ideal = self._ideal_output(operator, now.x.to(y.dtype), weight, bias)
            exact = exact.to(y.dtype).float()
        elif operator.declared is not None:
            ideal = exact.to(y.dtype) if operator.result is None else operator.result.ideal(exact.to(y.dtype), 1)
        one.add(exact, y, ideal)
        if not one.causes and (cause := of_output(exact, y, ideal, bias)) is not None:
            one.causes.append(cause)
        return True

    def _ideal_output(self, operator: Operator, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if operator.declared is None:
            return None
        grains = (operator.grain("fprop", "input"), x), (operator.grain("fprop", "weight"), weight)
        cast = [(tensor if grain is None else grain.ideal(tensor, 1)).float() for grain, tensor in grains]
        return F.linear(cast[0], cast[1], bias).to(x.dtype)


@contextmanager
def _aside() -> Iterator[None]:
    """Run products of our own without gradients, unseen by every dispatch mode.

    Selective checkpointing would otherwise count them among the operations that it saves and looks up again.
    """
    # `_disable_current_modes` has no public counterpart: a mode can leave only itself, not those that others entered.
    with torch.no_grad(), _disable_current_modes():
        yield


def _nodes_between(output: Any, origin: Any) -> list[Any]:
    """Return the autograd nodes from an output's down to `origin`, the input's, without it and without leaves."""
    nodes, ahead = dict.fromkeys([output]), [output]
    while ahead and len(nodes) < _NODES:
        for node, _ in ahead.pop(0).next_functions:
            if node is not None and node is not origin and node not in nodes and node.next_functions:
                nodes[node] = None
                ahead.append(node)
    return [*nodes]


@contextmanager
def watching(operators: Sequence[Operator], progress: Callable[[int], None]) -> Iterator[Watch]:
    """Measure forward and backward passes of the operators, and remove the hooks afterwards."""
    watch = Watch(progress)
    by_module = {operator.module: operator for operator in operators if isinstance(operator.module, nn.Module)}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
        watch.before(by_module[module], x)

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        watch.after(output)

    with ExitStack() as stack:
        for module in by_module:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        with watch:
            yield watch
    watch.finish()


def _pair(func: Any, args: Any) -> tuple[Tensor, Tensor] | None:
    """Return (a (M, K), b (K, N)) of a product of two matrices; None for any other function."""
    name = func.name().partition("::")[2].partition(".")[0] if hasattr(func, "name") else ""
    if name == "mm":
        return args[0], args[1]
    if name == "addmm":
        return args[1], args[2]
    if name == "linear" and args[1].dim() == 2:
        return args[0].reshape(-1, args[0].shape[-1]), args[1].t()
    return None


def _as_operands(gemm: str, a: Tensor, b: Tensor) -> list[dict[str, Tensor]]:
    """Return the operands that the two factors are if the product is this GEMM; wgrad has two orders."""
    if gemm == "fprop":
        return [{"input": a, "weight": b.t()}]
    if gemm == "dgrad":
        return [{"grad_output": a, "weight": b}]
    return [{"grad_output": a.t(), "input": b}, {"grad_output": b, "input": a.t()}]
