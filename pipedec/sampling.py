"""How a token is chosen from the target's logits. Knows nothing of trees, requests or processes.

Shapes: R rows, V vocabulary.
"""

from torch import Tensor


def greedy(logits_RV: Tensor) -> Tensor:
    """The likeliest token of every row, int64 [R]; among equals the lowest id, on every device."""
    return logits_RV.argmax(dim=-1)
