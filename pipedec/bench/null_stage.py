"""Stages that compute nothing and a rank 0 that is always right, so that what is left of a timestep is its fixed cost.

They run in the real ``StageLoop`` and ``RankLoop``: every task, message and transfer is a real one, only the model is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from pipedec.core import PipedecError, SamplingParams, Step, Verdict
from pipedec.engine.rank_loop import RankLoop
from pipedec.scheduler import Facts, GrantedTask, Message, Payload, Task, initial_tasks
from pipedec.stage import FinalStageWorker, StageWorker

_TOKEN = 7


class Probe:
    """Notes the clocks and a counter of one rank whenever it has synchronised with a verdict.

    Attributes:
        wall_seconds, cpu_seconds, round_trips: one entry for every sync of the present request, the prefill's first.
    """

    def __init__(self, round_trips: Callable[[], int]) -> None:
        self._round_trips = round_trips
        self.reset()

    def reset(self) -> None:
        """Begin a new request."""
        self.wall_seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.round_trips: list[int] = []

    def note(self) -> None:
        """Called at each sync."""
        self.wall_seconds.append(time.perf_counter())
        self.cpu_seconds.append(time.process_time())
        self.round_trips.append(self._round_trips())


class NullStage(StageWorker):
    """A stage that hands on as many rows as it gets, none of them ever pruned; its activations are zeros [R, E].

    ``on_finished`` is called at the last sync of every request.
    """

    def __init__(self, hidden_size: int, probe: Probe, on_finished: Callable[[], None]) -> None:
        self._hidden_size = hidden_size
        self._probe = probe
        self._on_finished = on_finished
        self._zeros: dict[int, Tensor] = {}
        self._computed: Step | None = None

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._probe.reset()
        self._computed = None

    def prefill(self, chunk: Step) -> Step:
        return self._output(chunk)

    def decode(self, step: Step) -> None:
        self._computed = self._output(step)

    def sync(self, verdict: Verdict) -> None:
        self._probe.note()
        if verdict.finished:
            self._on_finished()

    def outgoing(self) -> Step | None:
        computed, self._computed = self._computed, None
        return computed

    def _output(self, step: Step) -> Step:
        if step.num_rows not in self._zeros:
            self._zeros[step.num_rows] = torch.zeros(step.num_rows, self._hidden_size)
        return Step(step.token_ids, step.parents, self._zeros[step.num_rows])


class NullFinalStage(NullStage, FinalStageWorker):
    """The last stage: accepts one token at every timestep until ``max_tokens``."""

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        super().begin(prompt_length, sampling)
        self._left = sampling.max_tokens

    def first_verdict(self, last_chunk: Step) -> Verdict:
        return self.verdict()

    def verdict(self) -> Verdict:
        self._left -= 1
        return Verdict((_TOKEN,), "length" if self._left == 0 else None)


class ScriptedDraftLoop(RankLoop):
    """Rank 0 without a draft model: R rows enter at every timestep, and every verdict is taken for a hit."""

    def __init__(self, probe: Probe, *loop_arguments: Any) -> None:
        super().__init__(0, *loop_arguments)
        self._probe = probe
        self._num_rows = 0

    def answer(self, number: int, num_rows: int, max_tokens: int, trace: bool = False) -> list[GrantedTask]:
        """Run one request of ``max_tokens`` verdicts; returns the scheduler's own trace of it if ``trace``.

        Raises:
            PipedecError: the run was aborted or stopped, a rank is lost, or Redis is.
        """
        self._num_rows = num_rows
        self._probe.reset()
        chunk: Payload = {
            "prompt_length": 1,
            "sampling": asdict(SamplingParams(max_tokens=max_tokens)),
            "trace": False,
            "token_ids": [_TOKEN],
        }
        self._scheduler.begin(number, initial_tasks(self._topology, [chunk]), trace)
        message = self._next()
        while (task := message.task) is not None:
            if task.name == "end":
                granted = self._scheduler.trace() if trace else []
                self._scheduler.finish(0, task, [])
                return granted
            message = self._execute(message) or self._next()
        raise PipedecError("the run was stopped in the middle of a measurement")

    def _prefill(self, task: Task, message: Message) -> Facts:
        return Facts(payload=message.payload)

    def _decode(self, task: Task, message: Message) -> Facts:
        step = None if self._topology.has_sync(message.active) else self._rows()
        return Facts(rows_out=self._keep_outgoing(step, task.seq), active=message.active)

    def _sync(self, task: Task, message: Message) -> Facts:
        self._probe.note()
        finished = message.payload["verdict"]["finished"] is not None
        if finished:
            self._forget_request()
        self._events.append({"token_ids": message.payload["verdict"]["tokens"], "text": " word"})
        step = None if finished else self._rows()
        return Facts(rows_out=self._keep_outgoing(step, task.seq), finished=finished)

    def _rows(self) -> Step:
        return Step(torch.full((self._num_rows,), _TOKEN), torch.full((self._num_rows,), -1))
