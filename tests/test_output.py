"""What is named as output is replaced as a whole, or written through, or refused; never destroyed."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from gnmr.errors import UserError
from gnmr.records import output

NORMS = "step,unit,norm\n1,a,1.0\n1,b,2.0\n2,a,1.0\n2,b,9.0\n"


@pytest.fixture
def norms(tmp_path: Path) -> Path:
    file = tmp_path / "norms.csv"
    file.write_text(NORMS)
    return file


def null_device(folder: Path) -> Path:
    """A device node that a test may lose; where none can be made, /dev/null itself."""
    node = folder / "null"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        node.write_text("")
    except OSError:
        node.unlink(missing_ok=True)
        return Path("/dev/null")
    return node


def test_a_device_is_written_to_and_stays_one(norms, gnmr, tmp_path) -> None:
    node = null_device(tmp_path)
    assert gnmr("replay", str(norms), f"out={node}").code == 0
    output.check(node)
    output.write_json(node, {"a": 1.0})
    output.write_text(node, "text")
    assert stat.S_ISCHR(node.lstat().st_mode)


def test_a_pipe_is_written_to(norms, gnmr, tmp_path) -> None:
    fifo, told = tmp_path / "fifo", list[str]()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: told.append(fifo.read_text()), daemon=True)
    reader.start()
    assert gnmr("replay", str(norms), f"out={fifo}").code == 0
    reader.join(timeout=30)
    assert [line[:9] for line in told[0].splitlines()] == ['{"step": ', '{"step": '] and fifo.is_fifo()


def test_folders_and_sockets_are_refused(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(tmp_path / "s"))
        for name in ("folder", "s"):
            for write in (output.check, lambda path: output.write_text(path, "x")):
                with pytest.raises(UserError, match="must be a file in a folder that exists"):
                    write(tmp_path / name)


def test_a_link_is_followed_to_a_device_alone(tmp_path) -> None:
    """One that leads to a file may be another's, also where the user names it: it lies in a folder of theirs."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("new")
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("link", "dangling"):
        with pytest.raises(UserError, match=f"{name}: is a symbolic link"):
            output.write_text(tmp_path / name, "new text")
    with pytest.raises(UserError, match="is something else"):
        output.write_text(tmp_path / "null", "text", follow=False)  # in a folder of others
    output.write_text(tmp_path / "null", "text")
    assert (tmp_path / "null").is_symlink() and (tmp_path / "target").read_text() == "old"
    assert not (tmp_path / "new").exists()


def test_what_lies_beside_is_not_touched(tmp_path) -> None:
    """Another file's temporary name may be a file of the user's, and who may read a file stays as it was."""
    out = tmp_path / "scores.json"
    out.write_text("{}")
    out.chmod(0o600)
    for name in ("scores.json.tmp", ".scores.json.writing"):
        (tmp_path / name).write_text("mine")
    output.write_json(out, {"a": 1})
    assert len(list(tmp_path.iterdir())) == 3
    assert (tmp_path / "scores.json.tmp").read_text() == (tmp_path / ".scores.json.writing").read_text() == "mine"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_the_old_file(tmp_path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    with pytest.raises(RuntimeError), output.replacing(out) as file:
        file.write(b"half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and out.read_text() == "old"
