"""Envelopes that are well-formed, but do not fit the requests of the stage that receives them."""

from __future__ import annotations

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.core import NewRequest, RankLost, RequestUpdate, SamplingParams, StageMessage
from pipedec.engine.build import load_stage

OPENING = RequestUpdate(1, NewRequest(3, SamplingParams(), slots=((0, 16),)))
UNFIT = {
    "slots that are not there": [RequestUpdate(2, NewRequest(3, SamplingParams(), slots=((10**9, 16),)))],
    "further slots that are not there": [OPENING, RequestUpdate(1, slots=((-16, 16),))],
    "opened twice": [OPENING, OPENING],
}


@pytest.mark.parametrize("updates", UNFIT.values(), ids=UNFIT)
@pytest.mark.failure_case("S12")
def test_updates_that_do_not_fit_name_their_sender(pair: Pair, updates: list[RequestUpdate]) -> None:
    worker = load_stage(pair.spec(2), 1, torch.device("cpu"))
    with pytest.raises(RankLost, match="rank 0 sent updates that do not fit"):
        for update in updates:
            worker.advance(StageMessage((update,)))


@pytest.mark.failure_case("S12")
def test_an_unknown_request_is_void(pair: Pair) -> None:
    worker = load_stage(pair.spec(2), 1, torch.device("cpu"))
    worker.advance(StageMessage((RequestUpdate(99, slots=((0, 16),)),)))
    assert worker.num_lanes == 0
