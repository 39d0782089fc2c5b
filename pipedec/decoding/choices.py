"""What several proposers say may follow rows of the tree, put together.

Every proposer names tokens, and says by *features* what it knows about each token that anybody named; how much each feature
weighs is learned (see ``acceptance``). Shapes: F rows of a proposal, D rows drafted so far, k tokens that one proposer names for
a row, K tokens that all of them name together, w features of one proposer, W of all.
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
    """One proposer's word for F rows."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [F, k], distinct in a row; NO_TOKEN fills up."""

    def features(self, token_ids: Tensor) -> Tensor:
        """[F, K + 1, w]: of each of ``token_ids`` (int64 [F, K]), and last of all tokens that are not among them."""


class Proposer(Protocol):
    """Names tokens that may follow rows of the tree."""

    @property
    def prior(self) -> tuple[float, ...]:
        """What its features weigh before anything was learned."""

    def propose(self, tree: PredictionTree, rows: Tensor) -> Proposal:
        """What may follow ``rows``: int64 [F], ascending."""


def is_repeated(token_ids: Tensor) -> Tensor:
    """bool [F, k]: which of ``token_ids`` (int64 [F, k]) stand earlier in their row, too."""
    earlier = token_ids.new_ones(token_ids.shape[1], token_ids.shape[1]).tril(-1).bool()
    return ((token_ids[:, :, None] == token_ids[:, None]) & earlier).any(-1)


@dataclass(frozen=True)
class Choices:
    """What may follow D rows of the tree, all proposers together.

    Attributes:
        rows: int64 [D], in order of drafting.
        token_ids: int64 [D, K], distinct in a row; NO_TOKEN fills up.
        features: [D, K + 1, W]; the last of a row stands for all other tokens.
    """

    rows: Tensor
    token_ids: Tensor
    features: Tensor

    @classmethod
    def merged(cls, rows: Tensor, proposals: Sequence[Proposal]) -> Choices:
        """The union of what is proposed for ``rows``."""
        token_ids = torch.cat([proposal.token_ids for proposal in proposals], 1)
        token_ids = token_ids.masked_fill(is_repeated(token_ids), NO_TOKEN)
        return cls(rows, token_ids, torch.cat([proposal.features(token_ids) for proposal in proposals], -1))

    def joined(self, others: Choices) -> Choices:
        """These, then ``others``."""
        return Choices(
            torch.cat((self.rows, others.rows)),
            torch.cat((self.token_ids, others.token_ids)),
            torch.cat((self.features, others.features)),
        )

    def advanced(self, advance: Advance) -> tuple[Choices, Tensor]:
        """Those whose row is kept, renumbered, and which of the present ones they are (bool [D])."""
        is_kept, rows = advance.renumber(self.rows)
        return Choices(rows, self.token_ids[is_kept], self.features[is_kept]), is_kept
