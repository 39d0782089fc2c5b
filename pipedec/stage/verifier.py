"""Turns the target's own tokens into verdicts: how far the tree's path agrees with them, and whether the answer ends.

Knows the tree and the request's end conditions; knows no model and no cache. Between a verdict and its replay further rows may
arrive, so it remembers the accepted tokens that the tree has not been advanced to yet.
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
        self._ahead: list[int] = []  # accepted tokens below the tree's root
        self._finished = False
        self.verified_rows: list[int] = []  # the rows whose successors the last verdict of ``judge`` accepted, one per token

    def first(self, token: int) -> Verdict:
        """The verdict on prefill: the target's first token."""
        return self._judged([token])

    def verify(self, tree: PredictionTree, successors_N: Tensor) -> Verdict | None:
        """Walk on from the last accepted token along the target's own tokens, as deep as computed rows go (paper §3.3.4).

        Args:
            tree: the last stage's tree; all its rows are computed.
            successors_N: int64 [N], the target's token after each of them.

        Returns:
            None when the row of the last accepted token is not there (yet), or the answer has ended.
        """
        row = self._last_accepted(tree)
        if row is None or self._finished:
            return None
        successors = successors_N.tolist()
        rows: list[int] = []
        tokens: list[int] = []
        while row is not None:
            rows.append(row)
            tokens.append(successors[row])
            row = tree.child(row, tokens[-1])
        verdict = self._judged(tokens)
        self.verified_rows = rows[: len(verdict.tokens)]
        return verdict

    def replayed(self, verdict: Verdict) -> None:
        """The tree has been advanced to ``verdict``, the oldest one that it had not been advanced to."""
        del self._ahead[: len(verdict.tokens)]

    def _last_accepted(self, tree: PredictionTree) -> int | None:
        row = 0 if tree.num_rows else None
        for token in self._ahead:
            row = None if row is None else tree.child(row, token)
        return row

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
        self._ahead += tokens
        self._finished = finished is not None
        return Verdict(tuple(tokens), finished)
