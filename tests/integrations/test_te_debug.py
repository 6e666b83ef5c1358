"""The debug feature in the real nvdlfw_inspect; Transformer Engine has stand-ins (`Linear`, te_features)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.errors import UserError

pytest.importorskip("nvdlfw_inspect", reason="nvdlfw-inspect is not installed")

import nvdlfw_inspect.api as debug_api

from gnmr.attachment import te_debug

CONFIG = """
routed:
  enabled: True
  layers: {layer_types: [fc1, fc2]}
  transformer_engine:
    GnmrRouting: {enabled: True%s}
"""
GEMMS = ("fprop", "dgrad", "wgrad")


class Linear(nn.Linear):
    """Asks as Transformer Engine's does: once an iteration, and no more after "yes, and never mind"."""

    def __init__(self, name: str) -> None:
        super().__init__(16, 16)
        self.name, self.weight_names, self.bias_names = name, ["weight"], ["bias"]
        self.fp8: list[dict[str, bool]] = []
        self.settled: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.fp8.append({})
        for gemm in GEMMS:
            answer: Any = True
            if gemm not in self.settled:
                answer = debug_api.transformer_engine.fp8_gemm_enabled(
                    layer_name=self.name, gemm=gemm, iteration=len(self.fp8)
                )
            if answer == (True, None):
                self.settled.add(gemm)
            self.fp8[-1][gemm] = answer[0] if isinstance(answer, tuple) else answer
        return F.linear((4 * x).round() / 4 if self.fp8[-1]["fprop"] else x, self.weight, self.bias)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., nn.Sequential]]:
    """begin(": more of the config") -> three layers, made behind the initialization."""

    def make(more: str = "", known: bool = True) -> nn.Sequential:
        debug_api.end_debug()
        config = tmp_path / "debug.yaml"
        config.write_text(CONFIG % more)
        if known:
            te_debug.register()
        debug_api.initialize(str(config), [str(Path(__file__).parent / "te_features")], log_dir=str(tmp_path))
        torch.manual_seed(0)
        return nn.Sequential(*(Linear(f"block.{name}") for name in ("qkv", "fc1", "fc2")))

    yield make
    debug_api.end_debug()


def train(model: nn.Sequential, controller: gnmr.Controller, steps: range) -> list[gnmr.Decision]:
    optimizer, decisions = torch.optim.SGD(model.parameters(), lr=0.3), []
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        (model(x) - x.flip(1)).square().mean().backward()
        decisions.append(controller.step())
        optimizer.step()
        optimizer.zero_grad()
        debug_api.step()
    return decisions


def controller_of(model: nn.Sequential) -> gnmr.Controller:
    return gnmr.Controller(te_debug.units(model), gnmr.ControlSpec(max_o=1, alpha=1.02, beta=1.01))


@pytest.mark.parametrize("gemms", [GEMMS, ("dgrad", "wgrad")])
def test_gemms_run_as_routed(gemms: tuple[str, ...], begin: Callable[..., nn.Sequential]) -> None:
    model = begin(f", gemms: [{', '.join(gemms)}]" if gemms != GEMMS else "")
    controller = controller_of(model)
    assert controller.names == ["block.fc1", "block.fc2"]
    decisions = train(model, controller, range(10))
    assert len({tuple(one.in_force) for one in decisions}) >= 2
    for step, decision in enumerate(decisions):
        assert model[0].fp8[step] == dict.fromkeys(GEMMS, True)
        for layer, on in zip(model[1:], decision.in_force, strict=True):
            assert layer.fp8[step] == {gemm: not (on and gemm in gemms) for gemm in GEMMS}


def test_a_state_gives_the_same_sets(begin: Callable[..., nn.Sequential]) -> None:
    model = begin()
    controller = controller_of(model)
    train(model, controller, range(5))
    weights, state = {name: p.clone() for name, p in model.state_dict().items()}, controller.state_dict()
    whole = train(model, controller, range(5, 10))
    model = begin()
    model.load_state_dict(weights)
    controller = controller_of(model)
    controller.load_state_dict(state)
    rest = train(model, controller, range(5, 10))
    assert [one.norm.tolist() for one in rest] == [one.norm.tolist() for one in whole]
    assert [one.in_force.tolist() for one in rest] == [one.in_force.tolist() for one in whole]


def test_units_of_fused_layers(begin: Callable[..., nn.Sequential]) -> None:
    begin()
    model = nn.Module()
    model.name = "model"  # of debug_api.infer_and_assign_layer_names: any module may have one
    model.mlp, model.experts = nn.Module(), nn.Module()
    model.mlp.name, model.experts.name, model.experts.num_gemms = "mlp", "fc1_experts", 2
    for name in ("layer_norm_weight", "fc1_weight", "fc1_bias", "fc2_weight"):
        model.mlp.register_parameter(name, nn.Parameter(torch.zeros(1)))
    for name in ("weight0", "weight1", "bias1"):
        model.experts.register_parameter(name, nn.Parameter(torch.zeros(1)))
    found = {unit.name: len(unit.parameters) for unit in te_debug.units(model)}
    assert found == {"mlp.fc1": 2, "mlp.fc2": 1, "fc1_experts.gemm_0": 1, "fc1_experts.gemm_1": 2}


def test_mistakes_are_told_in_one_line(begin: Callable[..., nn.Sequential]) -> None:
    model = begin()
    with pytest.raises(UserError, match=r"routes no layer of the model; its layers are block\.qkv"):
        te_debug.units(model[:1])
    with pytest.raises(UserError, match="it has no layer of Transformer Engine"):
        te_debug.units(nn.Linear(2, 2))
    with pytest.raises(UserError, match="GnmrRouting: 'grad' is unknown; it takes gemms, some of fprop, dgrad, wgrad"):
        begin(", gemms: [grad]")(torch.zeros(1, 16))
    debug_api.end_debug()
    with pytest.raises(UserError, match=r"call te_debug\.register\(\)"):
        te_debug.units(model)


def test_a_layer_that_never_asks_is_told_of(begin: Callable[..., nn.Sequential]) -> None:
    controller = controller_of(begin())
    controller.units[0].switch(True)  # as of a state that is loaded
    with pytest.warns(UserWarning, match=r"block\.fc1: Transformer Engine never asked for its path") as told:
        controller.units[0].switch(False)
        controller.units[0].switch(True)
    assert len(told) == 1
