"""The kernels of recurrent layers, in Triton's interpreter, give what is computed request by request, in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from pipedec.families import KVShape, RecurrentShape, StateCounts
from pipedec.model.cache import KVCache, KVPool
from pipedec.model.kernels.delta_rule import gated_delta_rule
from pipedec.model.kernels.short_convolution import short_convolution
from pipedec.model.recurrent import LaneRecurrence, Recurrence
from pipedec.model.row_tables import MOST_REQUESTS, RowTables
from pipedec.model.rows import LaneRows
from pipedec.model.states import LayerStates, StatePool
from pipedec.model.table_recurrence import TableRecurrence
from pipedec.tree import Visibility

kernels = pytest.importorskip("support.kernels")
pytestmark = pytest.mark.skipif(not kernels.triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")

QWEN3_NEXT = RecurrentShape(32, 16, 128, 128, 1, 8192, 4)
REAL = {
    "Qwen3-Next": QWEN3_NEXT,
    "Kimi Linear": RecurrentShape(32, 32, 128, 128, 128, 12288, 4),
    "Olmo Hybrid": RecurrentShape(30, 30, 96, 192, 1, 11520, 4),
}
REDUCED = {  # key heads, widths and decays in the proportions of the real ones
    "Qwen3-Next": RecurrentShape(4, 2, 16, 16, 1, 20, 4),
    "Qwen3.5 27B": RecurrentShape(3, 1, 16, 16, 1, 20, 4),
    "Olmo Hybrid": RecurrentShape(1, 1, 12, 40, 1, 64, 4),
    "Kimi Linear": RecurrentShape(1, 1, 16, 16, 16, 20, 2),
}
New = Callable[[list[LaneRows]], Recurrence]


def of_layer(shape: RecurrentShape, rows: int, dtype: torch.dtype) -> list[kernels.Launch]:
    tables = RowTables(torch.empty(1 << 16, dtype=torch.int32, device="meta"), rows, MOST_REQUESTS, (), True)
    (memory,) = LayerStates.allocated(shape, 1, StateCounts(16, 256), dtype, "meta").unbind()

    def new(*size: int) -> Tensor:
        return torch.empty((rows, *size), dtype=dtype, device="meta")

    keys, values = new(shape.num_key_heads, shape.key_dim), new(shape.num_heads, shape.value_dim)
    with kernels.recorded() as found:
        short_convolution(new(shape.channels), new(shape.kernel)[:1].expand(shape.channels, -1), None, tables, memory)
        gated_delta_rule(keys, keys, values, new(shape.num_heads, shape.num_decays).float(), new(shape.num_heads), tables, memory)
    return found


def launches(dtype: torch.dtype) -> list[kernels.Launch]:
    """All launches of layers of real sizes."""
    return [launch for shape in REAL.values() for launch in of_layer(shape, 16, dtype)]


class Twins:
    """Requests of one shape in a pool, whose rows are drawn again for each pool of the same seed."""

    def __init__(self, shape: RecurrentShape, seed: int) -> None:
        self._random, self._generator, self._shape = random.Random(seed), torch.Generator().manual_seed(seed), shape
        states = StatePool([shape], torch.float32, StateCounts(8, 64))
        self._pool = KVPool([KVShape(0, 0, 0)], torch.float32, 1024, 16, states=states)
        self._weight = self._normal(shape.channels, shape.kernel)
        self.caches = [KVCache(self._pool, ((256 * number, 256),)) for number in range(3)]
        self._seen = [torch.zeros(0, 0, dtype=torch.bool) for _ in self.caches]

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator)

    def chunk(self, number: int, rows: int) -> LaneRows:
        past = self.caches[number].past_length
        return LaneRows(torch.arange(past, past + rows), self.caches[number])

    def trees(self, number: int, rows: int, threads: Sequence[int] | None = None) -> LaneRows:
        """Rows under random ones, or under the past; each under one of its own thread."""
        cache, old = self.caches[number], self._seen[number]
        seen = torch.eye(len(old) + rows, dtype=torch.bool)
        seen[: len(old), : len(old)] = old
        for row in range(len(old), len(seen)):
            parents = [one for one in range(row) if threads is None or threads[one] == threads[row - len(old)]]
            if parents and self._random.random() < 0.8:
                seen[row] |= seen[self._random.choice(parents)]
        self._seen[number] = seen
        visibility = Visibility(seen[len(old) :], cache.past_length, lambda: torch.zeros(len(seen), dtype=torch.int64))
        return LaneRows(torch.zeros(rows, dtype=torch.int64), cache, visibility, threads=threads)

    def compute(self, lanes: list[LaneRows], new: New, alone: bool = False) -> tuple[Tensor, Tensor]:
        """Convolution and rule of rows of random inputs, which are appended; ``alone``: first each request's, too."""
        shape, rows = self._shape, sum(lane.num_rows for lane in lanes)
        convolved = self._normal(rows, shape.channels)
        keys, queries = (self._normal(rows, shape.num_key_heads, shape.key_dim) for _ in range(2))
        decays = -2 * torch.rand(rows, shape.num_heads, shape.num_decays, generator=self._generator)
        values, rates = self._normal(rows, shape.num_heads, shape.value_dim), self._normal(rows, shape.num_heads).sigmoid()
        rule = queries, keys, values, decays, rates

        def computed(part: list[LaneRows], own: slice) -> tuple[Tensor, Tensor]:
            recurrence = new(part)
            return recurrence.convolve(0, convolved[own], self._weight), recurrence.mix(0, *(tensor[own] for tensor in rule))

        if alone:
            ends = [sum(lane.num_rows for lane in lanes[: number + 1]) for number in range(len(lanes))]
            parts = [computed([lane], slice(end - lane.num_rows, end)) for lane, end in zip(lanes, ends, strict=True)]
        found = computed(lanes, slice(0, rows))
        if alone:
            for column, together in zip(zip(*parts, strict=True), found, strict=True):
                assert torch.equal(torch.cat(column), together)
        for lane in lanes:
            lane.append()
        return found

    def steps(self, new: New, alone: bool) -> list[tuple[Tensor, Tensor]]:
        """Chunks; trees of several tiles; trees of two decode threads, beside a chunk, when some rows have been committed."""
        found = [self.compute([self.chunk(0, 3), self.chunk(1, 2)], new)]
        found.append(self.compute([self.trees(0, 18), self.trees(1, 1)], new, alone))
        path = self._seen[0][17].nonzero()[:, 0].tolist()
        kept = [row for row in range(18) if row not in path and self._seen[0][row, path[0]]]
        self.caches[0].commit(torch.tensor(path), torch.tensor(kept, dtype=torch.int64))
        self._seen[0] = self._seen[0][kept][:, kept]
        states = self.caches[0].states
        assert states is not None and self._pool.states is not None
        states.fork(1, 0)
        self._pool.states.layer(0).states[states.of_thread(1)] *= 2  # as if it had gone on by itself
        self._seen[0] = torch.zeros(0, 0, dtype=torch.bool)
        self.caches[0].commit(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        found.append(self.compute([self.trees(0, 3, [0, 1, 0]), self.chunk(2, 2), self.trees(1, 2)], new, alone))
        return found


def by_kernels(lanes: list[LaneRows]) -> TableRecurrence:
    states = lanes[0].cache.pool.states
    assert states is not None
    return TableRecurrence(RowTables.of(lanes, (), False), states, lanes)


@pytest.mark.parametrize("name", REDUCED)
def test_rows_of_trees_follow_their_paths_in_kernels(name: str) -> None:
    expected = Twins(REDUCED[name], 0).steps(LaneRecurrence, False)
    with kernels.interpreted():
        found = Twins(REDUCED[name], 0).steps(by_kernels, True)
    for step, wanted in zip(found, expected, strict=True):
        for one, other in zip(step, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_writes_to_no_request(dtype: torch.dtype) -> None:
    """Tables of 4 rows and 2 requests, of which one row is a request's: the others' outputs are 0, and no other stash changes."""
    shape = REDUCED["Qwen3-Next"]
    states = StatePool([shape], dtype, StateCounts(2, 8))
    pool, memory = KVPool([KVShape(0, 0, 0)], dtype, 64, 16, states=states), states.layer(0)
    for tensor in memory.tensors():
        tensor.fill_(0.5)
    cache = KVCache(pool, ((0, 16),))
    position = torch.zeros(1, dtype=torch.int64)
    lane = LaneRows(position, cache, Visibility(torch.ones(1, 1, dtype=torch.bool), 0, lambda: position))
    tables = RowTables(torch.zeros(256, dtype=torch.int32), 4, 2, (), True)
    tables.fill([lane], False)
    recurrence, new = TableRecurrence(tables, states), lambda *size: torch.ones(4, *size, dtype=dtype)
    with kernels.interpreted():
        convolved = recurrence.convolve(0, new(shape.channels), torch.ones(shape.channels, shape.kernel, dtype=dtype))
        keys, values = new(shape.num_key_heads, shape.key_dim), new(shape.num_heads, shape.value_dim)
        mixed = recurrence.mix(0, keys, keys, values, -new(shape.num_heads), new(shape.num_heads))
    for out in (convolved, mixed):
        assert out.dtype == dtype and out[0].any() and not out[1:].any()
    for tensor in (memory.keys, memory.updates, memory.decays, memory.inputs):
        assert (tensor != 0.5).flatten(1).any(1).sum() == 1
