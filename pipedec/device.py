"""Asynchronous work on a device: events, streams beside the one that computes, and pinned copies.

A GPU does its work some time after the call that queues it, so neither the end of the call nor its result shows that the work is
done; an event recorded afterwards does. A CPU's work ends with the call. Knows neither models nor messages. All times are seconds
of ``time.perf_counter``.
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
Stream = Any  # as ``torch.cuda`` has it, which a test replaces
Event = Any


class HostEvent(NamedTuple):
    """A point in the work of a CPU, which has passed when the event is recorded."""

    seconds: float
    has_passed: bool = True

    def wait(self) -> None:
        """Return at once."""

    def join(self, tensors: Sequence[Tensor] = ()) -> None:
        """Return at once."""


class HostDevice:
    """The CPU: work is done when the call returns."""

    def record_event(self) -> DeviceEvent:
        return HostEvent(time.perf_counter())

    def beside(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


class GpuEvent:
    """A point in a GPU's work, after everything queued before on the stream that was current when it was recorded.

    Args:
        event: of CUDA.
        origin: an earlier event, and when the device reached it.
        current_stream: returns the current stream.
    """

    def __init__(self, event: Event, origin: tuple[Event, float], current_stream: Callable[[], Stream]) -> None:
        self._event = event
        self._origin = origin
        self._current_stream = current_stream

    @property
    def has_passed(self) -> bool:
        """Whether the device has reached it. Does not wait."""
        return bool(self._event.query()) and bool(self._origin[0].query())

    @property
    def seconds(self) -> float:
        """When the device reached it. Raises RuntimeError if it has not yet."""
        event, seconds = self._origin
        return seconds + float(event.elapsed_time(self._event)) / 1000

    def wait(self) -> None:
        """Wait on the host until the device has reached it."""
        self._event.synchronize()
        self._origin[0].synchronize()  # perhaps of another stream

    def join(self, tensors: Sequence[Tensor] = ()) -> None:
        """Let work queued on the current stream from now on wait for the event. The host does not wait.

        Args:
            tensors: of the event's stream; their memory is not reused before the current stream is done with them.
        """
        stream = self._current_stream()
        stream.wait_event(self._event)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)


class GpuDevice:
    """A GPU. CUDA measures only the time between two events, so times count from an origin that the host's clock knows.

    An event on an idle stream is reached as soon as the host records it, so every such event becomes the origin of those that
    follow. Its error is the duration of a call, some microseconds, and the clocks cannot drift apart.

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
        """An event after all work queued on the current stream so far."""
        is_idle, now = bool(self._current_stream().query()), self._now()
        event = self._recorded()
        if is_idle:
            self._origin = (event, now)
        return GpuEvent(event, self._origin, self._current_stream)

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """Context in which work is queued on a stream of this name, which waits for no other stream."""
        if name not in self._streams:
            self._streams[name] = self._cuda.Stream(self._device)
        context: AbstractContextManager[Any] = self._cuda.stream(self._streams[name])
        return context

    def _recorded(self) -> Event:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._current_stream())
        return event

    def _current_stream(self) -> Stream:
        return self._cuda.current_stream(self._device)


DeviceEvent = HostEvent | GpuEvent
Device = HostDevice | GpuDevice


def device_of(place: torch.device) -> Device:
    """The device on which the tensors of ``place`` are."""
    return GpuDevice(place) if place.type == "cuda" else HostDevice()


class PhaseTimes:
    """Adds up how long a device is in each phase of its work; a phase begins where the one before it ends.

    A phase that the host begins while the device is busy with the one before begins when that has ended. It counts once the
    device has passed its end.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: deque[tuple[str, DeviceEvent]] = deque()  # phases that have not been counted, the current one last
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """Begin a phase after all work queued so far; the phase before ends there."""
        self._open.append((phase, self._device.record_event()))
        self._count()

    def seconds(self, phase: str) -> float:
        """How long the device has been in this phase, not counting one that has not ended."""
        self._count()
        return self._seconds.get(phase, 0.0)

    def _count(self) -> None:
        while len(self._open) > 1 and self._open[0][1].has_passed and self._open[1][1].has_passed:
            phase, began = self._open.popleft()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._open[0][1].seconds - began.seconds


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device``. A GPU copies it from pinned memory in the order of its stream; the host does not wait."""
    if tensor.device == HOST and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """``tensor`` on the host, which waits for its computation. A GPU copies it into pinned memory."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy
