"""When requests are submitted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipedec.bench.load.arrivals import AtTimes, Pattern
from pipedec.core import UserError


def test_a_fixed_number_is_always_unfinished() -> None:
    arrivals = Pattern(concurrency=3).arrivals(5, seed=0)
    assert arrivals.due(0.0, 0) == [0.0] * 3 and arrivals.left == 2
    assert arrivals.due(1.0, 3) == []
    assert arrivals.next_seconds() is None, "that depends on ends"
    assert arrivals.due(2.0, 2) == [2.0]
    assert arrivals.due(3.0, 0) == [3.0] and arrivals.left == 0


def test_a_rate_is_a_poisson_process_of_its_seed() -> None:
    def times(seed: int) -> list[float]:
        return Pattern(rate=4.0).arrivals(2000, seed).due(float("inf"), 0)

    ascending = times(1)
    assert ascending[0] == 0.0 and ascending == sorted(ascending) and times(1) == ascending != times(2)
    gaps = [after - before for before, after in pairwise(ascending)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.1)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04), "exponential gaps"


def test_given_times_do_not_wait_for_ends() -> None:
    arrivals = AtTimes([0.0, 0.0, 2.5])
    assert arrivals.due(0.0, 7) == [0.0, 0.0] and arrivals.next_seconds() == 2.5
    assert arrivals.due(2.4, 0) == [] and arrivals.due(3.0, 0) == [2.5] and arrivals.next_seconds() is None


@pytest.mark.parametrize(
    ("pattern", "message"), [({"concurrency": 0}, "at least 1"), ({"rate": 0.0}, "above 0"), ({"rate": -1}, "above 0")]
)
def test_impossible_loads_are_refused(pattern: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pattern(**pattern)  # type: ignore[arg-type]
