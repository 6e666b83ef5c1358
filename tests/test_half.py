"""16-bit products in FP32 (gnmr/half.py): against products of the same numbers in float64, rounded once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gnmr import half

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def operands(request: pytest.FixtureRequest) -> tuple[torch.Tensor, ...]:
    """A bias (5,), and two matrices with whole numbers so small that every order of the sums gives the same."""
    draw = torch.Generator().manual_seed(0)
    bias, a, b = (torch.randint(-8, 9, shape, generator=draw) for shape in ((5,), (7, 60), (60, 5)))
    return tuple(one.to(request.param) for one in (bias, a, b))


def product(name: str, *operands: torch.Tensor, **scales: float) -> torch.Tensor:
    """By the kernel that `provide` puts in place, whether this machine needs it or not."""
    return half._in_fp32(getattr(torch.ops.aten, name).out, half._SHAPES[name])(*operands, **scales)


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_products_are_the_exact_ones_rounded_once(name: str, operands: tuple[torch.Tensor, ...]) -> None:
    bias, a, b = operands
    if name in ("bmm", "baddbmm"):
        a, b = torch.stack([a, -a]), torch.stack([b, b])
    scales = {"beta": 2.0, "alpha": 0.5} if "add" in name else {}
    found = product(name, *((bias,) if scales else ()), a, b, **scales)
    exact = a.double() @ b.double()
    if scales:
        exact = 2 * bias.double() + exact / 2
    assert found.dtype == a.dtype
    assert torch.equal(found, exact.to(a.dtype))
    assert found.abs().max() > 2**8  # so that rounding once and rounding each sum differ


def test_other_dtypes_and_mistakes_are_pytorchs() -> None:
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    assert torch.equal(product("mm", a, b), a @ b)
    with pytest.raises(RuntimeError, match="dtype"):
        product("mm", a.bfloat16(), b)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        product("mm", a.bfloat16(), a.bfloat16())
    assert product("mm", a[:0].bfloat16(), b.bfloat16()).shape == (0, 2)
    assert product("mm", torch.full((1, 4), torch.nan).bfloat16(), b.bfloat16()).isnan().all()


def test_a_process_has_them_where_its_cpu_lacks_its_own() -> None:
    """In a process of its own: kernels are exchanged for good. Gradients go through them."""
    code = (
        "import torch\n"
        "from gnmr import half\n"
        "half.lacking = lambda: True\n"
        "seen = []\n"
        "class Seen(tuple):\n"
        "    def __contains__(self, dtype):\n"
        "        seen.append(dtype)\n"
        "        return super().__contains__(dtype)\n"
        "half._HALF = Seen(half._HALF)\n"
        "assert half.provide() and half.provide()\n"
        "x, w = (torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True) for _ in 'xw')\n"
        "y = torch.nn.functional.linear(x, w)\n"
        "y.sum().backward()\n"
        "assert (y == 3).all() and (x.grad == 2).all() and (w.grad == 2).all()\n"
        "print(len(seen))\n"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "3", ran.stderr  # fprop, dgrad, wgrad


def test_a_model_of_ours_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from gnmr import models
    from gnmr.config import ModelConfig

    asked = []
    monkeypatch.setattr(half, "provide", lambda: asked.append(True))
    with torch.device("meta"):
        models.build(ModelConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1), 10, 4)
    assert asked
