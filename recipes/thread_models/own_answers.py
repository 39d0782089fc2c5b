"""A model's own greedy answers to prompts, in one thread and in dialects, and how it unlearns those that run in circles.

Answers are kept in files, from which a killed run continues. The model in training answers prompts; the repeated tokens of
answers that run in circles are to become unlikely (sequence-level unlikelihood training, Welleck et al. 2020). ``figures`` owns
what counts as a repetition, ``learning`` the loss.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipedec.core.errors import UserError
from pipedec.threads import Sequence
from recipes.thread_models.answers import ModelAnswers, SeededPrompt
from recipes.thread_models.figures import answer_all, in_circles, repeats
from recipes.thread_models.learning import ThreadRecipe
from recipes.thread_models.records import kept_json
from recipes.thread_models.rows import IGNORED, RowWriter, TokenizedSample, TrainingRow, Unanswered, tree_row

_BATCH = 96
_LEARNED = 64  # repeated tokens of an answer that are learned from


@dataclass(frozen=True)
class OwnAnswers:
    """A model's greedy answers, of which each batch is kept in a file."""

    model: Any
    writer: RowWriter
    max_tokens: int  # maximum length of an answer
    store: Path  # directory of the files

    def to(self, asked: list[Unanswered], number: int) -> list[TokenizedSample]:
        """The answers of batch ``number``. Once they are kept, the model is not asked again.

        Raises UserError if answers to other prompts are kept.
        """
        path = self.store / f"{number:04}.json"
        kept = kept_json(path, lambda: list(self._answers(asked, f"{self.store.name} {number}")))
        samples = [TokenizedSample(one["dialect"], tuple(one["prompt"]), tuple(one["answer"])) for one in kept]
        if Counter(Unanswered(one.dialect, one.prompt) for one in samples) != Counter(asked):
            raise UserError(f"{path} has answers to other prompts: give another --work, or remove {self.store}")
        return samples

    def _answers(self, asked: list[Unanswered], title: str) -> Iterator[dict[str, Any]]:
        for dialect in (None, *self.writer.bound):
            answers = ModelAnswers(self.model, self.writer.bound_to(dialect), (self.writer.end_token_id,), self.max_tokens)
            prompts = [SeededPrompt(one.prompt) for one in asked if one.dialect == dialect]
            for prompt, sequence in answer_all(answers, prompts, f"{title}: {dialect or 'one thread'}"):
                answer = [token.token_id for token in sequence.document()]
                yield {"dialect": dialect, "prompt": prompt, "answer": answer}


def answers_to_all(answers: OwnAnswers, prompts: Iterable[str]) -> list[TokenizedSample]:
    """The answers to all prompts that are shorter than an answer may be, each in one thread and in every dialect."""
    asked = [answers.writer.unanswered(prompt, way) for prompt in prompts for way in (None, *answers.writer.bound)]
    asked = [one for one in asked if len(one.prompt) < answers.max_tokens]
    batches = (asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH))
    return [sample for number, batch in enumerate(batches) for sample in answers.to(batch, number)]


def avoiding_row(sequence: Sequence, prompt_ids: tuple[int, ...]) -> TrainingRow:
    """An answer whose repeated tokens are the targets, to become unlikely; cut after the 64th of them."""
    document = sequence.document()
    repeated_of = {thread.number: repeats(thread.token_ids) for thread in sequence.threads}
    places = {(token.thread, token.ordinal): place for place, token in enumerate(document, start=len(prompt_ids))}
    row = tree_row(sequence, prompt_ids)
    avoided = torch.zeros_like(row.targets, dtype=torch.bool)
    length, left = len(row.token_ids), _LEARNED
    for token in document:
        if token.ordinal > 0 and repeated_of[token.thread][token.ordinal]:
            avoided[places[token.thread, token.ordinal - 1]] = True
            left -= 1
            if not left:
                length = places[token.thread, token.ordinal]
                break
    targets = row.targets.where(avoided, torch.full_like(row.targets, IGNORED))
    return TrainingRow(
        row.token_ids[:length], row.positions[:length], row.mask[:length, :length], targets[:length], is_avoided=True
    )


@dataclass
class Circles:
    """The circling answers of the model in training, of which every step gets some.

    At the first step of each of ``circle_rounds`` equal parts of the training, the model answers the round's prompts greedily.
    """

    answers: OwnAnswers  # of the model in training
    asked: list[list[Unanswered]]  # what to answer in each round
    recipe: ThreadRecipe
    _current: tuple[int, list[TrainingRow]] | None = None

    def rows(self, step: int) -> list[TrainingRow]:
        """The rows to avoid in a step; none if no answer of its round ran in circles."""
        if not self.asked:
            return []
        number = step * len(self.asked) // self.recipe.steps
        if self._current is None or self._current[0] != number:
            writer, limit = self.answers.writer, self.answers.max_tokens
            said = [(writer.sequence(sample, limit), sample.prompt) for sample in self.answers.to(self.asked[number], number)]
            self._current = number, [avoiding_row(sequence, prompt) for sequence, prompt in said if in_circles(sequence)]
        found, most = self._current[1], self.recipe.circle_answers
        return [found[(step * most + count) % len(found)] for count in range(min(most, len(found)))]


def prompts_of_rounds(prompts: list[str], writer: RowWriter, recipe: ThreadRecipe) -> list[list[Unanswered]]:
    """The prompts of each round: random ones, in one thread and in every dialect by turns."""
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    numbers, ways = itertools.cycle(order), itertools.cycle((None, *writer.bound))
    return [
        [writer.unanswered(prompts[next(numbers)], next(ways)) for _ in range(recipe.circle_prompts)]
        for _ in range(recipe.circle_rounds)
    ]
