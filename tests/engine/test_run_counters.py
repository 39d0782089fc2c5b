"""The counters of a run, by kind of row and depth below the root; and those of a request."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience, Request, Resources, Scheduler, TimestepTiming
from pipedec.decoding.events import Advanced, Record, Timestep
from pipedec.decoding.method import POSITIONS, Tally
from pipedec.engine.local import LocalPipeline
from pipedec.engine.run_counters import ROW_BOUNDS, SECOND_BOUNDS, RunCounters
from pipedec.kv import KVManager
from pipedec.messages.stats import RunStats
from pipedec.methods import StaticTreeOptions
from pipedec.threads import Sequence, replay

PROMPT = tuple(range(5, 105))
SAMPLING = SamplingParams(max_tokens=13, ignore_eos=True)


@pytest.fixture
def pipeline(pair: Pair) -> LocalPipeline:
    """Its draft is the target, so that the most probable guess is right."""
    return LocalPipeline.load(pair.spec(stages=2, draft=str(pair.target)).replaced(prefix_cache=False))


def stats_of(pipeline: LocalPipeline, *requests: TokenizedRequest) -> RunStats:
    list(pipeline.run_all({1: requests}))
    return pipeline.stats()


@pytest.mark.parametrize("method", ["pp", "stpp", "pipedec", "pipedec-bestfirst", "bita"])
def test_every_row_is_of_one_kind(pipeline: LocalPipeline, method: str) -> None:
    stats = stats_of(pipeline, *(TokenizedRequest(number, PROMPT, SAMPLING, method) for number in range(2)))
    metrics = [answer.metrics for answer in pipeline.answers.values()]
    assert stats.prompt_rows == 2 * len(PROMPT)
    assert stats.draft_rows == sum(each.draft_tokens for each in metrics)
    assert stats.drafts == stats.root_rows == sum(each.misses for each in metrics) > 0
    assert stats.accepted_tokens == sum(each.hits for each in metrics)
    assert (stats.mask_rows > 0) == (method == "bita")
    assert sum(rows for rows, _ in pipeline.fill) == stats.prompt_rows + stats.root_rows + stats.draft_rows + stats.mask_rows
    assert list(stats.accepted_per_pos) == sorted(stats.accepted_per_pos, reverse=True)
    assert sum(stats.accepted_per_pos) == stats.accepted_tokens
    rates = [each.acceptance_rate for each in metrics]
    assert rates == [None] * 2 if method == "pp" else all(rate is not None and 0 <= rate < 1 for rate in rates)
    if method == "pp":
        assert (stats.draft_rows, stats.accepted_tokens, stats.drafts) == (0, 0, 24)


def test_accepted_tokens_by_position(pair: Pair) -> None:
    """Two children of each of four roots and three rows below them: five draft tokens, of which two are right.

    In 64 bits, so that the draft, which is the target, chooses what the target chooses, however each of them rounds.
    """
    spec = pair.spec(stages=2, draft=str(pair.target)).replaced(dtype="float64", draft_dtype="float64")
    pipeline = LocalPipeline.load(spec)
    stats = stats_of(pipeline, TokenizedRequest(0, PROMPT, SAMPLING, "stpp", StaticTreeOptions(width=3, children=2, depth=2)))
    metrics = pipeline.last.metrics
    assert (stats.drafts, stats.draft_rows, stats.accepted_per_pos[:3]) == (4, 20, (4, 4, 0))
    assert (metrics.misses, metrics.hits, metrics.draft_tokens, metrics.acceptance_rate) == (4, 8, 20, 8 / 20)


def test_tokens_of_a_long_row_of_hits() -> None:
    tally = Tally()
    for depth in range(0, 40, 4):
        tally.count_accepted(depth, 4)
    assert tally.accepted_tokens == 40 and tally.accepted_per_pos == [1] * POSITIONS


def test_requests_without_kv_memory_wait() -> None:
    scheduler = Scheduler(Resources(Experience(2)), KVManager(160, 16))
    for number in range(2):
        asked = TokenizedRequest(number, PROMPT, SAMPLING, "pp")
        scheduler.open(scheduler.prepare(asked, partial(Sequence, len(PROMPT), (), 13)))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    scheduler.entering()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.pause(scheduler.requests[0])
    assert scheduler.num_waiting == 2 and scheduler.tally.pauses == 1


def test_timesteps_fall_into_buckets() -> None:
    counters = RunCounters(Scheduler(Resources(Experience(2))))

    def note(rows: int, seconds: float | None) -> None:
        ids = torch.zeros(rows, dtype=torch.int64)
        entered = StageMessage((RequestUpdate(0, step=Step(ids, ids)),) if rows else ())
        counters.on_record(Timestep(1, entered, timing=None if seconds is None else TimestepTiming(seconds, 0.0, ())))

    for rows, seconds in ((1, None), (2, 0.0005), (3, 0.0006), (0, 9.0), (5000, 0.022)):
        note(rows, seconds)
    stats = counters.stats()
    assert stats.timesteps == 5
    assert (stats.rows_per_timestep.bounds, stats.timestep_seconds.bounds) == (ROW_BOUNDS, SECOND_BOUNDS)
    assert stats.rows_per_timestep.counts == (1, 1, 1, *[0] * (len(ROW_BOUNDS) - 3), 1)
    assert stats.rows_per_timestep.total == 5006
    assert stats.timestep_seconds.counts == (1, 1, 0, 0, 0, 0, 1, *[0] * (len(SECOND_BOUNDS) - 7), 1)
    assert stats.timestep_seconds.total == pytest.approx(9.0231)


# Those of one request.


@pytest.mark.parametrize("method", ["stpp", "pipedec", "pipedec-bestfirst", "bita"])
def test_draft_tokens_are_all_rows_but_roots_and_masks_from_the_first_verdict_on(pipeline: LocalPipeline, method: str) -> None:
    counted, begun = Counter[int](), set[int]()

    def count(record: Record) -> None:
        match record:
            case Timestep():
                for update in record.entered.updates:
                    if update.step is not None and update.number in begun:
                        counted[update.number] += int(((update.step.parents >= 0) & (update.step.token_ids >= 0)).sum())
            case Advanced(request):
                begun.add(request.number)

    pipeline.scheduler.listeners.append(count)
    stats_of(pipeline, *(TokenizedRequest(number, PROMPT[: 50 + number], SAMPLING, method) for number in range(3)))
    assert {number: answer.metrics.draft_tokens for number, answer in pipeline.answers.items()} == counted
    assert min(counted.values()) > 0


def scheduler_of(kv: KVManager, *seconds: float) -> Scheduler:
    """``seconds`` is the time at every look at the clock."""
    scheduler = Scheduler(Resources(Experience(1)), kv)
    times = iter(seconds)
    scheduler.now = lambda: next(times)
    return scheduler


def begin(scheduler: Scheduler, number: int, *said: int, priority: int = 0) -> Request:
    """A request for an answer of at most 30 tokens, of which some were ``said`` before."""
    asked = TokenizedRequest(number, PROMPT[:9], SamplingParams(max_tokens=30), "pp", output_token_ids=said, priority=priority)

    def new_sequence() -> Sequence:
        sequence = Sequence(9, (), 30)
        replay(sequence, said)
        return sequence

    request = scheduler.prepare(asked, new_sequence)
    scheduler.open(request)
    return request


def test_timesteps_and_seconds_count_from_the_first_verdict_on() -> None:
    scheduler = scheduler_of(KVManager(100, 1), 1.0, 4.0, 5.0, 6.5)
    request = begin(scheduler, 0)
    for timestep, token in ((4, 200), (6, 201), (9, 202)):
        scheduler.entering()
        scheduler.take(RequestUpdate(0, verdict=Verdict.of(token)), timestep)
    assert request.metrics.timesteps == 5
    assert (request.metrics.prefill_seconds, request.metrics.decode_seconds) == (3.0, 2.5)


def test_a_request_that_waits_for_its_first_lane_is_not_paused() -> None:
    """Cached tokens are those of the prompt when it first entered."""
    scheduler = scheduler_of(KVManager(60, 1), *range(99))
    said, rest = tuple(range(200, 212)), tuple(range(212, 216))
    begin(scheduler, 0)
    scheduler.entering()
    scheduler.take(RequestUpdate(0, verdict=Verdict.of(*said)), 1)
    waiting = begin(scheduler, 1, *said, priority=1)
    scheduler.entering()
    assert not waiting.has_lane and waiting.metrics.pauses == 0
    scheduler.take(RequestUpdate(0, verdict=Verdict.of(*rest, finished="stop")), 2)
    scheduler.entering()
    assert waiting.opening is not None and waiting.opening.cached > waiting.metrics.cached_tokens == 9
    for number in (2, 3):
        begin(scheduler, number)
        scheduler.entering()
        assert not waiting.has_lane
        scheduler.take(RequestUpdate(number, verdict=Verdict.of(7, finished="stop")), number)
        scheduler.take(RequestUpdate(1, verdict=Verdict.of(finished="paused")), number)
        scheduler.forget_prefixes()
        scheduler.entering()
        assert waiting.opening is not None and waiting.opening.cached == 0
    assert (waiting.metrics.pauses, waiting.metrics.cached_tokens, waiting.metrics.resumed_tokens) == (2, 9, 12)
