"""Messages that are well-formed, but do not fit the requests of the stage that receives them."""

from __future__ import annotations

from unittest.mock import ANY

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, StageMessage
from pipedec.engine.build import load_stage

OPENING = RequestUpdate(1, NewRequest(3, SamplingParams(), slots=((0, 16),)))
UNFIT = {
    "slots that are not there": [RequestUpdate(2, NewRequest(3, SamplingParams(), slots=((10**9, 16),)))],
    "further slots that are not there": [OPENING, RequestUpdate(1, slots=((-16, 16),))],
    "opened twice": [OPENING, OPENING],
}


@pytest.mark.parametrize("updates", UNFIT.values(), ids=UNFIT)
@pytest.mark.failure_case("S12")
def test_updates_that_do_not_fit_end_their_request(pair: Pair, updates: list[RequestUpdate]) -> None:
    worker = load_stage(pair.spec(2), 1, torch.device("cpu"))
    replies = [worker.advance(StageMessage((update,))).updates for update in updates]
    assert [one.failure for one in replies[-1]] == [ANY] and "rank 1 (stage 1) cannot answer this request" in str(replies[-1])
    assert worker.num_lanes == 0


@pytest.mark.failure_case("S12")
def test_an_unknown_request_is_void(pair: Pair) -> None:
    worker = load_stage(pair.spec(2), 1, torch.device("cpu"))
    worker.advance(StageMessage((RequestUpdate(99, slots=((0, 16),)),)))
    assert worker.num_lanes == 0
