"""What a client makes of a run that loses ranks, or of a Redis that is away: a pause, and nothing twice."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock
from support.processes import wait_until
from support.whole_scheduler import FreshRun

from pipedec.client.client import Client
from pipedec.client.reply import Delta, Reply
from pipedec.client.session import LOOK_SECONDS, OUTAGE_SECONDS
from pipedec.config import Settings
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, RankLost, SchedulerInterrupted, SchedulerLost, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.messages.events import (
    CompletionEvent,
    LogprobsEvent,
    PromptLogprobsEvent,
    ResumedEvent,
    ThreadNews,
    TokensEvent,
)
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.scheduler.calls import Call
from pipedec.topology import Topology

pytestmark = pytest.mark.usefixtures("redis_client")

T = TypeVar("T")
DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,),), ((0, 1),))
REQUEST = PromptRequest("Hello", sampling=SamplingParams(1.0, max_tokens=4))
TEXT = "abcdefghij"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Recovering(FreshRun):
    """A run whose ranks are replaced, on a Redis that can be away."""

    def __init__(self) -> None:
        super().__init__(Topology.even(1, 1))
        self.trouble: SchedulerLost | None = None
        self.times = 0  # that it is away
        self.open(DESCRIPTION, recovers=True)

    def ask(self, call: Call[T]) -> T:
        if self.times > 0 and self.trouble is not None:
            self.times -= 1
            raise self.trouble
        return super().ask(call)


def said(first: int, last: int) -> TokensEvent:
    return TokensEvent([*range(first, last)], TEXT[first:last], None, first, first)


def done() -> CompletionEvent:
    return CompletionEvent(Completion("pp", 1, 3, [*range(len(TEXT))], TEXT, "length"))


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10))))
def test_tokens_and_text_are_told_once(pieces: list[tuple[int, int]]) -> None:
    """Whatever is said again, with whatever pieces."""
    deltas = list[Delta]()
    reply, known = Reply(0, deltas.append), 0
    for first, last in [*pieces, (0, 10)]:
        if min(first, known) < last:
            reply.take("0", said(min(first, known), last))
            known = max(known, last)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [token for delta in deltas for token in delta.token_ids] == [*range(10)]
    assert sum(count for _, count in reply.arrivals.events) == 10


def test_news_of_threads_are_told_once() -> None:
    deltas = list[Delta]()
    reply = Reply(0, deltas.append)
    for news in (
        ThreadNews((0,), "ab", "running", 2),
        ThreadNews((0,), "a", "running", 1),
        ThreadNews((0,), "abc", "running", 3),
        ThreadNews((0,), "d", "ended", 4, 3),
    ):
        reply.take("0", TokensEvent([], "", [news]))
    told = [news for delta in deltas for news in delta.threads]
    assert [(news.text, news.tokens, news.state) for news in told] == [
        ("ab", 2, "running"),
        ("c", 3, "running"),
        ("d", 4, "ended"),
    ]


def test_log_probabilities_are_kept_by_ordinal_and_counted_from_what_the_request_has_said() -> None:
    deltas = list[Delta]()
    reply = Reply(0, deltas.append)
    for index, values in ((2, (-1.0, -2.0)), (3, (-2.5, -3.0))):
        reply.take("0", LogprobsEvent([[(7, value)] for value in values], index))
    reply.take("0", PromptLogprobsEvent([[(1, -1.0)], [(2, -1.0)]], 0))
    reply.take("0", PromptLogprobsEvent([[(2, -1.5)], [(3, -1.0)]], 1))
    reply.take("0", CompletionEvent(Completion("pp", 1, 4, [7] * 5, "", "length", prompt_logprobs=[None])))
    completion = reply.completed()
    assert completion.logprobs == [{}, {}, {7: -1.0}, {7: -2.5}, {7: -3.0}]
    assert completion.prompt_logprobs == [None, {1: -1.0}, {2: -1.5}, {3: -1.0}]
    assert [row for delta in deltas for row in delta.logprobs] == [{7: -1.0}, {7: -2.0}, {7: -3.0}]


def test_a_seed_is_chosen_before_a_request_is_submitted() -> None:
    scheduler = Recovering()
    client = Client(scheduler)
    client.submit(REQUEST)
    sent = PromptRequest.from_json(scheduler.pop_requests(1).requests[0].text)
    assert sent.sampling.seed is not None
    with pytest.raises(UserError, match="give its seed"):
        client.submit(PromptRequest("Hello", sampling=SamplingParams(1.0), resume=(5,)))


def test_an_answer_pauses_while_the_run_recovers(clock: Clock) -> None:
    scheduler, paused = Recovering(), list[bool]()
    client = Client(scheduler, lambda: None)
    reply = client.submit(REQUEST, on_pause=paused.append)
    scheduler.pop_requests(1)
    scheduler.publish(reply.number, said(0, 3))
    client.read(0)
    scheduler.renew_lease(1)
    scheduler.recover([1], "rank 1 died")
    clock.advance(LOOK_SECONDS)
    client.read(0)
    assert paused == [True] and reply.is_paused
    scheduler.enter(1)
    scheduler.open(DESCRIPTION, recovers=True)
    scheduler.publish(reply.number, ResumedEvent(1), said(2, 10))
    scheduler.complete(reply.number, done())
    client.read(0)
    assert paused == [True, False] and reply.completed().metrics.recoveries == 1


def test_a_rank_that_nobody_replaces_is_lost() -> None:
    scheduler = FreshRun(Topology.even(1, 1), lease_ms=1)
    scheduler.open(DESCRIPTION)
    scheduler.renew_lease(1)
    assert wait_until(lambda: scheduler.status().expired == (1,), 5)
    client = Client(scheduler)
    client.submit(REQUEST)
    with pytest.raises(RankLost, match="rank 1"):
        client.read(0)


@pytest.mark.failure_case("R4")
def test_readers_of_a_redis_that_has_lost_the_run_learn_what_to_do(clock: Clock) -> None:
    scheduler = Recovering()
    client = Client(scheduler, lambda: None)
    client.submit(REQUEST)
    client.read(0)
    scheduler.clear()
    clock.advance(LOOK_SECONDS)
    with pytest.raises(RankLost, match=r"or its Redis lost its data \(set appendonly yes there\)$"):
        client.read(0)
    with pytest.raises(UserError, match="the run is not up"):
        client.submit(REQUEST)


@pytest.mark.parametrize("trouble", [SchedulerLost("cannot reach Redis"), SchedulerInterrupted("the connection failed")])
@pytest.mark.failure_case("R5")
def test_a_redis_that_is_away_for_a_while_is_borne(trouble: SchedulerLost) -> None:
    scheduler = Recovering()
    client = Client(scheduler, lambda: None)
    reply = client.submit(REQUEST)
    client.read(0)
    scheduler.trouble, scheduler.times = trouble, 3
    for _ in range(3):
        assert client.read(0) == []
    assert reply.is_paused
    scheduler.pop_requests(1)
    scheduler.complete(reply.number, said(0, 10), done())
    assert client.read(0) == [reply] and reply.completed().text == TEXT


def test_a_redis_that_stays_away_is_lost(clock: Clock) -> None:
    scheduler = Recovering()
    client = Client(scheduler, lambda: None)
    client.submit(REQUEST)
    client.read(0)
    scheduler.trouble, scheduler.times = SchedulerLost("cannot reach Redis"), 1000
    with pytest.raises(PipedecError, match="cannot reach Redis"):
        while scheduler.times:
            client.read(0)
            clock.advance(OUTAGE_SECONDS / 4)
    assert 0 < scheduler.times < 999
