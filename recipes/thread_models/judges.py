"""Judges: the quality of an answer relative to others, by its likelihood or by a language model's preference.

Owns the meaning of the numbers. It does not know threads, nor how the numbers are used.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.learning import PaddedRows, answer_log_probs
from recipes.thread_models.rows import RowWriter, TrainingRow, causal_row

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
        prompt = list(self.writer.prompt(comparison.question, None))
        rows = [self._row(prompt, text) for text in (comparison.baseline, *answers)]
        means = [self._mean(row) for row in rows]
        return [math.exp(mean - means[0]) for mean in means[1:]]

    def rate(self, comparison: Comparison, answer: str) -> tuple[float, float]:
        """Positions do not matter to it: the likelier answer wins."""
        (quality,) = self.quality(comparison, [answer])
        return quality, (1 + (quality > 1) - (quality < 1)) / 2

    def _row(self, prompt: list[int], text: str) -> TrainingRow:
        return causal_row(prompt, [*self.writer.text(text), self.writer.end_token_id])

    def _mean(self, row: TrainingRow) -> float:
        """Mean log probability of the row's targets."""
        batch = PaddedRows.of([row], self.model.device)
        return float(answer_log_probs(self.model, batch)) / len(batch.learned)


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
