"""Decides when a waiting client gives up, from the state of a run, the silence of answers, and outages of Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pipedec.client.reply import Reply
from pipedec.core.errors import OutOfDescriptors, PipedecError, RankLost
from pipedec.scheduler import RunStatus
from pipedec.topology import rank_name

LOOK_SECONDS = 2.0  # between two checks of the state of the run
SILENCE_SECONDS = 600.0  # how long to wait for the next event of an answer before the cluster counts as lost
OUTAGE_SECONDS = 10.0  # how long Redis may be away


class RunWatch:
    """A client's view of its run."""

    def __init__(self) -> None:
        self._recovers = False
        self._unreachable_since: float | None = None

    def check(self, status: RunStatus) -> None:
        """Raises RankLost if a run will not answer any more. One that recovers will."""
        self._unreachable_since = None
        if status.failure is not None:
            raise RankLost(status.failure)
        if status.expired and not status.recovers:
            raise RankLost(f"{', '.join(map(rank_name, status.expired))} stopped answering")
        if status.state == "gone":
            raise RankLost("the cluster was stopped before it answered, or its Redis lost its data (set appendonly yes there)")
        self._recovers = status.recovers and status.state == "up"

    def outage(self, error: PipedecError) -> None:
        """Redis is away. Raises ``error`` if that lasts too long, or if lost ranks are not replaced."""
        if isinstance(error, OutOfDescriptors):
            return
        now = time.monotonic()
        self._unreachable_since = self._unreachable_since or now
        if not self._recovers or now > self._unreachable_since + OUTAGE_SECONDS:
            raise error


def check_silence(status: RunStatus, replies: Iterable[Reply], seconds: float) -> None:
    """Raises RankLost if an answer has been silent for ``seconds`` without waiting for others."""
    now = time.monotonic()
    for reply in replies:
        if reply.waits or (status.running and reply.number not in status.running):
            reply.heard = now  # it waits while others are answered
        elif now > reply.heard + seconds and not reply.has_ended:
            raise RankLost(f"no event has arrived for {seconds:.0f} s; see pipedec status")
