"""One cluster per state directory, also when two are started at the same instant."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from tiny_pair import Pair

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Started = Callable[..., "subprocess.Popen[bytes]"]


def test_of_two_clusters_started_at_once_one_comes_up(started: Started, pair: Pair) -> None:
    both = [started("up", "--detach", *pair.flags, "--stages", "1") for _ in range(2)]
    errors = {process.wait(60): process.communicate()[1].decode() for process in both}
    assert set(errors) == {0, 2}
    assert errors[2].startswith("pipedec: ") and len(errors[2].splitlines()) == 1
    assert "another `pipedec up` is starting" in errors[2] or "already running here" in errors[2]
    assert started("status").wait(30) == 0
    assert started("down").wait(60) == 0


def test_a_cluster_that_has_ended_makes_room_for_the_next(started: Started, pair: Pair) -> None:
    for _ in range(2):
        assert started("up", "--detach", *pair.flags, "--stages", "1").wait(60) == 0
        assert started("down").wait(60) == 0
