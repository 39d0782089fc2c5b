"""Draft tokens, counted from the steps that enter the pipeline."""

from __future__ import annotations

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.core import Request, SamplingParams, Step
from pipedec.engine.draft_tokens import DraftTokens
from pipedec.engine.local import LocalPipeline
from pipedec.methods import StaticTreeOptions


def step(token_ids: list[int], parents: list[int]) -> Step:
    return Step(torch.tensor(token_ids), torch.tensor(parents))


def test_roots_and_masks_are_no_draft_tokens() -> None:
    draft_tokens = DraftTokens()
    assert draft_tokens.total() == 0
    draft_tokens.count(step([7, 11, 12, -1, -2], [-1, 0, 0, 1, 3]))
    draft_tokens.count(step([13], [-1]))
    assert draft_tokens.total() == 2


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
    draft_tokens = DraftTokens()
    for number in range(1000):
        draft_tokens.count(step([number, number + 1, number + 2], [-1, 0, 1]))
        if number == 500:
            assert draft_tokens.total() == 2 * 501
    assert draft_tokens.total() == 2000
