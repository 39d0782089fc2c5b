"""The counters of a run, by kind of row and depth below the root; and those of a request, from the steps that enter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pipedec.decoding.request_state import POSITIONS, Tally
from pipedec.engine.counters import ROW_BOUNDS, SECOND_BOUNDS, Counters, RunCounters
from support.tiny_pair import Pair

from pipedec.core.completion import Metrics
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding import Batch, TimestepTiming
from pipedec.engine.local import LocalPipeline
from pipedec.engine.loop import Advanced, Record, RequestEnded, RequestOpened, Timestep, Waits
from pipedec.kv import KVManager
from pipedec.messages.stats import RunStats
from pipedec.methods import StaticTreeOptions
from pipedec.threads import Sequence

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
        tally.accept(depth, 4)
    assert tally.accepted_tokens == 40 and tally.accepted_per_pos == [1] * POSITIONS


def test_requests_without_kv_memory_wait() -> None:
    batch = Batch(2, kv=KVManager(160, 16))
    for number in range(2):
        batch.open(TokenizedRequest(number, PROMPT, SAMPLING, "pp"), partial(Sequence, len(PROMPT), (), 13))
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


# Those of one request.


def step(token_ids: list[int], parents: list[int]) -> Step:
    return Step(torch.tensor(token_ids), torch.tensor(parents))


def entered(*steps: Step) -> list[Record]:
    return [Timestep(1, StageMessage((RequestUpdate(0, step=each),))) for each in steps]


def opened(cached: int = 0) -> RequestOpened:
    request = TokenizedRequest(0, tuple(range(9)))
    return RequestOpened(0, request, lambda: Sequence(9, (), 9), NewRequest(9, request.sampling, cached=cached))


def advanced(timestep: int) -> Advanced:
    return Advanced(0, Verdict.of(5), (), timestep)


def counted(*records: Record) -> Metrics:
    """The metrics of request 0, each of whose records comes a second after the one before."""
    seconds = iter(range(9999))
    counters, metrics = Counters(lambda: time[0]), Metrics()
    time = [float(next(seconds))]
    counters.begin(0, metrics)
    for record in records:
        time[0] = float(next(seconds))
        counters.note(record)
    return metrics


END = RequestEnded(0, "length", hits=7, misses=2)


def test_roots_and_masks_are_no_draft_tokens() -> None:
    assert counted(opened(), advanced(1), END).draft_tokens == 0
    steps = entered(step([7, 11, 12, -1, -2], [-1, 0, 0, 1, 3]), step([13], [-1]))
    metrics = counted(opened(), advanced(1), *steps, END)
    assert (metrics.draft_tokens, metrics.hits, metrics.misses) == (2, 7, 2)


def test_draft_tokens_timesteps_and_seconds_count_from_the_first_verdict_on() -> None:
    tree = step([7, 11, 12], [-1, 0, 0])
    metrics = counted(opened(), *entered(tree), advanced(4), *entered(tree), advanced(9), END)
    assert (metrics.draft_tokens, metrics.timesteps) == (2, 5)
    assert (metrics.prefill_seconds, metrics.decode_seconds) == (3.0, 2.0)


def test_a_request_that_waits_for_its_first_lane_is_not_paused() -> None:
    metrics = counted(Waits(0), opened(cached=20), Waits(0), opened(cached=3), Waits(0), END)
    assert metrics.pauses == 2
    assert metrics.cached_tokens == 9, "of the prompt, when it first entered"
