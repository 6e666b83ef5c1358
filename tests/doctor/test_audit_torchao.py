"""The audit on torchao's float8 and MX training, emulated: planted mistakes by their names, silence on sound models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from audited import audited, lines, net, said
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchao")]
UP = "layers.1.up_proj"


def float8(
    model: nn.Module, recipe: str = "tensorwise", keep: Callable[[str], bool] = lambda name: name == "lm_head"
) -> nn.Module:
    """`keep`: names that stay in 16 bits."""
    ao = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    config = replace(ao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    converted: nn.Module = ao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _module, name: not keep(name)
    )
    return converted


def mx(model: nn.Module, keep: str = "lm_head", **options: Any) -> nn.Module:
    ao = pytest.importorskip("torchao.prototype.moe_training.config", reason="torchao is not installed")
    from torchao.quantization import quantize_

    config = ao.MXFP8TrainingOpConfig.from_recipe(ao.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    config = replace(config, **options)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != keep)
    return model


# ---- sound models ----


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_sound_float8(recipe: str) -> None:
    found = audited(float8(net(bias=True), recipe), lists={"filter_fqns": ["lm_head"]})
    assert found.sound, lines(found)
    row = next(row for row in found.rows if row.operator == UP)
    assert row.kind == "torchao float8" and 25 < row.measured["fprop"]["input"][0] < 40
    assert row.measured["dgrad"]["grad_output"][0] < 40, "seen where the GEMM reads it, in backward"
    kept = recipe == "rowwise_with_gw_hp"
    assert math.isinf(row.measured["wgrad"]["grad_output"][0]) == kept == (row.precision["wgrad"] == "bf16")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_channels_that_formats_with_exponents_bear_are_no_finding(recipe: str) -> None:
    """As trained models have them: a row's largest element, nearly all its energy, is exact but under powers of two."""
    model = net()
    with torch.no_grad():
        for block in model.layers:
            block.norm.weight[5] = 40
            block.up_proj.weight[:, 5] *= 0.02
    found = audited(float8(model, recipe))
    assert found.sound, lines(found)


@pytest.mark.parametrize("wgrad_with_hp", [False, True])
def test_sound_mx(wgrad_with_hp: bool) -> None:
    found = audited(mx(net(), wgrad_with_hp=wgrad_with_hp), recipe=None if wgrad_with_hp else "mxfp8")
    assert found.sound, lines(found)
    row = next(row for row in found.rows if row.operator == UP)
    assert row.kind == "torchao mx" and row.precision["dgrad"] == "e4m3/mx x e4m3/mx"
    assert 25 < row.measured["fprop"]["weight"][0] < 40
    assert math.isinf(row.measured["wgrad"]["input"][0]) == wgrad_with_hp


def test_sound_mx_linears() -> None:
    ao = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason="torchao is not installed")
    from torchao.quantization.quantize_.common import KernelPreference

    model = net(bias=True)
    for block in model.layers:
        plain, sizes = block.up_proj, (block.up_proj.in_features, block.up_proj.out_features)
        block.up_proj = ao.MXFP8Linear(*sizes, kernel_preference=KernelPreference.EMULATED)
        block.up_proj.load_state_dict(plain.state_dict())
        block.up_proj.to(plain.weight.dtype)
    found = audited(model)
    assert found.sound, lines(found)
    assert [row.kind for row in found.rows].count("torchao mx") == 3


# ---- planted mistakes ----


@pytest.mark.parametrize(
    ("lists", "tied", "kinds"),
    [
        (None, False, [("head", "lm_head")]),
        (None, True, [("tied head", "lm_head")]),
        (
            ["lm_head", "layers.2."],
            False,
            [("not applied", "layers.2.up_proj"), ("not applied", "lm_head"), ("head", "lm_head")],
        ),
    ],
)
def test_everything_was_converted(lists: list[str] | None, tied: bool, kinds: list[tuple[str, str]]) -> None:
    model = float8(net(tied=tied), keep=lambda _name: False)
    assert said(audited(model, lists={} if lists is None else {"filter_fqns": lists})) == kinds


def test_a_wrapped_tied_head_is_two_parameters() -> None:
    found = audited(mx(net(tied=True), keep=""))
    assert ("tied head", "lm_head") in said(found) and "two gradients, one weight" in lines(found), lines(found)


def broken_cast(monkeypatch: pytest.MonkeyPatch, of: str, change: Callable[..., Any], only: int | None = None) -> None:
    """Changes what torchao's float8 casts of one operand give; `only`: for weights of so many rows or columns."""
    module = pytest.importorskip("torchao.float8.float8_linear", reason="torchao is not installed")
    sound = module.hp_tensor_to_float8_dynamic

    def cast(x: Any, dtype: Any, *rest: Any, **more: Any) -> Any:
        found = sound(x, dtype, *rest, **more)
        return change(x, dtype, found, rest, more) if more["gemm_input_role"].name == of else found

    monkeypatch.setattr(module, "hp_tensor_to_float8_dynamic", cast)


@pytest.mark.parametrize("role", ["INPUT", "WEIGHT", "GRAD_OUTPUT"])
def test_a_scale_is_wrong_by_two(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(x: Any, dtype: Any, found: Any, rest: Any, more: Any) -> Any:
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

        return hp_tensor_and_scale_to_float8(
            x, found._scale * 2, dtype, rest[0], more["gemm_input_role"], more["axiswise_dim"]
        )

    broken_cast(monkeypatch, role, saturating)
    found = audited(float8(net()))
    assert {finding.kind for finding in found.findings} == {"scale"}, lines(found)
    assert "cast under 0.5 times the right scale" in lines(found) and role.lower() in found.findings[0].where[0]


def test_a_scale_is_not_multiplied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(_x: Any, _dtype: Any, found: Any, _rest: Any, _more: Any) -> Any:
        found._scale = found._scale / 2
        return found

    broken_cast(monkeypatch, "GRAD_OUTPUT", twice)
    found = audited(float8(net()))
    assert {finding.kind for finding in found.findings} == {"scale"}, lines(found)
    assert "the GEMM reads 2 times the tensor" in lines(found)


def test_an_operand_is_never_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_cast(monkeypatch, "INPUT", lambda x, *_rest: x)
    broken_cast(monkeypatch, "WEIGHT", lambda x, *_rest: x)
    broken_cast(monkeypatch, "GRAD_OUTPUT", lambda x, *_rest: x)
    found = audited(float8(net()))
    assert {finding.kind for finding in found.findings} == {"never quantized"}, lines(found)
    places = {where.split(" ", 1)[1] for finding in found.findings for where in finding.where}
    assert len(places) == 6, "every operand of every GEMM"


def test_mx_drops_the_bias_of_a_wrapped_weight() -> None:
    """pytorch/ao issue 4846; where it is fixed there is nothing to find."""
    found = audited(mx(net(bias=True)))
    assert found.sound or (
        said(found) == [("output", "layers.0.up_proj fprop output")] and "lacks the bias" in lines(found)
    )


# ---- inference, quantization-aware training and INT8 training ----


def few_bits(model: nn.Module, config: Any) -> nn.Module:
    from torchao.quantization import quantize_

    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    return model


@pytest.mark.parametrize("recipe", [None, "sim_int8"])
@pytest.mark.parametrize(
    ("of", "options"),
    [
        ("torchao.quantization.Int8DynamicActivationInt8WeightConfig", {}),
        ("torchao.quantization.Int8WeightOnlyConfig", {}),
        ("torchao.quantization.Float8WeightOnlyConfig", {}),
        ("torchao.quantization.IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
        ("torchao.quantization.Int8DynamicActivationIntxWeightConfig", {"weight_dtype": torch.int4}),
        ("torchao.quantization.qat.QATConfig", {"step": "prepare"}),
        ("torchao.prototype.quantized_training.int8_weight_only_quantized_training", {}),
        ("torchao.prototype.quantized_training.int8_mixed_precision_training", {"module_swap": True}),
        ("torchao.prototype.quantized_training.bitnet_training", {}),
    ],
)
def test_few_bits_are_low_whatever_keeps_or_makes_them(of: str, options: dict[str, Any], recipe: str | None) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    module, _, name = of.rpartition(".")
    if name == "QATConfig":
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig

        options = {**options, "base_config": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)}
    config = getattr(pytest.importorskip(module, reason="this torchao has none"), name)(**options)
    found = audited(few_bits(net(), config), recipe=recipe)
    assert found.sound, lines(found)
    assert found.verdict().startswith("7 linears, 6 in low precision, 7 of them measured"), found.verdict()
    assert all(row.precision["fprop"].startswith("not said") for row in found.rows if row.low)
    assert [row.precision["fprop"] for row in found.rows if not row.low] == ["bf16"]
