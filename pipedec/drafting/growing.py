"""Trees that grow on the device: the rows of several forwards, each chosen from what the one before has found.

The host waits once for all of them. It then chooses rows itself, as if they were drafted one forward after another, and takes
those that are the same (see ``RowsAhead``), so a rounding error of the device costs a forward and changes no tree. Knows no model
and no cache. Shapes: M *nodes*, which are drafted rows below which others are chosen; E choices, and rows that are not drafted;
F rows of a forward, c choices below each; N tree slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from pipedec.device import to_device, to_host
from pipedec.tree import Candidates, DraftRows, Growth, Visibility

_PLACES = 1 << 20  # more than there are choices below a row
_FIRST = -(1 << 40)  # added to the numbers of rows, which come before equal choices


@dataclass(frozen=True)
class Forward:
    """The rows of one forward.

    Attributes:
        node, slot: of its first row.
        tokens, parents: int64 [F], their token ids and the nodes above them; empty if the host has chosen the rows.
        token_ids, log_probs: [F, c], their candidates.
    """

    node: int
    slot: int
    tokens: Tensor
    parents: Tensor
    token_ids: Tensor
    log_probs: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.tokens, self.parents, self.token_ids, self.log_probs


class GrowingTree:
    """A tree of one request while its forwards are computed, by the ``Growth`` of rows that enter a first one.

    Call ``add`` with the candidates of each forward, and before every other forward ``choose``.

    Args:
        slots: the tree slot of each drafted row, those of the first forward included, ascending.
        choices: c.

    Attributes:
        counts: F of each forward after the first.
        forwards: those that have been added.
    """

    def __init__(
        self, requested: DraftRows, growth: Growth, slots: Mapping[int, int], choices: int, device: torch.device
    ) -> None:
        self.requested, self.forwards = requested, list[Forward]()
        self._growth, self._frontier, self._tree, self._device = growth, growth.frontier(), requested.tree, device
        undrafted = [one for one in self._frontier.undrafted if one.parent in slots]
        self.counts = list(_counts(growth, len(undrafted), len(requested.rows), choices))
        self.rows = [*requested.rows, *sorted({one.parent for one in undrafted} - set(requested.rows))]  # of the nodes
        self._rows_in_slots = list(slots)
        nodes = {row: node for node, row in enumerate(self.rows)}
        seen = np.zeros((len(self.rows), len(slots) + sum(self.counts)), np.bool_)
        for line, row in zip(seen, self.rows, strict=True):
            line[[slots[above] for above in self._tree.ancestors_of(row)]] = True
        keys = [one.parent * _PLACES + one.place if one.row is None else one.row + _FIRST for one in undrafted]
        numbers = [
            self.rows, self._tree.next_positions_of(self.rows), keys, [one.token for one in undrafted],
            [nodes[one.parent] for one in undrafted], [self._frontier.num_rows],
        ]  # fmt: skip
        chances = [*self._frontier.log_chances, *(one.log_chance for one in undrafted)]
        packed = to_device(torch.tensor([number for part in numbers for number in part]), device).split(list(map(len, numbers)))
        self._indices_M, self._next_positions_M, keys_E, tokens_E, nodes_E, self._num_rows = packed
        self._log_chances_F, log_chances_E = to_device(torch.tensor(chances, dtype=torch.float64), device).split(
            [len(requested.rows), len(undrafted)]
        )
        self._seen_MN = to_device(torch.from_numpy(seen), device)
        self._choices = log_chances_E, keys_E, tokens_E, nodes_E
        self._chosen = (0, len(slots) - len(requested.rows), keys_E[:0], keys_E[:0])
        self._chosen_positions: list[Tensor] = []

    @property
    def next_count(self) -> int:
        """F of the next forward; 0 if there is none."""
        number = len(self.forwards) - 1
        return self.counts[number] if number < len(self.counts) else 0

    def add(self, token_ids: Tensor, log_probs: Tensor) -> None:
        """Add the candidates of the rows of the last forward, [F, c] each, the most probable first."""
        self.forwards.append(Forward(*self._chosen, token_ids, log_probs))
        if not self.next_count:
            return
        count, first = len(token_ids), self._chosen[0]
        log_chances = self._growth.log_chances(log_probs).double().clamp(max=-self._frontier.least_loss)
        best = log_chances.sort(dim=1, descending=True, stable=True)
        numbers_F1 = torch.arange(count, device=self._device)[:, None]
        new = (
            self._log_chances_F[:, None] + best.values,
            self._indices_M[first : first + count, None] * _PLACES + torch.arange(token_ids.shape[1], device=self._device),
            token_ids.gather(1, best.indices), (numbers_F1 + first).expand_as(token_ids),
        )  # fmt: skip
        flat = [one.flatten() for one in new]
        if not self._growth.by_layer:
            flat = [torch.cat(pair) for pair in zip(self._choices, flat, strict=True)]
        self._choices = flat[0], flat[1], flat[2], flat[3]

    def choose(self, past: int) -> tuple[Tensor, Tensor, Visibility]:
        """The rows of the next forward, after ``past`` tokens: token ids and positions, int64 [F], and what they attend to."""
        count, (log_chances_E, keys_E, tokens_E, nodes_E) = self.next_count, self._choices
        by_key = keys_E.argsort()
        costs = self._frontier.root_log_chance - log_chances_E[by_key]
        chosen = by_key[costs.argsort(stable=True)[:count]]
        numbers_F = torch.arange(count, device=self._device)
        order = keys_E[chosen] if self._growth.by_layer else torch.where(keys_E[chosen] < 0, keys_E[chosen], numbers_F)
        chosen = chosen[order.argsort()]
        is_new, parents_F, tokens_F = keys_E[chosen] >= 0, nodes_E[chosen], tokens_E[chosen]
        indices = torch.where(is_new, self._num_rows - 1 + is_new.cumsum(0), keys_E[chosen] - _FIRST)
        positions = self._next_positions_M[parents_F]
        node, slot = len(self._seen_MN), self.forwards[-1].slot + len(self.forwards[-1].token_ids)
        seen_FN = self._seen_MN[parents_F]
        seen_FN[:, slot : slot + count] = torch.eye(count, dtype=torch.bool, device=self._device)
        self._log_chances_F = log_chances_E[chosen]
        self._choices = log_chances_E.index_fill(0, chosen, -torch.inf), keys_E, tokens_E, nodes_E
        self._num_rows = self._num_rows + is_new.sum()
        self._indices_M = torch.cat((self._indices_M, indices))
        self._next_positions_M = torch.cat((self._next_positions_M, positions + 1))
        self._seen_MN = torch.cat((self._seen_MN, seen_FN))
        self._chosen = node, slot, tokens_F, parents_F
        self._chosen_positions.append(positions)
        return tokens_F, positions, Visibility(seen_FN[:, : slot + count], past, self._slot_positions)

    def _slot_positions(self) -> Tensor:
        known = torch.tensor(self._tree.positions_of(self._rows_in_slots), dtype=torch.int64)
        return torch.cat((to_device(known, self._device), *self._chosen_positions))


def _counts(growth: Growth, undrafted: int, rows: int, choices: int) -> Iterable[int]:
    """The rows to choose for each forward: as many as the growth allows, unless choices are fewer."""
    left = rows * choices + (0 if growth.by_layer else undrafted)
    for _ in range(growth.forwards):
        count = min(growth.rows, left)
        yield count
        left = count * choices if growth.by_layer else left + count * (choices - 1)


class RowsAhead:
    """Rows of one tree that were drafted before the method has asked for them. Those that it asks for are taken; what it does not
    ask for was computed in vain.
    """

    def __init__(self, rows: Iterable[int], forwards: Iterable[Forward]) -> None:
        self._nodes = {row: node for node, row in enumerate(rows)}
        self._forwards = deque(forwards)

    def places_of(self, requested: DraftRows) -> list[int] | None:
        """The places of rows in the next forward; None unless all of them are there."""
        if not self._forwards:
            return None
        forward, tree = self._forwards[0], requested.tree
        places = {key: place for place, key in enumerate(zip(forward.parents.tolist(), forward.tokens.tolist(), strict=True))}
        parents = [self._nodes.get((tree.ancestors_of(row)[1:2] or [row])[0], -1) for row in requested.rows]
        found = [places.get(key, -1) for key in zip(parents, tree.tokens_of(requested.rows), strict=True)]
        return None if -1 in found else found

    def take(self, requested: DraftRows) -> tuple[dict[int, int], Candidates]:
        """The tree slots of rows that have ``places_of`` them, and their candidates."""
        found = self.places_of(requested)
        assert found is not None
        forward = self._forwards.popleft()
        self._nodes |= {row: forward.node + place for row, place in zip(requested.rows, found, strict=True)}
        slots = {row: forward.slot + place for row, place in zip(requested.rows, found, strict=True)}
        return slots, Candidates(torch.tensor(requested.rows), forward.token_ids[found], forward.log_probs[found])


def brought(growing: Iterable[GrowingTree]) -> list[list[Forward]]:
    """The forwards of each tree on the host, which waits for the device once."""
    trees = [one.forwards for one in growing]
    tensors = [part for forwards in trees for one in forwards for part in one.parts]
    values = to_host(torch.cat([part.flatten().double() for part in tensors]))  # float64 holds token ids, too
    parts = iter(zip(values.split([part.numel() for part in tensors]), tensors, strict=True))

    def on_host(forward: Forward) -> Forward:
        tokens, parents, ids, chances = (value.to(like.dtype).view(like.shape) for value, like in islice(parts, 4))
        return Forward(forward.node, forward.slot, tokens, parents, ids, chances)

    return [[on_host(one) for one in forwards] for forwards in trees]
