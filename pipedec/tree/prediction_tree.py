"""The dynamic prediction tree: the tokens that the target may generate next, as tensors (PipeDec §3.3).

Owns the rows of the tree and their ancestor mask, and how both change when rows enter and when a verdict arrives. Rank 0 and
every stage each keep a copy; since all replay the same steps and verdicts, the copies agree.

Shapes: N rows in the tree (in order of entry, root first), R rows that enter, F drafted rows, c children per drafted row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advance:
    """How a verdict changes a tree of N rows; whatever is stored per row (caches, pending outputs) follows it.

    Attributes:
        committed: int64, rows that move from the tree to the past, in order.
        committed_ids: int64, their token ids.
        kept: int64, rows that remain, in order: the subtree of the last accepted token, its root first.
        num_rows: N before the verdict.
        hit: whether the last accepted token was in the tree, so that its row is computed or in flight.
    """

    committed: Tensor
    committed_ids: Tensor
    kept: Tensor
    num_rows: int
    hit: bool

    def renumber(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Translate row indices from before the verdict to after it.

        Args:
            rows: int64 [R], indices before the verdict.

        Returns:
            bool [R], which of ``rows`` are kept; and int64, the new indices of those.
        """
        new_numbers = torch.full((self.num_rows,), -1, dtype=torch.int64, device=rows.device)
        new_numbers[self.kept] = torch.arange(len(self.kept), device=rows.device)
        renumbered = new_numbers[rows]
        is_kept = renumbered >= 0
        return is_kept, renumbered[is_kept]


@dataclass(frozen=True)
class Candidates:
    """The draft model's predictions for F rows of the tree (paper's Q and Y).

    Attributes:
        rows: int64 [F], tree rows that were drafted.
        token_ids: int64 [F, c], the c most probable next tokens of each row.
        log_probs: [F, c], their log-probabilities.
    """

    rows: Tensor
    token_ids: Tensor
    log_probs: Tensor

    def advanced(self, advance: Advance) -> Candidates:
        """The candidates of the rows that are kept, with new row indices (paper §3.4.3: M_h prunes the draft's output)."""
        is_kept, rows = advance.renumber(self.rows)
        return Candidates(rows, self.token_ids[is_kept], self.log_probs[is_kept])


RowsToDraft = tuple[int, "PredictionTree", Tensor]  # thread number, its tree, int64 [F] rows of the tree, ascending


class Gaps(Protocol):
    """Positions left empty after a row: room for the predicted length of a decode thread that the row's token opens."""

    def may_follow(self, token: int) -> bool:
        """Whether a gap is possible after this token. False means ``after`` is 0 for every path that ends with it."""

    def after(self, path: list[int]) -> int:
        """The number of positions left empty after the last token of ``path``, the tokens below the root."""


class PredictionTree:
    """Token ids X, parents, probabilities P and ancestor mask M of the rows in flight, in order of entry.

    A row's position id is ``root_position`` plus its depth plus the gaps after its ancestors, so siblings share a position.

    Args:
        block: number of rows by which the storage grows.

    Attributes:
        root_position: position id of the root.
        gaps: positions left empty after rows; None if there are none.
        num_rows: N.
    """

    def __init__(self, device: torch.device | str = "cpu", block: int = 256) -> None:
        self._device = torch.device(device)
        self._block = block
        self.root_position = 0
        self.gaps: Gaps | None = None
        self.num_rows = 0
        self._allocate(block)

    def _allocate(self, capacity: int) -> None:
        self._token_ids = torch.zeros(capacity, dtype=torch.int64, device=self._device)
        self._parents = torch.zeros(capacity, dtype=torch.int64, device=self._device)
        self._log_probs = torch.zeros(capacity, dtype=torch.float32, device=self._device)
        self._gaps = torch.zeros(capacity, dtype=torch.int64, device=self._device)  # positions left empty after each row
        self._mask = torch.zeros(capacity, capacity, dtype=torch.bool, device=self._device)

    @property
    def token_ids(self) -> Tensor:
        """int64 [N] (paper's X)."""
        return self._token_ids[: self.num_rows]

    @property
    def parents(self) -> Tensor:
        """int64 [N], −1 for the root."""
        return self._parents[: self.num_rows]

    @property
    def log_probs(self) -> Tensor:
        """[N], log-probability of each row's token given its parent (log of the paper's P), 0 for the root."""
        return self._log_probs[: self.num_rows]

    @property
    def tree_mask(self) -> Tensor:
        """bool [N, N], ``mask[i, j]``: row j is row i or an ancestor of it (paper's M)."""
        return self._mask[: self.num_rows, : self.num_rows]

    @property
    def positions(self) -> Tensor:
        """int64 [N], position ids."""
        positions = self.root_position + self.tree_mask.sum(1) - 1
        if self.gaps is None:
            return positions
        gaps = self._gaps[: self.num_rows]
        return positions + (self.tree_mask * gaps).sum(1) - gaps

    @property
    def cumulative_log_probs(self) -> Tensor:
        """[N], B = M · log P (paper §3.3.3): log-probability of the path from the root to each row."""
        return self.tree_mask.to(self._log_probs.dtype) @ self.log_probs

    def reset(self, root_position: int) -> None:
        """Drop all rows; the next root will have position ``root_position``."""
        self.num_rows = 0
        self.root_position = root_position

    def plant(self, token: int) -> slice:
        """Add an accepted token as the root of the empty tree; returns its row.

        Raises:
            ValueError: the tree is not empty.
        """
        return self.append(self._token_ids.new_tensor([token]), self._parents.new_tensor([-1]))

    def append(self, token_ids: Tensor, parents: Tensor, log_probs: Tensor | None = None) -> slice:
        """Add R rows after the existing ones; returns the slice of their indices.

        Args:
            token_ids: int64 [R].
            parents: int64 [R], index of an existing row or of an earlier row of this call (numbered from N on); −1 for the
                root of an empty tree.
            log_probs: [R], log-probability of each token given its parent; None if unused.

        Raises:
            ValueError: a second root, or a parent that does not exist.
        """
        first, last = self.num_rows, self.num_rows + len(token_ids)
        self._check_parents(parents, first)
        self._reserve(last)
        self._token_ids[first:last] = token_ids
        self._parents[first:last] = parents
        self._log_probs[first:last] = 0.0 if log_probs is None else log_probs
        self._extend_mask(parents, first, last)
        self.num_rows = last
        if self.gaps is not None:
            self._set_gaps(self.gaps, first, token_ids)
        return slice(first, last)

    def _set_gaps(self, gaps: Gaps, first: int, token_ids: Tensor) -> None:
        """Set the gaps after the rows that were just added. The root's gap is set by ``set_root_position``."""
        self._gaps[max(first, 1) : self.num_rows] = 0
        for row, token in enumerate(token_ids.tolist(), start=first):
            if row > 0 and token >= 0 and gaps.may_follow(token):
                self._gaps[row] = gaps.after(self.path(row))

    def path(self, row: int) -> list[int]:
        """The tokens on the path from below the root to ``row``, inclusive."""
        rows = torch.nonzero(self._mask[row, : row + 1])[1:, 0]
        return self._token_ids[rows].tolist()

    def set_root_position(self, root_position: int, gap: int) -> None:
        """Set the position id of the root, also of one still to come, and the number of positions left empty after it."""
        self.root_position = root_position
        self._gaps[0] = gap

    def grow(self, candidates: Candidates, width: int) -> slice:
        """Add a layer: the ``min(width, F·c)`` candidates with the most probable paths (paper §3.3.3); returns its rows.

        Candidates enter in row order (the selection mask S applied to the flattened Y), so the tree stays in BFS order.
        """
        num_children = candidates.token_ids.shape[1]
        cumulative = candidates.log_probs + self.cumulative_log_probs[candidates.rows, None]
        chosen = cumulative.flatten().topk(min(width, cumulative.numel())).indices.sort().values
        return self.append(
            candidates.token_ids.flatten()[chosen],
            candidates.rows[chosen // num_children],
            candidates.log_probs.flatten()[chosen],
        )

    def most_probable(self, count: int) -> Tensor:
        """The root and the ``count`` rows with the most probable paths below it: int64, ascending, each with its ancestors.

        Of two equally probable rows the earlier is taken. Rounding never ranks a row above its parent.
        """
        bounded = torch.where(self.tree_mask, self.cumulative_log_probs, torch.inf).amin(1)
        return bounded.sort(descending=True, stable=True).indices[: count + 1].sort().values

    def child(self, row: int, token: int) -> int | None:
        """The child of ``row`` with this token id, or None."""
        found = torch.nonzero((self.parents == row) & (self.token_ids == token))
        return int(found[0, 0]) if len(found) else None

    def advance(self, tokens: Sequence[int]) -> Advance:
        """Accept ``tokens``: commit the path before the last of them, keep the last one's subtree, drop all other rows.

        The root and every accepted row but the last are committed. The last accepted token is the new root: if it is in the
        tree (a hit), its subtree is kept (the mask column of the hit, paper §3.3.4); otherwise (a miss) the tree is empty
        until the token enters. An empty tree (after prefill) commits nothing.

        Raises:
            ValueError: a token other than the last is not in the tree, so the verdict belongs to another tree.
        """
        committed: list[int] = []
        row: int | None = 0 if self.num_rows else None
        for index, token in enumerate(tokens):
            if row is None and (index > 0 or self.num_rows):
                raise ValueError(f"verdict {list(tokens)} does not follow the tree: token {index - 1} is not in it")
            if row is not None:
                committed.append(row)
                row = self.child(row, token)
        kept = self._mask.new_zeros(0, dtype=torch.int64) if row is None else torch.nonzero(self.tree_mask[:, row])[:, 0]
        committed_rows = torch.tensor(committed, dtype=torch.int64, device=self._device)
        advance = Advance(committed_rows, self._token_ids[committed_rows], kept, self.num_rows, hit=row is not None)
        self._keep(advance)
        return advance

    def keep(self, rows: Tensor) -> Advance:
        """Drop all rows except ``rows``; commit nothing.

        Args:
            rows: int64, ascending, beginning with the root, each row with its ancestors.

        Raises:
            ValueError: ``rows`` are not so.
        """
        in_order = bool((rows.diff() > 0).all()) and rows[:1].tolist() == [0] and int(rows[-1]) < self.num_rows
        if not in_order or not bool(torch.isin(self.parents[rows[1:]], rows).all()):
            raise ValueError("rows to keep must be ascending, begin with the root, and include their parents")
        no_rows = rows.new_zeros(0)
        advance = Advance(no_rows, no_rows, rows, self.num_rows, hit=True)
        self._keep(advance)
        return advance

    def clear(self) -> Advance:
        """Drop all rows; commit nothing. The next root gets the position of the present one."""
        no_rows = self._parents.new_zeros(0)
        advance = Advance(no_rows, no_rows, no_rows, self.num_rows, hit=False)
        self._keep(advance)
        return advance

    def _keep(self, advance: Advance) -> None:
        kept, count = advance.kept, len(advance.kept)
        _, parents = advance.renumber(self._parents[kept[1:]])
        self._parents[1:count] = parents
        self._parents[:1] = -1
        self.root_position += len(advance.committed)
        if self.gaps is not None:
            self.root_position += int(self._gaps[advance.committed].sum())
        for storage in (self._token_ids, self._log_probs, self._gaps):
            storage[:count] = storage[kept]
        self._log_probs[:1] = 0.0  # the new root is certain
        self._mask[:count, :count] = self._mask[kept][:, kept]
        self.num_rows = count

    def _check_parents(self, parents: Tensor, first: int) -> None:
        own = torch.arange(first, first + len(parents), device=self._device)
        is_root = parents < 0
        if bool((parents >= own).any()):
            raise ValueError("a row must enter after its parent")
        if bool(is_root[1:].any()) or (len(parents) and bool(is_root[0]) != (first == 0)):
            raise ValueError("a tree has exactly one root, its first row")

    def _extend_mask(self, parents: Tensor, first: int, last: int) -> None:
        """Block-wise mask growth (paper §3.3.3): copy the parents' mask rows, then add the block of the new rows."""
        num_rows = last - first
        own = torch.eye(num_rows, dtype=torch.bool, device=self._device)
        inside = parents >= first
        if bool(inside.any()):  # some parents are new rows, too: each round doubles the distance to the ancestors collected
            farthest = torch.where(inside, parents - first, torch.arange(num_rows, device=self._device))
            for _ in range((num_rows - 1).bit_length()):
                own |= own[farthest]
                farthest = farthest[farthest]
            parents = parents[farthest]
        self._mask[:first, first:last] = False
        self._mask[first:last, :first] = self._mask[parents.clamp(min=0), :first] & (parents >= 0)[:, None]
        self._mask[first:last, first:last] = own

    def _reserve(self, rows: int) -> None:
        capacity = len(self._token_ids)
        if rows <= capacity:
            return
        old = self._token_ids, self._parents, self._log_probs, self._gaps, self._mask
        self._allocate(-(-rows // self._block) * self._block)
        for new, previous in zip((self._token_ids, self._parents, self._log_probs, self._gaps), old[:4], strict=True):
            new[:capacity] = previous
        self._mask[:capacity, :capacity] = old[4]
