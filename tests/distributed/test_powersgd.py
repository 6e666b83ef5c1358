"""torch's PowerSGD over virtual workers: against each worker's own arithmetic, and what is counted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.distributed.powersgd import PowerSgd
from gnmr.distributed.workers import VirtualWorkers

RANK, WORKERS, SEED = 3, 3, 5


def net() -> nn.Module:
    return nn.ModuleList([nn.Linear(17, 20), nn.Linear(4, 5), nn.LayerNorm(4)]).double()


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(WORKERS, *one.shape, generator=draw, dtype=torch.float64)
        for name, one in model.named_parameters()
    }


def made(model: nn.Module, **options: int) -> PowerSgd:
    dense = sum(one.numel() for one in model.parameters())
    usual = {"rank": RANK, "dense_steps": 2, "seed": SEED}
    return PowerSgd(dense, workers=VirtualWorkers(WORKERS), **(usual | options))  # type: ignore[arg-type]


class ByWorker:
    """PowerSGD of one matrix as the paper has it: each worker adds its own error, and what is sent are P and Q."""

    def __init__(self, columns: int) -> None:
        torch.manual_seed(np.random.RandomState(SEED).randint(1_000_000_000))
        self.Q = torch.randn(1, columns, RANK, dtype=torch.float64)[0].numpy()
        self.errors = [0.0] * WORKERS

    def step(self, given: np.ndarray) -> np.ndarray:
        sums = [g + e for g, e in zip(given, self.errors, strict=True)]
        Q = np.linalg.qr(self.Q)[0]
        P = np.linalg.qr(sum(m @ Q for m in sums))[0]
        self.Q = sum(m.T @ P for m in sums) / WORKERS
        self.errors = [m - P @ self.Q.T for m in sums]
        return P @ self.Q.T


def test_the_mean_alone_makes_what_workers_with_errors_of_their_own_make() -> None:
    model = net()
    ours, slow = made(model), ByWorker(17)
    low, sent = (17 + 20) * RANK + 20 + 4 * 5 + 5 + 4 + 4, []
    for step in range(7):
        given = gradients(model, step)
        found = ours.reduce(given)
        for name, one in given.items():
            if step >= 2 and name == "0.weight":
                expected = torch.from_numpy(slow.step(one.numpy()))
                assert torch.linalg.matrix_rank(found[name]) == RANK
            else:
                expected = one.mean(0)  # dense steps; what is not half as small
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)
        sent.append(ours.sent)
    assert sent == [ours.dense] * 2 + [low] * 5 and ours.sent_total == sum(sent)
