"""The books of KV memory against a pool that remembers what was written: nobody writes into another's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from pipedec.core.stage_message import SlotRuns
from pipedec.kv import KVManager, Lease

Prefix = tuple[int, ...]  # a token, and all before it


@dataclass
class Running:
    """A running request.

    Attributes:
        text: its tokens, in the order of its slots.
        reported: how many of them the manager knows.
        snapshots: places for states that it has yet to keep, after so many tokens.
    """

    text: list[int]
    slots: list[int] = field(default_factory=list)
    reported: int = 0
    snapshots: list[tuple[int, int]] = field(default_factory=list)


def slots_in(runs: SlotRuns) -> list[int]:
    return [slot for start, length in runs for slot in range(start, start + length)]


class Books(RuleBasedStateMachine):
    """``memory`` is a stage's pool: for each slot the prefix that ends there, or whose rows were computed there for nothing.
    ``states`` are its snapshots: for each place the prefix after which they were kept.
    """

    @initialize(
        block=st.sampled_from((1, 2, 4)),
        num_blocks=st.integers(1, 24),
        shares=st.sampled_from((True, True, False)),
        snapshots=st.sampled_from((3, None, 1, None, 2, 5, 0, 20)),
    )
    def begin(self, block: int, num_blocks: int, shares: bool, snapshots: int | None) -> None:
        self.kv = KVManager(block * num_blocks + block - 1, block, shares, snapshots)
        self.block, self.num_blocks = block, num_blocks
        self.states: list[Prefix | str] = [""] * (snapshots or 0)
        self.memory: list[Prefix | str] = [""] * (block * num_blocks)
        self.running: dict[int, Running] = {}
        self.ended: list[list[int]] = []
        self.number = 0

    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        room=st.integers(0, 9),
        at_once=st.booleans(),
    )
    def open(self, data: st.DataObject, more: list[int], room: int, at_once: bool) -> None:
        known = [[], *self.ended, *(one.text for one in self.running.values())]
        before = data.draw(st.sampled_from(known[::-1]))
        text = [*before[: len(before) - data.draw(st.integers(0, len(before)))], *more]
        expected, free = self.kv.cached_for(text, len(text) + room), self.kv.free_slots
        lease = self.kv.allocate(self.number, text, len(text) + room)
        if lease is None:
            assert expected is None and -(-(len(text) + room) // self.block) * self.block > free
            return
        number, self.number = self.number, self.number + 1
        one = self.running[number] = Running(text, slots_in(lease.slots), lease.cached)
        assert lease.cached == expected and lease.cached < len(text) and len(one.slots) >= len(text) + room
        copied = lease.copied[1]
        for index in range(lease.cached - copied, lease.cached):
            self.memory[one.slots[index]] = self.memory[lease.copied[0] + index - lease.cached + copied]
        self.open_states(one, lease)
        self.check(one)
        self.compute(one, f"opened {number}")
        if at_once:
            self.advance(number, len(text))

    def open_states(self, one: Running, lease: Lease) -> None:
        """States are copied from a snapshot of the very prefix. No place is promised twice."""
        if self.kv.snapshots is None:
            assert lease.snapshot is None and lease.snapshots == ()
            return
        assert (lease.snapshot is None) == (lease.cached == 0) and lease.cached % self.block == 0 and lease.copied == (0, 0)
        assert lease.snapshot is None or self.states[lease.snapshot] == tuple(one.text[: lease.cached])
        one.snapshots = list(lease.snapshots)
        ends, places = [tokens for tokens, _ in lease.snapshots], {place for _, place in lease.snapshots}
        assert len(ends) <= 2 and ends == sorted(set(ends)) and not any(tokens % self.block for tokens in ends)
        assert all(lease.cached < tokens < len(one.text) for tokens in ends) and lease.snapshot not in places
        promised = [place for other in self.running.values() for _, place in other.snapshots]
        assert len(promised) == len(set(promised)) and set(promised) <= set(range(self.kv.snapshots))
        for place in places:
            self.states[place] = "promised"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 9))
    def extend(self, data: st.DataObject, count: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        one = self.running[number]
        if one.reported == len(one.text):
            one.text += data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=count))
            room = self.kv.slots_of(number) + self.kv.free_slots
            runs = self.kv.grow(number, len(one.text))
            assert (runs is None) == (len(one.text) > room)
            if runs is None:
                del one.text[one.reported :]
                return
            one.slots += slots_in(runs)
        self.advance(number, min(one.reported + count, len(one.text)))

    def advance(self, number: int, end: int) -> None:
        """Compute the request's tokens up to ``end``."""
        one = self.running[number]
        for index in range(one.reported, end):
            self.memory[one.slots[index]] = tuple(one.text[: index + 1])
        for tokens, place in [snapshot for snapshot in one.snapshots if snapshot[0] <= end]:
            self.states[place] = tuple(one.text[:tokens])
            one.snapshots.remove((tokens, place))
        self.kv.extend(number, one.text[one.reported : end])
        one.reported = end
        self.compute(one, f"extended {number}")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        one = self.running.pop(number)
        self.kv.free(number)
        self.ended = [*self.ended[-5:], one.text[: one.reported]]
        assert self.kv.slots_of(number) == 0

    @rule()
    def forget(self) -> None:
        self.kv.forget_kept()
        assert self.kv.kept_slots == 0

    def compute(self, one: Running, what: str) -> None:
        """Rows of trees are written behind the tokens."""
        for slot in one.slots[one.reported :]:
            self.memory[slot] = what

    def check(self, one: Running) -> None:
        for index in range(one.reported):
            assert self.memory[one.slots[index]] == tuple(one.text[: index + 1])

    @invariant()
    def tokens_are_where_they_should_be(self) -> None:
        for number, one in getattr(self, "running", {}).items():
            self.check(one)
            assert len(one.slots) == self.kv.slots_of(number) == len(set(one.slots)) <= len(self.memory)

    @invariant()
    def slots_are_counted(self) -> None:
        if hasattr(self, "kv"):
            used = {slot for one in self.running.values() for slot in one.slots}
            assert self.kv.used_slots == len(used) and self.kv.capacity == len(self.memory)
            assert 0 <= self.kv.kept_slots <= self.kv.free_slots == len(self.memory) - len(used)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for number in self.running:
                self.kv.free(number)
            assert self.kv.free_slots == self.kv.capacity
            self.check_that_all_places_are_free()
            lease = self.kv.allocate(-1, [7], self.kv.capacity)
            assert lease is not None and sorted(slots_in(lease.slots)) == list(range(self.kv.capacity))

    def check_that_all_places_are_free(self) -> None:
        self.kv.forget_kept()
        number = min(len(self.states), self.num_blocks // 2) if self.kv.shares_prefixes else 0
        leases = [self.kv.allocate(-2 - one, [one] * 2 * self.block, 2 * self.block) for one in range(number)]
        assert len({lease.snapshots[0][1] for lease in leases if lease is not None}) == number
        for one in range(number):
            self.kv.free(-2 - one)


TestBooks = Books.TestCase
TestBooks.settings = settings(examples(200), stateful_step_count=30)


def opened(kv: KVManager, number: int, text: list[int], slots: int) -> tuple[SlotRuns, int, tuple[int, int]]:
    """Open a request whose tokens are computed at once."""
    lease = kv.allocate(number, text, slots)
    assert lease is not None
    kv.extend(number, text[lease.cached :])
    return lease.slots, lease.cached, lease.copied


TEXT = list(range(100))


def test_full_blocks_are_shared_with_running_requests_and_stored_once() -> None:
    kv = KVManager(1024, 16)
    opened(kv, 0, TEXT, 160)
    for number in range(1, 8):
        slots, cached, copied = opened(kv, number, [*TEXT[:70], *([100 + number] * 10)], 80)
        assert slots[0] == (0, 64) and cached == 70 and copied[1] == 6
    assert kv.used_slots == 160 + 7 * 16
    assert (kv.queried_tokens, kv.adopted_tokens) == (99 + 7 * 79, 7 * 70)


def test_a_second_turn_goes_on_in_the_last_block_of_the_first() -> None:
    """Then all its slots follow each other, and nothing is copied."""
    kv = KVManager(1024, 16)
    opened(kv, 0, TEXT, 160)
    kv.free(0)
    assert (kv.used_slots, kv.kept_slots) == (0, 112)
    assert opened(kv, 1, [*TEXT, *TEXT], 300) == (((0, 304),), 100, (0, 0))


def test_of_a_last_block_that_differs_the_beginning_is_copied() -> None:
    kv = KVManager(1024, 16)
    opened(kv, 0, TEXT, 100)
    kv.free(0)
    for number in (1, 2):
        slots, cached, copied = opened(kv, number, [*TEXT[:98], 0, 0], 112)
        assert slots[0] == (0, 96) and slots[1] != (96, 16)
        assert cached == 98 and copied[1] == 2


def test_what_a_request_holds_in_its_last_block_is_nobody_elses_while_it_runs() -> None:
    kv = KVManager(1024, 16)
    opened(kv, 0, TEXT, 160)
    assert opened(kv, 1, [*TEXT, 5], 160)[1] == 96
    kv = KVManager(2**40, 16, shares_prefixes=False)
    opened(kv, 0, TEXT, 160)
    assert opened(kv, 1, TEXT, 160)[1] == 0 and (kv.kept_slots, kv.queried_tokens) == (0, 0)


def test_the_last_token_is_computed() -> None:
    kv = KVManager(1024, 16)
    for number in range(3):
        _, cached, _ = opened(kv, number, TEXT[:32], 32)
        assert cached == (31 if number else 0)
        kv.free(number)


def test_the_prefix_that_was_not_used_for_longest_goes_first_its_end_before_its_beginning() -> None:
    kv = KVManager(16 * 16, 16)
    for number in range(4):
        opened(kv, number, [number] * 64, 64)
    for number in (2, 0, 1, 3):
        kv.free(number)
    assert kv.cached_for([0] * 65, 80) == 64  # looking does not count
    assert kv.cached_for([2] * 65, 80) == 64
    opened(kv, 4, [4] * 30, 32)
    assert [kv.cached_for([text] * 65, 80) for text in range(4)] == [64, 64, 32, 64]
    kv.free(4)
    opened(kv, 5, [0] * 65, 80)
    kv.free(5)
    opened(kv, 6, [6] * 6 * 16, 6 * 16)
    assert [kv.cached_for([text] * 65, 80) for text in range(4)] == [64, 0, 0, 48]


def test_an_opening_that_finds_no_room_changes_nothing() -> None:
    kv = KVManager(64, 16)
    opened(kv, 0, TEXT[:32], 32)
    opened(kv, 1, TEXT[50:80], 30)
    kv.free(0)
    assert kv.allocate(2, TEXT[:40], 48) is None and kv.allocate(3, TEXT[:33], 49) is None
    assert (kv.used_slots, kv.kept_slots) == (32, 32)
    assert kv.grow(1, 64) is not None and kv.kept_slots == 0
    assert kv.grow(1, 65) is None


def test_a_request_grows_behind_its_last_block_if_that_is_free() -> None:
    kv = KVManager(256, 16)
    opened(kv, 0, [0], 32)
    opened(kv, 1, [1], 32)
    assert kv.grow(1, 64) == ((64, 32),) and kv.grow(1, 50) == ()
    assert kv.grow(0, 48) == ((96, 16),)
    assert (kv.slots_of(0), kv.free_slots, kv.slots_of(9)) == (48, 144, 0)


def test_the_smallest_gap_that_suffices_is_taken() -> None:
    kv = KVManager(256, 16, shares_prefixes=False)
    for number, slots in enumerate((64, 16, 32, 16)):
        opened(kv, number, [0], slots)
    kv.free(0)
    kv.free(2)
    assert opened(kv, 4, [0], 32)[0] == ((80, 32),)
    assert opened(kv, 5, [0], 208 - 64)[0] == ((128, 128), (0, 16))


def test_wrong_books_are_noticed() -> None:
    with pytest.raises(ValueError, match="not one block"):
        KVManager(15, 16)
    kv = KVManager(64, 16)
    opened(kv, 0, TEXT[:10], 16)
    with pytest.raises(ValueError, match="open already"):
        kv.allocate(0, TEXT, 16)
    with pytest.raises(ValueError, match="too few"):
        kv.extend(0, TEXT[:7])


def with_states(kv: KVManager, number: int, text: list[int], computed: int | None = None) -> Lease:
    """Open a request whose first ``computed`` tokens are computed at once, by default all."""
    expected = kv.cached_for(text, len(text))
    lease = kv.allocate(number, text, len(text))
    assert lease is not None and lease.cached == expected and lease.copied == (0, 0)
    kv.extend(number, text[lease.cached : computed])
    return lease


@pytest.mark.parametrize("ends", [True, False], ids=["each ends before the next", "all run"])
def test_states_are_kept_where_a_prompt_ends_and_where_a_known_beginning_of_another_ends(ends: bool) -> None:
    kv = KVManager(1024, 16, snapshots=8)
    texts = [TEXT, TEXT, [*TEXT[:70], *[200] * 30], [*TEXT[:70], *[300] * 31]]
    found = list[Lease]()
    for number, text in enumerate(texts):
        found.append(with_states(kv, number, text))
        if ends:
            kv.free(number)
    assert [(lease.cached, lease.snapshot) for lease in found] == [(0, None), (96, 0), (0, None), (64, 1)]
    assert [lease.snapshots for lease in found] == [((96, 0),), (), ((64, 1), (96, 2)), ((96, 3),)]
    assert (kv.queried_tokens, kv.adopted_tokens) == (99 + 99 + 99 + 100, 96 + 64)


def test_an_answer_is_adopted_from_the_third_turn_on() -> None:
    """The second turn finds the states after the first prompt, and keeps those after the answer."""
    kv = KVManager(1024, 16, snapshots=8)
    with_states(kv, 0, TEXT[:40])
    kv.grow(0, 70)
    kv.extend(0, TEXT[40:70])
    kv.free(0)
    second = with_states(kv, 1, TEXT[:85])
    assert (second.cached, second.snapshot, second.snapshots) == (32, 0, ((64, 1), (80, 2)))
    assert with_states(kv, 2, [*TEXT[:64], 7, 7]).cached == 64


def test_places_of_a_paused_request_are_free_unless_its_tokens_are_known() -> None:
    kv = KVManager(1024, 16, snapshots=2)
    other, third = [5] * 100, [6] * 100
    assert with_states(kv, 0, TEXT, 50).snapshots == ((96, 0),)
    assert with_states(kv, 1, other, 99).snapshots == ((96, 1),)
    assert kv.cached_for(TEXT, 100) == 0, "its states are not kept yet"
    assert with_states(kv, 2, third, 0).snapshots == ((96, 1),), "a place that is promised is not free"
    assert with_states(kv, 3, [7] * 100, 0).snapshots == ()
    kv.free(2)
    kv.free(0)
    assert {with_states(kv, number, [number] * 100, 0).snapshots for number in (20, 21)} == {((96, 0),), ((96, 1),)}
    assert with_states(kv, 4, TEXT, 50).snapshots == ()


def test_the_snapshot_that_was_not_used_for_longest_goes_first() -> None:
    kv = KVManager(1024, 16, snapshots=2)
    texts = [[number] * 100 for number in range(4)]
    for number in (0, 1):
        with_states(kv, number, texts[number])
        kv.free(number)
    assert with_states(kv, 2, texts[0]).snapshot == 0
    assert with_states(kv, 3, texts[3]).snapshots == ((96, 1),)
    assert [kv.cached_for(text, 100) for text in texts] == [96, 0, 0, 96]
    longer = with_states(kv, 4, texts[0] * 2)
    assert (longer.cached, longer.snapshot, longer.snapshots) == (96, 0, ((192, 1),))


def test_the_snapshot_that_a_request_adopts_does_not_go_for_its_own() -> None:
    kv = KVManager(1024, 16, snapshots=1)
    with_states(kv, 0, TEXT)
    longer = with_states(kv, 1, TEXT * 2)
    assert (longer.cached, longer.snapshot, longer.snapshots) == (96, 0, ())


def test_a_snapshot_goes_with_its_block() -> None:
    kv = KVManager(128, 16, snapshots=2)
    with_states(kv, 0, TEXT)
    kv.free(0)
    assert with_states(kv, 1, TEXT[::-1]).snapshots == ((96, 0),)
    assert kv.kept_slots == 16 and kv.cached_for(TEXT, 16) == 0


def test_states_are_kept_with_the_block_that_another_running_request_has_for_the_same_tokens() -> None:
    kv = KVManager(1024, 16, snapshots=3)
    assert with_states(kv, 0, TEXT, 40).snapshots == ((96, 0),)
    assert with_states(kv, 1, TEXT).snapshots == ((32, 1), (96, 2))
    assert kv.cached_for(TEXT, 100) == 32
    kv.free(1)
    assert kv.cached_for(TEXT, 100) == 96
    kv.extend(0, TEXT[40:])
    assert with_states(kv, 2, [9] * 100).snapshots == ((96, 0),), "another snapshot of these tokens was there before"
    assert kv.cached_for(TEXT, 100) == 96


def test_without_places_or_shared_prefixes_nothing_is_adopted() -> None:
    for kv in (KVManager(1024, 16, snapshots=0), KVManager(1024, 16, shares_prefixes=False, snapshots=9)):
        for number in range(3):
            lease = with_states(kv, number, TEXT)
            assert (lease.cached, lease.snapshot, lease.snapshots) == (0, None, ())
        assert kv.adopted_tokens == 0


@pytest.mark.parametrize("forgets", [KVManager.forget_kept, KVManager.clear])
def test_snapshots_are_forgotten_with_prefixes(forgets: Callable[[KVManager], None]) -> None:
    kv = KVManager(1024, 16, snapshots=2)
    with_states(kv, 0, TEXT)
    with_states(kv, 1, [1] * 100, 50)
    forgets(kv)
    assert kv.cached_for(TEXT, 100) == 0
    if forgets is KVManager.forget_kept:
        kv.extend(1, [1] * 50)
        assert kv.cached_for([1] * 100, 100) == 96, "a promise is kept"
