"""Trials of the other way on pipelines whose speed with and without speculation is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipedec.decoding.controller import Trials


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
