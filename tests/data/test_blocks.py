from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.data.blocks import TrainBlocks, validation_blocks

SEQ_LEN = 4


def numbered(num_blocks: int, spare: int = 0) -> np.ndarray:
    """Tokens that are their own positions."""
    return np.arange(num_blocks * SEQ_LEN + 1 + spare, dtype=np.uint16)


def read(blocks: TrainBlocks, number: int, batch: int = 1) -> list[int]:
    """Block numbers, read from the first token of each block."""
    return torch.cat([blocks.next(batch)[:, 0] // SEQ_LEN for _ in range(number // batch)]).tolist()


def test_a_block_is_seq_len_tokens_and_the_next_one() -> None:
    blocks = TrainBlocks(numbered(6), SEQ_LEN, 0, None)
    batch = blocks.next(6)
    assert batch.shape == (6, SEQ_LEN + 1) and batch.dtype == torch.int64
    for row in batch:
        assert row.tolist() == list(range(row[0], row[0] + SEQ_LEN + 1)) and row[0] % SEQ_LEN == 0


@pytest.mark.parametrize("spare", range(SEQ_LEN))
def test_every_target_once_an_epoch(spare: int) -> None:
    """Tokens left over at the end (fewer than a block) are the only ones that are no target."""
    blocks = TrainBlocks(numbered(7, spare), SEQ_LEN, 3, None)
    assert blocks.num_blocks == 7
    for _ in range(3):
        assert sorted(blocks.next(7)[:, 1:].flatten().tolist()) == list(range(1, 7 * SEQ_LEN + 1))


@pytest.mark.parametrize("batch", [1, 3, 7, 10, 25])
def test_the_sequence_does_not_depend_on_the_batch_size(batch: int, tmp_path: Path) -> None:
    """10 blocks: batches that divide an epoch, cross a border, and hold several epochs."""
    one_by_one = read(TrainBlocks(numbered(10), SEQ_LEN, 1, None), 50)
    number = 50 // batch * batch
    assert read(TrainBlocks(numbered(10), SEQ_LEN, 1, tmp_path), number, batch) == one_by_one[:number]
    assert all(sorted(one_by_one[epoch * 10 : epoch * 10 + 10]) == list(range(10)) for epoch in range(5))


@pytest.mark.parametrize("saved", [True, False])
def test_resume_is_exact_everywhere(saved: bool, tmp_path: Path) -> None:
    folder = tmp_path if saved else None
    whole = read(TrainBlocks(numbered(6), SEQ_LEN, 5, folder), 20)
    for stop in range(20):
        first = TrainBlocks(numbered(6), SEQ_LEN, 5, folder)
        assert (read(first, stop) if stop else []) == whole[:stop]
        state = first.state_dict()
        assert state == {"epoch": stop // 6, "position": stop % 6}
        second = TrainBlocks(numbered(6), SEQ_LEN, 5, folder)
        second.load_state_dict(state)
        assert read(second, 20 - stop) == whole[stop:]
        second.load_state_dict(state)
        assert read(second, 20 - stop) == whole[stop:], "an order of the epoch before was kept"


def test_the_order_depends_on_seed_and_number_of_blocks_alone() -> None:
    def order(seed: int, tokens: np.ndarray) -> list[int]:
        return read(TrainBlocks(tokens, SEQ_LEN, seed, None), 60)

    np.random.seed(0)
    torch.manual_seed(0)
    expected = order(0, numbered(30))
    np.random.seed(1)
    torch.manual_seed(1)
    assert order(0, numbered(30, spare=3)) == expected
    assert order(1, numbered(30)) != expected
    assert expected[:30] != expected[30:]
    assert expected[:30] != sorted(expected[:30])


def test_the_saved_order_is_compared(tmp_path: Path) -> None:
    """One that another NumPy drew, or that was altered, is refused, by `check` before anything is taken."""
    drawn = read(TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path), 9)
    assert sorted(file.name for file in (tmp_path / "order").iterdir()) == ["epoch-0.npy", "epoch-1.npy"]
    file = tmp_path / "order" / "epoch-0.npy"
    assert np.load(file).tolist() == drawn[:8]
    np.save(file, np.load(file)[::-1])
    for begin in (lambda blocks: blocks.next(1), lambda blocks: blocks.check(1, SEQ_LEN)):
        with pytest.raises(UserError, match=r"epoch-0\.npy: damaged \(not the order that training\.seed=0 draws\)"):
            begin(TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path))
    later = TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path)
    later.load_state_dict({"epoch": 1, "position": 3})
    later.check(1, SEQ_LEN)  # epoch 0 is over
    np.save(tmp_path / "order" / "epoch-2.npy", np.arange(9, dtype=np.uint32))
    with pytest.raises(UserError, match=r"epoch-2\.npy: orders 9 blocks, the corpus has 8"):
        later.check(1, SEQ_LEN)


def test_no_flip_of_the_saved_order_is_read_as_another_order(tmp_path: Path) -> None:
    drawn = read(TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path), 8)
    file = tmp_path / "order" / "epoch-0.npy"
    sound = file.read_bytes()
    for bit in range(0, 8 * len(sound), 3):
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            assert read(TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path), 8) == drawn
        except UserError as error:
            assert "\n" not in str(error)


def test_a_run_folder_of_other_data_is_refused(tmp_path: Path) -> None:
    read(TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path), 1)
    other = TrainBlocks(numbered(9), SEQ_LEN, 0, tmp_path)
    with pytest.raises(UserError, match=r"epoch-0\.npy: orders 8 blocks, the corpus has 9: .* other data"):
        other.next(1)
    with pytest.raises(UserError, match="block 9 of epoch 1, but an epoch has 9 blocks"):
        other.load_state_dict({"epoch": 1, "position": 9})


@pytest.mark.parametrize("content", [b"", b"not an array", None])
def test_a_damaged_order_is_named(content: bytes | None, tmp_path: Path) -> None:
    read(TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path), 1)
    file = tmp_path / "order" / "epoch-0.npy"
    file.write_bytes(file.read_bytes()[:-3] if content is None else content)
    with pytest.raises(UserError, match=r"epoch-0\.npy: damaged"):
        TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path).next(1)


@pytest.mark.parametrize("dtype, largest", [("<u2", 2**16 - 1), ("<u4", 2**32 - 1)])
def test_large_token_ids_survive(dtype: str, largest: int) -> None:
    tokens = np.full(SEQ_LEN + 1, largest, dtype=dtype)
    assert TrainBlocks(tokens, SEQ_LEN, 0, None).next(1).tolist() == [[largest] * (SEQ_LEN + 1)]
    assert validation_blocks(tokens, SEQ_LEN, 1).tolist() == [[largest] * (SEQ_LEN + 1)]


def test_shorter_than_a_block() -> None:
    tokens = numbered(1)
    assert TrainBlocks(tokens, SEQ_LEN, 0, None).num_blocks == 1
    assert len(validation_blocks(tokens, SEQ_LEN, 5)) == 1
    for length in (0, 1, SEQ_LEN):
        with pytest.raises(UserError, match=f"seq_len=4: the corpus has {length} training tokens, a block needs 5"):
            TrainBlocks(tokens[:length], SEQ_LEN, 0, None)
        with pytest.raises(UserError, match=f"seq_len=4: the corpus has {length} validation tokens"):
            validation_blocks(tokens[:length], SEQ_LEN, 1)


def test_validation_blocks_are_spread_evenly() -> None:
    tokens = numbered(10, spare=2)
    chosen = validation_blocks(tokens, SEQ_LEN, 4)
    assert chosen.shape == (4, SEQ_LEN + 1) and chosen.dtype == torch.int64
    assert (chosen[:, 0] // SEQ_LEN).tolist() == [0, 2, 5, 7]
    assert (chosen[:, 1:] - chosen[:, :-1] == 1).all()
    assert (validation_blocks(tokens, SEQ_LEN, 99)[:, 0] // SEQ_LEN).tolist() == list(range(10))
    assert torch.equal(validation_blocks(tokens.copy(), SEQ_LEN, 4), chosen)


def test_a_batch_that_cannot_be_held_writes_nothing(tmp_path: Path) -> None:
    blocks = TrainBlocks(numbered(8), SEQ_LEN, 0, tmp_path)
    for n, message in (
        (9_999_999_999_999, r"training\.batch_size=9999999999999: its tokens take \d+ GiB, this machine has \d+"),
        (8 * 10_000 + 1, "a batch reads the corpus 10000 times, its 8 blocks of 4 tokens; 10000 times at most"),
    ):
        with pytest.raises(UserError, match=message):
            blocks.next(n)
    assert not list(tmp_path.iterdir()) and blocks.state_dict() == {"epoch": 0, "position": 0}
    assert len(TrainBlocks(numbered(8), SEQ_LEN, 0, None).next(100)) == 100
