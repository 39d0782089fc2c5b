"""Rank 0's loop alone, with a scheduler that says what the test wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.tiny_pair import CONTEXT, Pair

from pipedec.core import Opening, PipedecError, SamplingParams, SchedulerLost, Verdict
from pipedec.engine.draft_loop import DraftLoop
from pipedec.engine.rank_tasks import Wiring
from pipedec.engine.sequences import Sequences
from pipedec.messages import ErrorEvent, Event, PromptRequest, RunDescription, TokensEvent, verdict_to_payload
from pipedec.scheduler import MemoryScheduler, Message, Planned, Task
from pipedec.text.prompt import Prompter
from pipedec.topology import Topology
from pipedec.tracing import Tracer

TOPOLOGY = Topology.even(1, 1)
DESCRIPTION = RunDescription(((1,),), ((0, 8),), "target", dispatch="tasks")
NO_TRANSPORT: Any = None  # no step is ever sent
REQUEST = PromptRequest("Hello", True, "pp", SamplingParams(max_tokens=4)).to_json()


class EndsAtOnce(MemoryScheduler):
    """Every request ends with its first token, and a given message comes back when its last task is reported."""

    def __init__(self, reply: Message | None) -> None:
        super().__init__(TOPOLOGY)
        self._reply = reply
        self.open(DESCRIPTION)

    def begin(self, request_number: int, opening: Opening, planned: Sequence[Planned]) -> None:
        verdict = {"verdict": verdict_to_payload(Verdict.of(5, finished="length"))}
        self._push(0, Message("task", request_number, Task.compute("pre", 0, 0)))
        sync = Message("task", request_number, Task.compute("sync", 0, 0), verdict)
        self._replies = iter([sync, Message("task", request_number, Task.compute("end", 0, 0)), self._reply])

    def finish(
        self, rank: int, task: Task, planned: Sequence[Planned], events: Sequence[tuple[int, Event]] = ()
    ) -> Message | None:
        reply = next(self._replies)
        if reply is not None and reply.kind == "stop":
            self._state = "stopping"
        return reply

    def wait_request(self, timeout_seconds: float) -> Message | None:
        message = super().wait_request(timeout_seconds)
        assert message is not None or timeout_seconds == 0, "rank 0 waits on: the message was lost"
        return message


def loop_of(scheduler: MemoryScheduler, pair: Pair) -> DraftLoop:
    wiring = Wiring(scheduler, NO_TRANSPORT, TOPOLOGY, Tracer(0), Sequences(pair.target))
    return DraftLoop(Prompter(pair.target, CONTEXT), None, 0, wiring)


def test_a_stop_that_comes_with_the_end_of_a_request_is_obeyed(pair: Pair) -> None:
    """The scheduler hands a rank its next message with the reply to a report; here that message is the stop."""
    scheduler = EndsAtOnce(reply=Message("stop"))
    first, second = scheduler.submit(REQUEST), scheduler.submit(REQUEST)
    loop_of(scheduler, pair).serve(NO_TRANSPORT)
    assert scheduler.read_answer(second, "0", 0)[-1][1] == ErrorEvent("the cluster is being stopped")
    assert not [event for _, event in scheduler.read_answer(first, "0", 0) if isinstance(event, ErrorEvent)]


def test_an_abort_that_comes_with_the_end_of_a_request_is_raised(pair: Pair) -> None:
    scheduler = EndsAtOnce(reply=Message("abort", text="rank 1: went away"))
    scheduler.submit(REQUEST)
    with pytest.raises(PipedecError, match="rank 1: went away"):
        loop_of(scheduler, pair).serve(NO_TRANSPORT)


def test_a_run_whose_keys_are_gone_is_given_up(pair: Pair) -> None:
    scheduler = MemoryScheduler(TOPOLOGY)  # never opened: as after a FLUSHALL
    with pytest.raises(SchedulerLost, match="its keys were deleted"):
        loop_of(scheduler, pair).serve(NO_TRANSPORT)


def lose_ranks(scheduler: MemoryScheduler, times: int) -> None:
    for _ in range(times):
        scheduler.enter(scheduler.recover([1], "rank 1 was killed"))
        scheduler.open(DESCRIPTION, recovers=True)


@pytest.mark.parametrize("is_new", [True, False], ids=["a new process", "the same process"])
def test_a_request_that_three_epochs_did_not_outlive_is_refused_with_the_cause(pair: Pair, is_new: bool) -> None:
    scheduler = MemoryScheduler(TOPOLOGY)
    scheduler.open(DESCRIPTION, recovers=True)
    number, loop = scheduler.submit(REQUEST), loop_of(scheduler, pair)
    (message,) = scheduler.take(1).requests
    if not is_new:
        loop._resume([message])
    lose_ranks(scheduler, 3)
    scheduler.stop()
    loop.serve(NO_TRANSPORT)
    ((_, event),) = scheduler.read_answer(number, "0", 0)
    assert isinstance(event, ErrorEvent)
    assert "lost ranks 3 times while it answered this request" in event.message and "rank 1 was killed" in event.message
    assert scheduler.status().running == () and loop.remembered() == []


def test_what_could_not_be_published_is_published_in_the_next_epoch(pair: Pair) -> None:
    """And what has ended is not begun again, though the journal has it."""
    scheduler = MemoryScheduler(TOPOLOGY)
    scheduler.open(DESCRIPTION, recovers=True)
    number, loop = scheduler.submit(REQUEST), loop_of(scheduler, pair)
    scheduler.take(1)
    loop._queue.put(number, TokensEvent([5], "a"))
    loop._queue.finish(number, ErrorEvent("over"))
    lose_ranks(scheduler, 1)
    scheduler.stop()
    loop.serve(NO_TRANSPORT)
    assert [event for _, event in scheduler.read_answer(number, "0", 0)] == [TokensEvent([5], "a"), ErrorEvent("over")]
    assert scheduler.status().running == ()
