"""What attach does with its defaults to models of 48 architectures: the numbers by hand, and the share of the GEMMs.

The share is that of the multiplications with a weight in one forward pass that run in an operator with paths; output
heads, classifiers and routers of experts, which belong in high precision, are in neither. `PARTLY` names the
architectures that are covered in part, with their share: whoever covers more takes the line out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import gnmr
from gnmr.measure.coverage import count as counted

transformers = pytest.importorskip("transformers", minversion="5.0")
from architectures import ARCHITECTURES  # noqa: E402

pytestmark = pytest.mark.slow

PARTLY: dict[str, tuple[float, str]] = {
    "qwen3_next": (0.99, "conv1d"),
    "jamba": (0.978, "conv1d, dt_proj, which is read and not called"),
    "mamba": (0.917, "conv1d, dt_proj, which is read and not called"),
    "mamba2": (0.975, "conv1d"),
    "recurrent_gemma": (0.913, "gates of the recurrent layers, conv_1d"),
    "bert": (0.941, "the transform before the head"),
    "roberta": (0.941, "the transform before the head"),
    "modernbert": (0.952, "the transform before the head"),
    "distilbert": (0.941, "the transform before the head"),
    "electra": (0.941, "the transform before the head"),
    "whisper": (0.833, "convolutions"),
    "vit": (0.85, "the convolution of patches"),
    "swin": (0.812, "the convolution of patches"),
    "clip": (0.913, "the convolution of patches, the projections behind the towers"),
    "wav2vec2": (0.807, "convolutions, the projection behind them"),
}
"""The share, and what is left out."""


# ---- fp8_hybrid by hand ----


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an FP8 format under one scale."""
    scale = x.abs().max() / torch.tensor(torch.finfo(dtype).max)
    return (x / scale).to(dtype).float() * scale


class LinearByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        a, b = cast(x.flatten(0, -2), torch.float8_e4m3fn), cast(matrix, torch.float8_e4m3fn)
        ctx.save_for_backward(a, b)
        ctx.shape = x.shape
        return F.linear(a.view(x.shape), b, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        g = cast(rows, torch.float8_e5m2)
        return (g @ b).view(ctx.shape), g.t() @ a, rows.sum(0) if ctx.needs_input_grad[2] else None


class ByHand(TorchFunctionMode):
    """Every product with one of these matrices, told by where it begins in memory, is `LinearByHand`."""

    def __init__(self, begins: set[int]) -> None:
        super().__init__()
        self.begins = begins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].data_ptr() in self.begins and args[0].numel():
            bias = (kwargs or {}).get("bias", args[2] if len(args) > 2 else None)
            return LinearByHand.apply(args[0], args[1], bias)
        if getattr(func, "__name__", "") in ("matmul", "__matmul__") and args[1].data_ptr() in self.begins:
            return LinearByHand.apply(args[0], args[1].t(), None)
        if func is torch.addmm and args[2].data_ptr() in self.begins:  # Conv1D of transformers
            return LinearByHand.apply(args[1], args[2].t(), args[0])
        return func(*args, **(kwargs or {}))


# ---- a count of its own ----


class Count(TorchDispatchMode):
    """FLOPs of the products that read a parameter of `model`, by the parameter's name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        factors = args[1:] if "add" in str(func) else args
        read = [x.untyped_storage().data_ptr() for x in factors if isinstance(x, Tensor)]
        if formula is not None and (names := [self.names[place] for place in read if place in self.names]):
            self.found[names[0]] += formula(*args, **(kwargs or {}), out_val=out)
        return out


def is_kept(parameter: Tensor) -> bool:
    """Whether it is that of an output head (320 tokens), a classifier (10 classes), or a router (4 experts, 1 gate)."""
    return parameter.dim() == 2 and (320 in parameter.shape or parameter.shape[0] in (1, 4, 10))


@contextmanager
def rows_of(controller: Any) -> Iterator[Counter[str]]:
    """FLOPs of the operators that run inside, by their names."""
    found: Counter[str] = Counter()

    def watch(operator: Any, x: Tensor, output: Tensor) -> None:
        found[operator.operator_name] += 2 * x.numel() * output.shape[-1]

    shared = controller.converted.shared
    shared.watch = watch
    yield found
    shared.watch = None


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")
def test_numbers_and_share(name: str) -> None:
    model, batch, loss = ARCHITECTURES[name]()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # expert by expert, which is seen
    with torch.no_grad(), Count(model) as count:
        loss(batch)
    parameters = dict(model.named_parameters())
    whole = sum(flops for own, flops in count.found.items() if not is_kept(parameters[own]))
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", signal="always_low")
    operators = controller.converted.operators
    with rows_of(controller) as ran:
        found = gradients(model, loss(batch))
    begins = {operator.matrix.data_ptr() for operator in operators}
    names = [operator.operator_name for operator in operators]
    told = counted(model, lambda: loss(batch), operators)
    assert told.share(names) == pytest.approx(ran.total() / count.found.total(), rel=1e-9), "another count"
    controller.detach()
    with ByHand(begins):
        expected = gradients(model, loss(batch))
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    share = ran.total() / whole
    assert share == pytest.approx(PARTLY.get(name, (1.0,))[0], abs=5e-3), f"{name}: {share:.1%}, {told.line(names)}"


def test_there_are_many() -> None:
    assert len(ARCHITECTURES) >= 35 and PARTLY.keys() <= ARCHITECTURES.keys()
