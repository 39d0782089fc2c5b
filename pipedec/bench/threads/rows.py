"""The rows of ``pipedec bench threads`` as objects, and which of them belong together. Knows no statistics and no pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipedec.bench.record import Row
from pipedec.threads import ThreadMetrics

SCHEMA = "pipedec.threads/1"
SEQUENTIAL = "none"  # the dialect of answers in one thread
BASELINE = "pp"

Question = tuple[str, int]


@dataclass(frozen=True)
class ThreadRow:
    """One answer. Times are emulated, in ms, without the prompt's.

    Attributes:
        question: prompt set, and the prompt's number in it.
        decoded_text: text tokens but the first token of the answer, which comes with the prompt.
        fill: rows that each group worked on, timestep after timestep.
    """

    preset: str
    stages: int
    models: str
    dialect: str
    method: str
    question: Question
    metrics: ThreadMetrics
    anomalies: dict[str, int]
    decode_ms: float
    decoded_text: int
    finish_reason: str
    timesteps: int
    hits: int
    misses: int
    fill: list[list[int]]

    @classmethod
    def of(cls, record: Row) -> ThreadRow:
        """From a line of the file."""
        return cls(
            preset=record["preset"],
            stages=record["cluster"]["stages"],
            models=record["cluster"]["model"],
            dialect=record["dialect"],
            method=record["method"],
            question=(record["prompt_set"], record["prompt_index"]),
            metrics=ThreadMetrics(**record["metrics"]),
            anomalies=record["anomalies"],
            decode_ms=record["decode_ms"],
            decoded_text=record["decoded_text"],
            finish_reason=record["finish_reason"],
            timesteps=record["timesteps"],
            hits=record["hits"],
            misses=record["misses"],
            fill=record["fill"],
        )

    @property
    def forked(self) -> bool:
        return self.metrics.threads >= 2

    @property
    def ms_per_token(self) -> float | None:
        """Per text token."""
        return self.decode_ms / self.decoded_text if self.decoded_text else None

    @property
    def busy(self) -> int:
        """Group-timesteps with rows."""
        return sum(rows > 0 for timestep in self.fill for rows in timestep)

    @property
    def places(self) -> int:
        """All group-timesteps."""
        return sum(map(len, self.fill))

    @property
    def rows(self) -> int:
        """That groups worked on, in all."""
        return sum(map(sum, self.fill))


class ThreadRows:
    """The answers of one run, by what they came from."""

    def __init__(self, records: Iterable[Row]) -> None:
        self.all = [ThreadRow.of(record) for record in records]
        self._found = {(row.stages, row.dialect, row.method, row.question): row for row in self.all}
        self.stages = sorted({row.stages for row in self.all})
        self.methods = list(dict.fromkeys(row.method for row in self.all))
        self.dialects = [name for name in dict.fromkeys(row.dialect for row in self.all) if name != SEQUENTIAL]
        self.questions = list(dict.fromkeys(row.question for row in self.all))
        self.is_sequential_known = any(row.dialect == SEQUENTIAL for row in self.all)

    @property
    def speculative(self) -> list[str]:
        """The methods beside plain pipeline parallelism."""
        return [method for method in self.methods if method != BASELINE]

    def find(self, stages: int, dialect: str, method: str, question: Question) -> ThreadRow | None:
        return self._found.get((stages, dialect, method, question))

    def answers(self, dialect: str) -> dict[Question, ThreadRow]:
        """One row for each question: what is said in a dialect depends neither on the method nor on the pipeline."""
        return {row.question: row for row in reversed(self.all) if row.dialect == dialect}

    def forked(self, dialect: str) -> list[Question]:
        """Questions whose answers in this dialect have two threads or more."""
        found = self.answers(dialect)
        return [question for question in self.questions if question in found and found[question].forked]
