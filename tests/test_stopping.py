"""Signals, collected until the process can end well."""

from __future__ import annotations

import signal

import pytest

from gnmr.lab import stopping

ALL = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]


@pytest.fixture(autouse=True)
def own_handlers():
    """A signal that is not collected is an error, and no end of the tests."""

    def refuse(number: int, _: object) -> None:
        raise RuntimeError(number)

    with stopping.handled(ALL, refuse):
        yield


@pytest.mark.parametrize("number", ALL)
def test_the_first_is_collected_and_a_second_acts_as_usual(number):
    told = []
    with stopping.signals_collected(told.append) as received:
        signal.raise_signal(number)
        assert (received, told) == ([number], [number])
        with pytest.raises(RuntimeError):
            signal.raise_signal(signal.SIGTERM)


def test_a_worker_is_told_twice_without_ending(monkeypatch):
    """By its sweep, and by who signals all processes of a job: it saves its checkpoint all the same."""
    monkeypatch.setattr(stopping, "_insist", False)
    with stopping.signals_collected() as received:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGUSR1, signal.SIGTERM]


def test_what_is_ignored_stays_so():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert stopping.ending() == [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    with stopping.signals_collected() as received:
        signal.raise_signal(signal.SIGHUP)
    assert received == []
