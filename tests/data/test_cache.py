"""The cache folder: complete or absent, whatever happens to the processes that build it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_corpora import DOCUMENTS, VALIDATION, build, texts, write_rows

from gnmr.errors import RunFailed, UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import cache
from gnmr.lab.data.cache import TokenCorpus
from gnmr.lab.data.sequences import TrainSequences
from gnmr.lab.data.tokens import prepare

Make = Callable[..., DataConfig]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def edit(file: Path, offset: int) -> None:
    """Turn over one bit."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def linked(folder: Path) -> None:
    (folder / "train.bin").rename(folder.with_name("mine.bin"))
    (folder / "train.bin").symlink_to(folder.with_name("mine.bin"))


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, Path]:
    """A config, and a folder of caches with that of the config."""
    folder = tmp_path_factory.mktemp("built")
    chosen = DataConfig(name="text", vocab_size=300, path=str(write_rows(folder / "corpus.jsonl", DOCUMENTS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNMR_CACHE", str(folder / "cache"))
        build(chosen)
    return chosen, folder / "cache"


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda folder: edit(folder / "train.bin", 40), "train.bin does not match its checksum"),
        (lambda folder: edit(folder / "tokenizer.json", -1), "tokenizer.json does not match its checksum"),
        (lambda folder: os.truncate(folder / "val.bin", 6), "val.bin does not match its checksum"),
        (lambda folder: (folder / "val.bin").unlink(), "val.bin"),
        (lambda folder: (folder / "meta.json").unlink(), "meta.json"),
        (lambda folder: (folder / "meta.json").write_text("[" * 10**5), "cannot be read"),
        (lambda folder: (folder / "meta.json").write_text(" " * 2**21), "meta.json"),
        (lambda folder: edit(folder / "meta.json", 18), "meta.json does not match"),
        (linked, "Too many levels of symbolic links"),
        (moved, "it is not a folder"),
    ],
)
def test_a_damaged_or_planted_cache_is_rebuilt_and_said(
    damage: Callable[[Path], object], reason: str, built: tuple[DataConfig, Path], cache_dir: Path
) -> None:
    chosen, undamaged = built
    shutil.copytree(undamaged, cache_dir)
    first, said = build(chosen)
    assert said == []
    expected = first.train[:]
    damage(first.folder)
    second, said = build(chosen)
    assert said[0].startswith("token cache is corrupt (") and reason in said[0]
    assert second.fingerprint == first.fingerprint and np.array_equal(second.train[:], expected)
    assert build(chosen)[1] == [] and not second.folder.is_symlink()
    if damage is moved:
        assert (cache_dir / "elsewhere" / "train.bin").exists(), "what a link points to is not ours"
    elif damage is not linked:
        assert names(cache_dir) == [first.folder.name]


@pytest.mark.slow
def test_the_loser_of_a_race_uses_the_winners_files(config: Make, corpus_file: Path, cache_dir: Path) -> None:
    """The other process runs from start to end in the middle of this one."""
    winners: list[TokenCorpus] = []
    inodes: list[int] = []

    def say(line: str) -> None:
        if "tokenizing train" in line and not winners:
            winners.append(build(config(path=str(corpus_file)))[0])
            inodes.append((winners[0].folder / "train.bin").stat().st_ino)

    loser = prepare(config(path=str(corpus_file)), 0, say)
    assert loser.folder == winners[0].folder and texts(loser, "val") == VALIDATION
    assert (loser.folder / "train.bin").stat().st_ino == inodes[0], "the winner's files were exchanged under its feet"
    assert names(cache_dir) == [loser.folder.name]


@pytest.mark.slow
def test_a_killed_build_leaves_no_half_cache(config: Make, tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(DOCUMENTS))
    chosen = config(path=str(tmp_path / "a.txt"))
    script = (
        "import os, signal\nfrom gnmr.lab.config import DataConfig\nfrom gnmr.lab.data.tokens import prepare\n"
        "say = lambda line: 'tokenizing validation' in line and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"prepare({chosen!r}, 0, say)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    (left,) = names(cache_dir)
    temporary = cache_dir / left
    assert left.startswith(".text-") and (temporary / "new" / "train.bin").stat().st_size > 0

    corpus, said = build(chosen)
    assert not any("corrupt" in line for line in said)
    assert names(cache_dir) == [left, corpus.folder.name], "a young folder may belong to a build in progress"

    for path in (temporary, *temporary.rglob("*")):
        os.utime(path, (0, 0))
    (corpus.folder / "val.bin").unlink()
    build(chosen)
    assert names(cache_dir) == [corpus.folder.name]


def test_an_interrupted_build_leaves_nothing(config: Make, corpus_file: Path, cache_dir: Path) -> None:
    def say(line: str) -> None:
        if "tokenizing validation" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(path=str(corpus_file)), 0, say)
    assert names(cache_dir) == []


def test_a_cache_that_cannot_be_written_is_one_line(config: Make, corpus_file: Path, monkeypatch) -> None:
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"^GNMR_CACHE=.*: cannot be written \(Not a dir"),
    ):
        patch.setenv("GNMR_CACHE", str(corpus_file / "cache"))
        build(config(path=str(corpus_file)))
    plain = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda self, content: plain(Path("/dev/full"), content))
    with pytest.raises(UserError, match=r"^GNMR_CACHE=.*\(No space left on device\)"):
        build(config(path=str(corpus_file)))


# ---- while a run reads ----


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "mode, spoil, says",
    [
        (0o700, False, r"this user may not read text-\w+ there; its owner can share it by chmod -R a\+rX"),
        (0o755, True, r"cannot be written \(Permission denied\); set GNMR_CACHE to a folder"),
    ],
)
def test_a_cache_of_another_user_is_refused_before_any_work(
    mode: int, spoil: bool, says: str, config: Make, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that only their owner may read; and damaged ones that only their owner may replace."""
    with tempfile.TemporaryDirectory() as place:  # below pytest's folders, which are root's alone, no user may read
        Path(place).chmod(0o755)
        shared = Path(place, "cache")
        shared.mkdir()
        shared.chmod(0o1777)
        monkeypatch.setenv("GNMR_CACHE", str(shared))
        folder = prepare(config(path=str(corpus_file)), 100, lambda _: None).folder
        folder.chmod(mode)
        if spoil:
            (folder / cache.META).write_text("{}")
        os.seteuid(65534)
        said: list[str] = []
        try:
            with pytest.raises(UserError, match=rf"^GNMR_CACHE=\S+: {says}") as caught:
                cache.open_or_build(folder, lambda _: pytest.fail("it was built"), said.append)
        finally:
            os.seteuid(0)
        assert "\n" not in str(caught.value) and len(said) == spoil


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_slices_are_those_of_the_array(dtype: str, tmp_path: Path) -> None:
    tokens, file = np.arange(100, dtype=dtype), tmp_path / "a.bin"
    tokens.tofile(file)
    read = cache.TokenFile(file, dtype)
    assert len(read) == 100 and read.dtype == tokens.dtype
    for part in (slice(3, 9), slice(None), slice(90, 200), slice(-5, None), slice(9, 3), slice(100, 101)):
        assert np.array_equal(read[part], tokens[part]), part


@pytest.mark.parametrize(
    "change", [lambda file: os.truncate(file, 10), lambda file: file.write_bytes(file.read_bytes()[::-1])]
)
def test_a_change_in_mid_run_is_one_line(change: Callable[[Path], object], config: Make, corpus_file: Path) -> None:
    """A memory map ends the process with SIGBUS, or gives other tokens without a word."""
    corpus, _ = build(config(path=str(corpus_file)))
    sequences = TrainSequences(corpus.train, 16, 0)
    sequences.next(2)
    change(corpus.folder / "train.bin")
    with pytest.raises(RunFailed, match=r"train\.bin: changed while it was in use"):
        sequences.next(sequences.num_sequences)


def test_an_open_file_outlives_its_folder(config: Make, corpus_file: Path) -> None:
    corpus, _ = build(config(path=str(corpus_file)))
    expected = corpus.train[:]
    shutil.rmtree(corpus.folder)
    assert np.array_equal(corpus.train[:], expected)
