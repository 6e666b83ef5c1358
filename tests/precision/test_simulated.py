"""Fake quantization against loops written by hand, and the simulated linear against its GEMMs written out."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from close import EIGHT_BITS, FOUR_BITS, apart, assert_close
from slow_casts import EXPONENT_OF_MAX, MAX, groups, slow_cast, slow_integer_linear
from test_linear import WIDTH, gradients, inputs, kept_bytes, model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gnmr.conversion import PathSpec, convert, gemms
from gnmr.formats import RECIPES, scaling
from gnmr.formats import cast as casting
from gnmr.formats.cast import quantize
from gnmr.formats.recipes import Cast, Recipe
from gnmr.names import GEMMS

SCALES = ("tensor", "row", "tile", "block", "mx", "mx_floor", "nv", "nv2d", "nv_row")
FOUR_OVER_SIX = ("e2m1/nv_4over6", "e2m1/nv2d_4over6")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values over some orders of magnitude, so that groups have scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


# ---- one tensor ----


def cut(scale: str) -> tuple[int, int]:
    """A small shape of more than one group along both dimensions, of which no group's length divides both."""
    return (160, 136) if scale in ("tile", "block") else (72, 40)


@pytest.mark.parametrize(
    "word", [*(f"{name}/{scale}" for scale in SCALES for name in MAX), *FOUR_OVER_SIX, "bf16/none"]
)
def test_a_cast_is_the_one_written_out_by_hand(word: str) -> None:
    x = normal(*cut(word.split("/")[1]))
    x[3] = 0
    tiny = x.clone()
    tiny[-20:, -6:] *= 1e-30
    for dim, source in itertools.product((0, 1), (x, x.bfloat16(), tiny, tiny.bfloat16())):
        got = quantize(source, Cast.of(word), dim)[0]
        assert got.dtype == source.dtype and torch.equal(got, slow_cast(source, word, dim)), (dim, source.dtype)


def test_bf16_is_the_conversion_of_every_element_alone() -> None:
    x = normal(40, 24)
    x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max, 1e-45])
    got = quantize(x, Cast.of("bf16/none"), 1)[0]
    torch.testing.assert_close(got, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    for word in ("bf16/row", "e4m3/none"):
        with pytest.raises(ValueError, match=r"bf16 has no scale, and other formats have one"):
            Cast.of(word)


def cast_and_counts(x: Tensor, cast: Cast, dim: int) -> list[Tensor]:
    values, met = quantize(x, cast, dim)
    return [values, *(found for found in vars(met).values() if isinstance(found, Tensor))]


@pytest.mark.parametrize("word", [*(f"e4m3/{scale}" for scale in (*SCALES, "delayed")), *FOUR_OVER_SIX])
def test_pieces_give_the_same_numbers_and_counts_as_the_whole(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as codes times scales, without a look at the elements, as GPUs and compilers cast."""
    cast = Cast.of(word)
    assert cast is not None
    for dim, bad in itertools.product((0, 1), (math.nan, 1)):
        x = normal(300, 136)
        x[200, 7] = bad
        monkeypatch.setattr(casting, "_AT_ONCE", 10**9)
        whole = cast_and_counts(x, cast, dim)
        for at_once in (1, 136 * 64):
            monkeypatch.setattr(casting, "_AT_ONCE", at_once)
            pieces = cast_and_counts(x, cast, dim)
            for ours, theirs in zip(pieces, whole, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        with monkeypatch.context() as unseen:
            for module in (casting, scaling):
                unseen.setattr(module, "is_inspectable", lambda _: False)
            unseen_values = quantize(x, cast, dim)[0]
            if cast.format.name == "e4m3":
                codes, scale, _ = casting.quantize_to_codes(x, cast, dim)
                unseen_values = casting.as_matrix(casting.as_groups(codes.float(), cast, dim) * scale, x)
        torch.testing.assert_close(unseen_values, whole[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("word", [*(f"int8/{scale}" for scale in SCALES), *FOUR_OVER_SIX])
def test_a_group_with_a_bad_number_comes_back_as_nan_and_no_other(word: str) -> None:
    cast, scale = Cast.of(word), word.split("/")[1]
    assert cast is not None
    sound = normal(*cut(scale), seed=4)  # no line's largest number is in the group that is spoilt
    for dim, bad in itertools.product((0, 1), (math.nan, math.inf, -math.inf)):
        places = groups(tuple(sound.shape), scale, dim)
        for place in (places[0], places[-1]):
            x, expected = sound.clone(), quantize(sound, cast, dim)[0]
            x[place][-1, -1] = bad
            values, met = quantize(x, cast, dim)
            expected[place] = math.nan
            torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
            assert met.nonfinite == 1, "the element alone"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scale_that_is_rounded_up_makes_no_infinity(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    x = (torch.linspace(-1, 1, 64 * 32, dtype=torch.float64) * top).to(dtype).view(64, 32)
    for name, scale in itertools.product(("e2m1", "e4m3", "e5m2"), ("mx", "mx_floor", "nv", "nv2d")):
        assert quantize(x, Cast.of(f"{name}/{scale}"), 1)[0].isfinite().all(), (name, scale)


# ---- a linear ----

TOKENS, INPUTS, OUTPUTS = 136, 160, 32  # two tiles of 128 along the first two, the second one cut


def of(fprop: str, dgrad: str, wgrad: str) -> tuple[tuple[str | None, ...], ...]:
    """The casts of two operands and None for the result of each GEMM."""
    return tuple((*words.split(), None) for words in (fprop, dgrad, wgrad))


TENSOR, DELAYED = (
    of(f"e4m3/{scale} e4m3/{scale}", f"e5m2/{scale} e4m3/{scale}", f"e5m2/{scale} e4m3/{scale}")
    for scale in ("tensor", "delayed")
)
NV, NV2D = "e2m1/nv e2m1/nv", "e2m1/nv e2m1/nv2d"
DRAWN, DRAWN2D = "e2m1/nv/stochastic e2m1/nv", "e2m1/nv/stochastic e2m1/nv2d"
ROTATED = "e2m1/nv/hadamard/stochastic e2m1/nv/hadamard"
# (fprop: input, weight, result), (dgrad: grad_output, weight, result), (wgrad: grad_output, input, result)
BY_HAND: dict[str, tuple[tuple[str | None, ...], ...]] = {
    "fp8_hybrid": TENSOR,
    "fp8_delayed": DELAYED,  # in its first step
    "fp8_delayed_1024": DELAYED,
    "deepseek_v3": of("e4m3/tile e4m3/block", "e4m3/tile e4m3/block", "e4m3/tile e4m3/tile"),
    "deepseek_v3_blocks": of("e4m3/tile e4m3/block", "e4m3/block e4m3/block", "e4m3/block e4m3/tile"),
    **{f"mxfp8{more}": of(*[f"e4m3/mx{more} e4m3/mx{more}"] * 3) for more in ("", "_floor")},
    **{f"mxfp4{more}": of(*[f"e2m1/mx{more} e2m1/mx{more}"] * 3) for more in ("", "_floor")},
    "nvfp4": of(NV2D, DRAWN2D, ROTATED),
    "nvfp4_no_sr": of(NV2D, NV2D, "e2m1/nv/hadamard e2m1/nv/hadamard"),
    "nvfp4_no_rht": of(NV2D, DRAWN2D, DRAWN),
    "nvfp4_1d": of(NV, DRAWN, ROTATED),
    "nvfp4_4over6": of(
        "e2m1/nv_4over6 e2m1/nv2d_4over6",
        "e2m1/nv/stochastic e2m1/nv2d_4over6",
        "e2m1/nv/stochastic e2m1/nv_4over6",
    ),
    "nvfp4_row_scaled": of("e2m1/nv_row e2m1/nv2d", DRAWN2D, "e2m1/nv/stochastic e2m1/nv_row"),
    **{f"sim_{f}": ((f"{f}/row",) * 3,) * 3 for f in ("e2m1", "e2m3", "e3m2", "e4m3", "int4", "int8")},
    "sim_bf16": (("bf16/none",) * 3,) * 3,
    "llm_int8": (("codes", "codes", None), (None,) * 3, (None,) * 3),
    "llm_int8_dgrad": (("codes", "codes", None), (None, "int8/row", None), (None,) * 3),
    "bf16": ((None,) * 3,) * 3,
}


def by_us(x: Tensor, linear: nn.Linear, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    linear.zero_grad()
    y = linear(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, linear.weight.grad, linear.bias.grad]


def single(
    dtype: torch.dtype = torch.float32, shape: tuple[int, int, int] = (TOKENS, INPUTS, OUTPUTS)
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A linear, its input and its grad_output."""
    tokens, inputs, outputs = shape
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, outputs)).to(dtype)
    with torch.no_grad():
        net[0].weight.copy_(normal(outputs, inputs, seed=3))
    # Of few bits, so that sums of 16 are exact in any order.
    x, dy = (normal(tokens, width, seed=seed).clamp(-128, 128) for width, seed in ((inputs, 1), (outputs, 2)))
    return net, *((each * 2**10).round().div(2**10).to(dtype) for each in (x, dy))


@cache
def operand(name: str, word: str | None, contraction_dim: int, dtype: torch.dtype) -> Tensor:
    """One of `single`'s, cast by hand in the first pass of step 1 under seed 0."""
    net, x, dy = single(dtype)
    source = {"x": x, "w": net[0].weight.detach(), "dy": dy}[name]
    place = ["x", "w", "dy"].index(name)
    seed = np.random.SeedSequence([0, 1, 0, 0, 0, 0, place, contraction_dim]).generate_state(1, np.uint64)[0]
    return slow_cast(source, word, contraction_dim, generator=torch.Generator().manual_seed(int(seed)))


@cache
def integer_output(dtype: torch.dtype) -> Tensor:
    """`single`'s, by integers."""
    net, x, _ = single(dtype)
    return slow_integer_linear(x, net[0].weight, net[0].bias)


@cache
def gemm_by_hand(gemm: int, recipe: str, dtype: torch.dtype) -> Tensor:
    """Output (0) or gradient of x (1) or weight (2) of `single` by the recipe of that name."""
    net, _, _ = single(dtype)
    a, b, c = BY_HAND[recipe][gemm]
    if a == "codes":
        return slow_cast(integer_output(dtype), c, 1)
    if gemm == 0:
        found = F.linear(operand("x", a, 1, dtype), operand("w", b, 1, dtype), net[0].bias.detach())
    elif gemm == 1:
        found = operand("dy", a, 1, dtype) @ operand("w", b, 0, dtype)
    else:
        found = operand("dy", a, 0, dtype).t() @ operand("x", b, 0, dtype)
    return slow_cast(found, c, 1)


def by_hand(recipes: tuple[str, str, str], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output and gradients of x, weight and bias of `single`, where each GEMM has the recipe of that name."""
    _, _, dy = single(dtype)
    return [*(gemm_by_hand(i, recipe, dtype) for i, recipe in enumerate(recipes)), dy.sum(dim=0)]


def recast(word: str | None) -> float:
    """For `assert_close`: what a cast of a result allows."""
    if word is None:
        return 0.0
    if word == "bf16/none":  # sums that differ by 1e-6 round apart by 2^-8 in few elements: 1e-4 of the norm
        return 5e-4
    return EIGHT_BITS if word.startswith(("e4m3", "int8")) else FOUR_BITS


def assert_by_hand(ours: list[Tensor], recipes: tuple[str, str, str], dtype: torch.dtype = torch.float32) -> None:
    """Compare what `by_us` returned with `by_hand`."""
    allowed = max(recast(BY_HAND[recipe][gemm][2]) for gemm, recipe in enumerate(recipes))
    assert_close(ours, by_hand(recipes, dtype), terms=INPUTS, products=2, recast=allowed)  # 2: bfloat16 adds the bias


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """To the last bit: of one kernel, on the same strides, in one process."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


SOME = [gemms for number in (1, 2, 3) for gemms in itertools.combinations(GEMMS, number)]
RECOVERED = {  # all 7 combinations where formats, delayed scales and draws meet; elsewhere each GEMM on either side
    "bf16": list(zip(["mxfp8", "deepseek_v3", "sim_int8"] * 3, SOME, strict=False)),
    **{low: list(zip(["bf16", "fp8_hybrid"] * 4, SOME, strict=False)) for low in ("nvfp4", "llm_int8", "fp8_delayed")},
}
IN_BF16 = ("bf16", "fp8_hybrid", "fp8_delayed", "deepseek_v3", "mxfp8", "nvfp4", "sim_int8", "llm_int8")
PAIR = [("fp8_hybrid", ("dgrad",)), ("bf16", ("fprop", "wgrad"))]


@pytest.mark.filterwarnings("ignore:the recovery path", "ignore:recovers=")
@pytest.mark.parametrize(
    ("low", "dtype"),
    [
        *((low, torch.float32) for low in RECIPES),
        *((low, torch.bfloat16) for low in IN_BF16),
        *(pytest.param(low, torch.bfloat16, marks=pytest.mark.slow) for low in RECIPES if low not in IN_BF16),
    ],
)
def test_each_gemm_is_the_one_written_out_by_hand_low_or_recovered(low: str, dtype: torch.dtype) -> None:
    for recovery, recovers in RECOVERED.get(low, PAIR):
        net, x, dy = single(dtype)
        converted = convert(net, PathSpec.of(low, recovery, targets=["0"], recovers=recovers))
        net[0].switch(True)
        taken = tuple(recovery if gemm in recovers else low for gemm in GEMMS)
        assert_by_hand(by_us(x, net[0], dy), taken, dtype)
    net[0].switch(False)
    converted.begin_step(1)
    ours = by_us(x, net[0], dy)
    assert_by_hand(ours, (low, low, low), dtype)
    if low != "bf16" and (low, dtype) != ("sim_bf16", torch.bfloat16):  # casts nothing in bfloat16
        bounds = {"terms": INPUTS, "products": 2, "recast": recast(BY_HAND[low][0][2])}
        assert apart(ours[0], by_hand(("bf16", "bf16", "bf16"), dtype)[0], **bounds), "bf16 would pass for it"


# ---- a model ----


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, False), (torch.bfloat16, True)])
def test_off_is_off_the_16_bit_path_is_nn_linear(bias: bool, dtype: torch.dtype) -> None:
    plain = model(bias, dtype)
    for low in ("int4", "sim_int4", "fp8_delayed"):
        net = copy.deepcopy(plain)
        converted = convert(net, PathSpec.of(low, "bf16"))
        for operator in converted.operators:
            operator.switch(True)
        bounds = {"terms": WIDTH, "products": 24}
        assert_close(gradients(net, inputs(dtype)), gradients(plain, inputs(dtype)), **bounds)
        assert_close(net(inputs(dtype)), plain(inputs(dtype)), **bounds)
        for operator in converted.operators:
            operator.switch(False)
        assert apart(gradients(net, inputs(dtype)), gradients(plain, inputs(dtype)), **bounds), "low would pass for it"


@pytest.mark.parametrize("low", ["bf16", "sim_int8", "fp8_hybrid", "fp8_delayed", "mxfp8", "nvfp4", "llm_int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_bytes_are_the_inputs_own(low: str, dtype: torch.dtype) -> None:
    net = model(dtype=dtype)
    with warnings.catch_warnings(action="ignore"):
        converted = convert(net, PathSpec.of(low, "sim_int8"))
    # q, k, v read one tensor, gate and up another; delayed scales are each operator's own.
    one = 2 * 24 * WIDTH * dtype.itemsize
    tensors = 14 if low == "fp8_delayed" else 8
    assert kept_bytes(net, converted, inputs(dtype)) == tensors * one
    net[0].q_proj.switch(True)
    tensors += low not in ("fp8_delayed", "sim_int8")
    assert kept_bytes(net, converted, inputs(dtype)) == tensors * one
    assert converted.cost.spent()[1] == 0


def test_readers_of_one_tensor_share_its_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def counting(x: Tensor, cast: Cast, dim: int, *rest: object) -> object:
        made.append((str(cast), dim))
        return quantize(x, cast, dim, *rest)

    monkeypatch.setattr(gemms, "quantize", counting)
    expected = {
        "sim_int8": 4 + 7 * 5,  # inputs that are shared; weight, grad_output and three results of each operator
        "fp8_hybrid": 4 + 7 * 2,
        "deepseek_v3": 2 * 4 + 7 * 3,  # input and grad_output once for each of two directions
        "mxfp8": 2 * 4 + 7 * 4,
        "nvfp4": 2 * 4 + 7 * 3,
        "fp8_delayed": 7 * 3,
    }
    for low, number in expected.items():
        net = model()
        convert(net, PathSpec.of(low, None))
        made.clear()
        gradients(net, inputs())
        assert len(made) == 2 * number, low


def test_a_nonfinite_number_stays_one_in_every_recipe() -> None:
    for low in (name for name in RECIPES if name != "bf16"):
        net, x, dy = single()
        converted = convert(net, PathSpec.of(low, None, targets=["0"]))
        x[0, 0] = math.inf
        y, dx, dw, _ = by_us(x, net[0], dy)
        assert not y[0].isfinite().any() and not dw.isfinite().all() and dx.isfinite().all(), low
        assert converted.saturation()["input"][0, 1] > 0
        dy[3, 5] = math.nan
        _, dx, dw, db = by_us(normal(TOKENS, INPUTS), net[0], dy)
        assert not dx[3].isfinite().any() and not dw[5].isfinite().any() and db[5].isnan(), low
        assert (converted.saturation()["grad_output"][0, 1] > 0) != low.startswith("llm_int8"), low  # which casts none


# ---- what the ledger holds ----


def test_saturated_elements_of_mx_are_counted_in_the_operands_where_they_are() -> None:
    net, x, dy = single()
    weight = net[0].weight.detach()
    converted = convert(net, PathSpec.of("mxfp8_floor", "bf16", targets=["0"]))

    def saturated(matrix: Tensor, dim: int) -> int:
        number = 0
        for place in groups(tuple(matrix.shape), "mx_floor", dim):
            group = matrix[place].abs()
            scale = 2.0 ** (math.floor(math.log2(group.max())) - EXPONENT_OF_MAX["e4m3"])
            number += int((group / scale > 448).sum())
        return number

    by_us(x, net[0], dy)
    counts = {name: found.tolist() for name, found in converted.saturation().items()}
    assert counts["input"] == [[saturated(x, 1) + saturated(x, 0), 0]]
    assert counts["weight"] == [[saturated(weight, 1) + saturated(weight, 0), 0]]
    assert counts["grad_output"] == [[saturated(dy, 1) + saturated(dy, 0), 0]]
    assert counts["result"] == [[0, 0]] and counts["input"][0][0] > 0
    by_us(x, net[0], dy)
    assert converted.saturation()["input"].tolist() == [[2 * counts["input"][0][0], 0]], "until the step ends"
    converted.end_step()
    assert all(found.count_nonzero() == 0 for found in converted.saturation().values())
    net[0].switch(True)
    by_us(x, net[0], dy)
    assert all(found.count_nonzero() == 0 for found in converted.saturation().values())
    assert convert(nn.Sequential(nn.Linear(4, 4)), PathSpec.of("int4", None, targets=["0"])).saturation() == {}


@pytest.mark.parametrize("backend", ["simulated", pytest.param("scaled_mm", marks=pytest.mark.fp8)])
@pytest.mark.parametrize("first_runs", [True, False])
def test_a_cast_that_several_operators_read_is_counted_once(backend: str, first_runs: bool) -> None:
    """For the one that made it, even if that one's own backward pass never comes."""
    net = nn.ModuleDict({name: nn.Linear(INPUTS, OUTPUTS) for name in "abc"})
    net["a"].requires_grad_(first_runs)
    converted = convert(net, PathSpec.of("fp8_hybrid", None, targets=["a", "b", "c"], backend=backend))
    x = normal(TOKENS, INPUTS)
    x[0, 0] = math.nan
    sum(net[name](x).sum() for name in "abc").backward()
    assert converted.saturation()["input"].tolist() == [[0, 1], [0, 0], [0, 0]]
    converted.end_step()
    assert converted.saturation()["input"].count_nonzero() == 0


def delayed(history: int) -> Recipe:
    """fp8_delayed with another history."""
    forward, backward = f"e4m3/delayed/{history}", f"e5m2/delayed/{history}"
    gemms = {
        "fprop": {"input": forward, "weight": forward},
        "dgrad": {"grad_output": backward, "weight": forward},
        "wgrad": {"grad_output": backward, "input": forward},
    }
    return Recipe.of(f"delayed_{history}", gemms)


FACTORS = [
    (1, 1, 1),
    (4.3, 1.08, 300),
    (0.3, 1.02, 0.7),
    (3e-4, 0.98, 0),
    (3e-4, 0.98, 0),
    (3e-4, 1.05, 0),
    (0.7, 0.99, 0.03),
    (6.1, 1.04, 1e-6),
    (6.1, 1.04, 0.9),
]
"""What input, weight and grad_output are multiplied by, step by step. They grow, shrink below what E4M3 resolves under
the old scale, and grow again when that is forgotten; the weight changes as much as training may change it in a step. No
powers of two, under which a stale scale would give the same values."""


@pytest.mark.parametrize(  # steps that it looks back; 0: bf16
    ("low", "recovery", "dtype"), [(1, 4, torch.float32), (2, 0, torch.bfloat16), (3, 0, torch.float32)]
)
def test_each_step_under_delayed_scales_is_the_one_written_out_by_hand(
    low: int, recovery: int, dtype: torch.dtype
) -> None:
    """All 8 combinations of GEMMs; scales come from the steps before, of whichever path, and from no micro-batch."""
    small = 24, 32, 48
    first, x, dy = single(dtype, small)
    micro_batches = [
        [(size * a * x, b * first[0].weight.detach(), c / size * dy) for size in (1, 0.4)] for a, b, c in FACTORS
    ]
    largest = [[[each.float().abs().max().item() for each in one] for one in step] for step in micro_batches]
    stale = set()

    @cache
    def read(history: int, step: int, micro: int, operand: int) -> Tensor:
        value, now = micro_batches[step][micro][operand], largest[step][micro][operand]
        if not history:
            return value
        past = largest[max(0, step - history) : step]
        before = max((one[operand] for each in past for one in each), default=0)
        stale.add((operand, "saturates" if now > before > 0 else "recedes" if 0 < now < before else "as it is"))
        return slow_cast(value, "e5m2/delayed" if operand == 2 else "e4m3/delayed", 1, before or now)

    for number in range(4):
        for recovers in itertools.combinations(GEMMS, number):
            net, _, _ = single(dtype, small)
            other = delayed(recovery) if recovery else "bf16"
            converted = convert(net, PathSpec.of(delayed(low), other, targets=["0"], recovers=recovers or GEMMS))
            for step, batches in enumerate(micro_batches):
                taken = recovers if step % 4 > 0 else ()
                net[0].switch(bool(taken))
                fprop, dgrad, wgrad = (recovery if gemm in taken else low for gemm in GEMMS)
                for micro, (x, w, dy) in enumerate(batches):
                    at = step, micro
                    net[0].weight.data.copy_(w)
                    expected = [
                        F.linear(read(fprop, *at, 0), read(fprop, *at, 1), net[0].bias.detach()),
                        read(dgrad, *at, 2) @ read(dgrad, *at, 1),
                        read(wgrad, *at, 2).t() @ read(wgrad, *at, 0),
                        dy.sum(dim=0),
                    ]
                    assert_close(by_us(x, net[0], dy), expected, terms=small[2], products=2)
                converted.end_step()
    assert stale == set(itertools.product(range(3), ["saturates", "recedes", "as it is"]))


def test_what_a_delayed_scale_remembers() -> None:
    net, x, dy = single()
    converted = convert(net, PathSpec.of("fp8_delayed", "bf16", targets=["0"]))

    def history() -> list[float]:
        return [round(value, 5) for value in (converted.state_dict()["largest"][0, 0] / x.abs().max()).tolist()[:4]]

    for factor in (3, 2):  # two micro-batches: the larger one
        by_us(factor * x, net[0], dy)
    assert history() == [3, 0, 0, 0]
    converted.end_step()
    converted.end_step()  # nothing was run in between
    assert history() == [0, 3, 0, 0]
    net[0].switch(True)  # the other path looks on
    by_us(2 * x, net[0], dy)
    converted.end_step()
    assert history() == [0, 2, 3, 0]
    net[0].switch(False)
    with torch.no_grad():
        net(10 * x)
    with converted.high_precision():
        by_us(10 * x, net[0], dy)
    converted.shared.no_side_effects = True
    by_us(10 * x, net[0], dy)
    converted.shared.no_side_effects = False
    assert history() == [0, 2, 3, 0] and converted.saturation()["input"].count_nonzero() == 0
    for bad in (math.nan, math.inf):
        spoilt = x.clone()
        spoilt[1, 1] = bad
        assert not by_us(spoilt, net[0], dy)[0].isfinite().any()
    converted.end_step()
    assert history() == [0, 0, 2, 3]


def test_gradients_are_remembered_as_large_as_one_process_has_them() -> None:
    """One of four processes, whose gradients are four times as large; it learns of the others in its first step."""
    alone, x, dy = single()
    net = copy.deepcopy(alone)
    one, four = (convert(each, PathSpec.of("fp8_delayed", None, targets=["0"])) for each in (alone, net))
    for step, factor in enumerate((3, 2, 1)):
        y, dx, dw, db = by_us(factor * x, alone[0], factor * dy)
        theirs = by_us(factor * x, net[0], 4 * factor * dy)
        assert same(theirs, [y, 4 * dx, 4 * dw, 4 * db])
        if step == 0:
            assert four.shared.amax is not None
            four.shared.amax.come(4)
        assert torch.equal(one.state_dict()["largest"], four.state_dict()["largest"])
        one.end_step(), four.end_step()
    assert one.state_dict()["largest"][0, 2, 1] == dy.abs().max()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_operators_without_a_backward_pass_are_written_too(checkpointing: bool) -> None:
    """Frozen, and all before them: the projections of a first layer under LoRA. Recomputation counts nothing twice."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    converted = convert(net.requires_grad_(False), PathSpec.of("fp8_delayed", "bf16", targets=["*"]))
    net[2].weight.requires_grad_()
    x = normal(3, 8)
    x[1, 1] = math.nan
    with torch.no_grad():
        net(x)
    assert converted.saturation()["input"].count_nonzero() == 0
    y = checkpoint(net, x, use_reentrant=False) if checkpointing else net(x)
    y.sum().backward()
    assert converted.saturation()["input"].tolist() == [[0, 1], [0, x.numel()], [0, x.numel()]]
    net(normal(3, 8)).sum().backward()
    assert (converted.state_dict()["largest"][:, :2, 0] > 0).all()
