"""Token files as blocks of seq_len + 1 tokens, in a random order that a checkpoint can save and restore.

Block i holds tokens[i * seq_len : (i + 1) * seq_len + 1]; its last token is the next block's first, so that every
token but the first is a target exactly once an epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from gnmr.errors import UserError
from gnmr.lab.data.token_file import TokenFile
from gnmr.records.disk import no_link, replacing

MOST_EPOCHS = 10_000  # in one batch: every epoch draws and saves an order


@dataclass(frozen=True)
class Branch:
    """Where the order of a fork leaves its base's, and which continuation it takes."""

    seed: int
    """Of the base, in the place of the fork's own."""
    epoch: int
    position: int
    order: int
    """0: the base's own. Any other draws the rest of this epoch, and the epochs behind it, anew."""


class BlockOrder:
    """The numbers of `num_blocks` blocks in random order, each once an epoch.

    `folder` is the run folder, where the order of each epoch is saved as order/epoch-<k>.npy; None keeps it in memory.
    With a `branch` it begins at that place, in the order of its seed.
    """

    def __init__(self, num_blocks: int, seed: int, folder: Path | None, branch: Branch | None = None) -> None:
        self.num_blocks = num_blocks
        self._branch = branch or Branch(seed, 0, 0, 0)
        self._seed = self._branch.seed
        self._folder = None if folder is None else Path(folder) / "order"
        self._order: np.ndarray | None = None
        self._epoch = self._position = 0
        self._place(self._branch.epoch, self._branch.position)

    def take(self, n: int, seq_len: int) -> list[int]:
        """The numbers of the next n blocks of `seq_len` tokens; crosses epoch borders.

        Raises `UserError` for more than can be held, before an order is drawn or saved.
        """
        self._refuse(n, seq_len)
        chosen: list[int] = []
        while len(chosen) < n:
            if self._order is None:
                self._order = self._epoch_order()
            stop = min(self._position + n - len(chosen), self.num_blocks)
            chosen += self._order[self._position : stop].tolist()
            self._position = stop
            if stop == self.num_blocks:
                self._epoch, self._position, self._order = self._epoch + 1, 0, None
        return chosen

    def _refuse(self, n: int, seq_len: int) -> None:
        size, room = n * seq_len * 8, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > room:
            raise UserError(
                f"training.batch_size={n}: its tokens take {size / 2**30:.0f} GiB, this machine has {room / 2**30:.0f}"
            )
        if n > MOST_EPOCHS * self.num_blocks:
            raise UserError(
                f"training.batch_size={n}: a batch reads the corpus {n // self.num_blocks} times, its "
                f"{self.num_blocks} blocks of {seq_len} tokens; {MOST_EPOCHS} times at most: use more text or a "
                "smaller batch"
            )

    def state_dict(self) -> dict[str, int]:
        """{"epoch", "position"}: the epoch of the next block and its place in that epoch's order."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues where `state_dict` was taken. UserError for a position outside of this corpus."""
        self._place(state["epoch"], state["position"])

    def check(self, n: int, seq_len: int) -> None:
        """UserError for what `take` would refuse now or later: n blocks that cannot be held, and a saved order, of this
        epoch or a later one, that is not this seed's. Saves nothing."""
        self._refuse(n, seq_len)
        saved = [] if self._folder is None else sorted(self._folder.glob("epoch-*.npy"))
        for file in saved:
            number = file.stem.removeprefix("epoch-")
            if number.isdecimal() and int(number) >= self._epoch:
                self._compare(file, self._draw(int(number)))

    def _place(self, epoch: int, position: int) -> None:
        if epoch < 0 or not 0 <= position < self.num_blocks:
            raise UserError(
                f"checkpoint at block {position} of epoch {epoch}, but an epoch has {self.num_blocks} blocks: "
                "the run folder belongs to other data"
            )
        self._epoch, self._position, self._order = epoch, position, None

    def _epoch_order(self) -> np.ndarray:
        """(num_blocks,) uint32 or int64: the permutation of this epoch, which is saved.

        UserError where the saved order differs: the file is damaged, or another NumPy version drew it.
        """
        drawn = self._draw(self._epoch)
        if self._folder is None:
            return drawn
        file = self._folder / f"epoch-{self._epoch}.npy"
        if file.exists():
            self._compare(file, drawn)
        else:
            file.parent.mkdir(exist_ok=True)
            packed = BytesIO()
            np.save(packed, drawn)  # written to a file directly, a full disk would raise no errno
            with replacing(file) as target:
                target.write(packed.getbuffer())
        return drawn

    def _draw(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng([self._seed, epoch]).permutation(self.num_blocks)
        if (branch := self._branch).order and epoch >= branch.epoch:
            begin = branch.position if epoch == branch.epoch else 0
            order[begin:] = np.random.default_rng([self._seed, epoch, branch.order]).permutation(order[begin:])
        return order.astype(np.uint32) if self.num_blocks <= 2**32 else order

    def _compare(self, file: Path, drawn: np.ndarray) -> None:
        try:
            with open(file, "rb", opener=no_link) as saved:
                order = np.asarray(np.load(saved))
        except Exception as error:  # NumPy parses the header as Python and raises what that raises
            raise UserError(f"{file}: damaged ({error}); remove it to draw the same order again") from error
        if order.shape != (self.num_blocks,):
            raise UserError(
                f"{file}: orders {order.size} blocks, the corpus has {self.num_blocks}: the run folder belongs to "
                "other data; restore its data.* and training.seq_len or use another run_dir"
            )
        if not np.array_equal(order, drawn):
            raise UserError(
                f"{file}: damaged (not the order that training.seed={self._seed} draws); remove it to draw that "
                "order again, or, if the run began under another NumPy version, continue with that version"
            )


class TrainBlocks(BlockOrder):
    """Training blocks in random order, each once an epoch.

    tokens: (n,) unsigned integers, in memory or in a file. `folder` and `branch` as in `BlockOrder`. Raises `UserError`
    if there is not one block.
    """

    def __init__(
        self,
        tokens: np.ndarray | TokenFile,
        seq_len: int,
        seed: int,
        folder: Path | None,
        branch: Branch | None = None,
    ) -> None:
        super().__init__(_num_blocks(tokens, seq_len, "training"), seed, folder, branch)
        self._tokens = tokens
        self._seq_len = seq_len

    def next(self, n: int) -> torch.Tensor:
        """The next n blocks, (n, seq_len + 1) int64 on the CPU; crosses epoch borders.

        Inputs are [:, :-1], targets [:, 1:].
        """
        return _gather(self._tokens, self.take(n, self._seq_len), self._seq_len)


def validation_blocks(tokens: np.ndarray | TokenFile, seq_len: int, n: int) -> torch.Tensor:
    """(min(n, available), seq_len + 1) int64, spread evenly over `tokens`; the same in every run of a corpus.

    Raises `UserError` if there is not one block.
    """
    available = _num_blocks(tokens, seq_len, "validation")
    count = min(n, available)
    return _gather(tokens, (number * available // count for number in range(count)), seq_len)


def _num_blocks(tokens: np.ndarray | TokenFile, seq_len: int, split: str) -> int:
    available = (len(tokens) - 1) // seq_len
    if available < 1:
        raise UserError(
            f"training.seq_len={seq_len}: the corpus has {len(tokens)} {split} tokens, a block needs {seq_len + 1}; "
            "use more text or a smaller training.seq_len"
        )
    return available


def _gather(tokens: np.ndarray | TokenFile, blocks: Iterable[int], seq_len: int) -> torch.Tensor:
    rows = [tokens[block * seq_len : (block + 1) * seq_len + 1] for block in blocks]
    return torch.from_numpy(np.array(rows, dtype=np.int64).reshape(len(rows), seq_len + 1))
