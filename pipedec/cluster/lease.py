"""Which ranks are alive: each rank renews a lease in Redis. Also the claim to a run's name, before its ranks meet."""

from __future__ import annotations

import os
import sys
import threading
import time

from pipedec.core import PipedecError, UserError
from pipedec.scheduler import RedisScheduler
from pipedec.topology import Topology, rank_name

LEASE_RENEWAL_SECONDS = 1.0
GIVE_UP_SECONDS = 5.0


class LeaseKeeper:
    """Renews a rank's lease from a thread, so that a rank in a long computation does not count as dead.

    The thread also ends the process if the run has failed and the rank does not notice because it waits in a transfer for a peer
    that has stopped, or if the process itself was suspended for longer than its lease.
    """

    def __init__(self, scheduler: RedisScheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease of rank {rank}", daemon=True)

    def start(self) -> None:
        self._scheduler.renew_lease(self._rank)
        self._thread.start()

    def stop(self) -> None:
        """Give up the lease: this rank ends as planned."""
        self._ended.set()
        self._thread.join(timeout=2 * LEASE_RENEWAL_SECONDS)
        self._scheduler.leave(self._rank)

    def _lost_peer(self) -> str | None:
        """The ranks whose lease has expired, as a message; None if there are none. Aborts the run, so that no rank waits for
        them.
        """
        lost = self._scheduler.expired_ranks()
        if not lost:
            return None
        message = f"{', '.join(map(rank_name, lost))} stopped answering"
        self._scheduler.abort(self._rank, message)
        return message

    def _keep(self) -> None:
        failure: str | None = None
        renewed = time.monotonic()
        while failure is None:
            if self._ended.wait(LEASE_RENEWAL_SECONDS):
                return
            if (late := time.monotonic() - renewed) > self._scheduler.lease_ms / 1000:
                failure = f"was suspended for {late:.0f} s, longer than its lease"
                break
            try:
                self._scheduler.renew_lease(self._rank)
                renewed = time.monotonic()
                failure = self._scheduler.failure() or self._lost_peer()
            except PipedecError as error:
                failure = str(error)
        if not self._ended.wait(GIVE_UP_SECONDS):  # the rank's own loop notices and reports the same, unless it is stuck
            print(f"pipedec rank {self._rank}: {failure}", file=sys.stderr, flush=True)
            os._exit(1)


def claim_run(scheduler: RedisScheduler) -> None:
    """Make sure that no other ranks serve under this run's name, and delete the keys that a dead run has left.

    To be called before the ranks meet: until then no rank of this run has written any key.

    Raises:
        UserError: a run of this name is up.
    """
    deadline = time.monotonic() + scheduler.lease_ms / 1000 + LEASE_RENEWAL_SECONDS
    while (run := _run_found(scheduler)).status().alive:
        if time.monotonic() > deadline:  # these are not just the last leases of dead ranks
            name = scheduler.keys.run_id
            raise UserError(f"a run named {name!r} is already up on that Redis: stop it, or give another --run NAME")
        time.sleep(0.2)
    run.clear()


def _run_found(scheduler: RedisScheduler) -> RedisScheduler:
    """The run that has this name now; it may have more ranks than ours will have."""
    stages = max([scheduler.topology.num_stages, *scheduler.members()])
    return RedisScheduler(scheduler.client, scheduler.keys.run_id, Topology.even(stages, 1))
