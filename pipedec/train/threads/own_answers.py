"""A model's own greedy answers to prompts, in one thread and in dialects, kept in files.

Owns the files, from which a killed run continues. It does not know what is learned from the answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedec.core import UserError
from pipedec.train.threads.answers import Asked, ModelAnswers
from pipedec.train.threads.figures import answer_all
from pipedec.train.threads.rows import Sample, Unanswered, Writer

_BATCH = 96


@dataclass(frozen=True)
class OwnAnswers:
    """A model's greedy answers, of which each batch is kept in a file.

    Attributes:
        max_tokens: maximum length of an answer.
        store: directory of the files.
    """

    model: Any
    writer: Writer
    max_tokens: int
    store: Path

    def to(self, asked: list[Unanswered], number: int) -> list[Sample]:
        """The answers of batch ``number``. Once they are kept, the model is not asked again.

        Raises:
            UserError: answers to other prompts are kept.
        """
        path = self.store / f"{number:04}.json"
        if not path.exists():
            self.store.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".partial").write_text(json.dumps(list(self._answers(asked, f"{self.store.name} {number}"))))
            path.with_suffix(".partial").rename(path)
        kept: list[dict[str, Any]] = json.loads(path.read_text())
        samples = [Sample(one["dialect"], tuple(one["prompt"]), tuple(one["answer"])) for one in kept]
        if Counter(Unanswered(one.dialect, one.prompt) for one in samples) != Counter(asked):
            raise UserError(f"{path} has answers to other prompts: give another --work, or remove {self.store}")
        return samples

    def _answers(self, asked: list[Unanswered], title: str) -> Iterator[dict[str, Any]]:
        for dialect in (None, *self.writer.bound):
            answers = ModelAnswers(self.model, self.writer.bound_to(dialect), (self.writer.end_token_id,), self.max_tokens)
            prompts = [Asked(one.prompt) for one in asked if one.dialect == dialect]
            for prompt, sequence in answer_all(answers, prompts, f"{title}: {dialect or 'one thread'}"):
                answer = [token.token_id for token in sequence.document()]
                yield {"dialect": dialect, "prompt": prompt, "answer": answer}


def answers_to_all(answers: OwnAnswers, prompts: Iterable[str]) -> list[Sample]:
    """The answers to all prompts that are shorter than an answer may be, each in one thread and in every dialect."""
    asked = [answers.writer.unanswered(prompt, way) for prompt in prompts for way in (None, *answers.writer.bound)]
    asked = [one for one in asked if len(one.prompt) < answers.max_tokens]
    batches = (asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH))
    return [sample for number, batch in enumerate(batches) for sample in answers.to(batch, number)]
