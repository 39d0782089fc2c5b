"""What a client concludes from the state of a run while it waits for answers."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pipedec.client.reply import Reply
from pipedec.core import RankLost
from pipedec.scheduler.protocol import RunStatus
from pipedec.topology import rank_name

SILENCE_SECONDS = 600.0


def check_run(status: RunStatus, replies: Iterable[Reply], silence_seconds: float = SILENCE_SECONDS) -> None:
    """Judge a run by its state, and by the answers that are open.

    Args:
        silence_seconds: how long to wait for the next event of an answer before the cluster counts as lost.

    Raises:
        RankLost: the cluster has failed or ended, or an answer has been silent for too long without waiting.
    """
    if status.failure:
        raise RankLost(status.failure)
    if status.expired:
        raise RankLost(f"{', '.join(map(rank_name, status.expired))} stopped answering")
    if status.state == "gone":
        raise RankLost("the cluster was stopped before it answered")
    now = time.monotonic()
    for reply in replies:
        if reply.is_paused or (status.running and reply.number not in status.running):
            reply.heard = now  # it waits while others are answered
        elif now > reply.heard + silence_seconds and not reply.has_ended:
            raise RankLost(f"no event has arrived for {silence_seconds:.0f} s; see pipedec status")
