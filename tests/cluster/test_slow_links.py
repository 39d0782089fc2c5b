"""Hosts on slow links: the links are as slow as they say."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts
from support.processes import marked_processes, wait_until
from support.slow_links import Link

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PORT = 9000
# On a host: sends every datagram back, but for "end", which it answers with those that came before; and says the digest of
# whatever comes over a connection when its other end has no more to say.
PEER = f"""
import hashlib, socket, threading
datagrams, streams = socket.socket(type=socket.SOCK_DGRAM), socket.create_server(("", {PORT}))
datagrams.bind(("", {PORT}))

def echo():
    seen = []
    while True:
        text, sender = datagrams.recvfrom(65536)
        if text == b"end":
            text = b" ".join(seen)
        else:
            seen.append(text)
        datagrams.sendto(text, sender)

threading.Thread(target=echo, daemon=True).start()
print("ready", flush=True)
while True:
    digest, connection = hashlib.sha256(), streams.accept()[0]
    while text := connection.recv(65536):
        digest.update(text)
    connection.sendall(digest.digest())
    connection.close()
"""
CLIENT = f"""
import hashlib, json, socket, sys, time
place, links = (sys.argv[1], {PORT}), socket.socket(type=socket.SOCK_DGRAM)
links.connect(place)
"""
ROUND_TRIPS = """
seconds = []
for number in range(5):
    began = time.monotonic()
    links.send(b"%d" % number)
    assert links.recv(99) == b"%d" % number
    seconds.append(time.monotonic() - began)
print(json.dumps(seconds))
"""
STREAM = """
text = bytes(range(250)) * int(sys.argv[2])
began = time.monotonic()
with socket.create_connection(place) as connection:
    connection.sendall(text)
    connection.shutdown(socket.SHUT_WR)
    digest = connection.recv(99)
print(json.dumps([time.monotonic() - began, digest.hex()]))
"""
NUMBERS = """
for number in range(200):
    links.send(b"%d" % number)
links.settimeout(0.1)
while True:
    links.send(b"end")
    try:
        seen = links.recv(9999)
    except TimeoutError:
        continue
    if b" " in seen:
        print(json.dumps(list(map(int, seen.split()))))
        break
"""
WAITS = """
links.settimeout(0.2)
links.send(b"text")
try:
    print(links.recv(99), flush=True)
except TimeoutError:
    print("nothing", flush=True)
links.settimeout(30)
print(links.recv(99).decode(), flush=True)
"""


@pytest.fixture
def linked(slow_hosts3: Hosts) -> Iterator[Hosts]:
    """The last two of three hosts answer."""
    command = (sys.executable, "-ISc", PEER)
    peers = [slow_hosts3.popen(index, *command, stdout=subprocess.PIPE, bufsize=0) for index in (1, 2)]
    for peer in peers:
        assert peer.stdout.readline() == b"ready\n"
    yield slow_hosts3
    for peer in peers:
        peer.kill()
        peer.communicate()
    for pair in ((0, 1), (0, 2), (1, 2)):
        slow_hosts3.link(*pair, **vars(Link()))


def ask(hosts: Hosts, index: int, program: str, *arguments: str) -> list:
    """What a program prints on the first host, which asks another one."""
    done = hosts.run(0, sys.executable, "-ISc", CLIENT + program, hosts.address(index), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_pair_is_as_far_apart_as_it_is_told_and_others_are_not(linked: Hosts) -> None:
    linked.link(1, 0, delay_ms=30, jitter_ms=10)
    assert 0.06 <= min(ask(linked, 1, ROUND_TRIPS)) < 0.2
    linked.link(0, 1, delay_ms=100)
    assert min(ask(linked, 1, ROUND_TRIPS)) >= 0.2 > min(ask(linked, 2, ROUND_TRIPS))


@pytest.mark.parametrize(
    "link", [Link(rate_mbit=8), Link(delay_ms=5, jitter_ms=5, loss=0.05, rate_mbit=20), Link()], ids=["slow", "lossy", "fast"]
)
def test_everything_arrives_and_no_sooner_than_its_rate_allows(linked: Hosts, link: Link) -> None:
    linked.link(0, 1, **vars(link))
    num_bytes = 250 * 2000
    seconds, digest = ask(linked, 1, STREAM, "2000")
    assert digest == hashlib.sha256(bytes(range(250)) * 2000).hexdigest()
    assert seconds >= (num_bytes * 8 / (link.rate_mbit * 1e6) if link.rate_mbit else 0)


def test_what_a_link_does_not_lose_keeps_its_order(linked: Hosts) -> None:
    linked.link(0, 1, jitter_ms=5)
    assert ask(linked, 1, NUMBERS) == list(range(200))
    linked.link(0, 2, jitter_ms=5, loss=0.2)
    seen = ask(linked, 2, NUMBERS)
    assert seen == sorted(seen) and 100 < len(seen) < 200


def test_a_stalled_link_holds_back_what_it_is_given(linked: Hosts) -> None:
    linked.link(0, 1, stalled=True)
    command = (sys.executable, "-ISc", CLIENT + WAITS, linked.address(1))
    with linked.popen(0, *command, stdout=subprocess.PIPE, bufsize=0) as client:
        assert client.stdout.readline() == b"nothing\n"
        linked.link(0, 1, stalled=False)
        assert client.stdout.readline() == b"text\n"


DIES = """
import os, signal
from support.hosts import namespace_hosts
from support.slow_links import Link

with namespace_hosts(2, Link()) as hosts:
    hosts.run(0, "sh", "-c", "sleep 600 &", stdout=-3)
    print("made", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_however_their_owner_ends_hosts_and_switch_end(slow_hosts3: Hosts) -> None:
    before = marked_processes()
    owner = subprocess.Popen([sys.executable, "-c", DIES], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"made\n"
    assert owner.returncode == -signal.SIGKILL
    assert wait_until(lambda: marked_processes() <= before)
