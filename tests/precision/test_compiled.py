"""Converted linears inside of torch.compile's graphs, against the same model without them."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Iterator

import pytest
import torch
from close import EIGHT_BITS, FOUR_BITS, apart, assert_close
from torch import Tensor, nn

from gnmr.conversion import ConvertedModel, PathSpec, convert
from gnmr.formats.recipes import Recipe
from gnmr.lab import models
from gnmr.lab.config.model import ModelConfig
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.measure.operand_errors import measure_errors

pytestmark = pytest.mark.slow

VOCAB, SEQ_LEN, LAYERS = 40, 32, 3
GRAPHS = ["fp8_hybrid", "deepseek_v3", "sim_int8"]
"""One scale a tensor, a tile or a token; floating-point numbers and integers. A minute of compiling each."""
BF16 = {"terms": 128, "products": 60}
"""Of the longest sum, and of the products in a row of three blocks."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def model(name: str = "llama", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    if name == "small":
        return Small().to(dtype)
    config = ModelConfig(name=name, hidden_size=128, intermediate_size=128, num_layers=LAYERS, num_heads=4)
    found = models.build(config, VOCAB, SEQ_LEN)
    found.init_std = 0.2
    found.init_weights(torch.Generator().manual_seed(0))
    return found.to(dtype)


class SmallBlock(nn.Module):
    """q and k read one tensor, o what they make of it: a graph that is compiled in a third of a LLaMA block's time."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o_proj(self.q_proj(x) * self.k_proj(x).sigmoid())


class Small(nn.Module):
    """Blocks of three linears, for what is no matter of the architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, 64), nn.ModuleList(SmallBlock() for _ in range(LAYERS))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.normal_(std=1 if i == 0 else 0.2, generator=torch.Generator().manual_seed(i))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return x


def tokens(seed: int = 1, rows: int = 2) -> Tensor:
    return torch.randint(VOCAB, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(seed))


def step(net: nn.Module, converted: ConvertedModel, *batches: Tensor) -> list[Tensor]:
    """Gradients of every parameter and what the casts met, of one step of these micro-batches."""
    net.zero_grad()
    for batch in batches or (tokens(),):
        net(batch).float().square().mean().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None] + list(converted.saturation().values())
    converted.end_step()
    return found


def pair(
    low: str | Recipe, recovery: str | None, name: str = "llama", unit: str = "block", fullgraph: bool = True
) -> tuple[tuple[nn.Module, ConvertedModel], tuple[nn.Module, ConvertedModel]]:
    """The same model without and with compiled blocks."""
    made = []
    for _ in range(2):
        net = model(name)
        made.append((net, convert(net, PathSpec.of(low, recovery, unit=unit))))
    net, converted = made[1]
    converted.compile(net.layers, backend="aot_eager", fullgraph=fullgraph)
    return made[0], made[1]


def switch(converted: ConvertedModel, recovering: set[int]) -> None:
    for i, group in enumerate(converted.units):
        group.switch(i in recovering)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_second_model_of_a_process_has_the_graphs_of_its_own_recipe() -> None:
    """Dynamo keeps graphs by code, and has no guard on what a function encloses."""
    mine = [Recipe.of("mine", {"fprop": {"input": word}}) for word in ("e2m1/nv_row", "e2m1/nv_4over6")]
    found = []
    for low in ("fp8_hybrid", "mxfp8", *mine):
        (net, converted), (compiled, other) = pair(low, "bf16")
        found.append(step(compiled, other))
        assert other.in_graphs, low
        assert_close(found[-1], step(net, converted), **BF16, recast=FOUR_BITS)
    assert all(apart(ours, theirs, **BF16, recast=FOUR_BITS) for i, ours in enumerate(found) for theirs in found[:i])


@pytest.mark.filterwarnings("ignore:the recovery path")  # coarser, here and there
@pytest.mark.parametrize("low", GRAPHS)
def test_every_recipe_gives_the_same_gradients_and_counts(low: str) -> None:
    (net, converted), (compiled, other) = pair(low, "fp8_hybrid" if low != "fp8_hybrid" else "bf16")
    assert other.in_graphs and not converted.in_graphs
    for recovering in (set(), {0, 2}):
        for each in (converted, other):
            switch(each, recovering)
        assert_close(step(compiled, other), step(net, converted), **BF16, recast=EIGHT_BITS)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_block_type_has_one_graph_for_each_path_however_many_switches(name: str) -> None:
    _, (net, converted) = pair("sim_e2m1", "fp8_hybrid", name)
    step(net, converted)
    assert graphs() == 1
    for recovering in ({0}, {1, 2}, {0, 1, 2}, set(), {2}):
        switch(converted, recovering)
        step(net, converted)
    assert graphs() == 2


def test_a_static_recipe_has_one_graph_and_evaluation_another_on_the_plain_path() -> None:
    _, (net, converted) = pair("mxfp8_floor", None, unit="operator")
    step(net, converted)
    assert graphs() == 1
    with torch.no_grad(), converted.high_precision():
        seen = net(tokens())
        assert graphs() == 2
    expected = model()
    assert_close(seen, expected(tokens()), **BF16)
    with torch.no_grad():  # evaluation on the low path tells of no casts
        net(tokens())
    assert not any(counts.any() for counts in converted.saturation().values())


@pytest.mark.fp8
def test_eight_bit_codes_go_into_graphs_too() -> None:
    found = []
    for compiles in (False, True):
        net = model("small")
        converted = convert(net, PathSpec.of("fp8_hybrid", "bf16", unit="block", backend="scaled_mm"))
        if compiles:
            converted.compile(net.layers, backend="aot_eager", fullgraph=True)
        found.append(step(net, converted))
        switch(converted, {1})
        found[-1] += step(net, converted)
    assert converted.in_graphs
    assert_close(*found, **BF16, recast=EIGHT_BITS)


def test_recomputed_blocks_count_once() -> None:
    (net, converted), (compiled, other) = pair("mxfp8_floor", "bf16")
    for each in (net, compiled):
        each.activation_checkpointing = True
    assert_close(step(compiled, other), step(net, converted), **BF16, recast=EIGHT_BITS)


@pytest.mark.parametrize(
    ("low", "recovery", "how"),
    [
        ("sim_e2m1", "fp8_hybrid", {"unit": "operator"}),  # seven operators: 128 combinations
        ("sim_e2m1", "fp8_hybrid", {"unit": "layer"}),
        ("fp8_delayed", "bf16", {}),
        ("int4", "int8", {}),
        ("llm_int8", "bf16", {}),
    ],
)
def test_what_would_make_many_graphs_or_remembers_stays_between_them(low: str, recovery: str, how: dict) -> None:
    found = []
    for compiles in (False, True):
        net = model()
        converted = convert(net, PathSpec.of(low, recovery, **{"unit": "block"} | how))
        if compiles:
            why = converted.compile(net.layers, backend="aot_eager")
        found.append(step(net, converted))
    assert why and not converted.in_graphs
    assert_close(*found, **BF16, recast=FOUR_BITS)
    before = graphs()
    for i in range(len(converted.units)):
        switch(converted, {i})
        step(net, converted)
    assert graphs() == before


def test_a_probe_and_a_fault_look_in_as_without_compilation() -> None:
    seen = []
    for net, converted in pair("sim_e2m1", "fp8_hybrid", "small", fullgraph=False):
        faults = FaultSchedule(converted, Fault("noise", 8.0), ["layers.1.*"], 3, windows=[(2, 1)])
        probe = measure_errors(converted, ["gap_low", "mse"])
        found = []
        for number in (1, 2, 3):
            faults.begin_step(number)
            probe.enabled = number == 3
            probe.reset()
            found += [*step(net, converted), *probe.read().values()]
        seen.append(found)
    assert_close(*seen, **BF16, recast=FOUR_BITS)
    assert seen[0][-1].all()


def test_a_compiled_model_can_be_copied_pickled_and_turned_back() -> None:
    (net, converted), (compiled, other) = pair("sim_e2m1", "fp8_hybrid", "small")
    expected = step(net, converted)[:-4]
    step(compiled, other)
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        copied(tokens()).float().square().mean().backward()
        assert_close([p.grad for p in copied.parameters()], expected, **BF16, recast=FOUR_BITS)
    other.restore()
    compiled.zero_grad()
    compiled(tokens()).float().square().mean().backward()
    plain = model("small")
    plain(tokens()).float().square().mean().backward()
    assert_close([p.grad for p in compiled.parameters()], [p.grad for p in plain.parameters()], **BF16)


def test_a_nested_input_is_refused_by_name_here_too() -> None:
    _, (net, _) = pair("fp8_hybrid", "bf16", name="small", fullgraph=False)
    rows = [torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(3, 64, dtype=torch.bfloat16)]
    with pytest.raises(ValueError, match=r"^layers.0.q_proj: its input is a nested tensor"):
        net.layers[0](torch.nested.nested_tensor(rows, layout=torch.jagged))


def test_what_graphs_keep_cannot_be_read() -> None:
    _, (_, converted) = pair("sim_e2m1", "bf16", "small")
    with pytest.raises(ValueError, match="saved_bytes: what compiled blocks keep"):
        converted.cost.saved_bytes()
    net = model("small")
    converted = convert(net, PathSpec.of("sim_e2m1", "bf16", unit="block"))
    assert converted.compile([]) is None and not converted.in_graphs
    logits = net(tokens())
    assert logits.requires_grad and converted.cost.saved_bytes() > 0


def test_a_cast_counts_for_the_first_operator_that_made_it() -> None:
    """q, frozen, casts the input that k and v read for fprop alone."""
    (net, converted), (compiled, other) = pair("mxfp8_floor", "bf16", "small")
    for each in (net, compiled):
        for layer in each.layers:
            layer.q_proj.weight.requires_grad_(False)
    expected = step(net, converted)
    assert (expected[-4][:2, 0] > 0).all()
    assert_close(step(compiled, other), expected, **BF16, recast=EIGHT_BITS)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.xdist_group("inductor")  # whose start takes ten seconds
@pytest.mark.parametrize("low", ["sim_e2m1", "mxfp8", "mxfp4"])
def test_inductor_rounds_to_the_same_values(low: str) -> None:
    # In FP32, where nothing is left out between fused operations.
    found = []
    for compiles in (False, True):
        net = nn.Sequential(nn.Linear(64, 32, bias=False))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            net[0].weight.normal_(generator=generator)
        converted = convert(net, PathSpec.of(low, None, targets=["*"]))
        if compiles:
            converted.compile([net], fullgraph=True)
        x = torch.randn(48, 64, generator=generator).requires_grad_()
        y = net(x)
        y.backward(torch.randn(48, 32, generator=generator))
        found.append([y.detach(), x.grad, net[0].weight.grad, *converted.saturation().values()])
    assert_close(*found, terms=64, products=2, recast=EIGHT_BITS if low == "mxfp8" else FOUR_BITS)
    assert graphs() == 1
