"""Log-probabilities of the target beside the tokens that were chosen, for those who ask for them.

Shapes: R rows, V vocabulary, K = 1 + the number of top tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprobs:
    """For every row its chosen token and then the likeliest ones, whether or not the chosen is among them.

    Attributes:
        token_ids: int64 [R, K].
        values: [R, K], log-softmax of the target's own logits, before penalties, bias and temperature (as vLLM's).
    """

    token_ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, chosen_R: Tensor, num_top: int) -> Logprobs:
        logprobs_RV = logits_RV.log_softmax(-1)
        top = logprobs_RV.topk(min(num_top, logits_RV.shape[-1]))
        chosen_R1 = chosen_R[:, None]
        values = torch.cat([logprobs_RV.gather(1, chosen_R1), top.values], 1)
        return cls(torch.cat([chosen_R1, top.indices], 1), values)

    def followed_by(self, other: Logprobs) -> Logprobs:
        return Logprobs(torch.cat([self.token_ids, other.token_ids]), torch.cat([self.values, other.values]))

    def of_rows(self, rows: Tensor | list[int]) -> Logprobs:
        return Logprobs(self.token_ids[rows], self.values[rows])

    def as_lists(self) -> list[list[tuple[int, float]]]:
        """Per row, (token id, log-probability) of each of its tokens."""
        pairs = zip(self.token_ids.tolist(), self.values.tolist(), strict=True)
        return [list(zip(ids, values, strict=True)) for ids, values in pairs]
