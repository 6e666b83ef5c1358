"""What attach says of the whole model after its first step, and what its costs are shares of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from gnmr import attach
from gnmr.attachment import Router
from gnmr.control.spec import NO_CAP
from gnmr.records.reader import read_json

TOKENS = torch.arange(64).view(2, 32) % 16
BLOCK = 8 * 8 + 8 * 16 + 16 * 8 + 8 * 8
"""Multiplications of a block for a token: q_proj, up_proj and down_proj, and `mix`, which is no linear."""
HEAD = 8 * 16
PATHS = {"low": "sim_e2m1", "recovery": "bf16", "targets": ["*_proj"]}


class Block(nn.Module):
    def __init__(self, bypassed: bool) -> None:
        super().__init__()
        self.q_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mix, self.bypassed = nn.Parameter(torch.eye(8)), bypassed

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.q_proj.weight) if self.bypassed else self.q_proj(x)
        return x + self.down_proj(self.up_proj(x @ self.mix).relu())


class Model(nn.Module):
    def __init__(self, bypassed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block(bypassed) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def one_step(model: nn.Module, controller: Router) -> list[str]:
    """Return what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(TOKENS).backward()
        controller.step()
        model.zero_grad()
    return [str(one.message) for one in said]


def test_the_first_step_says_what_is_left_out_and_no_other_does() -> None:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        controller = attach(model, **PATHS, signal="always_low")
    (line,) = one_step(model, controller)
    share = (2 * (BLOCK - 64)) / (2 * BLOCK + HEAD)
    assert line == f"attach covers {share:.1%} of the GEMMs' arithmetic; not: layers.mix (Block) 14.3%, head 14.3%"
    assert controller.coverage is not None and f"{share:.1%} of all GEMMs" in repr(controller)
    assert line.removeprefix("attach ") in str(controller.converted)
    assert not one_step(model, controller)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("frozen", [False, True])
def test_linears_that_are_bypassed_are_all_named(frozen: bool) -> None:
    model = Model(bypassed=True)
    for layer in model.layers:
        layer.q_proj.requires_grad_(not frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller = attach(model, **PATHS, signal="always_low")
    never = [line for line in one_step(model, controller) if "never ran" in line]
    assert len(never) == 1 and never[0].startswith("layers.0.q_proj, layers.1.q_proj: never ran")
    assert "(read without a call) 14.3%" in str(controller.converted)


def test_spent_and_budget_are_shares_of_all_gemms(tmp_path: Path) -> None:
    model, whole = Model(), 3 * (2 * BLOCK + HEAD)
    pins = {"layers.0.up_proj": ["fprop"]}
    given = {**PATHS, "unit": "gemm", "pins": pins, "signal": "always_high", "max_o": NO_CAP}
    controller = attach(model, **given, budget=0.2, record=str(tmp_path / "run"))
    one_step(model, controller)
    cost = controller.converted.cost
    assert cost.spent().share <= 0.2 and cost.spent().share > 0.2 - 64 / whole
    assert cost.pinned_share() == pytest.approx(128 / whole)
    header = read_json(tmp_path / "run" / "header.json")
    assert header is not None and header["spend_pinned"] == pytest.approx(128 / whole)
    assert sum(header["spend"]) == pytest.approx((3 * 2 * (BLOCK - 64) - 128) / whole)
    for unit in controller.units:
        assert unit.switch is None or unit.switch(True) is None
    slow, fast = 3 * 4 * 2 * (BLOCK - 64), 3 * 1 * 2 * (BLOCK - 64)
    rest = 3 * 4 * (2 * 64 + HEAD)
    assert cost.spent().extra_time == pytest.approx((slow - fast) / (fast + rest))
    controller.detach()


def test_a_budget_is_refused_once_its_base_is_counted() -> None:
    """Of the operators alone a block takes a half."""
    share = (BLOCK - 64) / (2 * BLOCK + HEAD)
    given = {**PATHS, "unit": "block", "signal": "always_high", "max_o": NO_CAP}
    model = Model()
    controller = attach(model, **given, budget=share + 0.01)
    one_step(model, controller)
    assert controller.active == ["layers.0"]
    small, state = Model(), controller.state_dict()
    for pins in ({}, {"layers.0.*_proj": ["fprop", "dgrad", "wgrad"]}):  # of the operators alone they are a half
        begun = [attach(Model(), **given, pins=pins, budget=share + 0.01) for _ in range(2)]
        begun[0].load_state_dict(begun[1].state_dict())  # of before the first step, which has no count
    controller = attach(small, **given, budget=share - 0.01)
    with pytest.raises(ValueError, match=r"^budget=0\.\d+: is too small for any unit; the cheapest takes 0\.\d+$"):
        one_step(small, controller)
    with pytest.raises(ValueError, match="too small for any unit"):
        attach(Model(), **given, budget=share - 0.01).load_state_dict(state)
    units = dict.fromkeys(("layers.0", "layers.1"), 1.0)
    with pytest.raises(ValueError, match=r"too small for any unit; the cheapest takes 0\.5$"):
        attach(Model(), **given, budget=0.4, cost=units)


def test_rows_count() -> None:
    """An operator that half of the tokens reach costs half as much."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])})
    first, second = model["layers"]
    controller = attach(model, **{**PATHS, "targets": ["*"]}, signal="always_low")
    second(first(torch.randn(6, 8))[:3]).sum().backward()
    controller.step()
    assert [unit.cost for unit in controller.units] == pytest.approx([2 / 3, 1 / 3])


def test_a_resumed_controller_keeps_the_count() -> None:
    model = Model()
    controller = attach(model, **PATHS, signal="always_high", budget=0.3, max_o=NO_CAP)
    one_step(model, controller)
    state, costs = controller.state_dict(), [unit.cost for unit in controller.units]
    twin = Model()
    other = attach(twin, **PATHS, signal="always_high", budget=0.3, max_o=NO_CAP)
    assert [unit.cost for unit in other.units] != costs
    other.load_state_dict(state)
    assert [unit.cost for unit in other.units] == costs and other.active == controller.active
    assert not any(module._forward_hooks for module in twin.modules())


def test_copies_before_the_first_step_count_nothing() -> None:
    model = Model()
    controller = attach(model, **PATHS, signal="always_low")
    twin = copy.deepcopy(model)
    twin(TOKENS).backward()
    assert sum(controller._counting.coverage.called().values()) == 0  # type: ignore[union-attr]
    both = copy.deepcopy((model, controller))
    assert not [line for line in one_step(*both) if line.startswith("attach covers")]
    assert one_step(model, controller)


def test_several_micro_batches_and_passes_count_once() -> None:
    model = Model()
    controller = attach(model, **PATHS, signal="always_low")
    for _ in range(3):
        model(TOKENS).backward()
        controller.micro_step()
    with pytest.warns(UserWarning, match="attach covers"):
        controller.step()
    assert controller.coverage is not None and controller.coverage.called()["head"] == 64 * HEAD


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_activation_checkpointing_recomputes_counts_once(reentrant: bool) -> None:
    model = Model()
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
    controller = attach(model, **PATHS, signal="always_low")
    one_step(model, controller)
    assert controller.converted.cost.work is not None
    assert controller.converted.cost.work.outside == 64 * (2 * 64 + HEAD)
    assert sum(controller.converted.cost.work.operators) == 64 * 2 * (BLOCK - 64)


def test_a_part_that_runs_with_gradients_in_its_recomputation_alone_is_counted() -> None:
    model = Model()
    controller = attach(model.layers[0], **PATHS, signal="always_low")
    for _ in range(2):
        checkpoint(model.layers[0], model.table(TOKENS), use_reentrant=True).sum().backward()
    controller.step()
    assert controller.converted.cost.work is not None
    assert sum(controller.converted.cost.work.operators) == 2 * 64 * (BLOCK - 64)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("then", ["goes on", "attaches again", "detaches"])
@pytest.mark.parametrize("prepend", [False, True])
def test_a_pass_that_ends_early_is_not_counted_and_leaves_no_mode(
    error: type[BaseException], then: str, prepend: bool
) -> None:
    """An interrupt in a notebook calls no hooks of modules."""
    model = Model()
    controller = attach(model, **PATHS, signal="always_low")
    fails = model.layers[1].up_proj.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error), prepend=prepend)
    with pytest.raises(error):
        model(TOKENS)
    fails.remove()
    if then != "goes on":
        controller.detach()
        assert not _get_current_dispatch_mode_stack()
    if then != "detaches":
        controller = controller if then == "goes on" else attach(model, **PATHS, signal="always_low")
        one_step(model, controller)
        assert not _get_current_dispatch_mode_stack()
        assert controller.converted.cost.work is not None
        assert controller.converted.cost.work.operators == (64 * 64, 64 * 128, 64 * 128) * 2
        assert controller.converted.cost.work.outside == 64 * (2 * 64 + HEAD)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_linears_of_nested_tensors_count_by_their_rows(layout: torch.layout) -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 16), "then": nn.Linear(16, 4)})
    controller = attach(model, low="sim_int8", recovery="bf16", targets=["then"], max_o=1)
    x = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=layout)
    model["then"](torch.cat(model["first"](x).unbind())).square().mean().backward()
    controller.step()
    assert controller.coverage is not None and controller.coverage.called() == {"first": 5 * 128, "then": 5 * 64}
    with pytest.raises(ValueError, match=r"^then: its input is a nested tensor"):
        model["then"](model["first"](x))


COULD_NOT = "attach could not count what a compiled model runs"


def compiled_outside(model: Model) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="eager")


def compiled_in_part(model: Model) -> Callable[[Tensor], Tensor]:
    """Its head is called eagerly, and so counted."""
    layers = torch.compile(nn.Sequential(model.table, *model.layers), backend="eager")
    return lambda tokens: model.head(layers(tokens)).sum()


def forward_compiled(model: Model) -> Callable[[Tensor], Tensor]:
    """Dynamo passes over it while a mode counts."""
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("compiled", "counts"),
    [
        (compiled_outside, False),
        pytest.param(compiled_in_part, False, marks=pytest.mark.slow),
        (forward_compiled, True),
    ],
)
def test_compiled_passes_are_counted_right_or_it_is_said(
    compiled: Callable[[Model], Callable[[Tensor], Tensor]], counts: bool
) -> None:
    torch._dynamo.reset()
    model = Model()
    controller = attach(model, low="int4", recovery="int8", targets=["*"], signal="always_low")  # the head too
    run, said = compiled(model), []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run(TOKENS).backward()
            controller.step()
        said += [str(one.message) for one in told if str(one.message).startswith("attach")]
    if counts:
        assert controller.coverage is not None and controller.coverage.called()["head"] == 64 * HEAD
        assert controller.coverage.share(controller.names) == pytest.approx(1 - 2 * 64 / (2 * BLOCK + HEAD))
        assert all(line.startswith("attach covers") for line in said)
    else:
        assert controller.coverage is None and [line for line in said if line.startswith(COULD_NOT)] == said != []
        assert len(said) == 1
