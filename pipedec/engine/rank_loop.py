"""What a rank process does: take the next task from the scheduler, execute it, report it and the tasks that follow from it.

One loop for every rank, one subclass per role. The loop knows tasks, transfers and deadlines. What rows and verdicts mean is
known to the worker; what is scheduled next is decided by Algorithm 4 (``workflow.post_process``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from pipedec.core import PipedecError, Step
from pipedec.engine.dialects import Dialects
from pipedec.engine.emulated_time import Pacer
from pipedec.plan.emulation import Emulation
from pipedec.scheduler.protocol import Event, Message, Scheduler
from pipedec.scheduler.workflow import Facts, Task, post_process
from pipedec.topology import Topology
from pipedec.tracing import Tracer
from pipedec.transport import Envelope, Transport

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Wiring:
    """What the loop of every rank needs, whatever its role.

    Attributes:
        window: timesteps that the scheduler grants at once; 0 if it grants single tasks.
        dialects: None if this pipeline cannot decode in threads.
    """

    scheduler: Scheduler
    transport: Transport
    topology: Topology
    tracer: Tracer
    emulation: Emulation | None = None
    window: int = 0
    dialects: Dialects | None = None


class RankLoop(ABC):
    """Runs one rank until the run is stopped."""

    def __init__(self, rank: int, wiring: Wiring) -> None:
        self._rank = rank
        self._scheduler = wiring.scheduler
        self._transport = wiring.transport
        self._topology = wiring.topology
        self._tracer = wiring.tracer
        self._pacer = Pacer(wiring.emulation, rank)
        self._window_timesteps = wiring.window
        self._dialects = wiring.dialects
        self._overran: list[int] = []  # timesteps whose real work took longer than its emulated time
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
        """Wait for the next message, without a deadline of its own: the loss of another rank also arrives as a message."""
        while (message := self._scheduler.wait(self._rank, POLL_SECONDS)) is None:
            continue
        return self._checked(message)

    def _execute(self, message: Message) -> Message | None:
        """Execute and report one task. Returns this rank's next message if the scheduler already has one."""
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
        """Inside a window: send the envelope of timestep ``seq`` to rank ``target``."""
        rows = envelope.step.num_rows if envelope.step else 0
        with self._tracer.task(Task.transfer(self._rank, target, seq).label, "transfer"):
            if rows:
                self._pacer.delay_sending(rows)  # the receiver must not get it earlier than over the emulated link
            self._transport.send_envelope(envelope, target)

    def _transfer(self, task: Task, message: Message) -> Facts:
        """Algorithm 3: the sender takes the step from its outbox, the receiver puts it into its inbox."""
        rows, is_prompt = message.payload["rows"], "prompt_length" in message.payload
        with nullcontext() if is_prompt else self._pacer.sending(task.source, rows):
            if task.source == self._rank:
                self._transport.send(self._outbox.pop(task), task.target)
            else:
                self._inbox.append(self._transport.receive(rows, task.source))
        return Facts()

    def _keep_outgoing(self, step: Step | None, seq: int) -> int:
        """Keep the step until its transfer is granted. Returns its number of rows."""
        if step is None:
            return 0
        self._outbox[Task.transfer(self._rank, self._rank + 1, seq)] = step
        return step.num_rows

    def _forget_request(self) -> None:
        """The answer has ended: discard the rows that were still in flight."""
        self._inbox.clear()
        self._outbox.clear()

    @abstractmethod
    def _prefill(self, task: Task, message: Message) -> Facts:
        """Process a chunk of the prompt."""

    @abstractmethod
    def _decode(self, task: Task, message: Message) -> Facts:
        """Compute the rows of this timestep."""

    @abstractmethod
    def _sync(self, task: Task, message: Message) -> Facts:
        """Replay the verdict of this timestep."""

    @abstractmethod
    def _window(self, task: Task, message: Message) -> Facts:
        """Run all timesteps of a window without asking the scheduler in between."""

    def _checked(self, message: Message) -> Message:
        if message.kind == "abort":
            raise PipedecError(message.text)
        return message
