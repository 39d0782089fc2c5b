"""How requests share the rows of a timestep: prompts beside answers, priorities, and limits that requests set themselves."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

from support.simulation import KnowingDrafter, entered, proposed

from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import Verdict
from pipedec.decoding import Batch, TimestepTiming
from pipedec.methods import BestFirstOptions, BitaOptions, StaticTreeOptions
from pipedec.threads import Sequence

KNEE = 16


def arrive(
    batch: Batch, number: int, prompt: int = 1, priority: int = 0, method: str = "pp", options: MethodOptions | None = None
) -> None:
    request = TokenizedRequest(number, tuple(range(prompt)), SamplingParams(max_tokens=50), method, options, priority=priority)
    batch.open(request, partial(Sequence, prompt, (), 50))


def accept(batch: Batch, numbers: Iterable[int]) -> None:
    """The target has said a token of each: a root is about to enter."""
    for number in numbers:
        batch.apply(number, Verdict.of(5))


def running(batch: Batch, count: int) -> Batch:
    """With requests that all have a root to enter, of which those with higher numbers come first."""
    for number in range(count):
        arrive(batch, number, priority=-number)
    waiting = set(range(count))
    while waiting:
        waiting -= set(entered(batch))
    accept(batch, range(count))
    return batch


def drafted(width: int, *others: int, knee: int = KNEE) -> dict[int, int]:
    """The rows of request 0, which limits itself to ``width``, and of others when all have been drafted for."""
    drafter = KnowingDrafter(random.Random(1))
    batch = Batch(2, drafter, knee=knee)
    for number in (0, *others):
        drafter.answers[number] = []
        options = BestFirstOptions(width=None if number else width, forwards=8)
        arrive(batch, number, 8 // (1 + len(others)), method="pipedec-bestfirst", options=options)
    assert sum(entered(batch).values()) == 8
    assert not entered(batch)
    batch.observe(TimestepTiming(1.0, 0.5, ()))  # with 8 rows, so 16 are tried
    batch.draft()
    accept(batch, (0, *others))
    batch.draft()
    return entered(batch)


def test_an_eighth_of_the_room_is_the_prompts_however_many_roots_wait() -> None:
    batch = running(Batch(2, knee=KNEE), 3 * KNEE)
    arrive(batch, 99, 100, priority=1)
    for _ in range(2):
        rows = entered(batch)
        assert rows.pop(99) == KNEE // 8 and len(rows) == KNEE - KNEE // 8


def test_who_has_waited_longest_comes_first() -> None:
    batch = Batch(2, knee=1)
    for number in range(3):
        arrive(batch, number)
    turns = []
    for _ in range(9):
        turns += entered(batch)
        accept(batch, turns[-1:])
    assert turns == [0, 1, 2] * 3


def test_a_prompt_goes_before_steps_that_fill_the_timestep_once_it_has_waited_longer() -> None:
    drafter = KnowingDrafter(random.Random(1))
    batch = Batch(2, drafter, knee=KNEE)
    for number in range(2):
        drafter.answers[number] = []
        arrive(batch, number, method="stpp", options=StaticTreeOptions(16, 4, 3))
    entered(batch)
    batch.draft()
    accept(batch, range(2))
    arrive(batch, 2, 40)
    turns = []
    for _ in range(4):
        batch.draft()
        rows = entered(batch)
        accept(batch, rows.keys() - {2})
        turns += [(number, count > KNEE) for number, count in rows.items()]
    assert turns == [(0, True), (1, True), (2, False), (0, True)]


def test_lower_priorities_come_first_in_every_class_of_rows() -> None:
    batch = running(Batch(2, knee=4), 6)
    for _ in range(2):
        assert set(entered(batch)) == {5, 4, 3, 2}
        accept(batch, (5, 4, 3, 2))
    assert set(entered(batch)) == {5, 4, 3, 2}, "also before those that have waited longer"
    assert set(entered(batch)) == {1, 0}
    arrive(batch, 10, 20, priority=7)
    arrive(batch, 11, 20, priority=6)
    assert entered(batch) == {11: 4}


def test_a_requests_own_limit_binds_it_and_not_the_others() -> None:
    rows = drafted(3, 1)
    assert rows[0] == 3 and rows[1] > 3


def test_alone_a_request_may_set_more_rows_than_there_is_room_for_in_company() -> None:
    assert drafted(3 * KNEE) == {0: 3 * KNEE}
    assert sum(drafted(3 * KNEE, 1).values()) == KNEE


def test_the_last_token_of_a_prompt_enters_with_the_masks_behind_it() -> None:
    batch = Batch(2, trained_masks=2, knee=8)
    arrive(batch, 0, 7, method="bita", options=BitaOptions(depth=2))
    steps = [proposed(batch)[0].token_ids.tolist() for _ in range(2)]
    assert steps == [[0, 1, 2, 3, 4, 5], [6, -1, -2]], "there was room for the last token alone"
