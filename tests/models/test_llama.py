"""Against Hugging Face's LlamaForCausalLM with the same weights."""

from __future__ import annotations

import pytest
import torch

from gnmr.lab.models.pretrained import as_hugging_face

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 2},
        {"name": "pangu", "num_kv_heads": 1},
        {"num_kv_heads": 2, "tied_head": True},
    ],
)
def test_fp32_logits_and_gradients_equal(build, tokens_BT, changes):
    model = build(**changes)
    twin = as_hugging_face(model)
    ours, theirs = model(tokens_BT), twin(tokens_BT).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_bf16_logits_close(build, tokens_BT):
    model = build(num_kv_heads=2).bfloat16()
    ours = model(tokens_BT)
    assert ours.dtype == torch.bfloat16
    theirs = as_hugging_face(model)(tokens_BT).logits
    assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()
