"""What a stage rank does with its tasks: compute rows, replay verdicts, pass on the rows that are left."""

from __future__ import annotations

from typing import Any

import torch

from pipedec.core import Step, Verdict
from pipedec.engine.payloads import verdict_from_payload, verdict_to_payload
from pipedec.engine.rank_loop import RankLoop, Wiring
from pipedec.messages import sampling_from_payload
from pipedec.scheduler.protocol import Message
from pipedec.scheduler.workflow import Facts, Task
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.transport import Envelope

STOPPING_SECONDS = 0.05


class StageLoop(RankLoop):
    """Ranks 1..n."""

    def __init__(self, worker: StageWorker, device: torch.device, rank: int, wiring: Wiring) -> None:
        super().__init__(rank, wiring)
        self._worker = worker
        self._device = device
        self._reports_logprobs = False

    def run(self) -> None:
        super().run()
        # Rank 0 finishes the running request before it stops, so serve until it has left.
        while 0 in self._scheduler.status().alive:
            message = self._scheduler.wait(self._rank, STOPPING_SECONDS)
            while message is not None:
                message = self._execute(self._checked(message))

    def _prefill(self, task: Task, message: Message) -> Facts:
        payload = message.payload
        if payload["first"]:
            sampling = sampling_from_payload(payload["sampling"])
            length, dialect = payload["prompt_length"], payload["threads"]
            new_sequence = None
            if dialect is not None:
                assert self._dialects is not None, "rank 0 admits no threads without dialects"
                new_sequence = self._dialects.new_sequence(dialect, length, sampling)
            self._worker.begin(length, sampling, payload["named"], new_sequence)
            self._reports_logprobs = sampling.logprobs is not None
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
        """Compute the step of a timestep, if there is one, and pass it on; the last stage sends its verdict to rank 0."""
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
        self._report_logprobs()
        return verdict_to_payload(verdict)

    def _verdict(self) -> Verdict | None:
        verdict = self._final_worker.verdict()
        self._report_logprobs()
        return verdict

    def _report_logprobs(self) -> None:
        """Send log-probabilities to the client as an event, with this rank's next report."""
        if self._reports_logprobs and (logprobs := self._final_worker.take_logprobs()):
            self._events.append({"logprobs": logprobs})

    @property
    def _final_worker(self) -> FinalStageWorker:
        assert isinstance(self._worker, FinalStageWorker)
        return self._worker
