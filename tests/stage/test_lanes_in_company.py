"""Whatever else is in the pipeline, a request is computed as it is alone; so it is in captured forwards, and in one thread."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lane_scripts import END, LIKELY, OPENERS, Script, run
from lane_targets import CUT, Target, scripts
from support.captures import Repeated
from support.driven_stage import DrivenStage
from support.examples import examples
from support.slot_books import SlotAllocator
from support.toy_dialects import behind
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, Step
from pipedec.core.verdict import Verdict
from pipedec.threads import NewSequence, ThreadedSequence
from recipes.thread_models.one_thread import NO_DIALECT


def assert_equal(alone: Script, in_company: Script, tolerance: float) -> None:
    assert alone.verdicts == in_company.verdicts
    assert len(alone.seen) == len(in_company.seen)
    for one, other in zip(flat(alone.seen), flat(in_company.seen), strict=True):
        if isinstance(one, Tensor):
            assert isinstance(other, Tensor)
            torch.testing.assert_close(other, one, atol=tolerance, rtol=0)
        else:
            assert other == (pytest.approx(one, abs=1e-6) if isinstance(one, float) else one)


def flat(seen: list[object]) -> Iterator[object]:
    """Log-probabilities are compared one by one, as they are rounded."""
    for entry in seen:
        if isinstance(entry, RequestUpdate):
            yield from (entry.number, entry.verdict, *(value for token in entry.logprobs for pair in token for value in pair))
        else:
            yield entry


@pytest.mark.in_turn(3)
@examples(60)
@given(drawn=st.lists(scripts(), min_size=2, max_size=5), block=st.sampled_from([3, 16]), seed=st.integers(0, 99))
def test_a_request_in_company_is_computed_as_it_is_alone(
    target: Target, drawn: list[dict[str, Any]], block: int, seed: int
) -> None:
    """In company its slots are anywhere, and were those of requests that have just ended."""
    together = [Script(number, **arguments) for number, arguments in enumerate(drawn)]
    workers, allocator = target.workers(block), SlotAllocator(600, block, random.Random(seed))
    run(workers, together, allocator)
    assert [worker.num_lanes for worker in workers] == [0] * len(CUT) and allocator.num_taken == 0
    for number, arguments in enumerate(drawn):
        alone = Script(number, **arguments)
        run(target.workers(block), [alone])
        assert_equal(alone, together[number], 1e-12)


def sequences_that_may_fork(opening: NewRequest) -> NewSequence:
    """For all that the forest knows, but nothing ever opens a thread."""
    prompt_length, max_tokens, said = opening.prompt_length, opening.sampling.max_tokens, opening.output_token_ids
    return lambda: behind(said, ThreadedSequence(replace(NO_DIALECT), prompt_length, (END,), max_tokens))


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("window")
@examples(60)
@given(arguments=scripts())
def test_the_shortcut_of_one_thread_changes_nothing(target: Target, arguments: dict[str, Any]) -> None:
    """Not a bit of what leaves any stage."""
    short, general = (Script(0, **{**arguments, "has_threads": False, "patience": 60}) for _ in range(2))
    run(target.workers(8), [short])
    run(target.workers(8, new_sequence=sequences_that_may_fork), [general])
    assert_equal(short, general, 0.0)


def many(count: int, max_tokens: int = 12) -> list[Script]:
    """Requests of every kind, which arrive over eight timesteps."""
    return [
        Script(
            number=number, seed=number, arrival=number % 8, chunks=[3, 1 + number % 4], has_masks=number % 3 == 0,
            has_threads=number % 4 == 1, delay=number % 3, patience=5 if number % 7 == 6 else 60,
            sampling=SamplingParams(
                temperature=0.8 * (number % 2), seed=number, max_tokens=max_tokens + number % 20,
                logit_bias=LIKELY | OPENERS if number % 4 == 1 else LIKELY,
            ),
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.fast_cases
def test_the_scripts_fork_hit_and_end_in_every_way(target: Target) -> None:
    """What the comparisons see, and that rows of all requests are computed in one forward."""
    together, workers = many(20), target.workers(4)
    widest = 0

    def watch() -> None:
        nonlocal widest
        widest = max(widest, workers[0].num_lanes)

    run(workers, together, check=watch)
    verdicts = [verdict for script in together for verdict in script.verdicts]
    assert {verdict.finished for verdict in verdicts} == {None, "stop", "length", "cancelled"}
    assert max(len(part.tokens) for verdict in verdicts for part in verdict.accepted) > 1
    assert any(part.forecast for verdict in verdicts for part in verdict.accepted)
    assert any(part.thread > 0 for verdict in verdicts for part in verdict.accepted)
    assert widest > 15


@pytest.mark.fast_cases("window")
def test_requests_through_captured_stages_are_computed_as_without_graphs(target: Target) -> None:
    """Threads, masks, cancellations; each stage's slots are those of the same stage without graphs."""
    scripts, capture = [many(7) for _ in range(2)], Repeated()
    for together, is_captured in zip(scripts, (False, True), strict=True):
        workers = target.workers(4)
        for worker in workers if is_captured else ():
            worker._model.capture = capture
        run(workers, together, SlotAllocator(800, 4, random.Random(3)))
    assert capture.replays > capture.captures > 3
    for plain, captured in zip(*scripts, strict=True):
        assert_equal(plain, captured, 1e-12)


def test_rows_of_all_requests_are_one_forward(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    [worker] = map(DrivenStage, target.workers(8, [range(3)]))
    counts = list[int]()
    forward = worker._model.forward
    monkeypatch.setattr(worker._model, "forward", lambda inputs, lanes: counts.append(len(inputs)) or forward(inputs, lanes))
    for number in range(5):
        worker.open(number, NewRequest(2, SamplingParams(), slots=((8 * number, 8),)))
    chunk = Step(torch.tensor([4, 5]), torch.tensor([-1, -1]))
    steps = dict.fromkeys(range(7), chunk)
    worker.compute(steps)
    assert worker.load == (10, 0) and counts == [10], "numbers 5 and 6 are unknown"
    results = worker.results()
    assert [update.number for update in results] == list(range(5)) and worker.results() == ()
    for update in results:
        assert update.verdict is not None
        worker.sync(update.number, update.verdict)
    worker.sync(3, Verdict(finished="cancelled"))
    token = results[0].verdict.tokens[0] if results[0].verdict else 0
    root = Step(torch.tensor([token]), torch.tensor([-1]))
    worker.compute({0: root, 3: root})
    assert worker.load == (1, 2) and counts == [10, 1] and [update.number for update in worker.results()] == [0]


def test_rows_without_slots_are_refused(target: Target) -> None:
    """Rank 0's books are wrong."""
    [worker] = map(DrivenStage, target.workers(8, [range(3)]))
    worker.open(1, NewRequest(9, SamplingParams(), slots=((8, 8),)))
    chunk = Step(torch.arange(9), torch.full((9,), -1))
    worker.extend(2, ((16, 8),))
    worker.compute({1: chunk})
    [result] = worker.results()
    assert result.verdict and "9 rows do not fit into the 8 slots" in (result.verdict.failure or "") and worker.num_lanes == 0
