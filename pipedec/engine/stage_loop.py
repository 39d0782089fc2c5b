"""What a stage rank does: it takes tasks, and its worker computes rows and replays verdicts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import torch

from pipedec.core import Step, Verdict
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.messages import CacheSlotsEvent, LogprobsEvent, Opening, verdict_from_payload
from pipedec.scheduler.protocol import Message
from pipedec.scheduler.workflow import Facts, Task
from pipedec.stage import StageWorker

STOPPING_SECONDS = 0.05


class StageLoop:
    """Ranks 1..n."""

    def __init__(self, worker: StageWorker, rank: int, wiring: Wiring) -> None:
        self._worker = worker
        self._rank = rank
        self._wiring = wiring
        self._tasks = RankTasks(rank, wiring)
        self._num_chunks = 0
        self._handlers = {"pre": self._prefill, "dec": self._decode, "sync": self._sync, "window": self._window}

    def run(self) -> None:
        """Serve until ``stop``, and until rank 0 has left: it finishes the running request before it stops.

        Raises:
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        while (message := self._tasks.next()).kind != "stop":
            self._execute(message)
        while 0 in self._wiring.scheduler.status().alive:
            while (late := self._tasks.poll(STOPPING_SECONDS)) is not None:
                self._execute(late)

    def _execute(self, message: Message) -> None:
        if message.opening is not None:
            self._open(message.opening)
        if message.task is not None:
            self._tasks.report(message.task, self._handlers[message.task.name](message.task, message))

    def _open(self, opening: Opening) -> None:
        """Prepare for a request."""
        new_sequence = self._wiring.sequences.maker(opening.prompt_length, opening.sampling, opening.threads)
        self._worker.begin(new_sequence, opening.sampling, opening.tokens_per_mask)
        self._num_chunks = opening.num_chunks
        self._wiring.tracer.enabled = opening.trace

    def _prefill(self, task: Task, message: Message) -> Facts:
        token_ids = message.payload.get("token_ids")
        self._worker.prefill(self._tasks.inbox.popleft() if token_ids is None else self._prompt_chunk(token_ids))
        rows = self._tasks.keep(self._worker.outgoing(), task.seq)
        return Facts(rows, self._verdict(), is_first_chunk=task.seq == 1 - self._num_chunks)

    def _prompt_chunk(self, token_ids: list[int]) -> Step:
        chunk = torch.tensor(token_ids, dtype=torch.int64, device=self._wiring.device)
        return Step(chunk, torch.full_like(chunk, -1))

    def _decode(self, task: Task, message: Message) -> Facts:
        step = self._tasks.inbox.popleft()
        with self._tasks.recorder.computing(step.num_rows):
            self._worker.decode(step)
            verdict = self._verdict()
        topology = self._wiring.topology
        waits_for_sync = topology.is_exit(self._rank) and topology.has_sync(message.active)
        rows = 0 if waits_for_sync else self._tasks.keep(self._worker.outgoing(), task.seq)
        return Facts(rows, verdict, active=message.active)

    def _sync(self, task: Task, message: Message) -> Facts:
        verdict = verdict_from_payload(message.payload["verdict"])
        self._worker.sync(verdict)
        if verdict.finished:
            self._close()
            return Facts(finished=True)
        return Facts(self._tasks.keep(self._worker.outgoing(), task.seq))

    def _window(self, task: Task, message: Message) -> Facts:
        """All timesteps of a window, without asking the scheduler in between (see ``windows``)."""
        transport, following = self._wiring.transport, self._wiring.topology.following(self._rank)
        for number in range(task.seq, task.seq + message.payload["timesteps"]):
            received = transport.receive_envelope(self._rank - 1)
            reply = self._worker.advance(received, partial(self._span, number))
            self._report_logprobs()
            self._tasks.send(reply, following, number)
            self._tasks.note(self._tasks.timestep(number))
            if received.verdict is not None and received.verdict.finished:
                self._close()
                return Facts(finished=True)
        return Facts()

    def _span(self, number: int, name: str, rows: int) -> AbstractContextManager[None]:
        return self._tasks.recorder.span(Task.compute(name, self._rank, number).label, name, rows)

    def _verdict(self) -> Verdict | None:
        verdict = self._worker.verdict()
        self._report_logprobs()
        return verdict

    def _report_logprobs(self) -> None:
        """Send the log-probabilities of accepted tokens to the client, with this rank's next report."""
        if logprobs := self._worker.take_logprobs():
            self._tasks.events.append(LogprobsEvent(logprobs))

    def _close(self) -> None:
        """The answer has ended."""
        self._tasks.forget()
        if self._wiring.tracer.enabled:
            self._tasks.events.append(CacheSlotsEvent(self._rank, self._worker.cache_slots))
