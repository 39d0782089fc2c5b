"""The dynamic prediction tree: the tokens that the target may generate next, as tensors (PipeDec §3.3).

Owns the rows of the tree and their ancestor mask, and how both change when rows enter and when a verdict arrives. Rank 0 and
every stage each keep a copy; since all replay the same steps and verdicts, the copies agree.

Shapes: N rows in the tree (in order of entry, root first), R rows that enter, F drafted rows, c children per drafted row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
        renumbered = self.new_numbers[rows]
        is_kept = renumbered >= 0
        return is_kept, renumbered[is_kept]

    @cached_property
    def new_numbers(self) -> Tensor:
        """int64 [N], the index of each row after the verdict; −1 if the row is dropped."""
        numbers = torch.full((self.num_rows,), -1, dtype=torch.int64, device=self.kept.device)
        numbers[self.kept] = torch.arange(len(self.kept), device=self.kept.device)
        return numbers


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
        self._has_log_probs = False  # else all are 0
        self._lists: list[list[int]] | None = None  # see ``_as_lists``; None = outdated
        self._allocate(block)

    def _allocate(self, capacity: int) -> None:
        self._rows = torch.zeros(4, capacity, dtype=torch.int64, device=self._device)
        self._token_ids, self._parents, self._depths, self._gaps = self._rows  # gaps: positions left empty after each row
        self._log_probs = torch.zeros(capacity, dtype=torch.float32, device=self._device)
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
        positions = self._depths[: self.num_rows] + self.root_position
        if self.gaps is None:
            return positions
        gaps = self._gaps[: self.num_rows]
        return positions + (self.tree_mask * gaps).sum(1) - gaps

    @property
    def next_positions(self) -> Tensor:
        """int64 [N], position ids of each row's children."""
        return self.positions + 1 if self.gaps is None else self.positions + 1 + self._gaps[: self.num_rows]

    @property
    def cumulative_log_probs(self) -> Tensor:
        """[N], B = M · log P (paper §3.3.3): log-probability of the path from the root to each row."""
        return self.tree_mask.to(self._log_probs.dtype) @ self.log_probs

    def reset(self, root_position: int) -> None:
        """Drop all rows; the next root will have position ``root_position``."""
        self.num_rows = 0
        self.root_position = root_position
        self._lists = None

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
        parents_listed = parents.tolist()
        _check_parents(parents_listed, first)
        self._reserve(last)
        self._token_ids[first:last] = token_ids
        self._parents[first:last] = parents
        self._set_log_probs(first, last, log_probs)
        self._extend_mask(parents, first, last, has_new_parents=max(parents_listed, default=-1) >= first)
        self._depths[first:last] = self._mask[first:last, :last].sum(1) - 1
        self.num_rows = last
        self._lists = None
        if self.gaps is not None:
            self._set_gaps(self.gaps, first, token_ids)
        return slice(first, last)

    def _set_log_probs(self, first: int, last: int, log_probs: Tensor | None) -> None:
        if log_probs is not None:
            self._log_probs[first:last] = log_probs
            self._has_log_probs = True
        elif self._has_log_probs:
            self._log_probs[first:last] = 0.0

    def _set_gaps(self, gaps: Gaps, first: int, token_ids: Tensor) -> None:
        """Set the gaps after the rows that were just added. The root's gap is set by ``set_root_position``."""
        self._gaps[max(first, 1) : self.num_rows] = 0
        for row, token in enumerate(token_ids.tolist(), start=first):
            if row > 0 and token >= 0 and gaps.may_follow(token):
                self._gaps[row] = gaps.after(self.path(row))

    def path(self, row: int) -> list[int]:
        """The tokens on the path from below the root to ``row``, inclusive."""
        token_ids, parents = self._as_lists()
        path = []
        while row > 0:
            path.append(token_ids[row])
            row = parents[row]
        return path[::-1]

    def set_root_position(self, root_position: int, gap: int) -> None:
        """Set the position id of the root, also of one still to come, and the number of positions left empty after it."""
        self.root_position = root_position
        if self.gaps is not None:
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
        token_ids, parents = self._as_lists()
        later = range(row + 1, self.num_rows)
        return next((child for child in later if parents[child] == row and token_ids[child] == token), None)

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
        kept = self._rows.new_zeros(0) if row is None else self._mask[: self.num_rows, row].nonzero()[:, 0]
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
        kept, (_, parents) = rows.tolist(), self._as_lists()
        in_order = kept[:1] == [0] and kept == sorted(set(kept)) and kept[-1] < self.num_rows
        if not in_order or not {parents[row] for row in kept[1:]} <= set(kept):
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
        self.root_position += len(advance.committed)
        if self.gaps is not None:
            self.root_position += int(self._gaps[advance.committed].sum())
        if count:
            rows = self._rows[:, kept]
            rows[1] = advance.new_numbers[rows[1]]
            rows[2] -= len(advance.committed)
            self._rows[:, :count] = rows
            self._parents[0] = -1
            self._mask[:count, :count] = self._mask[kept][:, kept]
        if self._has_log_probs:
            self._log_probs[:count] = self._log_probs[kept]
            self._log_probs[:1] = 0.0  # the new root is certain
        self.num_rows = count
        self._lists = None

    def _extend_mask(self, parents: Tensor, first: int, last: int, has_new_parents: bool) -> None:
        """Block-wise mask growth (paper §3.3.3): copy the parents' mask rows, then add the block of the new rows."""
        num_rows = last - first
        own = torch.eye(num_rows, dtype=torch.bool, device=self._device)
        if has_new_parents:  # each round doubles the distance to the ancestors collected
            farthest = torch.where(parents >= first, parents - first, torch.arange(num_rows, device=self._device))
            for _ in range((num_rows - 1).bit_length()):
                own |= own[farthest]
                farthest = farthest[farthest]
            parents = parents[farthest]
        if first:
            self._mask[:first, first:last] = False
            self._mask[first:last, :first] = self._mask[parents, :first]
        self._mask[first:last, first:last] = own

    def _as_lists(self) -> list[list[int]]:
        """Token ids and parents on the host: one transfer per state of the tree, for walks along it."""
        if self._lists is None:
            self._lists = self._rows[:2, : self.num_rows].tolist()
        return self._lists

    def _reserve(self, rows_needed: int) -> None:
        capacity = len(self._token_ids)
        if rows_needed <= capacity:
            return
        rows, log_probs, mask = self._rows, self._log_probs, self._mask
        self._allocate(-(-rows_needed // self._block) * self._block)
        self._rows[:, :capacity] = rows
        self._log_probs[:capacity] = log_probs
        self._mask[:capacity, :capacity] = mask


def _check_parents(parents: list[int], first: int) -> None:
    if any(parent >= row for row, parent in enumerate(parents, start=first)):
        raise ValueError("a row must enter after its parent")
    if any(parent < 0 for parent in parents[0 if first else 1 :]):
        raise ValueError("a tree has exactly one root, its first row")
