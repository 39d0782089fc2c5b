"""Merging the proposals of several draft sources for rows of the tree.

Every source (``Proposer``) proposes tokens, and computes *features* of all tokens that any source proposed; the weights of the
features are learned (see ``acceptance``). Shapes: F rows of a proposal, D rows drafted so far, k tokens that one source proposes
for a row, K tokens of all sources together, w features of one source, W of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipedec.tree import Advance, PredictionTree

NO_TOKEN = -1


class Proposal(Protocol):
    """The proposal of one source for F rows."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [F, k], distinct within a row, padded with NO_TOKEN."""

    def features(self, token_ids: Tensor) -> Tensor:
        """[F, K + 1, w], features of each of ``token_ids`` (int64 [F, K]) and, last, of "none of them"."""


class Proposer(Protocol):
    """A draft source: proposes tokens that may follow rows of the tree."""

    @property
    def prior(self) -> tuple[float, ...]:
        """Initial weights of its w features."""

    def propose(self, tree: PredictionTree, rows: Tensor) -> Proposal:
        """Tokens that may follow ``rows``: int64 [F], ascending."""


def is_repeated(token_ids: Tensor) -> Tensor:
    """bool [F, k], which of ``token_ids`` (int64 [F, k]) occur earlier in the same row."""
    earlier = token_ids.new_ones(token_ids.shape[1], token_ids.shape[1]).tril(-1).bool()
    return ((token_ids[:, :, None] == token_ids[:, None]) & earlier).any(-1)


@dataclass(frozen=True)
class Choices:
    """The tokens that may follow D rows of the tree, proposed by all sources together.

    Attributes:
        rows: int64 [D], in order of drafting.
        token_ids: int64 [D, K], distinct within a row; NO_TOKEN marks unused entries.
        features: [D, K + 1, W]; the last entry of a row stands for "none of the choices".
    """

    rows: Tensor
    token_ids: Tensor
    features: Tensor

    @classmethod
    def merged(cls, rows: Tensor, proposals: Sequence[Proposal]) -> Choices:
        """The union of several proposals for the same ``rows``."""
        token_ids = torch.cat([proposal.token_ids for proposal in proposals], 1)
        token_ids = token_ids.masked_fill(is_repeated(token_ids), NO_TOKEN)
        return cls(rows, token_ids, torch.cat([proposal.features(token_ids) for proposal in proposals], -1))

    def joined(self, others: Choices) -> Choices:
        """These choices followed by ``others``."""
        return Choices(
            torch.cat((self.rows, others.rows)),
            torch.cat((self.token_ids, others.token_ids)),
            torch.cat((self.features, others.features)),
        )

    def advanced(self, advance: Advance) -> tuple[Choices, Tensor]:
        """The choices of the rows that are kept, with new row indices; and which of the D rows these are (bool [D])."""
        is_kept, rows = advance.renumber(self.rows)
        return Choices(rows, self.token_ids[is_kept], self.features[is_kept]), is_kept
