"""Questions with answers to annotate: read from files, each once, and chosen so that a share of them is unstructured.

Whether an answer has a structure is known by the annotators.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import track

from pipedec.core import UserError
from pipedec.data.records import read_rows
from pipedec.train.annotate.annotators import Annotator
from pipedec.train.annotate.records import Question

_PROMPT_FIELDS = ("question", "prompt", "instruction")
_ANSWER_FIELDS = ("answer", "response", "output")


def read_questions(files: Iterable[Path], problems: Path | None = None) -> Iterator[Question]:
    """The questions of all files, each once.

    A record has a question and an answer, and may have the fields ``source``, ``kind`` and ``subject`` of ``Question``.

    Args:
        problems: word problems in the GSM8K layout, whose calculator notes are removed.

    Raises:
        UserError: a file is missing, or a record has no question or no answer.
    """
    seen = set()
    for question in _all(files, problems):
        if question.answer and (question.prompt, question.answer) not in seen:
            seen.add((question.prompt, question.answer))
            yield question


def without_calculator_notes(answer: str) -> str:
    """A GSM8K answer as prose."""
    return re.sub(r"<<[^>]*>>", "", answer)


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


def _all(files: Iterable[Path], problems: Path | None) -> Iterator[Question]:
    for path in files:
        yield from _file_questions(path, path.name, "file")
    if problems is not None:
        for problem in _file_questions(problems, "problems", "problems"):
            yield replace(problem, answer=without_calculator_notes(problem.answer))


def _file_questions(path: Path, source: str, kind: str) -> Iterator[Question]:
    for number, row in enumerate(read_rows(path), start=1):
        prompt, answer = _text(row, *_PROMPT_FIELDS), _text(row, *_ANSWER_FIELDS)
        if not prompt or not answer:
            raise UserError(f"{path}, record {number}: no question or no answer (fields question and answer)")
        yield Question(
            prompt, answer, _text(row, "source") or source, _text(row, "kind") or kind, _text(row, "subject") or prompt
        )


def _text(row: dict[str, Any], *names: str) -> str:
    return next((row[name].strip() for name in names if isinstance(row.get(name), str)), "")
