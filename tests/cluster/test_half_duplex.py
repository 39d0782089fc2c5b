"""A cluster of half-duplex links: many requests and cancellations in real processes, and a Redis that grants a wrong order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.processes import wait_until
from support.tiny_pair import Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import RankLost, SamplingParams
from pipedec.messages import PromptRequest

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PROMPTS = ("Natalia sold 12 clips in April.", "The pipeline is kept full: " * 8, "東京 \U0001f680")
METHODS = ("pp", "stpp", "pipedec", "pipedec-bestfirst")
MAX_NUM_SEQS = 4


@pytest.fixture
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(replace(pair.spec(3).replaced(max_num_seqs=MAX_NUM_SEQS), duplex="half")) as cluster:
        yield cluster


def request(prompt: str, method: str = "pp", priority: int = 0) -> PromptRequest:
    return PromptRequest(prompt, True, method, SamplingParams(max_tokens=16, ignore_eos=True), priority=priority)


@pytest.mark.slow
def test_answers_in_company_are_those_alone_and_leave_nothing_in_redis(cluster: LocalCluster) -> None:
    scheduler, source = cluster.scheduler, random.Random(5)
    assert scheduler is not None
    client = Client(scheduler, cluster.check, silence_seconds=60)
    alone = {prompt: client.ask(request(prompt)).token_ids for prompt in PROMPTS}
    assert wait_until(lambda: not scheduler.usage().is_working)  # so all keys that a session leaves are there
    keys = scheduler.usage().keys
    asked: dict[int, str] = {}
    replies = []
    for _ in range(40):
        prompt = source.choice(PROMPTS)
        reply = client.submit(request(prompt, source.choice(METHODS), source.randint(-1, 1)))
        asked[reply.number] = prompt
        replies.append(reply)
        if source.random() < 0.3:
            client.cancel(source.choice(replies))
        client.read(0)
        assert len(scheduler.status().running) <= MAX_NUM_SEQS
    while not all(reply.has_ended for reply in replies):
        client.read()
    reasons = set()
    for reply in replies:
        if reply.error is not None:
            assert "cancelled before it began" in str(reply.error)
            continue
        answer = reply.completed()
        reasons.add(answer.finish_reason)
        said = alone[asked[reply.number]]
        assert answer.token_ids == (said[: len(answer.token_ids)] if answer.finish_reason == "cancelled" else said)
    assert "length" in reasons
    assert scheduler.status().running == () and scheduler.status().waiting == 0
    assert wait_until(lambda: scheduler.usage().keys <= keys)


@pytest.mark.slow
def test_a_wrong_order_of_transfers_ends_the_run_with_one_line(pair: Pair) -> None:
    spec = replace(pair.spec(3).replaced(max_num_seqs=MAX_NUM_SEQS), duplex="half")
    with LocalCluster(spec.replaced(max_restarts=0)) as cluster:
        scheduler = cluster.scheduler
        assert scheduler is not None
        client = Client(scheduler, cluster.check, silence_seconds=60)
        client.ask(request(PROMPTS[0]))
        scheduler.client.hset(scheduler.keys.run, "duplex", "full")
        with pytest.raises(RankLost, match=r"refuses the order of transfers that Redis granted: .* the links are half duplex"):
            client.ask(request(PROMPTS[0]))
        cluster.kill()
