"""The decode loop and its scheduler, with stages that answer what a test wants: what they are sent, and what listeners hear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support.drafters import IdleDrafter

from pipedec import threads
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience, Resources, Scheduler, TimestepTiming
from pipedec.decoding.controller import Controller
from pipedec.decoding.events import (
    Advanced,
    Drained,
    Interrupted,
    Record,
    RequestClosed,
    RequestEnded,
    RequestOpened,
    Timestep,
    Waits,
)
from pipedec.engine.loop import decode
from pipedec.kv import KVManager
from pipedec.methods import StaticTreeOptions
from pipedec.tree import Candidates, DraftRows

TIMING = TimestepTiming(0.01, 0.005, (0.001,))
PROMPT, MAX_TOKENS = (1, 2), 20
LANE = len(PROMPT) + MAX_TOKENS + 1  # slots: of the prompt, of the answer, and of the row that enters
Results = tuple[RequestUpdate, ...]


@dataclass(frozen=True)
class Sent:
    """What one request's part of a message to the stages says."""

    number: int
    verdict: Verdict | None = None
    opens: bool = False
    tokens: tuple[int, ...] = ()  # of the rows that enter


def sent(message: StageMessage) -> list[Sent]:
    return [
        Sent(one.number, one.verdict, one.opening is not None, () if one.step is None else tuple(one.step.token_ids.tolist()))
        for one in message.updates
    ]


class Stages:
    """A pipeline. ``results`` are those of every timestep.

    Attributes:
        log: what it is sent, timestep by timestep.
        last: what it is sent in the end.
        are_computing: whether rank 0 does its own work now.
    """

    def __init__(self, *results: Results, filling: int = 0) -> None:
        self.log: list[Any] = []
        self.last: list[Sent] | None = None
        self.are_computing = False
        self._results = list(results)
        self._filling = filling

    def run_timestep(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        self.log.append(sent(entering))
        self.are_computing = True
        meanwhile()
        self.are_computing = False
        return Timestep(number, entering, self._results.pop(0), TIMING if number > self._filling else None)

    def end_session(self, last: StageMessage) -> None:
        self.last = sent(last)


class Text:
    """An answer whose text ends with a certain token."""

    def __init__(self, end: int, cut: Verdict) -> None:
        self._end, self._cut = end, cut

    def cut(self, verdict: Verdict) -> Verdict:
        return self._cut if self._end in verdict.tokens else verdict


@dataclass
class Desk:
    """A scheduler with memory for ``room`` requests at a time, and what its listeners have heard of each request."""

    room: int = 9
    heard: dict[int, list[Any]] = field(default_factory=dict)
    experience: Experience = field(default_factory=lambda: Experience(1))

    def __post_init__(self) -> None:
        kv = KVManager(self.room * LANE, 1, shares_prefixes=False)
        self.scheduler = Scheduler(Resources(self.experience), kv, listeners=[self._hear])

    def ask(self, *numbers: int, priority: int = 0, text: Text | None = None, method: str = "pp", options: Any = None) -> None:
        for number in numbers:
            asked = TokenizedRequest(number, PROMPT, SamplingParams(max_tokens=MAX_TOKENS), method, options, priority=priority)
            self.scheduler.open(self.scheduler.prepare(asked, new_sequence, text))

    def decode(self, stages: Stages, *admit: Callable[[], object]) -> list[tuple[int, Verdict]]:
        """The verdicts of all requests. ``admit``: what happens before each timestep from the second on."""
        happens = [lambda: None, *admit]
        verdicts = decode(self.scheduler, stages, lambda: happens.pop(0)() if happens else None)  # type: ignore[func-returns-value]
        return [(request.number, verdict) for request, verdict in verdicts]

    def _hear(self, record: Record) -> None:
        if not isinstance(record, Timestep | Drained):
            self.heard.setdefault(record.request.number, []).append(short(record))


new_sequence = partial(threads.Sequence, len(PROMPT), (), MAX_TOKENS)


def short(record: Record) -> Any:
    """A record in few characters."""
    match record:
        case Waits():
            return "waits"
        case RequestOpened(request, opening):
            assert request.opening is opening and not request.has_advanced
            return "opened"
        case Advanced(request, verdict):
            assert not set(verdict.tokens) & set(request.sequence.main.token_ids), "the method follows the verdict after this"
            return verdict
        case RequestEnded(request, reason):
            assert record.failure is None
            return reason
        case RequestClosed():
            return "closed"
        case Interrupted():
            return "interrupted"
    raise AssertionError(record)


def says(number: int, *tokens: int, finished: str | None = None) -> RequestUpdate:
    return RequestUpdate(number, verdict=Verdict.of(*tokens, finished=finished))


FIRST, LAST = Verdict.of(3), Verdict.of(4, 5, finished="stop")


def test_a_timestep_is_a_message_to_the_stages_and_then_what_they_say() -> None:
    """A method has followed a verdict when it is returned; the stages get it, and the next row, with the next message."""
    desk, stages = Desk(), Stages((says(0, 3),), (), (says(0, 4, 5, finished="stop"),))
    desk.ask(0)
    verdicts = decode(desk.scheduler, stages)
    request, verdict = next(verdicts)
    assert (request.number, verdict, request.sequence.main.token_ids) == (0, FIRST, [3])
    assert stages.log == [[Sent(0, opens=True, tokens=PROMPT)]]
    assert [verdict for _, verdict in verdicts] == [LAST] and request.sequence.main.token_ids == [3, 4, 5]
    assert stages.log[1:] == [[Sent(0, FIRST, tokens=(3,))], []]
    assert stages.last == [Sent(0, LAST)]
    assert desk.heard[0] == ["opened", FIRST, LAST, "stop", "closed"]
    assert (request.metrics.hits, request.metrics.misses) == (1, 1)


class NotingDrafter(IdleDrafter):
    """Proposes nothing, and notes when it is asked."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        assert self._stages.are_computing
        self._stages.log.append("draft")
        return [Candidates(torch.tensor(entry.rows), *torch.zeros(2, len(entry.rows), 0)) for entry in requested]


class NotingController(Controller):
    """Notes the timesteps that it is to learn from."""

    def __init__(self, stages: Stages) -> None:
        super().__init__(1)
        self._stages = stages

    def record_timestep(self, timing: TimestepTiming) -> None:
        assert timing is TIMING
        self._stages.log.append("observe")
        super().record_timestep(timing)


def noting(stages: Stages) -> Experience:
    experience = Experience(1)
    experience.controller = NotingController(stages)
    return experience


def test_rank_0_drafts_while_the_stages_compute_and_learns_how_long_they_took() -> None:
    """The draft model computes the prompt and the row that was accepted, which then enters."""
    stages = Stages((says(0, 3),), (), (says(0, 4, finished="stop"),))
    desk = Desk(experience=noting(stages))
    desk.scheduler.adopt(NotingDrafter(stages))
    desk.ask(0, method="stpp", options=StaticTreeOptions(2, 2, 1))
    desk.decode(stages)
    assert stages.log == [
        [Sent(0, opens=True, tokens=PROMPT)], "draft", "observe",
        [Sent(0, FIRST)], "draft", "observe",
        [Sent(0, tokens=(3,))], "observe",
    ]  # fmt: skip


def test_what_is_cut_is_what_method_and_pipeline_get() -> None:
    cut = Verdict.of(4, finished="stop")
    desk, stages = Desk(), Stages((says(0, 3),), (says(0, 4, 5),))
    desk.ask(0, text=Text(4, cut))
    [request] = desk.scheduler.requests.values()
    assert desk.decode(stages) == [(0, FIRST), (0, cut)]
    assert request.sequence.main.token_ids == [3, 4] and stages.last == [Sent(0, cut)]
    assert desk.heard[0] == ["opened", FIRST, cut, "stop", "closed"]


def test_late_results_of_an_ended_request_are_void_and_its_echo_closes_it() -> None:
    desk, echo, end = Desk(), says(0, finished="length"), says(1, 6, finished="stop")
    stages = Stages((says(0, 3, finished="length"), says(1, 5)), (says(0, 9, 9),), (echo,), (end,))
    desk.ask(0, 1)
    closed: list[bool] = []
    watch = [lambda: closed.append("closed" in desk.heard[0])] * 3
    assert [number for number, _ in desk.decode(stages, *watch)] == [0, 1, 1]
    assert closed == [False, False, True]
    assert desk.heard[0] == ["opened", Verdict.of(3, finished="length"), "length", "closed"]
    assert desk.heard[1][-2:] == ["stop", "closed"]


def test_a_request_is_cancelled_with_what_it_has_accepted() -> None:
    """The stages get the accepted tokens and the end in one verdict."""
    desk, stages = Desk(), Stages((says(0, 3), says(1, 4)), (says(1, 6, finished="stop"),))
    desk.ask(0, 1)

    def cancel() -> None:
        desk.scheduler.cancel(0)
        desk.scheduler.cancel(0)  # nothing happens twice

    assert [number for number, _ in desk.decode(stages, cancel)] == [0, 1, 1]
    assert stages.log[1] == [Sent(0, Verdict(FIRST.accepted, "cancelled")), Sent(1, Verdict.of(4), tokens=(4,))]
    assert desk.heard[0] == ["opened", FIRST, "cancelled", "closed"]


def test_a_request_that_is_cancelled_before_it_enters_is_never_opened() -> None:
    desk, stages = Desk(), Stages()
    desk.ask(0)
    desk.scheduler.cancel(0)
    assert desk.decode(stages) == []
    assert (stages.log, stages.last, desk.scheduler.kv.used_slots) == ([], [], 0)
    assert desk.heard[0] == ["cancelled", "closed"]


PAUSED, ECHO = Verdict(FIRST.accepted, "paused"), says(0, finished="paused")
REST = Verdict.of(9, finished="length")


def test_a_paused_request_goes_on_once_every_stage_has_closed_its_lane() -> None:
    """Though there is memory before. What still comes out of the old lane is void, and will be said again."""
    desk, end = Desk(room=1), Verdict.of(5, finished="length")
    stages = Stages((says(0, 3),), (says(0, 7, 7), RequestUpdate(1, verdict=end)), (), (ECHO,), (RequestUpdate(0, verdict=REST),))
    desk.ask(0)
    assert desk.decode(stages, partial(desk.ask, 1, priority=-1)) == [(0, FIRST), (1, end), (0, REST)]
    assert stages.log == [
        [Sent(0, opens=True, tokens=PROMPT)],
        [Sent(0, PAUSED), Sent(1, opens=True, tokens=PROMPT)],
        [Sent(1, end)],
        [],
        [Sent(0, opens=True, tokens=(*PROMPT, 3))],
    ]
    assert stages.last == [Sent(0, REST)]
    assert desk.heard[0] == ["opened", FIRST, "waits", "opened", REST, "length", "closed"]


def test_a_request_without_memory_waits_and_hears_so_once() -> None:
    desk = Desk(room=1)
    stages = Stages((), (says(0, 3, finished="length"),), (says(1, 5, finished="length"),))
    desk.ask(0, 1)
    assert [number for number, _ in desk.decode(stages)] == [0, 1]
    assert stages.log[1:] == [[], [Sent(0, Verdict.of(3, finished="length")), Sent(1, opens=True, tokens=PROMPT)]]
    assert desk.heard[1] == ["waits", "opened", Verdict.of(5, finished="length"), "length", "closed"]
    assert desk.scheduler.tally.pauses == 0


CANCELLED = says(0, finished="cancelled")


@pytest.mark.parametrize("echoes", [((), (ECHO,), (CANCELLED,)), ((ECHO,), (), (CANCELLED,))], ids=["closing", "closed"])
def test_a_paused_request_is_cancelled(echoes: tuple[Results, ...]) -> None:
    """The stages are told, so that they report what they have to say of it; none of its echoes is taken for another's."""
    desk, last = Desk(room=2), (says(1, 6, finished="stop"), says(2, 8, finished="stop"))
    stages = Stages((says(0, 3), says(1, 4)), *echoes, last)
    desk.ask(0, priority=1)
    desk.ask(1)
    closed: list[bool] = []
    happens = [
        partial(desk.ask, 2),  # which takes the memory of the first one
        partial(desk.scheduler.cancel, 0),
        lambda: closed.append("closed" in desk.heard[0]),
        lambda: closed.append("closed" in desk.heard[0]),
    ]
    assert [number for number, _ in desk.decode(stages, *happens)] == [0, 1, 1, 2]
    assert stages.log[1] == [Sent(0, PAUSED), Sent(1, Verdict.of(4), tokens=(4,)), Sent(2, opens=True, tokens=PROMPT)]
    assert stages.log[2] == [Sent(0, Verdict((), "cancelled"))]
    assert desk.heard[0] == ["opened", FIRST, "waits", "cancelled", "closed"]
    assert closed == [False, True] and stages.log[3] == []


def test_records_come_in_the_order_in_which_things_happen() -> None:
    """What enters is in the record of its timestep, before the verdicts; tokens are accepted before their answer ends."""
    noted: list[Record] = []
    stages = Stages((says(0, 3),), (says(0, 4, finished="length"),), filling=1)
    desk = Desk(experience=noting(stages))
    desk.scheduler.listeners.append(noted.append)
    desk.ask(0)
    desk.decode(stages)
    kinds = [RequestOpened, Timestep, Advanced, Timestep, Advanced, RequestEnded, RequestClosed, Drained]
    assert [type(record) for record in noted] == kinds
    assert stages.log.count("observe") == 1, "there is no timing before the pipeline is full"
    opened, first, *_ = noted
    assert isinstance(opened, RequestOpened) and isinstance(first, Timestep)
    assert [update.opening for update in first.entered.updates] == [opened.opening]
    assert [record.timestep for record in noted if isinstance(record, Advanced)] == [1, 2]


def test_a_listener_that_joins_late_learns_what_has_a_lane() -> None:
    desk, stages = Desk(room=2), Stages((says(0, 3), says(1, 4)), ())
    scheduler = desk.scheduler
    desk.ask(0, priority=1)
    desk.ask(1)
    desk.ask(2, priority=1)

    def opened() -> list[tuple[int, bool]]:
        found = scheduler.opened()
        assert all(one.opening is one.request.opening for one in found)
        return [(one.request.number, one.request.has_advanced) for one in found]

    assert opened() == []
    verdicts = decode(scheduler, stages)
    next(verdicts)
    assert opened() == [(1, False), (0, True)]
    next(verdicts)
    desk.ask(3)
    scheduler.entering()
    assert opened() == [(1, True), (3, False)], "one is paused, another begins"
    scheduler.interrupt()
    assert opened() == []
    assert [desk.heard[number][-1] for number in range(4)] == ["interrupted"] * 4
    scheduler.drop(2)
    assert desk.heard[2] == ["waits", "interrupted", "closed"] and scheduler.requests.keys() == {0, 1, 3}


def test_a_cancelled_requests_memory_is_free_at_once_and_goes_to_the_next_with_the_same_message() -> None:
    desk = Desk(room=1)
    scheduler = desk.scheduler
    desk.ask(0, 1)
    assert [one.number for one in sent(scheduler.entering())] == [0], "there is memory for one"
    scheduler.cancel(0)
    assert (scheduler.kv.used_slots, desk.heard[0][-1]) == (0, "cancelled")
    assert sent(scheduler.entering()) == [Sent(0, Verdict((), "cancelled")), Sent(1, opens=True, tokens=PROMPT)]
    assert scheduler.take(says(0, 5), 3) is None, "a late verdict is void"
