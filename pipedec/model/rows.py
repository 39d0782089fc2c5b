"""The rows of requests that a forward computes, and where they go in the caches.

Shape legend: R rows in this step, P past tokens, N tree slots including this step's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipedec.device import to_device
from pipedec.model.cache import KVCache
from pipedec.tree import Visibility


@dataclass
class LaneRows:
    """The rows of one request that the next forward computes.

    Attributes:
        positions: int64 [R], position ids.
        cache: the request's. The forward adds the rows to the tree level if ``visibility`` is given, else to the past.
        visibility: the slots of past and tree (older rows, then these) that each row attends to. None for a chunk of the prompt,
            which directly follows the past.
        prefill_length: for a chunk of the prompt, or of a resumed answer, the number of tokens in the whole prompt.
        num_masks: number of mask rows, which are the last of the rows. Those after a chunk of the prompt attend to all of it and
            to each other causally, and are added to no level.
        num_tokens: number of the other rows.
        threads: the decode thread of each row; None if the answer has one.

    Raises:
        ValueError: there are no rows, the mask is not [rows, slots], or a chunk of the prompt follows tree rows.
    """

    positions: Tensor
    cache: KVCache
    visibility: Visibility | None = None
    prefill_length: int | None = None
    num_masks: int = 0
    threads: Sequence[int] | None = None
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
    def num_prompt_slots(self) -> int:
        """Q if there are mask rows, which alone attend to the learned prompt; else 0."""
        return len(self.cache.prompt) if self.num_masks else 0

    def slots(self) -> list[range]:
        """The pool's slots that any of the rows attends to, run by run: learned prompt, past and tree, then the rows' own. Raises
        ValueError if the cache has too few slots for the rows.
        """
        rows = self.cache.ranges(0, self.cache.length + self.num_rows)
        return [self.cache.prompt, *rows] if self.num_prompt_slots else rows

    def lengths(self) -> Tensor:
        """int64 [R], the sequence length that each row's rotary frequencies depend on, for rope types that have one.

        A token of the answer has the length at which it was decoded, also if it enters again.
        """
        lengths = self.positions + 1
        if self.prefill_length is not None:
            lengths[: self.num_tokens].clamp_(min=self.prefill_length)
        return lengths

    def append(self) -> None:
        """Add the rows, whose keys and values have been written, to a level of the cache."""
        is_chunk = self.visibility is None
        self.cache.append(self.num_tokens if is_chunk else self.num_rows, to_past=is_chunk, threads=self.threads)

    def visibility_of_tokens(self) -> Visibility:
        """The mask of the ordinary rows."""
        if self.visibility is not None:
            if not self.num_masks:
                return self.visibility
            return self.visibility.of(slice(0, self.num_tokens), self.cache.length + self.num_tokens)
        return self._chain(slice(0, self.num_tokens), self.cache.length)

    def visibility_of_masks(self) -> Visibility:
        """The mask of the mask rows over the slots after the learned prompt."""
        if self.visibility is not None:
            return self.visibility.of(slice(self.num_tokens, self.num_rows), self.cache.length + self.num_rows)
        return self._chain(slice(self.num_tokens, self.num_rows), self.cache.length + self.num_tokens)

    def _chain(self, rows: slice, shared: int) -> Visibility:
        """The mask of rows that attend to ``shared`` slots and to each other causally."""
        positions = self.positions[rows]
        chain = torch.ones(len(positions), len(positions), dtype=torch.bool, device=positions.device).tril()
        return Visibility(chain, shared, lambda: positions)


def slots_of(lanes: Sequence[LaneRows]) -> slice | Tensor:
    """The pool's slots for the rows of ``lanes``: int64 [R], or a slice if they are consecutive."""
    ranges = [run for lane in lanes for run in lane.cache.next_slots(lane.num_rows)]
    if len(ranges) == 1:
        return slice(ranges[0].start, ranges[0].stop)
    return to_device(torch.tensor([slot for slots in ranges for slot in slots]), lanes[0].positions.device)
