"""The store through which processes find each other: on one address, for those who join in time."""

from __future__ import annotations

import psutil
import pytest

from pipedec.core import PipedecError
from pipedec.transport.rendezvous import StoreServer, join_store, wait_for_key

LOOPBACK = "127.0.0.1"


def test_who_joins_sees_what_others_have_set() -> None:
    server = StoreServer(LOOPBACK)
    joined = join_store(LOOPBACK, server.port)
    joined.set("one", "1")
    assert server.store.get("one") == b"1"
    assert wait_for_key(joined, "one", 5.0)
    assert not wait_for_key(joined, "two", 0.1)


def test_it_listens_on_its_address_alone() -> None:
    server = StoreServer(LOOPBACK)
    listening = [place.laddr.ip for place in psutil.Process().net_connections("tcp") if place.laddr.port == server.port]
    assert set(listening) == {LOOPBACK}


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PipedecError, match=r"cannot listen on 192\.0\.2\.1"):
        StoreServer("192.0.2.1")
