"""Which hosts take over ranks: from the plan and from where ranks are, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.clusters import clustered

from pipedec.cluster.spares import Spares
from pipedec.cluster.stalls import Stall
from pipedec.config import ClusterConfig, DeviceConfig, ServerConfig
from pipedec.core.errors import RankLost, UserError
from pipedec.plan.placement import Placement, rank_places, spare_places
from pipedec.scheduler import Supervision

# The draft and stage 1 on the first host, stages 2 and 3 on the second, stage 4 on the third, two spares on the fourth.
PLANNED = tuple(Placement(host, "cpu", index) for host, index in (("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)))
SPARES = Spares(PLANNED, (Placement("d", "cpu", 0), Placement("d", "cpu", 1)), redis_host="c")
PLACES = {rank: place.host for rank, place in enumerate(PLANNED)}
NOW = Supervision(0, "up", None, (0, 1, 2, 3, 4), (), {}, {}, {}, PLACES, (), None, ())


def test_ranks_of_a_host_go_to_spares() -> None:
    assert SPARES.reassigned([2, 3], replace(NOW, lost_nodes=("b",))) == {2: "d", 3: "d"}


def test_a_host_that_has_come_back_is_free_again_but_comes_last() -> None:
    moved = replace(NOW, places={**NOW.places, 2: "d", 3: "d"})
    assert SPARES.reassigned([4], replace(moved, lost_nodes=("c",))) == {4: "b"}
    assert SPARES.reassigned([2, 3], replace(moved, lost_nodes=("d",))) == {2: "b", 3: "b"}
    mixed = replace(NOW, places={**NOW.places, 2: "d"})
    assert SPARES.reassigned([4], mixed) == {4: "d"}


def test_where_too_few_are_free_it_is_said_how_many_are_needed() -> None:
    with pytest.raises(
        RankLost, match=r"no spare is left for rank 0 \(draft\), rank 1 \(stage 1\), rank 4 \(stage 4\): .* --spares 3"
    ):
        SPARES.reassigned([0, 1, 4], replace(NOW, lost_nodes=("a", "c")))
    with pytest.raises(RankLost, match="no spare is left"):
        SPARES.reassigned([2], replace(NOW, lost_nodes=("b", "d")))


def test_ranks_that_move_compute_on_different_devices_and_return_to_their_own() -> None:
    first = SPARES.device_for(2, "d", {})
    second = SPARES.device_for(3, "d", {2: first})
    assert {first, second} == set(SPARES.standing_by)
    assert SPARES.device_for(2, "b", {}) == PLANNED[2] and SPARES.device_for(0, "b", {3: PLANNED[3]}) == PLANNED[2]
    with pytest.raises(RankLost, match=r"rank 4 \(stage 4\) was given to d, which has no free device"):
        SPARES.device_for(4, "d", dict(zip((2, 3), SPARES.standing_by, strict=True)))


def test_ranks_that_share_a_device_move_to_one_and_share_it_there() -> None:
    planned = (PLANNED[4], *PLANNED[1:])  # rank 0 shares stage 4's device, the only one of host c
    shared, now = replace(SPARES, planned=planned), replace(NOW, places={**NOW.places, 0: "c"}, lost_nodes=("c",))
    assert shared.devices("c") == [PLANNED[4]]
    assert shared.device_for(4, "c", {0: PLANNED[4]}) == PLANNED[4] == shared.device_for(0, "c", {4: PLANNED[4]})
    one = replace(shared, standing_by=SPARES.standing_by[:1])
    assert one.reassigned([0, 4], now) == {0: "d", 4: "d"}, "one spare is enough"
    device = one.device_for(0, "d", {})
    assert one.device_for(4, "d", {0: device}) == device == SPARES.standing_by[0]
    moved = replace(now, places={**now.places, 0: "d", 4: "d"}, lost_nodes=("b", "c"))
    assert shared.reassigned([2], moved) == {2: "d"}, "they take one of its two devices"
    with pytest.raises(RankLost, match=r"no spare is left for .*: start with --spares 3"):
        shared.reassigned([2, 3], moved)


@pytest.mark.parametrize(
    ("rank", "peer", "left"),
    [
        (2, 1, "b"),  # not rank 0's host
        (1, 2, "b"),
        (4, 3, "b"),  # not that of Redis
        (0, 4, "a"),  # Redis keeps more than rank 0 does
        (1, 0, None),  # one host
        (4, None, None),  # it computes: no link is to blame
    ],
)
@pytest.mark.failure_case("S8")
def test_of_two_hosts_between_which_nothing_arrives_one_is_left(rank: int, peer: int | None, left: str | None) -> None:
    assert SPARES.host_to_leave(Stall(rank, peer, 5.0), NOW) == left


def test_no_host_is_left_without_need_or_without_spares() -> None:
    stall = Stall(2, 1, 5.0)
    assert SPARES.host_to_leave(stall, replace(NOW, expired=(1,))) is None  # a process has stopped
    assert replace(SPARES, standing_by=()).host_to_leave(stall, NOW) is None


def config(*servers: ServerConfig, spares: tuple[DeviceConfig, ...] = ()) -> ClusterConfig:
    partition = {"stages": 2, "draft_device": DeviceConfig("one", "cpu")}
    return clustered(servers, {"two": partition}, target="target", draft="draft", spares=spares)


def test_spares_are_devices_that_the_partition_leaves() -> None:
    chosen = config(ServerConfig("one", {"cpu": 4}), ServerConfig("two", {"cpu": 2}))
    assert spare_places(chosen) == () == spare_places(chosen, count=0)
    assert [place.host for place in spare_places(chosen, count=2)] == ["two", "two"]  # another host than the ranks'
    taken = {*rank_places(chosen), *spare_places(chosen, count=3)}
    assert len(taken) == 6
    with pytest.raises(UserError, match=r"--spares 4: the partition leaves 3 devices"):
        spare_places(chosen, count=4)


def test_no_stage_takes_the_spares_that_the_file_names() -> None:
    servers = ServerConfig("one", {"cpu": 3}), ServerConfig("two", {"cpu": 2})
    chosen = config(*servers, spares=(DeviceConfig("one", "cpu"), DeviceConfig("two", "cpu")))
    assert [place.host for place in rank_places(chosen)] == ["one", "one", "two"]
    assert [(place.host, place.index) for place in spare_places(chosen)] == [("one", 2), ("two", 1)]
    assert len(spare_places(chosen, count=1)) == 1
    with pytest.raises(UserError, match="spares: no free cpu is left on two"):
        rank_places(config(*servers, spares=(DeviceConfig("two", "cpu", 3),)))
