"""What a recipe says of each operand of each GEMM, and what of it is refused."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from gnmr import attach
from gnmr.errors import UserError
from gnmr.lab import config
from gnmr.names import GEMMS
from gnmr.precision import PathLinear, PathSpec, convert
from gnmr.precision.formats import FORMATS
from gnmr.precision.recipes import RECIPES, Cast, Gemm, Recipe


def test_a_recipe_with_some_gemms_recovered() -> None:
    low, recovery = RECIPES["sim_e2m1"], RECIPES["fp8_hybrid"]
    assert low.with_recovered(recovery, GEMMS) is recovery
    for gemm in GEMMS:
        mixed = low.with_recovered(recovery, [gemm])
        assert getattr(mixed, gemm) == getattr(recovery, gemm)
        assert all(getattr(mixed, other) == getattr(low, other) for other in GEMMS if other != gemm)
        assert "fp8_hybrid" in mixed.name and gemm in mixed.name
    for wrong in ([], ["fpropp"], ["fprop", "bgrad"]):
        with pytest.raises(ValueError, match="fprop, dgrad, wgrad"):
            low.with_recovered(recovery, wrong)


def test_what_a_recipe_cannot_be() -> None:
    cast = Cast.of("e4m3/tile")
    assert Cast.of("bf16") is None and str(cast) == "e4m3/tile"
    for word, said in (("e4m3/tiles", "tile, mx"), ("e4m4/tile", "e4m3"), ("bf16/row", "None"), ("e4m3", "tensor")):
        with pytest.raises(ValueError, match=said):
            Cast.of(word)
    for word in ("int4/row/codes", "int8/tensor/codes"):
        with pytest.raises(ValueError, match=f"{word}: only the codes of int8/row can be multiplied"):
            Cast.of(word)
    codes = Cast.of("int8/row/codes")
    for gemms in (
        {"fprop": Gemm(input=codes)},
        {"fprop": Gemm(codes, Cast.of("int8/row"))},
        {"fprop": Gemm(codes, codes, result=Cast.of("int8/row"))},
        {"dgrad": Gemm(grad_output=codes, weight=codes)},
    ):
        with pytest.raises(ValueError, match="recipe odd: codes are for both operands of fprop, whose result is kept"):
            Recipe("odd", **gemms)
    with pytest.raises(ValueError, match="history=0"):
        Cast(FORMATS["e4m3"], "delayed", 0)
    with pytest.raises(ValueError, match="dgrad reads grad_output and weight, not input"):
        Recipe("odd", dgrad=Gemm(input=cast))
    with pytest.raises(ValueError, match="fprop's result cannot be e4m3/tile"):
        Recipe("odd", fprop=Gemm(result=cast))


def test_a_recipe_of_ones_own_is_what_its_words_say() -> None:
    for name, recipe in RECIPES.items():
        assert replace(Recipe.of("mine", recipe.words()), name=name) == recipe
    half = Recipe.of("half-1", {"wgrad": {"input": "e4m3/tile", "grad_output": "bf16"}})
    assert half == Recipe("half-1", wgrad=Gemm.of(input="e4m3/tile"))


_BOTH = {"input": "e2m1/nv/hadamard", "grad_output": "e2m1/nv/hadamard"}
OWN = [
    (
        {"wgrad": {"input": "e2m1/nv/hadamard", "grad_output": "e2m1/nv"}},
        "recipe mine: wgrad: hadamard is for both of grad_output and input",
    ),
    ({"wgrad": {"input": "e2m1/nv/hadamard"}}, "recipe mine: wgrad: hadamard is for both of grad_output and input"),
    ({"wgrad": {**_BOTH, "result": "e2m1/row/hadamard"}}, "recipe mine: wgrad: hadamard is for both of grad_output"),
    (
        {"fprop": {"input": "e2m1/nv/stochastic"}},
        "recipe mine: fprop: stochastic is for operands of dgrad and wgrad",
    ),
    ({"dgrad": {"result": "int8/row/stochastic"}}, "recipe mine: dgrad: stochastic is for operands of dgrad and wgrad"),
    ({"wgrad": {"input": "e2m1/nv/rht"}}, "recipe mine: wgrad: e2m1/nv/rht: behind the scale stands the history of"),
    ({"wgrad": {"input": "e2m1/nv/hadamard/hadamard"}}, "recipe mine: wgrad: e2m1/nv/hadamard/hadamard: behind the"),
    (
        {"wgrad": {"input": "e4m3/delayed/hadamard"}},
        "recipe mine: wgrad: e4m3/delayed/hadamard: what a delayed scale remembers is not rotated; use another scale",
    ),
    ({"fprop": {"input": "int8/row/codes/hadamard"}}, "recipe mine: fprop: int8/row/codes/hadamard: only the codes of"),
    ({"fprp": {}}, "recipe mine: 'fprp' is no GEMM: use fprop, dgrad, wgrad"),
    ({"fprop": {"grad_output": "e4m3/row"}}, "recipe mine: fprop has no 'grad_output': use input, weight, result"),
    ({"fprop": {"input": "e4m4/row"}}, "recipe mine: fprop: format 'e4m4' is not known: use one of int2"),
    ({"fprop": {"input": "e4m3/rows"}}, "recipe mine: fprop: scale 'rows' is not known: use one of delayed"),
    ({"fprop": {"input": "e4m3/row/3"}}, "recipe mine: fprop: e4m3/row/3: behind the scale stands the history of"),
    ({"fprop": {"input": "e4m3/delayed/x"}}, "recipe mine: fprop: e4m3/delayed/x: behind the scale stands the history"),
    ({"fprop": {"input": 8}}, "recipe mine: fprop.input=8: must be a word such as e4m3/tile, or bf16"),
    ({"fprop": {"result": "e4m3/tile"}}, "recipe mine: fprop's result cannot be e4m3/tile; use tensor or row"),
    ({"fprop": "e4m3"}, "recipe mine: fprop=e4m3: must be {operand: cast}, as {input: e4m3/tile}"),
    ("e4m3", "recipe mine=e4m3: must be {gemm: {operand: cast}}, as {fprop: {input: e4m3/tile}}"),
]


@pytest.mark.parametrize(("gemms", "line"), OWN)
def test_what_a_recipe_of_ones_own_cannot_be(gemms: Any, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        Recipe.of("mine", gemms)
    with pytest.raises(UserError, match=f"^precision.recipes: {re.escape(line)}"):
        config.load({"precision": {"recipes": {"mine": gemms}}})


def test_names_of_recipes_of_ones_own() -> None:
    for name, what in (("fp8_hybrid", "a recipe"), ("int4", "a format"), ("bf16", "a format")):
        with pytest.raises(ValueError, match=f"recipe {name}: is {what} already; name it otherwise"):
            Recipe.of(name, {})
        with pytest.raises(ValueError, match=f"recipe {name}: is not what has this name already"):
            convert(net(), PathSpec.of(Recipe(name, Gemm.of(input="e4m3/row")), None, targets=["0"]))
    for name in ("", "a.b", "1st", "two words"):
        with pytest.raises(ValueError, match="a name is letters, digits, - and _, and begins with no digit"):
            Recipe.of(name, {})


def test_recipes_in_the_place_of_names() -> None:
    """In code: either path, mixed with names, and under a backend that has their casts."""
    mine = Recipe.of("mine", RECIPES["fp8_hybrid"].words())
    plan = convert(net(), PathSpec.of(mine, "bf16", targets=["0"], recovers=["wgrad"], backend="scaled_mm"))
    assert plan.low == replace(mine, backend="scaled_mm") and "mine, scaled_mm" in str(plan)
    assert convert(net(), PathSpec.of("sim_e2m1", mine, targets=["0"])).recovery == mine
    attached = attach(net(), low=mine, recovery="bf16", targets=["0"])
    assert attached.converted.low == mine
    with pytest.raises(ValueError, match="recovery=mine: must be a format, as low=int4 is"):
        convert(net(), PathSpec.of("int4", mine, targets=["0"]))
    with pytest.warns(UserWarning, match="mine has all GEMMs as fp8_hybrid has them: recovery changes nothing"):
        convert(net(), PathSpec.of("fp8_hybrid", mine, targets=["0"]))
    with pytest.warns(UserWarning, match="the recovery path mine is the low path too"):
        convert(net(), PathSpec.of(mine, mine, targets=["0"]))


def test_the_state_of_another_recipe_of_the_same_name_is_refused() -> None:
    one, other = (Recipe.of("mine", {"fprop": {"input": cast}}) for cast in ("e4m3/row", "e5m2/row"))
    state = convert(net(), PathSpec.of(one, "bf16", targets=["0"])).state_dict()
    convert(net(), PathSpec.of(one, "bf16", targets=["0"])).load_state_dict(state)
    with pytest.raises(ValueError, match=r"belongs to .*e4m3/row.*; this plan has .*e5m2/row"):
        convert(net(), PathSpec.of(other, "bf16", targets=["0"])).load_state_dict(state)


def test_widths_are_those_along_which_a_group_lies() -> None:
    assert Recipe("a", fprop=Gemm.of(input="e4m3/tile")).divisors() == (128, 1)
    assert Recipe("b", dgrad=Gemm.of(grad_output="e4m3/mx")).divisors() == (1, 32)
    assert Recipe("c", dgrad=Gemm.of(weight="e4m3/mx")).divisors() == (1, 32)
    assert Recipe("d", wgrad=Gemm.of(input="e4m3/tile", grad_output="e4m3/tile")).divisors() == (1, 1)
    both = Gemm.of(input="e4m3/row/hadamard", weight="e4m3/row/hadamard")
    assert Recipe("f", fprop=both).divisors() == (16, 1)
    assert Recipe("e", wgrad=Gemm.of(input="e4m3/block")).divisors() == (128, 1)


def net(inputs: int = 128, outputs: int = 128) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"low": "fp8_hybird"}, r"low=fp8_hybird: must be one of int2, .*, fp8_hybrid"),
        ({"low": "int4", "recovery": "fp8_hybrid"}, "recovery=fp8_hybrid: must be a format, as low=int4 is"),
        ({"low": "sim_int4", "recovery": "int8"}, "recovery=int8: must be a recipe, as low=sim_int4 is"),
        ({"low": "sim_int4", "site": "forward"}, "site=forward: belongs to formats; with the recipe sim_int4"),
        ({"low": "sim_int4", "rounding": "stochastic"}, "rounding=stochastic: belongs to formats"),
        ({"low": "sim_int4", "recovery": "bf16", "recovers": ["bprop"]}, "recovers=.'bprop'.: must be some of fprop"),
        ({"low": "sim_int4", "recovery": "bf16", "recovers": []}, "recovers=..: must be some of fprop, dgrad, wgrad"),
    ],
)
def test_what_convert_refuses(arguments: dict, line: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=line):
        convert(model, PathSpec.of(**{"recovery": None, "targets": ["0"], **arguments}))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(("low", "recovery"), [("deepseek_v3", None), ("bf16", "deepseek_v3"), ("mxfp8", "bf16")])
def test_a_width_that_tiles_do_not_divide_is_named(low: str, recovery: str | None) -> None:
    size, name = (32, "mxfp8") if low == "mxfp8" else (128, "deepseek_v3")
    for inputs, outputs, said in ((176, 128, "176 inputs"), (128, 144, "144 outputs")):
        model = net(inputs, outputs)
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(ValueError, match=f"0 has {said}: the recipe {name} needs a multiple of {size}"),
        ):
            convert(model, PathSpec.of(low, recovery, targets=["0"]))
        assert type(model[0]) is nn.Linear
    with warnings.catch_warnings(action="ignore"):
        assert type(convert(net(256, 128), PathSpec.of(low, recovery, targets=["0"])).operators[0]) is PathLinear


def test_warnings_for_what_has_no_effect_or_cannot_be_meant() -> None:
    with pytest.warns(UserWarning, match=r"recovers=.'wgrad'.: has no effect on formats"):
        convert(net(), PathSpec.of("int4", "int8", targets=["0"], recovers=["wgrad"]))
    for low, recovery in (("fp8_hybrid", "sim_e3m2"), ("int8", "int4")):
        with pytest.warns(UserWarning, match=f"recovery path {recovery} is coarser than the low path {low}"):
            convert(net(), PathSpec.of(low, recovery, targets=["0"]))
    for low in ("int4", "sim_int4"):
        with pytest.warns(UserWarning, match="recovers=.'wgrad'.: has no effect without a recovery path"):
            convert(net(), PathSpec.of(low, None, targets=["0"], recovers=["wgrad"]))
    for name in ("int4", "mxfp8", "bf16"):
        with pytest.warns(UserWarning, match=f"the recovery path {name} is the low path too"):
            convert(net(), PathSpec.of(name, name, targets=["0"]))
    with warnings.catch_warnings(action="error"):
        convert(net(), PathSpec.of("sim_e2m1", "fp8_hybrid", targets=["0"], recovers=["wgrad"]))
        convert(net(), PathSpec.of("sim_int4", "bf16", targets=["0"]))
        convert(net(), PathSpec.of("int4", "bf16", targets=["0"]))
        convert(net(), PathSpec.of("int4", None, targets=["0"]))


@pytest.mark.parametrize(
    ("low", "recovery", "where"),
    [
        ("deepseek_v3", "fp8_hybrid", " in fprop.input, fprop.weight, dgrad.weight, dgrad.grad_output, wgrad"),
        ("mxfp8", "fp8_hybrid", " in fprop.input"),
        ("deepseek_v3", "deepseek_v3_blocks", " in dgrad.grad_output, wgrad.grad_output"),
        ("fp8_hybrid", "fp8_delayed_1024", " in fprop.input"),
        ("sim_e2m3", "sim_e3m2", " in fprop.input"),
        ("sim_int8", "fp8_hybrid", " in fprop.input"),
        ("bf16", "sim_int8", " in fprop.input"),
        ("e4m3", "e5m2", " (3 significant bits, 4)"),
        ("e2m3", "e5m2", " (3 significant bits, 4)"),
        ("int8", "e5m2", " (3 significant bits, 7)"),
        ("int8", "int4", " (4 bits, 8)"),
    ],
)
def test_a_recovery_path_that_is_coarser(low: str, recovery: str, where: str) -> None:
    """In bits, in significant bits, or of the same format in its scale."""
    with pytest.warns(UserWarning, match=f"{recovery} is coarser than the low path {low}{re.escape(where)}"):
        convert(net(), PathSpec.of(low, recovery, targets=["0"]))
