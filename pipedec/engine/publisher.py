"""Publishes an answer's events from a thread of its own, so that no timestep of a window waits for Redis.

The thread also checks whether the request was cancelled. Knows nothing of tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from pipedec.core import PipedecError
from pipedec.messages import Event
from pipedec.scheduler.protocol import Scheduler

_CHECK_SECONDS = 0.1  # between two checks for a cancellation
_PAUSE_SECONDS = 0.01  # between two batches of events: the thread shares the interpreter with the pipeline


class AnswerPublisher:
    """Inside ``publishing``: publishes one answer's events in order and watches for its cancellation."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._events: SimpleQueue[Event | None] = SimpleQueue()  # None ends the thread
        self._failure: PipedecError | None = None
        self.is_cancelled = False

    @contextmanager
    def publishing(self, request_number: int) -> Iterator[None]:
        """Run the thread. When the context ends, every event has been published.

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
        """Publish ``event`` soon. Raises PipedecError if publishing an earlier event has failed."""
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
        """Publish the queued events, after waiting briefly for the first. Returns False at the end of the queue."""
        events: list[Event | None] = []
        with suppress(Empty):  # the queue is empty
            events.append(self._events.get(timeout=_CHECK_SECONDS))
            while True:
                events.append(self._events.get_nowait())
        batch = [event for event in events if event is not None]
        if batch:
            self._scheduler.publish(request_number, *batch)
        if len(batch) < len(events):
            return False
        time.sleep(_PAUSE_SECONDS if batch else 0.0)
        return True

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
