"""The best and the worst of several sampled answers to each prompt (PASTA §4, §6.3): judges, samples, scores, pairs.

Owns the qualities, by likelihood or by a language model's preference, the score, and the files that keep samples and scores, one
line per prompt, so that a killed run continues. It does not know what is learned from the pairs.
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
from typing import Any, Protocol

import torch
from rich.progress import track

from pipedec.threads import Sequence, measure
from pipedec.train.run import check_identity
from recipes.thread_models.answers import AnswerSource, SeededPrompt
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.figures import text_of, theoretical_speedup
from recipes.thread_models.learning import PaddedRows, answer_log_probs
from recipes.thread_models.records import drop_unfinished_line
from recipes.thread_models.rows import RowWriter, TokenizedSample, TrainingRow, causal_row, tree_row

_TEMPLATE = Path(__file__).with_name("judge_prompt.txt")
_SMOOTHING = 0.5


@dataclass(frozen=True)
class Comparison:
    """A question with the answers to compare with: the sequential model's, and the one in the data."""

    question: str
    baseline: str
    reference: str


class Judge(Protocol):
    """Rates answers; larger is better, and 1 is as good as the answers compared with."""

    @property
    def name(self) -> str: ...

    def quality(self, comparison: Comparison, answers: list[str]) -> list[float]:
        """The quality of each answer."""

    def rate(self, comparison: Comparison, answer: str) -> tuple[float, float]:
        """The quality of an answer, and the share of comparisons with the baseline's that it wins, positions swapped; a tie is
        half a win.
        """


@dataclass(frozen=True)
class LikelihoodJudge:
    """Rates answers by their likelihood under a sequential model; needs no server.

    An answer's quality is the geometric mean of the probabilities of its plain text's tokens and of
    the end token, divided by the same mean of the baseline's own answer. Neither length nor control tokens count.
    The baseline's greedy answer is likely, so most qualities lie between 0 and 1.
    """

    model: Any
    writer: RowWriter
    name: str = "likelihood"

    @torch.no_grad()
    def quality(self, comparison: Comparison, answers: list[str]) -> list[float]:
        prompt, means = list(self.writer.prompt(comparison.question, None)), []  # of the log probabilities of tokens
        for text in (comparison.baseline, *answers):
            row = causal_row(prompt, [*self.writer.text(text), self.writer.end_token_id])
            batch = PaddedRows.of([row], self.model.device)
            means.append(float(answer_log_probs(self.model, batch)) / len(batch.learned))
        return [math.exp(mean - means[0]) for mean in means[1:]]

    def rate(self, comparison: Comparison, answer: str) -> tuple[float, float]:
        """Positions do not matter to it: the likelier answer wins."""
        (quality,) = self.quality(comparison, [answer])
        return quality, (1 + (quality > 1) - (quality < 1)) / 2


@dataclass(frozen=True)
class EndpointJudge:
    """Rates answers by a language model's preferences, as in PASTA §4.

    An answer is compared with the baseline's and with the one in the data, each in both orders; the model names the better one
    and its confidence from 0 to 1. Quality is the sum of the confidences of won comparisons divided by that of lost ones, each
    with 0.5 added, so that an answer without losses has a finite one.
    """

    endpoint: ChatEndpoint

    @property
    def name(self) -> str:
        return self.endpoint.model

    def quality(self, comparison: Comparison, answers: list[str]) -> list[float]:
        return [self.rate(comparison, answer)[0] for answer in answers]

    def rate(self, comparison: Comparison, answer: str) -> tuple[float, float]:
        """Wins count by their confidence."""
        won, lost = self._won_and_lost(comparison.question, answer, comparison.baseline)
        also_won, also_lost = self._won_and_lost(comparison.question, answer, comparison.reference)
        win_rate = won / (won + lost) if won + lost else 0.5
        return (won + also_won + _SMOOTHING) / (lost + also_lost + _SMOOTHING), win_rate

    def _won_and_lost(self, question: str, answer: str, other: str) -> tuple[float, float]:
        """The confidences of won and of lost comparisons with another answer, in both orders."""
        won = lost = 0.0
        for is_first in (True, False):
            pair = (answer, other) if is_first else (other, answer)
            preference, confidence = _preference(self.endpoint.complete(judge_prompt(question, *pair)))
            if preference in (1, 2):
                is_won = (preference == 1) == is_first
                won, lost = won + is_won * confidence, lost + (not is_won) * confidence
        return won, lost


def judge_prompt(question: str, first: str, second: str) -> str:
    """The prompt for the model."""
    comparison = {"instruction": question, "response_1": first, "response_2": second}
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("{comparison}", json.dumps(comparison, indent=2, ensure_ascii=False))


def _preference(reply: str | None) -> tuple[int, float]:
    """The number of the better answer (0 if the reply names none) and the confidence."""
    reply = reply or ""
    try:
        found = json.loads(reply[reply.find("{") : reply.rfind("}") + 1])
        confidence = float(found["confidence"])
        return int(found["preference"]), min(max(confidence, 0.0), 1.0) if math.isfinite(confidence) else 0.0
    except (ValueError, TypeError, LookupError):
        return 0, 0.0


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
    """A prompt to answer."""

    question: str
    prompt_ids: tuple[int, ...]  # the prompt, with the marker of the dialect
    reference: str  # the answer in the data
    baseline_ids: tuple[int, ...]  # the sequential model's answer, with its end token if it has ended


@dataclass(frozen=True)
class ScoredSamples:
    """The samples of a task, in document order, with their theoretical speed-ups and parallelism, and qualities."""

    task: RankingTask
    answers: list[tuple[int, ...]]
    ended: list[bool]  # whether each ended by itself; the quality of one that did not is 0
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
        if least >= most:
            return None
        return PreferencePair(self.task.prompt_ids, self.answers[best], self.answers[worst], self.ended[worst])


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
        return self.writer.sequence(TokenizedSample(self.dialect, prompt_ids, answer), self.max_tokens)

    def row(self, prompt_ids: tuple[int, ...], answer: tuple[int, ...]) -> TrainingRow:
        return tree_row(self.sequence(prompt_ids, answer), prompt_ids)

    def text(self, sequence: Sequence) -> str:
        return text_of(sequence, self.writer.decode)

    def comparison(self, task: RankingTask) -> Comparison:
        """The answers with which the judge compares those to the task."""
        return Comparison(task.question, self.writer.decode(list(task.baseline_ids)), task.reference)


def sample_answers(
    answers: AnswerSource, tasks: list[RankingTask], num_samples: int, seed: int, path: Path, at_once: int = ANSWERS_AT_ONCE
) -> list[list[tuple[int, ...]]]:
    """``num_samples`` answers to each task, each with its own seed, ``at_once`` in a batch. ``path`` keeps them."""

    def drawn(numbers: range) -> list[list[list[int]]]:
        seeds = range(numbers.start * num_samples, numbers.stop * num_samples)
        asked = [SeededPrompt(tasks[number // num_samples].prompt_ids, seed + number) for number in seeds]
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
        texts = [reader.text(sequence) for sequence in compress(sequences, ended)]
        qualities = iter(judge.quality(reader.comparison(task), texts))
        measured = [measure(sequence) for sequence in sequences]
        return {
            "ended": ended,
            "speedup": [round(theoretical_speedup(metrics, len(task.baseline_ids)), 5) for metrics in measured],
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
