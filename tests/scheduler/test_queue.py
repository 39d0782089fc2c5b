"""The queue: order, limit, room, cancelling at any moment, answers, and that nothing of the past is kept."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from support.processes import wait_until
from support.redis_usage import usage
from support.run_stats import run_stats
from support.whole_scheduler import WholeScheduler

from pipedec.config import Settings
from pipedec.core.errors import RankLost, UserError
from pipedec.messages.events import AbortEvent, CancelledEvent, ErrorEvent, Event, TokensEvent
from pipedec.messages.run import RunDescription
from pipedec.messages.stats import StageStats
from pipedec.scheduler import Task
from pipedec.scheduler.protocol import Post, RankMessage
from pipedec.scheduler.workflow import after_window, initial_windows
from pipedec.topology import Topology

MakeScheduler = Callable[[Topology], WholeScheduler]
TWO = Topology.even(2, 2)
DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,), (2,)), ((0, 1), (1, 2)))


@pytest.fixture
def scheduler(make_scheduler: MakeScheduler) -> WholeScheduler:
    """Of a run that is up."""
    made = make_scheduler(TWO)
    made.open(DESCRIPTION)
    return made


def taken(scheduler: WholeScheduler, limit: int) -> list[int]:
    return [message.number for message in scheduler.pop_requests(limit).requests]


def answer(scheduler: WholeScheduler, number: int) -> list[Event]:
    return [event for _, event in scheduler.read_answer(number, "0", 0)]


def test_requests_are_taken_by_priority_then_in_order(scheduler: WholeScheduler) -> None:
    for priority in (0, 5, -3, 0, 5, -3, 1 << 40):
        scheduler.submit(f'{{"é": {priority}}}', priority)
    assert scheduler.status().waiting == 7
    assert scheduler.pop_requests(1).requests == [RankMessage("request", 2, text='{"é": -3}')]
    assert taken(scheduler, 0) == []
    assert taken(scheduler, 3) == [5, 0, 3]
    assert scheduler.submit("{}", -1) == 7
    assert taken(scheduler, 100) == [7, 1, 4, 6]
    assert taken(scheduler, 100) == []
    assert (scheduler.status().running, scheduler.status().waiting) == ((0, 1, 2, 3, 4, 5, 6, 7), 0)


def test_many_requests_of_one_priority_are_taken_in_the_order_of_their_numbers(scheduler: WholeScheduler) -> None:
    numbers = [scheduler.submit("{}") for _ in range(120)]
    assert taken(scheduler, 50) == numbers[:50]
    assert taken(scheduler, 100) == numbers[50:64], "as many run as the run allows"
    for number in numbers[:64]:
        scheduler.complete(number)
    assert taken(scheduler, 100) == numbers[64:]


def test_a_full_queue_refuses_in_one_line(make_scheduler: MakeScheduler) -> None:
    """The requests for which there is a place do not count as waiting, whether rank 0 has taken them yet or not."""
    scheduler, places = make_scheduler(TWO), 3
    scheduler.open(replace(DESCRIPTION, settings=DESCRIPTION.settings.replaced(max_num_seqs=places, max_waiting=2)))
    numbers = [scheduler.submit("{}") for _ in range(places + 2)]
    assert taken(scheduler, places) == numbers[:places]
    with pytest.raises(UserError) as refusal:
        scheduler.submit("{}", -9)
    assert str(refusal.value) == (
        f"the cluster is full: {places} requests are running and 2 are waiting (--max-waiting 2); "
        "submit the request again when some of them have been answered"
    )
    scheduler.complete(0)
    assert scheduler.submit("{}") == places + 2, "the refused one has no number"
    scheduler.cancel(1 + places)
    assert scheduler.submit("{}") == places + 3


def test_waiting_for_a_request_takes_the_first_and_the_stop_overtakes(scheduler: WholeScheduler) -> None:
    assert scheduler.wait_request(0) is None
    scheduler.submit("later")
    scheduler.submit("sooner", -1)
    assert [scheduler.wait_request(0), scheduler.wait_request(0), scheduler.wait_request(0)] == [
        RankMessage("request", 1, text="sooner"),
        RankMessage("request", 0, text="later"),
        None,
    ]
    scheduler.submit("last")
    scheduler.stop()
    assert scheduler.wait_request(0) == RankMessage("stop")
    refused = scheduler.pop_requests(9)
    assert refused.stopping and [message.text for message in refused.requests] == ["last"]


def test_a_waiting_rank_wakes_up_for_each_request(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION)
    client = WholeScheduler(scheduler.client, scheduler.keys.run_id, TWO)
    received: list[RankMessage | None] = []

    def serve() -> None:
        while (message := scheduler.wait_request(10)) is not None and message.kind != "stop":
            received.append(message)
            scheduler.complete(message.number, TokensEvent([1], "a"))

    server = threading.Thread(target=serve)
    server.start()
    for number in range(5):
        assert client.submit("{}") == number
        [(_, event)] = client.read_answer(number, "0", 10)
        assert event == TokensEvent([1], "a")
    client.submit("{}")
    client.submit("{}")
    assert client.read_answer(6, "0", 10)
    client.stop()
    server.join(10)
    assert not server.is_alive()
    assert [message.number for message in received if message is not None] == list(range(7))


def test_a_waiting_request_is_cancelled_at_once(scheduler: WholeScheduler) -> None:
    scheduler.submit("{}")
    scheduler.submit("{}")
    assert scheduler.cancel(0) and not scheduler.cancel(0)
    assert answer(scheduler, 0) == [CancelledEvent()]
    assert scheduler.pop_requests(9).requests == [RankMessage("request", 1, text="{}")]
    assert scheduler.pop_requests(9).cancelled == []


def test_a_running_request_is_told_to_be_cancelled_until_it_ends(scheduler: WholeScheduler) -> None:
    for _ in range(3):
        scheduler.submit("{}")
    assert taken(scheduler, 3) == [0, 1, 2]
    assert scheduler.cancel(2) and scheduler.cancel(0) and scheduler.cancel(2)
    for _ in range(2):
        assert scheduler.pop_requests(1).cancelled == [0, 2]
    scheduler.complete(0, TokensEvent([1], "a"))
    assert scheduler.pop_requests(1).cancelled == [2]
    assert answer(scheduler, 0) == [TokensEvent([1], "a")]
    scheduler.complete(2)
    assert scheduler.pop_requests(1).cancelled == []
    assert not scheduler.cancel(0) and not scheduler.cancel(2) and not scheduler.cancel(99)
    assert scheduler.status().running == (1,)


def test_a_request_ends_with_its_last_events(scheduler: WholeScheduler) -> None:
    for _ in range(3):
        scheduler.submit("{}")
    taken(scheduler, 2)
    scheduler.publish_all(
        [
            Post(0, (TokensEvent([1], "a"), TokensEvent([2], "b"))),
            Post(1, (TokensEvent([3], "c"),)),
            Post(0, (ErrorEvent("d"),), ends=True),
        ]
    )
    assert answer(scheduler, 0) == [TokensEvent([1], "a"), TokensEvent([2], "b"), ErrorEvent("d")]
    assert answer(scheduler, 1) == [TokensEvent([3], "c")]
    assert scheduler.status().running == (1,) and scheduler.status().waiting == 1


def test_the_counters_are_what_was_told_last(scheduler: WholeScheduler) -> None:
    assert scheduler.status().stats is None
    for stats in (run_stats(512), run_stats(0)):
        scheduler.publish_all([], stats)
        scheduler.publish_all([Post(0, (ErrorEvent("no"),))])
        assert scheduler.status().stats == stats


@pytest.mark.failure_case("S16")
def test_counters_of_stages_are_told_with_their_leases(scheduler: WholeScheduler) -> None:
    stats = StageStats(1, 100, 250, 30, 1.25, 0.5)
    scheduler.publish_stats(stats)
    assert scheduler.status().stages == ()
    scheduler.renew_lease(1)
    assert scheduler.status().stages == (stats,)


def test_counters_outlive_no_run(make_scheduler: MakeScheduler) -> None:
    """A rank that renews its lease before the run is up, or once more at its end, brings nothing to life."""
    made = make_scheduler(TWO)
    made.publish_stats(StageStats(2, 1, 1, 0, 0.0, 0.0))
    made.renew_lease(2)
    assert made.status().stages == () and made.status().state == "gone"


def test_one_look_tells_all_that_a_client_waits_for(scheduler: WholeScheduler) -> None:
    scheduler.submit("{}")
    scheduler.submit("{}")
    taken(scheduler, 1)
    scheduler.renew_lease(1)
    assert wait_until(lambda: scheduler.status().expired == (1,), 5)
    scheduler.renew_lease(2)
    before = scheduler.round_trips
    status = scheduler.status()
    assert scheduler.round_trips - before == 1
    assert (status.state, status.submitted, status.waiting, status.running) == ("up", 2, 1, (0,))
    assert (status.alive, status.expired, status.failure) == ((2,), (1,), None)
    scheduler.abort(1, "out of memory")
    assert scheduler.status().failure == scheduler.failure() == "rank 1: out of memory"


@pytest.fixture
def patient(scheduler: WholeScheduler) -> WholeScheduler:
    """A scheduler whose leases outlast every delay of a test."""
    scheduler.lease_ms = 600_000
    return scheduler


def test_an_owner_that_is_silent_has_no_lease(scheduler: WholeScheduler) -> None:
    scheduler.submit("{}", owner="a")
    assert wait_until(lambda: scheduler.end_orphans() == [0], 5)
    assert scheduler.status().waiting == 0 and not scheduler.renew_owner("a")


def test_requests_of_an_owner_without_a_lease_end(patient: WholeScheduler) -> None:
    scheduler = patient
    numbers = [scheduler.submit("{}", owner=owner) for owner in ("a", "b", "", "a", "b")]
    assert taken(scheduler, 3) == numbers[:3]
    scheduler.publish_all([Post(number, (TokensEvent([1], "a"),)) for number in numbers[:3]])
    assert scheduler.end_orphans() == []
    scheduler.release_owner("a")
    assert scheduler.renew_owner("b") and scheduler.end_orphans() == [0, 3]
    assert scheduler.pop_requests(0).cancelled == [0] and scheduler.end_orphans() == []
    assert answer(scheduler, 0) == answer(scheduler, 3) == []
    assert taken(scheduler, 9) == [4]
    scheduler.complete(0, TokensEvent([2], "b"))
    scheduler.complete(1, TokensEvent([2], "b"))
    assert answer(scheduler, 0) == [] and answer(scheduler, 1) == [TokensEvent([1], "a"), TokensEvent([2], "b")]
    assert scheduler.status().running == (2, 4) and scheduler.status().waiting == 0


def test_an_owner_that_went_takes_its_answers_with_it(patient: WholeScheduler) -> None:
    """Those that were complete, too; but not those that it has read."""
    scheduler = patient
    for _ in range(2):
        scheduler.submit("{}", owner="a")
    taken(scheduler, 2)
    for number in range(2):
        scheduler.complete(number, TokensEvent([1], "a"))
    scheduler.close_answer(0)
    scheduler.release_owner("a")
    assert scheduler.end_orphans() == [1] and answer(scheduler, 1) == []
    assert not scheduler.renew_owner("a") and scheduler.renew_owner("a")


def test_a_submission_is_a_sign_of_life(patient: WholeScheduler) -> None:
    patient.submit("{}", owner="a")
    patient.release_owner("a")
    patient.submit("{}", owner="a")
    assert patient.end_orphans() == []


def test_ranks_publish_to_running_requests_only(scheduler: WholeScheduler) -> None:
    scheduler.submit("{}")
    scheduler.submit("{}")
    taken(scheduler, 2)
    scheduler.complete(0, ErrorEvent("over"))
    scheduler.publish(0, TokensEvent([1], "late"))
    scheduler.publish(1, TokensEvent([2], "b"), TokensEvent([3], "c"))
    assert answer(scheduler, 0) == [ErrorEvent("over")]
    assert answer(scheduler, 1) == [TokensEvent([2], "b"), TokensEvent([3], "c")]


def test_an_answer_that_nobody_reads_is_not_written_any_more(scheduler: WholeScheduler) -> None:
    for _ in range(3):
        scheduler.submit("{}")
    taken(scheduler, 1)
    for number in (0, 1):
        scheduler.publish(number, TokensEvent([1], "a"))
        scheduler.close_answer(number)
        scheduler.publish(number, TokensEvent([2], "b"))
    scheduler.cancel(1)
    scheduler.abort(2, "out of memory")
    scheduler.complete(0, TokensEvent([3], "c"))
    assert [answer(scheduler, number) for number in range(3)] == [[], [], [AbortEvent("rank 2: out of memory")]]


def test_an_abort_reaches_every_unfinished_answer(scheduler: WholeScheduler) -> None:
    for _ in range(5):
        scheduler.submit("{}")
    taken(scheduler, 3)
    scheduler.complete(1, ErrorEvent("over"))
    scheduler.cancel(2)
    scheduler.abort(2, "out of memory")
    failed: list[Event] = [AbortEvent("rank 2: out of memory")]
    assert [answer(scheduler, number) for number in range(5)] == [failed, [ErrorEvent("over")], failed, failed, failed]
    for call in (lambda: scheduler.pop_requests(1), lambda: scheduler.submit("{}")):
        with pytest.raises(RankLost, match="rank 2: out of memory"):
            call()


@dataclass
class Crowd:
    """Clients and rank 0 in random order: requests come, are cancelled at any moment, and end.

    Attributes:
        ended_waiting: requests that were cancelled before rank 0 took them.
        cancelled: those that were cancelled while they ran.
        running: those that rank 0 has taken and not completed.
        served: those that it has completed.
    """

    scheduler: WholeScheduler
    source: random.Random
    max_running: int = 8
    submitted: int = 0
    ended_waiting: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)

    def submit(self) -> None:
        if self.scheduler.status().waiting < 12:
            self.scheduler.submit("{}", self.source.choice((0, 0, 1)))
            self.submitted += 1

    def cancel(self) -> None:
        """A client leaves, whatever its request does at the moment."""
        number = self.source.randrange(max(0, self.submitted - 24), self.submitted + 1)
        is_waiting = number < self.submitted and number not in self.running | self.served | self.ended_waiting
        is_running = number in self.running
        assert self.scheduler.cancel(number) == (is_waiting or is_running)
        self.scheduler.close_answer(number)
        if is_waiting:
            self.ended_waiting.add(number)
        elif is_running:
            self.cancelled.add(number)

    def take(self) -> None:
        found = self.scheduler.pop_requests(self.max_running - len(self.running))
        numbers = {message.number for message in found.requests}
        assert not numbers & (self.ended_waiting | self.served | self.running)
        assert set(found.cancelled) == self.cancelled & self.running, "a cancellation was lost"
        self.running |= numbers
        for number in found.cancelled:
            self._complete(number)

    def publish(self) -> None:
        self.scheduler.publish_all([Post(number, (TokensEvent([1], "a"),)) for number in sorted(self.running)])

    def complete(self) -> None:
        if self.running:
            self._complete(self.source.choice(sorted(self.running)))

    def _complete(self, number: int) -> None:
        self.scheduler.complete(number, TokensEvent([2], "b"))
        if number not in self.cancelled:
            assert answer(self.scheduler, number)[-1] == TokensEvent([2], "b")
            self.scheduler.close_answer(number)
        self.running.remove(number)
        self.served.add(number)

    def run(self, requests: int, observe: Callable[[], None] = lambda: None) -> None:
        """Until all ``requests`` have ended. ``observe`` is called after every move until the last one has come."""
        moves = [self.submit, self.submit, self.submit, self.cancel, self.take, self.publish, self.complete]
        while self.submitted < requests:
            self.source.choice(moves)()
            observe()
        while self.running or self.scheduler.status().waiting:
            self.take()
            self.complete()
        assert len(self.served) + len(self.ended_waiting) == requests


def run_session(scheduler: WholeScheduler, number: int) -> None:
    scheduler.begin_session(number, initial_windows(TWO, 4), 10)
    for rank in TWO.ranks:
        assert scheduler.wait(rank, 0) is not None
        task = Task.compute("window", rank, 1)
        scheduler.report(rank, [task], after_window(task, TWO, 0) if rank == 0 else [])
    end = scheduler.wait(0, 0)
    assert end is not None
    scheduler.report(0, [end.tasks[0].task], [])


def test_no_request_and_no_cancellation_is_lost(scheduler: WholeScheduler) -> None:
    Crowd(scheduler, random.Random(1)).run(200)
    assert scheduler.status().running == () and scheduler.status().waiting == 0


def test_keys_that_lapse_and_come_back_are_not_counted(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION)
    scheduler.renew_lease(0)
    scheduler.supervise("here", [0])
    scheduler.renew_owner("client")
    found = usage(scheduler).keys
    leases = (scheduler.keys.alive(0), scheduler.keys.node("here"), scheduler.keys.owner("client"))
    assert scheduler.client.delete(*leases) == 3 and usage(scheduler).keys == found > 0


def test_a_session_has_all_its_keys_once_it_has_ended(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION)
    run_session(scheduler, 1)
    ended = usage(scheduler)
    scheduler.begin_session(2, initial_windows(TWO, 4), 10)
    assert usage(scheduler).is_working
    assert not ended.is_working and scheduler.client.exists(scheduler.keys.trace) == 0


@pytest.mark.slow
def test_a_thousand_requests_leave_no_key(make_scheduler: MakeScheduler) -> None:
    """Keys: some per run, and the answers of unfinished requests; none of a request that has ended and been read or left."""
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION)
    crowd = Crowd(scheduler, random.Random(1))
    sizes: list[int] = []
    moves = 0

    def observe() -> None:
        nonlocal moves
        moves += 1
        if moves % 50 == 0:
            run_session(scheduler, moves)
            sizes.append(usage(scheduler).keys)

    crowd.run(1000, observe)
    assert len(crowd.cancelled) > 50 and len(crowd.ended_waiting) > 50, "cancelled while it ran, and while it waited"
    fixed = len({"run", "workflow", "trace", "waiting", "requests", "bell", "running", "cancelled", "unread"})
    assert max(sizes) <= fixed + crowd.max_running
    names = {key.decode().removeprefix(scheduler.keys.prefix) for key in scheduler.client.scan_iter(scheduler.keys.prefix + "*")}
    assert names <= {"run", "workflow:0", "trace:0"}
