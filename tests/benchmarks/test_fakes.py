"""The fakes treat rows, verdicts and slots as real stages do, and say a known answer."""

from __future__ import annotations

import pytest
import torch
from support.driven_stage import DrivenStage

from benchmarks.policy.replay import AnsweringStage, KnownAnswer
from pipedec.bench.overhead.null_rank import no_layers, sequence_of
from pipedec.core import NewRequest, SamplingParams, Step, Verdict
from pipedec.stage import StageWorker

ANSWER = (7, 3, 9, 4)
PROMPT_LENGTH = 5
SAMPLED = SamplingParams(temperature=1.0, seed=1, logprobs=2, max_tokens=100, logit_bias={63: -5.0})


def opening(said: tuple[int, ...] = (), slots: int = 32) -> NewRequest:
    return NewRequest(PROMPT_LENGTH, SAMPLED, output_token_ids=said, slots=((0, slots),))


def prompt(count: int = PROMPT_LENGTH, hidden_size: int | None = None) -> Step:
    return Step(torch.arange(count), torch.full((count,), -1), _zeros(count, hidden_size))


def rows(*pairs: tuple[int, int]) -> Step:
    """A step from (token, parent), with activations of another fake."""
    token_ids, parents = zip(*pairs, strict=True)
    return Step(torch.tensor(token_ids), torch.tensor(parents), _zeros(len(pairs), 1))


def _zeros(count: int, hidden_size: int | None) -> torch.Tensor | None:
    return None if hidden_size is None else torch.zeros(count, hidden_size)


class Last:
    """A last stage that knows ANSWER, at timesteps that a test names."""

    def __init__(self) -> None:
        self.timestep = 0
        self.answer = KnownAnswer(ANSWER)
        self.stage = DrivenStage(AnsweringStage(lambda number, opening: self.answer, lambda: self.timestep, slots=2**40))

    def compute(self, timestep: int, step: Step) -> Verdict | None:
        self.timestep = timestep
        self.stage.compute({1: step})
        results = self.stage.results()
        assert len(results) <= 1
        return results[0].verdict if results else None


def test_the_last_stage_accepts_what_the_answer_says() -> None:
    """Rows beside the answer are dropped; several tokens may be accepted at once. No sampling parameter changes the answer."""
    last = Last()
    last.stage.open(1, opening())
    assert last.compute(2, prompt(3)) is None
    assert last.compute(3, prompt(2)) == Verdict.of(7)
    last.stage.sync(1, Verdict.of(7))
    assert last.compute(5, rows((7, -1), (8, 0))) == Verdict.of(3)
    last.stage.sync(1, Verdict.of(3))
    assert last.compute(9, rows((3, -1), (9, 0), (6, 0))) == Verdict.of(9, 4, finished="length")
    assert last.compute(10, rows((1, 0))) is None, "what arrives behind the end is void"
    last.stage.sync(1, Verdict.of(9, 4, finished="length"))
    assert last.stage.num_lanes == 0
    assert (last.answer.prefilled, last.answer.arrivals) == (3, [5, 9, 9])


def test_an_answer_goes_on_behind_what_was_said_before() -> None:
    last = Last()
    last.stage.open(1, opening(said=ANSWER[:2]))
    assert last.compute(1, prompt(PROMPT_LENGTH + 2)) == Verdict.of(9)
    last.stage.sync(1, Verdict.of(9))
    assert last.compute(2, rows((9, -1))) == Verdict.of(4, finished="length")


def test_other_stages_pass_zeros_on_and_prune_what_waits() -> None:
    stage = DrivenStage(StageWorker(no_layers(3), sequence_of, slots=2**40))
    stage.open(1, opening())
    stage.compute({1: prompt()})
    assert torch.equal(stage.outgoing()[1].hidden, torch.zeros(PROMPT_LENGTH, 3))
    stage.sync(1, Verdict.of(7))
    stage.compute({1: rows((7, -1), (8, 0), (3, 0))})
    assert (stage.load.rows, stage.load.past) == (3, PROMPT_LENGTH)
    stage.sync(1, Verdict.of(3))
    (left,) = stage.outgoing().values()
    assert (left.token_ids.tolist(), left.parents.tolist(), left.hidden.shape) == ([3], [-1], (1, 3))
    assert stage.pruned_rows == 1


def test_slots_are_checked_though_nothing_is_in_them() -> None:
    stage = DrivenStage(StageWorker(no_layers(), sequence_of, slots=32))
    with pytest.raises(ValueError, match="not whole blocks"):
        stage.open(1, opening(slots=48))
    stage.open(1, opening(slots=16))
    with pytest.raises(ValueError, match="cannot have been written"):
        stage.compute({1: prompt(17)})
