"""torch's PowerSGD (arXiv 1905.13727) as a communication hook of DistributedDataParallel, with what it sends counted.

It compresses every matrix of a bucket that is at least half as small for it, embedding and head among them, and keeps
its state by bucket, which DDP makes anew in a new process: so no checkpoint holds it.
"""

from __future__ import annotations

from typing import Any

from gnmr.distributed.world import size

_FIRST = 2
"""Steps before DDP's buckets are final."""


class PowerSgd:
    """PowerSGD with warm start. `sent` is how many numbers a worker sent in the last step, `sent_total` in all."""

    def __init__(self, dense: int, *, rank: int, dense_steps: int, feedback: bool, seed: int) -> None:
        """`dense`: numbers of all gradients. `dense_steps`: two at least. ValueError in one process."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        if size() < 2:
            raise ValueError("PowerSGD needs data parallelism, here is one process: start several of them")
        self._state = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=max(dense_steps, _FIRST),
            use_error_feedback=feedback,
            orthogonalization_epsilon=1e-8,  # a column of zeros would be NaN
            random_seed=seed,
        )
        self.dense = dense
        self.sent = self.sent_total = self._sending = 0

    def hook(self, bucket: Any) -> Any:
        """Of a bucket: a future of its mean gradients, which is done.

        torch's own starts two of its three collectives when the one before has ended, each rank in its own time, so
        that with several buckets ranks may take them in another order. Waiting keeps the order.
        """
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state, last = self._state, bucket.is_last()
        before, starts = state.total_numel_after_compression, state.iter >= state.start_powerSGD_iter
        found = powerSGD_hook(state, bucket)
        compressed = state.total_numel_after_compression - before
        self._sending += compressed if starts else bucket.buffer().numel()
        if last:
            self.sent, self._sending = self._sending, 0
            self.sent_total += self.sent
        found.wait()
        return found
