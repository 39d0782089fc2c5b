"""The time of a timestep by its rows, against functions that are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf

import pytest

from pipedec.decoding.controller import RowCosts


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
    costs = measured(lambda rows: 1 + rows / 32, [1, 8, 16, 32, 64], noise)
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


def test_rows_are_tried_from_few_to_many() -> None:
    costs = RowCosts()
    for most in (8, 16, 32, 64, 128):
        assert costs.added(most - 1) == 0 and costs.added(most) == inf
        costs.record(most // 2, 1.0)
        costs.record(256, 1.0)  # as of a prompt
        assert costs.added(most) == inf
        costs.record(most, 1.0)
    assert costs.added(200) == 0, "256 rows were measured"


def test_many_rows_that_are_certain_are_the_first_to_be_measured() -> None:
    costs = RowCosts()
    costs.record(33, 1.0)
    assert costs.added(127) == 0 and costs.added(128) == inf
