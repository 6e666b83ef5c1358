"""Bits per byte, tokens per second and MFU, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gnmr.lab.data.batch import IGNORED, Batch
from gnmr.lab.train.loss import bits_per_byte, bytes_per_target
from gnmr.lab.train.throughput import peak_of_name, throughput


def test_bits_per_byte_by_hand() -> None:
    token_bytes = np.array([0, 1, 5, 3])
    block = Batch.of_sequences(torch.tensor([[1, 2, 3], [3, 0, 1]]))  # the targets are 2 3 and 0 1: 9 bytes
    answers = Batch(torch.tensor([[1, 2]]), torch.tensor([[IGNORED, 2]]))
    assert bytes_per_target([block], token_bytes) == 9 / 4
    assert bytes_per_target([block, answers], token_bytes) == 14 / 5
    assert bits_per_byte(math.log(2), 9 / 4) == pytest.approx(4 / 9)
    # A text of which nothing is known has no bytes.
    assert bytes_per_target([block], None) is None and bytes_per_target([block], token_bytes * 0) is None
    assert bits_per_byte(1.0, None) is None


def test_mfu_by_hand() -> None:
    # 1,000 tokens in 2 s at 6e9 FLOPs each are 3e12 FLOPs per second, of 2 devices of 3e12
    assert throughput(1000, 2.0, 6e9, 3e12, devices=2) == {"tokens_per_s": 500.0, "mfu": pytest.approx(0.5)}
    assert throughput(1000, 2.0, 6e9, None)["mfu"] is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA L40S", 362),
    ],
)
def test_peak_by_the_full_name_of_a_device(name: str, teraflops: float | None) -> None:
    assert peak_of_name(name) == (None if teraflops is None else teraflops * 1e12)
