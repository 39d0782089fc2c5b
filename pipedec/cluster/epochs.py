"""From one epoch of the run to the next, as a rank sees it whose own process goes on.

It waits until lost ranks are replaced, and begins the epoch itself if none was lost. Knows no transport and no weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from pipedec.cluster.lease import RECOVERY_SECONDS
from pipedec.core import EpochEnded, PipedecError, RankLost, SchedulerInterrupted, SchedulerLost
from pipedec.scheduler import RankScheduler

PATIENCE_SECONDS = 1.5  # in which a supervisor sees that a process has ended
_POLL_SECONDS = 0.02


def next_epoch(scheduler: RankScheduler, rank: int, error: PipedecError, restore: Callable[[], None]) -> int:
    """Wait for the epoch after the one of ``scheduler``, which ``error`` has ended or will.

    Args:
        restore: called when Redis has lost the run, for rank 0 to write it back.

    Raises:
        RankLost: the run has failed; or it is aborted, because there is no next epoch in time.
    """
    with suppress(EpochEnded, SchedulerLost):
        scheduler.suspect(rank, str(error))
    now = began = time.monotonic()
    while now < began + RECOVERY_SECONDS:
        patience = 0.0 if isinstance(error, SchedulerInterrupted) else PATIENCE_SECONDS
        try:
            if (epoch := _look(scheduler, error, now > began + patience, restore)) is not None:
                _check_place(scheduler, rank)
                return epoch
        except SchedulerLost as trouble:
            error = trouble
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
    message = f"{error}; the run did not recover within {RECOVERY_SECONDS:.0f} s"
    with suppress(PipedecError):
        scheduler.abort(rank, message)
    raise RankLost(message)


def _check_place(scheduler: RankScheduler, rank: int) -> None:
    """Raises RankLost if another process has taken over this rank, because this one's host was cut off or it was suspended."""
    if any(rank in recovery.lost for recovery in scheduler.status().recoveries if recovery.epoch > scheduler.epoch):
        raise RankLost("another process has taken its place")


def _look(scheduler: RankScheduler, error: PipedecError, begins: bool, restore: Callable[[], None]) -> int | None:
    """The run's epoch if it is another one, after this rank has begun it if it is to."""
    if (failure := scheduler.failure()) is not None:
        raise RankLost(failure)
    epoch = scheduler.current_epoch()
    if epoch is None:
        restore()
    elif epoch != scheduler.epoch:
        return epoch
    elif begins:
        return scheduler.recover([], str(error))
    return None
