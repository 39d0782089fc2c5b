"""The controller on synthetic pipelines: what timesteps take and what rows are worth is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from pipedec.core import Request, SamplingParams, TreeParams
from pipedec.decoding.controller import CHILDREN, MAX_FORWARDS, WIDTHS, Controller, TimestepTiming
from pipedec.decoding.experience import Experience

PASSAGE = 5


@dataclass
class SyntheticPipeline:
    """Timesteps last as long as the stages for these rows, or as the draft's forwards; the r-th row has chance ``merit(r)``."""

    controller: Controller
    stages: Callable[[int], float] = lambda rows: 1.0
    forward: float = 0.1
    merit: Callable[[int], float] = lambda place: 0.2 / (1 + place)
    tokens: float = 1.0  # of a timestep with speculation
    passage: int = PASSAGE

    def run(self, timesteps: int) -> list[tuple[int, int]]:
        """Width and forwards after each timestep."""
        history = []
        unsaid = 0.0
        for _ in range(timesteps):
            width, forwards = self.controller.width, self.controller.forwards * self.controller.is_speculating
            if width:
                self.controller.record_entered(torch.tensor([self.merit(place) for place in range(width)]).flip(0))
            unsaid += self.tokens if width else 1 / self.passage
            self.controller.record_accepted(int(unsaid + 1e-9))
            unsaid -= int(unsaid + 1e-9)
            stages, draft = self.stages(max(width, 1)), forwards * self.forward
            self.controller.record_timestep(
                TimestepTiming(max(stages, draft), max(stages - draft, 0.0), (self.forward,) * forwards)
            )
            history.append((self.controller.width, self.controller.forwards))
        return history


def controller(width: int | None = None, children: int | None = None, forwards: int | None = None) -> Controller:
    return Controller(TreeParams(width, children, forwards=forwards), PASSAGE)


@pytest.mark.parametrize(
    ("forward", "fitting"),
    [(0.21, 4), (0.3, 3), (0.4, 2), (0.6, 1), (1.5, 1), (0.01, MAX_FORWARDS)],
)
def test_forwards_are_as_many_as_fit_beside_the_stages(forward: float, fitting: int) -> None:
    pipeline = SyntheticPipeline(controller(width=32), forward=forward)
    assert {forwards for _, forwards in pipeline.run(300)[200:]} == {fitting}


@pytest.mark.parametrize("forward", [0.1, 0.11, 0.125, 0.14, 0.16, 0.2, 0.24, 0.25, 0.32, 1 / 3, 0.45, 0.49, 0.5, 0.97, 1.0])
def test_forwards_settle(forward: float) -> None:
    """Also where one more just fits, so that rank 0 hardly waits with it, and long without it."""
    pipeline = SyntheticPipeline(controller(width=32), forward=forward)
    settled = {forwards for _, forwards in pipeline.run(400)[200:]}
    assert len(settled) == 1
    forwards = settled.pop()
    assert forwards == 1 or forwards * forward <= 1
    assert forwards == MAX_FORWARDS or (forwards + 2) * forward > 0.999


def test_forwards_fall_when_the_draft_becomes_slow() -> None:
    pipeline = SyntheticPipeline(controller(width=32), forward=0.12)
    assert pipeline.run(200)[-1][1] > 4
    pipeline.forward = 0.6
    assert pipeline.run(300)[-1][1] == 1


def test_timesteps_with_too_little_to_draft_do_not_count() -> None:
    """Rank 0 waits in them because it is idle, not because there is room."""
    limits = controller(width=32)
    before = limits.forwards
    for _ in range(100):
        limits.record_timestep(TimestepTiming(1.0, 0.9, (0.1,) * (before - 1)))
    assert limits.forwards == before


def test_limits_that_are_set_stay() -> None:
    limits = controller(width=11, children=7, forwards=3)
    pipeline = SyntheticPipeline(limits, forward=0.01, merit=lambda place: 1e-3, stages=float)
    for _ in range(300):
        assert pipeline.run(1) == [(11, 3)]
        limits.record_proposed(False)
    assert limits.children == 7


def roofline(rows: int) -> float:
    return max(1.0, rows / 76)


def test_the_width_climbs_to_the_knee() -> None:
    """One step too far it sees that twice the rows take longer, and comes back."""
    widths = [width for width, _ in SyntheticPipeline(controller(forwards=1), roofline).run(600)]
    assert 124 in widths
    assert set(widths[200:]) == {64}


def test_the_width_climbs_past_the_knee_where_rows_are_worth_their_time() -> None:
    pipeline = SyntheticPipeline(controller(forwards=1), roofline, merit=lambda place: 0.02)
    assert {width for width, _ in pipeline.run(600)[300:]} == {124}


def test_a_width_without_further_worth_is_not_taken() -> None:
    """Rows after the first eight never come true, and cost time."""
    pipeline = SyntheticPipeline(controller(forwards=1), float, merit=lambda place: 0.12 * (place < 8), tokens=2.0)
    assert {width for width, _ in pipeline.run(600)[300:]} == {8}


@pytest.mark.parametrize("passage", [2, 3, 4, 5, 8])
def test_without_speculation_where_every_row_costs_and_none_comes_true(passage: int) -> None:
    """Nothing but the last accepted token yields one, once per passage. From time to time speculation is tried again."""
    limits = Controller(TreeParams(forwards=1), passage)
    pipeline = SyntheticPipeline(limits, float, merit=lambda place: 1e-3, tokens=1 / passage, passage=passage)
    widths = [width for width, _ in pipeline.run(800 * passage)]
    assert widths.count(0) > 0.8 * len(widths)
    assert 8 in widths[widths.index(0) :]


def test_speculation_goes_on_where_rows_cost_nothing() -> None:
    pipeline = SyntheticPipeline(controller(forwards=1), merit=lambda place: 1e-3, tokens=1.5 / PASSAGE)
    assert 0 not in [width for width, _ in pipeline.run(2000)]


def test_speculation_comes_back_when_it_pays_again() -> None:
    pipeline = SyntheticPipeline(controller(forwards=1), float, merit=lambda place: 1e-3, tokens=1 / PASSAGE)
    assert 0 in [width for width, _ in pipeline.run(2000)]
    pipeline.merit, pipeline.tokens = lambda place: 0.2 / (1 + place), 8.0
    assert 0 not in [width for width, _ in pipeline.run(5000)[-500:]]


@pytest.mark.parametrize("stages", [float, roofline, lambda rows: 1.0])
def test_more_rows_than_ever_are_tried_by_one_step_at_a_time(stages: Callable[[int], float]) -> None:
    pipeline = SyntheticPipeline(controller(forwards=1), stages, merit=lambda place: 0.02)
    places = [WIDTHS.index(width) for width, _ in pipeline.run(1000)]
    widest = places[0]
    for place in places:
        assert place <= widest + 1
        widest = max(widest, place)


def test_there_are_more_children_while_unnamed_tokens_are_accepted() -> None:
    limits = controller(width=32)
    pipeline = SyntheticPipeline(limits)
    seen = []
    for name_every in (2, 1):
        for count in range(400):
            limits.record_proposed(count % name_every == 0)
            pipeline.run(1)
        seen.append(limits.children)
    assert seen == [CHILDREN[-1], CHILDREN[0]]


def test_experience_is_kept_for_the_same_limits_and_way_to_sample() -> None:
    experience = Experience(PASSAGE)
    greedy = Request(0, (1, 2))
    again = replace(greedy, number=1, prompt_token_ids=(3,), sampling=SamplingParams(seed=4, max_tokens=9, stop=("x",)))
    drawn = replace(greedy, sampling=SamplingParams(temperature=0.6))
    narrow = replace(greedy, tree=TreeParams(width=8))
    first = experience.controller(greedy), experience.acceptance(greedy, (1.0,), "cpu")
    assert (experience.controller(again), experience.acceptance(again, (1.0,), "cpu")) == first
    for other in (drawn, narrow):
        assert experience.controller(other) is not first[0]
        assert experience.acceptance(other, (1.0,), "cpu") is not first[1]
