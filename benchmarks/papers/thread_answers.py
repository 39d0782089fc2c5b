"""Answers in decode threads, as the experiments of APAR and PASTA ask for them, and the frames of their rows."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame

from benchmarks.papers.experiment import Place, Words
from benchmarks.papers.prompts import find_prompts
from benchmarks.threads.benchmark import SCHEMA
from benchmarks.threads.summary import read_frame
from pipedec.bench.record import ROWS_FILE, read_records
from pipedec.core.errors import UserError

DRAFTED = "pipedec-bestfirst"
LIBRARY = "threads-library"  # directory of the answers to questions of the kind that the shipped thread models learned
_TOKENS = 320  # of an answer; few are cut


def prompt_flags(place: Place, sets: Sequence[str]) -> Words:
    """``--prompts`` of these sets of the data; of lists and texts about Python's library if none is named."""
    sources = find_prompts(place.data if sets else None, sets, place.out)
    return [word for source in sources for word in ("--prompts", source)]


def answer_commands(place: Place, sets: dict[str, Sequence[str]], dialects: str, samples: int = 1) -> list[Words]:
    """Answer prompts of sets, by directory, in one thread and in these dialects; and questions about the library.

    On one emulated device, or on the running cluster of ``place``. Raises UserError for one that is to be launched.
    """
    if "--launch" in place.cluster:
        raise UserError("answers in threads are measured on a cluster that is running: launch it, then give --redis and --run")
    where = place.cluster or ("--preset", "paper-14", "--stages", "1", "--no-own-work")
    methods = ("--methods", f"pp,{DRAFTED}")
    asked: list[tuple[str, Sequence[str], str, int]] = [(LIBRARY, (), "none,apar,pasta", 6)]
    asked += [(name, named, dialects, samples) for name, named in sets.items() if place.data is not None]
    return [
        ["benchmarks.threads", *where, "--dialects", spoken, *methods, *place.size_flags(count, tokens=_TOKENS),
         *prompt_flags(place, named), "--out", str(place.directory(name))]
        for name, named, spoken, count in asked
    ]  # fmt: skip


def read_answers(place: Place, *names: str) -> DataFrame:
    """The frame of the answers in these directories, as far as they are there (see ``read_frame``)."""
    paths = [place.directory(name) / ROWS_FILE for name in names]
    return read_frame(row for path in paths if path.is_file() for _, row in read_records(path, SCHEMA))


def by_prompt(frame: DataFrame, dialect: str, method: str) -> DataFrame:
    """The answers in this dialect by this method, by prompt set and index."""
    chosen = frame[(frame["dialect"] == dialect) & (frame["method"] == method)]
    return chosen.set_index(["prompt_set", "prompt_index"])


def speed(answers: DataFrame) -> float:
    """Text tokens per second after the first token."""
    return float(1000 * answers["decoded_text"].sum() / answers["decode_ms"].sum())
