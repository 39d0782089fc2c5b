"""How requests share the rows of a timestep: prompts beside answers, priorities, and limits that requests set themselves."""

from __future__ import annotations

import random
from collections.abc import Iterable

from support.simulation import KnowingDrafter, begin, entered, judge, proposed, scheduler_of

from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import Verdict
from pipedec.decoding import Scheduler, TimestepTiming
from pipedec.methods import BestFirstOptions, BitaOptions, StaticTreeOptions

KNEE = 16


def arrive(
    scheduler: Scheduler,
    number: int,
    prompt: int = 1,
    priority: int = 0,
    method: str = "pp",
    options: MethodOptions | None = None,
) -> None:  # fmt: skip
    request = TokenizedRequest(number, tuple(range(prompt)), SamplingParams(max_tokens=50), method, options, priority=priority)
    begin(scheduler, request)


def accept(scheduler: Scheduler, numbers: Iterable[int]) -> None:
    """The target has said a token of each: a root is about to enter."""
    for number in numbers:
        judge(scheduler, number, Verdict.of(5))


def running(scheduler: Scheduler, count: int) -> Scheduler:
    """With requests that all have a root to enter, of which those with higher numbers come first."""
    for number in range(count):
        arrive(scheduler, number, priority=-number)
    waiting = set(range(count))
    while waiting:
        waiting -= set(entered(scheduler))
    accept(scheduler, range(count))
    return scheduler


def drafted(width: int, *others: int, knee: int = KNEE) -> dict[int, int]:
    """The rows of request 0, which limits itself to ``width``, and of others when all have been drafted for."""
    drafter = KnowingDrafter(random.Random(1))
    scheduler = scheduler_of(2, drafter, knee=knee)
    for number in (0, *others):
        drafter.answers[number] = []
        options = BestFirstOptions(width=None if number else width, forwards=8)
        arrive(scheduler, number, 8 // (1 + len(others)), method="pipedec-bestfirst", options=options)
    assert sum(entered(scheduler).values()) == 8
    assert not entered(scheduler)
    scheduler.controller.record_timestep(TimestepTiming(1.0, 0.5, ()))  # with 8 rows, so 16 are tried
    scheduler.draft()
    accept(scheduler, (0, *others))
    scheduler.draft()
    return entered(scheduler)


def test_an_eighth_of_the_room_is_the_prompts_however_many_roots_wait() -> None:
    scheduler = running(scheduler_of(2, knee=KNEE), 3 * KNEE)
    arrive(scheduler, 99, 100, priority=1)
    for _ in range(2):
        rows = entered(scheduler)
        assert rows.pop(99) == KNEE // 8 and len(rows) == KNEE - KNEE // 8


def test_who_has_waited_longest_comes_first() -> None:
    scheduler = scheduler_of(2, knee=1)
    for number in range(3):
        arrive(scheduler, number)
    turns = []
    for _ in range(9):
        turns += entered(scheduler)
        accept(scheduler, turns[-1:])
    assert turns == [0, 1, 2] * 3


def test_a_prompt_goes_before_steps_that_fill_the_timestep_once_it_has_waited_longer() -> None:
    drafter = KnowingDrafter(random.Random(1))
    scheduler = scheduler_of(2, drafter, knee=KNEE)
    for number in range(2):
        drafter.answers[number] = []
        arrive(scheduler, number, method="stpp", options=StaticTreeOptions(16, 4, 3))
    entered(scheduler)
    scheduler.draft()
    accept(scheduler, range(2))
    arrive(scheduler, 2, 40)
    turns = []
    for _ in range(4):
        scheduler.draft()
        rows = entered(scheduler)
        accept(scheduler, rows.keys() - {2})
        turns += [(number, count > KNEE) for number, count in rows.items()]
    assert turns == [(0, True), (1, True), (2, False), (0, True)]


def test_lower_priorities_come_first_in_every_class_of_rows() -> None:
    scheduler = running(scheduler_of(2, knee=4), 6)
    for _ in range(2):
        assert set(entered(scheduler)) == {5, 4, 3, 2}
        accept(scheduler, (5, 4, 3, 2))
    assert set(entered(scheduler)) == {5, 4, 3, 2}, "also before those that have waited longer"
    assert set(entered(scheduler)) == {1, 0}
    arrive(scheduler, 10, 20, priority=7)
    arrive(scheduler, 11, 20, priority=6)
    assert entered(scheduler) == {11: 4}


def test_a_requests_own_limit_binds_it_and_not_the_others() -> None:
    rows = drafted(3, 1)
    assert rows[0] == 3 and rows[1] > 3


def test_alone_a_request_may_set_more_rows_than_there_is_room_for_in_company() -> None:
    assert drafted(3 * KNEE) == {0: 3 * KNEE}
    assert sum(drafted(3 * KNEE, 1).values()) == KNEE


def test_the_last_token_of_a_prompt_enters_with_the_masks_behind_it() -> None:
    scheduler = scheduler_of(2, trained_masks=2, knee=8)
    arrive(scheduler, 0, 7, method="bita", options=BitaOptions(depth=2))
    steps = [proposed(scheduler)[0].token_ids.tolist() for _ in range(2)]
    assert steps == [[0, 1, 2, 3, 4, 5], [6, -1, -2]], "there was room for the last token alone"
