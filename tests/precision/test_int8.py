"""INT8 in the forward pass: by hand, against slow integers, real against simulated; where codes of weights are."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from close import apart, assert_close
from slow_casts import slow_cast, slow_integer_linear
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.conversion import ConvertedModel, PathSpec, convert, int8
from gnmr.conversion.int8 import integers, products
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.measure.operand_errors import measure_errors
from gnmr.names import WEIGHTS

BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """Rows over some orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape[0], *(1,) * (len(shape) - 1), generator=generator).exp()
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def linear(inputs: int = 40, outputs: int = 24, dtype: torch.dtype = BF16, trainable: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, outputs)).to(dtype).requires_grad_(trainable)


def int8_net(low: str = "llm_int8", recovery: str | None = "bf16", **more: Any) -> tuple[nn.Sequential, ConvertedModel]:
    net = linear()
    return net, convert(net, PathSpec.of(low, recovery, targets=["0"], **more))


def passed(net: nn.Module, x: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(output, input gradient)."""
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    y.backward(torch.ones_like(y) if dy is None else dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


# ---- the product ----


@pytest.mark.parametrize("width", [1, 8, 40, 1024, 1025, 2500])
@pytest.mark.parametrize("tokens", [1, 16, 17, 33])
def test_real_and_simulated_sums_are_the_same_integers(tokens: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    a, b = (torch.randint(-127, 128, (n, width), dtype=torch.int8, generator=generator) for n in (tokens, 9))
    a[0], b[0], b[1] = 127, 127, -127  # the largest sums that there are
    expected = a.long() @ b.long().t()
    for real in (True, False):
        sums = products(a, b, real)
        assert sums.dtype == torch.int32 and torch.equal(sums, expected.int()), real
    assert expected.max() == 127**2 * width


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("backend", ["int_mm", "simulated"])
def test_a_linear_is_the_slow_one_of_integers(dtype: torch.dtype, backend: str) -> None:
    net = linear(1100, 6, dtype)
    x = normal(2, 5, 1100, seed=1, dtype=dtype)
    x[0, 3] = 0
    expected = slow_integer_linear(x.view(10, 1100), net[0].weight, net[0].bias).view(2, 5, 6)
    convert(net, PathSpec.of("llm_int8", None, targets=["0"], backend=backend))
    y = net(x)
    assert y.dtype == dtype and torch.equal(y, expected)
    plain = F.linear(x, net[0].weight, net[0].bias).float()
    assert (y.float() - plain).norm() < 0.02 * plain.norm()


def test_it_is_torchaos_dynamic_int8_but_for_rounding() -> None:
    """Its scales are max / 127.5; both lie equally far from the exact product."""
    quantization = pytest.importorskip("torchao.quantization")
    net, x = linear(256, 64, torch.float32), normal(32, 256, seed=1, dtype=torch.float32)
    exact, theirs = net(x), copy.deepcopy(net)
    with warnings.catch_warnings(action="ignore"):
        quantization.quantize_(theirs, quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
        outside = theirs(x)
    convert(net, PathSpec.of("llm_int8", None, targets=["0"]))
    ours = net(x)

    def sqnr(found: Tensor, true: Tensor) -> float:
        return float(20 * torch.log10(true.norm() / (found - true).norm()))

    assert sqnr(ours, exact) > 38 and abs(sqnr(ours, exact) - sqnr(outside, exact)) < 0.7 and sqnr(ours, outside) > 36


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_number_spoils_its_token_or_channel_and_no_other(bad: float) -> None:
    net, converted = int8_net()
    x = normal(5, 40, seed=1)
    x[2, 7] = bad
    y, _ = passed(net, x)
    assert y.isnan().any(dim=1).tolist() == [False, False, True, False, False] and y[2].isnan().all()
    assert converted.saturation()["input"].tolist() == [[0, 1]]
    net[0].weight.data[3, 1] = bad
    assert net(normal(5, 40)).isnan().any(dim=0).nonzero().tolist() == [[3]]


# ---- backward, and what is kept ----


@pytest.mark.parametrize("unit", ["operator", "gemm"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("low", ["llm_int8", "llm_int8_dgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("recovers", [[], ["fprop"], ["dgrad"], ["fprop", "dgrad"]], ids=str)
def test_fprop_and_dgrad_by_hand_low_or_recovered(
    recovers: list[str], dtype: torch.dtype, low: str, weights: str, unit: str
) -> None:
    """Of a frozen weight; recovery reads codes times scale (W8A16) where nothing else is left of it."""
    if low == "llm_int8" and "dgrad" in recovers:
        pytest.skip("both paths have the same dgrad")
    net = linear(dtype=dtype)
    weight, codes = net[0].weight.detach().clone(), slow_cast(net[0].weight, "int8/row", 0)
    more = {"recovers": recovers or ["fprop"]} if unit == "operator" else {"unit": unit}
    converted = convert(net, PathSpec.of(low, "bf16", targets=["0"], weights=weights, **more))
    for one in converted.units:
        one.switch(bool(recovers) and (one.gemm is None or one.gemm in recovers))
    x, dy = normal(7, 40, seed=1, dtype=dtype), normal(7, 24, seed=2, dtype=dtype)
    own = codes if weights == "instead" else weight
    y, dx = passed(net, x, dy)
    expected = F.linear(x, own, net[0].bias) if "fprop" in recovers else slow_integer_linear(x, weight, net[0].bias)
    assert_close(y, expected, terms=40, products=2)
    assert_close(dx, dy @ (own if "dgrad" in recovers or low == "llm_int8" else codes), terms=24)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("low", ["llm_int8", "llm_int8_dgrad"])
@pytest.mark.parametrize("recovering", [False, True])
def test_a_frozen_weight_keeps_nothing_of_the_input_and_no_copy_of_itself(low: str, weights: str, recovering: bool):
    net, converted = int8_net(low, weights=weights, outlier_threshold=1.0)
    converted.operators[0].switch(recovering)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = net(normal(18, 40, seed=1).requires_grad_())
    assert y.requires_grad and converted.cost.saved_bytes() == converted.cost.predicted_bytes() == 0
    weight = net[0]._parameters["weight"]
    held = {weight.data_ptr()}
    if weights == "instead":
        held.add(net[0].weight_scale.data_ptr())
    assert saved and {tensor.data_ptr() for tensor in saved} <= held


# ---- where the codes are ----


@pytest.mark.parametrize("weights", WEIGHTS)
def test_bytes_of_weights_and_codes(weights: str) -> None:
    _, converted = int8_net(weights=weights)
    own, codes = 24 * 40 * 2, 24 * (40 + 4)
    assert converted.cost.weight_bytes() == {"online": (own, 0), "instead": (0, codes)}[weights]
    assert ("W8A16" in str(converted)) == (weights == "instead")


@pytest.mark.parametrize("outliers", [None, 2.0])
def test_online_and_instead_are_one_product(outliers: float | None) -> None:
    x = normal(9, 40, seed=1)
    results = []
    for weights in WEIGHTS:
        net, _ = int8_net("llm_int8_dgrad", weights=weights, outlier_threshold=outliers)
        results.append(passed(net, x))
        with torch.autocast("cpu", dtype=BF16):
            net.float()
            results.append(tuple(t.to(BF16) for t in passed(net, x)))
    for y, dx in results[1:] if outliers is None else results[1:2]:  # else `instead` has other columns
        assert torch.equal(y, results[0][0]) and torch.equal(dx, results[0][1])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_evaluation_and_restore_are_plain(weights: str) -> None:
    plain, x = linear(), normal(9, 40, seed=1)
    if weights == "instead":
        plain[0].weight.data.copy_(slow_cast(plain[0].weight, "int8/row", 0))
    net, converted = int8_net(weights=weights)
    expected, (_, dx) = plain(x), passed(plain, x)
    assert apart(net(x), expected, terms=40, products=2)
    with converted.high_precision():
        assert_close([net(x), passed(net, x)[1]], [expected, dx], terms=40, products=2)
        with torch.autocast("cpu", dtype=torch.float16):
            assert net(x).dtype == torch.float16
    for _ in range(2):
        converted.restore()
        assert type(net[0]) is nn.Linear and vars(net[0]).keys() == vars(plain[0]).keys()
        assert net.state_dict().keys() == plain.state_dict().keys()
        assert all(
            torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True)
        )
        assert not net[0].weight.requires_grad


def test_the_state_dict_of_codes_instead_of_the_weight() -> None:
    net, _ = int8_net(weights="instead")
    x = normal(9, 40, seed=1)
    expected, state = net(x), net.state_dict()
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    assert found == {
        "0.weight": (torch.int8, (24, 40)),
        "0.weight_scale": (torch.float32, (24, 1)),
        "0.bias": (BF16, (24,)),
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with pytest.raises(RuntimeError, match="weight_scale"):
        linear().load_state_dict(state)
    other, _ = int8_net(weights="instead")
    other[0].weight.zero_()
    assert not torch.equal(other(x), expected)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), expected)
    # A 16-bit checkpoint is quantized.
    other[0].weight.zero_()
    other.load_state_dict(linear().state_dict())
    assert torch.equal(other(x), expected) and other[0].weight.dtype == torch.int8
    # And .to(dtype) is for what was in 16 bits.
    assert other.to(torch.float16)[0].weight_scale.dtype == torch.float32
    assert torch.equal(other.to(BF16)(x), expected) and torch.equal(pickle.loads(pickle.dumps(other))(x), expected)


def test_a_weight_that_another_module_shares_stays_its_own() -> None:
    model = nn.ModuleDict({name: nn.Linear(40, 24, bias=False) for name in "ab"}).requires_grad_(False)
    model["b"].weight = model["a"].weight
    before = model["a"].weight.clone()
    convert(model, PathSpec.of("llm_int8", None, targets=["b"], weights="instead"))
    assert torch.equal(model["a"].weight, before) and model["b"].weight.dtype == torch.int8


# ---- outlier columns ----


def heavy(rows: int = 9) -> Tensor:
    x = normal(rows, 40, seed=1).clamp_(-3, 3)
    x[2, 5], x[4, 31], x[0, 0] = 60.0, -6.0, 5.96875  # below 6 by one step of bfloat16
    return x


@pytest.mark.parametrize("weights", WEIGHTS)
def test_columns_from_the_threshold_on_are_multiplied_in_16_bits(weights: str) -> None:
    net, converted = int8_net(weights=weights, outlier_threshold=6.0)
    x = heavy()
    y, dx = passed(net, x)
    _, _, columns, outliers = integers(x, 6.0)[0]
    assert columns.tolist() == [5, 31] and torch.equal(outliers, x[:, [5, 31]])
    rest = x.clone()
    rest[:, columns] = 0
    weight = linear()[0].weight
    part = slow_cast(weight, "int8/row", 0) if weights == "instead" else weight
    expected = slow_integer_linear(rest.float(), weight) + (outliers @ part[:, columns].t()).float()
    assert_close(y, (expected + net[0].bias.float()).to(BF16), terms=40, products=2)
    assert_close(dx, torch.ones_like(y) @ part, terms=24)
    assert "llm_int8, int_mm, columns from 6 in 16 bits" in str(converted)


# ---- what runs it ----


def test_a_machine_that_cannot_add_up_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = int8._device_missing.__wrapped__
    assert tried(torch.device("cpu")) is None
    assert "runs on CPUs and NVIDIA GPUs, the model is on meta" in tried(torch.device("meta"))
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.float() @ b.float()).clamp(max=1_000_000).int())
    assert tried(torch.device("cpu")) == "PyTorch's INT8 product does not add up exactly on this machine"

    def missing(_a: Tensor, _b: Tensor) -> Tensor:
        raise RuntimeError("not implemented\nsecond line")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert tried(torch.device("cpu")) == "PyTorch's INT8 product does not run on this cpu (not implemented)"
    monkeypatch.setattr(int8, "_device_missing", tried)
    with pytest.raises(ValueError, match=r"^backend='int_mm': .*not implemented\); use backend='simulated'$"):
        int8_net(backend="int_mm")
    assert "llm_int8, simulated" in str(int8_net()[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 16, 17, 31, 33])
def test_on_a_gpu_both_backends_give_the_same_bits(tokens: int) -> None:
    x, plain = normal(tokens, 2048, seed=1), linear(2048, 64)[0]
    expected = slow_integer_linear(x, plain.weight, plain.bias)
    for backend in ("int_mm", "simulated"):
        net = linear(2048, 64).cuda()
        convert(net, PathSpec.of("llm_int8", None, targets=["0"], backend=backend))
        assert torch.equal(net(x.cuda()).cpu(), expected)


# ---- LoRA ----


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64)).to(BF16).requires_grad_(False)
    )


def with_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=kinds), autocast_adapter_dtype=False)
    return adapted.to(BF16)  # adapters of codes are made in float32


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_under_lora(before: bool, weights: str) -> None:
    model, options = llama(), {"unit": "block", "weights": weights}
    if before:
        converted = convert(model, PathSpec.of("llm_int8", "bf16", **options))
        model = with_adapters(model)
    else:
        model = with_adapters(model)
        converted = convert(model, PathSpec.of("llm_int8", "bf16", targets=["*_proj.base_layer"], **options))
    assert [group.name for group in converted.units] == ["model.layers.0", "model.layers.1"]
    assert converted.operators[0].operator_name == "model.layers.0.self_attn.q_proj" and len(converted.operators) == 14
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    adapters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert len(adapters) == 28 and all("lora" in name and p.dtype == BF16 for name, p in adapters.items())
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        converted.units[1].switch(step == 2)
        loss = model(input_ids=tokens, labels=tokens).loss
        assert converted.cost.saved_bytes() == converted.cost.predicted_bytes() == 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        converted.end_step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], p) for name, p in frozen.items())
    assert not any(torch.equal(now[name], p) for name, p in adapters.items())
    # Evaluation is that of a model that was never converted, and its adapters load into this one.
    plain = with_adapters(llama())
    trained = {name: p for name, p in model.state_dict().items() if "lora" in name}
    plain.load_state_dict(trained, strict=False)
    if weights == "instead":
        for name, module in plain.named_modules():
            if name.endswith("base_layer"):
                module.weight.copy_(slow_cast(module.weight, "int8/row", 0))
    with torch.no_grad(), converted.high_precision():
        assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, terms=64, products=24)
    converted.restore()
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


# ---- faults and the probe ----


@pytest.mark.parametrize("threshold", [None, 3.0])
@pytest.mark.parametrize("kind", ["scale_up", "scale_down", "noise", "bit_flip", "stale_scale", "nan", "inf"])
def test_a_fault_breaks_the_input_s_codes(kind: str, threshold: float | None) -> None:
    """Columns in 16 bits have no codes to break."""
    x = normal(10, 40, dtype=torch.float32)
    net = linear(dtype=torch.float32)
    converted = convert(net, PathSpec.of("llm_int8", None, targets=["0"], outlier_threshold=threshold))
    sound = net(x.requires_grad_()).detach()
    schedule = FaultSchedule(converted, Fault(kind, 3.0, rows_frac=0.5), ["0"], steps=2, windows=[(2, 1)], seed=1)
    schedule.begin_step(1)
    assert torch.equal(net(x), sound)
    schedule.begin_step(2)
    found = net(x).detach()
    hit = (found != sound).any(dim=1) | ~found.isfinite().all(dim=1)
    assert hit.sum() == 5 or (kind in ("noise", "bit_flip", "stale_scale") and 0 < hit.sum() <= 5)
    injector = net[0].fault
    cast = converted.low.fprop.input
    columns = (x.abs().amax(dim=0) >= (threshold or math.inf)).nonzero()[:, 0]
    inner = x.detach().index_fill(1, columns, 0)
    values, *_ = injector.for_step(x, remember=False).quantize(inner, cast, 1, None)
    weight = integers(net[0].weight.detach())[0].values(torch.float32)
    expected = values @ weight.t() + net[0].bias.detach()
    expected += x.detach()[:, columns] @ net[0].weight.detach()[:, columns].t()
    finite = expected.isfinite().all(dim=1)
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-4, atol=1e-4)
    assert not found[~finite].isfinite().any() and (finite.all() != (kind in ("nan", "inf")))


def test_the_probe_sees_the_error_of_the_codes() -> None:
    x = normal(12, 40, dtype=torch.float32)
    net = linear(dtype=torch.float32, trainable=True)
    converted = convert(net, PathSpec.of("llm_int8", "bf16", targets=["0"], outlier_threshold=3.0))
    probe = measure_errors(converted, ["mse", "gap_low"])
    net(x).sum().backward()
    columns = (x.abs().amax(dim=0) >= 3.0).nonzero()[:, 0]
    assert 0 < len(columns) < 40
    values = slow_cast(x.index_fill(1, columns, 0), "int8/row", 1)
    values[:, columns] = x[:, columns]
    told = {name: float(value) for name, value in probe.read().items()}
    assert told["mse"] == pytest.approx(float((values - x).square().mean()), rel=1e-5)
    assert told["gap_low"] == 0, "wgrad reads the input in 16 bits"


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"weights": "elsewhere"}, "weights=elsewhere"),
        ({"outlier_threshold": 0.0}, "outlier_threshold=0.0"),
        ({"backend": "scaled_mm"}, "backend='scaled_mm': the recipe llm_int8"),
        ({"low": "fp8_hybrid", "backend": "int_mm"}, "the recipe fp8_hybrid multiplies no integers"),
        ({"recovery": "fp8_hybrid", "weights": "instead"}, "weights='instead': the recipe fp8_hybrid"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the recovery path")
def test_what_is_refused(more: dict[str, Any], key: str) -> None:
    net = linear()
    with pytest.raises(ValueError, match=key):
        convert(net, PathSpec.of(**{"low": "llm_int8", "recovery": "bf16", "targets": ["0"], **more}))
    assert type(net[0]) is nn.Linear and net[0].weight.dtype == BF16


def test_sums_that_an_int32_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="0 has 133145 inputs"):
        convert(nn.Sequential(nn.Linear(133_145, 1, device="meta")), PathSpec.of("llm_int8", None, targets=["0"]))
    assert 133_144 * 127**2 < 2**31 <= 133_145 * 127**2
