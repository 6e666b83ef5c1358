"""What happens when nobody reads any more."""

from __future__ import annotations

import os

import pytest

from gnmr.records.view import View
from gnmr.terminal import Terminal


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
