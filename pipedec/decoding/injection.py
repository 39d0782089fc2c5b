"""The tree of best-first injection: all rows that were drafted or have entered the pipeline, and the choices below them.

Knows the probability that each row and choice is accepted (its *chance*), and selects the most probable ones to be drafted or to
enter. The trees of the stages hold only the rows that entered, in order of entry; this class translates between the two
numberings. It knows no draft source and no clock. Shapes: N rows, D of them drafted, K choices for each of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipedec.core import Step
from pipedec.decoding.choices import Choices, ChoiceTable
from pipedec.tree import Advance, PredictionTree

_NOT_ENTERED = -1
_MIN_LOSS = 1e-4  # the log-chance of a choice is at least this much below its row's, so no row is taken before its parent


class InjectionTree:
    """A prediction tree whose rows are drafted and enter in order of decreasing chance.

    Attributes:
        tree: the rows, with the numbering of rank 0.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.tree = PredictionTree(device)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=device)  # [N], row in the stages' trees
        self._num_entered = 0
        self._log_chances = torch.zeros(0, device=device)  # [N], log-chance of the path from the root to each row
        self._is_drafted = torch.zeros(0, dtype=torch.bool, device=device)  # [N]
        self._table = ChoiceTable(device)

    def plant(self, token: int) -> None:
        """Make an accepted token the root of the empty tree. It has yet to be drafted and to enter."""
        self.tree.plant(token)
        self._add_rows(self._log_chances.new_zeros(1))

    def undrafted(self, count: int) -> Tensor:
        """Take the ``count`` most probable rows that are not drafted, and mark them as drafted: int64, ascending."""
        rows = self._take(self._is_drafted, count)
        self._is_drafted[rows] = True
        return rows

    def add(self, choices: Choices, log_chances: Tensor) -> None:
        """Add the choices of F rows that were just drafted.

        Args:
            log_chances: [F, K], log-probability that each choice is accepted, given that its row is.
        """
        self._table.add(choices, log_chances.clamp(max=-_MIN_LOSS) + self._log_chances[choices.rows, None])

    def enter(self, count: int) -> tuple[Step | None, Tensor]:
        """Let the ``count`` most probable rows that have not entered enter.

        Returns:
            the step, with parents in the numbering of the stages, None if there are no such rows; and the chances of its rows.
        """
        rows = self._take(self._numbers != _NOT_ENTERED, count)
        if not len(rows):
            return None, self._log_chances[rows]
        first = self._num_entered
        self._num_entered += len(rows)
        self._numbers[rows] = torch.arange(first, self._num_entered, device=rows.device)
        parents = self._numbers[self.tree.parents[rows]]
        if not first:
            parents[0] = -1  # the root is the first row that enters
        return Step(self.tree.token_ids[rows], parents), self._log_chances[rows].exp()

    def advance(self, tokens: Sequence[int]) -> tuple[Advance, Choices]:
        """Accept ``tokens``; also returns the choices below the committed rows, with their numbers before the verdict."""
        advance = self.tree.advance(tokens)
        choices = self._table.of(advance.committed)
        self._follow(advance)
        return advance, choices

    def cut(self) -> Advance:
        """Drop all rows."""
        advance = self.tree.clear()
        self._follow(advance)
        return advance

    @property
    def root_has_entered(self) -> bool:
        """Whether there is a root and it has entered the pipeline."""
        return self._num_entered > 0

    def undrafted_chances(self, count: int) -> Tensor:
        """The log-chances of the rows that ``undrafted`` would return, best first."""
        return self._best(self._is_drafted, count)[0]

    def entering_chances(self, count: int) -> Tensor:
        """The log-chances of the rows that ``enter`` would take, best first."""
        return self._best(self._numbers != _NOT_ENTERED, count)[0]

    def _follow(self, advance: Advance) -> None:
        """Prune everything that is stored per row or per choice."""
        kept = advance.kept
        numbers, log_chances = self._numbers[kept], self._log_chances[kept]
        self._is_drafted = self._is_drafted[kept]
        self._log_chances = log_chances - log_chances[:1]  # relative to the new root, which is certain
        self._table.advance(advance, log_chances[:1])
        remains = self._is_drafted.new_zeros(self._num_entered + 1)  # the last entry stands for rows that have not entered
        remains[numbers] = True
        remains[-1] = False
        new_numbers = remains.cumsum(0)
        self._num_entered = int(new_numbers[-1])
        self._numbers = torch.where(numbers == _NOT_ENTERED, _NOT_ENTERED, new_numbers[numbers] - 1)

    def _best(self, is_taken: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` most probable of all choices and of the rows that are not taken (``is_taken``: bool [N]), best first.

        Returns:
            their log-chances, and their indices into the N rows followed by the D · K choices.
        """
        log_chances = torch.cat((self._log_chances.masked_fill(is_taken, -torch.inf), self._table.log_chances))
        best = log_chances.topk(min(count, len(log_chances)))
        exists = best.values > -torch.inf
        return best.values[exists], best.indices[exists]

    def _take(self, is_taken: Tensor, count: int) -> Tensor:
        """The rows selected by ``_best``, int64, ascending; selected choices become rows."""
        num_rows = self.tree.num_rows
        _, best = self._best(is_taken, count)
        is_row = best < num_rows
        rows = best[is_row].sort().values
        if len(rows) == len(best):
            return rows
        return torch.cat((rows, self._become_rows(best[~is_row] - num_rows)))

    def _become_rows(self, chosen: Tensor) -> Tensor:
        """Turn choices (int64, indices into all D · K) into rows of the tree; returns these rows."""
        parents, token_ids, log_chances = self._table.take(chosen)
        rows = self.tree.append(token_ids, parents)
        self._add_rows(log_chances)
        return torch.arange(rows.start, rows.stop, device=chosen.device)

    def _add_rows(self, log_chances: Tensor) -> None:
        count = len(log_chances)
        self._numbers = torch.cat((self._numbers, self._numbers.new_full((count,), _NOT_ENTERED)))
        self._log_chances = torch.cat((self._log_chances, log_chances))
        self._is_drafted = torch.cat((self._is_drafted, self._is_drafted.new_zeros(count)))
