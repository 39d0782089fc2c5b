"""The store through which processes find each other: on one address, for those who join in time."""

from __future__ import annotations

import threading

import psutil
import pytest

from pipedec.core.errors import PipedecError
from pipedec.transport.rendezvous import (
    CONNECT_SECONDS,
    MEETING_SECONDS,
    Rendezvous,
    Store,
    StoreServer,
    join_store,
    wait_for_key,
)
from pipedec.transport.torch_distributed import ProcessGroups

LOOPBACK = "127.0.0.1"


def test_who_joins_sees_what_others_have_set() -> None:
    server = StoreServer(LOOPBACK)
    joined = join_store(LOOPBACK, server.port)
    joined.set("one", "1")
    assert server.store.get("one") == b"1"
    assert wait_for_key(joined, "one", 5.0)
    assert not wait_for_key(joined, "two", 0.1)


def pair_store(server: StoreServer) -> Store:
    """Where stage 2 finds stage 1."""
    return ProcessGroups(Rendezvous(2, 3, join_store(LOOPBACK, server.port), MEETING_SECONDS, "lo")).pair_store(1)


def test_a_stage_waits_for_a_neighbour_as_long_as_for_all_ranks() -> None:
    server = StoreServer(LOOPBACK)
    assert pair_store(server).timeout.total_seconds() == MEETING_SECONDS


@pytest.mark.slow
@pytest.mark.failure_case("S3c")
def test_a_neighbour_that_first_meets_its_other_one_is_waited_for() -> None:
    """Longer than a store is waited for when it is joined."""
    server = StoreServer(LOOPBACK)
    theirs, mine = pair_store(server), pair_store(server)
    threading.Timer(CONNECT_SECONDS + 1.0, theirs.set, ("the id of NCCL", "it has come")).start()
    assert mine.get("the id of NCCL") == b"it has come"


def test_it_listens_on_its_address_alone() -> None:
    server = StoreServer(LOOPBACK)
    listening = [place.laddr.ip for place in psutil.Process().net_connections("tcp") if place.laddr.port == server.port]
    assert set(listening) == {LOOPBACK}


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PipedecError, match=r"cannot listen on 192\.0\.2\.1"):
        StoreServer("192.0.2.1")
