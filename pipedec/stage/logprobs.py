"""The log-probabilities of the accepted tokens, for requests that set ``logprobs``."""

from __future__ import annotations

from torch import Tensor

from pipedec.sampling import Logprobs


class RowLogprobs:
    """Log-probabilities of the target's token after each row of the forest, and of accepted tokens not yet reported.

    Args:
        num_top: number of most probable tokens, besides the chosen one; None if no log-probabilities are requested.
    """

    def __init__(self, num_top: int | None) -> None:
        self._num_top = num_top
        self._of_rows: Logprobs | None = None
        self._accepted: list[list[tuple[int, float]]] = []

    def accept_first(self, logits_1V: Tensor, token: Tensor) -> None:
        """The first token of the answer is accepted: int64 [1]."""
        if self._num_top is not None:
            self._accepted += Logprobs.of(logits_1V, token, self._num_top).as_lists()

    def add(self, logits_RV: Tensor, chosen_R: Tensor) -> None:
        """Add rows after the existing ones."""
        if self._num_top is not None:
            added = Logprobs.of(logits_RV, chosen_R, self._num_top)
            self._of_rows = added if self._of_rows is None else self._of_rows.followed_by(added)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except ``rows``: int64."""
        if self._of_rows is not None:
            self._of_rows = self._of_rows.of_rows(rows)

    def accept(self, rows: list[int]) -> None:
        """The tokens after these rows are accepted."""
        if self._of_rows is not None:
            self._accepted += self._of_rows.of_rows(rows).as_lists()

    def take(self) -> list[list[tuple[int, float]]]:
        """For each token accepted since the last call, the (id, log-probability) of itself and then of the top tokens."""
        taken, self._accepted = self._accepted, []
        return taken
