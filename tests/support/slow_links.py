"""Slow links between hosts: a switch in user space that delays what it passes on, for each pair of hosts as it is told.

Each host's network device is a TAP device whose other end this process holds (``/dev/net/tun``), so that a kernel without netem
will do. A frame leaves its sender at the link's rate, after all before it, and arrives ``delay_ms`` later. Frames of a pair keep
their order. Segments of a TCP connection are passed on up to 64 KiB at once, as network cards do.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

TUN = Path("/dev/net/tun")
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS_AND_SEGMENTS = 0b111  # that the kernel leaves to us, and we to the kernel of the receiver: no frame is looked into
_HEADER_BYTES = 10  # of ``struct virtio_net_hdr``, before each frame
_FRAME_BYTES = _HEADER_BYTES + 18 + 65_536
_FRAMES = 64  # that are read from one host before another one's turn
_QUEUE_SECONDS = 1.0  # of traffic that may wait for a link; what comes later is lost
_TURN_SECONDS = 100e-6  # at least between two turns while frames are on their way
_PRIORITY = -15  # a link is no slower on a busy machine


@dataclasses.dataclass(frozen=True)
class Link:
    """How two hosts are joined, in both directions alike.

    Attributes:
        delay_ms: one way.
        jitter_ms: of each frame, drawn evenly up to this much and added to the delay.
        rate_mbit: of each direction; None: unlimited.
        loss: the share of packets that are lost.
        stalled: frames wait at their sender until this is False again.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_mbit: float | None = None
    loss: float = 0.0
    stalled: bool = False


class SlowSwitch:
    """The process of a switch, seen from the one that starts it. It ends when this one closes it or ends."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-m", __name__], bufsize=0, cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._hear()

    def add_port(self, index: int) -> str:
        """Make the network device of a host, in the network of the switch; returns its name."""
        self._tell({"port": index})
        return _port(index)

    def set_link(self, first: int, second: int, link: Link) -> None:
        """Join two hosts, from now on like this; what is on its way arrives as it would have."""
        self._tell({"pair": [first, second], "link": dataclasses.asdict(link)})

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self._hear()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"done\n", "the switch has ended"


def address_of(index: int) -> str:
    """The hardware address of a host on a slow switch."""
    return f"02:00:00:00:00:{index:02x}"


def _port(index: int) -> str:
    return f"port{index}"


class _Line:
    """One direction of a link."""

    def __init__(self, receiver: int, link: Link) -> None:
        self.link = link
        self.on_its_way: deque[tuple[float, bytes]] = deque()  # with the time of arrival
        self._receiver = receiver
        self._stalled: list[bytes] = []
        self._free_at = 0.0  # when all frames will have left
        self._last_arrival = 0.0

    def set(self, link: Link, now: float) -> None:
        self.link = link
        if not link.stalled:
            waiting, self._stalled = self._stalled, []
            for frame in waiting:
                self.send(frame, now)

    def send(self, frame: bytes, now: float) -> None:
        link = self.link
        if link.stalled:
            self._stalled.append(frame)
            return
        if random.random() < link.loss:
            return
        leaves = now
        if link.rate_mbit is not None:
            leaves = max(now, self._free_at)
            if leaves > now + _QUEUE_SECONDS:
                return
            leaves += (len(frame) - _HEADER_BYTES) * 8 / (link.rate_mbit * 1e6)
            self._free_at = leaves
        arrives = leaves + (link.delay_ms + random.random() * link.jitter_ms) / 1000
        self._last_arrival = max(arrives, self._last_arrival)
        self.on_its_way.append((self._last_arrival, frame))

    def deliver(self, now: float) -> None:
        """Hand over what has arrived. A receiver whose queue is full, or who is not there yet, loses it."""
        while self.on_its_way and self.on_its_way[0][0] <= now:
            with suppress(OSError):
                os.write(self._receiver, self.on_its_way.popleft()[1])


class _Switch:
    def __init__(self) -> None:
        self._ports: dict[int, int] = {}  # file descriptors of hosts' devices
        self._lines: dict[tuple[int, int], _Line] = {}

    def obey(self, message: dict[str, Any]) -> None:
        if "port" in message:
            self._add_port(message["port"])
            return
        first, second = message["pair"]
        link = Link(**message["link"])
        for sender, receiver in ((first, second), (second, first)):
            line = self._lines.setdefault((sender, receiver), _Line(self._ports[receiver], link))
            line.set(link, time.monotonic())
            self._allow_segments(sender)

    def _add_port(self, index: int) -> None:
        port = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH", _port(index).encode(), _TAP | _NO_PACKET_INFO | _OFFLOAD_HEADER))
        self._ports[index] = port

    def _allow_segments(self, sender: int) -> None:
        """Let the kernel hand over several TCP segments at once, unless each of them may be lost alone."""
        loses = any(line.link.loss for (start, _), line in self._lines.items() if start == sender)
        fcntl.ioctl(self._ports[sender], _TUNSETOFFLOAD, 0 if loses else _CHECKSUMS_AND_SEGMENTS)

    def run(self) -> None:
        """Pass frames on and do what the standard input says, until it ends."""
        print("done", flush=True)
        stdin = os.fdopen(0, "rb", buffering=0)  # so that nothing is hidden from select
        hosts: dict[int, int] = {}
        wait: float | None = None
        while True:
            readable, _, _ = select.select([0, *hosts], [], [], wait)
            now = time.monotonic()
            for source in readable:
                if source == 0:
                    if not (told := stdin.readline()):
                        return
                    self.obey(json.loads(told))
                    hosts = {port: index for index, port in self._ports.items()}
                    print("done", flush=True)
                else:
                    self._read(hosts[source], now)
            for line in self._lines.values():
                line.deliver(now)
            arrivals = [line.on_its_way[0][0] for line in self._lines.values() if line.on_its_way]
            wait = max(_TURN_SECONDS, min(arrivals) - time.monotonic()) if arrivals else None

    def _read(self, sender: int, now: float) -> None:
        """Send what a host has to send: to all others what is for several."""
        with suppress(BlockingIOError):
            for _ in range(_FRAMES):
                frame = os.read(self._ports[sender], _FRAME_BYTES)
                is_broadcast = frame[_HEADER_BYTES] & 1
                for receiver in self._ports if is_broadcast else (frame[_HEADER_BYTES + 5],):
                    if line := self._lines.get((sender, receiver)):
                        line.send(frame, now)


if __name__ == "__main__":
    with suppress(PermissionError):
        os.nice(_PRIORITY)
    _Switch().run()
