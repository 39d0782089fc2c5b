"""What both drivers of rank 0 share: an answer's prefill, its last task, and the task that rank 0 has not reported yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipedec.core import Envelope, MaskParams, Request, Verdict
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.recorder import Timestep
from pipedec.messages import Event, Opening, verdict_from_payload
from pipedec.scheduler.protocol import Message
from pipedec.scheduler.workflow import Facts, Task, initial_tasks


class RankZero(ABC):
    """A ``Pipeline`` of the decode loop, on rank 0 of a cluster, for one answer.

    The scheduler hands out tasks and wants reports, the loop calls ``advance``. So a task is held until what follows from it is
    known: the rows that the loop proposes next.

    Args:
        masks: of the request's method.
    """

    def __init__(self, request: Request, masks: MaskParams, tasks: RankTasks, wiring: Wiring) -> None:
        self._request = request
        self._masks = masks
        self._tasks = tasks
        self._wiring = wiring
        self._held = Message("task")
        self._stages_know_the_end = False
        self.is_stopping = False  # the run was asked to stop; the answer is finished first

    def prefill(self, chunks: Sequence[list[int]], compute: Callable[[Tensor], None]) -> Verdict:
        request, prompt_length = self._request, len(self._request.prompt_token_ids)
        opening = Opening(
            prompt_length, len(chunks), request.sampling, self._masks.named, threads=request.threads, trace=request.trace
        )
        self._wiring.scheduler.begin(request.number, opening, initial_tasks(self._wiring.topology, chunks))
        for chunk in chunks:
            self._take("pre")
            compute(torch.tensor(chunk, dtype=torch.int64, device=self._wiring.device))
            self._report(Facts())
        return self._take_verdict()

    @abstractmethod
    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep: ...

    @abstractmethod
    def close(self, last: Verdict) -> None: ...

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """While it is open, ``publish`` sends events; when it ends, the answer's reader has them all or will with ``end``."""
        yield

    def publish(self, event: Event) -> None:
        """Send an event to the answer's reader."""
        self._tasks.events.append(event)

    def end(self, events: Sequence[Event]) -> None:
        """Report the answer's last task, with its last events: every rank has replayed the last verdict."""
        self._tasks.events += events
        self._report(Facts())

    def _take_verdict(self) -> Verdict:
        """Wait for the verdict with which every rank was told to sync."""
        verdict = verdict_from_payload(self._take("sync").payload["verdict"])
        self._stages_know_the_end = verdict.finished is not None
        return verdict

    def _take(self, name: str) -> Message:
        """Wait for rank 0's next task, a ``name``, and hold it."""
        while (message := self._tasks.next()).task is None:
            self.is_stopping |= message.kind == "stop"
        assert message.task.name == name, f"rank 0 got {message.task.id} instead of a {name}"
        self._held = message
        return message

    def _report(self, facts: Facts) -> None:
        """Report the task that is held."""
        self._tasks.report(self._held_task, facts)

    @property
    def _held_task(self) -> Task:
        assert self._held.task is not None
        return self._held.task

    def _end(self) -> None:
        self._report(Facts(finished=True))
        self._tasks.forget()
        self._take("end")
