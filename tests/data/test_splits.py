"""What is validated on is not trained on: from the files to the sequences of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_corpora import word_checkpoint, write_examples, write_rows

from gnmr.lab.config import Config, DataConfig, ModelConfig, TrainingConfig
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.build import open_data, training_blocks, validation

Make = Callable[..., DataConfig]


def rows_of(sequences: Batch) -> list[tuple[int, ...]]:
    """The inputs of each sequence and its last target."""
    return [tuple(row) for row in torch.cat([sequences.tokens, sequences.targets[:, -1:]], dim=1).tolist()]


def overlap(data: DataConfig, model: ModelConfig, seq_len: int) -> tuple[int, int, int]:
    """Sequences of an epoch, validation sequences, and how many of these hold ten tokens in a row of training."""
    training = TrainingConfig(seq_len=seq_len, batch_size=1, steps=1)
    config = Config(data=data, model=model, training=training)
    corpus = open_data(config, len)
    sequences = training_blocks(config, corpus, None)
    trained = rows_of(sequences.next(sequences.num_sequences))
    held_out = rows_of(validation(config, corpus, 1000))
    seen = {part for row in trained for part in tens(row)}
    return len(trained), len(held_out), sum(any(part in seen for part in tens(row)) for row in held_out)


def tens(row: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [row[i : i + 10] for i in range(len(row) - 9)]


def letters(number: int) -> str:
    """Forty of the letters a to j at random: no two numbers share ten in a row."""
    draw = torch.Generator().manual_seed(number)
    return " ".join("abcdefghij"[i] for i in torch.randint(10, (40,), generator=draw).tolist())


def write(folder: Path, write_file: Callable[[Path, list[Any]], Path], rows: list[Any], by_name: bool) -> None:
    """The rows in one file, or the last quarter of them in a file for validation."""
    split = 3 * len(rows) // 4
    for name, part in {"train": rows[:split], "valid": rows[split:]}.items() if by_name else [("a", rows)]:
        write_file(folder / f"{name}.jsonl", part)


@pytest.mark.parametrize("by_name", [True, False])
def test_no_validation_sequence_holds_training_tokens(by_name: bool, config: Make, tmp_path: Path) -> None:
    write(tmp_path / "data", write_rows, [letters(i) for i in range(200)], by_name)
    trained, held_out, shared = overlap(config(path=str(tmp_path / "data")), ModelConfig(), 12)
    assert trained > 100 and held_out > 10 and shared == 0


@pytest.mark.parametrize("by_name", [True, False])
def test_no_packed_validation_sequence_holds_training_tokens(
    by_name: bool, config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data", write_examples, [(letters(i), letters(1000 + i)) for i in range(60)], by_name)
    data = config(name="instructions", path=str(tmp_path / "data"))
    checkpoint = word_checkpoint(tmp_path / "checkpoint")
    monkeypatch.setattr("gnmr.lab.models.pretrained.local", lambda name: checkpoint)  # only its tokenizer is read
    model = ModelConfig(name="pretrained", checkpoint=str(checkpoint))
    trained, held_out, shared = overlap(data, model, 82)
    assert trained >= 40 and held_out >= 3 and shared == 0
