"""What a rank says that it does, and how another thread stops it."""

from __future__ import annotations

import pytest

from pipedec.core import EpochEnded
from pipedec.engine.activity import Doing


def test_what_a_rank_does_is_told_with_its_longest_timestep(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 5.5, 6.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    doing = Doing()
    doing.begin("computing")
    doing.begin("waiting", 2)  # at 4 s
    told = doing.activity()
    assert (told.kind, told.peer, told.seconds, told.longest_seconds) == ("waiting", 2, 1.0, 3.0)
    doing.begin("computing")
    assert doing.activity().seconds == 0.5


def test_an_interrupted_rank_stops_at_what_it_begins_next_until_it_meets_the_others_again() -> None:
    doing = Doing()
    doing.interrupt(EpochEnded("the run is in epoch 2"))
    for _ in range(2):
        with pytest.raises(EpochEnded, match="epoch 2"):
            doing.begin("idle")
    doing.meet_again()
    assert doing.activity().kind == "meeting"
    doing.begin("idle")
