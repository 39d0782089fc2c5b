"""A Markov table that a BiTA learns for its frozen masks: low-rank maps of the target's embeddings, so that it also knows tokens
that its training text has rarely. Shapes: N rows, V vocabulary, M masks, E hidden size, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipedec.model.markov import NAMES
from pipedec.train.mask_rows import TargetLayers
from pipedec.train.replicas import Replicas


class MarkovHead(nn.Module):
    """At first it adds nothing. In float32, the same on all stages; the first and the last have the embeddings that it maps."""

    def __init__(self, target: TargetLayers, num_masks: int, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self._embeddings, hidden = (target.inputs, target.outputs), target.config.hidden_size
        self._norms = [1.0 if part is None else float(part.float().norm(dim=1).mean()) for part in self._embeddings]
        self.previous = nn.Parameter(torch.randn(hidden, rank, generator=generator) * hidden**-0.5)
        self.following = nn.Parameter(torch.zeros(hidden, rank))
        self.gates = nn.Parameter(torch.ones(num_masks, rank))
        self._vocab_size, self._device = target.config.vocab_size, target.device

    def vectors(self, before: Tensor) -> Tensor:
        """[..., r] of tokens [...], on the first stage."""
        assert self._embeddings[0] is not None
        vectors: Tensor = self._embeddings[0][before].float() @ self.previous / self._norms[0]
        return vectors

    def bias(self, vectors_Nr: Tensor, masks_N: Tensor) -> Tensor:
        """As ``markov_bias``, on the last stage, from the vectors of the tokens before."""
        return (vectors_Nr * self.gates[masks_N]) @ self._table(1, self.following).T

    @torch.no_grad()
    def rounded(self, together: Replicas) -> dict[str, Tensor]:
        """The table's tensors as they are stored, in bfloat16."""
        previous, following = (together.total(self._table(end, part)) for end, part in enumerate((self.previous, self.following)))
        return {name: tensor.to(torch.bfloat16) for name, tensor in zip(NAMES, (previous, following, self.gates), strict=True)}

    def _table(self, end: int, part: Tensor) -> Tensor:
        """The map of all input (0) or output (1) embeddings, [V, r]; 0 on other stages."""
        embeddings = self._embeddings[end]
        if embeddings is None:
            return part.new_zeros(self._vocab_size, part.shape[1])
        table: Tensor = embeddings.float() @ part / self._norms[end]
        return table


def markov_bias(tensors: dict[str, Tensor], before_N: Tensor, masks_N: Tensor) -> Tensor:
    """Added by a table with these tensors to the logits of masks after the tokens ``before_N``: [N, V]."""
    previous, following, gates = (tensors[name].float() for name in NAMES)
    return (previous[before_N] * gates[masks_N]) @ following.T
