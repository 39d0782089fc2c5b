"""How fast the links of a ring of ranks are, measured over gloo: every rank times the link to the next one (``measured``), while
a second thread of it answers the rank before (``answer``).

A link's burst begins only when the rank before has timed its round trips, as their echoes would queue after the burst. All of it
takes some milliseconds over a short link, and about eight latencies over a long one. Knows links, not ranks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from threading import Event

import torch

from pipedec.messages.run import LinkSpeed
from pipedec.transport.links import HostLink, HostTransfer

_ROUND_TRIPS = 5
_TIMING_SECONDS = 0.05  # after which no further round trip begins
_SENDING_SECONDS = 0.2  # from the first round trip on, after which the rest of the burst is empty
_PARTS = 128  # in a burst
_PART_BYTES = 14_000  # what TCP sends at once over a new connection; then twice that after every round trip
_AT_ONCE = 3  # parts at least, in two windows of TCP
_PING_TAG, _ECHO_TAG, _PART_TAG = 16, 17, 18
_MORE, _END = (torch.tensor([value], dtype=torch.uint8) for value in (0, 1))
_FULL, _EMPTY = torch.ones(_PART_BYTES, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)


def measured(link: HostLink, may_burst: Event) -> LinkSpeed:
    """The speed of ``link``, whose peer answers. Raises RuntimeError if a transfer fails."""
    link.receive(1, _ECHO_TAG).wait()  # the peer has posted its receives, so from now on every message costs one latency
    began, shortest = time.perf_counter(), math.inf
    for _ in range(_ROUND_TRIPS):
        echo = link.receive(1, _ECHO_TAG)
        sent = time.perf_counter()
        link.send(_MORE, _PING_TAG).wait()
        echo.wait()
        shortest = min(shortest, time.perf_counter() - sent)
        if time.perf_counter() > began + _TIMING_SECONDS:
            break
    link.send(_END, _PING_TAG).wait()
    may_burst.wait()
    rate = link.receive(8, _ECHO_TAG)
    sent_parts: deque[HostTransfer] = deque()
    for number in range(_PARTS):
        if number >= _AT_ONCE:
            sent_parts.popleft().wait()
        is_full = number < _AT_ONCE or time.perf_counter() < began + _SENDING_SECONDS
        sent_parts.append(link.send(_FULL if is_full else _EMPTY, _PART_TAG))
    rate.wait()
    return LinkSpeed(shortest / 2, rate.message.view(torch.float64).item())


def answer(link: HostLink, is_timed: Event) -> None:
    """Answer the peer of ``link``, which measures it. Sets ``is_timed`` when its round trips are over, or on an error. Raises as
    ``measured``.
    """
    try:
        ping = link.receive(1, _PING_TAG)
        parts = [link.receive(_PART_BYTES, _PART_TAG) for _ in range(_PARTS)]
        link.send(_MORE, _ECHO_TAG).wait()
        ping.wait()
        while not ping.message.item():
            ping = link.receive(1, _PING_TAG)
            link.send(_MORE, _ECHO_TAG).wait()
            ping.wait()
    finally:
        is_timed.set()
    arrivals = []
    for part in parts:
        part.wait()
        if part.message[0]:
            arrivals.append(time.perf_counter())
    link.send(torch.tensor([rate_of(arrivals)], dtype=torch.float64).view(torch.uint8), _ECHO_TAG).wait()


def rate_of(arrivals: Sequence[float]) -> float:
    """Bytes per second in the second half of a burst of at least two parts, which arrived at these times (seconds): in the first,
    TCP starts slowly.
    """
    last = len(arrivals) - 1
    middle = last // 2
    return (last - middle) * _PART_BYTES / max(arrivals[last] - arrivals[middle], 1e-6)
