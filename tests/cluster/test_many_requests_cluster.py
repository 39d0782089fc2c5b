"""Many requests in a real cluster: processes, Redis, gloo. Each gets the answer that it gets alone; nothing is left of any."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import psutil
import pytest
from msgspec import structs
from redis import Redis
from support.processes import wait_until
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.cluster.local import LocalCluster
from pipedec.core import Completion, SamplingParams, UserError
from pipedec.messages import PromptRequest
from pipedec.methods import METHOD_NAMES
from pipedec.scheduler import RunStatus, connect

ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)
SAMPLINGS = (
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(0.9, seed=3, max_tokens=20, logprobs=2),
    SamplingParams(max_tokens=40, stop=("e", "a clip")),
    SamplingParams(0.7, seed=9, max_tokens=25, repetition_penalty=1.3, frequency_penalty=0.4),
)


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    """Three stages, up to 8 requests at once, up to 20 that wait."""
    with LocalCluster(pair.spec(3).replaced(max_num_seqs=8, max_waiting=20)) as running:
        yield running


def client_of(cluster: LocalCluster) -> Client:
    assert cluster.scheduler is not None
    return Client(cluster.scheduler, cluster.check)


def various(count: int) -> list[PromptRequest]:
    """Requests of all methods, samplings, lengths and priorities."""
    return [
        PromptRequest(
            SENTENCES[index % 3] * (1 + index % 4), True, METHOD_NAMES[index % len(METHOD_NAMES)], SAMPLINGS[index % 4],
            priority=index % 3,
        )
        for index in range(count)
    ]  # fmt: skip


def facts(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.seed


def test_answers_in_company_are_the_answers_alone(cluster: LocalCluster) -> None:
    """Of every method and sampling, with stop strings, log-probabilities and penalties; more than the pipeline has room for."""
    requests = various(12)
    alone = [facts(client_of(cluster).ask(structs.replace(request, method="pp"))) for request in requests]
    replies = client_of(cluster).ask_all(requests)
    assert [facts(reply.completed()) for reply in replies] == alone
    for reply, request in zip(replies, requests, strict=True):
        logprobs = reply.completed().logprobs
        assert (logprobs is None) == (request.sampling.logprobs is None)
        assert logprobs is None or len(logprobs) == len(reply.completed().token_ids)
    assert_nothing_runs(cluster)


def test_requests_are_in_the_pipeline_at_the_same_time(cluster: LocalCluster) -> None:
    """As many as there is room for; the others wait until one of them ends."""
    client = client_of(cluster)
    running = begin(client, 8)
    assert len(status_of(cluster).running) == 8
    late = [
        client.submit(PromptRequest("x", True, "pp", SamplingParams(max_tokens=2), priority=priority)) for priority in (5, 0, 1)
    ]
    assert wait_until(lambda: status_of(cluster).waiting == 3)
    for reply in running[:7]:
        client.cancel(reply)  # one place stays taken, so the late ones take turns in those that are free
    read_until_ended(client, [*running[:7], *late])
    client.cancel(running[7])
    assert read_until_ended(client, running[7:]) == [running[7]]
    assert {reply.completed().finish_reason for reply in running} == {"cancelled"}
    assert_nothing_runs(cluster)


@pytest.mark.slow
def test_a_lower_priority_value_is_served_first(pair: Pair) -> None:
    with LocalCluster(pair.spec(2).replaced(max_num_seqs=1)) as cluster:
        client = client_of(cluster)
        first = client.submit(PromptRequest("x", True, "pp", ENDLESS))
        assert wait_until(lambda: len(status_of(cluster).running) == 1)
        late = [
            client.submit(PromptRequest("x", True, "pp", SamplingParams(max_tokens=2), priority=each)) for each in (5, 0, 1, 0)
        ]
        client.cancel(first)
        read_until_ended(client, [first, *late])
        waited = [reply.completed().metrics.queue_seconds or 0.0 for reply in late]
        assert sorted(range(4), key=waited.__getitem__) == [1, 3, 2, 0]


def test_a_full_queue_refuses_in_one_line(cluster: LocalCluster) -> None:
    client = client_of(cluster)
    replies = begin(client, 8)
    replies += [client.submit(PromptRequest("x", True, "pp", ENDLESS)) for _ in range(20)]
    with pytest.raises(UserError) as refusal:
        client.submit(PromptRequest("x", True, "pp", ENDLESS))
    assert "20" in str(refusal.value) and "--max-waiting" in str(refusal.value) and "\n" not in str(refusal.value)
    for reply in replies[::-1]:
        client.cancel(reply)
    read_until_ended(client, replies)
    assert {reply.completed().finish_reason for reply in replies[:8]} == {"cancelled"}
    assert all(isinstance(reply.error, UserError) for reply in replies[8:]), "those that waited never began"
    assert_nothing_runs(cluster)


def test_a_request_may_be_cancelled_while_its_prompt_enters(cluster: LocalCluster) -> None:
    client = client_of(cluster)
    reply = client.submit(PromptRequest(SENTENCES[0] * 20, True, "pp", SamplingParams(max_tokens=300, ignore_eos=True)))
    assert wait_until(lambda: reply.number in status_of(cluster).running)
    client.cancel(reply)
    assert read_until_ended(client, [reply]) == [reply]
    assert reply.completed().finish_reason == "cancelled"
    assert_nothing_runs(cluster)


def test_a_request_comes_while_a_long_one_runs_and_goes_before_it(cluster: LocalCluster) -> None:
    client = client_of(cluster)
    long = client.submit(PromptRequest("x", True, "pipedec", ENDLESS))
    assert wait_until(lambda: long.number in status_of(cluster).running)
    short = client.submit(PromptRequest("y", True, "stpp", SamplingParams(max_tokens=3, ignore_eos=True)))
    assert read_until_ended(client, [short]) == [short]
    assert long.number in status_of(cluster).running
    client.cancel(long)
    read_until_ended(client, [long])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count", "growth"), [(30, 60, 128), (600, 400, 64)])
def test_many_requests_with_random_cancels_leave_nothing(cluster: LocalCluster, first: int, count: int, growth: int) -> None:
    """Keys in Redis, lanes and KV slots, and the memory of every rank are what they were after the first ones.

    The memory of three ranks grows by 40 to 86 MB in the first 600 requests, and by 10 in the 2,400 after these. ``growth`` is
    the limit in MiB.
    """
    rng = random.Random(count)
    drive(cluster, rng, first)
    with connect(cluster.address.redis_url) as redis:
        before, slots = keys_of(redis), slots_of(cluster)
        memory = cluster_memory(cluster)
        drive(cluster, rng, count)
        assert wait_until(lambda: not [key for key in keys_of(redis) if b"answer" in key]), keys_of(redis)
        assert len(keys_of(redis)) <= len(before) + 4, "queues and bells come and go"
    assert slots_of(cluster) == slots
    assert cluster_memory(cluster) < memory + growth * 2**20


def drive(cluster: LocalCluster, rng: random.Random, count: int) -> None:
    """Answer ``count`` requests, a dozen at a time, of which about a third is cancelled at some time."""
    client, open_replies, begun = client_of(cluster), list[Reply](), 0
    while begun < count or open_replies:
        while begun < count and len(open_replies) < 12:
            sampling = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True)
            method = METHOD_NAMES[begun % len(METHOD_NAMES)]
            open_replies.append(client.submit(PromptRequest(rng.choice(SENTENCES), True, method, sampling)))
            begun += 1
        if rng.random() < 0.3:
            client.cancel(rng.choice(open_replies))
        ended = client.read(0.05)
        open_replies = [reply for reply in open_replies if reply not in ended]
    assert_nothing_runs(cluster)


def begin(client: Client, count: int) -> list[Reply]:
    """Submit requests that do not end, and wait until each has a token; before that, rank 0 may have taken but not begun it."""
    begun: set[int] = set()

    def on_text(index: int) -> Callable[[str], None]:
        return lambda text: begun.add(index)

    replies = [client.submit(PromptRequest("x", True, "pp", ENDLESS), on_text(index)) for index in range(count)]

    def all_begun() -> bool:
        client.read(0.1)
        return len(begun) == count

    assert wait_until(all_begun, 60)
    return replies


def read_until_ended(client: Client, replies: list[Reply]) -> list[Reply]:
    """The replies in the order in which they ended."""
    ended: list[Reply] = []

    def all_ended() -> bool:
        ended.extend(client.read(0.1))
        return all(reply in ended for reply in replies)

    assert wait_until(all_ended, 60)
    return ended


def status_of(cluster: LocalCluster) -> RunStatus:
    assert cluster.scheduler is not None
    return cluster.scheduler.status()


def assert_nothing_runs(cluster: LocalCluster) -> None:
    assert wait_until(lambda: not status_of(cluster).running and not status_of(cluster).waiting)


def keys_of(redis: Redis) -> set[bytes]:
    return set(redis.keys("*"))  # type: ignore[arg-type]


def slots_of(cluster: LocalCluster) -> dict[int, int]:
    """Capacity of the KV pools, which would grow if lanes were not closed."""
    traced = PromptRequest("x", True, "pp", SamplingParams(max_tokens=2, ignore_eos=True), trace=True)
    return client_of(cluster).follow(traced).cache_slots


def cluster_memory(cluster: LocalCluster) -> int:
    """Bytes that all ranks hold for themselves."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in cluster.pids.values())
