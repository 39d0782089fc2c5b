"""A scheduler with little KV memory, or whose draft model comes late: who waits, who is paused, and where it goes on."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import pytest
from support.simulation import KnowingDrafter, begin, close_lane, entered, judge, scheduler_of, updates
from support.toy_dialects import IDS, sequence_of, toy
from support.toy_structures import ToyStructure, rule_of

from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.verdict import Verdict
from pipedec.decoding import Request, Scheduler
from pipedec.families import StateCounts
from pipedec.kv import KVManager
from pipedec.methods import StaticTreeOptions
from pipedec.threads import Sequence

PROMPT = tuple(range(100))


def with_memory(capacity: int, knee: int = 16) -> Scheduler:
    return scheduler_of(2, knee=knee, kv=KVManager(capacity, 16))


def paused(scheduler: Scheduler) -> list[int]:
    """The requests whose lanes are taken before the next timestep."""
    found = updates(scheduler).items()
    return [number for number, update in found if update.verdict is not None and update.verdict.finished == "paused"]


def arrive(scheduler: Scheduler, number: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 20, priority: int = 0) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    begin(
        scheduler,
        TokenizedRequest(number, prompt, sampling, "pp", priority=priority),
        partial(Sequence, len(prompt), (), max_tokens),
    )


def test_users_who_arrive_together_find_the_prefix_of_the_first() -> None:
    """Each computes only what is its own, once the first one's prompt has entered."""
    several = with_memory(4096)
    for number in range(8):
        arrive(several, number, (*PROMPT, *[200 + number] * 3))
    rows = [entered(several) for _ in range(10)]
    assert rows[:6] == [{0: 16}] * 6
    assert rows[6] == {0: 7, 1: 7, 2: 2}, "the others know what has entered before"
    assert sum(sum(each.values()) for each in rows) == 103 + 7 * 7
    assert [several.requests[number].metrics.cached_tokens for number in range(8)] == [0, *[96] * 7]


def test_who_waits_first_begins_first() -> None:
    """A short request does not overtake a long one that waits for memory, and one of a better priority does."""
    several = with_memory(320)
    for number, prompt in enumerate((PROMPT, PROMPT[50:] * 3, (1, 2))):
        arrive(several, number, prompt)
    assert entered(several) == {0: 16}
    assert entered(several) == {0: 16}
    arrive(several, 3, (7,), priority=-1)
    assert entered(several) == {3: 1, 0: 15}
    several.cancel(0)
    assert entered(several) == {1: 16}


def test_a_request_of_a_better_priority_takes_the_memory_of_the_youngest_of_the_worst() -> None:
    several = with_memory(320)
    arrive(several, 0, priority=1)
    arrive(several, 1, PROMPT[::-1], priority=1)
    for _ in range(8):
        entered(several)
    arrive(several, 2, (5,) * 100)
    found = updates(several)
    assert found[1].verdict == Verdict((), "paused") and found[2].opening is not None
    assert paused(several) == []
    several.cancel(0)
    for _ in range(20):
        assert 1 not in entered(several), "its old lanes are not closed yet"
    close_lane(several, 1)
    update = updates(several)[1]
    assert update.opening is not None and update.opening.cached == 28, "it finds its own rows"


def test_an_answer_goes_on_behind_what_it_has_said() -> None:
    several = with_memory(4096)
    arrive(several, 0, PROMPT[:5])
    assert entered(several) == {0: 5}
    for token in (50, 51, 52):
        judge(several, 0, Verdict.of(token))
        assert entered(several) == {0: 1}
    hits, misses = several.requests[0].metrics.hits, several.requests[0].metrics.misses
    several.pause(several.requests[0])
    assert paused(several) == [0]
    judge(several, 0, Verdict.of(60))  # late: void
    close_lane(several, 0)
    update = updates(several)[0]
    assert update.opening is not None and update.opening.output_token_ids == (50, 51, 52)
    assert update.opening.cached == 7, "it finds its own rows, but for the last token's"
    assert update.step is not None and update.step.token_ids.tolist() == [52]
    judge(several, 0, Verdict.of(53))
    assert (several.requests[0].metrics.hits, several.requests[0].metrics.misses) == (hits, misses + 1)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    few = with_memory(320)
    arrive(few, 0, max_tokens=219)
    with pytest.raises(UserError, match=r"^the request needs 321 slots of KV cache \(100 for the prompt, 220 for max_"):
        arrive(few, 1, max_tokens=220)
    options = StaticTreeOptions(16, 4, 3)
    request = TokenizedRequest(2, PROMPT, SamplingParams(max_tokens=200), "stpp", options)
    with pytest.raises(UserError, match=r"but there are 320: shorten the prompt, lower max_tokens, or raise --kv-cache-memory$"):
        scheduler_of(2, object(), kv=KVManager(320)).prepare(request, partial(Sequence, 100, (), 200))  # type: ignore[arg-type]


def test_what_a_structure_forces_needs_memory_too() -> None:
    """Its chain of forced tokens enters with the row above it, or not at all: without room for it, an answer would never end."""
    one, structure = with_memory(320), ToyStructure(rule_of(range(50), range(50), seed=0))
    fits, does_not = (TokenizedRequest(0, PROMPT, SamplingParams(max_tokens=count), "pp") for count in (187, 188))
    one.prepare(fits, lambda: Sequence(100, (), 187, structure))
    one.prepare(does_not, lambda: Sequence(100, (), 188))
    with pytest.raises(UserError, match=r"^the request needs 321 slots .* 33 for rows that enter together\), but there are 320"):
        one.prepare(does_not, lambda: Sequence(100, (), 188, structure))


def opened(scheduler: Scheduler, method: str) -> Request:
    options = StaticTreeOptions() if method == "stpp" else None
    return begin(scheduler, TokenizedRequest(0, (1, 2, 3), SamplingParams(max_tokens=9), method, options))


def test_methods_do_without_a_draft_model_until_it_comes() -> None:
    scheduler = scheduler_of(2)
    with pytest.raises(UserError, match="needs a draft model"):
        opened(scheduler, "stpp")
    scheduler.resources.awaits_drafter = True
    request = opened(scheduler, "stpp")
    assert request.method.drafter is None
    scheduler.adopt(KnowingDrafter(random.Random(0)))
    assert request.method.drafter is not None, "it has no lane yet, so nothing is paused"
    assert paused(scheduler) == []


def test_a_running_request_is_paused_to_go_on_with_its_draft_model() -> None:
    scheduler = scheduler_of(2)
    scheduler.resources.awaits_drafter = True
    opened(scheduler, "pipedec-bestfirst")
    assert updates(scheduler)[0].opening is not None
    assert paused(scheduler) == []
    scheduler.adopt(KnowingDrafter(random.Random(0)))
    assert paused(scheduler) == [0] and paused(scheduler) == []


@pytest.mark.parametrize("memory", [{"states": StateCounts(2, 20)}, {"kv": KVManager(48)}], ids=["states", "slots"])
@pytest.mark.parametrize("has_lane", [True, False])
def test_a_request_whose_tree_would_be_refused_goes_on_without_the_draft_model(
    memory: dict[str, Any], has_lane: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = scheduler_of(2, **memory)
    scheduler.resources.awaits_drafter = True
    request = opened(scheduler, "stpp")
    if has_lane:
        assert updates(scheduler)[0].opening is not None
    scheduler.adopt(KnowingDrafter(random.Random(0)))
    assert paused(scheduler) == [] and request.method.drafter is None
    assert re.search("^request 0 goes on without the draft model: .* enter together", caplog.messages[0])
    request.begin()  # as after a pause
    assert request.method.drafter is None


def with_states(states: int, rows: int = 300, knee: int = 16) -> Scheduler:
    return scheduler_of(2, knee=knee, states=StateCounts(states, rows))


def test_a_request_opens_only_if_a_state_is_free() -> None:
    two = with_states(2)
    for number in range(4):
        arrive(two, number, (1, 2, 3))
    assert entered(two) == {0: 3, 1: 3} and two.num_waiting == 2
    assert entered(two) == {}
    two.cancel(0)
    assert entered(two) == {2: 3}


def test_a_request_of_a_better_priority_takes_the_state_of_the_youngest_of_the_worst() -> None:
    two = with_states(2)
    arrive(two, 0, (1, 2, 3), priority=1)
    arrive(two, 1, (4, 5, 6), priority=1)
    assert entered(two) == {0: 3, 1: 3}
    arrive(two, 2, (7, 8))
    found = updates(two)
    assert found[1].verdict == Verdict((), "paused") and found[2].opening is not None
    arrive(two, 3, (9,), priority=1)
    assert entered(two) == {} and paused(two) == []


def test_certain_rows_come_first_and_in_the_order_of_service() -> None:
    """Three answers of one row at a time, and stashes for two rows."""
    few = with_states(3, rows=2)
    for number in range(3):
        arrive(few, number, (1, 2, 3))
    assert entered(few) == {0: 3, 1: 3, 2: 3}
    for number in range(3):
        judge(few, number, Verdict.of(50))
    assert entered(few) == {0: 1, 1: 1}
    assert entered(few) == {}
    judge(few, 1, Verdict.of(51))
    assert entered(few) == {1: 1}, "the second comes before the third, which waits"
    judge(few, 0, Verdict.of(51, finished="stop"))
    assert entered(few) == {2: 1}


def drafted(scheduler: Scheduler) -> None:
    """Draft whole trees, after prompts."""
    for _ in range(4):
        scheduler.draft()


def test_rows_that_enter_together_wait_until_all_fit() -> None:
    """No younger request takes the stashes for which they wait."""
    drafter = KnowingDrafter(random.Random(0))
    drafter.answers = {0: [], 1: []}
    few = scheduler_of(2, drafter, states=StateCounts(3, 12))
    options = StaticTreeOptions(layer_rows := 4, 4, 2)
    for number in range(2):
        begin(few, TokenizedRequest(number, (1, 2, 3), SamplingParams(max_tokens=9), "stpp", options))
    arrive(few, 2, (1, 2, 3))
    assert entered(few) == {0: 3, 1: 3, 2: 3}
    for number in range(3):
        judge(few, number, Verdict.of(50))
    drafted(few)
    whole = 1 + 2 * layer_rows
    assert entered(few) == {0: whole}, "9 of 12 rows: the second's tree does not fit, and the third comes after it"
    judge(few, 0, Verdict.of(70))
    drafted(few)
    assert entered(few) == {0: whole}, "the first is served first"
    judge(few, 0, Verdict.of(70, finished="stop"))
    assert entered(few) == {1: whole, 2: 1}


def test_trees_that_can_never_fit_are_refused() -> None:
    few = scheduler_of(2, KnowingDrafter(random.Random(0)), states=StateCounts(3, 12))
    options = StaticTreeOptions(4, 4, 3)
    with pytest.raises(
        UserError, match=r"^13 rows of the request enter together, but there is memory for 12 rows of trees in rec"
    ):
        begin(few, TokenizedRequest(0, (1, 2, 3), SamplingParams(max_tokens=9), "stpp", options))


def test_threads_take_the_states_of_the_newest_requests() -> None:
    three = with_states(3)
    dialect = toy("apar", no_opening_after=())
    begin(three, TokenizedRequest(0, (1, 2, 3), SamplingParams(max_tokens=50), "pp"), lambda: sequence_of(dialect, 3, 50))
    for number in (1, 2):
        arrive(three, number, (1, 2, 3))
    assert entered(three) == {0: 3, 1: 3, 2: 3}
    for number in (1, 2):
        judge(three, number, Verdict.of(50))
    judge(three, 0, Verdict.of(IDS["a"]))
    assert set(entered(three)) == {0, 1, 2}
    judge(three, 0, Verdict.of(IDS["[Fork]"]))
    found = updates(three)
    assert found[2].verdict == Verdict((), "paused") and found[0].verdict is not None and list(found)[:2] == [2, 0]
    assert three.num_running == 2
    close_lane(three, 2)
    assert 2 not in updates(three), "the answer in two threads, and the second, have all states"
