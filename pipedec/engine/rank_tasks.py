"""One rank's side of the scheduler: takes tasks, executes transfers, reports tasks done and the tasks that follow.

Knows tasks, transfers and deadlines. Workers and methods know what rows and verdicts mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from pipedec.core.errors import EpochEnded, PipedecError
from pipedec.core.stage_message import EMPTY, Arrival, RequestUpdate, StageMessage
from pipedec.decoding import TimestepTiming
from pipedec.decoding.events import TimedSpan, Timestep
from pipedec.device import HOST, Device, DeviceEvent, HostDevice
from pipedec.engine.activity import Activity
from pipedec.engine.emulation import Pacer
from pipedec.engine.recorder import Recorder, unpaced
from pipedec.messages.events import Event, OverranEvent, TraceEvents
from pipedec.scheduler import RankScheduler
from pipedec.scheduler.protocol import RankMessage
from pipedec.scheduler.workflow import Planned, Task
from pipedec.threads.sequences import Sequences
from pipedec.topology import Topology
from pipedec.tracing import Tracer
from pipedec.transport import Transport

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Wiring:
    """Everything that a rank needs in any role."""

    scheduler: RankScheduler
    transport: Transport
    topology: Topology
    tracer: Tracer
    sequences: Sequences
    place: torch.device = HOST  # of the rank's model
    pacer: Pacer | None = None  # of an emulated device
    window: int = 0  # timesteps that the scheduler grants at once; 0 if it grants single tasks
    tunes_passage: bool = False  # it is not given
    duplex: str = "full"  # of the links between the ranks (see ``scheduler.workflow``)
    activity: Activity = field(default_factory=Activity)
    device: Device = field(default_factory=HostDevice)  # of ``place``


class Report(NamedTuple):
    """A running request whose trace or overruns are reported at its end, and the first of them."""

    traced: bool
    first_event: int
    first_overran: int


class _TimedArrival(NamedTuple):
    """Activations on their way, awaited in a context of ``waiting``."""

    arrival: Arrival
    waiting: Callable[[], AbstractContextManager[None]]

    def wait(self) -> None:
        with self.waiting():
            self.arrival.wait()


class RankTasks:
    """The tasks of one rank, and the recorder that times its work."""

    def __init__(self, rank: int, wiring: Wiring) -> None:
        self.rank = rank
        self._pacer = wiring.pacer
        self.recorder = Recorder(wiring.device, unpaced if self._pacer is None else self._pacer.computing)
        self._wiring = wiring
        self._following: RankMessage | None = None  # the next message, if the last report brought it
        self._overran: list[int] = []  # timesteps whose real work took longer than its emulated time
        self._reports: list[Report] = []  # of running requests

    def next(self) -> RankMessage:
        """Wait for the next message, without a deadline: the loss of another rank also arrives as a message. Raises EpochEnded
        if the epoch has ended, and PipedecError if the run was aborted, a rank is lost, or Redis is.
        """
        while (message := self.poll(POLL_SECONDS)) is None:
            pass
        return message

    def poll(self, timeout_seconds: float) -> RankMessage | None:
        """As ``next``; None if no message arrives in time."""
        return self.request(partial(self._wiring.scheduler.wait, self.rank), timeout_seconds)

    def request(self, wait: Callable[[float], RankMessage | None], timeout_seconds: float) -> RankMessage | None:
        """As ``poll``, for rank 0 when nothing runs: ``wait`` returns the next message unless it came with the last report."""
        message, self._following = self._following, None
        if message is None:
            message = self._waited(partial(wait, timeout_seconds))
        if message is not None and message.kind == "abort":
            raise PipedecError(message.text)
        if message is not None and message.kind == "recover":
            raise EpochEnded(message.text)
        return message

    def report(
        self, done: Sequence[Task], planned: Sequence[Planned], waits: bool = True, trace_lines: int | None = None
    ) -> None:
        """Report tasks done, and those that follow. If ``waits``, a message for ``next`` may come in the same round trip.
        ``trace_lines``: as of ``RankScheduler.report``.
        """
        scheduler, seconds = self._wiring.scheduler, POLL_SECONDS if waits else 0.0
        self._following = self._waited(partial(scheduler.report, self.rank, done, planned, seconds, trace_lines))

    def _waited(self, wait: Callable[[], RankMessage | None]) -> RankMessage | None:
        self._wiring.activity.begin("idle")
        with self.recorder.waiting():
            message = wait()
        self._wiring.activity.begin("computing")
        return message

    def timestep(
        self, number: int, entered: StageMessage = EMPTY, results: tuple[RequestUpdate, ...] = (),
        timing: TimestepTiming | None = None,
    ) -> Timestep:  # fmt: skip
        """The record of this rank's work since the last one."""
        spans, overran = self.recorder.take_spans(), self._pacer is not None and self._pacer.take_overran()
        return Timestep(number, entered, results, timing, spans=spans, overran=overran)

    def on_timestep(self, timestep: Timestep) -> None:
        """Trace the spans of a timestep of this rank, and note whether it overran."""
        self._trace(timestep.spans)
        if timestep.overran:
            self._overran.append(timestep.number)

    def _trace(self, spans: Iterable[TimedSpan]) -> None:
        for span in spans if self._wiring.tracer.enabled else ():
            self._wiring.tracer.add(*span)

    def begin_report(self, traced: bool) -> Report | None:
        """A report on a request whose lane is opened; None if it needs none."""
        if not (traced or self._pacer is not None):
            return None
        self._reports.append(Report(traced, len(self._wiring.tracer.events), len(self._overran)))
        self._wiring.tracer.enabled |= traced
        return self._reports[-1]

    def end_report(self, report: Report) -> list[Event]:
        """This rank's report on a request that has ended: its trace, and the timesteps that overran."""
        self._reports.remove(report)
        tracer, events = self._wiring.tracer, list[Event]()
        if report.traced:
            self.recorder.await_spans()
            self._trace(self.recorder.take_spans())
            events.append(TraceEvents(tracer.events[report.first_event :]))
        if overran := self._overran[report.first_overran :]:
            events.append(OverranEvent(overran))
        tracer.enabled = any(other.traced for other in self._reports)
        if not self._reports:
            self._overran.clear()
            tracer.events.clear()
        return events

    def send(self, message: StageMessage, target: int, number: int) -> DeviceEvent:
        """Send the message of a timestep to rank ``target``. Returns the event at which the rows have left and its span ends."""
        began = self.recorder.record_event()
        if self._pacer is not None and (rows := message.num_rows):
            self._pacer.delay_sending(rows)  # the receiver must not get it earlier than over the emulated link
        self._wiring.activity.begin("waiting", target)
        sent = self._wiring.transport.send_message(message, target)
        self._wiring.activity.begin("computing")
        self.recorder.add(Task.transfer(self.rank, target, number).label, "transfer", began, sent)
        return sent

    def receive(self, source: int) -> StageMessage:
        """Wait for the next message from rank ``source``; its activations may come later."""
        with self._waiting_for(source, "between timesteps"):
            message = self._wiring.transport.receive_message(source)
        if message.arrival is None:
            return message
        return replace(message, arrival=_TimedArrival(message.arrival, partial(self._waiting_for, source, "computing")))

    @contextmanager
    def _waiting_for(self, source: int, then: str) -> Iterator[None]:
        """Context in which this rank waits for rank ``source``. The phase ``then`` begins afterwards."""
        self._wiring.activity.begin("waiting", source)
        self.recorder.phases.begin("waiting")
        yield
        self.recorder.phases.begin(then)
        self._wiring.activity.begin("computing")
