"""A model's own answers: what it says, in one thread and in every dialect, is kept; circles are told and unlearned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.annotated_answers import records

from pipedec.core.errors import UserError
from pipedec.threads import Sequence, replay
from recipes.thread_models.answers import ModelAnswers, SeededPrompt
from recipes.thread_models.figures import in_circles
from recipes.thread_models.learning import PaddedRows, ThreadLoss, ThreadRecipe, ThreadSteps, learned_logits
from recipes.thread_models.own_answers import OwnAnswers, answers_to_all, avoiding_row, prompts_of_rounds
from recipes.thread_models.rows import IGNORED, RowWriter, Unanswered
from recipes.thread_models.tuning import Student

PROMPTS = [f"How long is {number}?" for number in range(12)]
LIMIT = 100  # tokens of an answer
CPU = torch.device("cpu")
CIRCLE = [*range(100, 120), *[20, 21, 22, 23, 24] * 60]
RECIPE = ThreadRecipe(
    steps=4, batch_tokens=300, warmup_steps=1, learning_rate=1e-3, max_length=130,
    circle_rounds=2, circle_prompts=6, circle_answers=2,
)  # fmt: skip


@pytest.fixture
def answers(student: Student, writer: RowWriter, tmp_path: Path) -> OwnAnswers:
    return OwnAnswers(student.model, writer, LIMIT, tmp_path / "teacher")


@pytest.mark.slow
def test_they_are_what_the_model_says(answers: OwnAnswers) -> None:
    asked = [answers.writer.unanswered(prompt, way) for prompt in PROMPTS[:2] for way in (None, "apar", "pasta")]
    found = answers.to(asked, 0)
    assert {Unanswered(one.dialect, one.prompt) for one in found} == set(asked) and len(found) == 6
    for sample in found:
        bound = answers.writer.bound_to(sample.dialect)
        (said,) = ModelAnswers(answers.model, bound, (answers.writer.end_token_id,), LIMIT).answer([SeededPrompt(sample.prompt)])
        assert sample.answer == tuple(token.token_id for token in said.document())
        replayed = answers.writer.sequence(sample, LIMIT)
        assert (replayed.finished, len(replayed.threads)) == (said.finished, len(said.threads))
        (row,) = answers.writer.rows(sample, "unrolled")
        assert row.token_ids.tolist()[: len(sample.prompt)] == list(sample.prompt), "no record tells how it is unrolled"


@pytest.mark.slow
def test_every_prompt_is_answered_in_every_way_and_asked_once(answers: OwnAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [*PROMPTS[:3], "Why? " * 60]
    found = answers_to_all(answers, prompts)
    expected = [(way, answers.writer.prompt(prompt, way)) for prompt in prompts[:3] for way in (None, "apar", "pasta")]
    assert sorted((str(one.dialect), one.prompt) for one in found) == sorted((str(way), prompt) for way, prompt in expected)
    with monkeypatch.context() as patch:
        patch.setattr(ModelAnswers, "answer", None)
        assert answers_to_all(answers, prompts) == found
    with pytest.raises(UserError, match=r"0000\.json has answers to other prompts: give another --work"):
        answers_to_all(answers, prompts[1:])


def said(tokens: list[int], max_tokens: int, end: int = 1) -> Sequence:
    sequence = Sequence(3, [end], max_tokens)
    replay(sequence, tokens)
    return sequence


def test_circles_are_answers_that_are_cut_while_they_repeat_themselves() -> None:
    assert in_circles(said(CIRCLE[:200], 200))
    assert not in_circles(said([*CIRCLE[:200], 1], 300)), "it ended by itself"
    assert not in_circles(said(list(range(100, 300)), 200)), "it is merely long"
    assert not in_circles(said([*range(100, 200), *range(100, 140)], 140)), "a part of its end is repeated"


def test_only_repeated_tokens_are_targets_and_the_rest_is_cut(student: Student) -> None:
    row = avoiding_row(said(CIRCLE[:200], 200), (5, 6, 7))
    places = (row.targets != IGNORED).nonzero().flatten().tolist()
    first = 3 + 20 + 5 + 8 - 1  # of the second time that eight tokens come
    assert row.is_avoided and places == list(range(first - 1, first - 1 + 64)) and len(row.token_ids) == first + 63
    assert row.targets[places].tolist() == CIRCLE[first - 3 : first - 3 + 64]


def test_unlikelihood_is_of_avoided_targets_alone(student: Student, writer: RowWriter) -> None:
    row = avoiding_row(said(CIRCLE[:60], 60), (5, 6, 7))
    likely = replace(row, is_avoided=False)
    batch = PaddedRows.of([row, likely], CPU)
    losses = ThreadLoss(student.model, writer.controls).of(batch)
    chances = learned_logits(student.model, batch).softmax(-1).gather(1, batch.learned[:, None])[:, 0]
    half = len(chances) // 2
    assert losses.is_avoided.tolist() == [True] * half + [False] * half
    assert torch.allclose(losses.values[:half], -torch.log1p(-chances[:half]), atol=1e-5)
    assert torch.allclose(losses.values[half:], -chances[half:].log(), atol=1e-4)


def test_a_step_learns_its_samples_and_avoids_circles(student: Student, writer: RowWriter) -> None:
    samples = [writer.sample(record, "apar") for record in records("apar", 3)]
    row = avoiding_row(said(CIRCLE[:100], 100), (5, 6, 7))
    loss = ThreadLoss(student.model, writer.controls)
    alone = ThreadSteps(loss, writer, [samples], RECIPE)(0)
    student.model.zero_grad()
    with_circles = ThreadSteps(loss, writer, [samples], RECIPE, lambda step: [row, row])(0)
    assert with_circles["circles"] == 2 and with_circles["circle_loss"] > 0 and "circles" not in alone
    assert with_circles["loss"] == pytest.approx(alone["loss"]), "of the samples, as before"
    assert with_circles["control_loss"] == pytest.approx(alone["control_loss"])


def test_rounds_ask_in_one_thread_and_in_every_dialect_by_turns(writer: RowWriter) -> None:
    rounds = prompts_of_rounds(PROMPTS, writer, RECIPE)
    asked = [one for part in rounds for one in part]
    assert [one.dialect for one in asked] == [None, "apar", "pasta"] * 4 and len(rounds) == 2
    of_each = [[writer.prompt(prompt, one.dialect) for prompt in PROMPTS] for one in asked]
    places = [known.index(one.prompt) for known, one in zip(of_each, asked, strict=True)]
    assert sorted(places) == list(range(12)) != places, "each once, in a random order"
    for changes, option in (({"circle_rounds": 5}, "--circle-rounds"), ({"circle_prompts": 0}, "circle_prompts")):
        with pytest.raises(UserError, match=option):
            replace(RECIPE, **changes)
