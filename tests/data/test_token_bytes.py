"""Bytes of text by token, for bits per byte."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from gnmr.lab.data import tokenizer as bpe

TEXT = "def f(x):\n    return x  # naïve – 東京\n" * 3


def test_tokens_of_a_byte_level_vocabulary_spell_every_text() -> None:
    tokenizer = bpe.train(iter([TEXT]), 320)
    table = bpe.token_bytes(tokenizer)
    assert table is not None and table[bpe.end_token(tokenizer, "")] == 0
    for text in (TEXT, "never seen: ßø 한국어 🙂"):
        assert table[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_pieces_count_a_blank_in_front_and_the_bytes_of_unknown_characters() -> None:
    pieces = [f"<0x{i:02X}>" for i in range(256)] + ["▁", *"abcdefg", "ï"]
    model = models.BPE(
        {name: i for i, name in enumerate(["<unk>", *pieces])}, [], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    table = bpe.token_bytes(tokenizer)
    assert table is not None
    text = "bad ïdea 東\n"
    assert table[tokenizer.encode(text).ids].sum() == len(text.encode()) + 1


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        (models.WordPiece(unk_token="?"), trainers.WordPieceTrainer(vocab_size=90, special_tokens=["?"])),
        (models.WordLevel(unk_token="?"), trainers.WordLevelTrainer(special_tokens=["?"])),
    ],
)
def test_tokens_that_drop_blanks_have_no_bytes(model: models.Model, trainer: trainers.Trainer) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([TEXT], trainer)
    assert bpe.token_bytes(tokenizer) is None
