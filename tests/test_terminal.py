"""What happens when several threads print, and when nobody reads any more."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gnmr
from gnmr.records.view import View
from gnmr.terminal import Terminal, say


def closed_pipe() -> Terminal:
    """Writes to a pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    return Terminal(file=os.fdopen(write, "w"), force_terminal=False)


def test_a_reader_that_left_is_an_error_and_no_exit() -> None:
    with pytest.raises(BrokenPipeError):
        closed_pipe().print("anybody?")


def test_a_run_goes_on_without_its_reader() -> None:
    view = View("plain", console=closed_pipe())
    view.say("anybody?")
    assert view._console.quiet, "nothing is printed any more"
    view.say("nobody: nothing is raised either")


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, _: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_run_goes_on_without_its_terminal() -> None:
    view = View("plain", console=Terminal(file=Gone(), force_terminal=True))
    view.say("anybody?")
    assert view._console.quiet
    view.stop()


def test_text_is_shown_as_it_is(capsys) -> None:
    say("a [bold]message[/bold] :smile: " + "x" * 200)
    assert capsys.readouterr().out == "a [bold]message[/bold] :smile: " + "x" * 200 + "\n"


MANY_PICTURES = """
import threading
from pathlib import Path
from gnmr.terminal import say
from gnmr.records.view import RunInfo, View

over = threading.Event()
def talk():
    said = 0
    while not over.is_set():
        said += 1
        say(f"line {said} of the thread")
thread = threading.Thread(target=talk)
thread.start()
try:
    for number in range(50):
        view = View("auto")
        view.start(RunInfo(f"run {number}", Path("runs/x"), "int4", "cpu", 40, 4, 2, 1000, 2048))
        view.stop()
finally:
    over.set()
    thread.join()
print("all shown")
"""


def on_a_terminal(script: str, cwd: Path) -> tuple[int, str]:
    """(exit code, what is shown) of a Python script on a pseudo-terminal."""
    ours, its = os.openpty()
    package = str(Path(gnmr.__file__).parent.parent)
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": package}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=its, stdout=its, stderr=its, cwd=cwd, env=environment
    )
    os.close(its)
    shown, until = b"", time.monotonic() + 120
    try:
        while time.monotonic() < until:
            shown += os.read(ours, 1 << 16)
    except OSError:  # nobody holds the other end any more
        pass
    finally:
        process.kill() if time.monotonic() >= until else None
        os.close(ours)
    return process.wait(timeout=60), shown.decode(errors="replace")


def test_a_thread_prints_while_pictures_come_and_go(tmp_path) -> None:
    """`print` would write to a stream that the end of a picture has freed: a crash of the interpreter."""
    code, shown = on_a_terminal(MANY_PICTURES, tmp_path)
    assert code == 0, shown[-2000:]
    assert "all shown" in shown and "Error" not in shown
    assert "line 1 of the thread" in shown
