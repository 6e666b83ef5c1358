"""One process at a time writes a run folder, whatever its file system does about locks."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_rows import step_row

from gnmr.errors import RunFailed, UserError
from gnmr.records import lock as lock_module
from gnmr.records.lock import OWNER, lock_folder
from gnmr.records.reader import read_jsonl
from gnmr.records.schema import EVAL_FIELDS
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


@pytest.mark.parametrize("locks", ["whole", ".lock deleted", "each locks for itself", "none at all"])
def test_a_second_process_is_refused_and_changes_nothing(locks, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "_DYING_S", 0.1)
    with writing_child(tmp_path) as pid:
        if locks == ".lock deleted":
            (tmp_path / ".lock").unlink()
        elif locks == "each locks for itself":
            monkeypatch.setattr(lock_module.fcntl, "flock", lambda *_: None)
        elif locks == "none at all":
            monkeypatch.setattr(lock_module.fcntl, "flock", fails_with(errno.ENOLCK))
            monkeypatch.setattr(lock_module, "warn", lambda *_, **__: None)
        by = "" if locks == "whole" else f", {pid} of this machine"
        with pytest.raises(UserError, match=f"is being written by another process{by}$"):
            RunWriter(tmp_path, 2)
        assert [row["step"] for row in read_jsonl(tmp_path / "steps.jsonl")] == [1, 2, 3]
    RunWriter(tmp_path, 2).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "steps.jsonl")] == [1, 2]


def test_the_owner_is_gone_with_its_process_even_if_nobody_asked_for_its_end(tmp_path):
    with writing_child(tmp_path) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        RunWriter(tmp_path, 2).close()


def test_the_mark_goes_with_the_writer(tmp_path):
    writer = RunWriter(tmp_path, None)
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    RunWriter(tmp_path, 0).close()  # a loop that was interrupted in a notebook, and attached again
    writer.close()
    assert [path.name for path in tmp_path.glob(".*")] == [".lock"]


def elsewhere(folder: Path) -> Path:
    """A mark of a process on another machine."""
    (folder / OWNER).write_text(json.dumps({"machine": "another", "pid": 1, "start": "5"}))
    return folder / OWNER


def test_an_owner_on_another_machine_that_touches_its_mark_lives(tmp_path, monkeypatch):
    mark = elsewhere(tmp_path)
    threading.Timer(0.2, lambda: os.utime(mark)).start()
    monkeypatch.setattr(lock_module, "_TOUCH_S", 0.05)
    with pytest.raises(UserError, match="on another machine"), pytest.warns(UserWarning, match="looking whether"):
        RunWriter(tmp_path, None)


@pytest.mark.parametrize("age", [0, 100])
def test_an_owner_on_another_machine_that_is_silent_is_dead(age, tmp_path, monkeypatch, recwarn):
    mark = elsewhere(tmp_path)
    os.utime(mark, (time.time() - age,) * 2)
    monkeypatch.setattr(lock_module, "_SILENT_S", 0.3)
    monkeypatch.setattr(lock_module, "_TOUCH_S", 0.05)
    RunWriter(tmp_path, None).close()
    assert len(recwarn) == (age == 0)


@pytest.mark.parametrize("call", ["step", "eval", "sync"])
def test_a_writer_whose_folder_was_taken_adds_no_row_and_ends(call, tmp_path):
    writer = RunWriter(tmp_path, None)
    writer.step(step_row(1))
    elsewhere(tmp_path)
    arguments = {"step": [step_row(2)], "eval": [dict.fromkeys(EVAL_FIELDS) | {"step": 1}], "sync": []}[call]
    for _ in range(2):  # a loop may catch the first error
        with pytest.raises(RunFailed, match=r"another process writes .* by now; this one ends"):
            getattr(writer, call)(*arguments)
    writer.finish("failed", "another process", 4, 2)
    assert not (tmp_path / "FAILED").exists() and json.loads((tmp_path / OWNER).read_text())["machine"] == "another"
    assert len(read_jsonl(tmp_path / "steps.jsonl")) == 1 and not read_jsonl(tmp_path / "eval.jsonl")


def test_a_mark_that_was_deleted_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "_TOUCH_S", 0.02)
    writer = RunWriter(tmp_path, None)
    (tmp_path / OWNER).unlink()
    until = time.monotonic() + 10
    while not (tmp_path / OWNER).exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / OWNER).exists()
    writer.close()
    assert not (tmp_path / OWNER).exists()


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
