"""torch's PowerSGD (arXiv 1905.13727), its communication hook of DistributedDataParallel, with what it sends counted.

It compresses every matrix of a bucket that is at least half as small for it, embedding and head among them, and keeps
its state by bucket, which DDP makes anew in a new process: so no checkpoint holds it. Sums are in float32, or float64
where gradients are.

Of virtual workers the hook gets the mean gradient, in a group of one. That is what all workers get: of a matrix, with
M_i = G_i + E_i, every worker gets P Q', where P comes of the sum of M_i Q_before, Q is the mean of M_i' P and
E_i = M_i - P Q'. All of these are linear, so the mean of M_i alone makes P, Q and the mean of E_i.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnmr.distributed.workers import RankWorkers, Workers

_FIRST = 2
"""Steps before DDP's buckets are final."""
_HALF = 2
"""A matrix is compressed that is smaller by more than this."""


def numbers(shapes: Iterable[torch.Size], rank: int) -> int:
    """Numbers that a worker sends of gradients of these shapes in a step that is compressed."""
    found = 0
    for shape in shapes:
        rows, whole = shape[0], shape.numel()
        columns = whole // rows
        low = (rows + columns) * min(rows, columns, rank)
        found += low if _HALF * low < whole else whole
    return found


@dataclass(frozen=True)
class _Bucket:
    """What torch's hook reads of a `GradBucket`."""

    flat: Tensor
    shapes: list[torch.Size]
    number: int = 0
    last: bool = True

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last


class _Alone:
    """A process group of one, which `torch.distributed.all_reduce` takes for a real one."""

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[Tensor], _options: object) -> _Alone:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)
        return self

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class PowerSgd:
    """PowerSGD with warm start. `sent` is how many numbers a worker sent in the last step, `sent_total` in all."""

    def __init__(
        self, dense: int, *, rank: int, dense_steps: int, feedback: bool, seed: int, workers: Workers | None = None
    ) -> None:
        """`dense`: numbers of all gradients. `dense_steps`: two at least. `workers`: None for the processes of the run.

        ValueError as `RankWorkers`.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self.workers = RankWorkers() if workers is None else workers
        self._state = PowerSGDState(
            None if workers is None else _Alone(),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=max(dense_steps, _FIRST),
            min_compression_rate=_HALF,
            use_error_feedback=feedback,
            orthogonalization_epsilon=1e-8,  # a column of zeros would be NaN
            random_seed=seed,
        )
        self.dense = dense
        self.sent = self.sent_total = self._sending = 0

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The means that the optimizer is to have, by parameter name, of all gradients of a step, (K, *shape) each, of
        virtual workers."""
        first = next(iter(gradients.values()))
        rows = torch.cat([one.flatten(1) for one in gradients.values()], 1)
        bucket = _Bucket(
            self.workers.mean(rows.to(torch.promote_types(first.dtype, torch.float32))),
            [one.shape[1:] for one in gradients.values()],
        )
        self._run(bucket)
        return {name: one.to(first.dtype) for name, one in zip(gradients, bucket.gradients(), strict=True)}

    def hook(self, bucket: Any) -> Any:
        """Of a bucket of DDP's: a future of its mean gradients, which is done."""
        buffer = bucket.buffer()
        wide = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        self._run(_Bucket(wide, [one.shape for one in bucket.gradients()], bucket.index(), bucket.is_last()))
        if wide is not buffer:
            buffer.copy_(wide)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _run(self, bucket: _Bucket) -> None:
        """Leaves the means in the bucket.

        torch's own starts two of its three collectives when the one before has ended, each rank in its own time, so
        that with several buckets ranks may take them in another order. Waiting keeps the order.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state = self._state
        before, starts = state.total_numel_after_compression, state.iter >= state.start_powerSGD_iter
        bucket.flat.copy_(powerSGD_hook(state, bucket).wait())  # type: ignore[arg-type]
        compressed = state.total_numel_after_compression - before
        self._sending += compressed if starts else bucket.flat.numel()
        if bucket.last:
            self.sent, self._sending = self._sending, 0
            self.sent_total += self.sent
