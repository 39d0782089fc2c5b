"""A batch whose stages lose everything, and whose draft model comes late: all requests end with their answers."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.simulation import KnowingDrafter, Simulation

from pipedec.core import Request, SamplingParams, UserError
from pipedec.decoding import Batch, RequestState
from pipedec.kv import KVManager
from pipedec.methods import StaticTreeOptions
from pipedec.threads import Sequence


@examples(60)
@given(
    seed=st.integers(0, 2**32), capacity=st.sampled_from((300, 2000)), block=st.sampled_from((4, 16)), late=st.integers(-1, 40)
)
def test_all_requests_end_with_their_answers(seed: int, capacity: int, block: int, late: int) -> None:
    """The simulated stage checks that every lane opens behind what was said, in slots that hold its own text.

    Args:
        late: when the draft model comes; -1: it is there from the beginning.
    """
    simulation = Simulation(seed, KVManager(capacity, block))
    if late >= 0:
        simulation.draft_late()
    for number in range(60):
        if number < 40 and len(simulation.running) < 12:
            simulation.arrive(number, longest=simulation.chooser.choice((3, 12, 60)))
        if number == late:
            simulation.adopts_drafter = True
            simulation.batch.adopt(simulation.drafter)
        if simulation.chooser.random() < 0.1:
            simulation.lose()
        simulation.timestep()
    simulation.finish()
    assert simulation.drafter.open_requests == {}
    assert simulation.batch.kv.used_slots == 0 and simulation.batch.propose() == {}


def opened(batch: Batch, method: str) -> RequestState:
    request = Request(0, (1, 2, 3), SamplingParams(max_tokens=9), method, StaticTreeOptions() if method == "stpp" else None)
    batch.open(request, partial(Sequence, 3, (), 9))
    return batch.requests[0]


def test_methods_do_without_a_draft_model_until_it_comes() -> None:
    batch = Batch(2)
    with pytest.raises(UserError, match="needs a draft model"):
        opened(batch, "stpp")
    batch.awaits_drafter = True
    state = opened(batch, "stpp")
    assert state.drafter is None
    batch.adopt(KnowingDrafter(Simulation(0).chooser))
    assert state.drafter is not None, "it has no lane yet, so nothing is paused"
    assert batch.to_pause() == []


def test_a_running_request_is_paused_to_go_on_with_its_draft_model() -> None:
    batch = Batch(2)
    batch.awaits_drafter = True
    opened(batch, "pipedec-bestfirst")
    assert batch.propose()[0].opening is not None
    assert batch.to_pause() == []
    batch.adopt(KnowingDrafter(Simulation(0).chooser))
    assert batch.to_pause() == [0] and batch.to_pause() == []


def test_a_pool_that_was_cleared_is_empty_and_keeps_its_counters() -> None:
    kv = KVManager(64, 4)
    kv.open(1, range(9), 12)
    kv.extend(1, range(9))
    kv.close(1)
    kv.open(2, range(9), 12)
    assert kv.kept_slots + kv.used_slots > 0
    kv.clear()
    assert (kv.used_slots, kv.kept_slots, kv.free_slots) == (0, 0, 64)
    assert kv.queried_tokens == 16 and kv.cached_for(range(9), 12) == 0
