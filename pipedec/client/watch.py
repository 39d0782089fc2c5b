"""Decides when a waiting client gives up, from the state of a run, the silence of answers, and outages of Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pipedec.client.reply import Reply
from pipedec.core.errors import OutOfDescriptors, PipedecError, RankLost
from pipedec.scheduler import RunStatus
from pipedec.scheduler.protocol import RESTORED
from pipedec.topology import rank_name

LOOK_SECONDS = 2.0  # between two checks of the state of the run
SILENCE_SECONDS = 600.0  # how long to wait for the next event of an answer before the cluster counts as lost
OUTAGE_SECONDS = 10.0  # how long Redis may be away, and a run that recovers may be gone from it


class RunWatch:
    """A client's view of its run."""

    def __init__(self) -> None:
        self._recovers = False
        self._gone_since: float | None = None
        self._restored: int | None = None  # the last epoch that began because Redis had lost the run; None before the first look
        self._unreachable_since: float | None = None

    def check(self, status: RunStatus) -> None:
        """Raises RankLost if a run will not answer any more. One that recovers, or that Redis has just lost, will."""
        self._unreachable_since = None
        if status.failure is not None:
            raise RankLost(status.failure)
        if status.expired and not status.recovers:
            raise RankLost(f"{', '.join(map(rank_name, status.expired))} stopped answering")
        if status.state != "gone":
            self._recovers, self._gone_since = status.recovers and status.state == "up", None
            return
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if not self._recovers or now > self._gone_since + OUTAGE_SECONDS:
            raise RankLost("the cluster was stopped before it answered")

    def outage(self, error: PipedecError) -> None:
        """Redis, or the run in it, is away. Raises ``error`` if that lasts too long, or if lost ranks are not replaced."""
        if isinstance(error, OutOfDescriptors):
            return
        now = time.monotonic()
        self._unreachable_since = self._unreachable_since or now
        if not self._recovers or now > self._unreachable_since + OUTAGE_SECONDS:
            raise error

    def is_forgotten(self, status: RunStatus) -> bool:
        """Whether Redis had lost the run's data at the last call of ``lost``."""
        return status.state == "gone" or (self._restored is not None and _restored(status) > self._restored)

    def lost(self, status: RunStatus, replies: Iterable[Reply]) -> list[Reply]:
        """Open answers that Redis no longer knows because it has lost its data; each is returned once."""
        if status.state == "gone":
            return []  # rank 0 may restore the run with them
        is_forgotten, self._restored = self.is_forgotten(status), _restored(status)
        if not is_forgotten:
            return []
        return [reply for reply in replies if not reply.has_ended and reply.number not in status.running]


def _restored(status: RunStatus) -> int:
    return max((one.epoch for one in status.recoveries if one.reason == RESTORED), default=0)


def is_away(status: RunStatus) -> bool:
    """Whether the run does not serve: it recovers, or Redis has lost it."""
    return status.is_recovering or status.state == "gone"


def check_silence(status: RunStatus, replies: Iterable[Reply], seconds: float) -> None:
    """Raises RankLost if an answer has been silent for ``seconds`` without waiting for others."""
    now = time.monotonic()
    for reply in replies:
        if reply.waits or (status.running and reply.number not in status.running):
            reply.heard = now  # it waits while others are answered
        elif now > reply.heard + seconds and not reply.has_ended:
            raise RankLost(f"no event has arrived for {seconds:.0f} s; see pipedec status")
