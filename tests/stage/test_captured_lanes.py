"""Requests of every kind through stages whose forwards are captured: verdicts and log-probabilities are those without graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from captures import Repeated
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from lane_scripts import Script, run
from lane_targets import CUT, MODELS, Target, save_target, scripts
from slot_books import SlotBooks
from test_lanes_in_company import assert_equal


@pytest.fixture(scope="module", params=MODELS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(request.param, tmp_path_factory.mktemp("target"))


@examples(40)
@given(drawn=st.lists(scripts(), min_size=1, max_size=5), block=st.sampled_from([3, 16]), seed=st.integers(0, 99))
def test_requests_through_captured_stages_are_computed_as_without_graphs(
    target: Target, drawn: list[dict[str, Any]], block: int, seed: int
) -> None:
    """Threads, masks, penalties, cancellations; with slots that were those of requests that have ended."""
    captured, plain = ([Script(number, **arguments) for number, arguments in enumerate(drawn)] for _ in range(2))
    workers, capture = target.workers(CUT, torch.float64, block), Repeated()
    for worker in workers:
        worker._model.capture = capture
    run(workers, captured, SlotBooks(600, block, random.Random(seed)))
    run(target.workers(CUT, torch.float64, block), plain, SlotBooks(600, block, random.Random(seed)))
    assert capture.replays > capture.captures > 0
    for one, other in zip(plain, captured, strict=True):
        assert_equal(one, other, 1e-12)
