"""The doctor on small models: its numbers by hand, the model as it was, what it recommends, what it refuses."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr
from gnmr.conversion import PathSpec, convert
from gnmr.errors import UserError
from gnmr.formats import Recipe
from gnmr.formats.recipes import RECIPES, Gemm
from gnmr.measure.gemm_costs import PathCost
from gnmr.measure.price import measure_prices
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.page import page, totals
from gnmr.plan.pin_plan import read_plan

Batch = tuple[Tensor, Tensor]
NAMES = ["0", "3", "5"]
TOKENS = 256


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.SiLU(), nn.Dropout(0.5), nn.Linear(64, 32, bias=False), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 16))
    with torch.no_grad():
        model[5].weight *= 8
    return model


def batches_of(number: int, seed: int = 1) -> list[Batch]:
    """Targets as the model itself draws them: any error of its output costs something."""
    draw, model = torch.Generator().manual_seed(seed), model_of().eval()
    found = []
    for _ in range(number):
        x = torch.randn(TOKENS, 32, generator=draw)
        x[:, 3] *= 8
        with torch.no_grad():
            targets = torch.multinomial(model(x).softmax(-1), 1, generator=draw)[:, 0]
        found.append((x, targets))
    return found


def loss_by(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def rose(low: float, error: float) -> PathCost:
    """Of six batches whose loss was 2 and is `low`."""
    return PathCost(6, None, float("nan"), 0, 2.0, low, error)


def diagnosed(**options: Any) -> Diagnosis:
    model = model_of()
    return gnmr.diagnose(model, loss_by(model), batches_of(6), **{"recipe": "sim_e2m1", "budget": 0.6} | options)


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnosed(held_out=batches_of(3, seed=2))


def test_its_numbers_are_those_of_the_price_meter_and_of_plain_passes(found: Diagnosis) -> None:
    model, batches = model_of().eval(), batches_of(6)
    loss = loss_by(model)
    high = [float(loss(batch).detach()) for batch in batches]
    plan = convert(model, PathSpec(low="sim_e2m1", recovery="bf16", targets=["*"]))
    low = [float(loss(batch).detach()) for batch in batches]
    meter = measure_prices(plan, tokens=1)
    sums: dict[str, Tensor] = {}
    for operator in plan.operators:
        operator.switch(True)
    norms = torch.zeros(3)
    for batch in batches:
        meter.reset()
        model.zero_grad()
        loss(batch).backward()
        norms += torch.stack([operator.weight.grad.norm() for operator in plan.operators])
        for name, value in meter.by_operator().items():
            sums[name] = sums.get(name, 0) + value / len(batches)
    for gemm in ("fprop", "dgrad", "wgrad"):
        rows = [row for row in found.rows if row.gemm == gemm]
        assert [row.operator for row in rows] == NAMES
        assert [row.value for row in rows] == pytest.approx(sums[gemm].tolist())
        assert all(row.interval[0] < row.value < row.interval[1] for row in rows)
        by_operand = [row.bias if gemm != "fprop" else row.input for row in rows]
        assert by_operand == pytest.approx(sums["fprop_input" if gemm == "fprop" else f"{gemm}_bias"].tolist())
    assert found.total == pytest.approx(float(sums["fprop"].sum()))
    measured = found.measured
    assert (measured.high, measured.low) == pytest.approx((np.mean(high), np.mean(low)))
    apart = np.array(low) - np.array(high)
    assert measured.error == pytest.approx(apart.std(ddof=1) / 6**0.5)
    assert measured.noise == pytest.approx(2.5706 * measured.error, rel=1e-4), "t with five degrees of freedom"
    assert found.scores["gradient norm"] == pytest.approx(dict(zip(NAMES, (norms / 6).tolist(), strict=True)))
    assert all(value > 0 for value in found.scores["mse"].values())


@pytest.mark.parametrize("fails", [False, True], ids=["done", "error"])
def test_the_model_is_as_it_was_to_the_bit(fails: bool) -> None:
    model = model_of()
    model[2].eval()  # one module in another mode than the others
    model[3].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 3.0)
    stepped: list[Tensor] = []
    model[5].weight.register_post_accumulate_grad_hook(stepped.append)  # as an optimizer within backward
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    batches = batches_of(3)
    torch.manual_seed(7)
    drawn, state = torch.rand(3), torch.manual_seed(7).get_state()
    if fails:
        batches[2] = (batches[2][0], torch.full((TOKENS,), -100))
        with pytest.raises(ValueError, match=r"batch 3=nan: is not finite; has it any targets\?"):
            gnmr.diagnose(model, loss_by(model), batches, recipe="int4")
    else:
        gnmr.diagnose(model, loss_by(model), batches, recipe="int4")
    assert torch.equal(torch.random.get_rng_state(), state) and torch.equal(torch.rand(3), drawn)
    assert [type(model[int(name)]) for name in NAMES] == [nn.Linear] * 3 and not hasattr(model[0], "operator_name")
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True, True] and not stepped
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 3.0))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_plan_is_the_choice_and_what_it_leaves_is_measured(found: Diagnosis) -> None:
    choice = found.choice()
    plan = found.plan(provenance={"command": "here"})
    assert plan.pins == choice.pins and all(own.keys() == {"fprop"} for own in plan.pins.values())
    factor = found.measured.cost / found.total
    assert found.calibration == pytest.approx(factor)
    assert plan.expected == pytest.approx((found.measured.cost, factor * choice.after))
    assert (plan.low, plan.recovery, plan.budget, plan.extra) == ("sim_e2m1", "bf16", 0.6, choice.extra)
    assert plan.provenance["command"] == "here" and plan.provenance["loss"].startswith("+")
    assert plan.triggers["price"] == min(found.prices[name, "fprop"]["sim_e2m1"] for name in plan.pins)
    assert found.plan("+60%") == found.plan() and diagnosed(budget="60%").budget == 0.6
    assert found.plan(4.0).extra == pytest.approx(3.0), "every fprop on bf16, and nothing else has a price in nats"

    model, left = model_of().eval(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = convert(model, PathSpec(**plan.paths()))
    with torch.no_grad():
        for batch in batches_of(3, seed=2)[1 if found.selection else 0 :]:
            low = float(loss_by(model)(batch))
            with converted.high_precision():
                left.append(low - float(loss_by(model)(batch)))
    assert found.remaining["plan"].cost == pytest.approx(np.mean(left), abs=1e-6)


def test_guesses_spend_no_more_and_the_plan_leaves_less_by_price(found: Diagnosis) -> None:
    guesses, choice = found.alternatives, found.choice()
    rules = {"last", "first", "first_last", "random", "mse", "gradient norm"}
    assert set(guesses) == rules | {"mxfp8 alone", "bf16 alone"} == set(found.remaining) - {"plan"}
    for several in guesses.values():
        for one in several:
            assert one.extra <= 0.6 and one.after >= choice.after - 1e-12
    assert list(guesses["last"][0].pins) == ["3", "5"] and len(guesses["random"]) == 2
    assert found.remaining["last"].nats > 0 and found.remaining["last"].nats != found.remaining["first"].nats


def test_a_plan_goes_into_attach_and_back_into_diagnose(found: Diagnosis, tmp_path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(found.plan().text())
    plan = read_plan(file)
    assert plan.pins == found.plan().pins and json.loads(file.read_text())["expected"]["before"] > 0
    model = model_of()
    controller = gnmr.attach(model, plan=plan, max_o=1)
    pinned = {operator.operator_name: list(operator.pinned) for operator in controller.converted.operators}
    assert pinned == {name: list(plan.pins.get(name, ())) for name in NAMES}
    controller.detach()
    controller = gnmr.attach(model, plan=plan, signal="price", options={"every": 1})
    assert (
        controller.controller.signal.threshold == plan.triggers["price"] > 0 and controller.controller.signal.every == 1
    )
    controller.detach()
    under = gnmr.diagnose(model, loss_by(model), batches_of(6), plan=file)
    assert under.pins == plan.pins
    for row, before in zip(under.rows, found.rows, strict=True):
        spared = row.operator in plan.pins and row.gemm == "fprop"
        on = before.rescued.get(plan.pins.get(row.operator, {}).get("fprop", ""), before.value)
        assert row.value == pytest.approx(on) and (on < before.value) == spared
    assert under.total == pytest.approx(found.choice().after) and under.measured.low < found.measured.low
    assert under.verdict().startswith("under the plan sim_e2m1 costs ") and under.tree()["choices"] == {}
    with pytest.raises(ValueError, match=r"^plan: this is a diagnosis under a plan's pins"):
        under.plan()
    other = nn.Sequential(nn.Linear(32, 16))
    with pytest.raises(UserError, match=r"^plan: was made for another model \(3 operators, here 1; "):
        gnmr.diagnose(other, loss_by(other), batches_of(2), plan=plan)


def test_nothing_is_recommended_for_what_cannot_be_shown() -> None:
    found = diagnosed(recipe=Recipe.of("nearly", {"fprop": {"input": "e4m3/row"}, "wgrad": {"input": "int2/row"}}))
    quiet = rose(2.0001, 0.001)
    text = replace(found, measured=quiet).verdict()
    assert text.startswith("nothing has to be kept: nearly costs nothing here that 6 batches can show (+0.0001 ± 0.003")
    assert "by estimate" in text and found.total < 0.001
    noisy = replace(found, measured=rose(2.04, 0.1)).verdict()
    assert "can show (+0.04 ± 0.3 nats" in noisy and noisy.endswith("): more batches would tell")
    assert replace(found, measured=quiet).calibration is None
    assert found.plan().recipes == {
        "nearly": {"fprop": {"input": "e4m3/row"}, "dgrad": {}, "wgrad": {"input": "int2/row"}}
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody asked what runs it here
        gnmr.attach(model_of(), plan=found.plan(), max_o=1).detach()
    assert [row.gemm for row in found.worst("wgrad")] == ["wgrad"] * 3
    assert found.worst("wgrad")[0].value > 0.01
    assert all(row.value == 0 for row in found.worst("dgrad"))
    diverged = replace(found, measured=rose(float("inf"), float("nan"))).verdict()
    assert diverged.startswith("the loss is not finite under nearly (2.0000 on bf16); worst: fprop of ")


def test_what_is_shown_to_cost_little_is_not_kept(found: Diagnosis) -> None:
    for cost, little in ((0.0099, True), (0.0101, False)):
        one = replace(found, measured=rose(2.0 + cost, 0.001))
        assert one.little == little == one.verdict().startswith("nothing has to be kept: sim_e2m1 costs 0.0099 nats")
        assert ("GEMMs" in one.verdict()) != little
        assert ("; the plan, for +" in one.verdict()) == (" is optional: it " in one.verdict()) == little
        assert ('<p class="verdict">nothing has to be kept: ' in page(one, "", {})) == little
    under = replace(found, measured=rose(2.001, 0.0001), pins={"0": {"fprop": "bf16"}})
    assert under.verdict().startswith("nothing more has to be kept: under the plan sim_e2m1 costs 0.001 nats")


class Idle(nn.Module):
    """Linears that are read without being called, of a branch that is not taken, whose output is thrown away, and of a
    branch of some batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32)
        self.dt_proj, self.side_proj = nn.Linear(32, 32), nn.Linear(32, 256)
        self.lost_proj, self.some_proj = nn.Linear(32, 16), nn.Linear(32, 32)
        self.out_proj = nn.Linear(32, 50)  # an output head, for its width

    def forward(self, tokens_BT: Tensor) -> Tensor:
        h = self.embed(tokens_BT)
        h = h + self.down_proj(torch.tanh(self.up_proj(h)))
        h = h + F.linear(h, self.dt_proj.weight, self.dt_proj.bias)
        self.lost_proj(h)
        if tokens_BT[0, 0] % 2:
            h = h + self.some_proj(h)
        return F.linear(h, self.out_proj.weight, self.out_proj.bias)


def next_token(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def token_batches() -> list[Tensor]:
    drawn = torch.randint(50, (6, 4, 16), generator=torch.Generator().manual_seed(1))
    drawn[:, 0, 0] = torch.arange(6)
    return list(drawn)


def test_linears_that_never_run_are_named_and_left_out_of_all_shares(tmp_path) -> None:
    model, batches = Idle(), token_batches()
    options: dict[str, Any] = {"recipe": "sim_int4", "budget": 0.3, "held_out": batches[:2]}
    found = gnmr.diagnose(model, next_token(model), batches, **options)
    assert list(found.operators) == ["up_proj", "down_proj", "some_proj"] and len(found.rows) == 9
    reasons = {
        "dt_proj": "they never run (their weights are read without calling them, so no path is in force)",
        "side_proj": "they never run",
        "lost_proj": "the loss does not depend on what they give",
    }
    assert found.idle == reasons == found.tree()["idle"] and found.partly == {"some_proj": 3}
    for text in (found.verdict(), "; ".join(totals(found)), page(found, "", {})):
        assert all(name in text for name in (*reasons, "only in some of the batches ran some_proj"))
    plan = found.plan()
    every = sum(own["sim_int4"] for (_, gemm), own in found.costs.items() if gemm == "fprop")
    times = {name: found.costs[name, "fprop"] for name in plan.pins}
    spent = sum(times[name][own["fprop"]] - times[name]["sim_int4"] for name, own in plan.pins.items())
    assert plan.extra == pytest.approx(spent / every)
    assert plan.operators == found.operators and plan.targets == list(found.operators) and plan.pins
    file = tmp_path / "plan.json"
    file.write_text(plan.text())
    controller = gnmr.attach(model, plan=file, max_o=1)
    assert [operator.operator_name for operator in controller.converted.operators] == list(found.operators)
    controller.detach()
    under = gnmr.diagnose(model, next_token(model), batches, plan=file)
    assert not under.idle and under.partly == found.partly and under.total < found.total


def test_where_no_list_of_names_leaves_them_out_a_plan_holds_them_without_a_share() -> None:
    """`0` is the end of `more.0` too."""
    model = nn.ModuleDict({"0": nn.Linear(8, 8), "more": nn.ModuleList([nn.Linear(8, 64)])})
    batches = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = gnmr.diagnose(model, lambda x: model["0"](x).square().mean(), batches, recipe="sim_int4", budget=3.0)
    assert found.rescues == ("bf16",), "mxfp8 has no groups of 8"
    assert list(found.operators) == ["0"] and list(found.idle) == ["more.0"]
    plan = found.plan()
    assert plan.operators == {"0": (8, 8), "more.0": (8, 64)} and plan.extra == pytest.approx(3.0)
    assert plan.targets is None


def masked(model: nn.Module, reduction: str) -> Callable[[Batch], Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), torch.full_like(batch[1], -100), reduction=reduction)


ZERO, NO_TARGETS = (
    "every gradient that reaches .* is 0, so the loss is constant",
    r"is not finite; has it any targets\?$",
)
USELESS: dict[str, tuple[Callable[[nn.Module], Callable[[Batch], Tensor]], str]] = {
    "masked": (lambda model: masked(model, "sum"), ZERO),
    "zero": (lambda model: lambda batch: model(batch[0]).sum() * 0, ZERO),
    "itself": (lambda model: lambda batch: (model(batch[0]) - model(batch[0]).detach()).square().mean() + 3, ZERO),
    "shares": (lambda model: lambda batch: model(batch[0]).softmax(-1).sum(-1).mean(), ZERO),
    "mean of none": (lambda model: masked(model, "mean"), NO_TARGETS),
    "inf": (lambda model: lambda batch: loss_by(model)(batch) / 0, NO_TARGETS),
}


@pytest.mark.parametrize("what", USELESS)
def test_a_loss_that_is_constant_or_not_finite_is_refused(what: str) -> None:
    loss, line = USELESS[what]
    model = model_of().eval()
    with pytest.raises(ValueError, match=rf"^run of batch 1=[-\d.a-z]+: {line}"):
        gnmr.diagnose(model, loss(model), batches_of(2), recipe="sim_int4")
    with pytest.raises(ValueError, match=rf"^loss_of_batch=[-\d.a-z]+: {line}"):
        gnmr.audit(model, loss(model), batches_of(1)[0])


@pytest.mark.parametrize("name", ["3.weight", "0.bias"])
def test_weights_that_are_not_finite_are_named(name: str) -> None:
    model = model_of()
    with torch.no_grad():
        model.get_parameter(name)[0] = float("nan")
    number, of = (64, 2048) if name == "3.weight" else (1, 64)
    line = rf"^run of batch 1=nan: {number} of the {of} elements of {name} are not finite"
    with pytest.raises(ValueError, match=line):
        gnmr.diagnose(model, loss_by(model), batches_of(2), recipe="sim_int4")
    audited = gnmr.audit(model, loss_by(model), batches_of(1)[0])
    said = f"not finite: {name}: {number} of its {of} elements are not finite"
    assert any(finding.line().startswith(said) for finding in audited.findings), audited.findings
    model[0].bias.data[0] = model[3].weight.data[:] = 0.0
    model[5].bias.data[0] = float("inf")  # of the last linear, behind all that GEMMs read
    with pytest.raises(ValueError, match=r"^loss_of_batch=nan: 1 of the 16 elements of 5\.bias are not finite"):
        gnmr.audit(model, loss_by(model), batches_of(1)[0])


def keep(seen: dict[str, list[Tensor]], name: str, _module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    output.retain_grad()
    seen[name] = [inputs[0], output]


def test_recovery_that_is_no_16_bits_is_what_errors_are_against() -> None:
    """The result of the recovery path, at the operands of its passes, in place of the exact one."""
    found = diagnosed(recovery="sim_e4m3")
    model, batches = model_of().eval(), batches_of(6)
    operators = {name: model[int(name)] for name in NAMES}
    converted = convert(model, PathSpec(low="sim_e2m1", recovery="sim_e4m3", recovers=["fprop"], targets=["*"]))
    by_hand = dict.fromkeys(NAMES, 0.0)
    for x, targets in batches:
        for operator in converted.operators:
            operator.low = replace(operator.low, dgrad=Gemm(), wgrad=Gemm())
            operator.recovery = replace(operator.recovery, dgrad=Gemm(), wgrad=Gemm())
            operator.switch(True)
        seen: dict[str, list[Tensor]] = {}
        handles = [operator.register_forward_hook(partial(keep, seen, name)) for name, operator in operators.items()]
        F.cross_entropy(model(x), targets).backward()
        for handle in handles:
            handle.remove()
        for name, operator in operators.items():
            given, y = seen[name]
            operator.switch(False)
            with torch.no_grad():
                error = operator(given) - y
            by_hand[name] += float(TOKENS / 2 * (error * y.grad).sum(dim=1).double().square().sum()) / len(batches)
            converted.end_step()
    assert [row.value for row in found.rows if row.gemm == "fprop"] == pytest.approx(list(by_hand.values()), rel=1e-4)


def test_terms_of_the_loss() -> None:
    half = diagnosed(terms=lambda batch: len(batch[1]) // 2)
    assert half.total == pytest.approx(diagnosed().total / 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipe": "nvfp5"}, "recipe=nvfp5: is not a recipe: did you mean nvfp4?"),
        ({"recipe": "nvfp4", "model": nn.Sequential(nn.Linear(10, 10))}, "0 has 10 inputs"),
        ({"rescue": "mxfp9"}, "rescue=mxfp9: is not a recipe: did you mean mxfp8?"),
        ({"rescue": []}, "rescue=[]: must be one recipe or several"),
        ({"rescue": "nvfp4"}, "rescue=nvfp4: takes no more time in fprop than sim_int4"),
        ({"rescue": "fp8_delayed"}, "rescue=fp8_delayed: can be the recipe of all operators alone"),
        ({"rescue": "mxfp8", "against": "bf16"}, "rescue=mxfp8: cannot be asked for if operators have recipes"),
        ({"times": {"9": 1.0}}, "times.9=1.0: must be of 4, 8, 16, a recipe, or "),
        ({"times": 2}, "times=2: must be {bits or recipe: relative time}"),
        ({"fused": "qkv"}, "fused=qkv: this model has no such operators"),
        ({"plan": "nowhere.json"}, "plan=nowhere.json"),
        ({"model": nn.LayerNorm(4)}, "model=LayerNorm: has no linear operator"),
        ({"plan": "some.json", "targets": ["q_proj"]}, "targets=['q_proj']: cannot be asked for under plan="),
        ({"exclude": ["nothing"]}, "exclude ['nothing']: no linear has such a name"),
        ({"model": nn.Linear(4, 4, device="meta")}, "model=Linear: has parameters on the meta"),
        ({"run": lambda _: None}, "run of batch 1=NoneType"),
        ({"run": lambda _: torch.zeros(2)}, "run of batch 1=Tensor: must be logits"),
        ({"run": lambda _: torch.zeros(())}, "run of batch 1=a tensor without gradient"),
        ({"run": lambda _: torch.zeros((), requires_grad=True) * 1}, "run=..."),
        ({"batches": batches_of(1)}, "batches=1: needs two at least"),
        ({"held_out": [(torch.zeros(2, 32), torch.full((2,), -100))]}, "run of held-out batch 1=nan: is not finite"),
    ],
)
def test_a_senseless_request_is_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    model = options.pop("model", None) or model_of()
    asked = {"run": loss_by(model), "batches": batches_of(2), "recipe": "int4"} | options
    with pytest.raises(ValueError) as refused:
        gnmr.diagnose(model, **asked)
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)
    assert all(type(module) is not gnmr.conversion.PathLinear for module in model.modules())


def test_a_rescue_has_the_price_of_a_plan_that_keeps_all_on_it() -> None:
    """Of several, from one backward pass; bf16 is what errors are against."""
    rescues = [Recipe.of("mine", {"fprop": {"input": "e4m3/row", "weight": "e2m1/row"}}), "mxfp8", "bf16"]
    found = diagnosed(rescue=rescues, held_out=batches_of(2, seed=2), times={"mine": 1.5})
    assert found.rescues == ("mine", "mxfp8", "bf16")
    assert set(found.remaining) >= {f"{name} alone" for name in found.rescues}
    for name, recipe in (("mine", rescues[0]), ("mxfp8", Recipe("forward", fprop=RECIPES["mxfp8"].fprop))):
        alone = diagnosed(recipe=recipe)
        values = [row.value for row in alone.rows if row.gemm == "fprop"]
        assert [row.rescued[name] for row in found.rows if row.gemm == "fprop"] == pytest.approx(values, rel=1e-6)
    assert all(row.rescued["bf16"] == 0 for row in found.rows if row.gemm == "fprop")
    plain = diagnosed(rescue="bf16")
    for row, same in zip(found.rows, plain.rows, strict=True):
        assert replace(row, rescued={}) == replace(same, rescued={})
    plan = found.plan(0.1)
    assert plan.recipes == {"mine": rescues[0].words()} and plan.times == {"mine": 1.5} and plan.fused == []
    assert plan.prices["0"]["fprop"].keys() == {"sim_e2m1", "mine", "mxfp8", "bf16"}
    assert [time for _, time, _ in found.recipes_in_use()] == [1.0, 1.5, 2.0, 4.0]
    assert sum(number for *_, number in found.recipes_in_use()) == len(found.rows)


def test_the_default_has_mxfp8_where_low_has_four_bits_and_widths_allow() -> None:
    assert diagnosed().rescues == ("mxfp8", "bf16") and diagnosed(recipe="fp8_hybrid").rescues == ("bf16",)
    assert diagnosed(recovery="sim_e4m3").rescues == ("sim_e4m3",)
    assert diagnosed(recipe=Recipe.of("one", {"fprop": {"weight": "int4/row"}})).rescues == ("bf16",)


def test_fused_operators_have_one_recipe() -> None:
    """And the page says what that costs."""
    model = nn.Sequential()
    torch.manual_seed(0)
    for name, size in (("q_proj", 1.0), ("k_proj", 30.0), ("v_proj", 1.0), ("o_proj", 1.0)):
        model.add_module(name, nn.Linear(32, 32))
        model.get_submodule(name).weight.data *= size
    free, tied = (
        gnmr.diagnose(model, lambda batch: model(batch[0]), batches_of(3), recipe="sim_int4", budget=0.6, fused=fused)
        for fused in ((), "qkv")
    )
    names = ("q_proj", "k_proj", "v_proj")
    assert len({str(free.choice().pins.get(name)) for name in names}) > 1
    assert len({str(tied.choice().pins.get(name)) for name in names}) == 1 and tied.plan().fused == ["qkv"]
    assert any("one recipe for each qkv leaves" in line for line in totals(tied))
