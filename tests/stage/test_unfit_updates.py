"""Envelopes that are well-formed, but do not fit the requests of the stage that receives them."""

from __future__ import annotations

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.core import Envelope, Opening, RankLost, SamplingParams, Update
from pipedec.engine.build import load_stage

OPENING = Update(1, Opening(3, SamplingParams(), slots=((0, 16),)))
UNFIT = {
    "slots that are not there": [Update(2, Opening(3, SamplingParams(), slots=((10**9, 16),)))],
    "further slots that are not there": [OPENING, Update(1, slots=((-16, 16),))],
    "opened twice": [OPENING, OPENING],
}


@pytest.mark.parametrize("updates", UNFIT.values(), ids=UNFIT)
def test_updates_that_do_not_fit_name_their_sender(pair: Pair, updates: list[Update]) -> None:
    worker = load_stage(pair.spec(2), 1, torch.device("cpu"))
    with pytest.raises(RankLost, match="rank 0 sent updates that do not fit"):
        for update in updates:
            worker.advance(Envelope((update,)))


def test_an_unknown_request_is_void(pair: Pair) -> None:
    worker = load_stage(pair.spec(2), 1, torch.device("cpu"))
    worker.advance(Envelope((Update(99, slots=((0, 16),)),)))
    assert worker.num_lanes == 0
