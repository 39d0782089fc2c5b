"""Penalties, temperature, and the filters min-p, top-k and top-p: from logits to logits.

Filters put −inf for excluded tokens. Equally probable tokens are kept or excluded together, so no result depends on how a sort
breaks ties. Parameters that exclude nothing return the logits unchanged. Penalties have vLLM's meanings; ``History`` owns the
token counts of the prompt and of the accepted output, and the tokens on a row's path in the tree are passed with the row.

Shapes: R rows, V vocabulary, K sorted tokens, N tree slots, T tokens, some of them repeatedly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import SamplingParams
from pipedec.device import to_device

_USUALLY_ENOUGH = 1024  # tokens that are sorted; more only if they do not have the mass
_ROUNDING = 1e-10  # more than the error of a sum of probabilities


def tempered(logits_RV: Tensor, temperature: float) -> Tensor:
    """Logits divided by ``temperature``, which is above 0. Each row's maximum is first shifted to 0 to prevent overflow."""
    return (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature


def min_p(logits_RV: Tensor, ratio: float) -> Tensor:
    """Keep tokens whose probability is at least ``ratio`` times that of the most probable token."""
    if ratio <= 0:
        return logits_RV
    probabilities_RV = logits_RV.softmax(-1)
    return _without(logits_RV, probabilities_RV < ratio * probabilities_RV.amax(-1, keepdim=True))


def top_k(logits_RV: Tensor, count: int) -> Tensor:
    """Keep the ``count`` most probable tokens and those that tie with the last of them; 0 or −1 keeps all."""
    if not 0 < count < logits_RV.shape[-1]:
        return logits_RV
    return _without(logits_RV, logits_RV < logits_RV.topk(count).values[:, -1:])


def top_p(logits_RV: Tensor, mass: float, count: int = 0) -> Tensor:
    """Keep the smallest set of most probable tokens whose total probability is at least ``mass``, and ties with the last.

    ``count``: the ``top_k`` already applied to the logits, if any; then only that many tokens are sorted.
    """
    if mass >= 1:
        return logits_RV
    probabilities_RV = logits_RV.softmax(-1)
    vocab_size = logits_RV.shape[-1]
    count = min(count, vocab_size) if count > 0 else vocab_size
    sorted_RK = probabilities_RV.topk(min(count, _USUALLY_ENOUGH)).values
    if count > _USUALLY_ENOUGH and bool((sorted_RK.sum(-1) < mass + _ROUNDING).any()):
        sorted_RK = probabilities_RV.topk(count).values
    before_RK = sorted_RK.cumsum(-1) - sorted_RK
    last_R1 = (before_RK < mass).sum(-1, keepdim=True) - 1
    return _without(logits_RV, probabilities_RV < sorted_RK.gather(-1, last_R1.clamp(min=0)))


def _without(logits_RV: Tensor, dropped_RV: Tensor) -> Tensor:
    return logits_RV.masked_fill(dropped_RV, -torch.inf)


class History:
    """The tokens before the tree: which are in the prompt, and how often each one has been committed."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._accepted_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self._seen_T = torch.zeros(0, dtype=torch.int64, device=device)  # of both, in order of arrival

    def add_prompt(self, token_ids: Tensor) -> None:
        """Add a chunk of the prompt: int64 [any number]."""
        token_ids = to_device(token_ids, self._in_prompt_V.device)
        self._in_prompt_V[token_ids] = True
        self._seen_T = torch.cat((self._seen_T, token_ids))

    def add_accepted(self, token_ids: Tensor) -> None:
        """Add committed tokens: int64 [any number]; every repetition counts."""
        token_ids = to_device(token_ids, self._accepted_V.device)
        self._accepted_V.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=self._accepted_V.dtype))
        self._seen_T = torch.cat((self._seen_T, token_ids))

    def penalised(self, logits_RV: Tensor, mask_RN: Tensor, token_ids_N: Tensor, params: SamplingParams) -> Tensor:
        """Logits after the repetition, frequency and presence penalties, float64.

        As in vLLM, the repetition penalty applies to tokens of prompt and output, the others to tokens of the output only.

        Args:
            mask_RN: bool, which tree slots are on a row's path, the row itself included.
            token_ids_N: int64, the tokens of the tree.
        """
        logits_RV, dtype = logits_RV.double(), self._accepted_V.dtype
        on_path_RN = mask_RN.to(dtype) @ (token_ids_N[:, None] == token_ids_N).to(dtype)  # how often on a row's path
        seen_RT = self._columns(logits_RV, self._seen_T, 0, params)
        of_tree_RN = self._columns(logits_RV, token_ids_N, on_path_RN, params)
        return logits_RV.index_copy(1, self._seen_T, seen_RT).index_copy_(1, token_ids_N, of_tree_RN)

    def _columns(self, logits_RV: Tensor, token_ids_T: Tensor, on_path: Tensor | int, params: SamplingParams) -> Tensor:
        """The logits of some tokens after the penalties, [R, T]."""
        counts = self._accepted_V[token_ids_T] + on_path
        in_output, repetition = counts > 0, params.repetition_penalty
        logits_RT = logits_RV.index_select(1, token_ids_T)
        repeated_RT = torch.where(logits_RT > 0, logits_RT / repetition, logits_RT * repetition)
        logits_RT = torch.where(in_output | self._in_prompt_V[token_ids_T], repeated_RT, logits_RT)
        return logits_RT - params.frequency_penalty * counts - params.presence_penalty * in_output
