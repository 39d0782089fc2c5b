"""Rank processes by themselves, and which of them a supervisor blames where several have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from support.processes import wait_until

from pipedec.cluster.processes import LOST_ANOTHER, RankProcesses, describe_exit
from pipedec.cluster.supervisor import Supervisor
from pipedec.config.environment import RANK_ENVIRONMENT
from pipedec.core.errors import RankLost
from pipedec.scheduler import ClientScheduler, EmbeddedRedis, connect
from pipedec.topology import Topology

# A process of its own: the fork server of this one is running already.
_PROGRAM = """
import multiprocessing.util
import tempfile
from pipedec.cluster.processes import RankProcesses
if __name__ == "__main__":
    ranks, before = RankProcesses(), tempfile.gettempdir()
    ranks.start(0, len, "abc", [])  # fails: len takes one argument
    while not ranks.exit_statuses:
        ranks.read(0.1)
    assert tempfile.gettempdir() == before
    print(multiprocessing.util.get_temp_dir())
    ranks.kill()
"""

# Says what the environment is when torch is about to be loaded, and ends.
_WATCH = """
import json, os, sys
class Watch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            os.write(1, json.dumps(dict(os.environ)).encode())
            os._exit(0)
sys.meta_path.insert(0, Watch)
"""
_TORCHRUN = """
sys.argv[1:] = ["--redis", "redis://127.0.0.1:1/0", "--stages", "1"]
from pipedec.cluster.torchrun import main
main()
"""


def _report_and_end(rank: int, report: Callable[[Any], None]) -> int:
    report(("rank", rank))
    return rank


def test_ranks_report_and_end() -> None:
    ranks = RankProcesses()
    try:
        for rank in range(2):
            ranks.start(rank, _report_and_end, rank)
        assert sorted(ranks.pids) == [0, 1]
        reports: list[tuple[int, Any]] = []
        while len(reports) < 4:
            reports += ranks.read(30.0)
        assert {rank: [report for one, report in reports if one == rank] for rank in range(2)} == {
            0: [("rank", 0), None], 1: [("rank", 1), None],
        }  # fmt: skip
        assert wait_until(lambda: ranks.exit_statuses == {0: 0, 1: 1})
        ends = ranks.waitables([1])
        assert len(ends) == 1 and wait(ends, 5.0) == ends  # although its end is known
    finally:
        ranks.kill()
    assert not ranks.pids and not ranks.exit_statuses and not ranks.waitables([])


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "was killed by SIGKILL"),
        (-37, "was killed by signal 37"),
        (0, "ended unexpectedly with exit status 0"),
        (3, "failed with exit status 3"),
    ],
)
def test_ends_in_words(status: int, text: str) -> None:
    assert describe_exit(status) == text


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 150])
def test_a_long_temporary_directory_is_no_obstacle(tmp_path: Path, length: int) -> None:
    scratch = Path(str(tmp_path / "long").ljust(length, "x"))
    scratch.mkdir(parents=True)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    sockets = Path(done.stdout.strip())
    assert sockets.is_relative_to(scratch if len(str(scratch)) < 70 else "/tmp") and not sockets.exists()
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("start", ["import pipedec.cluster.fork_server", _TORCHRUN], ids=["fork server", "torchrun"])
def test_ranks_have_their_environment_before_torch_is_loaded(start: str) -> None:
    """What the user has set stays."""
    given = {"NCCL_MAX_P2P_NCHANNELS": "7", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_ENVIRONMENT}
    found = subprocess.run([sys.executable, "-c", _WATCH + start], capture_output=True, env=inherited | given, check=True)
    assert json.loads(found.stdout).items() >= (RANK_ENVIRONMENT | given).items()


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


# A supervisor that neither starts nor closes anything.
OfThree: Any = type("OfThree", (Supervisor,), dict.fromkeys(Supervisor.__abstractmethods__, lambda *_: None))


@pytest.mark.parametrize(
    "ends",
    [((3, LOST_ANOTHER), (2, -9)), ((2, -9), (3, LOST_ANOTHER)), ((3, LOST_ANOTHER), (1, LOST_ANOTHER), (2, -9))],
    ids=["late", "soon", "last"],
)
def test_a_killed_rank_is_blamed_although_its_neighbour_was_seen_to_end_before_it(ends: tuple[tuple[int, int], ...]) -> None:
    with EmbeddedRedis() as server:
        supervisor = OfThree(Topology.even(3, 3), "run", EndingRanks(*ends))
        supervisor.scheduler = ClientScheduler(connect(server.url), "run", Topology.even(3, 3))
        with pytest.raises(RankLost, match=r"rank 2 \(stage 2\) ended with -9"):
            supervisor.check()
        supervisor.kill()
