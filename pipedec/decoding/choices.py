"""Merging the proposals of several draft sources for rows of trees.

Every source (``Proposer``) proposes tokens, and computes *features* of all tokens that any source proposed; the weights of the
features are learned (see ``acceptance``). Shapes: F rows of a proposal, k tokens that one source proposes for a row, K tokens of
all sources together, w features of one source, W of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NO_TOKEN = -1


class Proposal(Protocol):
    """The proposal of one source for F rows."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [F, k], distinct within a row, padded with NO_TOKEN."""

    def features(self, token_ids: Tensor) -> Tensor:
        """[F, K + 1, w], features of each of ``token_ids`` (int64 [F, K]) and, last, of "none of them"."""


@dataclass(frozen=True)
class Choices:
    """The tokens that may follow F rows of trees, proposed by all sources together.

    Attributes:
        token_ids: int64 [F, K], distinct within a row; NO_TOKEN marks unused entries.
        features: [F, K + 1, W]; the last entry of a row stands for "none of the choices".
    """

    token_ids: Tensor
    features: Tensor

    @classmethod
    def merged(cls, proposals: Sequence[Proposal]) -> Choices:
        """The union of several proposals for the same rows."""
        token_ids = proposals[0].token_ids
        for proposal in proposals[1:]:
            is_known = (proposal.token_ids[:, :, None] == token_ids[:, None]).any(-1)
            token_ids = torch.cat((token_ids, proposal.token_ids.masked_fill(is_known, NO_TOKEN)), 1)
        return cls(token_ids, torch.cat([proposal.features(token_ids) for proposal in proposals], -1))


class Line(NamedTuple):
    """The choices below one row, on the host.

    Attributes:
        token_ids: best first.
        log_chances: of each, given that the row is accepted; further values mean nothing.
        choices: where they come from, with their features.
        place: of the row in ``choices``.
    """

    token_ids: list[int]
    log_chances: list[float]
    choices: Choices | None
    place: int


NO_LINE = Line([], [], None, 0)  # of a row that nothing can follow
