"""How fast the links of a ring of ranks are, measured over gloo: every rank times the link to the next one (``measured``), while
a second thread of it answers the rank before (``answer``).

A link's burst begins only when the rank before has timed its round trips: their echoes would queue behind the burst. Over a long
link all of this takes a few round trips, over a short one some milliseconds. Knows links, not ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import combinations
from threading import Event

import torch

from pipedec.messages import LinkSpeed
from pipedec.transport.links import HostLink

_ROUND_TRIPS = 5
_TIMING_SECONDS = 0.1  # after which no further round trip begins
_SENDING_SECONDS = 0.2  # from the first round trip on, after which the rest of the burst is empty
_PARTS = 128  # of a burst
_FEWEST_PARTS = 2  # that are not empty
_PART_BYTES = 1 << 14  # about what TCP sends at once over a new connection
_WINDOW_SECONDS = 0.005  # the shortest in which a rate counts, if the burst lasts that long
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
    for number in range(_PARTS):
        is_full = number < _FEWEST_PARTS or time.perf_counter() < began + _SENDING_SECONDS
        link.send(_FULL if is_full else _EMPTY, _PART_TAG).wait()
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
    link.send(torch.tensor([best_rate(arrivals)], dtype=torch.float64).view(torch.uint8), _ECHO_TAG).wait()


def best_rate(arrivals: Sequence[float]) -> float:
    """The highest rate, in bytes per second, between two of at least two parts of a burst that arrived at these times (seconds).

    While TCP starts slowly, it sends ever more at once and then waits for a round trip, so a mean would say little.
    """
    windows = [(last - first, end - start) for (first, start), (last, end) in combinations(enumerate(arrivals), 2)]
    rates = [parts * _PART_BYTES / seconds for parts, seconds in windows if seconds >= _WINDOW_SECONDS]
    whole = (len(arrivals) - 1) * _PART_BYTES / max(arrivals[-1] - arrivals[0], 1e-6)
    return max(rates, default=whole)
