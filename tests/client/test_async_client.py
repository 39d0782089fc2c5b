"""Requests of one event loop in a real cluster: answers, cancellation, loss, what is left in Redis, and round trips."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs
from support.processes import deadline, wait_until
from support.tiny_pair import SENTENCES, Pair
from support.whole_scheduler import WholeScheduler

from pipedec.client.async_client import AsyncClient, AsyncReply
from pipedec.client.client import Client
from pipedec.client.reply import Delta
from pipedec.cluster.local import LocalCluster
from pipedec.config import Settings
from pipedec.core.errors import OutOfDescriptors, PipedecError, QueueFull, RankLost, SchedulerLost, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.scheduler import ClientScheduler, EmbeddedRedis, calls, connect
from pipedec.topology import Topology

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = PromptRequest("x", True, "pp", SamplingParams(max_tokens=1500, ignore_eos=True))
_OWNER = "front"


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    """Two stages, up to 4 requests at once, up to 100 that wait."""
    with LocalCluster(pair.spec(2).replaced(max_num_seqs=4, max_waiting=100)) as running:
        yield running


@asynccontextmanager
async def connected(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    client = await AsyncClient.connect(cluster.address.redis_url, cluster.address.run_id, _OWNER)
    try:
        yield client
    finally:
        await client.aclose()


def run(cluster: LocalCluster, body: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """``body`` with a client of ``cluster``; afterwards nothing of its requests is left."""

    async def with_client() -> None:
        async with connected(cluster) as client:
            await body(client)

    with deadline(60):
        asyncio.run(with_client())
    assert_nothing_left(cluster)


def assert_nothing_left(cluster: LocalCluster) -> None:
    """Nothing runs, no answer is stored, and no KV memory is used but for prefixes."""
    scheduler = scheduler_of(cluster)
    assert wait_until(lambda: scheduler.status().running == () and scheduler.status().waiting == 0)
    assert wait_until(lambda: not [key for key in stored(scheduler) if key.startswith(("answer:", "owner", "wake:", "unread"))])
    assert wait_until(lambda: (stats := scheduler.status().stats) is None or stats.kv.used == 0)


def scheduler_of(cluster: LocalCluster) -> ClientScheduler:
    assert cluster.scheduler is not None
    return cluster.scheduler


def stored(scheduler: ClientScheduler) -> list[str]:
    """Its keys, but for the prefix and the answer on which the ranks have met."""
    names = [name.decode().removeprefix(scheduler.keys.prefix) for name in scheduler.client.keys(scheduler.keys.prefix + "*")]
    return [name for name in names if name != "answer:-1"]


async def read(reply: AsyncReply) -> list[Delta]:
    return [delta async for delta in reply]


def test_answers_are_those_of_the_blocking_client(cluster: LocalCluster) -> None:
    """Of greedy and drawn requests with stop strings and log-probabilities; the deltas are the completion in pieces."""
    samplings = (SHORT, SamplingParams(0.9, seed=3, max_tokens=12, logprobs=2), SamplingParams(max_tokens=20, stop=("e",)))
    requests = [PromptRequest(SENTENCES[index % 3], True, sampling=samplings[index % 3]) for index in range(3)]
    expected = [reply.completed() for reply in Client(scheduler_of(cluster), cluster.check).ask_all(requests)]

    async def body(client: AsyncClient) -> None:
        replies = [await client.submit(request) for request in requests]
        deltas = await asyncio.gather(*map(read, replies))
        for reply, pieces, known in zip(replies, deltas, expected, strict=True):
            completion = await reply.completed()
            assert (completion.token_ids, completion.text) == (known.token_ids, known.text)
            assert (completion.logprobs is None) == (known.logprobs is None)
            for ours, theirs in zip(completion.logprobs or (), known.logprobs or (), strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
            assert "".join(piece.text for piece in pieces) == known.text
            assert [token for piece in pieces for token in piece.token_ids] == known.token_ids
            said = [logprobs for piece in pieces for logprobs in piece.logprobs]
            assert said[: len(known.token_ids)] == (completion.logprobs or [])
            assert [piece.arrived for piece in pieces] == sorted(piece.arrived for piece in pieces)
            assert completion.metrics.ttft_seconds is not None

    run(cluster, body)


def test_a_slow_reader_gets_one_delta_and_stalls_nobody(cluster: LocalCluster) -> None:
    async def body(client: AsyncClient) -> None:
        slow, quick = [await client.submit(PromptRequest("x", True, "pp", SHORT)) for _ in range(2)]
        assert len(await read(quick)) > 1
        completion = await slow.completed()
        [delta] = await read(slow)
        assert (delta.text, delta.token_ids) == (completion.text, completion.token_ids)
        assert await read(slow) == [], "everything was read"

    run(cluster, body)


def test_a_request_that_joins_later_need_not_wait_for_events_of_others(cluster: LocalCluster) -> None:
    """The read that is blocked when a request is submitted asks again, whatever else happens."""

    async def body(client: AsyncClient) -> None:
        for _ in range(3):
            await asyncio.sleep(0.05)  # nothing is open: the reader waits
            async with asyncio.timeout(4):  # the read would wait for 5 seconds
                await (await client.submit(PromptRequest("x", True, "pp", SHORT))).completed()

    run(cluster, body)


@pytest.mark.slow
def test_a_cancelled_answer_ends_and_the_others_stay_what_they_are(cluster: LocalCluster) -> None:
    """A running one has what it has; a waiting one is refused; a second cancel changes nothing."""

    async def body(client: AsyncClient) -> None:
        known = await (await client.submit(PromptRequest(SENTENCES[0], True, sampling=SHORT))).completed()
        endless = [await client.submit(ENDLESS) for _ in range(3)]
        other = await client.submit(PromptRequest(SENTENCES[0], True, sampling=structs.replace(SHORT, max_tokens=300)))
        for reply in (*endless, other):
            await anext(aiter(reply))
        waiting = await client.submit(ENDLESS)
        for reply in (*endless, waiting, endless[0]):
            await reply.cancel()
        for reply in endless:
            assert (await reply.completed()).finish_reason == "cancelled"
        with pytest.raises(UserError, match="cancelled before it began"):
            await waiting.completed()
        assert await read(waiting) == []
        assert (await other.completed()).token_ids[: len(known.token_ids)] == known.token_ids
        await other.cancel()

    run(cluster, body)


@pytest.mark.slow
def test_who_stops_waiting_for_a_submission_cancels_the_request(cluster: LocalCluster) -> None:
    """At any moment: a thousand times, dropped before, while and after the request is on its way."""
    generator = random.Random(1)

    async def dropped(client: AsyncClient) -> None:
        task = asyncio.create_task(client.submit(ENDLESS))
        for _ in range(generator.randrange(40)):
            await asyncio.sleep(0)
        if not task.cancel():
            await task.result().cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await task.result().cancel()

    async def body(client: AsyncClient) -> None:
        known = await (await client.submit(PromptRequest(SENTENCES[1], True, sampling=SHORT))).completed()
        for _ in range(50):
            await asyncio.gather(*(dropped(client) for _ in range(20)), return_exceptions=True)
        while (status := await client.status()).running or status.waiting:
            await asyncio.sleep(0.05)
        again = await (await client.submit(PromptRequest(SENTENCES[1], True, sampling=SHORT))).completed()
        assert again.token_ids == known.token_ids
        assert client.failure is None

    run(cluster, body)


def test_closing_cancels_what_is_open(cluster: LocalCluster) -> None:
    """Whoever waits for an answer then learns of it, and nothing is submitted any more."""

    async def body(client: AsyncClient) -> None:
        replies = [await client.submit(ENDLESS) for _ in range(6)]
        reading = [asyncio.create_task(read(reply)) for reply in replies]
        while not (await client.status()).running:
            await asyncio.sleep(0.02)
        await client.aclose()
        for task, reply in zip(reading, replies, strict=True):
            with pytest.raises(PipedecError, match="client was closed"):
                await task
            with pytest.raises(PipedecError, match="client was closed"):
                await reply.completed()
        with pytest.raises(PipedecError, match="client was closed"):
            await client.submit(ENDLESS)

    run(cluster, body)


def test_refusals(cluster: LocalCluster) -> None:
    async def body(client: AsyncClient) -> None:
        refused = await client.submit(PromptRequest("", True))
        assert await read(refused) == []
        with pytest.raises(UserError, match="empty"):
            await refused.completed()
        waiting = [await client.submit(ENDLESS) for _ in range(104)]
        with pytest.raises(QueueFull, match="the cluster is full"):
            await client.submit(ENDLESS)
        for reply in waiting:
            await reply.cancel()

    run(cluster, body)


@pytest.mark.slow
def test_waiting_requests_take_few_round_trips(cluster: LocalCluster) -> None:
    """None is asked for on its own: about one for the answers, and two for the lease and the run, in 1.5 seconds."""
    running = Client(scheduler_of(cluster), cluster.check)
    with running.cancelling():
        places = [running.submit(ENDLESS) for _ in range(4)]

        async def body(client: AsyncClient) -> None:
            waiting = [await client.submit(structs.replace(ENDLESS, priority=1)) for _ in range(96)]
            assert scheduler_of(cluster).status().waiting == 96
            before = client.connection.round_trips
            await asyncio.sleep(2)
            assert 0 < client.connection.round_trips - before <= 20
            for reply in waiting:
                await reply.cancel()
            for place in places:
                running.cancel(place)
                scheduler_of(cluster).ask(calls.close_answer(scheduler_of(cluster).keys, place.number))

        run(cluster, body)


_VICTIM = """
import asyncio, sys
from pipedec.client.async_client import AsyncClient
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
async def main():
    client = await AsyncClient.connect(*sys.argv[1:])
    request = PromptRequest("x", True, "pp", SamplingParams(max_tokens=1500, ignore_eos=True))
    for _ in range(8):
        await client.submit(request)
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print("submitted", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.slow
def test_of_a_killed_process_nothing_is_left_and_others_go_on(cluster: LocalCluster) -> None:
    address = cluster.address
    victim = subprocess.Popen([sys.executable, "-c", _VICTIM, address.redis_url, address.run_id], stdout=subprocess.PIPE)

    async def body(client: AsyncClient) -> None:
        assert victim.stdout is not None
        assert await asyncio.to_thread(victim.stdout.readline) == b"submitted\n"
        other = await client.submit(PromptRequest(SENTENCES[2], True, sampling=SHORT))
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        assert len((await other.completed()).token_ids) == 12

    with victim:
        run(cluster, body)


def test_a_client_of_no_run(cluster: LocalCluster) -> None:
    with pytest.raises(UserError, match="no cluster named 'other'"):
        asyncio.run(AsyncClient.connect(cluster.address.redis_url, "other"))
    gone = EmbeddedRedis()
    gone.stop()
    with pytest.raises(SchedulerLost, match="cannot reach Redis"):
        asyncio.run(AsyncClient.connect(gone.url, "other"))


def opened(server: EmbeddedRedis, run_id: str) -> WholeScheduler:
    """A run without ranks, which takes requests and answers none."""
    scheduler = WholeScheduler(connect(server.url), run_id, Topology.even(1, 1))
    scheduler.open(RunDescription(Settings.of(target="target"), ((1,),), ((0, 1),)))
    return scheduler


def lost(server: EmbeddedRedis, run_id: str, lose: Callable[[], object]) -> PipedecError:
    """What all waiting readers, those who submit and ``failure`` say of a run after ``lose``."""

    async def body() -> PipedecError:
        client = await AsyncClient.connect(server.url, run_id, _OWNER)
        replies = [await client.submit(ENDLESS) for _ in range(3)]
        waiting = [asyncio.create_task(read(replies[0])), *(asyncio.create_task(reply.completed()) for reply in replies)]
        lose()
        said = await asyncio.gather(*waiting, return_exceptions=True)
        assert client.failure is not None and said == [client.failure] * 4
        with pytest.raises(type(client.failure), match=re.escape(str(client.failure))):
            await client.submit(ENDLESS)
        await client.aclose()
        return client.failure

    with deadline(30):
        return asyncio.run(body())


def test_everybody_who_waits_learns_that_the_run_is_lost(redis_server: EmbeddedRedis) -> None:
    failing, gone, silent = (opened(redis_server, name) for name in ("fails", "gone", "silent"))
    error = lost(redis_server, "fails", lambda: failing.abort(1, "it went away"))
    assert isinstance(error, RankLost) and "it went away" in str(error)
    assert "stopped before it answered" in str(lost(redis_server, "gone", gone.clear))
    error = lost(redis_server, "silent", lambda: silent.client.sadd(silent.keys.members, 1))  # without a lease
    assert str(error).endswith("stopped answering")


def test_everybody_who_waits_learns_that_redis_is_gone() -> None:
    server = EmbeddedRedis()
    opened(server, "alone")
    error = lost(server, "alone", server.stop)
    assert isinstance(error, SchedulerLost) and "cannot reach Redis" in str(error)


@pytest.mark.failure_case("K10")
def test_a_busy_event_loop_keeps_its_requests(redis_server: EmbeddedRedis) -> None:
    scheduler = opened(redis_server, "busy")
    lease = scheduler.keys.owner(_OWNER)

    async def body() -> None:
        client = await AsyncClient.connect(redis_server.url, "busy", _OWNER)
        reply = await client.submit(ENDLESS)
        scheduler.client.pexpire(lease, 4000)
        assert wait_until(lambda: scheduler.client.pttl(lease) > 4000)  # which the loop waits for
        assert scheduler.end_orphans() == [] and scheduler.status().waiting == 1
        await reply.cancel()
        await client.aclose()
        assert not scheduler.client.exists(lease)

    with deadline(60):
        asyncio.run(body())


@pytest.mark.failure_case("K9")
def test_a_lack_of_descriptors_is_no_lost_cluster(redis_server: EmbeddedRedis) -> None:
    """The connections of a client are open from the start; another one says what is wrong, and that is no outage."""
    opened(redis_server, "full")

    async def body() -> None:
        client = await AsyncClient.connect(redis_server.url, "full", _OWNER)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        unused = [open(os.devnull) for _ in range(_free_descriptors())]  # noqa: SIM115
        try:
            replies = await asyncio.gather(*(client.submit(ENDLESS) for _ in range(12)))
            with pytest.raises(OutOfDescriptors, match="too many open files"):
                await AsyncClient.connect(redis_server.url, "full", "other")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in unused:
                file.close()
        assert client.failure is None and len(replies) == 12
        await client.aclose()

    with deadline(30):
        asyncio.run(body())


def _free_descriptors() -> int:
    """How many this process can still open."""
    taken = len(os.listdir("/proc/self/fd")) - 1  # without that of the folder itself
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - taken


def test_a_process_that_slept_loses_its_requests_and_goes_on(redis_server: EmbeddedRedis) -> None:
    """Its lease has expired, so that the cluster ends what it has asked for."""
    scheduler = opened(redis_server, "sleepy")

    async def body() -> None:
        client = await AsyncClient.connect(redis_server.url, "sleepy", _OWNER)
        reply = await client.submit(ENDLESS)
        scheduler.release_owner(_OWNER)
        with pytest.raises(SchedulerLost, match="did not run for some seconds"):
            await reply.completed()
        assert client.failure is None
        await client.submit(ENDLESS)
        await client.aclose()

    with deadline(30):
        asyncio.run(body())
    assert not [name for name in stored(scheduler) if name.startswith(("answer:", "owner", "wake:"))]
    assert scheduler.status().waiting == 0
