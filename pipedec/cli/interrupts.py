"""Ctrl-C and SIGTERM for commands that run until they are stopped."""

from __future__ import annotations

import signal
import sys
from types import FrameType


class Interrupts:
    """From its creation on, SIGTERM raises KeyboardInterrupt like Ctrl-C, even where Ctrl-C is ignored (in a background job).

    Python drops an exception that a signal handler raises in a finalizer or in the callback of a weak reference, such as the ones
    that every import has. A command that waits therefore asks in every turn whether it has missed one. What Python would print of
    the dropped exception is not printed.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._print_unraisable = sys.unraisablehook
        sys.unraisablehook = self._dropped
        signal.signal(signal.SIGTERM, self._interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)

    def raise_missed(self) -> None:
        """Raises KeyboardInterrupt if a signal has come."""
        if self._has_come:
            raise KeyboardInterrupt

    def _dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if not (self._has_come and isinstance(dropped.exc_value, KeyboardInterrupt)):
            self._print_unraisable(dropped)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        raise KeyboardInterrupt
