"""The protocol of both clients, without Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.clock import Clock

from pipedec.client.session import LOOK_SECONDS, OUTAGE_SECONDS, Session
from pipedec.core.completion import Completion
from pipedec.core.errors import OutOfDescriptors, PipedecError, QueueFull, RankLost, SchedulerBusy, SchedulerInterrupted
from pipedec.messages.events import AbortEvent, CompletionEvent, TokensEvent
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import RunStatus
from pipedec.scheduler.calls import Call, Heard
from pipedec.scheduler.keys import Keys
from pipedec.topology import Topology

UP = RunStatus("up", 1, 0, (), (0, 1), recovers=True)
AWAY = SchedulerInterrupted("cannot reach Redis")
REQUEST = PromptRequest("Hello")


class Scripted:
    """A connection to a Redis that gives these results in turn, or fails with them."""

    def __init__(self, *results: object) -> None:
        self.results = [*results]
        self.asked: list[Call[Any]] = []
        self.pauses = 0

    async def ask(self, call: Call[Any]) -> Any:
        self.asked.append(call)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def pause(self, seconds: float) -> None:
        self.pauses += 1


def session_on(redis: Scripted, check: Any = lambda: None, silence_seconds: float = 600.0, owner: str = "") -> Session:
    return Session(redis, Keys("run"), Topology.even(1, 1), check, silence_seconds, owner)


def heard(*events: tuple[int, str, Any], woken: str = "0") -> Heard:
    return Heard([*events], woken)


def submitted(redis: Scripted, session: Session) -> list[str]:
    """Submit a request; returns the texts of its answer, which grow."""
    texts = list[str]()
    redis.results.insert(0, 7)
    asyncio.run(session.submit(REQUEST, lambda delta: texts.append(delta.text)))
    return texts


def test_a_submission_that_may_not_have_arrived_is_repeated_as_it_was() -> None:
    redis = Scripted(UP, heard(), AWAY, AWAY, 7)
    session = session_on(redis)
    asyncio.run(session.turn(0))
    reply = asyncio.run(session.submit(REQUEST, lambda delta: None))
    first, *others = redis.asked[2:]
    assert [call.words for call in others] == [first.words] * 2 and redis.pauses == 2
    assert session.open == {7: reply} and reply.operation in first.words[3 + 7]


@pytest.mark.parametrize("refusal", [QueueFull("the cluster is full"), SchedulerBusy("no memory left"), AWAY])
def test_a_refusal_is_raised_at_once_and_so_is_an_outage_of_a_run_that_may_not_recover(refusal: PipedecError) -> None:
    redis = Scripted(refusal)
    with pytest.raises(type(refusal)):
        asyncio.run(session_on(redis).submit(REQUEST, lambda delta: None))
    assert len(redis.asked) == 1


def test_a_turn_reads_on_where_the_last_has_ended_and_returns_what_has_ended() -> None:
    done = CompletionEvent(Completion("pp", 1, 1, [5], "a"))
    redis = Scripted(UP, heard((7, "1-1", TokensEvent([5], "a")), woken="9-9"), heard((7, "2-1", done)))
    session = session_on(redis, owner="front")
    texts = submitted(redis, session)
    assert asyncio.run(session.turn(0)) == [] and texts == ["a"]
    [reply] = asyncio.run(session.turn(0))
    assert reply.completed().text == "a" and session.open == {}
    *_, first, second = [call.words for call in redis.asked if call.name == "XREAD"]
    assert (first[-2:], second[-2:]) == (["0", "0"], ["9-9", "1-1"])


def test_redis_may_be_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    redis, clock = Scripted(UP, heard(), *[AWAY] * 99), Clock(monkeypatch)
    session = session_on(redis)
    submitted(redis, session)
    asyncio.run(session.turn(0))
    assert not session.open[7].is_paused
    asyncio.run(session.turn(0))
    assert session.open[7].is_paused and redis.pauses == 1
    clock.advance(OUTAGE_SECONDS + 1)
    with pytest.raises(SchedulerInterrupted):
        asyncio.run(session.turn(0))


@pytest.mark.failure_case("K9")
def test_a_lack_of_descriptors_is_no_outage() -> None:
    redis = Scripted(OutOfDescriptors("too many open files"))
    assert asyncio.run(session_on(redis).turn(0)) == [] and redis.pauses == 1


def test_a_silent_answer_is_given_up_but_not_one_that_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    others = RunStatus("up", 2, 1, (3,), (0, 1), recovers=True)
    redis, clock = Scripted(UP, heard(), others, heard(), UP), Clock(monkeypatch)
    session = session_on(redis, silence_seconds=10 * LOOK_SECONDS)
    submitted(redis, session)
    for _ in range(2):
        asyncio.run(session.turn(0))
        clock.advance(11 * LOOK_SECONDS)
    with pytest.raises(RankLost, match="no event has arrived for 20 s"):
        asyncio.run(session.turn(0))


def test_the_supervisor_names_the_cause_of_an_abort() -> None:
    def check() -> None:
        if len(redis.asked) > 2:
            raise RankLost("rank 1 was killed by SIGKILL")

    redis = Scripted(UP, heard((7, "1-1", AbortEvent("rank 2 lost another"))))
    session = session_on(redis, check)
    submitted(redis, session)
    with pytest.raises(RankLost, match="SIGKILL"):
        asyncio.run(session.turn(0))
