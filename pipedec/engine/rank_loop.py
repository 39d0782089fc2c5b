"""What a rank process does: take the next task from the scheduler, do it, report it together with what follows from it.

One loop for every rank, one subclass per role. The loop knows tasks, transfers and deadlines; what rows and verdicts mean,
the worker knows; what is scheduled next, Algorithm 4 (``workflow.post_process``) knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from pipedec.core import PipedecError, RankLost, Step
from pipedec.engine.emulation import Emulation, Pacer
from pipedec.engine.messages import sampling_from_payload, verdict_from_payload, verdict_to_payload
from pipedec.scheduler.protocol import Event, Message, Scheduler
from pipedec.scheduler.workflow import Facts, Task, Topology, post_process
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.tracing import Tracer
from pipedec.transport import Transport

POLL_SECONDS = 1.0
STOPPING_SECONDS = 0.05


class RankLoop(ABC):
    """Runs one rank until it is told to stop."""

    def __init__(
        self,
        rank: int,
        scheduler: Scheduler,
        transport: Transport,
        topology: Topology,
        tracer: Tracer,
        emulation: Emulation | None = None,
    ) -> None:
        self._rank = rank
        self._scheduler = scheduler
        self._transport = transport
        self._topology = topology
        self._tracer = tracer
        self._pacer = Pacer(emulation, rank)
        self._overran: list[int] = []  # timesteps whose real work outlasted its emulated time
        self._inbox: deque[Step] = deque()
        self._outbox: dict[Task, Step] = {}
        self._events: list[Event] = []
        self._handlers: dict[str, Callable[[Task, Message], Facts]] = {
            "pre": self._prefill,
            "dec": self._decode,
            "sync": self._sync,
            "send": self._transfer,
        }

    def run(self) -> None:
        """Serve until ``stop``.

        Raises:
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        message = self._next()
        while message.kind != "stop":
            message = self._execute(message) or self._next()

    def _next(self) -> Message:
        """The next message, however long it takes; a rank that stops answering meanwhile is an error that names it."""
        while True:
            message = self._scheduler.wait(self._rank, POLL_SECONDS)
            if message is not None:
                return self._checked(message)
            self._check_peers()

    def _check_peers(self) -> None:
        lost = self._scheduler.expired_ranks()
        if lost:
            raise RankLost(f"{', '.join(map(self._name, lost))} stopped answering")

    def _execute(self, message: Message) -> Message | None:
        """Do one task and report it; returns this rank's next message if the scheduler already has one."""
        task = message.task
        assert task is not None
        with self._tracer.task(task.label, "transfer" if task.kind == "T" else task.name):
            facts = self._handlers[task.name](task, message)
        if self._pacer.take_overran():
            self._overran.append(task.seq)
        if task.kind == "T" and task.source == self._rank:
            return None  # the receiver reports a transfer (Algorithm 3)
        if facts.finished and self._tracer.enabled:
            self._events.append({"trace": [event.as_row() for event in self._tracer.drain()]})
        if facts.finished and self._overran:
            self._events.append({"overran": self._overran})
            self._overran = []
        events, self._events = self._events, []
        following = self._scheduler.finish(self._rank, task, post_process(task, self._topology, facts), events)
        return None if following is None else self._checked(following)

    def _transfer(self, task: Task, message: Message) -> Facts:
        """Algorithm 3: the sender empties its cache of the step, the receiver fills its own."""
        rows, is_prompt = message.payload["rows"], "prompt_length" in message.payload
        with nullcontext() if is_prompt else self._pacer.sending(task.source, rows):
            if task.source == self._rank:
                self._transport.send(self._outbox.pop(task), task.target)
            else:
                self._inbox.append(self._transport.receive(rows, task.source))
        return Facts()

    def _keep_outgoing(self, step: Step | None, seq: int) -> int:
        """Put the step by until its transfer is granted; returns its rows."""
        if step is None:
            return 0
        self._outbox[Task.transfer(self._rank, self._rank + 1, seq)] = step
        return step.num_rows

    def _forget_request(self) -> None:
        """The answer has ended: rows that were still under way are nobody's any more."""
        self._inbox.clear()
        self._outbox.clear()

    @abstractmethod
    def _prefill(self, task: Task, message: Message) -> Facts:
        """Take in a chunk of the prompt."""

    @abstractmethod
    def _decode(self, task: Task, message: Message) -> Facts:
        """Compute the rows that arrived for this timestep."""

    @abstractmethod
    def _sync(self, task: Task, message: Message) -> Facts:
        """Replay the verdict of this timestep."""

    def _checked(self, message: Message) -> Message:
        if message.kind == "abort":
            raise PipedecError(message.text)
        return message

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({'draft' if rank == 0 else f'stage {rank}'})"


class StageLoop(RankLoop):
    """Ranks 1..n."""

    def __init__(self, worker: StageWorker, device: torch.device, *args: Any) -> None:
        super().__init__(*args)
        self._worker = worker
        self._device = device

    def run(self) -> None:
        super().run()
        # Rank 0 finishes the request under way before it obeys the stop, so serve until it has left.
        while 0 in self._scheduler.status().alive:
            message = self._scheduler.wait(self._rank, STOPPING_SECONDS)
            while message is not None:
                message = self._execute(self._checked(message))

    def _prefill(self, task: Task, message: Message) -> Facts:
        payload = message.payload
        if payload["first"]:
            self._worker.begin(payload["prompt_length"], sampling_from_payload(payload["sampling"]))
            self._tracer.enabled = payload["trace"]
        output = self._worker.prefill(self._prompt_chunk(payload) if self._rank == 1 else self._inbox.popleft())
        if self._rank == self._topology.final_rank:
            return Facts(verdict=self._first_verdict(output) if payload["last"] else None, payload=payload)
        return Facts(rows_out=self._keep_outgoing(output, task.seq), payload=payload)

    def _decode(self, task: Task, message: Message) -> Facts:
        step = self._inbox.popleft()
        with self._pacer.computing(step.num_rows):
            self._worker.decode(step)
            verdict = self._verdict() if self._rank == self._topology.final_rank else None
        if verdict is not None:
            return Facts(verdict=verdict, active=message.active)
        in_group = not self._topology.is_exit(self._rank)
        no_sync = not self._topology.has_sync(message.active)
        leaving = self._worker.outgoing() if in_group or no_sync else None
        return Facts(rows_out=self._keep_outgoing(leaving, task.seq), active=message.active)

    def _sync(self, task: Task, message: Message) -> Facts:
        verdict = verdict_from_payload(message.payload["verdict"])
        self._worker.sync(verdict)
        leaving = self._worker.outgoing()
        if self._rank == self._topology.final_rank:
            leaving = None
        if verdict.finished:
            leaving = None
            self._forget_request()
            if self._tracer.enabled:
                self._events.append({"rank": self._rank, "cache_slots": self._worker.cache_slots})
        return Facts(rows_out=self._keep_outgoing(leaving, task.seq), finished=verdict.finished is not None)

    def _prompt_chunk(self, payload: dict[str, Any]) -> Step:
        token_ids = torch.tensor(payload["token_ids"], dtype=torch.int64, device=self._device)
        return Step(token_ids, torch.full_like(token_ids, -1))

    def _first_verdict(self, last_chunk: Step) -> dict[str, object]:
        assert isinstance(self._worker, FinalStageWorker)
        return verdict_to_payload(self._worker.first_verdict(last_chunk))

    def _verdict(self) -> dict[str, object]:
        assert isinstance(self._worker, FinalStageWorker)
        return verdict_to_payload(self._worker.verdict())
