"""Every published size, built on the meta device; all parameters count, the untied head included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from gnmr.lab import config, models

SCALES = Path(__file__).parents[2] / "conf" / "scale"
VOCAB = 32000


@pytest.mark.parametrize(
    ("scale", "label", "count"),
    [
        ("60m", 60e6, 58_073_600),
        ("130m", 130e6, 134_105_856),
        ("350m", 350e6, 367_969_280),
        ("1.3b", 1.3e9, 1_339_082_752),
    ],
)
def test_parameter_count(scale, label, count):
    sizes = config.load({"model": OmegaConf.load(SCALES / f"{scale}.yaml").model}).model
    with torch.device("meta"):
        model = models.build(sizes, VOCAB, 256)
    d, f, n = sizes.hidden_size, sizes.intermediate_size, sizes.num_layers
    embedding_and_head, attention, mlp, norms = 2 * VOCAB * d, 4 * d * d, 3 * d * f, 2 * d
    assert models.parameter_count(model) == embedding_and_head + n * (attention + mlp + norms) + d == count
    assert count == pytest.approx(label, rel=0.15)


def test_pangu_1b_is_the_1_2b_of_table_14():
    sizes = config.load({"model": OmegaConf.load(SCALES / "pangu_1b.yaml").model}).model
    with torch.device("meta"):
        model = models.build(sizes, 153_376, 4096)
    attention, mlp, norms = (2 * 1536 + 2 * 768) * 1536, 3 * 6144 * 1536, 2 * 1536
    assert model.layers[0].self_attn.head_width == 128
    count = models.parameter_count(model)
    assert count == 153_376 * 1536 + 26 * (attention + mlp + norms) + 1536 == 1_155_792_384
    assert count == pytest.approx(1.2e9, rel=0.05)


@pytest.mark.parametrize(("experts", "count"), [(64, 6_515_775_488), (32, 3_695_630_336)])
def test_what_table_12_gives_is_not_its_3_7b(experts, count):
    """As read (64 experts of a GPT) it is 6.5B; half the experts would be the 3.7B that it says."""
    tree = {"name": "moe", **OmegaConf.to_container(OmegaConf.load(SCALES / "moe_3.7b.yaml").model)}
    assert tree["experts"] == {"number": 64, "top_k": 8}
    sizes = config.load({"model": tree | {"experts": {"number": experts, "top_k": 8}}}).model
    with torch.device("meta"):
        model = models.build(sizes, VOCAB, 4096)
    d, f = 7168, 2048
    attention, expert, router, norms = 4 * (d * d + d), 2 * d * f + f + d, d * experts, 4 * d
    by_hand = (VOCAB + 4096) * d + 3 * (attention + experts * expert + router + norms) + 2 * d
    assert models.parameter_count(model) == by_hand == count
    assert (count == pytest.approx(3.7e9, rel=0.01)) == (experts == 32)


def test_gpt_counts_its_tied_head_once():
    sizes = config.ModelConfig(name="gpt", hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12)
    with torch.device("meta"):
        model = models.build(sizes, 50257, 1024)
    assert models.parameter_count(model) == 124_439_808  # GPT-2 small
