"""What both drivers of rank 0 share: the task that rank 0 has not reported yet, and the end of a workflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from pipedec.core import Envelope
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.recorder import Timestep
from pipedec.scheduler.protocol import Message
from pipedec.scheduler.workflow import Facts, Task


class RankZero(ABC):
    """A ``Pipeline`` of the decode loop, on rank 0 of a cluster.

    The scheduler hands out tasks and wants reports, the loop calls ``advance``. So a task is held until what follows from it is
    known: the rows that the loop proposes next.
    """

    def __init__(self, tasks: RankTasks, wiring: Wiring) -> None:
        self._tasks = tasks
        self._wiring = wiring
        self._held = Message("task")
        self.is_stopping = False  # the run was asked to stop; the running requests are finished first

    @abstractmethod
    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep: ...

    @abstractmethod
    def close(self, last: Envelope) -> None: ...

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
        """End the workflow: every rank has reported its last task."""
        self._report(Facts(finished=True))
        self._tasks.forget()
        self._take("end")
        self._report(Facts())
