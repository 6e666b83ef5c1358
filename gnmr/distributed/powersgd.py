"""PowerSGD (arXiv 1905.13727): torch's communication hook, with the numbers that it sends counted.

The hook compresses every matrix of a bucket that shrinks to less than half, embedding and head included. It keeps its
state by bucket, which DDP rebuilds in a new process, so a run cannot be continued. Sums are in float32 or wider.

Virtual workers hand the hook their mean gradient in a group of one. All of its steps are linear in the workers'
M_i = G_i + E_i, so the mean of M_i alone gives P, Q and the mean of E_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gnmr.distributed.workers import RankWorkers, Workers, done


class _Alone:
    """A process group of one, as far as `torch.distributed.all_reduce` reads it."""

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[Tensor], _options: object) -> SimpleNamespace:
        return SimpleNamespace(get_future=lambda: done(tensors))


class PowerSgd:
    """PowerSGD with warm start. `sent` counts the numbers that a worker sent in the last step, `sent_total` all."""

    def __init__(self, dense: int, *, rank: int, dense_steps: int, seed: int, workers: Workers | None = None) -> None:
        """`dense`: the size of all gradients. `workers`: None for the ranks of the process group."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self.workers = RankWorkers() if workers is None else workers
        self._state = PowerSGDState(
            None if workers is None else _Alone(),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=max(dense_steps, 2),  # DDP's buckets are final after two steps
            min_compression_rate=2,
            orthogonalization_epsilon=1e-8,  # a column of zeros would become NaN
            random_seed=seed,
        )
        self.dense = dense
        self.sent = self.sent_total = self._sending = 0

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean gradients of a step by parameter name; `gradients`: (K, *shape) of the virtual workers."""
        first = next(iter(gradients.values()))
        rows = torch.cat([one.flatten(1) for one in gradients.values()], 1)
        flat = self.workers.mean(rows.to(torch.promote_types(first.dtype, torch.float32)))
        parts = self._run(flat, [one.shape[1:] for one in gradients.values()], 0, True)
        return {name: one.to(first.dtype) for name, one in zip(gradients, parts, strict=True)}

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Leave the means in a bucket of DDP's; return a completed future of its buffer."""
        buffer = bucket.buffer()
        wide = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        self._run(wide, [one.shape for one in bucket.gradients()], bucket.index(), bucket.is_last())
        if wide is not buffer:
            buffer.copy_(wide)
        return done(buffer)

    def _run(self, flat: Tensor, shapes: list[torch.Size], index: int, last: bool) -> list[Tensor]:
        """Leave the means in `flat`, and return its views.

        The hook is waited for: its later collectives start when the earlier ones end, at a time of each rank's own, so
        ranks could issue those of several buckets in different orders.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        parts = [part.view(s) for part, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        seen = {"buffer": flat, "gradients": parts, "index": index, "is_last": last}
        bucket: Any = SimpleNamespace(**{name: lambda value=value: value for name, value in seen.items()})
        state = self._state
        before, starts = state.total_numel_after_compression, state.iter >= state.start_powerSGD_iter
        flat.copy_(powerSGD_hook(state, bucket).wait())
        self._sending += state.total_numel_after_compression - before if starts else flat.numel()
        if last:
            self.sent, self._sending = self._sending, 0
            self.sent_total += self.sent
        return parts
