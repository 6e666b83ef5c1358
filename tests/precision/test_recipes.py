"""What a recipe says of each operand of each GEMM, and what of it is refused."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from gnmr import attach
from gnmr.conversion import PathSpec, convert
from gnmr.errors import UserError
from gnmr.formats.recipes import RECIPES, Cast, Gemm, Recipe
from gnmr.lab import config
from gnmr.names import GEMMS


def test_a_recipe_with_some_gemms_recovered() -> None:
    low, recovery = RECIPES["sim_e2m1"], RECIPES["fp8_hybrid"]
    assert low.with_gemms(dict.fromkeys(GEMMS, recovery)) is recovery
    for gemm in GEMMS:
        mixed = low.with_gemms({gemm: recovery})
        assert getattr(mixed, gemm) == getattr(recovery, gemm)
        assert all(getattr(mixed, other) == getattr(low, other) for other in GEMMS if other != gemm)
        assert "fp8_hybrid" in mixed.name and gemm in mixed.name


def test_a_recipe_of_ones_own_is_what_its_words_say() -> None:
    for name, recipe in RECIPES.items():
        assert replace(Recipe.of("mine", recipe.words()), name=name) == recipe
    half = Recipe.of("half-1", {"wgrad": {"input": "e4m3/tile", "grad_output": "bf16"}})
    assert half == Recipe("half-1", wgrad=Gemm.of(input="e4m3/tile"))


def test_names_of_recipes_of_ones_own() -> None:
    for name, what in (("fp8_hybrid", "a recipe"), ("int4", "a format"), ("bf16", "a format")):
        with pytest.raises(ValueError, match=f"recipe {name}: is {what} already; name it otherwise"):
            Recipe.of(name, {})
        with pytest.raises(ValueError, match=f"recipe {name}: is not what has this name already"):
            convert(net(), PathSpec.of(Recipe(name, Gemm.of(input="e4m3/row")), None, targets=["0"]))
    for name in ("", "a.b", "1st", "two words"):
        with pytest.raises(ValueError, match="a name is letters, digits, - and _, and begins with no digit"):
            Recipe.of(name, {})


@pytest.mark.fp8
def test_recipes_in_the_place_of_names() -> None:
    """In code: either path, mixed with names, and under a backend that has their casts."""
    mine = Recipe.of("mine", RECIPES["fp8_hybrid"].words())
    converted = convert(net(), PathSpec.of(mine, "bf16", targets=["0"], recovers=["wgrad"], backend="scaled_mm"))
    assert converted.low == replace(mine, backend="scaled_mm") and "mine, scaled_mm" in str(converted)
    assert convert(net(), PathSpec.of("sim_e2m1", mine, targets=["0"])).recovery == mine
    attached = attach(net(), low=mine, recovery="bf16", targets=["0"])
    assert attached.converted.low == mine
    with pytest.raises(ValueError, match="recovery=mine: must be a format, as low=int4 is"):
        convert(net(), PathSpec.of("int4", mine, targets=["0"]))
    with pytest.warns(UserWarning, match="mine has all GEMMs as fp8_hybrid has them"):
        convert(net(), PathSpec.of("fp8_hybrid", mine, targets=["0"]))


def test_widths_are_those_along_which_a_group_lies() -> None:
    assert Recipe("a", fprop=Gemm.of(input="e4m3/tile", weight="e4m3/block")).divisors() == (1, 1)
    assert Recipe("b", dgrad=Gemm.of(grad_output="e4m3/mx")).divisors() == (1, 32)
    assert Recipe("c", dgrad=Gemm.of(weight="e4m3/mx")).divisors() == (1, 32)
    assert Recipe("d", wgrad=Gemm.of(input="e4m3/tile", grad_output="e4m3/tile")).divisors() == (1, 1)
    both = Gemm.of(input="e4m3/row/hadamard", weight="e4m3/row/hadamard")
    assert Recipe("f", fprop=both).divisors() == (16, 1)
    assert Recipe("e", wgrad=Gemm.of(input="e2m1/nv2d")).divisors() == (16, 1)


def net(inputs: int = 128, outputs: int = 128) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs))


@pytest.mark.parametrize(("low", "recovery"), [("mxfp8", None), ("bf16", "mxfp8"), ("mxfp8", "bf16")])
@pytest.mark.parametrize(("widths", "said"), [((176, 128), "176 inputs"), ((128, 144), "144 outputs")])
@pytest.mark.filterwarnings("ignore:the recovery path")
def test_a_width_that_groups_do_not_divide_is_named(low: str, recovery: str | None, widths: tuple, said: str) -> None:
    model = net(*widths)
    with pytest.raises(ValueError, match=f"0 has {said}"):
        convert(model, PathSpec.of(low, recovery, targets=["0"]))
    assert type(model[0]) is nn.Linear


CASTS = """e4m3/tiles e4m4/tile bf16/row e4m3 e4m3/row/3 e4m3/delayed/x e4m3/delayed/0 int4/row/codes int8/tensor/codes
int8/row/codes/hadamard e4m3/delayed/hadamard e2m1/nv/rht e2m1/nv/hadamard/hadamard
e4m3/nv_4over6 e2m1/nv_4over6/stochastic"""


@pytest.mark.parametrize("word", CASTS.split())
def test_what_a_cast_cannot_be(word: str) -> None:
    with pytest.raises(ValueError):
        Cast.of(word)


ROTATED = "e2m1/nv/hadamard"
CODES = "int8/row/codes"


@pytest.mark.parametrize(
    ("gemms", "key"),
    [
        ({"wgrad": {"input": ROTATED, "grad_output": "e2m1/nv"}}, "wgrad: hadamard"),
        ({"wgrad": {"input": ROTATED}}, "wgrad: hadamard"),
        ({"wgrad": {"input": ROTATED, "grad_output": ROTATED, "result": "e2m1/row/hadamard"}}, "wgrad: hadamard"),
        ({"fprop": {"input": "e2m1/nv/stochastic"}}, "fprop: stochastic"),
        ({"dgrad": {"result": "int8/row/stochastic"}}, "dgrad: stochastic"),
        ({"fprop": {"input": CODES}}, "codes"),
        ({"fprop": {"input": CODES, "weight": "int8/row"}}, "codes"),
        ({"fprop": {"input": CODES, "weight": CODES, "result": "int8/row"}}, "codes"),
        ({"dgrad": {"grad_output": CODES, "weight": CODES}}, "codes"),
        ({"fprp": {}}, "'fprp'"),
        ({"fprop": {"grad_output": "e4m3/row"}}, "fprop has no 'grad_output'"),
        ({"fprop": {"input": "e4m4/row"}}, "fprop: format 'e4m4'"),
        ({"fprop": {"input": 8}}, "fprop.input=8"),
        ({"fprop": {"result": "e4m3/tile"}}, "fprop's result"),
        ({"fprop": "e4m3"}, "fprop=e4m3"),
        ("e4m3", "=e4m3"),
    ],
)
def test_what_a_recipe_of_ones_own_cannot_be(gemms: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"^recipe mine.*{key}"):
        Recipe.of("mine", gemms)


def test_a_bad_recipe_of_the_config_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"^precision\.recipes: recipe mine: 'fprp'"):
        config.load({"precision": {"recipes": {"mine": {"fprp": {}}}}})


@pytest.mark.parametrize(
    ("paths", "key"),
    [
        ({"low": "fp8_hybird"}, "low=fp8_hybird"),
        ({"low": "int4", "recovery": "fp8_hybrid"}, "recovery=fp8_hybrid"),
        ({"low": "sim_int4", "recovery": "int8"}, "recovery=int8"),
        ({"low": "sim_int4", "site": "forward"}, "site=forward"),
        ({"low": "sim_int4", "rounding": "stochastic"}, "rounding=stochastic"),
        ({"low": "sim_int4", "recovery": "bf16", "recovers": ["bprop"]}, "recovers="),
        ({"low": "sim_int4", "recovery": "bf16", "recovers": []}, "recovers="),
    ],
    ids=str,
)
def test_which_paths_are_refused(paths: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        PathSpec.of(**{"recovery": None, **paths})


@pytest.mark.parametrize(
    ("low", "recovery", "recovers", "said"),
    [
        ("int4", "int8", ["wgrad"], "recovers=.* no effect on formats"),
        ("int4", None, ["wgrad"], "recovers=.* no effect without a recovery path"),
        ("sim_int4", None, ["wgrad"], "recovers=.* no effect without a recovery path"),
        ("int4", "int4", GEMMS, "is the low path too"),
        ("mxfp8", "mxfp8", GEMMS, "is the low path too"),
        (
            "deepseek_v3",
            "fp8_hybrid",
            GEMMS,
            "coarser .* in fprop.input, fprop.weight, dgrad.weight",
        ),
        ("deepseek_v3", "deepseek_v3_blocks", GEMMS, "coarser .* in dgrad.grad_output, wgrad.grad_output"),
        ("sim_e2m3", "sim_e3m2", GEMMS, "coarser .* in fprop.input"),
        ("bf16", "sim_int8", GEMMS, "coarser .* in fprop.input"),
        ("int8", "e5m2", GEMMS, r"coarser .*3 significant bits, 7"),
        ("int8", "int4", GEMMS, r"coarser .*4 bits, 8"),
        ("sim_e2m1", "fp8_hybrid", ["wgrad"], None),
        ("sim_int4", "bf16", GEMMS, None),
        ("int4", None, GEMMS, None),
    ],
)
def test_warnings_of_what_has_no_effect_or_cannot_be_meant(
    low: str, recovery: str | None, recovers: list[str], said: str | None
) -> None:
    """Coarser: in bits, in significant bits, or of the same format in its scale."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(net(), PathSpec.of(low, recovery, targets=["0"], recovers=recovers))
    assert not caught if said is None else re.search(said, str(caught[0].message))
