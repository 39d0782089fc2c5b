"""Watches the ranks of one host and replaces those that are lost, for ``pipedec up`` and for the nodes of a cluster.

Every action follows from the present state of processes and Redis; the first watch to see a loss begins the next epoch. Knows
processes and the scheduler; the caller decides how ranks are started, where Redis runs and which hosts there are. Loads no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pipedec.cluster.processes import ABORTED, LOST_ANOTHER, WatchedRanks, killed_ranks
from pipedec.cluster.spares import Spares
from pipedec.cluster.stalls import find_stall, stall_limit
from pipedec.config.settings import Cluster
from pipedec.core.errors import PipedecError, RankLost, SchedulerLost
from pipedec.messages.stats import Recovery
from pipedec.scheduler import Supervision, SupervisorScheduler
from pipedec.topology import rank_name

TURN_SECONDS = 0.5  # between two turns, unless a process ends
OUTAGE_SECONDS = 10.0  # how long Redis may be away, or without the run
_LATE_SECONDS = 3.0  # on a busy machine a killed rank is seen to end long after its neighbours
_ABORTED_SECONDS = 1.0  # as above on an idle machine; less than ``lease.PATIENCE_SECONDS``, when ranks begin the next epoch
_ENTER_SECONDS = 15.0  # for a live rank to take part in a new epoch
_START_SECONDS = 60.0  # the same for a new process, which checks its checkpoints first; it loads its weights afterwards
_SLOW_SECONDS = 1.0  # after a slower reply from Redis, expired leases may be Redis's fault
_GRACE_SECONDS = 5.0  # for ranks to renew their leases afterwards

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchedHost:
    """The host of a watch."""

    node: str  # its name in ``Supervision.places``
    processes: WatchedRanks  # its ranks
    start_rank: Callable[[int], None]  # starts the process of a rank here, for the first time or again
    keep_redis: Callable[[], None] | None = None  # called at every turn; restarts Redis if it has died; None if not started here
    on_recovery: Callable[[Recovery], None] = lambda recovery: None  # called with every recovery when it is over

    def has(self, rank: int, look: Supervision) -> bool:
        """Whether a rank belongs here, so that no other host has taken it over."""
        return look.places.get(rank, self.node) == self.node


class HostWatch:
    """The watch over one host.

    Args:
        scheduler: used by this watch alone.
        spares: decides which other hosts take over ranks that are not replaced here; None if there are no others.
        timestep_ms: as planned, or emulated; 0 if neither is.
    """

    def __init__(
        self, scheduler: SupervisorScheduler, host: WatchedHost, settings: Cluster, spares: Spares | None = None,
        timestep_ms: float = 0.0,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._host = host
        self._processes = host.processes
        self._settings = settings
        self._spares = spares
        self._stall_seconds = stall_limit(settings.stall_timeout, timestep_ms)
        # All times are on the monotonic clock.
        # When ranks were replaced within the last ``restart_window``, and in which epoch; not because of a request.
        self._restarts: list[tuple[float, int]] = []
        # When a rank was last lost, here or on another host, until the run is served again. For ``_LATE_SECONDS`` the ends of
        # ranks that have served count as its consequences; those of others never do, or a rank could fail without end.
        self._loss: float | None = None
        self._served: set[int] = set()
        self._noted = 0  # the last epoch whose lost ranks are in ``_loss``
        self._outage: float | None = None  # since when Redis, or the run in it, is away
        self._grace_until = 0.0
        self._epoch, self._since = -1, 0.0  # the current one, and since when it is known
        self._first_end: float | None = None  # when the first of several ranks was seen to have lost another
        self._started: dict[int, float] = {}  # when the processes began that have not taken part in any epoch yet
        self._reasons: dict[int, str] = {}  # why this watch has killed ranks that are yet to be replaced
        self._announced = 0  # the last epoch that was passed to ``on_recovery``

    def turn(self) -> bool:
        """Look once at everything, and do what is necessary; False when the run has ended in order, with all ranks here. To be
        called whenever a process ends, and at least every ``TURN_SECONDS``. Raises RankLost if the run has failed, or too many
        ranks were lost (the run has been aborted, so the others end, too); SchedulerLost if Redis, or the run in it, is gone.
        """
        if self._settings.recovers and self._host.keep_redis is not None:
            self._host.keep_redis()
        self._processes.read(0.0)  # so that no rank waits for a reader of its reports
        ended = self._processes.exit_statuses  # before ``supervise``: these are no members of an epoch that begins later
        began = time.monotonic()
        try:
            look = self._scheduler.supervise(self._host.node, self._processes.alive)
            return self._judge(look, ended, began)
        except SchedulerLost as error:
            if self._settings.recovers:
                return self._wait_for(error)
            if killed := killed_ranks(ended):  # Redis was lost with the rank
                raise RankLost(self._describe(killed[0], {})) from None
            raise

    def _judge(self, look: Supervision, ended: Mapping[int, int], began: float) -> bool:
        if look.failure is not None or (look.state == "stopping" and any(ended.values())):
            raise self._failed(look)
        if look.state == "stopping" or (look.epoch is None and ended and not any(ended.values())):
            return ended.keys() != self._processes.pids.keys()
        if look.epoch is None:
            return self._wait_for(self._scheduler.lost_run())
        now = time.monotonic()
        if self._outage is not None or now - began > _SLOW_SECONDS:  # all ranks waited for Redis, too
            self._grace_until = now + _GRACE_SECONDS
        self._outage = None
        if look.epoch != self._epoch:
            logger.info("the run is in epoch %d", look.epoch)
            self._epoch, self._since = look.epoch, now
            self._scheduler.enter(look.epoch)
        self._note_recoveries(look)
        for rank in look.members:
            self._started.pop(rank, None)
        for rank in [rank for rank in self._processes.pids if not self._host.has(rank, look)]:  # other hosts have it
            self._processes.end(rank)
            self._processes.forget(rank)
        if not self._take_over(look):
            self._kill(look)
            self._replace(look)
        return True

    def _wait_for(self, error: SchedulerLost) -> bool:
        """Wait for Redis, or for a rank to report that the run is not in it. Raises ``error`` after ``OUTAGE_SECONDS``."""
        now = time.monotonic()
        if self._outage is None:
            logger.warning("waits up to %.0f s for Redis: %s", OUTAGE_SECONDS, error)
        self._outage = self._outage or now
        if now - self._outage > OUTAGE_SECONDS:
            raise error
        return True

    def _note_recoveries(self, look: Supervision) -> None:
        """Note ranks that other hosts have lost, and whether the run is served. Pass on every recovery that is over: its epoch
        is served, or has ended before it was.
        """
        for recovery in look.recoveries:
            if recovery.epoch > self._noted and not all(self._host.has(rank, look) for rank in recovery.lost):
                self._loss = time.monotonic()
            self._noted = max(self._noted, recovery.epoch)
            is_served = recovery.seconds is not None
            if recovery.epoch > self._announced and (is_served or recovery.epoch != look.epoch):
                self._announced = recovery.epoch
                outcome = f"was served after {recovery.seconds:.1f} s" if is_served else "was not served"
                logger.info("epoch %d %s: %s", recovery.epoch, outcome, recovery.reason)
                self._host.on_recovery(recovery)
        if look.epoch == 0 or any(one.epoch == look.epoch and one.seconds is not None for one in look.recoveries):
            self._loss = None
            self._served.update(look.members)

    def _take_over(self, look: Supervision) -> bool:
        """Give the ranks of hosts that are gone or cut off to other hosts; returns whether there are any."""
        if self._spares is None or time.monotonic() < self._grace_until:
            return False
        reasons = dict.fromkeys(look.lost_nodes, "stopped answering")
        stall = find_stall(look.activities, self._stall_seconds)
        if stall is not None and (host := self._spares.host_to_leave(stall, look)) is not None:
            reasons = {host: f"is left: {rank_name(stall.suspect)} {stall.reason}"}
        away = sorted(rank for rank, node in look.places.items() if node in reasons)
        if away:
            hosts = dict.fromkeys(look.places[rank] for rank in away)
            self._move(self._spares, look, away, "; ".join(f"{host} {reasons[host]}" for host in hosts))
        return bool(away)

    def _move(self, spares: Spares, look: Supervision, ranks: Sequence[int], reason: str) -> None:
        """Give these ranks to other hosts. Raises RankLost if no device is free; the run has then been aborted."""
        logger.warning("gives %s to other hosts: %s", ", ".join(map(rank_name, ranks)), reason)
        try:
            places = spares.reassigned(ranks, look)
        except RankLost as error:
            message = f"{reason}; {error}"
            self._scheduler.abort(ranks[0], message)
            raise RankLost(message) from None
        self._scheduler.recover(ranks, reason, places)

    def _kill(self, look: Supervision) -> None:
        """Kill own ranks that stall, have stopped answering, or did not take part in the epoch."""
        now, alive, doomed = time.monotonic(), self._processes.alive, dict[int, str]()  # with reasons, as ends of sentences
        if now > self._grace_until:
            stall = find_stall(look.activities, self._stall_seconds)
            if stall is not None and not stall.is_apart:
                doomed[stall.suspect] = stall.reason
            doomed |= dict.fromkeys(look.expired, "stopped answering")
        for rank in set(alive) - set(look.members):
            if now > max(self._since + _ENTER_SECONDS, self._started.get(rank, 0.0) + _START_SECONDS):
                doomed[rank] = "did not take part in the next epoch"
        doomed = {rank: reason for rank, reason in doomed.items() if rank in alive}
        self._reasons |= doomed
        if doomed and not self._settings.recovers:  # the cause must be known before others see that they have lost a rank
            self._give_up(look, list(doomed), min(doomed))
        activities = "; ".join(f"{rank} {activity}" for rank, activity in sorted(look.activities.items()))
        for rank, reason in doomed.items():
            logger.warning("kills %s, which %s; the ranks: %s", rank_name(rank), reason, activities)
            self._processes.end(rank)

    def _replace(self, look: Supervision) -> None:
        """Start every own rank that does not run; begin the next epoch if one of them took part in this one."""
        ended, settings = self._processes.exit_statuses, self._settings
        given = [rank for rank, node in look.places.items() if node == self._host.node and rank not in self._processes.pids]
        lost = sorted(rank for rank in ended if self._host.has(rank, look))
        known = sorted(set(lost) & set(look.members))
        if not lost + given:
            return
        statuses = set(ended.values())
        if known and statuses <= {LOST_ANOTHER, ABORTED}:  # another rank, which these have lost, may yet be seen to have ended
            self._first_end = self._first_end or time.monotonic()
            if time.monotonic() < self._first_end + (_LATE_SECONDS if LOST_ANOTHER in statuses else _ABORTED_SECONDS):
                return
        self._first_end = None
        # The ranks that have made the others end, as far as can be known: not those that report the loss of another rank, nor
        # those that end soon after a loss (over NCCL, a library may abort or fail a rank whose neighbour is gone). As such an
        # abort may come first, it is the cause only if no other rank is.
        follows_loss = self._loss is not None and time.monotonic() < self._loss + _LATE_SECONDS
        explained = self._served if follows_loss else set()
        own = [rank for rank in lost if ended[rank] != LOST_ANOTHER and rank not in explained]
        causes = [rank for rank in own if ended[rank] != ABORTED] or own[:1]
        now, count = time.monotonic(), min(len(causes), 1) if look.tried is None else 0
        charged = {one.epoch for one in look.recoveries if one.request is not None}
        since = now - settings.restart_window
        self._restarts = [(when, epoch) for when, epoch in self._restarts if when > since and epoch not in charged]
        if not settings.recovers or len(self._restarts) + count > settings.max_restarts:
            return self._give_up(look, lost, (causes or lost)[0])
        self._restarts += [(now, self._epoch + 1)] * count
        if causes:
            self._loss = time.monotonic()
        if known:
            reason = "; ".join(self._describe(rank, look.ends) for rank in causes or known)
            logger.warning("begins the next epoch: %s", reason)
            self._scheduler.recover(known, reason)
        for rank in [*lost, *given]:
            self._served.discard(rank)
            self._reasons.pop(rank, None)
            self._started[rank] = time.monotonic()
            self._host.start_rank(rank)
            restarts = len(self._restarts), settings.max_restarts, settings.restart_window
            logger.warning("started %s again; %d of %d restarts within %.0f s", rank_name(rank), *restarts)

    def _give_up(self, look: Supervision, lost: Sequence[int], cause: int) -> None:
        """Give ranks that are no longer replaced here to other hosts. Raises RankLost if there are none."""
        message, settings = self._describe(cause, look.ends), self._settings
        if settings.recovers:
            ranks = f"{len(self._restarts)} rank{'' if len(self._restarts) == 1 else 's'}"
            limit = f"(--max-restarts {settings.max_restarts})"
            message += f"; {ranks} had been replaced within {settings.restart_window:.0f} s {limit}"
        logger.error("replaces no more ranks: %s", message)
        if self._spares is not None:
            self._move(self._spares, look, lost, message)
        else:
            self._scheduler.abort(cause, message)
            raise RankLost(message)

    def _failed(self, look: Supervision) -> RankLost:
        """Why the run was aborted, or a rank failed while it stopped. A rank that was killed comes first: it cannot report why,
        and the others only report that they have lost it.
        """
        deadline = time.monotonic() + _LATE_SECONDS
        while set((ended := self._processes.exit_statuses).values()) <= {LOST_ANOTHER} and time.monotonic() < deadline:
            time.sleep(TURN_SECONDS)
        killed = killed_ranks(ended)
        early = [rank for rank, status in ended.items() if status == 0 and look.state != "stopping"]
        if look.failure is not None and not killed and not early:
            return RankLost(look.failure)
        rank = [*killed, *early, *(rank for rank, status in ended.items() if status > 0)][0]
        with suppress(PipedecError):
            self._scheduler.abort(rank, self._describe(rank, look.ends))
        return RankLost(self._describe(rank, look.ends))

    def _describe(self, rank: int, ends: Mapping[int, str]) -> str:
        """How a rank ended, as a sentence."""
        reported = f": {ends[rank]}" if rank in ends else ""
        return f"{rank_name(rank)} {self._reasons.get(rank) or self._processes.describe_end(rank)}{reported}"
