"""Off is off: with every unit on the 16-bit path a run is what plain PyTorch makes of it, but for the order of sums."""

from __future__ import annotations

import math

import pytest
import torch
from everything import differences, weights
from torch import nn
from torch.nn import functional as F

from gnmr.lab import models
from gnmr.lab.data.sequences import TrainSequences
from gnmr.lab.data.tokens import prepare
from gnmr.records.reader import read_jsonl

SUMS = {"terms": 48, "products": 60}
"""Of the longest sum of a tiny model, and of the products in a row of some steps."""


def plain_loop(config) -> tuple[list[float], nn.Module]:
    """Losses and model of a loop that knows nothing of paths and controllers."""
    corpus = prepare(config.data, 0, lambda _: None)
    training, optim = config.training, config.optim
    generator = torch.Generator().manual_seed(training.seed)
    model = models.build(config.model, corpus.vocab_size, training.seq_len)
    model.init_weights(generator)
    outliers = config.model.outlier_channels
    if outliers.number:
        models.add_outlier_channels(model, outliers.number, outliers.gain, generator)
    model.to(getattr(torch, training.dtype))
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))

    blocks = TrainSequences(corpus.train, training.seq_len, training.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=tuple(optim.betas), fused=True)
    warmup = round(optim.warmup_frac * training.steps)
    losses = []
    for t in range(1, training.steps + 1):
        rate = optim.lr * t / warmup
        if t > warmup:
            cosine = (1 + math.cos(math.pi * (t - warmup) / (training.steps - warmup))) / 2
            rate = optim.lr * (optim.min_lr_frac + (1 - optim.min_lr_frac) * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros(())
        for _ in range(training.accumulation):
            block = blocks.next(training.batch_size)
            logits = model(block.tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), block.targets.flatten())
            (loss / training.accumulation).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total / training.accumulation))
    return losses, model


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ("saved", ["model.outlier_channels.number=2", "model.outlier_channels.gain=20", "model.num_kv_heads=1"]),
        ("saved", ["model.name=gpt"]),
        ("forward", ["training.dtype=float32", "training.accumulation=2"]),
        pytest.param("forward", [], marks=pytest.mark.slow),
    ],
    ids=["llama_bf16_outliers", "gpt_bf16", "llama_fp32_accumulated", "llama_bf16"],
)
def test_off_is_off(site, words, train, tiny, tmp_path):
    words = [*words, "model.num_layers=2", "optim.lr=1e-2", "optim.weight_decay=0.1", "optim.warmup_frac=0.25"]
    off = ["precision.low=bf16", "precision.recovery=null", f"precision.site={site}", "training.checkpoint_every=100"]
    losses, model = plain_loop(tiny(*words))
    folder = train(tmp_path / "run", *words, *off)
    rows = read_jsonl(folder / "steps.jsonl")
    assert differences([row["loss"] for row in rows], losses, **SUMS) == []
    assert losses[-1] < losses[0] - 0.1  # it learned something
    trained = weights(folder)["model"]
    assert differences(dict(model.state_dict()), trained, **SUMS) == []
    assert {row["num_active"] for row in rows} == {0}


def test_routed_between_two_16_bit_paths_is_off_too(train, tiny, tmp_path):
    losses, model = plain_loop(tiny())
    folder = train(tmp_path / "run", "precision.low=bf16", "precision.recovery=bf16")
    rows = read_jsonl(folder / "steps.jsonl")
    assert differences([row["loss"] for row in rows], losses, **SUMS) == []
    assert any(row["num_active"] for row in rows)
    trained = weights(folder)["model"]
    assert differences(dict(model.state_dict()), trained, **SUMS) == []
    low = weights(train(tmp_path / "low", "precision.low=sim_int8", "precision.recovery=bf16"))["model"]
    assert differences(low, trained, **SUMS) != [], "INT8 would pass for BF16"
