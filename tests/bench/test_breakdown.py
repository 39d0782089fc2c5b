"""Where the time of a timestep goes, from hand-made traces."""

from __future__ import annotations

import pytest

from pipedec.bench.breakdown import PHASES, breakdown
from pipedec.tracing import SCHEDULER_TRACK, TraceEvent


def event(label: str, start_ms: float, end_ms: float, rank: int = 0) -> TraceEvent:
    return TraceEvent(rank, label, "", round(1000 * start_ms), round(1000 * end_ms))


def test_phases_of_one_timestep_add_up_to_it() -> None:
    events = [
        event("0F1", 0, 6), event("1F1", 1, 21, 1), event("2F1", 0, 20, 2),  # stage 1 begins late, stage 3 has no rows
        event("0S1", 22, 22.5), event("1S1", 22, 23, 1),
        event("0>1@1", 23, 24), event("1>2@1", 24, 26, 1), event("1>2@1", 24, 26, 2),
        event("0F2", 27, 33), event("1F2", 27, 47, 1),
        event("1F1", 0, 40, SCHEDULER_TRACK),
    ]  # fmt: skip
    parts = breakdown(events, num_stages=3)
    assert parts is not None
    assert parts == pytest.approx(
        {"compute": 40 / 3, "wait": (0 + 1 + 21) / 3, "transfer": 3, "sync": 1, "scheduler": 27 - 21 - 4 + 1 / 3}
    )
    assert sum(parts.values()) == pytest.approx(27)
    assert tuple(parts) == PHASES


def test_prefill_and_the_last_timestep_do_not_count() -> None:
    assert breakdown([event("1P0", 0, 5, 1), event("1S0", 5, 6, 1), event("1F1", 6, 9, 1)], num_stages=1) is None
    assert breakdown([], num_stages=2) is None


def test_inside_windows_every_stage_has_its_own_clock() -> None:
    events = [
        event("1P0", -9, -5, 1), event("1W1", 0, 50, 1), event("1F1", 1, 21, 1), event("1>2@1", 21, 22, 1),
        event("1S2", 22, 23, 1), event("1F2", 23, 43, 1), event("1>2@2", 43, 44, 1),
        event("2W1", 0, 40, 2), event("2F1", 22, 32, 2), event("2W2", 44, 60, 2), event("2F2", 45, 55, 2),
        event("0W1", 0, 60), event("0F1", 0, 6),
    ]  # fmt: skip
    parts = breakdown(events, num_stages=2)
    assert parts is not None
    assert parts == pytest.approx(
        {"compute": (20 + 10) / 2, "wait": (7 + 36) / 4, "transfer": 2 / 4, "sync": 1 / 4, "scheduler": 4 / 4}
    )
    assert tuple(parts) == PHASES
