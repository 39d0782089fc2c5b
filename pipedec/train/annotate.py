"""From questions with answers to annotated training data for threads: which questions, in which order, and what was made of them.

Owns the sources, the share of unstructured answers (§3.1 of APAR) and the counts. The annotators decide about a single answer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.progress import track

from pipedec.core import UserError
from pipedec.data.records import read_rows
from pipedec.train import corpus, library_questions
from pipedec.train.annotated import UNSTRUCTURED, Annotated, Question, drop_unfinished_line, read_annotated, write_annotated
from pipedec.train.annotators import Annotator, Rejected

_PROMPT_FIELDS = ("question", "prompt", "instruction")
_ANSWER_FIELDS = ("answer", "response", "output")
_LIBRARY_KINDS = {"questions": "docstrings", "functions": "code"}


@dataclass(frozen=True)
class Sources:
    """Where questions come from.

    Attributes:
        files: JSONL files with a question and an answer in each record.
        library: the docstrings and comments of the Python standard library.
        problems: word problems in the GSM8K layout, or None.
    """

    files: tuple[Path, ...] = ()
    library: bool = False
    problems: Path | None = None

    def questions(self, seed: int) -> Iterator[Question]:
        """All questions, each once. Raises UserError if a file is missing or has no such fields."""
        seen = set()
        for question in self._all(seed):
            if question.answer and (question.prompt, question.answer) not in seen:
                seen.add((question.prompt, question.answer))
                yield question

    def _all(self, seed: int) -> Iterator[Question]:
        for path in self.files:
            yield from _file_questions(path, path.name, "file")
        if self.library:
            yield from library_questions.library_questions(seed)
            yield from _corpus_questions()
        if self.problems is not None:
            for problem in _file_questions(self.problems, "problems", "problems"):
                yield replace(problem, answer=corpus.without_calculator_notes(problem.answer))


def _file_questions(path: Path, source: str, kind: str) -> Iterator[Question]:
    for number, row in enumerate(read_rows(path), start=1):
        prompt, answer = _text(row, _PROMPT_FIELDS), _text(row, _ANSWER_FIELDS)
        if not prompt or not answer:
            raise UserError(f"{path}, record {number}: no question or no answer (fields question and answer)")
        yield Question(prompt, answer, source, kind, prompt)


def _text(row: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((row[name].strip() for name in names if isinstance(row.get(name), str)), "")


def _corpus_questions() -> Iterator[Question]:
    """The conversations among the corpus's documents of the library."""
    for document in corpus.library_documents():
        turn, separator, answer = document.text.partition(corpus.END + corpus.ASSISTANT)
        if separator:
            prompt = turn.removeprefix(corpus.BEGIN + corpus.USER).strip()
            yield Question(prompt, answer.removesuffix(corpus.END).strip(), "library", _LIBRARY_KINDS[document.family], prompt)


def choose(questions: Iterable[Question], rules: Annotator, unstructured_share: float, seed: int) -> list[Question]:
    """All questions whose answers have a structure by the rules, and so many others that they make up their share, shuffled.

    The order is such that any first part of it has about the same shares.
    """
    structured: list[Question] = []
    others: list[Question] = []
    for question in track(list(questions), "rules"):
        (others if rules.annotate(question.prompt, question.answer) is None else structured).append(question)
    rng = random.Random(seed)
    wanted = round(len(structured) * unstructured_share / (1 - unstructured_share))
    chosen = structured + rng.sample(others, min(wanted, len(others)))
    return rng.sample(chosen, len(chosen))


@dataclass
class Outcome:
    """What a run did: records written, found in the file from before, and refused (by reason)."""

    written: int = 0
    present: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


def annotate(questions: list[Question], dialect: str, annotator: Annotator, fallback: Annotator | None, out: Path) -> Outcome:
    """Annotate what ``out`` does not hold yet and append it there.

    Args:
        fallback: who annotates what ``annotator`` cannot; None leaves it out, and a later run tries it again.

    Raises:
        UserError: ``out`` is no such file or of another dialect.
    """
    outcome = Outcome()
    if out.exists():
        drop_unfinished_line(out)
    known = [record.question for record in read_annotated(out, dialect)] if out.exists() else []
    present = {(question.prompt, question.answer) for question in known}
    with out.open("a", encoding="utf-8") as file:
        for question in track(questions, f"{dialect}: {annotator.name}"):
            if (question.prompt, question.answer) in present:
                outcome.present += 1
                continue
            record = _annotated(question, annotator, fallback, outcome.rejected)
            if record is not None:
                file.write(write_annotated(record, dialect))
                file.flush()
                outcome.written += 1
    return outcome


def _annotated(question: Question, annotator: Annotator, fallback: Annotator | None, rejected: Counter[str]) -> Annotated | None:
    try:
        found = annotator.annotate(question.prompt, question.answer)
    except Rejected as reason:
        rejected[str(reason)] += 1
        return _annotated(question, fallback, None, rejected) if fallback is not None else None
    if found is None:
        return Annotated(question, (question.answer,), UNSTRUCTURED, annotator.name)
    return Annotated(question, found.pieces, found.rule, annotator.name)


@dataclass(frozen=True)
class Row:
    """What the records of one rule, or of one kind of question, are like; lengths in characters."""

    name: str
    documents: int
    structured: int
    mean_forks: float
    most_forks: int
    median_fork: float
    mean_answer: float

    @classmethod
    def of(cls, name: str, records: list[Annotated]) -> Row:
        forks = [record.forks for record in records if record.forks]
        lengths = [len(fork.text) for row in forks for fork in row]
        counts = [len(row) for row in forks]
        return cls(
            name, len(records), len(forks), mean(counts or [0]), max(counts, default=0), median(lengths or [0]),
            mean(len(record.question.answer) for record in records),
        )  # fmt: skip


def by_rule(records: list[Annotated]) -> list[Row]:
    """A row for each rule."""
    return _rows(records, lambda record: record.rule)


def by_kind(records: list[Annotated]) -> list[Row]:
    """A row for each kind of question of the library, and for each other source."""
    return _rows(records, lambda record: record.question.kind if record.question.source == "library" else record.question.source)


def _rows(records: list[Annotated], name_of: Callable[[Annotated], str]) -> list[Row]:
    ordered = sorted(records, key=name_of)
    return [Row.of(name, list(group)) for name, group in groupby(ordered, key=name_of)]
