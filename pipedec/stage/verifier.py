"""Turns the target's own tokens into verdicts: how far the tree's path agrees with them, and whether the answer ends.

Knows the tree and the request's end conditions; knows no model and no cache.
"""

from __future__ import annotations

from torch import Tensor

from pipedec.core import SamplingParams, Verdict
from pipedec.tree import PredictionTree


class Verifier:
    """Counts an answer's tokens and knows what ends it."""

    def __init__(self, sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
        self._max_tokens = sampling.max_tokens
        self._ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
        self._num_tokens = 0

    def first(self, token: int) -> Verdict:
        """The verdict on prefill: the target's first token."""
        return self._judged([token])

    def judge(self, tree: PredictionTree, successors_N: Tensor) -> Verdict:
        """Walk from the root along the target's own tokens as deep as the computed rows allow (paper §3.3.4).

        Args:
            tree: the last stage's tree. All its rows came with this step: a verdict ends where the tree does, so it leaves
                none behind.
            successors_N: int64 [N], the target's token after each of those rows.
        """
        successors = successors_N.tolist()
        row: int | None = 0
        tokens: list[int] = []
        while row is not None:
            tokens.append(successors[row])
            row = tree.child(row, tokens[-1])
        return self._judged(tokens)

    def _judged(self, tokens: list[int]) -> Verdict:
        """Cut ``tokens`` at the first end token or at ``max_tokens``."""
        for count, token in enumerate(tokens, start=1):
            if token in self._ends:
                return self._counted(tokens[:count], "stop")
            if self._num_tokens + count == self._max_tokens:
                return self._counted(tokens[:count], "length")
        return self._counted(tokens, None)

    def _counted(self, tokens: list[int], finished: str | None) -> Verdict:
        self._num_tokens += len(tokens)
        return Verdict(tuple(tokens), finished)
