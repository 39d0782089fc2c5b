"""The connection that a rank keeps for itself: replies stay with their commands, whatever goes wrong."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import redis

from pipedec.core import SchedulerLost
from pipedec.scheduler import EmbeddedServer, RedisScheduler, Task, connect, initial_tasks
from pipedec.scheduler.client import DedicatedConnection
from pipedec.topology import Topology

TWO = Topology.even(2, 2)


def test_an_interrupted_wait_leaves_no_reply_behind(redis_client: redis.Redis) -> None:
    """Ctrl-C in the middle of a BLPOP: the message pushed afterwards must not answer the next command."""
    own = DedicatedConnection(redis_client)
    before = signal.signal(signal.SIGALRM, lambda number, frame: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            own.call("BLPOP", "interrupted", 5)
    finally:
        signal.signal(signal.SIGALRM, before)
    deadline = time.monotonic() + 5
    while redis_client.info("clients")["blocked_clients"] and time.monotonic() < deadline:
        time.sleep(0.01)
    redis_client.rpush("interrupted", "message")
    assert own.call("PING") in (b"PONG", "PONG")
    assert own.call("BLPOP", "interrupted", 1) == [b"interrupted", b"message"]


def test_an_error_reply_leaves_the_connection_in_order(redis_client: redis.Redis) -> None:
    own = DedicatedConnection(redis_client)
    with pytest.raises(redis.ResponseError):
        own.call("LPOP")
    assert own.call("ECHO", "next") == b"next"


def test_a_second_thread_is_not_kept_waiting(redis_client: redis.Redis) -> None:
    own = DedicatedConnection(redis_client)
    replies: list[object] = []
    waiter = threading.Thread(target=lambda: replies.append(own.call("BLPOP", "awaited", 20)))
    waiter.start()
    try:
        for number in range(20):
            assert own.call("ECHO", number) == str(number).encode()
    finally:
        own.call("RPUSH", "awaited", "message")
        waiter.join(20)
    assert replies in ([[b"awaited", b"message"]], [(b"awaited", b"message")])


def test_a_server_that_forgot_its_scripts_gets_them_again(redis_client: redis.Redis) -> None:
    scheduler = RedisScheduler(redis_client, "forgetful", TWO)
    scheduler.begin(0, initial_tasks(TWO, [{"token_ids": [1]}]))
    message = scheduler.wait(0, 1)
    assert message is not None and message.task == Task.compute("pre", 0, 0)
    redis_client.script_flush()
    assert scheduler.finish(0, message.task, []) is None
    assert redis_client.hget(scheduler.keys.workflow, "last 0") == b"C:pre:0:0"


def test_a_server_that_dies_is_lost() -> None:
    with EmbeddedServer() as server:
        scheduler = RedisScheduler(connect(server.url), "dying", TWO)
        assert scheduler.wait(0, 0.01) is None
    with pytest.raises(SchedulerLost, match="cannot reach Redis"):
        scheduler.wait(0, 0.01)
