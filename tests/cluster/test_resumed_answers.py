"""Answers that a client resumes, in real processes, by every method and dispatch: they go on as if nothing had happened."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from msgspec import structs
from support.clusters import client_of
from support.thread_models import ThreadModels
from support.thread_requests import thread_request
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.resumption import Resumption
from pipedec.cluster.local import LocalCluster
from pipedec.core import Completion, SamplingParams, UserError
from pipedec.llm import LLM
from pipedec.messages import PromptRequest
from pipedec.methods import METHOD_NAMES

SAMPLINGS = (
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(0.9, seed=3, max_tokens=24, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=40, stop=("e", "a clip")),
    SamplingParams(0.7, seed=9, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.5),
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


@pytest.mark.fast_cases("windows-pipedec-bestfirst")
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
