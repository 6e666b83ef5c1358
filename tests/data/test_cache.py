"""The cache folder: complete or absent, whatever happens to the processes that build it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_corpora import DOCUMENTS, build, texts

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import cache, token_file
from gnmr.lab.data.cache import TokenCorpus
from gnmr.lab.data.tokens import prepare

Make = Callable[..., DataConfig]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def edit(file: Path, offset: int) -> None:
    """Turns over one bit."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def edit_meta(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"end_token": 7}))


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda folder: edit(folder / "train.bin", 40), "train.bin does not match its checksum"),
        (lambda folder: edit(folder / "tokenizer.json", -1), "tokenizer.json does not match its checksum"),
        (lambda folder: os.truncate(folder / "val.bin", 6), "val.bin has 6 bytes instead of"),
        (lambda folder: (folder / "val.bin").unlink(), "val.bin is missing"),
        (lambda folder: (folder / "meta.json").unlink(), "meta.json is missing"),
        (lambda folder: (folder / "meta.json").write_text("{"), "meta.json cannot be used"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "meta.json cannot be used"),
        (edit_meta, "meta.json does not match its fingerprint"),
    ],
)
def test_a_damaged_cache_is_rebuilt_and_said(
    damage: Callable[[Path], object], reason: str, config: Make, corpus_file: Path, cache_dir: Path
) -> None:
    first, _ = build(config(path=str(corpus_file)))
    expected = np.array(first.train)
    damage(first.folder)
    second, said = build(config(path=str(corpus_file)))
    assert said[0].startswith(f"token cache is corrupt ({reason}") and "rebuilding" in said[0]
    assert second.fingerprint == first.fingerprint and np.array_equal(second.train, expected)
    assert names(cache_dir) == [first.folder.name]
    assert build(config(path=str(corpus_file)))[1] == []


def test_files_are_verified_whole(config: Make, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "CHUNK", 16)
    corpus, _ = build(config(path=str(corpus_file)))
    for offset in (3, 60, -3):
        content = (corpus.folder / "train.bin").read_bytes()
        edit(corpus.folder / "train.bin", offset)
        with pytest.raises(cache.Corrupt, match=r"train\.bin"):
            cache.open_folder(corpus.folder)
        (corpus.folder / "train.bin").write_bytes(content)


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
    assert loser.folder == winners[0].folder and texts(loser, "val") == [DOCUMENTS[19], DOCUMENTS[39]]
    assert (loser.folder / "train.bin").stat().st_ino == inodes[0], "the winner's files were exchanged under its feet"
    assert names(cache_dir) == [loser.folder.name]


def script(config: DataConfig, say: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import os, signal\nfrom gnmr.lab.config import DataConfig\nfrom gnmr.lab.data.tokens import prepare\n"
        f"def say(line):\n    {say}\n"
        f"print(prepare({config!r}, 0, say).fingerprint)",
    ]


@pytest.mark.slow
def test_two_processes_at_once(config: Make, tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(DOCUMENTS))
    chosen = config(path=str(tmp_path / "a.txt"))
    both = [subprocess.Popen(script(chosen, "pass"), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    fingerprints = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    corpus, said = build(chosen)
    assert fingerprints == {corpus.fingerprint + "\n"} and said == []
    assert names(cache_dir) == [corpus.folder.name]


@pytest.mark.slow
def test_a_killed_build_leaves_no_half_cache(config: Make, tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(DOCUMENTS))
    chosen = config(path=str(tmp_path / "a.txt"))
    killed = subprocess.run(script(chosen, "'tokenizing validation' in line and os.kill(os.getpid(), signal.SIGKILL)"))
    assert killed.returncode == -signal.SIGKILL
    (left,) = names(cache_dir)
    assert left.startswith(".text-")
    temporary = cache_dir / left
    assert (temporary / "new" / "train.bin").stat().st_size > 0, "killed too early to show anything"

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


def test_a_cache_that_cannot_be_written_is_one_line(config: Make, corpus_file: Path) -> None:
    with pytest.raises(
        UserError, match=r"data\.cache_dir=.*: cannot be written \(Not a directory\); set data"
    ) as caught:
        build(config(path=str(corpus_file), cache_dir=str(corpus_file / "cache")))
    assert "\n" not in str(caught.value)
