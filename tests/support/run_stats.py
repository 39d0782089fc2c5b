"""Counters and ranks of a run, for tests in which most of their values do not matter."""

from __future__ import annotations

from collections.abc import Sequence

from pipedec.messages.run import Choice, LinkSpeed, RankDescription
from pipedec.messages.stats import Histogram, KVUsage, RunStats


def run_stats(used: int = 0) -> RunStats:
    """With ``used`` slots of KV memory in use."""
    histogram = Histogram((1.0, 2.0), (3, 0, 1), 8.5)
    return RunStats(KVUsage(4096, used, 1024, 700, 480, 3), 2, 1, 90, 40, 12, 60, 0, 11, 25, (11, 9, 5), histogram, histogram)


def described_ranks(links: Sequence[LinkSpeed | None]) -> tuple[RankDescription, ...]:
    """As many ranks as links from them."""
    dtype, transport, interface, attention = (Choice(name, "as given") for name in ("float32", "gloo", "eth0", "SDPA"))
    return tuple(
        RankDescription(rank, f"host-{rank}", "cpu", dtype, transport, interface, attention, link=link)
        for rank, link in enumerate(links)
    )
