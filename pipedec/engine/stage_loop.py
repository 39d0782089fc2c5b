"""The loop of a stage rank: it takes tasks, and its worker computes rows and replays verdicts.

With windows a rank runs many timesteps without asking the scheduler in between. With single tasks (PipeDec, Algorithm 3) every
transfer is granted; computed rows wait for that, and verdicts prune them meanwhile.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from pipedec.core.stage_message import EMPTY, Load, StageMessage
from pipedec.engine.rank_tasks import RankTasks, Report, Wiring
from pipedec.messages.events import CacheSlotsEvent, TraceEvents
from pipedec.messages.stats import StageStats
from pipedec.scheduler.paper import Facts, post_process, results_of
from pipedec.scheduler.protocol import Granted, RankMessage
from pipedec.scheduler.workflow import Planned, Task, checked_transfers
from pipedec.stage import StageWorker
from pipedec.stage.worker import SpanContext
from pipedec.transport import Transport

STOPPING_SECONDS = 0.05
PUBLISH_SECONDS = 1.0  # between two publications of the counters


class StageLoop:
    """The loop of one rank 1..n. Owns the messages that wait to be computed or sent."""

    def __init__(self, worker: StageWorker, rank: int, wiring: Wiring) -> None:
        self._worker = worker
        self._rank = rank
        self._wiring = wiring
        self._topology = wiring.topology
        self._tasks = RankTasks(rank, wiring)
        self._arrived = EMPTY  # with single tasks: received and not computed
        self._waiting = EMPTY  # with single tasks: computed and not sent
        self._reports: dict[int, Report] = {}  # on running requests, by number
        self._timesteps = 0
        self._published = 0.0  # when the counters were last published

    def serve(self, transport: Transport) -> None:
        """Serve the scheduler's present epoch, whose ranks ``transport`` connects, until ``stop``, and until rank 0 has left:
        it finishes the running requests before it stops. All state of the epoch before is discarded.

        Raises EpochEnded if the epoch has ended, and PipedecError if the run was aborted, a rank is lost, or Redis is.
        """
        self._wiring = replace(self._wiring, transport=transport)
        self._tasks = RankTasks(self._rank, self._wiring)
        self._reports.clear()
        self._worker.reset()
        self._arrived = self._waiting = EMPTY
        while (message := self._tasks.next()).kind != "stop":
            self._execute(message)
        while 0 in self._wiring.scheduler.status().alive:
            while (late := self._tasks.poll(STOPPING_SECONDS)) is not None:
                self._execute(late)

    def _execute(self, message: RankMessage) -> None:
        """Execute the granted tasks, one after another, and report them; the receiver of a transfer reports it."""
        done, planned = list[Task](), list[Planned]()
        for granted in message.tasks:
            task, facts = granted.task, Facts()
            if task.kind == "T":
                self._transfer(task)
            elif task.name == "window":
                self._run_window(granted)
            else:
                facts = self._compute(granted)
            if task.target == self._rank:
                done.append(task)
                planned += post_process(task, self._topology, facts)
        if done:
            self._tasks.report(done, planned)

    def _run_window(self, granted: Granted) -> None:
        """Run all timesteps of a window, without asking the scheduler in between (see ``rank_zero``).

        If its order of transfers requires it, a rank receives the whole next message before it sends its last result.
        """
        first, last = granted.task.seq, granted.task.seq + granted.payload["timesteps"] - 1
        phases = checked_transfers(granted.payload["transfers"], self._rank, self._topology, self._wiring.duplex)
        receives_first = len(phases) == 2 and phases[0][0].target == self._rank
        withheld: StageMessage | None = None
        for number in range(first, last + 1):
            received = self._tasks.receive(self._rank - 1)
            if withheld is not None:
                received.await_hidden()
                self._send(withheld, number - 1)

            def span(name: str, load: Load, number: int = number) -> AbstractContextManager[None]:
                return self._tasks.recorder.span(Task.compute(name, self._rank, number).label, name, load)

            reply, withheld = self._advance(received, number, span), None
            if receives_first and number < last and not received.ends_session:
                withheld = reply
            else:
                self._send(reply, number)
            if received.ends_session:
                self._publish_counters()
                return

    def _send(self, reply: StageMessage, number: int) -> None:
        self._tasks.send(reply, self._topology.following(self._rank), number)

    def _transfer(self, task: Task) -> None:
        """Receive or send (Algorithm 3). Returns when the device has finished, so that the rank is free for the next transfer."""
        if task.target == self._rank:
            self._arrived = self._tasks.receive(task.source)
            self._arrived.await_hidden()
            self._tasks.recorder.record_event().wait()
        else:
            self._waiting, leaving = EMPTY, self._waiting
            self._tasks.send(leaving, task.target, task.seq).wait()

    def _compute(self, granted: Granted) -> Facts:
        """Replay the verdicts of a sync, or compute the rows that have arrived."""
        task, recorder = granted.task, self._tasks.recorder
        if task.name == "sync":
            results = results_of(granted.payload)
            with recorder.span(task.label, "sync"):
                self._waiting = self._worker.replay(results, self._waiting)
            return Facts(has_output=bool(self._waiting.updates))

        def span(name: str, load: Load) -> AbstractContextManager[None]:
            return nullcontext() if name == "sync" else recorder.span(task.label, name, load)  # ends of answers are part of it

        self._arrived, arrived = EMPTY, self._arrived
        reply = self._advance(arrived, task.seq, span)
        if self._rank == self._topology.final_rank:
            return Facts(bool(self._waiting.updates), reply.updates, granted.active)
        self._waiting = reply
        return Facts(bool(reply.updates), (), granted.active)

    def _advance(self, received: StageMessage, number: int, span: SpanContext) -> StageMessage:
        """Run one timestep. Reports on requests that end are published before the next rank receives its message."""
        for update in received.updates:
            opening = update.opening if update.number not in self._reports else None
            if opening is not None and (report := self._tasks.begin_report(opening.trace)) is not None:
                self._reports[update.number] = report
        phases = self._tasks.recorder.phases
        phases.begin("computing")
        reply = self._worker.advance(received, span)
        phases.begin("between timesteps")  # the work of this one is queued on the device
        self._timesteps += 1
        self._wiring.activity.count_timestep()
        if (now := time.perf_counter()) > self._published + PUBLISH_SECONDS:
            self._published = now
            self._publish_counters()
        self._tasks.on_timestep(self._tasks.timestep(number))
        for update in received.updates:
            if update.verdict is not None and update.verdict.finished not in (None, "paused"):
                ending = self._reports.pop(update.number, None)
                events = [] if ending is None else self._tasks.end_report(ending)
                if any(isinstance(event, TraceEvents) for event in events):
                    events.append(CacheSlotsEvent(self._rank, self._worker.cache_slots))
                if events:
                    self._wiring.scheduler.publish(update.number, *events)
        return reply

    def _publish_counters(self) -> None:
        """Publish the counters for clients, without waiting for Redis."""
        phases = self._tasks.recorder.phases
        stats = StageStats(
            self._rank, self._timesteps, self._worker.rows, self._worker.pruned_rows,
            compute_seconds=phases.seconds("computing"), wait_seconds=phases.seconds("waiting"),
            experts=int(self._worker.experts), expert_layers=self._worker.expert_layers, num_experts=self._worker.num_experts,
        )  # fmt: skip
        self._wiring.scheduler.publish_stats(stats)
