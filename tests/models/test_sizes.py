"""Every published size, built on the meta device; all parameters count, the untied head included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from gnmr import config, models

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


def test_gpt_counts_its_tied_head_once():
    sizes = config.ModelConfig(name="gpt", hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12)
    with torch.device("meta"):
        model = models.build(sizes, 50257, 1024)
    assert models.parameter_count(model) == 124_439_808  # GPT-2 small
