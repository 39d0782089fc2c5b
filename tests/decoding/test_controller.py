"""The controller on synthetic pipelines: what timesteps take and what rows are worth is known exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from pipedec.core.limits import MAX_FORWARDS
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding.acceptance import AcceptanceModel
from pipedec.decoding.controller import CHILDREN, Controller, EnteredCounts, FirstRow, TimestepTiming, Trials
from pipedec.decoding.experience import Experience
from pipedec.decoding.row_costs import RowCosts
from pipedec.methods import BestFirstOptions

PASSAGE = 5
PRIOR = {"draft": {"log probability": 1.0}}


def run(controller: Controller, timesteps: int, forward: float, rows: int = 32) -> list[int]:
    """Forwards after each timestep. Timesteps last as long as the stages, 1 second, or as the draft's forwards."""
    history = []
    for _ in range(timesteps):
        draft = controller.forwards * forward
        controller.record_entered(EnteredCounts(rows, 0, 1))
        controller.record_timestep(TimestepTiming(max(1.0, draft), max(1.0 - draft, 0.0), (forward,) * controller.forwards))
        history.append(controller.forwards)
    return history


@pytest.mark.parametrize(
    ("forward", "fitting"),
    [(0.21, 4), (0.3, 3), (0.4, 2), (0.6, 1), (1.5, 1), (0.01, MAX_FORWARDS)]
    + [(forward, None) for forward in (0.1, 0.11, 0.125, 0.14, 0.16, 0.2, 0.24, 0.25, 0.32, 1 / 3, 0.45, 0.49, 0.5, 0.97, 1.0)],
)
def test_forwards_settle_at_as_many_as_fit_beside_the_stages(forward: float, fitting: int | None) -> None:
    """Also where one more just fits, so that rank 0 hardly waits with it, and long without it: there may be one less."""
    (settled,) = set(run(Controller(PASSAGE), 400, forward)[200:])
    assert fitting in (None, settled)
    assert settled == 1 or settled * forward <= 1
    assert settled == MAX_FORWARDS or (settled + 2) * forward > 0.999


def test_forwards_fall_when_the_draft_becomes_slow() -> None:
    controller = Controller(PASSAGE)
    assert run(controller, 200, 0.12)[-1] > 4
    assert run(controller, 300, 0.6)[-1] == 1


def test_timesteps_with_too_little_to_draft_do_not_count() -> None:
    """Rank 0 waits in them because it is idle, not because there is room."""
    controller = Controller(PASSAGE)
    before = controller.forwards
    for _ in range(100):
        controller.record_timestep(TimestepTiming(1.0, 0.9, (0.1,) * (before - 1)))
    assert controller.forwards == before


def test_a_row_pays_by_what_it_was_measured_to_cost() -> None:
    """A timestep takes 1 second up to 16 rows, and twice as long with 64; so beyond 16, one row costs 1/48 of a timestep."""
    controller = timed(1, rows=(1, 8, 16, 32, 64), tokens=1)
    assert controller.pays(4, 1e-6)
    assert controller.pays(100, 1e-6) and not controller.pays(128, 1.0), "twice the rows that were measured are tried"


@pytest.mark.parametrize(("tokens", "running"), [(1, 1), (4, 1), (4, 4), (2, 8)])
def test_a_row_is_worth_the_timesteps_that_its_token_takes_otherwise(tokens: int, running: int) -> None:
    """One row costs 1/48 of a timestep. In it the requests get so many tokens, so a row must bring 1/48 of those."""
    controller = timed(1, rows=(1, 8, 16, 32, 64), tokens=tokens, running=running)
    least = tokens / running / (48 + 4)  # of the 20 rows here, 4 cost something
    assert controller.pays(20, 1.1 * least) and not controller.pays(20, 0.9 * least)


def test_a_pipeline_that_is_not_half_full_says_nothing_of_costs() -> None:
    controller = Controller(4)
    for _ in range(50):
        for rows in (64, 0, 0, 0):
            controller.record_entered(EnteredCounts(rows, 0, 1))
            controller.record_timestep(TimestepTiming(float(rows or 1), 0.5, ()))
    assert controller.pays(7, 1e-6)


def test_timesteps_while_the_pipeline_fills_say_nothing_of_costs() -> None:
    """Until the first rows return, rank 0 waits for no stage: its timesteps are short, as if few rows were cheap."""
    controller = Controller(PASSAGE)
    for rows, seconds in ((1, 0.1), (8, 0.1), (8, 0.1), (8, 0.1), (16, 1.0), (16, 1.0), (16, 1.0)):
        controller.record_entered(EnteredCounts(rows, 0, 1))
        controller.record_timestep(TimestepTiming(seconds, 0.05, ()))
    assert controller.pays(9, 1e-6)


def test_a_first_row_shows_what_a_timestep_takes_without_speculation() -> None:
    """Half of that is assumed, since the rows that follow slow it down. A row after others is no first one."""
    first = FirstRow(3)
    history = ((1.0, [True]), (2.0, [True, True]), (3.0, [True, True, True]), (9.0, [True, True, True]))
    for count, (seconds, has_rows) in enumerate(history, start=1):
        first.record(seconds, has_rows)
        assert first.least_seconds == (None if count < 3 else 1.0)
    for seconds, has_rows in ((4.0, [False, False, True]), (4.0, [False, True, False]), (4.0, [True, False, False])):
        first.record(seconds, has_rows)
    assert first.least_seconds == 2.0
    for has_rows in ([True, False, False], [False, False, True], [], [False, True, False], [True, False, False]):
        first.record(9.0, has_rows)
    assert first.least_seconds == 2.0, "a prompt ends the measurement"


def timed(passage: int, rows: tuple[int, ...], tokens: int, running: int = 1) -> Controller:
    """Timesteps with so many rows, which took 1 second up to 16 and one 48th longer for each one more."""
    controller = Controller(passage)
    for _ in range(200):
        for each in rows:
            controller.record_entered(EnteredCounts(each, 0, running))
            controller.record_accepted(tokens, True)
            controller.record_timestep(TimestepTiming(1 + max(each - 16, 0) / 48, 0.5, ()))
    return controller


def test_the_rows_of_a_timestep_are_those_of_the_widest_stage() -> None:
    """Of all that entered during a passage; a timestep that waited for the draft model says nothing of them."""
    controller = Controller(3)
    history = (8, 64, 8, 32, 8, 16, 8, 8, 8)
    for index, rows in enumerate(history):
        controller.record_entered(EnteredCounts(rows, 0, 1))
        is_wide = 64 in history[max(index - 2, 0) : index + 1]
        controller.record_timestep(TimestepTiming(2.0 if is_wide else 1.0, 0.5, (0.1, 0.1)))
        controller.record_timestep(TimestepTiming(9.0, 0.0, (4.5, 4.5)))
    assert not controller.pays(40, 0.01) and controller.pays(40, 0.05)


def test_there_are_more_children_while_unproposed_tokens_are_accepted() -> None:
    controller, seen = Controller(PASSAGE), []
    for propose_every in (2, 1):
        for count in range(400):
            controller.record_proposed(count % propose_every == 0)
        seen.append(controller.children)
    assert seen == [CHILDREN[-1], CHILDREN[0]]


def test_experience_is_kept_for_the_same_limits_and_way_to_sample() -> None:
    experience = Experience(PASSAGE)
    greedy = TokenizedRequest(0, (1, 2))
    again = replace(greedy, number=1, prompt_token_ids=(3,), sampling=SamplingParams(seed=4, max_tokens=9, stop=("x",)))
    drawn = replace(greedy, sampling=SamplingParams(temperature=0.6))
    narrow = replace(greedy, options=BestFirstOptions(width=8))
    first = experience.learned(greedy, AcceptanceModel, PRIOR)
    assert experience.learned(again, AcceptanceModel, PRIOR) is first
    for other in (drawn, narrow):
        assert experience.learned(other, AcceptanceModel, PRIOR) is not first


def measured(seconds: Callable[[int], float], rows: list[int], noise: float = 0.0) -> RowCosts:
    chooser, costs = random.Random(1), RowCosts()
    for _ in range(100):
        for each in rows:
            costs.record(each, seconds(each) * (1 + noise * chooser.uniform(-1, 1)))
    return costs


def test_nothing_measured_costs_nothing() -> None:
    assert RowCosts().seconds(5) is None and RowCosts().added(5) == 0


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_is_linear_between_measurements_and_flat_outside(noise: float) -> None:
    costs = measured(lambda rows: 1 + rows / 32, [1, 8, 16, 32, 64], noise)
    for rows in (1, 5, 16, 40, 64):
        assert costs.seconds(rows) == pytest.approx(1 + rows / 32, rel=0.01 + noise / 2)
    assert costs.seconds(500) == costs.seconds(64) and costs.added(40) > 0
    assert costs.added(20) == pytest.approx(1 / 52, rel=0.01 + 4 * noise)


def test_it_never_falls() -> None:
    """More rows do not make a timestep shorter: what looks like it is noise."""
    costs = measured(lambda rows: 2.0 if rows < 8 else 1.0, [1, 4, 16, 64])
    seconds = [costs.seconds(rows) for rows in range(1, 70)]
    assert seconds == sorted(seconds, key=lambda each: each or 0) and costs.added(3) >= 0


def test_one_long_timestep_changes_little() -> None:
    costs = measured(lambda rows: 1.0, [1, 64])
    costs.record(64, 50.0)
    assert costs.seconds(64) == pytest.approx(1.15)


def test_old_measurements_are_forgotten() -> None:
    costs = measured(lambda rows: rows, [64])
    for _ in range(5000):
        costs.record(1, 1.0)
    assert costs.seconds(64) == 1.0


def test_rows_are_tried_from_few_to_many() -> None:
    costs = RowCosts()
    for most in (8, 16, 32, 64, 128):
        assert costs.added(most - 1) == 0 and costs.added(most) == inf
        costs.record(most // 2, 1.0)
        costs.record(256, 1.0)  # as of a prompt
        assert costs.added(most) == inf
        costs.record(most, 1.0)
    assert costs.added(200) == 0, "256 rows were measured"


def test_many_rows_that_are_certain_are_the_first_to_be_measured() -> None:
    costs = RowCosts()
    costs.record(33, 1.0)
    assert costs.added(127) == 0 and costs.added(128) == inf


class Pipeline:
    """``seconds`` of a timestep and tokens per timestep with speculation; without it there is one token per passage."""

    def __init__(self, passage: int, with_speculation: tuple[float, float], without: float, requests: int = 1) -> None:
        self.trials = Trials(passage)
        self.passage = passage
        self.requests = requests
        self.with_speculation = with_speculation
        self.without = without
        self.tokens = self.seconds = self.unsaid = 0.0

    def run(self, tokens: int, best_without: Callable[[], float | None] = lambda: None) -> list[bool]:
        """Whether each timestep speculated, until so many more tokens were said."""
        history = []
        end = self.tokens + tokens
        while self.tokens < end:
            is_speculating = self.trials.is_speculating
            seconds, rate = self.with_speculation if is_speculating else (self.without, 1 / self.passage)
            self.unsaid += rate * self.requests
            said = int(self.unsaid + 1e-9)
            self.unsaid -= said
            self.tokens += said
            self.seconds += seconds
            self.trials.record(seconds, said, self.requests, best_without())
            history.append(is_speculating)
        return history


@pytest.mark.parametrize("passage", [1, 4])
@pytest.mark.parametrize("requests", [1, 4])
def test_speculation_that_does_not_pay_goes_to_zero(passage: int, requests: int) -> None:
    """With it, a token takes 1.24 times as long as without."""
    pipeline = Pipeline(passage, (1.24 * 1.6 / passage, 1.6 / passage), 1 / passage, requests)
    pipeline.run(64 * requests)
    began = pipeline.seconds
    history = pipeline.run(400 * requests)
    assert history.count(True) < 0.15 * len(history)
    assert pipeline.seconds - began < 400 / 0.96, "and trials cost little"


@pytest.mark.parametrize("passage", [1, 4])
def test_speculation_that_pays_goes_on(passage: int) -> None:
    pipeline = Pipeline(passage, (1.2, 2.0 / passage), 1.0)
    pipeline.run(64)
    began = pipeline.seconds
    pipeline.run(400)
    assert pipeline.seconds - began < 400 * 1.2 * passage / 2 / 0.96


def test_it_is_not_tried_without_speculation_where_that_cannot_pay() -> None:
    pipeline = Pipeline(14, (1.0, 0.45), 1.0)
    assert all(pipeline.run(500, lambda: 0.25))


def test_the_way_changes_when_the_other_becomes_better() -> None:
    pipeline = Pipeline(1, (1.0, 2.0), 1.0)
    assert pipeline.run(500)[-20:].count(True) > 10
    pipeline.with_speculation = (1.0, 0.5)
    history = pipeline.run(3000)
    assert history[-500:].count(True) < 50
    pipeline.with_speculation = (1.0, 2.0)
    assert pipeline.run(4000)[-500:].count(False) < 50


@pytest.mark.parametrize(("pays", "expected"), [(True, True), (False, False)])
def test_a_process_begins_with_the_decision_of_an_earlier_one_and_soon_tries_the_other(pays: bool, expected: bool) -> None:
    earlier = Pipeline(1, (1.0, 0.5), 1.0)
    earlier.run(300)
    assert not earlier.trials.speculates
    pipeline = Pipeline(1, (1.0, 2.0 if pays else 0.5), 1.0)
    pipeline.trials.start_from(earlier.trials.speculates)
    history = pipeline.run(64)
    assert not any(history[:16]) and any(history), "it is tried within 64 tokens"
    pipeline.run(200)
    assert pipeline.trials.speculates is expected


def test_a_process_does_not_repeat_the_first_trials_of_an_earlier_one() -> None:
    earlier = Pipeline(1, (1.0, 2.0), 1.0)
    earlier.run(500)
    pipeline = Pipeline(1, (1.0, 2.0), 1.0)
    pipeline.trials.start_from(earlier.trials.speculates, earlier.trials.interval)
    assert all(pipeline.run(100)) and not all(Pipeline(1, (1.0, 2.0), 1.0).run(100))
