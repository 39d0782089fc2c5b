"""The costs of rows where each of them takes time, as with routed experts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from support.tiny_pair import Pair

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load
from pipedec.decoding import Experience
from pipedec.decoding.controller import Controller, EnteredCounts
from pipedec.decoding.row_costs import OfferedRows, RowCosts
from pipedec.engine.local import LocalPipeline
from pipedec.families import ExpertsShape
from pipedec.formats import WeightFormat
from pipedec.hardware import DEVICES, LinkSpec
from pipedec.methods import BestFirstOptions
from pipedec.plan.costs import ModelCosts, RankTiming
from pipedec.plan.emulation import Emulation
from pipedec.plan.held import HeldWeights, as_experts, together
from pipedec.plan.roofline import PassTime, expected_ms, pass_time

GPU = DEVICES["rtx3090"]
DENSE = HeldWeights(10**9, 2 * 10**9)
ROUTED = as_experts(ExpertsShape(128, 8), HeldWeights(10**10, 2 * 10**10))  # of which a row reads as little as a 16th
EXPECTED = expected_ms([pass_time(GPU, together([DENSE, ROUTED]), "bfloat16")])


def seconds_of(rows: float) -> float:
    """Twice the time that is expected."""
    return EXPECTED[round(rows) - 1] / 500


def costs_of(rows: Sequence[int], noise: float = 0.0) -> RowCosts:
    chooser, costs = random.Random(1), RowCosts(EXPECTED)
    for _ in range(100):
        for each in rows:
            costs.record(each, seconds_of(each) * (1 + noise * chooser.uniform(-1, 1)))
    return costs


def test_nothing_is_expected_of_a_dense_model() -> None:
    assert expected_ms([pass_time(GPU, DENSE, "bfloat16")]) == ()
    assert len(EXPECTED) == 512 and list(EXPECTED) == sorted(EXPECTED)


def test_before_the_first_measurement_a_row_costs_what_the_plan_expects() -> None:
    costs = RowCosts(EXPECTED)
    assert costs.added(0) == 0, "a first row may always enter"
    assert [costs.added(rows) for rows in (1, 2, 7)] == pytest.approx(
        [EXPECTED[rows] / EXPECTED[rows - 1] - 1 for rows in (1, 2, 7)]
    )
    assert costs.seconds(1) is None


@pytest.mark.parametrize("rows", [[4], [2, 40], [1, 16, 64], [40, 64]])
def test_times_grow_as_expected_between_measurements_and_outside(rows: list[int]) -> None:
    costs = costs_of(rows)
    for each in (1, 2, 3, 8, 20, 44, 64, 200):
        assert costs.seconds(each) == pytest.approx(seconds_of(each), rel=1e-6)
    assert costs.seconds(0) == costs.seconds(1) and costs.seconds(9999) == pytest.approx(seconds_of(512))


def test_noise_makes_no_row_free() -> None:
    costs = costs_of([1, 2, 4, 8, 12, 16, 24, 32], noise=0.2)
    seconds = [costs.seconds(rows) or 0.0 for rows in range(1, 100)]
    assert all(after > before for before, after in pairwise(seconds[:40]))
    assert seconds == pytest.approx([seconds_of(rows) for rows in range(1, 100)], rel=0.2)
    falling = RowCosts(EXPECTED)
    for rows, took in ((4, 2.0), (8, 1.0)):
        falling.record(rows, took)
    assert falling.added(5) == pytest.approx(EXPECTED[5] / EXPECTED[4] - 1), "what looks like it gets faster is noise"


def entered(controller: Controller, offers: Sequence[Sequence[float]], running: int = 1) -> list[int]:
    """Rows that enter at timesteps with a certain row and such candidates, best first, for each."""
    counts = []
    for chances in offers:
        rows = 1
        for chance in chances:
            if not controller.pays(rows, chance / running):
                break
            rows += 1
        controller.record_entered(EnteredCounts(rows, 0, running))
        counts.append(rows)
    return counts


def test_rows_enter_where_their_tokens_pay_for_the_experts_that_they_add() -> None:
    likely, unlikely = ([chance] * 6 for chance in (0.95, 0.2))
    needed = [RowCosts(EXPECTED).added(rows) * max(rows, 1) for rows in range(1, 7)]
    assert min(needed) > 0.2 and max(needed) < 0.9, "in between"
    assert entered(Controller(4, EXPECTED), [likely] * 200)[-1] == 7
    assert entered(Controller(4, EXPECTED), [unlikely] * 200)[-1] == 1
    assert entered(Controller(4), [unlikely] * 200)[-1] == 7, "a row of a dense model is free until one is measured"


def test_a_burst_enters_a_few_rows_at_a_time() -> None:
    """Twelve likely rows in one of 16 timesteps would make as many as there are stages slow."""
    bursts = [[0.9] * 6 if timestep % 16 == 0 else [] for timestep in range(320)]
    assert max(entered(Controller(8, EXPECTED), bursts)) == 1
    assert max(entered(Controller(8), bursts)) == 7


def test_what_comes_after_a_refused_row_is_unknown() -> None:
    offered = OfferedRows()
    for _ in range(100):
        assert offered.mean_with(1, 0.8) and offered.mean_with(2, 0.6)
        offered.settle(1.0, 3)
    known = offered.mean_with(2, 0.6)
    offered.settle(1.0, 1)
    for _ in range(100):
        offered.mean_with(1, 0.1)
        offered.refuse()
        offered.settle(1.0, 1)
    assert offered.mean_with(1, 0.1) == pytest.approx(0.1, rel=0.02) and offered.mean_with(2, 0.6) == pytest.approx(
        known, rel=0.07
    )
    for _ in range(100):
        offered.settle(1.0, 1)
    assert offered.mean_with(1, 0.0) < 0.01 > offered.mean_with(2, 0.0), "there were no more candidates"
    assert offered.mean_with(0, 1.0) == pytest.approx(1.0), "the certain row"


@cache
def mixture() -> tuple[PassTime, PassTime]:
    """A third of Qwen3-30B-A3B on a card, by the plan, and if its rows were routed independently."""
    from pipedec.families import KNOWN_MODELS

    costs = ModelCosts(KNOWN_MODELS["qwen3-30b-a3b"], WeightFormat("bfloat16"), 32, 4096, 3)
    times = (replace(costs, row_overlap=overlap).pass_time(GPU, range(16), False) for overlap in (costs.row_overlap, 0.0))
    planned, independent = times
    return planned, independent


@pytest.mark.parametrize("surprise", [False, True], ids=["as planned", "other routing"])
def test_what_is_learned_is_within_a_tenth_of_the_emulated_times(pair: Pair, surprise: bool) -> None:
    """Real tokens, and times of a mixture. What requests ask for is measured; the rest follows from that and from the plan."""
    planned, independent = mixture()
    stage = RankTiming(independent if surprise else planned, LinkSpec("fast", 0, 1e6, "test"), 0)
    emulation = Emulation("mixture", 1.0, None, (stage,) * 3, duplex="full", counts_own_work=False)
    spec = replace(pair.spec(3).replaced(draft=str(pair.target)), emulation=emulation)
    assert spec.knee == planned.room_rows > 64 and spec.expected_ms == expected_ms([stage.compute])
    experience = Experience(3, expected_ms=expected_ms([planned]))
    pipeline = LocalPipeline.load(spec, experience=experience)
    for number, width in enumerate((None, 2, 8, 32, 64)):
        options = BestFirstOptions(width=width, children=16)
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        request = TokenizedRequest(number, (1, 5, 9, 20), sampling, "pipedec-bestfirst", options)
        assert sum(len(verdict.tokens) for verdict in pipeline.run(request)) == 24
    learned = RowCosts(expected_ms([planned]))
    learned.start_from(experience.controller.costs.rows)
    for rows in range(1, 65):
        assert learned.seconds(rows) == pytest.approx(stage.compute_ms(Load(rows)) / 1000, rel=0.1), rows
