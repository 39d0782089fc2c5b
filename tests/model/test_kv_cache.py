"""The two-level cache keeps its rows in order through commits and prunes, in one run of slots or in several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.kv_caches import read_cache

from pipedec.core import SlotRuns
from pipedec.families import KVShape
from pipedec.model.cache import KVCache, KVPool

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


def indices(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def write(cache: KVCache, layer: int, keys_RKD: torch.Tensor) -> None:
    slots = [slot for run in cache.next_slots(len(keys_RKD)) for slot in run]
    cache.pool.write(layer, torch.tensor(slots, dtype=torch.int64), keys_RKD, -keys_RKD)


def append(cache: KVCache, labels: list[int], to_tree: bool = True) -> None:
    """Write rows whose numbers encode label, layer, and key or value."""
    for layer in range(LAYERS):
        write(cache, layer, (torch.tensor(labels, dtype=torch.float64)[:, None, None] * 10 + layer).expand(-1, HEADS, HEAD_DIM))
    cache.append(len(labels), to_past=not to_tree)


ONE_RUN: SlotRuns = ((0, 120),)
RUNS = st.sampled_from([ONE_RUN, tuple((4 * (7 * index % 30), 4) for index in range(30))])


def make_cache(runs: SlotRuns = ONE_RUN, prompt: torch.Tensor | None = None) -> KVCache:
    pool = KVPool([KVShape(HEADS, HEAD_DIM, HEAD_DIM)] * LAYERS, torch.float64, 120, 4, prompt)
    return KVCache(pool, runs, with_prompt=prompt is not None)


def learned_prompt(length: int) -> torch.Tensor:
    return -1 - torch.rand(LAYERS, 2, HEADS, length, HEAD_DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def assert_holds(cache: KVCache, labels: list[int]) -> None:
    for layer in range(LAYERS):
        keys, values = read_cache(cache, layer)
        expected = (torch.tensor(labels, dtype=torch.float64)[None, :, None] * 10 + layer).expand(HEADS, -1, HEAD_DIM)
        assert torch.equal(keys, expected)
        assert torch.equal(values, -expected)


def assert_begins_with(cache: KVCache, prompt: torch.Tensor) -> None:
    """A view with the prompt is the learned prompt, followed by the view without it."""
    for layer in range(LAYERS):
        with_prompt, without = (read_cache(cache, layer, 0, flag) for flag in (True, False))
        for seen, rows, learned in zip(with_prompt, without, prompt[layer], strict=True):
            assert torch.equal(seen, torch.cat((learned, rows), 1))


@examples(40)
@given(data=st.data(), prompt_length=st.integers(0, 5), runs=RUNS)
def test_any_sequence_of_appends_and_advances_keeps_the_rows(data, prompt_length, runs):
    prompt = learned_prompt(prompt_length)
    cache, past, tree, label = make_cache(runs, prompt if data.draw(st.booleans()) or prompt_length else None), [], [], 0
    for _ in range(data.draw(st.integers(1, 8))):
        if not tree and data.draw(st.booleans()):
            rows = list(range(label, label + data.draw(st.integers(1, 6))))
            append(cache, rows, to_tree=False)
            past, label = past + rows, label + len(rows)
        rows = list(range(label, label + data.draw(st.integers(0, 6))))
        append(cache, rows)
        tree, label = tree + rows, label + len(rows)
        chosen = data.draw(st.permutations(range(len(tree))))
        chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
        split = data.draw(st.integers(0, len(chosen)))
        cache.advance(indices(*chosen[:split]), indices(*chosen[split:]))
        past, tree = past + [tree[row] for row in chosen[:split]], [tree[row] for row in chosen[split:]]
        assert (cache.past_length, cache.tree_length) == (len(past), len(tree))
        assert_holds(cache, past + tree)
        assert_begins_with(cache, prompt)


def test_committing_the_first_rows_moves_only_the_boundary():
    cache = make_cache()
    append(cache, [1, 2, 3])
    before = read_cache(cache, 0)[0].data_ptr()
    cache.advance(indices(0), indices(1, 2))
    assert (cache.past_length, cache.tree_length) == (1, 2)
    assert read_cache(cache, 0)[0].data_ptr() == before
    assert_holds(cache, [1, 2, 3])


def test_a_learned_prompt_takes_no_slots_and_survives_reset():
    prompt = learned_prompt(3)
    cache = make_cache(((8, 4), (0, 4)), prompt)
    assert (cache.length, cache.slots, len(cache.prompt)) == (0, 8, 3)
    append(cache, [1, 2, 3, 4, 5], to_tree=False)
    assert (cache.length, cache.slots) == (5, 8)
    cache.reset()
    assert (cache.length, cache.slots) == (0, 8)
    append(cache, [6])
    assert_holds(cache, [6])
    assert_begins_with(cache, prompt)
    write(cache, 0, torch.ones(2, HEADS, HEAD_DIM, dtype=torch.float64))
    assert torch.equal(read_cache(cache, 0, 2, True)[0], torch.cat((prompt[0, 0], read_cache(cache, 0, 2)[0]), 1))
    with pytest.raises(ValueError, match="9 rows do not fit into the 8 slots"):
        read_cache(cache, 0, 8, True)


def test_written_rows_do_not_count_until_they_are_appended():
    cache = make_cache()
    append(cache, [1])
    write(cache, 0, torch.ones(2, HEADS, HEAD_DIM, dtype=torch.float64))
    assert cache.length == 1
    assert read_cache(cache, 0, 2)[0].shape == (HEADS, 3, HEAD_DIM)


def test_misuse_is_refused():
    cache = make_cache(((4, 4),))
    with pytest.raises(ValueError, match="5 rows do not fit into the 4 slots that this request was given"):
        cache.next_slots(5)
    with pytest.raises(ValueError, match="5 rows do not fit into the 4 slots that this request was given"):
        read_cache(cache, 0, 5)
    with pytest.raises(ValueError, match="cannot have been written"):
        cache.append(5)
    append(cache, [1, 2])
    with pytest.raises(ValueError, match="a past that 2 tree rows follow"):
        cache.append(0, to_past=True)
    for committed, kept in (((0,), (0,)), ((2,), ()), ((), (-1,))):
        with pytest.raises(ValueError, match="distinct indices below 2"):
            cache.advance(indices(*committed), indices(*kept))


@examples(25)
@given(data=st.data(), past_length=st.integers(0, 9), tree_length=st.integers(0, 4), prompt_length=st.integers(0, 2), runs=RUNS)
def test_release_keeps_the_given_rows_and_the_tree(data, past_length, tree_length, prompt_length, runs):
    prompt = learned_prompt(prompt_length)
    cache = make_cache(runs, prompt if prompt_length else None)
    past = list(range(past_length))
    append(cache, past, to_tree=False)
    append(cache, tree := list(range(50, 50 + tree_length)))
    kept = [row for row in past if data.draw(st.booleans())]
    cache.release(indices(*kept))
    assert (cache.past_length, cache.tree_length) == (len(kept), tree_length)
    assert_holds(cache, kept + tree)
    assert_begins_with(cache, prompt)
    append(cache, [70])
    cache.advance(indices(tree_length), indices(*range(tree_length)))
    assert_holds(cache, [*kept, 70, *tree])


@pytest.mark.parametrize("kept", [(1, 0), (1, 1), (0, 3), (-1, 0)])
def test_release_refuses_slots_outside_the_past_or_out_of_order(kept):
    cache = make_cache()
    append(cache, [1, 2, 3], to_tree=False)
    append(cache, [4])
    with pytest.raises(ValueError, match="ascending and below 3"):
        cache.release(indices(*kept))
    assert_holds(cache, [1, 2, 3, 4])
