"""Repetition, frequency and presence penalties, with vLLM's meanings.

Owns the token counts of the prompt and of the accepted output. The tokens on a row's path in the tree are passed with the row.

Shapes: R rows, N tree slots, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import SamplingParams


class History:
    """The tokens before the tree: which are in the prompt, and how often each one has been committed."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._accepted_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)

    def add_prompt(self, token_ids: Tensor) -> None:
        """Add a chunk of the prompt: int64 [any number]."""
        self._in_prompt_V[token_ids] = True

    def add_accepted(self, token_ids: Tensor) -> None:
        """Add committed tokens: int64 [any number]; every repetition counts."""
        self._accepted_V.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=self._accepted_V.dtype))

    def penalised(self, logits_RV: Tensor, mask_RN: Tensor, token_ids_N: Tensor, params: SamplingParams) -> Tensor:
        """Logits after the repetition, frequency and presence penalties.

        As in vLLM, the repetition penalty applies to tokens of prompt and output, the others to tokens of the output only.

        Args:
            mask_RN: bool, which tree slots are on a row's path, the row itself included.
            token_ids_N: int64, the tokens of the tree.
        """
        on_path = mask_RN.to(self._accepted_V.dtype)
        counts_RV = self._accepted_V.repeat(len(logits_RV), 1).scatter_add_(1, token_ids_N.expand_as(on_path), on_path)
        in_output_RV = counts_RV > 0
        repetition = params.repetition_penalty
        repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
        logits_RV = torch.where(in_output_RV | self._in_prompt_V, repeated_RV, logits_RV)
        return logits_RV - params.frequency_penalty * counts_RV - params.presence_penalty * in_output_RV
