"""The rows of one request in a forward of many requests, and their attention: each row attends to its own request's cache only.

Knows caches and masks; knows neither weights nor what the rows stand for. Shapes as in ``attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pipedec.device import to_device
from pipedec.model.attention import AttentionPlan, tree_attention
from pipedec.model.cache import KVCache, Reader
from pipedec.tree import Visibility


@dataclass(frozen=True)
class LaneRows:
    """The rows of one request that a forward computes.

    Attributes:
        positions: int64 [R], position ids.
        cache: the request's. The forward adds the rows to the tree level if ``visibility`` is given, else to the past.
        visibility: the slots of past and tree (older rows, then these) that each row attends to. None for a chunk of the prompt,
            which directly follows the past.
        prefill_length: for a chunk of the prompt, or of an answer that goes on, the number of tokens in the whole prompt.
        num_masks: number of mask rows, which are the last of the rows. Those behind a chunk of the prompt attend to all of it and
            to each other causally, and are added to no level.
    """

    positions: Tensor
    cache: KVCache
    visibility: Visibility | None = None
    prefill_length: int | None = None
    num_masks: int = 0

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of rows that are no masks."""
        return self.positions.shape[0] - self.num_masks

    @property
    def num_shared(self) -> int:
        """Of rows of trees: the leading slots that all of them attend to."""
        assert self.visibility is not None
        return self.visibility.shared

    @property
    def num_prompt_slots(self) -> int:
        """Q if there are mask rows, which alone attend to the learned prompt; else 0."""
        return self.cache.prompt_length if self.num_masks else 0

    @property
    def num_slots(self) -> int:
        """Slots that any of the rows attends to."""
        return self.num_prompt_slots + self.cache.length + self.num_rows

    def slots(self) -> list[range]:
        """The pool's slots that any of the rows attends to, run by run: learned prompt, past and tree, then the rows' own."""
        return self.cache.read_ranges(self.num_rows, with_prompt=bool(self.num_masks))

    def check(self) -> None:
        """Raise ValueError if there are no rows, the mask is not [rows, slots], or a prompt chunk follows tree rows."""
        rows, cache, visibility = self.num_rows, self.cache, self.visibility
        if rows == 0:
            raise ValueError("a step needs at least one row")
        if visibility is None:
            if cache.tree_length:
                raise ValueError(f"a prompt chunk cannot follow {cache.tree_length} tree rows")
        elif visibility.seen.shape != (rows, slots := cache.length + rows - visibility.shared):
            raise ValueError(f"the mask is {list(visibility.seen.shape)}, but the step is {[rows, slots]}")

    def lengths(self) -> Tensor:
        """int64 [R], the sequence length that each row's rotary frequencies depend on, if they do.

        A token of the answer has the length that it had when it was decoded, also if it enters again.
        """
        lengths = self.positions + 1
        if self.prefill_length is not None:
            lengths[: self.num_tokens].clamp_(min=self.prefill_length)
        return lengths

    def append(self) -> None:
        """Add the rows to the cache, in which their keys and values have been written."""
        if self.visibility is None:
            self.cache.extend_past(self.num_tokens)
        else:
            self.cache.extend_tree(self.num_rows)

    def visibility_of_tokens(self) -> Visibility:
        """What the ordinary rows attend to."""
        if self.visibility is not None:
            return self.visibility.of(slice(0, self.num_tokens), self.cache.length + self.num_tokens)
        return self._chain(slice(0, self.num_tokens), self.cache.length)

    def visibility_of_masks(self) -> Visibility:
        """What the mask rows attend to, behind the learned prompt."""
        if self.visibility is not None:
            return self.visibility.of(slice(self.num_tokens, self.num_rows), self.cache.length + self.num_rows)
        return self._chain(slice(self.num_tokens, self.num_rows), self.cache.length + self.num_tokens)

    def _chain(self, rows: slice, shared: int) -> Visibility:
        """Some of the rows attend to ``shared`` slots and to each other causally."""
        positions = self.positions[rows]
        chain = torch.ones(len(positions), len(positions), dtype=torch.bool, device=positions.device).tril()
        return Visibility(chain, shared, lambda: positions)


def slots_of(lanes: Sequence[LaneRows]) -> slice | Tensor:
    """The pool's slots for the rows of ``lanes``: int64 [R], or a slice if they are consecutive."""
    ranges = [run for lane in lanes for run in lane.cache.slots_behind(lane.num_rows)]
    if len(ranges) == 1:
        return slice(ranges[0].start, ranges[0].stop)
    return to_device(torch.tensor([slot for slots in ranges for slot in slots]), lanes[0].positions.device)


class RowAttention(Protocol):
    """Attention of the rows of a forward, layer by layer."""

    def attend(self, q_RHD: Tensor, layer: int) -> Tensor:
        """out_RHD in one layer of the stage, in whose cache the rows' keys and values have been written."""


Placed = tuple[LaneRows, int]  # a lane, and the index of its first row in the forward


@dataclass(frozen=True)
class Part:
    """Rows of one request that share a plan: its ordinary rows or its mask rows.

    Attributes:
        rows: which rows of the forward.
        plan: their masks.
        reader: keys and values of each layer that they attend to.
    """

    rows: slice
    plan: AttentionPlan
    reader: Reader

    def attend(self, q_RHD: Tensor, layer: int, window: int | None) -> Tensor:
        return tree_attention(q_RHD[self.rows], *self.reader(layer), self.plan, window)


class LaneAttention:
    """Attention of a forward's rows, request by request.

    Args:
        lanes: whose rows follow each other in the forward. Their caches have room for them.
        windows: the sliding windows of the layers.
        group: query heads per key-value head.
    """

    def __init__(self, lanes: Sequence[LaneRows], windows: tuple[int | None, ...], group: int, dtype: torch.dtype) -> None:
        self._windows, self._group, self._dtype = windows, group, dtype
        starts = accumulate((lane.num_rows for lane in lanes), initial=0)
        self._prepare(list(zip(lanes, starts, strict=False)))

    def _prepare(self, placed: Sequence[Placed]) -> None:
        self._parts = list[Part]()
        for lane, first in placed:
            if lane.num_tokens:
                self._parts.append(self._of_tokens(lane, first))
            if lane.num_masks:
                self._parts.append(self._of_masks(lane, first))

    def attend(self, q_RHD: Tensor, layer: int) -> Tensor:
        """Attention in one layer of the stage, in whose cache the rows' keys and values have been written: out_RHD."""
        attended = [part.attend(q_RHD, layer, self._windows[layer]) for part in self._parts]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _of_tokens(self, lane: LaneRows, first: int) -> Part:
        """The ordinary rows of a lane whose rows begin at ``first``."""
        tokens = lane.num_tokens
        if lane.visibility is None:
            device = lane.positions.device
            plan = AttentionPlan.for_prefill(lane.cache.past_length, tokens, self._windows, self._dtype, device)
        else:
            plan = self._tree_plan(lane.visibility_of_tokens(), lane.positions[:tokens])
        return Part(slice(first, first + tokens), plan, lane.cache.reader(tokens))

    def _of_masks(self, lane: LaneRows, first: int) -> Part:
        """The mask rows of a lane whose rows begin at ``first``."""
        plan = self._tree_plan(lane.visibility_of_masks(), lane.positions[lane.num_tokens :], lane.cache.prompt_length)
        rows = slice(first + lane.num_tokens, first + lane.num_rows)
        return Part(rows, plan, lane.cache.reader(lane.num_rows, with_prompt=True))

    def _tree_plan(self, visibility: Visibility, positions_R: Tensor, prompt_length: int | None = None) -> AttentionPlan:
        return AttentionPlan.for_tree(visibility, positions_R, self._windows, self._group, self._dtype, prompt_length)
