"""Recipes through Transformer Engine: the wiring, against a stub of its interface; the real thing where it is there."""

from __future__ import annotations

import copy
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gnmr import attach
from gnmr.lab.faults.faults import Fault
from gnmr.lab.faults.schedule import FaultSchedule
from gnmr.precision import RECIPES, PathSpec, Recipe, convert
from gnmr.precision.kernels import te


def net(seed: int = 0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48, bias=bias), nn.ReLU(), nn.Linear(48, 16, bias=bias))


def plan_of(model: nn.Module, low: str | Recipe = "fp8_hybrid", recovery: str | Recipe | None = "bf16", **how: Any):
    return convert(model, PathSpec.of(low, recovery, targets=["0", "2"], backend="te", **how))


def batch(rows: int = 10, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


# ---- which recipes, where ----


@pytest.mark.parametrize(
    ("low", "kind", "fmt", "more"),
    [
        ("fp8_hybrid", "Float8CurrentScaling", "HYBRID", {}),
        ("fp8_delayed", "DelayedScaling", "HYBRID", {"amax_history_len": 16, "amax_compute_algo": "max"}),
        ("fp8_delayed_1024", "DelayedScaling", "HYBRID", {"amax_history_len": 1024}),
        ("mxfp8", "MXFP8BlockScaling", "E4M3", {}),
        ("deepseek_v3", "Float8BlockScaling", "E4M3", {}),
        ("e4m3/tensor", "Float8CurrentScaling", "E4M3", {}),
    ],
)
def test_every_recipe_runs_under_the_engines_own_of_its_casts(
    low: str, kind: str, fmt: str, more: dict[str, Any], stub: Any
) -> None:
    words = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
    own = {gemm: dict.fromkeys(operands, low) for gemm, operands in words.items()}
    model = nn.Sequential(nn.Linear(128, 128))
    plan = convert(
        model, PathSpec.of(low if low in RECIPES else Recipe.of("own", own), None, targets=["0"], backend="te")
    )
    model(torch.randn(8, 128))
    ((recipe, depth, _),) = stub.ran
    assert type(recipe).__name__ == kind and recipe.fp8_format.name == fmt and depth == 1
    assert {key: getattr(recipe, key) for key in more} == more
    assert f"{plan.low.name}, te" in str(plan) and "saturation, the paths' errors and saved bytes" in str(plan)


def test_what_it_cannot_run_is_named(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(line: str, *paths: Any, widths: int = 128, **how: Any) -> None:
        model = nn.Sequential(nn.Linear(widths, 128))
        with pytest.raises(ValueError, match=f"^backend='te': {line}"):
            convert(model, PathSpec.of(*paths, targets=["0"], backend="te", **how))
        assert type(model[0]) is nn.Linear

    for low in ("sim_e4m3", "llm_int8", "deepseek_v3_blocks"):
        refused(
            f"Transformer Engine does not run the recipe {low}, but fp8_hybrid, fp8_delayed, deepseek_v3 and", low, None
        )
    for recovers in (["wgrad"], ["fprop", "dgrad"]):
        refused("Transformer Engine does not run the recipe bf16 in ", "fp8_hybrid", "bf16", recovers=recovers)
    refused("fp8_hybrid: 0 has 24 inputs, and FP8 hardware needs a multiple of 16", "fp8_hybrid", None, widths=24)
    refused("fp8_delayed and fp8_hybrid: beside delayed scales Transformer Engine runs no", "fp8_delayed", "fp8_hybrid")
    refused("mxfp8 and fp8_delayed: beside delayed scales", "mxfp8", "fp8_delayed")
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["transformer_engine.common.recipe"], "MXFP8BlockScaling")
        refused("this version of Transformer Engine has no MXFP8BlockScaling, which mxfp8 needs", "mxfp8", None)

        def autocast(enabled: bool, recipe: Any) -> None:
            raise AssertionError("CUDA 12.9 or later is needed\nand more")

        patch.setattr(stub, "autocast", autocast)
        refused(r"Transformer Engine refuses fp8_hybrid here \(CUDA 12.9 or later is needed\); use", "fp8_hybrid", None)


def test_a_machine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"Transformer Engine is not installed \(pip install -e '.\[te\]'"):
        plan_of(net())
    monkeypatch.setattr(te, "find_spec", lambda name: name)
    with pytest.raises(
        ValueError, match=r"mxfp8: needs a GPU of compute capability 10.0 or newer, the model is on cpu"
    ):
        convert(nn.Sequential(nn.Linear(32, 32)), PathSpec.of("mxfp8", None, targets=["0"], backend="te"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    cuda = torch.device("cuda")
    assert te.capability_missing(cuda, (10, 0)) == "needs a GPU of compute capability 10.0 or newer, this one has 9.0"
    assert te.capability_missing(cuda, (8, 9)) is None


def test_auto_never_takes_it(stub: Any) -> None:
    assert convert(net(), PathSpec.of("fp8_hybrid", None, targets=["0"])).low.backend == "simulated"


def test_older_versions_call_the_region_otherwise(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = stub.autocast
    monkeypatch.delattr(stub, "autocast")
    monkeypatch.setattr(stub, "fp8_autocast", lambda enabled, fp8_recipe: plain(enabled, fp8_recipe), raising=False)
    model = net()
    plan_of(model)
    model(batch())
    assert len(stub.ran) == 2


# ---- one linear ----


@pytest.mark.parametrize("bias", [True, False])
def test_it_switches_between_the_engine_and_the_plain_linear(bias: bool, stub: Any) -> None:
    model, plain = net(bias=bias), net(bias=bias)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    keys = list(model.state_dict())
    plan, x = plan_of(model), batch().view(2, 5, 32)
    outputs = []
    for recovering in (False, True, False):
        for group in plan.units:
            group.switch(recovering)
        outputs.append(model(x))
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], plain(x))
    assert [rows for _, _, rows in stub.ran] == [32] * 4  # of 10, filled up with zeros
    with plan.high_precision():
        assert torch.equal(model(x), plain(x)) and len(stub.ran) == 4
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert list(model.state_dict()) == keys and len(list(model.modules())) == 4
    plan.restore()
    assert type(model[0]) is nn.Linear and torch.equal(model(x), plain(x))


def test_gradients_reach_the_operators_own_parameters(stub: Any) -> None:
    model, plain = net(), net()
    plan_of(model)
    rounded = lambda t: t + ((t * 64).round() / 64 - t).detach()  # as the stub rounds what a linear reads
    x = batch()
    model(x).sum().backward()
    F.linear(rounded(torch.relu(F.linear(rounded(x), *plain[0].parameters()))), *plain[2].parameters()).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # The stub rounds gradients too: those of a sum are 1 in the last layer.
        assert torch.allclose(ours.grad, theirs.grad, atol=0.2) and ours.grad.count_nonzero() > 0
    assert torch.allclose(model[2].weight.grad, plain[2].weight.grad)


def test_weights_that_are_loaded_in_another_parameter_are_followed(stub: Any) -> None:
    model = net()
    plan_of(model)
    x = batch()
    before = model(x)
    model.load_state_dict(net(seed=5).state_dict(), assign=True)
    fresh = net(seed=5)
    plan_of(fresh)
    assert torch.equal(model(x), fresh(x)) and not torch.equal(model(x), before)


def test_a_copy_has_parameters_of_its_own(stub: Any) -> None:
    model = net()
    plan_of(model, "fp8_delayed")
    steps(model, 2)
    twin = copy.deepcopy(model)
    steps(model, 1, lr=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert list(twin.state_dict()) == list(model.state_dict()) and twin(batch()).count_nonzero() > 0
    assert model(batch()).count_nonzero() == 0


def test_no_rows_at_all(stub: Any) -> None:
    model = net()
    plan_of(model)
    model(torch.zeros(0, 32, requires_grad=True)).sum().backward()
    assert stub.ran == [] and model[0].weight.grad.count_nonzero() == 0


# ---- delayed scales ----


def steps(model: nn.Module, number: int, first: int = 0, lr: float = 1e-3) -> list[float]:
    losses = []
    for step in range(first, first + number):
        loss = model(batch(seed=step)).square().sum()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
        model.zero_grad()
    return losses


def test_delayed_scales_move_once_a_pass_and_go_on_where_they_were(stub: Any) -> None:
    whole = net()
    plan_of(whole, "fp8_delayed")
    wanted = steps(whole, 6)
    assert {depth for _, depth, _ in stub.ran} == {1}
    for which in ("forward", "backward"):
        assert all(int(linear.state[which][0].count_nonzero()) == 6 for linear in stub._delayed), which
    model = net()
    plan = plan_of(model, "fp8_delayed")
    assert steps(model, 3) == wanted[:3]
    other = net()
    again = plan_of(other, "fp8_delayed")
    other.load_state_dict(model.state_dict())
    again.load_state_dict(plan.state_dict())
    assert steps(other, 3, 3) == wanted[3:]
    forgetful = net()
    plan_of(forgetful, "fp8_delayed")
    forgetful.load_state_dict(model.state_dict())
    assert steps(forgetful, 3, 3) != wanted[3:]


def test_passes_that_are_not_the_runs_leave_no_trace(stub: Any) -> None:
    model, quiet = net(), net()
    plan, _ = plan_of(model, "fp8_delayed"), plan_of(quiet, "fp8_delayed")
    for step in range(3):
        state = plan.state_dict()
        model(100 * batch(seed=50)).sum().backward()
        model.zero_grad()
        plan.load_state_dict(state)
        with plan.high_precision():
            model(100 * batch(seed=51))
        assert steps(model, 1, step) == steps(quiet, 1, step)


def test_a_forward_pass_that_fails_closes_its_region(stub: Any) -> None:
    model = net()
    plan = plan_of(model, "fp8_delayed")
    with pytest.raises(RuntimeError):
        model(torch.zeros(8, 31))
    assert stub._regions == [] and steps(model, 1)
    plan.restore()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_delayed_scales_outside_of_the_forward_pass_are_refused(stub: Any) -> None:
    model = net()
    plan_of(model, "fp8_delayed")
    with pytest.raises(RuntimeError, match=r"0 ran outside of its model's forward pass .activation checkpointing"):
        model[0](batch())
    plain = net()
    plan_of(plain)
    checkpoint(plain, batch().requires_grad_(), use_reentrant=False).sum().backward()  # current scales may
    assert plain[0].weight.grad is not None


# ---- what cannot be had ----


def test_what_looks_into_casts_is_refused(stub: Any) -> None:
    model = net()
    plan = plan_of(model)
    for look in (lambda: plan.probe(["gap_low"]), plan.saved_bytes):
        with pytest.raises(ValueError, match="of Transformer Engine's casts nothing can be read; use backend='scaled"):
            look()
    with pytest.raises(
        ValueError, match="nothing can be broken in Transformer Engine's casts; use backend='scaled_mm'"
    ):
        FaultSchedule(plan, Fault("noise", 1.0, 1.0, 16), ["*"], 10, windows=[[1, 2]], rate=0.0, duration=1, seed=0)
    assert plan.saturation() == {}
    plan.restore()
    with pytest.raises(ValueError, match=r"gap_low.*: of Transformer Engine's casts nothing can be read"):
        attach(model, low="fp8_hybrid", recovery="bf16", targets=["0", "2"], backend="te", signal="recovery_gap")
    assert type(model[0]) is nn.Linear


def test_extra_bytes_count_its_codes(stub: Any) -> None:
    model = net()
    plan = plan_of(model)
    plan.units[0].switch(True)
    model(batch())
    assert plan.extra_bytes() == 8 / 8 * 10 * 32


@pytest.mark.gpu
@pytest.mark.parametrize("low", ["fp8_hybrid", "fp8_delayed", "deepseek_v3", "mxfp8"])
def test_the_real_one_is_near_the_simulation(low: str) -> None:
    if find_spec("transformer_engine") is None or not torch.cuda.is_available():
        pytest.skip("needs Transformer Engine and a CUDA device")
    made = []
    for backend in ("te", "simulated"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512)).to("cuda", torch.bfloat16)
        try:
            convert(model, PathSpec.of(low, "bf16", targets=["0"], backend=backend))
        except ValueError as error:
            pytest.skip(str(error))
        x = torch.randn(100, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(100, 512, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):  # delayed scales begin at 1
            x.grad = model[0].weight.grad = None
            y = model(x)
            y.backward(dy)
        made.append((y, x.grad, model[0].weight.grad))
    for ours, simulated in zip(*made, strict=True):
        assert float((ours.float() - simulated.float()).norm() / simulated.float().norm()) < 5e-2
