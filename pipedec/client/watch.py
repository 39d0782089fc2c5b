"""When a waiting client gives up: what the state of a run, and the silence of answers, say about it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pipedec.client.reply import Reply
from pipedec.core import RankLost
from pipedec.scheduler import RunStatus
from pipedec.topology import rank_name

LOOK_SECONDS = 2.0  # between two looks at the state of the run
SILENCE_SECONDS = 600.0  # how long to wait for the next event of an answer before the cluster counts as lost


def check_run(status: RunStatus) -> None:
    """Raises RankLost if a run answers nothing any more."""
    if status.failure is not None:
        raise RankLost(status.failure)
    if status.expired:
        raise RankLost(f"{', '.join(map(rank_name, status.expired))} stopped answering")
    if status.state == "gone":
        raise RankLost("the cluster was stopped before it answered")


def check_silence(status: RunStatus, replies: Iterable[Reply], seconds: float) -> None:
    """Raises RankLost if an answer has been silent for so long without waiting for others."""
    now = time.monotonic()
    for reply in replies:
        if reply.is_paused or (status.running and reply.number not in status.running):
            reply.heard = now  # it waits while others are answered
        elif now > reply.heard + seconds and not reply.has_ended:
            raise RankLost(f"no event has arrived for {seconds:.0f} s; see pipedec status")
