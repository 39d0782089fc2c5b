"""Verification: compares the tree with the target's tokens, and decides whether the answer ends.

Knows the tree and the request's end conditions; knows no model and no cache. Further rows may arrive between a verdict and its
replay, so a verifier keeps the accepted tokens to which the tree has not been advanced yet.
"""

from __future__ import annotations

from torch import Tensor

from pipedec.core import SamplingParams, Verdict
from pipedec.tree import PredictionTree


class Verifier:
    """Verifies the rows of an answer in one thread.

    Attributes:
        verified_rows: rows whose successors the last verdict of ``verify`` accepted, one per token.
    """

    def __init__(self, sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
        self._max_tokens = sampling.max_tokens
        self._end_token_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
        self._num_tokens = 0
        self._ahead: list[int] = []  # accepted tokens that are not replayed yet: a path below the tree's root
        self._finished = False
        self.verified_rows: list[int] = []

    def first(self, token: int) -> Verdict:
        """The verdict after prefill, which accepts the target's first token."""
        return self._truncate([token])

    def verify(self, tree: PredictionTree, successors_N: Tensor) -> Verdict | None:
        """Walk down from the last accepted token along the target's tokens, as deep as there are rows (PipeDec §3.3.4).

        Args:
            tree: the last stage's tree; all its rows are computed.
            successors_N: int64 [N], the target's token after each row.

        Returns:
            the verdict; None if the last accepted token has no row yet, or the answer has ended.
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
        verdict = self._truncate(tokens)
        self.verified_rows = rows[: len(verdict.tokens)]
        return verdict

    def replayed(self, verdict: Verdict) -> None:
        """To be called when the tree has been advanced by ``verdict``. Verdicts are replayed in order."""
        del self._ahead[: len(verdict.tokens)]

    def _last_accepted(self, tree: PredictionTree) -> int | None:
        row = 0 if tree.num_rows else None
        for token in self._ahead:
            row = None if row is None else tree.child(row, token)
        return row

    def _truncate(self, tokens: list[int]) -> Verdict:
        """The verdict on ``tokens``, truncated after the first end token or at ``max_tokens``."""
        for count, token in enumerate(tokens, start=1):
            if token in self._end_token_ids:
                return self._record(tokens[:count], "stop")
            if self._num_tokens + count == self._max_tokens:
                return self._record(tokens[:count], "length")
        return self._record(tokens, None)

    def _record(self, tokens: list[int], finished: str | None) -> Verdict:
        self._num_tokens += len(tokens)
        self._ahead += tokens
        self._finished = finished is not None
        return Verdict(tuple(tokens), finished)
