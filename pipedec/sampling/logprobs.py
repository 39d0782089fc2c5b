"""Log-probabilities of the chosen and the most probable tokens, for requests that set ``logprobs``.

Shapes: R rows, V vocabulary, K = 1 + the number of top tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprobs:
    """For every row, the chosen token followed by the most probable ones, which may include the chosen token again.

    Attributes:
        token_ids: int64 [R, K].
        values: [R, K], log-softmax of the target's logits before bias, penalties and temperature (as in vLLM).
    """

    token_ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, chosen_R: Tensor, num_top: int) -> Logprobs:
        """The log-probabilities of ``chosen_R`` (int64) and of the ``num_top`` most probable tokens."""
        logprobs_RV = logits_RV.log_softmax(-1)
        top = logprobs_RV.topk(min(num_top, logits_RV.shape[-1]))
        chosen_R1 = chosen_R[:, None]
        values = torch.cat([logprobs_RV.gather(1, chosen_R1), top.values], 1)
        return cls(torch.cat([chosen_R1, top.indices], 1), values)

    def followed_by(self, other: Logprobs) -> Logprobs:
        """The rows of both, those of ``other`` last."""
        return Logprobs(torch.cat([self.token_ids, other.token_ids]), torch.cat([self.values, other.values]))

    def of_rows(self, rows: Tensor | list[int]) -> Logprobs:
        return Logprobs(self.token_ids[rows], self.values[rows])

    def as_lists(self) -> list[list[tuple[int, float]]]:
        """For every row, the (token id, log-probability) of each of its K tokens."""
        pairs = zip(self.token_ids.tolist(), self.values.tolist(), strict=True)
        return [list(zip(ids, values, strict=True)) for ids, values in pairs]
