"""A Markov table that a BiTA learns for its frozen masks: low-rank maps of the target's embeddings, so that it also knows tokens
that its training text has rarely. Shapes: N rows, V vocabulary, M masks, E hidden size, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipedec.model.markov import NAMES


class MarkovHead(nn.Module):
    """At first it adds nothing. In float32."""

    def __init__(self, target: Any, num_masks: int, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self._inputs, self._outputs = (
            part.weight.detach() for part in (target.get_input_embeddings(), target.get_output_embeddings())
        )
        hidden = self._inputs.shape[1]
        self._norms = [float(part.float().norm(dim=1).mean()) for part in (self._inputs, self._outputs)]
        self.previous = nn.Parameter(torch.randn(hidden, rank, generator=generator) * hidden**-0.5)
        self.following = nn.Parameter(torch.zeros(hidden, rank))
        self.gates = nn.Parameter(torch.ones(num_masks, rank))

    def tensors(self) -> dict[str, Tensor]:
        """The table's (see ``MarkovTable``), with gradients."""
        inputs, outputs = (part.float() / norm for part, norm in zip((self._inputs, self._outputs), self._norms, strict=True))
        return dict(zip(NAMES, (inputs @ self.previous, outputs @ self.following, self.gates), strict=True))

    @torch.no_grad()
    def rounded(self) -> dict[str, Tensor]:
        """As they are stored, in bfloat16."""
        return {name: tensor.to(torch.bfloat16) for name, tensor in self.tensors().items()}


def markov_bias(tensors: dict[str, Tensor], before_N: Tensor, masks_N: Tensor) -> Tensor:
    """Added by a table with these tensors to the logits of masks after the tokens ``before_N``: [N, V]."""
    previous, following, gates = (tensors[name].float() for name in NAMES)
    return (previous[before_N] * gates[masks_N]) @ following.T
