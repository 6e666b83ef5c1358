"""The audit on plain models and on conversions of ours: planted mistakes by their names, silence on sound models."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
from architectures import ARCHITECTURES
from audited import audited, batch_of, lines, net, said
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gnmr
from gnmr.conversion import ConvertedModel, PathLinear, PathSpec, convert
from gnmr.conversion.gemms import GemmContext
from gnmr.lab.fault_injection import Fault, Injector
from gnmr.names import OPERANDS

UP = "layers.1.up_proj"


def converted(
    low: str = "fp8_hybrid", dtype: torch.dtype = torch.bfloat16, **options: object
) -> tuple[nn.Module, ConvertedModel]:
    model = net(dtype)
    return model, convert(model, PathSpec(low=low, recovery=None, **options))


def planted(plan: ConvertedModel, fault: Fault, index: int = 2) -> PathLinear:
    operator = plan.operators[index]
    operator.fault = Injector(fault, None)
    operator.fault.arm(1)
    return operator


class Idle(nn.Module):
    """A linear whose weight is read without calling it, a branch that is not taken, two experts without a token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(96, 64)
        self.dt_proj, self.side_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(64, 64)}) for _ in range(4))
        self.lm_head = nn.Linear(64, 96, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        x = x + F.linear(x, self.dt_proj.weight, self.dt_proj.bias)
        x = x + self.experts[0]["up_proj"](x) + self.experts[1]["up_proj"](x)
        return self.lm_head(x)


def test_linears_that_do_not_run_are_named_and_not_counted() -> None:
    model = Idle()
    convert(model, PathSpec(low="sim_int8", recovery=None))
    found = audited(model)
    assert [(one.kind, one.where) for one in found.findings] == [
        ("never ran", ("dt_proj",)),
        ("never ran", ("side_proj",)),
    ]
    assert "its weight has a gradient, and it is never called" in found.findings[0].problem
    assert "did not run in this batch" in found.findings[1].problem
    head = "3 linears, 2 in low precision, 3 of them measured in one batch; "
    assert found.verdict() == (
        f"{head}dt_proj, side_proj, experts.2.up_proj and 1 more did not run; low precision covers 44.4% of the GEMMs' "
        "arithmetic; not: lm_head 33.3%, dt_proj (read without a call) 22.2%: 2 findings"
    )
    plain = audited(Idle())
    assert plain.sound and "dt_proj, side_proj, experts.2.up_proj and 1 more did not run" in plain.verdict()


# ---- sound models ----


@pytest.mark.parametrize(
    "low",
    ["fp8_hybrid", "nvfp4", "fp8_delayed"]
    + [pytest.param(low, marks=pytest.mark.slow) for low in ("mxfp8", "sim_int8", "mxfp4", "llm_int8", "nvfp4_no_rht")],
)
def test_a_sound_recipe_is_met_with_silence(low: str) -> None:
    found = audited(converted(low)[0], recipe=low, lists={"targets": ["*_proj"]})
    assert found.sound, lines(found)
    assert found.verdict() == (
        "7 linears, 6 in low precision, 7 of them measured in one batch; low precision covers 88.9% of the GEMMs' "
        "arithmetic; not: lm_head 11.1%: sound"
    )
    row = next(row for row in found.rows if row.operator == UP)
    for gemm, words in row.precision.items():
        assert "/" in words or low == "llm_int8", gemm
    for operands in row.measured.values():
        for snr, best in operands.values():
            assert best is None or snr == pytest.approx(best, abs=1) or math.isinf(best)


@pytest.mark.parametrize("site", ["saved", "forward"])
def test_a_format_is_measured_where_it_is_read(site: str) -> None:
    found = audited(converted("int4", site=site)[0])
    assert found.sound, lines(found)
    measured = next(row for row in found.rows if row.operator == UP).measured
    assert 10 < measured["wgrad"]["input"][0] < 25
    assert math.isinf(measured["fprop"]["input"][0]) == (site == "saved")
    assert math.isinf(measured["wgrad"]["grad_output"][0]) and math.isinf(measured["dgrad"]["weight"][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plain_model_reads_its_own_tensors(dtype: torch.dtype) -> None:
    found = audited(net(dtype, tied=True))
    assert found.sound, lines(found)
    assert {row.precision["fprop"] for row in found.rows} == {"bf16" if dtype == torch.bfloat16 else "fp32"}
    for row in found.rows:
        assert all(math.isinf(own[0]) for gemm in row.measured.values() for key, own in gemm.items() if key != "output")


def test_autocast_and_checkpointing_are_no_findings() -> None:
    model, _ = converted("fp8_hybrid", torch.float32)
    tokens = batch_of()

    def loss(_batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = model.embed_tokens(tokens[:, :-1])
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return F.cross_entropy(model.lm_head(x).float().flatten(0, 1), tokens[:, 1:].flatten())

    found = gnmr.audit(model, loss, tokens)
    assert found.sound, lines(found)
    measured = next(row for row in found.rows if row.operator == UP).measured
    assert set(measured) == {"fprop", "dgrad", "wgrad"}


# ---- planted mistakes ----


@pytest.mark.parametrize(
    ("low", "kind", "text"), [("fp8_hybrid", "scale_down", "0.5 times"), ("sim_int8", "scale_up", "2 times")]
)
def test_a_scale_that_is_wrong_by_two(low: str, kind: str, text: str) -> None:
    model, plan = converted(low)
    planted(plan, Fault(kind, 2.0))
    found = audited(model)
    assert {finding.kind for finding in found.findings} == {"scale"}, lines(found)
    assert found.findings[0].where == (f"{UP} fprop input", f"{UP} wgrad input")
    assert f"cast under {text} the right scale" in found.findings[0].problem
    assert ("saturate" in found.findings[0].problem) == (kind == "scale_down")


@pytest.mark.parametrize(
    ("low", "operand", "change", "kind", "what"),
    [
        *(("mxfp8", own, lambda x, cast: cast(x) * 2, "scale", "reads 2 times the tensor") for own in OPERANDS[:3]),
        ("nvfp4_no_rht", "grad_output", lambda x, cast: x, "never quantized", "infinite dB"),
        ("fp8_hybrid", "input", lambda x, cast: cast(x.clamp(-1.5, 1.5)), "saturated", "are beyond 1.5, the largest"),
    ],
)
def test_a_cast_that_is_not_what_it_says(
    low: str,
    operand: str,
    change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor],
    kind: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = converted(low)
    sound = GemmContext.cast

    def broken(self: GemmContext, own: str, x: Tensor, cast: object, *rest: object, **more: object) -> Tensor:
        def right(given: Tensor) -> Tensor:
            return sound(self, own, given, cast, *rest, **more)

        return change(x, right) if (self.name, own) == (UP, operand) and cast is not None else right(x)

    monkeypatch.setattr(GemmContext, "cast", broken)
    found = audited(model)
    assert {finding.kind for finding in found.findings} == {kind} and what in lines(found), lines(found)
    assert all(where.startswith(UP) and where.endswith(operand) for one in found.findings for where in one.where)


@pytest.mark.parametrize(
    ("low", "fault", "kind"),
    [("mxfp8", Fault("nan", rows_frac=0.01), "not finite"), ("fp8_hybrid", Fault("noise", 4.0), "noise")],
)
def test_a_cast_that_is_not_finite_and_noise_that_nothing_explains(low: str, fault: Fault, kind: str) -> None:
    model, plan = converted(low)
    planted(plan, fault)
    assert (kind, f"{UP} fprop input") in said(audited(model))


def test_an_outlier_channel_has_its_number() -> None:
    model, _ = converted("sim_int8", torch.float32)
    with torch.no_grad():
        model.layers[1].norm.weight[23] = 500
        model.layers[1].up_proj.weight[:, 23] *= 1e-3  # what training does about it
    found = audited(model)
    one = next(finding for finding in found.findings if f"{UP} fprop input" in finding.where)
    assert one.kind == "outlier" and re.match(
        r"channel 23 is \d+ times as large as the median channel: beside it the other channels have [\d.]+ dB, without "
        r"it they would have [\d.]+ dB$",
        one.problem,
    ), lines(found)
    clean, _ = converted("sim_int8", torch.float32)
    assert audited(clean).sound


def test_inputs_that_have_grown_saturate_under_a_delayed_scale() -> None:
    model, plan = converted("fp8_delayed")
    tokens = batch_of()
    F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    plan.end_step()
    assert audited(model).sound, "what has not grown does not saturate"
    with torch.no_grad():
        model.layers[1].norm.weight.mul_(8)
    found = audited(model)
    one = next(finding for finding in found.findings if f"{UP} fprop input" in finding.where)
    assert one.kind == "saturated" and "delayed scale" in one.problem and "0.12" in one.problem, lines(found)
    assert "of its elements saturate" in one.problem


def test_a_cast_that_nobody_declared() -> None:
    model = net()
    linear = model.layers[2].down_proj
    linear.forward = lambda x: F.linear(x, linear.weight.to(torch.float8_e4m3fn).to(x.dtype))
    found = audited(model)
    assert said(found) == [("undeclared cast", "layers.2.down_proj fprop weight")], lines(found)
    assert found.findings[0].where[1] == "layers.2.down_proj dgrad weight" and "dB, and nothing says" in lines(found)


@pytest.mark.parametrize("declared", [True, False])
def test_an_output_that_is_scaled_twice(declared: bool) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.linear(x, self.weight)

    model = converted()[0] if declared else net()
    linear = model.layers[0].up_proj
    if declared:
        plain = linear.forward
        linear.forward = lambda x: plain(x) * 2
    else:
        linear.__class__ = Twice
    found = audited(model)
    assert ("output", "layers.0.up_proj fprop output") in said(found) and "2 times it" in lines(found)


def test_a_class_of_its_own_may_do_more_than_its_product() -> None:
    architecture = ARCHITECTURES["llama4"]()  # its router is an nn.Linear that returns scores and logits
    found = gnmr.audit(architecture.model, architecture.loss, architecture.batch)
    assert found.sound, lines(found)
    row = next(row for row in found.rows if row.operator.endswith("router"))
    assert row.measured["fprop"]["weight"][0] == float("inf")


def test_a_recipe_that_is_not_in_force_and_another_one() -> None:
    found = audited(net(), recipe="fp8_hybrid")
    assert [f.kind for f in found.findings] == ["not converted"] and "no linear is in low precision" in lines(found)
    assert len(found.findings[0].where) == 6, "the head is no part of it"
    found = audited(converted("fp8_hybrid")[0], recipe="mxfp8")
    assert {f.kind for f in found.findings} == {"another recipe"} and len(found.findings) == 3
    assert "fprop is in e4m3/tensor x e4m3/tensor, and recipe=mxfp8 has it in e4m3/mx x e4m3/mx" in lines(found)


def test_one_operator_that_was_left_out() -> None:
    model = net(blocks=5)
    convert(
        model,
        PathSpec(low="mxfp8", recovery=None, targets=[f"layers.{i}.*" for i in (0, 1, 2, 4)] + ["layers.3.up_proj"]),
    )
    found = audited(model)
    assert said(found) == [("odd one out", "layers.3.down_proj")] and "the 4 others of its kind" in lines(found)
    model = net(blocks=5)
    convert(model, PathSpec(low="mxfp8", recovery=None, targets=[f"layers.{i}.*" for i in (1, 2, 3)]))
    assert audited(model).sound, "whole blocks in 16 bits are somebody's choice"


def test_a_parameter_of_one_byte() -> None:
    model = net()
    model.layers[0].norm.register_parameter(
        "shift", nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False)
    )
    assert said(audited(model)) == [("parameter", "layers.0.norm.shift")]


# ---- the model afterwards, and mistakes ----


def test_the_model_is_as_it_was() -> None:
    model, plan = converted("nvfp4")
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, drawn, hooks = plan.state_dict(), torch.get_rng_state(), [len(m._forward_hooks) for m in model.modules()]
    assert audited(model).sound
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert model.training and torch.equal(torch.get_rng_state(), drawn)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    for key, value in plan.state_dict().items():
        same = torch.equal(value, state[key]) if isinstance(value, Tensor) else value == state[key]
        assert same, key
    with pytest.raises(RuntimeError, match="boom"):
        gnmr.audit(model, lambda _: (_ for _ in ()).throw(RuntimeError("boom")), None)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks and model.training


def reentrant() -> object:
    model = net()
    return gnmr.audit(
        model, lambda x: checkpoint(model.layers[0], x, use_reentrant=True).sum(), model.embed_tokens(batch_of())
    )


@torch.inference_mode()
def in_inference_mode() -> object:
    return audited(net())


def made_in_inference_mode() -> object:
    with torch.inference_mode():
        model = net()
    assert audited(copy.deepcopy(model)).sound, "as the message advises"
    with pytest.raises(ValueError, match="was made or loaded in"):
        gnmr.diagnose(model, model, [batch_of()], recipe="mxfp8")
    assert gnmr.audit(model).sound, "nothing is run"
    return audited(model)


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (made_in_inference_mode, "^model=Net: was made or loaded in torch.inference_mode.*use copy.deepcopy"),
        (in_inference_mode, "^model=Net: has no gradients in inference mode; leave the mode"),
        (reentrant, "^model: its activation checkpointing is reentrant; use use_reentrant=False"),
        (lambda: audited(net(), lists={"filter_fqn": ["a"]}), "^lists=filter_fqn: .*filter_fqns"),
        (lambda: audited(net(), recipe="fp8_hybird"), "^recipe=fp8_hybird: is not a recipe: did you mean fp8_hybrid"),
        (lambda: gnmr.audit(net(), lambda _: 3.0, None), "^loss_of_batch=float: must be one number with a gradient"),
        (lambda: gnmr.audit(net(), lambda _: torch.ones(()), None), "a tensor without gradient"),
        (lambda: gnmr.audit(nn.LayerNorm(4)), "has no linear"),
        (lambda: gnmr.audit(3), "must be an nn.Module"),
    ],
)
def test_a_mistake_is_one_line(ask: Callable[[], object], line: str) -> None:
    with pytest.raises(ValueError, match=line) as told:
        ask()
    assert "\n" not in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"signal": "price"}, {"signal": "recovery_gap"}, {"observe": "input_grad"}])
def test_in_the_midst_of_training_under_a_controller_it_changes_nothing(more: dict[str, str]) -> None:
    def trained(audits: bool) -> list[float]:
        model = net()
        numbers = {} if "signal" in more else {"alpha": 1.01, "beta": 1.0}
        controller = gnmr.attach(model, low="nvfp4", recovery="mxfp8", max_o=2, **numbers, **more)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, tokens = [], batch_of()
        for _ in range(4):
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if audits and "observe" not in more:
                assert audited(model).sound
            controller.step()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if audits:
                assert audited(model).sound
                controller.discard()
        return [*losses, *(float(parameter.sum()) for parameter in model.parameters())]

    assert trained(False) == trained(True)


def test_transformer_engine_is_judged_by_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear(nn.Module):
        """As far as an audit sees one: its GEMMs run in kernels of its own, here a cast and an einsum."""

        def __init__(self, plain: nn.Linear, low: bool) -> None:
            super().__init__()
            self.weight, self.low = plain.weight, low

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.to(torch.float8_e4m3fn).to(x.dtype) if self.low else self.weight
            return (x.unsqueeze(-2) * weight).sum(-1)

    monkeypatch.setattr(Linear, "__module__", "transformer_engine.pytorch.module.linear")
    model = net()
    for block in model.layers:
        block.up_proj = Linear(block.up_proj, low=True)
    model.lm_head = Linear(model.lm_head, low=False)
    found = audited(model)
    assert found.sound, lines(found)
    rows = {row.operator: row for row in found.rows}
    assert rows[UP].kind == "Transformer Engine" and rows[UP].precision["fprop"] == "not said"
    assert 20 < rows[UP].measured["fprop"]["output"][0] < 40 and "judged by its output" in rows[UP].note
    assert rows["lm_head"].measured["fprop"]["output"][0] > 45
    model.lm_head.low = True
    assert said(audited(model)) == [("head", "lm_head")]
    found = audited(model, lists={"filter_fqns": ["lm_head", UP, "down_proj"]})
    assert [finding.kind for finding in found.findings] == ["not applied", "not applied", "head"], lines(found)


# ---- weights that a class of another library keeps or makes ----


class Codes(Tensor):
    """A weight of INT8 codes and a scale, as libraries for inference keep it; `refuses`: it never gives its values."""

    refuses = False

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., object], types: object, args: tuple = (), kwargs: object = None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.t.default) or cls.refuses:
            raise NotImplementedError(func)
        plain = [arg.codes.to(arg.scale.dtype) * arg.scale if isinstance(arg, Codes) else arg for arg in args]
        return func(*plain)


class DynamicCodes(Codes):
    """Also casts the input to INT8, and scales the sums of the codes' products."""

    refuses = True

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight = args[:2]
        step = x.abs().amax(-1, keepdim=True) / 127
        return ((x / step).round() @ weight.codes.to(x.dtype).t()) * step * weight.scale.t()


class Rounded(nn.Linear):
    """Casts its weight to INT8 in each pass, as quantization-aware training does."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.abs().amax(1, keepdim=True) / 127
        return F.linear(x, self.weight + ((self.weight / step).round() * step - self.weight).detach())


class Packed(nn.Linear):
    """Keeps two 4-bit codes in a byte, in a tensor of another shape."""

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([self.weight & 15, self.weight >> 4], -1).reshape(self.out_features, -1)
        return F.linear(x, (codes.to(x.dtype) - 8) * 0.01)


def keep_weight_as(linear: nn.Linear, how: type) -> None:
    weight = linear.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    if issubclass(how, Codes):
        codes = (weight / scale).round().to(torch.int8)
        linear.weight = nn.Parameter(how(codes, scale), requires_grad=False)
    else:
        linear.__class__ = how
    if how is Packed:
        packed = torch.randint(0, 256, (weight.numel() // 2, 1), dtype=torch.uint8)
        linear.weight = nn.Parameter(packed, requires_grad=False)


@pytest.mark.parametrize("recipe", [None, "sim_int8"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (Codes, "not said, int8 weight"),
        (DynamicCodes, "not said, int8 weight"),
        (Rounded, "not said"),
        (Packed, "not said, uint8 weight"),
    ],
)
def test_a_weight_of_another_class_is_never_called_16_bits(how: type, words: str, recipe: str | None) -> None:
    model = net(torch.float32)
    for block in model.layers:
        keep_weight_as(block.up_proj, how)
        keep_weight_as(block.down_proj, how)
    found = audited(model, recipe=recipe)
    assert found.sound, lines(found)
    assert found.verdict().startswith("7 linears, 6 in low precision"), found.verdict()
    row = next(row for row in found.rows if row.operator == UP)
    assert row.low and row.precision["fprop"] == words
    if how is Rounded:
        assert 35 < row.measured["fprop"]["weight"][0] < 50, "what the GEMM reads against the weight itself"


class CodesAlone(nn.Module):
    """As the linears of HQQ, GPTQ and AWQ: no nn.Linear, and no attribute called weight."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.randint(0, 2**31, (self.in_features * bits // 32, self.out_features), dtype=torch.int32)
        self.register_buffer("qweight", packed)

    def forward(self, x: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 32 * len(self.qweight) // self.in_features)
        codes = (self.qweight.unsqueeze(1) >> shifts.view(-1, 1)) & 1
        return x @ (codes.reshape(self.in_features, -1).to(x.dtype) - 0.5) * 0.01


class Scaled(nn.Module):
    """Has widths and a mask, and no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 64
        self.scale = nn.Parameter(torch.ones(64))
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_linears_of_other_classes_that_keep_codes_are_named(bits: int) -> None:
    model = net(torch.float32)
    for block in model.layers:
        block.up_proj = CodesAlone(block.up_proj, bits)
        block.norm = Scaled()
    found = audited(model)
    assert said(found) == [("not examined", "layers.0.up_proj")], lines(found)
    assert len(found.findings[0].where) == 3 and "is a CodesAlone, no nn.Linear" in lines(found)
    assert said(gnmr.audit(model)) == said(found), "also before anything runs"
    with pytest.raises(ValueError, match="has no linear that an audit can read, only CodesAlone"):
        gnmr.audit(model.layers[0].up_proj)


def test_a_weight_in_few_bits_is_low_before_anything_runs() -> None:
    model = net(torch.float32)
    keep_weight_as(model.lm_head, Codes)
    found = gnmr.audit(model)
    assert said(found) == [("head", "lm_head")] and "low precision (Codes)" in lines(found)


def test_a_weight_that_refuses_to_be_converted_is_read_through_its_product() -> None:
    model = net(torch.float32)
    keep_weight_as(model.layers[0].up_proj, Packed)
    keep_weight_as(model.layers[1].up_proj, DynamicCodes)
    rows = {row.operator: row for row in audited(model).rows}
    assert 35 < rows[UP].measured["fprop"]["output"][0] < 50, "the cast of the input is what is missing"
    assert rows["layers.0.up_proj"].measured == {}
    assert rows["layers.0.up_proj"].note.startswith("nothing of it could be measured")


def test_weights_that_are_made_in_each_pass_are_not_called_low() -> None:
    model = net(torch.float32)
    nn.utils.parametrizations.weight_norm(model.layers[0].up_proj)
    prune.l1_unstructured(model.layers[1].up_proj, "weight", 0.5)
    found = audited(model, lists={"filter_fqns": ["proj", "lm_head"]})
    assert found.sound and "7 linears, 0 in low precision" in found.verdict(), lines(found)
    assert found.rows[0].precision["fprop"] == "not said", "a parametrization may also round"
    assert found.rows[0].measured["dgrad"]["weight"][0] == math.inf


# ---- products beside a linear's own ----


class Beside(nn.Module):
    """A frozen linear beside a product of the same input, as peft's LoHa and LoKr have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.q_proj = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)
        self.extra = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        extra = F.linear(x, self.extra)  # before the linear, so that its gradient comes after the linear's
        return torch.tanh(self.q_proj(x)) * extra


class Adapted(nn.Linear):
    """A linear with a second product of the same input and shape within its own forward, before or after its own."""

    def __init__(self, first: bool) -> None:
        super().__init__(32, 32)
        self.extra, self.extra_first = nn.Parameter(torch.randn(32, 32) / 50), first

    def forward(self, x: Tensor) -> Tensor:
        products = [F.linear(x, weight) for weight in ((self.extra, self.weight)[:: 1 if self.extra_first else -1])]
        return products[0] + products[1] + self.bias


@pytest.mark.parametrize("low", [None, "mxfp8"])
def test_a_product_of_the_same_input_is_not_taken_for_a_gemm_of_the_linear(low: str | None) -> None:
    model = Beside()
    if low:
        convert(model, PathSpec(low=low, recovery=None, targets=["first", "q_proj"]))
    found = gnmr.audit(model, lambda x: model(x).square().mean(), torch.randn(64, 32))
    assert {finding.kind for finding in found.findings} <= {"not covered"}, lines(found)
    assert set(found.rows[1].measured) == {"fprop", "dgrad"}, "a frozen weight has no wgrad"


@pytest.mark.parametrize("first", [True, False])
def test_of_two_products_the_nearer_one_is_the_gemm(first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Adapted(first))
    found = gnmr.audit(model, lambda x: model(x).square().mean(), torch.randn(64, 32))
    assert found.sound, lines(found)
    measured = found.rows[1].measured
    assert measured["fprop"]["weight"][0] == measured["dgrad"]["weight"][0] == math.inf
    assert not found.rows[1].low


class Shell(nn.Linear):
    """A linear around the linear that holds its weight, as some of peft's adapters are."""

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.base_layer, self.weight, self.bias = base, base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


def test_products_belong_to_the_innermost_linear() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert(model, PathSpec(low="mxfp8", recovery=None))
    model[1] = Shell(model[1])  # after the conversion
    found = gnmr.audit(model, lambda x: model(x).square().mean(), torch.randn(64, 32))
    row = next(row for row in found.rows if row.kind == "gnmr" and row.operator.startswith("1"))
    assert set(row.measured) == {"fprop", "dgrad", "wgrad"} and row.measured["dgrad"]["weight"][0] < 40, found.rows


def test_autocast_of_a_class_that_is_judged_by_its_output_is_not_low(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x, weight = x.bfloat16(), self.weight.bfloat16()
            return torch.einsum("abi,oi->abo", x.float(), weight.float()).bfloat16()

    model = net(torch.float32)
    model.lm_head.__class__ = Linear
    monkeypatch.setattr(
        "gnmr.auditing.seen_operands._factors", lambda *_: None
    )  # as if the product ran in another kernel
    row = audited(model).rows[-1]
    assert row.operator == "lm_head" and not row.low and row.measured["fprop"]["output"][0] > 55, row


# ---- selective checkpointing ----


def saved_by_name(_context: object, op: object, *_args: object, **_options: object) -> CheckpointPolicy:
    products = {"aten::mm", "aten::bmm", "aten::addmm"}
    return CheckpointPolicy.MUST_SAVE if op._schema.name in products else CheckpointPolicy.PREFER_RECOMPUTE


def saved_always(*_args: object, **_options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("low", [None, "mxfp8"])
@pytest.mark.parametrize("policy", [None, saved_by_name, saved_always])
def test_checkpointing_changes_nothing(policy: Callable[..., CheckpointPolicy] | None, low: str | None) -> None:
    if policy is saved_always and low:
        pytest.skip("the linear's casts write into buffers that such a policy saves")
    torch.manual_seed(0)
    model = nn.ModuleDict({"up_proj": nn.Linear(32, 64), "down_proj": nn.Linear(64, 32), "o_proj": nn.Linear(32, 32)})
    if low:
        convert(model, PathSpec(low=low, recovery=None))
    more = {} if policy is None else {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}

    def forward(x: Tensor) -> Tensor:
        return model.o_proj(model.down_proj(torch.tanh(model.up_proj(x))))

    def loss(x: Tensor) -> Tensor:
        return checkpoint(forward, x, use_reentrant=False, **more).square().mean()

    x = torch.randn(17, 32, requires_grad=True)
    found = gnmr.audit(model, loss, x)
    assert found.sound, lines(found)
    assert found.rows == gnmr.audit(model, lambda x: forward(x).square().mean(), x).rows


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["LoHaConfig", "LoKrConfig", "BOFTConfig", "FourierFTConfig", "target_parameters"])
def test_adapters_of_peft_are_no_findings(adapter: str) -> None:
    peft, llm = pytest.importorskip("peft"), pytest.importorskip("transformers")
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    if adapter == "target_parameters":
        config = llm.MixtralConfig(vocab_size=96, num_key_value_heads=4, num_local_experts=4, **widths)
        model, places = llm.MixtralForCausalLM(config), ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        options = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=places)
    else:
        model = llm.LlamaForCausalLM(llm.LlamaConfig(vocab_size=96, num_key_value_heads=4, **widths))
        sizes = {"BOFTConfig": {"boft_block_size": 8}, "FourierFTConfig": {"n_frequency": 20}}
        options = getattr(peft, adapter)(target_modules=["q_proj", "up_proj"], **sizes.get(adapter, {"r": 4}))
    convert(model, PathSpec(low="mxfp8", recovery=None))
    model = peft.get_peft_model(model, options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    found = audited(model)
    assert {finding.kind for finding in found.findings} <= {"not covered"}, lines(found)
    if adapter == "target_parameters":
        assert found.coverage.share([row.operator for row in found.rows if row.low]) > 0.5, found.verdict()
