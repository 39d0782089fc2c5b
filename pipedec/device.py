"""Work that a device does while its host goes on: marks in it, streams beside the one that computes, and pinned copies.

A GPU carries out what it is given later than the call that gives it, so neither the end of a call nor a result that exists means
that the work is done: a mark that is made after the work shows it. A CPU's work ends with the call. Knows neither models nor
messages. All times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOST = torch.device("cpu")
Stream = Any  # of the calls of ``torch.cuda``, which a test replaces
Event = Any


class HostEvent(NamedTuple):
    """A point in the work of a CPU, which is reached when the mark is made."""

    seconds: float
    has_passed: bool = True

    def wait(self) -> None:
        """It has passed."""

    def join(self, tensors: Sequence[Tensor] = ()) -> None:
        """It has passed."""


class HostDevice:
    """The CPU: the work that it is given is done when the call returns."""

    def record_event(self) -> DeviceEvent:
        return HostEvent(time.perf_counter())

    def beside(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


class GpuEvent:
    """A point in a GPU's work, after everything that the stream of the mark had been given before.

    Args:
        event: of CUDA.
        origin: an earlier event, and when the device reached it.
        present: returns the present stream.
    """

    def __init__(self, event: Event, origin: tuple[Event, float], present: Callable[[], Stream]) -> None:
        self._event = event
        self._origin = origin
        self._present = present

    @property
    def has_passed(self) -> bool:
        """Whether the device has come so far. Does not wait."""
        return bool(self._event.query()) and bool(self._origin[0].query())

    @property
    def seconds(self) -> float:
        """When the device came so far. Raises RuntimeError if it has not yet."""
        event, seconds = self._origin
        return seconds + float(event.elapsed_time(self._event)) / 1000

    def wait(self) -> None:
        """Wait on the host until the device has come so far."""
        self._event.synchronize()
        self._origin[0].synchronize()  # of another stream, maybe

    def join(self, tensors: Sequence[Tensor] = ()) -> None:
        """Let the present stream wait for the mark before it carries out what it is given from now on. The host does not wait.

        Args:
            tensors: made on the stream of the mark; their memory is not used again before the present stream is done with them.
        """
        stream = self._present()
        stream.wait_event(self._event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


class GpuDevice:
    """A GPU. Its events show only how much time is between two of them.

    An event on a stream that has nothing to do is reached at once, when the host makes it; so every such event is a new origin
    for the times of those that follow. Its error is that of a call, some microseconds, and clocks cannot drift apart.

    Args:
        cuda: ``torch.cuda``.
        now: the host's clock.
    """

    def __init__(
        self, device: torch.device | str = "cuda", cuda: Any = torch.cuda, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._now = now
        self._streams: dict[str, Stream] = {}
        first = self._recorded()
        first.synchronize()
        self._origin: tuple[Event, float] = (first, now())

    def record_event(self) -> DeviceEvent:
        """A mark after all that the present stream has been given so far."""
        is_idle, now = bool(self._present().query()), self._now()
        event = self._recorded()
        if is_idle:
            self._origin = (event, now)
        return GpuEvent(event, self._origin, self._present)

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """In the context, the device is given work on a stream of this name, which waits for no other stream."""
        if name not in self._streams:
            self._streams[name] = self._cuda.Stream(self._device)
        context: AbstractContextManager[Any] = self._cuda.stream(self._streams[name])
        return context

    def _recorded(self) -> Event:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._present())
        return event

    def _present(self) -> Stream:
        return self._cuda.current_stream(self._device)


DeviceEvent = HostEvent | GpuEvent
Device = HostDevice | GpuDevice


def device_of(place: torch.device) -> Device:
    """The device on which the tensors of ``place`` are."""
    return GpuDevice(place) if place.type == "cuda" else HostDevice()


class PhaseTimes:
    """Adds up how long a device is in each phase of its work; a phase begins where the one before it ends.

    A phase that the host begins while the device is still at the one before begins on the device when that has ended. It counts
    as soon as the device has passed its end.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: deque[tuple[str, DeviceEvent]] = deque()  # phases that have not been counted, the present one last
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """A phase begins after all that the device has been given so far, and the phase before ends there."""
        self._open.append((phase, self._device.record_event()))
        self._count()

    def seconds(self, phase: str) -> float:
        """How long the device has been in this phase, as far as it has passed the end of it."""
        self._count()
        return self._seconds.get(phase, 0.0)

    def _count(self) -> None:
        while len(self._open) > 1 and self._open[0][1].has_passed and self._open[1][1].has_passed:
            phase, began = self._open.popleft()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._open[0][1].seconds - began.seconds


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device``. A GPU fetches it from pinned memory when its stream gets there; the host does not wait."""
    if tensor.device == HOST and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """``tensor`` on the host, which waits for what computes it. A GPU writes it into pinned memory."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy
