"""The decode loop and its pool alone, with a pipeline and a company that record what they are asked to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipedec.core import NO_MASKS, Envelope, Opening, Request, SamplingParams, Step, TokenLogprobs, Update, Verdict
from pipedec.decoding import RequestState, TimestepTiming
from pipedec.engine.loop import decode
from pipedec.engine.pool import Pool
from pipedec.engine.recorder import Timestep

TIMING = TimestepTiming(0.01, 0.005, (0.001,))
Results = tuple[Update, ...]


class FakeMethod:
    masks = NO_MASKS


class Recorded:
    """Pipeline and company in one. ``results`` are those of every timestep.

    Attributes:
        room: how many requests have memory at the same time.
        short: requests that must be paused before the next timestep.
    """

    def __init__(self, *results: Results, filling: int = 0, room: int = 9) -> None:
        self.calls: list[Any] = []
        self.room = room
        self.short: list[int] = []
        self._results = list(results)
        self._filling = filling
        self._waiting: list[int] = []
        self._open: list[int] = []

    def open(self, request: Request, new_sequence: Any) -> None:
        self._waiting.append(request.number)

    def state(self, number: int) -> FakeMethod:
        return FakeMethod()

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

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        self.calls.append(("advance", number, [(one.number, one.opening, one.verdict) for one in entering.updates]))
        meanwhile()
        return Timestep(number, entering, self._results.pop(0), TIMING if number > self._filling else None)

    def apply(self, number: int, verdict: Verdict) -> None:
        self.calls.append(("apply", number, verdict))
        if verdict.finished:
            self._open.remove(number)

    def propose(self) -> dict[int, Update]:
        count = self.room - len(self._open)
        opened, self._waiting = self._waiting[:count], self._waiting[count:]
        self._open += opened
        return {number: Update(number, OPENING) for number in opened}

    def draft(self) -> None:
        self.calls.append("draft")

    def observe(self, timing: TimestepTiming) -> None:
        self.calls.append("observe")


class Listening:
    """A reader that cuts the verdicts in ``cuts``."""

    def __init__(self, **cuts: Verdict) -> None:
        self.heard: list[Any] = []
        self._cuts = cuts

    def waits(self) -> None:
        self.heard.append("waits")

    def opened(self, opening: Opening) -> None:
        self.heard.append("opened")

    def entered(self, step: Step) -> None:
        self.heard.append(("entered", step))

    def scored(self, logprobs: TokenLogprobs) -> None:
        self.heard.append(("scored", logprobs))

    def take(self, result: Update, timestep: int) -> Verdict:
        assert result.verdict is not None
        verdict = self._cuts.get(f"at_{timestep}", result.verdict)
        self.heard.append(verdict)
        return verdict

    def ended(self, reason: str, method: RequestState) -> None:
        self.heard.append(reason)

    def closed(self) -> None:
        self.heard.append("closed")


def pool_of(recorded: Recorded, *numbers: int, reader: Listening | None = None) -> tuple[Pool, dict[int, Listening]]:
    pool = Pool(recorded)  # type: ignore[arg-type]
    readers = {number: reader or Listening() for number in numbers}
    for number, each in readers.items():
        pool.open(Request(number, (1, 2)), None, each)  # type: ignore[arg-type]
    return pool, readers


def says(number: int, *tokens: int, finished: str | None = None) -> Update:
    return Update(number, verdict=Verdict.of(*tokens, finished=finished))


OPENING = Opening(2, SamplingParams())
FIRST, LAST = Verdict.of(3), Verdict.of(4, 5, finished="stop")


def test_a_timestep_is_propose_advance_accept_apply() -> None:
    recorded = Recorded((says(0, 3),), (), (says(0, 4, 5, finished="stop"),))
    pool, readers = pool_of(recorded, 0)
    assert list(decode(pool, recorded)) == [(0, FIRST), (0, LAST)]  # type: ignore[arg-type]
    assert recorded.calls == [
        ("advance", 1, [(0, OPENING, None)]), "draft", "observe",
        ("apply", 0, FIRST),
        ("advance", 2, [(0, None, FIRST)]), "draft", "observe",
        ("advance", 3, []), "draft", "observe",
        ("apply", 0, LAST),
        ("close", Envelope((Update(0, verdict=LAST),))),
    ]  # fmt: skip
    assert readers[0].heard == ["opened", FIRST, LAST, "stop", "closed"]


def test_requests_end_and_begin_in_the_same_timestep() -> None:
    recorded = Recorded((says(0, 3, finished="length"),), (says(1, 7, finished="length"),))
    pool, _ = pool_of(recorded, 0)
    late = Listening()

    def admit() -> None:
        if not pool.is_busy and not late.heard:
            pool.open(Request(1, (1, 2)), None, late)  # type: ignore[arg-type]
            late.heard.append("opened")

    verdicts = [number for number, _ in decode(pool, recorded, admit)]  # type: ignore[arg-type]
    assert verdicts == [0, 1]
    assert recorded.calls[4] == ("advance", 2, [(0, None, Verdict.of(3, finished="length")), (1, OPENING, None)])


def test_what_a_reader_cuts_is_what_method_and_pipeline_get() -> None:
    cut = Verdict.of(4, finished="stop")
    recorded = Recorded((says(0, 3),), (says(0, 4, 5),))
    pool, _ = pool_of(recorded, 0, reader=Listening(at_2=cut))
    assert [verdict for _, verdict in decode(pool, recorded)] == [FIRST, cut]  # type: ignore[arg-type]
    assert recorded.calls[-2:] == [("apply", 0, cut), ("close", Envelope((Update(0, verdict=cut),)))]


def test_late_results_of_an_ended_request_are_void_and_its_echo_closes_it() -> None:
    recorded = Recorded(
        (says(0, 3, finished="length"), says(1, 5)), (says(0, 9, 9),), (says(0, finished="length"), says(1, 6, finished="stop"))
    )
    pool, readers = pool_of(recorded, 0, 1)
    verdicts = list(decode(pool, recorded))  # type: ignore[arg-type]
    assert [number for number, _ in verdicts] == [0, 1, 1]
    assert readers[0].heard == ["opened", Verdict.of(3, finished="length"), "length", "closed"]
    assert readers[1].heard[-2:] == ["stop", "closed"]


def test_a_request_is_cancelled_with_what_it_has_accepted() -> None:
    """The stages get the accepted tokens and the end in one verdict."""
    recorded = Recorded((says(0, 3), says(1, 4)), (says(1, 6, finished="stop"),))
    pool, readers = pool_of(recorded, 0, 1)
    verdicts = decode(pool, recorded)  # type: ignore[arg-type]
    assert [next(verdicts)[0], next(verdicts)[0]] == [0, 1]
    pool.cancel(0)
    pool.cancel(0)  # nothing happens twice
    assert [number for number, _ in verdicts] == [1]
    cancelled = Verdict(FIRST.accepted, "cancelled")
    assert ("advance", 2, [(0, None, cancelled), (1, None, Verdict.of(4))]) in recorded.calls
    assert readers[0].heard == ["opened", FIRST, "cancelled", "closed"]


def test_a_request_that_is_cancelled_before_it_enters_is_never_opened() -> None:
    recorded = Recorded()
    pool, readers = pool_of(recorded, 0)
    pool.cancel(0)
    assert list(decode(pool, recorded)) == []  # type: ignore[arg-type]
    assert recorded.calls == [("close", 0), ("close", Envelope())]
    assert readers[0].heard == ["cancelled", "closed"]


PAUSED, ECHO = Verdict(FIRST.accepted, "paused"), says(0, finished="paused")
REST = Verdict.of(9, finished="length")


def test_a_paused_request_goes_on_once_every_stage_has_closed_its_lane() -> None:
    """What still comes out of the old lane is void, and will be said again."""
    recorded = Recorded((says(0, 3),), (says(0, 7, 7),), (ECHO,), (Update(0, verdict=REST),))
    pool, readers = pool_of(recorded, 0)
    verdicts = decode(pool, recorded)  # type: ignore[arg-type]
    assert next(verdicts) == (0, FIRST)
    recorded.short = [0]
    assert list(verdicts) == [(0, REST)]
    assert [call for call in recorded.calls if call not in ("draft", "observe")] == [
        ("advance", 1, [(0, OPENING, None)]), ("apply", 0, FIRST),
        ("pause", 0), ("advance", 2, [(0, None, PAUSED)]),
        ("advance", 3, []), ("closed", 0),
        ("advance", 4, [(0, OPENING, None)]), ("apply", 0, REST),
        ("close", Envelope((Update(0, verdict=REST),))),
    ]  # fmt: skip
    assert readers[0].heard == ["opened", FIRST, "waits", "opened", REST, "length", "closed"]


def test_a_request_without_memory_waits_and_hears_so_once() -> None:
    recorded = Recorded((), (says(0, 3, finished="length"),), (says(1, 5, finished="length"),), room=1)
    pool, readers = pool_of(recorded, 0, 1)
    assert [number for number, _ in decode(pool, recorded)] == [0, 1]  # type: ignore[arg-type]
    assert readers[1].heard == ["waits", "opened", Verdict.of(5, finished="length"), "length", "closed"]
    assert ("pause", 1) not in recorded.calls


CANCELLED = says(0, finished="cancelled")


@pytest.mark.parametrize("echoes", [((), (ECHO,), (CANCELLED,)), ((ECHO,), (), (CANCELLED,))], ids=["closing", "closed"])
def test_a_paused_request_is_cancelled(echoes: tuple[Results, ...]) -> None:
    """The stages are told, so that they report what they have to say of it; none of its echoes is taken for another's."""
    recorded = Recorded((says(0, 3), says(1, 4)), *echoes, (says(1, 6, finished="stop"),))
    pool, readers = pool_of(recorded, 0, 1)
    timesteps = iter(range(1, 9))

    def admit() -> None:
        timestep = next(timesteps)
        if timestep == 2:
            recorded.short = [0]
        elif timestep == 3:
            pool.cancel(0)

    assert [number for number, _ in decode(pool, recorded, admit)] == [0, 1, 1]  # type: ignore[arg-type]
    assert ("advance", 3, [(0, None, Verdict((), "cancelled"))]) in recorded.calls
    assert readers[0].heard == ["opened", FIRST, "waits", "cancelled", "closed"]
    assert recorded.calls.count(("closed", 0)) == (echoes[0] != ())


def test_listeners_get_every_timestep_and_timings_only_of_a_full_pipeline() -> None:
    heard: list[Timestep] = []
    recorded = Recorded((says(0, 3),), (), (says(0, 4, finished="length"),), filling=2)
    pool, _ = pool_of(recorded, 0)
    list(decode(pool, recorded, listeners=(heard.append,)))  # type: ignore[arg-type]
    assert [timestep.number for timestep in heard] == [1, 2, 3]
    assert recorded.calls.count("observe") == 1
