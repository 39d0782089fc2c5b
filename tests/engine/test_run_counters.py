"""The counters of a run: what enters is told apart by kind, and what is accepted by its depth below the root."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.core import Request, RequestUpdate, SamplingParams, StageMessage, Step
from pipedec.decoding import Batch, TimestepTiming
from pipedec.decoding.request_state import POSITIONS, Tally
from pipedec.engine.counters import ROW_BOUNDS, SECOND_BOUNDS, RunCounters
from pipedec.engine.local import LocalPipeline
from pipedec.engine.loop import Timestep
from pipedec.kv import KVManager
from pipedec.messages import RunStats
from pipedec.methods import StaticTreeOptions
from pipedec.threads import Sequence

PROMPT = tuple(range(5, 105))
SAMPLING = SamplingParams(max_tokens=13, ignore_eos=True)


@pytest.fixture
def pipeline(pair: Pair) -> LocalPipeline:
    """Its draft is the target, so that the most probable guess is right."""
    return LocalPipeline.load(pair.spec(stages=2, draft=str(pair.target)).replaced(prefix_cache=False))


def counted(pipeline: LocalPipeline, *requests: Request) -> RunStats:
    list(pipeline.run_all({1: requests}))
    return pipeline.stats()


@pytest.mark.parametrize("method", ["pp", "stpp", "pipedec", "pipedec-bestfirst", "bita"])
def test_every_row_is_of_one_kind(pipeline: LocalPipeline, method: str) -> None:
    stats = counted(pipeline, *(Request(number, PROMPT, SAMPLING, method) for number in range(2)))
    metrics = [answer.metrics for answer in pipeline.answers.values()]
    assert stats.prompt_rows == 2 * len(PROMPT)
    assert stats.draft_rows == sum(each.draft_tokens for each in metrics)
    assert stats.drafts == stats.root_rows == sum(each.misses for each in metrics) > 0
    assert stats.accepted_tokens == sum(each.hits for each in metrics)
    assert (stats.mask_rows > 0) == (method == "bita")
    assert sum(rows for rows, _ in pipeline.fill) == stats.prompt_rows + stats.root_rows + stats.draft_rows + stats.mask_rows
    assert list(stats.accepted_per_pos) == sorted(stats.accepted_per_pos, reverse=True)
    assert sum(stats.accepted_per_pos) == stats.accepted_tokens
    if method == "pp":
        assert (stats.draft_rows, stats.accepted_tokens, stats.drafts) == (0, 0, 24)


def test_accepted_tokens_by_position(pipeline: LocalPipeline) -> None:
    """Four roots below which two of the two layers are right."""
    stats = counted(pipeline, Request(0, PROMPT, SAMPLING, "stpp", StaticTreeOptions(width=3, children=2, depth=2)))
    assert (stats.drafts, stats.draft_rows, stats.accepted_per_pos[:3]) == (4, 20, (4, 4, 0))


def test_tokens_of_a_long_row_of_hits() -> None:
    tally = Tally()
    for depth in range(0, 40, 4):
        tally.accept(depth, 4)
    assert tally.accepted_tokens == 40 and tally.accepted_per_pos == [1] * POSITIONS


def test_requests_without_kv_memory_wait() -> None:
    batch = Batch(2, kv=KVManager(160, 16))
    for number in range(2):
        batch.open(Request(number, PROMPT, SAMPLING, "pp"), partial(Sequence, len(PROMPT), (), 13))
    assert (batch.num_running, batch.num_waiting) == (0, 2)
    batch.propose()
    assert (batch.num_running, batch.num_waiting) == (1, 1)
    batch.pause(0)
    assert batch.num_waiting == 2 and batch.tally.pauses == 1


def test_timesteps_fall_into_buckets() -> None:
    counters = RunCounters(Batch(2))

    def note(rows: int, seconds: float | None) -> None:
        ids = torch.zeros(rows, dtype=torch.int64)
        entered = StageMessage((RequestUpdate(0, step=Step(ids, ids)),) if rows else ())
        counters.note(Timestep(1, entered, timing=None if seconds is None else TimestepTiming(seconds, 0.0, ())))

    for rows, seconds in ((1, None), (2, 0.0005), (3, 0.0006), (0, 9.0), (5000, 0.022)):
        note(rows, seconds)
    stats = counters.stats()
    assert stats.timesteps == 5
    assert (stats.rows_per_timestep.bounds, stats.timestep_seconds.bounds) == (ROW_BOUNDS, SECOND_BOUNDS)
    assert stats.rows_per_timestep.counts == (1, 1, 1, *[0] * (len(ROW_BOUNDS) - 3), 1)
    assert stats.rows_per_timestep.total == 5006
    assert stats.timestep_seconds.counts == (1, 1, 0, 0, 0, 0, 1, *[0] * (len(SECOND_BOUNDS) - 7), 1)
    assert stats.timestep_seconds.total == pytest.approx(9.0231)
