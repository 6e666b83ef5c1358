"""What `attach` refuses, takes back and warns of in loops that are not ours."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.control.signals import SIGNALS
from gnmr.measure.price import measure_prices


def net(number: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(number)))


def loss_of(model: nn.Module, seed: int = 1) -> Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x).square().mean()


def attached(model: nn.Module, **how: Any) -> gnmr.Router:
    return gnmr.attach(model, **{"targets": ["?"], "max_o": 2} | how)


# ---- thresholds and options ----


@pytest.mark.parametrize(
    ("how", "thresholds"),
    [
        ({"alpha": 9.0, "beta": 8.0}, (9.0, 8.0)),
        ({"signal": SIGNALS["gnmr_delta"], "alpha": 9.0, "beta": None}, (9.0, None)),
        ({"options": {"alpha": 7.0}}, (7.0, 1.3)),
        ({"signal": "mse", "options": {"threshold": 4.0}}, (4.0,)),
    ],
)
def test_thresholds_reach_the_signal_however_it_is_named(how: dict[str, Any], thresholds: tuple[float, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attached(net(), **how).controller.signal.thresholds(1) == thresholds


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"low": "fp8_hybrid"}, ["recipe fp8_hybrid is simulated: needs a GPU of compute capability 8.9 or newer"]),
        ({"low": "sim_e3m2", "recovery": "fp8_hybrid"}, ["recipe fp8_hybrid is simulated: needs a GPU of"]),
        ({"low": "fp8_hybrid", "backend": "simulated"}, []),
        ({"low": "sim_e3m2"}, []),
    ],
)
def test_a_recipe_that_is_simulated_unasked_is_told_once(how: dict[str, Any], told: list[str]) -> None:
    model = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        controller = attached(model, **{"recovery": "bf16"} | how)
        loss_of(model).backward()
        controller.step()
    said = [str(one.message) for one in caught]
    assert len(said) == len(told) and all(map(str.startswith, said, told)), said


# ---- mistakes ----


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"targets": 3}, "targets=3: must be a list of names"),
        ({"low": ["int4"]}, r"low=\['int4'\]: must be one of"),
        ({"seed": "x"}, "seed=x: must be a whole number"),
        ({"options": [1]}, r"options=\[1\]: must map names"),
        ({"probe_tokens": 1.5}, "probe_tokens=1.5"),
        ({"record": "gap_low"}, "record='gap_low': must be a list"),
        ({"low": "llm_int8", "recovery": "bf16", "outlier_threshold": "6"}, "outlier_threshold=6: must be"),
        ({"signal": 3}, "is not a signal: int has no"),
        ({"signal": "gnrm"}, "did you mean gnmr_delta[?]"),
        ({"signal": "recovery_gap", "recovery": None}, "gap_recovery"),
        ({"signal": partial(SIGNALS["mse"], level=1.0)}, "level"),
        ({"record": ["colour"]}, "evidence 'colour' is not known"),
        ({"low": "int9"}, "low=int9"),
        ({"targets": ["nothing"]}, "targets"),
        ({"recovery": None, "warmup_steps": 3}, "warmup_steps=3"),
    ],
)
def test_wrong_arguments_are_named_and_the_model_is_as_it_was(how: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        attached(model, **how)
    assert [type(module) for module in model] == [nn.Linear] * 4


def test_a_model_must_be_one_with_weights() -> None:
    with pytest.raises(ValueError, match=r"model: must be an nn\.Module, not"):
        gnmr.attach(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on the meta device"):
        gnmr.attach(net().to("meta"), targets=["?"])


def test_a_format_on_frozen_weights_is_refused_and_a_recipe_is_not() -> None:
    """A format touches what the weight gradient reads; of a frozen weight there is none."""

    def lora() -> nn.Sequential:
        model = net().requires_grad_(False)
        return nn.Sequential(nn.Linear(16, 16), *model)

    how = {"targets": ["1", "2"], "observe": "input_grad"}
    model = lora()
    with pytest.raises(ValueError, match=r"low='int4': compresses what the weight gradient reads.*low='llm_int8'"):
        attached(model, **how)
    assert [type(module) for module in model] == [nn.Linear] * 5
    for more in ({"site": "forward"}, {"low": "llm_int8", "recovery": "bf16"}, {"low": "bf16", "recovery": "bf16"}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bf16 twice
            attached(lora(), **how, **more)


def test_a_detached_controller_says_so() -> None:
    model = net()
    controller = attached(model)
    state = controller.state_dict()
    controller.detach()
    controller.detach()
    loss_of(model).backward()
    converted, names = controller.converted, controller.names
    assert repr(controller) == f"<Router of {len(names)} units, detached; step 0>"
    assert [type(module) for module in model] == [nn.Linear] * 4
    uses = (
        controller.step,
        controller.micro_step,
        controller.discard,
        controller.state_dict,
        controller.calibrate,
        lambda: controller.load_state_dict(state),
        lambda: controller.promote(names[:1]),
        lambda: controller.log(loss=1.0),
        lambda: controller.true_gap(lambda: None),
        lambda: controller.explain(lambda: loss_of(model)),
        lambda: str(converted),
        lambda: converted.cost.spent(),
        converted.saturation,
        converted.state_dict,
        lambda: measure_prices(converted),
        lambda: converted.cost.of_units("gemm"),
        lambda: converted.compile([model]),
        lambda: converted.on_low_path().__enter__(),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=r"^this controller was detached: its model has plain linears again"):
            use()
    with converted.high_precision():  # as a Trainer evaluates after training
        loss_of(model)
    assert repr(converted)


@pytest.mark.parametrize(
    "how",
    [
        {"signal": "recovery_gap", "recovery": "bf16"},
        {"observe": "input_grad"},
        {"rounding": "stochastic"},
        {"low": "fp8_delayed", "recovery": "bf16", "backend": "simulated"},
    ],
)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_controller_goes_on_as_they_do(how: dict[str, Any], copied: Any) -> None:
    pairs = [(model := net(), attached(model, **how))]
    for seed in range(4):
        if seed == 2:
            pairs.append(copied(pairs[0]))
        decisions = []
        for model, controller in pairs:
            model.zero_grad()
            loss_of(model, seed).backward()
            decisions.append(controller.step())
        for decision in decisions:
            assert decision.risk.tolist() == decisions[0].risk.tolist() and decision.observed.all()
            assert all((values > 0).all() for values in decision.columns.values())


def test_a_foreign_state_changes_nothing() -> None:
    """Of the paths after the controller's own, and the other way round."""
    controller = attached(net(), rounding="stochastic")
    other = attached(net(), rounding="stochastic", seed=5)
    good, before = other.state_dict(), copy.deepcopy(controller.state_dict())
    bad = ({"signal": {}}, {"converted": {}})
    for state in (3, *({**good, **changed} for changed in bad)):
        with pytest.raises(ValueError, match="state"):
            controller.load_state_dict(state)
        assert torch.equal(controller.state_dict()["converted"]["rounding"], before["converted"]["rounding"])
        assert torch.equal(controller.state_dict()["lock"], before["lock"])


def test_a_model_on_another_device_than_its_controller_is_told() -> None:
    model = net()
    controller = attached(model)
    loss_of(model).backward()
    model.to("meta")
    with pytest.raises(
        ValueError, match=r"^the model is on meta by now, its controller on cpu: move it before attaching"
    ):
        controller.step()


def test_evidence_that_is_missing_is_told_before_the_norms_are_read() -> None:
    """Those of hooks can be read once."""
    model = net()
    controller = attached(model, observe="input_grad", signal="oracle")
    loss_of(model).backward()
    for wrong in (None, {"true_gap": torch.ones(3)}):
        with pytest.raises(ValueError, match="true_gap"):
            controller.step(evidence=wrong)
    decision = controller.step(evidence={"true_gap": torch.ones(4, dtype=torch.float64)})
    assert decision.observed.all() and (decision.norm > 0).all() and decision.step == 1


# ---- what is exchanged afterwards ----


def exchange_weight(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach() * 3)


def exchange_both(model: nn.Sequential) -> None:
    exchange_weight(model)
    model[1].bias = None


def add_bias(model: nn.Sequential) -> None:
    model[1].bias = nn.Parameter(torch.ones(16))


def tie(model: nn.Sequential) -> None:
    model[1].weight = model[3].weight


def parametrize(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[1])


@pytest.mark.parametrize("signal", ["gnmr_delta", "gsnr", "jacobian"])
@pytest.mark.parametrize("exchange", [exchange_weight, exchange_both, add_bias, tie, parametrize])
def test_parameters_that_are_exchanged_are_followed(exchange: Any, signal: str) -> None:
    model = net()
    controller = attached(model, signal=signal)
    exchange(model)
    for _ in range(2):
        loss_of(model).backward()
        controller.micro_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decision = controller.step()
    own = [torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item() for layer in model]
    assert decision.norm.tolist() == pytest.approx(own, rel=1e-5)
    assert [list(unit.parameters) for unit in controller.units] == [list(layer.parameters()) for layer in model]


def freeze_bias(model: nn.Sequential) -> None:
    model[3].bias.requires_grad_(False)


def add_adapter(model: nn.Sequential) -> None:
    model[3].adapter = nn.Parameter(torch.ones(16))
    model[3].register_forward_hook(lambda module, inputs, output: output * module.adapter)


@pytest.mark.parametrize("change", [freeze_bias, add_adapter])
def test_trained_parameters_below_a_unit_are_followed(change: Any) -> None:
    model = net()
    controller = attached(model, observe="adapter")
    change(model)
    loss_of(model).backward()
    controller.step()
    trained = [[p for p in layer.parameters() if p.requires_grad] for layer in model]
    assert [list(unit.parameters) for unit in controller.units] == trained


@pytest.mark.parametrize("observe", ["parameters", "adapter", "input_grad"])
def test_a_module_that_was_replaced_is_told(observe: str) -> None:
    model = nn.Sequential(net(), net())
    controller = gnmr.attach(model, targets=["?.?"], max_o=2, observe=observe, unit="block")
    model[1] = net()
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"^1\.0: its module is no longer in the model \(replaced or taken out since"):
        controller.step()


def test_weights_that_codes_take_the_place_of_are_let_go() -> None:
    model = nn.Sequential(nn.Linear(16, 16), *net().requires_grad_(False))
    old = weakref.ref(model[1].weight)
    controller = attached(
        model,
        targets=["1", "2"],
        low="llm_int8",
        recovery="bf16",
        weights="instead",
        observe="input_grad",
        backend="simulated",
        max_o=1,
    )
    gc.collect()
    assert old() is None and controller.units[0].parameters[0] is model[1].weight


# ---- what makes it pointless ----


def test_a_weight_that_is_read_past_its_module_is_told() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.o_proj(F.linear(x, self.q_proj.weight))

    model = Fused()
    controller = attached(model, targets=["*_proj"])
    loss_of(model).backward()
    with pytest.warns(UserWarning, match="q_proj: never ran"):
        controller.step()


# ---- steps that are thrown away ----


@pytest.mark.parametrize(
    "how",
    [
        {"observe": "input_grad"},
        {"signal": "recovery_gap"},
        *({"low": n, "recovery": "bf16"} for n in ("fp8_delayed", "nvfp4")),
    ],
)
def test_a_discarded_step_leaves_no_trace(how: dict[str, Any]) -> None:
    """A broken batch, thrown away between two steps: the next decision is as if it had never been."""

    def decisions(broken: bool) -> list[list[float]]:
        model = net()
        controller = attached(model, **how)
        found = []
        for seed in range(3):
            for factor in (float("nan"), 1e6) if broken and seed > 0 else ():
                (loss_of(model, 9) * factor).backward()
                model.zero_grad()
                controller.discard()
            loss_of(model, seed).backward()
            decision = controller.step()
            found.append([*decision.norm, *decision.risk, *decision.lock])
            model.zero_grad()
        return found

    assert decisions(True) == decisions(False)


def test_options_go_to_the_spec_that_has_them() -> None:
    paths = {"low": "int2", "targets": ["?"]}
    control = {"max_o": 1, "alpha": 1.2}
    specs = {"paths": gnmr.PathSpec(**paths), "control": gnmr.ControlSpec(**control)}  # type: ignore[arg-type]
    for how in (specs, paths | control, {"paths": specs["paths"]} | control, paths | {"control": specs["control"]}):
        controller = gnmr.attach(net(), **how)
        assert (controller.spec, controller.converted.low.name) == (specs["control"], "int2")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"alhpa": 1.2}, TypeError, "no option 'alhpa': did you mean alpha"),
        ({"control": gnmr.ControlSpec(), "alpha": 1.2}, ValueError, "alpha: is a field of control"),
        ({"paths": gnmr.PathSpec(), "low": "int2"}, ValueError, "low: is a field of paths"),
        ({"plan": {"pins": {}}}, TypeError, r"^plan: must be plan.json or what Diagnosis.plan\(\) returns, not a dict"),
        ({"paths": "int2"}, TypeError, "^paths='int2': must be a PathSpec, not a str; name the options, as low="),
        ({"control": {"max_o": 1}}, TypeError, r"^control=\{'max_o': 1\}: must be a ControlSpec, not a dict"),
    ],
)
def test_options_that_no_spec_takes_are_refused(how: dict[str, Any], error: type[Exception], message: str) -> None:
    model = net()
    with pytest.raises(error, match=message):
        gnmr.attach(model, **how)


# ---- whose line a warning shows ----


WARNS = {
    "max_o=8 caps nothing": lambda: attached(net(), max_o=8),
    "alpha: has no effect": lambda: attached(net(), signal="recovery_gap", alpha=2.0),
    "no unit has a gradient": lambda: attached(net()).step(),
}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="warnings cannot skip frames by file")
@pytest.mark.parametrize("text", WARNS)
def test_a_warning_shows_the_loops_line(text: str) -> None:
    with pytest.warns(UserWarning) as seen:
        WARNS[text]()
    assert [one.filename for one in seen if text in str(one.message)] == [__file__]


def test_a_model_of_inference_tensors_is_refused() -> None:
    with torch.inference_mode():
        model = net()
        with pytest.raises(ValueError, match=r"^model: was made in torch\.inference_mode"):
            attached(net())
    with pytest.raises(ValueError, match=r"^model: was made in torch\.inference_mode"):
        attached(model)


def test_no_record_is_none() -> None:
    controller = attached(net(), record=None)
    assert not controller.recorded and controller.controller.record == ()


def test_a_budget_is_read_as_on_the_command_line() -> None:
    assert attached(net(), budget="50%").spec.budget == attached(net(), budget=0.5).spec.budget == 0.5
    for wrong in (1.5, "ten", 10):
        with pytest.raises(ValueError, match=f"budget={wrong}: must be a share above 0, at most 1"):
            attached(net(), budget=wrong)
