"""Connections of strangers to the ports of transfers and of the store: port scans, HTTP, garbage, and silence."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support import peer
from support.peer import Peer

from pipedec.core.verdict import Verdict
from pipedec.transport.rendezvous import CONNECT_SECONDS, StoreServer, join_store, wait_for_key

ZEROS = bytes(64)
UNLIKE_GLOO = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 4096, secrets.token_bytes(100_000), b"\x16\x03\x01"]
SAID = [*UNLIKE_GLOO, ZEROS]


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
    stage.order(peer.receive_message, 0)
    draft.do(peer.send_message, 1, 200, Verdict.of(3), 1)
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
    """The ports are found by scans of the ranks' processes, again and again."""
    done, knocks = threading.Event(), [0]

    def knock() -> None:
        while not done.is_set():
            for port in [port for one in pair for port in listening_ports(one.process.pid or 0)]:
                if (stranger := connect(port, UNLIKE_GLOO[knocks[0] % len(UNLIKE_GLOO)])) is not None:
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
def test_ranks_meet_again_after_a_stranger_has_taken_the_place_of_one(pair: tuple[Peer, Peer], tmp_path: Path) -> None:
    """gloo recognises a rank by the first eight bytes of its connection, which are zero for the first rank that it expects.

    The ports, which differ in each meeting, decide which rank connects to the other one. Only a rank that expects a connection
    takes the stranger's.
    """

    def meet(name: str) -> list[str]:
        """Let rank 1 listen, connect strangers to its ports, and then let rank 0 join."""
        draft, stage = pair
        stage.order(peer.join_again, 1, 2, tmp_path / name)
        deadline = time.monotonic() + peer.PATIENCE_SECONDS
        while not (tmp_path / name).exists() or b"/all/0/1" not in (tmp_path / name).read_bytes():  # rank 1's address
            assert time.monotonic() < deadline, "rank 1 does not listen"
            time.sleep(0.01)
        strangers = [connect(port, ZEROS) for port in listening_ports(stage.process.pid or 0)]
        time.sleep(0.1)
        draft.order(peer.join_again, 0, 2, tmp_path / name)
        results = [one.result() for one in pair]
        for stranger in strangers:
            if stranger is not None:
                stranger.close()
        return results

    for one in pair:
        one.do(peer.connect_within, 2.0)
    meetings = (meet(f"meeting-{number}") for number in range(40))
    disturbed = next(results for results in meetings if results != ["joined"] * 2)
    for rank, result in enumerate(disturbed):
        assert result.startswith(f"RankLost: rank {rank} could not join the 2 ranks: ")
    for rank, one in enumerate(pair):
        one.do(peer.connect_within, CONNECT_SECONDS)
        one.order(peer.join_again, rank, 2, tmp_path / "undisturbed")
    assert [one.result() for one in pair] == ["joined"] * 2
    check_transfers(*pair)


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
