"""16-bit products in FP32 (gnmr/lab/models/cpu_products.py): against products in float64, rounded once."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnmr.lab import models
from gnmr.lab.config import ModelConfig
from gnmr.lab.models import cpu_products, pretrained

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def operands(request: pytest.FixtureRequest) -> tuple[torch.Tensor, ...]:
    """A bias (5,), and two matrices with whole numbers so small that FP32 sums them exactly in every order."""
    draw = torch.Generator().manual_seed(0)
    bias, a, b = (torch.randint(-60, 61, shape, generator=draw) for shape in ((5,), (7, 60), (60, 5)))
    return tuple(one.to(request.param) for one in (bias, a, b))


def product(name: str, *operands: torch.Tensor, **more: Any) -> torch.Tensor:
    """By the kernel that `provide` puts in place, of PyTorch's own operator in place of its kernel."""

    def plain(_: object, *args: torch.Tensor, **named: Any) -> torch.Tensor:
        return getattr(torch, name)(*args, **named)

    kernel = SimpleNamespace(call_boxed=plain)
    made = cpu_products._written(kernel, kernel) if "out" in more else cpu_products._product(kernel)
    return made(None, *operands, **more)


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
@pytest.mark.parametrize("out", [False, True])
def test_products_are_the_exact_ones_rounded_once(name: str, out: bool, operands: tuple[torch.Tensor, ...]) -> None:
    bias, a, b = operands
    if name in ("bmm", "baddbmm"):
        a, b = torch.stack([a, -a]), torch.stack([b, b])
    scales = {"beta": 2.0, "alpha": 0.5} if "add" in name else {}
    exact = a.double() @ b.double()
    if scales:
        exact = 2 * bias.double() + exact / 2
    into = {"out": torch.empty(exact.shape, dtype=a.dtype)} if out else {}
    found = product(name, *((bias,) if scales else ()), a, b, **scales, **into)
    assert found.dtype == a.dtype and (not out or found is into["out"])
    assert torch.equal(found, exact.to(a.dtype))
    assert not torch.equal(exact, exact.to(a.dtype).double()), "sums that 16 bits hold would show nothing"


def test_other_dtypes_and_mistakes_are_pytorchs() -> None:
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    assert torch.equal(product("mm", a, b), a @ b)
    for first, second, told in (
        (a.bfloat16(), b, "dtype"),
        (a.bfloat16(), a.bfloat16(), "cannot be multiplied"),
        (a.bfloat16(), b[:, 0].bfloat16(), "must be a matrix"),
    ):
        with pytest.raises(RuntimeError, match=told):
            product("mm", first, second)
    assert product("mm", a[:0].bfloat16(), b.bfloat16()).shape == (0, 2)
    assert product("mm", torch.full((1, 4), torch.nan).bfloat16(), b.bfloat16()).isnan().all()


def test_a_pytorch_without_onednn_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert cpu_products.lacking()


def in_place() -> None:
    """Put the kernels in place of this process's, and count the products of 16 bits that come to them."""
    seen, ours = [], cpu_products._is_half
    cpu_products.lacking = lambda: True
    cpu_products._is_half = lambda operands: bool(ours(operands) and (seen.append(1) or True))
    cpu_products.provide.cache_clear()
    warnings.simplefilter("error")
    assert cpu_products.provide() and cpu_products.provide() and cpu_products.kind() == "in FP32"
    x, w = (torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True) for _ in "xw")
    y = torch.nn.functional.linear(x, w)
    y.sum().backward()
    assert (y == 3).all() and (x.grad == 2).all() and (w.grad == 2).all()
    assert len(seen) == 3, "fprop, dgrad, wgrad"


def test_a_process_has_them_where_its_cpu_lacks_its_own() -> None:
    """In a child: kernels are exchanged for good. Gradients go through them."""
    child = multiprocessing.get_context("fork").Process(target=in_place)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_what_builds_or_loads_a_model_asks_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(cpu_products, "provide", lambda: asked.append(True))
    with torch.device("meta"):
        models.build(ModelConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1), 10, 4)
    assert len(asked) == 1
    transformers = pytest.importorskip("transformers")
    small = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(small).save_pretrained(tmp_path)
    pretrained.load(str(tmp_path), torch.float32, torch.device("cpu"))
    assert len(asked) == 2
