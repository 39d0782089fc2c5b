"""The tree of best-first injection: every row that was drafted or has entered the pipeline, and the choices below them.

Knows how likely each row and choice is to be accepted, given what is accepted already, and hands out the likeliest of those that
are not drafted, or have not entered. The stages know only the rows that entered, in the order in which they did; this class
translates. It knows no proposer and no clock. Shapes: N rows, D of them drafted, K choices for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipedec.core import Step
from pipedec.decoding.choices import Choices
from pipedec.tree import Advance, PredictionTree

_NOT_ENTERED = -1
_LEAST_DOUBT = 1e-4  # a choice is always a little less likely than its row, so that no row is taken before its parent


class InjectionTree:
    """A prediction tree whose rows are drafted, and enter, in the order of their chances."""

    def __init__(self, root_position: int, device: torch.device | str = "cpu") -> None:
        self.tree = PredictionTree(device)
        self.tree.reset(root_position)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=device)  # [N], of each row in the stages' trees
        self._log_chances = torch.zeros(0, device=device)  # [N], of the path from the root to each row
        self._is_drafted = torch.zeros(0, dtype=torch.bool, device=device)  # [N]
        self.choices: Choices | None = None
        self._choice_log_chances = torch.zeros(0, 0, device=device)  # [D, K], −∞ once a choice has become a row

    def plant(self, token: int) -> None:
        """An accepted token that is not in the tree becomes its root, which has yet to be drafted and to enter."""
        self.tree.plant(token)
        self._add_rows(self._log_chances.new_zeros(1))

    def undrafted(self, count: int) -> Tensor:
        """The likeliest ``count`` rows that were never drafted, now counted as drafted: int64, ascending."""
        rows = self._take(~self._is_drafted, count)
        self._is_drafted[rows] = True
        return rows

    def add(self, choices: Choices, log_chances: Tensor) -> None:
        """What may follow rows that were just drafted.

        Args:
            log_chances: [F, K], log of the chance of each choice, given its row.
        """
        below = log_chances.clamp(max=-_LEAST_DOUBT) + self._log_chances[choices.rows, None]
        self.choices = choices if self.choices is None else self.choices.joined(choices)
        self._choice_log_chances = torch.cat((self._choice_log_chances.view(-1, below.shape[1]), below))

    def enter(self, count: int) -> tuple[Step | None, Tensor]:
        """The likeliest ``count`` rows that have not entered, as the stages number them, and their chances in no order."""
        rows = self._take(self._numbers == _NOT_ENTERED, count)
        if not len(rows):
            return None, self._log_chances[rows]
        first = int((self._numbers != _NOT_ENTERED).sum())
        self._numbers[rows] = torch.arange(first, first + len(rows), device=rows.device)
        parents = self.tree.parents[rows]
        numbers = torch.where(parents < 0, parents, self._numbers[parents.clamp(min=0)])
        return Step(self.tree.token_ids[rows], numbers), self._log_chances[rows].exp()

    def advance(self, tokens: Sequence[int]) -> tuple[Advance, bool]:
        """Accept ``tokens``; whether the row of the last one is in the pipeline, too."""
        advance = self.tree.advance(tokens)
        self._follow(advance)
        return advance, self.root_has_entered

    def cut(self) -> Advance:
        """Forget all rows."""
        advance = self.tree.clear()
        self._follow(advance)
        return advance

    @property
    def root_has_entered(self) -> bool:
        """Whether there is a root, and it is in the pipeline."""
        return bool((self._numbers[:1] != _NOT_ENTERED).any())

    def undrafted_chances(self, count: int) -> Tensor:
        """The log-chances of the rows that ``undrafted`` would name, the best first."""
        return self._best(~self._is_drafted, count)[0]

    def entering_chances(self, count: int) -> Tensor:
        """The log-chances of the rows that ``enter`` would let in, the best first."""
        return self._best(self._numbers == _NOT_ENTERED, count)[0]

    def _follow(self, advance: Advance) -> None:
        """Prune what is kept beside the tree."""
        kept = advance.kept
        numbers, self._log_chances, self._is_drafted = self._numbers[kept], self._log_chances[kept], self._is_drafted[kept]
        has_entered = numbers != _NOT_ENTERED
        numbers[has_entered] = numbers[has_entered].argsort().argsort()
        self._numbers = numbers
        root = self._log_chances[:1].clone()
        self._log_chances = self._log_chances - root  # given the root
        if self.choices is not None:
            self.choices, is_kept = self.choices.advanced(advance)
            remaining = self._choice_log_chances[is_kept]
            self._choice_log_chances = remaining - root if len(remaining) else remaining

    def _best(self, is_wanted: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The best of the rows ``is_wanted`` and of the choices: log-chances, places among both, and those rows."""
        rows = torch.nonzero(is_wanted)[:, 0]
        merit = torch.cat((self._log_chances[rows], self._choice_log_chances.flatten()))
        best = merit.topk(min(count, len(merit)))
        is_one = best.values > -torch.inf
        return best.values[is_one], best.indices[is_one], rows

    def _take(self, is_wanted: Tensor, count: int) -> Tensor:
        """The likeliest of the rows ``is_wanted`` and of the choices, which become rows by it: int64, ascending."""
        _, taken, rows = self._best(is_wanted, count)
        is_choice = taken >= len(rows)
        new_rows = self._become_rows(taken[is_choice] - len(rows))
        return torch.cat((rows[taken[~is_choice]], new_rows)).sort().values

    def _become_rows(self, chosen: Tensor) -> Tensor:
        """Turn choices (int64, of all D · K) into rows of the tree."""
        if self.choices is None or not len(chosen):
            return chosen
        parents = self.choices.rows[chosen // self.choices.token_ids.shape[1]]
        where = self.tree.append(self.choices.token_ids.flatten()[chosen], parents)
        chances = self._choice_log_chances.view(-1)
        self._add_rows(chances[chosen])
        chances[chosen] = -torch.inf
        return torch.arange(where.start, where.stop, device=chosen.device)

    def _add_rows(self, log_chances: Tensor) -> None:
        count = len(log_chances)
        self._numbers = torch.cat((self._numbers, self._numbers.new_full((count,), _NOT_ENTERED)))
        self._log_chances = torch.cat((self._log_chances, log_chances))
        self._is_drafted = torch.cat((self._is_drafted, self._is_drafted.new_zeros(count)))
