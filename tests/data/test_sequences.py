from __future__ import annotations

import numpy as np
import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.data.sequences import TrainSequences, validation_sequences

SEQ_LEN = 4


def numbered(num_sequences: int, spare: int = 0) -> np.ndarray:
    """Tokens that are their own positions."""
    return np.arange(num_sequences * SEQ_LEN + 1 + spare, dtype=np.uint16)


def read(sequences: TrainSequences, number: int, batch: int = 1) -> list[int]:
    """Sequence numbers, read from the first token of each sequence."""
    return torch.cat([sequences.next(batch).tokens[:, 0] // SEQ_LEN for _ in range(number // batch)]).tolist()


@pytest.mark.parametrize("spare", range(SEQ_LEN))
def test_every_target_once_an_epoch(spare: int) -> None:
    """Tokens left over at the end (fewer than a sequence) are the only ones that are no target."""
    sequences = TrainSequences(numbered(7, spare), SEQ_LEN, 3)
    assert sequences.num_sequences == 7
    for _ in range(3):
        assert sorted(sequences.next(7).targets.flatten().tolist()) == list(range(1, 7 * SEQ_LEN + 1))


@pytest.mark.parametrize("batch", [3, 10, 25])
def test_the_sequence_does_not_depend_on_the_batch_size(batch: int) -> None:
    """10 sequences: batches that divide an epoch, cross a border, and hold several epochs."""
    one_by_one = read(TrainSequences(numbered(10), SEQ_LEN, 1), 50)
    number = 50 // batch * batch
    assert read(TrainSequences(numbered(10), SEQ_LEN, 1), number, batch) == one_by_one[:number]
    assert all(sorted(one_by_one[epoch * 10 : epoch * 10 + 10]) == list(range(10)) for epoch in range(5))


def test_resume_is_exact_everywhere() -> None:
    whole = read(TrainSequences(numbered(6), SEQ_LEN, 5), 20)
    for stop in range(20):
        first = TrainSequences(numbered(6), SEQ_LEN, 5)
        assert (read(first, stop) if stop else []) == whole[:stop]
        state = first.state_dict()
        assert (state["epoch"], state["position"]) == (stop // 6, stop % 6)
        second = TrainSequences(numbered(6), SEQ_LEN, 5)
        second.load_state_dict(state)
        assert read(second, 20 - stop) == whole[stop:]
        second.load_state_dict(state)
        assert read(second, 20 - stop) == whole[stop:], "an order of the epoch before was kept"


def test_the_order_depends_on_seed_and_number_of_sequences_alone() -> None:
    def order(seed: int, tokens: np.ndarray) -> list[int]:
        np.random.seed(len(tokens))
        torch.manual_seed(len(tokens))
        return read(TrainSequences(tokens, SEQ_LEN, seed), 60)

    expected = order(0, numbered(30))
    assert order(0, numbered(30, spare=3)) == expected != order(1, numbered(30))
    assert expected[:30] != expected[30:] and expected[:30] != sorted(expected[:30])


def test_another_order_than_the_saved_one_is_refused() -> None:
    """Another NumPy may draw another order, and other data has another number of sequences."""
    sequences = TrainSequences(numbered(8), SEQ_LEN, 0)
    sequences.next(3)
    state = sequences.state_dict()
    with pytest.raises(UserError, match=r"training\.seed=1 drew another order"):
        TrainSequences(numbered(8), SEQ_LEN, 1).load_state_dict(state)
    with pytest.raises(UserError, match="other data"):
        TrainSequences(numbered(3), SEQ_LEN, 0).load_state_dict(state)


def test_shorter_than_a_sequence() -> None:
    tokens = numbered(1)
    assert TrainSequences(tokens, SEQ_LEN, 0).num_sequences == 1
    assert len(validation_sequences(tokens, SEQ_LEN, 5)) == 1
    for length in (0, 1, SEQ_LEN):
        with pytest.raises(UserError, match=f"^training.seq_len=4: the corpus has {length} training tokens"):
            TrainSequences(tokens[:length], SEQ_LEN, 0)
        with pytest.raises(UserError, match=f"^training.seq_len=4: the corpus has {length} validation tokens"):
            validation_sequences(tokens[:length], SEQ_LEN, 1)


def test_validation_sequences_are_spread_evenly() -> None:
    tokens = numbered(10, spare=2)
    chosen = validation_sequences(tokens, SEQ_LEN, 4)
    assert chosen.tokens.shape == (4, SEQ_LEN) and chosen.tokens.dtype == torch.int64
    assert (chosen.tokens[:, 0] // SEQ_LEN).tolist() == [0, 2, 5, 7] and chosen.num_targets == 4 * SEQ_LEN
    assert torch.equal(chosen.targets, chosen.tokens + 1)
    every = validation_sequences(tokens, SEQ_LEN, 99)
    assert (every.tokens[:, 0] // SEQ_LEN).tolist() == list(range(10))


def test_a_batch_that_cannot_be_held_is_refused() -> None:
    sequences = TrainSequences(numbered(8), SEQ_LEN, 0)
    for n in (9_999_999_999_999, 8 * 10_000 + 1):
        with pytest.raises(UserError, match=f"training.batch_size={n}"):
            sequences.next(n)
    assert sequences.state_dict()["position"] == 0 and len(sequences.next(100)) == 100
