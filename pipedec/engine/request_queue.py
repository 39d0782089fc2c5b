"""Rank 0's side of the queue: takes requests, learns of cancellations and publishes answers, from a thread of its own.

So no timestep waits for Redis: the pipeline's loop finds what the thread has brought, and leaves what the thread is to publish.
Knows nothing of tokens, nor how many requests the pipeline has room for: its caller says that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from pipedec.core import PipedecError
from pipedec.messages import CancelledEvent, ErrorEvent, Event, RunStats
from pipedec.scheduler.protocol import Message, Post, Scheduler

_LOOK_SECONDS = 0.02  # between two looks at the queue in Redis, while the pipeline runs
_ORPHANS_SECONDS = 1.0  # between two looks for requests whose owner has died
_PAUSE_SECONDS = 0.01  # between two batches of events: the thread shares the interpreter with the pipeline
_REFUSED_AT_ONCE = 1000
_END = None  # among the posts: the thread is to end


class RequestQueue:
    """Inside ``serving``: the requests of a run and their answers. Its calls are made by one thread, the pipeline's.

    Every call raises PipedecError if the thread has failed: Redis was lost, or the run has failed.

    Attributes:
        is_stopping: the run was asked to stop. Requests may still wait (see ``refuse``), but no further ones will come.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.is_stopping = False
        self._scheduler = scheduler
        self._posts: SimpleQueue[Post | None] = SimpleQueue()
        self._stats: RunStats | None = None  # not published yet
        self._failure: PipedecError | None = None
        self._taking = threading.Lock()  # held by the thread that asks Redis for requests
        self._changing = threading.Lock()  # held while the following is changed, never while Redis is asked
        self._limit = 0  # how many requests the pipeline has room for
        self._arrived: list[Message] = []
        self._cancelled: set[int] = set()  # of those given out, the ones of whose cancellation the pipeline has not learned
        self._told: set[int] = set()  # those of which it has

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run the thread; the run is up. When the context ends, every event has been published.

        Raises:
            PipedecError: the thread has failed.
        """
        thread = threading.Thread(target=self._run, name="request queue", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._posts.put(_END)
            thread.join()
        self._check()

    def put(self, number: int, *events: Event) -> None:
        """Publish events of a running request soon. Those of a request are published in the order in which they were put."""
        self._check()
        self._posts.put(Post(number, events))

    def finish(self, number: int, *events: Event) -> None:
        """Publish the last events of a running request soon; with them it ends."""
        self._check()
        self._posts.put(Post(number, events, ends=True))

    def tell(self, stats: RunStats) -> None:
        """Publish the counters of the run, with the next events."""
        self._stats = stats

    def arrivals(self, limit: int) -> list[Message]:
        """Requests that have arrived, at most ``limit``, sooner ones first. Does not wait.

        Args:
            limit: how many requests the pipeline has room for. Further ones stay in Redis, in their order.
        """
        self._check()
        with self._changing:
            arrived, self._arrived = self._arrived[:limit], self._arrived[limit:]
            self._limit = limit - len(arrived)
        return arrived

    def cancelled(self) -> list[int]:
        """Requests given out that have been cancelled since the last call. They run until ``finish``."""
        self._check()
        with self._changing:
            cancelled, self._cancelled = self._cancelled, set()
        return sorted(cancelled)

    def wait(self, timeout_seconds: float) -> Message | None:
        """For a pipeline in which nothing runs: the next ``request``, or ``stop``; None after ``timeout_seconds``."""
        self._check()
        with self._taking:
            if self._arrived:
                return self._arrived.pop(0)
            message = self._scheduler.wait_request(timeout_seconds)
        if message is not None and message.kind == "abort":
            raise PipedecError(message.text)
        self.is_stopping |= message is not None and message.kind == "stop"
        return message

    def refuse(self, reason: str) -> None:
        """Answer all requests that wait with an error. For a run that is stopping."""
        self._check()
        with self._taking:
            requests, self._arrived = self._arrived, []
            while requests or (requests := self._scheduler.take(_REFUSED_AT_ONCE).requests):
                self._scheduler.publish_all([Post(message.number, (ErrorEvent(reason),), ends=True) for message in requests])
                requests = []

    def _run(self) -> None:
        looked = sought = time.monotonic()
        is_open = True
        try:
            while is_open:
                is_open = self._publish()
                if is_open and time.monotonic() > looked + _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look()
                if is_open and time.monotonic() > sought + _ORPHANS_SECONDS:
                    sought = time.monotonic()
                    self._scheduler.end_orphans()
        except PipedecError as error:
            self._failure = error

    def _publish(self) -> bool:
        """Publish the queued posts, after waiting briefly for the first. Returns False at the end of the queue."""
        posts: list[Post | None] = []
        with suppress(Empty):  # the queue is empty
            posts.append(self._posts.get(timeout=_LOOK_SECONDS))
            while True:
                posts.append(self._posts.get_nowait())
        batch = [post for post in posts if post is not None]
        stats, self._stats = self._stats, None
        if batch or stats is not None:
            self._scheduler.publish_all(batch, stats)
        if len(batch) < len(posts):
            return False
        time.sleep(_PAUSE_SECONDS if batch else 0.0)
        return True

    def _look(self) -> None:
        """Take requests as far as there is room, and learn which running ones were cancelled."""
        if not self._taking.acquire(blocking=False):
            return  # the pipeline waits for a request
        try:
            taken = self._scheduler.take(max(0, self._limit - len(self._arrived)))
            with self._changing:
                self._arrived += taken.requests
                self._note_cancelled(set(taken.cancelled))
            self.is_stopping |= taken.stopping
        finally:
            self._taking.release()

    def _note_cancelled(self, cancelled: set[int]) -> None:
        """A request that was not given out yet ends here; the others end when the pipeline says so."""
        ended = {message.number for message in self._arrived} & cancelled
        self._arrived = [message for message in self._arrived if message.number not in ended]
        for number in sorted(ended):
            self._posts.put(Post(number, (CancelledEvent(),), ends=True))
        self._cancelled |= cancelled - ended - self._told
        self._told = cancelled

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
