"""Which ranks are alive, and how they go on together: each renews a lease in Redis, and waits for the next epoch of the run when
another one was lost. Also the claim to a run's name, before its ranks meet. Knows no weights.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from pipedec.cluster.place import RankPlace
from pipedec.cluster.processes import FAILED, LOST_ANOTHER, leave
from pipedec.core.errors import EpochEnded, PipedecError, RankLost, SchedulerInterrupted, SchedulerLost, UserError
from pipedec.engine.activity import Activity
from pipedec.scheduler import BaseScheduler, RankScheduler, RunStatus, SupervisorScheduler
from pipedec.scheduler.scripts import LEASE_MS
from pipedec.topology import Topology, rank_name

LEASE_RENEWAL_SECONDS = 1.0
GIVE_UP_SECONDS = 5.0
RECOVERY_SECONDS = 20.0  # for a rank to take part in the next epoch when one has ended, or to reach Redis again
BUSY_LEASE_MS = 30_000  # while a rank meets the others, loads weights or warms up, which may block its other threads
PATIENCE_SECONDS = 1.5  # for a supervisor to see that a process has ended, before ranks begin the next epoch themselves
_BUSY = ("meeting", "loading", "connecting")
_POLL_SECONDS = 0.02
logger = logging.getLogger(__name__)


class Abortable(Protocol):
    """The transfers of a rank, which wait for its peers (``transport.torch_distributed``)."""

    can_rejoin: bool

    def abort(self) -> None: ...


class LeaseKeeper:
    """Renews a rank's lease from a thread, so that a rank in a long computation does not count as dead.

    The thread also ends the process if the run has failed and the rank does not notice because it waits in a transfer for a peer
    that has stopped, or if the process itself was suspended for longer than its lease.

    Where lost ranks are replaced (``place.recovers``), this rank leaves it to supervisors to judge the others, waits for a Redis
    that is away, and survives the end of an epoch.

    Args:
        transport: is aborted when the epoch has ended, to free the rank from a transfer; where it cannot rejoin, as over NCCL,
            this process ends instead.
        give_up_seconds: for the rank itself to notice that the run has failed, before its process is ended.
    """

    def __init__(
        self, scheduler: RankScheduler, place: RankPlace, activity: Activity, transport: Abortable,
        renewal_seconds: float = LEASE_RENEWAL_SECONDS, give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._place = place
        self._activity = activity
        self._transport = transport
        self._renewal_seconds = renewal_seconds
        self._give_up_seconds = give_up_seconds
        self._lease_ms = scheduler.lease_ms
        self._changing = threading.Lock()  # held while the epoch changes, and while what is left of the last one is interrupted
        self._trouble: float | None = None  # since when the epoch has ended or Redis is away; monotonic
        self._is_up = False  # Redis has known the run
        self._is_settled = False
        self._turned = time.monotonic()  # when the lease was renewed last, or Redis was seen to be away
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease of rank {place.rank}", daemon=True)

    def start(self) -> None:
        with suppress(EpochEnded):  # the meeting will notice it
            self._renew()
        self._thread.start()

    def enter(self, epoch: int) -> None:
        """Take part in another epoch from now on. Raises EpochEnded if that has ended, too."""
        with self._changing:
            self._scheduler.enter(epoch)
            self._trouble = None
            self._is_settled = False
            self._activity.meet_again()
        self._renew()

    def settle(self) -> None:
        """The rank has met the others and can serve: from now on its lease is short. Raises as ``enter``."""
        self._activity.begin("idle")
        self._is_settled = True
        self._renew()

    def stop(self) -> None:
        """Give up the lease: this rank ends as planned."""
        self._ended.set()
        self._thread.join(timeout=2 * self._renewal_seconds)
        self._scheduler.leave(self._place.rank)

    def _renew(self) -> None:
        report = self._activity.activity()
        if self._place.recovers:
            is_busy = report.kind in _BUSY or (report.kind == "warming" and not self._is_settled)
            self._scheduler.lease_ms = BUSY_LEASE_MS if is_busy else self._lease_ms
        self._scheduler.renew_lease(self._place.rank, report)

    def _keep(self) -> None:
        failure: str | None = None
        while failure is None:
            if self._ended.wait(self._renewal_seconds):
                return
            failure = self._turn()
        self._transport.abort()
        if not self._ended.wait(self._give_up_seconds):  # the rank's own loop notices and reports the same, unless it is stuck
            self._end(failure, FAILED)

    def _turn(self) -> str | None:
        """Renew the lease. Returns why the process must end, if it must."""
        late = time.monotonic() - self._turned
        suspension = f"was suspended for {late:.0f} s, longer than its lease" if late > self._scheduler.lease_ms / 1000 else None
        if suspension and not self._place.recovers:
            return suspension
        epoch, self._turned = self._scheduler.epoch, time.monotonic()
        try:
            self._renew()
            if self._place.recovers:
                is_known = self._scheduler.current_epoch() is not None
                if self._is_up and not is_known:  # that ends the epoch, too
                    raise EpochEnded(str(self._scheduler.lost_run()))
                self._is_up |= is_known
            self._trouble = None
            if failure := self._scheduler.failure():
                return failure
            if self._place.recovers and self._place.survives:  # supervisors judge the others
                return None
            if not (lost := self._scheduler.expired_ranks()):
                return None
            message = f"{', '.join(map(rank_name, lost))} stopped answering"
            if not self._place.recovers:  # else all are started again
                self._scheduler.abort(self._place.rank, message)
            return message
        except EpochEnded as error:
            if suspension:  # another process may have its place
                self._end(suspension, LOST_ANOTHER)
            return self._outlive(epoch, error) if self._place.recovers else str(error)
        except SchedulerLost as error:
            self._turned = time.monotonic()
            return self._wait(error) if self._place.recovers else str(error)
        except PipedecError as error:
            return str(error)

    def _outlive(self, epoch: int, error: EpochEnded) -> str | None:
        """The epoch has ended: interrupt the rank, or end its process if its transport cannot rejoin. A rank that loads goes on,
        however long that takes: it holds its place in the present epoch, so that the others wait for it.
        """
        with self._changing:
            if self._scheduler.epoch != epoch:
                return None
            if not self._transport.can_rejoin:
                leave()
            self._activity.interrupt(error)
            self._transport.abort()
        if self._activity.activity().kind == "loading" and self._hold_place():
            self._trouble = None
            return None
        return self._wait(error)

    def _hold_place(self) -> bool:
        """Take the rank's lease in the run's present epoch. Returns whether this process may take part in it."""
        with suppress(EpochEnded, SchedulerLost):
            epoch = self._scheduler.current_epoch()
            if self._place.survives and epoch is not None and not _is_replaced(self._scheduler, self._place.rank):
                self._scheduler.renew_lease(self._place.rank, self._activity.activity(), epoch)
                return True
        return False

    def _wait(self, error: PipedecError) -> str | None:
        """Wait for the next epoch or for Redis; returns why the process must end after ``RECOVERY_SECONDS``."""
        now = time.monotonic()
        if self._trouble is None:
            logger.warning("waits for the next epoch, or for Redis: %s", error)
        self._trouble = self._trouble or now
        return str(error) if now > self._trouble + RECOVERY_SECONDS else None

    def _end(self, reason: str, status: int) -> None:
        logger.error("ends: %s", reason)
        with suppress(OSError):  # a full disk keeps no rank alive
            print(f"pipedec rank {self._place.rank}: {reason}", file=sys.stderr, flush=True)
        os._exit(status)


def next_epoch(scheduler: RankScheduler, rank: int, error: PipedecError) -> int:
    """Wait for the epoch after the one of ``scheduler``, which ``error`` has ended or will; begin it if no rank was lost. Raises
    RankLost if the run has failed, another process has taken this rank's place, Redis has lost the run, or there is no next epoch
    in time. The last two abort the run.
    """
    with suppress(EpochEnded, SchedulerLost):
        scheduler.suspect(rank, str(error))
    is_outage = isinstance(error, SchedulerLost)
    now = began = time.monotonic()
    while now < began + RECOVERY_SECONDS:
        patience = 0.0 if isinstance(error, SchedulerInterrupted) else PATIENCE_SECONDS
        try:
            if (failure := scheduler.failure()) is not None:
                raise RankLost(failure)
            epoch = scheduler.current_epoch()
            if epoch is None:
                message = str(scheduler.lost_run())
                scheduler.enter(0)  # that of a run that is not stored: readers of answers shall see why this one has ended
                break
            if epoch == scheduler.epoch:
                epoch = scheduler.recover([], str(error), counts=not is_outage) if now > began + patience else None
            if epoch is not None:
                if _is_replaced(scheduler, rank):  # this host was cut off, or the process suspended
                    raise RankLost("another process has taken its place")
                return epoch
        except SchedulerLost as trouble:
            error = trouble
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
    else:
        message = f"{error}; the run did not recover within {RECOVERY_SECONDS:.0f} s"
    with suppress(PipedecError):
        scheduler.abort(rank, message)
    raise RankLost(message)


def _is_replaced(scheduler: RankScheduler, rank: int) -> bool:
    """Whether a rank was lost after the epoch of ``scheduler``, so that another process has its place."""
    return any(rank in recovery.lost for recovery in scheduler.status().recoveries if recovery.epoch > scheduler.epoch)


def claim_run(scheduler: SupervisorScheduler, goes_on: Callable[[RunStatus], bool] = lambda status: False) -> None:
    """Make sure that no other ranks serve under this run's name, and delete the keys that a dead run has left, unless that
    ``goes_on``. To be called before the ranks meet and write any key. Raises UserError if a run of this name is up.
    """
    deadline = time.monotonic() + LEASE_MS / 1000 + LEASE_RENEWAL_SECONDS
    while True:
        stages = max([scheduler.topology.num_stages, *scheduler.members()])  # a run that is up may have more ranks than ours
        run = BaseScheduler(scheduler.client, scheduler.run_id, Topology.even(stages, 1))
        if not (status := run.status()).alive:
            return None if goes_on(status) else run.clear()
        if time.monotonic() > deadline:  # these are not just the last leases of dead ranks
            name = scheduler.run_id
            raise UserError(f"a run named {name!r} is already up on that Redis: stop it, or give another --run NAME")
        time.sleep(0.2)
