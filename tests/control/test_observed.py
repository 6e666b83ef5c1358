"""What a unit is watched by: hooks on outputs against hand-worked numbers, adapters by name."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from contexts import context
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gnmr.control import Controller, ControlSpec, GnmrSignal, OutputGradients, Unit
from gnmr.control.output_norms import adapters
from gnmr.control.signals import SIGNALS


class Pair(nn.Module):
    """y = b(a(x)) beside something else, as an attention returns its weights."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.a.weight, first)
        nn.init.constant_(self.b.weight, second)

    def forward(self, x: Tensor) -> tuple[Tensor, None, dict[str, Tensor]]:
        return self.b(self.a(x)), None, {"weights": x}


class Net(nn.Module):
    """L = c * sum of both blocks; dL/d(layers.1 output) = c, and through each linear times its weight."""

    def __init__(self, run=lambda layer, x: layer(x)) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.layers = nn.ModuleList([Pair(2.0, 3.0), Pair(5.0, 7.0)])
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)[0]
        return x


UNITS = ["layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "layers.0", "layers.1"]
FACTORS = torch.tensor([105.0, 35.0, 7.0, 1.0, 35.0, 1.0], dtype=torch.float64)
"""dL/dy of each unit's output where L is the sum of the last one's."""


def tokens(number: int) -> Tensor:
    return torch.arange(1.0, number + 1).view(number, 1)


RUNS = {
    "plain": lambda layer, x: layer(x),
    "checkpointing": partial(checkpoint, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x.requires_grad_(), use_reentrant=True),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_norm_over_all_tokens_of_a_step(run: str) -> None:
    """Two micro-batches of 3 and 5 tokens with factors 0.5 and 2: sqrt(3 * 0.25 + 5 * 4) of each unit's own."""
    net = Net(RUNS[run])
    norms = OutputGradients(net, UNITS)
    (net(tokens(3)).sum() * 0.5).backward()
    (net(tokens(5)).sum() * 2).backward()
    norm, observed = norms()
    torch.testing.assert_close(norm, FACTORS * math.sqrt(20.75), rtol=1e-6, atol=0)
    assert norm.dtype == torch.float64 and observed.tolist() == [True] * 6
    net(tokens(1)).sum().backward()
    torch.testing.assert_close(norms()[0], FACTORS, rtol=1e-6, atol=0)  # a step of its own


def test_what_leaves_no_trace() -> None:
    """No graph, no backward pass, a rehearsal; nor does the watching change a gradient."""
    net, alone = Net(), Net()
    norms = OutputGradients(net, UNITS)
    with torch.no_grad():
        net(tokens(4))
    net.eval()(tokens(4))
    norms.enabled = False
    net(tokens(4)).sum().backward()
    norms.enabled = True
    net.zero_grad()
    with pytest.warns(UserWarning, match="no gradient reached any unit's output"):
        norm, observed = norms()
    assert norm.tolist() == [0.0] * 6 and not observed.any()
    for each in (net, alone):
        each(tokens(4)).square().sum().backward()
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_unit_that_no_gradient_reaches_is_not_observed() -> None:
    """Frozen from the input up to layers.1.a: nothing before it is trained, so nothing flows there."""
    net = Net()
    net.layers[0].requires_grad_(False)
    net.layers[1].a.requires_grad_(False)
    norms = OutputGradients(net, UNITS)
    net(tokens(2)).sum().backward()
    norm, observed = norms()
    assert observed.tolist() == [False, False, False, True, False, True]
    assert norm.tolist() == pytest.approx([0, 0, 0, math.sqrt(2), 0, math.sqrt(2)])
    net.layers[0].a.requires_grad_(True)  # now through frozen operators as well
    net(tokens(2)).sum().backward()
    torch.testing.assert_close(norms()[0], FACTORS * math.sqrt(2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_and_is_gone_afterwards(bad: float) -> None:
    net = Net()
    units = [Unit(name, tuple(net.get_submodule(name).parameters()), lambda _on: None) for name in UNITS]
    norms = OutputGradients(net, UNITS)
    controller = Controller(units, ControlSpec(signal=GnmrSignal(context(6), alpha=1.5), max_o=2), norms=norms)
    for factor in (1.0, bad, 1.0):
        (net(tokens(2)).sum() * factor).backward()
        decision = controller.step()
        net.zero_grad()
        if factor == bad:
            assert decision.risk.tolist() == [math.inf] * 6
            assert not decision.events, "all of them: nobody is to blame"
    assert decision.norm.tolist() == pytest.approx((FACTORS * math.sqrt(2)).tolist())
    assert controller.signal.history.count.tolist() == [2] * 6  # type: ignore[attr-defined]


def test_a_watched_model_can_be_copied_and_compiled() -> None:
    net = Net()
    norms = OutputGradients(net, ["layers.0", "layers.1"])
    copy.deepcopy(net)(tokens(2)).sum().backward()
    pickle.loads(pickle.dumps(net.layers))
    for layer in net.layers:
        layer.compile(backend="eager")
    net(tokens(1)).sum().backward()
    assert norms()[0].tolist() == pytest.approx([35, 1])


def test_units_that_cannot_be_watched() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"unit 'layers.2': the model has no module of this name"):
        OutputGradients(net, ["layers.0", "layers.2"])
    with pytest.raises(ValueError, match=r"unit 'layers' is a ModuleList, which has no output of its own"):
        OutputGradients(net, ["layers"])
    units = [Unit("layers.0", tuple(net.layers[0].parameters()))]
    gsnr = SIGNALS["gsnr"](context(1))
    with pytest.raises(ValueError, match="micro_square is of the gradients of the units' parameters"):
        Controller(units, ControlSpec(signal=gsnr, max_o=1), norms=OutputGradients(net, ["layers.0"]))


# ---- adapters ----


class Lora(nn.Module):
    """As peft wraps a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_adapters_are_found_by_the_units_name() -> None:
    """Below layers.1 are not those of layers.10, a base layer's are its wrapper's, and what is frozen is left out."""
    net = nn.Module()
    net.layers = nn.ModuleList(nn.ModuleDict({"q": Lora(), "norm": nn.LayerNorm(4)}) for _ in range(11))
    net.layers[1]["norm"].requires_grad_(False)

    def names(unit: str) -> list[str]:
        found = {id(p) for p in adapters(net, unit)}
        return [name for name, p in net.named_parameters() if id(p) in found]

    q = ["layers.1.q.lora_A.weight", "layers.1.q.lora_B.weight"]
    assert names("layers.1") == names("layers.1.q") == names("layers.1.q.base_layer") == q
    assert len(names("layers.10")) == 4  # its norm is trained too
    with pytest.raises(ValueError, match=r"unit 'layers.1.norm' has no trainable parameter; add its adapters first"):
        adapters(net, "layers.1.norm")


def test_a_base_layer_is_watched_where_its_adapter_adds() -> None:
    """Before anything that is trained the frozen linear's own output has no gradient, the sum's has: the same one."""
    layer = nn.Sequential(Lora())
    norms = OutputGradients(layer, ["0.base_layer"])
    layer(torch.ones(3, 4)).sum().backward()
    norm, observed = norms()
    assert observed.all() and norm.item() == pytest.approx(math.sqrt(12))
