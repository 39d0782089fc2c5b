"""Sessions of windows: how windows follow each other, what they grant, what is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.whole_scheduler import WholeScheduler

from pipedec.config import Settings
from pipedec.core.errors import RankLost, UserError
from pipedec.messages.run import RunDescription
from pipedec.scheduler import Task
from pipedec.scheduler.protocol import SESSION_TRACE, Granted, RankMessage
from pipedec.scheduler.workflow import after_window, initial_windows
from pipedec.topology import Topology

MakeScheduler = Callable[[Topology], WholeScheduler]
TWO = Topology.even(2, 2)
DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,), (2,)), ((0, 1), (1, 2)))


def window(rank: int, seq: int) -> Task:
    return Task.compute("window", rank, seq)


def open_session(scheduler: WholeScheduler, duplex: str = "full") -> dict[int, Granted]:
    """A session with windows of 4 timesteps. Returns every rank's first window."""
    scheduler.open(DESCRIPTION, duplex)
    begin(scheduler, 0)
    return {rank: granted(scheduler.wait(rank, 0)) for rank in TWO.ranks}


def begin(scheduler: WholeScheduler, session: int) -> None:
    scheduler.begin_session(session, initial_windows(TWO, 4), SESSION_TRACE)


def granted(message: RankMessage | None) -> Granted:
    assert message is not None and message.kind == "tasks"
    [only] = message.tasks
    return only


def finish(scheduler: WholeScheduler, rank: int, seq: int, finished: bool = False) -> RankMessage | None:
    planned = after_window(window(0, seq), TWO, 0 if finished else 4) if rank == 0 else []
    return scheduler.report(rank, [window(rank, seq)], planned, timeout_seconds=0.01)


def test_windows_follow_each_other_without_a_barrier(make_scheduler: MakeScheduler) -> None:
    """A rank that has finished its window gets the next one while another rank still works on the previous one."""
    scheduler = make_scheduler(TWO)
    for rank, first in open_session(scheduler).items():
        assert first.task == window(rank, 1) and first.payload["timesteps"] == 4
    following = granted(finish(scheduler, 0, 1))
    assert following.task == window(0, 5) and following.payload["timesteps"] == 4
    assert granted(finish(scheduler, 1, 1)).task == window(1, 5)
    last = finish(scheduler, 0, 5, finished=True), finish(scheduler, 1, 5, finished=True)
    assert last == (None, None), "rank 2 is still at its first window"
    assert granted(finish(scheduler, 2, 1)).task == window(2, 5)
    finish(scheduler, 2, 5, finished=True)
    assert granted(scheduler.wait(0, 0)).task == Task.compute("end", 0, 5)


def test_sessions_follow_each_other(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    open_session(scheduler)
    with pytest.raises(UserError, match="workflow 0 is still running"):
        begin(scheduler, 1)
    for rank in TWO.ranks:
        finish(scheduler, rank, 1, finished=True)
    end = granted(scheduler.wait(0, 0))
    scheduler.report(0, [end.task], [])
    begin(scheduler, 1)
    messages = [scheduler.wait(rank, 0) for rank in TWO.ranks]
    assert [(message.number, message.tasks[0].task) for message in messages if message is not None] == [
        (1, window(rank, 1)) for rank in TWO.ranks
    ]


def test_a_session_needs_a_run_that_is_up(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    with pytest.raises(UserError, match="not up"):
        begin(scheduler, 0)
    scheduler.open(DESCRIPTION)
    scheduler.abort(1, "out of memory")
    with pytest.raises(RankLost, match="rank 1: out of memory"):
        begin(scheduler, 0)


def test_the_order_of_transfers_depends_on_the_duplex(make_scheduler: MakeScheduler) -> None:
    half = {rank: message.payload["transfers"] for rank, message in open_session(make_scheduler(TWO), "half").items()}
    assert half == {0: [[[2, 0]], [[0, 1]]], 1: [[[1, 2]], [[0, 1]]], 2: [[[2, 0]], [[1, 2]]]}
    full = {rank: message.payload["transfers"] for rank, message in open_session(make_scheduler(TWO), "full").items()}
    assert full == {0: [[[2, 0], [0, 1]]], 1: [[[1, 2], [0, 1]]], 2: [[[2, 0], [1, 2]]]}


def test_every_window_of_a_session_is_traced(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    open_session(scheduler)
    for rank in TWO.ranks:
        finish(scheduler, rank, 1)
    trace = scheduler.trace()
    assert [line.task for line in trace] == [window(rank, 1) for rank in TWO.ranks]
    assert all(0 < line.granted_us <= line.finished_us for line in trace)
