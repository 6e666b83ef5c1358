"""Tokenizer and token files: what is in them, and that the cache is used."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import DOCUMENTS, TRAIN, VALIDATION, build, texts, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import tokenizer as bpe
from gnmr.lab.data import tokens

Make = Callable[..., DataConfig]


def test_documents_come_back_from_the_tokens(config: Make, corpus_file: Path, cache_dir: Path) -> None:
    corpus, said = build(config(path=str(corpus_file)))
    assert texts(corpus, "train") == TRAIN
    assert texts(corpus, "val") == VALIDATION
    assert (corpus.vocab_size, corpus.end_token) == (300, 0)
    assert corpus.train.dtype == np.uint16 and np.max(corpus.train[:]) < 300
    assert corpus.folder.parent == cache_dir and corpus.folder.name.startswith("text-")
    assert any("training the tokenizer" in line for line in said)
    assert said[-1].startswith(f"38 train documents with {len(corpus.train):,} tokens, 2 validation documents")


def test_lines_about_a_text_of_one_document(config: Make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokens, "SAY_EVERY", 0.0)
    monkeypatch.setattr(tokens, "PIECE", 1000)
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 2000)
    _, said = build(config(path=str(tmp_path / "a.txt")))
    assert any(line.endswith("training files: 1, validation: the last 5% of the text") for line in said)
    assert any(line.startswith("tokenizing train documents: 1 with") for line in said)
    assert not any("documents: 0 with" in line for line in said)


def test_a_path_that_the_library_does_not_read_is_a_warning(config: Make, monkeypatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": "nowhere"})
    with (
        pytest.warns(UserWarning, match=r"data.path=a.txt: has no effect, because data.name=stdlib"),
        pytest.raises(UserError, match=r"^data.name=stdlib: nowhere holds no .py files"),
    ):
        build(config(name="stdlib", path="a.txt"))


def test_the_tokenizer_sees_training_documents_alone(config: Make, tmp_path: Path) -> None:
    documents = ["common words here"] * 40
    documents[18], documents[19] = "learnable " * 50, "forbidden " * 50
    corpus, _ = build(config(path=str(write_rows(tmp_path / "a.jsonl", documents)), vocab_size=400))
    vocabulary = Tokenizer.from_file(str(corpus.tokenizer_path)).get_vocab()
    assert "Ġlearnable" in vocabulary and "Ġforbidden" not in vocabulary


@pytest.mark.parametrize("in_one_document", [True, False])
def test_the_tokenizer_sees_so_many_bytes(in_one_document: bool, config: Make, tmp_path: Path, monkeypatch) -> None:
    """The limit counts bytes (ä has two) and falls behind the first 123, or 30 bytes later."""
    early, later = "ä " + "early " * 20, "later " * 20
    documents = [early + later] * 20 if in_one_document else [early, later] * 20
    file = str(write_rows(tmp_path / "a.jsonl", documents))
    for limit, learned in ((123, False), (153, True)):
        monkeypatch.setattr(tokens, "TOKENIZER_BYTES", limit)
        corpus, _ = build(config(path=file, vocab_size=400))
        vocabulary = Tokenizer.from_file(str(corpus.tokenizer_path)).get_vocab()
        assert "Ġearly" in vocabulary
        assert any("later" in entry for entry in vocabulary) == learned


def test_a_stream_is_read_as_far_as_the_run_needs(config: Make, corpus_file: Path, monkeypatch) -> None:
    complete, _ = build(config(path=str(corpus_file)))
    streamed = replace(tokens.open_corpus(config(path=str(corpus_file))), streamed=True)
    monkeypatch.setattr(tokens, "open_corpus", lambda config, tell: streamed)
    limited = tokens.prepare(config(path=str(corpus_file)), 121, lambda _: None)
    assert len(limited.train) == 123
    assert np.array_equal(limited.train[:], complete.train[:123])
    assert np.array_equal(limited.val[:], complete.val[:])


def test_equal_data_equal_fingerprint(config: Make, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    path = str(corpus_file)
    first, _ = build(config(path=path))
    other, _ = build(config(path=path, vocab_size=301))
    assert other.folder != first.folder and other.fingerprint != first.fingerprint
    monkeypatch.setenv("GNMR_CACHE", str(tmp_path / "other"))
    second, _ = build(config(path=path))
    assert first.fingerprint == second.fingerprint and first.folder != second.folder


# ---- long words ----


def test_ordinary_text_has_the_tokenizer_that_it_had() -> None:
    """The bound on words changes nothing for shorter ones, this very file's text among them."""
    documents = [Path(__file__).read_text(), *DOCUMENTS, "ab" * 499 + " " * 1000 + "é" * 499]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    assert bpe.train(iter(documents), 600).to_str() == tokenizer.to_str()


@pytest.mark.parametrize(
    "word", ["a" * 300_000, " " * 300_000, "一二三四五六七八九十百千" * 9000], ids=["letters", "spaces", "Chinese"]
)
def test_a_word_without_end_is_learned_in_pieces(
    word: str, config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning takes the square of a word's length: 100,000 characters took 44 s."""
    longest = []
    learn = Tokenizer.train_from_iterator

    def learning(tokenizer: Tokenizer, documents: Iterator[str], trainer: trainers.BpeTrainer) -> None:
        seen = list(documents)
        words = [word for text in seen for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        longest.append(max(map(len, words)))
        learn(tokenizer, iter(seen), trainer)

    monkeypatch.setattr(Tokenizer, "train_from_iterator", learning)
    (tmp_path / "a.txt").write_text(f"x{word}y")
    corpus, _ = build(config(path=str(tmp_path / "a.txt")))
    assert longest == [bpe.LONGEST_WORD]
    assert "".join(texts(corpus, "train") + texts(corpus, "val")) == f"x{word}y"


@settings(max_examples=15)
@given(st.lists(st.text(), min_size=1, max_size=8), st.integers(1, 30))
def test_any_text_comes_back(documents: list[str], piece: int) -> None:
    """Pieces join to the documents, and each document decodes to itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "PIECE", piece)
        parts = [part for text in documents for part in tokens.pieces(text)]
    assert max(len(text) for text, _ in parts) <= piece
    assert "".join(text for text, _ in parts) == "".join(documents)
    assert sum(last for _, last in parts) == len(documents)
    tokenizer = bpe.train(iter(documents), 300)
    for text in documents:
        (encoding,) = bpe.encode(tokenizer, [text], "", bpe.Controls.of(tokenizer, 0), offsets=False)
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


# ---- a user's tokenizer ----


def word_tokenizer(file: Path, end: str, last_id: int) -> Path:
    vocabulary = {"<unk>": 0, "the": 1, end: 2, "fox": last_id}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(file))
    return file


@pytest.mark.parametrize(
    "end, last_id, dtype",
    [("<|endoftext|>", 2**16 - 1, np.uint16), ("<|end_of_text|>", 2**16, np.uint32), ("</s>", 9, np.uint16)],
)
def test_a_users_tokenizer(end: str, last_id: int, dtype: type, config: Make, tmp_path: Path) -> None:
    """Also: vocabularies with gaps, the switch to 32 bits, and no truncation or padding of the user's."""
    file = word_tokenizer(tmp_path / "tokenizer.json", end, last_id)
    corpus_file = write_rows(tmp_path / "a.jsonl", ["the fox the fox the"] * 20)
    corpus, _ = build(config(path=str(corpus_file), tokenizer=str(file)))
    assert corpus.train.dtype == dtype
    assert (corpus.vocab_size, corpus.end_token) == (last_id + 1, 2)
    assert corpus.train[:].tolist() == [1, last_id, 1, last_id, 1, 2] * 19
    assert corpus.tokenizer_path.read_bytes() == file.read_bytes()


# ---- control tokens that are written out in a text ----


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), *((letter, -3.0) for letter in "abcdfox </s>")]
    return Tokenizer(models.Unigram(pieces, 0, False))


def byte_level() -> Tokenizer:
    return bpe.train(iter(DOCUMENTS), 300)


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "fox": 2, "<s>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, words, unigram])
@pytest.mark.parametrize("special", [True, False])
def test_a_control_token_in_a_text_is_text(make: Callable, special: bool, config: Make, tmp_path: Path) -> None:
    """Of a tokenizer from a file, whether its control tokens are marked as special, added, or words of the model."""
    tokenizer = make()
    end = "</s>" if make is not byte_level else "<|endoftext|>"
    more = ["<s>", "</s>", "<pad>", "<|im_start|>"]
    tokenizer.add_special_tokens([end, *more])
    tree = json.loads(tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["special"] = special or token["content"] != end
    (tmp_path / "t.json").write_text(json.dumps(tree))
    documents = [f"fox {i} {end} fox<s>fox {end}{end} <pad></s> a{end}" for i in range(40)]
    file = write_rows(tmp_path / "a.jsonl", documents)
    corpus, said = build(config(path=str(file), tokenizer=str(tmp_path / "t.json")))
    ids = np.concatenate([corpus.train[:], corpus.val[:]])
    assert (ids == corpus.end_token).sum() == 40
    names = Tokenizer.from_file(str(tmp_path / "t.json"))
    assert not {names.token_to_id(name) for name in ("<s>", "<pad>")} & set(ids.tolist())
    assert said[-1].endswith("; 280 control tokens in the text, read as text")


# ---- what a warm start costs ----


@pytest.mark.slow
def test_a_warm_start_says_nothing_and_imports_little(config: Make, corpus_file: Path, cache_dir: Path) -> None:
    cold, said = build(config(path=str(corpus_file)))
    assert said
    script = (
        "import sys; from gnmr.lab.config import DataConfig; from gnmr.lab.data.tokens import prepare; said = []\n"
        f"corpus = prepare(DataConfig('text', {str(corpus_file)!r}, vocab_size=300), 0, said.append)\n"
        "heavy = [name for name in ('datasets', 'tokenizers', 'torch', 'transformers') if name in sys.modules]\n"
        "import json; print(json.dumps([corpus.fingerprint, said, heavy]))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [cold.fingerprint, [], []]


# ---- progress ----


def test_chatter_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SAY_EVERY", math.inf)
    said: list[str] = []
    tell = tokens.Progress(said.append)
    tell.begin("reading")
    for i in range(100):
        tell(f"read {i}")
    assert said == ["reading"]
    monkeypatch.setattr(tokens, "SAY_EVERY", 0.0)
    tell("read 101")
    assert said[-1] == "read 101"
