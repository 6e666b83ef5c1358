"""Every kind of fault by hand; who is hit, who is not, and that it comes out the same again."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from close import apart, assert_close
from slow_casts import EXPONENT_OF_MAX, MAX, groups, nearest, scale_of_two_levels, slow_cast
from test_probe import WIDTH, Net, make
from test_scaled_mm import DY, W, X
from test_simulated import BY_HAND, recast, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnmr.conversion import ConvertedModel, PathSpec, convert
from gnmr.formats import FORMATS
from gnmr.formats.cast import quantize
from gnmr.formats.cast_stats import CastStats
from gnmr.formats.recipes import Cast, Recipe
from gnmr.formats.scaling import compress, decompress, unpack
from gnmr.lab.fault_injection import KINDS, Fault, FaultSchedule
from gnmr.measure.operand_errors import measure_errors
from gnmr.records.reader import FaultWindow

FEW_BITS = [name for name, fmt in FORMATS.items() if fmt.bits < 16]
ROW = [7.0, -3.5, 1.0, 0.4]  # in int4 its scale is 1


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def broken(fault: Fault, rows: Tensor, name: str = "int4", seed: int = 0, largest: float | None = None) -> Tensor:
    """`rows` as they come back."""
    fmt = FORMATS[name]
    copy = fault.compress(rows, fmt, seeded(seed), largest=None if largest is None else torch.tensor(largest))
    sound = compress(rows, fmt)
    for ours, theirs in zip(copy, sound, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return decompress(*copy, fmt, rows.shape[1], rows.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "largest", "expected"),
    [
        (Fault("scale_up", 4), None, [8.0, -4.0, 0.0, 0.0]),  # scale 4: codes 1.75, -0.875, 0.25, 0.1
        (Fault("scale_down", 4), None, [1.75, -1.75, 1.0, 0.5]),  # scale 1/4: codes 28, -14, 4, 1.6, clamped at 7
        (Fault("stale_scale", 1), 3.5, [3.5, -3.5, 1.0, 0.5]),  # scale 3.5 / 7
        (Fault("stale_scale", 2), 7.0, [3.5, -3.5, 1.0, 0.5]),
        (Fault("stale_scale", 1), 14.0, [8.0, -4.0, 0.0, 0.0]),  # scale 2: codes 3.5, -1.75, 0.5 (to even), 0.2
        (Fault("scale_up", 1), None, [7.0, -4.0, 1.0, 0.0]),  # as it should be
    ],
)
def test_broken_scales_by_hand(fault: Fault, largest: float | None, expected: list[float], dtype: torch.dtype) -> None:
    assert broken(fault, torch.tensor([ROW], dtype=dtype), largest=largest).tolist() == [expected]


@pytest.mark.parametrize("name", ["int4", "int8", "e2m1", "e4m3"])
def test_noise_of_some_steps_comes_before_rounding(name: str) -> None:
    fmt = FORMATS[name]
    rows = torch.full((4000, 2), 0.3 * fmt.max)
    rows[:, 1] = fmt.max
    step = fmt.step(rows[:1, :1].clone()).item()
    came_back = broken(Fault("noise", 2.0), rows, name)
    error = (came_back - rows)[:, 0] / step
    assert error.abs().max() <= 2.5 + 1e-4 and error.abs().max() > 1.5
    if name.startswith("int"):  # steps of the same size everywhere: variance (2 * 2)^2 / 12, rounding adds 1 / 12
        assert error.mean().item() == pytest.approx(0.0, abs=0.1)
        assert error.var().item() == pytest.approx(16 / 12 + 1 / 12, rel=0.1)
    assert came_back.max() <= fmt.max


@pytest.mark.parametrize("name", FEW_BITS)
def test_a_bit_flip_is_one_bit_of_one_code_of_each_hit_row(name: str) -> None:
    fmt, rows = FORMATS[name], torch.randn(400, 10, generator=seeded())
    packed, scale = Fault("bit_flip", rows_frac=0.25).compress(rows, fmt, seeded())
    sound, sound_scale = compress(rows, fmt)
    flipped = unpack(packed, fmt.bits, 10) ^ unpack(sound, fmt.bits, 10)
    assert torch.equal(scale, sound_scale)
    codes = flipped[flipped != 0].tolist()
    assert len(codes) == 100 and (flipped != 0).sum(dim=1).max() == 1
    assert set(codes) == {1 << bit for bit in range(fmt.bits)}, "any bit"
    assert (flipped != 0).any(dim=0).all(), "of any code"


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_of_the_rows_is_exact_and_drawn_and_at_least_one(kind: str) -> None:
    rows = torch.randn(200, 8, generator=seeded())

    def hit(rows_frac: float, seed: int) -> Tensor:
        sound = decompress(*compress(rows, FORMATS["int8"]), FORMATS["int8"], 8, rows.dtype)
        return (broken(Fault(kind, 9.0, rows_frac), rows, "int8", seed, largest=1.0) != sound).any(dim=1)

    assert hit(1.0, 0).all()
    assert hit(0.05, 0).sum() == 10 and hit(1e-6, 0).sum() == 1
    assert torch.equal(hit(0.05, 0), hit(0.05, 0)) and not torch.equal(hit(0.05, 0), hit(0.05, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_does_not_come_back_finite_and_zeros_do_not_turn_bad(kind: str) -> None:
    rows = torch.ones(3, 8)
    rows[0, 1], rows[1, 1] = math.nan, math.inf
    assert not broken(Fault(kind, 8.0), rows, largest=0.0)[:2].isfinite().any(dim=1).all()
    if kind not in ("nan", "inf"):
        assert broken(Fault(kind, 8.0), torch.zeros(3, 8), largest=0.0).isfinite().all()


def inputs(step: int = 0) -> Tensor:
    return torch.randn(12, WIDTH, generator=seeded(step)) * (1 + step)


def gradients(net: nn.Module, step: int = 0) -> dict[str, Tensor]:
    net.zero_grad()
    net(inputs(step)).square().mean().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.dim() == 2}


def armed(plan: ConvertedModel, kind: str = "scale_up", targets: tuple[str, ...] = ("a",), **options) -> FaultSchedule:
    """A fault in step 2 of 4."""
    schedule = FaultSchedule(plan, Fault(kind, **{"magnitude": 8.0, **options}), targets, 4, windows=[(2, 1)])
    schedule.begin_step(2)
    return schedule


def test_the_weight_gradient_reads_the_broken_copy_and_the_forward_pass_with_site_forward() -> None:
    for site in ("saved", "forward"):
        net = nn.Sequential(nn.Linear(4, 1, bias=False))
        plan = convert(net, PathSpec.of("int4", None, targets=["0"], site=site))
        with torch.no_grad():
            net[0].weight.fill_(1.0)
        armed(plan, "scale_up", ("0",))
        y = net(torch.tensor([ROW]))
        y.sum().backward()
        # scale 8: codes 0.875, -0.4375, 0.125, 0.05
        assert net[0].weight.grad.tolist() == [[8.0, 0.0, 0.0, 0.0]]
        assert y.item() == pytest.approx(4.9 if site == "saved" else 8.0)
        with torch.no_grad():
            assert net(torch.tensor([ROW])).item() == pytest.approx(4.9 if site == "saved" else 8.0)
            with plan.high_precision():
                assert net(torch.tensor([ROW])).item() == pytest.approx(4.9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["noise", "stale_scale"])
@pytest.mark.parametrize("how", [{"site": "forward"}, {"low": "sim_e2m1"}, {"low": "fp8_delayed"}], ids=str)
def test_a_recomputed_forward_pass_meets_the_same_fault(how: dict, kind: str, reentrant: bool) -> None:
    results = []
    for run in (lambda net, x: net(x), lambda net, x: checkpoint(net, x, use_reentrant=reentrant)):
        net, plan = make(**how, recovery=None)
        armed(plan, kind, ("*",))
        run(net, inputs().requires_grad_()).square().sum().backward()
        results.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_stale_scale_is_that_of_the_steps_before() -> None:
    """Magnitudes 2, 4, 16, 1, 1, 1, history 2: the scale of steps 4 and 5 is 16 / 7, of step 6 1 / 7."""
    net = nn.Sequential(nn.Linear(4, 1, bias=False))
    plan = convert(net, PathSpec.of("int4", "int8", targets=["0"]))
    schedule = FaultSchedule(plan, Fault("stale_scale", 1.0, history=2), ["0"], 6, windows=[(1, 1), (4, 3)])
    scales = {}
    for step, size in enumerate((2.0, 4.0, 16.0, 1.0, 1.0, 1.0), start=1):
        schedule.begin_step(step)
        net[0].switch(step == 3)  # what is remembered does not depend on the path
        for part in (1.0, 0.5):  # micro-batches: the larger one counts
            y = net(torch.full((3, 4), size * part))
            scales[step] = net[0].kept()[1].flatten().tolist()
            y.sum().backward()
    assert scales[1] == pytest.approx([2 / 7] * 3), "without a history, the tensor's own"
    assert scales[4] == scales[5] == pytest.approx([16 / 7] * 3)
    assert scales[6] == pytest.approx([1 / 7] * 3)


def test_a_bad_step_does_not_spoil_the_history() -> None:
    net = nn.Sequential(nn.Linear(4, 1, bias=False))
    plan = convert(net, PathSpec.of("int4", None, targets=["0"]))
    schedule = FaultSchedule(plan, Fault("stale_scale"), ["0"], 9, windows=[(3, 1)])
    for step, value in enumerate((2.0, math.nan, 8.0), start=1):
        schedule.begin_step(step)
        y = net(torch.full((1, 4), value))
        assert step < 3 or net[0].kept()[1].item() == pytest.approx(2 / 7)
        y.sum().backward()


@pytest.mark.parametrize("kind", ["stale_scale", "noise", "bit_flip"])
@pytest.mark.parametrize("how", [{}, {"rounding": "stochastic"}, {"low": "fp8_delayed", "recovery": "bf16"}], ids=str)
def test_resuming_is_exact(kind: str, how: dict) -> None:
    def start() -> tuple[Net, ConvertedModel, FaultSchedule]:
        net, plan = make(**how)
        schedule = FaultSchedule(plan, Fault(kind, 2.0, 0.5, history=3), ["a", "c"], 12, rate=200.0, duration=3, seed=4)
        assert sum(window.end - window.start + 1 for window in schedule.windows) > 6
        return net, plan, schedule

    def steps(net: Net, plan: ConvertedModel, schedule: FaultSchedule, first: int, last: int) -> list[Tensor]:
        found = []
        for step in range(first, last + 1):
            schedule.begin_step(step)
            found += gradients(net, step % 5).values()
            plan.end_step()
        return found

    net, plan, schedule = start()
    whole = steps(net, plan, schedule, 1, 6)
    states = plan.state_dict(), {key: value.clone() for key, value in schedule.state_dict().items()}
    whole = steps(net, plan, schedule, 7, 12)
    net, plan, schedule = start()
    plan.load_state_dict(states[0])
    schedule.load_state_dict(states[1])
    assert all(torch.equal(a, b) for a, b in zip(steps(net, plan, schedule, 7, 12), whole, strict=True))


def test_given_windows() -> None:
    _, plan = make()
    schedule = FaultSchedule(plan, Fault("noise", 2.0), ["a", "c"], 10, windows=[[8, 3], (2, 1)])
    spans = [(window.unit, window.start, window.end) for window in schedule.windows]
    assert spans == [("a", 2, 2), ("c", 2, 2), ("a", 8, 10), ("c", 8, 10)]


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"targets": ["a", "z_proj"], "windows": [(1, 1)]}, "z_proj"),
        ({"windows": [(10, 2)]}, r"window \[10, 2\]"),
        ({"windows": [(0, 1)]}, r"window \[0, 1\]"),
        ({"windows": [(3, 2), (1, 3)]}, r"window \[3, 2\]"),
        ({"rate": 0.0}, "rate=0.0"),
        ({"rate": 101.0, "duration": 10}, "rate=101.0, duration=10"),
        ({"low": "bf16", "windows": [(1, 1)]}, "no quantizer"),
    ],
    ids=str,
)
def test_schedules_that_are_refused(how: dict, key: str) -> None:
    _, plan = make(how.pop("low", "int4"), None)
    with pytest.raises(ValueError, match=key):
        FaultSchedule(plan, Fault("noise"), **{"targets": ["a"], "steps": 10} | how)
    assert all(operator.fault is None for operator in plan.operators)


@pytest.mark.parametrize(("key", "value"), [("kind", "bits"), ("magnitude", 0), ("rows_frac", 0), ("history", 0)])
def test_faults_that_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}={value}"):
        Fault(**{"kind": "noise", key: value})


def test_drawn_windows_come_at_their_rate_do_not_overlap_and_end_with_the_run() -> None:
    _, plan = make()
    steps, rate, duration = 20_000, 5.0, 50

    def windows(seed: int, targets: tuple[str, ...] = ("*",)) -> list[FaultWindow]:
        return FaultSchedule(plan, Fault("nan"), targets, steps, rate=rate, duration=duration, seed=seed).windows

    drawn = windows(0)
    assert len(drawn) == pytest.approx(3 * steps * rate / 1000, rel=0.1)
    for unit in "abc":
        spans = [(w.start, w.end) for w in drawn if w.unit == unit]
        assert all(end < start for (_, end), (start, _) in pairwise(spans))
        assert all(end - start + 1 == duration for start, end in spans if end < steps) and spans[-1][1] <= steps
    assert windows(0) == drawn and windows(1) != drawn
    assert windows(0, ("b",)) == [w for w in drawn if w.unit == "b"], "a unit's windows are its own"
    schedule = FaultSchedule(plan, Fault("nan"), ["*"], 200, rate=1000.0)
    assert sorted((window.unit, window.start) for window in schedule.windows) == [
        (u, s) for u in "abc" for s in range(1, 201)
    ]
    with pytest.warns(UserWarning, match="no window falls into the 3 steps"):
        assert not FaultSchedule(plan, Fault("nan"), ["a"], 3, rate=1e-9).windows


# ---- recipes ----

ALL_SCALES = ["tensor", "row", "tile", "block", "mx", "mx_floor", "nv", "nv2d", "delayed"]
ROTATED = [*ALL_SCALES, "nv_row", "nv/hadamard", "row/hadamard"]


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Values over some orders of magnitude, so that groups have scales of their own."""
    return torch.randn(shape, generator=seeded(seed)) * torch.randn(shape, generator=seeded(seed + 100)).exp()


def broken_cast(fault: Fault, x: Tensor, word: str, dim: int, largest: float | None = None) -> tuple[Tensor, CastStats]:
    cast = Cast.of(word)
    assert cast is not None
    values, _, met = fault.quantize(
        x, cast, dim, None, seeded(), largest=None if largest is None else torch.tensor(largest)
    )
    return values, met


def by_hand(x: Tensor, word: str, dim: int, hit: list[int], factor: float) -> tuple[Tensor, int]:
    """The cast written out, with the scales of the rows `hit` times `factor`; and how many elements saturate."""
    name, kind = word.split("/")
    result, saturated, whole = x.clone(), 0, x.abs().max().item()
    for rows, columns in groups(tuple(x.shape), kind, dim):
        largest = x[rows, columns].abs().max().item()
        scale = largest / MAX[name]
        if kind == "mx_floor":
            scale = 2.0 ** (math.floor(math.log2(largest)) - EXPONENT_OF_MAX[name])
        if kind == "mx":
            scale = 2.0 ** math.ceil(math.log2(scale))
        if kind in ("nv", "nv2d"):
            scale = scale_of_two_levels(largest, whole, name)
        own = np.array([scale * factor if row in hit else scale for row in range(*rows.indices(len(x)))], np.float32)
        scaled = x[rows, columns].numpy() / own[:, None]
        saturated += int((np.abs(scaled) > MAX[name] * (1 + 1e-6)).sum())
        result[rows, columns] = torch.from_numpy(nearest(scaled, name).astype(np.float32) * own[:, None])
    return result, saturated


@pytest.mark.parametrize("scale", ROTATED)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_fault_that_breaks_nothing_is_the_sound_cast_to_the_last_bit(scale: str, dim: int) -> None:
    x = spread(150, 140)  # no group's length divides both
    x[3], x[140:, 130:] = 0, x[140:, 130:] * 1e-30
    x[70, 9] = math.nan
    for name in ("e2m1", "e4m3", "int8"):
        cast = Cast.of(f"{name}/{scale}")
        sound, met = quantize(x, cast, dim)
        values, broken_met = broken_cast(Fault("scale_up", 1.0), x, f"{name}/{scale}", dim)
        torch.testing.assert_close(values, sound, rtol=0, atol=0, equal_nan=True)
        assert broken_met.nonfinite == met.nonfinite and broken_met.saturated == (met.saturated or 0)
        torch.testing.assert_close(broken_met.largest.amax(), met.largest.amax(), equal_nan=True)


WIDE = ["sim_e2m1", "fp8_hybrid", "fp8_delayed", "deepseek_v3", "mxfp8", "nv_blocks"]
NV = {"fprop": {"input": "e2m1/nv", "weight": "e2m1/nv2d"}, "wgrad": {"input": "e2m1/nv", "grad_output": "e2m1/nv"}}
OWN = {"nv_blocks": Recipe.of("nv_blocks", NV)}
"""Without what is random: the weight gradients of two passes are compared."""
BY_HAND = {**BY_HAND, "nv_blocks": (("e2m1/nv", "e2m1/nv2d", None), (None,) * 3, ("e2m1/nv", "e2m1/nv", None))}


def readers(low: str, recovery: str | None = "bf16", **how) -> tuple[nn.ModuleDict, ConvertedModel]:
    """a and b read one tensor, both without bias."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(128, 128, bias=False) for name in "ab"})
    return net, convert(net, PathSpec.of(OWN.get(low, low), recovery, targets=["a", "b"], **how))


def outcome(net: nn.ModuleDict, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Of a its output and its weight's gradient, then those of b."""
    shared, found = x.clone().requires_grad_() * 1, []
    for linear in net.values():
        y = linear(shared)
        found += [y.detach(), *torch.autograd.grad(y, linear.weight, dy)]
    return found


@pytest.mark.parametrize(
    ("low", "how"),
    [
        *((low, {}) for low in WIDE),
        ("sim_e2m1", {"recovers": ["wgrad"]}),
        ("int4", {"site": "forward"}),
        ("e4m3", {"site": "forward"}),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_target_on_its_low_path_in_its_window_is_hit(low: str, kind: str, how: dict) -> None:
    net, plan = readers(low, **how)
    x, dy = spread(40, 128), spread(40, 128, seed=1)
    sound = outcome(net, x, dy)
    net["a"].switch(True)
    recovering = outcome(net, x, dy)
    net["a"].switch(False)
    # Under a larger scale floating-point formats lose nothing before they underflow.
    schedule = armed(plan, kind, rows_frac=0.5, magnitude=3000.0 if kind == "scale_up" else 8.0)
    hit = outcome(net, x, dy)
    rows = (hit[0] != sound[0]).any(dim=1).sum()
    assert rows == 20 or (kind == "bit_flip" and 10 < rows < 20), "the forward pass, in the share of the rows"
    assert not torch.equal(hit[1], sound[1]), "the weight gradient"
    assert same(hit[2:], sound[2:]), "another reader of the same tensor"
    repeated = outcome(net, x, dy)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(repeated, hit, strict=True))
    assert hit[0].isfinite().all() == (kind not in ("nan", "inf")) or kind == "bit_flip"
    net["a"].switch(True)
    assert same(outcome(net, x, dy), recovering)
    net["a"].switch(False)
    schedule.begin_step(3)
    assert same(outcome(net, x, dy), sound)


@pytest.mark.parametrize("low", WIDE)
def test_fprop_and_wgrad_read_the_broken_input_and_what_saturates_is_counted(low: str) -> None:
    (x_fprop, w_fprop, y_result), _, (dy_wgrad, x_wgrad, w_result) = BY_HAND[low]
    net, plan = readers(low)
    x, dy = spread(40, 128), spread(40, 128, seed=1)
    sound = outcome(net, x, dy)
    of_b = plan.saturation()["input"][1].tolist()
    plan.end_step()
    if plan.shared.amax.history is not None:
        plan.shared.amax.history.zero_()
    armed(plan, "scale_down", rows_frac=0.5)
    y, grad, *other = outcome(net, x, dy)
    assert same(other, sound[2:])
    hit = (y != sound[0]).any(dim=1).nonzero().flatten().tolist()
    (forward, over), (backward, over_too) = (by_hand(x, x_fprop, 1, hit, 1 / 8), by_hand(x, x_wgrad, 0, hit, 1 / 8))
    weight = net["a"].weight.detach()
    expected = slow_cast(nn.functional.linear(forward, slow_cast(weight, w_fprop, 1)), y_result, 1)
    assert_close(y, expected, terms=128, recast=recast(y_result))
    expected = slow_cast(slow_cast(dy, dy_wgrad, 0).t() @ backward, w_result, 1)
    assert_close(grad, expected, terms=128, recast=recast(w_result))
    assert apart([y, grad], sound[:2], terms=128, recast=recast(y_result)), "the fault would pass unseen"
    total = over + over_too if low in ("deepseek_v3", "mxfp8", "nv_blocks") else over
    assert total > 100
    shared = [0, 0] if low != "fp8_delayed" else of_b
    counted = plan.saturation()["input"].tolist()
    assert counted[0] == [total, 0]
    if low == "nv_blocks":  # of itself some; a shared them before, now they are b's
        assert counted[1][0] == by_hand(x, x_fprop, 1, [], 1)[1] + by_hand(x, x_wgrad, 0, [], 1)[1] > 0
    else:
        assert counted[1] == shared == [0, 0]
    if plan.shared.amax.history is not None:
        assert plan.shared.amax.history[0, 0, 0] == x.abs().max(), "what was there, not what became of it"


@pytest.mark.fp8
@pytest.mark.parametrize("rows_frac", [1.0, 0.5])
@pytest.mark.parametrize("low", ["fp8_hybrid", "fp8_delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_hit_as_their_simulation(kind: str, low: str, rows_frac: float) -> None:
    found, x = [], X.clone()
    x[::3, 5] = x.max()
    for backend in ("scaled_mm", "simulated"):
        net = nn.ModuleDict({"a": nn.Linear(32, 48, bias=False)})
        net["a"].weight.data.copy_(W)
        plan = convert(net, PathSpec.of(low, "bf16", targets=["a"], backend=backend))
        sound = outcome(net, x, DY)
        armed(plan, kind, rows_frac=rows_frac, magnitude=4096.0 if kind == "scale_up" else 4.0)
        found.append([*outcome(net, x, DY), plan.saturation()["input"]])
        assert plan.low.backend == backend and not torch.equal(found[-1][0], sound[0])
    (y, grad, counts), (simulated_y, simulated_grad, simulated_counts) = found
    assert torch.equal(counts, simulated_counts) and (counts[0, 0] > 0) == (
        kind in ("scale_down", "stale_scale", "noise")
    )
    if kind in ("nan", "inf"):
        assert torch.equal(y.isfinite(), simulated_y.isfinite()) and not grad.isfinite().any()
    else:
        assert torch.equal(y.isnan(), simulated_y.isnan()) and torch.equal(grad.isnan(), simulated_grad.isnan())
        assert_close(y.nan_to_num(), simulated_y.nan_to_num(), terms=32)
        assert_close(grad.nan_to_num(), simulated_grad.nan_to_num(), terms=72)


@pytest.mark.parametrize("low", WIDE)
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_probe_describes_the_broken_casts_on_either_path(low: str, tokens: int) -> None:
    x, dy, read = spread(40, 128), spread(40, 128, seed=1), []
    for recovering in (False, True):
        net, plan = readers(low)
        sound = outcome(net, x, dy)
        armed(plan, "scale_down", rows_frac=0.5)
        if not recovering:
            rows = (outcome(net, x, dy)[0] != sound[0]).any(dim=1).nonzero().flatten().tolist()
        probe = measure_errors(plan, ["gap_low", "gap_recovery", "mse"], tokens)
        net["a"].switch(recovering)
        outcome(net, x, dy)
        read.append({key: value.tolist() for key, value in probe.read().items()})
    for key, value in read[0].items():
        assert read[1][key] == pytest.approx(value, rel=1e-5), key
    expected = (x - by_hand(x, BY_HAND[low][0][0], 1, rows, 1 / 8)[0])[::tokens].square().mean().item()
    assert read[0]["mse"][0] == pytest.approx(expected, rel=1e-5) and expected > 10 * read[0]["mse"][1]
    assert read[0]["gap_low"][0] > 3 * read[0]["gap_low"][1]
