"""Signals that end a command, wherever its main thread is when they come."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from pipedec.cli.show import Interrupts


@pytest.fixture
def usual() -> Iterator[None]:
    """What handles signals is put back."""
    handlers, hook = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}, sys.unraisablehook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.unraisablehook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def interrupts(usual: None) -> Interrupts:
    return Interrupts()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts(interrupts: Interrupts, number: signal.Signals) -> None:
    interrupts.raise_missed()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_a_deferred_signal_waits_until_the_command_asks(interrupts: Interrupts) -> None:
    with interrupts.deferred():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_missed()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_comes_while_an_object_is_finalized_is_not_lost_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))
    interrupts: Interrupts = request.getfixturevalue("interrupts")

    class Finalized:
        def __init__(self, ends: Callable[[], None]) -> None:
            self._ends = ends

        def __del__(self) -> None:
            self._ends()

    Finalized(lambda: os.kill(os.getpid(), signal.SIGINT))
    Finalized(lambda: [].pop())
    assert dropped == [IndexError] and capfd.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_missed()


@pytest.mark.usefixtures("usual")
def test_ctrl_c_stays_ignored_where_it_is() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts = Interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    interrupts.raise_missed()
