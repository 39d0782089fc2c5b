"""How long a rank works and waits: the timing of its timesteps for the controller, and the spans of its traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from pipedec.core.stage_message import NO_LOAD, Load
from pipedec.decoding import TimestepTiming
from pipedec.decoding.events import TimedSpan
from pipedec.device import Device, DeviceEvent, HostDevice, PhaseTimes


class _Piece(NamedTuple):
    """A piece of work that the device may not have finished. Its label is that of a trace."""

    began: DeviceEvent
    ended: DeviceEvent
    label: str = ""
    category: str = ""
    parts: int = 1  # that took equally long

    @property
    def seconds(self) -> float:
        return self.ended.seconds - self.began.seconds


def unpaced(load: Load) -> AbstractContextManager[None]:
    """Work takes as long as it takes."""
    return nullcontext()


class Recorder:
    """Times the work of one rank on ``device``. Work with rows is done within the context ``pace`` of its load."""

    def __init__(self, device: Device | None = None, pace: Callable[[Load], AbstractContextManager[None]] = unpaced) -> None:
        device = HostDevice() if device is None else device
        self.pace = pace
        self.record_event = device.record_event  # records an event after all work queued on the rank's device
        self.phases = PhaseTimes(device)  # how long the device is in each phase of a rank's work
        self._spans: list[_Piece] = []
        self._forwards: list[_Piece] = []  # of the draft model
        self._waits: list[_Piece] = []
        self.restart()

    def restart(self) -> None:
        """Begin a timestep now, and discard the measurements of the current one."""
        self._began = time.perf_counter()
        self._waits.clear()
        self._forwards.clear()

    @contextmanager
    def span(self, label: str, category: str, load: Load = NO_LOAD) -> Iterator[None]:
        """Context whose body is recorded as a span."""
        began = self.record_event()
        with self.pace(load):
            yield
        self.add(label, category, began)

    def add(self, label: str, category: str, began: DeviceEvent, ended: DeviceEvent | None = None) -> None:
        """Record a span. It ends after all work queued on the device, unless ``ended`` is given."""
        self._spans.append(_Piece(began, self.record_event() if ended is None else ended, label, category))

    @contextmanager
    def drafting(self, load: Load, forwards: int = 1) -> Iterator[None]:
        """Context of draft forwards that are timed together."""
        began = self.record_event()
        with self.pace(load):
            yield
        self._forwards.append(_Piece(began, self.record_event(), parts=forwards))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the rank waits; it counts from when its device has finished the queued work."""
        began = self.record_event()
        yield
        self._waits.append(_Piece(began, self.record_event()))

    def timing(self) -> TimestepTiming:
        """The timing of the timestep that ends now. Work that the device has not finished belongs to the next one."""
        forwards, later_forwards = _finished(self._forwards)
        waits, later_waits = _finished(self._waits)
        drafted = [seconds for one in forwards for seconds in [one.seconds / one.parts] * one.parts]
        timing = TimestepTiming(time.perf_counter() - self._began, sum([wait.seconds for wait in waits]), tuple(drafted))
        self.restart()
        self._forwards, self._waits = later_forwards, later_waits
        return timing

    def take_spans(self) -> tuple[TimedSpan, ...]:
        """The spans that have not been taken yet and that the device has finished."""
        finished, self._spans = _finished(self._spans)
        times = ((one.label, one.category, one.began.seconds, one.ended.seconds) for one in finished)
        return tuple([TimedSpan(label, category, min(began, ended), ended) for label, category, began, ended in times])

    def await_spans(self) -> None:
        """Wait until the device has finished all spans."""
        for span in self._spans:
            span.began.wait()
            span.ended.wait()


def _finished(pieces: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
    """The pieces that the device has finished, and the others. With two streams an end may come before its beginning."""
    finished, others = list[_Piece](), list[_Piece]()
    for piece in pieces:
        (finished if piece.began.has_passed and piece.ended.has_passed else others).append(piece)
    return finished, others
