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
from pipedec.decoding.choices import Choices
from pipedec.tree import Advance, PredictionTree

_NOT_ENTERED = -1
_MIN_LOSS = 1e-4  # the log-chance of a choice is at least this much below its row's, so no row is taken before its parent


class InjectionTree:
    """A prediction tree whose rows are drafted and enter in order of decreasing chance.

    Attributes:
        tree: the rows, with the numbering of rank 0.
        choices: proposed tokens below drafted rows; None until there are any.
    """

    def __init__(self, root_position: int, device: torch.device | str = "cpu") -> None:
        self.tree = PredictionTree(device)
        self.tree.reset(root_position)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=device)  # [N], row in the stages' trees
        self._log_chances = torch.zeros(0, device=device)  # [N], log-chance of the path from the root to each row
        self._is_drafted = torch.zeros(0, dtype=torch.bool, device=device)  # [N]
        self.choices: Choices | None = None
        self._choice_log_chances = torch.zeros(0, 0, device=device)  # [D, K], −∞ once a choice has become a row

    def plant(self, token: int) -> None:
        """Make an accepted token the root of the empty tree. It has yet to be drafted and to enter."""
        self.tree.plant(token)
        self._add_rows(self._log_chances.new_zeros(1))

    def undrafted(self, count: int) -> Tensor:
        """Take the ``count`` most probable rows that are not drafted, and mark them as drafted: int64, ascending."""
        rows = self._take(~self._is_drafted, count)
        self._is_drafted[rows] = True
        return rows

    def add(self, choices: Choices, log_chances: Tensor) -> None:
        """Add the choices of F rows that were just drafted.

        Args:
            log_chances: [F, K], log-probability that each choice is accepted, given that its row is.
        """
        below = log_chances.clamp(max=-_MIN_LOSS) + self._log_chances[choices.rows, None]
        is_first = self.choices is None or not len(self.choices.rows)
        self.choices = choices if is_first or self.choices is None else self.choices.joined(choices)
        self._choice_log_chances = torch.cat((self._choice_log_chances.view(-1, below.shape[1]), below))

    def enter(self, count: int) -> tuple[Step | None, Tensor]:
        """Let the ``count`` most probable rows that have not entered enter.

        Returns:
            the step, with parents in the numbering of the stages, None if there are no such rows; and the chances of its rows.
        """
        rows = self._take(self._numbers == _NOT_ENTERED, count)
        if not len(rows):
            return None, self._log_chances[rows]
        first = int((self._numbers != _NOT_ENTERED).sum())
        self._numbers[rows] = torch.arange(first, first + len(rows), device=rows.device)
        parents = self.tree.parents[rows]
        numbers = torch.where(parents < 0, parents, self._numbers[parents.clamp(min=0)])
        return Step(self.tree.token_ids[rows], numbers), self._log_chances[rows].exp()

    def advance(self, tokens: Sequence[int]) -> tuple[Advance, bool]:
        """Accept ``tokens``; also returns whether the last one has entered the pipeline."""
        advance = self.tree.advance(tokens)
        self._follow(advance)
        return advance, self.root_has_entered

    def cut(self) -> Advance:
        """Drop all rows."""
        advance = self.tree.clear()
        self._follow(advance)
        return advance

    @property
    def root_has_entered(self) -> bool:
        """Whether there is a root and it has entered the pipeline."""
        return bool((self._numbers[:1] != _NOT_ENTERED).any())

    def undrafted_chances(self, count: int) -> Tensor:
        """The log-chances of the rows that ``undrafted`` would return, best first."""
        return self._best(~self._is_drafted, count)[0]

    def entering_chances(self, count: int) -> Tensor:
        """The log-chances of the rows that ``enter`` would take, best first."""
        return self._best(self._numbers == _NOT_ENTERED, count)[0]

    def _follow(self, advance: Advance) -> None:
        """Prune everything that is stored per row or per choice."""
        kept = advance.kept
        numbers, self._log_chances, self._is_drafted = self._numbers[kept], self._log_chances[kept], self._is_drafted[kept]
        has_entered = numbers != _NOT_ENTERED
        numbers[has_entered] = numbers[has_entered].argsort().argsort()
        self._numbers = numbers
        root = self._log_chances[:1].clone()
        self._log_chances = self._log_chances - root  # relative to the new root, which is certain
        if self.choices is not None:
            self.choices, is_kept = self.choices.advanced(advance)
            remaining = self._choice_log_chances[is_kept]
            self._choice_log_chances = remaining - root if len(remaining) else remaining

    def _best(self, is_eligible: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The ``count`` most probable of the eligible rows and of all choices, best first.

        Args:
            is_eligible: bool [N].

        Returns:
            their log-chances; their indices into the eligible rows followed by the D · K choices; and int64, the eligible rows.
        """
        rows = torch.nonzero(is_eligible)[:, 0]
        log_chances = torch.cat((self._log_chances[rows], self._choice_log_chances.flatten()))
        best = log_chances.topk(min(count, len(log_chances)))
        exists = best.values > -torch.inf
        return best.values[exists], best.indices[exists], rows

    def _take(self, is_eligible: Tensor, count: int) -> Tensor:
        """The rows selected by ``_best``, int64, ascending; selected choices become rows."""
        _, taken, rows = self._best(is_eligible, count)
        is_choice = taken >= len(rows)
        new_rows = self._become_rows(taken[is_choice] - len(rows))
        return torch.cat((rows[taken[~is_choice]], new_rows)).sort().values

    def _become_rows(self, chosen: Tensor) -> Tensor:
        """Turn choices (int64, indices into all D · K) into rows of the tree; returns these rows."""
        if self.choices is None or not len(chosen):
            return chosen
        parents = self.choices.rows[chosen // self.choices.token_ids.shape[1]]
        rows = self.tree.append(self.choices.token_ids.flatten()[chosen], parents)
        log_chances = self._choice_log_chances.view(-1)
        self._add_rows(log_chances[chosen])
        log_chances[chosen] = -torch.inf
        return torch.arange(rows.start, rows.stop, device=chosen.device)

    def _add_rows(self, log_chances: Tensor) -> None:
        count = len(log_chances)
        self._numbers = torch.cat((self._numbers, self._numbers.new_full((count,), _NOT_ENTERED)))
        self._log_chances = torch.cat((self._log_chances, log_chances))
        self._is_drafted = torch.cat((self._is_drafted, self._is_drafted.new_zeros(count)))
