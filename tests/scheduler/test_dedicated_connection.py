"""DedicatedConnection: after interrupts and errors every reply still belongs to its command."""

from __future__ import annotations

import signal
import threading

import pytest
import redis
from support.processes import wait_until

from pipedec.core.errors import SchedulerLost
from pipedec.scheduler import EmbeddedRedis, RankScheduler, connect
from pipedec.scheduler.client import DedicatedConnection
from pipedec.topology import Topology

TWO = Topology.even(2, 2)


def test_an_interrupted_wait_leaves_no_reply_behind(redis_client: redis.Redis) -> None:
    """Ctrl-C in the middle of a BLPOP: the message pushed afterwards must not answer the next command."""
    connection = DedicatedConnection(redis_client)
    before = signal.signal(signal.SIGALRM, lambda number, frame: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            connection.call("BLPOP", "interrupted", 5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert wait_until(lambda: not redis_client.info("clients")["blocked_clients"])
    redis_client.rpush("interrupted", "message")
    assert connection.call("PING") in (b"PONG", "PONG")
    assert connection.call("BLPOP", "interrupted", 1) == [b"interrupted", b"message"]


def test_a_second_thread_does_not_wait_for_the_first(redis_client: redis.Redis) -> None:
    connection = DedicatedConnection(redis_client)
    replies: list[object] = []
    waiter = threading.Thread(target=lambda: replies.append(connection.call("BLPOP", "awaited", 20)))
    waiter.start()
    try:
        for number in range(20):
            assert connection.call("ECHO", number) == str(number).encode()
    finally:
        connection.call("RPUSH", "awaited", "message")
        waiter.join(20)
    assert replies in ([[b"awaited", b"message"]], [(b"awaited", b"message")])


def test_replies_of_several_commands_come_in_one_round_trip(redis_client: redis.Redis) -> None:
    connection = DedicatedConnection(redis_client)
    redis_client.rpush("several", "message")
    assert connection.call_all([("ECHO", "first"), ("BLPOP", "several", 1)]) == [b"first", [b"several", b"message"]]


def test_an_error_reply_to_the_first_of_two_commands_leaves_no_reply_behind(redis_client: redis.Redis) -> None:
    connection = DedicatedConnection(redis_client)
    with pytest.raises(redis.ResponseError):
        connection.call_all([("LPOP",), ("ECHO", "late")])
    assert connection.call("ECHO", "next") == b"next"


def test_a_dead_server_raises_scheduler_lost() -> None:
    with EmbeddedRedis() as server:
        scheduler = RankScheduler(connect(server.url), "dying", TWO)
        assert scheduler.wait(0, 0.01) is None
    with pytest.raises(SchedulerLost, match="cannot reach Redis"):
        scheduler.wait(0, 0.01)
