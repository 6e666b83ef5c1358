"""The loss of a model on a batch, and its mean over many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.distributed.reduce import Ranks
from gnmr.distributed.world import ALONE, World
from gnmr.lab.data.batch import Batch, model_inputs
from gnmr.lab.models import Decoder
from gnmr.lab.train.draws import Draws
from gnmr.precision import ConvertedModel


def loss_of(model: nn.Module, batch: Tensor | Batch, call: Callable[..., Any] | None = None) -> Tensor:
    """Mean next-token cross-entropy over the targets of `batch`, a block (B, T + 1) or packed documents, in FP32.

    A scalar on the device. Documents that share a block do not see each other. `call`: what is called in the model's
    place (`Wrapped.call`).
    """
    block = batch if isinstance(batch, Batch) else Batch.of_sequences(batch)
    return F.cross_entropy(logits_of(model, block, call).float().flatten(0, 1), block.targets.flatten())


def logits_of(model: nn.Module, block: Batch, call: Callable[..., Any] | None = None) -> Tensor:
    """Logits of the next token at each position of `block`, (B, T, V). `call`: as of `loss_of`."""
    call = model if call is None else call
    if isinstance(model, Decoder):
        assert block.positions is None, "models of ours read one document a block"
        logits: Tensor = call(block.tokens)
    else:
        logits = call(**model_inputs(block)).logits
    return logits


def num_targets(batch: Tensor | Batch) -> int:
    """Tokens over which `loss_of` takes the mean."""
    return batch.num_targets if isinstance(batch, Batch) else batch[:, 1:].numel()


def objective_of(model: nn.Module, loss: Tensor) -> Tensor:
    """What backward starts from: `loss` of the last forward pass and what the model adds to it in training."""
    auxiliary = model.auxiliary_loss if isinstance(model, Decoder) else None
    return loss if auxiliary is None else loss + auxiliary


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """`Decoder.statistics`; nothing of a model that is not ours."""
    return model.statistics() if isinstance(model, Decoder) else {}


class Experts:
    """Which experts of a model had tokens in a step, in this process and, by a sum, in any.

    FSDP2 gives experts without a token gradients of zeros, so that all ranks reduce the same parameters. AdamW would
    step by them. In one process such an expert has no gradient, and its weights and moments stay as they are.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._parameters = [list(expert.parameters()) for expert in model.experts()]
        self._reached: list[Tensor] = []

    def add(self) -> None:
        """Count a training forward pass of this process."""
        self._reached.append(self._model.reached())

    def take(self) -> Tensor:
        """Return in how many passes of the step each expert had a token here, (E,) float64; the next step begins."""
        reached, self._reached = self._reached, []
        return torch.stack(reached).sum(dim=0).double()

    def drop(self, reached: Tensor) -> None:
        """Drop the gradients of experts without a token; `reached` is the sum of `take` over ranks. Waits."""
        for passes, parameters in zip(reached.tolist(), self._parameters, strict=True):
            if not passes:
                for parameter in parameters:
                    parameter.grad = None


def divisors(micro_batches: Sequence[Tensor | Batch]) -> list[float]:
    """What each micro-batch's mean loss is divided by: their number where all have as many targets."""
    counts = [num_targets(batch) for batch in micro_batches]
    return [sum(counts) / count for count in counts]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    plan: ConvertedModel,
    blocks: Tensor | Batch,
    batch_size: int,
    low: bool = False,
    world: World = ALONE,
    draws: Draws | None = None,
) -> float:
    """Mean cross-entropy over the targets of `blocks` on the 16-bit path, or with every operator on the `low` one,
    nats. Waits for the device. Of several processes each takes some of the batches."""
    was_training = model.training
    model.eval()
    batches = list(blocks.split(batch_size))
    with plan.on_low_path() if low else plan.high_precision():
        total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
        for i in range(world.rank, len(batches) + -len(batches) % world.size, world.size):
            batch = batches[i] if i < len(batches) else batches[0]  # shards are gathered in passes: all take as many
            with nullcontext() if draws is None else draws.of(i, evaluation=True):
                loss = loss_of(model, batch.to(total.device)).double() * num_targets(batch)
            total += loss if i < len(batches) else 0.0
        if world.size > 1:
            total = Ranks().sum({"total": total})["total"]
    model.train(was_training)
    return float(total) / num_targets(blocks)
