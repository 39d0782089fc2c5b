"""What a rank says that it does, and how another thread stops it."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
from support.clock import Clock

from pipedec.core.errors import EpochEnded
from pipedec.engine import activity
from pipedec.engine.activity import Activity


def test_what_a_rank_does_is_told_with_its_longest_timestep(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 5.5, 6.0])
    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: next(now)))
    doing = Activity()
    doing.begin("computing")
    doing.begin("waiting", 2)  # at 4 s
    told = doing.activity()
    assert (told.kind, told.peer, told.seconds, told.longest_seconds) == ("waiting", 2, 1.0, 3.0)
    doing.begin("computing")
    assert doing.activity().seconds == 0.5


def test_an_interrupted_rank_stops_at_what_it_begins_next_until_it_meets_the_others_again() -> None:
    doing = Activity()
    doing.interrupt(EpochEnded("the run is in epoch 2"))
    for _ in range(2):
        with pytest.raises(EpochEnded, match="epoch 2"):
            doing.begin("idle")
    doing.meet_again()
    assert doing.activity().kind == "meeting"
    doing.begin("idle")


def test_the_first_timesteps_of_an_epoch_count_as_warming_up_and_not_as_timesteps() -> None:
    doing, kinds = Activity(), list[str]()
    doing.meet_again()
    for _ in range(5):
        doing.begin("waiting", 1)
        doing.begin("computing")
        kinds.append(doing.activity().kind)
        doing.count_timestep()
    assert kinds == ["warming"] * 3 + ["computing"] * 2
    doing.meet_again()
    doing.begin("computing")
    assert doing.activity().kind == "warming"


def test_what_is_warmed_up_in_a_timestep_is_told_and_no_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    doing = Activity()
    assert doing.activity().warmed_seconds is None
    doing.begin("computing")
    clock.advance(1.0)
    with doing.warming():
        clock.advance(20.0)
        told = doing.activity()
        assert told.kind == "warming" and [told.seconds, told.longest_seconds] == pytest.approx([20.0, 1.0], abs=0.5)
    clock.advance(2.0)
    told = doing.activity()
    assert told.kind == "computing"
    assert [told.seconds, told.longest_seconds, told.warmed_seconds] == pytest.approx([2.0, 1.0, 2.0], abs=0.5)
    doing.interrupt(EpochEnded("the run is in epoch 2"))
    with doing.warming():
        assert doing.activity().kind == "warming"
    assert doing.activity().kind == "computing", "a forward is not left in the middle"


def test_another_thread_that_warms_up_says_nothing() -> None:
    doing, kinds = Activity(), list[str]()

    def load_late() -> None:
        with doing.warming():
            kinds.append(doing.activity().kind)

    doing.begin("waiting", 1)
    thread = threading.Thread(target=load_late)
    thread.start()
    thread.join()
    assert kinds == ["waiting"]


def test_slow_timesteps_are_logged_once_a_second(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pipedec")
    clock, doing = Clock(monkeypatch), Activity()
    for seconds in (1.0, 1.0, 3.0, 9.0, 9.0, 0.5):  # three times as long as usual is not slow; the second long one comes at once
        with clock.halted():
            doing.begin("computing")
        clock.advance(seconds)
        with clock.halted():
            doing.begin("idle")
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["slow timestep: computed for 9.00 s"] * 2
