"""Fine-tuning in two processes: adapters on a frozen base and whole checkpoints, from a folder and back into one."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gnmr.lab.config import Config

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from everything import differences, everything

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]
WORDS = ["training.accumulation=2", "training.batch_size=2", "training.steps=6", "optim.lr=0.01"]
LORA = ["model.adapter.rank=2", "model.adapter.dropout=0.2", "precision.unit=block", "controller.observe=adapter"]


@pytest.fixture(scope="module")
def base(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    return train(folder, "model.num_layers=2", "training.export_hf=true", *WORDS)


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
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
def test_adapters_are_those_of_one_process(
    pair: Callable[..., list[Any]],
    tiny: Callable[..., Config],
    train: Callable[..., Path],
    tuned: list[str],
    tmp_path: Path,
    numbered: list[str],
    parallel: str,
    paths: list[str],
) -> None:
    words = [*tuned, *LORA, *paths]
    one = everything(train(tmp_path / "one", *words, *numbered))
    config = tiny(f"run_dir={tmp_path / 'run'}", *words)
    assert pair("train", config=config, parallel=parallel, stop=4) == [128 + signal.SIGTERM] * 2
    told = pair("train", config=config, parallel=parallel)
    assert isinstance(told[0], list), told
    two = everything(tmp_path / "run")
    assert not any(name.endswith("base_layer.weight") for name in two["state"]["model"]), "the base is in no checkpoint"
    for part in ("model", "optimizer", "plan"):
        assert differences(one["state"][part], two["state"][part]) == []
    assert [row["loss"] for row in one["steps"]] == [row["loss"] for row in two["steps"]]
    assert [row["unit"] for row in one["events"]] == [row["unit"] for row in two["events"]] != []
    left = [tensors(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "run")]
    assert left[0] and differences(*left) == []


def test_whole_weights_are_trained_in_shards_and_written_whole(
    pair: Callable[..., list[Any]],
    tiny: Callable[..., Config],
    train: Callable[..., Path],
    base: Path,
    tuned: list[str],
    tmp_path: Path,
) -> None:
    words = ["model.num_layers=2", "training.export_hf=true", *WORDS]
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'base'}", *words), parallel="fsdp")
    assert isinstance(told[0], list), told
    exported = [tensors(folder / "hf" / "model.safetensors") for folder in (base, tmp_path / "base")]
    assert differences(*exported) == []
    words = [*tuned, "training.export_hf=true"]
    told = pair("train", config=tiny(f"run_dir={tmp_path / 'run'}", *words), parallel="fsdp")
    assert isinstance(told[0], list), told
    one = train(tmp_path / "one", *words)
    ours, theirs = (tensors(folder / "hf" / "model.safetensors") for folder in (tmp_path / "run", one))
    assert differences(ours, theirs) == [] and differences(ours, exported[0]) != []
    names = [{file.name for file in (folder / "hf").iterdir()} for folder in (tmp_path / "run", one)]
    assert names[0] == names[1]
