"""What torchtitan's integration chooses and refuses, without torchtitan."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gnmr
from gnmr.attachment import torchtitan_rules as rules
from gnmr.conversion import PathLinear
from gnmr.errors import UserError

NAMES = [
    *(
        f"layers.{i}.{name}"
        for i in range(2)
        for name in ("attention.qkv_linear.wqkv", "attention.wo", "moe.router.gate")
    ),
    "lm_head",
]


def config(**changed: Any) -> SimpleNamespace:
    parallelism: dict[str, Any] = dict.fromkeys(rules._DEGREES, 1) | {"spmd_backend": "spmd_types"}
    training: dict[str, Any] = {"disable_cuda_graphs": True, "enable_cpu_offload": False}
    for name, value in changed.items():
        (parallelism if name in parallelism else training)[name] = value
    return SimpleNamespace(parallelism=SimpleNamespace(**parallelism), training=SimpleNamespace(**training))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 2) for name in rules._DEGREES),
        ("disable_cuda_graphs", False),
        ("spmd_backend", "full_dtensor"),
        ("enable_cpu_offload", True),
    ],
)
def test_what_would_be_silently_wrong_is_refused(name: str, value: object) -> None:
    rules.refuse(config())
    with pytest.raises(UserError, match=name):
        rules.refuse(config(**{name: value}))


def test_targets_choose_and_without_any_layers_do_but_gates_and_heads() -> None:
    inside = [name for name in NAMES if name.endswith(("wqkv", "wo"))]
    for recipes in (False, True):
        assert rules.chosen(NAMES, [], [], recipes) == inside
        assert rules.chosen(NAMES, ["layers.1.attention.*"], [], recipes) == NAMES[3:5]
        assert rules.chosen(NAMES, ["q_proj"], [], recipes) == []
    formats = rules.chosen(NAMES, ["lm_head", "wo", "gate"], [], False)
    assert formats == [NAMES[1], NAMES[2], NAMES[4], NAMES[5], "lm_head"]
    assert rules.chosen(NAMES, [], ["layers.1.*"], True) == inside[: len(inside) // 2]
    assert rules.chosen(NAMES, ["*"], [], True) == inside


def test_the_section_says_what_attach_takes() -> None:
    section = rules.ControlSection(
        max_o=2, budget=1.0, signal="recovery_gap", options={"threshold": 2.0}, calibrate=0.01
    )
    named = section.named()
    assert "calibrate" not in named and set(named) < {one.name for one in fields(gnmr.ControlSpec)} | {"seed"}
    controller = gnmr.attach(nn.Sequential(nn.Linear(8, 8)), targets=["0"], **named)
    assert (controller.spec.max_o, controller.spec.budget, controller.spec.signal) == (2, 1.0, "recovery_gap")
    usual, spec = rules.ControlSection().named(), gnmr.ControlSpec()
    assert all(getattr(spec, name) == value for name, value in usual.items() if name != "seed")


# ---- what it needs of conversion ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"wo": nn.Linear(16, 16)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention["wo"](x)


def test_names_are_those_without_checkpointing() -> None:
    model = nn.Sequential(*(checkpoint_wrapper(Block()) for _ in range(2)))
    controller = gnmr.attach(model, targets=["1.attention.*"], observe="input_grad", max_o=1)
    assert controller.names == ["1.attention.wo"]
    assert [name for name, one in model.named_modules() if isinstance(one, PathLinear)] == [
        "1._checkpoint_wrapped_module.attention.wo"
    ]
    model(torch.ones(2, 16)).sum().backward()
    assert controller.step().norm[0] > 0


class Linear(nn.Linear):
    """Called as torchtitan's."""


Linear.__module__, Linear.__qualname__ = "torchtitan.models.common.linear", "Linear"


def test_torchtitans_linear_gets_two_paths_and_is_itself_again_afterwards() -> None:
    model = nn.Sequential(Linear(16, 16))
    controller = gnmr.attach(model, targets=["0"], max_o=1)
    assert isinstance(model[0], PathLinear) and isinstance(model[0], Linear)
    controller.detach()
    assert type(model[0]) is Linear

    model[0].forward = partial(model[0].forward)
    with pytest.raises(ValueError, match="0: its forward was wrapped as it was"):
        gnmr.attach(model, targets=["0"], max_o=1)

    class Other(nn.Linear):
        """Not torchtitan's."""

    with pytest.raises(ValueError, match="0 is a Other: only a plain"):
        gnmr.attach(nn.Sequential(Other(16, 16)), targets=["0"], max_o=1)
