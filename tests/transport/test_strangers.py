"""Connections of strangers to the ports of transfers and of the store: port scans, HTTP, garbage, and silence."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support import peer
from support.peer import Peer

from pipedec.core import Verdict
from pipedec.transport.rendezvous import StoreServer, join_store, wait_for_key

SAID = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), b"\xff" * 4096, secrets.token_bytes(100_000), b"\x16\x03\x01"]


def connect(port: int, said: bytes) -> socket.socket | None:
    """Say something to a port of this machine, and hold the connection."""
    with contextlib.suppress(OSError):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
        with contextlib.suppress(OSError):
            stranger.sendall(said)
        return stranger
    return None


def listening_ports(pid: int) -> set[int]:
    found = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    draft, stage = (Peer(rank, 2, tmp_path / "meeting", torch.float32) for rank in range(2))
    try:
        assert draft.result() == stage.result() == "met"
        yield draft, stage
    finally:
        draft.end()
        stage.end()


def check_transfers(draft: Peer, stage: Peer) -> None:
    stage.order(peer.receive_envelope, 0)
    draft.do(peer.send_envelope, 1, 200, Verdict.of(3), 1)
    assert stage.result() == (peer.as_lists(peer.make_step(200, None, 1)), Verdict.of(3))


@pytest.mark.failure_case("S14")
def test_strangers_do_not_disturb_ranks_that_have_joined(pair: tuple[Peer, Peer]) -> None:
    draft, stage = pair
    ports = [port for one in pair for port in listening_ports(one.process.pid or 0)]
    assert ports, "gloo listens for as long as its group lives"
    held = [connect(port, said) for port in ports for said in SAID]
    for stranger in held[::2]:
        if stranger is not None:
            stranger.close()
    for _ in range(3):
        check_transfers(draft, stage)


@pytest.mark.failure_case("S14")
def test_ranks_join_while_strangers_knock(pair: tuple[Peer, Peer], tmp_path: Path) -> None:
    """Whoever listens is found by a scan of its process's ports, again and again."""
    done, knocks = threading.Event(), [0]

    def knock() -> None:
        while not done.is_set():
            for port in [port for one in pair for port in listening_ports(one.process.pid or 0)]:
                if (stranger := connect(port, SAID[knocks[0] % len(SAID)])) is not None:
                    knocks[0] += 1
                    stranger.close()

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        for epoch in range(300):
            if knocks[0] > 12:
                break
            for rank, one in enumerate(pair):
                one.order(peer.join_again, rank, 2, tmp_path / f"meeting-{epoch}")
            assert [one.result() for one in pair] == ["joined"] * 2
            check_transfers(*pair)
    finally:
        done.set()
        knocking.join()
    assert knocks[0] > 12


@pytest.mark.failure_case("S14")
def test_a_store_outlasts_strangers() -> None:
    server = StoreServer("127.0.0.1")
    held = [connect(server.port, said) for said in SAID]
    assert any(held)
    store = join_store("127.0.0.1", server.port)
    store.set("met", "yes")
    assert wait_for_key(server.store, "met", 30.0) and server.store.get("met") == b"yes"
    for stranger in held:
        if stranger is not None:
            stranger.close()
    assert join_store("127.0.0.1", server.port).get("met") == b"yes"
