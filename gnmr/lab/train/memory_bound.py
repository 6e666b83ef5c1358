"""A lower bound of a run's memory, by arithmetic alone: what cannot fit is refused before anything is built.

    weights + optimizer state + the step's tokens + the largest of gradients, loss and one activation

The first three are always there, each of the others at some time in a step. What is kept for backward, which is most of
it in a large batch, is not counted: only `memory_plan`, which builds the model, knows how much that is. So what passes
here may still not fit, and what may fit is never refused.

The loss of a micro-batch holds its logits in FP32 twice, before and after the softmax. On the CPU a model of ours is
drawn in FP32, and each of its linears is a Python object with tables of its own, whatever the device.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from gnmr.errors import UserError
from gnmr.lab.config import Config, ModelConfig

GB = 10**9
LARGEST = 100_000 * GB
"""No machine has more; `gnmr train memory_plan=true` plans for others than this one."""
MOST_LINEARS = 100_000
"""Of a model that is built here: 61 layers of 256 experts have 47,000, and each is made by itself."""
_LINEAR = 3000
"""Bytes of a linear on the meta device, its share of the modules around it included; 3,976 were measured."""
_ENTRY = 32
"""Bytes that training a tokenizer sets aside for each entry of the vocabulary that it may reach."""
_BYTES = 257
"""Vocabulary of a byte-level BPE that merged nothing."""
_WINDOW = 60
"""Bytes of a window of faults in the schedule: half of them, for windows are drawn at random."""


@dataclass(frozen=True)
class Need:
    """Some of the memory."""

    what: str
    keys: str
    """Whose values decide it."""
    size: int
    """Bytes."""


def parameters(model: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """Of a model of ours, as `models.parameter_count` counts them."""
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
    """Of a model of ours, its head aside."""
    mlp = {"llama": 3, "gpt": 2, "moe": 2 * model.experts.number + 1}[model.name]
    return model.num_layers * (4 + mlp)


def on_device(config: Config, vocab_size: int) -> list[Need]:
    """Where the run trains."""
    training, model = config.training, config.model
    tokens = training.batch_size * training.seq_len
    sizes = f"model.hidden_size={model.hidden_size}, model.intermediate_size={model.intermediate_size}, "
    sizes += f"model.num_layers={model.num_layers}"
    batch = f"training.batch_size={training.batch_size}, training.seq_len={training.seq_len}"
    weights = gradients = state = 0
    if model.checkpoint is None:  # else its weights say it
        weights = parameters(model, vocab_size, training.seq_len) * (2 if training.dtype == "bfloat16" else 4)
        gradients = 0 if model.name == "moe" else weights  # an expert without a token has none
        state = 2 * weights if config.optim.name == "adamw" else 0
    activation = 0 if model.checkpoint is not None else 2 * tokens * model.hidden_size
    if model.name in ("llama", "gpt"):  # a mixture's experts see some of the tokens each
        activation = max(activation, 2 * tokens * model.intermediate_size)
    of_a_time = [
        Need("gradients", sizes, gradients),
        Need("logits", batch, 8 * tokens * vocab_size),
        Need("an activation", f"{batch}, {sizes}", activation),
    ]
    return [
        Need("weights", sizes, weights),
        Need("optimizer state", sizes, state),
        max(of_a_time, key=lambda need: need.size),
        Need(
            "a step's tokens",
            f"{batch}, training.accumulation={training.accumulation}",
            8 * tokens * training.accumulation,
        ),
    ]


def on_host(config: Config, vocab_size: int) -> list[Need]:
    """In the memory of the machine, also of a run on a GPU."""
    model = config.model
    if model.checkpoint is not None:
        return []
    sizes = f"model.hidden_size={model.hidden_size}, model.num_layers={model.num_layers}"
    return [Need("weights as they are drawn", sizes, 4 * parameters(model, vocab_size, config.training.seq_len))]


def to_build(config: Config) -> list[Need]:
    """In the memory of the machine, even for a plan."""
    model, faults, training = config.model, config.faults, config.training
    needs = []
    if faults.kind != "none" and not faults.windows and faults.rate:
        keys = f"faults.rate={faults.rate}, training.steps={training.steps}"
        needs.append(Need("windows of faults", keys, int(_WINDOW * training.steps * faults.rate / 1000)))
    if model.checkpoint is not None:
        return needs
    keys = f"model.num_layers={model.num_layers}"
    keys += f", model.experts.number={model.experts.number}" if model.name == "moe" else ""
    needs.append(Need("modules", keys, _LINEAR * linears(model)))
    if model.name == "llama":  # angles, cosines and sines of half a head's channels, FP32
        size = 6 * training.seq_len * (model.hidden_size // model.num_heads)
        needs.append(Need("rotary tables", f"training.seq_len={training.seq_len}", size))
    return needs


def to_tokenize(config: Config) -> list[Need]:
    """In the memory of the machine, where a tokenizer is trained."""
    if config.data.tokenizer is not None or config.model.checkpoint is not None:
        return []
    return [
        Need(
            "tables of the tokenizer's training",
            f"data.vocab_size={config.data.vocab_size}",
            _ENTRY * config.data.vocab_size,
        )
    ]


def _refuse_many(config: Config) -> None:
    """UserError for more linears than are built in a few seconds, whatever their size."""
    model = config.model
    if model.checkpoint is None and (many := linears(model)) > MOST_LINEARS:
        keys = f"model.num_layers={model.num_layers}"
        keys += f", model.experts.number={model.experts.number}" if model.name == "moe" else ""
        raise UserError(f"{keys}: makes {many:,} linears, {MOST_LINEARS:,} are the most")


def refuse_run(config: Config, device: torch.device, vocab_size: int | None = None) -> None:
    """UserError for a run that cannot fit here. vocab_size: once it is known; it may be less than data.vocab_size."""
    known = vocab_size or (_BYTES if config.data.tokenizer is None and config.model.checkpoint is None else 1)
    need = on_device(config, known)
    if device.type == "cuda":
        _refuse(need, torch.cuda.get_device_properties(device).total_memory, "this GPU has")
        need = on_host(config, known)
    _refuse([*need, *to_build(config), *to_tokenize(config)], machine_memory(), "this machine has")
    _refuse_many(config)


def refuse_plan(config: Config) -> None:
    """UserError for a plan that cannot be made, or that no machine could hold."""
    _refuse(to_build(config), machine_memory(), "this machine has")
    _refuse(on_device(config, config.data.vocab_size), LARGEST, "no machine has more than")
    _refuse_many(config)


def machine_memory() -> int:
    """Bytes of memory and swap."""
    swap = 0
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        swap = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")), 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + swap


def _refuse(needs: list[Need], there: int, has: str) -> None:
    total = sum(need.size for need in needs)
    if total > there:
        most = max(needs, key=lambda need: need.size)
        raise UserError(
            f"{most.keys}: cannot fit into memory: the run needs at least {_gb(total)}, of it {_gb(most.size)} for "
            f"{most.what}, and {has} {_gb(there)}; use smaller ones"
        )


def _gb(size: int) -> str:
    return f"{size / GB:,.0f} GB" if size < 10**6 * GB else f"{size / GB:.1e} GB"
