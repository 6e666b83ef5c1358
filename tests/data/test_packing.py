"""Packed examples: the sequences by hand and by a slow search, the cache, and an order that resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import shared_data, word_checkpoint, write_examples
from tokenizers import Tokenizer, models, pre_tokenizers

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import packing, tokens
from gnmr.lab.data.batch import IGNORED, Batch
from gnmr.lab.data.cache import Documents, TokenCorpus
from gnmr.lab.data.packing import PackedSequences, packed_validation
from gnmr.lab.data.tokens import prepare

Make = Callable[..., DataConfig]
PAIRS = [("a b", "c"), ("d", "e f g h i j e"), ("a", "b"), ("a b c d e f g", "h"), ("c", "d")]
"""Tokens, by `word_checkpoint`: <s> is 0, </s> 1, the letters a to j are 10 to 19."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return word_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def five(config: Make, tmp_path: Path) -> Callable[..., DataConfig]:
    write_examples(tmp_path / "five" / "train.jsonl", PAIRS)
    write_examples(tmp_path / "five" / "valid.jsonl", PAIRS[:1])
    return lambda **changes: config(**({"name": "instructions", "path": str(tmp_path / "five")} | changes))


def build(config: DataConfig, checkpoint: Path) -> tuple[TokenCorpus, list[str]]:
    """The examples and what was said."""
    said: list[str] = []
    return prepare(config, 1000, said.append, checkpoint), said


def in_order(documents: Documents, seq_len: int) -> tuple[Batch, PackedSequences]:
    sequences = PackedSequences(documents, seq_len, 0)
    return sequences.packing.batch(range(sequences.num_sequences)), sequences


# ---- five documents by hand ----

_ = IGNORED


def test_five_documents(five: Make, checkpoint: Path) -> None:
    """Of 5, 10, 4, 10 and 4 tokens, into sequences of 6.

    The second document is cut into pieces of 6 and 3 inputs; of the fourth's the first holds prompt alone. The rooms
    are 2 (sequence 0), none (1), 3 (2, where the third document goes) and 3 (3, where the fifth goes).
    """
    corpus, _said = build(five(), checkpoint)
    assert corpus.train.tokens[:].tolist() == [
        *[0, 10, 11, 12, 1],
        *[0, 13, 14, 15, 16, 17, 18, 19, 14, 1],
        *[0, 10, 11, 1],
        *[0, 10, 11, 12, 13, 14, 15, 16, 17, 1],
        *[0, 12, 13, 1],
    ]
    assert corpus.train.borders.tolist() == [[5, 3], [15, 2], [19, 2], [29, 8], [33, 2]]
    batch, sequences = in_order(corpus.train, 6)
    assert batch.tokens.tolist() == [
        [0, 10, 11, 12, 1, 1],
        [0, 13, 14, 15, 16, 17],
        [18, 19, 14, 0, 10, 11],
        [15, 16, 17, 0, 12, 13],
    ]
    assert batch.targets.tolist() == [
        [_, _, 12, 1, _, _],
        [_, 14, 15, 16, 17, 18],
        [19, 14, 1, _, 11, 1],
        [_, 17, 1, _, 13, 1],
    ]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1], [*range(6)], [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]]
    assert batch.num_targets == 16
    packing = sequences.packing
    assert (packing.examples, packing.size, packing.cut, packing.left_out) == (5, 22, 2, 1)
    assert "8.3% padding" in packing.summary


def test_a_document_a_sequence(five: Make, checkpoint: Path) -> None:
    """For models that would mix them: the pieces and targets are the same, and there are no positions."""
    documents = build(five(), checkpoint)[0].train
    assert isinstance(documents, Documents)
    packed, _sequences = in_order(documents, 6)
    batch, sequences = in_order(replace(documents, alone=True), 6)
    assert batch.positions is None and batch.num_targets == packed.num_targets
    assert batch.tokens.tolist() == [
        [0, 10, 11, 12, 1, 1],
        [0, 13, 14, 15, 16, 17],
        [18, 19, 14, 1, 1, 1],
        [0, 10, 11, 1, 1, 1],
        [15, 16, 17, 1, 1, 1],
        [0, 12, 13, 1, 1, 1],
    ]
    assert batch.targets[4].tolist() == [_, 17, 1, _, _, _]
    assert "an example each" in sequences.packing.summary


def test_loss_on_prompts_too_and_without_a_begin_token(five: Make, tmp_path: Path) -> None:
    """A begin token that the checkpoint names, but does not put before a text, is not put there."""
    checkpoint = word_checkpoint(tmp_path / "other", begin=False)
    corpus, _said = build(five(), checkpoint)
    assert corpus.train.tokens[:4].tolist() == [10, 11, 12, 1]
    both, _said = build(five(answers_only=False), checkpoint)
    assert both.fingerprint != corpus.fingerprint
    batch, sequences = in_order(both.train, 3)
    assert batch.tokens[0].tolist() == [10, 11, 12] and batch.targets[0].tolist() == [11, 12, 1]
    assert sequences.packing.left_out == 0 and batch.num_targets == sum(len(f"{a} {b}".split()) for a, b in PAIRS)


# ---- the rule, slowly ----


@st.composite
def any_documents(draw: st.DrawFn) -> Documents:
    """Documents of any lengths, with the first target anywhere, whose tokens are their own positions."""
    lengths = draw(st.lists(st.integers(1, 25), min_size=1, max_size=60))
    before = [draw(st.integers(0, length)) for length in lengths]
    borders = np.stack([np.cumsum(lengths), before], axis=1)
    return Documents(np.arange(sum(lengths), dtype=np.uint16), borders, 9999)


@settings(max_examples=100)
@given(any_documents(), st.sampled_from([1, 2, 4, 9, 40]))
def test_sequences_against_a_slow_search(documents: Documents, seq_len: int) -> None:
    sequences: list[list[tuple[int, int | None, int]]] = []  # input, target, position
    reached: list[int] = []  # the step at which a sequence came to have its room
    begin = 0
    for end, before in documents.borders.tolist():
        inputs = list(range(begin, end - 1))
        for start in range(0, len(inputs), seq_len):
            piece = [
                (token, token + 1 if token + 1 >= begin + before else None, place)
                for place, token in enumerate(inputs[start : start + seq_len])
            ]
            if all(target is None for _token, target, _place in piece):
                continue
            fitting = [i for i, sequence in enumerate(sequences) if len(sequence) + len(piece) <= seq_len]
            if not fitting:
                sequences.append([])
                reached.append(0)
                fitting = [len(sequences) - 1]
            chosen = min(fitting, key=lambda i: (-len(sequences[i]), reached[i]))
            sequences[chosen] += piece
            reached[chosen] = max(reached) + 1
        begin = end
    packed = packing.Packing(documents, seq_len)
    batch = packed.batch(range(packed.num_sequences))
    assert packed.num_sequences == len(sequences) and batch.positions is not None
    for row, sequence in enumerate(sequences):
        padding = [(9999, None, place) for place in range(seq_len - len(sequence))]
        found = zip(batch.tokens[row].tolist(), batch.targets[row].tolist(), batch.positions[row].tolist(), strict=True)
        assert [(a, None if b == IGNORED else b, c) for a, b, c in found] == sequence + padding
    assert batch.num_targets == sum(target is not None for sequence in sequences for _token, target, _place in sequence)
    assert (batch.targets != IGNORED).any(dim=1).all(), "a sequence without a target"


# ---- validation ----


def test_validation_is_spread_evenly() -> None:
    documents = Documents(np.arange(50, dtype=np.uint16), np.array([[5 * (i + 1), 0] for i in range(10)]), 99)
    chosen = packed_validation(documents, 4, 4)
    assert (chosen.tokens[:, 0] // 5).tolist() == [0, 2, 5, 7] and chosen.num_targets == 16
    assert len(packed_validation(documents, 4, 99)) == 10
    assert len(packed_validation(documents, 1000, 5)) == 1  # padded, where training would be refused


# ---- tokens ----


def test_a_token_on_the_border_belongs_to_the_answer(config: Make, tmp_path: Path) -> None:
    words = {"</s>": 0, "a": 1, " ": 2, "b": 3, " b": 4}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    Tokenizer(models.BPE(words, [(" ", "b")])).save(str(folder / "tokenizer.json"))
    file = write_examples(tmp_path / "a.jsonl", [("a ", "b")] * 2)
    corpus, _said = build(config(name="instructions", path=str(file)), folder)
    assert corpus.train.tokens[:].tolist() == [1, 4, 0] and corpus.train.borders.tolist() == [[3, 1]]


@pytest.mark.parametrize("piece", [3, 10**6])
def test_plain_text_is_encoded_in_pieces_and_all_of_it_learned(
    piece: int, config: Make, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PIECE", piece)
    monkeypatch.setattr(tokens, "BATCH", 2 * piece)
    for name, text in (("train-0.txt", "a\nb c\nd"), ("train-1.txt", "e"), ("val.txt", "f")):
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    corpus, _said = build(config(path=str(tmp_path / "texts")), checkpoint)
    assert corpus.train.tokens[:].tolist() == [0, 10, 11, 12, 13, 1, 0, 14, 1]
    assert corpus.train.borders.tolist() == [[6, 0], [9, 0]]
    both = build(config(path=str(tmp_path / "texts"), answers_only=False), checkpoint)[0]
    assert both.fingerprint == corpus.fingerprint


def test_a_limit_keeps_the_document_that_reaches_it(five: Make, checkpoint: Path, monkeypatch) -> None:
    """The limit of a stream without end is the number of tokens that the run needs."""
    streamed = replace(tokens.open_corpus(five()), streamed=True)
    monkeypatch.setattr(tokens, "open_corpus", lambda config, tell: streamed)
    for needed, number in ((5, 1), (6, 2), (15, 2), (16, 3), (100, 5)):
        assert len(prepare(five(), needed, len, checkpoint).train.borders) == number


def test_control_tokens_in_an_example_are_text(config: Make, checkpoint: Path, tmp_path: Path) -> None:
    """And the tokenizer's own template puts its token before each example all the same."""
    pairs = [("a </s> b <s>", "c </s> d"), ("e", "</s>")] * 20
    settings = config(name="instructions", path=str(write_examples(tmp_path / "a.jsonl", pairs)))
    corpus, said = build(settings, checkpoint)
    both = np.concatenate([corpus.train.tokens[:], corpus.val.tokens[:]])
    assert (both == 1).sum() == (both == 0).sum() == 40
    first = corpus.train.tokens[: corpus.train.borders[0, 0]].tolist()
    assert first == [0, 10, 2, 2, 11, 2, 2, 12, 2, 2, 13, 1]  # "<" and "/s>" are unknown words
    assert corpus.train.borders[0, 1] == 7  # the prompt's, behind which the answer begins
    assert said[-1].endswith("; 80 control tokens in the text, read as text")


def test_real_gsm8k(config: Make, tmp_path: Path) -> None:
    """With bytes for tokens no token of an answer is lost."""
    words = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(words | {"<|endoftext|>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = shared_data("gsm8k")
    corpus, _said = build(config(name="gsm8k", path=str(folder)), tmp_path)
    batch, sequences = in_order(corpus.train, 1024)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    answers = [f" {row['answer']}" for number, row in enumerate(rows, start=1) if number % 20]
    assert batch.num_targets == sum(len(answer.encode()) + 1 for answer in answers)
    assert sequences.packing.examples == 950 and sequences.packing.size > 0.9 * sequences.num_sequences * 1024


# ---- the cache ----


def test_the_cache_follows_all_that_decides_it(five: Make, checkpoint: Path, tmp_path: Path) -> None:
    first, said = build(five(), checkpoint)
    assert said[-1].startswith("5 train examples with 33 tokens, 1 validation examples with 5 tokens")
    assert (first.vocab_size, first.end_token, len(first.val.borders)) == (20, 1, 1)
    second, said = build(five(), checkpoint)
    assert said == [] and second.fingerprint == first.fingerprint
    folders = {first.folder}
    for change in ({"answers_only": False}, {"columns": ["prompt", "prompt"]}):
        folders.add(build(five(**change), checkpoint)[0].folder)
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "j"}))
    changed, _said = build(five(), checkpoint)
    assert changed.end_token == 19
    folders |= {changed.folder, build(five(), word_checkpoint(tmp_path / "other", begin=False))[0].folder}
    assert len(folders) == 5
    (checkpoint / "tokenizer_config.json").write_text("{}")
    (checkpoint / "special_tokens_map.json").write_text('{"eos_token": "j"}')
    assert build(five(), checkpoint)[0].end_token == 19
    (checkpoint / "special_tokens_map.json").unlink()
    assert build(five(), checkpoint)[0].end_token == 1  # </s> is known


# ---- mistakes ----


def spoil(name: str, content: str | None) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_text(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (spoil("tokenizer.json", None), "checkpoint: there is no tokenizer.json"),
        (spoil("tokenizer.json", "{}"), "checkpoint: not a tokenizer.json"),
        (spoil("tokenizer_config.json", "{"), "tokenizer_config.json: cannot be read"),
        (spoil("tokenizer_config.json", '{"eos_token": "<end>"}'), "has no end-of-text token"),
        (shutil.rmtree, "checkpoint: there is no tokenizer.json"),
    ],
)
def test_bad_tokenizers_are_one_line(
    damage: Callable[[Path], Any], message: str, five: Make, checkpoint: Path, tmp_path: Path
) -> None:
    damage(checkpoint)
    with pytest.raises(UserError, match=message) as caught:
        build(five(), checkpoint)
    assert "\n" not in str(caught.value) and not list((tmp_path / "cache").glob("*"))


def test_too_little_is_one_line(five: Make, checkpoint: Path, config: Make, tmp_path: Path) -> None:
    corpus, _said = build(five(), checkpoint)
    assert PackedSequences(corpus.train, 28, 0).num_sequences == 1
    with pytest.raises(UserError, match=r"^training\.seq_len=29: the training examples have 28 tokens"):
        PackedSequences(corpus.train, 29, 0)
    alone = write_examples(tmp_path / "a.jsonl", [("a", "b")])
    with pytest.raises(UserError, match=r"^data\.path=.*: holds no train examples"):
        build(config(name="instructions", path=str(alone)), checkpoint)
