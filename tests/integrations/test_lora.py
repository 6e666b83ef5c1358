"""LoRA on a frozen Hugging Face model: the paper's fine-tuning setting (5.3), and what is watched in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gnmr

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from tiny_lora import BASE, PROJECTIONS, llama, lora_llama, token_blocks

pytestmark = pytest.mark.slow

INT8: dict[str, Any] = {"low": "llm_int8", "recovery": "bf16", "targets": BASE}


def loss_of(model: nn.Module, blocks: Tensor) -> Tensor:
    logits = model(input_ids=blocks).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten())


def test_the_papers_fine_tuning_setting() -> None:
    """40 layers, at most 10 in recovery: the base stays as it was to the last bit, and the adapters learn."""
    model = lora_llama(layers=40, dropout=0.05)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 40 * 7 * 2 and all("lora_" in name for name in trained)
    controller = gnmr.attach(
        model, **INT8, unit="block", observe="adapter", max_o=10, t_lock=1, alpha=gnmr.TwoStage(1.5, 1.1, 3), beta=1.5,
        delta=5,
    )  # fmt: skip
    assert controller.names == [f"model.layers.{i}" for i in range(40)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    numbers, candidates = [], []
    for blocks in token_blocks(24, length=8).split(2):
        numbers.append(sum(all(o.recovering for o in group.operators) for group in controller.converted.units))
        assert numbers[-1] == sum(any(o.recovering for o in group.operators) for group in controller.converted.units)
        loss_of(model, blocks).backward()
        decision = controller.step()
        assert decision.observed.all() and (decision.norm > 0).all()
        candidates.append(int(decision.candidate.sum()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert max(numbers) == 10 < max(candidates)
    assert min(numbers[1:]) < 10
    controller.detach()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trained), name


def test_adapters_that_are_added_switched_to_and_deleted_are_watched() -> None:
    """The norms are those of the adapter in force, be it on linears that had none before."""
    blocks, first = token_blocks(4), peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(llama(), first)
    targets = ["*_proj", "q_proj.base_layer"]
    spec: dict[str, Any] = {"low": "llm_int8", "recovery": "bf16", "targets": targets, "unit": "block", "max_o": 1}
    controller = gnmr.attach(model, **spec, observe="adapter")

    def stepped() -> tuple[list[float], list[float], bool]:
        """(norms, what they should be, whether all were observed)"""
        model.zero_grad()
        loss_of(model, blocks).backward()
        decision = controller.step()
        right = []
        for name in decision.units:
            own = [p.grad for n, p in model.named_parameters() if f".{name}." in n and p.grad is not None]
            right.append(torch.cat([gradient.flatten() for gradient in own]).norm().item())
        return decision.norm.tolist(), right, bool(decision.observed.all())

    model.add_adapter("b", peft.LoraConfig(r=8, lora_alpha=16, target_modules=PROJECTIONS))
    of_first = stepped()
    model.set_adapter("b")
    of_second = stepped()
    with model.disable_adapter():
        loss_of(model, blocks)
        model.zero_grad()
        assert not controller.step().observed.any()
    again = stepped()
    model.delete_adapter("default")
    for norms, right, observed in (of_first, of_second, again, stepped()):
        assert norms == pytest.approx(right, rel=1e-5) and observed
    assert of_second[0] != pytest.approx(of_first[0], rel=0.1)
