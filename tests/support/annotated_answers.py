"""A few annotated answers of each dialect, as files and as records."""

from __future__ import annotations

from pathlib import Path

from recipes.thread_models.records import Annotated, Question, write_annotated
from recipes.thread_models.structure import Fork, JoinPoint, Piece

APAR = ("Here:\n1. ", "one:", Fork(" the first"), "\n2. two:", Fork(" the second point"), "\nDone.")
PASTA = (
    "Here:\n1. one:", Fork(" the first of them", "one", 30), "\n2. two:", Fork(" the second", "two", 20), JoinPoint(), "\nDone.",
)  # fmt: skip


def record(pieces: tuple[Piece, ...], prompt: str = "List both.", subject: str = "", rule: str = "list") -> Annotated:
    answer = "".join(piece if isinstance(piece, str) else piece.text for piece in pieces if not isinstance(piece, JoinPoint))
    return Annotated(Question(prompt, answer, "test", "points", subject or prompt), pieces, rule, "rules")


def records(dialect: str, count: int = 60) -> list[Annotated]:
    """Questions about numbers, every third answered in one piece; of 60, one of each kind is held out."""
    pieces = APAR if dialect == "apar" else PASTA
    return [
        record((f"It is {number}.",), f"How long is {number}?", rule="none")
        if number % 3 == 0
        else record(pieces, f"Say {number} words.")
        for number in range(count)
    ]


def write_records(path: Path, dialect: str, count: int = 60) -> Path:
    path.write_text("".join(write_annotated(found, dialect) for found in records(dialect, count)))
    return path
