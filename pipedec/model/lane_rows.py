"""The rows of one request in a forward of many requests, and their attention: each row attends to its own request's cache only.

Knows caches and masks; knows neither weights nor what the rows stand for. Shapes as in ``attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pipedec.device import to_device
from pipedec.model.attention import AttentionPlan, LayersShape, tree_attention
from pipedec.model.cache import KVCache, Reader
from pipedec.tree import Visibility


@dataclass
class LaneRows:
    """The rows of one request that the next forward computes.

    Attributes:
        positions: int64 [R], position ids.
        cache: the request's. The forward adds the rows to the tree level if ``visibility`` is given, else to the past.
        visibility: the slots of past and tree (older rows, then these) that each row attends to. None for a chunk of the prompt,
            which directly follows the past.
        prefill_length: for a chunk of the prompt, or of an answer that goes on, the number of tokens in the whole prompt.
        num_masks: number of mask rows, which are the last of the rows. Those behind a chunk of the prompt attend to all of it and
            to each other causally, and are added to no level.
        num_rows: R.
        num_tokens: number of rows that are no masks.

    Raises:
        ValueError: there are no rows, the mask is not [rows, slots], or a chunk of the prompt follows tree rows.
    """

    positions: Tensor
    cache: KVCache
    visibility: Visibility | None = None
    prefill_length: int | None = None
    num_masks: int = 0
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        rows, cache, visibility = self.positions.shape[0], self.cache, self.visibility
        self.num_rows, self.num_tokens = rows, rows - self.num_masks
        if rows == 0:
            raise ValueError("a step needs at least one row")
        if visibility is None:
            if cache.length > cache.past_length:
                raise ValueError(f"a prompt chunk cannot follow {cache.tree_length} tree rows")
        elif visibility.seen.shape != (rows, slots := cache.length + rows - visibility.shared):
            raise ValueError(f"the mask is {list(visibility.seen.shape)}, but the step is {[rows, slots]}")

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
            if not self.num_masks:
                return self.visibility
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

    @classmethod
    def of_tokens(cls, lane: LaneRows, first: int, shape: LayersShape) -> Part:
        """The ordinary rows of a lane whose rows begin at ``first``."""
        tokens, positions_R = lane.num_tokens, lane.positions
        if lane.visibility is None:
            plan = AttentionPlan.for_prefill(lane.cache.past_length, tokens, shape.windows, shape.dtype, positions_R.device)
        else:
            visibility, positions_R = lane.visibility_of_tokens(), positions_R[:tokens]
            plan = AttentionPlan.for_tree(visibility, positions_R, shape.windows, shape.group, shape.dtype)
        return cls(slice(first, first + tokens), plan, lane.cache.reader(tokens))

    @classmethod
    def of_masks(cls, lane: LaneRows, first: int, shape: LayersShape) -> Part:
        """The mask rows of a lane whose rows begin at ``first``."""
        visibility, positions_R, prompt = lane.visibility_of_masks(), lane.positions[lane.num_tokens :], lane.cache.prompt_length
        plan = AttentionPlan.for_tree(visibility, positions_R, shape.windows, shape.group, shape.dtype, prompt)
        rows = slice(first + lane.num_tokens, first + lane.num_rows)
        return cls(rows, plan, lane.cache.reader(lane.num_rows, with_prompt=True))


class LaneAttention:
    """Attention of a forward's rows, request by request.

    Args:
        lanes: whose rows follow each other in the forward. Their caches have room for them.
    """

    def __init__(self, lanes: Sequence[LaneRows], shape: LayersShape) -> None:
        self._windows = shape.windows
        self._parts = list[Part]()
        first = 0
        for lane in lanes:
            if lane.num_tokens:
                self._parts.append(Part.of_tokens(lane, first, shape))
            if lane.num_masks:
                self._parts.append(Part.of_masks(lane, first, shape))
            first += lane.num_rows

    def attend(self, q_RHD: Tensor, layer: int) -> Tensor:
        parts, window = self._parts, self._windows[layer]
        if len(parts) == 1:
            return tree_attention(q_RHD, *parts[0].reader(layer), parts[0].plan, window)
        return torch.cat([tree_attention(q_RHD[part.rows], *part.reader(layer), part.plan, window) for part in parts])
