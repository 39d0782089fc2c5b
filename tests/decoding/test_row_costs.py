"""The time of a timestep by its rows, against functions that are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

import pytest

from pipedec.decoding.row_costs import RowCosts


def measured(seconds: Callable[[int], float], rows: list[int], noise: float = 0.0) -> RowCosts:
    chooser, costs = random.Random(1), RowCosts()
    for _ in range(100):
        for each in rows:
            costs.record(each, seconds(each) * (1 + noise * chooser.uniform(-1, 1)))
    return costs


def test_nothing_measured_costs_nothing() -> None:
    assert RowCosts().seconds(5) is None and RowCosts().added(5) == 0


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_is_linear_between_measurements_and_flat_outside(noise: float) -> None:
    costs = measured(lambda rows: 1 + rows / 32, [1, 16, 64], noise)
    for rows in (1, 5, 16, 40, 64):
        assert costs.seconds(rows) == pytest.approx(1 + rows / 32, rel=0.01 + noise / 2)
    assert costs.seconds(500) == costs.seconds(64) and costs.added(40) > 0
    assert costs.added(20) == pytest.approx(1 / 52, rel=0.01 + 4 * noise)


def test_it_never_falls() -> None:
    """More rows do not make a timestep shorter: what looks like it is noise."""
    costs = measured(lambda rows: 2.0 if rows < 8 else 1.0, [1, 4, 16, 64])
    seconds = [costs.seconds(rows) for rows in range(1, 70)]
    assert seconds == sorted(seconds, key=lambda each: each or 0) and costs.added(3) >= 0


def test_one_long_timestep_changes_little() -> None:
    costs = measured(lambda rows: 1.0, [1, 64])
    costs.record(64, 50.0)
    assert costs.seconds(64) == pytest.approx(1.15)


def test_old_measurements_are_forgotten() -> None:
    costs = measured(lambda rows: rows, [64])
    for _ in range(5000):
        costs.record(1, 1.0)
    assert costs.seconds(64) == 1.0


def test_a_price_is_a_mean_over_what_is_computed_by_the_dozen() -> None:
    """16 rows take as long as one, and 17 as long as 32: the next row after 16 does not cost 15 of them."""
    costs = measured(lambda rows: 1.0 + -(-rows // 16), [1, 16, 17, 32, 64])
    assert costs.added(16) == pytest.approx(costs.added(20), rel=0.3) and costs.added(16) < 0.05


def test_a_step_that_noise_has_made_is_no_price() -> None:
    """What rows up to 24 take was measured too long: the next row is not dear before, nor is it free behind."""
    costs = measured(lambda rows: 1.1 if rows == 24 else 1 + rows / 640, [1, 16, 24, 32, 64])
    assert {round(costs.added(rows), 4) for rows in (10, 20, 30)} == {0.0015}


def test_rows_are_tried_from_few_to_many() -> None:
    costs = RowCosts()
    for most in (32, 64, 128):
        assert costs.added(most - 1) == 0 and costs.added(most) == inf
        costs.record(256, 1.0)  # as of a prompt
        costs.record(most // 2, 1.0)
        assert costs.added(most) == inf
        costs.record(most, 1.0)
    assert costs.added(200) == 0, "256 rows were measured"
