"""Operators that are no nn.Linear, against the same models written with nn.Linear, and against the plain module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from close import EIGHT_BITS, FOUR_BITS, apart, assert_close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gnmr
from gnmr.conversion import ConvertedModel, PathSpec, adapters, convert
from gnmr.conversion.adapters import WeightOwner, operators_in, register

D, H, E, T = 32, 64, 4, 24
PATHS = [("bf16", None), ("int4", "int8"), ("fp8_hybrid", "bf16"), ("mxfp8", "bf16"), ("llm_int8", "bf16")]
LOW = pytest.mark.parametrize(("low", "recovery"), PATHS, ids=[low for low, _ in PATHS])
RECAST = {"bf16": 0.0, "int4": FOUR_BITS, "fp8_hybrid": EIGHT_BITS, "mxfp8": EIGHT_BITS, "llm_int8": EIGHT_BITS}


class Experts(nn.Module):
    """A mixture of experts; `how` says in which of the usual ways its products are written."""

    def __init__(self, how: str = "loop") -> None:
        super().__init__()
        self.how = how
        self.up = nn.Parameter(torch.randn(E, D, H) / 8 if how in ("matmul", "bmm") else torch.randn(E, H, D) / 8)
        self.down = nn.Parameter(torch.randn(E, H, D) / 8 if how in ("matmul", "bmm") else torch.randn(E, D, H) / 8)
        self.down_bias = nn.Parameter(torch.randn(E, D) / 8)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        if self.how == "grouped":
            ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
            h = F.grouped_mm(x, self.up.transpose(-2, -1), offs=ends).relu()
            rows = torch.arange(E).repeat_interleave(torch.tensor(sizes))
            return torch._grouped_mm(h, mat2=self.down.transpose(-2, -1), offs=ends) + self.down_bias[rows]
        if self.how == "bmm":
            h = torch.bmm(x.view(E, -1, D), self.up).relu()
            return (torch.bmm(h, self.down) + self.down_bias[:, None]).flatten(0, 1)
        found = []
        for i, part in enumerate(x.split(sizes)):
            if len(part) and self.how == "loop":
                h = F.linear(part, self.up[torch.tensor(i)]).relu()
                found.append(F.linear(h, self.down[i], self.down_bias[i]))
            elif len(part):
                found.append((part @ self.up[i]).relu() @ self.down[i] + self.down_bias[i])
        return torch.cat(found)


class AsLinears(nn.Module):
    """The same with an nn.Linear for each matrix."""

    def __init__(self, of: Experts) -> None:
        super().__init__()
        turned = of.how in ("matmul", "bmm")
        self.fused = of.how == "loop"
        self.ups = nn.ModuleList(nn.Linear(D, H, bias=False) for _ in range(E))
        self.downs = nn.ModuleList(nn.Linear(H, D, bias=self.fused) for _ in range(E))
        self.bias = nn.Parameter(of.down_bias.detach().clone())
        for i in range(E):
            for linear, own in ((self.ups[i], of.up[i]), (self.downs[i], of.down[i])):
                linear.weight = nn.Parameter((own.mT if turned else own).detach().clone())
            if self.fused:
                self.downs[i].bias = nn.Parameter(of.down_bias[i].detach().clone())

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        found = []
        for i, part in enumerate(x.split(sizes)):
            if len(part):
                y = self.downs[i](self.ups[i](part).relu())
                found.append(y if self.fused else y + self.bias[i])
        return torch.cat(found)

    def gradients(self, turned: bool) -> list[Tensor]:
        def stacked(linears: Any) -> Tensor:
            grads = [torch.zeros_like(one.weight) if one.weight.grad is None else one.weight.grad for one in linears]
            return torch.stack([grad.mT if turned else grad for grad in grads])

        return [stacked(self.ups), stacked(self.downs)]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    before = list(adapters._ADAPTERS)
    yield
    adapters._ADAPTERS[:] = before


def experts(how: str = "loop") -> nn.ModuleDict:
    torch.manual_seed(0)
    turned = how in ("matmul", "bmm")
    register(Experts, up="eio" if turned else "eoi", down="eio" if turned else "eoi")
    return nn.ModuleDict({"experts": Experts(how)})


def inputs() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1))


def loss(module: nn.Module, sizes: list[int]) -> Tensor:
    found: Tensor = module(inputs(), sizes).square().mean()
    return found


def gradients(module: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    module.zero_grad()
    value = run()
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@LOW
@pytest.mark.parametrize("how", ["loop", "matmul", "bmm", "grouped"])
def test_experts_are_the_same_linears_one_by_one(how: str, low: str, recovery: str | None) -> None:
    model = experts(how)
    sizes = [6, 6, 6, 6] if how == "bmm" else [7, 0, 12, 5]
    reference = AsLinears(model["experts"])
    converted = convert(model, PathSpec.of(low, recovery, targets=["*"]))
    convert(reference, PathSpec.of(low, recovery, targets=["*"]))
    assert [o.operator_name for o in converted.operators][:3] == ["experts.0.up", "experts.0.down", "experts.1.up"]
    steps = []
    for recovered in (False, True)[: 1 + (recovery is not None)]:
        for net in (model, reference):
            for module in net.modules():
                for operator in getattr(module, "path_operators", [module] if hasattr(module, "recovering") else []):
                    operator.switch(recovered)
        ours = gradients(model, lambda: loss(model["experts"], sizes))
        theirs = gradients(reference, lambda: loss(reference, sizes))
        theirs = [theirs[0], *reference.gradients(how in ("matmul", "bmm"))]
        assert_close(ours[:3], theirs, terms=H, products=4, recast=RECAST[low])
        steps.append(ours[:3])
    assert all(apart(steps[0], other, H, 4, RECAST[low]) for other in steps[1:]), "recovery would pass for the low path"
    assert all(operator.read is not None for operator in converted.operators)


@pytest.mark.parametrize("how", ["loop", "matmul", "bmm", "grouped"])
def test_the_plain_module_is_what_is_left(how: str) -> None:
    model = experts(how)
    sizes = [6, 6, 6, 6] if how == "bmm" else [7, 0, 12, 5]
    plain, state = gradients(model, lambda: loss(model["experts"], sizes)), list(model.state_dict())
    converted = convert(model, PathSpec.of("bf16", "bf16", targets=["*"]))
    assert list(model.state_dict()) == state and len(list(model.modules())) == 2
    assert_close(gradients(model, lambda: loss(model["experts"], sizes)), plain, terms=H, products=4)
    converted.restore()
    converted = convert(model, PathSpec.of("fp8_hybrid", "bf16", targets=["*"]))
    assert apart(gradients(model, lambda: loss(model["experts"], sizes)), plain, terms=H, products=4)
    with converted.high_precision():
        assert_close(gradients(model, lambda: loss(model["experts"], sizes)), plain, terms=H, products=4)
    converted.restore()
    assert type(model["experts"]) is Experts and "path_operators" not in vars(model["experts"])
    assert equal(gradients(model, lambda: loss(model["experts"], sizes)), plain)


def test_some_experts_alone() -> None:
    model = experts("grouped")
    converted = convert(model, PathSpec.of("fp8_hybrid", "bf16", targets=["experts.2.*"]))
    assert [operator.operator_name for operator in converted.operators] == ["experts.2.up", "experts.2.down"]
    x, sizes = inputs(), [7, 0, 12, 5]
    low, plain = model["experts"](x, sizes), Experts.forward(model["experts"], x, sizes)
    for rows in (slice(7), slice(19, None)):
        assert_close(low[rows], plain[rows], terms=H, products=2)
    assert apart(low[7:19], plain[7:19], terms=H, products=2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_operators_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = experts()
    convert(model, PathSpec.of("fp8_hybrid", "bf16", targets=["*"]))
    other = copied(model)
    assert isinstance(other["experts"], WeightOwner) and type(other["experts"]) is type(model["experts"])
    assert {id(o.owner) for o in other["experts"].path_operators} == {id(other["experts"])}
    sizes = [7, 0, 12, 5]
    assert equal(*(gradients(net, lambda net=net: loss(net["experts"], sizes)) for net in (model, other)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_pass(reentrant: bool) -> None:
    model, sizes = experts(), [7, 0, 12, 5]
    site = "saved" if reentrant else "forward"
    convert(model, PathSpec.of("int4", "int8", targets=["*"], site=site, rounding="stochastic"), seed=3)
    other = copy.deepcopy(model)
    x = inputs().requires_grad_()
    plain = gradients(model, lambda: model["experts"](x, sizes).square().mean())
    again = gradients(other, lambda: checkpoint(other["experts"], x, sizes, use_reentrant=reentrant).square().mean())
    assert equal(plain, again)


def test_norms_are_those_of_slices() -> None:
    model, sizes = experts(), [7, 0, 12, 5]
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", targets=["*"], max_o=2, alpha=1.1, beta=1.1)
    assert controller.names[:3] == ["experts.0.up", "experts.0.down", "experts.1.up"]
    loss(model["experts"], sizes).backward()
    owner = model["experts"]
    _, norms, _ = controller.controller.measured.unit_norms()()
    weights = [(owner.up.grad[i], owner.down.grad[i], owner.down_bias.grad[i]) for i in range(E)]
    wanted = [norm for up, *down in weights for norm in (up.norm(), torch.stack([d.norm() for d in down]).norm())]
    torch.testing.assert_close(norms, torch.stack(wanted).double(), rtol=1e-6, atol=0)
    controller.step()
    controller.detach()
    assert type(owner) is Experts


@pytest.mark.parametrize(
    ("unit", "signal"), [("operator", "gnmr_delta"), ("expert", "recovery_gap"), ("gemm", "price"), ("expert", "price")]
)
def test_experts_train_under_a_controller(unit: str, signal: str) -> None:
    model = experts("grouped")
    usual = {"alpha": 1.001, "beta": 1.001, "delta": 3} if signal == "gnmr_delta" else {"routing": "ranked"}
    options: dict[str, Any] = {"low": "fp8_hybrid", "recovery": "bf16", "targets": ["*"], "max_o": 2, "unit": unit}
    controller = gnmr.attach(model, signal=signal, **options, **usual)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss(model["experts"], [7, 0, 12, 5]).backward()
        decision = controller.step()
        optimizer.step()
    assert decision.observed.any() and len(controller.active) <= 2


def test_price_is_that_of_the_same_linears() -> None:
    from gnmr.measure.price import measure_prices

    found = []
    model = experts()
    for net in (model["experts"], AsLinears(model["experts"])):
        holder = nn.ModuleDict({"experts": net})
        converted = convert(holder, PathSpec.of("fp8_hybrid", "bf16", targets=["*"]))
        meter = measure_prices(converted, tokens=1)
        meter.loss_tokens = 24  # no operator here reads all tokens
        loss(net, [7, 0, 12, 5]).backward()
        price = meter.by_operator()
        found.append({name: sorted(values.tolist()) for name, values in price.items()})
        converted.restore()
    for name, values in found[0].items():
        assert values == pytest.approx(found[1][name], rel=1e-9), name
    assert min(found[0]["wgrad"][2:]) > 0


class Scaled(nn.Module):
    """A linear of the user's own: its weight is inputs x outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(D, H) / 8)
        self.kernel_bias = nn.Parameter(torch.randn(H) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.addmm(self.kernel_bias, x.reshape(-1, D), self.kernel).view(*x.shape[:-1], H)


def test_a_layer_of_the_users_own() -> None:
    model = nn.Sequential(Scaled(), nn.ReLU(), nn.Linear(H, D))
    with pytest.raises(ValueError, match="no linear has such a name"):
        convert(model, PathSpec.of("fp8_hybrid", "bf16", targets=["0.kernel"]))
    register(Scaled, kernel="io")
    shapes = {name: (one.in_features, one.out_features, one.class_name) for name, one in operators_in(model).items()}
    assert shapes == {"0.kernel": (D, H, "Scaled"), "2": (H, D, "Linear")}
    linear = nn.Sequential(nn.Linear(D, H))
    linear[0].weight = nn.Parameter(model[0].kernel.detach().t().clone())
    linear[0].bias = nn.Parameter(model[0].kernel_bias.detach().clone())
    convert(linear, PathSpec.of("fp8_hybrid", "bf16", targets=["*"]))
    converted = convert(model, PathSpec.of("fp8_hybrid", "bf16", targets=["0.kernel"]))
    assert "Scaled 32 -> 64" in str(converted)
    x = inputs().view(2, -1, D)
    assert_close(model[0](x), 2 * linear(x), terms=D)


def test_a_forward_that_hides_its_products() -> None:
    class Hidden(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ti,io->to", x, self.kernel) + self.kernel_bias

    register(Hidden, {"kernel": "io"}, forward=lambda module, x: x @ module.kernel + module.kernel_bias)
    model = nn.Sequential(Hidden())
    converted = convert(model, PathSpec.of("fp8_hybrid", "bf16", targets=["*"]))
    model(inputs()).sum().backward()
    assert converted.operators[0].read is not None


@pytest.mark.parametrize(
    ("kind", "layouts", "match"),
    [
        (nn.Linear, {"weight": "oi"}, "kind="),
        (Scaled, {"kernel": "xy"}, "kernel=xy"),
        (Scaled, {}, "layouts"),
        (Scaled, {"weights": "io"}, "declares weights"),
        (Scaled, {"kernel": "eio"}, "0.kernel: its adapter says eio"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(kind: Any, layouts: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        register(kind, layouts)
        operators_in(nn.Sequential(Scaled()))


def test_codes_in_place_of_weights_are_refused() -> None:
    model = experts()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"weights='instead'.*part of a Experts"):
        convert(model, PathSpec.of("llm_int8", "bf16", targets=["*"], weights="instead"))
    assert type(model["experts"]) is Experts


def test_a_second_conversion_is_refused() -> None:
    model = experts()
    converted = convert(model, PathSpec.of("int4", "int8", targets=["experts.0.*"]))
    with pytest.raises(ValueError, match="has two paths already"):
        convert(model, PathSpec.of("int4", "int8", targets=["experts.1.*"]))
    assert isinstance(converted, ConvertedModel)


# ---- attention ----


@LOW
def test_self_attention_is_packed_linears(low: str, recovery: str | None) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"self_attn": nn.MultiheadAttention(D, 4, batch_first=True)})
    attention = model["self_attn"]
    packed = nn.ModuleDict({"in_proj": nn.Linear(D, 3 * D), "out_proj": nn.Linear(D, D)})
    packed["in_proj"].weight = nn.Parameter(attention.in_proj_weight.detach().clone())
    packed["in_proj"].bias = nn.Parameter(torch.randn(3 * D))
    packed["out_proj"].weight = nn.Parameter(attention.out_proj.weight.detach().clone())
    attention.in_proj_bias.data.copy_(packed["in_proj"].bias.detach())
    x = torch.randn(2, 12, D)

    def by_hand() -> Tensor:
        projected = packed["in_proj"](x.transpose(0, 1)).view(12, 2, 3, D)  # torch's attention runs sequence-first
        parts = projected.movedim(2, 0).contiguous()
        q, k, v = (part.view(12, 8, D // 4).transpose(0, 1).view(2, 4, 12, D // 4) for part in parts)
        y: Tensor = packed["out_proj"](F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(-1, D))
        return y

    packed["out_proj"].bias = nn.Parameter(attention.out_proj.bias.detach().clone())
    converted = convert(model, PathSpec.of(low, recovery, targets=["*"]))
    convert(packed, PathSpec.of(low, recovery, targets=["*"]))
    assert [o.operator_name for o in converted.operators] == ["self_attn.in_proj", "self_attn.out_proj"]
    ours = gradients(model, lambda: attention(x, x, x, need_weights=False)[0].square().mean())
    theirs = gradients(packed, lambda: by_hand().square().mean())
    linears = (packed["in_proj"], packed["out_proj"])
    theirs = [theirs[0], *(p.grad for linear in linears for p in (linear.weight, linear.bias))]
    assert_close(ours, theirs, terms=D, products=6, recast=RECAST[low])


@pytest.mark.parametrize("evaluating", [False, True])
def test_attention_is_torchs_own_on_bf16(evaluating: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(D, 4, H, 0.0, batch_first=True)
    x, memory = torch.randn(2, 12, D), torch.randn(2, 7, D)
    direction = torch.randn(2, 12, D)  # the squares of a normalized output add up to the same for any layer
    mask = nn.Transformer.generate_square_subsequent_mask(12)

    def passes() -> list[Tensor]:
        y = layer(x, memory, mask, tgt_is_causal=True)
        return [y.detach(), *gradients(layer, lambda: (y * direction).sum())]

    plain = passes()
    converted = convert(layer, PathSpec.of("bf16", None, targets=["*_proj"]))
    assert len(converted.operators) == 4
    layer.train(not evaluating)
    assert_close(passes(), plain, terms=H, products=12)
    converted.restore()
    low = convert(layer, PathSpec.of("fp8_hybrid", None, targets=["*_proj"]))
    assert apart(passes(), plain, terms=H, products=12)
    with torch.no_grad():  # torch's own fast path would read the weights without a call
        assert apart(layer(x, memory, mask), plain[0], terms=H, products=12)
    low.restore()


# ---- transformers ----

EXPERTS = ["*.experts.*"]
TOKENS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))


def mixture(kind: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    usual = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**usual, **experts, num_attention_heads=4, num_key_value_heads=2)
    found: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **more)
    return found.train()


MIXTURE: dict[str, Any] = {"terms": 96, "products": 24}


def of_tokens(model: nn.Module) -> list[Tensor]:
    return gradients(model, lambda: model(input_ids=TOKENS, labels=TOKENS).loss)


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts_of_transformers(kind: str) -> None:
    low = []
    for how in ("eager", "grouped_mm"):
        model = mixture(kind, experts_implementation=how)
        plain = of_tokens(model)
        converted = convert(model, PathSpec.of("bf16", None, targets=EXPERTS))
        assert_close(of_tokens(model), plain, **MIXTURE)
        converted.restore()
        convert(model, PathSpec.of("fp8_hybrid", None, targets=EXPERTS))
        low.append(of_tokens(model))
        assert apart(low[-1], plain, **MIXTURE)
    assert_close(*low, **MIXTURE, recast=EIGHT_BITS)


def test_experts_of_transformers_that_know_no_config() -> None:
    modeling = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    sizes = {"num_local_experts": E, "hidden_size": D, "moe_intermediate_size": H, "hidden_act": "silu"}
    model = nn.ModuleDict({"experts": modeling.Step3p7Experts(SimpleNamespace(**sizes))})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    chosen, weights = torch.arange(2 * T).view(T, 2) % 3, torch.rand(T, 2)
    plain = gradients(model, lambda: model["experts"](inputs(), chosen, weights).square().mean())
    for low in ("bf16", "fp8_hybrid"):
        converted = convert(model, PathSpec.of(low, None, targets=["*"]))
        found = gradients(model, lambda: model["experts"](inputs(), chosen, weights).square().mean())
        assert bool(apart(found, plain, terms=H, products=4)) is (low == "fp8_hybrid")
        assert all(operator.read is not None for operator in converted.operators)
        converted.restore()


@pytest.mark.parametrize("first", ["peft", "attach"])
def test_lora_over_experts_runs_as_the_sum_of_both(first: str) -> None:
    """peft's target_parameters: the low path casts W + BA, and A and B get the gradient of that."""
    peft = pytest.importorskip("peft")
    model = mixture("Mixtral", experts_implementation="eager")
    summed, sums = copy.deepcopy(model), {}
    spec = PathSpec.of("fp8_hybrid", "bf16", targets=EXPERTS)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_parameters=parameters, init_lora_weights=False)
    converted = None if first == "peft" else convert(model, spec)
    adapted = peft.get_peft_model(model, config)
    converted = converted or convert(adapted, spec)
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{w}_proj" for i in (0, 1) for e in range(4) for w in ("gate_up", "down")
    ]
    assert [operator.operator_name for operator in converted.operators] == names

    def keep(experts: nn.Module, _args: object) -> None:
        for name in ("gate_up_proj", "down_proj"):
            sums[experts, name] = getattr(experts, name)  # as peft's parametrization caches it
            sums[experts, name].retain_grad()

    owners = [module for module in adapted.modules() if isinstance(module, WeightOwner)]
    handles = [owner.register_forward_pre_hook(keep) for owner in owners]
    found = gradients(adapted, lambda: adapted(input_ids=TOKENS, labels=TOKENS).loss)
    assert len(found) == 1 + 2 * 2 * 2 and all(gradient.norm() > 0 for gradient in found)
    for layer, owner in zip(summed.model.layers, owners, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            setattr(layer.mlp.experts, name, nn.Parameter(sums[owner, name].detach().clone()))
    convert(summed, spec)
    ours, theirs = [of_tokens(summed)[0]], [found[0]]
    for layer, owner in zip(summed.model.layers, owners, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            ours.append(getattr(layer.mlp.experts, name).grad)
            theirs.append(sums[owner, name].grad)
    assert_close(ours, theirs, **MIXTURE, recast=EIGHT_BITS)
    for handle in handles:
        handle.remove()
    converted.restore()
    assert {type(owner).__name__ for owner in owners} == {"MixtralExperts"}
    assert not any(isinstance(module, WeightOwner) for module in adapted.modules())
    watching: dict[str, Any] = {"low": "fp8_hybrid", "recovery": "bf16", "max_o": 1, "observe": "adapter"}
    with pytest.raises(ValueError, match=r"unit '.*\.mlp\.experts\.0\.gate_up_proj': the model has no module"):
        gnmr.attach(adapted, **watching, targets=EXPERTS)
    controller = gnmr.attach(adapted, **watching, targets=EXPERTS, unit="layer")
    adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert controller.names == ["model.layers.0.mlp", "model.layers.1.mlp"] and controller.step().observed.all()


def test_experts_are_named_as_such_whatever_their_module_is_called() -> None:
    mlp = experts()["experts"]
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": mlp})])})
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", max_o=2, unit="expert", signal="price")
    assert controller.names == [f"layers.0.mlp.experts.{i}" for i in range(E)]
    loss(mlp, [7, 0, 12, 5]).backward()
    controller.step()
    assert len({unit.cost for unit in controller.units}) == 1, "one batch does not tell which the next tokens reach"
