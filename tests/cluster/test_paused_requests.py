"""Pauses in a real cluster: a request that gives way to another one is answered as if it had not, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs
from support.clusters import client_of, keys_of, read_all, read_until, status_of
from support.kv_budgets import with_slots
from support.processes import wait_until
from support.thread_models import ThreadModels
from support.thread_requests import thread_request
from support.tiny_pair import SENTENCES, Pair

from pipedec.cluster.local import LocalCluster
from pipedec.core import Completion, SamplingParams
from pipedec.messages import KVUsage, PromptRequest

SLOTS = 480
LONG = SamplingParams(max_tokens=250, ignore_eos=True)  # only one fits
SAMPLINGS = (
    LONG,
    structs.replace(LONG, temperature=0.9, seed=3, logprobs=2, prompt_logprobs=1),
    structs.replace(LONG, repetition_penalty=1.2, stop=("qqqq",)),
)


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    """Three stages with memory for one long answer."""
    with LocalCluster(with_slots(pair.spec(3).replaced(max_num_seqs=8), SLOTS)) as running:
        yield running


def assert_same(found: Completion, wanted: Completion) -> None:
    assert (found.token_ids, found.text, found.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
    assert (found.seed, found.threads) == (wanted.seed, wanted.threads)
    assert (found.logprobs is None) == (wanted.logprobs is None)
    assert (found.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
    if found.prompt_logprobs is not None and wanted.prompt_logprobs is not None:
        assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == found.prompt_tokens
        for ours, theirs in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
    for ours, theirs in zip(found.logprobs or [], wanted.logprobs or [], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def usage_of(cluster: LocalCluster) -> KVUsage:
    stats = status_of(cluster).stats
    assert stats is not None
    return stats.kv


def assert_nothing_is_left(cluster: LocalCluster) -> None:
    assert wait_until(lambda: usage_of(cluster).used == 0)
    assert wait_until(lambda: not [key for key in keys_of(cluster) if b"answer" in key]), keys_of(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(SAMPLINGS)))
def test_a_paused_answer_is_the_answer_alone(cluster: LocalCluster, index: int) -> None:
    """It gives way to requests of a better priority, again and again; its reader sees pauses, and every piece once."""
    client, pieces, pauses = client_of(cluster), list[str](), list[bool]()
    request = PromptRequest(SENTENCES[index], True, sampling=SAMPLINGS[index], priority=5)
    alone = client.ask(structs.replace(request, method="pp"))
    counted = usage_of(cluster).pauses
    reply = client.submit(request, pieces.append, on_pause=pauses.append)
    read_until(client, lambda: len(pieces) > 3)
    for tokens in (240, 220):
        urgent = PromptRequest("x", True, "pp", SamplingParams(max_tokens=tokens, ignore_eos=True))
        hurried = client.submit(urgent)
        read_all(client, hurried)
        assert len(hurried.completed().token_ids) == tokens
        read_until(client, lambda: not reply.is_paused)
        if reply.has_ended:
            break
    read_all(client, reply)
    completion = reply.completed()
    assert_same(completion, alone)
    assert "".join(pieces) == completion.text
    assert completion.metrics.pauses == pauses.count(True) >= 1 and pauses == [True, False] * pauses.count(True)
    assert_nothing_is_left(cluster)
    assert usage_of(cluster).pauses >= counted + completion.metrics.pauses


@pytest.mark.slow
def test_a_paused_request_is_cancelled(cluster: LocalCluster) -> None:
    client, pieces = client_of(cluster), list[str]()
    request = PromptRequest(SENTENCES[0], True, "pp", LONG, priority=5, trace=True)
    alone = client.ask(request)
    reply = client.submit(request, pieces.append)
    read_until(client, lambda: len(pieces) > 3)
    hurried = client.submit(PromptRequest("x", True, "pp", LONG))
    read_until(client, lambda: reply.is_paused)
    client.cancel(reply)
    read_all(client, reply, hurried)
    completion = reply.completed()
    assert completion.finish_reason == "cancelled" and completion.text == "".join(pieces)
    assert completion.token_ids == alone.token_ids[: len(completion.token_ids)]
    assert {event.rank for event in reply.trace} >= {0, 1, 2, 3}, "every rank has reported its trace"
    assert len(hurried.completed().token_ids) == LONG.max_tokens
    assert_nothing_is_left(cluster)


@pytest.mark.slow
def test_requests_that_wait_for_memory_are_answered_in_turn(cluster: LocalCluster) -> None:
    """A reader who waits for memory hears so, and is not told that the cluster is lost."""
    client = client_of(cluster, silence_seconds=3)
    waits = [list[bool]() for _ in range(4)]
    replies = [client.submit(PromptRequest(f"{number}", True, "pp", LONG), on_pause=waits[number].append) for number in range(4)]
    read_all(client, *replies)
    assert {len(reply.completed().token_ids) for reply in replies} == {LONG.max_tokens}
    assert waits[0] == [] and waits[1:] == [[True, False]] * 3
    assert {reply.completed().metrics.pauses for reply in replies} == {0}
    assert_nothing_is_left(cluster)


@pytest.mark.slow
def test_an_answer_in_threads_is_told_once_although_it_is_said_twice(thread_models: ThreadModels) -> None:
    request = structs.replace(
        thread_request(thread_models, "apar", temperature=0.8, seed=4, max_tokens=150, logprobs=1), priority=5
    )
    with LocalCluster(with_slots(thread_models.spec(4, 2), 512)) as cluster:
        client, pieces = client_of(cluster), list[str]()
        alone = client.ask(request)
        reply = client.submit(request, pieces.append)
        read_until(client, lambda: len(pieces) > 3)
        hurried = client.submit(PromptRequest("a", True, "pp", SamplingParams(max_tokens=300, ignore_eos=True)))
        read_until(client, lambda: reply.is_paused)
        read_all(client, reply, hurried)
        completion = reply.completed()
        assert completion.metrics.pauses == 1
        assert_same(completion, alone)
        assert "".join(pieces) == completion.text
        assert_nothing_is_left(cluster)


@pytest.mark.slow
def test_answers_that_outgrow_the_memory(pair: Pair) -> None:
    """More is generated than was reserved: the youngest are paused, nobody starves, and all say what they say alone."""
    sampling = SamplingParams(max_tokens=1400, ignore_eos=True)
    requests = [PromptRequest(sentence, True, "pp", sampling) for sentence in SENTENCES]
    with LocalCluster(with_slots(pair.spec(3), 2560)) as cluster:
        client = client_of(cluster)
        alone = [client.ask(request) for request in requests]
        replies = client.ask_all(requests)
        for reply, wanted in zip(replies, alone, strict=True):
            assert_same(reply.completed(), wanted)
        pauses = [reply.completed().metrics.pauses for reply in replies]
        assert pauses[0] == 0 and sum(pauses) > 0
        assert_nothing_is_left(cluster)
