"""Many requests in one scheduler, through a simulated pipeline: they come, are cancelled and end at any timestep."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafters import Switch
from support.examples import examples
from support.simulation import KNEE, METHODS, KnowingDrafter, Simulation, begin, judge, proposed, scheduler_of, updates

from pipedec import threads
from pipedec.core.errors import UserError
from pipedec.core.limits import DRAFT_KNEE
from pipedec.core.request import TokenizedRequest
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience, LaneSizes, Phase
from pipedec.decoding.budget import RESERVED
from pipedec.families import StateCounts
from pipedec.kv import KVManager
from pipedec.methods import BestFirstOptions, StaticTreeOptions


@pytest.mark.in_turn(2)
@examples(200)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.sampled_from((None, 200, 300, 500, 2000)),
    block=st.sampled_from((1, 4, 16, 64)),
    shares=st.booleans(),
    ahead=st.sampled_from((1, 5, 1024)),
    growth=st.sampled_from((0, 8, 128)),
    loses=st.booleans(),
    late=st.integers(-40, 40),
    snapshots=st.sampled_from((None, None, 0, 2, 5, 40)),
    states=st.sampled_from((None, None, (1, 60), (2, 90), (5, 60), (15, 34))),
)
def test_all_requests_end_whatever_is_beside_them(
    seed, capacity, block, shares, ahead, growth, loses, late, snapshots, states
) -> None:
    """With its own tokens, in steps that a stage's tree takes, however little memory there is; and nothing is left of those that
    are gone. The simulated stage checks that every lane has its own text in its slots, whatever is shared, paused and resumed.

    Args:
        loses: stages lose everything now and then.
        states: states and rows of recurrent layers, which the simulated stage counts.
        late: when the draft model comes; if negative, it is there from the beginning.
        snapshots: places for states of recurrent layers, with which no BiTA runs.
    """
    kv = None if capacity is None else KVManager(capacity, block, shares, snapshots)
    methods = {name: options for name, options in METHODS.items() if name != "bita" or snapshots is None}
    counts = None if states is None else StateCounts(*states)
    simulation = Simulation(seed, kv, LaneSizes(ahead, growth), counts, methods=methods)
    if late >= 0:
        simulation.draft_late()
    for number in range(60):
        if number < 40 and len(simulation.running) < 15:
            simulation.arrive(number)
        if number == late:
            simulation.adopts_drafter = True
            simulation.scheduler.adopt(simulation.drafter)
        if loses and simulation.chooser.random() < 0.1:
            simulation.lose()
        simulation.timestep()
        if simulation.running and simulation.chooser.random() < 0.1:
            simulation.cancel()
    simulation.finish()
    assert simulation.drafter.open_requests == {}
    updates(simulation.scheduler)  # the last verdicts
    assert updates(simulation.scheduler) == {}
    judge(simulation.scheduler, 7, Verdict.of(1))  # of a request that is gone: void
    if kv is not None:
        assert (kv.used_slots, kv.free_slots) == (0, kv.capacity)
        assert (shares and snapshots != 0) or simulation.cached == 0


@examples(20)
@given(st.integers(0, 2**32))
def test_no_answer_waits_longer_than_a_passage_while_every_root_finds_room(seed: int) -> None:
    """However much the candidates and prompts of others would let enter: a missed token enters at once."""
    bestfirst = {"pipedec-bestfirst": METHODS["pipedec-bestfirst"]}
    simulation, last = Simulation(seed, methods=bestfirst, has_structures=False), dict[int, int]()
    arrived = 0
    while arrived < 30 or simulation.running:
        while arrived < 30 and len(simulation.running) < KNEE - KNEE // RESERVED:
            simulation.arrive(arrived, range(1, 13))
            arrived += 1
        simulation.timestep()
        for number in simulation.verdicts:
            assert simulation.timesteps - last.get(number, simulation.timesteps) <= simulation.groups
            last[number] = simulation.timesteps


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("known", [0.0, 1.0])
def test_speculation_costs_no_timestep_and_saves_some_if_it_is_right(groups: int, known: float) -> None:
    options = BestFirstOptions(width=8, forwards=3, proposers=("draft",))
    simulation = Simulation(1, methods={"pipedec-bestfirst": (options,)}, has_structures=False, known=known, groups=groups)
    simulation.seconds_per_row = 0.0
    simulation.arrive(0, (60,))
    while not simulation.verdicts:
        simulation.timestep()
    request, before = simulation.scheduler.requests[0], simulation.timesteps
    simulation.finish()
    if known:
        assert simulation.timesteps - before <= 60 / 2 + groups
    else:
        assert (simulation.timesteps - before, request.metrics.hits) == (59 * groups, 0)


def test_a_draft_forward_serves_all_requests_and_is_bounded() -> None:
    chooser = random.Random(1)
    drafter = KnowingDrafter(chooser)
    scheduler = scheduler_of(2, drafter, knee=256)
    for number in range(40):
        drafter.answers[number] = [chooser.randrange(50) for _ in range(30)]
        begin(scheduler, TokenizedRequest(number, (1, 2, 3)), partial(threads.Sequence, 3, (), 30))
    updates(scheduler)
    scheduler.draft()
    for number in range(40):
        judge(scheduler, number, Verdict.of(drafter.answers[number][0]))
    drafter.forwards.clear()
    for _ in range(3):
        updates(scheduler)
        scheduler.draft()
    assert drafter.forwards[0] == 40 and len(drafter.forwards) <= 6
    assert max(drafter.forwards) <= DRAFT_KNEE


@pytest.mark.failure_case("H25")
def test_trees_that_are_drafted_at_once_share_the_draft_model_and_take_turns() -> None:
    """Each is half of what one timestep drafts."""
    chooser = random.Random(1)
    drafter, largest = KnowingDrafter(chooser), StaticTreeOptions(depth=2, rows=256, children=64)
    scheduler = scheduler_of(1, drafter, knee=256)
    for number in range(9):
        drafter.answers[number] = [chooser.randrange(50) for _ in range(30)]
        request = TokenizedRequest(number, (1, 2, 3), method="stpp", options=largest)
        begin(scheduler, request, partial(threads.Sequence, 3, (), 30))
    updates(scheduler)
    scheduler.draft()
    for number in range(9):
        judge(scheduler, number, Verdict.of(drafter.answers[number][0]))
    found = list[set[int]]()
    for _ in range(3):
        scheduler.draft()
        found.append({number for number, request in scheduler.requests.items() if request.method.demand().whole})
    assert [len(each) for each in found] == [2, 4, 6] and found[0] < found[1] < found[2]


def test_without_speculation_nothing_is_drafted_and_prompts_are_made_up_for() -> None:
    drafter = KnowingDrafter(random.Random(1))
    experience = Experience(1)
    experience.controller = controller = Switch(1)
    scheduler = scheduler_of(1, drafter, knee=8, experience=experience)
    drafter.answers[0] = list(range(20))
    begin(scheduler, TokenizedRequest(0, tuple(range(20))), partial(threads.Sequence, 20, (), 20))
    for _ in range(3):
        updates(scheduler)
        scheduler.draft()
    judge(scheduler, 0, Verdict.of(0))
    assert proposed(scheduler)[0].num_rows == 1
    scheduler.draft()
    assert drafter.forwards == []
    controller.is_speculating = True
    for rows in (8, 16, 20, 20):
        scheduler.draft()
        assert len(drafter.prompts[0]) == rows
    assert drafter.forwards[:4] == [0, 0, 0, 1], "rows are drafted behind the whole prompt"


def test_chunks_of_prompts_end_where_states_of_recurrent_layers_are_kept() -> None:
    scheduler = scheduler_of(1, knee=64, kv=KVManager(4096, 16, snapshots=4))
    prompt = tuple(range(100))
    openings, chunks = list[tuple[object, ...]](), list[list[int]]()
    for number, text in enumerate((prompt, prompt, (*prompt[:40], *[200] * 60), (*prompt[:40], *[300] * 9))):
        begin(scheduler, TokenizedRequest(number, text, method="pp"))
        chunks.append([])
        while scheduler.requests[number].phase is not Phase.RUNNING:
            update = updates(scheduler)[number]
            assert update.step is not None
            chunks[number].append(update.step.num_rows)
            if (opening := update.opening) is not None:
                openings.append((opening.cached, opening.snapshot, opening.snapshots))
        scheduler.cancel(number)
    assert openings == [(0, None, ((96, 0),)), (96, 0, ()), (0, None, ((32, 1), (96, 2))), (32, 1, ((48, 3),))]
    assert chunks == [[64, 32, 4], [4], [32, 64, 4], [16, 1]]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        begin(scheduler_of(1), TokenizedRequest(0, (), method="pp"))
