"""Clients that go away, or stop reading: their requests are cancelled, and others go on."""

from __future__ import annotations

import socket
import struct

import pytest
from support.http_server import BOTH, CHAT, COMPLETIONS, Site, next_chunk, open_stream, send, stream, text_of
from support.processes import wait_until
from support.scripted_engine import ANSWER


def reset(connection: socket.socket) -> None:
    """As when a client's machine vanishes and comes back: RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@BOTH
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.failure_case("K1", "K2")
def test_the_requests_of_a_client_that_leaves_are_cancelled(site: Site, path: str, n: int, streamed: bool) -> None:
    for leave in (socket.socket.close, reset):
        site.engine.reset()
        site.engine.allowed = 2
        connection = site.connect()
        send(site, path, connection, n=n, stream=streamed)
        assert wait_until(lambda: site.front.unfinished == n)
        leave(connection)
        assert wait_until(lambda: site.front.unfinished == 0)
        assert wait_until(lambda: sorted(site.engine.cancelled) == list(range(n)))


@BOTH
def test_a_client_that_leaves_in_mid_stream_is_noticed_before_the_next_token(site: Site, path: str) -> None:
    site.engine.allowed = 6
    with open_stream(site, path) as response:
        next_chunk(response.iter_lines())
    assert wait_until(lambda: site.engine.cancelled == [0]) and site.front.unfinished == 0


def test_an_answer_that_was_read_is_not_cancelled(site: Site) -> None:
    stream(site, CHAT)
    site.client.post(COMPLETIONS, json={"prompt": "hello"})
    assert site.front.unfinished == 0 and site.engine.cancelled == []


@pytest.mark.failure_case("K3")
def test_a_client_that_stops_reading_stalls_nobody_and_loses_its_stream(site: Site) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", site.port))
        send(site, CHAT, connection, stream=True, n=8, ignore_eos=True, max_tokens=900, logprobs=True, top_logprobs=5)
        assert wait_until(lambda: site.front.unfinished > 0)
        assert text_of(stream(site, CHAT)) == ANSWER
        assert wait_until(lambda: site.front.unfinished == 0)
