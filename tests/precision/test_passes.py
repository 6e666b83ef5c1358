"""One forward pass of an operator, its backward pass, and what may come between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from close import apart, assert_close
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gnmr
from gnmr.formats.recipes import RECIPES

PATHS = ["bf16", "int4", "sim_int4", "fp8_hybrid", "fp8_delayed", "nvfp4", "mxfp8", "deepseek_v3", "llm_int8"]
CASTING = [name for name in PATHS if name != "bf16"]
WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore:.*caps nothing", "ignore:backend", "ignore:low=", "ignore:recipe")


class Two(nn.Module):
    """Two linears with a curve between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x)))


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attached(low: str, recovery: str | None = None, **kwargs: object) -> tuple[Two, gnmr.Controller]:
    model = Two()
    return model, gnmr.attach(model, low=low, recovery=recovery, signal="always_low", **kwargs)


# ---- second derivatives ----

SECOND = {"terms": WIDTH, "products": 8}  # two linears, each with its gradient and the gradient of that


def penalty(model: nn.Module) -> list[Tensor | None]:
    """The gradients of a gradient penalty."""
    x = numbers(8, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_second_derivatives_of_bf16_are_the_plain_models() -> None:
    (model, _), plain = attached("bf16"), Two()
    assert_close(penalty(model), penalty(plain), **SECOND)
    x = numbers(WIDTH)

    def value(net: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda v: net(v).square().sum()

    functional = torch.autograd.functional
    assert_close(functional.hessian(value(model), x), functional.hessian(value(plain), x), **SECOND)
    for derivative in (functional.vhp, functional.hvp, functional.jvp):
        assert_close(derivative(value(model), x, x)[1], derivative(value(plain), x, x)[1], **SECOND)
    assert_close(torch.func.jvp(model, (x,), (x,))[1], torch.func.jvp(plain, (x,), (x,))[1], **SECOND)
    assert_close(torch.func.vmap(model)(numbers(3, WIDTH)), torch.func.vmap(plain)(numbers(3, WIDTH)), **SECOND)


@pytest.mark.parametrize("low", CASTING)
def test_second_derivatives_of_casts_are_refused_with_the_operators_name(low: str) -> None:
    model, controller = attached(low)
    with pytest.raises(RuntimeError, match=r"^o_proj: second derivatives \(create_graph=True\) [^\n]*$"):
        penalty(model)
    model.zero_grad()
    with controller.converted.high_precision():
        assert_close(penalty(model), penalty(Two()), **SECOND)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.vmap(f)(x.expand(3, -1)),
        lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
        lambda f, x: torch.func.jacrev(f)(x),
    ],
)
@pytest.mark.parametrize("low", ["int4", "nvfp4", "llm_int8"])
def test_transforms_of_casts_are_refused_with_the_operators_name(low: str, transform: Callable) -> None:
    model, _ = attached(low)
    with pytest.raises(RuntimeError, match=r"^q_proj: torch.func's transforms [^\n]*$"):
        transform(model, numbers(WIDTH))


# ---- changes in place ----


def masked(h: Tensor, x: Tensor) -> Tensor:
    h[h < 0] = 0
    return h


def through_a_view(h: Tensor, x: Tensor) -> Tensor:
    h.view(-1)[:3].add_(1)
    return h


IN_PLACE = [
    lambda h, x: h.add_(x),
    lambda h, x: h.mul_(2),
    lambda h, x: torch.relu_(h),
    lambda h, x: h.copy_(x),
    masked,
    through_a_view,
]


@pytest.mark.parametrize("shape", [(WIDTH,), (2, 2, 16, WIDTH)], ids=str)
@pytest.mark.parametrize("low", PATHS)
def test_outputs_can_be_changed_in_place(low: str, shape: tuple[int, ...]) -> None:
    (model, _), plain, x = attached(low), Two(), numbers(*shape)
    for change in IN_PLACE:
        found = []
        for net in (model, plain):
            leaf = x.clone().requires_grad_()
            change(net.q_proj(leaf), x).square().sum().backward()
            found.append((leaf.grad, net.q_proj.weight.grad.clone()))
            net.zero_grad()
        assert all(ours is theirs is None or ours.isfinite().all() for ours, theirs in zip(*found, strict=True))
        reached = any(gradient is not None and gradient.any() for gradient in found[1])
        differ = apart(*found, terms=WIDTH, products=3)
        assert bool(differ) == (low != "bf16" and reached), differ


# ---- recomputed passes ----


@pytest.mark.parametrize("low", CASTING)
def test_a_kept_graph_keeps_its_path_and_its_scales(low: str) -> None:
    model, controller = attached(low, "bf16")
    x = numbers(64, WIDTH)
    model(x).sum().backward()
    controller.step()
    model.zero_grad()
    loss, found = model(2 * x).square().sum(), []
    for _ in range(2):
        loss.backward(retain_graph=True)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        controller.step()
        model.zero_grad()
        controller.converted.operators[1].switch(True)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def gradients_of(
    run: Callable[[Two, gnmr.Controller, Callable], object], reentrant: bool | None, low: str, **kwargs: object
) -> list[Tensor]:
    """What `run` leaves as gradients with checkpointing of this kind; None: without."""

    def around(f: Callable, *inputs: Tensor) -> Tensor:
        return f(*inputs) if reentrant is None else checkpoint(f, *inputs, use_reentrant=reentrant)

    model, controller = attached(low, "bf16", **kwargs)
    run(model, controller, around)
    return [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


def in_turn(model: Two, controller: gnmr.Controller, around: Callable) -> None:
    """Two graphs, on two paths, the first one run through twice."""
    x = numbers(8, WIDTH).requires_grad_()
    first = around(model, x).square().sum()
    first.backward(retain_graph=True)
    for operator in controller.converted.operators:
        operator.switch(True)
    second = around(model, x).square().sum()
    first.backward()
    second.backward()


def twice(model: Two, controller: gnmr.Controller, around: Callable) -> None:
    """One linear twice in a region, and regions in regions."""
    x = numbers(8, WIDTH).requires_grad_()
    around(lambda x: around(model, model.q_proj(torch.tanh(model.q_proj(x)))), x).square().sum().backward()


def all_forward_first(model: Two, controller: gnmr.Controller, around: Callable) -> None:
    """Micro-batches whose backward passes come afterwards, and evaluations between them."""
    losses = []
    for seed in range(3):
        with torch.no_grad(), controller.converted.high_precision():
            around(model, numbers(8, WIDTH).requires_grad_())
        losses.append(around(model, numbers(8, WIDTH, seed=seed).requires_grad_()).square().sum())
    for loss in losses:
        loss.backward()


def kept_losses(model: Two, controller: gnmr.Controller, around: Callable) -> None:
    """Graphs without a backward pass, thrown away or kept, over several steps; the model is in another mode later."""
    x, kept = numbers(8, WIDTH).requires_grad_(), []
    for step in range(3):
        kept.append(around(model, x).sum())
        controller.discard()
        model.zero_grad()
        loss = around(model, (1 + step) * x).square().sum()
        model.train(step == 1)
        loss.backward()
        if step < 2:
            controller.step()


def within_high_precision(model: Two, controller: gnmr.Controller, around: Callable) -> None:
    """A forward pass in 16 bits, its backward pass outside."""
    x = numbers(8, WIDTH).requires_grad_()
    with controller.converted.high_precision():
        loss = around(model, x).square().sum()
    loss.backward()


def replaced_later(model: Two, controller: gnmr.Controller, around: Callable) -> None:
    x = numbers(32, WIDTH).requires_grad_()
    for step in range(3):
        model(x * (step + 1)).sum().backward()
        controller.step()
        model.zero_grad()
    with torch.no_grad():
        model.o_proj.weight.mul_(3)
    model.o_proj(torch.tanh(around(model.q_proj, x))).square().sum().backward()


def a_step_later(model: Two, controller: gnmr.Controller, around: Callable) -> None:
    """A backward pass in the step after its forward pass, when delayed scales come from another history."""
    x = numbers(8, WIDTH).requires_grad_()
    loss = around(model, x).square().sum()
    model(3 * x).sum().backward()
    controller.step()
    model.zero_grad()
    loss.backward()


RUNS = (in_turn, twice, all_forward_first, kept_losses, within_high_precision, replaced_later, a_step_later)
CHANGED = (in_turn, within_high_precision, a_step_later)
"""Runs whose paths, or scales, have changed between a forward pass and its backward pass."""
DRAWN = [{"low": "int4", "rounding": "stochastic"}, {"low": "int4", "rounding": "stochastic", "site": "forward"}]


@pytest.mark.parametrize(
    ("run", "how"),
    [  # what is kept between passes: copies, casts, scales of the past, draws
        *((run, {"low": low}) for run in RUNS for low in ("int4", "fp8_delayed", "nvfp4")),
        *((run, how) for run in (in_turn, all_forward_first, kept_losses) for how in DRAWN),
        *(
            pytest.param(run, {"low": low}, marks=() if run is in_turn else pytest.mark.slow)
            for run in RUNS[:5]
            for low in ("sim_int4", "fp8_hybrid", "mxfp8", "deepseek_v3", "llm_int8")
        ),
    ],
)
def test_recomputed_passes_are_those_that_they_repeat(run: Callable, how: dict) -> None:
    plain = gradients_of(run, None, **how)
    for reentrant in (False, True):
        if reentrant and (run in CHANGED or how in DRAWN[1:]):
            with pytest.raises(RuntimeError, match=r"^\w_proj: [^\n]*activation checkpointing .* use_reentrant=False$"):
                gradients_of(run, reentrant, **how)
            continue
        for ours, theirs in zip(gradients_of(run, reentrant, **how), plain, strict=True):
            if run is twice:  # a weight's gradients are added in another order
                assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
            else:
                assert torch.equal(ours, theirs)


def by_composable(model: Two) -> None:
    """Regions in a region, each begun by a hook of its module."""
    for module in (model.q_proj, model.o_proj, model):
        composable_checkpoint(module)


@pytest.mark.parametrize("prepare", [lambda model: None, by_composable])
@pytest.mark.parametrize("hooks", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_regions_are_found_whoever_else_has_hooks_for_saved_tensors(prepare: Callable, hooks: Callable) -> None:
    found = []
    for prepares, surrounding in ((lambda model: None, nullcontext), (prepare, hooks)):
        model, _ = attached("int4", "bf16", rounding="stochastic", site="forward")
        prepares(model)
        with surrounding():
            losses = [model(numbers(8, WIDTH, seed=seed).requires_grad_()).square().sum() for seed in range(2)]
            for loss in losses:
                loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_evaluation_under_other_weights_leaves_delayed_scales_alone() -> None:
    found = []
    for evaluates in (False, True):
        model, controller = attached("fp8_delayed", "bf16")
        for step in range(3):
            model(numbers(32, WIDTH, seed=step)).sum().backward()
            controller.step()
            model.zero_grad()
        if evaluates:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
                model(numbers(32, WIDTH))
            model.load_state_dict(state)
        model(numbers(32, WIDTH, seed=5) * 0.5).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        controller.step()
        found[-1].append(controller.converted.state_dict()["largest"])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- replaced weights ----


def by_copy(model: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def by_data(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = state[name]


@pytest.mark.parametrize(
    ("replace", "factor"),
    [
        (lambda model, state: model.load_state_dict(state), 100.0),
        (lambda model, state: model.load_state_dict(state, assign=True), 1.2),
        (by_copy, 0.01),
        (by_data, 1.2),
    ],
)
def test_delayed_scales_notice_replaced_weights(replace: Callable, factor: float) -> None:
    """Scales are then those of the tensors themselves, as fp8_hybrid takes them; and go on from there."""
    (model, controller), (fresh, _) = attached("fp8_delayed", "bf16"), attached("fp8_hybrid", "bf16")
    x = numbers(32, WIDTH)
    for _ in range(3):
        model(x).sum().backward()
        controller.step()
        model.zero_grad()
    state = {name: value * factor for name, value in model.state_dict().items()}
    replace(model, {name: value.clone() for name, value in state.items()})
    fresh.load_state_dict(state)
    found = []
    for net in (model, fresh):
        net(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert controller.converted.saturation()["weight"].sum() == 0
    controller.step()
    history = controller.converted.state_dict()["largest"]
    assert (history[:, 1, 1] > 0).all() and (history[:, 1, 2:] == 0).all(), "what was before is forgotten"


def test_trained_weights_are_not_taken_for_replaced_ones() -> None:
    model, controller = attached("fp8_delayed", "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        model(numbers(32, WIDTH, seed=step)).square().mean().backward()
        assert not controller.converted.shared.amax.replaced
        controller.step()
        optimizer.step()
        optimizer.zero_grad()


# ---- what is drawn ----


@pytest.mark.parametrize(
    "how",
    [
        {"low": "nvfp4", "recovery": "bf16"},
        {"low": "int4", "recovery": "bf16", "rounding": "stochastic"},
        {"low": "int4", "recovery": "int8", "rounding": "stochastic"},
        {"low": "nvfp4", "recovery": "bf16", "unit": "gemm"},
    ],
    ids=str,
)
def test_moving_one_operator_leaves_the_noise_of_the_others(how: dict) -> None:
    """All three read one tensor: its first reader moves."""
    found = []
    for moved in ((), ("q_proj",), ("k_proj",)):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj")})
        controller = gnmr.attach(model, signal="always_low", **how)
        own: dict[str, list[Tensor]] = {name: [] for name in model}
        for step in range(3):
            for operator in controller.converted.operators:
                if operator.operator_name in moved:
                    operator.switch(True)
            for micro in range(2):
                x = numbers(64, WIDTH, seed=10 * step + micro)
                sum(linear(x).square().sum() for linear in model.values()).backward()
            for name, linear in model.items():
                own[name].append(linear.weight.grad.clone())
            controller.step()
            model.zero_grad()
        found.append({name: own[name] for name in model})
    for other, moved in ((found[1], "q_proj"), (found[2], "k_proj")):
        for name in other:
            alike = all(torch.equal(a, b) for a, b in zip(found[0][name], other[name], strict=True))
            assert alike == (name != moved), name


def test_micro_batches_and_steps_draw_anew_and_a_resumed_run_draws_the_same() -> None:
    def steps(model: Two, controller: gnmr.Controller, number: int) -> list[Tensor]:
        found = []
        for _ in range(number):
            for _ in range(2):
                model(numbers(64, WIDTH)).square().sum().backward()
                found.append(model.q_proj.weight.grad.clone())
                model.zero_grad()
            controller.step()
        return found

    model, controller = attached("nvfp4", "bf16")
    before = torch.get_rng_state()
    whole = steps(model, controller, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(torch.equal(whole[i], whole[j]) for i in range(4) for j in range(i))
    state = controller.state_dict()
    rest = steps(model, controller, 1)
    model, other = attached("nvfp4", "bf16", seed=7)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(steps(model, other, 1), rest, strict=True))


def saves_products(_context: object, operation: OpOverload, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """Match by name, so that products into given memory are saved too."""
    products = ("aten::mm", "aten::bmm", "aten::addmm")
    return CheckpointPolicy.MUST_SAVE if operation._schema.name in products else CheckpointPolicy.PREFER_RECOMPUTE


def saves_all(*_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("low", [*RECIPES, "int4", "int4 forward"])
@pytest.mark.parametrize("policy", [saves_products, saves_all])
def test_selective_checkpointing_changes_no_gradient_and_no_count(low: str, policy: Callable) -> None:
    fmt, _, site = low.partition(" ")
    context_fn = partial(create_selective_checkpoint_contexts, policy)
    found = []
    for around in (lambda f, x: f(x), partial(checkpoint, use_reentrant=False, context_fn=context_fn)):
        model, controller = attached(fmt, site=site or "saved")
        x = numbers(8, WIDTH).requires_grad_()
        for _ in range(2):
            around(model, x).square().sum().backward()
            found.append([*[p.grad.clone() for p in model.parameters()], *controller.converted.saturation().values()])
            controller.step()
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
