"""Token files that others change: in a shared cache, and while a run reads them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpora import build, word_checkpoint, write_examples

from gnmr.errors import RunFailed, UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import cache, token_file
from gnmr.lab.data.cache import Corrupt, TokenCorpus, open_folder
from gnmr.lab.data.sequences import TrainSequences
from gnmr.lab.data.token_file import TokenFile
from gnmr.lab.data.tokens import prepare_packed

Make = Callable[..., DataConfig]


def recorded(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def seal(folder: Path, **changes: Any) -> None:
    """What the cache's own `seal` writes, over whatever lies there."""
    meta = json.loads((folder / "meta.json").read_text()) | changes
    meta.pop("fingerprint")
    meta["files"] = {name: recorded((folder / name).read_bytes()) for name in meta["files"]}
    fingerprint = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta | {"fingerprint": fingerprint}))


@pytest.fixture
def corpus(config: Make, corpus_file: Path) -> TokenCorpus:
    return build(config(path=str(corpus_file)))[0]


def write_tokens(file: Path, tokens: np.ndarray) -> TokenFile:
    tokens.tofile(file)
    return TokenFile(file, recorded(file.read_bytes()), tokens.dtype.str, 1000)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_slices_are_those_of_the_array(dtype: str, tmp_path: Path) -> None:
    tokens = np.arange(100, dtype=dtype)
    read = write_tokens(tmp_path / "a.bin", tokens)
    assert len(read) == 100 and read.dtype == tokens.dtype and np.array_equal(read, tokens)
    for part in (slice(3, 9), slice(None), slice(90, 200), slice(-5, None), slice(9, 3), slice(100, 101)):
        assert np.array_equal(read[part], tokens[part]), part


# ---- while a run reads ----


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: os.truncate(file, 10), "train.bin has 10 bytes instead of"),
        (lambda file: os.truncate(file, 0), "train.bin has 0 bytes instead of"),
        (lambda file: file.write_bytes(file.read_bytes()[::-1]), "train.bin does not match its checksum"),
    ],
)
def test_a_change_in_mid_run_is_one_line(change: Callable[[Path], object], reason: str, corpus: TokenCorpus) -> None:
    """A memory map ends the process with SIGBUS, or gives other tokens without a word."""
    sequences = TrainSequences(corpus.train, 16, 0)
    sequences.next(2)
    change(corpus.folder / "train.bin")
    with pytest.raises(RunFailed, match=rf"changed while it was in use \({reason}") as caught:
        sequences.next(sequences.num_sequences)
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_between_the_look_and_the_read(corpus: TokenCorpus, monkeypatch) -> None:
    seen = token_file._stamp(corpus.train._fd)
    monkeypatch.setattr(token_file, "_stamp", lambda fd: seen)
    os.truncate(corpus.folder / "train.bin", 10)
    with pytest.raises(RunFailed, match=r"train\.bin ends early"):
        corpus.train[20:40]


def test_what_does_not_change_the_tokens_is_no_failure(corpus: TokenCorpus) -> None:
    expected = np.array(corpus.train)
    os.utime(corpus.folder / "train.bin", (0, 0))  # as a backup does
    assert np.array_equal(corpus.train, expected)
    shutil.rmtree(corpus.folder)  # the open file stays
    assert np.array_equal(corpus.train, expected)


# ---- in a shared folder ----


def above(folder: Path) -> None:
    np.full(100, 300, dtype="<u2").tofile(folder / "train.bin")
    seal(folder)


def linked(folder: Path) -> None:
    (folder / "train.bin").rename(folder.with_name("mine.bin"))
    (folder / "train.bin").symlink_to(folder.with_name("mine.bin"))


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def piped(folder: Path) -> None:
    (folder / "meta.json").unlink()
    os.mkfifo(folder / "meta.json")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (above, r"train\.bin holds token 300, and the vocabulary has 300"),
        (lambda folder: seal(folder, vocab_size=0), r"meta\.json describes no tokens"),
        (lambda folder: seal(folder, end_token=-1), r"meta\.json describes no tokens"),
        (lambda folder: seal(folder, dtype="O"), r"meta\.json describes no tokens"),
        (lambda folder: (folder / "meta.json").write_text("[" * 10**5), r"meta\.json cannot be used"),
        (lambda folder: (folder / "meta.json").write_text(" " * 2**21), r"meta\.json has 2097152 bytes"),
        (lambda folder: ((folder / "train.bin").write_bytes(b"abc"), seal(folder)), r"train\.bin ends early"),
        (linked, r"meta\.json cannot be used: .*Too many levels of symbolic links"),
        (moved, "it is no folder"),
        (piped, r"is no regular file: '.*meta\.json'"),
    ],
)
def test_a_planted_cache_is_rebuilt(
    damage: Callable[[Path], object], reason: str, corpus: TokenCorpus, config: Make, corpus_file: Path
) -> None:
    expected = np.array(corpus.train)
    damage(corpus.folder)
    with pytest.raises(Corrupt, match=reason):
        open_folder(corpus.folder)
    again, said = build(config(path=str(corpus_file)))
    assert "token cache is corrupt" in said[0]
    assert again.fingerprint == corpus.fingerprint and np.array_equal(again.train, expected)


def test_what_a_link_points_to_is_left_alone(corpus: TokenCorpus, config: Make, corpus_file: Path) -> None:
    moved(corpus.folder)
    build(config(path=str(corpus_file)))
    assert (corpus.folder.with_name("elsewhere") / "train.bin").exists() and not corpus.folder.is_symlink()


def test_borders_that_do_not_fit_are_named(config: Make, tmp_path: Path) -> None:
    write_examples(tmp_path / "data" / "train.jsonl", [("a", "b")] * 3)
    write_examples(tmp_path / "data" / "valid.jsonl", [("a", "b")] * 3)
    settings, checkpoint = config(name="instructions", path=str(tmp_path / "data")), word_checkpoint(tmp_path / "c")
    folder = prepare_packed(settings, 100, len, checkpoint).folder
    np.array([[9**9, 0]], dtype="<i8").tofile(folder / cache.DOCUMENTS["train.bin"])
    seal(folder)
    with pytest.raises(UserError, match=r"train\.documents\.bin does not match train\.bin; remove the folder"):
        prepare_packed(settings, 100, len, checkpoint)


def test_a_full_disk_while_the_tokenizer_is_written(config: Make, corpus_file: Path, monkeypatch) -> None:
    """The library's own `save` raises a plain Exception."""
    plain = Path.write_bytes

    def write_bytes(self: Path, content: bytes) -> int:
        return plain(Path("/dev/full") if self.name == "tokenizer.json" else self, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(UserError, match=r"data\.cache_dir=.*: cannot be written \(No space left on device\)"):
        build(config(path=str(corpus_file)))
