"""Requests of every kind through stages whose forwards are captured: verdicts and log-probabilities are those without graphs."""

from __future__ import annotations

import random

import pytest
import torch
from lane_scripts import run
from lane_targets import CUT, MODELS, save_target
from support.captures import Repeated
from support.slot_books import SlotAllocator
from test_lanes_in_company import assert_equal, many


@pytest.mark.parametrize("name", MODELS)
def test_requests_through_captured_stages_are_computed_as_without_graphs(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Threads, masks, cancellations; each stage's slots are those of the same stage without graphs."""
    target, scripts = save_target(name, tmp_path_factory.mktemp("target")), [many(9) for _ in range(2)]
    capture = Repeated()
    for together, is_captured in zip(scripts, (False, True), strict=True):
        workers = target.workers(CUT, torch.float64, 4)
        for worker in workers if is_captured else ():
            worker._model.capture = capture
        run(workers, together, SlotAllocator(800, 4, random.Random(3)))
    assert capture.replays > capture.captures > 3
    for plain, captured in zip(*scripts, strict=True):
        assert_equal(plain, captured, 1e-12)
