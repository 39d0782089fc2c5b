"""The decode loop and its pool alone; most with a pipeline and a batch that record what they are asked to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.decoding import Batch, TimestepTiming
from pipedec.engine.loop import (
    Advanced,
    Drained,
    Interrupted,
    Record,
    RequestClosed,
    RequestEnded,
    RequestOpened,
    RequestPool,
    Timestep,
    Waits,
    decode,
)
from pipedec.faults import RequestFaults
from pipedec.kv import KVManager
from pipedec.threads import Sequence

TIMING = TimestepTiming(0.01, 0.005, (0.001,))
Results = tuple[RequestUpdate, ...]


class FakeRequest:
    hits, misses = 3, 2


class Recorded:
    """Pipeline and batch in one. ``results`` are those of every timestep.

    Attributes:
        room: how many requests have memory at the same time.
        short: requests that must be paused before the next timestep.
    """

    passage = 1

    def __init__(self, *results: Results, filling: int = 0, room: int = 9) -> None:
        self.calls: list[Any] = []
        self.faults = RequestFaults("rank 0")
        self.requests: defaultdict[int, FakeRequest] = defaultdict(FakeRequest)
        self.room = room
        self.short: list[int] = []
        self._results = list(results)
        self._filling = filling
        self._waiting: list[int] = []
        self._open: list[int] = []

    def open(self, request: TokenizedRequest, new_sequence: Any) -> None:
        self._waiting.append(request.number)

    def to_pause(self) -> list[int]:
        short, self.short = self.short, []
        return short

    def pause(self, number: int) -> None:
        self._open.remove(number)
        self.calls.append(("pause", number))

    def closed(self, number: int) -> None:
        self._waiting.append(number)
        self.calls.append(("closed", number))

    def close(self, what: Any) -> None:
        if isinstance(what, int):
            for numbers in (self._open, self._waiting):
                if what in numbers:
                    numbers.remove(what)
        self.calls.append(("close", what))

    def advance(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        self.calls.append(("advance", number, [(one.number, one.opening, one.verdict) for one in entering.updates]))
        meanwhile()
        return Timestep(number, entering, self._results.pop(0), TIMING if number > self._filling else None)

    def apply(self, number: int, verdict: Verdict) -> None:
        self.calls.append(("apply", number, verdict))
        if verdict.finished:
            self._open.remove(number)

    def propose(self) -> dict[int, RequestUpdate]:
        count = self.room - len(self._open)
        opened, self._waiting = self._waiting[:count], self._waiting[count:]
        self._open += opened
        return {number: RequestUpdate(number, OPENING) for number in opened}

    def draft(self) -> None:
        self.calls.append("draft")

    def observe(self, timing: TimestepTiming) -> None:
        self.calls.append("observe")

    def interrupt(self) -> None:
        self.calls.append("interrupt")


Heard = dict[int, list[Any]]


def short(record: Record) -> Any:
    """A record in few characters."""
    match record:
        case Waits():
            return "waits"
        case RequestOpened():
            assert record.opening is OPENING and record.request.number == record.number and record.is_prefilling
            return "opened"
        case Advanced():
            return record.verdict
        case RequestEnded():
            assert (record.hits, record.misses, record.failure) == (3, 2, None)
            return record.reason
        case RequestClosed():
            return "closed"
        case Interrupted():
            return "interrupted"
    raise AssertionError(record)


def pool_of(recorded: Recorded, *numbers: int, **cuts: Verdict) -> tuple[RequestPool, Heard]:
    """A pool of requests that cuts verdicts on the token of a name, and what it emits of each request."""

    def take(result: RequestUpdate) -> Verdict:
        assert result.verdict is not None
        return cuts.get(f"at_{result.verdict.tokens[0]}", result.verdict)

    def note(record: Record) -> None:
        if not isinstance(record, Timestep | Drained):
            heard.setdefault(record.number, []).append(short(record))

    heard: Heard = {}
    pool = RequestPool(recorded, take, [note])  # type: ignore[arg-type]
    for number in numbers:
        pool.open(TokenizedRequest(number, (1, 2)), None)  # type: ignore[arg-type]
    return pool, heard


def says(number: int, *tokens: int, finished: str | None = None) -> RequestUpdate:
    return RequestUpdate(number, verdict=Verdict.of(*tokens, finished=finished))


OPENING = NewRequest(2, SamplingParams())
FIRST, LAST = Verdict.of(3), Verdict.of(4, 5, finished="stop")


def test_a_timestep_is_propose_advance_accept_apply() -> None:
    recorded = Recorded((says(0, 3),), (), (says(0, 4, 5, finished="stop"),))
    pool, heard = pool_of(recorded, 0)
    assert list(decode(pool, recorded)) == [(0, FIRST), (0, LAST)]  # type: ignore[arg-type]
    assert recorded.calls == [
        ("advance", 1, [(0, OPENING, None)]), "draft", "observe",
        ("apply", 0, FIRST),
        ("advance", 2, [(0, None, FIRST)]), "draft", "observe",
        ("advance", 3, []), "draft", "observe",
        ("apply", 0, LAST),
        ("close", StageMessage((RequestUpdate(0, verdict=LAST),))),
    ]  # fmt: skip
    assert heard[0] == ["opened", FIRST, LAST, "stop", "closed"]


def test_what_is_cut_is_what_method_and_pipeline_get() -> None:
    cut = Verdict.of(4, finished="stop")
    recorded = Recorded((says(0, 3),), (says(0, 4, 5),))
    pool, _ = pool_of(recorded, 0, at_4=cut)
    assert [verdict for _, verdict in decode(pool, recorded)] == [FIRST, cut]  # type: ignore[arg-type]
    assert recorded.calls[-2:] == [("apply", 0, cut), ("close", StageMessage((RequestUpdate(0, verdict=cut),)))]


def test_late_results_of_an_ended_request_are_void_and_its_echo_closes_it() -> None:
    recorded = Recorded(
        (says(0, 3, finished="length"), says(1, 5)), (says(0, 9, 9),), (says(0, finished="length"), says(1, 6, finished="stop"))
    )
    pool, heard = pool_of(recorded, 0, 1)
    verdicts = list(decode(pool, recorded))  # type: ignore[arg-type]
    assert [number for number, _ in verdicts] == [0, 1, 1]
    assert heard[0] == ["opened", Verdict.of(3, finished="length"), "length", "closed"]
    assert heard[1][-2:] == ["stop", "closed"]


def test_a_request_is_cancelled_with_what_it_has_accepted() -> None:
    """The stages get the accepted tokens and the end in one verdict."""
    recorded = Recorded((says(0, 3), says(1, 4)), (says(1, 6, finished="stop"),))
    pool, heard = pool_of(recorded, 0, 1)
    verdicts = decode(pool, recorded)  # type: ignore[arg-type]
    assert [next(verdicts)[0], next(verdicts)[0]] == [0, 1]
    pool.cancel(0)
    pool.cancel(0)  # nothing happens twice
    assert [number for number, _ in verdicts] == [1]
    cancelled = Verdict(FIRST.accepted, "cancelled")
    assert ("advance", 2, [(0, None, cancelled), (1, None, Verdict.of(4))]) in recorded.calls
    assert heard[0] == ["opened", FIRST, "cancelled", "closed"]


def test_a_request_that_is_cancelled_before_it_enters_is_never_opened() -> None:
    recorded = Recorded()
    pool, heard = pool_of(recorded, 0)
    pool.cancel(0)
    assert list(decode(pool, recorded)) == []  # type: ignore[arg-type]
    assert recorded.calls == [("close", 0), ("close", StageMessage())]
    assert heard[0] == ["cancelled", "closed"]


PAUSED, ECHO = Verdict(FIRST.accepted, "paused"), says(0, finished="paused")
REST = Verdict.of(9, finished="length")


def test_a_paused_request_goes_on_once_every_stage_has_closed_its_lane() -> None:
    """What still comes out of the old lane is void, and will be said again."""
    recorded = Recorded((says(0, 3),), (says(0, 7, 7),), (ECHO,), (RequestUpdate(0, verdict=REST),))
    pool, heard = pool_of(recorded, 0)
    verdicts = decode(pool, recorded)  # type: ignore[arg-type]
    assert next(verdicts) == (0, FIRST)
    recorded.short = [0]
    assert list(verdicts) == [(0, REST)]
    assert [call for call in recorded.calls if call not in ("draft", "observe")] == [
        ("advance", 1, [(0, OPENING, None)]), ("apply", 0, FIRST),
        ("pause", 0), ("advance", 2, [(0, None, PAUSED)]),
        ("advance", 3, []), ("closed", 0),
        ("advance", 4, [(0, OPENING, None)]), ("apply", 0, REST),
        ("close", StageMessage((RequestUpdate(0, verdict=REST),))),
    ]  # fmt: skip
    assert heard[0] == ["opened", FIRST, "waits", "opened", REST, "length", "closed"]


def test_a_request_without_memory_waits_and_hears_so_once() -> None:
    recorded = Recorded((), (says(0, 3, finished="length"),), (says(1, 5, finished="length"),), room=1)
    pool, heard = pool_of(recorded, 0, 1)
    assert [number for number, _ in decode(pool, recorded)] == [0, 1]  # type: ignore[arg-type]
    assert heard[1] == ["waits", "opened", Verdict.of(5, finished="length"), "length", "closed"]
    assert ("pause", 1) not in recorded.calls


CANCELLED = says(0, finished="cancelled")


@pytest.mark.parametrize("echoes", [((), (ECHO,), (CANCELLED,)), ((ECHO,), (), (CANCELLED,))], ids=["closing", "closed"])
def test_a_paused_request_is_cancelled(echoes: tuple[Results, ...]) -> None:
    """The stages are told, so that they report what they have to say of it; none of its echoes is taken for another's."""
    recorded = Recorded((says(0, 3), says(1, 4)), *echoes, (says(1, 6, finished="stop"),))
    pool, heard = pool_of(recorded, 0, 1)
    timesteps = iter(range(1, 9))

    def admit() -> None:
        timestep = next(timesteps)
        if timestep == 2:
            recorded.short = [0]
        elif timestep == 3:
            pool.cancel(0)

    assert [number for number, _ in decode(pool, recorded, admit)] == [0, 1, 1]  # type: ignore[arg-type]
    assert ("advance", 3, [(0, None, Verdict((), "cancelled"))]) in recorded.calls
    assert heard[0] == ["opened", FIRST, "waits", "cancelled", "closed"]
    assert recorded.calls.count(("closed", 0)) == (echoes[0] != ())


def test_records_come_in_the_order_in_which_things_happen() -> None:
    """What enters is in the record of its timestep, before the verdicts; tokens are accepted before their answer ends."""
    noted: list[Record] = []
    recorded = Recorded((says(0, 3),), (says(0, 4, finished="length"),), filling=1)
    pool, _ = pool_of(recorded, 0)
    pool.listeners.append(noted.append)
    list(decode(pool, recorded))  # type: ignore[arg-type]
    kinds = [RequestOpened, Timestep, Advanced, Timestep, Advanced, RequestEnded, RequestClosed, Drained]
    assert [type(record) for record in noted] == kinds
    assert recorded.calls.count("observe") == 1, "there is no timing before the pipeline is full"
    first = noted[1]
    assert isinstance(first, Timestep) and [update.opening for update in first.entered.updates] == [OPENING]
    assert [record.timestep for record in noted if isinstance(record, Advanced)] == [1, 2]


def test_a_listener_that_joins_late_learns_what_has_a_lane() -> None:
    recorded = Recorded((says(0, 3), says(1, 4)), (), room=2)
    pool, heard = pool_of(recorded, 0, 1, 2)
    assert pool.opened() == []
    verdicts = decode(pool, recorded)  # type: ignore[arg-type]
    next(verdicts)
    assert [(opened.number, opened.is_prefilling) for opened in pool.opened()] == [(0, False), (1, True)]
    next(verdicts)
    recorded.short, recorded.room = [0], 1
    pool.entering()
    assert [(opened.number, opened.opening) for opened in pool.opened()] == [(1, OPENING)]
    pool.interrupt()
    assert pool.opened() == []
    assert [heard[number][-1] for number in range(3)] == ["interrupted"] * 3
    pool.drop(2)
    assert heard[2] == ["waits", "interrupted", "closed"] and pool.running.keys() == {0, 1}


def test_a_cancelled_requests_memory_is_free_at_once_and_goes_to_the_next_with_the_same_message() -> None:
    prompt = tuple(range(100))
    batch = Batch(14, kv=KVManager(160, 16, shares_prefixes=False))
    noted: list[Record] = []
    pool = RequestPool(batch, listeners=[noted.append])
    for number in range(2):
        request = TokenizedRequest(number, prompt, SamplingParams(max_tokens=20), "pp")
        pool.open(request, partial(Sequence, len(prompt), (), 20))
    assert [update.number for update in pool.entering().updates] == [0], "there is memory for one"
    pool.cancel(0)
    assert (batch.kv.used_slots, noted[-1]) == (0, RequestEnded(0, "cancelled", 0, 0))
    told, begun = pool.entering().updates
    assert (told.number, told.verdict) == (0, Verdict((), "cancelled"))
    assert begun.number == 1 and begun.opening is not None and begun.step is not None
    assert pool.take(RequestUpdate(0, verdict=Verdict.of(5)), 3) is None, "a late verdict is void"
