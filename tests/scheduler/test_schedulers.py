"""Each call of the scheduler protocol: repeats, cancelling, failing, stopping, leases, answers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace
from support.processes import wait_until
from support.simulated_pipeline import SimulatedPipeline
from support.whole_scheduler import WholeScheduler

from pipedec.config import Settings
from pipedec.core.errors import EpochEnded, PipedecError, RankLost, SchedulerLost, UserError
from pipedec.messages.events import AbortEvent, OverranEvent, ThreadNews, TokensEvent
from pipedec.messages.run import RunDescription
from pipedec.methods import LayerTreeOptions
from pipedec.scheduler import Task, read_description
from pipedec.scheduler.paper import initial_tasks
from pipedec.scheduler.workflow import Planned
from pipedec.topology import Topology

MakeScheduler = Callable[[Topology], WholeScheduler]
TWO = Topology.even(2, 2)
DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,), (2,)), ((0, 1), (1, 2)))


def begin(scheduler: WholeScheduler, session: int = 0, trace: bool = False) -> None:
    """Begin a session of single tasks, in a run that is up."""
    if scheduler.current_epoch() is None:
        scheduler.open(DESCRIPTION)
    scheduler.begin_session(session, initial_tasks(TWO), 100 if trace else 0)


def taken(scheduler: WholeScheduler, rank: int) -> list[str]:
    """The ids of the tasks that a rank is granted in one message."""
    message = scheduler.wait(rank, 1)
    assert message is not None and message.kind == "tasks"
    return [granted.task.id for granted in message.tasks]


def submit_and_take(scheduler: WholeScheduler) -> None:
    """Open the run; rank 0 takes request 0."""
    scheduler.open(DESCRIPTION)
    assert scheduler.submit("{}") == 0
    assert [message.number for message in scheduler.pop_requests(1).requests] == [0]


PRE_1 = [Task.transfer(0, 1, -1), Task.compute("pre", 1, 0)]  # what stage 1 reports first


def test_a_rank_is_granted_in_one_message_what_it_does_in_a_row(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    begin(scheduler)
    assert taken(scheduler, 0) == ["T:0:1:-1", "C:pre:0:0"]
    assert taken(scheduler, 1) == ["T:0:1:-1", "C:pre:1:0", "T:1:2:0"]
    assert taken(scheduler, 2) == ["T:1:2:0", "C:pre:2:0"]


@pytest.mark.parametrize("seed", range(4))
def test_a_transfer_is_granted_in_the_first_round_in_which_its_ranks_are_free(make_scheduler: MakeScheduler, seed: int) -> None:
    """Algorithm 2, lines 9 to 17, over transfers that become ready together; the next round begins with all ranks free."""
    topology = Topology.even(6, 6)
    pairs = random.Random(seed).sample([(source, target) for source in topology.ranks for target in range(source)], 12)
    pending = [Task.transfer(source, target, seq) for seq, (source, target) in enumerate(pairs)]
    scheduler = make_scheduler(topology)
    scheduler.open(DESCRIPTION)
    scheduler.begin_session(0, [Planned(task) for task in pending], 0)
    granted = defaultdict[int, list[str]](list)
    while pending:
        bitmap, waiting = set[int](), list[Task]()
        for task in pending:
            if bitmap & {task.source, task.target}:
                waiting.append(task)
                continue
            bitmap |= {task.source, task.target}
            for rank in (task.source, task.target):
                granted[rank].append(task.id)
        pending = waiting
    assert {rank: taken(scheduler, rank) for rank in granted} == granted


@pytest.mark.failure_case("S13")
def test_a_report_made_twice_has_effect_once(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    begin(scheduler)
    for rank in TWO.ranks:
        taken(scheduler, rank)
    planned = [Planned(Task.compute("dec", 1, 1))]
    granted = scheduler.report(1, PRE_1, planned, 1)
    assert granted is not None and [one.task for one in granted.tasks] == [Task.compute("dec", 1, 1)]
    assert scheduler.report(1, PRE_1, planned, 0.01) is None, "the task was granted twice"


def test_a_task_never_granted_has_no_effect(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    begin(scheduler)
    for rank in (0, 2):
        taken(scheduler, rank)
        planned = [Planned(Task.compute("dec", rank, 6))]
        assert scheduler.report(rank, [Task.compute("pre", rank, 0), Task.compute("dec", rank, 5)], planned, 0.01) is None
    scheduler.report(0, [Task.compute("pre", 0, 0)], [Planned(Task.compute("dec", 0, 1))])
    assert taken(scheduler, 0) == ["C:dec:0:1"], "the first report did nothing"


def test_dec_tasks_name_the_active_entries(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    received = SimulatedPipeline(TWO, scheduler, random.Random(1), 20).run().received
    decs = [(rank, granted) for rank, message in received for granted in message if granted.task.name == "dec"]
    by_seq = {granted.task.seq: granted.active for _, granted in decs}
    for rank, granted in decs:
        assert granted.active == by_seq[granted.task.seq]
        assert rank == 0 or rank in granted.active
    assert {(1,), (1, 2)} <= set(by_seq.values())


def test_a_run_takes_requests_only_while_it_is_up(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    with pytest.raises(UserError, match="not up"):
        scheduler.submit("early")
    scheduler.open(DESCRIPTION)
    with pytest.raises(UserError, match="in use"):
        scheduler.open(DESCRIPTION)
    scheduler.submit("in time")
    scheduler.stop()
    scheduler.stop()
    with pytest.raises(UserError, match="stopping"):
        scheduler.submit("late")
    for rank in (1, 2):
        message = scheduler.wait(rank, 1)
        assert message is not None and message.kind == "stop"
        assert scheduler.wait(rank, 0) is None
    message = scheduler.wait_request(1)
    assert message is not None and message.kind == "stop"


def test_abort_overtakes_every_queue_and_reaches_every_reader(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION)
    for text in ("running", "waiting"):
        scheduler.submit(text)
    assert scheduler.wait_request(1) is not None
    begin(scheduler)
    assert scheduler.failure() is None
    assert scheduler.abort(2, 'out of memory: "é"')
    assert not scheduler.abort(1, "lost rank 2")
    assert scheduler.failure() == 'rank 2: out of memory: "é"'
    for rank in TWO.ranks:
        message = scheduler.wait(rank, 1)
        assert message is not None and (message.kind, message.text) == ("abort", 'rank 2: out of memory: "é"')
    for number in (0, 1):
        events = [event for _, event in scheduler.read_answer(number, "0", 1)]
        assert events == [AbortEvent('rank 2: out of memory: "é"')]
    with pytest.raises(RankLost, match="rank 2"):
        scheduler.submit("late")
    with pytest.raises(RankLost, match="rank 2"):
        begin(scheduler, 1)


def test_reading_an_answer_continues_at_a_position(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    assert scheduler.read_answer(0, "0", 0) == []
    submit_and_take(scheduler)
    scheduler.publish(0, TokensEvent([1], "a"))
    [(position, event)] = scheduler.read_answer(0, "0", 1)
    assert event == TokensEvent([1], "a")
    events = [TokensEvent([], "“x”", [ThreadNews((0, 1), "y", "ended", 3)]), OverranEvent([3, 4])]
    scheduler.publish(0, *events)
    scheduler.publish(1, OverranEvent([1]))
    assert [event for _, event in scheduler.read_answer(0, position, 1)] == events
    assert scheduler.read_answer(1, "0", 0) == [], "an event of a request that does not run"
    scheduler.close_answer(0)
    assert scheduler.read_answer(0, "0", 0) == []


def test_several_answers_are_read_together(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    assert scheduler.read_answers({0: "0", 1: "0"}, 0) == []
    scheduler.open(replace(DESCRIPTION, settings=DESCRIPTION.settings.replaced(max_num_seqs=4)))
    for text in "abcd":
        scheduler.submit(text)
    scheduler.pop_requests(4)
    scheduler.publish(0, TokensEvent([1], "a"))
    [(number, position, _)] = scheduler.read_answers({0: "0", 1: "0", 2: "0"}, 1)
    assert number == 0
    scheduler.publish(0, TokensEvent([2], "b"))
    scheduler.publish(2, TokensEvent([3], "c"), TokensEvent([4], "d"))
    scheduler.publish(3, TokensEvent([5], "e"))
    found = scheduler.read_answers({0: position, 1: "0", 2: "0"}, 1)
    texts = sorted((number, event.text) for number, _, event in found if isinstance(event, TokensEvent))
    assert texts == [(0, "b"), (2, "c"), (2, "d")]
    assert scheduler.read_answers({0: position, 2: "0"}, 0)[0][1] != position


@pytest.mark.failure_case("S18")
def test_expired_leases_are_found(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    assert scheduler.expired_ranks() == []
    scheduler.renew_lease(1)
    scheduler.renew_lease(2)
    assert wait_until(lambda: scheduler.expired_ranks() == [1, 2])


def test_trace_holds_every_task_once(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    history = SimulatedPipeline(TWO, scheduler, random.Random(2), 5).run(trace=True)
    trace = scheduler.trace()
    assert {line.task for line in trace} == set(history.finished) and len(trace) == len(history.finished)
    assert all(0 < line.granted_us <= line.finished_us for line in trace)
    SimulatedPipeline(TWO, scheduler, random.Random(2), 5).run(1)
    assert scheduler.trace() == []


def test_a_cleared_run_can_be_opened_again(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    for _ in range(2):
        scheduler.open(DESCRIPTION)
        assert scheduler.submit("x") == 0
        begin(scheduler)
        scheduler.abort(1, "gone")
        scheduler.clear()
        assert scheduler.wait(1, 0) is None and scheduler.failure() is None


def test_clear_leaves_no_key(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION)
    for rank in TWO.ranks:
        scheduler.renew_lease(rank)
    scheduler.submit("a")
    scheduler.submit("b")
    scheduler.cancel(1)
    begin(scheduler, trace=True)
    scheduler.report(0, [Task.compute("pre", 0, 0)], [])
    scheduler.publish(0, TokensEvent([1], "a"))
    scheduler.stop()
    names = [key.decode() for key in scheduler.client.scan_iter(match=scheduler.keys.prefix + "*")]
    assert len(names) > 8
    lasting = [name for name in names if not -1 < (lifetime := scheduler.client.ttl(name)) <= 60 and lifetime != -2]
    assert lasting == [], "a key would outlive the run by more than a minute"
    scheduler.clear()
    assert list(scheduler.client.scan_iter(match=scheduler.keys.prefix + "*")) == []


def test_a_deleted_workflow_raises_scheduler_lost(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    begin(scheduler)
    scheduler.client.delete(scheduler.keys.workflow)
    with pytest.raises(SchedulerLost, match="lost the run"):
        scheduler.report(0, [Task.compute("pre", 0, 0)], [])


def test_a_rank_cannot_finish_tasks_of_a_later_session(make_scheduler: MakeScheduler) -> None:
    first = make_scheduler(TWO)
    begin(first)
    stopped = WholeScheduler(first.client, first.keys.run_id, TWO)
    assert stopped.wait(1, 1) is not None
    for rank in (0, 2):
        taken(first, rank)
    first.client.hset(first.keys.workflow, "running", "0")
    begin(first, 1)
    for rank in TWO.ranks:
        taken(first, rank)
    assert stopped.report(1, PRE_1, [Planned(Task.compute("dec", 2, 1))], 0.01) is None
    assert first.wait(2, 0) is None


def test_one_round_trip_reports_tasks_and_waits_for_the_next(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(TWO)
    begin(scheduler)
    taken(scheduler, 1)
    before = scheduler.round_trips
    following = scheduler.report(1, PRE_1, [Planned(Task.compute("dec", 1, 1))], 1)
    assert following is not None and scheduler.round_trips == before + 1


def test_status_and_members(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(Topology.even(2, 2))
    assert scheduler.status().state == "gone"
    scheduler.open(DESCRIPTION)
    for rank in range(3):
        scheduler.renew_lease(rank)
    assert scheduler.members() == [0, 1, 2]
    scheduler.submit("{}")
    scheduler.submit("{}")
    assert scheduler.wait_request(1) is not None
    begin(scheduler)
    status = scheduler.status()
    assert (status.state, status.submitted, status.waiting, status.running) == ("up", 2, 1, (0,))
    assert status.alive == (0, 1, 2)
    scheduler.leave(1)
    assert scheduler.members() == [0, 2]
    assert wait_until(lambda: scheduler.status().alive == ())
    assert scheduler.expired_ranks() == [0, 2], "a rank that left normally has not expired"
    scheduler.stop()
    assert scheduler.status().state == "stopping"
    assert scheduler.clock_us() > 1_600_000_000_000_000


def test_clients_read_the_description_of_a_run(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(Topology.even(3, 2))
    run_id = scheduler.keys.run_id
    assert read_description(scheduler.client, run_id) is None
    description = RunDescription(
        Settings.of(target="x", draft="y", tree=LayerTreeOptions(8, 4), max_model_len=99),
        ((1, 2), (3,)),
        ((0, 2), (2, 3), (3, 6)),
    )
    scheduler.open(description)
    assert read_description(scheduler.client, run_id) == description
    scheduler.client.hset(scheduler.keys.run, "description", '{"groups": [[1]]}')
    with pytest.raises(UserError, match=r"^the description of the run: "):
        read_description(scheduler.client, run_id)


def test_what_is_no_event_is_an_error_of_one_line(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.client.xadd(scheduler.keys.answer(0), {"event": '{"kind": "news"}'})
    with pytest.raises(PipedecError, match=r"^the cluster sent an event that this version does not understand: "):
        scheduler.read_answer(0, "0", 1)


def recovered(scheduler: WholeScheduler, lost: Sequence[int] = (1,)) -> None:
    scheduler.enter(scheduler.recover(lost, "rank 1 was killed"))
    scheduler.open(DESCRIPTION, recovers=True)


@pytest.mark.failure_case("S4", "S13", "R14", "R15")
def test_a_caller_of_an_ended_epoch_changes_nothing(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    submit_and_take(scheduler)
    begin(scheduler)
    assert scheduler.recover([2], "rank 2 was killed") == 1
    calls: list[Callable[[], object]] = [
        lambda: scheduler.report(0, [Task.compute("pre", 0, 0)], []),
        lambda: scheduler.pop_requests(1),
        lambda: scheduler.publish(0, TokensEvent([1], "a")),
        lambda: scheduler.complete(0),
        lambda: scheduler.end_orphans(),
        lambda: scheduler.renew_lease(1),
        lambda: scheduler.leave(1),
        lambda: scheduler.abort(1, "it failed"),
        lambda: scheduler.suspect(1, "rank 2 does not answer"),
        lambda: scheduler.note_end(1, "it failed"),
        lambda: scheduler.open(DESCRIPTION),
        lambda: begin(scheduler, 1),
    ]
    for call in calls:
        with pytest.raises(EpochEnded, match=r"^the run is in epoch 1, not in 0$"):
            call()
    status = scheduler.status()
    assert (status.epoch, status.is_recovering, status.running, status.failure, status.alive) == (1, True, (0,), None, ())
    assert scheduler.read_answer(0, "0", 0) == []


@pytest.mark.failure_case("R14")
def test_an_epoch_is_ended_once(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION, recovers=True)
    assert scheduler.current_epoch() == 0
    assert [scheduler.recover([1], "rank 1 was killed"), scheduler.recover([2], "rank 2 was killed")] == [1, 1]
    for rank in TWO.ranks:
        message = scheduler.wait(rank, 0)
        assert message is not None and (message.kind, message.text) == ("recover", "rank 1 was killed")
    scheduler.enter(1)
    scheduler.open(DESCRIPTION, recovers=True)
    status = scheduler.status()
    assert (status.epoch, status.is_recovering, status.recovers, status.num_recoveries) == (1, False, True, 1)
    [recovery] = status.recoveries
    assert (recovery.epoch, recovery.lost, recovery.reason) == (1, (1,), "rank 1 was killed")
    assert recovery.served_us is not None and recovery.served_us >= recovery.at_us


def test_a_new_epoch_finds_the_running_requests_and_what_their_answers_have(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(replace(DESCRIPTION, settings=DESCRIPTION.settings.replaced(max_num_seqs=3)))
    for text in ("first", "second", "third"):
        scheduler.submit(text)
    scheduler.pop_requests(2)
    begin(scheduler)
    scheduler.publish(
        0, TokensEvent([5, 6], "a", index=0), TokensEvent([7], "b", index=2, offset=1), TokensEvent([7, 8], "bc", None, 2, 1)
    )
    recovered(scheduler)
    assert [(one.number, one.text, one.output_token_ids, one.attempts) for one in scheduler.journal()] == [
        (0, "first", (5, 6, 7, 8), 1), (1, "second", (), 1)
    ]  # fmt: skip
    scheduler.publish(0, TokensEvent([], "", index=4))
    recovered(scheduler)
    assert [one.attempts for one in scheduler.journal()] == [2, 2]
    scheduler.enter(scheduler.recover([], "Redis was away", counts=False))
    assert [one.attempts for one in scheduler.journal()] == [2, 2]
    scheduler.publish(0, TokensEvent([9], "d", index=4))
    assert [one.attempts for one in scheduler.journal()] == [0, 2]
    scheduler.complete(0)
    begin(scheduler, 1)
    assert [one.number for one in scheduler.journal()] == [1]
    assert [message.text for message in scheduler.pop_requests(2).requests] == ["third"]


@pytest.mark.failure_case("S3e")
def test_a_loss_before_an_epoch_is_served_is_no_attempt_of_a_running_request(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    submit_and_take(scheduler)
    for attempts, is_served in ((1, False), (1, False), (1, True), (2, False)):
        scheduler.enter(scheduler.recover([1], "rank 1 was killed"))
        assert [one.attempts for one in scheduler.journal()] == [attempts]
        if is_served:
            scheduler.open(DESCRIPTION, recovers=True)


@pytest.mark.failure_case("S20")
def test_a_loss_during_a_trial_is_that_of_the_request_and_those_of_the_guilty_are_charged_to_it(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(replace(DESCRIPTION, settings=DESCRIPTION.settings.replaced(max_num_seqs=3)))
    for text in ("first", "second", "third"):
        scheduler.submit(text)
    scheduler.pop_requests(3)
    recovered(scheduler)
    scheduler.publish(1, TokensEvent([5], "a"))
    scheduler.try_alone(1)
    recovered(scheduler)
    assert [(one.attempts, one.losses) for one in scheduler.journal()] == [(1, 1), (1, 2), (1, 1)]
    recovered(scheduler)  # nobody is tried any more
    assert [one.losses for one in scheduler.journal()] == [2, 3, 2]
    scheduler.try_alone(1, passed=0)
    assert [one.losses for one in scheduler.journal()] == [0, 3, 2]
    scheduler.enter(scheduler.recover([], "Redis was away", counts=False))
    scheduler.blame(1)
    assert [(one.attempts, one.losses) for one in scheduler.journal()] == [(0, 0)] * 3
    assert [one.request for one in scheduler.status().recoveries] == [1, 1, 1, None]


def test_a_run_that_is_stopped_while_it_recovers_stops_in_its_next_epoch(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(TWO)
    scheduler.open(DESCRIPTION)
    scheduler.stop()
    recovered(scheduler)
    for rank in TWO.ranks:
        message = scheduler.wait(rank, 0)
        assert message is not None and message.kind == "stop"
