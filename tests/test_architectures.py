"""What attach does with its defaults to models of 51 architectures: the numbers by hand, and the share of the GEMMs.

The share is that of the multiplications in the transformer blocks, in one forward pass, that run in an operator with
paths. Routers belong in high precision and are in neither number. Convolutions, recurrences, output heads and whatever
else lies outside of the blocks are left out and named. `PARTLY` names the architectures whose blocks are covered in
part, with their share: whoever covers more takes the line out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import gnmr
from gnmr.measure.coverage import count as counted

transformers = pytest.importorskip("transformers", minversion="5.0")
from architectures import ARCHITECTURES  # noqa: E402
from close import EIGHT_BITS, apart  # noqa: E402

pytestmark = pytest.mark.slow

PARTLY: dict[str, tuple[float, str]] = {
    "jamba": (0.98, "dt_proj (read without a call)"),
    "mamba": (0.933, "dt_proj (read without a call)"),
    "recurrent_gemma": (0.923, "gate (RecurrentGemmaRglru)"),
    "dbrx": (0.333, "mlp.w1 (DbrxExpertGLU)"),
}
"""The share, and what is named as left out: time steps whose weight is read and not called, gates of a recurrence, and
experts in a matrix that is cut after it was viewed as another shape."""


SUMS: dict[str, Any] = {"terms": 128, "products": 40}
"""The longest sums of these models, and the products in a row of two blocks, forward and backward."""

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
        if func is torch.bmm and args[1].data_ptr() in self.begins:  # Llama 4's experts
            return torch.stack([LinearByHand.apply(x, w.t(), None) for x, w in zip(*args, strict=True)])
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


def counts(name: str, model: nn.Module) -> bool:
    """Whether a parameter is one of a block's, and neither a convolution's nor a router's (4 experts, or 1 gate)."""
    parameter, module = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
    routes = parameter.dim() == 2 and len(parameter) in (1, 4)
    return in_block(name) and not isinstance(module, _ConvNd) and not routes


def in_block(name: str) -> bool:
    return re.search(r"(?:^|\.)\d+\.", name) is not None


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
    whole = sum(flops for own, flops in count.found.items() if counts(own, model))
    kinds, keys, plain = [type(one) for one in model.modules()], list(model.state_dict()), gradients(model, loss(batch))
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", signal="always_low")
    assert list(model.state_dict()) == keys
    operators = controller.converted.operators
    with rows_of(controller) as ran:
        found = gradients(model, loss(batch))
    begins = {operator.matrix.data_ptr() for operator in operators}
    names = [operator.operator_name for operator in operators]
    told = counted(model, lambda: loss(batch), operators)
    assert told.share(names) == pytest.approx(ran.total() / count.found.total(), rel=1e-9), "another count"
    for operator in operators:
        operator.switch(recovering=True)
    assert apart(gradients(model, loss(batch)), plain, **SUMS) == {}, "BF16"
    assert apart(found, plain, **SUMS), "FP8 would pass for BF16"
    controller.detach()
    assert [type(one) for one in model.modules()] == kinds
    with ByHand(begins):
        assert apart(found, gradients(model, loss(batch)), **SUMS, recast=EIGHT_BITS) == {}
    share = sum(flops for own, flops in ran.items() if in_block(own)) / whole
    expected, left_out = PARTLY.get(name, (1.0, ""))
    assert share == pytest.approx(expected, abs=5e-3) and left_out in told.line(names), (
        f"{share:.1%}, {told.line(names)}"
    )
