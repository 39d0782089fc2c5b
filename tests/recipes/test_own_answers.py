"""A model's own answers: they are what it says, in one thread and in every dialect, and are kept over a killed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipedec.core import UserError
from recipes.thread_models.answers import ModelAnswers, SeededPrompt
from recipes.thread_models.own_answers import OwnAnswers, answers_to_all
from recipes.thread_models.rows import RowWriter, Unanswered
from recipes.thread_models.tuning import Student

PROMPTS = [f"How long is {number}?" for number in range(40)]
LIMIT = 100  # tokens of an answer


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
    """A killed run has the batches that it finished; the next one asks only for the others."""
    asked: list[int] = []
    ask = ModelAnswers.answer

    def dies(self: ModelAnswers, prompts: list[SeededPrompt]) -> Any:
        if len(asked) == 4:
            asked.append(0)
            raise KeyboardInterrupt
        asked.append(len(prompts))
        return ask(self, prompts)

    monkeypatch.setattr(ModelAnswers, "answer", dies)
    prompts = [*PROMPTS, "Why? " * 60]
    with pytest.raises(KeyboardInterrupt):
        answers_to_all(answers, prompts)
    assert [path.name for path in answers.store.iterdir()] == ["0000.json"]
    found = answers_to_all(answers, prompts)
    assert asked == [32, 32, 32, 8, 0, 8, 8, 8], "96 answers, one dialect of the second batch, and that batch once more"
    expected = [(way, answers.writer.prompt(prompt, way)) for prompt in PROMPTS for way in (None, "apar", "pasta")]
    assert sorted((str(one.dialect), one.prompt) for one in found) == sorted((str(way), prompt) for way, prompt in expected)
    assert answers_to_all(answers, prompts) == found and len(asked) == 8
    with pytest.raises(UserError, match=r"0000\.json has answers to other prompts: give another --work"):
        answers_to_all(answers, prompts[1:])
