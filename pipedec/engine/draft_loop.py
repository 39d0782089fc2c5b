"""Rank 0: takes requests from the queue and decodes them together; listeners publish the answers and observe.

Decides nothing about rows: the batch of decoding methods does. The driver brings rows to the stages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pipedec.core import KNEE_ROWS, MAX_NUM_SEQS, UserError
from pipedec.decoding import Batch, Drafter
from pipedec.engine.admission import Admission
from pipedec.engine.counters import Counters
from pipedec.engine.late_drafter import LateDrafter
from pipedec.engine.loop import decode
from pipedec.engine.publisher import Publisher
from pipedec.engine.rank_tasks import POLL_SECONDS, RankTasks, Wiring
from pipedec.engine.rank_zero import RankZero
from pipedec.engine.records import Record, Timestep
from pipedec.engine.request_pool import RequestPool
from pipedec.engine.request_queue import Frame, RequestQueue
from pipedec.engine.run_counters import RunCounters
from pipedec.engine.tasks import TaskPipeline
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.engine.windows import WindowPipeline
from pipedec.kv import KVManager
from pipedec.messages import ErrorEvent
from pipedec.methods import LayerTreeOptions
from pipedec.scheduler.protocol import RankMessage, Remembered
from pipedec.text.prompt import Prompter
from pipedec.transport import Transport

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # epochs that may end while a request is running, without a new token of it
_TELLING_SECONDS = 1.0  # between two publications of the counters


class Feed(Protocol):
    """Shows what happens in the pipeline, frame by frame, as a listener of the pool for as long as there is a watcher.

    Attributes:
        watcher: names the latest watcher; empty if there is none.
    """

    watcher: str

    def follow(self, watcher: str, pool: RequestPool, timestep: int) -> None:
        """``watcher`` begins to watch, or there is none any more. Called between two timesteps.

        Args:
            timestep: the number of those so far.
        """

    def begin_epoch(self, epoch: int) -> None:
        """All rows in flight are lost."""


# Makes a feed from two functions: the text of a running answer so far, and where frames go, in order.
MakeFeed = Callable[[Callable[[int], str], Callable[[list[Frame]], None]], Feed]


class DraftLoop:
    """Rank 0 of a resident cluster. Serves any number of requests without reloading anything.

    Args:
        knee: rows that a stage computes in about the time of one.
        max_num_seqs: maximum number of requests in the pipeline at the same time.
        kv: of the stages' KV pools.
        wiring: of the first epoch; every other one has a transport of its own.
        load_drafter: loads the draft model, if ``drafter`` is None and there is one: in a thread, while requests are decoded
            without it. For a process that takes over the requests of another one.
        make_feed: makes the live feed; None for a pipeline that cannot be watched.
    """

    def __init__(
        self,
        prompter: Prompter,
        drafter: Drafter | None,
        trained_masks: int,
        wiring: Wiring,
        tree: LayerTreeOptions | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        knee: int = KNEE_ROWS,
        kv: KVManager | None = None,
        load_drafter: Callable[[], Drafter] | None = None,
        make_feed: MakeFeed | None = None,
    ) -> None:
        self._wiring = wiring
        self._tasks = RankTasks(0, wiring)
        timed = None if drafter is None else self._timed(drafter)
        self._batch = Batch(wiring.topology.num_groups, timed, wiring.place, trained_masks, knee, kv=kv)
        self._late_drafter = None if load_drafter is None else LateDrafter(load_drafter)
        self._batch.awaits_drafter = load_drafter is not None
        self._admission = Admission(prompter, wiring.sequences, wiring.topology.num_stages, tree)
        self._max_num_seqs = max_num_seqs
        self._queue = RequestQueue(wiring.scheduler)
        self._publisher = Publisher(self._queue, wiring, self._tasks)
        self._counters, self._run_counters = Counters(), RunCounters(self._batch)
        listeners = self._note, self._run_counters.note, self._counters.note, self._publisher.note
        self._pool = RequestPool(self._batch, self._publisher.take, listeners)
        self._feed = None if make_feed is None else make_feed(self._publisher.text, self._queue.show)
        self._published = 0.0  # when the counters were last published
        self._sessions = 0
        self._stopping = False

    def serve(self, transport: Transport) -> None:
        """Serve in the scheduler's present epoch, whose ranks have met, until ``stop``. Requests that were running at the end of
        the last epoch continue first, even if another process was rank 0 then.

        May be called again in the next epoch after EpochEnded, RankLost or SchedulerInterrupted.

        Raises:
            EpochEnded: the epoch has ended.
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        self._wiring = replace(self._wiring, transport=transport)
        self._tasks = self._publisher.tasks = RankTasks(0, self._wiring)
        self._queue.begin_epoch()
        if self._feed is not None:
            self._feed.begin_epoch(self._wiring.scheduler.epoch)
        self._pool.interrupt()
        self._resume(self._queue.journal())
        with self._queue.serving():
            while not self._stopping or self._pool.running:
                if self._pool.running:
                    self._decode()
                else:
                    self._wait()
            self._queue.refuse("the cluster is being stopped")

    def remembered(self) -> list[Remembered]:
        """The running requests and what was published of them, to restore a Redis that has lost its data."""
        return self._queue.remembered()

    def _resume(self, running: list[RankMessage]) -> None:
        """Take over the requests that this process does not know, and give up those that may be the cause of lost epochs."""
        for message in running:
            if message.attempts >= MAX_ATTEMPTS:
                self._give_up(message)
            elif message.number not in self._pool.running:
                self._queue.give_out(message)
                self._admit(message)

    def _give_up(self, message: RankMessage) -> None:
        logger.warning("gives up request %d, which was running when ranks were lost %d times", message.number, message.attempts)
        if message.number in self._pool.running:
            self._pool.drop(message.number)
        recoveries = self._wiring.scheduler.status().recoveries
        cause = f": {recoveries[-1].reason}" if recoveries else ""
        self._queue.finish(
            message.number,
            ErrorEvent(
                f"the cluster has lost ranks {message.attempts} times while it answered this request, which may be why{cause}"
            ),
        )

    def _wait(self) -> None:
        """Wait for a request; nothing is running."""
        message = self._tasks.request(self._queue.wait, POLL_SECONDS)
        if message is not None and message.kind == "stop":
            self._stopping = True
        elif message is not None:
            self._admit(message)

    def _decode(self) -> None:
        """Run one session: from a request that finds the pipeline empty until no request is left."""
        pipeline = self._pipeline()
        for _ in decode(self._pool, pipeline, self._follow_queue):
            continue  # the pool's listeners receive everything
        self._stopping |= pipeline.is_stopping or self._queue.is_stopping
        self._publish_counters()

    def _timed(self, drafter: Drafter) -> TimedDrafter:
        return TimedDrafter(drafter, lambda load: self._tasks.recorder.drafting(load))

    def _adopt_late_drafter(self) -> None:
        if self._late_drafter is not None and (drafter := self._late_drafter.take()) is not None:
            self._late_drafter = None
            self._batch.adopt(self._timed(drafter))

    def _pipeline(self) -> RankZero:
        self._sessions += 1
        driver = WindowPipeline if self._wiring.window else TaskPipeline
        return driver(self._sessions, self._tasks, self._wiring)

    def _follow_queue(self) -> None:
        """Begin requests for which there is room, and end those that were cancelled."""
        self._queue.check()
        self._adopt_late_drafter()
        if time.monotonic() > self._published + _TELLING_SECONDS:
            self._publish_counters()
        for number in self._queue.cancelled():
            self._pool.cancel(number)
        room = 0 if self._queue.is_stopping else self._max_num_seqs - len(self._pool.running)
        for message in self._queue.arrivals(room):
            self._admit(message)
        if self._feed is not None and self._feed.watcher != self._queue.watcher:
            self._feed.follow(self._queue.watcher, self._pool, self._run_counters.timesteps)

    def _publish_counters(self) -> None:
        """Publish the counters for clients."""
        self._published = time.monotonic()
        self._queue.tell(self._run_counters.stats())

    def _admit(self, message: RankMessage) -> None:
        try:
            answer, new_sequence = self._admission.admit(message, self._batch)
        except UserError as error:
            logger.info("refuses request %d: %s", message.number, error)
            self._queue.finish(message.number, ErrorEvent(str(error)))
            return
        if answer.is_complete:
            self._queue.finish(message.number, answer.completed())
            return
        request = answer.request
        logger.debug("begins request %d: %d prompt tokens by %s", request.number, len(request.prompt_token_ids), request.method)
        self._counters.begin(request.number, answer.completion.metrics)
        self._publisher.begin(answer, goes_on=bool(message.told) or message.attempts > 0)
        self._pool.open(request, new_sequence)

    def _note(self, record: Record) -> None:
        """Add the record to this rank's traces, and note that it makes progress."""
        if isinstance(record, Timestep):
            self._tasks.note(record)
            self._wiring.activity.count_timestep()
