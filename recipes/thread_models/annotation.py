"""Annotate questions with answers: choose them, append the records to a file so that a killed run continues, and sum them up.

Owns the shares of structured and unstructured answers, and the counts of refused annotations; ``annotators`` find the structure.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import mean, median

from rich.progress import track

from recipes.thread_models.annotators import Annotator, Rejected
from recipes.thread_models.records import (
    UNSTRUCTURED,
    Annotated,
    Question,
    drop_unfinished_line,
    read_annotated,
    write_annotated,
)


def choose(questions: Iterable[Question], rules: Annotator, unstructured_share: float, seed: int) -> list[Question]:
    """All questions whose answers the rules find structured, and enough others to make up their share, shuffled.

    Any prefix of the result has about the same shares, so that it can be cut off.
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
class AnnotationCounts:
    """Counts of a run: records written, found in the file from an earlier run, and refused (by reason)."""

    written: int = 0
    present: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


def annotate(
    questions: list[Question], dialect: str, annotator: Annotator, fallback: Annotator | None, out: Path
) -> AnnotationCounts:
    """Annotate what ``out`` does not hold yet and append it there.

    Args:
        fallback: who annotates what ``annotator`` cannot; None leaves it out, and a later run tries it again.

    Raises:
        UserError: ``out`` is no such file or of another dialect.
    """
    outcome = AnnotationCounts()
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
class Summary:
    """Figures of the records of one rule, or of one kind of question; lengths in characters."""

    name: str
    documents: int
    structured: int
    mean_forks: float
    most_forks: int
    median_fork: float
    mean_answer: float

    @classmethod
    def of(cls, name: str, records: list[Annotated]) -> Summary:
        forks = [record.forks for record in records if record.forks]
        lengths = [len(fork.text) for row in forks for fork in row]
        counts = [len(row) for row in forks]
        return cls(
            name, len(records), len(forks), mean(counts or [0]), max(counts, default=0), median(lengths or [0]),
            mean(len(record.question.answer) for record in records),
        )  # fmt: skip

    def cells(self) -> tuple[str, ...]:
        """The figures as text."""
        forks = f"{self.mean_forks:.1f}", str(self.most_forks), f"{self.median_fork:.0f}"
        return self.name, f"{self.documents:,}", f"{self.structured:,}", *forks, f"{self.mean_answer:.0f}"


def by_rule(records: list[Annotated]) -> list[Summary]:
    """One summary per rule."""
    return _rows(records, lambda record: record.rule)


def by_kind(records: list[Annotated]) -> list[Summary]:
    """One summary per kind of question that has one, and per source of the others."""
    return _rows(records, lambda record: record.question.source if record.question.kind in ("", "file") else record.question.kind)


def _rows(records: list[Annotated], name_of: Callable[[Annotated], str]) -> list[Summary]:
    ordered = sorted(records, key=name_of)
    return [Summary.of(name, list(group)) for name, group in groupby(ordered, key=name_of)]
