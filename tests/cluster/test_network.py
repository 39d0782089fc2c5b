"""What a machine finds out about itself: its names, its addresses, the routes from it; on hosts whose name is 127.0.1.1 there."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from support.hosts import Hosts
from support.processes import wait_until

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


def on(hosts: Hosts, index: int, expression: str) -> object:
    """The value of a Python expression about ``network`` on a host."""
    program = "import json; from pipedec.cluster import network; from pipedec.config import ServerConfig\n"
    ended = hosts.run(index, sys.executable, "-c", f"{program}print(json.dumps({expression}))")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_hosts_that_call_themselves_127_0_1_1_find_the_way_to_each_other(hosts3: Hosts) -> None:
    found = on(
        hosts3, 1,
        "[network.addresses_of('host-2'), network.routed_address('host-1'), network.interface_of('10.77.0.2'),"
        " network.routed_address('192.0.2.1')]",
    )  # fmt: skip
    assert found == [["127.0.1.1"], "10.77.0.2", "eth0", None]
    entries = ", ".join(f"network.is_this_host(ServerConfig({name!r}, {{'cpu': 1}}))" for name in (*hosts3.names, "alias"))
    assert on(hosts3, 1, f"[{entries}]") == [False, True, False, None]


@pytest.mark.slow
def test_a_firewall_and_a_missing_cable_are_told_apart_from_a_closed_port(hosts3: Hosts) -> None:
    ask = "network.can_connect('host-3', 8000, 1)"
    assert on(hosts3, 0, ask) == "connection refused"
    server = hosts3.popen(2, sys.executable, "-c", "import socket; socket.create_server(('', 8000)).accept(); input()", stdin=-1)
    try:
        assert wait_until(lambda: hosts3.is_listening(2, 8000))
        hosts3.block_port(2, 8000)
        assert on(hosts3, 0, ask) == "no answer within 1 s"
        hosts3.unblock(2)
        hosts3.block_port(2)
        assert on(hosts3, 0, ask) == "no answer within 1 s"
        assert on(hosts3, 0, "network.can_connect('host-3', 22, 5)") is None
        assert on(hosts3, 2, "network.can_connect('host-1', 22, 5)") is None
        hosts3.unblock(2)
        hosts3.unplug(2)
        assert on(hosts3, 0, ask) in ("no answer within 1 s", "no route to host")
        hosts3.plug(2)
        assert on(hosts3, 0, ask) is None
    finally:
        server.kill()
        server.wait(10)
