"""Rank 0: takes requests from the queue and decodes them together; listeners publish the answers and observe.

Decides nothing about rows: the scheduler of requests does. The driver brings rows to the stages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Protocol

from pipedec.core.errors import UserError
from pipedec.core.limits import MAX_NUM_SEQS, SLOW_SECONDS
from pipedec.decoding import Drafter, Request, Scheduler
from pipedec.decoding.events import Advanced, Record, Timestep
from pipedec.engine.admission import Admission, Admitted, Arrived
from pipedec.engine.loop import decode
from pipedec.engine.output import Publisher, answer_of
from pipedec.engine.rank_tasks import POLL_SECONDS, RankTasks, Wiring
from pipedec.engine.rank_zero import TaskPipeline, WindowPipeline
from pipedec.engine.request_queue import Frame, RequestQueue
from pipedec.engine.run_counters import RunCounters
from pipedec.faults import failure_of, is_of_machine
from pipedec.messages.events import ErrorEvent
from pipedec.scheduler.protocol import RankMessage
from pipedec.topology import rank_name
from pipedec.transport import Transport

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # epochs that may end while a request is running, without a new token of it
MAX_LOSSES = 5  # the same with new tokens
SUSPECTED = 2  # of these, after which the request is served alone
TRIAL_TOKENS = 64  # with which a request passes its trial
LONGER = 16  # times as long windows on slow links
_STATS_SECONDS = 1.0  # between two publications of the counters


class Feed(Protocol):
    """A live view of the pipeline in frames, made by a listener of the scheduler while there is a watcher."""

    watcher: str  # names the latest watcher; empty if there is none

    def follow(self, watcher: str, scheduler: Scheduler, timestep: int) -> None:
        """Show frames to a new ``watcher``, or to none if it is empty. Called after timestep number ``timestep``."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: all rows in flight are lost."""


# Makes a feed from two functions: one returns the text of a running answer so far, one takes frames in order.
MakeFeed = Callable[[Callable[[Request], str], Callable[[list[Frame]], None]], Feed]


class DraftLoop:
    """Rank 0 of a resident cluster. Serves any number of requests without reloading anything.

    Args:
        wiring: of the first epoch; every other one has a transport of its own.
        scheduler: of requests, without any.
        load_drafter: loads the draft model while requests are decoded without it, in a process that replaces a lost one; None
            if ``scheduler`` has all it needs.
        make_feed: makes the live feed; None for a pipeline that cannot be watched.
        keep: keeps what was learned, now and then, or with True at once.
    """

    def __init__(
        self, wiring: Wiring, admission: Admission, scheduler: Scheduler, max_num_seqs: int = MAX_NUM_SEQS,
        load_drafter: Callable[[], Drafter] | None = None, make_feed: MakeFeed | None = None,
        keep: Callable[[bool], None] = lambda at_once: None,
    ) -> None:  # fmt: skip
        self._wiring = wiring
        self._short_window = wiring.window
        self._tasks = RankTasks(0, wiring)
        self._admission = admission
        self._scheduler = scheduler
        scheduler.draft_rounds.time_forward = lambda load, forwards: self._tasks.recorder.drafting(load, forwards)
        scheduler.resources.awaits_drafter = load_drafter is not None
        self._late_drafter = None if load_drafter is None else _in_a_thread(load_drafter)
        self._max_num_seqs = max_num_seqs
        self._keep = keep
        self._queue = RequestQueue(wiring.scheduler, admission.arrived)
        self._publisher = Publisher(self._queue, wiring, self._tasks)
        self._counters = RunCounters(scheduler)
        scheduler.listeners += [self._on_record, self._counters.on_record, self._publisher.on_record]
        text = lambda request: answer_of(request).completion.text  # noqa: E731
        self._feed = None if make_feed is None else make_feed(text, self._queue.show)
        self._published = 0.0  # when the counters were last published
        self._sessions = 0
        self._stopping = False
        self._suspects: list[int] = []  # requests that may be why ranks were lost; the first is served alone
        self._tried_tokens = 0  # of that one, since its trial began

    def serve(self, transport: Transport) -> None:
        """Serve in the scheduler's present epoch, whose ranks have met, until ``stop``. Requests that were running at the end
        of the last epoch continue first, even if another process was rank 0 then.

        Raises EpochEnded if the epoch has ended, and PipedecError if the run was aborted, a rank is lost, or Redis is. After
        EpochEnded, RankLost or SchedulerInterrupted it may be called again in the next epoch.
        """
        self._wiring = replace(self._wiring, transport=transport)
        self._tasks = self._publisher.tasks = RankTasks(0, self._wiring)
        self._queue.begin_epoch()
        if self._feed is not None:
            self._feed.begin_epoch(self._wiring.scheduler.epoch)
        self._scheduler.interrupt()
        journal = self._queue.journal()
        guilty = [message for message in journal if message.attempts >= MAX_ATTEMPTS or message.losses >= MAX_LOSSES]
        for message in journal:
            if message in guilty:
                self._give_up(message)
            elif message.number not in self._scheduler.requests:  # another process has admitted it
                self._begin(self._admission.arrived(message))
        suspected = [message.number for message in journal if message.losses >= SUSPECTED]
        self._suspects = [] if guilty else suspected[::-1]  # those that came last first: without them, all was well
        self._try_next()
        with self._queue.serving():
            while not self._stopping or self._scheduler.requests:
                if self._scheduler.requests:
                    self._decode()
                elif (arrived := self._tasks.request(self._queue.wait, POLL_SECONDS)) is not None:
                    if arrived.kind == "stop":
                        self._stopping = True
                    else:
                        self._begin(self._admission.arrived(arrived))
            self._queue.refuse("the cluster is being stopped")
        self._keep(True)

    def set_ring_latency(self, seconds: float) -> None:
        """Let as many timesteps be in flight as pay on links with this latency, all together, unless the passage is given.

        On slow links windows are longer, too: between two of them a stage waits for Redis, perhaps over such a link.
        """
        if self._wiring.tunes_passage:
            self._scheduler.controller.fill_links(seconds)
        self._wiring = replace(self._wiring, window=self._short_window * (LONGER if seconds > SLOW_SECONDS else 1))

    def _give_up(self, message: RankMessage) -> None:
        """End a request that may be why epochs are lost."""
        logger.warning("gives up request %d, which was running when ranks were lost %d times", message.number, message.losses)
        if message.number in self._scheduler.requests:
            self._scheduler.drop(message.number)
        recoveries = self._wiring.scheduler.status().recoveries
        cause = f": {recoveries[-1].reason}" if recoveries else ""
        error = f"the cluster has lost ranks {message.losses} times while it answered this request, which may be why{cause}"
        self._wiring.scheduler.blame(message.number)
        self._queue.finish(message.number, ErrorEvent(error, is_fault=True))

    def _try_next(self, passed: int | None = None) -> None:
        """Serve the next suspect alone, or all requests if there is none. ``passed`` is not suspected any more."""
        self._suspects = [number for number in self._suspects if number in self._scheduler.requests and number != passed]
        before, self._scheduler.only = self._scheduler.only, next(iter(self._suspects), None)
        self._tried_tokens = 0
        if before is not None or self._scheduler.only is not None:
            alone = (
                "all requests"
                if self._scheduler.only is None
                else f"request {self._scheduler.only} alone, since ranks were lost for it"
            )
            logger.info("serves %s", alone)
            self._wiring.scheduler.try_alone(self._scheduler.only, passed)

    def _begin(self, arrived: Arrived) -> None:
        """Begin a request, or end it with an error."""
        number = arrived.message.number
        try:
            if isinstance(arrived.admitted, Exception):
                raise arrived.admitted
            self._open(arrived.message, arrived.admitted)
        except UserError as error:
            logger.info("refuses request %d: %s", number, error)
            self._queue.finish(number, ErrorEvent(str(error)))
        except Exception as error:
            if is_of_machine(error):
                raise
            logger.warning("request %d cannot begin", number, exc_info=True)
            self._queue.finish(number, ErrorEvent(failure_of(rank_name(0), error), is_fault=True))

    def _open(self, message: RankMessage, admitted: Admitted) -> None:
        answer, asked = admitted.answer, admitted.answer.asked
        if answer.is_complete:
            self._queue.finish(message.number, answer.completed())
            return
        request = self._scheduler.prepare(asked, admitted.new_sequence, answer)
        answer.completion.metrics = request.metrics
        logger.debug("begins request %d: %d prompt tokens by %s", asked.number, len(asked.prompt_token_ids), asked.method)
        self._publisher.begin(answer, goes_on=bool(message.output_token_ids) or message.attempts > 0)
        self._scheduler.open(request)

    def _decode(self) -> None:
        """Run one session: from a request that finds the pipeline empty until no request is left."""
        self._sessions += 1
        pipeline = (WindowPipeline if self._wiring.window else TaskPipeline)(self._sessions, self._tasks, self._wiring)
        for _ in decode(self._scheduler, pipeline, self._follow_queue):
            continue  # listeners receive everything
        self._stopping |= pipeline.is_stopping or self._queue.is_stopping
        self._publish_counters()

    def _follow_queue(self) -> None:
        """Before a timestep, begin requests for which there is room, and end cancelled ones."""
        self._queue.check()
        if self._late_drafter is not None and self._late_drafter.done():
            self._scheduler.adopt(self._late_drafter.result())
            self._late_drafter = None
        if time.monotonic() > self._published + _STATS_SECONDS:
            self._publish_counters()
        for number in self._queue.cancelled():
            self._scheduler.cancel(number)
        if (tried := self._scheduler.only) is not None and (
            self._tried_tokens >= TRIAL_TOKENS or tried not in self._scheduler.requests
        ):
            self._try_next(passed=tried)
        room = 0 if self._queue.is_stopping else self._max_num_seqs - len(self._scheduler.requests)
        for arrived in self._queue.arrivals(room):
            self._begin(arrived)
        if self._feed is not None and self._feed.watcher != self._queue.watcher:
            self._feed.follow(self._queue.watcher, self._scheduler, self._counters.timesteps)

    def _publish_counters(self) -> None:
        self._published = time.monotonic()
        self._queue.publish_stats(self._counters.stats())
        self._keep(False)

    def _on_record(self, record: Record) -> None:
        """Trace and count this rank's timesteps, and the tokens of a request that is tried."""
        if isinstance(record, Timestep):
            self._tasks.on_timestep(record)
            self._wiring.activity.count_timestep()
        elif isinstance(record, Advanced) and record.request.number == self._scheduler.only:
            self._tried_tokens += len(record.verdict.tokens)


def _in_a_thread(load: Callable[[], Drafter]) -> Future[Drafter]:
    """The result of ``load``, which is called in a thread that does not keep the process alive."""
    loaded: Future[Drafter] = Future()

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:
            loaded.set_exception(error)

    Thread(target=run, name="draft model", daemon=True).start()
    return loaded
