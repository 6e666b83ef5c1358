"""Which linears get two paths: roles, the default, exclusions, and what does not fit a recipe."""

from __future__ import annotations

import copy
import re

import pytest
from torch import nn

import gnmr
from gnmr.conversion import PathLinear, PathSpec, convert
from gnmr.conversion.converting import operator_shapes
from gnmr.conversion.targets import roles_of
from gnmr.measure.in_force import operators_of

VOCABULARY = 320


def modules(**named: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(named)


def linears(*names: str, inputs: int = 64, outputs: int = 64) -> dict[str, nn.Module]:
    return {name: nn.Linear(inputs, outputs) for name in names}


def blocks(number: int, **named: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(copy.deepcopy(modules(**named)) for _ in range(number))


def encoder(head: str = "decoder") -> nn.ModuleDict:
    """As BERT: nothing is called *_proj, a pooler and an output head outside of the blocks."""
    layer = modules(
        attention=modules(**linears("query", "key")), intermediate=modules(dense=nn.Linear(64, 128)), **linears("fc2")
    )
    heads = {"pooler": nn.Linear(64, 64), head: nn.Linear(64, VOCABULARY)}
    return modules(embed=nn.Embedding(VOCABULARY, 64), layer=blocks(2, **layer), **heads)


def mixture() -> nn.ModuleDict:
    """With the gates of a mixture and the gate of an MLP."""
    experts = nn.ModuleList(modules(**linears("gate", "w2")) for _ in range(2))
    mlp = modules(gate=nn.Linear(64, 40), shared_expert_gate=nn.Linear(64, 1), experts=experts)
    other = modules(gate=nn.Linear(64, 128), router=modules(layer=nn.Linear(64, 2)))
    return modules(layers=nn.ModuleList([modules(mlp=mlp), modules(mlp=other)]), lm_head=nn.Linear(64, 96))


class Adapted(nn.Module):
    """As peft's: the linear that was there is called base_layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = modules(default=nn.Linear(base.in_features, 4, bias=False))
        self.lora_B = modules(default=nn.Linear(4, base.out_features, bias=False))


def adapted() -> nn.ModuleDict:
    block = modules(q_proj=Adapted(nn.Linear(64, 64)), fc1=nn.Linear(64, 128))
    return modules(base_model=modules(model=modules(layers=blocks(1, **block), lm_head=nn.Linear(64, 32))))


def taken(model: nn.Module, **more: object) -> list[str]:
    spec = PathSpec(**{"low": "sim_e2m1", "recovery": "bf16"} | more)
    found = list(operator_shapes(model, spec))
    assert [operator.operator_name for operator in convert(copy.deepcopy(model), spec).operators] == found
    return found


@pytest.mark.parametrize("low", ["sim_e2m1", "int4"])
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            encoder,
            [
                f"layer.{i}.{name}"
                for i in (0, 1)
                for name in ["attention.query", "attention.key", "intermediate.dense", "fc2"]
            ],
        ),
        (
            mixture,
            [*[f"layers.0.mlp.experts.{i}.{name}" for i in (0, 1) for name in ("gate", "w2")], "layers.1.mlp.gate"],
        ),
        (adapted, ["layers.0.q_proj", "layers.0.fc1"]),
        (lambda: modules(**linears("a_proj", "fc", "lm_head")), ["a_proj"]),
        (lambda: modules(**linears("fc", "lm_head")), ["fc"]),
        (
            lambda: modules(layers=blocks(1, **linears("fc")), **linears("out_proj", "score")),
            ["layers.0.fc", "out_proj"],
        ),
    ],
)
def test_the_default_takes_every_linear_of_the_blocks(model, expected: list[str], low: str) -> None:
    assert taken(model(), low=low) == expected


@pytest.mark.parametrize("head", ["decoder", "proj_out", "head", "lm_head"])
def test_an_output_head_stays_in_16_bits_whatever_its_name(head: str) -> None:
    model = encoder(head)
    assert taken(model, targets=["*"])[-1] == "pooler"
    with pytest.raises(ValueError, match=rf"targets \['{head}'\]: recipes keep {head}"):
        taken(model, targets=[head])
    assert {one.name for one in operators_of(model) if one.role == "head"} == {head}
    assert head in taken(model, low="int4", targets=["*"]), "formats leave the forward pass as it is"


def test_the_copy_of_a_head_that_peft_does_not_run_is_no_head() -> None:
    head = modules(
        original_module=nn.Linear(64, VOCABULARY), modules_to_save=modules(default=nn.Linear(64, VOCABULARY))
    )
    model = modules(embed=nn.Embedding(VOCABULARY, 64), layers=blocks(1, **linears("q_proj")), lm_head=head)
    assert {one.name: one.role for one in operators_of(model)} == {
        "layers.0.q_proj": "",
        "lm_head.original_module": "adapter",
        "lm_head": "head",
    }


def test_attach_and_audit_give_a_linear_the_same_role() -> None:
    for model in (encoder(), mixture(), adapted()):
        named = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert [one.role for one in operators_of(model)] == list(roles_of(model, named).values())
    roles = {one.name: one.role for one in operators_of(mixture()) if one.role}
    assert roles == {
        "layers.0.mlp.gate": "router",
        "layers.0.mlp.shared_expert_gate": "router",
        "layers.1.mlp.router.layer": "router",
        "lm_head": "head",
    }


@pytest.mark.parametrize(("low", "recovery"), [("sim_int4", None), ("llm_int8", "bf16"), ("bf16", "sim_int8")])
@pytest.mark.filterwarnings("ignore:the recovery path")
def test_gates_and_heads_stay_in_16_bits_whatever_pattern_names_them(low: str, recovery: str | None) -> None:
    model, paths = mixture(), {"low": low, "recovery": recovery}
    assert taken(model, targets=["*"], **paths) == taken(model, **paths)
    assert taken(model, targets=["layers.1.mlp.*", "gate"], **paths)[-1] == "layers.1.mlp.gate"
    for target in ("layers.0.mlp.gate", "shared_expert_gate", "router.layer", "*router*", "lm_head", "*head*"):
        with pytest.raises(ValueError, match=f"^targets .*{re.escape(target)}.*: recipes keep"):
            taken(model, targets=["w2", target], **paths)
        assert not any(isinstance(module, PathLinear) for module in model.modules())
    assert len(taken(model, targets=["*"], low="int4")) == 9


@pytest.mark.parametrize("pattern", ["q_proj", "*_proj", "q_proj.base_layer", "*_proj.base_layer", "layers.0.q_proj"])
def test_patterns_match_the_names_that_units_have(pattern: str) -> None:
    assert taken(adapted(), targets=[pattern]) == ["layers.0.q_proj"]


def test_adapters_are_taken_only_if_they_alone_are_named() -> None:
    assert taken(adapted(), targets=["layers.0.*"]) == ["layers.0.q_proj", "layers.0.fc1"]
    assert taken(adapted(), targets=["*lora_A*"]) == ["layers.0.q_proj.lora_A.default"]


def test_exclude_leaves_linears_out() -> None:
    model = encoder()
    assert taken(model, exclude=["layer.0.*", "fc2"]) == [
        f"layer.1.{n}" for n in ("attention.query", "attention.key", "intermediate.dense")
    ]
    assert taken(model, targets=["query", "key"], exclude=["layer.*.key"]) == [
        f"layer.{i}.attention.query" for i in (0, 1)
    ]
    with pytest.raises(ValueError, match=r"exclude \['nobody'\]: no linear has such a name"):
        taken(model, exclude=["nobody"])
    with pytest.raises(ValueError, match=r"exclude \['\*'\]: no linear is left"):
        taken(model, exclude=["*"])
    controller = gnmr.attach(model, low="sim_e2m1", recovery="bf16", exclude=["layer.*"], targets=["pooler", "fc2"])
    assert controller.names == ["pooler"]


@pytest.mark.parametrize(("low", "recovery"), [("nvfp4", "bf16"), ("bf16", "mxfp8")])
@pytest.mark.filterwarnings("ignore:the recovery path")
def test_what_does_not_fit_a_recipe_is_left_out_and_named_once(low: str, recovery: str) -> None:
    class Own(nn.Linear):
        pass

    block = modules(fc1=nn.Linear(64, 128), fc2=nn.Linear(128, 10), own=Own(64, 64))
    model = modules(layers=blocks(3, **block))
    spec = PathSpec(low=low, recovery=recovery)
    with pytest.warns(UserWarning, match="left in 16 bits") as told:
        converted = convert(model, spec)
    assert [one.operator_name for one in converted.operators] == [f"layers.{i}.fc1" for i in range(3)]
    assert list(converted.left_out) == [f"layers.{i}.{name}" for i in range(3) for name in ("fc2", "own")]
    (line,) = [str(one.message) for one in told if "left in" in str(one.message)]
    assert "layers.*.fc2 (3) has 10 outputs" in line and "layers.*.own (3) is a Own" in line
    converted.restore()
    for name, what in (("fc2", "has 10 outputs"), ("own", "is a Own")):
        with pytest.raises(ValueError, match=rf"layers\.0\.{name} {what}"):
            convert(model, PathSpec(low=low, recovery=recovery, targets=["fc1", name]))
    with pytest.raises(ValueError, match=r"layers\.0\.fc2 has 10 outputs"):
        convert(model, PathSpec(low=low, recovery=recovery, exclude=["fc1", "own"]))


def test_all_of_a_router_is_one() -> None:
    """A gate next to experts may be an MLP, and a class may say what its name does not."""

    class Top1Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj, self.mlp = nn.Linear(64, 64), modules(**linears("fc1", "fc2"))

    experts = nn.ModuleList(modules(**linears("up_proj")) for _ in range(2))
    mixtures = [
        modules(gate=modules(down_proj=nn.Linear(64, 64), router_mlp=modules(**linears("fc1"))), experts=experts),
        modules(chooser=Top1Router(), experts=copy.deepcopy(experts)),
        modules(gate=modules(**linears("fc1")), up_proj=nn.Linear(64, 64)),
    ]
    model = modules(layers=nn.ModuleList(modules(mlp=one) for one in mixtures))
    named = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    roles = roles_of(model, named)
    routers = {name for name, role in roles.items() if role == "router"}
    assert routers == {name for name in named if re.search(r"0\.mlp\.gate|chooser", name)}, "the last is a gated MLP"
