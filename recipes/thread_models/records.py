"""Questions with answers, and annotated answers on disk: JSONL, one answer a line, appended to, so that a killed run continues.

Owns the format. A line has ``prompt``, ``answer``, ``dialect`` (``apar`` or ``pasta``), ``annotated``, ``rule``, ``annotator``,
``source``, ``kind`` and ``subject``. In the dialect pasta, ``annotated`` is the answer with its tags; in apar it is a list of
texts and ``{"fork": text}`` objects. An answer without structure has the rule ``none``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipedec.core.errors import UserError
from pipedec.data import read_rows
from pipedec.flags import Help
from recipes.thread_models import pasta_language
from recipes.thread_models.structure import Fork, JoinPoint, Piece, plain_text

DIALECTS = ("apar", "pasta")
UNSTRUCTURED = "none"
_HELD_OUT_ONE_IN = 40


@dataclass(frozen=True)
class Question:
    """A prompt with its answer, and where they come from."""

    prompt: str
    answer: str
    source: str  # ``library``, ``problems`` or a file's name
    kind: str  # what sort of question it is (``methods``, ``steps``, …)
    subject: str  # the topic; questions with the same subject are held out together

    @property
    def held_out(self) -> bool:
        return is_held_out(self.subject)


@dataclass(frozen=True)
class Annotated:
    """A question with its answer in pieces; one piece if it is unstructured (``rule`` is ``none``)."""

    question: Question
    pieces: tuple[Piece, ...]
    rule: str
    annotator: str

    @property
    def forks(self) -> tuple[Fork, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Fork))


def is_held_out(text: str) -> bool:
    """Whether what belongs to this text is held out: one in forty, the same in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % _HELD_OUT_ONE_IN == 0


def write_annotated(record: Annotated, dialect: str) -> str:
    """One line of the file, newline included."""
    question = record.question
    if dialect == "pasta":
        annotated: Any = pasta_language.written(record.pieces)
    elif JoinPoint() in record.pieces:
        raise ValueError("a paragraph tree has no joins")
    else:
        annotated = [{"fork": piece.text} if isinstance(piece, Fork) else piece for piece in record.pieces]
    row = {
        "prompt": question.prompt, "answer": question.answer, "dialect": dialect, "annotated": annotated,
        "rule": record.rule, "annotator": record.annotator,
        "source": question.source, "kind": question.kind, "subject": question.subject,
    }  # fmt: skip
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_annotated(path: Path, dialect: str) -> Iterator[Annotated]:
    """The records of a file.

    Raises UserError if it is missing or not JSONL, or a record has another dialect, lacks a field, or does not hold its answer.
    """
    for number, row in enumerate(read_rows(path), start=1):
        try:
            yield _record(row, dialect)
        except ValueError as wrong:
            raise UserError(f"{path}, record {number}: {wrong}") from None


def kept_json(path: Path, make: Callable[[], Any]) -> Any:
    """The JSON document in ``path``; if there is none, ``make`` makes it, and it is kept there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".partial").write_text(json.dumps(make()))
        path.with_suffix(".partial").rename(path)
    return json.loads(path.read_text())


def drop_unfinished_line(path: Path) -> None:
    """Remove the last line if a killed run left it unfinished."""
    text = path.read_bytes()
    if text and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _record(row: dict[str, Any], dialect: str) -> Annotated:
    texts = {name: row.get(name, "") for name in ("prompt", "answer", "rule", "annotator", "source", "kind", "subject")}
    for name, text in texts.items():
        if not isinstance(text, str) or (name in ("prompt", "answer") and not text.strip()):
            raise ValueError(f"the field {name!r} must be a text")
    if row.get("dialect") != dialect:
        raise ValueError(f"its dialect is {row.get('dialect')!r}, not {dialect!r}")
    pieces = _pasta_pieces(row.get("annotated")) if dialect == "pasta" else _apar_pieces(row.get("annotated"))
    if plain_text(pieces) != texts["answer"]:
        raise ValueError("without its structure, 'annotated' is not the answer")
    rule, annotator = texts.pop("rule"), texts.pop("annotator")
    texts["subject"] = texts["subject"] or texts["prompt"]
    return Annotated(Question(**texts), tuple(pieces), rule or UNSTRUCTURED, annotator)


def _pasta_pieces(annotated: object) -> list[Piece]:
    if not isinstance(annotated, str):
        raise ValueError("the field 'annotated' must be a text")
    pieces = pasta_language.parse(annotated)
    if any(isinstance(piece, Fork) and piece.tokens is None for piece in pieces):
        raise ValueError("a block without a promised length")
    return pieces


def _apar_pieces(annotated: object) -> list[Piece]:
    if not isinstance(annotated, list):
        raise ValueError("the field 'annotated' must be a list")
    pieces: list[Piece] = []
    for entry in annotated:
        text = entry.get("fork") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise ValueError("'annotated' must hold only texts and forks")
        pieces.append(Fork(text) if isinstance(entry, dict) else text)
    return pieces


_PROMPT_FIELDS = ("question", "prompt", "instruction")
_ANSWER_FIELDS = ("answer", "response", "output")


def read_questions(files: Iterable[Path], problems: Path | None = None) -> Iterator[Question]:
    """The questions of all files, each once; of word problems in the GSM8K layout, too, without their calculator notes.

    A record has a question and an answer, and may have the fields ``source``, ``kind`` and ``subject`` of ``Question``. Raises
    UserError if a file is missing, or a record has no question or no answer.
    """
    found = [_file_questions(path, path.name, "file") for path in files]
    if problems is not None:
        asked = _file_questions(problems, "problems", "problems")
        found.append(replace(problem, answer=without_calculator_notes(problem.answer)) for problem in asked)
    seen = set()
    for question in itertools.chain(*found):
        if question.answer and (question.prompt, question.answer) not in seen:
            seen.add((question.prompt, question.answer))
            yield question


def without_calculator_notes(answer: str) -> str:
    """A GSM8K answer as prose."""
    return re.sub(r"<<[^>]*>>", "", answer)


def _file_questions(path: Path, source: str, kind: str) -> Iterator[Question]:
    for number, row in enumerate(read_rows(path), start=1):
        prompt, answer = _text(row, *_PROMPT_FIELDS), _text(row, *_ANSWER_FIELDS)
        if not prompt or not answer:
            raise UserError(f"{path}, record {number}: no question or no answer (fields question and answer)")
        own_source, own_kind, subject = (_text(row, name) for name in ("source", "kind", "subject"))
        yield Question(prompt, answer, own_source or source, own_kind or kind, subject or prompt)


def _text(row: dict[str, Any], *names: str) -> str:
    return next((row[name].strip() for name in names if isinstance(row.get(name), str)), "")


Problems = typing.Annotated[Path | None, Help("Word problems in the GSM8K JSONL format (training split).", "FILE")]


def existing(problems: Path | None) -> Path | None:
    """The file of ``--problems``. Raises UserError if it is missing."""
    if problems is not None and not problems.is_file():
        raise UserError(f"--problems {problems}: there is no such file")
    return problems
