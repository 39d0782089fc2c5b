"""Where two answers to one question diverge, and whether rounding explains it.

Owns the bounds of a near tie. Knows logits only as the log-probabilities that an answer came with, and needs no torch.

A method computes a token among other rows than ``pp`` does, and a matrix product may round differently with another number of
rows. In 16 bits this changes a logit by units of its last place, so two tokens whose logits are nearly equal may change places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

from msgspec import structs

from pipedec.core.sampling import MAX_LOGPROBS, SamplingParams
from pipedec.messages.request import PromptRequest

# The largest difference of two logits that rounding may reverse. The best logits of chat models lie between 16 and 32, where
# the last place of bfloat16 (8 bits) is 1/8 and that of float16 (11 bits) 1/64: four of them, since each of the two is rounded,
# and so is all that they were computed from. In float32 and float64 there is no such bound: all methods give the same tokens.
TIE_BOUNDS = {"bfloat16": 4 / 8, "float16": 4 / 64}


@dataclass(frozen=True)
class Divergence:
    """The first difference between two answers.

    Attributes:
        position: index of the first output token that differs or exists in only one answer.
        expected, found: the two token ids; None if the answer had ended.
        margin: how far apart the target's logits of the two tokens are there; None if it is not known.
    """

    position: int
    expected: int | None
    found: int | None
    margin: float | None = None

    def is_near_tie(self, dtype: str) -> bool:
        """Whether rounding in ``dtype`` explains the difference."""
        return self.margin is not None and dtype in TIE_BOUNDS and self.margin <= TIE_BOUNDS[dtype]

    def __str__(self) -> str:
        margin = f"; the target's logits of the two are {self.margin:.2g} apart" if self.margin is not None else ""
        return f"output token {self.position} is {self.found}, not {self.expected}{margin}"


def is_explained(divergence: Divergence, dtype: str, sampling: SamplingParams) -> bool:
    """Whether rounding may be the cause: a near tie; of sampled tokens, which have no margin, any difference in 16 bits."""
    return divergence.is_near_tie(dtype) or (sampling.is_stochastic and dtype in TIE_BOUNDS)


class ScoredAnswer(Protocol):
    """An answer with its log-probabilities (see ``Completion``), if they were requested."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[Mapping[int, float]] | None: ...


def first_difference(expected: Sequence[int], found: Sequence[int]) -> Divergence | None:
    """The first difference, with its margin left open; None if the answers are equal."""
    for position, (wanted, token) in enumerate(zip_longest(expected, found)):
        if wanted != token:
            return Divergence(position, wanted, token)
    return None


def measured_divergence(
    ask: Callable[[PromptRequest], ScoredAnswer], request: PromptRequest, expected: Sequence[int], found: Sequence[int]
) -> Divergence | None:
    """The first difference, with the margin that ``pp`` has there; of sampled tokens, which depend on noise, without a margin.

    Args:
        ask: answers a request where the answers came from; called only if they differ.
        request: the question. Its answer by ``pp`` was ``expected``.
    """
    divergence = first_difference(expected, found)
    if divergence is None or request.sampling.is_stochastic:
        return divergence
    wanted = structs.replace(request.sampling, logprobs=MAX_LOGPROBS)
    again = ask(structs.replace(request, method="pp", options={}, sampling=wanted, trace=False))
    return replace(divergence, margin=_margin(again, expected, divergence))


def _margin(answer: ScoredAnswer, expected: Sequence[int], divergence: Divergence) -> float | None:
    """None if the answer has other tokens before that position, or one of the two is not among its most probable there."""
    position, logprobs = divergence.position, answer.logprobs or []
    if position >= len(logprobs) or list(answer.token_ids[:position]) != list(expected[:position]):
        return None
    values = [logprobs[position].get(token) for token in (divergence.expected, divergence.found) if token is not None]
    known = [value for value in values if value is not None]
    return abs(known[0] - known[1]) if len(known) == 2 else None
