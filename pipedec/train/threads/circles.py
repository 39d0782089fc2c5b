"""How a model unlearns answers that run in circles (sequence-level unlikelihood training, Welleck et al. 2020).

The model in training answers prompts; those of its answers that run in circles become rows whose repeated tokens are to become
unlikely. Owns these answers and rows; ``repetition`` owns what counts as a repetition, ``learning`` the loss.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from pipedec.threads import Sequence
from pipedec.threads.visibility import IGNORED
from pipedec.train.threads.learning import ThreadRecipe
from pipedec.train.threads.own_answers import OwnAnswers
from pipedec.train.threads.repetition import in_circles, repeats
from pipedec.train.threads.rows import Row, Unanswered, Writer, tree_row

_LEARNED = 64  # repeated tokens of an answer that are learned from


def avoiding_row(sequence: Sequence, prompt_ids: tuple[int, ...]) -> Row:
    """An answer whose repeated tokens are the targets, to become unlikely; cut behind the 64th of them."""
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
    return Row(row.token_ids[:length], row.positions[:length], row.mask[:length, :length], targets[:length], is_avoided=True)


@dataclass
class Circles:
    """The circling answers of the model in training, of which every step gets some.

    At the first step of each of ``circle_rounds`` equal parts of the training, the model answers the round's prompts greedily.

    Attributes:
        answers: of the model in training.
        asked: what to answer in each round.
    """

    answers: OwnAnswers
    asked: list[list[Unanswered]]
    recipe: ThreadRecipe
    _current: tuple[int, list[Row]] | None = None

    def rows(self, step: int) -> list[Row]:
        """The rows to avoid in a step; none if no answer of its round ran in circles."""
        if not self.asked:
            return []
        number = step * len(self.asked) // self.recipe.steps
        if self._current is None or self._current[0] != number:
            self._current = number, self._circling(number)
        found, most = self._current[1], self.recipe.circle_answers
        return [found[(step * most + count) % len(found)] for count in range(min(most, len(found)))]

    def _circling(self, number: int) -> list[Row]:
        writer, limit = self.answers.writer, self.answers.max_tokens
        found = [(writer.sequence(sample, limit), sample.prompt) for sample in self.answers.to(self.asked[number], number)]
        return [avoiding_row(sequence, prompt) for sequence, prompt in found if in_circles(sequence)]


def prompts_of_rounds(prompts: list[str], writer: Writer, recipe: ThreadRecipe) -> list[list[Unanswered]]:
    """What to answer in each round: random prompts, in one thread and in every dialect by turns."""
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    numbers, ways = itertools.cycle(order), itertools.cycle((None, *writer.bound))
    return [
        [writer.unanswered(prompts[next(numbers)], next(ways)) for _ in range(recipe.circle_prompts)]
        for _ in range(recipe.circle_rounds)
    ]
