"""What the client learns of an answer while its pipeline runs through a window: told from a thread, so that no timestep waits.

Owns that thread and what it has found out: whether the answer has been cancelled. Knows nothing of tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from pipedec.core import PipedecError
from pipedec.scheduler.protocol import Event, Scheduler

_CHECK_SECONDS = 0.1  # between two looks for a cancellation
_PAUSE_SECONDS = 0.01  # between two batches of events: the thread shares the interpreter with the pipeline


class AnswerPublisher:
    """Publishes one answer's events in order, and watches for its cancellation, inside ``publishing``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None ends the thread
        self._failure: PipedecError | None = None
        self.is_cancelled = False

    @contextmanager
    def publishing(self, request_number: int) -> Iterator[None]:
        """Runs the thread; everything put has been published when this ends.

        Raises:
            PipedecError: Redis was lost.
        """
        self._failure = None
        self.is_cancelled = self._scheduler.is_cancelled(request_number)
        thread = threading.Thread(target=self._run, args=(request_number,), name="answer publisher", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._events.put(None)
            thread.join()
        self._check()

    def put(self, event: Event) -> None:
        """Have ``event`` published. Raises PipedecError if publishing has failed meanwhile."""
        self._check()
        self._events.put(event)

    def _run(self, request_number: int) -> None:
        checked = time.monotonic()
        is_open = True
        try:
            while is_open:
                is_open = self._publish(request_number)
                if time.monotonic() > checked + _CHECK_SECONDS:
                    checked = time.monotonic()
                    self.is_cancelled = self.is_cancelled or self._scheduler.is_cancelled(request_number)
        except PipedecError as error:
            self._failure = error

    def _publish(self, request_number: int) -> bool:
        """Publish what is there, waiting for it a while; False once the end was put."""
        events: list[Event | None] = []
        with suppress(Empty):  # then these are all
            events.append(self._events.get(timeout=_CHECK_SECONDS))
            while True:
                events.append(self._events.get_nowait())
        told = [event for event in events if event is not None]
        if told:
            self._scheduler.publish(request_number, *told)
        if len(told) < len(events):
            return False
        time.sleep(_PAUSE_SECONDS if told else 0.0)
        return True

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
