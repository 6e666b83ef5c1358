"""One process at a time writes a run folder."""

from __future__ import annotations

import errno
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_rows import step_row

from gnmr.errors import UserError
from gnmr.records import lock as lock_module
from gnmr.records.lock import lock_folder
from gnmr.records.reader import read_jsonl
from gnmr.records.writer import RunWriter


def fails_with(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@contextmanager
def writing_child(folder: Path) -> Iterator[int]:
    """A child process that has written three steps and goes on living."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        writer = RunWriter(folder, None)
        for step in (1, 2, 3):
            writer.step(step_row(step))
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(read, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES])
def test_these_errors_mean_another_process(number, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module.fcntl, "flock", fails_with(number))
    with pytest.raises(UserError, match="is being written by another process"):
        lock_folder(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_without_locks_it_goes_on_with_a_warning(number, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module.fcntl, "flock", fails_with(number))
    with pytest.warns(UserWarning, match="its file system has no locks") as warned:
        writer = RunWriter(tmp_path, None)
    writer.step(step_row(1))
    writer.finish("done", None, 4, 2)
    assert len(warned) == 1 and (tmp_path / "DONE").exists()


def test_a_second_process_is_refused_and_changes_nothing(tmp_path):
    with writing_child(tmp_path):
        with pytest.raises(UserError, match=r"is being written by another process$"):
            RunWriter(tmp_path, 2)
        assert [row["step"] for row in read_jsonl(tmp_path / "steps.jsonl")] == [1, 2, 3]
    RunWriter(tmp_path, 2).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "steps.jsonl")] == [1, 2]


def test_a_loop_that_was_interrupted_in_a_notebook_attaches_again(tmp_path):
    first = RunWriter(tmp_path, None)
    RunWriter(tmp_path, 0).close()
    first.close()
    assert [path.name for path in tmp_path.glob(".*")] == [".lock"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_folders_serves(number, tmp_path, monkeypatch):
    """As those of VirtualBox, of CIFS, and some of FUSE."""
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            fails_with(number)()
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    writer = RunWriter(tmp_path, None)
    writer.write_header("a: 1\n", {})
    writer.step(step_row(1))
    writer.sync()
    writer.finish("done", None, 4, 2)
    assert (tmp_path / "DONE").exists()
