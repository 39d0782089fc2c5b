"""Which rank a supervisor blames where several have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipedec.cluster.processes import LOST_ANOTHER
from pipedec.cluster.supervisor import Supervisor
from pipedec.core import RankLost
from pipedec.scheduler import ClientScheduler, EmbeddedServer, connect
from pipedec.topology import Topology


class EndingRanks:
    """Ranks whose ends are seen one after the other, one more with each look."""

    def __init__(self, *ends: tuple[int, int]) -> None:
        self._ends = list(ends)
        self._seen: dict[int, int] = {}

    @property
    def pids(self) -> dict[int, int]:
        return {1: 101, 2: 102, 3: 103}

    @property
    def exit_statuses(self) -> dict[int, int]:
        if self._ends:
            self._seen.update([self._ends.pop(0)])
        return dict(self._seen)

    def describe_end(self, rank: int) -> str:
        return f"ended with {self._seen[rank]}"

    def read(self, seconds: float) -> list[tuple[int, Any]]:
        return []

    def kill(self) -> None:
        pass


class OfThree(Supervisor):
    def _open_redis(self) -> str:
        raise NotImplementedError

    def _start_ranks(self) -> None:
        raise NotImplementedError

    def wait(self, turn: Callable[[], None] = lambda: None) -> None:
        raise NotImplementedError

    def _wait_for_ends(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        pass


@pytest.mark.parametrize(
    "ends",
    [((3, LOST_ANOTHER), (2, -9)), ((2, -9), (3, LOST_ANOTHER)), ((3, LOST_ANOTHER), (1, LOST_ANOTHER), (2, -9))],
    ids=["late", "soon", "last"],
)
def test_a_killed_rank_is_blamed_although_its_neighbour_was_seen_to_end_before_it(ends: tuple[tuple[int, int], ...]) -> None:
    with EmbeddedServer() as server:
        supervisor = OfThree(Topology.even(3, 3), "run", EndingRanks(*ends))
        supervisor.scheduler = ClientScheduler(connect(server.url), "run", Topology.even(3, 3))
        with pytest.raises(RankLost, match=r"rank 2 \(stage 2\) ended with -9"):
            supervisor.check()
        supervisor.kill()
