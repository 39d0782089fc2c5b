"""Answers in real clusters that are paused, or that a client resumes: they go on as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from support.clusters import client_of, keys_of, read_all, read_until, status_of
from support.kv_budgets import with_slots
from support.processes import wait_until
from support.thread_models import ThreadModels
from support.thread_requests import thread_request
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.resumption import Resumption
from pipedec.cluster.local import LocalCluster
from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.llm import LLM
from pipedec.messages.request import PromptRequest
from pipedec.messages.stats import KVUsage
from pipedec.methods import METHOD_NAMES

SAMPLINGS = (
    SamplingParams(max_tokens=16, ignore_eos=True),
    SamplingParams(0.9, seed=3, max_tokens=16, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=24, stop=("e", "a clip")),
    SamplingParams(0.7, seed=9, max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.5),
)


def assert_continues(found: Completion, wanted: Completion, said: int, streamed: str) -> None:
    """``found`` was resumed behind ``said`` tokens of ``wanted``."""
    assert (found.token_ids, found.text, found.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
    assert found.seed == wanted.seed and wanted.text.endswith(streamed)
    assert (found.logprobs is None) == (wanted.logprobs is None)
    if found.logprobs is not None and wanted.logprobs is not None:
        assert found.logprobs[:said] == [{}] * said
        for ours, theirs in zip(found.logprobs[said:], wanted.logprobs[said:], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases("windows-pipedec")
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_an_answer_goes_on_behind_any_token(resident: LocalCluster, method: str) -> None:
    client, rng = client_of(resident), random.Random(METHOD_NAMES.index(method))
    for index, sampling in enumerate(SAMPLINGS):
        request = PromptRequest(SENTENCES[index % 3], True, method, sampling)
        whole = client.ask(request)
        count = rng.randrange(1, len(whole.token_ids))
        pieces: list[str] = []
        resumed = client.ask(structs.replace(request, resume=tuple(whole.token_ids[:count])), pieces.append)
        assert_continues(resumed, whole, count, "".join(pieces))
        assert resumed.metrics.resumed_tokens == count
        assert resumed.metrics.hits + resumed.metrics.misses == len(whole.token_ids) - count - 1


def test_an_answer_that_was_complete_is_returned_at_once(resident: LocalCluster) -> None:
    client = client_of(resident)
    for sampling in SAMPLINGS[:3]:
        request = PromptRequest(SENTENCES[0], True, "pp", sampling)
        whole = client.ask(request)
        again = client.ask(structs.replace(request, resume=tuple(whole.token_ids)))
        assert (again.token_ids, again.text, again.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)
        assert again.metrics.timesteps == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume": (10**6,)}, "tokens that the target lacks"),
        ({"resume": (2, 5), "sampling": SamplingParams()}, "tokens follow the end of the answer"),
        ({"resume": (5,), "sampling": SamplingParams(0.5)}, "give its seed"),
    ],
    ids=["token", "end", "seed"],
)
def test_what_cannot_be_resumed_is_refused(resident: LocalCluster, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        client_of(resident).ask(structs.replace(PromptRequest(SENTENCES[0], True, "pp", SAMPLINGS[0]), **change))


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dispatch", ["windows", "tasks"])
def test_an_answer_in_threads_goes_on_behind_any_token(thread_models: ThreadModels, dispatch: str) -> None:
    """All of its log-probabilities are said, since it is decoded again."""
    request = thread_request(thread_models, "apar", temperature=0.8, seed=4, max_tokens=40, logprobs=1)
    with LocalCluster(thread_models.spec(4, 2).replaced(dispatch=dispatch)) as cluster:
        client = client_of(cluster)
        whole = client.ask(request)
        assert whole.threads is not None and whole.threads["metrics"]["threads"] > 1 and whole.logprobs is not None
        for count in (1, 13, 39):
            pieces: list[str] = []
            resumed = client.ask(structs.replace(request, resume=tuple(whole.token_ids[:count])), pieces.append)
            assert (resumed.token_ids, resumed.text, resumed.threads) == (whole.token_ids, whole.text, whole.threads)
            assert whole.text.endswith("".join(pieces)) and len("".join(pieces)) < len(whole.text)
            for ours, theirs in zip(resumed.logprobs or (), whole.logprobs, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.slow
def test_the_python_api_goes_on_with_completions_and_token_ids(pair: Pair) -> None:
    with LLM(pair.target, pair.draft, stages=2) as llm:
        sampling = SamplingParams(0.9, max_tokens=20, logprobs=1, ignore_eos=True)
        whole = llm.generate(SENTENCES[0], structs.replace(sampling, seed=5), raw_prompt=True)[0]
        assert whole.logprobs is not None
        begun = llm.generate(SENTENCES[0], structs.replace(sampling, seed=5, max_tokens=8), raw_prompt=True)[0]
        by_completion = llm.generate(SENTENCES[0], sampling, raw_prompt=True, resume=begun)[0]
        by_tokens, new = llm.generate(
            [SENTENCES[0], SENTENCES[1]], structs.replace(sampling, seed=5), raw_prompt=True, resume=[whole.token_ids[:8], None]
        )
        assert by_completion.token_ids == by_tokens.token_ids == whole.token_ids and by_completion.seed == 5
        assert by_completion.logprobs is not None and by_tokens.logprobs is not None and new.logprobs is not None
        assert [list(row) for row in by_completion.logprobs] == [list(row) for row in whole.logprobs]
        assert by_completion.logprobs[:8] == begun.logprobs
        assert by_tokens.logprobs[:8] == [{}] * 8 and all(by_tokens.logprobs[8:])
        assert new.metrics.resumed_tokens == 0 and all(new.logprobs)
        with pytest.raises(UserError, match="one answer for each of 2 prompts"):
            llm.generate(SENTENCES[:2], sampling, resume=[[5]])
        with pytest.raises(UserError, match="give its seed"):
            llm.generate(SENTENCES[0], sampling, resume=[5])


def test_a_completion_as_json_is_an_answer_to_resume() -> None:
    done = Completion("pp", 2, 3, [5, 6], "ab", "length", seed=7, logprobs=[{5: -0.5, 9: -1.0}, {6: -0.25}])
    known = Resumption.from_json(json.dumps(done.as_dict()), "--resume x")
    assert known == Resumption.of(done) == Resumption((5, 6), 7, ({5: -0.5, 9: -1.0}, {6: -0.25}))
    assert Resumption.from_json('{"token_ids": [5]}', "x") == Resumption.of([5])
    request = known.resumed(PromptRequest("Hello", sampling=SamplingParams(0.5)))
    assert request.resume == (5, 6) and request.sampling.seed == 7
    assert known.resumed(PromptRequest("Hello", sampling=SamplingParams(0.5, seed=1))).sampling.seed == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "give one completion as --json prints it"),
        ("[5, 6]", "give one completion as --json prints it"),
        ("{}", "token_ids: missing"),
        ('{"token_ids": ["a"]}', r"token_ids\[0\]: must be an integer"),
        ('{"token_ids": [5], "seed": "x"}', "seed: must be an integer"),
    ],
)
def test_what_is_no_answer_to_resume(text: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^--resume x: {message}"):
        Resumption.from_json(text, "--resume x")


SLOTS = 480
LONG = SamplingParams(max_tokens=250, ignore_eos=True)  # only one fits
PAUSED = (
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
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("index", range(len(PAUSED)))
def test_a_paused_answer_is_the_answer_alone(cluster: LocalCluster, index: int) -> None:
    """It gives way to requests of a better priority, again and again; its reader sees pauses, and every piece once."""
    client, pieces, pauses = client_of(cluster), list[str](), list[bool]()
    request = PromptRequest(SENTENCES[index], True, sampling=PAUSED[index], priority=5)
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
