"""unit=gemm: one GEMM of an operator changes its path by itself."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from test_simulated import same
from torch import Tensor, nn

from gnmr import attach
from gnmr.conversion import PathLinear, PathSpec, convert
from gnmr.formats import Recipe
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.names import GEMMS, RECIPES

SETS = [frozenset(some) for some in chain.from_iterable(combinations(GEMMS, k) for k in range(4))]


def model(width: int = 16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


def passes(net: nn.Module, width: int = 16) -> list[Tensor]:
    """Loss and all gradients of a batch, of the input too."""
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    net.zero_grad(set_to_none=True)
    loss = net(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recovered", SETS, ids=lambda some: "+".join(gemm for gemm in GEMMS if gemm in some) or "none")
@pytest.mark.parametrize(
    ("low", "recovery", "backend"),
    [
        ("sim_e2m1", "bf16", "auto"),
        ("sim_int4", "fp8_hybrid", "simulated"),
        pytest.param("fp8_hybrid", "bf16", "scaled_mm", marks=pytest.mark.fp8),
        ("mxfp8", "sim_int4", "simulated"),
    ],
)
def test_any_set_of_gemms_computes_as_a_recipe_that_says_so(
    low: str, recovery: str, backend: str, recovered: frozenset[str]
) -> None:
    """Against static paths of a recipe written out, to the bit."""
    width = 32
    ours, theirs = model(width), model(width)
    converted = convert(ours, PathSpec(low=low, recovery=recovery, targets=["*"], unit="gemm", backend=backend))
    for unit in converted.units:
        unit.switch(unit.gemm in recovered)
    words = {gemm: RECIPES[recovery if gemm in recovered else low].get(gemm, {}) for gemm in GEMMS}
    written = Recipe.of("written", words)
    convert(theirs, PathSpec.of(written, None, targets=["*"], backend=backend if written.casts else "auto"))
    assert same(passes(ours, width), passes(theirs, width))


def test_which_gemms_are_units() -> None:
    def names(net: nn.Module | None = None, **more: object) -> list[str]:
        spec = PathSpec(**{"low": "sim_e2m1", "recovery": "bf16", "targets": ["*"], "unit": "gemm"} | more)
        return [unit.name for unit in convert(model() if net is None else net, spec).units]

    assert names() == [f"{i}:{gemm}" for i in (0, 2) for gemm in GEMMS]
    assert names(recovers=["fprop"]) == ["0:fprop", "2:fprop"]
    assert names(recovers=["wgrad", "fprop"]) == ["0:fprop", "0:wgrad", "2:fprop", "2:wgrad"]
    assert names(low="llm_int8") == ["0:fprop", "2:fprop"]  # the paths are alike in the others
    assert names(low="llm_int8_dgrad") == ["0:fprop", "0:dgrad", "2:fprop", "2:dgrad"]
    assert names(recovery=None) == names()  # watched
    frozen = model()
    frozen[2].requires_grad_(False)
    assert names(frozen) == ["0:fprop", "0:dgrad", "0:wgrad", "2:fprop", "2:dgrad"]


@pytest.mark.parametrize(
    "paths", [{"low": "int4"}, {"low": "int4", "recovery": None}, {"low": "llm_int8", "recovers": ["wgrad"]}], ids=str
)
@pytest.mark.filterwarnings("ignore:.*recovery changes nothing")
def test_what_has_no_gemms_to_route_is_refused(paths: dict[str, object]) -> None:
    net = model()
    with pytest.raises(ValueError, match="unit="):
        convert(net, PathSpec(**{"recovery": "bf16", "targets": ["*"], "unit": "gemm"} | paths))
    assert all(type(one) is not PathLinear for one in net)


# ---- controller ----


def one_step(unit: str, *record: str, observe: str = "parameters", **more: object):
    net = model()
    controller = attach(
        net, low="sim_e2m1", recovery="bf16", targets=["*"], unit=unit, observe=observe, record=record, max_o=1,
        signal="always_low", **more,
    )  # fmt: skip
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    for half in x.chunk(2):
        (net(half).square().mean() / 2).backward()
        controller.micro_step()
    return controller.step(), controller


@pytest.mark.parametrize("observe", ["parameters", "input_grad", "adapter"])
def test_norms_are_those_of_the_operator_and_made_once(observe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_operator, _ = one_step("operator", observe=observe)
    counted: list[int] = []
    real = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda x, *more, **kw: counted.append(len(x)) or real(x, *more, **kw))
    by_gemm, controller = one_step("gemm", observe=observe)
    assert by_gemm.norm.tolist() == by_operator.norm.repeat(3).tolist() and by_gemm.observed.all()
    assert counted == ([] if observe == "input_grad" else [4])
    if observe == "input_grad":
        assert sum(len(module._forward_hooks) for module in controller.converted.operators) == 2


def test_evidence_goes_to_the_gemm_that_it_is_of() -> None:
    names = ("gap_low", "gap_recovery", "mse", "input_std", "weight_std", "micro_square")
    ours, theirs = one_step("gemm", *names)[0].evidence, one_step("operator", *names)[0].evidence
    alone = {"gap_low": 2, "gap_recovery": 2, "mse": 0}
    for name in names:
        expected = np.repeat(theirs[name], 3)
        if name in alone:
            expected[[i for i in range(6) if i % 3 != alone[name]]] = 0
        assert ours[name].tolist() == expected.tolist(), name
    assert theirs["gap_low"].all() and theirs["mse"].all()


def test_a_state_holds_the_gemms_in_recovery() -> None:
    def made():
        net = model()
        more = {"unit": "gemm", "signal": "recovery_gap", "routing": "ranked", "max_o": 2}
        return net, attach(net, low="sim_e2m1", recovery="bf16", targets=["*"], **more)

    net, controller = made()
    for _ in range(3):
        net(torch.randn(8, 16)).square().mean().backward()
        controller.step()
    _, other = made()
    other.load_state_dict(controller.state_dict())
    assert len(other.active) == 2 and other.active == controller.active
    assert [o.recovered for o in other.converted.operators] == [o.recovered for o in controller.converted.operators]
    with pytest.raises(ValueError, match="other units"):
        attach(model(), low="sim_e2m1", recovery="bf16", targets=["*"], max_o=1).load_state_dict(
            controller.state_dict()
        )


# ---- faults ----


def schedule(unit: str, targets: list[str], **more: object) -> tuple[nn.Module, FaultSchedule]:
    net = model()
    converted = convert(net, PathSpec(**{"low": "sim_int4", "recovery": "bf16", "targets": ["*"], "unit": unit} | more))
    return net, FaultSchedule(converted, Fault("scale_up", 50), targets, 400, rate=5, duration=20, seed=7)


def test_a_fault_hits_the_gemms_that_are_on_the_low_path() -> None:
    """By hand: fprop recovered, the fault is in wgrad alone, and the other way round."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))

    def of(recovered: set[str], armed: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16, bias=False))
        converted = convert(net, PathSpec(low="sim_int4", recovery="bf16", targets=["*"], unit="gemm"))
        faults = FaultSchedule(converted, Fault("scale_up", 50), ["*"], 10, windows=[[1, 1]])
        for unit in converted.units:
            unit.switch(unit.gemm in recovered)
        faults.begin_step(1 if armed else 2)
        y = net(x)
        y.backward(torch.ones_like(y))
        return y.detach(), net[0].weight.grad

    for recovered, (in_fprop, in_wgrad) in {
        (): (True, True),
        ("fprop",): (False, True),
        ("wgrad",): (True, False),
        ("dgrad",): (True, True),
        ("fprop", "wgrad"): (False, False),
    }.items():
        hit, sound = of(set(recovered), True), of(set(recovered), False)
        assert torch.equal(hit[0], sound[0]) is not in_fprop, recovered
        assert torch.equal(hit[1], sound[1]) is not in_wgrad, recovered
    both, alone = of(set(), True), of({"fprop"}, True)
    assert torch.equal(both[1], alone[1])  # the same rows


def test_faults_of_no_routed_gemm_that_reads_the_input_are_refused() -> None:
    with pytest.raises(ValueError, match="no unit has such a name"):
        schedule("gemm", ["0:fprop"])
    with pytest.raises(ValueError, match="no GEMM that reads it is routed"):
        schedule("gemm", ["*"], recovers=["dgrad"])


# ---- pins ----


def test_pinned_gemms_are_watched_and_the_others_routed() -> None:
    ours = model()
    spec = {"low": "sim_e2m1", "recovery": "bf16", "targets": ["*"], "unit": "gemm"}
    converted = convert(ours, PathSpec(**spec, recovers=["fprop", "dgrad"], pins={"0": ["fprop"], "2": ["wgrad"]}))
    assert [(unit.name, unit.routable) for unit in converted.units] == [
        ("0:fprop", False),
        ("0:dgrad", True),
        ("2:fprop", True),
        ("2:dgrad", True),
    ]
    area = 16 * 32  # of either operator
    assert converted.cost.spent()[0] == 2 * area / (6 * area)
    for unit in converted.units:
        if unit.name in ("0:dgrad", "2:fprop"):
            unit.switch(True)
    assert converted.cost.spent()[0] == 4 * area / (6 * area)
