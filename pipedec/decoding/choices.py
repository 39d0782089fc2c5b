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

from pipedec.tree import Advance

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
        token_ids = proposals[0].token_ids
        for proposal in proposals[1:]:
            is_known = (proposal.token_ids[:, :, None] == token_ids[:, None]).any(-1)
            token_ids = torch.cat((token_ids, proposal.token_ids.masked_fill(is_known, NO_TOKEN)), 1)
        return cls(rows, token_ids, torch.cat([proposal.features(token_ids) for proposal in proposals], -1))


class ChoiceTable:
    """The choices below all drafted rows of a tree, with the log-chance of each.

    Features are needed for few rows, and so stay where they were stored while rows come and go.
    """

    def __init__(self, device: torch.device | str) -> None:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        self._rows = empty  # int64 [D]
        self._token_ids = empty  # int64 [D, K]
        self._log_chances = empty.float()  # [D, K]
        self._slots = empty  # int64 [D], indices into ``_features``
        self._features = empty.float()  # [at least D, K + 1, W]
        self._stored = 0  # used slots

    @property
    def log_chances(self) -> Tensor:
        """[D · K], log-chance of the path from the root to each choice; −∞ for NO_TOKEN, and once the choice has become a row."""
        return self._log_chances.view(-1)

    def of(self, rows: Tensor) -> Choices:
        """The choices below those of ``rows`` (int64 [any number]) that were drafted, in order of drafting."""
        found = torch.isin(self._rows, rows).nonzero()[:, 0]
        return Choices(self._rows[found], self._token_ids[found], self._features[self._slots[found]])

    def add(self, choices: Choices, log_chances: Tensor) -> None:
        """Append the choices of rows that were just drafted.

        Args:
            log_chances: [F, K], from the root on.
        """
        count = len(choices.rows)
        if self._stored + count > len(self._features):
            self._make_room(choices.features)
        slots = torch.arange(self._stored, self._stored + count, device=choices.rows.device)
        self._features[self._stored : self._stored + count] = choices.features
        self._stored += count
        self._slots = torch.cat((self._slots, slots))
        self._rows = torch.cat((self._rows, choices.rows))
        self._token_ids = torch.cat((self._token_ids.view(-1, *choices.token_ids.shape[1:]), choices.token_ids))
        self._log_chances = torch.cat((self._log_chances.view(-1, *log_chances.shape[1:]), log_chances))

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take choices out: int64, indices into all D · K. Returns the row above each, its token id and its log-chance."""
        log_chances = self.log_chances[chosen]
        self.log_chances[chosen] = -torch.inf
        return self._rows[chosen // self._token_ids.shape[1]], self._token_ids.view(-1)[chosen], log_chances

    def advance(self, advance: Advance, root: Tensor) -> None:
        """Keep the choices of the rows that are kept. ``root``: [1], log-chance of the new root, or [0] if no row is kept."""
        is_kept, self._rows = advance.renumber(self._rows)
        kept = is_kept.nonzero()[:, 0]
        self._slots, self._token_ids, self._log_chances = (
            column.index_select(0, kept) for column in (self._slots, self._token_ids, self._log_chances)
        )
        if len(root):
            self._log_chances -= root

    def _make_room(self, added: Tensor) -> None:
        """Move the features to a larger buffer, without those of rows that were dropped, so that ``added`` fit, too."""
        count = len(self._slots)
        larger = added.new_empty((2 * (count + len(added)), *added.shape[1:]))
        larger[:count] = self._features[self._slots].view(-1, *added.shape[1:])
        self._features, self._stored = larger, count
        self._slots = torch.arange(count, device=added.device)
