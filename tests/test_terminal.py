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
from gnmr import console
from gnmr.console import Terminal, activation, print_plain, say, shown_command
from gnmr.lab.views.live import LiveView
from gnmr.streams import Unwritable


class Gone(io.StringIO):
    """A stream whose reader left (EPIPE), whose terminal was closed (EIO) or whose disk is full (ENOSPC)."""

    def __init__(self, reason: int) -> None:
        super().__init__()
        self.reason = reason

    def write(self, _: str) -> int:
        raise OSError(self.reason, os.strerror(self.reason))


@pytest.mark.parametrize("reason", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_run_goes_on_without_its_terminal_and_a_command_gets_an_error(reason: int) -> None:
    view = LiveView("plain", console=Terminal(file=Gone(reason), force_terminal=True))
    view.say("anybody?")
    assert view._console.quiet, "nothing is printed any more"
    view.say("nobody: nothing is raised either")
    view.stop()
    with pytest.raises(Unwritable if reason == errno.ENOSPC else BrokenPipeError):
        Terminal(file=Gone(reason)).print("anybody?")


FULL = Path("/dev/full")


def to_a_full_disk(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command with its standard output on a disk that takes nothing more."""
    with FULL.open("w") as full:
        return subprocess.run(
            [sys.executable, "-m", "gnmr", *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=cwd, timeout=300
        )


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words",
    [["--version"], pytest.param(["runs", "--help"], marks=pytest.mark.slow), ["train", "debug=smoke", "--cfg", "job"]],
)
def test_output_that_cannot_be_written_is_one_line(words: list[str], tmp_path: Path) -> None:
    ended = to_a_full_disk(*words, cwd=tmp_path)
    told = "gnmr: standard output: cannot be written (No space left on device)\n"
    assert (ended.returncode, ended.stderr) == (2, told)


def test_a_closed_stream_goes_nowhere(tmp_path: Path) -> None:
    command = f"{sys.executable} -m gnmr --version >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60).returncode == 0


def test_the_line_before_commands_where_the_shell_does_not_find_ours(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.chdir(tmp_path)
    assert activation() == []
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    assert activation() == ["first: source .venv/bin/activate"]
    (tmp_path / "gnmr").touch(0o755)
    assert activation() == []
    assert shown_command("report", "runs/a b") == "gnmr report 'runs/a b'"


def test_text_is_shown_as_it_is(capsys) -> None:
    say("a [bold]message[/bold] :smile: " + "x" * 200)
    assert capsys.readouterr().out == "a [bold]message[/bold] :smile: " + "x" * 200 + "\n"


def test_what_nobody_copies_breaks_between_words_on_a_terminal() -> None:
    line = "#12 sim_e2m1_bf16-always_low-53c38d0b-s0  ppl 18.28  GEMM FLOPs spent 10.0%  0:00:09"
    for terminal, lines in (
        (True, ["#12 sim_e2m1_bf16-always_low-53c38d0b-s0  ppl", "18.28  GEMM FLOPs spent 10.0%  0:00:09"]),
        (False, [line]),
    ):
        out = io.StringIO()
        console = Terminal(file=out, force_terminal=terminal, width=50, _environ={})
        print_plain(console, line, by_words=console.is_terminal)
        assert [one.rstrip() for one in out.getvalue().splitlines()] == lines
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=50, _environ={})
    print_plain(console, f"page: /{'p' * 60}/a.html is written", by_words=True)
    assert f"/{'p' * 60}/a.html" in out.getvalue(), "a path stays whole"


MANY_PICTURES = """
import threading
from pathlib import Path
from gnmr.console import say
from gnmr.lab.views.live import RunInfo, LiveView

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
        view = LiveView("auto")
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


def test_time_left_does_not_count_what_was_before_the_first_of_all(monkeypatch, capsys) -> None:
    """As the preparing of data."""
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.showing("demo", "steps") as show:
        for now, done in ((27.0, 1), (33.0, 7), (40.0, 14)):  # noqa: B007  (the clock reads it)
            show(done, 301)
    assert capsys.readouterr().err == "gnmr: demo: 1 of 301 steps\ngnmr: demo: 14 of 301 steps, 287 s left\n"


@pytest.mark.parametrize("name", ["a\u202eb", "it's \x1b[2J", "a\\b\t\u202ec"])
def test_letters_that_are_not_seen_are_written_out_and_a_command_can_be_pasted(name):
    console = Terminal(file=io.StringIO(), width=40)
    command = shown_command("report", name)
    print_plain(console, f"{name}: {command}")
    printed = console.file.getvalue().removesuffix("\n")
    assert printed.isprintable() and printed.endswith(command)
    pasted = command.removeprefix("gnmr report ")
    assert subprocess.run(["bash", "-c", f"printf %s {pasted}"], capture_output=True).stdout.decode() == name
