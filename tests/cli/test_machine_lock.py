"""One cluster per state directory, also when two are started at the same instant."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from support.tiny_pair import Pair

from pipedec.cluster.state import MachineLock

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Started = Callable[..., "subprocess.Popen[bytes]"]
Pipedec = Callable[..., Any]


def test_up_is_refused_while_another_starts(pipedec: Pipedec, pair: Pair) -> None:
    lock = MachineLock()
    assert "another cluster is starting or stopping here" in pipedec("up", *pair.flags).refused()
    lock.release()
    MachineLock().release()


@pytest.mark.slow
def test_of_two_clusters_started_at_once_one_comes_up(started: Started, pair: Pair) -> None:
    both = [started("up", "--detach", *pair.flags, "--stages", "1") for _ in range(2)]
    errors = {process.wait(60): process.communicate()[1].decode() for process in both}
    assert set(errors) == {0, 2}
    assert errors[2].startswith("pipedec: ") and len(errors[2].splitlines()) == 1
    assert "another cluster is starting" in errors[2] or "already running here" in errors[2]
    assert started("down").wait(60) == 0
    assert started("up", "--detach", *pair.flags, "--stages", "1").wait(60) == 0
    assert started("down").wait(60) == 0
