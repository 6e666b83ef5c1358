"""A lower bound of a run's memory by arithmetic, which refuses a run that cannot fit before anything is built.

    weights + optimizer state + the tokens of a step + the larger of gradients and logits

Activations that are kept for the backward pass are not counted. A run that passes may still not fit, but a run that
fits is never refused. The loss of a micro-batch holds its logits in FP32 twice, before and after the softmax. The
weights of a new model are drawn in FP32 on the CPU.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnmr.errors import UserError, warn
from gnmr.lab.config import Config, ModelConfig
from gnmr.lab.config.model import LLAMAS
from gnmr.lab.data.batch import Batch
from gnmr.lab.models import pretrained
from gnmr.measure.blocks import named_blocks

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_IMPORTS, _PER_INPUT, _PER_LOGIT = 400_000_000, 12, 36
"""Bytes of a diagnosis: of the libraries, and per token of an input of a linear and of a logit (measured on a CPU)."""
_CASTS, _ACTIVATIONS = 8, 6
"""Casts of the largest matrix, and copies of each input of a matrix, that stand while a block is measured."""
_BYTES = 257
"""Vocabulary size of a byte-level BPE without merges."""


def parameters(model: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """Return the number of parameters of a new model, which is not built. A tied head counts once."""
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_layers
    if model.name in LLAMAS:
        kv_width = (model.num_kv_heads or model.num_heads) * (width // model.num_heads)
        # Llama: Q and O have d^2 each, K and V d d_kv, SwiGLU 3 d m, and the two norms 2 d.
        block = 2 * width * (width + kv_width) + 3 * width * inner + 2 * width
        return vocab_size * width * (1 if model.tied_head else 2) + layers * block + width
    # GPT: two matrices d m with biases; a mixture has them for each expert, and a router row of d.
    mlp = 2 * width * inner + inner + width
    if model.name == "moe":
        mlp = model.experts.number * (mlp + width)
    # Q, K, V and O with biases, and two LayerNorms with gain and bias.
    block = 4 * (width * width + width) + mlp + 4 * width
    return (vocab_size + seq_len) * width + layers * block + 2 * width


def needs_of(config: Config, vocab_size: int) -> list[tuple[int, str, str]]:
    """Return (bytes, purpose, the settings that determine it) for each part of a run's device memory."""
    training, model = config.training, config.model
    batch = f"training.batch_size={training.batch_size}, training.seq_len={training.seq_len}"
    # In bytes. Tokens and targets are int64; logits are FP32 before and after the softmax.
    tokens, size, weights = training.batch_size * training.seq_len, 2 if training.dtype == "bfloat16" else 4, 0
    if model.checkpoint is None:
        weights = trained = size * parameters(model, vocab_size, training.seq_len)
    else:  # adapters may be all that is trained
        trained = 0
        with suppress(UserError):  # a name on the hub, or a fault that loading tells
            tensors = pretrained.tensors_of(Path(model.checkpoint).expanduser())
            weights = size * sum(math.prod(shape) for shape, _ in tensors.values())
    gradients = 0 if model.name == "moe" else trained  # an expert without tokens has no gradient
    return [
        (weights, "weights", _sizes(model)),
        # AdamW keeps two moments in the dtype of the weights.
        (2 * trained if config.optim.name == "adamw" else 0, "optimizer state", _sizes(model)),
        # Logits and all gradients need not exist at once, so a lower bound counts the larger.
        max((gradients, "gradients", _sizes(model)), (8 * tokens * vocab_size, "logits", batch)),
        (8 * tokens * training.accumulation, "tokens", f"{batch}, training.accumulation={training.accumulation}"),
    ]


def _sizes(model: ModelConfig) -> str:
    if model.checkpoint is not None:
        return f"model.checkpoint={model.checkpoint}"
    keys = ("hidden_size", "intermediate_size", "num_layers")
    sizes = ", ".join(f"model.{key}={getattr(model, key)}" for key in keys)
    return f"{sizes}, model.experts.number={model.experts.number}" if model.name == "moe" else sizes


def refuse_run(config: Config, device: torch.device, vocab_size: int | None = None) -> None:
    """Raise UserError if the run cannot fit into the memory of this machine.

    Pass `vocab_size` once the tokenizer's size is known; it may be smaller than data.vocab_size.
    """
    is_new = config.model.checkpoint is None
    entries = vocab_size or (_BYTES if config.data.tokenizer is None and is_new else 1)
    needs = needs_of(config, entries)
    if device.type == "cuda":
        _refuse(needs, torch.cuda.get_device_properties(device).total_memory, "this GPU has")
        # Beside a GPU, the host must hold the weights in FP32 while they are drawn.
        drawn = 4 * parameters(config.model, entries, config.training.seq_len) if is_new else 0
        needs = [(drawn, "weights as they are drawn", _sizes(config.model))]
    _refuse(needs, machine_memory(), "this machine has")


def _refuse(needs: list[tuple[int, str, str]], available: int, has: str) -> None:
    if (total := sum(size for size, *_ in needs)) > available:
        size, purpose, keys = max(needs)
        raise UserError(
            f"{keys}: cannot fit into memory: the run needs at least {total / 1e9:,.0f} GB, of it {size / 1e9:,.0f} GB "
            f"for {purpose}, and {has} {available / 1e9:,.0f} GB; use smaller ones"
        )


def machine_memory() -> int:
    """Return the bytes of memory and swap, or what a container or `ulimit -v` leaves of them."""
    swap, page = 0, os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        swap = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")), 0)
    # The smallest of: physical memory and swap, a container's limit, and what `ulimit -v` leaves.
    limits = [page * os.sysconf("SC_PHYS_PAGES") + swap]
    for file in _CGROUPS:
        with suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()) + swap)
    with suppress(OSError, ValueError, IndexError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:  # addresses that the process holds are not given back
            limits.append(max(0, limit - page * int(Path("/proc/self/statm").read_text().split()[0])))
    return min(limits)


def _memory_of(device: torch.device) -> tuple[int, str]:
    """Return the bytes of memory for a model on this device, and the words that say whose they are."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "this GPU has"
    return machine_memory(), "this process can have"


def refuse_checkpoint(
    tensors: Mapping[str, tuple[tuple[int, ...], int]],
    device: torch.device,
    *,
    where: str,
    gradients: bool,
    floats: bool,
    tokens: int,
) -> None:
    """Raise UserError if a checkpoint's weights cannot fit; warn if a diagnosis of it probably does not.

    Args:
        tensors: (shape, bytes of a number) of each tensor, by its name.
        device: where the model will be.
        where: its name in messages.
        gradients: whether there is a gradient for each weight.
        floats: whether the weights will be converted to float32.
        tokens: tokens of a batch that is diagnosed; 0: it is not.
    """
    # A lower bound, which refuses: the weights, and a gradient for each of them.
    numbers = {name: math.prod(shape) for name, (shape, _) in tensors.items()}
    weights = sum(number * (4 if floats else max(2, tensors[name][1])) for name, number in numbers.items())
    need, (available, has) = weights * (1 + gradients), _memory_of(device)
    needs = f"{sum(numbers.values()) / 1e9:,.3g} billion parameters{' with gradients' * gradients} take"
    smaller = f"use {'dtype=own, ' * floats}a smaller model or a larger machine"
    if need > available:
        raise UserError(
            f"{where}: cannot fit into memory: its {needs} {need / 1e9:,.3g} GB, and {has} {available / 1e9:,.3g} GB; "
            f"{smaller}"
        )
    # An estimate, which only warns: the inputs of all linears, and the logits, of each token.
    matrices = {name: shape for name, (shape, _) in tensors.items() if len(shape) == 2}
    inputs = sum(shape[1] for name, shape in matrices.items() if "emb" not in name and "wte" not in name)
    per_token = _PER_INPUT * inputs + _PER_LOGIT * max((shape[0] for shape in matrices.values()), default=0)
    total = _IMPORTS + need + tokens * per_token
    if tokens and total > available:
        warn(
            f"{where}: may not fit into memory: about {total / 1e9:,.3g} GB for its weights and {tokens:,} tokens a "
            f"batch, and {has} {available / 1e9:,.3g} GB; use a smaller batch_size= or block=, or {smaller[4:]}"
        )


def memory_to_estimate(
    model: nn.Module,
    batches: Sequence[Batch],
    device: torch.device,
    operators: int,
    side_by_side: Sequence[tuple[int, Sequence[Batch]]],
) -> str:
    """Return one line that says what an estimate block by block holds in memory.

    Args:
        model: the model, whose blocks are on the meta device.
        batches: the batches that are priced.
        device: where the blocks run.
        operators: number of operators.
        side_by_side: number of models that go through the blocks together, and their batches.

    Raises:
        UserError: this is more memory than there is.
    """
    _, blocks = named_blocks(model)
    most = max(batch.tokens.numel() for batch in batches)
    # The hidden states that enter each block, or those of the models that go side by side.
    hidden = max(len(blocks) * most, *(models * _tokens_of(some) for models, some in side_by_side))
    # What is measured in a block: the activations of its operators, and casts of weights.
    matrices = [p.shape[-2:].numel() for block in blocks for p in block.parameters() if p.dim() > 1]
    inputs = sum(p.shape[-1] for p in blocks[0].parameters() if p.dim() > 1)
    measured = 4 * (_CASTS * max(matrices) + _ACTIVATIONS * most * inputs)
    advice = "diagnose", "a smaller batch_size=, block= or confirm="
    total = _block_by_block(model, device, most, hidden, measured, _PER_LOGIT, advice)
    return f"estimating {operators} operators, {len(blocks)} blocks one after the other: {total / 1e9:,.3g} GB"


def memory_to_measure(
    model: nn.Module, batches: Sequence[Batch], device: torch.device, operators: int, recipes: int
) -> str:
    """Return one line that says what measuring every operator alone holds in memory, and how long it takes.

    The arguments and the error are those of `memory_to_estimate`; each operator is measured on `recipes` recipes.
    """
    most = max(batch.tokens.numel() for batch in batches)
    hidden = (operators * recipes + 2) * _tokens_of(batches)
    advice = "measure=all", "fewer batches= or a smaller batch_size="
    # Logits of two models, and slices of them.
    total = _block_by_block(model, device, most, hidden, 0, 12, advice)
    passes = len(batches) * (2 + operators * recipes / 2)
    on = f" on {recipes} recipes" if recipes > 1 else ""
    return (
        f"measuring {operators} operators alone{on}, {len(named_blocks(model)[1])} blocks one after the other: the "
        f"time of about {passes:,.0f} forward passes of a batch, and {total / 1e9:,.3g} GB"
    )


def _block_by_block(
    model: nn.Module,
    device: torch.device,
    tokens: int,
    hidden: int,
    measured: int,
    per_logit: int,
    advice: tuple[str, str],
) -> int:
    """Return the bytes of passes block by block.

    Args:
        model: the model, whose blocks are on the meta device.
        device: where the blocks run.
        tokens: tokens of the largest batch.
        hidden: tokens whose hidden states are held.
        measured: bytes of what is measured in a block.
        per_logit: bytes for each logit of a batch.
        advice: what is refused, and what to use instead.

    Raises:
        UserError: this is more memory than there is.
    """
    size = next(parameter.element_size() for parameter in model.parameters() if not parameter.is_meta)
    of_block = max(sum(p.numel() for p in block.parameters()) for block in named_blocks(model)[1])
    around = sum(p.numel() for p in model.parameters() if not p.is_meta)
    config: Any = model.config
    width, vocabulary = config.get_text_config().hidden_size, len(model.get_input_embeddings().weight)  # type: ignore[operator]
    # A block and the tensor that is read next.
    total = _IMPORTS + size * (around + 2 * of_block + hidden * width) + measured + per_logit * tokens * vocabulary
    there, has = _memory_of(device)
    if total > there:
        raise UserError(
            f"{advice[0]}: cannot fit into memory: about {total / 1e9:,.3g} GB, of it {size * around / 1e9:,.3g} GB "
            f"for the embedding and the head and {size * hidden * width / 1e9:,.3g} GB for hidden states, and {has} "
            f"{there / 1e9:,.3g} GB; use {advice[1]}"
        )
    return total


def _tokens_of(batches: Sequence[Batch]) -> int:
    return sum(batch.tokens.numel() for batch in batches)


def out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out; the CPU's allocator has no error type of its own."""
    words = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "unable to mmap")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, (RuntimeError, OSError)) and any(word in str(error) for word in words)
    )


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
