"""Which tokens may be drawn, and how their probabilities are sharpened: temperature, min-p, top-k, top-p.

Each takes logits and gives logits, −inf where a token may not be drawn. Tokens that are equally likely stay or go together, so
no result depends on how a sort breaks ties. Values that filter nothing give the logits back.

Shapes: R rows, V vocabulary, K tokens that may be left.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tempered(logits_RV: Tensor, temperature: float) -> Tensor:
    """Logits divided by a temperature above 0, the largest of a row moved to 0 so that no temperature overflows."""
    return (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature


def min_p(logits_RV: Tensor, least: float) -> Tensor:
    """Keep tokens at least ``least`` times as likely as the likeliest."""
    if least <= 0:
        return logits_RV
    probabilities_RV = logits_RV.softmax(-1)
    return _without(logits_RV, probabilities_RV < least * probabilities_RV.amax(-1, keepdim=True))


def top_k(logits_RV: Tensor, count: int) -> Tensor:
    """Keep the ``count`` likeliest tokens, and those equal to the last of them; 0 or −1 keeps all."""
    if not 0 < count < logits_RV.shape[-1]:
        return logits_RV
    return _without(logits_RV, logits_RV < logits_RV.topk(count).values[:, -1:])


def top_p(logits_RV: Tensor, mass: float, count: int = 0) -> Tensor:
    """Keep the fewest likeliest tokens that together have probability ``mass``, and those equal to the last of them.

    Args:
        count: the limit of a ``top_k`` before, if there was one: only so many tokens need to be sorted.
    """
    if mass >= 1:
        return logits_RV
    probabilities_RV = logits_RV.softmax(-1)
    vocab_size = logits_RV.shape[-1]
    sorted_RK = probabilities_RV.topk(min(count, vocab_size) if count > 0 else vocab_size).values
    before_RK = sorted_RK.cumsum(-1) - sorted_RK
    last_R1 = (before_RK < mass).sum(-1, keepdim=True) - 1
    return _without(logits_RV, probabilities_RV < sorted_RK.gather(-1, last_R1.clamp(min=0)))


def _without(logits_RV: Tensor, dropped_RV: Tensor) -> Tensor:
    return logits_RV.masked_fill(dropped_RV, -torch.inf)
