"""Temperature and filters: min-p, top-k, top-p.

Each function maps logits to logits, with −inf for excluded tokens. Equally probable tokens are kept or excluded together, so no
result depends on how a sort breaks ties. Parameters that exclude nothing return the logits unchanged.

Shapes: R rows, V vocabulary, K sorted tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

    Args:
        count: the ``top_k`` already applied to the logits, if any; then only that many tokens are sorted.
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
