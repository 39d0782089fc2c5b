"""What the watch of a host does about its ranks. The tests choose when ranks end, what the run's state is and what time it is."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
from msgspec import structs
from support.clock import Clock

from pipedec.cluster.host_watch import OUTAGE_SECONDS, HostWatch, WatchedHost
from pipedec.cluster.processes import FAILED, LOST_ANOTHER, describe_exit
from pipedec.cluster.spares import Spares
from pipedec.cluster.stalls import Stall
from pipedec.config.settings import Cluster
from pipedec.core.errors import RankLost, SchedulerLost
from pipedec.messages.stats import ActivityReport, Recovery
from pipedec.plan.placement import Placement
from pipedec.scheduler import Supervision
from pipedec.scheduler.client import lost_run

OPTIONS, ONE_RESTART = (Cluster(max_restarts=limit, restart_window=600) for limit in (3, 1))
KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT


class Run:
    """A run as a watch sees it, by the rules of ``SupervisorScheduler``: nobody is a member of a new epoch."""

    def __init__(self) -> None:
        self.look = Supervision(0, "up", None, (0, 1, 2), (), {}, {}, {}, {}, (), None, ())
        self.recovered: list[tuple[int, tuple[int, ...], str, dict[str, Any]]] = []
        self.aborted: list[tuple[int, str]] = []
        self.lost: SchedulerLost | None = None
        self._epoch = -1

    def supervise(self, node: str, ranks: Sequence[int]) -> Supervision:
        if self.lost is not None:
            raise self.lost
        return self.look

    def enter(self, epoch: int) -> None:
        self._epoch = epoch

    def recover(self, lost: Sequence[int], reason: str, places: Mapping[int, str] = MappingProxyType({})) -> int:
        assert self._epoch == self.look.epoch
        self.recovered.append((self._epoch, tuple(lost), reason, dict(places)))
        self.look = replace(self.look, epoch=self._epoch + 1, members=(), places={**self.look.places, **places})
        return self._epoch + 1

    def serve(self) -> None:
        """All ranks take part in the epoch, which is served."""
        served = Recovery(self.look.epoch or 0, (), "", 0, 1)
        self.look = replace(self.look, members=(0, 1, 2), recoveries=(served,) if self.look.epoch else ())

    def lost_run(self) -> SchedulerLost:
        return lost_run("there:1")

    def abort(self, rank: int, message: str) -> bool:
        self.aborted.append((rank, message))
        return True


@dataclass(frozen=True)
class OneSpare(Spares):
    """The host "spare", which takes over all that is lost; ``left`` is the host to leave when a link stalls."""

    planned: tuple[Placement, ...] = ()
    standing_by: tuple[Placement, ...] = ()
    left: str | None = None
    is_gone: bool = False

    def reassigned(self, ranks: Sequence[int], look: Supervision) -> Mapping[int, str]:
        if self.is_gone:
            raise RankLost("there are no spares")
        return dict.fromkeys(ranks, "spare")

    def host_to_leave(self, stall: Stall, look: Supervision) -> str | None:
        return self.left


class Ranks:
    """Stands for ``RankProcesses``: a rank ends when a test says so."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._new_pids = itertools.count(1000)

    def start(self, rank: int) -> None:
        self.pids[rank] = next(self._new_pids)
        self._statuses.pop(rank, None)

    @property
    def exit_statuses(self) -> dict[int, int]:
        return dict(self._statuses)

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self._statuses]

    def read(self, seconds: float) -> list[tuple[int, Any]]:
        return []

    def end(self, rank: int, status: int = KILLED) -> None:
        self._statuses.setdefault(rank, status)

    def forget(self, rank: int) -> None:
        del self.pids[rank], self._statuses[rank]

    def describe_end(self, rank: int) -> str:
        return describe_exit(self._statuses[rank])


class Host:
    """A host with three ranks, or with those that are given, and its watch."""

    def __init__(
        self, run: Run, clock: Clock, options: Cluster = OPTIONS, *, ranks: Sequence[int] = (0, 1, 2), node: str = "here",
        spares: Spares | None = None, timestep_ms: float = 0.0, **hooks: Any,
    ) -> None:  # fmt: skip
        self.processes, self.started, self._clock = Ranks(), list[int](), clock
        host = WatchedHost(node, self.processes, self.start, **hooks)  # type: ignore[arg-type]
        self.watch = HostWatch(run, host, options, spares, timestep_ms)  # type: ignore[arg-type]
        for rank in ranks:
            self.processes.start(rank)

    def start(self, rank: int) -> None:
        self.started.append(rank)
        self.processes.start(rank)

    def end(self, *ranks: int, status: int = KILLED) -> None:
        for rank in ranks:
            self.processes.end(rank, status)

    def turn_until(self, condition: Callable[[], object] = lambda: False) -> None:
        """Four turns a second; without a condition, until the watch raises."""
        for _ in range(100):
            assert self.watch.turn()
            if condition():
                return
            self._clock.advance(0.25)
        raise AssertionError("nothing happened for 25 s")


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def host(run: Run, clock: Clock) -> Host:
    return Host(run, clock)


@pytest.mark.parametrize(
    ("status", "end_in_words"),
    [
        (KILLED, "was killed by SIGKILL"),
        (0, "ended unexpectedly with exit status 0"),
        (FAILED, "failed with exit status 1: CUDA out of memory"),
    ],
)
@pytest.mark.failure_case("S5", "S6")
def test_a_rank_that_ends_is_replaced_in_the_next_epoch(host: Host, run: Run, status: int, end_in_words: str) -> None:
    run.look = replace(run.look, ends={2: "CUDA out of memory"} if status == FAILED else {})
    pids = dict(host.processes.pids)
    host.end(2, status=status)
    host.turn_until(lambda: host.started)
    assert run.recovered == [(0, (2,), f"rank 2 (stage 2) {end_in_words}", {})] and host.started == [2]
    assert {rank for rank, pid in host.processes.pids.items() if pid != pids[rank]} == {2}


def test_a_rank_that_ends_before_it_took_part_is_replaced_without_another_epoch(host: Host, run: Run) -> None:
    run.look = replace(run.look, epoch=4, members=(0, 1))
    host.end(2)
    host.turn_until(lambda: host.started == [2])
    assert not run.recovered


def test_who_has_lost_another_is_not_blamed_and_counts_for_nothing(host: Host, run: Run) -> None:
    """Ranks on NCCL do not survive: they leave as soon as they have lost another, which is seen to end later."""
    for _ in range(OPTIONS.max_restarts):
        host.started.clear()
        run.recovered.clear()
        run.look = replace(run.look, members=(0, 1, 2))
        host.end(0, 1, status=LOST_ANOTHER)
        assert host.watch.turn() and not run.recovered
        host.end(2)
        host.turn_until(lambda: host.started)
        assert [(lost, reason) for _, lost, reason, _ in run.recovered] == [((0, 1, 2), "rank 2 (stage 2) was killed by SIGKILL")]
        assert host.started == [0, 1, 2]


@pytest.mark.failure_case("S20")
def test_losses_that_a_request_has_caused_cost_no_restart(run: Run, clock: Clock) -> None:
    """Neither those during its trial nor those before it, once they are charged to it."""
    host = Host(run, clock, ONE_RESTART)
    for tried, charged in ((None, ()), (7, ()), (None, (1, 2)), (8, ())):
        run.look = replace(
            run.look, members=(0, 1, 2), tried=tried, recoveries=tuple(Recovery(epoch, (), "", 0, 1, 7) for epoch in charged)
        )
        host.started.clear()
        host.end(2)
        host.turn_until(lambda: host.started)
    run.look = replace(run.look, members=(0, 1, 2), tried=None, recoveries=())
    host.end(2)
    with pytest.raises(RankLost, match=r"1 rank had been replaced within 600 s \(--max-restarts 1\)"):
        host.turn_until(lambda: False)


@pytest.mark.parametrize("order", ["together", "later", "first"])
@pytest.mark.failure_case("S3b")
def test_a_neighbour_that_aborts_when_a_rank_is_lost_costs_no_restart(run: Run, clock: Clock, order: str) -> None:
    """As NCCL may make it do."""
    host, ends = Host(run, clock, ONE_RESTART), [(1, KILLED), (2, ABORTED)]
    assert host.watch.turn()
    with clock.halted():
        for rank, status in reversed(ends) if order == "first" else ends:
            host.end(rank, status=status)
            assert order == "together" or host.watch.turn()
            assert order != "first" or rank == 1 or not host.started, "it may have lost another"
    host.turn_until(lambda: sorted(host.started) == [1, 2])
    assert [reason for _, _, reason, _ in run.recovered] == ["rank 1 (stage 1) was killed by SIGKILL"]
    assert not run.aborted


def test_a_rank_that_aborts_by_itself_is_a_loss(run: Run, clock: Clock) -> None:
    host = Host(run, clock, ONE_RESTART)
    host.end(2, status=ABORTED)
    host.turn_until(lambda: host.started == [2])
    assert run.recovered == [(0, (2,), "rank 2 (stage 2) was killed by SIGABRT", {})]
    run.serve()
    host.end(2, status=ABORTED)
    with pytest.raises(RankLost, match="1 rank had been replaced"):
        host.turn_until()


@pytest.mark.parametrize("status", [ABORTED, FAILED])
@pytest.mark.failure_case("S3b")
def test_what_ends_because_of_a_loss_on_another_host_costs_no_restart_here(run: Run, clock: Clock, status: int) -> None:
    run.look = replace(run.look, places={0: "there", 1: "here", 2: "here"})
    host = Host(run, clock, ONE_RESTART, ranks=(1, 2))
    assert host.watch.turn()
    run.look = replace(run.look, epoch=1, members=(), recoveries=(Recovery(1, (0,), "it was killed", 0),))
    with clock.halted():
        assert host.watch.turn()
        host.end(1, 2, status=status)
    host.turn_until(lambda: sorted(host.started) == [1, 2])
    assert not run.recovered and not run.aborted
    run.serve()
    host.end(1)
    host.turn_until(lambda: len(host.started) == 3)
    assert not run.aborted, "only now has this host lost one"


@pytest.mark.failure_case("S3b")
def test_a_new_process_that_fails_before_it_serves_costs_a_restart(run: Run, clock: Clock) -> None:
    """However soon after a loss: or it might do so without end."""
    host = Host(run, clock, Cluster(max_restarts=2, restart_window=600))
    for _ in range(2):
        run.look = replace(run.look, members=(0, 1, 2))
        host.started.clear()
        host.end(1)
        host.turn_until(lambda: host.started)
    host.end(1)
    with pytest.raises(RankLost, match="2 ranks had been replaced"):
        host.turn_until()


STALLED = {1: ActivityReport("computing", None, 5.0), 2: ActivityReport("waiting", 1, 4.9)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expired": (1,)}, "stopped answering"),
        ({"activities": STALLED}, "computed one timestep for more than 5 s (--stall-timeout)"),
    ],
    ids=["silent", "computing"],
)
def test_a_rank_that_stands_still_is_killed_and_replaced(host: Host, run: Run, changes: dict[str, Any], reason: str) -> None:
    run.look = replace(run.look, **changes)
    host.turn_until(lambda: host.started == [1])
    assert run.recovered == [(0, (1,), f"rank 1 (stage 1) {reason}", {})]


def test_where_timesteps_are_planned_to_be_long_ranks_have_longer(run: Run, clock: Clock) -> None:
    host = Host(run, clock, timestep_ms=1000.0)
    for seconds in (19.0, 21.0):
        assert not run.recovered
        waiting = ActivityReport("waiting", 1, seconds - 0.1)
        run.look = replace(run.look, activities={1: ActivityReport("computing", None, seconds), 2: waiting})
        assert host.watch.turn()
    assert host.started == [1]


def test_a_rank_that_does_not_go_on_is_killed_and_replaced(host: Host, run: Run, clock: Clock) -> None:
    pid = host.processes.pids[1]
    run.look = replace(run.look, epoch=1, members=(0, 2))
    assert host.watch.turn() and not host.started
    clock.advance(120.0)
    host.turn_until(lambda: host.started == [1])
    assert host.processes.pids[1] != pid and not run.recovered


def test_a_new_process_that_has_taken_part_once_has_no_more_time_than_others(host: Host, run: Run, clock: Clock) -> None:
    host.end(1)
    host.turn_until(lambda: host.started == [1])
    clock.advance(20.0)
    assert host.watch.turn() and host.started == [1], "it may still load its weights"
    run.look = replace(run.look, members=(0, 1, 2))
    assert host.watch.turn()
    run.look = replace(run.look, epoch=2, members=(0, 2))
    assert host.watch.turn() and host.started == [1]
    clock.advance(20.0)
    host.turn_until(lambda: host.started == [1, 1])


def test_what_ranks_tell_while_redis_was_away_means_nothing(host: Host, run: Run) -> None:
    run.lost = SchedulerLost("cannot reach Redis")
    assert host.watch.turn()
    run.lost, run.look = None, replace(run.look, expired=(0, 1, 2), activities={1: ActivityReport("computing", None, 8.0)})
    assert host.watch.turn() and not run.recovered


def test_redis_may_be_away_for_a_while_and_is_looked_after(run: Run, clock: Clock) -> None:
    kept = list[float]()
    host = Host(run, clock, ranks=(), keep_redis=lambda: kept.append(time.monotonic()))
    for away in (replace(run.look, epoch=None, state="gone"), SchedulerLost("cannot reach Redis at there:1")):
        run.lost, run.look = (away, run.look) if isinstance(away, SchedulerLost) else (None, away)
        kept.clear()
        with pytest.raises(SchedulerLost, match="its keys were deleted" if run.lost is None else "cannot reach Redis at there:1"):
            while host.watch.turn():
                clock.advance(OUTAGE_SECONDS / 4)
        assert len(kept) > 2 and kept[-1] > kept[0] + OUTAGE_SECONDS / 2
        run.lost, run.look = None, replace(run.look, epoch=0, state="up")
        assert host.watch.turn(), "it is back"


@pytest.mark.parametrize("limit", [0, 2])
def test_beyond_the_limit_the_run_is_aborted_with_the_cause(run: Run, clock: Clock, limit: int) -> None:
    host = Host(run, clock, Cluster(max_restarts=limit, restart_window=600))
    for _ in range(limit):
        run.serve()
        host.started.clear()
        host.end(1)
        host.turn_until(lambda: host.started)
    run.serve()
    host.end(0)
    with pytest.raises(RankLost) as lost:
        host.turn_until()
    more = "; 2 ranks had been replaced within 600 s (--max-restarts 2)" if limit else ""
    assert str(lost.value) == f"rank 0 (draft) was killed by SIGKILL{more}"
    assert run.aborted == [(0, str(lost.value))] and len(run.recovered) == limit


def test_a_rank_that_is_not_replaced_is_told_before_it_is_killed(run: Run, clock: Clock) -> None:
    run.look, host = replace(run.look, expired=(1,)), Host(run, clock, Cluster(max_restarts=0))
    with pytest.raises(RankLost, match=r"rank 1 \(stage 1\) stopped answering"):
        host.watch.turn()
    assert run.aborted == [(1, "rank 1 (stage 1) stopped answering")] and not host.processes.exit_statuses


def test_restarts_of_long_ago_do_not_count(run: Run, clock: Clock) -> None:
    host = Host(run, clock, ONE_RESTART)
    for _ in range(2):
        run.look = replace(run.look, members=(0, 1, 2))
        host.started.clear()
        host.end(1)
        host.turn_until(lambda: host.started)
        clock.advance(601)


@pytest.mark.parametrize("state", ["stopping", "gone"])
def test_a_run_that_has_ended_in_order(host: Host, run: Run, state: str) -> None:
    run.look = replace(run.look, state=state, epoch=None if state == "gone" else 0)
    host.end(0, 1, status=0)
    assert host.watch.turn()
    host.end(2, status=0)
    assert not host.watch.turn()
    assert not run.recovered and not run.aborted and not host.started


def test_why_a_run_has_failed_is_told(host: Host, run: Run) -> None:
    """A rank that fails while it is stopped, or the cause for which it was aborted."""
    run.look = replace(run.look, state="stopping")
    host.end(2)
    with pytest.raises(RankLost, match=r"rank 2 \(stage 2\) was killed by SIGKILL"):
        host.turn_until()
    assert run.aborted == [(2, "rank 2 (stage 2) was killed by SIGKILL")]
    run.look = replace(run.look, state="up", failure="rank 1: the disk is full")
    host.processes.start(2)
    host.end(1, status=FAILED)
    host.end(2, status=LOST_ANOTHER)
    with pytest.raises(RankLost, match="rank 1: the disk is full"):
        host.turn_until()


def test_every_recovery_is_told_once_it_is_over(run: Run, clock: Clock) -> None:
    told: list[Recovery] = []
    host = Host(run, clock, ranks=(), on_recovery=told.append)
    first, second = Recovery(1, (2,), "it was killed", 0), Recovery(2, (1,), "it was, too", 0)
    steps = [(0, ()), (1, (first,)), (2, (first, second)), (2, (first, structs.replace(second, served_us=500_000)))]
    seen = []
    for epoch, recoveries in [*steps, steps[-1]]:
        run.look = replace(run.look, epoch=epoch, recoveries=recoveries)
        host.watch.turn()
        seen.append([one.epoch for one in told])
    assert seen == [[], [], [1], [1, 2], [1, 2]] and told[1].seconds == 0.5


def test_ranks_of_a_host_that_is_gone_are_taken_over_by_another(run: Run, clock: Clock) -> None:
    """The watch of whichever host sees it first gives them away; the host that gets them starts them."""
    run.look = replace(run.look, places={0: "here", 1: "there", 2: "there"}, lost_nodes=("there",))
    spare, host = Host(run, clock, ranks=(), node="spare"), Host(run, clock, ranks=(0,), spares=OneSpare())
    assert host.watch.turn()
    assert run.recovered == [(0, (1, 2), "there stopped answering", {1: "spare", 2: "spare"})]
    assert spare.watch.turn() and spare.started == [1, 2] and host.started == []


def test_without_another_host_the_run_ends(run: Run, clock: Clock) -> None:
    run.look = replace(run.look, places={0: "here", 1: "there"}, lost_nodes=("there",))
    with pytest.raises(RankLost, match="there stopped answering; there are no spares"):
        Host(run, clock, ranks=(0,), spares=OneSpare(is_gone=True)).watch.turn()
    assert run.aborted == [(1, "there stopped answering; there are no spares")]


def test_ranks_that_are_replaced_too_often_move_to_another_host(run: Run, clock: Clock) -> None:
    host, moved = Host(run, clock, ONE_RESTART, spares=OneSpare()), []
    for _ in range(2):
        run.look = replace(run.look, members=(0, 1, 2))
        host.end(1)
        host.turn_until(lambda: run.recovered)
        moved.append(run.recovered.pop()[-1])
    assert moved == [{}, {1: "spare"}] and host.started == [1]


def test_a_host_to_which_nothing_comes_is_left(run: Run, clock: Clock) -> None:
    """Both ends of a link tell their supervisors what they do; no process of either is at fault."""
    waiting = {2: ActivityReport("waiting", 1, 9.0, 0.1), 1: ActivityReport("idle", None, 9.0, 0.1)}
    run.look = replace(run.look, places={0: "here", 1: "here", 2: "there"}, activities=waiting)
    host = Host(run, clock, ranks=(0, 1), spares=OneSpare(left="there"))
    assert host.watch.turn() and not host.processes.exit_statuses
    ((_, lost, reason, places),) = run.recovered
    assert (lost, places) == ((2,), {2: "spare"})
    assert "there is left: rank 1 (stage 1) kept rank 2 (stage 2) waiting" in reason


def test_where_no_host_can_be_left_hosts_that_cannot_reach_each_other_go_on_trying(host: Host, run: Run) -> None:
    """Until the ranks themselves give up."""
    run.look = replace(run.look, activities={1: ActivityReport("connecting", 2, 9.0), 2: ActivityReport("connecting", 1, 9.0)})
    assert all(host.watch.turn() for _ in range(3))
    assert not host.processes.exit_statuses and not host.started and not run.recovered


def test_a_rank_that_has_moved_is_ended_where_it_was(host: Host, run: Run) -> None:
    """A host that was taken for dead comes back: its old processes must not go on."""
    run.look = replace(run.look, places={0: "here", 1: "elsewhere", 2: "here"})
    assert host.watch.turn() and host.processes.pids.keys() == {0, 2}
    assert not run.recovered and not host.started
