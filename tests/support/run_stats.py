"""Counters of a run, for tests in which their values do not matter."""

from __future__ import annotations

from pipedec.messages import Histogram, KVUsage, RunStats


def run_stats(used: int = 0) -> RunStats:
    """With ``used`` slots of KV memory in use."""
    histogram = Histogram((1.0, 2.0), (3, 0, 1), 8.5)
    return RunStats(KVUsage(4096, used, 1024, 700, 480, 3), 2, 1, 90, 40, 12, 60, 0, 11, 25, (11, 9, 5), histogram, histogram)
