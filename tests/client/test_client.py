"""What a client makes of the events of an answer."""

from __future__ import annotations

import time
from typing import TypeVar

import pytest
from support.whole_scheduler import FreshRun

from pipedec.client.client import Client
from pipedec.client.reply import TokenArrivals
from pipedec.config import Settings
from pipedec.core.completion import Completion
from pipedec.core.errors import RankLost, UserError
from pipedec.messages.events import (
    CacheSlotsEvent,
    CancelledEvent,
    CompletionEvent,
    ErrorEvent,
    Event,
    LogprobsEvent,
    OverranEvent,
    ThreadNews,
    TokensEvent,
    TraceEvents,
)
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.scheduler.calls import Call
from pipedec.topology import Topology
from pipedec.tracing import TraceEvent

pytestmark = pytest.mark.usefixtures("redis_client")

T = TypeVar("T")
DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,),), ((0, 1),))


class Answers(FreshRun):
    """Every request is answered by the same events."""

    def __init__(self, *events: Event) -> None:
        super().__init__(Topology.even(1, 1))
        self.open(DESCRIPTION)
        self.events = events

    def ask(self, call: Call[T]) -> T:
        result = super().ask(call)
        if call.name == "submit":
            for message in self.pop_requests(1).requests:
                self.publish(message.number, *self.events)
        return result


def test_events_become_text_news_logprobs_and_metrics() -> None:
    news = [ThreadNews((), "ab", "ended", 2)]
    scheduler = Answers(
        TokensEvent([5], "a"),
        LogprobsEvent([[(5, -0.5), (7, -1.0)], [(6, -0.25)], [(9, -2.0)]]),
        TokensEvent([6], "b", news, 1, 1),
        TraceEvents([TraceEvent(1, "1F1", "dec", 3, 4)]),
        OverranEvent([2, 3]),
        CacheSlotsEvent(1, 256),
        CompletionEvent(Completion("pp", 1, 3, [5, 6], "ab", "stop")),
    )
    client, pieces, told = Client(scheduler), list[str](), list[ThreadNews]()
    reply = client.follow(PromptRequest("Hello"), pieces.append, told.extend)
    completion = reply.completed()
    assert (completion.text, pieces, told) == ("ab", ["a", "b"], news)
    assert completion.logprobs == [{5: -0.5, 7: -1.0}, {6: -0.25}], "the last stage may have sent those of further tokens"
    assert reply.trace == [TraceEvent(1, "1F1", "dec", 3, 4)] and reply.overran == {2, 3}
    assert reply.cache_slots == {1: 256}
    assert completion.metrics.ttft_seconds is not None and completion.metrics.tpot_seconds is not None
    assert scheduler.read_answer(0, "0", 0) == []


def test_logprobs_of_threads_are_in_the_order_of_the_document() -> None:
    logprobs = LogprobsEvent([[(5, -0.5)], [(6, -0.25)]])
    done = CompletionEvent(Completion("pp", 1, 3, [6, 8, 5], "ba"), [1, -1, 0])
    completion = Client(Answers(logprobs, done)).ask(PromptRequest("Hello"))
    assert completion.logprobs == [{6: -0.25}, {8: 0.0}, {5: -0.5}]


@pytest.mark.parametrize(
    ("event", "message"), [(ErrorEvent("no such method"), "no such method"), (CancelledEvent(), "cancelled before it began")]
)
def test_a_refused_request_is_an_error(event: Event, message: str) -> None:
    scheduler = Answers(event)
    with pytest.raises(UserError, match=message):
        Client(scheduler).ask(PromptRequest("Hello"))
    assert scheduler.read_answer(0, "0", 0) == []


def test_the_message_of_an_aborted_run_is_no_text_of_the_answer() -> None:
    scheduler, pieces = Answers(), list[str]()
    client = Client(scheduler)
    client.submit(PromptRequest("Hello"), pieces.append)
    scheduler.abort(1, "rank 1 went away")
    with pytest.raises(RankLost, match="rank 1 went away"):
        client.read(0)
    assert pieces == []


class OneOfEach(FreshRun):
    """Requests are answered, refused, cancelled before they begin, and answered, in turn; the queue has room for so many."""

    def __init__(self, room: int) -> None:
        super().__init__(Topology.even(1, 1))
        self.open(DESCRIPTION)
        self.room = room
        self.cancels: list[int] = []

    def ask(self, call: Call[T]) -> T:
        if call.name == "cancel":
            self.cancels.append(call.words[-2])
        if call.name != "submit":
            return super().ask(call)
        if self.room == 0:
            raise UserError("the queue is full")
        self.room -= 1
        result = super().ask(call)
        (message,) = self.pop_requests(1).requests
        number = message.number
        done = CompletionEvent(Completion("pp", 1, 3, [5, 6], "ab", "stop"))
        answered = (TokensEvent([5], f"a{number}"), TokensEvent([6], f"b{number}", None, 1, 2), done)
        self.publish(number, *(answered, (ErrorEvent("too long"),), (CancelledEvent(),))[number % 4 % 3])
        return result


def test_of_many_requests_one_that_is_refused_does_not_lose_the_others() -> None:
    scheduler, pieces, ended = OneOfEach(room=4), list[tuple[int, str]](), list[int]()
    replies = Client(scheduler).ask_all(
        [PromptRequest("Hello")] * 5, lambda index, text: pieces.append((index, text)), ended.append
    )
    assert [None if reply.error is None else str(reply.error) for reply in replies] == [
        None, "too long", "the request was cancelled before it began", None, "the queue is full",
    ]  # fmt: skip
    assert [replies[index].completed().token_ids for index in (0, 3)] == [[5, 6]] * 2
    assert pieces == [(0, "a0"), (0, "b0"), (3, "a3"), (3, "b3")]
    assert sorted(ended) == [0, 1, 2, 3, 4]
    for number in range(4):
        assert scheduler.read_answer(number, "0", 0) == [], "what was read is deleted"
    metrics = replies[3].completed().metrics
    assert metrics.ttft_seconds is not None and metrics.e2e_seconds is not None and metrics.queue_seconds is not None
    assert metrics.ttft_seconds <= metrics.e2e_seconds
    with pytest.raises(UserError, match="too long"):
        replies[1].completed()


def test_an_exception_in_a_callback_cancels_all_that_is_open() -> None:
    scheduler = OneOfEach(room=4)

    def broken(index: int, text: str) -> None:
        raise KeyboardInterrupt

    client = Client(scheduler)
    with pytest.raises(KeyboardInterrupt):
        client.ask_all([PromptRequest("Hello")] * 4, broken)
    assert scheduler.cancels == [0, 1, 2, 3]
    scheduler.room = 1
    assert client.ask(PromptRequest("Hello")).token_ids == [5, 6], "it forgets them"


def test_tpot_is_the_time_from_the_first_token_to_the_last_over_the_tokens_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    arrivals = TokenArrivals()
    arrivals.note(0)
    assert arrivals.ttft_seconds is None and arrivals.tpot_seconds is None
    now[0] = 100.5
    arrivals.note(1)
    assert arrivals.ttft_seconds == 0.5 and arrivals.tpot_seconds is None
    for now[0], tokens in ((101.0, 3), (102.0, 2), (109.0, 0)):  # the last piece is text without a token
        arrivals.note(tokens)
    assert arrivals.ttft_seconds == 0.5
    assert arrivals.tpot_seconds == pytest.approx(1.5 / 5)
