"""Whole answers through both schedulers, ranks in random order: every scheduling rule holds throughout."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.simulated_pipeline import History, SimulatedPipeline

from pipedec.core import Opening, SamplingParams
from pipedec.scheduler import MemoryScheduler, RedisScheduler, Scheduler, Task
from pipedec.topology import Topology

TOPOLOGIES = [
    Topology.even(1, 1),
    Topology.even(2, 2),
    Topology.even(3, 1),
    Topology.even(3, 3),
    Topology(((1,), (2, 3, 4), (5, 6))),
    Topology.even(14, 7),
    Topology.even(14, 14),
]
MakeScheduler = Callable[[Topology], Scheduler]


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


def check_openings(topology: Topology, history: History, num_chunks: int) -> None:
    """Every rank is told of the request once, before its first task, and by no task."""
    for rank in topology.ranks:
        messages = [message for receiver, message in history.received if receiver == rank]
        assert [message.kind for message in messages] == ["open"] + ["task"] * (len(messages) - 1)
        assert messages[0].number == messages[1].number
        assert messages[0].opening == Opening(num_chunks, SamplingParams())
        keys = {"token_ids"} if rank == 1 else set()
        assert set().union(*(message.payload for message in messages)) <= {"rows", "verdict", "is_first_chunk"} | keys


def check_answer(topology: Topology, history: History, num_tokens: int) -> None:
    accepted = [verdict.tokens[0] for verdict in history.verdicts[0]]
    assert accepted == list(range(1, num_tokens + 1))
    assert all(history.verdicts[rank] == history.verdicts[0] for rank in topology.ranks)
    assert history.verdicts[0][-1].finished == "length"
    assert len(history.hits) == num_tokens - 1
    assert history.timesteps == sum(1 if hit else topology.num_groups for hit in history.hits)
    assert history.finished[-1].name == "end"


@pytest.mark.fast_cases
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=named)
def test_whole_answers(make_scheduler: MakeScheduler, topology: Topology, seed: int) -> None:
    num_tokens = 20 if topology.num_stages < 14 else 8
    pipeline = SimulatedPipeline(topology, make_scheduler(topology), random.Random(seed), num_tokens, repeat_rate=0.1)
    history = pipeline.run(num_chunks=1 + 2 * seed)
    check_order(history)
    check_barriers(history)
    check_openings(topology, history, 1 + 2 * seed)
    check_answer(topology, history, num_tokens)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=named)
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_short_answers(make_scheduler: MakeScheduler, topology: Topology, num_tokens: int) -> None:
    history = SimulatedPipeline(topology, make_scheduler(topology), random.Random(0), num_tokens).run()
    check_order(history)
    check_answer(topology, history, num_tokens)


@pytest.mark.fast_cases
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=named)
def test_an_answer_that_a_stop_string_ends(make_scheduler: MakeScheduler, topology: Topology, seed: int) -> None:
    """Rank 0 lets the pipeline run empty, then ends the answer by itself; the next request finds nothing of it."""
    scheduler = make_scheduler(topology)
    for number in range(2):
        pipeline = SimulatedPipeline(topology, scheduler, random.Random(seed), 100, hit_rate=0.9, stop_after=3)
        history = pipeline.run(number)
        check_order(history)
        check_barriers(history)
        check_openings(topology, history, 1)
        tokens = [verdict.tokens[0] for verdict in history.verdicts[0]]
        assert tokens == list(range(1, len(tokens) + 1)) and 3 <= len(tokens) <= 3 + topology.num_groups
        assert all(verdicts == history.verdicts[0] for verdicts in history.verdicts.values())
        end, last = history.finished[-1], max(task.seq for task in history.finished if task.name == "sync")
        assert end.name == "end" and end.seq > last
        assert [task for task in history.finished if task.seq == end.seq] == [Task.compute("dec", 0, end.seq), end]
        assert all(scheduler.wait(rank, 0) is None for rank in topology.ranks)


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_in_two_transfers(seed: int) -> None:
    source = random.Random(seed)
    topology = Topology.even(7, source.randint(1, 7))
    scheduler = MemoryScheduler(topology)
    pipeline = SimulatedPipeline(topology, scheduler, source, num_tokens=25)
    most = 0

    def observe() -> None:
        nonlocal most
        assert scheduler.graph is not None
        busy = [rank for task in scheduler.graph.granted if task.kind == "T" for rank in task.ranks]
        assert len(busy) == len(set(busy))
        assert set(busy) == scheduler.graph.busy
        for task, _ in scheduler.graph.pending:
            assert set(task.ranks) & scheduler.graph.busy, "a transfer waits though both its ranks are free"
        most = max(most, len(busy) // 2)

    check_order(pipeline.run(observe=observe))
    assert most >= (2 if topology.num_groups > 4 else 1)


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=named)
def test_both_back_ends_grant_the_same(make_redis_scheduler: Callable[[Topology], RedisScheduler], topology: Topology) -> None:
    num_tokens = 12 if topology.num_stages < 14 else 6
    histories = [
        SimulatedPipeline(topology, scheduler, random.Random(11), num_tokens, repeat_rate=0.1).run(num_chunks=2)
        for scheduler in (MemoryScheduler(topology), make_redis_scheduler(topology))
    ]
    memory, redis = (
        [(rank, replace(message, payload=json.loads(json.dumps(message.payload)))) for rank, message in history.received]
        for history in histories
    )
    assert memory == redis
    assert histories[0].finished == histories[1].finished


def test_the_memory_scheduler_keeps_nothing_of_a_finished_request() -> None:
    topology = Topology.even(6, 3)
    scheduler = MemoryScheduler(topology)
    for number in range(3):
        SimulatedPipeline(topology, scheduler, random.Random(number), 15).run(number)
        graph = scheduler.graph
        assert graph is not None and not graph.running
        kept = (graph.waiting, graph.unmet, graph.dependents, graph.granted, graph.done, graph.active, graph.pending, graph.busy)
        assert not any(kept)
        assert all(scheduler.wait(rank, 0) is None for rank in topology.ranks)


def test_redis_keeps_nothing_of_a_finished_request(make_redis_scheduler: Callable[[Topology], RedisScheduler]) -> None:
    topology = Topology.even(6, 3)
    scheduler = make_redis_scheduler(topology)
    keys, client = scheduler.keys, scheduler.client
    for number in range(3):
        SimulatedPipeline(topology, scheduler, random.Random(number), 15).run(number)
        words = {field.decode().split(" ")[0] for field in client.hkeys(keys.workflow)}
        assert words == {"number", "running", "entries", "trace", "last", "reply"}
        assert not client.get(keys.bitmap).strip(b"\0")
        remaining = {key.decode() for key in client.scan_iter(match=keys.prefix + "*")}
        assert remaining == {keys.workflow, keys.bitmap}


@pytest.mark.slow
def test_stored_state_does_not_grow_with_the_answer(make_redis_scheduler: Callable[[Topology], RedisScheduler]) -> None:
    topology = Topology.even(4, 4)
    scheduler = make_redis_scheduler(topology)
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
