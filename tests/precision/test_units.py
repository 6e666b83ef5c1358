"""Units of several operators: which belong together, that they move together, and what is measured of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gnmr.attachment import units_of
from gnmr.control.norms import UnitNorms
from gnmr.conversion import ConvertedModel, PathSpec, convert
from gnmr.conversion.unit_names import unit_of
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.measure.operand_errors import measure_errors


class Block(nn.Module):
    """Three linears, the first two of which read the same tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q_proj": nn.Linear(width, width), "o_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"down_proj": nn.Linear(width, width)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp["down_proj"](self.attn["q_proj"](x) * self.attn["o_proj"](x))


class Net(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head_proj(x)


def made(unit: str, low: str = "int4", recovery: str | None = "int8") -> tuple[Net, ConvertedModel]:
    model = Net()
    return model, convert(model, PathSpec.of(low, recovery, unit=unit))


def backward(model: nn.Module, seed: int = 1) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    (model(x) - x).square().mean().backward()


@pytest.mark.parametrize(
    ("name", "expert", "layer", "block"),
    [
        ("layers.3.self_attn.q_proj", None, "layers.3.self_attn", "layers.3"),
        ("layers.12.mlp.experts.5.up_proj", "layers.12.mlp.experts.5", "layers.12.mlp", "layers.12"),
        ("model.layers.0.moe.experts.31.w1", "model.layers.0.moe.experts.31", "model.layers.0.moe", "model.layers.0"),
        ("encoder.block.1.layer.0.SelfAttention.q", None, "encoder.block.1.layer.0", "encoder.block.1"),  # T5
        ("layers.0.blocks.1.attention.self.query", None, "layers.0.blocks.1.attention", "layers.0.blocks.1"),  # Swin
        ("layers.0.blocks.1.output.dense", None, "layers.0.blocks.1.mlp", "layers.0.blocks.1"),
        ("bert.encoder.layer.1.attention.output.dense", None, "bert.encoder.layer.1.attention", "bert.encoder.layer.1"),
        ("bert.encoder.layer.1.intermediate.dense", None, "bert.encoder.layer.1.mlp", "bert.encoder.layer.1"),
        ("decoder.layers.2.fc1", None, "decoder.layers.2.mlp", "decoder.layers.2"),  # OPT, Whisper
        ("1.layers.0.linear2", None, "1.layers.0.mlp", "1.layers.0"),  # nn.TransformerEncoderLayer
        ("encoder.layers.encoder_layer_3.mlp.0", None, *[f"encoder.layers.encoder_layer_3{x}" for x in (".mlp", "")]),
        ("layers.0.0.to_qkv", None, "layers.0.0", "layers.0"),
        ("layers.4.wq", None, "layers.4.attention", "layers.4"),
        (
            "block.1.layer.1.mlp.experts.expert_3.wi",
            "block.1.layer.1.mlp.experts.expert_3",
            "block.1.layer.1",
            "block.1",
        ),
        ("lm_heads.0", None, None, "lm_heads.0"),
        ("lm_head", None, None, None),
        ("0", None, None, "0"),
        ("0.0", None, None, "0"),
    ],
)
def test_the_unit_of_a_name(name: str, expert: str | None, layer: str | None, block: str | None) -> None:
    assert unit_of(name, "operator") == name
    assert [unit_of(name, kind) for kind in ("expert", "layer", "block")] == [
        own or name for own in (expert, layer, block)
    ]


@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("layer", [name for i in range(4) for name in (f"layers.{i}.attn", f"layers.{i}.mlp")]),
        ("block", [f"layers.{i}" for i in range(4)]),
    ],
)
def test_the_units_of_a_model(unit: str, names: list[str]) -> None:
    _, converted = made(unit)
    assert [group.name for group in converted.units] == [*names, "head_proj"]
    assert [operator for group in converted.units for operator in group.operators] == converted.operators


def test_a_units_norm_is_that_of_all_its_operators() -> None:
    model, converted = made("block")
    units = units_of(converted)
    backward(model)
    _, norms, observed = UnitNorms([unit.parameters for unit in units])()
    assert observed.all() and norms.shape == (5,)
    for norm, group in zip(norms, converted.units, strict=True):
        square = sum(float(p.grad.double().square().sum()) for o in group.operators for p in o.parameters())
        assert float(norm) == pytest.approx(square**0.5, rel=1e-6)


def test_a_unit_costs_what_its_operators_cost() -> None:
    (_, single), (model, blocks) = made("operator"), made("block")
    assert [unit.extra_bytes for unit in units_of(blocks)] == [3 * 16 * 4 / 8] * 4 + [16 * 4 / 8]
    assert sum(unit.extra_bytes for unit in units_of(single)) == sum(unit.extra_bytes for unit in units_of(blocks))
    backward(model)
    blocks.units[1].switch(True)
    assert blocks.cost.spent()[1] == 4 / 8 * 8 * 3 * 16
    assert all(unit.switch is None for unit in units_of(made("block", recovery=None)[1]))


@pytest.mark.parametrize(
    ("paths", "recovers", "bits"),
    [
        (("sim_e2m1", "bf16"), ["fprop", "dgrad", "wgrad"], 12),
        (("sim_e2m1", "bf16"), ["wgrad"], 12),
        (("sim_e2m1", "fp8_hybrid"), ["wgrad", "dgrad"], 4),
        (("sim_e2m1", "bf16"), ["fprop", "dgrad"], None),  # the input that wgrad reads stays as it is
        (("bf16", "sim_int8"), ["wgrad"], None),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the recovery path")
def test_a_recipe_costs_the_bits_of_the_input_that_wgrad_reads(paths, recovers, bits) -> None:
    converted = convert(Net(), PathSpec.of(*paths, unit="block", recovers=recovers))
    expected = [1.0] * 5 if bits is None else [3 * 16 * bits / 8] * 4 + [16 * bits / 8]
    assert [unit.extra_bytes for unit in units_of(converted)] == expected


@pytest.mark.parametrize("paths", [("int4", "int8"), ("sim_e2m1", "fp8_hybrid")], ids=str)
def test_evidence_of_a_unit_is_that_of_its_operators_together(paths: tuple[str, str]) -> None:
    read = {}
    for unit in ("operator", "block"):
        model, converted = made(unit, *paths)
        probe = measure_errors(converted, ("gap_low", "gap_recovery", "mse", "input_std"))
        backward(model)
        read[unit] = probe.read()
    single, blocks = read["operator"], read["block"]
    for name, values in blocks.items():
        assert values.shape == (5,)
        each = single[name].tolist()
        for place, value in enumerate(values.tolist()):
            own = each[3 * place : 3 * place + 3]
            if name.startswith("gap"):
                assert value == pytest.approx(sum(own), rel=1e-9)
            elif name == "mse":  # all inputs have as many elements
                assert value == pytest.approx(sum(own) / len(own), rel=1e-9)
            else:
                assert min(own) * 0.999 <= value <= max(own) * 1.5


def test_a_fault_hits_operators_and_is_told_of_their_unit() -> None:
    _, converted = made("block")
    schedule = FaultSchedule(converted, Fault("nan"), ["q_proj"], 10, windows=[(2, 3)])
    assert [(w.unit, w.start, w.end) for w in schedule.windows] == [(f"layers.{i}", 2, 4) for i in range(4)]
    assert [o.operator_name for o in converted.operators if o.fault] == [f"layers.{i}.attn.q_proj" for i in range(4)]

    model, converted = made("block")
    FaultSchedule(converted, Fault("nan"), ["layers.1"], 10, windows=[(1, 1)]).begin_step(1)
    assert sum(operator.fault is not None for operator in converted.operators) == 3
    backward(model)
    bad = [not group.operators[0].weight.grad.isfinite().all() for group in converted.units]
    assert bad == [False, True, False, False, False]
    model.zero_grad()
    converted.units[1].switch(True)
    backward(model)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises(ValueError, match=r"targets \['layers.9'\]: no unit has such a name; there are layers.\*, h"):
        FaultSchedule(converted, Fault("nan"), ["layers.9"], 10, windows=[(1, 1)])
