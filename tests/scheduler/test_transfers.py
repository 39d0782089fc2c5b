"""The order of transfers between timesteps: without conflict, granted by Redis, checked, never a deadlock."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transfer_order import DUPLEXES, transfer_phases, transfers_of
from support.whole_scheduler import WholeScheduler

from pipedec.config import Settings
from pipedec.core.errors import PipedecError
from pipedec.messages.run import RunDescription
from pipedec.scheduler import Task
from pipedec.scheduler.workflow import (
    Phase,
    PlannedTransfer,
    after_window,
    checked_transfers,
    initial_windows,
    transfers_between_timesteps,
)
from pipedec.topology import Topology

MakeScheduler = Callable[[Topology], WholeScheduler]
DESCRIPTION = RunDescription(Settings.of(target="target"), ((1,),), ((0, 1),))
FIVE = Topology.even(5, 5)
GROUPED = Topology(((1, 2, 3), (4,), (5, 6)))


def all_groupings(stages: int) -> Iterator[Topology]:
    """Every way to cut a row of stages into groups."""
    for count in range(stages):
        for cuts in combinations(range(1, stages), count):
            bounds = [0, *cuts, stages]
            yield Topology(tuple(tuple(range(low + 1, high + 1)) for low, high in pairwise(bounds)))


TOPOLOGIES = [topology for stages in range(1, 6) for topology in all_groupings(stages)]
LARGER = [Topology.even(12, groups) for groups in (1, 5, 7, 12)]
topologies = st.integers(1, 12).flatmap(lambda stages: st.sampled_from(list(all_groupings(stages))))
duplexes = st.sampled_from(DUPLEXES)


def ids(phases: list[Phase]) -> list[list[str]]:
    return [[str(transfer) for transfer in phase] for phase in phases]


def test_half_duplex_lets_a_rank_take_part_in_one_transfer_at_a_time() -> None:
    """Algorithm 2's rule, in the order n→0, n−1→n, …, 0→1."""
    assert ids(transfer_phases(FIVE, "half")) == [["5>0", "3>4", "1>2"], ["4>5", "2>3", "0>1"]]
    assert ids(transfer_phases(Topology.even(2, 2), "half")) == [["2>0"], ["1>2"], ["0>1"]]
    assert ids(transfer_phases(Topology.even(4, 4), "half")) == [["4>0", "2>3"], ["3>4", "1>2"], ["0>1"]]
    assert ids(transfer_phases(Topology.even(1, 1), "half")) == [["1>0"], ["0>1"]]


def test_full_duplex_lets_a_rank_send_and_receive_at_the_same_time() -> None:
    assert ids(transfer_phases(FIVE, "full")) == [["5>0", "4>5", "3>4", "2>3", "1>2", "0>1"]]


def test_transfers_inside_a_group_are_part_of_its_timestep() -> None:
    assert ids(transfer_phases(GROUPED, "full")) == [["6>0", "4>5", "3>4", "0>1"]]
    assert ids(transfer_phases(GROUPED, "half")) == [["6>0", "4>5"], ["3>4", "0>1"]]
    assert [len(transfers_of(rank, GROUPED, "half")) for rank in GROUPED.ranks] == [2, 1, 0, 1, 2, 1, 1]


@given(topologies, duplexes)
def test_every_transfer_is_in_one_phase_and_none_conflicts(topology: Topology, duplex: str) -> None:
    phases = transfer_phases(topology, duplex)
    assert sorted(transfer for phase in phases for transfer in phase) == sorted(transfers_between_timesteps(topology))
    assert phases[0][0] == (topology.final_rank, 0)
    for phase in phases:
        sources, targets = zip(*phase, strict=True)
        ends = [*sources, *targets]
        for crowd in [ends] if duplex == "half" else [sources, targets]:
            assert len(crowd) == len(set(crowd))


@given(topologies, duplexes)
def test_every_rank_accepts_its_own_order(topology: Topology, duplex: str) -> None:
    for rank in topology.ranks:
        own = transfers_of(rank, topology, duplex)
        assert checked_transfers([[list(transfer) for transfer in phase] for phase in own], rank, topology, duplex) == own


def granted(scheduler: WholeScheduler, duplex: str) -> list[Any]:
    """The transfers that every rank is granted."""
    scheduler.open(DESCRIPTION, duplex)
    scheduler.begin_session(0, initial_windows(scheduler.topology, 4), 0)
    messages = [scheduler.wait(rank, 0) for rank in scheduler.topology.ranks]
    return [message.tasks[0].payload["transfers"] for message in messages if message is not None]


@pytest.mark.parametrize("duplex", DUPLEXES)
def test_redis_grants_the_order_of_the_rule(make_scheduler: MakeScheduler, duplex: str) -> None:
    for topology in TOPOLOGIES:
        expected = [
            [[list(transfer) for transfer in phase] for phase in transfers_of(rank, topology, duplex)] for rank in topology.ranks
        ]
        assert granted(make_scheduler(topology), duplex) == expected


def test_a_rank_refuses_what_a_redis_grants_that_knows_other_links(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler(FIVE)
    assert checked_transfers(granted(scheduler, "half")[2], 2, FIVE, "half")
    following = {"duplex": "full", "groups": "1-1 2-3 4-4 5-5"}
    for seq, (field, value) in zip((1, 5), following.items(), strict=True):
        scheduler.client.hset(scheduler.keys.run, field, value)
        for rank in reversed(FIVE.ranks):
            task = Task.compute("window", rank, seq)
            scheduler.report(rank, [task], after_window(task, FIVE, 4) if rank == 0 else [])
        again = scheduler.wait(2, 0)
        assert again is not None
        with pytest.raises(PipedecError, match=r"rank 2 .* refuses the order"):
            checked_transfers(again.tasks[0].payload["transfers"], 2, FIVE, "half")


RIGHT = [[[1, 2]], [[2, 3]]]  # of rank 2 of five stages, half duplex


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([[[1, 2]]], "2>3 is missing"),
        ([], "2>3 is missing"),
        ([[[2, 3]], [[1, 2]], [[2, 3]]], "2>3 is granted twice"),
        ([[[2, 3]], [[3, 4]]], "3>4 is no transfer of this rank"),
        ([[[2, 3]], [[0, 2]]], "0>2 is no transfer of this rank"),
        ([[[3, 2]], [[1, 2]]], "3>2 is no transfer of this rank"),
        ([[[2, 3], [1, 2]]], "2>3 and 1>2 at the same time, but the links are half duplex"),
        (None, "it is no list of phases of transfers"),
        ([[[2, 3, 4]], [[1, 2]]], "it is no list of phases of transfers"),
        ({}, "2>3 is missing"),
        ("send", "it is no list of phases of transfers"),
        ([[["2", "3"]], [[1, 2]]], "its transfers are not between ranks"),
    ],
)
def test_a_rank_refuses_a_wrong_order(wrong: Any, reason: str) -> None:
    assert checked_transfers(RIGHT, 2, FIVE, "half") == transfers_of(2, FIVE, "half")
    assert checked_transfers(RIGHT[::-1], 2, FIVE, "half") == transfers_of(2, FIVE, "half")[::-1], (
        "what others do is not its matter"
    )
    with pytest.raises(PipedecError) as refusal:
        checked_transfers(wrong, 2, FIVE, "half")
    assert str(refusal.value) == f"rank 2 (stage 2) refuses the order of transfers that Redis granted: {reason}"


def test_a_rank_refuses_the_order_of_another_topology_or_duplex() -> None:
    with pytest.raises(PipedecError, match="at the same time, but the links are half duplex"):
        checked_transfers(transfers_of(2, FIVE, "full"), 2, FIVE, "half")
    assert checked_transfers(transfers_of(2, FIVE, "half"), 2, FIVE, "full"), "one after the other is always possible"
    with pytest.raises(PipedecError, match="6>0 is no transfer of this rank"):
        checked_transfers(transfers_of(0, Topology.even(6, 6), "half"), 0, FIVE, "half")


def test_rank_0_refuses_to_send_before_it_has_the_result() -> None:
    with pytest.raises(PipedecError, match="0>1 before the result on which it depends"):
        checked_transfers([[[0, 1]], [[5, 0]]], 0, FIVE, "half")


# Ranks that follow their orders: each yields the transfers that it offers and goes on with the one that took place. A transfer
# needs both its ranks at once, as with a link that holds nothing.
Offers = Generator[tuple[PlannedTransfer, ...], PlannedTransfer, None]


def in_order(phases: tuple[Phase, ...], wanted: Callable[[PlannedTransfer], bool]) -> Offers:
    """The wanted transfers, phase by phase, those of a phase in any order."""
    for phase in phases:
        offered = [transfer for transfer in phase if wanted(transfer)]
        while offered:
            offered.remove((yield tuple(offered)))


def draft_rank(topology: Topology, phases: tuple[Phase, ...], timesteps: int) -> Offers:
    """At most one message per group is in flight. In a phase with both, the result comes first: the next message needs it."""
    order = tuple((transfer,) for phase in phases for transfer in phase)
    for number in range(1, timesteps + 1):
        is_full = number > topology.num_groups
        yield from in_order(order, lambda transfer, is_full=is_full: is_full or transfer.source == 0)  # type: ignore[misc]
    for _ in range(min(timesteps, topology.num_groups)):
        yield from in_order(order, lambda transfer: transfer.target == 0)


def stage_rank(rank: int, topology: Topology, phases: tuple[Phase, ...], timesteps: int, window: int) -> Offers:
    """Between two timesteps the granted order, and after a window's last one the output before the next window's input."""
    is_entry, is_exit = rank in topology.entry_ranks, rank in topology.exit_ranks
    receives = PlannedTransfer(rank - 1, rank)
    yield (receives,)
    for number in range(1, timesteps + 1):
        last, ends_window = number == timesteps, number % window == 0
        if not is_exit:
            yield (PlannedTransfer(rank, rank + 1),)
        if not is_entry or ends_window or last:
            yield from in_order(phases, lambda transfer: transfer.source == rank)
            if not last:
                yield (receives,)
        else:
            yield from in_order(phases, lambda transfer: True)


def singles(phases: tuple[Phase, ...]) -> list[Phase]:
    return [(transfer,) for phase in phases for transfer in phase]


def run(
    topology: Topology, orders: dict[int, tuple[Phase, ...]], timesteps: int, window: int
) -> dict[int, tuple[PlannedTransfer, ...]]:
    """Run until no transfer can take place. Returns what the ranks that have not ended still offer."""
    ranks: dict[int, Offers] = {0: draft_rank(topology, orders[0], timesteps)}
    for rank in topology.ranks[1:]:
        ranks[rank] = stage_rank(rank, topology, orders[rank], timesteps, window)
    offers = {rank: next(offering) for rank, offering in ranks.items()}
    while possible := [
        transfer
        for rank, offered in offers.items()
        for transfer in offered
        if transfer.source == rank and transfer in offers.get(transfer.target, ())
    ]:
        for rank in possible[0]:
            try:
                offers[rank] = ranks[rank].send(possible[0])
            except StopIteration:
                del offers[rank]
    return offers


def orders_of(topology: Topology, duplex: str) -> dict[int, tuple[Phase, ...]]:
    """What is granted to every rank; duplex ``listed``: full duplex, the transfers of a phase one after the other as listed."""
    if duplex == "listed":
        return {rank: tuple(singles(order)) for rank, order in orders_of(topology, "full").items()}
    return {rank: transfers_of(rank, topology, duplex) for rank in topology.ranks}


@pytest.mark.parametrize("duplex", [*DUPLEXES, "listed"])
@pytest.mark.parametrize("window", [1, 8])
def test_ranks_that_follow_their_orders_never_deadlock(duplex: str, window: int) -> None:
    for topology in TOPOLOGIES + LARGER:
        for timesteps in (1, 2 * topology.num_stages):
            assert run(topology, orders_of(topology, duplex), timesteps, window) == {}, (topology, timesteps)
