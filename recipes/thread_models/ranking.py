"""The best and the worst of several sampled answers to each prompt (PASTA §4, §6.3): samples, scores, pairs.

Owns the score, and the files that keep samples and scores, one line per prompt, so that a killed run continues. It does not
know what is learned from the pairs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import compress
from operator import itemgetter
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from rich.progress import track

from pipedec.threads import Sequence, ThreadedSequence, measure, replay
from pipedec.train.loop import check_identity
from recipes.thread_models.answers import AnswerSource, SeededPrompt
from recipes.thread_models.figures import text_of
from recipes.thread_models.judges import Comparison, Judge
from recipes.thread_models.records import drop_unfinished_line
from recipes.thread_models.rows import RowWriter

ANSWERS_AT_ONCE = 48

# The four efficiency terms of PASTA §6.3, from theoretical speed-up and theoretical parallelism.
EFFICIENCIES: dict[str, Callable[[float, float], float]] = {
    "speedup": lambda speedup, parallelism: speedup,
    "harmonic": lambda speedup, parallelism: harmonic_mean((speedup, parallelism)),
    "arithmetic": lambda speedup, parallelism: (speedup + parallelism) / 2,
    "parallelism": lambda speedup, parallelism: parallelism,
}


@dataclass(frozen=True)
class RankingTask:
    """A prompt to answer.

    Attributes:
        prompt_ids: the prompt, with the marker of the dialect.
        reference: the answer in the data.
        baseline_ids: the sequential model's answer, with its end token if it has ended.
    """

    question: str
    prompt_ids: tuple[int, ...]
    reference: str
    baseline_ids: tuple[int, ...]


@dataclass(frozen=True)
class ScoredSamples:
    """The samples of a task, in document order, with their theoretical speed-ups and parallelism, and qualities.

    Attributes:
        ended: whether each ended by itself; the quality of one that did not is 0.
    """

    task: RankingTask
    answers: list[tuple[int, ...]]
    ended: list[bool]
    speedups: list[float]
    parallelisms: list[float]
    qualities: list[float]

    def totals(self, quality_weight: float, efficiency: str) -> list[float]:
        """Score of each answer: efficiency + λ · quality (PASTA §4), with an infinite λ the quality alone."""
        if math.isinf(quality_weight):
            return self.qualities
        found = map(EFFICIENCIES[efficiency], self.speedups, self.parallelisms)
        return [efficient + quality_weight * quality for efficient, quality in zip(found, self.qualities, strict=True)]

    def pair(self, quality_weight: float, efficiency: str, unfinished_worst: bool) -> PreferencePair | None:
        """The best of those that ended, and the worst of those or of all; None if their scores do not differ."""
        totals = list(enumerate(self.totals(quality_weight, efficiency)))
        ended = [(number, total) for number, total in totals if self.ended[number]]
        if not ended:
            return None
        best, most = max(ended, key=itemgetter(1))
        worst, least = min(totals if unfinished_worst else ended, key=itemgetter(1))
        return (
            PreferencePair(self.task.prompt_ids, self.answers[best], self.answers[worst], self.ended[worst])
            if least < most
            else None
        )


@dataclass(frozen=True)
class PreferencePair:
    """The best and the worst answer to a prompt, in document order, and whether the worst ended by itself."""

    prompt_ids: tuple[int, ...]
    best: tuple[int, ...]
    worst: tuple[int, ...]
    worst_ended: bool = True


@dataclass(frozen=True)
class Reader:
    """Reads answers back into the dialect's threads, and into text."""

    writer: RowWriter
    dialect: str
    max_tokens: int

    def sequence(self, prompt_ids: tuple[int, ...], answer: tuple[int, ...]) -> Sequence:
        bound, end = self.writer.bound[self.dialect], self.writer.end_token_id
        sequence = ThreadedSequence(bound, len(prompt_ids), [end], self.max_tokens)
        replay(sequence, answer)
        return sequence

    def text(self, sequence: Sequence) -> str:
        return text_of(sequence, self.writer.decode)


def sample_answers(
    answers: AnswerSource, tasks: list[RankingTask], num_samples: int, seed: int, path: Path, at_once: int = ANSWERS_AT_ONCE
) -> list[list[tuple[int, ...]]]:
    """``num_samples`` answers to each task, each with its own seed, ``at_once`` in a batch. ``path`` keeps them."""

    def drawn(numbers: range) -> list[list[list[int]]]:
        asked = [
            SeededPrompt(tasks[number].prompt_ids, seed + number * num_samples + count)
            for number in numbers
            for count in range(num_samples)
        ]
        answered = [[token.token_id for token in sequence.document()] for sequence in answers.answer(asked)]
        return [answered[first : first + num_samples] for first in range(0, len(answered), num_samples)]

    rows = _kept(path, len(tasks), "samples", drawn, max(1, at_once // num_samples))
    return [[tuple(answer) for answer in row] for row in rows]


def score(
    tasks: list[RankingTask], samples: list[list[tuple[int, ...]]], reader: Reader, judge: Judge, path: Path
) -> list[ScoredSamples]:
    """Theoretical speed-up over the baseline, parallelism and quality by the judge of all samples; ``path`` keeps them.

    The judge is asked only about samples that ended.
    """

    def scored(number: int) -> dict[str, list[Any]]:
        task = tasks[number]
        sequences = [reader.sequence(task.prompt_ids, answer) for answer in samples[number]]
        ended = [sequence.finished == "stop" for sequence in sequences]
        comparison = Comparison(task.question, reader.writer.decode(list(task.baseline_ids)), task.reference)
        qualities = iter(judge.quality(comparison, [reader.text(sequence) for sequence in compress(sequences, ended)]))
        measured = [measure(sequence) for sequence in sequences]
        return {
            "ended": ended,
            "speedup": [round(metrics.theoretical_speedup(len(task.baseline_ids)), 5) for metrics in measured],
            "parallelism": [round(metrics.parallelism, 5) for metrics in measured],
            "quality": [round(next(qualities), 5) if is_rated else 0.0 for is_rated in ended],
        }

    rows = _kept(path, len(tasks), "scores", lambda numbers: list(map(scored, numbers)))
    return [
        ScoredSamples(task, found, row["ended"], row["speedup"], row["parallelism"], row["quality"])
        for task, found, row in zip(tasks, samples, rows, strict=True)
    ]


def digest(tasks: list[RankingTask]) -> str:
    """A short name for the tasks, equal for equal tasks."""
    return hashlib.sha256(json.dumps([asdict(task) for task in tasks]).encode()).hexdigest()[:16]


def claim(path: Path, identity: dict[str, Any]) -> None:
    """Record the identity of the run that owns the files beside ``path``. Raises UserError if another run owns them."""
    if path.exists():
        check_identity(path.parent, json.loads(path.read_text()), identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(identity, indent=2) + "\n")


def _kept(path: Path, count: int, title: str, make: Callable[[range], list[Any]], at_once: int = 1) -> list[Any]:
    """``make`` of all numbers below ``count``, ``at_once`` at a time, one line each; lines that ``path`` has are read instead.

    Lines of a part that was not kept whole are made again, so that a killed run continues with the same parts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    drop_unfinished_line(path)
    lines = path.read_text().splitlines(keepends=True)
    if len(lines) < count:
        lines = lines[: len(lines) // at_once * at_once]
        path.write_text("".join(lines))
    rows = [json.loads(line) for line in lines]
    with path.open("a") as stream:
        for first in track(range(len(rows), count, at_once), title):
            made = make(range(first, min(first + at_once, count)))
            stream.write("".join(json.dumps(row) + "\n" for row in made))
            stream.flush()
            rows += made
    return rows
