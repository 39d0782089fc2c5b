"""The pool gives every slot to one cache at most, keeps what caches hold when they move, and is empty when all are closed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from pipedec.core import UserError
from pipedec.model import KVCache, KVPool

LAYERS, HEADS, HEAD_DIM = 2, 3, 4
PROMPT = -1 - torch.rand(LAYERS, 2, HEADS, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def make_pool(block: int = 4, prompt: torch.Tensor | None = None, capacity: int | None = None) -> KVPool:
    return KVPool(LAYERS, HEADS, HEAD_DIM, torch.float64, "cpu", block, prompt, capacity)


@dataclass
class Held:
    """A cache and the labels of its rows."""

    cache: KVCache
    past: list[int] = field(default_factory=list)
    tree: list[int] = field(default_factory=list)

    def append(self, labels: list[int], to_tree: bool) -> None:
        self.cache.reserve(len(labels))
        write([(self.cache, labels)])
        (self.cache.extend_tree if to_tree else self.cache.extend_past)(len(labels))
        (self.tree if to_tree else self.past).extend(labels)

    def check(self) -> None:
        cache, labels = self.cache, torch.tensor([*self.past, *self.tree], dtype=torch.float64)[:, None, None]
        assert (cache.past_length, cache.tree_length) == (len(self.past), len(self.tree))
        for layer in range(LAYERS):
            keys, values = cache.view(layer, 0, True)
            expected = (labels * 10 + layer).expand(-1, HEADS, HEAD_DIM).transpose(0, 1)
            prompt = PROMPT[layer, :, :, : cache.prompt_length]
            assert torch.equal(keys, torch.cat((prompt[0], expected), 1))
            assert torch.equal(values, torch.cat((prompt[1], -expected), 1))


def write(rows: list[tuple[KVCache, list[int]]]) -> None:
    """The rows of several caches at once."""
    slots = torch.tensor([slot for cache, labels in rows for slot in cache.slots_behind(len(labels))])
    labels = torch.tensor([label for _, labels in rows for label in labels], dtype=torch.float64)[:, None, None]
    for layer in range(LAYERS):
        keys = (labels * 10 + layer).expand(-1, HEADS, HEAD_DIM)
        rows[0][0].pool.write(layer, slots, keys, -keys)


def slots_of(cache: KVCache) -> set[int]:
    return set(range(cache.start - cache.prompt_length, cache.start + cache.slots))


@examples(60)
@given(data=st.data(), block=st.integers(1, 5), capacity=st.sampled_from([None, 40, 120]))
def test_caches_come_grow_and_go(data: st.DataObject, block: int, capacity: int | None) -> None:
    pool, held, label = make_pool(block, PROMPT, capacity), list[Held](), 0
    address = pool.tensor.data_ptr()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "grow", "grow", "grow", "advance", "close"]))
        try:
            if action == "open" or not held:
                held.append(Held(pool.open(data.draw(st.booleans()), data.draw(st.integers(1, 20)))))
            one = data.draw(st.sampled_from(held))
            if action == "grow":
                count = data.draw(st.integers(1, 12))
                one.append(list(range(label, label + count)), to_tree=bool(one.tree) or data.draw(st.booleans()))
                label += count
        except UserError as error:
            assert capacity is not None and "the KV cache is full" in str(error)
        if action == "advance":
            committed = data.draw(st.integers(0, len(one.tree)))
            kept = data.draw(st.permutations(range(committed, len(one.tree))))
            one.cache.advance(torch.arange(committed), torch.tensor(kept, dtype=torch.int64))
            one.past, one.tree = one.past + one.tree[:committed], [one.tree[row] for row in kept]
        if action == "close":
            one.cache.close()
            held.remove(one)
        check(pool, held)
        assert capacity is None or pool.tensor.data_ptr() == address
    for one in held:
        one.cache.close()
    assert (pool.used_slots, pool.num_caches) == (0, 0)


def check(pool: KVPool, held: list[Held]) -> None:
    taken = set[int]()
    for one in held:
        one.check()
        own = slots_of(one.cache)
        assert not own & taken and max(own) < pool.slots
        taken |= own
    assert len(taken) <= pool.used_slots <= pool.slots and pool.used_slots % pool.block == 0
    assert pool.num_bytes == LAYERS * 2 * HEADS * pool.slots * HEAD_DIM * 8


def test_a_full_pool_doubles_and_stays_as_large() -> None:
    pool = make_pool(block=4)
    assert (pool.slots, pool.used_slots) == (4, 0)
    caches = [pool.open() for _ in range(5)]
    assert (pool.slots, pool.used_slots) == (32, 20)
    for cache in caches:
        cache.close()
    assert (pool.slots, pool.used_slots) == (32, 0)
    assert pool.open(reserve=30).slots == 32


def test_a_cache_grows_in_place_where_the_next_block_is_free_and_is_moved_where_not() -> None:
    pool = make_pool(capacity=24)
    first, second = Held(pool.open()), Held(pool.open())
    second.append([1, 2, 3, 4, 5], to_tree=False)
    assert (first.cache.start, second.cache.start) == (0, 4), "in place"
    first.append([6, 7, 8, 9, 10], to_tree=True)
    assert (first.cache.start, second.cache.start) == (12, 4), "behind the other"
    third = Held(pool.open())
    assert third.cache.start == 0, "in the gap"
    first.check()
    second.check()


def test_gaps_of_a_fixed_pool_are_closed_if_nothing_else_helps() -> None:
    pool = make_pool(capacity=16)
    held = [Held(pool.open()) for _ in range(4)]
    for number, one in enumerate(held):
        one.append([number], to_tree=False)
    for number in (0, 2):
        held[number].cache.close()
    held[1].append(list(range(5, 15)), to_tree=False)
    assert (held[3].cache.start, held[1].cache.start) == (0, 4)
    held[1].check()
    held[3].check()
    with pytest.raises(UserError, match="16 of its 16 slots are used, and a request needs 8; run fewer"):
        pool.open(reserve=5)
    assert (pool.used_slots, pool.num_caches) == (16, 2)
    held[3].cache.close()
    assert pool.open(reserve=4).start == 0


def test_a_learned_prompt_fills_whole_blocks_in_front_so_that_the_past_begins_with_one() -> None:
    pool = make_pool(prompt=PROMPT)
    plain, masked = pool.open(), pool.open(with_prompt=True)
    assert (plain.prompt_length, plain.start, plain.slots) == (0, 0, 4)
    assert (masked.prompt_length, masked.start, masked.slots) == (3, 8, 4)
    Held(masked).check()


def test_the_pool_is_as_large_after_a_thousand_requests_as_after_a_few_hundred() -> None:
    pool, chooser, held, sizes = make_pool(), random.Random(1), list[KVCache](), list[int]()
    for _ in range(1000):
        if len(held) == 8:
            held.pop(chooser.randrange(8)).close()
        held.append(pool.open(reserve=chooser.randint(1, 60)))
        one = chooser.choice(held)
        one.reserve(one.slots + 1)
        sizes.append(pool.slots)
    assert sizes[300:] == [sizes[300]] * 700 and sizes[300] <= 2048
