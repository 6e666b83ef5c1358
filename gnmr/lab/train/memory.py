"""A lower bound of a run's memory by arithmetic, which refuses a run that cannot fit before anything is built.

    weights + optimizer state + the tokens of a step + the larger of gradients and logits

Activations that are kept for the backward pass are not counted. A run that passes may still not fit, but a run that
fits is never refused. The loss of a micro-batch holds its logits in FP32 twice, before and after the softmax. The
weights of a new model are drawn in FP32 on the CPU.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from gnmr.errors import UserError
from gnmr.lab.config import Config, ModelConfig

_BYTES = 257
"""Vocabulary size of a byte-level BPE without merges."""


def parameters(model: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """Return the number of parameters of a new model, which is not built. A tied head counts once."""
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


def needs_of(config: Config, vocab_size: int) -> list[tuple[int, str, str]]:
    """Return (bytes, purpose, the settings that determine it) for each part of a run's device memory."""
    training, model = config.training, config.model
    batch = f"training.batch_size={training.batch_size}, training.seq_len={training.seq_len}"
    tokens, weights = training.batch_size * training.seq_len, 0  # a checkpoint's size is not known here
    if model.checkpoint is None:
        weights = parameters(model, vocab_size, training.seq_len) * (2 if training.dtype == "bfloat16" else 4)
    gradients = 0 if model.name == "moe" else weights  # an expert without tokens has no gradient
    return [
        (weights, "weights", _sizes(model)),
        (2 * weights if config.optim.name == "adamw" else 0, "optimizer state", _sizes(model)),
        max((gradients, "gradients", _sizes(model)), (8 * tokens * vocab_size, "logits", batch)),
        (8 * tokens * training.accumulation, "tokens", f"{batch}, training.accumulation={training.accumulation}"),
    ]


def _sizes(model: ModelConfig) -> str:
    found = ", ".join(
        f"model.{key}={getattr(model, key)}" for key in ("hidden_size", "intermediate_size", "num_layers")
    )
    return f"{found}, model.experts.number={model.experts.number}" if model.name == "moe" else found


def refuse_run(config: Config, device: torch.device, vocab_size: int | None = None) -> None:
    """Raise UserError if the run cannot fit into the memory of this machine.

    Pass `vocab_size` once the tokenizer's size is known; it may be smaller than data.vocab_size.
    """
    ours = config.model.checkpoint is None
    known = vocab_size or (_BYTES if config.data.tokenizer is None and ours else 1)
    needs = needs_of(config, known)
    if device.type == "cuda":
        _refuse(needs, torch.cuda.get_device_properties(device).total_memory, "this GPU has")
        drawn = 4 * parameters(config.model, known, config.training.seq_len) if ours else 0
        needs = [(drawn, "weights as they are drawn", _sizes(config.model))]
    _refuse(needs, machine_memory(), "this machine has")


def _refuse(needs: list[tuple[int, str, str]], there: int, has: str) -> None:
    if (total := sum(size for size, *_ in needs)) > there:
        size, what, keys = max(needs)
        raise UserError(
            f"{keys}: cannot fit into memory: the run needs at least {total / 1e9:,.0f} GB, of it {size / 1e9:,.0f} GB "
            f"for {what}, and {has} {there / 1e9:,.0f} GB; use smaller ones"
        )


def machine_memory() -> int:
    """Return the bytes of memory and swap."""
    swap = 0
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        swap = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")), 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + swap


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory_bytes` reads, because a sweep runs many cells in one process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the largest resident size since the reset (Linux), or the most memory that PyTorch allocated on CUDA.

    Memory of earlier cells in this process may still count. Returns None if the system does not report it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
