"""Signals that end a command, wherever its main thread is when they come."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from pipedec.cli.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Interrupts()
    for number, handler in usual.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts(interrupts: Interrupts, number: signal.Signals) -> None:
    interrupts.raise_missed()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_a_signal_that_comes_while_an_object_is_finalized_is_not_lost(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    Finalized()
    assert dropped == [KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_missed()


def test_ctrl_c_stays_ignored_where_it_is() -> None:
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupts = Interrupts()
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.raise_missed()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
