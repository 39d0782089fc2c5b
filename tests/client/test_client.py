"""What a client makes of the events of an answer."""

from __future__ import annotations

import pytest

from pipedec.client.client import Client
from pipedec.core import RankLost
from pipedec.messages import PromptRequest, RunDescription
from pipedec.scheduler import MemoryScheduler
from pipedec.topology import Topology


class FailsAtOnce(MemoryScheduler):
    """The run fails while the request waits."""

    def submit(self, request: str) -> int:
        number = super().submit(request)
        self.abort(1, "rank 1 went away")
        return number


def test_the_message_of_an_aborted_run_is_no_text_of_the_answer() -> None:
    scheduler, pieces = FailsAtOnce(Topology.even(1, 1)), list[str]()
    scheduler.open(RunDescription(((1,),), ((0, 1),), "target"))
    with pytest.raises(RankLost, match="rank 1 went away"):
        Client(scheduler).ask(PromptRequest("Hello"), on_text=pieces.append)
    assert pieces == []
