"""Fine-tuning in two processes: adapters on a frozen base and whole checkpoints, from a folder and back into one."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import torch
from everything import SHARDED, differences, everything

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
WORDS = ["training.accumulation=2", "training.batch_size=2", "training.steps=6", "optim.lr=0.01"]
LORA = ["model.adapter.rank=2", "model.adapter.dropout=0.2", "precision.unit=block", "controller.observe=adapter"]


@pytest.fixture(scope="module")
def base(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    return train(folder, "model.num_layers=2", "training.export_hf=true", *WORDS)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """Words of a run on it, whose micro-batches have unequal numbers of targets."""
    draw, file = random.Random(1), tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": "ab" * draw.randint(1, 3), "response": "cd" * draw.randint(1, 6)} for _ in range(200)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data.name=instructions", f"data.path={file}", "model.name=pretrained"]
    return [*WORDS, *data, f"model.checkpoint={base / 'hf'}"]


def tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


@pytest.mark.parametrize(
    ("parallel", "paths"),
    [
        ("ddp", ["precision.low=sim_int8", "precision.recovery=bf16"]),
        ("fsdp", ["precision.low=llm_int8", "precision.recovery=bf16", "precision.weights=instead"]),
    ],
    ids=["ddp", "fsdp, codes"],
)
def test_adapters_are_those_of_one_process(told, ranks, train, tuned, tmp_path, numbered, parallel, paths):
    words = [*tuned, *LORA, *paths]
    one = everything(train(tmp_path / "one", *words, *numbered))
    assert told(words, parallel, stop=4) == [128 + signal.SIGTERM] * 2
    two = everything(ranks(words, parallel))
    assert not any(name.endswith("base_layer.weight") for name in two["state"]["model"]), "the base is in no checkpoint"
    sums = SHARDED if parallel == "fsdp" else {}
    for part in ("model", "optimizer", "plan"):
        assert differences(one["state"][part], two["state"][part], **sums) == []
    assert differences(*([row["loss"] for row in run["steps"]] for run in (one, two)), **sums) == []
    assert [row["unit"] for row in one["events"]] == [row["unit"] for row in two["events"]] != []
    left = [tensors(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "run")]
    assert left[0] and differences(*left, **sums) == []


def test_whole_weights_are_trained_in_shards_and_written_whole(ranks, train, base, tuned, tmp_path):
    sharded = ranks(["model.num_layers=2", "training.export_hf=true", *WORDS], "fsdp", "base")
    exported = [tensors(folder / "hf" / "model.safetensors") for folder in (base, sharded)]
    assert differences(*exported, **SHARDED) == []
    words = [*tuned, "training.export_hf=true"]
    both = ranks(words, "fsdp"), train(tmp_path / "one", *words)
    ours, theirs = (tensors(folder / "hf" / "model.safetensors") for folder in both)
    assert differences(ours, theirs, **SHARDED) == [] and differences(ours, exported[0], **SHARDED) != []
    names = [{file.name for file in (folder / "hf").iterdir()} for folder in both]
    assert names[0] == names[1]
