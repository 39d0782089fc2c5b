"""How far the clock of another machine is from this one's. Knows nothing of who is asked."""

from __future__ import annotations

import time
from collections.abc import Callable

SAMPLES = 8


def measured_offset_us(their_clock_us: Callable[[], int]) -> int:
    """The other clock minus this host's, from the fastest of several round trips (a slow one is imprecise).

    Args:
        their_clock_us: asks the other machine for its time, in microseconds since the epoch.
    """
    samples = []
    for _ in range(SAMPLES):
        before_us = time.time_ns() // 1000
        theirs_us = their_clock_us()
        after_us = time.time_ns() // 1000
        samples.append((after_us - before_us, theirs_us - (before_us + after_us) // 2))
    return min(samples)[1]
