"""Rank 0's side of the queue: takes requests, receives cancellations and publishes answers, in a thread of its own.

So no timestep waits for Redis or a tokenizer: the decode loop begins requests that the thread has fetched and admitted, and
leaves events for it to publish. Does not know the pipeline's capacity, which its caller passes in.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from pipedec.core.errors import PipedecError, SchedulerLost
from pipedec.engine.admission import Arrived
from pipedec.messages.events import CancelledEvent, ErrorEvent, Event
from pipedec.messages.stats import RunStats
from pipedec.scheduler import RankScheduler
from pipedec.scheduler.protocol import Post, RankMessage

Frame = dict[str, Any]  # of the live feed: a JSON object

_LOOK_SECONDS = 0.02  # between two looks at the queue in Redis, while the pipeline runs
_ORPHANS_SECONDS = 1.0  # between two searches for requests whose owner has died
_PAUSE_SECONDS = 0.01  # between two batches of events: the thread shares the interpreter with the pipeline
_SHOW_SECONDS = 0.1  # between two batches of frames of the live feed
_FRAMES = 1000  # timesteps whose frames may wait
_REFUSED_AT_ONCE = 1000
_END = None  # among the posts: the thread must end


class RequestQueue:
    """Inside ``serving``: the requests of a run and their answers. Its methods are called by one thread, the pipeline's.

    Calls that return something raise PipedecError if the thread has failed: Redis was lost, the run has failed, or its epoch
    has ended. The same object continues in the next epoch, from ``begin_epoch`` on, and then publishes the remaining events. So
    calls that publish do not fail: a token must not be taken by some listeners and not by others.

    Args:
        admit: tokenizes and checks a request.
    """

    def __init__(self, scheduler: RankScheduler, admit: Callable[[RankMessage], Arrived]) -> None:
        self.is_stopping = False  # the run was asked to stop; requests may still wait (see ``refuse``), but no more will come
        self.watcher = ""  # the name of the newest reader of the live feed; empty if there is none
        self._frames: deque[list[Frame]] = deque(maxlen=_FRAMES)  # of the live feed, not published yet
        self._scheduler = scheduler
        self._admit = admit
        self._posts: SimpleQueue[Post | None] = SimpleQueue()
        self._unsent: list[Post] = []  # taken from the posts; perhaps published
        self._stats: RunStats | None = None  # not published yet
        self._failure: PipedecError | None = None
        self._taking = threading.Lock()  # held by the thread that takes requests from Redis
        self._changing = threading.Lock()  # held while the following is changed, never during a call of Redis
        self._limit = 0  # the pipeline's capacity for requests
        self._arrived: list[Arrived] = []
        self._cancelled: set[int] = set()  # given out, and cancelled, which the pipeline does not know yet
        self._reported: set[int] = set()  # cancelled, as Redis reported last

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run the thread while the run is up. Raises PipedecError unless every event has been published at the end."""
        thread = threading.Thread(target=self._run, name="request queue", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._posts.put(_END)
            thread.join()
            self._keep_posts()
        self.check()

    def begin_epoch(self) -> None:
        """Use the scheduler's present epoch for the calls that follow."""
        self._failure = None

    def journal(self) -> list[RankMessage]:
        """The requests that run when an epoch begins, before ``serving``, also those that another process began; without those
        that this one has ended or not begun. Raises PipedecError.
        """
        self._keep_posts()
        if self._unsent:
            self._publish_unsent()
        arrived = {one.message.number for one in self._arrived}
        return [message for message in self._scheduler.journal() if message.number not in arrived]

    def put(self, number: int, *events: Event) -> None:
        """Publish events of a running request soon, in the order of the calls for each request."""
        self._posts.put(Post(number, events))

    def finish(self, number: int, *events: Event) -> None:
        """Publish the last events of a running request soon. They end it."""
        self._posts.put(Post(number, events, ends=True))

    def publish_stats(self, stats: RunStats) -> None:
        """Publish the counters of the run, with the next events."""
        self._stats = stats

    def show(self, frames: list[Frame]) -> None:
        """Publish frames of the live feed soon; if too many are waiting, the oldest are dropped."""
        self._frames.append(frames)

    def arrivals(self, limit: int) -> list[Arrived]:
        """The next requests, at most ``limit``, for which the pipeline has room. The others stay in Redis."""
        self.check()
        with self._changing:
            arrived, self._arrived = self._arrived[:limit], self._arrived[limit:]
            self._limit = limit - len(arrived)
        return arrived

    def check(self) -> None:
        """Raises PipedecError if the thread has failed."""
        if self._failure is not None:
            raise self._failure

    def cancelled(self) -> list[int]:
        """Requests given out that have been cancelled since the last call. They run until ``finish``."""
        self.check()
        with self._changing:
            cancelled, self._cancelled = self._cancelled, set()
        return sorted(cancelled)

    def wait(self, timeout_seconds: float) -> RankMessage | None:
        """For a pipeline in which nothing runs: the next request, or another message; None after ``timeout_seconds``."""
        self.check()
        with self._taking:
            message = self._arrived.pop(0).message if self._arrived else self._scheduler.wait_request(timeout_seconds)
        self.is_stopping |= message is not None and message.kind == "stop"
        return message

    def refuse(self, reason: str) -> None:
        """Answer all waiting requests with an error. For a run that is stopping."""
        self.check()
        with self._taking:
            requests, self._arrived = [one.message for one in self._arrived], []
            while requests or (requests := self._scheduler.pop_requests(_REFUSED_AT_ONCE).requests):
                self._scheduler.publish_all([Post(message.number, (ErrorEvent(reason),), ends=True) for message in requests])
                requests = []

    def _run(self) -> None:
        looked = sought = shown = time.monotonic()
        is_open = True
        try:
            while is_open:
                is_open = self._take_posts(_LOOK_SECONDS)
                has_posts = bool(self._unsent)
                stats, self._stats = self._stats, None
                if has_posts or stats is not None:
                    self._publish_unsent(stats)
                if is_open:
                    time.sleep(_PAUSE_SECONDS if has_posts else 0.0)
                if is_open and time.monotonic() > looked + _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look()
                if self._frames and (not is_open or time.monotonic() > shown + _SHOW_SECONDS):
                    shown = time.monotonic()
                    self._publish_frames()
                if is_open and time.monotonic() > sought + _ORPHANS_SECONDS:
                    sought = time.monotonic()
                    self._scheduler.end_orphans()
        except PipedecError as error:
            self._failure = error

    def _publish_frames(self) -> None:
        """Publish the waiting frames of the live feed. Other calls report the loss of Redis."""
        frames = list[str]()
        while self._frames and len(frames) < _FRAMES:
            frames += [json.dumps(frame, separators=(",", ":")) for frame in self._frames.popleft()]
        with suppress(SchedulerLost):
            self._scheduler.show(frames)

    def _publish_unsent(self, stats: RunStats | None = None) -> None:
        self._scheduler.publish_all(self._unsent, stats)
        self._unsent = []

    def _take_posts(self, timeout_seconds: float) -> bool:
        """Take the queued posts, after waiting for the first. Returns False at the end of the queue."""
        with suppress(Empty):  # the queue is empty
            post = self._posts.get(timeout=timeout_seconds)
            while post is not None:
                self._unsent.append(post)
                post = self._posts.get_nowait()
            return False
        return True

    def _keep_posts(self) -> None:
        """Keep the posts that the ended thread has not taken."""
        while not self._posts.empty():
            self._take_posts(0)

    def _look(self) -> None:
        """Take requests while there is room, and note which were cancelled."""
        if not self._taking.acquire(blocking=False):
            return  # the pipeline waits for a request
        try:
            taken = self._scheduler.pop_requests(max(0, self._limit - len(self._arrived)))
            cancelled = set(taken.cancelled)
            admitted = [self._admit(message) for message in taken.requests if message.number not in cancelled]
            with self._changing:
                waiting = {one.message.number for one in self._arrived} | {message.number for message in taken.requests}
                ended = waiting & cancelled  # the pipeline ends those that it has begun
                self._arrived = [one for one in [*self._arrived, *admitted] if one.message.number not in ended]
                for number in sorted(ended):
                    self._posts.put(Post(number, (CancelledEvent(),), ends=True))
                self._cancelled |= cancelled - ended - self._reported
                self._reported = cancelled
            self.is_stopping |= taken.stopping
            self.watcher = taken.watcher
        finally:
            self._taking.release()
