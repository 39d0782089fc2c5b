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


def is_repeated(token_ids: Tensor) -> Tensor:
    """bool [F, k], which of ``token_ids`` (int64 [F, k]) occur earlier in the same row."""
    return (token_ids[:, :, None] == token_ids[:, None]).tril_(-1).any(-1)


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
        token_ids.masked_fill_(is_repeated(token_ids), NO_TOKEN)
        return cls(rows, token_ids, torch.cat([proposal.features(token_ids) for proposal in proposals], -1))


class ChoiceTable:
    """The choices below all drafted rows of a tree, with the log-chance of each. Appends in place.

    Attributes:
        num_rows: D.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.num_rows = 0
        empty = torch.zeros(0, device=device)
        self._columns: tuple[Tensor, ...] = (empty.long(), empty.long(), empty, empty)  # rows, token ids, features, log-chances

    @property
    def choices(self) -> Choices:
        return Choices(*(column[: self.num_rows] for column in self._columns[:3]))

    @property
    def log_chances(self) -> Tensor:
        """[D · K], log-chance of the path from the root to each choice; −∞ for NO_TOKEN, and once the choice has become a row."""
        return self._columns[3][: self.num_rows].view(-1)

    def add(self, choices: Choices, log_chances: Tensor) -> None:
        """Append the choices of rows that were just drafted.

        Args:
            log_chances: [F, K], from the root on.
        """
        first, last = self.num_rows, self.num_rows + len(choices.rows)
        added = choices.rows, choices.token_ids, choices.features, log_chances
        if last > len(self._columns[0]):
            self._columns = tuple(map(_grown, self._columns, added))
        for column, values in zip(self._columns, added, strict=True):
            column[first:last] = values
        self.num_rows = last

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take choices out: int64, indices into all D · K. Returns the row above each, its token id and its log-chance."""
        rows, token_ids, _, log_chances = self._columns
        values = log_chances.view(-1)[chosen]
        log_chances.view(-1)[chosen] = -torch.inf
        return rows[chosen // token_ids.shape[1]], token_ids.view(-1)[chosen], values

    def advance(self, advance: Advance, root: Tensor) -> None:
        """Keep the choices of the rows that are kept. ``root``: [1], log-chance of the new root, or [0] if no row is kept."""
        is_kept, rows = advance.renumber(self._columns[0][: self.num_rows])
        kept = torch.nonzero(is_kept)[:, 0]
        self.num_rows = len(kept)
        if not self.num_rows:
            return
        for column in self._columns[1:]:
            column[: len(kept)] = column[kept]
        self._columns[0][: len(kept)] = rows
        self._columns[3][: len(kept)] -= root


def _grown(column: Tensor, added: Tensor) -> Tensor:
    """A larger copy of ``column``, with the shape of what is ``added`` in all dimensions but the first."""
    larger = added.new_empty((2 * len(column) + len(added), *added.shape[1:]))
    larger[: len(column)] = column.view(-1, *added.shape[1:])
    return larger
