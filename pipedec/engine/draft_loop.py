"""Rank 0: takes requests from the queue, drafts, and streams the answers to the client.

The loop opens the workflow of each request and publishes the accepted tokens. It decides nothing about rows: the decoding method
of the current request does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from pipedec.core import Request, SchedulerLost, UserError, Verdict
from pipedec.decoding import Drafter
from pipedec.engine.admission import Admission, chunk_payloads
from pipedec.engine.answer import Answer
from pipedec.engine.clock import TimestepClock
from pipedec.engine.payloads import verdict_from_payload
from pipedec.engine.publisher import AnswerPublisher
from pipedec.engine.rank_loop import POLL_SECONDS, RankLoop, Wiring
from pipedec.engine.timed_drafter import TimedDrafter
from pipedec.methods import LayerTreeOptions
from pipedec.scheduler.protocol import Event, Message
from pipedec.scheduler.workflow import Facts, Task, initial_tasks
from pipedec.text.prompt import Prompter
from pipedec.tracing import SCHEDULER_TRACK
from pipedec.transport import Envelope


class DraftLoop(RankLoop):
    """Rank 0 of a resident cluster. Serves one request after another without reloading anything."""

    def __init__(
        self,
        prompter: Prompter,
        drafter: Drafter | None,
        trained_masks: int,
        device: torch.device,
        wiring: Wiring,
        tree: LayerTreeOptions | None = None,
    ) -> None:
        super().__init__(0, wiring)
        timed = None if drafter is None else TimedDrafter(drafter, self._drafting)
        self._admission = Admission(self._topology, prompter, wiring.dialects, timed, trained_masks, device, tree)
        self._clock = TimestepClock()
        self._device = device
        self._answer: Answer | None = None
        self._publisher = AnswerPublisher(self._scheduler)
        self._unsent: Verdict | None = None  # inside windows: the verdict that the stages have yet to replay
        self._in_flight = 0  # inside windows: timesteps whose result the last stage has not sent yet
        self._stopping = False

    def run(self) -> None:
        while not self._stopping:
            message = self._scheduler.wait_request(POLL_SECONDS)
            if message is None:
                self._check_run()
            elif not self._is_stop(message):
                self._serve(message)
        while (message := self._scheduler.wait_request(0)) is not None:
            self._scheduler.publish(self._checked(message).number, {"error": "the cluster is being stopped"})

    def _is_stop(self, message: Message) -> bool:
        """Whether ``message`` asks the run to stop; it stops when no request is running."""
        is_stop = self._checked(message).kind == "stop"
        self._stopping |= is_stop
        return is_stop

    def _check_run(self) -> None:
        if self._scheduler.status().state == "gone":
            raise SchedulerLost("Redis no longer knows the run: its keys were deleted")

    def _serve(self, message: Message) -> None:
        """Answer one request completely."""
        try:
            self._answer = self._admission.admit(message)
        except UserError as error:
            self._scheduler.publish(message.number, {"error": str(error)})
            return
        self._run_answer(self._answer.request)

    def _run_answer(self, request: Request) -> None:
        """From prefill until the current answer has ended."""
        self._tracer.enabled = request.trace
        chunks = chunk_payloads(request, self._current.method.masks)
        self._scheduler.begin(request.number, initial_tasks(self._topology, chunks), request.trace)
        following: Message | None = None
        while self._answer is not None:
            following = following or self._next()
            if self._is_stop(following):
                following = None
            elif following.task is not None and following.task.name == "end":
                following = self._end(following.task)
            else:
                following = self._execute(following)
        if following is not None:
            self._is_stop(following)

    def _prefill(self, task: Task, message: Message) -> Facts:
        token_ids = torch.tensor(message.payload["token_ids"], dtype=torch.int64, device=self._device)
        self._current.method.prefill(token_ids)
        return Facts(payload=message.payload)

    @contextmanager
    def _drafting(self, rows: int) -> Iterator[None]:
        with self._clock.forward(), self._pacer.computing(rows):
            yield

    def _decode(self, task: Task, message: Message) -> Facts:
        method = self._current.method
        timing = self._clock.finish_timestep()
        if task.seq > self._topology.num_groups:
            method.observe(timing)
        method.draft()
        step = None if self._topology.has_sync(message.active) else self._current.propose()
        self._clock.pause()
        return Facts(rows_out=self._keep_outgoing(step, task.seq), active=message.active)

    def _sync(self, task: Task, message: Message) -> Facts:
        verdict = verdict_from_payload(message.payload["verdict"])
        answer, method = self._current, self._current.method
        self._clock.resume()
        if not (verdict.tokens or verdict.finished):  # no row of this timestep continues the accepted tokens
            step = self._current.propose()
            self._clock.pause()
            return Facts(rows_out=self._keep_outgoing(step, task.seq))
        published = verdict if answer.has_ended else answer.until_stop(verdict)
        if verdict.finished is None and published.finished is not None:
            self._stop_early(published, task.seq)
        method.apply(published if verdict.finished else verdict)
        step = None if verdict.finished or self._window_timesteps else self._current.propose()
        if verdict.finished:
            self._forget_request()
        if not answer.has_ended:
            self._events.append(self._current.add(published, task.seq))
        rows_out = self._keep_outgoing(step, task.seq)
        self._clock.pause()
        return Facts(rows_out=rows_out, finished=verdict.finished is not None, window=self._window_timesteps)

    def _stop_early(self, last: Verdict, seq: int) -> None:
        """A stop string ends the answer within a verdict that every rank replays in full.

        Inside a window, the next envelope tells the stages that the answer has ended; with single tasks, a cancellation does.
        """
        self._events.append(self._current.add(last, seq))
        self._current.completion.metrics.hits += len(last.tokens) - 1  # the tokens up to the stop string; the rest are dropped
        if not self._ranks_report:
            self._current.is_published = True
            self._events.append(self._current.completed())
        if self._window_timesteps:
            self._unsent = Verdict((), last.finished)
        else:
            self._scheduler.cancel(self._current.request.number)

    def _window(self, task: Task, message: Message) -> Facts:
        """Propose rows, draft and apply results, timestep by timestep. A step's result arrives after one timestep per group."""
        self._clock.restart()
        with self._publisher.publishing(self._current.request.number):
            for seq in range(task.seq, task.seq + message.payload["timesteps"]):
                if self._unsent is not None and self._unsent.finished:
                    self._leave_request(self._unsent, seq)
                    return Facts(finished=True)
                self._timestep(seq)
        return Facts(window=self._window_timesteps)

    def _timestep(self, seq: int) -> None:
        method = self._current.method
        self._send_envelope(Envelope(self._current.propose(), self._unsent), 1, seq)
        self._unsent = None
        self._in_flight += 1
        with self._tracer.task(Task.compute("dec", 0, seq).label, "dec"):
            method.draft()
        self._note_overrun(seq)
        if self._in_flight < self._topology.num_groups:
            self._clock.restart()
            return  # the pipeline is still filling
        verdict = self._result()
        if verdict is not None:
            with self._tracer.task(Task.compute("sync", 0, seq).label, "sync"):
                method.apply(verdict)
            self._publisher.put(self._current.add(verdict, seq))
            self._unsent = verdict
            if verdict.finished and not self._ranks_report:
                # The rows still in flight take as many timesteps as there are groups to leave; the client need not wait for them.
                self._current.is_published = True
                self._publisher.put(self._current.completed())
        method.observe(self._clock.finish_timestep())

    @property
    def _ranks_report(self) -> bool:
        """Whether the client expects events from other ranks, which they send when the answer has ended."""
        request = self._current.request
        return request.trace or self._pacer.is_emulating or request.sampling.logprobs is not None

    def _result(self) -> Verdict | None:
        """The verdict of the oldest timestep in flight, cut at a stop string; finished if the request was cancelled."""
        verdict = self._receive_result()
        if verdict is None:
            return None
        verdict = self._current.until_stop(verdict)
        if self._publisher.is_cancelled:
            return replace(verdict, finished=verdict.finished or "cancelled")
        return verdict

    def _receive_result(self) -> Verdict | None:
        self._clock.pause()
        verdict = self._transport.receive_envelope(self._topology.final_rank).verdict
        self._clock.resume()
        self._in_flight -= 1
        return verdict

    def _leave_request(self, last: Verdict, seq: int) -> None:
        """Tell the stages that the answer has ended, and receive the results that are still in flight."""
        self._send_envelope(Envelope(verdict=last), 1, seq)
        while self._in_flight:
            self._receive_result()
        self._unsent = None
        self._forget_request()

    def _end(self, task: Task) -> Message | None:
        """Close the answer: every rank has replayed the last verdict. Returns rank 0's next message, if there is one."""
        answer = self._current
        events: list[Event] = []
        if answer.request.trace:
            rows = [
                [SCHEDULER_TRACK, granted.task.label, granted.task.kind, granted.granted_us, granted.finished_us]
                for granted in self._scheduler.trace()
            ]
            events.append({"trace": rows})
        if not answer.is_published:
            events.append(answer.completed())
        self._answer = None
        return self._scheduler.finish(0, task, [], events)

    @property
    def _current(self) -> Answer:
        assert self._answer is not None, "a task arrived outside a request"
        return self._answer
