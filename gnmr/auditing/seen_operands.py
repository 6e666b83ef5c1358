"""Measure the signal-to-noise ratios of the operands that the GEMMs of linears really read, and explain poor ones.

One forward and backward pass is measured. No recipe is trusted. A dispatch mode sees each product of matrices
(`aten.mm`, `addmm`, `linear`) that runs within a linear: during its forward call, or in the autograd nodes that this
call made. The operands may be plain tensors or of any subclass that gives its values in high precision
(`in_force.values_of`). If several products resemble a GEMM of the linear, the one whose two operands resemble it most
is that GEMM. An operand q is compared, in its dtype, with the tensor x that the linear was given:

    measured    ||x||^2 / ||q - x||^2, of q as the GEMM reads it; infinite: never quantized
    possible    the same of an ideal cast of that very x: the declared format under scales of its own magnitudes

GEMMs of some operators run elsewhere (integer codes, Transformer Engine). Their outputs are compared with an exact
linear on the same inputs, and with an ideal cast if a recipe is declared. Their backward passes are not judged.

Equally poor ratios can have different causes. Further casts distinguish them:

    scale        q is a multiple of the ideal cast, or the cast under a scale that is k times the right one
    saturated    without the elements at the largest value of q, the ratio is as good as it can be
    outlier      the ratio is as good as it can be, and a few channels cost all others half of the decibels that they
                 would have if the few were zero (under scales of several tokens, also a few tokens)
    noise        none of these
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

from gnmr.compiler import compiled_code_eagerly
from gnmr.conversion.passes import in_backward
from gnmr.conversion.reads import is_sharded
from gnmr.errors import first_few
from gnmr.formats.cast import rotated
from gnmr.formats.dispatch_modes import TorchDispatchMode, without_modes
from gnmr.formats.recipes import HADAMARD
from gnmr.measure.absent_weights import gathered
from gnmr.measure.guards import refuse_transformed
from gnmr.measure.in_force import CONTRACTS, Grain, Operator, values_of

_TOLERANCE = 10**0.3
"""Allowed noise, as a multiple of the ideal cast's (3 dB), for other scale rules (powers of two) and ties."""
_FEW_ELEMENTS = 256
"""Number of elements below which stochastic rounding is noisy, so that the tolerance is squared."""
_PRODUCT_NOISE = 1e-3
"""Allowed energy of the noise of an output, as a share of the product of its operands (30 dB)."""
_OUTLIER = 8.0
"""Multiple of the median channel's magnitude above which a channel may be an outlier."""
_SCALE_FACTORS = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 0.0625)
"""Wrong scales that are tried, as multiples of the right one."""
_SAMPLED_ROWS = 256
"""Number of rows by which an operand is recognized."""
_CERTAIN = 1.9
"""Sum of the cosines of two operands with their tensors from which on no other product can be the GEMM."""
_CLAIMED = "gnmr.auditing.seen_operands"
"""Key in the metadata of an autograd node, for the pass that made the node."""
_MAX_NODES = 64
"""Largest number of autograd nodes that one call of a linear makes."""


@dataclass(frozen=True)
class Cause:
    """The problem of one operand or output, and its remedy."""

    kind: str
    text: str
    right: str


@dataclass
class MeasuredOperand:
    """One operand of one GEMM (or fprop's `output`): energies, summed over all passes of an operator."""

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
        return _decibels(self.signal, self.noise)

    @property
    def best(self) -> float | None:
        """Return the possible ratio in dB."""
        return None if self.possible is None else _decibels(self.signal, self.possible)

    def add(self, x: Tensor, q: Tensor, ideal: Tensor | None) -> None:
        """Add one pass."""
        # Energies add up over passes, decibels do not.
        self.signal += _energy(x)
        self.noise += _energy(q.float() - x.float())
        if ideal is not None:
            self.possible = (self.possible or 0.0) + _energy(ideal.float() - x.float())


# ---- causes ----


def _decibels(signal: float, noise: float) -> float:
    if not math.isfinite(signal + noise):
        return -math.inf
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def _energy(x: Tensor) -> float:
    """Return the sum of squares, computed in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _dot(x: Tensor, y: Tensor) -> float:
    return float((x.double() * y.double()).sum())


def _operand_cause(x: Tensor, q: Tensor, grain: Grain | None, contracted: int, ideal: Tensor | None) -> Cause | None:
    """Return the problem of `q`, which a GEMM reads for the tensor `x` (N, D) cast in `grain`, or None."""
    # Values in 16 bits are exact in float32, and so is their difference but for its last digit.
    x, q = x.float(), q.float()
    signal, noise = _energy(x), _energy(q - x)
    if not math.isfinite(signal):
        return Cause("not finite", "the tensor itself is not finite", "look for the operator before it")
    if not math.isfinite(noise):
        return Cause("not finite", "is not finite, the tensor that was cast is", "look at its scale")
    if signal == 0:
        return None
    # Nothing is declared: the GEMM should read the tensor itself.
    if grain is None:
        if noise == 0:
            return None
        text, gain = f"is cast to {_decibels(signal, noise):.0f} dB, and nothing says that it is", _dot(q, x) / signal
        if abs(gain - 1) > 0.1:
            text = f"is {gain:.3g} times the tensor that the operator was given"
        return Cause("undeclared cast", text, "look at what wraps this linear")
    assert ideal is not None
    possible = _energy(ideal.float() - x)
    if noise == 0:
        text = f"is the tensor itself (infinite dB); {grain} can give {_decibels(signal, possible):.0f} dB"
        return None if possible == 0 else Cause("never quantized", text, f"cast it to {grain}, or say that it is not")
    if noise > possible * _TOLERANCE ** (2 if x.numel() < _FEW_ELEMENTS else 1):
        return _poor_cast_cause(x, q, grain, contracted, ideal.float())
    return _outlier_cause(x, q, grain, contracted)


def _poor_cast_cause(x: Tensor, q: Tensor, grain: Grain, contracted: int, ideal: Tensor) -> Cause:
    """Return the reason why the noise of q is far above that of the ideal cast."""
    signal, noise, possible = _energy(x), _energy(q - x), _energy(ideal - x)
    head = f"{_decibels(signal, noise):.1f} dB where {grain} can give {_decibels(signal, possible):.1f}"
    enough = possible * _TOLERANCE

    # q is a multiple of the ideal cast: another scale is multiplied back than was divided by.
    for dim, extent in ((None, "the tensor"), (1, "its rows"), (0, "its columns")):
        gain = _least_squares_gain(ideal, q, dim)
        wrong = (gain - 1).abs() > 0.1
        if wrong.any() and _energy(q / gain - x) <= enough:
            where = "" if dim is None else f" in {int(wrong.sum())} of {gain.numel()} of {extent}"
            text = f"{head}: the GEMM reads {float(gain[wrong][0]):.3g} times the tensor{where}"
            return Cause("scale", text, "the scale that is multiplied back must be the one that was divided by")

    # Elements beyond the largest of q: 3% above, because a format rounds them by less.
    largest = float(q.abs().max())
    beyond = x.abs() > 1.03 * largest
    share_beyond = float(beyond.double().mean())
    text = f"{head}: {share_beyond:.2g} of its elements are beyond {largest:.3g}, the largest that the GEMM reads"
    clamped = Cause("saturated", text, "look for a clamp, or a scale of another tensor")
    saturate = f", so that {share_beyond:.2g} of its elements saturate" if share_beyond else ""
    delayed = grain.cast.scale == "delayed"

    # q is the cast under k times the right scale. A factor that is no power of two explains a delayed scale, or a
    # scale of another tensor; if elements saturate under a current scale, q was clamped.
    for factor in (*_SCALE_FACTORS[:2], largest / float(x.abs().max()), *_SCALE_FACTORS[2:]):
        if factor <= 0 or abs(factor - 1) < 0.05 or _energy(q - grain.under(x, contracted, factor)) >= 0.1 * noise:
            continue
        if delayed and factor < 1:
            text = f"{head}: saturated: its delayed scale is of {factor:.2g} times its largest value{saturate}"
            return Cause("saturated", text, "a shorter history, or a scale of the tensor at hand")
        if share_beyond and not delayed and abs(math.log2(factor) - round(math.log2(factor))) >= 0.05:
            return clamped
        text = f"{head}: cast under {factor:.3g} times the right scale{saturate}"
        return Cause("scale", text, "the scale of a group is its largest magnitude over the format's")
    if share_beyond and _energy((q - x)[~beyond]) <= enough:
        return clamped
    return Cause("noise", f"{head}, and no scale, saturation or outlier explains it", "look at how it is cast")


def _least_squares_gain(x: Tensor, q: Tensor, dim: int | None) -> Tensor:
    """Return the factor between x and q by least squares, for all, each row or each column; 1 for zeros."""
    # q ~ gain x, with the least squared error for gain = <x, q> / <x, x>.
    x, q = x.double(), q.double()
    if dim is None:
        squares, products = x.square().sum(), (x * q).sum()
    else:
        squares, products = x.square().sum(dim, keepdim=True), (x * q).sum(dim, keepdim=True)
    gain = torch.where(squares > 0, products / squares, 1.0)
    return torch.where(gain.abs() > 1e-6, gain, 1.0).float()


def _outlier_cause(x: Tensor, q: Tensor, grain: Grain, contracted: int) -> Cause | None:
    """Return a cause if a few channels or tokens cost the others half of their decibels."""
    # A row (token) can spoil others only where several rows share a scale.
    shares_rows = grain.cast.scale in ("tensor", "delayed", "block")
    for dim, noun in ((0, "channel"), (1, "row")):
        if x.shape[1 - dim] <= 4 or (noun == "row" and not shares_rows):
            continue
        peaks = x.abs().amax(dim)
        outliers = peaks > _OUTLIER * peaks.median()
        count = int(outliers.sum())
        if not 0 < count <= max(1, outliers.numel() // 32):
            continue
        # The ratio of all others, now and if the outliers were zero.
        ordinary = ~outliers.unsqueeze(dim).expand_as(x)
        without = grain.ideal(torch.where(ordinary, x, 0.0), contracted).float()
        signal = _energy(x[ordinary])
        beside = _decibels(signal, _energy((q - x)[ordinary]))
        alone = _decibels(signal, _energy((without - x)[ordinary]))
        if beside < alone / 2:
            numbers = first_few([str(number) for number in outliers.nonzero().flatten().tolist()], 3)
            times = float(peaks[outliers].max() / peaks.median())
            subject, pronoun = (
                (f"{noun} {numbers} is", "it") if count == 1 else (f"{noun}s {numbers} are up to", "them")
            )
            text = (
                f"{subject} {times:.3g} times as large as the median {noun}: beside {pronoun} the other {noun}s have "
                f"{beside:.1f} dB, without {pronoun} they would have {alone:.1f} dB"
            )
            return Cause("outlier", text, "smaller groups with a scale, a rotation, or 16 bits for this operator")
    return None


def _squared_cosine(y: Tensor, exact: Tensor) -> float:
    """Return the squared cosine between two tensors; NaN if one is 0 or not finite."""
    norms = _energy(y.float()) * _energy(exact.float())
    return _dot(y, exact) ** 2 / norms if math.isfinite(norms) and norms else math.nan


def _output_cause(exact: Tensor, y: Tensor, ideal: Tensor | None, bias: Tensor | None) -> Cause | None:
    """Return the problem of an output that should be `exact`, or None; `ideal` is the best possible output."""
    exact, y = exact.float(), y.float()
    signal, noise = _energy(exact), _energy(y - exact)
    if not math.isfinite(noise):
        finite = math.isfinite(signal)
        return Cause("not finite", "its output is not finite", "look at its scales") if finite else None
    if signal == 0:
        return None
    if ideal is None:  # nothing is declared, so only a wrong multiple is a problem; ternary weights leave 0.8 of it
        possible = signal * 0.1
        if 0.25 < _squared_cosine(y, exact) < 0.9:
            return None
    else:
        possible = max(signal * _PRODUCT_NOISE, _energy(ideal.float() - exact) * _TOLERANCE)
    if noise <= possible:
        return None
    # Wrong: the bias is missing, or the sums are multiplied with a wrong scale.
    if bias is not None and _energy(y + bias - exact) <= possible:
        return Cause("output", "its output lacks the bias", "the bias must be added after the product")
    gain = _dot(y, exact) / signal
    text = f"its output is {_decibels(signal, noise):.1f} dB from what its operands give"
    if abs(gain - 1) > 0.1:
        text += f", {gain:.3g} times it"
    return Cause("output", text, "look at the scales that multiply the product")


# ---- measurements ----


@dataclass(eq=False)
class _OperatorPass:
    """One forward pass of an operator, until its backward pass is over."""

    operator: Operator
    x: Tensor
    """The input (T, I)."""
    weight: Tensor
    """The weight (O, I) as it was during the forward pass (adapters may change it there), of any class."""
    origin: Any
    """The autograd node of the input."""
    grad: Tensor | None = None
    """The gradient (T, O) of the output."""
    candidates: dict[str, tuple[float, dict[str, Tensor]]] = field(default_factory=dict)
    """By GEMM: the product that resembles it most, as the sum of its operands' cosines and the operands."""
    measured: set[str] = field(default_factory=set)
    """GEMMs that were measured, or cannot be."""

    def reference(self, gemm: str, operand: str) -> Tensor | None:
        """Return the tensor (N, D) that the operator was given, rotated if that is declared.

        The result is None if the weight's class does not give its values.
        """
        x = self.operator.values(self.weight) if operand == "weight" else self._tensor(operand)
        grain = self.operator.grain(gemm, operand)
        if x is None or grain is None or not grain.cast.hadamard:
            return x
        return rotated(x, CONTRACTS[gemm, operand])

    def _tensor(self, operand: str) -> Tensor | None:
        return {"weight": self.weight, "input": self.x, "grad_output": self.grad}[operand]

    def fits(self, gemm: str, operand: str, q: Tensor) -> bool:
        """Return True if a tensor has the shape of this operand; a rotated one may be padded."""
        x = self._tensor(operand)
        assert x is not None
        padded = -(-x.shape[0] // HADAMARD) * HADAMARD
        return tuple(q.shape) == tuple(x.shape) or (gemm == "wgrad" and tuple(q.shape) == (padded, x.shape[1]))

    def likeness(self, gemm: str, operand: str, q: Tensor) -> float:
        """Return the cosine between q and its reference tensor; 1 if q is not finite, 0 for zeros."""
        x = self.reference(gemm, operand)
        if x is None or x.shape != q.shape:
            return 0.0
        stride = max(1, len(x) // _SAMPLED_ROWS)
        a, b = q[::stride].double().flatten(), x[::stride].double().flatten()
        norms = float(a.norm() * b.norm())
        # A NaN has to be measured to be reported, so it counts as alike.
        if not math.isfinite(norms):
            return 1.0
        return abs(float(a @ b)) / norms if norms else 0.0

    def offer(self, a: Tensor, b: Tensor) -> tuple[str, float] | None:
        """Compare a product of a (M, K) and b (K, N) with the GEMMs that may run now, and keep it for the nearest.

        Returns:
            The GEMM and the likeness if the product resembles the GEMM more than any before; else None.
        """
        first, second = values_of(a), values_of(b)
        if first is None or second is None:
            return None
        nearest, gemm_of_nearest = 0.0, ""
        nearest_operands: dict[str, Tensor] = {}
        # Before the gradient of the output is known only fprop can run. One product may fit two GEMMs of a square
        # weight, and a linear may run more products than its own (adapters), so the cosines decide.
        for gemm in ("fprop",) if self.grad is None else ("dgrad", "wgrad"):
            if gemm in self.measured or self.operator.multiplies_codes(gemm):
                continue
            for operands in _as_operands(gemm, first, second):
                if not all(self.fits(gemm, operand, q) for operand, q in operands.items()):
                    continue
                cosines = [self.likeness(gemm, operand, q) for operand, q in operands.items()]
                if max(cosines) > 0.5 and sum(cosines) > nearest:
                    nearest, gemm_of_nearest, nearest_operands = sum(cosines), gemm, operands
        if nearest <= self.candidates.get(gemm_of_nearest, (0.0, {}))[0]:
            return None
        self.candidates[gemm_of_nearest] = nearest, nearest_operands
        return gemm_of_nearest, nearest

    def explains(self, output: Tensor) -> bool:
        """Return True if the output is the product that was seen, but for a tenth of its energy and a bias."""
        if "fprop" not in self.candidates:
            return True
        _, operands = self.candidates["fprop"]
        product = F.linear(operands["input"].float(), operands["weight"].float(), self.operator.bias)
        y = output.detach().reshape(product.shape).float()
        return _energy(y - product) <= 0.1 * _energy(product)


class Watch(TorchDispatchMode):
    """A mode that measures the operands of the linears' GEMMs; use `watching`."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        """Call `progress` with the number of finished forward and backward passes of linears."""
        super().__init__()
        self._progress, self._done = progress, 0
        self.measurements: dict[tuple[str, str, str], MeasuredOperand] = {}
        """Measurements by operator, GEMM and operand."""
        self.ran: set[str] = set()
        self._running: list[_OperatorPass | None] = []
        """Passes whose forward call or autograd node runs now, from the outside in; None: a call that is ignored."""
        self._undecided: dict[_OperatorPass, None] = {}
        """Passes with a candidate that is not certain."""
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        running = self._running[-1] if self._running else None
        if running is not None and (factors := _factors(func, args)) is not None:
            with _aside():
                self._product(running, *factors)
        return result

    def before(self, operator: Operator, x: Any) -> None:
        """Begin a forward pass of `operator` on `x`; passes that checkpointing runs again are ignored."""
        refuse_transformed(operator.name)
        with _aside():
            begun: _OperatorPass | None = None
            if isinstance(x, Tensor) and x.numel() and not in_backward():
                rows = gathered(x.detach()).reshape(-1, x.shape[-1])
                begun = _OperatorPass(operator, rows, operator.raw_weight, x.grad_fn)
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
            if ended.operator.stored and not ended.explains(output):
                ended.candidates.clear()
                ended.measured |= {"fprop", "dgrad"}  # codes, whose sums are scaled
            operands = self._decide(ended, "fprop")
            judged = self._output(ended, gathered(output.detach()).reshape(-1, output.shape[-1]), operands)
        # dgrad and wgrad run in the autograd nodes of this call, in the order of backward; the hooks say when.
        if judged and output.requires_grad:
            output.register_hook(lambda grad: self._gradient(ended, grad))
            for node in _nodes_between(output.grad_fn, ended.origin):
                if node.metadata.setdefault(_CLAIMED, ended) is not ended:
                    continue  # a node of a linear within this one
                node.register_prehook(lambda _grads: self._running.append(ended))
                node.register_hook(lambda _inputs, _outputs: self._leave())

    def _leave(self) -> None:
        self._running.pop()

    def _report(self) -> None:
        self._done += 1
        self._progress(self._done)

    def _gradient(self, ended: _OperatorPass, grad: Tensor) -> None:
        self._report()
        with _aside():
            ended.grad = gathered(grad.detach()).reshape(-1, grad.shape[-1])

    def finish(self) -> None:
        """Measure the products that resembled a GEMM most, where none was certain."""
        with _aside():
            for undecided in [*self._undecided]:
                for gemm in [*undecided.candidates]:
                    self._decide(undecided, gemm)

    def _product(self, running: _OperatorPass, a: Tensor, b: Tensor) -> None:
        """Take a product for the GEMM that it resembles; fprop is decided when the call ends."""
        gemm, likeness = running.offer(a, b) or ("", 0.0)
        if gemm in ("dgrad", "wgrad"):
            self._undecided[running] = None
            if likeness >= _CERTAIN:
                self._decide(running, gemm)

    def _decide(self, decided: _OperatorPass, gemm: str) -> dict[str, Tensor] | None:
        """Measure the product that resembles the GEMM most, and return its operands; None: there is none."""
        if gemm not in decided.candidates:
            return None
        _, operands = decided.candidates.pop(gemm)
        decided.measured.add(gemm)
        operator = decided.operator
        for operand, q in operands.items():
            reference, grain = decided.reference(gemm, operand), operator.grain(gemm, operand)
            if reference is None:
                continue
            x, contracted = reference.to(q.dtype), CONTRACTS[gemm, operand]
            # The ideal cast rounds stochastically where the declared one does, but with draws of its own.
            if self._generator.device != x.device:
                self._generator = torch.Generator(x.device).manual_seed(0)
            ideal = None if grain is None else grain.ideal(x, contracted, self._generator)
            measured = self.measurements.setdefault((operator.name, gemm, operand), MeasuredOperand())
            measured.add(x, q, ideal)
            if not measured.causes and operator.declared is not None:
                cause = _operand_cause(x, q, grain, contracted, ideal)
                measured.causes += [] if cause is None else [cause]
        if not decided.candidates:
            self._undecided.pop(decided, None)
        return operands

    def _output(self, ended: _OperatorPass, y: Tensor, operands: dict[str, Tensor] | None) -> bool:
        """Compare the output (T, O) with the product of the seen operands, or of the given tensors.

        A class that declares nothing may do more after the product that was seen, as a router does. Then its output is
        no multiple of the product, it and the backward pass say nothing about precision, and False is returned.
        """
        operator, x = ended.operator, ended.x
        bias, weight = operator.bias, operator.values(ended.weight)
        if weight is None or x.shape[1] != weight.shape[1] or y.shape != (x.shape[0], weight.shape[0]):
            return True  # packed weights, or a parallel shard
        ideal: Tensor | None = None
        if operands is None:  # rounded as autocast rounds the operands
            exact = F.linear(x.to(y.dtype).float(), weight.to(y.dtype).float(), bias).to(y.dtype).float()
            if operator.declared is not None:
                casts = {"input": x.to(y.dtype), "weight": weight}
                for operand, tensor in casts.items():
                    grain = operator.grain("fprop", operand)
                    casts[operand] = (tensor if grain is None else grain.ideal(tensor, 1)).float()
                ideal = F.linear(casts["input"], casts["weight"], bias).to(y.dtype)
        else:
            exact = F.linear(operands["input"].float(), operands["weight"].float(), bias)
            if operator.declared is not None:
                ideal = exact.to(y.dtype) if operator.result is None else operator.result.ideal(exact.to(y.dtype), 1)
            else:  # the class of another library may lack the bias, which is a finding, or do more
                products = [exact] if bias is None else [exact, exact - bias.float()]
                if all(_squared_cosine(y, product) < 0.9 for product in products):
                    return False
        measured = self.measurements.setdefault((operator.name, "fprop", "output"), MeasuredOperand())
        measured.by = "output" if operands is None else measured.by
        measured.add(exact, y, ideal)
        if not measured.causes and (cause := _output_cause(exact, y, ideal, bias)) is not None:
            measured.causes.append(cause)
        return True


@contextmanager
def watching(operators: Sequence[Operator], progress: Callable[[int], None]) -> Iterator[Watch]:
    """Measure forward and backward passes of the operators, and remove the hooks afterwards.

    Args:
        operators: the model's linears; products within other modules, which no hook sees, are ignored.
        progress: called with the number of finished forward and backward passes of linears.

    Yields:
        The watch, whose measurements are complete at the end.
    """
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
            # Tensor parallelism takes this process's part of the output in a hook of its own.
            first = isinstance(module, nn.Linear) and is_sharded(module.weight)
            stack.callback(module.register_forward_hook(after, always_call=True, prepend=first).remove)
        stack.enter_context(compiled_code_eagerly())
        with watch:
            yield watch
    watch.finish()


@contextmanager
def _aside() -> Iterator[None]:
    """Run products of our own without gradients, unseen by every dispatch mode.

    Selective checkpointing would otherwise count them among the operations that it saves and looks up again.
    """
    with torch.no_grad(), without_modes():
        yield


def _nodes_between(output: Any, origin: Any) -> list[Any]:
    """Return the autograd nodes from an output's down to `origin`, the input's, without it and without leaves."""
    nodes, ahead = dict.fromkeys([output]), [output]
    while ahead and len(nodes) < _MAX_NODES:
        for node, _ in ahead.pop(0).next_functions:
            if node is not None and node is not origin and node not in nodes and node.next_functions:
                nodes[node] = None
                ahead.append(node)
    return [*nodes]


def _factors(func: Any, args: Any) -> tuple[Tensor, Tensor] | None:
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
    # grad_weight (O, I) is grad_output^T input; a library may compute its transpose instead.
    return [{"grad_output": a.t(), "input": b}, {"grad_output": b, "input": a.t()}]
