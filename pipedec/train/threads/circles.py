"""How a model unlearns answers that run in circles (sequence-level unlikelihood training, Welleck et al. 2020).

The model in training answers prompts; those of its answers that run in circles become rows whose repeated tokens are to become
unlikely. Owns these answers and rows; ``repetition`` owns what counts as a repetition, ``learning`` the loss.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipedec.threads import Sequence, replay
from pipedec.threads.visibility import IGNORED
from pipedec.train.threads.answers import Asked, ModelAnswers
from pipedec.train.threads.figures import answer_all
from pipedec.train.threads.learning import ThreadRecipe
from pipedec.train.threads.repetition import in_circles, repeats
from pipedec.train.threads.rows import Row, Sample, Writer, tree_row

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
        asked: what to answer in each round: prompts, with their dialects (None: in one thread).
        store: directory that keeps the answers, so that a killed run continues with the same ones.
    """

    model: Any
    writer: Writer
    asked: list[list[Sample]]
    recipe: ThreadRecipe
    store: Path
    _current: tuple[int, list[Row]] | None = None

    def rows(self, step: int) -> list[Row]:
        """The rows to avoid in a step; none if no answer of its round ran in circles."""
        if not self.asked:
            return []
        number = step * len(self.asked) // self.recipe.steps
        if self._current is None or self._current[0] != number:
            self._current = number, [self._row(kept) for kept in self._kept(number)]
        found, most = self._current[1], self.recipe.circle_answers
        return [found[(step * most + count) % len(found)] for count in range(min(most, len(found)))]

    def _row(self, kept: dict[str, Any]) -> Row:
        prompt = tuple(kept["prompt"])
        sequence = Sequence(
            self.writer.bound_to(kept["dialect"]), len(prompt), [self.writer.end_token_id], self.recipe.max_length
        )
        replay(sequence, kept["answer"])
        return avoiding_row(sequence, prompt)

    def _kept(self, number: int) -> list[dict[str, Any]]:
        path = self.store / f"{number:04}.json"
        if not path.exists():
            self.store.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".partial").write_text(json.dumps(list(self._circling(number))))
            path.with_suffix(".partial").rename(path)
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return found

    def _circling(self, number: int) -> Iterator[dict[str, Any]]:
        for dialect in (None, *self.writer.bound):
            answers = ModelAnswers(self.model, self.writer.bound_to(dialect), (self.writer.end_token_id,), self.recipe.max_length)
            asked = [Asked(sample.prompt) for sample in self.asked[number] if sample.dialect == dialect]
            for prompt, sequence in answer_all(answers, asked, f"circles {number}: {dialect or 'one thread'}"):
                if in_circles(sequence):
                    answer = [token.token_id for token in sequence.document()]
                    yield {"dialect": dialect, "prompt": prompt, "answer": answer}


def prompts_of_rounds(samples: list[Sample], writer: Writer, recipe: ThreadRecipe) -> list[list[Sample]]:
    """What to answer in each round: random prompts, in one thread and in every dialect by turns."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    numbers, ways = itertools.cycle(order), itertools.cycle((None, *writer.bound))
    return [
        [_asked_in(samples[next(numbers)], next(ways), writer) for _ in range(recipe.circle_prompts)]
        for _ in range(recipe.circle_rounds)
    ]


def _asked_in(sample: Sample, dialect: str | None, writer: Writer) -> Sample:
    return replace(sample, dialect=dialect, prompt=writer.prompt(sample.record.question.prompt, dialect))
