"""The counters of a request: pauses, seconds, timesteps, and draft tokens, from the steps that enter the pipeline."""

from __future__ import annotations

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.core import Metrics, NewRequest, Request, RequestUpdate, SamplingParams, StageMessage, Step, Verdict
from pipedec.engine.counters import Counters
from pipedec.engine.local import LocalPipeline
from pipedec.engine.loop import Advanced, Record, RequestClosed, RequestEnded, RequestOpened, Timestep, Waits
from pipedec.methods import StaticTreeOptions
from pipedec.threads import Sequence


def step(token_ids: list[int], parents: list[int]) -> Step:
    return Step(torch.tensor(token_ids), torch.tensor(parents))


def entered(*steps: Step) -> list[Record]:
    return [Timestep(1, StageMessage((RequestUpdate(0, step=each),))) for each in steps]


def opened(cached: int = 0) -> RequestOpened:
    request = Request(0, tuple(range(9)))
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


def test_a_request_that_is_closed_is_forgotten() -> None:
    counters, metrics = Counters(), Metrics()
    counters.begin(0, metrics)
    for record in (opened(), advanced(1), END, RequestClosed(0), RequestClosed(1)):
        counters.note(record)
    with pytest.raises(KeyError):
        counters.note(END)


@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", ["pp", "stpp", "pipedec", "pipedec-bestfirst", "bita"])
def test_every_method_reports_what_it_drafted_and_accepted(pair: Pair, method: str) -> None:
    pipeline = LocalPipeline.load(pair.spec(stages=2, draft=str(pair.target)))
    for _ in pipeline.run(Request(0, (5, 9, 11, 20), SamplingParams(max_tokens=12, ignore_eos=True), method)):
        pass
    metrics = pipeline.last.metrics
    if method == "pp":
        assert (metrics.draft_tokens, metrics.hits, metrics.acceptance_rate) == (0, 0, None)
        return
    assert metrics.draft_tokens > metrics.hits
    if method != "bita":  # the draft is the target itself
        assert metrics.hits > 0 and metrics.acceptance_rate is not None and 0 < metrics.acceptance_rate < 1


def test_a_static_tree_is_drafted_for_every_root(pair: Pair) -> None:
    """Two children of the root and three rows below them, five draft tokens; two are right if the draft is the target.

    In 64 bits, so that the draft chooses what the target chooses, however each of them rounds.
    """
    spec = pair.spec(stages=2, draft=str(pair.target)).replaced(dtype="float64", draft_dtype="float64")
    pipeline = LocalPipeline.load(spec)
    options = StaticTreeOptions(width=3, children=2, depth=2)
    for _ in pipeline.run(Request(0, (5, 9, 11, 20), SamplingParams(max_tokens=13, ignore_eos=True), "stpp", options)):
        pass
    metrics = pipeline.last.metrics
    assert (metrics.misses, metrics.hits, metrics.draft_tokens) == (4, 8, 20)
    assert metrics.acceptance_rate == 8 / 20


def test_long_answers_are_counted_in_full() -> None:
    steps = entered(*(step([number, number + 1, number + 2], [-1, 0, 1]) for number in range(1000)))
    assert counted(opened(), advanced(1), *steps, END).draft_tokens == 2000
