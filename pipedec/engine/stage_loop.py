"""The loop of a stage rank: it takes tasks, and its worker computes rows and replays verdicts.

With windows a rank runs many timesteps without asking the scheduler in between. With single tasks (PipeDec, Algorithm 3) every
transfer is granted; computed rows wait for that, and verdicts prune them meanwhile.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from pipedec.core import EMPTY, Load, RequestUpdate, StageMessage
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.messages import CacheSlotsEvent, Event, StageStats
from pipedec.scheduler.paper import Facts, post_process, results_of
from pipedec.scheduler.protocol import Granted, RankMessage
from pipedec.scheduler.transfers import checked_transfers
from pipedec.scheduler.workflow import Planned, Task
from pipedec.stage import StageWorker
from pipedec.stage.worker import SpanContext
from pipedec.transport import Transport

STOPPING_SECONDS = 0.05
TELLING_SECONDS = 1.0  # between two publications of the counters


class StageLoop:
    """Ranks 1..n."""

    def __init__(self, worker: StageWorker, rank: int, wiring: Wiring) -> None:
        self._worker = worker
        self._rank = rank
        self._wiring = wiring
        self._tasks = RankTasks(rank, wiring)
        self._traced: set[int] = set()  # requests
        self._arrived = EMPTY  # with single tasks: received and not computed
        self._waiting = EMPTY  # with single tasks: computed and not sent
        self._timesteps = 0
        self._published = 0.0  # when the counters were last published

    def serve(self, transport: Transport) -> None:
        """Serve until ``stop``, and until rank 0 has left: it finishes the running requests before it stops.

        Serves the scheduler's present epoch, whose ranks ``transport`` connects; all state of the epoch before is discarded.

        Raises:
            EpochEnded: the epoch has ended.
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        self._wiring = replace(self._wiring, transport=transport)
        self._tasks = RankTasks(self._rank, self._wiring)
        self._worker.reset()
        self._traced.clear()
        self._arrived = self._waiting = EMPTY
        while (message := self._tasks.next()).kind != "stop":
            self._execute(message)
        while 0 in self._wiring.scheduler.status().alive:
            while (late := self._tasks.poll(STOPPING_SECONDS)) is not None:
                self._execute(late)

    def _execute(self, message: RankMessage) -> None:
        """Execute the granted tasks, one after another, and report them: a transfer is reported by its receiver."""
        done, planned = list[Task](), list[Planned]()
        for granted in message.tasks:
            task, facts = granted.task, Facts()
            if task.kind == "T":
                self._transfer(task)
            elif task.name == "window":
                self._window(granted)
            elif task.name == "sync":
                self._sync(granted)
                facts = Facts(has_output=bool(self._waiting.updates))
            else:
                results = self._compute(task)
                facts = Facts(bool(self._waiting.updates), results, granted.active)
            if task.target == self._rank:
                done.append(task)
                planned += post_process(task, self._wiring.topology, facts)
        if done:
            self._tasks.report(done, planned)

    def _transfer(self, task: Task) -> None:
        """Algorithm 3. Ends when the device has finished the transfer, so that the rank is free for the next one."""
        if task.target == self._rank:
            self._arrived = self._tasks.receive(task.source)
            self._arrived.await_hidden()
            self._tasks.recorder.record_event().wait()
        else:
            self._waiting, leaving = EMPTY, self._waiting
            self._tasks.send(leaving, task.target, task.seq).wait()

    def _compute(self, task: Task) -> tuple[RequestUpdate, ...]:
        """Compute the rows that have arrived. Returns the results of the last stage."""
        self._arrived, arrived = EMPTY, self._arrived
        reply = self._advance(arrived, task.seq, partial(self._span_of, task))
        if self._rank == self._wiring.topology.final_rank:
            return reply.updates
        self._waiting = reply
        return ()

    def _sync(self, granted: Granted) -> None:
        results = results_of(granted.payload)
        with self._span_of(granted.task, "sync", Load()):
            self._waiting = self._worker.replay(results, self._waiting)

    def _window(self, granted: Granted) -> None:
        """Run all timesteps of a window, without asking the scheduler in between (see ``windows``).

        If its order of transfers requires it, a rank receives the whole next envelope before it sends its last result.
        """
        wiring, first, last = self._wiring, granted.task.seq, granted.task.seq + granted.payload["timesteps"] - 1
        phases = checked_transfers(granted.payload["transfers"], self._rank, wiring.topology, wiring.duplex)
        receives_first = len(phases) == 2 and phases[0][0].target == self._rank
        withheld: StageMessage | None = None
        for number in range(first, last + 1):
            received = self._tasks.receive(self._rank - 1)
            if withheld is not None:
                received.await_hidden()
                self._send(withheld, number - 1)
            reply, withheld = self._advance(received, number, partial(self._span_in_window, number)), None
            if receives_first and number < last and not received.ends_session:
                withheld = reply
            else:
                self._send(reply, number)
            if received.ends_session:
                self._publish_counters()
                return

    def _send(self, reply: StageMessage, number: int) -> None:
        self._tasks.send(reply, self._wiring.topology.following(self._rank), number)

    def _advance(self, received: StageMessage, number: int, span: SpanContext) -> StageMessage:
        """Run one timestep. Reports on requests that end are published before the next rank receives its envelope."""
        for update in received.updates:
            self._open(update)
        self._tasks.recorder.phases.begin("computing")
        reply = self._worker.advance(received, span)
        self._count()
        self._tasks.note(self._tasks.timestep(number))
        for update in received.updates:
            if update.verdict is not None and update.verdict.finished not in (None, "paused"):
                events = [*self._tasks.closed(update.number), *self._slots(update.number)]
                if events:
                    self._wiring.scheduler.publish(update.number, *events)
        return reply

    def _count(self) -> None:
        """Count a timestep whose work is queued on the device."""
        self._timesteps += 1
        self._wiring.activity.count_timestep()
        self._tasks.recorder.phases.begin("between timesteps")
        if (now := time.perf_counter()) > self._published + TELLING_SECONDS:
            self._published = now
            self._publish_counters()

    def _publish_counters(self) -> None:
        """Publish the counters for clients, without waiting for Redis."""
        phases = self._tasks.recorder.phases
        stats = StageStats(
            self._rank, self._timesteps, self._worker.rows, self._worker.pruned_rows,
            compute_seconds=phases.seconds("computing"), wait_seconds=phases.seconds("waiting"),
        )  # fmt: skip
        self._wiring.scheduler.tell(stats)

    def _span_in_window(self, number: int, name: str, load: Load) -> AbstractContextManager[None]:
        return self._tasks.recorder.span(Task.compute(name, self._rank, number).label, name, load)

    def _span_of(self, task: Task, name: str, load: Load) -> AbstractContextManager[None]:
        """The span of a granted task. It includes replaying that answers have ended."""
        is_part = name == "sync" and task.name != "sync"
        return nullcontext() if is_part else self._tasks.recorder.span(task.label, name, load)

    def _open(self, update: RequestUpdate) -> None:
        if update.opening is not None:
            self._tasks.opened(update.number, update.opening.trace)
            if update.opening.trace:
                self._traced.add(update.number)

    def _slots(self, number: int) -> list[Event]:
        """The size of the KV pool, if the request that has ended was traced."""
        if number not in self._traced:
            return []
        self._traced.discard(number)
        return [CacheSlotsEvent(self._rank, self._worker.cache_slots)]
