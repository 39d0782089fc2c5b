"""Log-probabilities of tokens and of the most probable ones, for requests that set ``logprobs`` or ``prompt_logprobs``.

They are the log-softmax of the target's logits before bias, penalties and temperature (as in vLLM). Shapes: R rows that enter,
N rows present, V vocabulary, K = 1 + the number of top tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core.sampling import LOWEST_LOGPROB
from pipedec.core.stage_message import TokenLogprobs
from pipedec.device import to_device

ScoredTokens = tuple[tuple[int, float], ...]  # (id, log-probability) of a token, and then of the most probable ones


class Logprobs:
    """The log-probabilities after each row, of the chosen token and then of the ``num_top`` most probable ones, which may include
    it again. Keeps those of accepted tokens until they are taken.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._rows: tuple[Tensor, Tensor] | None = None  # token ids and values, each [N, K]
        self._accepted: list[ScoredTokens] = []

    def accept_first(self, logits_1V: Tensor, token: Tensor) -> None:
        """Accept the first token of the answer, int64 [1], which follows no row."""
        self._accepted += _scored(*_top(logits_1V, token, self._num_top))

    def add(self, logits_RV: Tensor, chosen_R: Tensor) -> None:
        """Add rows after the present ones, and the tokens chosen after them, int64 [R]."""
        token_ids, values = _top(logits_RV, chosen_R, self._num_top)
        present = (token_ids[:0], values[:0]) if self._rows is None else self._rows
        self._rows = torch.cat((present[0], token_ids)), torch.cat((present[1], values))

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except ``rows``, int64."""
        if self._rows is not None:
            rows = to_device(rows, self._rows[0].device)
            self._rows = self._rows[0][rows], self._rows[1][rows]

    def select_rows(self, rows: list[int]) -> None:
        """Accept the tokens chosen after these rows."""
        if self._rows is not None:
            self._accepted += _scored(self._rows[0][rows], self._rows[1][rows])

    def pop_rows(self) -> TokenLogprobs:
        """For each token accepted since the last call, the (id, log-probability) of itself and then of the top tokens."""
        taken, self._accepted = tuple(self._accepted), []
        return taken


class PromptLogprobs:
    """For each token of a prompt from the second one on, its log-probability and then those of the ``num_top`` most probable."""

    def __init__(self, num_top: int, length: int) -> None:
        self._num_top = num_top
        self._left = length  # tokens whose rows have yet to come
        self._last: Tensor | None = None  # [1, V], logits after the tokens so far
        self._ready: list[ScoredTokens] = []

    @property
    def is_open(self) -> bool:
        """Whether it needs the logits of the rows that come next."""
        return self._left > 0

    def add(self, logits_RV: Tensor, token_ids_R: Tensor) -> None:
        """Add the next rows, of tokens int64 [R]; those past the end of the prompt are ignored."""
        logits_RV, token_ids_R = logits_RV[: self._left], token_ids_R[: self._left]
        self._left -= len(token_ids_R)
        before_RV = logits_RV[:-1]  # the logits of the rows before these tokens
        if self._last is None:
            token_ids_R = token_ids_R[1:]
        else:
            before_RV = torch.cat((self._last, before_RV))
        if len(token_ids_R):
            self._ready += _scored(*_top(before_RV, token_ids_R, self._num_top))
        self._last = logits_RV[-1:].clone() if self._left else None

    def pop_rows(self) -> TokenLogprobs:
        """As ``Logprobs.pop_rows``, for the tokens since the last call."""
        taken, self._ready = tuple(self._ready), []
        return taken


def _top(logits_RV: Tensor, chosen_R: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities, each [R, K]."""
    logprobs_RV, chosen_R1 = logits_RV.log_softmax(-1), chosen_R[:, None]
    top = logprobs_RV.topk(min(num_top, logits_RV.shape[-1]))
    return torch.cat((chosen_R1, top.indices), 1), torch.cat((logprobs_RV.gather(1, chosen_R1), top.values), 1)


def _scored(token_ids: Tensor, values: Tensor) -> list[ScoredTokens]:
    finite = values.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
    return [tuple(zip(*pair, strict=True)) for pair in zip(token_ids.tolist(), finite.tolist(), strict=True)]
