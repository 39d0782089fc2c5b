"""How a rank gets from one epoch to the next, with a real Redis: its lease, its meeting, and who begins the epoch."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from support.clock import Clock
from support.processes import wait_until
from support.tiny_pair import Pair
from support.whole_scheduler import WholeScheduler

from pipedec.cluster.lease import PATIENCE_SECONDS, RECOVERY_SECONDS, LeaseKeeper, next_epoch
from pipedec.cluster.meeting import Meeting
from pipedec.cluster.place import RankPlace
from pipedec.cluster.processes import LOST_ANOTHER
from pipedec.config import Settings
from pipedec.core.errors import EpochEnded, RankLost, SchedulerInterrupted
from pipedec.engine.activity import Activity
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import ActivityReport
from pipedec.scheduler import EmbeddedRedis, connect
from pipedec.topology import Topology

TOPOLOGY = Topology.even(2, 2)
PLACE = RankPlace(1, 3, 1, 3, recovers=True)
DESCRIPTION = RunDescription(Settings.of(target="null"), ((1,), (2,)), ((0, 1), (1, 2)))
_names = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def attach(server: EmbeddedRedis) -> Callable[[], WholeScheduler]:
    """Makes schedulers of one open run."""
    name = f"epochs-{next(_names)}"
    first = WholeScheduler(connect(server.url), name, TOPOLOGY, lease_ms=400)
    first.open(DESCRIPTION, recovers=True)
    return lambda: WholeScheduler(connect(server.url), name, TOPOLOGY, lease_ms=400)


def test_a_rank_waits_for_the_epoch_that_a_supervisor_begins(attach: Callable[[], WholeScheduler]) -> None:
    rank, supervisor = attach(), attach()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(next_epoch, rank, 1, RankLost("rank 1 could not receive from rank 0"))
        assert wait_until(lambda: supervisor.supervise("local").suspects == {1: "rank 1 could not receive from rank 0"}, 60)
        supervisor.recover([0], "rank 0 was killed")
        assert waiting.result(60) == 1
    assert [recovery.lost for recovery in supervisor.status().recoveries] == [(0,)]


@pytest.mark.failure_case("S9")
def test_a_rank_begins_the_epoch_itself_if_nobody_has_died(attach: Callable[[], WholeScheduler]) -> None:
    ranks = [attach() for _ in TOPOLOGY.ranks]
    with ThreadPoolExecutor(3) as threads:
        broken = RankLost("rank 1 could not send to rank 2: Connection reset by peer")
        waiting = [threads.submit(next_epoch, rank, number, broken) for number, rank in enumerate(ranks)]
        assert [future.result(60) for future in waiting] == [1, 1, 1], "however many of them try"
    (recovery,) = ranks[0].status().recoveries
    assert recovery.lost == () and recovery.reason == str(broken)


@pytest.mark.failure_case("R3", "R5")
def test_a_broken_connection_to_redis_begins_the_next_epoch_at_once(
    attach: Callable[[], WholeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    assert next_epoch(attach(), 1, SchedulerInterrupted("cannot reach Redis")) == 1
    assert sum(slept) < PATIENCE_SECONDS / 10


def test_an_outage_of_redis_is_no_attempt_of_a_running_request(
    attach: Callable[[], WholeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, clock = attach(), Clock(monkeypatch)
    monkeypatch.setattr(time, "sleep", clock.advance)
    rank.submit("running")
    rank.pop_requests(1)
    for error, attempts in ((SchedulerInterrupted("cannot reach Redis"), 0), (RankLost("rank 2 sends nothing"), 1)):
        rank.enter(next_epoch(rank, 1, error))
        rank.open(DESCRIPTION, recovers=True)
        assert [one.attempts for one in rank.journal()] == [attempts]


def test_a_run_that_does_not_recover_is_aborted_with_the_cause(
    attach: Callable[[], WholeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, other, clock = attach(), attach(), Clock(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.advance(RECOVERY_SECONDS))  # long before the rank looks again
    with pytest.raises(RankLost, match=rf"^it is gone; the run did not recover within {RECOVERY_SECONDS:.0f} s$"):
        next_epoch(rank, 1, RankLost("it is gone"))
    with pytest.raises(RankLost, match="did not recover"):
        next_epoch(other, 2, RankLost("it is gone, too"))


@pytest.mark.failure_case("R4")
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_redis_that_has_lost_the_run_is_given_the_reason_why_it_ends(attach: Callable[[], WholeScheduler], epoch: int) -> None:
    rank, other = attach(), attach()
    for one in (rank, other) if epoch else ():
        one.enter(one.recover([], "the link was cut"))
    rank.clear()
    for one in (rank, other):
        with pytest.raises(RankLost, match=r"has lost the run: .* \(set appendonly yes there\)$"):
            next_epoch(one, 1, EpochEnded("its keys were deleted"))
    assert "has lost the run" in (attach_again(rank).status().failure or "")


def attach_again(scheduler: WholeScheduler) -> WholeScheduler:
    return WholeScheduler(scheduler.client, scheduler.run_id, TOPOLOGY)


@dataclass
class Transfers:
    abort: Callable[[], object]
    can_rejoin: bool = True


class CountedDoing(Activity):
    """Counts how often it was asked for the activity: once for each renewal of the lease."""

    told = 0

    def activity(self) -> ActivityReport:
        self.told += 1
        return super().activity()


@pytest.mark.parametrize("ends", ["by a supervisor", "with the run's keys"])
def test_the_lease_keeper_interrupts_a_rank_whose_epoch_has_ended(attach: Callable[[], WholeScheduler], ends: str) -> None:
    """Until it enters the next one, in which the keeper renews its lease."""
    scheduler, doing, aborted = attach(), CountedDoing(), threading.Event()
    keeper = LeaseKeeper(scheduler, PLACE, doing, Transfers(aborted.set), renewal_seconds=0.05)
    keeper.start()
    assert wait_until(lambda: doing.told > 2, 60), "with the second renewal the keeper has seen the run"
    if ends == "by a supervisor":
        attach().recover([2], "rank 2 was killed")
    else:
        scheduler.client.delete(scheduler.keys.run)
    assert aborted.wait(60)
    with pytest.raises(EpochEnded):
        doing.begin("idle")
    if ends == "by a supervisor":
        keeper.enter(1)
        doing.begin("idle")
        assert wait_until(lambda: attach().supervise("local").activities[1].kind == "idle", 60)
    keeper.stop()


@pytest.mark.failure_case("S3e")
@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_loads_has_its_place_in_the_next_epoch_unless_it_was_lost(
    attach: Callable[[], WholeScheduler], lost: int
) -> None:
    scheduler, supervisor, doing = attach(), attach(), CountedDoing()
    doing.begin("loading")
    keeper = LeaseKeeper(scheduler, PLACE, doing, Transfers(list), renewal_seconds=0.05)
    keeper.start()
    supervisor.recover([lost], f"rank {lost} was killed")
    turns = doing.told
    assert wait_until(lambda: doing.told > turns + 10, 60)
    look, kinds = supervisor.supervise("local"), {} if lost == 1 else {1: "loading"}
    assert look.members == tuple(kinds) and {rank: one.kind for rank, one in look.activities.items()} == kinds
    with pytest.raises(EpochEnded):
        doing.begin("warming")
    keeper.enter(1)
    keeper.stop()


@pytest.mark.failure_case("S3a")
def test_the_lease_keeper_ends_a_process_that_nothing_else_lets_come_loose(
    attach: Callable[[], WholeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL, at once, and before anything is interrupted or aborted."""
    happened: list[str | int] = []
    monkeypatch.setattr(os, "_exit", happened.append)
    scheduler, doing = attach(), CountedDoing()
    transfers = Transfers(lambda: happened.append("abort"), can_rejoin=False)
    keeper = LeaseKeeper(scheduler, PLACE, doing, transfers, renewal_seconds=0.05)
    keeper.start()
    assert wait_until(lambda: doing.told > 2, 60)
    assert not happened
    attach().recover([2], "rank 2 was killed")
    assert wait_until(lambda: happened, 60)
    keeper.enter(1)
    keeper.stop()
    assert happened[0] == LOST_ANOTHER


def test_a_meeting_notices_the_next_epoch_at_once(server: EmbeddedRedis, pair: Pair, state_directory: object) -> None:
    spec, name = pair.spec(2), "meets-again"
    first = WholeScheduler(connect(server.url), name, spec.topology)
    first.open(DESCRIPTION, recovers=True)
    meetings, all_met = {}, threading.Barrier(3)
    for rank in (0, 1, 2):
        scheduler = WholeScheduler(connect(server.url), name, spec.topology)
        meetings[rank] = scheduler, Meeting(scheduler, RankPlace(rank, 3, rank, 3, "here", recovers=True), spec)

    def meet(rank: int) -> int:
        scheduler, meeting = meetings[rank]
        with meeting.hold() as met:
            met.rendezvous.store.set(f"rank {rank}", "is here")
            met.rendezvous.store.wait([f"rank {other}" for other in range(3)])
            all_met.wait(60)  # the store ends with its meeting
        return scheduler.epoch

    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(meet, rank) for rank in (0, 1)]  # rank 2 does not come
        assert wait_until(lambda: first.client.xlen(first.keys.answer(first.keys.meeting)) == 2, 60)
        first.recover([2], "rank 2 was killed")
        for future in waiting:
            with pytest.raises(EpochEnded):
                future.result(60)
        for scheduler, _ in meetings.values():
            scheduler.enter(1)
        assert [future.result(60) for future in [threads.submit(meet, rank) for rank in range(3)]] == [1, 1, 1]
