"""What is named as output is replaced as a whole, or refused; never destroyed."""

from __future__ import annotations

import socket
import stat

import pytest

from gnmr.errors import UserError
from gnmr.records import output


def test_folders_and_sockets_are_refused(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(tmp_path / "s"))
        for name in ("folder", "s"):
            for write in (output.check, lambda path: output.write_text(path, "x")):
                with pytest.raises(UserError, match="must be a file in a folder that exists"):
                    write(tmp_path / name)


def test_a_link_is_refused(tmp_path) -> None:
    """It may lead to a file of somebody else."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("new")
    for name in ("link", "dangling"):
        with pytest.raises(UserError, match=f"{name}: is a symbolic link"):
            output.write_text(tmp_path / name, "new text")
    assert (tmp_path / "target").read_text() == "old" and not (tmp_path / "new").exists()


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
