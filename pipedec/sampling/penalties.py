"""Penalties and biases: how the tokens before a row, and the user, change its logits (vLLM's meanings).

Owns what is remembered of a sequence: which tokens its prompt has, how often each one was accepted. The tokens of a row's own
path in the tree come with the row.

Shapes: R rows, N tree slots, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import SamplingParams


class History:
    """The tokens before the tree: the prompt's, and those that were accepted and left the tree."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._accepted_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)

    def add_prompt(self, token_ids: Tensor) -> None:
        """Remember a chunk of the prompt: int64, any number."""
        self._in_prompt_V[token_ids] = True

    def add_accepted(self, token_ids: Tensor) -> None:
        """Remember tokens that were committed: int64, any number, repetitions counted."""
        self._accepted_V.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=self._accepted_V.dtype))

    def penalised(self, logits_RV: Tensor, mask_RN: Tensor, token_ids_N: Tensor, params: SamplingParams) -> Tensor:
        """Logits after the repetition, frequency and presence penalties.

        The first counts for tokens of prompt and output, the others for tokens of the output alone, as vLLM has it.

        Args:
            mask_RN: bool, which slots of the tree are on a row's path (itself included).
            token_ids_N: int64, the tokens of the tree.
        """
        on_path = mask_RN.to(self._accepted_V.dtype)
        counts_RV = self._accepted_V.repeat(len(logits_RV), 1).scatter_add_(1, token_ids_N.expand_as(on_path), on_path)
        is_said_RV = counts_RV > 0
        repetition = params.repetition_penalty
        repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
        logits_RV = torch.where(is_said_RV | self._in_prompt_V, repeated_RV, logits_RV)
        return logits_RV - params.frequency_penalty * counts_RV - params.presence_penalty * is_said_RV
