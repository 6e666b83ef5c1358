"""The loss on a batch, its mean over batches, and the random numbers of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.attachment.ranks.reduce import DistributedRanks
from gnmr.attachment.ranks.world import ALONE, World
from gnmr.conversion import ConvertedModel
from gnmr.lab.data.batch import IGNORED, Batch, model_inputs
from gnmr.lab.models import Decoder


def loss_of(model: nn.Module, batch: Batch, call: Callable[..., Any] | None = None) -> Tensor:
    """Return the mean next-token cross-entropy over the targets of `batch` in FP32, a scalar on the device.

    `call` is called instead of the model (`Wrapped.call`).
    """
    # In FP32: a sum of exponentials over the vocabulary loses too much in BF16.
    return F.cross_entropy(logits_of(model, batch, call).float().flatten(0, 1), batch.targets.flatten())


def logits_of(model: nn.Module, block: Batch, call: Callable[..., Any] | None = None) -> Tensor:
    """Return the next-token logits at each position of `block`, (B, T, V). See `loss_of` for `call`."""
    call = model if call is None else call
    if isinstance(model, Decoder):
        assert block.positions is None, "models of ours read one document a block"
        logits: Tensor = call(block.tokens)
        return logits
    inputs = model_inputs(block)
    if block.inputs is not None:  # sound and pictures are float32
        dtype = next(model.parameters()).dtype
        inputs = {name: x.to(dtype) if _is_floating(x) else x for name, x in inputs.items()}
    logits = call(**inputs).logits
    return logits


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def bytes_per_target(batches: Sequence[Batch], token_bytes: np.ndarray | None) -> float | None:
    """Return the mean bytes of text of a target.

    Args:
        batches: on the CPU.
        token_bytes: bytes of each token of the vocabulary, (V,), or None if unknown.

    Returns:
        The mean over the targets with loss. None if it is unknown or 0.
    """
    if token_bytes is None:
        return None
    targets = [batch.targets.numpy() for batch in batches]
    text_bytes = sum(int(token_bytes[tokens[tokens != IGNORED]].sum()) for tokens in targets)
    return text_bytes / sum(batch.num_targets for batch in batches) or None


def bits_per_byte(loss: float, bytes_of_target: float | None) -> float | None:
    """Return a loss in nats per target as bits per byte of the text, which no tokenizer changes; None if unknown."""
    return None if bytes_of_target is None else loss / math.log(2) / bytes_of_target


def objective_of(model: nn.Module, loss: Tensor) -> Tensor:
    """Return the loss for the backward pass: `loss` plus the model's auxiliary loss, if it has one."""
    auxiliary = model.auxiliary_loss if isinstance(model, Decoder) else None
    # The auxiliary loss only shapes the gradient; the recorded loss is the cross-entropy alone.
    return loss if auxiliary is None else loss + auxiliary


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return `Decoder.statistics`, or nothing for a Hugging Face model."""
    return model.statistics() if isinstance(model, Decoder) else {}


class Experts:
    """Tracks which experts of a model received tokens in a step, in this process and in all processes.

    FSDP2 gives experts without tokens zero gradients, so that all ranks reduce the same parameters. AdamW would update
    these experts. In a single process an expert without tokens has no gradient, so its weights and moments do not
    change.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._parameters = [list(expert.parameters()) for expert in model.experts()]
        self._reached: list[Tensor] = []

    def add(self) -> None:
        """Count a training forward pass of this process."""
        self._reached.append(self._model.reached())

    def take(self) -> Tensor:
        """Return the number of passes in which each expert had a token in this process, (E,) float64, and reset it."""
        reached, self._reached = self._reached, []
        return torch.stack(reached).sum(dim=0).double()

    def drop(self, reached: Tensor) -> None:
        """Drop the gradients of experts without tokens; `reached` is the sum of `take()` over ranks. Waits."""
        for passes, parameters in zip(reached.tolist(), self._parameters, strict=True):
            # As in a single process: without a gradient, neither weight decay nor the moments touch the expert.
            if not passes:
                for parameter in parameters:
                    parameter.grad = None


def divisors(micro_batches: Sequence[Batch]) -> list[float]:
    """Return the divisor of each micro-batch's mean loss, which is their number if all have equal target counts."""
    counts = [batch.num_targets for batch in micro_batches]
    # mean over all N targets = sum_i (n_i / N) mean_i, so mean_i is divided by N / n_i.
    return [sum(counts) / count for count in counts]


class Draws:
    """Random numbers for dropout and stochastic rounding that do not depend on the number of processes.

    Stochastic rounding always draws from (seed, step, micro-batch, operator). With parallel=none, dropout draws in the
    order of the micro-batches, from PyTorch's generators, which checkpoints contain. With any other `parallel`, dropout
    draws from (seed, step, index of the micro-batch in the step), whichever process runs it. Call `begin_step` before
    the first micro-batch of a step.
    """

    def __init__(self, seed: int, converted: ConvertedModel, device: torch.device) -> None:
        self._seed, self._converted = seed, converted
        self._devices = [device] if device.type == "cuda" else []
        self._step = 0

    def begin_step(self, step: int) -> None:
        """Set the step (from 1) that the next micro-batches belong to."""
        self._step = step

    @contextmanager
    def of(self, number: int, *, evaluation: bool = False) -> Iterator[None]:
        """Seed PyTorch's generators and stochastic rounding for the passes of a micro-batch, then restore them.

        `number` is the index of the micro-batch in the step, from 0, or in an `evaluation` after the step.
        """
        # Hashing all four gives neighbouring steps and micro-batches unrelated seeds.
        words = [self._seed, self._step, number, int(evaluation)]
        seeds = np.random.SeedSequence(words).generate_state(1, np.uint64).tolist()
        rounding = self._converted.shared.rounding
        named = nullcontext() if rounding is None else rounding.micro_batch(number, evaluation)
        # Restored afterwards, so that what runs here shifts no other draw of the run.
        with torch.random.fork_rng(self._devices), named:
            torch.manual_seed(seeds[0])
            yield


@torch.no_grad()
def evaluate(
    model: nn.Module,
    converted: ConvertedModel,
    blocks: Batch,
    batch_size: int,
    low: bool = False,
    world: World = ALONE,
    draws: Draws | None = None,
) -> float:
    """Return the mean cross-entropy over the targets of `blocks` in nats. Waits for the device.

    Every operator runs on the 16-bit path, or on the low path if `low` is true. Several processes share the batches.
    """
    was_training = model.training
    model.eval()
    batches = blocks.split(batch_size)
    with converted.on_low_path() if low else converted.high_precision():
        # Sums n_i mean_i and divides once at the end, because packed batches differ in their number of targets.
        total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
        for i in range(world.rank, len(batches) + -len(batches) % world.size, world.size):
            batch = batches[i] if i < len(batches) else batches[0]  # passes gather shards: all ranks run equally many
            with nullcontext() if draws is None else draws.of(i, evaluation=True):
                loss = loss_of(model, batch.to(total.device)).double() * batch.num_targets
            # The repeated first batch only keeps this rank in step with the others.
            total += loss if i < len(batches) else 0.0
        if world.size > 1:
            total = DistributedRanks().sum({"total": total})["total"]
    model.train(was_training)
    return float(total) / blocks.num_targets
