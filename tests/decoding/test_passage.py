"""The passage on synthetic links: how many tokens per second each length gives is known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pipedec.core.limits import MAX_PASSAGE
from pipedec.decoding.controller import Controller, EnteredCounts, TimestepTiming
from pipedec.decoding.learned import NOTHING_LEARNED
from pipedec.decoding.passage import Passages

LEAST, LATENCY = 3, 0.3


def seconds_at(passage: int, work: float, ring: float = 0.15) -> float:
    """Of a timestep that takes rank 0 or a stage ``work``, with a way of ``ring`` seconds around the ring."""
    return max(work, ring / passage)


def run(passages: Passages, timesteps: int, work: float, miss: Callable[[int], float]) -> None:
    """One request, a token of which takes a timestep, or a whole passage with the probability ``miss`` of its length."""
    drawn, left = random.Random(1), 0
    for _ in range(timesteps):
        is_miss = not left and drawn.random() < miss(passages.length)
        passages.record(seconds_at(passages.length, work), 0 if left else 1, is_miss, 1)
        left = passages.length - 1 if is_miss else max(left - 1, 0)


@pytest.mark.parametrize(("work", "fills"), [(0.01, 15), (0.02, 7), (0.03, 5)])
def test_the_links_are_filled_and_no_more(work: float, fills: int) -> None:
    passages = Passages(LEAST)
    passages.fill(LATENCY)
    run(passages, 60_000, work, lambda length: 0.1)
    assert 0.7 * fills <= passages.best <= 1.4 * fills


def test_older_guesses_that_are_worth_less_shorten_it() -> None:
    passages = Passages(LEAST)
    passages.fill(LATENCY)
    run(passages, 60_000, 0.01, lambda length: min(0.08 * (length - 2), 1))
    assert passages.best <= 5


def test_links_that_are_short_against_a_timestep_leave_the_groups() -> None:
    """Also if an earlier process had longer ones, and however long it runs."""
    passages = Passages(LEAST)
    passages.fill(0.0007, learned=9)
    run(passages, 5000, 0.001, lambda length: 0.1)
    assert (passages.length, passages.best, passages.is_trying) == (LEAST, LEAST, False)


@pytest.mark.parametrize(
    ("latency", "learned", "expected"),
    [(0.3, None, 6), (0.1, None, LEAST), (0.3, 11, 11), (60.0, None, MAX_PASSAGE), (0.3, 128, 78)],
)
def test_it_begins_with_what_usual_timesteps_fill_or_an_earlier_process_has_found(
    latency: float, learned: int | None, expected: int
) -> None:
    passages = Passages(LEAST)
    passages.fill(latency, learned)
    assert expected <= passages.length <= 1.4 * expected


def test_no_longer_one_is_tried_while_work_takes_most_of_a_passage() -> None:
    passages = Passages(LEAST)
    passages.fill(0.02)
    run(passages, 5000, 0.05, lambda length: 0.0)
    assert (passages.length, passages.is_trying) == (LEAST, False)


def test_several_requests_fill_the_links_for_each_other() -> None:
    passages = Passages(LEAST)
    passages.fill(0.12)
    alone = passages.length
    passages.record(0.03, 0, 0, 5, counts=False)
    assert passages.length > alone == passages.best == LEAST
    passages.record(0.03, 0, 0, 1, counts=False)
    assert passages.length == alone


def entered(controller: Controller, fills: bool) -> int:
    """The passage of the next timestep, after one that was measured."""
    controller.record_timestep(TimestepTiming(0.02, 0.01, ()))
    controller.record_entered(EnteredCounts(1, 0, 1, fills))
    return controller.passage


def test_only_requests_that_keep_the_pipeline_full_lengthen_it() -> None:
    controller = Controller(LEAST)
    assert entered(controller, fills=True) == LEAST, "the latency is not known yet"
    controller.fill_links(LATENCY)
    longer = entered(controller, fills=True)
    assert longer > LEAST and entered(controller, fills=False) == LEAST and entered(controller, fills=True) == longer
    another = Controller(LEAST)
    another.start_from(NOTHING_LEARNED, controller.costs)
    another.fill_links(10 * LATENCY)
    assert entered(another, fills=True) == longer


def test_forwards_wait_for_a_passage_of_timesteps_in_which_it_was_full() -> None:
    controller = Controller(LEAST)
    controller.fill_links(LATENCY)
    before, found = controller.forwards, list[int]()
    for _ in range(2 * controller.full_passage - 1):
        controller.record_entered(EnteredCounts(8, 0, 1, fills=True))
        controller.record_timestep(TimestepTiming(0.1, 0.08, (0.01,) * controller.forwards))
        found.append(controller.forwards)
    assert controller.passage == controller.full_passage > LEAST
    assert found[-1] > before and set(found[:-1]) == {before}


def test_rows_cost_what_they_cost_with_this_passage() -> None:
    """In a timestep that waits for links rows are free, in one that waits for stages they are not."""
    controller = Controller(LEAST)
    controller.fill_links(LATENCY)
    for fills in (True, False) * 3:
        for rows in (4, 8, 16):
            for _ in range(60):
                controller.record_entered(EnteredCounts(rows, 0, 1, fills))
                controller.record_timestep(TimestepTiming(0.02 if fills else 0.01 + 0.002 * rows, 0.01, ()))
        assert controller.pays(10, 1e-6) is fills
