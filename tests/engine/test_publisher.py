"""Events of an answer published from a thread, and the cancellation it looks for."""

from __future__ import annotations

from typing import Any

import pytest
from processes import wait_until

from pipedec.core import SchedulerLost
from pipedec.engine.publisher import AnswerPublisher
from pipedec.scheduler import MemoryScheduler
from pipedec.topology import Topology


class Recording(MemoryScheduler):
    """A scheduler that notes what is published, can be cancelled, and can be lost."""

    def __init__(self) -> None:
        super().__init__(Topology.even(1, 1))
        self.told: list[Any] = []
        self.cancelled = self.is_lost = False

    def publish(self, request_number: int, *events: Any) -> None:
        if self.is_lost:
            raise SchedulerLost("cannot reach Redis")
        self.told += [(request_number, event) for event in events]

    def is_cancelled(self, request_number: int) -> bool:
        return self.cancelled


def test_all_events_are_told_in_order_before_the_end() -> None:
    scheduler = Recording()
    publisher = AnswerPublisher(scheduler)
    for number in (4, 5):
        with publisher.publishing(number):
            for index in range(50):
                publisher.put({"index": index})
    assert scheduler.told == [(number, {"index": index}) for number in (4, 5) for index in range(50)]


def test_a_cancellation_is_noticed_and_belongs_to_one_answer() -> None:
    scheduler = Recording()
    publisher = AnswerPublisher(scheduler)
    with publisher.publishing(1):
        assert not publisher.is_cancelled
        scheduler.cancelled = True
        assert wait_until(lambda: publisher.is_cancelled, 5)
    scheduler.cancelled = False
    with publisher.publishing(2):
        assert not publisher.is_cancelled


def test_a_lost_redis_is_an_error_of_the_pipeline() -> None:
    scheduler = Recording()
    scheduler.is_lost = True
    publisher = AnswerPublisher(scheduler)
    with pytest.raises(SchedulerLost), publisher.publishing(1):
        publisher.put({"index": 0})
    with pytest.raises(SchedulerLost), publisher.publishing(2):
        publisher.put({"index": 1})
        while wait_until(lambda: True):
            publisher.put({"index": 2})
