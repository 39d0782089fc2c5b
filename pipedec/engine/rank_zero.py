"""The part that both drivers of rank 0 share: the tasks that rank 0 has not reported yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pipedec.core import StageMessage
from pipedec.engine.rank_tasks import RankTasks, Wiring
from pipedec.engine.records import Timestep
from pipedec.scheduler.protocol import Granted
from pipedec.scheduler.workflow import Planned, Task


class RankZero(ABC):
    """A ``Pipeline`` of the decode loop, on rank 0 of a cluster.

    The scheduler hands out tasks and expects reports, the loop calls ``advance``. So a task is held until its successors are
    known: the rows that the loop proposes next.
    """

    def __init__(self, tasks: RankTasks, wiring: Wiring) -> None:
        self._tasks = tasks
        self._wiring = wiring
        self._held = Granted(Task.compute("end", 0, 0))
        self.is_stopping = False  # the run was asked to stop; the running requests are finished first

    @abstractmethod
    def advance(self, number: int, entering: StageMessage, meanwhile: Callable[[], None]) -> Timestep: ...

    @abstractmethod
    def close(self, last: StageMessage) -> None: ...

    def _take(self, name: str) -> Granted:
        """Wait for rank 0's next tasks, the last of which is a ``name``, and hold that one. A transfer may come before it."""
        while not (message := self._tasks.next()).tasks:
            self.is_stopping |= message.kind == "stop"
        self._held = message.tasks[-1]
        assert self._held.task.name == name, f"rank 0 got {self._held.task.id} instead of a {name}"
        return self._held

    def _end(self, planned: Sequence[Planned]) -> None:
        """Report the last task, and end the session."""
        self._tasks.report([self._held.task], planned)
        self._take("end")
        self._tasks.report([self._held.task], [], waits=False)
