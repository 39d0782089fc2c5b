"""The reports to Redis that a timestep waits for, one after another."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

from support.critical_path import critical_path, critical_path_lengths
from support.simulated_pipeline import SimulatedPipeline

from pipedec.scheduler import EmbeddedServer, GrantedTask, RankScheduler, Task, connect
from pipedec.topology import Topology


def _steady_trace(period_us: int) -> list[GrantedTask]:
    """Two timesteps of one stage: both ranks compute, rank 1 says the verdict, both sync, rank 0 sends."""
    trace = []
    for seq in (1, 2, 3):
        start = seq * period_us
        trace += [
            GrantedTask(Task.compute("dec", 0, seq), start, start + 10),
            GrantedTask(Task.compute("dec", 1, seq), start, start + 30),
            GrantedTask(Task.compute("sync", 0, seq), start + 30, start + 50),
            GrantedTask(Task.compute("sync", 1, seq), start + 30, start + 60),
            GrantedTask(Task.transfer(0, 1, seq), start + 50, start + period_us),
        ]
    return trace


def test_critical_path_follows_grants_and_busy_ranks() -> None:
    """The transfer is granted by rank 0's sync, but its receiver has its own sync to report first."""
    path = critical_path(_steady_trace(100), 1)
    assert path == [Task.compute("dec", 1, 1), Task.compute("sync", 1, 1), Task.transfer(0, 1, 1)]
    assert critical_path_lengths(_steady_trace(100)) == [3, 3]


def test_critical_path_of_a_real_trace_is_a_chain_of_causes() -> None:
    topology = Topology.even(2, 2)
    with EmbeddedServer() as server:
        scheduler = RankScheduler(connect(server.url), "critical", topology)
        SimulatedPipeline(topology, scheduler, random.Random(3), num_tokens=6, hit_rate=1.0).run(trace=True)
        lines = {line.task: line for line in scheduler.trace()}
    lengths = critical_path_lengths(list(lines.values()))
    assert len(lengths) >= 3 and min(lengths) >= 2
    assert statistics.median(lengths) <= 3  # a dec or verdict, a sync, and a transfer if it is reported last
    for seq in (2, 3):
        path = critical_path(list(lines.values()), seq)
        # Redis's clock stands still inside a script, so the report that completes the barrier has the time of the grant.
        assert lines[path[-1]].finished_us == lines[Task.compute("dec", 0, seq + 1)].granted_us
        assert all(lines[before].finished_us < lines[after].finished_us for before, after in pairwise(path))
