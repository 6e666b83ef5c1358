"""FP8 GEMMs through `torch._scaled_mm`, which CPUs have too: the wiring against the simulation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from close import assert_close
from torch import Tensor, nn

from gnmr.conversion import ConvertedModel, PathSpec, convert, scaled_mm
from gnmr.measure.operand_errors import measure_errors
from gnmr.names import GEMMS

RECOVERED = [
    gemms for n in product((False, True), repeat=3) if (gemms := [g for g, yes in zip(GEMMS, n, strict=True) if yes])
]


def few_bits(rows: int, columns: int, largest: float, low: int, high: int, scale: float, seed: int) -> Tensor:
    """Scales are powers of two, and operands of few enough bits that float32 sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(low, high, (rows, columns), generator=generator).float()
    whole += 0.8 * torch.rand(rows, columns, generator=generator) - 0.4  # what the cast has to round away
    whole *= torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    whole[-1, -1] = largest
    return whole * scale


X = few_bits(72, 32, 448, 9, 15, 2.0**-3, 1)  # tokens that 16 does not divide
W = few_bits(48, 32, 448, 9, 15, 2.0**-7, 2)
DY = few_bits(72, 48, 57344, 5, 7, 2.0**-20, 3)


def through(
    backend: str,
    low: str,
    recovers: list[str] | None = None,
    operands: tuple[Tensor, ...] = (X, W, DY),
    bias: bool = False,
    probe: Sequence[str] = (),
) -> tuple[list[Tensor], ConvertedModel]:
    """Output and gradients of one linear and what `probe` reads, and the converted model.

    `recovers`: it runs in recovery, of these GEMMs.
    """
    x, w, dy = operands
    net = nn.Sequential(nn.Linear(w.shape[1], len(w), bias=bias))
    net[0].weight.data.copy_(w)
    if bias:
        net[0].bias.data.fill_(0.25)
    paths = PathSpec.of(low, "bf16" if recovers else None, targets=["0"], recovers=recovers or GEMMS, backend=backend)
    converted = convert(net, paths)
    converted.operators[0].switch(bool(recovers))
    errors = measure_errors(converted, probe) if probe else None
    leaf = x.clone().requires_grad_()
    y = net(leaf.view(2, -1, x.shape[1]))
    assert converted.cost.saved_bytes() == converted.cost.predicted_bytes()
    assert all(kept.untyped_storage().nbytes() == kept.nbytes for kept in converted.operators[0].kept()[1:])
    y.backward(dy.view(2, -1, dy.shape[1]))
    measured = [] if errors is None else list(errors.read().values())
    return [y.detach(), leaf.grad, *(p.grad for p in net.parameters()), *measured], converted


@pytest.mark.fp8
@pytest.mark.parametrize("recovers", [None, *RECOVERED], ids=str)
@pytest.mark.parametrize("low", ["fp8_hybrid", "fp8_delayed"])
def test_it_is_the_simulation_where_no_sum_is_rounded(low: str, recovers: list[str] | None) -> None:
    """For every combination of GEMMs low or recovered."""
    real, converted = through("scaled_mm", low, recovers)
    simulated, _ = through("simulated", low, recovers)
    assert converted.low.backend == "scaled_mm"
    for ours, theirs, gemm in zip(real, simulated, GEMMS, strict=True):
        if recovers is None or gemm not in recovers:
            assert torch.equal(ours, theirs), gemm
        else:
            assert_close(ours, theirs, terms=72)


@pytest.mark.fp8
def test_of_any_numbers_it_differs_by_the_order_of_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    operands = tuple(torch.randn(one.shape, generator=generator) for one in (X, W, DY))
    both = (through(backend, "fp8_hybrid", None, operands, bias=True)[0] for backend in ("scaled_mm", "simulated"))
    assert_close(*both, terms=72)


@pytest.mark.fp8
def test_what_is_kept_are_codes_and_their_scale() -> None:
    """As saved tensors, the weight's codes too, so that checkpointing and hooks of saved tensors reach them."""
    net, saved = nn.Sequential(nn.Linear(32, 48)), []
    converted = convert(net, PathSpec.of("fp8_hybrid", "bf16", targets=["0"], backend="scaled_mm"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, tuple(t.shape))) or t, lambda t: t):
        y = net(X.clone().requires_grad_())
    assert [shape for dtype, shape in saved if dtype.itemsize == 1] == [(48, 32), (72, 32)]
    assert not any(isinstance(value, scaled_mm.Codes) for value in vars(y.grad_fn).values())
    assert converted.cost.saved_bytes() == converted.cost.predicted_bytes() == 72 * 32 + 4
    assert converted.cost.spent()[1] == 0
    converted.operators[0].switch(True)
    y = net(X.clone().requires_grad_())
    assert y.requires_grad and converted.cost.saved_bytes() == converted.cost.predicted_bytes() == 72 * 32 * 4
    assert converted.cost.spent()[1] == 8 / 8 * 72 * 32


@pytest.mark.fp8
def test_delayed_scales_saturate_and_are_counted_alike() -> None:
    counts = []
    for backend in ("scaled_mm", "simulated"):
        net = nn.Sequential(nn.Linear(32, 48))
        converted = convert(net, PathSpec.of("fp8_delayed", None, targets=["0"], backend=backend))
        for factor in (1.0, 100.0):
            converted.end_step()
            net(X * factor).sum().backward()
        counts.append(converted.saturation()["input"].tolist())
        assert converted.shared.amax.history[0, 0, :2].tolist() == [X.abs().max() * 100, X.abs().max()]
    assert counts[0] == counts[1] and counts[0][0][0] > 1000


# ---- which backend runs a recipe ----


@pytest.mark.parametrize(
    ("low", "widths", "said"),
    [
        ("sim_e3m2", (128, 128), "the recipe sim_e3m2 has e3m2/row in fprop"),
        ("mxfp8", (128, 128), "the recipe mxfp8 has e4m3/mx in fprop"),
        ("deepseek_v3", (128, 128), "the model is on cpu"),
        pytest.param("fp8_hybrid", (32, 24), "0 has 24 outputs", marks=pytest.mark.fp8),
    ],
)
def test_what_it_cannot_run_is_refused(low: str, widths: tuple[int, int], said: str) -> None:
    net = nn.Sequential(nn.Linear(*widths))
    with pytest.raises(ValueError, match=f"backend='scaled_mm': .*{said}"):
        convert(net, PathSpec.of(low, None, targets=["0"], backend="scaled_mm"))
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize("refused", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cpu_that_refuses_fp8_products_is_told_when_the_model_is_converted(
    refused: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two E4M3 operands, or a mixed pair: PyTorch has a kernel for each."""

    def product(a: Tensor, *_args: object, **_options: object) -> Tensor:
        if a.dtype == refused:
            raise RuntimeError("could not create a primitive descriptor. Run with ONEDNN_VERBOSE=all\nsecond line")
        return torch.zeros(16, 16)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
    scaled_mm.cpu_missing.cache_clear()
    try:
        net = nn.Sequential(nn.Linear(32, 48))
        line = r"^backend='scaled_mm': PyTorch .* \(could not create a primitive descriptor\); use backend='auto'$"
        with pytest.raises(ValueError, match=line):
            convert(net, PathSpec.of("fp8_hybrid", None, targets=["0"], backend="scaled_mm"))
        assert type(net[0]) is nn.Linear
        assert convert(net, PathSpec.of("fp8_hybrid", None, targets=["0"])).low.backend == "simulated"
    finally:
        scaled_mm.cpu_missing.cache_clear()


@pytest.mark.parametrize(
    ("low", "capability", "said"),
    [
        ("deepseek_v3", (9, 0), "recipe deepseek_v3 is simulated: it has e4m3/tile"),
        ("deepseek_v3", (10, 0), "recipe deepseek_v3 is simulated: needs a GPU of compute capability 9.0"),
        ("mxfp8", (10, 0), "recipe mxfp8 is simulated: it has e4m3/mx"),
        ("fp8_hybrid", (8, 0), "recipe fp8_hybrid is simulated: needs a GPU of compute capability 8.9"),
        ("fp8_hybrid", (9, 0), None),
        ("sim_e3m2", (9, 0), None),
        ("bf16", (9, 0), None),
    ],
)
def test_auto_on_a_gpu_says_why_a_recipe_is_simulated(
    low: str, capability: tuple[int, int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")

    for device, expected in (("cpu", None), ("cuda", said)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net = nn.Sequential(nn.Linear(128, 128, device="meta"))
            convert(net, PathSpec.of(low, None, targets=["0"]), device=torch.device(device))
        found = [str(one.message) for one in caught if "simulated" in str(one.message)]
        assert found == [] if expected is None else len(found) == 1 and found[0].startswith(expected)
