"""Diagnose and audit on models whose GEMMs are not all linears that are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gnmr
from gnmr.conversion import adapters

K = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
X = [torch.randint(3, 320, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(2)]


def language_model(config: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**options))
    return model


def loss_by(model: nn.Module) -> Any:
    return lambda x: model(input_ids=x, labels=x).loss


def test_experts_in_one_tensor_are_named_with_their_share() -> None:
    model = language_model("MixtralConfig", **K, num_key_value_heads=2, num_local_experts=4)
    found = gnmr.diagnose(model, loss_by(model), X, recipe="nvfp4", targets=ATTENTION, confirm=1)
    said = "this covers 17.1% of the GEMMs' arithmetic; not: experts.gate_up_proj (MixtralExperts) 45.6%"
    assert said in found.verdict()
    assert found.tree()["covers"] == pytest.approx(0.171, abs=5e-4)
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", targets=ATTENTION, signal="always_low")
    for recipe in ("fp8_hybrid", None):
        audit = gnmr.audit(model, loss_by(model), X[0], recipe=recipe)
        (finding,) = audit.findings
        assert finding.kind == "not converted" and len(finding.where) == 2 * 4 * 2
        assert "model.layers.1.mlp.experts.3.gate_up_proj" in finding.where
        said = "25 linears, 8 in low precision, 9 of them measured in one batch; low precision covers 17.1%"
        assert audit.verdict().startswith(said) and "experts.gate_up_proj 45.6%" in audit.verdict()
    controller.detach()


@pytest.mark.parametrize("recipe", ["nvfp4", None])
def test_operators_within_modules_that_were_never_converted(recipe: str | None) -> None:
    model = language_model("GPT2Config", vocab_size=320, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    audit = gnmr.audit(model, loss_by(model), X[0], recipe=recipe)
    assert audit.verdict().startswith("9 linears, 0 in low precision, 1 of them measured in one batch: ")
    assert [(one.kind, len(one.where)) for one in audit.findings] == ([("not converted", 8)] if recipe else [])
    rows = {row.operator: row for row in audit.rows}
    assert rows["transformer.h.1.mlp.c_fc"].kind == "Conv1D" and rows["transformer.h.1.mlp.c_fc"].ran
    assert set(rows["transformer.h.0.attn.c_attn"].precision.values()) == {"fp32"}


@pytest.mark.parametrize("recipe", ["nvfp4", None])
def test_most_of_the_arithmetic_in_no_operator_is_not_sound(recipe: str | None) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(64, 64), "net": nn.LSTM(64, 64, 2), "head": nn.Linear(64, 64)})

    def loss(x: Tensor) -> Tensor:
        hidden = model["net"](model["table"](x % 64))[0]
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), x.flatten() % 64)

    (finding,) = [one for one in gnmr.audit(model, loss, X[0], recipe=recipe).findings if one.kind == "not covered"]
    assert "94.1% of the GEMMs' arithmetic is in no linear operator (LSTM)" in finding.problem


class Product(nn.Module):
    """A layer of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


@pytest.mark.parametrize("kind", ["own", "Conv1D", "attention"])
def test_a_model_without_an_nn_linear(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_ADAPTERS", [*adapters._ADAPTERS])
    adapters.register(Product, matrix="io")
    torch.manual_seed(0)
    layer: nn.Module = Product()
    if kind == "Conv1D":
        layer = pytest.importorskip("transformers").pytorch_utils.Conv1D(64, 64)
    elif kind == "attention":
        layer = nn.MultiheadAttention(64, 4, batch_first=True)
    model = nn.ModuleDict({"table": nn.Embedding(320, 64), "layer": layer})

    def loss(x: Tensor) -> Tensor:
        hidden = model["table"](x)
        found = layer(hidden, hidden, hidden)[0] if kind == "attention" else layer(hidden)
        return F.cross_entropy((found @ model["table"].weight.t()).flatten(0, 1), x.flatten())

    audit = gnmr.audit(model, loss, X[0], recipe="nvfp4")
    assert [one.kind for one in audit.findings] == ["not converted", "not covered"], "the table is the head too"
    found = gnmr.diagnose(model, loss, X, recipe="nvfp4", confirm=0)
    names = {"own": ["layer.matrix"], "Conv1D": ["layer"], "attention": ["layer.in_proj", "layer.out_proj"]}
    assert list(found.operators) == names[kind] == [row.operator for row in audit.rows]
    assert all(row.ran for row in audit.rows)


def test_what_is_read_without_a_call_is_a_finding_though_it_is_frozen() -> None:
    options = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 16}
    model = language_model("MambaConfig", **options)
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", signal="always_low")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("dt_proj" not in name)
    audit = gnmr.audit(model, loss_by(model), X[0], recipe="fp8_hybrid")
    controller.detach()
    never = [one for one in audit.findings if one.kind == "never ran"]
    assert len(never) == 1 and len(never[0].where) == 2 and "is never called" in never[0].problem


def test_rows_decide_on_time() -> None:
    """An encoder reads 50 times as many tokens as its decoder: a pin there costs 50 times as much."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 320, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0))
    batches = [torch.randint(3, 320, (1, 200), generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def loss(batch: Tensor) -> Tensor:
        found: Tensor = model(input_ids=batch, labels=batch[:, :4].clone()).loss
        return found

    found = gnmr.diagnose(
        model, loss, batches, recipe="nvfp4", confirm=0, targets=["SelfAttention.*", "EncDecAttention.*"]
    )
    encoder, decoder = (f"{side}.block.0.layer.0.SelfAttention.q" for side in ("encoder", "decoder"))
    assert found.work[encoder] == 50 * found.work[decoder] == 2 * 200 * 64 * 64
    time = {name: found.costs[name, "fprop"]["bf16"] for name in (encoder, decoder)}
    assert time[encoder] == 50 * time[decoder]
    share = found.coverage.share(found.operators)
    assert found.rest == pytest.approx(sum(found.work.values()) * (1 - share) / share, rel=1e-6)
    plan = found.plan()
    assert plan.gemm_times()[encoder, "fprop"]["nvfp4"] == found.work[encoder] and plan.rest == found.rest
    chosen = plan.choice()
    assert plan.pins and chosen.extra == pytest.approx(plan.extra, rel=1e-12), "operators that never ran take no time"
    assert chosen.after == pytest.approx(found.choice().after, rel=1e-4)


def test_the_rest_of_the_model_is_counted_in_all_batches() -> None:
    """A head that reads the last token of each text, and a tower that one batch lacks: the order changes nothing."""
    torch.manual_seed(0)
    names = {"up_proj": nn.Linear(64, 64), "lm_head": nn.Linear(64, 320), "tower": nn.Linear(64, 64)}
    model = nn.ModuleDict({"emb": nn.Embedding(320, 64), **names})
    batches = [torch.randint(1, 320, (2, n), generator=torch.Generator().manual_seed(n)) for n in (4, 32, 16)]
    batches[1][0, 0] = 0

    def run(x: Tensor) -> Tensor:
        hidden = model["emb"](x)
        hidden = hidden + model["up_proj"](hidden).relu()
        if x[0, 0] == 0:
            hidden = hidden + model["tower"](hidden)
        return model["lm_head"](hidden[:, -1:])

    found = [
        gnmr.diagnose(model, run, order, recipe="mxfp4", confirm=0, targets=["up_proj"], budget=0.5)
        for order in (batches, batches[::-1], batches[1:] + batches[:1])
    ]
    for one in found:
        assert one.rest == 3 * 2 * 64 * 320 + 2 * 32 * 64 * 64
        assert one.work == {"up_proj": 2 * (4 + 32 + 16) * 64 * 64}
        assert one.coverage == found[0].coverage and one.choice().extra == found[0].choice().extra
        assert one.coverage.share(one.operators) == one.work["up_proj"] / (one.work["up_proj"] + one.rest)


def test_a_plan_names_the_modules_that_hold_its_operators() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.ModuleDict({"emb": nn.Embedding(320, 64), "up_proj": conv1d(64, 64), "out_proj": nn.Linear(64, 64)})
    model["lm_head"] = nn.Linear(64, 320)

    def run(x: Tensor) -> Tensor:
        out: Tensor = model["lm_head"](model["out_proj"](model["up_proj"](model["emb"](x)).relu()))
        return out

    found = gnmr.diagnose(model, run, X, confirm=0, targets=["*_proj"])
    assert found.plan().modules == {"up_proj": "Conv1D"}


@pytest.mark.parametrize("what", ["diagnose", "audit"])
def test_reentrant_checkpointing_is_refused_in_one_line(what: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"emb": nn.Embedding(320, 64), "up_proj": nn.Linear(64, 64), "out_proj": nn.Linear(64, 64)})
    model["lm_head"] = nn.Linear(64, 320)

    def loss(x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: model["up_proj"](h).relu(), model["emb"](x), use_reentrant=True)
        return F.cross_entropy(model["lm_head"](model["out_proj"](hidden)).flatten(0, 1), x.flatten())

    def whole(x: Tensor) -> Tensor:
        """Reads whole numbers alone, so that nothing of the checkpoint has a gradient."""
        logits = checkpoint(lambda x: model["lm_head"](model["up_proj"](model["emb"](x))), x, use_reentrant=True)
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())

    for own, says in ((loss, "use use_reentrant=False"), (whole, "is no checkpointing reentrant")):
        with pytest.raises(ValueError, match=says):
            gnmr.diagnose(model, own, X) if what == "diagnose" else gnmr.audit(model, own, X[0])


class Shared(nn.Module):
    """Two blocks with the same weights, each with a branch of its own that the other does not call (Zamba2)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.ModuleDict({n: nn.Linear(32, 32) for n in ("up", "0", "1")}) for _ in range(2))
        for name, module in self.layers[0].items():
            self.layers[1][name].weight = module.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = h + torch.tanh(layer["up"](h) + layer[f"{i}"](h))
        return self.head(h)


def test_a_module_whose_weight_another_one_reads_never_ran() -> None:
    model = Shared()
    batches = [torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    found = gnmr.diagnose(model, model, batches, recipe="sim_e2m1", confirm=0)
    assert found.idle == dict.fromkeys(("layers.0.1", "layers.1.0"), "they never run")
    controller = gnmr.attach(model, low="fp8_hybrid", recovery="bf16", signal="always_low")
    audit = gnmr.audit(model, lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()), batches[0])
    controller.detach()
    (finding,) = [one for one in audit.findings if one.kind == "never ran"]
    assert finding.problem.startswith("did not run in this batch") and finding.where == ("layers.0.1", "layers.1.0")


def test_weights_that_are_read_around_all_modules_are_the_reason() -> None:
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32))

    def run(x: Tensor) -> Tensor:
        return F.linear(model[0](x), model[1].weight).tanh()

    with pytest.raises(ValueError, match=r"^run=.*without calling them \(F.linear, a fused kernel, a forward that was"):
        gnmr.diagnose(model, run, [torch.randint(32, (4, 8)) for _ in range(2)], recipe="sim_e2m1", targets=["1"])


class Stacked(nn.Module):
    """Four experts whose stacked weights run in one `vmap`, through the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: torch.stack([e.get_parameter(name) for e in self.experts]) for name in ("0.weight", "0.bias")}
        h = self.embed(x)
        run = torch.vmap(lambda own, h: torch.func.functional_call(self.experts[0], own, (h,)), in_dims=(0, None))
        return self.head(h + run(weights, h).mean(0))


class Reversible(torch.autograd.Function):
    """A layer that keeps nothing and runs again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + torch.tanh(layer(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (x + torch.tanh(ctx.layer(x))).backward(grad)
        return x.grad, None


class Reversed(nn.Module):
    """`below` whether a plain linear precedes the reversible layer, else it follows."""

    def __init__(self, below: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.below = nn.Embedding(32, 32), nn.Linear(32, 32), below
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, (first, second) = self.embed(x), self.layers
        h = Reversible.apply(first(h), second) if self.below else second(Reversible.apply(h, first))
        return self.head(h)


@pytest.mark.parametrize("what", ["diagnose", "audit"])
def test_experts_in_vmap_are_refused_in_one_line(what: str) -> None:
    model = Stacked()
    batches = [torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with pytest.raises(ValueError, match=r"^model=experts.0.0: runs in a transform of torch.func \(vmap,"):
        if what == "diagnose":
            gnmr.diagnose(model, model, batches, recipe="sim_e2m1", targets=["experts.*"])
        else:
            gnmr.audit(model, lambda x: model(x).square().mean(), batches[0])


@pytest.mark.parametrize("below", [False, True])
def test_reversible_layers_are_refused_with_their_reason(below: bool) -> None:
    model = Reversed(below)
    model.layers[0].weight.grad = torch.ones(32, 32)
    batches = [torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with pytest.raises(ValueError, match=rf"^run=.*: layers.{int(below)} runs inside a custom autograd function"):
        gnmr.diagnose(model, model, batches, recipe="sim_e2m1")
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert list(grads) == ["layers.0.weight"] and grads["layers.0.weight"].eq(1).all()


class Quantized(nn.Module):
    """A linear that is no `nn.Linear` (I-BERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_blocks_without_an_nn_linear_name_what_they_hold() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "layers": nn.ModuleList([Quantized()])})
    model["lm_head"] = nn.Linear(32, 64)
    with pytest.raises(
        ValueError, match=r"^targets: no linear is left .*lm_head.*can be declared, as Quantized of this"
    ):
        gnmr.diagnose(model, model, X, recipe="sim_e2m1")


def test_weights_that_nothing_brings_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8, device="meta"))
    with pytest.raises(ValueError, match=r"^model=Sequential: has parameters on the meta device; load its weights"):
        gnmr.diagnose(model, model, X)
