"""Times the pieces of a rank's work by events recorded on its device.

A piece ends when the device has done it, perhaps long after the call that queued it. On an emulated device pieces last as long as
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar

from pipedec.core import NO_LOAD, Load
from pipedec.decoding import TimestepTiming
from pipedec.device import Device, DeviceEvent, HostDevice, PhaseTimes
from pipedec.engine.emulated_time import Pacer, TimestepLoad
from pipedec.engine.records import TimedSpan

Item = TypeVar("Item")


class _Piece(NamedTuple):
    """A piece of work that the device may not have finished."""

    label: str
    category: str
    began: DeviceEvent
    ended: DeviceEvent


class Recorder:
    """Times one rank's work.

    Args:
        pacer: of the rank's emulated device.
        device: the device that does the work.

    Attributes:
        mark: records an event after all work queued on the rank's device.
        phases: how long the device is in each phase of a rank's work.
    """

    def __init__(self, pacer: Pacer, device: Device | None = None) -> None:
        self.pacer = pacer
        device = HostDevice() if device is None else device
        self.record_event = device.record_event
        self.phases = PhaseTimes(device)
        self._pieces: list[_Piece] = []
        self._forwards: list[tuple[Load, DeviceEvent, DeviceEvent]] = []  # each draft forward
        self._waits: list[tuple[DeviceEvent, DeviceEvent]] = []
        self.restart()

    def restart(self) -> None:
        """Begin a timestep now, and discard the measurements of the current one."""
        self._began = time.perf_counter()
        self._own_began = time.thread_time()
        self._drafting = 0.0  # CPU time of the draft forwards
        self._waits.clear()
        self._forwards.clear()

    @contextmanager
    def span(self, label: str, category: str, load: Load = NO_LOAD) -> Iterator[None]:
        """Record the body of the ``with`` statement. If it computes rows, it takes as long as on the emulated device."""
        began = self.record_event()
        with self.computing(load):
            yield
        self.add(label, category, began)

    def add(self, label: str, category: str, began: DeviceEvent, ended: DeviceEvent | None = None) -> None:
        """Record a span. It ends after all work queued on the device, unless ``ended`` is given."""
        self._pieces.append(_Piece(label, category, began, self.record_event() if ended is None else ended))

    @contextmanager
    def drafting(self, load: Load) -> Iterator[None]:
        """Time one draft forward."""
        began, cpu_began = self.record_event(), time.thread_time()
        with self.computing(load):
            yield
        self._forwards.append((load, began, self.record_event()))
        self._drafting += time.thread_time() - cpu_began

    def note_beside(self, load: TimestepLoad) -> None:
        """Add to ``load`` this thread's computing time since ``restart``, beside the stages; draft forwards apart."""
        load.drafted = [forward for forward, _, _ in self._forwards]
        load.beside_seconds = time.thread_time() - self._own_began - self._drafting

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The rank has nothing to do once its device has finished the queued work."""
        began = self.record_event()
        yield
        self._waits.append((began, self.record_event()))

    def timing(self) -> TimestepTiming:
        """Return the timing of the timestep that ends now, and begin the next one.

        Work that the device has not finished belongs to the timing of the timestep in which the device finishes it.
        """
        forwards, later = _split(self._forwards, lambda forward: _have_passed(*forward[1:]))
        waits, later_waits = _split(self._waits, lambda wait: _have_passed(*wait))
        waited = sum(ended.seconds - began.seconds for began, ended in waits)
        drafted = tuple(ended.seconds - began.seconds for _, began, ended in forwards)
        timing = TimestepTiming(time.perf_counter() - self._began, waited, drafted)
        self.restart()
        self._forwards, self._waits = later, later_waits
        return timing

    def take_spans(self) -> tuple[TimedSpan, ...]:
        """The spans that have not been taken yet and that the device has finished."""
        ended, self._pieces = _split(self._pieces, lambda piece: _have_passed(piece.began, piece.ended))
        times = ((label, category, began.seconds, end.seconds) for label, category, began, end in ended)
        return tuple(TimedSpan(label, category, min(began, end), end) for label, category, began, end in times)

    def await_spans(self) -> None:
        """Wait until the device has finished all spans."""
        for piece in self._pieces:
            piece.began.wait()
            piece.ended.wait()

    def computing(self, load: Load) -> AbstractContextManager[None]:
        """Let the body take as long as ``load`` takes on the emulated device."""
        return self.pacer.computing(load) if load.rows and self.pacer.is_emulating else nullcontext()


def _have_passed(began: DeviceEvent, ended: DeviceEvent) -> bool:
    """Whether both events have passed. With two streams, as in a transfer, the later one may pass first."""
    return began.has_passed and ended.has_passed


def _split(items: list[Item], has_ended: Callable[[Item], bool]) -> tuple[list[Item], list[Item]]:
    """The items that have ended, and the others, each in order."""
    ended: list[Item] = []
    others: list[Item] = []
    for item in items:
        (ended if has_ended(item) else others).append(item)
    return ended, others
