"""What a machine finds out about itself: its names, its addresses, the routes from it; on hosts whose name is 127.0.1.1 there."""

from __future__ import annotations

import socket

import pytest

from pipedec.cluster import network
from pipedec.config import ServerConfig

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is called Node17, and knows some names: node17 is 127.0.1.1 as on Debian."""
    known = {"node17": "127.0.1.1", "far": "192.0.2.7", "near": "127.0.0.1", "127.0.0.1": "127.0.0.1"}

    def resolve(host: str, port: object, **keywords: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (known[host], 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "Node17")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"host": "node17"}, True),
        ({"host": "NODE17.example.org"}, True),
        ({"host": "alpha", "hostname": "node17"}, True),
        ({"host": "near", "hostname": "node18"}, False),
        ({"host": "near"}, True),
        ({"host": "far"}, False),
        ({"host": "far", "ssh": "me@near"}, False),
        ({"host": "alias", "ssh": "me@near"}, True),
        ({"host": "alias", "ssh": "me@far"}, False),
        ({"host": "alias", "ssh": "me@node17"}, True),
        ({"host": "alias", "ssh": "ssh://me@127.0.0.1:2222"}, True),
        ({"host": "alias", "ssh": "me@bastion"}, None),
        ({"host": "alias"}, None),
    ],
)
def test_a_host_knows_its_own_entry(given: dict[str, str], expected: bool | None, named: None) -> None:
    assert network.is_this_host(ServerConfig(devices={"cpu": 1}, **given)) is expected


@pytest.mark.parametrize(
    ("own", "name", "expected"),
    [
        ("node17.a.org", "node17", True),
        ("node17.a.org", "node17.b.org", False),
        ("node1", "node17", False),
    ],
)
def test_a_domain_may_be_left_out(own: str, name: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    assert network.is_own_name(name) is expected


def test_addresses_of_this_machine() -> None:
    assert network.routed_address("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo" and network.interface_address("lo") == "127.0.0.1"
    assert network.interface_of("192.0.2.1") is None and network.interface_address("none0") is None
    for name in ("no-such-host.invalid", "a..b"):
        assert network.routed_address(name) is None and network.addresses_of(name) == []


def test_connecting_gives_a_reason_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.can_connect("127.0.0.1", port, 5) is None
    assert network.can_connect("127.0.0.1", port, 5) == "connection refused"
    assert network.can_connect("no-such-host.invalid", 1, 5) == "unknown host name"
