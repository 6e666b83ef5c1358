"""Measure low precision in parts that no plan covers: the output head, routers, and the cache of keys and values.

- head, router: linears that every recipe leaves in 16 bits, on the low path.
- kv: the keys and values that attention reads (`scaled_dot_product_attention`), under a separate cast; of a model of
  transformers, those of its decoder. No GEMM reads them in low precision. Their error is an inner product with the
  gradient, u = <dk, Q(k) - k>. It is summed over heads, by token and by sequence as in `gnmr.measure.price`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gnmr.conversion import ConvertedModel, PathLinear, PathSpec, convert
from gnmr.formats import Recipe
from gnmr.formats.cast import quantize
from gnmr.formats.recipes import Cast, Gemm
from gnmr.measure.absent_weights import settle
from gnmr.measure.in_force import operators_of
from gnmr.measure.price import PriceMeter, Sequences, measure_prices
from gnmr.names import KV_CAST
from gnmr.options import require


def kv_cast_of(word: str) -> Cast:
    """Return the cast of a cache from a word such as `KV_CAST`.

    Raises:
        ValueError: the word names no cast, or one that needs a history.
    """
    require(isinstance(word, str), "kv_cast", word, f"must be a cast, as {KV_CAST}")
    try:
        cast = Cast.of(word)
    except ValueError as error:
        raise ValueError(f"kv_cast={word}: {error} (such as {KV_CAST})") from error
    require(cast is not None, "kv_cast", word, f"casts nothing; use one such as {KV_CAST}")
    assert cast is not None
    require(cast.scale != "delayed", "kv_cast", word, "a cache has no history of magnitudes; use the scale tensor")
    return cast


ALL_CACHES = "kv"
"""Name of all keys and values together, as a part that is in low precision."""


class UnplannedParts:
    """The parts (`BESIDE` in gnmr.names) to measure, each alone with everything else on the recovery path."""

    def __init__(self, model: nn.Module, kinds: Sequence[str], low: Recipe, kv_cast: Cast) -> None:
        """Convert the linears of these kinds. Raises ValueError if the model has none of a kind."""
        self.converted: ConvertedModel | None = None
        self._meter: PriceMeter | None = None
        names = []
        for kind in (kind for kind in kinds if kind != "kv"):
            chosen = [operator.name for operator in operators_of(model) if operator.role == kind]
            require(chosen, "include", kind, "this model has none that is an nn.Linear")
            names += chosen
        if names:
            spec = PathSpec.of(low, "bf16", targets=names, backend="simulated")
            self.converted = convert(model, spec, include_heads=True)
            settle(self.converted, model)
            for operator in self.converted.operators:
                operator.switch(True)
                assert isinstance(operator.low, Recipe)
                # Only fprop is measured, so the low path casts nothing else.
                operator.low = Recipe(operator.low.name, fprop=operator.low.fprop, dgrad=Gemm(), wgrad=Gemm())
            self._meter = measure_prices(self.converted, ["price_fprop"], 1, frozen=True)
            self._meter.enabled = False
        self.kv = KVCache(model, kv_cast) if "kv" in kinds else None

    @property
    def operators(self) -> list[PathLinear]:
        """Return the linears, converted."""
        return [] if self.converted is None else self.converted.operators

    def find_sequences(self, sequences: Sequences) -> None:
        """Let one object find the sequences of the rows of linears and caches.

        Args:
            sequences: that of the operators of the plan, so that all are found by the same backward passes.
        """
        if self._meter is not None:
            self._meter.sequences = sequences
        if self.kv is not None:
            self.kv.sequences = sequences

    def restore(self) -> None:
        """Undo the conversion of the linears."""
        if self.converted is not None:
            self.converted.restore()

    @contextmanager
    def running(self, alone: str | None = None) -> Iterator[None]:
        """Keep everything on the recovery path inside, except one part.

        Args:
            alone: name of a linear or a cache, or `ALL_CACHES`; None: no part.
        """
        if self.converted is not None:
            for operator in self.converted.operators:
                operator.switch(operator.operator_name != alone)
        with ExitStack() as stack:
            if self.kv is not None:
                stack.enter_context(self.kv.running(alone))
            for operator in self.operators:
                stack.callback(operator.switch, True)
            yield

    @contextmanager
    def priced(self, place: int) -> Iterator[None]:
        """Measure the backward pass of a batch, with all parts on the recovery path.

        Args:
            place: number of the batch, which seeds the measurement's draws.
        """
        if self._meter is not None:
            self._meter.begin_step(place)
            self._meter.enabled = True
        try:
            with self.running():
                yield
        finally:
            if self._meter is not None:
                self._meter.enabled = False

    def take(self, loss_tokens: int) -> dict[str, tuple[float, float]]:
        """Return and reset the prices of the backward passes since the last call.

        Args:
            loss_tokens: the number of tokens in the mean of their loss.

        Returns:
            {name: (nats by token, nats by sequence)}, the latter NaN if sequences are unknown.

        Raises:
            ValueError: keys and values are to be measured, and no attention was seen.
        """
        nats: dict[str, tuple[float, float]] = {}
        if self._meter is not None:
            self._meter.loss_tokens = loss_tokens
            numbers = self._meter.by_operator()
            estimates = zip(numbers["fprop"].tolist(), numbers["fprop_sequence"].tolist(), strict=True)
            nats |= dict(zip(self._meter.operators, estimates, strict=True))
            self._meter.reset()
            assert self.converted is not None
            self.converted.end_step()
        if self.kv is not None:
            nats |= self.kv.take(loss_tokens)
        return nats


class KVCache(TorchFunctionMode):
    """A mode that watches the keys and values that attention reads, or casts one of them, inside `running`."""

    def __init__(self, model: nn.Module, cast: Cast) -> None:
        super().__init__()
        self._model, self._cast = model, cast
        self.cast_name = str(cast)
        self._decoder = _decoder_of(model)
        self._inside: list[str] = []
        self._alone: str | None = None
        self._sums: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
        """Inner products by token (B, T) and by sequence (S,) of each call, by cache."""
        self.sequences = Sequences()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        arguments = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        module = self._inside[-1] if self._inside else ""  # "": called by the model itself, or by `run`
        # Only a decoder keeps keys and values for the next token.
        if not f"{module}.".startswith(self._decoder):
            return func(*args, **(kwargs or {}))
        for operand in ("key", "value"):
            arguments[operand] = self._read(f"{module}.{operand[0]}_cache".lstrip("."), arguments[operand])
        return func(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), *args[3:], **arguments)

    def _read(self, name: str, x: Tensor) -> Tensor:
        """Return the tensor that attention reads in place of `x` (B, ..., T, D)."""
        if self._alone in (name, ALL_CACHES):
            return self._stored(x)
        if torch.is_grad_enabled() and x.requires_grad:
            # A view of its own, so that the hook sees the gradient of this reader alone.
            x = x.view_as(x)
            x.register_hook(partial(self._measure, name, x.detach(), self.sequences.watch(x)))
        self._sums.setdefault(name, [])
        return x

    def _stored(self, x: Tensor) -> Tensor:
        by_token = _by_token(x)
        values = quantize(by_token.reshape(-1, x.shape[-1]), self._cast, 1)[0].to(x.dtype)
        return values.view(by_token.shape).movedim(1, -2).view(x.shape)

    @torch.no_grad()
    def _measure(self, name: str, x: Tensor, marks: list[Tensor], grad: Tensor) -> None:
        if self.sequences.takes(marks, grad):
            return
        # The inner products <dy, Q(x) - x> of rows, as in `gnmr.measure.price`.
        products = (grad.float() * (self._stored(x) - x).float()).sum(dim=-1).double()  # (B, ..., T)
        by_token, by_sequence = _by_token(products[..., None]).flatten(2).sum(dim=2), None
        if (rows := self.sequences.of(marks, grad)) is not None:
            by_sequence = products.new_zeros(rows[1]).index_add_(0, rows[0], products.flatten())
        self._sums[name].append((by_token, by_sequence))

    @contextmanager
    def running(self, alone: str | None = None) -> Iterator[None]:
        """Turn the mode on, and cast the cache `alone`, or `ALL_CACHES`."""
        self._alone = alone
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                enter = partial(self._enter, name)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(self)
            yield
        self._alone = None
        self._inside.clear()

    def _enter(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        self._inside.append(name)

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._inside.pop()

    def take(self, loss_tokens: int) -> dict[str, tuple[float, float]]:
        """Return the numbers of `UnplannedParts.take`. Raises ValueError if no attention was seen."""
        require(self._sums, "include", "kv", "this model's attention is not PyTorch's scaled_dot_product_attention")
        nats = {}
        for name, calls in self._sums.items():
            if not calls:
                continue
            by_shape: dict[torch.Size, Tensor] = {}  # the error of several calls is one error
            for by_token, _ in calls:
                by_shape[by_token.shape] = by_shape.get(by_token.shape, 0.0) + by_token
            # T/2 * sum of u^2, as the price of fprop.
            token = sum(float(u.square().sum()) for u in by_shape.values())
            sums = [by_sequence for _, by_sequence in calls if by_sequence is not None]
            sequence = float(torch.stack(sums).sum(dim=0).square().sum()) if len(sums) == len(calls) else math.nan
            nats[name] = loss_tokens / 2 * token, loss_tokens / 2 * sequence
        self._sums = {}
        return nats


def _decoder_of(model: nn.Module) -> str:
    """Return the beginning of the names of modules whose keys and values are kept for the next token.

    Encoders and vision towers attend once. It is empty unless the model is one of transformers that names its decoder.
    """
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    names = (name for name, module in model.named_modules() if module is decoder and name)
    return next((f"{name}." for name in names), "")


def _by_token(x: Tensor) -> Tensor:
    """Reshape (B, ..., T, D), or (T, D) of one sequence, to (B, T, ..., D), so that each head of a token is a row."""
    return (x if x.dim() > 2 else x[None]).movedim(-2, 1)
