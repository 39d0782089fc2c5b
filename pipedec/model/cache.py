"""The KV pool of one stage, and in its slots the two-level caches of requests.

The pool is allocated once. A cache holds accepted rows (the *past*), then speculative rows (the *tree*), in slots of
the pool that it was given. In front of both may be a learned prompt (BiTA), which never changes and which only readers
``with_prompt`` see.

Knows slots and the order of rows, but not tokens, parents or masks, nor which slots belong to which request: rank 0 decides
that for all stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pipedec.core.stage_message import SlotRuns
from pipedec.device import to_device
from pipedec.families import KVShape
from pipedec.model.states import LaneStates, StatePool

Reader = Callable[[int], tuple[Tensor, Tensor]]  # by layer: keys_KSD, values_KSD


class KVPool:
    """Keys and values of every layer of a stage for many requests, allocated once.

    Layers that cache keys and values of one shape share a tensor, a *plane*: [layers, 2, K, slots, D], or, if keys and values are
    of different widths, one for the keys and one for the values, [layers, 1, K, slots, D]. Most models have one plane. Layers
    with a recurrent state cache none.

    Args:
        layers: what each layer caches of a token.
        slots: rounded down to whole blocks.
        block: slots that are handed out together.
        prompt: [L, 2, K, Q, D], keys and values of a learned prompt, for caches that are opened with it; or None. All layers
            must be of one shape, with keys and values of one width.
        states: the memory of recurrent layers; None without such layers.

    Attributes:
        planes: with more slots for the learned prompt and for padding. They never move in memory.
        prompt_slots: the learned prompt's slots, Q slots after those of requests.
        spare_slot: a slot that no request has, after all others: for padding rows of a forward.

    Raises:
        ValueError: there is not one block.
    """

    def __init__(
        self, layers: Sequence[KVShape], dtype: torch.dtype, slots: int, block: int = 16, prompt: Tensor | None = None,
        device: torch.device | str = "cpu", states: StatePool | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= block <= slots:
            raise ValueError(f"a pool needs at least one block of at least one slot, not {slots} slots in blocks of {block}")
        self.block = block
        self.states = states
        self.slots = slots // block * block
        num_prompt_tokens = 0 if prompt is None else prompt.shape[3]
        self.prompt_slots = range(self.slots, self.slots + num_prompt_tokens)
        self.spare_slot = self.slots + num_prompt_tokens
        num_slots = self.slots + -(-(num_prompt_tokens + 1) // block) * block
        self.planes: list[Tensor] = []
        self._layers: list[tuple[Tensor, ...]] = [()] * len(layers)  # [2, K, slots, D], or keys and values, each [1, K, slots, D]
        self._places: list[list[tuple[int, int]]] = [
            [] for _ in layers
        ]  # for keys and values: plane, and index into its first axes
        with torch.inference_mode(False):  # a tensor made in inference mode could only be written there
            for shape in dict.fromkeys(shape for shape in layers if shape.num_values):
                members = [layer for layer, other in enumerate(layers) if other == shape]
                same = shape.key_dim == shape.value_dim
                for count, width in [(2, shape.key_dim)] if same else [(1, shape.key_dim), (1, shape.value_dim)]:
                    size = (len(members), count, shape.num_heads, num_slots, width)
                    plane = torch.empty(size, dtype=dtype, device=device)
                    for row, (layer, part) in enumerate(zip(members, plane.unbind(0), strict=True)):
                        self._layers[layer] += (part,)
                        self._places[layer] += [(len(self.planes), count * row + index) for index in range(count)]
                    self.planes.append(plane)
            self._whole = self.reader([range(num_slots)])
        if prompt is not None:
            (plane,) = self.planes
            plane[:, :, :, self.slots : self.slots + num_prompt_tokens] = prompt

    def has_room(self, rows: int) -> bool:
        """Whether recurrent layers, if there are any, have memory for so many more rows in flight."""
        return self.states is None or rows <= self.states.free[1]

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and all values of a layer, [K, slots, D] each."""
        return self._whole(layer)

    def write(self, layer: int, slots: slice | Tensor, keys_RKD: Tensor, values_RKD: Tensor) -> None:
        """Write rows of any caches to ``slots``, a slice or integers [R], of one layer."""
        for target, rows_RKD in zip(self.keys_values(layer), (keys_RKD, values_RKD), strict=True):
            if isinstance(slots, slice):
                target[:, slots] = rows_RKD.transpose(0, 1)
            else:
                target.index_copy_(1, slots.long(), rows_RKD.transpose(0, 1))

    def copy(self, sources: Sequence[int], targets: Iterable[range]) -> None:
        """Copy the contents of some slots to others, in all layers. All are read before any is written."""
        places, indices = list(targets), torch.tensor(sources, dtype=torch.int64)
        for plane in self.planes:
            rows, first = plane.index_select(3, to_device(indices, plane.device)), 0
            for target in places:
                plane.narrow(3, target.start, len(target)).copy_(rows.narrow(3, first, len(target)))
                first += len(target)

    def clear(self, slots: int) -> None:
        """Fill the first slots with zeros: memory that was never written may hold NaN."""
        for plane in self.planes:
            plane.narrow(3, 0, slots).zero_()

    def reader(self, ranges: Sequence[range]) -> Reader:
        """A function that reads one or more ranges of slots in a layer: keys_KSD, values_KSD. A single range is not copied."""
        if len(ranges) == 1:
            views = [plane.narrow(3, ranges[0].start, len(ranges[0])).flatten(0, 1).unbind(0) for plane in self.planes]
            by_layer = {
                layer: [views[plane][index] for plane, index in places] for layer, places in enumerate(self._places) if places
            }
            return {layer: (keys_KSD, values_KSD) for layer, (keys_KSD, values_KSD) in by_layer.items()}.__getitem__

        def joined(layer: int) -> tuple[Tensor, Tensor]:
            parts = (torch.cat([part[:, :, run.start : run.stop] for run in ranges], 2) for part in self._layers[layer])
            keys_KSD, values_KSD = (one for part in parts for one in part.unbind(0))
            return keys_KSD, values_KSD

        return joined

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer block by block, each [blocks, block, K, D], without copying."""
        keys, values = (one.unflatten(1, (-1, self.block)).permute(1, 2, 0, 3) for one in self.keys_values(layer))
        return keys, values

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes) + (0 if self.states is None else self.states.num_bytes)


class KVCache:
    """Keys and values of one request in every layer of a stage, in the slots of a pool that it was given, and the states of its
    recurrent layers.

    Slots [0, past_length) hold the accepted rows in the order in which they were committed, the slots from there to ``length``
    the speculative rows in the order of entry. Committing the root therefore only moves the boundary, and attention sees both
    levels as one block. A step's rows are written after both; ``append`` then adds them to a level.

    Its slots are *runs* of consecutive slots of the pool. One run is read without copying, several are joined layer by layer.
    The first slots may be shared with other requests: only ``release`` ever writes before ``past_length``.

    Args:
        slots: its first slots (see ``extend``).
        cached: how many of them hold rows of others, which become the past.
        copied: slots of the pool, (first, number), from which the last of these rows are copied first.
        with_prompt: the pool's learned prompt precedes slot 0.
        snapshot: number of the states after the cached rows; None without cached rows, or without recurrent layers.

    Attributes:
        states: of the recurrent layers; None without such layers.
        prompt: the pool's slots of the learned prompt, Q or none.
        slots: number of rows that it can hold.
        length: number of rows in both levels.

    Raises:
        ValueError: there are fewer slots than cached rows, or slots are not in the pool or not whole blocks.
        UserError: every state is in use.
    """

    def __init__(
        self, pool: KVPool, slots: SlotRuns = (), cached: int = 0, copied: tuple[int, int] = (0, 0), with_prompt: bool = False,
        snapshot: int | None = None,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.prompt = pool.prompt_slots if with_prompt else range(0)
        self.slots = 0
        self._runs: list[range] = []  # slots of the pool; no two are adjacent there
        self._firsts: list[int] = []  # the first of the cache's slots in each run
        self.extend(slots)
        first, count = copied
        if not 0 <= count <= cached <= self.slots or not 0 <= first <= first + count <= pool.slots:
            raise ValueError(f"{cached} rows, {count} of them from {first} on, do not fit into {self.slots} slots")
        if count:
            pool.copy(range(first, first + count), self.ranges(cached - count, cached))
        self.past_length = self.length = cached
        self.states = None if pool.states is None else LaneStates(pool.states, snapshot)

    @property
    def tree_length(self) -> int:
        """Number of speculative rows."""
        return self.length - self.past_length

    def extend(self, runs: SlotRuns) -> None:
        """Add slots of the pool after the present ones. Raises ValueError for runs that are not whole blocks of the pool."""
        for first, count in runs:
            if first % self.pool.block or count % self.pool.block or not 0 <= first < first + count <= self.pool.slots:
                raise ValueError(
                    f"{count} slots from {first} on are not whole blocks of {self.pool.block} in a pool of {self.pool.slots}"
                )
            if self._runs and self._runs[-1].stop == first:
                self._runs[-1] = range(self._runs[-1].start, first + count)
            else:
                self._runs.append(range(first, first + count))
                self._firsts.append(self.slots)
            self.slots += count

    def reset(self) -> None:
        """Drop all rows; the slots stay."""
        self.past_length = self.length = 0
        if self.states is not None:
            self.states.reset()

    def close(self) -> None:
        """Give back the memory of recurrent layers. Slots are for the caller to assign again."""
        if self.states is not None:
            self.states.close()

    def ranges(self, first: int, stop: int) -> list[range]:
        """The pool's slots for slots ``first`` to ``stop`` − 1, run by run, at least one range. Raises ValueError for too few."""
        if stop > self.slots:
            raise ValueError(f"{stop} rows do not fit into the {self.slots} slots that this request was given")
        if len(self._runs) == 1:
            start = self._runs[0].start
            return [range(start + first, start + stop)]
        found = list[range]()
        for index in range(max(bisect_right(self._firsts, first) - 1, 0), len(self._runs)):
            offset = self._firsts[index]
            if offset >= stop:
                break
            found.append(self._runs[index][max(first - offset, 0) : stop - offset])
        return found or [range(0)]

    def next_slots(self, rows: int) -> list[range]:
        """The pool's slots for the next ``rows`` rows, which ``append`` adds to a level. Raises ValueError as ``ranges``."""
        return self.ranges(self.length, self.length + rows)

    def blocks(self, slots: int) -> list[int]:
        """The pool's blocks, in order, of the first ``slots`` slots."""
        block = self.pool.block
        return [first // block for run in self.ranges(0, slots) for first in range(run.start, run.stop, block)]

    def append(self, rows: int, to_past: bool = False, threads: Sequence[int] | None = None) -> None:
        """Add ``rows`` written rows to the tree, or ``to_past`` if the tree is empty. Raises ValueError if that is impossible.

        ``threads``: the decode thread of each; None if the answer has one.
        """
        if rows < 0 or self.length + rows > self.slots:
            raise ValueError(f"{rows} rows cannot have been written: {self.length} of {self.slots} slots are used")
        if to_past and self.length > self.past_length:
            raise ValueError(f"cannot append to a past that {self.tree_length} tree rows follow: advance or reset first")
        self.length += rows
        if to_past:
            self.past_length = self.length
        if self.states is not None:
            self.states.append(threads)

    def commit(self, committed: Tensor, kept: Tensor, joining: Mapping[int, Sequence[int]] | None = None) -> None:
        """Commit tree rows to the past and prune those that are not kept (one copy over all layers).

        Args:
            committed, kept: int64 indices into the tree rows, in their new order, on the host.
            joining: see ``LaneStates.commit``.

        Raises:
            ValueError: an index is outside the tree or occurs twice.
        """
        order, past, size = committed.tolist() + kept.tolist(), self.past_length, self.length - self.past_length
        if len(set(order)) != len(order) or (order and not 0 <= min(order) <= max(order) < size):
            raise ValueError(f"advance needs distinct indices below {size}, not {order}")
        if self.states is not None:
            self.states.commit(order[: len(committed)], order[len(committed) :], joining)
        self._gather(past, [past + row for row in order])
        self.past_length += committed.shape[0]
        self.length = past + len(order)

    def release(self, kept: Tensor) -> None:
        """Drop all past rows except ``kept``, int64 slots on the host, ascending; the tree follows directly after them. Raises
        ValueError if a slot is outside the past or out of order.
        """
        slots = kept.tolist()
        if slots != sorted(set(slots)) or not all(0 <= slot < self.past_length for slot in slots):
            raise ValueError(f"slots to keep must be ascending and below {self.past_length}")
        sources = [*slots, *range(self.past_length, self.length)]
        self._gather(0, sources)
        self.past_length, self.length = len(slots), len(sources)

    def _gather(self, first: int, sources: list[int]) -> None:
        """Move the rows in slots ``sources`` to the slots from ``first`` on, except leading ones that are there already."""
        moved = next((slot for slot, source in enumerate(sources, start=first) if slot != source), first + len(sources))
        if sources := sources[moved - first :]:
            runs = [bisect_right(self._firsts, source) - 1 for source in sources]
            own = [self._runs[run].start + source - self._firsts[run] for run, source in zip(runs, sources, strict=True)]
            self.pool.copy(own, self.ranges(moved, moved + len(sources)))
