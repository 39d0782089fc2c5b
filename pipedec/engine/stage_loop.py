"""What a stage rank does: it takes tasks, and its worker computes rows and replays verdicts."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from msgspec import convert

from pipedec.core import Envelope, Load, Step, Update, Verdict
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.messages import CacheSlotsEvent, Event, LogprobsEvent, StageStats
from pipedec.scheduler.protocol import Message
from pipedec.scheduler.transfers import checked_transfers
from pipedec.scheduler.workflow import Facts, Task
from pipedec.stage import StageWorker
from pipedec.transport import Transport

STOPPING_SECONDS = 0.05
TELLING_SECONDS = 1.0  # between two notes on what was counted


class StageLoop:
    """Ranks 1..n."""

    def __init__(self, worker: StageWorker, rank: int, wiring: Wiring) -> None:
        self._worker = worker
        self._rank = rank
        self._wiring = wiring
        self._tasks = RankTasks(rank, wiring)
        self._traced: set[int] = set()  # requests
        self._num_sampled = 0  # tokens of the only request, in task dispatch
        self._timesteps = 0
        self._told = 0.0  # when what was counted was told
        self._handlers = {"pre": self._prefill, "dec": self._decode, "sync": self._sync, "window": self._window}

    def serve(self, transport: Transport) -> None:
        """Serve until ``stop``, and until rank 0 has left: it finishes the running requests before it stops.

        In the epoch in which the scheduler takes part now, whose ranks ``transport`` connects; nothing is left of the one before.

        Raises:
            EpochEnded: the epoch has ended.
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        self._wiring = replace(self._wiring, transport=transport)
        self._tasks = RankTasks(self._rank, self._wiring)
        self._worker.reset()
        self._traced.clear()
        while (message := self._tasks.next()).kind != "stop":
            self._execute(message)
        while 0 in self._wiring.scheduler.status().alive:
            while (late := self._tasks.poll(STOPPING_SECONDS)) is not None:
                self._execute(late)

    def _execute(self, message: Message) -> None:
        if message.opening is not None:
            self._open(Update(message.number, message.opening))
            self._worker.open(message.number, message.opening)
            self._num_sampled = len(message.opening.said)
        if message.task is not None:
            self._tasks.report(message.task, self._handlers[message.task.name](message.task, message))

    def _prefill(self, task: Task, message: Message) -> Facts:
        token_ids = message.payload.get("token_ids")
        step = self._tasks.inbox.popleft() if token_ids is None else self._prompt_chunk(token_ids)
        verdict = self._compute(message.number, step)
        return Facts(self._keep(message.number, task.seq), verdict, is_first_chunk=message.payload["is_first_chunk"])

    def _prompt_chunk(self, token_ids: list[int]) -> Step:
        chunk = torch.tensor(token_ids, dtype=torch.int64)
        return Step(chunk, torch.full_like(chunk, -1))

    def _decode(self, task: Task, message: Message) -> Facts:
        verdict = self._compute(message.number, self._tasks.inbox.popleft())
        topology = self._wiring.topology
        waits_for_sync = topology.is_exit(self._rank) and topology.has_sync(message.active)
        rows = 0 if waits_for_sync else self._keep(message.number, task.seq)
        return Facts(rows, verdict, active=message.active)

    def _compute(self, number: int, step: Step) -> Verdict | None:
        """Compute the rows of the only request. Returns the verdict, whose log-probabilities go out with the next report."""
        steps = {number: step}
        self._tasks.recorder.phases.begin("computing")
        with self._tasks.recorder.computing(self._worker.load(steps)):
            self._worker.compute(steps)
            results = self._worker.results()
        self._count()
        for result in results:
            if result.logprobs:
                self._tasks.events.append((number, LogprobsEvent([list(row) for row in result.logprobs], self._num_sampled)))
                self._num_sampled += len(result.logprobs)
        return results[0].verdict if results else None

    def _keep(self, number: int, seq: int) -> int:
        return self._tasks.keep(self._worker.outgoing().get(number), seq)

    def _sync(self, task: Task, message: Message) -> Facts:
        verdict = convert(message.payload["verdict"], Verdict)
        self._worker.sync(message.number, verdict)
        if verdict.finished:
            self._tasks.forget()
            self._tasks.ended.append(message.number)
            self._tasks.events += [(message.number, event) for event in self._slots(message.number)]
            return Facts(finished=True)
        return Facts(self._keep(message.number, task.seq))

    def _window(self, task: Task, message: Message) -> Facts:
        """All timesteps of a window, without asking the scheduler in between (see ``windows``).

        A rank whose order of transfers says so takes the next envelope, all of it, before it sends what became of the last.
        """
        wiring, last = self._wiring, task.seq + message.payload["timesteps"] - 1
        granted = checked_transfers(message.payload["transfers"], self._rank, wiring.topology, wiring.duplex)
        receives_first = len(granted) == 2 and granted[0][0].target == self._rank
        withheld: Envelope | None = None
        for number in range(task.seq, last + 1):
            received = self._tasks.receive(self._rank - 1)
            if withheld is not None:
                received.await_hidden()
                self._send(withheld, number - 1)
            reply, withheld = self._advance(received, number), None
            if receives_first and number < last and not received.ends_session:
                withheld = reply
            else:
                self._send(reply, number)
            if received.ends_session:
                self._tell()
                return Facts(finished=True)
        return Facts()

    def _send(self, reply: Envelope, number: int) -> None:
        self._tasks.send(reply, self._wiring.topology.following(self._rank), number)

    def _advance(self, received: Envelope, number: int) -> Envelope:
        """One timestep. What this rank has to say about requests that end is published before the next rank is told."""
        for update in received.updates:
            self._open(update)
        self._tasks.recorder.phases.begin("computing")
        reply = self._worker.advance(received, partial(self._span, number))
        self._count()
        self._tasks.note(self._tasks.timestep(number))
        for update in received.updates:
            if update.verdict is not None and update.verdict.finished not in (None, "paused"):
                events = [*self._tasks.closed(update.number), *self._slots(update.number)]
                if events:
                    self._wiring.scheduler.publish(update.number, *events)
        return reply

    def _count(self) -> None:
        """The device has been given one timestep's work."""
        self._timesteps += 1
        self._wiring.doing.count_timestep()
        self._tasks.recorder.phases.begin("between timesteps")
        if (now := time.perf_counter()) > self._told + TELLING_SECONDS:
            self._told = now
            self._tell()

    def _tell(self) -> None:
        """Let clients know what was counted, without waiting for Redis."""
        phases = self._tasks.recorder.phases
        stats = StageStats(
            self._rank, self._timesteps, self._worker.rows, self._worker.pruned_rows,
            compute_seconds=phases.seconds("computing"), wait_seconds=phases.seconds("waiting"),
        )  # fmt: skip
        self._wiring.scheduler.tell(stats)

    def _span(self, number: int, name: str, load: Load) -> AbstractContextManager[None]:
        return self._tasks.recorder.span(Task.compute(name, self._rank, number).label, name, load)

    def _open(self, update: Update) -> None:
        if update.opening is not None:
            self._tasks.opened(update.number, update.opening.trace)
            if update.opening.trace:
                self._traced.add(update.number)

    def _slots(self, number: int) -> list[Event]:
        """Of a traced request that has ended: the size of the KV pool."""
        if number not in self._traced:
            return []
        self._traced.discard(number)
        return [CacheSlotsEvent(self._rank, self._worker.cache_slots)]
