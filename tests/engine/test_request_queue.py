"""The queue as rank 0 sees it: arrivals within its room, cancellations, answers published in order, a lost Redis."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident

import pytest
from support.processes import wait_until
from support.run_stats import run_stats
from support.whole_scheduler import FreshRun

from pipedec.config import Settings
from pipedec.core.errors import PipedecError, SchedulerLost, UserError
from pipedec.engine.admission import Arrived
from pipedec.engine.request_queue import RequestQueue
from pipedec.messages.events import CancelledEvent, ErrorEvent, Event, TokensEvent
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import RunStats
from pipedec.scheduler.protocol import Post, RankMessage
from pipedec.topology import Topology

pytestmark = pytest.mark.usefixtures("redis_client")

DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,),), ((0, 1),))


class Losable(FreshRun):
    """A run that is up, on a scheduler that can be lost."""

    def __init__(self) -> None:
        super().__init__(Topology.even(1, 1))
        self.is_lost = False
        self.batches: list[int] = []
        self.open(DESCRIPTION)

    def publish_all(self, posts: Sequence[Post], stats: RunStats | None = None) -> None:
        if self.is_lost:
            raise SchedulerLost("cannot reach Redis")
        self.batches.append(len(posts))
        super().publish_all(posts, stats)

    def answer(self, number: int) -> list[Event]:
        return [event for _, event in self.read_answer(number, "0", 0)]


def admit(message: RankMessage) -> Arrived:
    """Nobody looks at what is asked for here."""
    return Arrived(message, UserError("asks for nothing"))


def collect(queue: RequestQueue, limit: int, count: int) -> list[int]:
    """``count`` arrivals, asked for with ``limit`` in all."""
    numbers: list[int] = []

    def have_arrived() -> bool:
        numbers.extend(arrived.message.number for arrived in queue.arrivals(limit - len(numbers)))
        return len(numbers) >= count

    assert wait_until(have_arrived, 5), numbers
    return numbers


@pytest.fixture
def scheduler() -> Losable:
    return Losable()


def test_events_of_many_answers_are_published_in_order_before_the_end(scheduler: Losable) -> None:
    scheduler.lease_ms = 600_000
    queue = RequestQueue(scheduler, admit)
    numbers = [scheduler.submit("{}") for _ in range(3)]
    with queue.serving():
        assert collect(queue, 3, 3) == numbers
        for index in range(50):
            for number in numbers:
                queue.put(number, TokensEvent([index], str(number)))
        queue.finish(1, ErrorEvent("over"))
        queue.publish_stats(run_stats(16))
    assert scheduler.status().stats == run_stats(16)
    for number in numbers:
        events = [TokensEvent([index], str(number)) for index in range(50)]
        assert scheduler.answer(number) == events + ([ErrorEvent("over")] if number == 1 else [])
    assert scheduler.status().running == (0, 2)
    assert len(scheduler.batches) < sum(scheduler.batches) == 151


def test_no_more_requests_are_taken_than_there_is_room_for(scheduler: Losable) -> None:
    queue = RequestQueue(scheduler, admit)
    for index in range(10):
        scheduler.submit("{}", priority=index % 2)
    with queue.serving():
        assert collect(queue, 3, 3) == [0, 2, 4]
        assert scheduler.status().waiting == 7
        assert queue.arrivals(0) == []
        scheduler.submit("{}", priority=-1)
        assert collect(queue, 2, 2) == [10, 6]
    assert scheduler.status().running == (0, 2, 4, 6, 10) and scheduler.status().waiting == 6


def test_requests_are_admitted_beside_the_pipeline(scheduler: Losable) -> None:
    """What cannot be answered arrives as well, with the reason."""
    threads: set[int] = set()

    def admit(message: RankMessage) -> Arrived:
        threads.add(get_ident())
        return Arrived(message, UserError(f"refuses {message.text}"))

    queue, arrived = RequestQueue(scheduler, admit), list[Arrived]()
    number = scheduler.submit("{}")

    def has_arrived() -> bool:
        arrived.extend(queue.arrivals(1))
        return bool(arrived)

    with queue.serving():
        assert wait_until(has_arrived, 5)
    [one] = arrived
    assert one.message.number == number and str(one.admitted) == "refuses {}"
    assert len(threads) == 1 and get_ident() not in threads


def test_a_cancellation_is_told_once_and_the_request_runs_until_it_is_finished(scheduler: Losable) -> None:
    queue = RequestQueue(scheduler, admit)
    scheduler.submit("{}")
    told: list[int] = []

    def learns() -> bool:
        told.extend(queue.cancelled())
        return bool(told)

    with queue.serving():
        assert collect(queue, 1, 1) == [0]
        assert queue.cancelled() == []
        assert scheduler.cancel(0)
        assert wait_until(learns, 5)
        scheduler.submit("{}")
        assert collect(queue, 1, 1) == [1], "the thread has looked again"
        assert told == [0] and queue.cancelled() == []
        assert scheduler.status().running == (0, 1)
        queue.finish(0, CancelledEvent())
    assert scheduler.status().running == (1,) and not scheduler.cancel(0)


def test_a_request_cancelled_before_it_was_given_out_never_arrives(scheduler: Losable) -> None:
    """The thread has taken it, and the pipeline has not asked for it since."""
    queue = RequestQueue(scheduler, admit)
    with queue.serving():
        assert queue.arrivals(1) == []
        number = scheduler.submit("{}")
        assert wait_until(lambda: scheduler.status().running == (number,), 5)
        assert scheduler.cancel(number)
        assert wait_until(lambda: scheduler.status().running == (), 5)
        assert queue.arrivals(1) == [] and queue.cancelled() == []
    assert scheduler.answer(number) == [CancelledEvent()]


def test_a_busy_pipeline_learns_of_the_stop_and_refuses_what_waits(scheduler: Losable) -> None:
    queue = RequestQueue(scheduler, admit)
    numbers = [scheduler.submit("{}") for _ in range(3)]
    with queue.serving():
        assert collect(queue, 1, 1) == [0]
        scheduler.stop()
        assert wait_until(lambda: queue.is_stopping, 5) and queue.wait(0) == RankMessage("stop")
        queue.refuse("the cluster is being stopped")
    for number in numbers[1:]:
        assert scheduler.answer(number) == [ErrorEvent("the cluster is being stopped")]
    assert scheduler.answer(0) == [] and scheduler.status().running == (0,)


def test_a_lost_redis_or_run_is_an_error_of_the_next_call(scheduler: Losable) -> None:
    scheduler.is_lost = True
    queue = RequestQueue(scheduler, admit)
    with pytest.raises(SchedulerLost), queue.serving():
        queue.put(0, TokensEvent([1], "a"))
    queue = RequestQueue(scheduler, admit)

    def goes_on() -> bool:
        queue.put(0, TokensEvent([1], "a"))
        return False

    with pytest.raises(SchedulerLost, match="cannot reach Redis"), queue.serving():
        wait_until(goes_on, 5)
    for call in (lambda: queue.arrivals(1), queue.cancelled, lambda: queue.wait(0), lambda: queue.refuse("")):
        with pytest.raises(SchedulerLost):
            call()
    scheduler.is_lost, queue = False, RequestQueue(scheduler, admit)
    with pytest.raises(PipedecError, match="rank 1: out of memory"), queue.serving():
        scheduler.abort(1, "out of memory")
        wait_until(lambda: queue.arrivals(1), 5)


def test_requests_of_a_dead_owner_end_while_others_go_on(scheduler: Losable) -> None:
    queue = RequestQueue(scheduler, admit)
    numbers = [scheduler.submit("{}", owner=owner) for owner in ("front-end", "", "front-end")]
    with queue.serving():
        assert wait_until(lambda: queue.arrivals(2) != [] and scheduler.status().running == (0, 1), 5)
        scheduler.release_owner("front-end")
        assert wait_until(lambda: queue.cancelled() == numbers[:1], 5)
        assert scheduler.status().waiting == 0 and not queue.cancelled()
        queue.finish(1, TokensEvent([1], "a"))
    assert scheduler.answer(1) == [TokensEvent([1], "a")] and scheduler.answer(0) == []
