"""Annotate questions with answers: append the records to a file, so that a killed run continues, and count what was refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import track

from pipedec.train.annotate.annotators import Annotator, Rejected
from pipedec.train.annotate.records import (
    UNSTRUCTURED,
    Annotated,
    Question,
    drop_unfinished_line,
    read_annotated,
    write_annotated,
)


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
