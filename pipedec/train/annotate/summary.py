"""Tables about annotated answers: how many are structured, how many forks they have, how long they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from statistics import mean, median

from pipedec.train.annotate.records import Annotated


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
