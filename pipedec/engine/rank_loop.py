"""What a rank process does: take the next task from the scheduler, do it, report it together with what follows from it.

One loop for every rank, one subclass per role. The loop knows tasks, transfers and deadlines; what rows and verdicts mean,
the worker knows; what is scheduled next, Algorithm 4 (``workflow.post_process``) knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pipedec.core import PipedecError, Step, UserError, Verdict
from pipedec.engine.dialects import Dialects
from pipedec.engine.emulation import Emulation, Pacer
from pipedec.engine.messages import sampling_from_payload, verdict_from_payload, verdict_to_payload
from pipedec.scheduler.protocol import Event, Message, Scheduler
from pipedec.scheduler.workflow import Facts, Task, Topology, post_process
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.tracing import Tracer
from pipedec.transport import Envelope, Transport

POLL_SECONDS = 1.0
STOPPING_SECONDS = 0.05


def rank_name(rank: int) -> str:
    """A rank for people."""
    return f"rank {rank} ({'draft' if rank == 0 else f'stage {rank}'})"


@dataclass(frozen=True)
class Wiring:
    """What the loop of every rank needs, whatever its role. ``window``: see ``PipelineSpec.window``.

    Without ``dialects`` no request may ask for threads.
    """

    scheduler: Scheduler
    transport: Transport
    topology: Topology
    tracer: Tracer
    emulation: Emulation | None = None
    window: int = 0
    dialects: Dialects | None = None


class RankLoop(ABC):
    """Runs one rank until it is told to stop."""

    def __init__(self, rank: int, wiring: Wiring) -> None:
        self._rank = rank
        self._scheduler = wiring.scheduler
        self._transport = wiring.transport
        self._topology = wiring.topology
        self._tracer = wiring.tracer
        self._pacer = Pacer(wiring.emulation, rank)
        self._window_timesteps = wiring.window  # that the scheduler grants at once; 0: it grants single tasks
        self._wired_dialects = wiring.dialects
        self._overran: list[int] = []  # timesteps whose real work outlasted its emulated time
        self._inbox: deque[Step] = deque()
        self._outbox: dict[Task, Step] = {}
        self._events: list[Event] = []
        self._handlers: dict[str, Callable[[Task, Message], Facts]] = {
            "pre": self._prefill,
            "dec": self._decode,
            "sync": self._sync,
            "window": self._window,
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
        """The next message, however long it takes. That a rank has been lost meanwhile is such a message, too."""
        while (message := self._scheduler.wait(self._rank, POLL_SECONDS)) is None:
            continue
        return self._checked(message)

    def _execute(self, message: Message) -> Message | None:
        """Do one task and report it; returns this rank's next message if the scheduler already has one."""
        task = message.task
        assert task is not None
        with self._tracer.task(task.label, "transfer" if task.kind == "T" else task.name):
            facts = self._handlers[task.name](task, message)
        self._note_overrun(task.seq)
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

    def _note_overrun(self, seq: int) -> None:
        if self._pacer.take_overran():
            self._overran.append(seq)

    def _send_envelope(self, envelope: Envelope, target: int, seq: int) -> None:
        """Inside a window: pass on what belongs to timestep ``seq``."""
        rows = envelope.step.num_rows if envelope.step else 0
        with self._tracer.task(Task.transfer(self._rank, target, seq).label, "transfer"):
            if rows:
                self._pacer.delay_sending(rows)  # the receiver must not have it before an emulated link would have brought it
            self._transport.send_envelope(envelope, target)

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

    @property
    def _dialects(self) -> Dialects:
        if self._wired_dialects is None:
            raise UserError("this pipeline does not decode in threads")
        return self._wired_dialects

    @abstractmethod
    def _prefill(self, task: Task, message: Message) -> Facts:
        """Take in a chunk of the prompt."""

    @abstractmethod
    def _decode(self, task: Task, message: Message) -> Facts:
        """Compute the rows that arrived for this timestep."""

    @abstractmethod
    def _sync(self, task: Task, message: Message) -> Facts:
        """Replay the verdict of this timestep."""

    @abstractmethod
    def _window(self, task: Task, message: Message) -> Facts:
        """Run through the timesteps of a window without asking the scheduler."""

    def _checked(self, message: Message) -> Message:
        if message.kind == "abort":
            raise PipedecError(message.text)
        return message


class StageLoop(RankLoop):
    """Ranks 1..n."""

    def __init__(self, worker: StageWorker, device: torch.device, rank: int, wiring: Wiring) -> None:
        super().__init__(rank, wiring)
        self._worker = worker
        self._device = device
        self._tells_logprobs = False

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
            sampling = sampling_from_payload(payload["sampling"])
            length, dialect = payload["prompt_length"], payload["threads"]
            new_sequence = None if dialect is None else self._dialects.new_sequence(dialect, length, sampling)
            self._worker.begin(length, sampling, payload["named"], new_sequence)
            self._tells_logprobs = sampling.logprobs is not None
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
        if self._rank == self._topology.final_rank:
            return Facts(verdict=verdict_to_payload(verdict or Verdict(())), active=message.active)
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
        if verdict.finished or self._window_timesteps:
            leaving = None
        if verdict.finished:
            self._forget_request()
            if self._tracer.enabled:
                self._events.append({"rank": self._rank, "cache_slots": self._worker.cache_slots})
        return Facts(rows_out=self._keep_outgoing(leaving, task.seq), finished=verdict.finished is not None)

    def _window(self, task: Task, message: Message) -> Facts:
        for seq in range(task.seq, task.seq + message.payload["timesteps"]):
            envelope = self._transport.receive_envelope(self._rank - 1)
            if envelope.verdict is not None:
                with self._tracer.task(Task.compute("sync", self._rank, seq).label, "sync"):
                    self._worker.sync(envelope.verdict)
                if envelope.verdict.finished:
                    self._leave_request(envelope, seq)
                    return Facts(finished=True)
            self._forward(envelope, seq)
        return Facts()

    def _forward(self, envelope: Envelope, seq: int) -> None:
        """Compute the step of a timestep, if there is one, and pass it on; from the last stage the verdict goes to rank 0."""
        is_final = self._rank == self._topology.final_rank
        leaving: Step | None = None
        verdict: Verdict | None = None
        if envelope.step is not None:
            with self._tracer.task(Task.compute("dec", self._rank, seq).label, "dec"):
                with self._pacer.computing(envelope.step.num_rows):
                    self._worker.decode(envelope.step)
                    verdict = self._verdict() if is_final else None
                leaving = self._worker.outgoing()
            self._note_overrun(seq)
        if is_final:
            self._send_envelope(Envelope(verdict=verdict), 0, seq)
        else:
            self._send_envelope(Envelope(leaving, envelope.verdict), self._rank + 1, seq)

    def _leave_request(self, last: Envelope, seq: int) -> None:
        if self._rank != self._topology.final_rank:
            self._send_envelope(last, self._rank + 1, seq)
        self._worker.outgoing()
        self._forget_request()
        if self._tracer.enabled:
            self._events.append({"rank": self._rank, "cache_slots": self._worker.cache_slots})

    def _prompt_chunk(self, payload: dict[str, Any]) -> Step:
        token_ids = torch.tensor(payload["token_ids"], dtype=torch.int64, device=self._device)
        return Step(token_ids, torch.full_like(token_ids, -1))

    def _first_verdict(self, last_chunk: Step) -> dict[str, object]:
        verdict = self._final_worker.first_verdict(last_chunk)
        self._note_logprobs()
        return verdict_to_payload(verdict)

    def _verdict(self) -> Verdict | None:
        verdict = self._final_worker.verdict()
        self._note_logprobs()
        return verdict

    def _note_logprobs(self) -> None:
        """Log-probabilities go to the client as an event with this rank's next report, beside the pipeline's messages."""
        if self._tells_logprobs and (logprobs := self._final_worker.take_logprobs()):
            self._events.append({"logprobs": logprobs})

    @property
    def _final_worker(self) -> FinalStageWorker:
        assert isinstance(self._worker, FinalStageWorker)
        return self._worker
