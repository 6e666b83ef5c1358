"""A lower bound of a run's memory, by arithmetic alone: a run that cannot fit is refused before anything is built.

    weights + optimizer state + the tokens of a step + the larger of gradients and logits

Activations that are kept for backward are not counted: a run that passes may still not fit, and a run that may fit is
never refused. The loss of a micro-batch holds its logits in FP32 twice, before and after the softmax. A model of ours
is drawn in FP32 on the CPU.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from gnmr.errors import UserError
from gnmr.lab.config import Config, ModelConfig

GB = 10**9
_MOST_LINEARS = 100_000
"""61 layers of 256 experts have 47,000, and each is built by itself."""
_BYTES = 257
"""Vocabulary of a byte-level BPE that merged nothing."""


class _Need(NamedTuple):
    what: str
    keys: str
    """The settings that decide it."""
    size: int
    """Bytes."""


def parameters(model: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """Return the parameter count of a model of ours, as `models.parameter_count` does of a built one."""
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_layers
    if model.name == "llama":
        kv_width = (model.num_kv_heads or model.num_heads) * (width // model.num_heads)
        block = 2 * width * (width + kv_width) + 3 * width * inner + 2 * width
        return vocab_size * width * (1 if model.tied_head else 2) + layers * block + width
    mlp = 2 * width * inner + inner + width
    if model.name == "moe":
        mlp = model.experts.number * (mlp + width)
    block = 4 * (width * width + width) + mlp + 4 * width
    return (vocab_size + seq_len) * width + layers * block + 2 * width


def linears(model: ModelConfig) -> int:
    """Return the number of linears of a model of ours without its head."""
    mlp = {"llama": 3, "gpt": 2, "moe": 2 * model.experts.number + 1}[model.name]
    return model.num_layers * (4 + mlp)


def _sizes(model: ModelConfig) -> str:
    keys = ["hidden_size", "intermediate_size", "num_layers"]
    found = ", ".join(f"model.{key}={getattr(model, key)}" for key in keys)
    return f"{found}, model.experts.number={model.experts.number}" if model.name == "moe" else found


def _on_device(config: Config, vocab_size: int) -> list[_Need]:
    training, model = config.training, config.model
    tokens = training.batch_size * training.seq_len
    batch = f"training.batch_size={training.batch_size}, training.seq_len={training.seq_len}"
    weights = 0  # a checkpoint tells its own
    if model.checkpoint is None:
        weights = parameters(model, vocab_size, training.seq_len) * (2 if training.dtype == "bfloat16" else 4)
    gradients = 0 if model.name == "moe" else weights  # an expert without a token has none
    return [
        _Need("weights", _sizes(model), weights),
        _Need("optimizer state", _sizes(model), 2 * weights if config.optim.name == "adamw" else 0),
        max(
            _Need("gradients", _sizes(model), gradients),
            _Need("logits", batch, 8 * tokens * vocab_size),
            key=lambda need: need.size,
        ),
        _Need(
            "a step's tokens",
            f"{batch}, training.accumulation={training.accumulation}",
            8 * tokens * training.accumulation,
        ),
    ]


def refuse_run(config: Config, device: torch.device, vocab_size: int | None = None) -> None:
    """Raises UserError for a run that cannot fit here.

    vocab_size: the tokenizer's size, once it is known; it may be smaller than data.vocab_size.
    """
    known = vocab_size or (_BYTES if config.data.tokenizer is None and config.model.checkpoint is None else 1)
    cuda, needs = device.type == "cuda", _on_device(config, known)
    if cuda:
        _refuse(needs, torch.cuda.get_device_properties(device).total_memory, "this GPU has")
        needs = []
    if cuda and config.model.checkpoint is None:  # the weights are drawn in FP32 on the CPU
        drawn = 4 * parameters(config.model, known, config.training.seq_len)
        needs.append(_Need("weights as they are drawn", _sizes(config.model), drawn))
    _refuse(needs, machine_memory(), "this machine has")
    if config.model.checkpoint is None and (many := linears(config.model)) > _MOST_LINEARS:
        raise UserError(f"{_sizes(config.model)}: makes {many:,} linears, {_MOST_LINEARS:,} are the most")


def machine_memory() -> int:
    """Return the bytes of memory and swap."""
    swap = 0
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        swap = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")), 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + swap


def _refuse(needs: list[_Need], there: int, has: str) -> None:
    total = sum(need.size for need in needs)
    if total > there:
        most = max(needs, key=lambda need: need.size)
        raise UserError(
            f"{most.keys}: cannot fit into memory: the run needs at least {_gb(total)}, of it {_gb(most.size)} for "
            f"{most.what}, and {has} {_gb(there)}; use smaller ones"
        )


def _gb(size: int) -> str:
    return f"{size / GB:,.0f} GB" if size < 10**6 * GB else f"{size / GB:.1e} GB"


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory_bytes` reads, because a sweep runs many cells in one process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the largest resident size since the reset (Linux), or on CUDA the most that PyTorch allocated.

    Memory of cells that this process ran before may still count. Returns None if the system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
