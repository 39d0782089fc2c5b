"""The dynamic prediction tree: the tokens that the target may generate next, as tensors (PipeDec §3.3).

Owns the rows of the tree and their ancestor mask, and how both change when rows enter and when a verdict arrives. Rank 0 and
every stage each keep a copy; since all replay the same steps and verdicts, the copies agree.

Shapes: N rows in the tree (in order of entry, root first), R rows that enter, F drafted rows, c children per drafted row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree.growth import Growth


@dataclass(frozen=True)
class Gaps:
    """Positions left empty after rows of a thread's tree: room for the predicted length of a child that the row opens (PASTA)."""

    sequence: ThreadSequence
    thread: int

    def may_follow(self, token: int) -> bool:
        """Whether a gap is possible after this token. If not, ``after`` is 0 for every path that ends with it."""
        return self.sequence.may_leave_gap(token)

    def after(self, path: list[int]) -> int:
        """The number of positions left empty after the last token of ``path``, the tokens below the root."""
        return self.sequence.gap(self.thread, path)


@dataclass(frozen=True)
class Advance:
    """The changes of a verdict to a tree of N rows; everything stored per row (caches, pending outputs) follows them.

    The tensors are on the host, even if the tree is not.

    Attributes:
        committed: int64, rows that move from the tree to the past, in order.
        committed_ids: int64, their token ids.
        kept: int64, rows that remain, in order: the subtree of the last accepted token, its root first.
        num_rows: N before the verdict.
        hit: whether the last accepted token was in the tree, so that its row is computed or in flight.
        joining: by decode thread that had not ended before, the rows that its past gains, each the parent of the next; None for
            an answer in one thread, or unless paths are tracked (see ``ThreadedForest``).
    """

    committed: Tensor
    committed_ids: Tensor
    kept: Tensor
    num_rows: int
    hit: bool
    joining: Mapping[int, Sequence[int]] | None = None

    def renumber(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """For ``rows``, int64 [R] on the host: which are kept, bool [R], and the new indices of those, int64."""
        numbers = torch.full((self.num_rows,), -1, dtype=torch.int64)
        numbers[self.kept] = torch.arange(len(self.kept))
        renumbered = numbers[rows]
        is_kept = renumbered >= 0
        return is_kept, renumbered[is_kept]

    @property
    def changes(self) -> RowChanges:
        """The changes as lists."""
        return RowChanges(self.committed.tolist(), self.committed_ids.tolist(), self.kept.tolist(), self.num_rows)


@dataclass(frozen=True)
class Candidates:
    """The draft model's predictions for F rows of the tree (paper's Q and Y).

    Attributes:
        rows: int64 [F], tree rows that were drafted, on the host.
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


class DraftTree(Protocol):
    """A tree as the draft model sees it. See ``PredictionTree``."""

    gaps: Gaps | None

    @property
    def num_rows(self) -> int: ...

    def tokens_of(self, rows: Sequence[int]) -> list[int]: ...

    def positions_of(self, rows: Sequence[int]) -> list[int]: ...

    def next_positions_of(self, rows: Sequence[int]) -> list[int]: ...

    def ancestors_of(self, row: int) -> list[int]: ...

    def set_root_position(self, root_position: int, gap: int) -> None: ...


@dataclass(frozen=True)
class DraftRows:
    """Rows that the draft model computes next, of the tree of ``thread`` of request ``number``.

    Attributes:
        rows: ascending, not drafted yet. Their ancestors were drafted or are among them.
        children: number of most probable next tokens to return for each row.
        growth: which rows will follow; None if the host decides when it has the candidates.
    """

    number: int
    thread: int
    tree: DraftTree
    rows: Sequence[int]
    children: int
    growth: Growth | None = None


@dataclass(frozen=True)
class RowChanges:
    """The changes of a verdict or a cut to a tree of ``num_rows`` rows, as lists. Attributes as those of ``Advance``."""

    committed: list[int]
    committed_ids: list[int]
    kept: list[int]
    num_rows: int


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
        self.gaps: Gaps | None = None
        self._root_gap = 0
        self._has_log_probs = False  # otherwise all are 0
        self._log_probs = torch.zeros(block, dtype=torch.float32, device=self._device)
        self._mask = torch.zeros(block, block, dtype=torch.bool, device=self._device)
        self.reset(0)

    def reset(self, root_position: int) -> None:
        """Drop all rows. The next root gets position ``root_position``."""
        self.num_rows = 0
        self.root_position = root_position
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._row_gaps: list[int] = []  # positions left empty after each row

    @property
    def token_ids(self) -> Tensor:
        """int64 [N] (paper's X)."""
        return torch.tensor(self._token_ids, dtype=torch.int64, device=self._device)

    @property
    def parents(self) -> Tensor:
        """int64 [N], −1 for the root."""
        return torch.tensor(self._parents, dtype=torch.int64, device=self._device)

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
        return torch.tensor(self.positions_of(range(self.num_rows)), dtype=torch.int64, device=self._device)

    @property
    def cumulative_log_probs(self) -> Tensor:
        """[N], B = M · log P (paper §3.3.3): log-probability of the path from the root to each row."""
        return self.tree_mask.to(self._log_probs.dtype) @ self.log_probs

    def plant(self, token: int) -> slice:
        """Add an accepted token as the root of the empty tree; returns its row. Raises ValueError if the tree is not empty."""
        return self.append(torch.tensor([token]), torch.tensor([-1]))

    def append(self, token_ids: Tensor, parents: Tensor, log_probs: Tensor | None = None) -> slice:
        """Add R rows after the existing ones; returns the slice of their indices.

        Args:
            token_ids: int64 [R]; on the host, or the call waits for the device. So are ``parents``.
            parents: int64 [R], index of an existing row or of an earlier row of this call (numbered from N on); −1 for the
                root of an empty tree.
            log_probs: [R], log-probability of each token given its parent; None if unused.

        Raises:
            ValueError: a second root, or a parent that does not exist.
        """
        rows = torch.stack((token_ids, parents))
        ids, above = rows.tolist()
        first, last = self.num_rows, self.num_rows + len(ids)
        if any(parent >= row for row, parent in enumerate(above, start=first)):
            raise ValueError("a row must enter after its parent")
        if any(parent < 0 for parent in above[0 if first else 1 :]):
            raise ValueError("a tree has exactly one root, its first row")
        if last > self._mask.shape[0]:
            more = -(-last // self._block) * self._block - self._mask.shape[0]
            self._log_probs, self._mask = pad(self._log_probs, (0, more)), pad(self._mask, (0, more, 0, more))
        self._token_ids += ids
        self._parents += above
        self._row_gaps += [0] * len(ids)
        for parent in above:
            self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
        if log_probs is not None:
            self._log_probs[first:last] = log_probs
            self._has_log_probs = True
        elif self._has_log_probs:
            self._log_probs[first:last] = 0.0
        self._extend_mask(rows[1].to(self._device), first, last, has_new_parents=max(above, default=-1) >= first)
        self.num_rows = last
        if self.gaps is not None:
            for row in range(first, last):
                token = self._token_ids[row]
                if row == 0:
                    self._row_gaps[0] = self._root_gap
                elif token >= 0 and self.gaps.may_follow(token):
                    self._row_gaps[row] = self.gaps.after(self.path(row))
        return slice(first, last)

    def path(self, row: int) -> list[int]:
        """The tokens on the path from below the root to ``row``, inclusive."""
        path = []
        while row > 0:
            path.append(self._token_ids[row])
            row = self._parents[row]
        return path[::-1]

    def tokens_of(self, rows: Sequence[int]) -> list[int]:
        """Token ids of ``rows``."""
        return [self._token_ids[row] for row in rows]

    def positions_of(self, rows: Sequence[int]) -> list[int]:
        """The position ids of ``rows``."""
        if self.gaps is None:
            return [self.root_position + self._depths[row] for row in rows]
        above = (sum(self._row_gaps[ancestor] for ancestor in self.ancestors_of(row)[1:]) for row in rows)
        return [self.root_position + self._depths[row] + gaps for row, gaps in zip(rows, above, strict=True)]

    def next_positions_of(self, rows: Sequence[int]) -> list[int]:
        """The position ids of the children of ``rows``."""
        return [position + 1 + self._row_gaps[row] for position, row in zip(self.positions_of(rows), rows, strict=True)]

    def ids_of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Token ids and parents of ``rows``, int64, on the host."""
        return torch.tensor(self._token_ids[rows], dtype=torch.int64), torch.tensor(self._parents[rows], dtype=torch.int64)

    def ancestors_of(self, row: int) -> list[int]:
        """``row`` itself, its parent, and so on up to the root."""
        ancestors = []
        while row >= 0:
            ancestors.append(row)
            row = self._parents[row]
        return ancestors

    def set_root_position(self, root_position: int, gap: int) -> None:
        """Set the position id of the root, or of the next one, and the number of positions left empty after it."""
        self.root_position = root_position
        self._root_gap = gap
        if self.gaps is not None and self.num_rows:
            self._row_gaps[0] = gap

    def grow(self, candidates: Candidates, width: int) -> slice:
        """Add a layer: the ``min(width, F·c)`` candidates with the most probable paths (paper §3.3.3); returns its rows.

        Candidates enter in row order (the selection mask S applied to the flattened Y), so the tree stays in BFS order.
        """
        num_children = candidates.token_ids.shape[1]
        cumulative = candidates.log_probs + self.cumulative_log_probs[candidates.rows, None]
        chosen = cumulative.flatten().topk(min(width, cumulative.numel())).indices.sort().values
        return self.append(
            candidates.token_ids.flatten()[chosen],
            candidates.rows.to(self._device)[chosen // num_children],
            candidates.log_probs.flatten()[chosen],
        )

    def child(self, row: int, token: int) -> int | None:
        """The child of ``row`` with this token id, or None."""
        for later in range(row + 1, self.num_rows):
            if self._parents[later] == row and self._token_ids[later] == token:
                return later
        return None

    def advance_to(self, tokens: Sequence[int]) -> Advance:
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
        subtree = set() if row is None else {row}
        for later in range(self.num_rows if row is None else row + 1, self.num_rows):
            if self._parents[later] in subtree:
                subtree.add(later)
        return self._keep(committed, sorted(subtree), hit=row is not None)

    def keep(self, rows: Tensor) -> Advance:
        """Drop all rows except ``rows``, int64, ascending, beginning with the root, each with its ancestors; commit nothing.

        Raises ValueError if ``rows`` do not have this form.
        """
        kept, parents = rows.tolist(), self._parents
        in_order = kept[:1] == [0] and kept == sorted(set(kept)) and kept[-1] < self.num_rows
        if not in_order or not {parents[row] for row in kept[1:]} <= set(kept):
            raise ValueError("rows to keep must be ascending, begin with the root, and include their parents")
        return self._keep([], kept, hit=True)

    def clear(self) -> Advance:
        """Drop all rows; commit nothing. The next root gets the position of the present one."""
        return self._keep([], [], hit=False)

    def _keep(self, committed: list[int], kept: list[int], hit: bool) -> Advance:
        """Commit some rows, a path from the root, and drop all others but ``kept``."""
        numbers = {row: number for number, row in enumerate(kept)}
        of_committed = torch.tensor([committed, [self._token_ids[row] for row in committed]], dtype=torch.int64)
        advance = Advance(of_committed[0], of_committed[1], torch.tensor(kept, dtype=torch.int64), self.num_rows, hit)
        self.root_position += len(committed) + sum(self._row_gaps[row] for row in committed)
        self._token_ids = [self._token_ids[row] for row in kept]
        self._parents = [numbers.get(self._parents[row], -1) for row in kept]
        self._depths = [self._depths[row] - len(committed) for row in kept]
        self._row_gaps = [self._row_gaps[row] for row in kept]
        count = self.num_rows = len(kept)
        if self._has_log_probs:
            self._log_probs[:count] = self._log_probs[advance.kept]
            self._log_probs[:1] = 0.0  # the new root is certain
        if count:
            self._mask[:count, :count] = self._mask[advance.kept][:, advance.kept]
        return advance

    def _extend_mask(self, parents: Tensor, first: int, last: int, has_new_parents: bool) -> None:
        """Block-wise mask growth (paper §3.3.3): copy the parents' mask rows, then add the block of the new rows."""
        num_rows = last - first
        own = torch.eye(num_rows, dtype=torch.bool, device=self._device)
        if has_new_parents:  # each round doubles the distance to the collected ancestors
            farthest = torch.where(parents >= first, parents - first, torch.arange(num_rows, device=self._device))
            for _ in range((num_rows - 1).bit_length()):
                own |= own[farthest]
                farthest = farthest[farthest]
            parents = parents[farthest]
        if first:
            self._mask[:first, first:last] = False
            self._mask[first:last, :first] = self._mask[parents, :first]
        self._mask[first:last, first:last] = own
