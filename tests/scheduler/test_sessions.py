"""Sessions of windows on both back ends: how windows follow each other, what they grant, what is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipedec.config import Settings
from pipedec.core import RankLost, UserError
from pipedec.messages import RunDescription
from pipedec.scheduler import Facts, Message, Scheduler, Task, Topology, post_process

MakeScheduler = Callable[[Topology], Scheduler]
TWO = Topology.even(2, 2)
DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,), (2,)), ((0, 1), (1, 2)))


def window(rank: int, seq: int) -> Task:
    return Task.compute("window", rank, seq)


def open_session(scheduler: Scheduler, duplex: str = "full") -> dict[int, Message]:
    """A session with windows of 4 timesteps. Returns every rank's first window."""
    scheduler.open(DESCRIPTION, duplex)
    scheduler.begin_session(0, 4)
    granted = {rank: scheduler.wait(rank, 0) for rank in TWO.ranks}
    assert all(message is not None for message in granted.values())
    return {rank: message for rank, message in granted.items() if message is not None}


def finish(scheduler: Scheduler, rank: int, seq: int, finished: bool = False) -> Message | None:
    return scheduler.finish(rank, window(rank, seq), post_process(window(rank, seq), TWO, Facts(window=4, finished=finished)))


def test_windows_follow_each_other_without_a_barrier(make_scheduler: MakeScheduler) -> None:
    """A rank that has finished its window gets the next one while another rank still works on the previous one."""
    scheduler = make_scheduler(TWO)
    for rank, message in open_session(scheduler).items():
        assert message.kind == "task" and message.task == window(rank, 1) and message.payload["timesteps"] == 4
    following = finish(scheduler, 0, 1)
    assert following is not None and following.task == window(0, 5) and following.payload["timesteps"] == 4
    following = finish(scheduler, 1, 1)
    assert following is not None and following.task == window(1, 5)
    last = finish(scheduler, 0, 5, finished=True), finish(scheduler, 1, 5, finished=True)
    assert last == (None, None), "rank 2 is still at its first window"
    following = finish(scheduler, 2, 1)
    assert following is not None and following.task == window(2, 5)
    finish(scheduler, 2, 5, finished=True)
    end = scheduler.wait(0, 0)
    assert end is not None and end.task == Task.compute("end", 0, 5)


def test_sessions_follow_each_other(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    open_session(scheduler)
    with pytest.raises(UserError, match="workflow 0 is still running"):
        scheduler.begin_session(1, 4)
    for rank in TWO.ranks:
        finish(scheduler, rank, 1, finished=True)
    end = scheduler.wait(0, 0)
    assert end is not None and end.task is not None
    scheduler.finish(0, end.task, [])
    scheduler.begin_session(1, 4)
    messages = [scheduler.wait(rank, 0) for rank in TWO.ranks]
    assert [(message.number, message.task) for message in messages if message is not None] == [
        (1, window(rank, 1)) for rank in TWO.ranks
    ]


def test_a_session_needs_a_run_that_is_up(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    with pytest.raises(UserError, match="not up"):
        scheduler.begin_session(0, 4)
    scheduler.open(DESCRIPTION)
    scheduler.abort(1, "out of memory")
    with pytest.raises(RankLost, match="rank 1: out of memory"):
        scheduler.begin_session(0, 4)


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
