"""The probe's sums against the same sums written out; what it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from slow_casts import slow_cast
from test_scaled_mm import DY, W, X
from test_simulated import BY_HAND, by_us, single
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnmr.conversion import PathSpec, convert, gemms
from gnmr.formats import FORMATS
from gnmr.formats.scaling import compress, decompress
from gnmr.measure.operand_errors import STATISTICS, measure_errors

ROWS, WIDTH, OUT = 48, 32, 16
NAMES = ["a", "b", "c"]
pytestmark = pytest.mark.filterwarnings("ignore:the recovery path")


class Net(nn.Module):
    """a and b read the same tensor, c reads what they make of it."""

    def __init__(self, dtype: torch.dtype = torch.float32, out: int = OUT) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(WIDTH, out), nn.Linear(WIDTH, out), nn.Linear(out, out)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5  # not a leaf
        return self.c(self.a(x) * self.b(x).sigmoid())


def make(
    low: str = "int4", recovery: str | None = "int8", dtype: torch.dtype = torch.float32, out: int = OUT, **how
) -> tuple:
    net = Net(dtype, out)
    return net, convert(net, PathSpec.of(low, recovery, targets=NAMES, **how))


def inputs(seed: int = 1, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, rows // 2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seen(net: nn.Module, x: Tensor, loss=lambda y: y.float().square().sum()) -> dict[str, tuple[Tensor, Tensor]]:
    """Runs forward and backward; {unit: (its input, its grad_output)}, both float32 with one row a token."""
    found: dict[str, list[Tensor]] = {}

    def note(name: str):
        def hook(_module, args, output):
            found[name] = [args[0].detach().float().flatten(0, -2)]
            output.register_hook(lambda g: found[name].append(g.float().flatten(0, -2)))

        return hook

    handles = [getattr(net, name).register_forward_hook(note(name)) for name in NAMES]
    loss(net(x)).backward()
    for handle in handles:
        handle.remove()
    return {name: (values[0], values[1]) for name, values in found.items()}


def test_micro_batches_add_up_until_reset() -> None:
    net, plan = make()
    probe = measure_errors(plan, STATISTICS)
    parts, sizes = [], (48, 16)
    for seed, rows in enumerate(sizes):
        probe.reset()
        seen(net, inputs(seed, rows))
        parts.append(probe.read())
    probe.reset()
    for seed, rows in enumerate(sizes):
        seen(net, inputs(seed, rows))
    whole = probe.read()
    for key in ("gap_low", "gap_recovery"):
        torch.testing.assert_close(whole[key], parts[0][key] + parts[1][key])
    torch.testing.assert_close(whole["mse"], (parts[0]["mse"] * 48 + parts[1]["mse"] * 16) / 64)
    elements = torch.cat([(inputs(seed, rows) * 1.5).flatten() for seed, rows in enumerate(sizes)])
    assert whole["input_std"][0].item() == pytest.approx(elements.std(correction=0).item(), rel=1e-5)
    probe.reset()
    assert all((value == 0).all() for value in probe.read().values()), "0 where nothing was measured"


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(x).float().square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def test_a_gap_to_recovery_needs_one() -> None:
    _, plan = make(recovery=None)
    with pytest.raises(ValueError, match="no recovery path"):
        measure_errors(plan, ["gap_recovery"])
    assert plan.shared.probe is None


PAIRS = [("sim_e2m1", "fp8_hybrid"), ("fp8_hybrid", "bf16"), ("sim_int4", "sim_int8")]


def quantized(x: Tensor, name: str) -> Tensor:
    """`x` as a format keeps it."""
    return x if name == "bf16" else decompress(*compress(x, FORMATS[name]), FORMATS[name], x.shape[1], x.dtype)


def described(
    x: Tensor, grad: Tensor, low: str, recovery: str, tokens: int = 1, largest: tuple | None = None
) -> dict[str, float]:
    """The statistics of one operator written out; `largest`: magnitudes of delayed scales of x and grad."""
    x_at, grad_at = largest or (None, None)

    def error(name: str) -> float:
        if name in FORMATS:
            kept, grad_kept = quantized(x, name), grad
        else:
            grad_word, x_word, _ = BY_HAND[name][2]
            kept, grad_kept = slow_cast(x, x_word, 0, x_at), slow_cast(grad, grad_word, 0, grad_at)
        parts = [part.double()[::tokens] for part in (x, kept, grad, grad_kept)]
        square_x, error_x = parts[0].square().sum(1), (parts[0] - parts[1]).square().sum(1)
        square_grad, error_grad = parts[2].square().sum(1), (parts[2] - parts[3]).square().sum(1)
        return (square_grad * error_x + error_grad * square_x).sum().item() * len(x) / len(parts[0])

    forward = quantized(x, low) if low in FORMATS else slow_cast(x, BY_HAND[low][0][0], 1, x_at)
    rows = x[::tokens].float()
    return {
        "gap_low": error(low),
        "gap_recovery": error(recovery),
        "mse": (rows - forward[::tokens].float()).double().square().mean().item(),
        "input_std": rows.double().std(correction=0).item(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(
    ("low", "recovery", "site"),
    [
        *(("int4", "int8", site) for site in ("saved", "forward")),
        *(("e2m1", "bf16", site) for site in ("saved", "forward")),
        *((*pair, "saved") for pair in PAIRS),
    ],
)
def test_every_statistic_is_what_it_says_on_either_path(low, recovery, site, tokens, dtype) -> None:
    net, plan = make(low, recovery, dtype, site=site)
    probe = measure_errors(plan, STATISTICS, tokens)
    plan.operators[0].switch(True)  # a recovers, b reads the same tensor on its low path
    found = seen(net, inputs(dtype=dtype))
    measured = probe.read()
    assert list(measured) == list(STATISTICS)
    for i, name in enumerate(NAMES):
        x, grad = (part.to(dtype) for part in found[name])
        for key, value in described(x, grad, low, recovery, tokens).items():
            assert measured[key][i].item() == pytest.approx(value, rel=1e-5), (name, key)
    assert (measured["gap_recovery"] == 0).all() == (recovery == "bf16")
    assert all(value.shape == (3,) and value.dtype == torch.float64 for value in measured.values())


@pytest.mark.parametrize("low", ["deepseek_v3", "deepseek_v3_blocks", "mxfp8", "sim_e3m2", "fp8_delayed"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("recovering", [False, True])
@pytest.mark.slow
def test_groups_of_several_tokens_are_those_of_all_whatever_the_stride(low: str, tokens: int, recovering: bool) -> None:
    net, x, dy = single()
    plan = convert(net, PathSpec.of(low, "sim_int8", targets=["0"]))
    probe = measure_errors(plan, STATISTICS, tokens)
    plan.operators[0].switch(recovering)
    by_us(x, net[0], dy)
    for key, value in described(x, dy, low, "sim_int8", tokens).items():
        assert probe.read()[key].item() == pytest.approx(value, rel=1e-5), key


@pytest.mark.parametrize("recovering", [False, True])
def test_delayed_scales_are_those_that_the_low_path_takes(recovering: bool) -> None:
    net, x, dy = single()
    plan = convert(net, PathSpec.of("fp8_delayed", "bf16", targets=["0"]))
    by_us(x, net[0], dy)
    plan.end_step()
    probe = measure_errors(plan, STATISTICS)
    plan.operators[0].switch(recovering)
    by_us(3 * x, net[0], 5 * dy)
    before = x.abs().max().item(), dy.abs().max().item()
    expected = described(3 * x, 5 * dy, "fp8_delayed", "bf16", largest=before)
    for key, value in expected.items():
        assert probe.read()[key].item() == pytest.approx(value, rel=1e-5), key
    assert expected["mse"] > 2 * described(3 * x, 5 * dy, "fp8_delayed", "bf16")["mse"], "it saturates"


@pytest.mark.fp8
@pytest.mark.parametrize("low", ["fp8_hybrid", "fp8_delayed"])
def test_codes_and_their_simulation_have_the_same_errors(low: str) -> None:
    read = []
    for backend in ("scaled_mm", "simulated"):
        for recovering in (False, True):
            net = nn.Sequential(nn.Linear(32, 48, bias=False))
            net[0].weight.data.copy_(W)
            plan = convert(net, PathSpec.of(low, "bf16", targets=["0"], backend=backend))
            assert plan.low.backend == backend
            probe = measure_errors(plan, STATISTICS)
            plan.operators[0].switch(recovering)
            net(X.clone().requires_grad_()).backward(DY)
            read.append({key: value.item() for key, value in probe.read().items()})
    for other in read[1:]:
        assert other == pytest.approx(read[0], rel=1e-6)
    assert read[0]["gap_low"] > 0


def test_a_recovery_that_leaves_wgrad_alone_gains_nothing_of_it_and_says_so() -> None:
    net, plan = make("sim_e2m1", "bf16", recovers=["fprop", "dgrad"])
    with pytest.warns(UserWarning, match="gap_recovery: both paths have the same wgrad"):
        probe = measure_errors(plan, STATISTICS)
    gradients(net, inputs())
    read = probe.read()
    assert torch.equal(read["gap_low"], read["gap_recovery"]) and (read["gap_low"] > 0).all()
    net, plan = make("sim_e2m1", "bf16", recovers=["wgrad"])
    probe = measure_errors(plan, STATISTICS)
    gradients(net, inputs())
    assert (probe.read()["gap_recovery"] == 0).all(), "an operand that wgrad keeps has no error"


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("low", "recovery"), [*PAIRS, ("fp8_delayed", "sim_int8")])
def test_sharing_a_tensor_changes_nothing_but_the_number_of_casts(low, recovery, tokens, monkeypatch) -> None:
    casts = []
    plain = gemms.quantize

    def counting(x: Tensor, cast, *rest):
        casts.append((x.shape[1], str(cast)))
        return plain(x, cast, *rest)

    monkeypatch.setattr(gemms, "quantize", counting)
    read = []
    for shared in (True, False):
        net, plan = make(low, recovery)
        plan.operators[1].switch(True)
        probe = measure_errors(plan, STATISTICS, tokens)
        x = inputs() * 1.5
        casts.clear()
        (net.a(x) * net.b(x if shared else x.clone()).sigmoid()).sum().backward()
        of_x = [name for width, name in casts if width == WIDTH]
        read.append((probe.read(), len(of_x)))
    assert all(torch.equal(value, read[1][0][key]) for key, value in read[0][0].items())
    assert read[0][1] < read[1][1] or low == "fp8_delayed"
    if tokens == 1 and low != "fp8_delayed":
        kinds = {name for name in (BY_HAND[low][2][1], BY_HAND[recovery][2][1]) if name}
        assert read[1][1] - read[0][1] == len(kinds), "each cast of the input once"


@pytest.mark.parametrize("low", ["int4", "e4m3", "fp8_hybrid"])
def test_the_gap_is_the_expected_squared_error_of_the_weight_gradient(low: str) -> None:
    """Independent random grad_output: the mean over 8 draws of ||dW_low - dW||^2 within 10% of the gap."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    plan = convert(net, PathSpec.of(low, None, targets=["0"]))
    probe, truth = measure_errors(plan, ["gap_low"]), 0.0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        # Tokens of very different sizes: the sum of products, not the product of sums, has to be right.
        x, grad = (torch.randn(256, 64, generator=generator) * torch.logspace(-1, 1, 256)[:, None] for _ in range(2))
        net.zero_grad()
        net(x).backward(grad)
        truth += (net[0].weight.grad - grad.t() @ x).double().square().sum().item()
    assert probe.read()["gap_low"].item() == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("low", ["int4", "sim_e2m1", "fp8_delayed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_counts_once(low: str, reentrant: bool) -> None:
    results = []
    for run in (lambda net, x: net(x), lambda net, x: checkpoint(net, x, use_reentrant=reentrant)):
        net, plan = make(low, "bf16")
        probe = measure_errors(plan, STATISTICS)
        for factor in (1, 3):
            run(net, (inputs() * factor).requires_grad_()).square().sum().backward()
            plan.end_step()
        results.append(probe.read())
    for key in STATISTICS:
        assert torch.equal(results[0][key], results[1][key]), key


@pytest.mark.parametrize("low", ["int4", "bf16", "sim_e2m1"])
def test_a_bad_number_shows_in_every_statistic_of_its_unit(low: str) -> None:
    net, plan = make(low, "bf16")
    probe = measure_errors(plan, STATISTICS)
    x = inputs()
    x[0, 3, 2] = math.nan
    (net.a(x * 1.5).nan_to_num().sum() + net.b(x * 1.5).nan_to_num().sum()).backward()
    for key, value in probe.read().items():
        assert value[:2].isnan().all(), key
    probe.reset()
    y = net.a(inputs())
    y.backward(torch.full_like(y, math.nan))
    assert probe.read()["gap_low"][0].isnan() and probe.read()["mse"][0].isfinite()


@pytest.mark.parametrize(
    "how",
    [{}, pytest.param({"low": "fp8_hybrid", "recovery": "bf16", "backend": "scaled_mm"}, marks=pytest.mark.fp8)],
)
def test_frozen_units_and_empty_batches_and_pauses_measure_nothing(how: dict) -> None:
    net, plan = make(**how)
    probe = measure_errors(plan, STATISTICS)
    net.b.weight.requires_grad_(False)
    net(inputs()).sum().backward()
    first = probe.read()["gap_low"]
    assert first[0] > 0 and first[1] == 0
    probe.enabled = False
    net(inputs()).sum().backward()
    with plan.high_precision():
        net(inputs()).sum().backward()
    assert torch.equal(probe.read()["gap_low"], first)
    probe.enabled = True
    probe.reset()
    net(torch.zeros(0, WIDTH)).sum().backward()
    assert all((value == 0).all() for value in probe.read().values())


@pytest.mark.parametrize(
    ("low", "recovery", "how", "tokens"),
    [
        ("int4", "int8", {}, 3),
        ("int4", "int8", {"rounding": "stochastic"}, 1),
        ("int4", "int8", {"site": "forward"}, 3),
        ("sim_e2m1", "fp8_hybrid", {}, 1),
        ("sim_int4", "sim_int8", {"recovers": ["wgrad"]}, 3),
        ("fp8_delayed", "bf16", {}, 1),
        ("sim_e2m1", "fp8_delayed", {}, 3),
        ("mxfp8", "fp8_hybrid", {"recovers": ["wgrad"]}, 1),
    ],
)
def test_a_probe_changes_no_bit_of_the_run(low: str, recovery: str, how: dict, tokens: int) -> None:
    """Outputs, gradients, counts of saturated and bad elements, delayed scales, drawn numbers, saved bytes."""
    runs = []
    for probed in (False, True):
        net, plan = make(low, recovery, out=WIDTH, **how)
        if probed:
            measure_errors(plan, STATISTICS, tokens)
        steps, kept = [], []
        for step in range(4):
            plan.operators[0].switch(step in (1, 2))  # the first reader is not always the one that casts
            plan.operators[1].switch(step == 2)
            x = inputs(step) * 3**step
            if step == 3:
                x[0, 3, 2] = math.inf
            y = net(x)
            kept.append(plan.cost.saved_bytes())
            y.sum().backward()
            steps += [y.detach(), *gradients(net, x), *plan.saturation().values()]
            plan.end_step()
        state = [value for value in plan.state_dict().values() if isinstance(value, Tensor)]
        runs.append(([*steps, *state], kept))
    assert runs[0][1] == runs[1][1]
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
