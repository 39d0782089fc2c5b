"""Caches keep their rows in order through commits and prunes, over any runs of slots, and nobody writes into another's slots."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.kv_caches import read_cache
from support.slot_books import SlotAllocator
from torch._subclasses import FakeTensorMode

from pipedec.families import KVShape
from pipedec.model import KVCache, KVPool
from pipedec.model.rows import slots_of

LAYERS, HEADS, HEAD_DIM = 2, 3, 4
SHAPES = [KVShape(HEADS, HEAD_DIM, HEAD_DIM)] * LAYERS
PROMPT = -1 - torch.rand(LAYERS, 2, HEADS, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@dataclass
class Held:
    """A cache and the labels of its rows."""

    number: int
    cache: KVCache
    past: list[int] = field(default_factory=list)
    tree: list[int] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)  # slots that others may have, too

    def append(self, labels: list[int], to_tree: bool) -> None:
        write([(self.cache, labels)])
        self.cache.append(len(labels), to_past=not to_tree)
        (self.tree if to_tree else self.past).extend(labels)

    def advance(self, committed: list[int], kept: list[int]) -> None:
        self.cache.commit(torch.tensor(committed, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64))
        self.past, self.tree = self.past + [self.tree[row] for row in committed], [self.tree[row] for row in kept]

    def release(self, kept: list[int]) -> None:
        self.cache.release(torch.tensor(kept, dtype=torch.int64))
        self.past = [self.past[slot] for slot in kept]

    def check(self) -> None:
        cache, labels = self.cache, torch.tensor([*self.past, *self.tree], dtype=torch.float64)[:, None, None]
        assert (cache.past_length, cache.tree_length) == (len(self.past), len(self.tree))
        for layer in range(LAYERS):
            keys, values = read_cache(cache, layer, 0, True)
            expected = (labels * 10 + layer).expand(-1, HEADS, HEAD_DIM).transpose(0, 1)
            prompt = PROMPT[layer, :, :, : len(cache.prompt)]
            assert torch.equal(keys, torch.cat((prompt[0], expected), 1))
            assert torch.equal(values, torch.cat((prompt[1], -expected), 1))


def write(rows: list[tuple[KVCache, list[int]]]) -> None:
    """The rows of several caches at once."""
    slots = torch.tensor([slot for cache, labels in rows for run in cache.next_slots(len(labels)) for slot in run])
    labels = torch.tensor([label for _, labels in rows for label in labels], dtype=torch.float64)[:, None, None]
    for layer in range(LAYERS):
        keys = (labels * 10 + layer).expand(-1, HEADS, HEAD_DIM)
        rows[0][0].pool.write(layer, slots, keys, -keys)


@examples(80)
@given(data=st.data(), block=st.integers(1, 5), is_scattered=st.booleans())
def test_caches_come_grow_adopt_and_go(data: st.DataObject, block: int, is_scattered: bool) -> None:
    """What the others hold, shared slots among them, is the same after every step."""
    pool, held, label = KVPool(SHAPES, torch.float64, 200 * block, block, PROMPT), list[Held](), 0
    allocator = SlotAllocator(pool.slots, block, random.Random(data.draw(st.integers(0, 99))) if is_scattered else None)
    address = pool.planes[0].data_ptr()
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "adopt", "grow", "grow", "grow", "advance", "advance", "release", "close"]))
        if action == "open" or not held:
            held.append(Held(number, KVCache(pool, with_prompt=data.draw(st.booleans()))))
        one = data.draw(st.sampled_from(held))
        if action == "adopt":
            held.append(adopter(data, pool, allocator, one, 100 + number))
        if action == "grow":
            count = data.draw(st.integers(1, 12))
            one.cache.extend(allocator.take(one.number, one.cache.length + count - len(one.shared)))
            one.append(list(range(label, label + count)), to_tree=bool(one.tree) or data.draw(st.booleans()))
            label += count
        if action == "advance":
            rows = data.draw(st.permutations(range(len(one.tree))))
            committed, kept = sorted(data.draw(st.integers(0, len(rows))) for _ in range(2))
            one.advance(rows[:committed], rows[committed:kept])
        is_alone = not any(one.shared or other.shared for other in held)
        if action == "release" and is_alone:
            one.release([slot for slot in range(len(one.past)) if data.draw(st.booleans())])
        if action == "close" and is_alone:
            held.remove(one)
            allocator.free(one.number)
        for other in held:
            other.check()
    assert pool.planes[0].data_ptr() == address


def adopter(data: st.DataObject, pool: KVPool, allocator: SlotAllocator, owner: Held, number: int) -> Held:
    """A cache with the first blocks of another's past, and a copy of a part of the next block."""
    block = pool.block
    shared = data.draw(st.integers(0, len(owner.past) // block)) * block
    copied = data.draw(st.integers(0, min(block, len(owner.past) - shared)))
    slots = (*((first * block, block) for first in owner.cache.blocks(shared)), *allocator.take(number, copied))
    first = owner.cache.ranges(shared, shared + copied)[0].start if copied else 0
    cache = KVCache(pool, slots, shared + copied, (first, copied), with_prompt=data.draw(st.booleans()))
    own = {slot for run in owner.cache.ranges(0, shared) for slot in run}
    return Held(number, cache, owner.past[: shared + copied], [], own)


def held_in(*runs: tuple[int, int], with_prompt: bool = False) -> Held:
    return Held(0, KVCache(KVPool(SHAPES, torch.float64, 40, 4, PROMPT), runs, with_prompt=with_prompt))


def test_committing_the_first_rows_moves_only_the_boundary() -> None:
    one = held_in((0, 40))
    one.append([1, 2, 3], to_tree=True)
    before = read_cache(one.cache, 0)[0].data_ptr()
    one.advance([0], [1, 2])
    assert read_cache(one.cache, 0)[0].data_ptr() == before
    one.check()


def test_a_learned_prompt_takes_no_slots_and_survives_reset() -> None:
    one = held_in((8, 4), (0, 4), with_prompt=True)
    cache = one.cache
    assert (cache.length, cache.slots, len(cache.prompt)) == (0, 8, 3)
    one.append([1, 2, 3, 4, 5], to_tree=False)
    assert (cache.length, cache.slots) == (5, 8)
    cache.reset()
    assert (cache.length, cache.slots) == (0, 8)
    one.past.clear()
    one.append([6], to_tree=True)
    one.check()
    write([(cache, [7, 8])])
    assert cache.length == 1, "written rows do not count until they are appended"
    assert torch.equal(read_cache(cache, 0, 2, True)[0], torch.cat((PROMPT[0, 0], read_cache(cache, 0, 2)[0]), 1))
    with pytest.raises(ValueError, match="9 rows do not fit into the 8 slots"):
        read_cache(cache, 0, 8, True)


def test_misuse_is_refused_and_rows_that_stay_are_moved_together() -> None:
    one = held_in((4, 4))
    with pytest.raises(ValueError, match="5 rows do not fit into the 4 slots that this request was given"):
        one.cache.next_slots(5)
    with pytest.raises(ValueError, match="cannot have been written"):
        one.cache.append(5)
    one.append([0, 1], to_tree=False)
    one.append([2, 3], to_tree=True)
    with pytest.raises(ValueError, match="a past that 2 tree rows follow"):
        one.cache.append(0, to_past=True)
    for committed, kept in (([0], [0]), ([2], []), ([], [-1])):
        with pytest.raises(ValueError, match="distinct indices below 2"):
            one.advance(committed, kept)
    for kept in ([1, 0], [1, 1], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="ascending and below 2"):
            one.release(kept)
    one.advance([1], [0])
    one.check()
    one.release([0, 2])
    one.check()


def test_slots_that_follow_each_other_are_read_in_place_and_others_joined() -> None:
    pool = KVPool(SHAPES, torch.float64, 40, 4)
    one, several = Held(0, KVCache(pool, ((8, 4),))), Held(1, KVCache(pool, ((20, 4), (0, 8))))
    one.cache.extend(((12, 8),))
    for held in (one, several):
        held.append(list(range(10)), to_tree=False)
        held.check()
    assert read_cache(one.cache, 1)[0].data_ptr() == pool.planes[0][1, 0, :, 8:].data_ptr()
    assert one.cache.ranges(3, 9) == [range(11, 17)] and one.cache.blocks(9) == [2, 3, 4]
    assert several.cache.ranges(3, 9) == [range(23, 24), range(0, 5)] and several.cache.blocks(9) == [5, 0, 1]


def test_a_pool_is_allocated_once_in_whole_blocks_with_the_learned_prompt_behind_them() -> None:
    pool = KVPool(SHAPES, torch.float64, 11, 4, PROMPT)
    assert (pool.slots, pool.prompt_slots) == (8, range(8, 11))
    assert pool.num_bytes == LAYERS * 2 * HEADS * 12 * HEAD_DIM * 8
    keys, values = pool.pages(1)
    assert keys.shape == values.shape == (3, 4, HEADS, HEAD_DIM)
    assert torch.equal(keys[2, :3].transpose(0, 1), PROMPT[1, 0])


@pytest.mark.parametrize(("slots", "block"), [(3, 4), (4, 0)])
def test_a_pool_without_a_block_is_refused(slots: int, block: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KVPool(SHAPES, torch.float64, slots, block)


@pytest.mark.parametrize("run", [(2, 4), (0, 3), (8, 4), (-4, 4)])
def test_slots_outside_the_pool_and_parts_of_blocks_are_refused(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="whole blocks of 4 in a pool of 8"):
        KVCache(KVPool(SHAPES, torch.float64, 8, 4, PROMPT)).extend((run,))


@pytest.mark.parametrize(("cached", "copied"), [(5, (0, 0)), (1, (0, 2)), (2, (7, 2)), (2, (-1, 1))])
def test_an_adoption_that_does_not_fit_is_refused(cached: int, copied: tuple[int, int]) -> None:
    pool = KVPool(SHAPES, torch.float64, 8, 4)
    with pytest.raises(ValueError, match="do not fit into 4 slots"):
        KVCache(pool, ((0, 4),), cached, copied)


def test_indices_go_to_a_gpu_by_way_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from pageable memory would make the host wait."""
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(len(tensor)) or tensor)
    with FakeTensorMode():  # tensors of a GPU without one: their shapes and places
        KVPool(SHAPES, torch.float64, 16, device="cuda").copy([3, 1], [])
        cache = SimpleNamespace(next_slots=lambda rows: [range(2, 4), range(7, 8)])
        lane = SimpleNamespace(cache=cache, num_rows=3, positions=torch.zeros(3, device="cuda"))
        slots = slots_of([lane])  # type: ignore[list-item]
    assert pinned == [2, 3] and isinstance(slots, torch.Tensor) and slots.is_cuda


def test_layers_may_cache_other_shapes() -> None:
    """Two of one shape, which share a plane, and one whose keys are wider than its values."""
    shapes = [KVShape(2, 4, 4), KVShape(1, 6, 3), KVShape(2, 4, 4)]
    pool = KVPool(shapes, torch.float64, 12, 4)
    assert [tuple(plane.shape[:3]) for plane in pool.planes] == [(2, 2, 2), (1, 1, 1), (1, 1, 1)]
    assert pool.num_bytes == 8 * 16 * sum(shape.num_values for shape in shapes), "and a block for padding rows"
    generator = torch.Generator().manual_seed(0)
    rows = [
        tuple(torch.randn(5, shape.num_heads, width, generator=generator, dtype=torch.float64) for width in widths)
        for shape in shapes
        for widths in [(shape.key_dim, shape.value_dim)]
    ]
    for layer, (keys, values) in enumerate(rows):
        pool.write(layer, torch.tensor([8, 9, 10, 11, 0]), keys, values)
    pool.copy([9], [range(4, 5)])
    for layer, pair in enumerate(rows):
        several = pool.reader([range(8, 12), range(0, 1)])(layer)
        one = pool.reader([range(9, 11)])(layer)
        pages = pool.pages(layer)
        for part, own in enumerate(pair):
            own_KRD = own.transpose(0, 1)
            assert torch.equal(several[part], own_KRD)
            assert torch.equal(one[part], own_KRD[:, 1:3])
            assert torch.equal(pages[part][2], own[:4])
            assert torch.equal(pool.keys_values(layer)[part][:, 4], own_KRD[:, 1])
