"""Answers of a pipeline in one process, in document order, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from golden.questions import Question, prompter
from golden.record import PRECISION
from pipedec.core.request import TokenizedRequest
from pipedec.core.verdict import Verdict
from pipedec.engine.local import LocalAnswer, LocalPipeline

DIGITS = 5
FORCED: tuple[float, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        token_ids: in document order.
        logprobs: of each token, its own log-probability and those of the two best; empty for what was said before or forced.
        threads: that were opened.
        pauses: see ``Metrics``.
    """

    token_ids: list[int]
    finished: str | None
    logprobs: list[tuple[float, ...]]
    threads: int = 1
    pauses: int = 0

    def described(self, question: Question) -> dict[str, Any]:
        """As the record keeps it."""
        rounded = [[round(value, DIGITS) for value in row] for row in self.logprobs]
        text = prompter(question.target).text(self.token_ids)
        return {"text": text, "tokens": self.token_ids, "finish": self.finished, "threads": self.threads, "logprobs": rounded}

    def differences(self, wanted: Answer) -> list[str]:
        """In words; the first token alone."""
        for place, (token, other) in enumerate(zip(self.token_ids, wanted.token_ids, strict=False)):
            if token != other:
                return [f"token {place} is {token}, not {other}"]
        if len(self.token_ids) != len(wanted.token_ids):
            return [f"{len(self.token_ids)} tokens, not {len(wanted.token_ids)}"]
        found = [] if self.finished == wanted.finished else [f"it finishes with {self.finished}, not {wanted.finished}"]
        if self.threads != wanted.threads:
            found.append(f"{self.threads} threads, not {wanted.threads}")
        for place, (row, other_row) in enumerate(zip(self.logprobs, wanted.logprobs, strict=True)):
            if row and (len(row) != len(other_row) or max(map(_apart, row, other_row)) > PRECISION):
                return [*found, f"the log-probabilities of token {place} are {row}, not {other_row}"]
        return found


def _apart(one: float, other: float) -> float:
    return abs(one - other)


def answers(
    pipeline: LocalPipeline, arrivals: Mapping[int, Iterable[TokenizedRequest]], losses: Container[int] = ()
) -> dict[int, Answer]:
    """The answers to requests that arrive at these timesteps, by number. The KV cache forgets them."""
    told: dict[int, _Told] = {}
    for number, verdict in pipeline.run_all(arrivals, losses=losses):
        told.setdefault(number, _Told(pipeline.answers[number])).take(verdict)
    pipeline.forget_prefixes()
    return {number: told[number].answer() for number in sorted(told)}


class _Told:
    """Replays the verdicts of one request, since only their order says to which token log-probabilities belong."""

    def __init__(self, local: LocalAnswer) -> None:
        self._local = local
        self._sequence = local.new_sequence()
        self._places: list[tuple[tuple[int, ...], int] | None] = []  # of decoded tokens: path of the thread, index there

    def take(self, verdict: Verdict) -> None:
        for number, tokens, *_ in verdict.accepted:
            thread = self._sequence.threads[number]
            for token in tokens:
                self._places.append(None if thread.is_cut else (thread.path, thread.num_tokens))
                if not thread.is_cut:
                    self._sequence.accept_token(number, token)

    def answer(self) -> Answer:
        local, sequence = self._local, self._sequence
        if local.finished is not None:
            sequence.end_all(local.finished)
        rows = dict(zip(self._places, map(_ranked, local.token_ids, local.logprobs), strict=True))
        document = sequence.document()
        logprobs = [rows.get((sequence.threads[token.thread].path, token.ordinal), FORCED) for token in document]
        tokens, threads = [token.token_id for token in document], len({token.thread for token in document})
        return Answer(tokens, local.finished, logprobs, threads, local.metrics.pauses)


def _ranked(token: int, row: dict[int, float]) -> tuple[float, ...]:
    """The token's own log-probability, and those of the best, in order: which tokens these are may be a near tie."""
    return (row[token], *sorted(row.values(), reverse=True)[:2])
