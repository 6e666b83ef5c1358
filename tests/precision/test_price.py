"""Prices against the paths themselves: an operator is run on its low path, given the very input and grad_output."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gnmr.conversion import ConvertedModel, PathSpec, convert
from gnmr.formats.recipes import RECIPES
from gnmr.lab.fault_injection import Fault, Injector
from gnmr.measure.price import PRICES, PriceMeter, measure_prices

TOKENS, WIDTH = 96, 128


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 256), nn.SiLU(), nn.Linear(256, WIDTH, bias=False), nn.SiLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(dtype)


def batch_of(seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH)
    x[:, 3] *= 20  # an outlier channel, and tokens of unequal size
    return (x * torch.rand(TOKENS, 1).exp()).to(dtype), torch.randint(0, WIDTH, (TOKENS,))


def planned(model: nn.Module, **spec: object) -> ConvertedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert(model, PathSpec(targets=["0", "2", "4"], **spec), shown=False)  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def by_hand(plan: ConvertedModel, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, list[float]]:
    """The prices of the low path, of its own forward and backward passes at the operands of a pass in recovery."""
    seen: dict[int, list[Tensor]] = {}
    handles = []
    for operator in plan.operators:
        operator.switch(True)

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            own = seen.setdefault(module.index, [inputs[0].detach()])
            output.register_hook(lambda grad: own.append(grad))

        handles.append(operator.register_forward_hook(keep))
    loss_of(model, batch).backward()
    for handle in handles:
        handle.remove()
    found: dict[str, list[float]] = {"fprop": [], "dgrad": [], "wgrad": []}
    for operator in plan.operators:
        x, dy = seen[operator.index]
        given: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}
        for exact in (False, True):
            plan.shared.forget()
            operator.switch(False)
            own = x.clone().requires_grad_()
            y = F.linear(own, operator.weight, operator.bias) if exact else operator(own)
            given[exact] = (y, *torch.autograd.grad(y, (own, operator.weight), dy))
        error = [(low - high).double() for low, high in zip(given[False], given[True], strict=True)]
        u = (dy.double() * error[0]).sum(dim=-1)
        found["fprop"].append(float(len(x) / 2 * u.square().sum()))
        for i, gemm in ((1, "dgrad"), (2, "wgrad")):
            found[gemm].append(float(error[i].square().sum() / given[True][i].double().square().sum()))
    model.zero_grad()
    return found


def measured(plan: ConvertedModel, model: nn.Module, batch: tuple[Tensor, Tensor], **options: object) -> PriceMeter:
    meter = measure_prices(plan, **{"tokens": 1} | options)  # type: ignore[arg-type]
    loss_of(model, batch).backward()
    meter.enabled = False
    model.zero_grad()
    return meter


NAMES = (
    "sim_e2m1",
    "sim_int4",
    "fp8_hybrid",
    "fp8_delayed",
    "deepseek_v3",
    "deepseek_v3_blocks",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "nvfp4_no_sr",
)
PATHS = [
    *({"low": name, "recovery": "bf16", "backend": "simulated"} for name in NAMES),
    {"low": "llm_int8", "recovery": "bf16"},
    {"low": "llm_int8_dgrad", "recovery": "bf16", "outlier_threshold": 6.0},
    {"low": "int4", "recovery": "bf16"},
    {"low": "int4", "recovery": "int8", "site": "forward"},
    {"low": "e2m1", "recovery": "e4m3", "site": "forward"},
]


@pytest.mark.parametrize("spec", PATHS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_the_price_is_that_of_the_paths_own_passes(spec: dict[str, object]) -> None:
    model, batch = model_of(), batch_of()
    plan = planned(model, **spec)
    if spec["low"] == "fp8_delayed":  # a history that is not the tensor's own
        loss_of(model, (batch[0] * 0.5, batch[1])).backward()
        plan.end_step()
    expected = by_hand(plan, model, batch)
    for operator in plan.operators:
        operator.switch(True)
    found = measured(plan, model, batch).by_operator()
    for gemm, prices in expected.items():
        rtol = 0.2 if spec["low"] == "nvfp4" and gemm != "fprop" else 2e-3  # other random numbers
        torch.testing.assert_close(
            found[gemm].tolist(), prices, rtol=rtol, atol=1e-9, msg=lambda m, g=gemm: f"{g}: {m}"
        )


@pytest.mark.parametrize("spec", [PATHS[0], PATHS[-2]], ids=["recipe", "format"])
def test_a_fault_in_force_is_in_the_price_of_the_low_path(spec: dict[str, object]) -> None:
    model, batch = model_of(), batch_of()
    plan = planned(model, **spec)
    broken = plan.operators[1]
    broken.fault = Injector(Fault("scale_down", magnitude=8.0, rows_frac=0.5), None)
    broken.fault.arm(3)
    expected = by_hand(plan, model, batch)
    for operator in plan.operators:
        operator.switch(True)
    found = measured(plan, model, batch).by_operator()
    for gemm in ("fprop", "wgrad"):
        torch.testing.assert_close(found[gemm].tolist(), expected[gemm], rtol=2e-3, atol=1e-9)
    broken.fault.arm(None)
    healthy = measured(plan, model, batch).by_operator()
    assert found["fprop"][1] > 2 * healthy["fprop"][1]


def test_both_paths_are_priced_whatever_path_is_in_force() -> None:
    model, batch = model_of(), batch_of()
    plan = planned(model, low="int4", recovery="int8", site="forward")
    meter = measured(plan, model, batch, names=PRICES)
    low, recovery = meter.by_operator("low"), meter.by_operator("recovery")
    assert (low["fprop"] > 50 * recovery["fprop"]).all() and (recovery["fprop"] > 0).all()
    read = meter.read(grad_scale=2.0)
    assert tuple(read) == PRICES
    torch.testing.assert_close(read["price"], (low["fprop"] - recovery["fprop"]) / 4)
    torch.testing.assert_close(read["price_wgrad"], low["wgrad"])


@pytest.mark.parametrize("recovery", ["bf16", "sim_e4m3"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_candidate_has_the_price_that_it_has_as_the_low_path(recovery: str, tokens: int) -> None:
    """And the paths have the same prices to the bit as without it."""
    batch, found = batch_of(), {}
    names = ("fp8_hybrid", "sim_int4")
    for low, candidates in (("sim_e2m1", names), ("sim_e2m1", ()), *((name, ()) for name in names)):
        model = model_of()
        plan = planned(model, low=low, recovery=recovery, backend="simulated")
        for operator in plan.operators:
            operator.switch(True)
        given = {name: RECIPES[name] for name in candidates}
        found[low, candidates] = measured(
            plan, model, batch, names=PRICES, tokens=tokens, against_recovery=True, candidates=given
        )
    several, plain = found["sim_e2m1", names], found["sim_e2m1", ()]
    for path in ("low", "recovery"):
        for name, value in several.by_operator(path).items():
            assert torch.equal(value, plain.by_operator(path)[name]) or value.isnan().all(), (path, name)
    assert all(torch.equal(value, plain.read()[name]) for name, value in several.read().items())
    for name in names:
        expected, own = found[name, ()].by_operator(), several.by_operator(name)
        assert own.keys() == {key for key in expected if key.startswith("fprop")}
        for key, value in own.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=0, equal_nan=True)
        assert (own["fprop"] > 0).all()


def test_where_fprop_is_exact_the_price_is_what_the_weight_gradient_loses() -> None:
    model, batch = model_of(), batch_of()
    plan = planned(model, low="int4", recovery="int8", unit="operator")
    meter = measured(plan, model, batch, names=["price", "price_fprop"])
    low, recovery = meter.by_operator("low")["wgrad"], meter.by_operator("recovery")["wgrad"]
    exact = planned(other := model_of(), low="bf16", recovery=None)
    loss_of(other, batch).backward()
    squares = torch.stack([o.weight.grad.double().square().sum() for o in exact.operators])
    read = meter.read(grad_scale=3.0)
    torch.testing.assert_close(read["price"], (low - recovery) * squares / squares.sum(), rtol=1e-3, atol=0)
    assert (read["price_fprop"] == 0).all()


def test_accumulation_adds_up_to_the_price_of_the_whole_batch() -> None:
    model, (x, targets) = model_of(), batch_of()
    plan = planned(model, low="sim_e2m1", recovery="bf16")
    for operator in plan.operators:
        operator.switch(True)
    whole = measured(plan, model, (x, targets)).by_operator()["fprop"]
    meter = measure_prices(plan, tokens=1)
    for part in (slice(0, 48), slice(48, 96)):
        (loss_of(model, (x[part], targets[part])) / 2).backward()
    torch.testing.assert_close(meter.by_operator()["fprop"], whole, rtol=1e-4, atol=0)


class Repeated(nn.Module):
    """One block that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.down_proj(F.silu(self.up_proj(x)))
        return x


@pytest.mark.parametrize("spec", [PATHS[0], PATHS[-2]], ids=["recipe", "format"])
@pytest.mark.parametrize("stride", [1, 3])
def test_calls_of_one_operator_make_one_error(spec: dict[str, object], stride: int) -> None:
    """Also of its weight gradient, if two micro-batches are under way at once; T is not the rows of all calls."""
    model, (x, targets) = Repeated(), batch_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = convert(model, PathSpec(targets=["*_proj"], **spec), shown=False)  # type: ignore[arg-type]
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {0: [], 1: []}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda grad: seen[module.index].append((inputs[0].detach(), grad)))

    for operator in plan.operators:
        operator.switch(True)
        operator.register_forward_hook(keep)
    meter = measure_prices(plan, PRICES[:3], tokens=stride)
    parts = [(x[:48], targets[:48]), (x[48:], targets[48:])]
    losses = [loss_of(model, part) / 2 for part in parts]
    losses[0].backward()
    losses[1].backward()
    found = meter.by_operator()
    meter.enabled = False
    for operator in plan.operators:
        fprop, wgrad, exact = 0.0, 0.0, 0.0
        for start in (0, 3):
            u, error, gradient = torch.zeros(48, dtype=torch.float64), 0.0, 0.0
            chosen = meter._chosen(48, [plan.low], x.device)
            for given, dy in seen[operator.index][start : start + 3]:
                both = []
                for low in (True, False):
                    plan.shared.forget()
                    operator.switch(not low)
                    rows = given[chosen].clone().requires_grad_()
                    y = operator(rows) if low else F.linear(rows, operator.weight, operator.bias)
                    both.append((y, torch.autograd.grad(y, operator.weight, dy[chosen])[0]))
                u[chosen] += ((both[0][0] - both[1][0]).detach().double() * dy[chosen]).sum(1)
                error, gradient = error + both[0][1] - both[1][1], gradient + both[1][1]
            scale = 48 / len(chosen)
            fprop += float(96 / 2 * u.square().sum()) * scale
            wgrad, exact = wgrad + float(error.square().sum()), exact + float(gradient.square().sum())
        assert float(found["fprop"][operator.index]) == pytest.approx(fprop, rel=5e-3)
        assert float(found["wgrad"][operator.index]) == pytest.approx(wgrad / exact, rel=5e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_price(reentrant: bool) -> None:
    (x, targets), prices = batch_of(), []
    targets = targets.masked_fill(torch.arange(TOKENS) % 10 > 0, -100)
    for checkpointed in (False, True):
        model = model_of()
        plan = planned(model, low="sim_e2m1", recovery="bf16")
        meter, hidden = measure_prices(plan, tokens=1), x.clone().requires_grad_()
        for block in (model[:2], model[2:]):
            hidden = checkpoint(block, hidden, use_reentrant=reentrant) if checkpointed else block(hidden)
        F.cross_entropy(hidden, targets).backward()
        prices.append(meter.read())
    for name, value in prices[0].items():
        torch.testing.assert_close(prices[1][name], value, rtol=1e-6, atol=0)


class Chunked(nn.Sequential):
    """The last linear runs on parts of the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *first, last = self
        for module in first:
            x = module(x)
        return torch.cat([last(part) for part in x.split(TOKENS // 3)])


@pytest.mark.parametrize("calls", [1, 3, -4])
def test_masked_tokens_are_no_terms_of_the_loss(calls: int) -> None:
    """As `loss_tokens` says, which nothing gives in training."""
    batch, prices = batch_of(), []
    targets = batch[1].masked_fill(torch.arange(TOKENS) % 10 > 0, -100)
    for known in (None, 10):
        model = Repeated() if calls > 1 else model_of()
        model = Chunked(*model) if calls < 0 else model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = convert(model, PathSpec(targets=["*"], low="sim_e2m1", recovery="bf16"), shown=False)
        meter = measure_prices(plan, tokens=1)
        meter.loss_tokens = known
        loss_of(model, (batch[0], targets)).backward()
        prices.append(meter.read()["price_fprop"])
    assert torch.equal(*prices) and (prices[0] > 0).all()


def test_a_looped_operator_counts_once_in_each_of_unequal_micro_batches() -> None:
    model, (x, targets) = Repeated(), batch_of()
    plan = convert(model, PathSpec(targets=["*"], low="sim_e2m1", recovery="bf16"), shown=False)
    meter = measure_prices(plan, tokens=1)
    for part in (slice(TOKENS // 8), slice(TOKENS)):
        loss_of(model, (x[part], targets[part])).backward()
    assert float(meter.terms) == TOKENS // 8 + TOKENS


@pytest.mark.parametrize("low", ["sim_e2m1", "mxfp8", "deepseek_v3"])
def test_samples_of_tokens_give_the_price_on_average(low: str) -> None:
    """Of all offsets together they are every token once, whatever the scales' granularity."""
    model, batch = model_of(), batch_of()
    plan = planned(model, low=low, recovery="bf16", backend="simulated")
    for operator in plan.operators:
        operator.switch(True)
    whole = measured(plan, model, batch).by_operator()["fprop"]
    meter = measure_prices(plan, tokens=3)
    seen, offsets = torch.zeros(3, dtype=torch.float64), set()
    for step in range(60):
        meter.begin_step(step)
        chosen = meter._chosen(TOKENS, [plan.low], torch.device("cpu"))
        if int(chosen[0]) in offsets:
            continue
        offsets.add(int(chosen[0]))
        meter.reset()
        loss_of(model, batch).backward()
        seen += meter.by_operator()["fprop"] * len(chosen) / TOKENS
    torch.testing.assert_close(seen, whole, rtol=1e-3, atol=0)


def test_measuring_changes_nothing_that_the_passes_give() -> None:
    gradients = []
    for priced in (False, True):
        model, batch = model_of(), batch_of()
        plan = planned(model, low="fp8_delayed", recovery="bf16", backend="simulated")
        if priced:
            measure_prices(plan, PRICES)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch).backward()
            counts = copy.deepcopy(plan.saturation())
            plan.end_step()
        gradients.append([*(p.grad for p in model.parameters()), plan.shared.amax.history, *counts.values()])
    for plain, priced_one in zip(*gradients, strict=True):
        assert torch.equal(plain, priced_one)


def test_evaluation_and_steps_that_are_not_measured_leave_no_price() -> None:
    model, batch = model_of(), batch_of()
    plan = planned(model, low="sim_e2m1", recovery="bf16")
    meter = measure_prices(plan, tokens=1)
    with plan.high_precision():
        loss_of(model, batch).backward()
    meter.enabled = False
    loss_of(model, batch).backward()
    assert all((value == 0).all() for value in meter.read().values())


def test_of_units_that_are_gemms_each_has_its_own_price() -> None:
    whole, batch = model_of(), batch_of()
    expected = measured(planned(whole, low="sim_e2m1", recovery="bf16"), whole, batch).by_operator()
    model = model_of()
    plan = planned(model, low="sim_e2m1", recovery="bf16", unit="gemm")
    read = measured(plan, model, batch, names=[*PRICES]).read()
    assert [unit.gemm for unit in plan.units] == ["fprop", "dgrad", "wgrad"] * 3
    for place, gemm in enumerate(("fprop", "dgrad", "wgrad")):
        own = read[f"price_{gemm}"].view(3, 3)
        torch.testing.assert_close(own[:, place], expected[gemm])
        assert (own[:, [i for i in range(3) if i != place]] == 0).all()
    assert torch.equal(read["price"], read["price_fprop"])


def test_of_a_unit_of_several_operators_nats_add_up_and_errors_are_averaged() -> None:
    model, batch = model_of(), batch_of()
    model = nn.Sequential(model)  # all in block 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = convert(model, PathSpec(low="sim_e2m1", recovery="bf16", targets=["0.*"], unit="block"), shown=False)
    meter = measured(plan, model, batch)
    found, read = meter.by_operator(), meter.read()
    assert len(plan.units) == 1
    torch.testing.assert_close(read["price_fprop"], found["fprop"].sum()[None])
    torch.testing.assert_close(read["price_wgrad"], found["wgrad"].mean()[None])


def test_a_price_of_two_paths_needs_both() -> None:
    plan = planned(model_of(), low="sim_e2m1", recovery=None)
    with pytest.raises(ValueError, match="no recovery path"):
        measure_prices(plan, ["price"])
    assert plan.shared.prices is None
