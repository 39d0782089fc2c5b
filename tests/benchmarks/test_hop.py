"""The benchmark of one hop, with both sides in this process."""

from __future__ import annotations

from threading import Thread

from benchmarks.hop import HopConfig, answer, connected, measure


def test_a_hop_is_measured_over_both_ways() -> None:
    config = HopConfig(rows=(1, 200), in_flight=(1, 3), round_trips=4, repeats=1, idle_seconds=0.001)
    other: list[Thread] = []

    def join(port: int) -> None:
        other.append(Thread(target=answer, args=("127.0.0.1", port, "lo")))
        other[0].start()

    with connected("127.0.0.1", "lo", config, join) as ways:
        measured = measure(ways, config)
    other[0].join(60)
    assert not other[0].is_alive()
    assert [(row["rows"], row["in_flight"]) for row in measured] == [(1, 1), (1, 3), (1, 0), (200, 1), (200, 3), (200, 0)]
    assert all(row["ratio"] > 0 and row["ms"]["socket"] > 0 for row in measured)
