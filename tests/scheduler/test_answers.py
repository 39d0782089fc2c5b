"""Whole answers, ranks in random order: every scheduling rule holds throughout."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.simulated_pipeline import History, SimulatedPipeline
from support.whole_scheduler import WholeScheduler

from pipedec.scheduler import Task
from pipedec.topology import Topology

TOPOLOGIES = [
    Topology.even(1, 1),
    Topology(((1,), (2, 3, 4), (5, 6))),
    Topology.even(7, 7),
]
MakeScheduler = Callable[[Topology], WholeScheduler]


def named(topology: Topology) -> str:
    return "-".join(str(len(group)) for group in topology.groups)


def check_order(history: History) -> None:
    """Every task ran once and after all its dependencies. A virtual task is done when its dependencies are."""
    position = {task: index for index, task in enumerate(history.finished)}
    assert len(position) == len(history.finished)
    after = {plan.task: plan.after for plan in history.planned}
    assert len(after) == len(history.planned), "a task was scheduled twice"
    assert {task for task in after if task.kind != "V"} == set(position)

    def done_at(task: Task) -> int:
        if task in position:
            return position[task]
        return max((done_at(before) for before in after[task]), default=-1)

    for task in position:
        for before in after[task]:
            assert done_at(before) < position[task], (task, before)


def check_barriers(history: History) -> None:
    """No compute task of timestep seq + 1 runs before all those of timestep seq are done."""
    computes = [task.seq for task in history.finished if task.name in ("dec", "sync", "end")]
    assert computes == sorted(computes)


def check_answer(topology: Topology, history: History, num_tokens: int) -> None:
    told = history.verdicts[0]
    assert [verdict.tokens[0] for verdict in told] == list(range(1, num_tokens + 1))
    assert told[-1].finished == "length"
    for rank in range(1, topology.num_stages + 1):
        assert [verdict.accepted for verdict in history.verdicts[rank]] == [verdict.accepted for verdict in told]
        assert all(verdict.finished is None for verdict in history.verdicts[rank]), "what ends an answer travels with the rows"
    assert len(history.hits) == num_tokens - 1
    assert history.timesteps == sum(1 if hit else topology.num_groups for hit in history.hits)
    assert history.closed == list(range(1, topology.num_stages + 1))
    assert history.finished[-1].name == "end"


def check_messages(topology: Topology, history: History) -> None:
    """A rank gets what it does in a row at once, and reports it at once: at most two messages and two reports in a timestep."""
    last = max(task.seq for task in history.finished)
    for rank in topology.ranks:
        messages = [granted for receiver, granted in history.received if receiver == rank]
        for granted in messages:
            names = [one.task.name for one in granted]
            assert sum(name in ("pre", "dec", "sync", "end") for name in names) <= 1, names
        for seq in range(1, last + 1):
            assert sum(any(one.task.kind == "C" and one.task.seq == seq for one in granted) for granted in messages) <= 2
        assert history.reports[rank] <= 2 * (last + 1) + 1
        assert set().union(*(one.payload for granted in messages for one in granted)) <= {"results"}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=named)
def test_whole_answers(make_scheduler: MakeScheduler, topology: Topology) -> None:
    scheduler, source = make_scheduler(topology), random.Random(1)
    for number, num_tokens in enumerate((1, 2, 20 if topology.num_stages < 6 else 8)):
        history = SimulatedPipeline(topology, scheduler, source, num_tokens, repeat_rate=0.1).run(number)
        check_order(history)
        check_barriers(history)
        check_messages(topology, history)
        check_answer(topology, history, num_tokens)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=named)
def test_an_answer_that_a_stop_string_ends(make_scheduler: MakeScheduler, topology: Topology) -> None:
    """Rank 0 alone knows, and lets the pipeline run empty; the next session finds nothing of it."""
    scheduler = make_scheduler(topology)
    for number in range(2):
        history = SimulatedPipeline(topology, scheduler, random.Random(1), 100, hit_rate=0.9, stop_after=3).run(number)
        check_order(history)
        check_barriers(history)
        assert history.closed == list(range(1, topology.num_stages + 1))
        tokens = [verdict.tokens[0] for verdict in history.verdicts[0]]
        assert tokens == list(range(1, len(tokens) + 1)) and 3 <= len(tokens) <= 3 + topology.num_groups
        end = history.finished[-1]
        assert end.name == "end" and [task for task in history.finished if task.seq == end.seq] == [
            Task.compute("dec", 0, end.seq),
            end,
        ]
        assert all(scheduler.wait(rank, 0) is None for rank in topology.ranks)


def test_transfers_that_do_not_conflict_may_run_together(make_scheduler: MakeScheduler) -> None:
    """Algorithm 2: of those that are granted together, each in the first round in which both its ranks are free."""
    topology = Topology.even(7, 5)
    pipeline = SimulatedPipeline(topology, make_scheduler(topology), random.Random(5), num_tokens=12)
    check_order(pipeline.run())
    assert pipeline.most_transfers >= 2


def test_redis_keeps_nothing_of_a_finished_session(make_scheduler: MakeScheduler) -> None:
    topology = Topology.even(6, 3)
    scheduler = make_scheduler(topology)
    keys, client = scheduler.keys, scheduler.client
    for number in range(2):
        SimulatedPipeline(topology, scheduler, random.Random(number), 8).run(number)
        words = {field.decode().split(" ")[0] for field in client.hkeys(keys.workflow)}
        assert words == {"number", "running", "entries", "trace"}
        remaining = {key.decode() for key in client.scan_iter(match=keys.prefix + "*")}
        assert remaining == {keys.workflow, keys.run}


@pytest.mark.slow
def test_stored_state_does_not_grow_with_the_answer(make_scheduler: MakeScheduler) -> None:
    topology = Topology.even(4, 4)
    scheduler = make_scheduler(topology)
    client, keys = scheduler.client, scheduler.keys
    pipeline = SimulatedPipeline(topology, scheduler, random.Random(4), num_tokens=120)
    largest: dict[int, tuple[int, int]] = {}

    def observe() -> None:
        task = pipeline.history.finished[-1]
        if task.name == "sync" and task.target == 0 and task.seq > 0:
            half = int(task.seq > 60)
            sizes = (client.hlen(keys.workflow), client.zcard(keys.done))
            largest[half] = max(largest.get(half, (0, 0)), sizes)

    history = pipeline.run(observe=observe)
    assert history.timesteps > 200
    for early, late in zip(largest[0], largest[1], strict=True):
        assert late <= early + 12  # random variation within a timestep, not the tasks of 140 timesteps
