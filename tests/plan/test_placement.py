"""The order of hosts around the ring, and the host of rank 0."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console
from support.clusters import clustered

from pipedec.config import ClusterConfig, ServerConfig
from pipedec.core.errors import UserError
from pipedec.plan.partition import plan
from pipedec.plan.placement import EXACT_STOPS, rank_places, shortest_round, spare_places
from pipedec.plan.table import plan_table

# Milliseconds between hosts: a square with the sides a-c, c-b, b-d and d-a. All others are 40.
SIDES = {("a", "c"): 5, ("c", "b"): 6, ("b", "d"): 7, ("d", "a"): 8}


def square(partition: Mapping[str, Any], sides: Mapping[tuple[str, str], float] = SIDES, **keys: Any) -> ClusterConfig:
    """Four hosts of two devices each, listed from a to d."""
    links = [{"between": list(pair), "latency_us": 1000 * ms} for pair, ms in sides.items()]
    servers = [ServerConfig(host, {"l40": 2}) for host in "abcd"]
    network = {"latency_us": 40_000, "links": links}
    models = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "dtype": "bfloat16"}
    return clustered(servers, {"only": {"stages": 7, **partition}}, network=network, **{**models, **keys})


def ring(config: ClusterConfig) -> str:
    """The hosts of all ranks, rank 0's first."""
    return "".join(place.host for place in rank_places(config))


@pytest.mark.parametrize(
    ("partition", "hosts"),
    [
        ({"draft_device": {"host": "a", "device": "l40"}}, "aaccbbdd"),
        ({"draft_device": {"host": "b", "device": "l40"}}, "bbccaadd"),
        ({"draft_device": {"host": "auto", "device": "l40"}}, "aaccbbdd"),
        ({"draft_device": {"host": "auto", "device": "l40"}, "stages": 3, "servers": ["b", "c"]}, "bbcc"),
        ({"draft_device": {"host": "d", "device": "l40", "shared": True}}, "daaccbbd"),
        ({"draft": "none"}, "aaaccbbd"),
        ({"draft": "none", "draft_device": {"host": "d", "device": "l40"}}, "daaccbbd"),
        ({"draft_device": {"host": "d", "device": "l40"}, "layers": [5, 5, 5, 5, 4, 4, 4]}, "daabbccd"),
        ({"draft_device": {"host": "d", "device": "l40"}, "stages": 2,
          "devices": [{"host": "b", "device": "l40"}, {"host": "a", "device": "l40"}]}, "dba"),
    ],
)  # fmt: skip
def test_hosts_are_in_the_order_of_the_shortest_way_around_the_ring(partition: Mapping[str, Any], hosts: str) -> None:
    """From rank 0 through all stages and back. Where devices or layers are given one by one, they keep their order."""
    assert ring(square(partition)) == hosts


@pytest.mark.parametrize("sides", [{}, {("a", "b"): 40}, dict.fromkeys(SIDES | {("a", "b"): 0, ("c", "d"): 0}, 8)])
def test_hosts_that_are_equally_far_stay_as_they_are_listed(sides: Mapping[tuple[str, str], float]) -> None:
    assert ring(square({"draft_device": {"host": "d", "device": "l40"}}, sides)) == "daabbccd"


def test_the_plan_says_what_the_order_of_hosts_saves() -> None:
    partition = {"draft_device": {"host": "a", "device": "l40"}}
    config = square(partition)
    found, listed = plan(config), plan(config.for_partition(given={"layers": (5, 5, 5, 5, 4, 4, 4)}))
    within_ms = 4 * 0.02  # rank 0 and stage 1, and the stages of the other hosts
    assert found.ring_us / 1000 == pytest.approx(5 + 6 + 7 + 8 + within_ms)
    assert listed.ring_us / 1000 == pytest.approx(between := 40 + 6 + 40 + 8 + within_ms)
    assert listed.tpot_ms - found.tpot_ms == pytest.approx(94 - 26, rel=0.01)
    output = io.StringIO()
    Console(width=100, file=output).print(plan_table(found))
    assert "  latency                 26.1 ms   around the ring, one way over every link\n" in output.getvalue()
    assert f"  order of hosts       a, c, b, d: as the file lists them, {between:.1f} ms around the ring\n" in output.getvalue()
    Console(width=100, file=(output := io.StringIO())).print(plan_table(listed))
    assert "order of hosts" not in output.getvalue()


def test_rank_0_goes_to_the_host_with_the_shortest_ring() -> None:
    """All devices of b and c are stages'; a is near c, or else d near b."""
    partition = {"stages": 4, "servers": ["b", "c"], "draft_device": {"host": "auto", "device": "l40"}}
    config = square(partition)
    assert ring(config) == "abbcc" and {place.host for place in spare_places(config, count=3)} == {"a", "d"}
    assert ring(square(partition, {pair: ms for pair, ms in SIDES.items() if pair != ("a", "c")})) == "dbbcc"
    with pytest.raises(UserError, match=r"^partitions\.only\.draft_device: no server has a h100$"):
        plan(square(partition | {"draft_device": {"host": "auto", "device": "h100"}}))
    with pytest.raises(UserError, match=r"^partitions\.only\.stages: 8 stages need as many devices, but 7 are free$"):
        plan(square({"stages": 8, "draft_device": {"host": "auto", "device": "l40"}}))


def on_a_circle(hosts: Sequence[int], count: int) -> list[str]:
    def length(source: str, target: str) -> int:
        angle = math.tau * (int(source) - int(target)) / count
        return round(1e6 * math.hypot(1 - math.cos(angle), math.sin(angle)))

    return shortest_round("0", [str(host) for host in hosts], length)


@pytest.mark.parametrize("count", [EXACT_STOPS + 1, 15])
def test_hosts_on_a_circle_are_visited_around_it(count: int) -> None:
    """Listed in steps of 7 around it; beyond eight, all orders are too many to compare."""
    listed = [7 * step % count for step in range(1, count)]
    found = [int(host) for host in on_a_circle(listed, count)]
    assert found in (around := list(range(1, count)), around[::-1])


def test_many_hosts_that_are_equally_far_stay_as_they_are_listed() -> None:
    hosts = [f"host-{number}" for number in range(EXACT_STOPS + 4)]
    assert shortest_round(hosts[0], hosts[1:], lambda source, target: 50) == hosts[1:]
