"""Redis in trouble: what each kind of it is called, what is tried again, and that nothing is half done. Real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from support.lasting_server import LastingServer
from support.processes import wait_until
from support.whole_scheduler import WholeScheduler

from pipedec.config import Settings
from pipedec.core.errors import SchedulerBusy, SchedulerInterrupted, SchedulerLost
from pipedec.messages.events import TokensEvent
from pipedec.messages.run import RunDescription
from pipedec.scheduler import AsyncConnection, EmbeddedRedis, RunStatus, calls, connect
from pipedec.scheduler.workflow import initial_windows
from pipedec.topology import Topology

TWO = Topology.even(2, 2)
WINDOWS = initial_windows(TWO, 64)
RUN = "trouble"
DESCRIPTION = RunDescription(Settings.of(target="target", max_num_seqs=4), TWO.groups, ((0, 1), (1, 2)))
_BUSY = "while redis.call('TIME')[1] < ARGV[1] do end"


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def run(server: EmbeddedRedis) -> Iterator[WholeScheduler]:
    """A run that is up, with one running request and one that waits."""
    scheduler = WholeScheduler(connect(server.url), RUN, TWO, patience_seconds=0.2)
    scheduler.open(DESCRIPTION, recovers=True)
    scheduler.submit("running")
    scheduler.pop_requests(1)
    scheduler.submit("waiting")
    yield scheduler
    scheduler.client.close()


def kill(server: EmbeddedRedis) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert wait_until(lambda: not server.is_running)


def fill(server: EmbeddedRedis) -> redis.Redis:
    """Leave the server no memory."""
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")
    return client


@pytest.mark.failure_case("R8", "R9")
def test_calls_on_a_server_without_memory_name_that_and_change_nothing(server: EmbeddedRedis, run: WholeScheduler) -> None:
    before = run.status()
    client = fill(server)
    calls: list[Callable[[], object]] = [
        lambda: run.submit("more"),
        lambda: run.pop_requests(1),
        lambda: run.publish(0, TokensEvent([1], "a")),
        lambda: run.complete(0, TokensEvent([1], "a")),
        lambda: run.renew_lease(0),
        lambda: run.begin_session(1, WINDOWS, 0),
        lambda: run.cancel(0),
        lambda: run.cancel(1),
        lambda: run.recover([1], "rank 1 was killed"),
    ]
    for call in calls:
        with pytest.raises(SchedulerBusy, match=r"has no memory left: raise its maxmemory$"):
            call()
    assert run.status() == before
    client.config_set("maxmemory", "0")
    assert [message.text for message in run.pop_requests(4).requests] == ["waiting"]
    run.begin_session(1, WINDOWS, 0)
    message = run.wait(1, 1)
    assert message is not None and message.tasks[0].task == WINDOWS[1].task


@pytest.mark.failure_case("R8")
def test_a_report_on_a_server_without_memory_is_made_when_there_is_some(server: EmbeddedRedis, run: WholeScheduler) -> None:
    run.begin_session(1, WINDOWS, 0)
    message = run.wait(1, 1)
    assert message is not None
    client = fill(server)
    with pytest.raises(SchedulerBusy):
        run.report(1, [message.tasks[0].task], [])
    run.patience_seconds = 30.0
    threading.Timer(0.3, client.config_set, ["maxmemory", "0"]).start()
    assert run.report(1, [message.tasks[0].task], []) is None


@pytest.mark.failure_case("R7")
def test_somebody_else_s_slow_script_is_waited_for_and_then_named(server: EmbeddedRedis, run: WholeScheduler) -> None:
    client = redis.Redis.from_url(server.url)
    client.config_set("busy-reply-threshold", "10")
    seconds = str(int(time.time()) + 600)
    slow = threading.Thread(target=lambda: suppressed(lambda: client.eval(_BUSY, 0, seconds)))
    slow.start()
    try:
        with pytest.raises(SchedulerBusy, match=r"is busy with a script that is not pipedec's: end that with SCRIPT KILL$"):
            while True:  # until the script runs
                run.status()
        run.patience_seconds = 30.0
        threading.Timer(0.3, redis.Redis.from_url(server.url).script_kill).start()
        assert run.status().waiting == 1
    finally:
        suppressed(redis.Redis.from_url(server.url).script_kill)
        slow.join()


def suppressed(call: Callable[[], object]) -> None:
    with suppress(redis.RedisError):
        call()


@pytest.mark.failure_case("R11")
def test_a_replica_is_refused_by_name(server: EmbeddedRedis, run: WholeScheduler) -> None:
    with EmbeddedRedis() as primary:
        redis.Redis.from_url(server.url).replicaof("127.0.0.1", str(primary.port))
        with pytest.raises(
            SchedulerLost,
            match=r"(is a read-only replica|has lost its primary): give the (address of its primary|primary's address)$",
        ):
            run.submit("more")


@pytest.mark.failure_case("R6")
def test_a_flushed_script_is_sent_again(server: EmbeddedRedis, run: WholeScheduler) -> None:
    redis.Redis.from_url(server.url).script_flush()
    assert run.submit("more") == 2
    run.begin_session(1, WINDOWS, 0)
    message = run.wait(1, 1)
    assert message is not None
    redis.Redis.from_url(server.url).script_flush()
    assert run.report(1, [message.tasks[0].task], []) is None


@pytest.mark.failure_case("R10")
def test_a_broken_connection_is_an_interruption_after_which_calls_work_again(server: EmbeddedRedis, run: WholeScheduler) -> None:
    killer = redis.Redis.from_url(server.url)
    waiting = threading.Timer(0.2, lambda: killer.client_kill_filter(_type="normal", skipme=True))
    waiting.start()
    with pytest.raises(SchedulerInterrupted, match=r"the connection failed$"):
        while True:
            run.wait(1, 5.0)
    waiting.join()
    assert run.status().waiting == 1


@pytest.mark.failure_case("R10")
def test_a_paused_server_is_waited_for(server: EmbeddedRedis, run: WholeScheduler) -> None:
    redis.Redis.from_url(server.url).client_pause(500)
    assert run.status().waiting == 1
    run.renew_lease(1)
    assert run.submit("more") == 2


@pytest.mark.failure_case("R3")
def test_a_submission_whose_reply_was_lost_is_made_once(run: WholeScheduler) -> None:
    numbers = {run.submit("more", operation="a"), run.submit("more", operation="a")}
    assert numbers == {2}
    assert run.submit("more", operation="b") == 3
    assert run.status().waiting == 3


def test_a_server_that_was_restarted_without_data_knows_no_epoch(server: EmbeddedRedis, run: WholeScheduler) -> None:
    port = server.port
    server.stop()
    with pytest.raises(SchedulerInterrupted):
        run.status()
    with EmbeddedRedis(port=port), pytest.raises(SchedulerLost):  # another password
        run.current_epoch()


@pytest.mark.failure_case("R5")
def test_a_server_that_was_killed_and_has_its_data_again_knows_the_run(tmp_path: Path) -> None:
    """Its scripts are gone; they are sent again."""
    with LastingServer(tmp_path, password="secret") as first:
        run = WholeScheduler(connect(first.url), RUN, TWO)
        run.open(DESCRIPTION, recovers=True)
        run.submit("running", operation="a")
        run.pop_requests(1)
        run.publish(0, TokensEvent([7], "a"))
        kill(first)
        with pytest.raises(SchedulerInterrupted):
            run.publish(0, TokensEvent([8], "b", index=1))
        with LastingServer(tmp_path, first.port, "secret"):
            assert run.current_epoch() == 0 and run.submit("running", operation="a") == 0
            run.enter(run.recover([], "Redis was away"))
            assert [(one.text, one.output_token_ids, one.attempts) for one in run.journal()] == [("running", (7,), 1)]
            run.complete(0, TokensEvent([8], "b", index=1))
            assert [event.token_ids for _, event in run.read_answer(0, "0", 0)] == [[7], [8]]  # type: ignore[union-attr]
        run.client.close()


@pytest.mark.failure_case("R11")
def test_a_server_that_is_still_loading_its_data_is_waited_for_and_then_named(tmp_path: Path) -> None:
    slowly = ("appendonly no", "rdbcompression no", "key-load-delay 20000", "loading-process-events-interval-bytes 1024")
    with LastingServer(tmp_path, password="secret", more=slowly) as first:
        run = WholeScheduler(connect(first.url), RUN, TWO, patience_seconds=0.2)
        run.open(DESCRIPTION, recovers=True)
        for number in range(100):
            run.submit("waiting", operation=f"{number:01000}")  # a key of this length, so that the server looks up often
        run.client.save()
        kill(first)
        with suppress(SchedulerInterrupted):
            run.status()
        settings = (f"port {first.port}", "requirepass secret", f"dir {tmp_path}", *slowly)
        with started([str(first.binary), *(f"--{line}" for line in settings)]):
            with pytest.raises(SchedulerBusy, match=r"is still loading its data"):
                first_status(run)
            run.patience_seconds = 60.0
            assert run.status().waiting == 100
        run.client.close()


def first_status(run: WholeScheduler) -> RunStatus:
    """The status, once the server listens. Raises SchedulerBusy."""
    while True:
        try:
            return run.status()
        except SchedulerBusy:
            raise
        except SchedulerLost:
            time.sleep(0.01)


@contextmanager
def started(command: list[str]) -> Iterator[None]:
    """A program that runs until the end of the block."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.failure_case("R12")
def test_flushed_keys_are_noticed_by_every_call_of_rank_0(server: EmbeddedRedis, run: WholeScheduler) -> None:
    redis.Redis.from_url(server.url).flushall()
    assert run.current_epoch() is None
    assert run.status().state == "gone"
    for call in (lambda: run.pop_requests(1), lambda: run.wait_request(0), lambda: run.recover([1], "rank 1 was killed")):
        with pytest.raises(SchedulerLost, match=r"its keys were deleted"):
            call()


@pytest.mark.failure_case("R8")
def test_a_front_end_is_told_of_full_memory_at_once(server: EmbeddedRedis, run: WholeScheduler) -> None:
    async def ask() -> None:
        front_end = await AsyncConnection.to(server.url)
        fill(server)
        try:
            await front_end.ask(calls.submit(run.keys, "more"))
        finally:
            await front_end.close()

    with pytest.raises(SchedulerBusy, match=r"no memory left"):
        asyncio.run(ask())
