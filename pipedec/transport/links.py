"""Messages between two ranks over a process group, and their progress.

Through host memory, the host waits until a message has arrived. Over NCCL it records an event after the transfer, for which the
device's later work waits without the host. Knows bytes, not what they mean.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipedec.device import Device, DeviceEvent, HostEvent

Group = Any  # a process group; torch's stubs have none of its calls
Work = Any

STEP_TAG = 0
_POLL_SECONDS = 20e-6


@dataclass(frozen=True)
class HostTransfer:
    """A message that is being sent or received through host memory."""

    message: Tensor  # uint8; a received one may be read after ``wait``
    work: Work
    timeout: timedelta

    def wait(self) -> None:
        """Wait, once, on the host until the message has left or arrived. Raises RuntimeError if the transfer has failed."""
        self.work.wait(self.timeout)

    @property
    def has_left(self) -> bool:
        """Always False: with gloo only ``wait`` can find out."""
        return False

    @property
    def end(self) -> DeviceEvent:
        """The present moment: no device takes part in the transfer."""
        return HostEvent(time.perf_counter())


@dataclass(frozen=True)
class HostLink:
    """Messages in host memory, over gloo. ``peer``: the other's rank in the group."""

    group: Group
    peer: int
    timeout: timedelta

    def send(self, message: Tensor, tag: int = STEP_TAG) -> HostTransfer:
        """Begin to send ``message``, which must not change until the transfer has ended. Raises RuntimeError if it fails."""
        return HostTransfer(message, self.group.send([message], self.peer, tag), self.timeout)

    def receive(self, num_bytes: int, tag: int = STEP_TAG) -> HostTransfer:
        """Begin to receive a message of at most ``num_bytes``. Raises RuntimeError if that fails."""
        message = torch.empty(num_bytes, dtype=torch.uint8)
        return HostTransfer(message, self.group.recv([message], self.peer, tag), self.timeout)


@dataclass(frozen=True)
class DeviceTransfer:
    """As ``HostTransfer``, on a stream of the device, with an event at its end."""

    message: Tensor
    end: DeviceEvent
    timeout: timedelta
    is_aborted: Callable[[], bool]

    def wait(self) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not self.end.has_passed:
            if self.is_aborted() or time.monotonic() > deadline:
                raise RuntimeError(f"nothing has arrived within {self.timeout.total_seconds():g} seconds")
            time.sleep(_POLL_SECONDS)
        if self.is_aborted():
            raise RuntimeError("the transfers were aborted")  # an aborted transfer ends, too
        self.join()

    @property
    def has_left(self) -> bool:
        return self.end.has_passed

    def join(self) -> None:
        """As ``wait``, but only for work that is queued on the device from now on; instead of it."""
        self.end.join([self.message])


@dataclass(frozen=True)
class DeviceLink:
    """Messages in device memory, over NCCL, in one direction: from this rank to the next, or to this rank from the one before.

    A message leaves after the work queued before it has computed it, and can arrive while the device computes something else.
    NCCL carries out the transfers of one group in order, so a group has one direction.
    """

    group: Group
    peer: int  # the other's rank in the group
    timeout: timedelta
    place: torch.device
    device: Device
    is_aborted: Callable[[], bool]  # whether the groups were aborted, which ends all their transfers

    def send(self, message: Tensor, tag: int = STEP_TAG) -> DeviceTransfer:
        """As ``HostLink.send``."""
        work = self.group.send([message], self.peer, tag)
        with self.device.beside("send"):
            return self._under_way(message, work)

    def receive(self, num_bytes: int, tag: int = STEP_TAG) -> DeviceTransfer:
        """As ``HostLink.receive``, for a message of exactly ``num_bytes``."""
        with self.device.beside("receive"):
            message = torch.empty(num_bytes, dtype=torch.uint8, device=self.place)
            return self._under_way(message, self.group.recv([message], self.peer, tag))

    def _under_way(self, message: Tensor, work: Work) -> DeviceTransfer:
        work.wait()  # the current stream waits, and the host does not
        return DeviceTransfer(message, self.device.record_event(), self.timeout, self.is_aborted)


Transfer = HostTransfer | DeviceTransfer
Link = HostLink | DeviceLink


class Sender:
    """Messages over one link, each of which is kept until it has left: of at most ``depth`` calls of ``send``."""

    def __init__(self, link: Link, depth: int) -> None:
        self._link, self._depth = link, depth
        self._leaving: deque[list[Transfer]] = deque()

    def send(self, messages: Sequence[Tensor], tag: int = STEP_TAG) -> DeviceEvent:
        """Begin to send ``messages``, at least one. Returns the event at the end of the last one. Waits for the receiver if it
        has not received the messages of ``depth`` earlier calls. Raises RuntimeError if these, or the new ones, fail.
        """
        while self._leaving and self._leaving[0][-1].has_left:
            self._leaving.popleft()
        while len(self._leaving) >= self._depth:
            try:
                for transfer in self._leaving[0]:
                    transfer.wait()
            except RuntimeError as error:
                raise RuntimeError(f"it has not received {len(self._leaving)} earlier messages: {error}") from error
            self._leaving.popleft()
        self._leaving.append([self._link.send(message, tag) for message in messages])
        return self._leaving[-1][-1].end


class Receiver:
    """Messages of at most ``num_bytes`` over one link, in the order in which they were sent.

    gloo sends a message once it knows that a receive is posted, which takes a latency. So ``depth`` receives are posted at any
    time, and as many messages may be on their way. A message may be shorter than the buffer that receives it.
    """

    def __init__(self, link: HostLink, num_bytes: int, depth: int, tag: int) -> None:
        self._post = partial(link.receive, num_bytes, tag)
        self._posted = deque(self._post() for _ in range(depth))
        self._taken: Transfer | None = None

    def receive_next(self) -> Tensor:
        """Wait for the next message; what follows it in the buffer is undefined. Raises RuntimeError if a receive has failed."""
        transfer = self._posted[0]
        transfer.wait()
        # gloo's thread may not have released the buffer yet, and the destructor of the work would wait for it, so keep the work.
        self._taken = self._posted.popleft()
        self._posted.append(self._post())
        return transfer.message
