"""What a long prompt costs the requests beside it."""

from __future__ import annotations

from benchmarks.load.replayed import disturbance
from pipedec.bench.load.results import LoadOutcome, ServedRequest


def served(submitted: float, *events: tuple[float, int]) -> ServedRequest:
    return ServedRequest("set", 0, 5, submitted, events, events[-1][0])


def test_an_intruder_is_judged_by_what_the_others_take_meanwhile() -> None:
    alone = LoadOutcome((served(0.0, (1.0, 1), (2.0, 2), (3.0, 2)), served(0.0, (1.0, 1), (3.0, 1))))
    late = served(1.0, (3.0, 1))
    disturbed = LoadOutcome((served(0.0, (1.0, 1), (3.0, 2)), served(0.0, (1.0, 1), (3.5, 1)), late))
    found = disturbance(alone, disturbed)
    assert found["tpot_without_ms"] == 1000 * (2 / 4 + 2 / 1) / 2, "two seconds, four tokens and one"
    assert found["tpot_ms"] == 1000 * (2 / 2 + 2.5 / 1) / 2, (
        "the token that ends the window's last wait counts, and so does the wait"
    )
    assert (found["ttft_ms"], found["prompt_tokens"]) == (2000, 5)
