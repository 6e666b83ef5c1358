"""The compressed linear against arithmetic written out by hand; what it keeps, measured and predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from close import apart, assert_close
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.conversion import ConvertedModel, PathLinear, PathSpec, convert
from gnmr.formats import FORMATS, RECIPES
from gnmr.formats.scaling import compress, decompress

FEW_BITS = [name for name, fmt in FORMATS.items() if fmt.bits < 16]
ROWS, WIDTH = 2 * 24, 32


class Block(nn.Module):
    """Attention and MLP in miniature: q, k, v read one tensor, gate and up another."""

    def __init__(self, width: int = WIDTH, bias: bool = False) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"):
            setattr(self, name, nn.Linear(width, width, bias=bias))
        self.down_proj = nn.Linear(width, width, bias=bias)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o_proj(F.scaled_dot_product_attention(self.q_proj(h), self.k_proj(h), self.v_proj(h)))
        h = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def model(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(bias=bias), Block(bias=bias)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(x).float().square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def single(name: str, bias: bool, dtype: torch.dtype, site: str = "saved") -> tuple[nn.Linear, PathLinear]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 16, bias=bias)).to(dtype)
    low = copy.deepcopy(plain)
    convert(low, PathSpec.of(name, None, targets=["0"], site=site))
    return plain[0], low[0]


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_dgrad_are_exact_and_wgrad_uses_the_compressed_input(name, bias, dtype) -> None:
    plain, low = single(name, bias, dtype)
    x = inputs(dtype)
    grad_output = torch.randn(2, 24, 16).to(dtype)
    results = []
    for linear in (plain, low):
        leaf = x.clone().requires_grad_()
        output = linear(leaf)
        output.backward(grad_output)
        results.append((output.detach(), leaf.grad, linear.weight.grad, linear.bias.grad if bias else None))
    (y, dx, dw, db), (y_low, dx_low, dw_low, db_low) = results
    assert_close([y_low, dx_low, db_low], [y, dx, db], terms=ROWS)

    flat, fmt = x.reshape(-1, WIDTH), FORMATS[name]
    x_hat = decompress(*compress(flat, fmt), fmt, WIDTH, dtype)
    assert_close(dw_low, grad_output.reshape(-1, 16).t() @ x_hat, terms=ROWS)
    assert apart(dw_low, dw, terms=ROWS)


@pytest.mark.parametrize("name", ["int4", "e4m3"])
def test_site_forward_reads_the_quantized_input_in_the_forward_pass_too(name: str) -> None:
    plain, low = single(name, True, torch.float32, site="forward")
    x = inputs()
    fmt = FORMATS[name]
    x_hat = decompress(*compress(x.reshape(-1, WIDTH), fmt), fmt, WIDTH, x.dtype).view_as(x)
    expected = F.linear(x_hat, plain.weight, plain.bias)
    assert_close(low(x), expected, terms=WIDTH)
    with torch.no_grad():
        assert_close(low(x), expected, terms=WIDTH)
        low.shared.switches.high_precision = True
        assert_close(low(x), plain(x), terms=WIDTH)
    assert apart(expected, plain(x), terms=WIDTH)


def kept_bytes(net: nn.Module, converted: ConvertedModel, x: Tensor) -> int:
    output = net(x)
    kept = converted.cost.saved_bytes()
    assert kept == converted.cost.predicted_bytes()
    output.float().sum().backward()
    assert converted.cost.saved_bytes() == 0, "nothing is held after backward"
    return kept


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_bytes_are_those_of_the_memory_model(name: str, dtype: torch.dtype) -> None:
    net = model(dtype=dtype)
    converted = convert(net, PathSpec.of(name, None))
    scale = 2 if dtype == torch.bfloat16 else 4
    per_row = WIDTH * dtype.itemsize if name == "bf16" else WIDTH * FORMATS[name].bits // 8 + scale
    copies = 4 * 2  # a block's q/k/v, o, gate/up and down inputs; two blocks
    assert kept_bytes(net, converted, inputs(dtype)) == copies * ROWS * per_row


def test_readers_of_one_tensor_share_a_copy_only_on_the_same_path() -> None:
    net, x = model(dtype=torch.bfloat16), inputs(torch.bfloat16)
    converted = convert(net, PathSpec.of("int4", "int8"))
    low_copy, high_copy = ROWS * (WIDTH // 2 + 2), ROWS * (WIDTH + 2)
    assert kept_bytes(net, converted, x) == 8 * low_copy
    net[0].q_proj.switch(True)
    assert kept_bytes(net, converted, x) == 8 * low_copy + high_copy, "k and v still need the 4-bit copy"
    net[0].k_proj.switch(True)
    net[0].v_proj.switch(True)
    assert kept_bytes(net, converted, x) == 7 * low_copy + high_copy
    net[1].down_proj.switch(True)
    assert kept_bytes(net, converted, x) == 6 * low_copy + 2 * high_copy
    # By the paper's equations each counts by itself.
    assert converted.cost.spent()[1] == 4 * (8 - 4) / 8 * ROWS * WIDTH


def test_one_tensor_changed_in_place_is_compressed_again() -> None:
    net = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    converted = convert(net, PathSpec.of("int4", None, targets=["a", "b"]))
    x = torch.randn(4, 8)
    first = net["a"](x)
    x.mul_(3)
    second = net["b"](x)
    assert converted.cost.saved_bytes() == 2 * 4 * (4 + 4)
    (first.sum() + second.sum()).backward()
    fmt = FORMATS["int4"]
    x_hat = decompress(*compress(x, fmt), fmt, 8, x.dtype)
    torch.testing.assert_close(net["b"].weight.grad, torch.ones(4, 8).t() @ x_hat)


def backend(low: str) -> str:
    """What says nothing about it: a simulation that is asked for, and for formats none."""
    return "auto" if low in FORMATS else "simulated"


def refilled(how: str) -> tuple[Tensor, Callable[[float], None]]:
    """(a tensor of ones, what fills it without a new version number)."""
    array = np.ones((4, 32), dtype=np.float32)
    x = torch.from_numpy(array) if how == "array" else torch.ones(4, 32)
    if how == "array of a tensor":
        array = x.numpy()
    before = x._version

    def fill(value: float) -> None:
        if how == "data":
            x.data.fill_(value)
        else:
            array[:] = value
        assert x._version == before

    return x, fill


@pytest.mark.parametrize("how", ["array", "array of a tensor", "data"])
@pytest.mark.parametrize("low", ["int8", "llm_int8", "fp8_hybrid"])
def test_a_buffer_that_is_refilled_is_cast_anew_in_each_pass(low: str, how: str) -> None:
    net = nn.ModuleDict({"a": nn.Linear(32, 8, bias=False), "b": nn.Linear(32, 8, bias=False)})
    convert(net, PathSpec.of(low, None, targets=["a", "b"], backend=backend(low)))
    x, fill = refilled(how)
    total, of_ones = torch.zeros(8, 32), [net[name](torch.ones(4, 32)) for name in "ab"]
    for value in (1.0, 3.0):  # two micro-batches of one step
        fill(value)
        total += 4 * value
        outputs = [net[name](x) for name in "ab"]
        for output, ones in zip(outputs, of_ones, strict=True):
            torch.testing.assert_close(output, value * ones, rtol=1e-3, atol=1e-3)
            output.sum().backward()
        for name in "ab":
            torch.testing.assert_close(net[name].weight.grad, total, rtol=0.05, atol=0)
    with torch.no_grad():
        answers = [(fill(value), net["a"](x).clone())[1] for value in (1.0, 2.0)]
    torch.testing.assert_close(answers[1], 2 * answers[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("low", ["int4", "bf16", "llm_int8"])
def test_an_array_may_change_between_two_readers_of_one_pass(low: str) -> None:
    """So its readers share nothing; the memory model knows."""
    net = nn.ModuleDict({"a": nn.Linear(32, 8, bias=False), "b": nn.Linear(32, 8, bias=False)})
    converted = convert(net, PathSpec.of(low, None, targets=["a", "b"], backend=backend(low)))
    x, fill = refilled("array")
    ones = net["b"](torch.ones(4, 32)).detach()
    first = net["a"](x)
    if low != "bf16":  # that keeps the array itself, as nn.Linear does
        fill(2.0)
    second = net["b"](x)
    assert converted.cost.saved_bytes() == converted.cost.predicted_bytes() > 0
    (first.sum() + second.sum()).backward()
    value = 2.0 if low != "bf16" else 1.0
    torch.testing.assert_close(second, value * ones, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(net["b"].weight.grad, torch.full((8, 32), 4 * value), rtol=0.05, atol=0)


@pytest.mark.parametrize("low", ["int8", "llm_int8"])
def test_what_was_cast_of_a_tensor_goes_with_it(low: str) -> None:
    """Nobody calls `end_step` while a model answers."""
    net = nn.Sequential(nn.Linear(32, 8))
    converted = convert(
        net, PathSpec.of(low, None, targets=["0"], site="forward" if low == "int8" else "saved", backend=backend(low))
    )
    with torch.no_grad():
        x = torch.ones(4, 32)
        net(x)
        read = converted.shared._last
        assert read.copies or read.casts
        del x
        assert not read.copies and not read.casts


@pytest.mark.parametrize("low", ["bf16", "llm_int8", "int4"])
def test_views_of_one_storage_count_once_where_they_are_kept_as_they_are(low: str) -> None:
    net = nn.ModuleDict({name: nn.Linear(16, 8) for name in "abc"} | {"part": nn.Linear(8, 8)})
    converted = convert(net, PathSpec.of(low, None, targets=["a", "b", "c", "part"], backend=backend(low)))
    x = torch.randn(2, 3, 16, requires_grad=True) * 1
    outputs = [net["a"](x), net["b"](x.view(6, 16)), net["c"](x.clone()), net["part"](x[..., :8])]
    assert converted.cost.saved_bytes() == converted.cost.predicted_bytes()
    if low == "bf16":
        assert converted.cost.saved_bytes() == 2 * 6 * 16 * 4
    sum(output.sum() for output in outputs).backward()
    assert converted.cost.saved_bytes() == 0


def test_a_frozen_weight_keeps_nothing() -> None:
    net = model()
    converted = convert(net, PathSpec.of("int4", None))
    for operator in converted.operators:
        operator.weight.requires_grad_(False)
    x = inputs().requires_grad_()
    net(x).sum().backward()
    assert x.grad is not None and converted.cost.predicted_bytes() == 0


@pytest.mark.parametrize("low", ["int4", "mxfp8"])
def test_nothing_is_cast_for_an_input_without_rows(low: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(32, 32))
    converted = convert(net, PathSpec.of(low, None, targets=["?"]))
    monkeypatch.setattr("gnmr.conversion.gemms.quantize", None)
    monkeypatch.setattr("gnmr.conversion.reads.compress", None)
    net(torch.randn(0, 32, requires_grad=True)).sum().backward()
    assert torch.equal(net[0].weight.grad, torch.zeros(32, 32))
    assert converted.cost.predicted_bytes() == converted.cost.saved_bytes() == 0


def test_a_model_that_moved_to_another_device_is_told() -> None:
    for how in ({"low": "fp8_hybrid", "backend": "simulated"}, {"low": "int4", "rounding": "stochastic"}):
        net = nn.Sequential(nn.Linear(32, 32))
        convert(net, PathSpec.of(recovery=None, targets="?", **how))
        net.to("meta")
        with pytest.raises(ValueError, match=r"^0 is on meta and was given its paths on cpu: move the model first"):
            net(torch.ones(2, 32, device="meta"))


def test_what_is_no_state_of_the_paths_is_refused() -> None:
    converted = convert(nn.Sequential(nn.Linear(32, 32)), PathSpec.of("int4", None, targets="?"))
    with pytest.raises(ValueError, match="belongs to unknown paths"):
        converted.load_state_dict(3)


@pytest.mark.parametrize(
    "other",
    [
        {"low": "fp8_delayed_1024"},
        {"recovery": None},
        {"recovers": ["wgrad"]},
        {"targets": ["q_proj"]},
        {"pins": {"0.q_proj": ["wgrad"]}},
        {"low": "mine", "recipes": {"mine": RECIPES["fp8_delayed"].words()}},
        {"low": "mine", "recipes": {"mine": {"fprop": {"input": "e4m3/delayed"}}}},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the recovery path", "ignore:recovers")
def test_another_models_state_is_refused_before_anything_is_loaded(other: dict) -> None:
    kwargs = {"low": "fp8_delayed", "recovery": "bf16", "targets": ["*_proj"]}
    converted, foreign = (convert(model(), PathSpec(**more)) for more in (kwargs, {**kwargs, **other}))
    before = converted.state_dict()["largest"]
    with pytest.raises(ValueError, match=r"^the paths' state belongs to low=.* this model has low=fp8_delayed, .*$"):
        converted.load_state_dict(foreign.state_dict())
    assert torch.equal(converted.state_dict()["largest"], before)
    converted.load_state_dict(convert(model(), PathSpec(**kwargs)).state_dict())


def test_linears_on_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    gpu, device_of = torch.device("cuda", 1), torch.Tensor.device.__get__
    devices = property(lambda weight: gpu if weight is net[1].weight else device_of(weight))
    monkeypatch.setattr(nn.Parameter, "device", devices, raising=False)
    with pytest.raises(ValueError, match=r"linears on several devices \(cpu, cuda:1\)"):
        convert(net, PathSpec.of("int4", None, targets=["?"]))
    assert type(net[0]) is nn.Linear


def test_a_parameter_that_is_read_directly_is_compressed_anew_each_time() -> None:
    """Fused optimizers change parameters without a new version number."""
    latent = nn.Parameter(torch.randn(6, 8))
    net = nn.Sequential(nn.Linear(8, 8))
    convert(net, PathSpec.of("int8", None, targets=["0"]))
    optimizer = torch.optim.AdamW([latent], lr=0.5, fused=True)
    for _ in range(3):
        net.zero_grad()
        net(latent).sum().backward()
        fmt = FORMATS["int8"]
        x_hat = decompress(*compress(latent.detach(), fmt), fmt, 8, latent.dtype)
        torch.testing.assert_close(net[0].weight.grad, torch.ones(6, 8).t() @ x_hat)
        optimizer.step()


def test_inference_tensors_and_the_meta_device_are_fine() -> None:
    net = model()
    convert(net, PathSpec.of("int4", None, site="forward"))
    with torch.inference_mode():
        assert net(inputs()).shape == (2, 24, WIDTH)
    meta = model().to("meta")
    convert(meta, PathSpec.of("int4", "int8"))
    assert meta(inputs().to("meta")).device.type == "meta"
