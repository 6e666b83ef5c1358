"""Measure the signal-to-noise ratios of the operands that the GEMMs of linears really read.

One forward and backward pass is measured; `causes` explains poor ratios. No recipe is trusted. A dispatch mode sees
each product of matrices (`aten.mm`, `addmm`, `linear`) that runs within a linear, forward or backward. The operands may
come from our kernels, from torchao's `Float8TrainingTensor` and `MXTensor` (converted back to high precision by their
own method), or be plain tensors. An operand is compared, in its dtype, with the tensor that the linear was given:

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
from torch.utils._python_dispatch import TorchDispatchMode

from gnmr.doctor.causes import Cause, decibels, energy, explained, is_multiple, of_output
from gnmr.doctor.guards import refuse_transformed
from gnmr.doctor.in_force import CONTRACTS, Operator
from gnmr.precision.cast import rotated
from gnmr.precision.recipes import HADAMARD

_ROWS = 256
"""Number of rows by which an operand is recognized."""


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


@dataclass
class _Pass:
    """One forward pass of an operator, until its backward pass is over."""

    operator: Operator
    x: Tensor
    grad: Tensor | None = None
    seen: set[str] = field(default_factory=set)
    operands: tuple[Tensor, Tensor] | None = None
    """The operands of fprop, as its GEMM read them."""


class Watch(TorchDispatchMode):
    """A mode that measures the operands of the linears' GEMMs; use `watching`."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        """Call `progress` with the number of finished forward and backward passes of linears."""
        super().__init__()
        self._progress, self._done = progress, 0
        self.found: dict[tuple[str, str, str], Measured] = {}
        """Measurements by operator, GEMM and operand."""
        self.ran: set[str] = set()
        self._now: _Pass | None = None
        self._busy = False
        self._draw = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._now is None or self._busy or (pair := _pair(func, args)) is None:
            return result
        with self._aside():
            self._gemm(self._now, *pair)
        return result

    def before(self, operator: Operator, x: Tensor) -> None:
        """Begin a forward pass of `operator` on `x`."""
        refuse_transformed(operator.name)
        rows = x.detach().reshape(-1, x.shape[-1])
        self._now = _Pass(operator, rows) if rows.numel() else None

    def after(self, output: Any) -> None:
        """End the forward pass with this output."""
        now, self._now = self._now, None
        output = output[0] if isinstance(output, tuple) else output
        if now is None:
            return
        self.ran.add(now.operator.name)
        self._report()
        with self._aside():
            judged = self._output(now, output.detach().reshape(-1, output.shape[-1]))
        if judged and output.requires_grad:
            output.register_hook(lambda grad: self._backward(now, grad))
        now.operands = None

    def _report(self) -> None:
        self._done += 1
        self._progress(self._done)

    def _backward(self, now: _Pass, grad: Tensor) -> None:
        self._report()
        with self._aside():
            now.grad = grad.detach().reshape(-1, grad.shape[-1])
        self._now = now

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Mark products inside as our own, so that they are not measured."""
        before, self._busy = self._busy, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._busy = before

    # ---- operands ----

    def _gemm(self, now: _Pass, a: Tensor, b: Tensor) -> None:
        """Match a product of a (M, K) and b (K, N) while `now` runs with one of its GEMMs, or with none."""
        gemms = ("fprop",) if now.grad is None else ("dgrad", "wgrad")
        best: tuple[float, str, dict[str, Tensor]] | None = None
        for gemm in gemms:
            if gemm in now.seen or now.operator.multiplies_codes(gemm):
                continue
            for given in _as_operands(gemm, a, b):
                if any(not self._fits(now, gemm, operand, shape) for operand, shape in given.items()):
                    continue
                values = {operand: _values(q) for operand, q in given.items()}
                likeness = [self._likeness(now, gemm, operand, q) for operand, q in values.items()]
                if max(likeness) > 0.5 and (best is None or sum(likeness) > best[0]):
                    best = sum(likeness), gemm, values
        if best is None:
            return
        _, gemm, values = best
        now.seen.add(gemm)
        for operand, q in values.items():
            self._operand(now, gemm, operand, q)
        if gemm == "fprop":
            now.operands = values["input"], values["weight"]
        if {"dgrad", "wgrad"} <= now.seen:
            self._now = None

    def _fits(self, now: _Pass, gemm: str, operand: str, q: Tensor) -> bool:
        """Return True if a tensor has the shape of this operand; a rotated one may be padded."""
        have, want = tuple(q.shape), tuple(self._reference(now, operand).shape)
        if gemm == "wgrad" and have[0] == -(-want[0] // HADAMARD) * HADAMARD:
            return have[1] == want[1]
        return have == want

    def _likeness(self, now: _Pass, gemm: str, operand: str, q: Tensor) -> float:
        """Return the cosine between q and its reference tensor; 1 if q is not finite, 0 for zeros."""
        x = self._turned(now, gemm, operand)
        if x.shape != q.shape:
            return 0.0
        every = max(1, len(x) // _ROWS)
        a, b = q[::every].double().flatten(), x[::every].double().flatten()
        norms = float(a.norm() * b.norm())
        if not math.isfinite(norms):
            return 1.0
        return abs(float(a @ b)) / norms if norms else 0.0

    def _reference(self, now: _Pass, operand: str) -> Tensor:
        """Return the tensor (N, D) that the operator was given."""
        found = {"weight": now.operator.weight, "input": now.x, "grad_output": now.grad}[operand]
        assert found is not None
        return found

    def _turned(self, now: _Pass, gemm: str, operand: str) -> Tensor:
        """Return the reference, rotated if that is declared."""
        x, grain = self._reference(now, operand), now.operator.grain(gemm, operand)
        return rotated(x, CONTRACTS[gemm, operand]) if grain is not None and grain.cast.hadamard else x

    def _operand(self, now: _Pass, gemm: str, operand: str, q: Tensor) -> None:
        operator = now.operator
        grain = operator.grain(gemm, operand)
        x = self._turned(now, gemm, operand).to(q.dtype)
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

    def _output(self, now: _Pass, y: Tensor) -> bool:
        """Compare the output with the product of the seen operands, or of the given tensors.

        A class that declares nothing may do more after the product that was seen, as a router does. Then its output is
        no multiple of the product, it and the backward pass say nothing about precision, and False is returned.
        """
        operator = now.operator
        bias = operator.bias
        x, weight = now.x.float(), operator.weight.float()
        if x.shape[1] != weight.shape[1] or y.shape != (x.shape[0], weight.shape[0]):
            return True  # packed weights, or a parallel shard
        if now.operands is not None:
            x, weight = (operand.float() for operand in now.operands)
        exact = F.linear(x, weight, bias)
        if now.operands is not None and operator.declared is None:
            products = [exact] if bias is None else [exact, exact - bias.float()]  # it may lack the bias
            if not any(is_multiple(y, product) for product in products):
                return False
        one = self.found.setdefault((operator.name, "fprop", "output"), Measured())
        if now.operands is None:
            one.by = "output"
            ideal = self._ideal_output(operator, now.x.to(y.dtype), bias)
            exact = exact.to(y.dtype).float()
        else:
            ideal = exact.to(y.dtype) if operator.result is None else operator.result.ideal(exact.to(y.dtype), 1)
        one.add(exact, y, ideal)
        if not one.causes and (cause := of_output(exact, y, ideal, bias)) is not None:
            one.causes.append(cause)
        return True

    def _ideal_output(self, operator: Operator, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if operator.declared is None:
            return None
        grains = (operator.grain("fprop", "input"), x), (operator.grain("fprop", "weight"), operator.weight)
        own, weight = ((tensor if grain is None else grain.ideal(tensor, 1)).float() for grain, tensor in grains)
        return F.linear(own, weight, bias).to(x.dtype)


@contextmanager
def watching(operators: Sequence[Operator], progress: Callable[[int], None]) -> Iterator[Watch]:
    """Measure forward and backward passes of the operators, and remove the hooks afterwards."""
    watch = Watch(progress)
    by_module = {operator.module: operator for operator in operators if isinstance(operator.module, nn.Module)}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else next((value for value in kwargs.values() if isinstance(value, Tensor)), None)
        if isinstance(x, Tensor):
            watch.before(by_module[module], x)

    with ExitStack() as stack:
        for module in by_module:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(lambda _module, _args, output: watch.after(output)).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(watch)
        yield watch


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


def _values(q: Any) -> Tensor:
    """Return the high-precision values of a torchao tensor; other tensors are unchanged."""
    for method in ("to_original_precision", "dequantize"):
        if type(q) is not Tensor and hasattr(type(q), method) and type(q).__module__.startswith("torchao."):
            found: Tensor = getattr(q, method)()
            return found.detach()
    return q.detach()
