"""Mixtures of experts: against a token-by-token reading; balancing by hand; experts without tokens; routing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from gnmr.control.norms import UnitNorms
from gnmr.conversion import PathSpec, convert
from gnmr.lab.config.model import ExpertsConfig, ModelConfig
from gnmr.lab.models.moe import MoEMLP


def mixture(number: int = 6, top_k: int = 2, seed: int = 0, **options: object) -> MoEMLP:
    """A mixture with random weights, of width 16."""
    torch.manual_seed(seed)
    experts = ExpertsConfig(number=number, top_k=top_k, **options)
    mlp = MoEMLP(ModelConfig(name="moe", hidden_size=16, intermediate_size=24, experts=experts))
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0, 0.4)
    return mlp


def one_by_one(mlp: MoEMLP, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, balancing loss): the equations of `gnmr/lab/models/moe.py`, one token and one expert at a time."""
    flat = x_BTD.flatten(0, 1)
    number, assigned, gates, outputs = len(mlp.experts), [0] * len(mlp.experts), [], []
    for x in flat:
        p = torch.exp(mlp.router.weight @ x)
        p = p / p.sum()
        chosen = p.topk(mlp.top_k).indices.tolist()
        total = sum(p[e] for e in chosen) if mlp.normalized else 1.0
        y = torch.zeros_like(x)
        for e in chosen:
            up, down = mlp.experts[e].up_proj, mlp.experts[e].down_proj
            hidden = F.gelu(up.weight @ x + up.bias, approximate="tanh")
            y = y + p[e] / total * (down.weight @ hidden + down.bias)
            assigned[e] += 1
        gates.append(p)
        outputs.append(y)
    mean = torch.stack(gates).mean(0)
    balance = number * sum(assigned[e] / (len(flat) * mlp.top_k) * mean[e] for e in range(number))
    return torch.stack(outputs).view_as(x_BTD), balance


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 6},
        {"number": 1, "top_k": 1},
        {"number": 40, "top_k": 3},  # 21 tokens: most experts get one or none
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_token_by_token_reading(options):
    mlp = mixture(**options)
    x_BTD = torch.randn(3, 7, 16, requires_grad=True)
    direction = torch.randn(3, 7, 16)
    found = []
    for run in (mlp, lambda x: one_by_one(mlp, x)):
        mlp.zero_grad(set_to_none=True)
        x_BTD.grad = None
        y_BTD, routing = run(x_BTD)
        balance = routing if isinstance(routing, torch.Tensor) else routing.balance_loss
        ((y_BTD * direction).sum() + 3 * balance).backward()
        gradients = {name: parameter.grad for name, parameter in mlp.named_parameters()}
        found.append((y_BTD, balance, x_BTD.grad, gradients))
    (y, balance, x_grad, gradients), (want_y, want_balance, want_x_grad, want_gradients) = found
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y, want_y, **close)
    torch.testing.assert_close(balance, want_balance, **close)
    torch.testing.assert_close(x_grad, want_x_grad, **close)
    for name, gradient in gradients.items():
        assert (gradient is None) == (want_gradients[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, want_gradients[name], **close, msg=name)


def test_the_same_bits_on_two_threads_again_and_again():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        mlp, x_BTD = mixture(number=4), torch.randn(4, 512, 16)
        seen = []
        for _ in range(3):
            leaf = x_BTD.clone().requires_grad_()
            mlp.zero_grad(set_to_none=True)
            y_BTD, routing = mlp(leaf)
            (y_BTD.square().sum() + routing.balance_loss).backward()
            seen.append([y_BTD, leaf.grad, *(parameter.grad for parameter in mlp.parameters())])
        assert all(torch.equal(a, b) for again in seen[1:] for a, b in zip(seen[0], again, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_gate_is_fp32(autocast: bool):
    """Logits that BF16 cannot tell apart choose the right expert."""
    mlp = mixture(number=2, top_k=1).bfloat16()
    with torch.no_grad():
        mlp.router.weight.zero_()
        mlp.router.weight[:, 0] = 1.0
        mlp.router.weight[1, 1] = 2.0**-10  # 1 + 2^-10 is 1 in BF16
    x_ND = torch.zeros(1, 16, dtype=torch.bfloat16)
    x_ND[0, :2] = 1.0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        weight_Nk, expert_Nk, _, balance_loss = mlp.route(x_ND)
    assert expert_Nk.item() == 1 and weight_Nk.dtype == balance_loss.dtype == torch.float32
    assert weight_Nk.item() == pytest.approx(1 / (1 + math.exp(-(2.0**-10))), abs=1e-7)


# ---- the balancing loss ----


def test_the_balancing_loss_by_hand():
    """Three tokens, three experts, two choices; gates (.5, .3, .2), (.2, .5, .3) and (.6, .3, .1)."""
    mlp = mixture(number=3, top_k=2)
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
    with torch.no_grad():
        mlp.router.weight.zero_()
        mlp.router.weight[:, :3] = p.log().t()  # token n is the n-th unit vector
    _, routing = mlp(torch.eye(3, 16)[None])
    torch.testing.assert_close(routing.share_E, torch.tensor([2 / 6, 3 / 6, 1 / 6]))
    expected = 3 * (2 / 6 * 1.3 / 3 + 3 / 6 * 1.1 / 3 + 1 / 6 * 0.6 / 3)
    assert routing.balance_loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_model_adds_it_up(build, tokens_BT):
    model = build("moe")
    model.balance_coef = 0.5
    assert model.auxiliary_loss is None  # no forward pass yet
    model(tokens_BT)
    losses = [routing.balance_loss for routing in model.routings]
    assert len(losses) == 2 and model.auxiliary_loss == 0.5 * (losses[0] + losses[1])
    told = model.statistics()
    assert [told[f"layers.{i}.mlp.balance_loss"] for i in range(2)] == losses
    shares = model.routings[1].share_E
    assert told["layers.1.mlp.max_share"] == shares.max() and told["layers.1.mlp.min_share"] == shares.min()
    entropy = -sum(s * math.log(s) for s in shares.tolist() if s)
    assert told["layers.1.mlp.entropy"].item() == pytest.approx(entropy, rel=1e-5)
    assert len(told) == 8 and not any(value.requires_grad for value in told.values())


# ---- experts without tokens ----


def test_an_expert_without_tokens_is_not_observed():
    mlp = mixture(number=6, top_k=2)
    x_BTD = torch.randn(1, 1, 16).expand(2, 5, 16)  # one token, ten times
    y_BTD, routing = mlp(x_BTD)
    y_BTD.sum().backward()
    busy = routing.share_E > 0
    assert busy.sum() == 2
    groups = [tuple(expert.parameters()) for expert in mlp.experts]
    for expert, is_busy in zip(groups, busy, strict=True):
        assert all((parameter.grad is not None) == is_busy for parameter in expert)
    _, norms, observed = UnitNorms(groups)()
    assert torch.equal(observed, busy) and torch.equal(norms > 0, busy)


def test_linears_of_an_expert_without_tokens_keep_nothing():
    """Nor do they say that they still read what the pass before gave them."""
    mlp = mixture(number=3, top_k=1)
    with torch.no_grad():
        mlp.router.weight.zero_()
        mlp.router.weight[:, :3] = torch.eye(3)
    for low in ("int4", "bf16"):
        converted = convert(mlp, PathSpec.of(low, None))
        for experts in ([0, 0, 1], [2, 2, 2]):
            y_BTD, _ = mlp(10 * torch.eye(16)[experts][None])
            rows = [experts.count(e) for e in range(3) for _ in ("up", "down")]
            assert [operator.read[0] for operator in converted.operators] == rows
            assert converted.cost.saved_bytes() == converted.cost.predicted_bytes() > 0
            y_BTD.sum().backward()
            assert converted.cost.saved_bytes() == 0
        converted.restore()


# ---- its place among the others ----


def test_convert_finds_exactly_the_eligible_linears(build):
    model = build("moe")
    names = [f"self_attn.{name}_proj" for name in "qkvo"]
    names += [f"mlp.experts.{e}.{name}_proj" for e in range(4) for name in ("up", "down")]
    converted = convert(model, PathSpec.of("int4", "int8"))
    assert [o.operator_name for o in converted.operators] == [f"layers.{i}.{n}" for i in range(2) for n in names]
    converted.restore()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router is a ExpertRouter: only a plain nn\.Linear"):
        convert(model, PathSpec.of("int4", "int8", targets=["router"]))


@pytest.mark.slow
def test_compiled_blocks_give_the_same_gradients_and_can_be_copied(build, tokens_BT):
    plain, compiled = build("moe"), build("moe")
    for block in compiled.layers:
        block.compile(backend="eager")
    for model in (plain, compiled):
        (model(tokens_BT).square().mean() + model.auxiliary_loss).backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    assert torch.equal(copy.deepcopy(plain)(tokens_BT), plain(tokens_BT))
