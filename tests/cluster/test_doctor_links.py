"""Links between hosts: measuring over loopback, what figures mean beside ``network:``, and three hosts of which one is slow."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.hosts import Hosts
from support.tiny_pair import Pair

from pipedec.cluster.doctor import links
from pipedec.cluster.doctor.facts import NetworkFacts
from pipedec.cluster.doctor.links import LinkServer, MeasuredLink, link_findings, measure
from pipedec.config.cluster import NetworkConfig

FACTS = NetworkFacts(
    "alpha", True, ("10.0.0.1",), {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}, "10.0.0.1", "eth0", 40000,
    {"eth0": 10_000, "ib0": 10_000, "unused": 100_000},
)  # fmt: skip
GIVEN = NetworkConfig(latency_us=50, bandwidth_gbps=10)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_loopback_is_measured(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SEND_SECONDS", 0.1)
    server = LinkServer(listener)
    port = listener.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()  # one that only tries whether it can connect
    link = measure("127.0.0.1", port)
    assert link.error is None and link.gbps > 0 and 0 < link.latency_us < 1e6
    server.close()
    assert measure("127.0.0.1", port).error == "connection refused"


def test_a_host_that_says_nothing_is_given_up(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SESSION_SECONDS", 0.2)
    assert measure("127.0.0.1", listener.getsockname()[1]).error == "not measured within 0 s"


def test_a_peer_that_speaks_something_else_is_left_alone(listener: socket.socket) -> None:
    LinkServer(listener)
    with socket.create_connection(listener.getsockname()) as peer:
        peer.settimeout(30.0)
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        try:
            assert peer.recv(1) == b""
        except ConnectionResetError:  # it had not read all
            return


@pytest.mark.parametrize(
    ("link", "facts", "words"),
    [
        (MeasuredLink(9.4, 45), FACTS, None),
        (MeasuredLink(8.1, 199), FACTS, None),
        (MeasuredLink(39, 5), FACTS, None),
        (MeasuredLink(0.94, 45), FACTS, "0.94 Gbit/s bandwidth_gbps: 0.94 what else uses"),
        (
            MeasuredLink(0.94, 45),
            replace(FACTS, speeds_mbps={"eth0": 1000}),
            "eth0 has negotiated 1: cable bandwidth_gbps: 0.94",
        ),
        (
            MeasuredLink(0.94, 45),
            replace(FACTS, speeds_mbps={"eth0": 1000, "ib0": 40_000}),
            "set interface: ib0 of this (40 Gbit/s)",
        ),
        (MeasuredLink(9.4, 700), FACTS, "given as 50 µs latency_us: 700"),
        (MeasuredLink(error="connection refused"), FACTS, "connection refused run the doctor again"),
    ],
)
def test_what_a_measurement_means(link: MeasuredLink, facts: NetworkFacts, words: str | None) -> None:
    (finding,) = link_findings(GIVEN, facts, {"beta": link})
    assert finding.level == ("note" if words else "ok")
    assert all(word in f"{finding.value} {finding.mend}" for word in ("to beta:", *(words or "").split())), finding


def test_the_slowest_link_counts_and_hosts_without_links_say_so() -> None:
    (finding,) = link_findings(GIVEN, FACTS, {"beta": MeasuredLink(9.4, 45), "gamma": MeasuredLink(4.7, 45)})
    assert finding.value == "to beta: 9.4 Gbit/s, 45 µs; to gamma: 4.7 Gbit/s, 45 µs" and "bandwidth_gbps: 4.7" in str(
        finding.mend
    )
    (finding,) = link_findings(GIVEN, FACTS, {})
    assert finding.level == "ok" and "not measured" in finding.value
    assert link_findings(GIVEN, FACTS, None) == []


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_links_of_three_hosts_are_measured(hosts3: Hosts, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    servers = "".join(f"  - {{host: {host}, devices: {{cpu: 2}}}}\n" for host in hosts3.names)
    partitions = (
        "partitions:\n  three: {stages: 3, devices: [{host: host-1, device: cpu}, {host: host-2, device: cpu}, "
        "{host: host-3, device: cpu}]}\n  one: {stages: 2, servers: [host-1]}\n"
    )
    file.write_text(
        f"target: {pair.target}\nnetwork: {{latency_us: 100000, bandwidth_gbps: 0.1}}\nservers:\n{servers}{partitions}"
    )

    def told(partition: str) -> dict[str, tuple[str, str, str | None]]:
        command = (sys.executable, "-m", "pipedec.cli", "doctor", "--cluster", file, "--partition", partition, "--json")
        table = json.loads(hosts3.run(0, *command, timeout=180).stdout).items()
        rows = {host: one for host, findings in table for one in findings if one["name"] == "links"}
        return {host: (row["level"], row["value"], row["mend"]) for host, row in rows.items()}

    hosts3.slow_down(1, 20)
    try:
        links_of = told("three")
    finally:
        hosts3.speed_up(1)
    assert [links_of[host][0] for host in hosts3.names] == ["ok", "note", "ok"]
    assert [value.split(":")[0] for _, value, _ in links_of.values()] == ["to host-2", "to host-3", "to host-1"]
    slow = float(links_of["host-2"][1].split()[2])
    assert 0.005 < slow < 0.04 and f"bandwidth_gbps: {slow:g}" in str(links_of["host-2"][2])
    assert told("one") == {"host-1": ("ok", "not measured: no rank here sends to another host", None)}
