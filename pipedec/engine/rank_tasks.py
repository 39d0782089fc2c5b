"""One rank's side of the scheduler: takes tasks, executes transfers, reports what is done and which tasks follow from it.

Knows tasks, transfers and deadlines. What rows and verdicts mean is known to workers and methods; what is scheduled next is
decided by Algorithm 4 (``workflow.post_process``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from pipedec.core import EMPTY, Envelope, EpochEnded, PipedecError, Step, Update
from pipedec.decoding import TimestepTiming
from pipedec.device import HOST, Device, HostDevice
from pipedec.engine.activity import Doing
from pipedec.engine.emulated_time import Pacer
from pipedec.engine.recorder import Recorder, Span, Timestep
from pipedec.engine.sequences import Sequences
from pipedec.messages import Event, OverranEvent, TraceEvents
from pipedec.plan.emulation import Emulation
from pipedec.scheduler.protocol import Message, Scheduler
from pipedec.scheduler.workflow import Facts, Task, post_process
from pipedec.topology import Topology
from pipedec.tracing import Tracer
from pipedec.transport import Transport

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Wiring:
    """What every rank needs, whatever its role.

    Attributes:
        window: timesteps that the scheduler grants at once; 0 if it grants single tasks.
        duplex: of the links between the ranks (see ``scheduler.transfers``).
        sequences: makes the sequences of answers.
        place: of the rank's model.
        doing: what the rank does at this moment.
        device: of ``place``.
        turn: held while the rank computes, where it shares its emulated device with another rank.
    """

    scheduler: Scheduler
    transport: Transport
    topology: Topology
    tracer: Tracer
    sequences: Sequences
    place: torch.device = HOST
    emulation: Emulation | None = None
    window: int = 0
    duplex: str = "full"
    doing: Doing = field(default_factory=Doing)
    device: Device = field(default_factory=HostDevice)
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)


class _Watched(NamedTuple):
    """A running request whose trace or overruns are reported: since when."""

    traced: bool
    first_event: int
    first_overran: int


class RankTasks:
    """The tasks of one rank.

    Attributes:
        recorder: times the rank's work.
        events: for clients, each with its request's number; sent with the next report.
        inbox: steps received, in order.
        ended: requests that have ended with the present task; what the rank has to say about them goes with its report.
    """

    def __init__(self, rank: int, wiring: Wiring) -> None:
        self.rank = rank
        self.recorder = Recorder(Pacer(wiring.emulation, rank, wiring.device, wiring.turn), wiring.device)
        self.events: list[tuple[int, Event]] = []
        self.inbox: deque[Step] = deque()
        self.ended: list[int] = []
        self._outbox: dict[Task, Step] = {}
        self._wiring = wiring
        self._following: Message | None = None  # the next message, if the last report brought it
        self._began = self.recorder.mark()  # when the present task was received
        self._overran: list[int] = []  # timesteps whose real work took longer than its emulated time
        self._watched: dict[int, _Watched] = {}  # requests of which something is reported at their end

    def next(self) -> Message:
        """Wait for the next message that is no transfer; transfers are executed on the way.

        It has no deadline: the loss of another rank also arrives as a message.

        Raises:
            EpochEnded: the epoch has ended.
            PipedecError: the run was aborted, a rank is lost, or Redis is.
        """
        while (message := self.poll(POLL_SECONDS)) is None:
            continue
        return message

    def poll(self, timeout_seconds: float) -> Message | None:
        """As ``next``; None if no message arrives in time."""
        while (message := self._receive(self._wiring.scheduler.wait, self.rank, timeout_seconds)) is not None:
            self._began = self.recorder.mark()
            if message.task is None or message.task.kind != "T":
                return message
            self._transfer(message.task, message)
        return None

    def request(self, wait: Callable[[float], Message | None], timeout_seconds: float) -> Message | None:
        """For rank 0 when nothing runs: the next request or ``stop``, None if neither arrives in time. Raises as ``next``.

        Args:
            wait: brings it, unless it came with the last report.
        """
        return self._receive(wait, timeout_seconds)

    def _receive(self, wait: Callable[..., Message | None], *arguments: float) -> Message | None:
        """The message that came with the last report, else what ``wait`` brings."""
        message, self._following = self._following, None
        if message is None:
            self._wiring.doing.begin("idle")
            with self.recorder.waiting():
                message = wait(*arguments)
            self._wiring.doing.begin("computing")
        if message is not None and message.kind == "abort":
            raise PipedecError(message.text)
        if message is not None and message.kind == "recover":
            raise EpochEnded(message.text)
        return message

    def report(self, task: Task, facts: Facts) -> None:
        """Report a task done, with the tasks that follow from it and the events so far."""
        self.recorder.add(task.label, "transfer" if task.kind == "T" else task.name, self._began)
        self.note(self.timestep(task.seq))
        for number in self.ended:
            self.events += [(number, event) for event in self.closed(number)]
        events, self.events, self.ended = self.events, [], []
        planned = post_process(task, self._wiring.topology, facts)
        self._following = self._wiring.scheduler.finish(self.rank, task, planned, events)

    def timestep(
        self,
        number: int,
        entered: Envelope = EMPTY,
        results: tuple[Update, ...] = (),
        timing: TimestepTiming | None = None,
    ) -> Timestep:
        """The record of what this rank has done since the last one."""
        spans, overran = self.recorder.take_spans(), self.recorder.pacer.take_overran()
        return Timestep(number, entered, results, timing, spans=spans, overran=overran)

    def note(self, timestep: Timestep) -> None:
        """Listens to the timesteps of this rank: traces their spans, and notes those that overran."""
        self._trace(timestep.spans)
        if timestep.overran:
            self._overran.append(timestep.number)

    def _trace(self, spans: Iterable[Span]) -> None:
        for span in spans if self._wiring.tracer.enabled else ():
            self._wiring.tracer.add(*span)

    def opened(self, number: int, traced: bool) -> None:
        """A request begins, or goes on after a pause."""
        if number not in self._watched and (traced or self.recorder.pacer.is_emulating):
            self._watched[number] = _Watched(traced, len(self._wiring.tracer.events), len(self._overran))
            self._wiring.tracer.enabled |= traced

    def closed(self, number: int) -> list[Event]:
        """A request has ended. Returns what this rank has to say about it: its trace, and the timesteps that overran."""
        watched = self._watched.pop(number, None)
        if watched is None:
            return []
        tracer, events = self._wiring.tracer, list[Event]()
        if watched.traced:
            self.recorder.await_spans()
            self._trace(self.recorder.take_spans())
            events.append(TraceEvents([event.as_row() for event in tracer.events[watched.first_event :]]))
        if overran := self._overran[watched.first_overran :]:
            events.append(OverranEvent(overran))
        tracer.enabled = any(other.traced for other in self._watched.values())
        if not self._watched:
            self._overran.clear()
            tracer.drain()
        return events

    def send(self, envelope: Envelope, target: int, number: int) -> None:
        """Inside a window: send the envelope of a timestep to rank ``target``. Its span ends when the rows have left."""
        began = self.recorder.mark()
        if rows := envelope.num_rows:
            self.recorder.pacer.delay_sending(rows)  # the receiver must not get it earlier than over the emulated link
        self._wiring.doing.begin("waiting", target)
        sent = self._wiring.transport.send_envelope(envelope, target)
        self._wiring.doing.begin("computing")
        self.recorder.add(Task.transfer(self.rank, target, number).label, "transfer", began, sent)

    def receive(self, source: int) -> Envelope:
        """Inside a window: wait for the next envelope from rank ``source``; its activations may come later."""
        with self._waiting_for(source, "between timesteps"):
            envelope = self._wiring.transport.receive_envelope(source)
        if envelope.await_hidden is EMPTY.await_hidden:
            return envelope
        return replace(envelope, await_hidden=partial(self._await_hidden, envelope, source))

    def _await_hidden(self, envelope: Envelope, source: int) -> None:
        with self._waiting_for(source, "computing"):
            envelope.await_hidden()

    @contextmanager
    def _waiting_for(self, source: int, then: str) -> Iterator[None]:
        """In the context, rank ``source`` is waited for; behind it begins the phase ``then``."""
        self._wiring.doing.begin("waiting", source)
        self.recorder.phases.begin("waiting")
        yield
        self.recorder.phases.begin(then)
        self._wiring.doing.begin("computing")

    def keep(self, step: Step | None, seq: int) -> int:
        """Keep the step until its transfer is granted. Returns its number of rows."""
        if step is None:
            return 0
        self._outbox[Task.transfer(self.rank, self.rank + 1, seq)] = step
        return step.num_rows

    def forget(self) -> None:
        """The answer has ended: discard the rows that were still in flight."""
        self.inbox.clear()
        self._outbox.clear()

    def _transfer(self, task: Task, message: Message) -> None:
        """Algorithm 3: the sender takes the step from its outbox, the receiver puts it into its inbox and reports."""
        rows = message.payload["rows"]
        self._wiring.doing.begin("waiting", task.target if task.source == self.rank else task.source)
        with self.recorder.pacer.sending(task.source, rows):
            if task.source == self.rank:
                self._wiring.transport.send(self._outbox.pop(task), task.target)
            else:
                self.inbox.append(self._wiring.transport.receive(rows, task.source))
        self._wiring.doing.begin("computing")
        if task.target == self.rank:
            self.report(task, Facts())
        else:
            self.recorder.add(task.label, "transfer", self._began)
