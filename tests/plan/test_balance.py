"""How the layers of a model are divided among stages: equal ones, and ones that differ in time and memory."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipedec.core.errors import UserError
from pipedec.plan.placement import balance


def equal_layers(num_layers: int, layer_ms: Sequence[float], extra_ms: Sequence[float], room: Sequence[int]) -> list[int]:
    """The numbers of equal layers: each further one goes to the stage that is fastest with it, of equals the first."""
    counts = [1] * len(room)
    queue = [(extra + 2 * layer_ms[stage], stage) for stage, extra in enumerate(extra_ms) if room[stage] > 1]
    heapq.heapify(queue)
    for _ in range(num_layers - len(room)):
        _, stage = heapq.heappop(queue)
        counts[stage] += 1
        if counts[stage] < room[stage]:
            heapq.heappush(queue, (extra_ms[stage] + (counts[stage] + 1) * layer_ms[stage], stage))
    return counts


TIMES = st.one_of(st.integers(1, 20).map(float), st.sampled_from([1 / 3, 1.843, 3.671354, 22.09, 0.0123456789]))


@given(st.data(), st.integers(1, 16), st.integers(1, 126))
def test_equal_layers_go_one_by_one_to_the_stage_that_is_fastest_with_them(
    data: st.DataObject, stages: int, num_layers: int
) -> None:
    assume(stages <= num_layers)
    layer_ms, extra_ms = (data.draw(st.lists(TIMES, min_size=stages, max_size=stages)) for _ in range(2))
    room = data.draw(st.lists(st.integers(1, num_layers), min_size=stages, max_size=stages))
    assume(sum(room) >= num_layers)
    tenths = [10 * layers + 9 for layers in room]
    steps = sorted(extra + count * layer for layer, extra in zip(layer_ms, extra_ms, strict=True) for count in range(num_layers))
    assume(all(later == earlier or later - earlier > 1e-6 for earlier, later in itertools.pairwise(steps)))
    found = balance([[one] * num_layers for one in layer_ms], extra_ms, [10] * num_layers, tenths)
    assert found == equal_layers(num_layers, layer_ms, extra_ms, room)


def cuts(num_layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, num_layers), stages - 1):
        yield 0, *inner, num_layers


SMALL = st.integers(1, 9)


@given(st.data(), st.integers(1, 4), st.integers(1, 8))
def test_no_cut_of_unequal_layers_has_a_faster_slowest_stage(data: st.DataObject, stages: int, num_layers: int) -> None:
    assume(stages <= num_layers)
    lists = st.lists(SMALL, min_size=num_layers, max_size=num_layers)
    layer_ms = data.draw(st.lists(lists.map(lambda times: [*map(float, times)]), min_size=stages, max_size=stages))
    layer_bytes, extra_ms = data.draw(lists), data.draw(st.lists(SMALL.map(float), min_size=stages, max_size=stages))
    room = data.draw(st.lists(st.integers(1, 30), min_size=stages, max_size=stages))

    def slowest(cut: tuple[int, ...]) -> float:
        parts = enumerate(itertools.pairwise(cut))
        return max(extra_ms[stage] + sum(layer_ms[stage][first:last]) for stage, (first, last) in parts)

    def fits(cut: tuple[int, ...]) -> bool:
        parts = enumerate(itertools.pairwise(cut))
        return all(sum(layer_bytes[first:last]) <= room[stage] for stage, (first, last) in parts)

    choices = [cut for cut in cuts(num_layers, stages) if fits(cut)]
    if not choices:
        with pytest.raises(UserError, match=r"has no room for a single layer$|have room for [0-9]+ layers, the target has"):
            balance(layer_ms, extra_ms, layer_bytes, room)
        return
    cut = (0, *itertools.accumulate(balance(layer_ms, extra_ms, layer_bytes, room)))
    assert cut in choices
    assert slowest(cut) == min(map(slowest, choices))


def test_a_stage_with_layers_of_more_bytes_has_fewer_of_them() -> None:
    """The first four layers take four times as long and as much memory as the others."""
    sizes = [4] * 4 + [1] * 12
    times = [float(size) for size in sizes]
    assert balance([times] * 2, [0.0, 0.0], sizes, [28, 28]) == [4, 12], "16 ms and 12 ms, not 12 ms and 16 ms: earlier in all"
    assert balance([times] * 2, [0.0, 0.0], sizes, [12, 28]) == [3, 13]
    assert balance([times] * 4, [0.0] * 4, sizes, [28] * 4) == [2, 2, 6, 6]


@pytest.mark.parametrize(
    ("sizes", "room", "most"), [([1] * 6, [2, 3], 5), ([3, 1, 1, 3, 1], [5, 3], 4), ([4, 1], [1, 5], 0), ([1, 1, 2], [2, 1], 2)]
)
def test_what_does_not_fit_is_counted_in_layers(sizes: list[int], room: list[int], most: int) -> None:
    with pytest.raises(UserError, match=rf"^the 2 stages have room for {most} layers, the target has {len(sizes)}$"):
        balance([[1.0] * len(sizes)] * 2, [0.0, 0.0], sizes, room)


def test_a_large_model_is_cut_at_once() -> None:
    layer_ms = [[1.0 + (layer * stage) % 7 for layer in range(126)] for stage in range(16)]
    balance(layer_ms, [0.0] * 16, [1] * 126, [126] * 16)
    started = time.process_time()
    balance(layer_ms, [0.0] * 16, [1] * 126, [126] * 16)
    assert time.process_time() - started < 0.05
