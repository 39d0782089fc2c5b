"""The figures of KV memory during a load."""

from __future__ import annotations

from benchmarks.load.replayed import kv_use


def test_memory_is_that_of_running_requests() -> None:
    assert kv_use([16, 48, 32], 64, 10) == {
        "capacity_slots": 64, "peak_slots": 48, "peak_bytes": 480, "peak_utilisation": 0.75, "mean_utilisation": 0.5,
    }  # fmt: skip
    assert kv_use([], 64, 10)["peak_slots"] == 0
