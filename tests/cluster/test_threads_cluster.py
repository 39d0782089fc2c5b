"""Answers in several threads from a resident cluster of real processes: those of ``LocalPipeline``, whatever the dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from support.clusters import client_of
from support.thread_models import END, PROMPTS, THREAD_DIALECTS, ThreadModels
from support.thread_requests import sampling_in_threads

from pipedec.cluster.local import LocalCluster
from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.messages.events import ThreadNews
from pipedec.messages.request import PromptRequest
from pipedec.plan.spec import DISPATCHES
from pipedec.threads import Dialect, ThreadedSequence

LAYERS, MAX_TOKENS = 4, 45


@pytest.fixture(scope="module", params=list(DISPATCHES))
def cluster(thread_models: ThreadModels, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(thread_models.spec(LAYERS, 2).replaced(dispatch=request.param)) as started:
        yield started


@pytest.fixture(scope="module")
def local(thread_models: ThreadModels) -> LocalPipeline:
    return LocalPipeline.load(thread_models.spec(LAYERS, 2))


def ask(cluster: LocalCluster, dialect: Dialect, sampling: SamplingParams, method: str | None = None, **hooks: Any) -> Completion:
    show = "on_threads" in hooks
    request = PromptRequest(PROMPTS[0], True, method, sampling, threads=dialect.to_json(), show_threads=show)
    return client_of(cluster).ask(request, **hooks)


def said_by_one_process(
    local: LocalPipeline, models: ThreadModels, dialect: str, sampling: SamplingParams, method: str = "pipedec"
) -> ThreadedSequence:
    threads = THREAD_DIALECTS[dialect].to_json()
    for _ in local.run(TokenizedRequest(0, models.prompt_ids(PROMPTS[0]), sampling, method, threads=threads)):
        pass
    assert isinstance(local.last.sequence, ThreadedSequence)
    return local.last.sequence


@pytest.mark.fast_cases("windows-apar-pipedec-bestfirst-0.0")
@pytest.mark.parametrize(
    ("cluster", "dialect", "method", "temperature"),
    [
        ("windows", "apar", "pipedec-bestfirst", 0.0),
        ("windows", "pasta", "bita", 1.0),
        ("tasks", "parallel", "pipedec-bestfirst", 1.0),
        ("tasks", "apar", "bita", 0.0),
    ],
    indirect=["cluster"],
)
def test_a_cluster_says_what_one_process_says(
    cluster: LocalCluster, local: LocalPipeline, thread_models: ThreadModels, dialect: str, method: str, temperature: float
) -> None:
    sampling = sampling_in_threads(thread_models, dialect, max_tokens=MAX_TOKENS, temperature=temperature, seed=8)
    expected = said_by_one_process(local, thread_models, dialect, sampling, method)
    assert len(expected.threads) > 1
    pieces: list[str] = []
    answer = ask(cluster, THREAD_DIALECTS[dialect], sampling, method, on_text=pieces.append)
    assert answer.token_ids == [token.token_id for token in expected.document()]
    assert answer.finish_reason == expected.finished
    assert answer.text == "".join(pieces)
    paths = {expected.threads[token.thread].path for token in expected.document()}
    assert answer.threads is not None and answer.threads["metrics"]["threads"] == len(paths)
    assert {tuple(thread["path"]) for thread in answer.threads["threads"]} == paths


def test_news_of_the_threads_are_what_they_said(cluster: LocalCluster, thread_models: ThreadModels) -> None:
    told: dict[tuple[int, ...], str] = {}
    ended: set[tuple[int, ...]] = set()

    def listen(news: list[ThreadNews]) -> None:
        for one in news:
            assert one.path not in ended, "an ended thread says nothing"
            told[one.path] = told.get(one.path, "") + one.text
            ended.update([one.path] if one.state == "ended" else [])

    sampling = sampling_in_threads(thread_models, "parallel", max_tokens=MAX_TOKENS, temperature=1.0, seed=8, logprobs=1)
    answer = ask(cluster, THREAD_DIALECTS["parallel"], sampling, on_threads=listen)
    assert answer.threads is not None and len(told) > 1
    assert all(told[tuple(thread["path"])].startswith(thread["text"]) for thread in answer.threads["threads"])
    assert answer.logprobs is not None and [next(iter(entry)) for entry in answer.logprobs] == answer.token_ids


def test_a_dialect_that_the_target_lacks_is_refused_and_the_cluster_goes_on(
    cluster: LocalCluster, thread_models: ThreadModels
) -> None:
    foreign = Dialect("apar-released", opener="[SplitMask]", child_start="[SplitSop]")
    with pytest.raises(UserError, match=r"the tokenizer has no token '\[SplitMask\]', which dialect apar-released") as refused:
        ask(cluster, foreign, SamplingParams(max_tokens=4))
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="the dialect"):
        client_of(cluster).ask(PromptRequest("Hello", True, threads='{"name": "x"}'))
    assert len(ask(cluster, THREAD_DIALECTS["apar"], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_a_cancelled_answer_leaves_nothing_of_its_threads(
    cluster: LocalCluster, local: LocalPipeline, thread_models: ThreadModels
) -> None:
    """Ctrl-C when several threads are open."""

    def interrupt(news: list[ThreadNews]) -> None:
        if sum(one.state == "running" for one in news) > 1:
            raise KeyboardInterrupt

    endless = sampling_in_threads(thread_models, "apar", max_tokens=1500, ignore_eos=True)
    endless = structs.replace(endless, logit_bias={**(endless.logit_bias or {}), END: -100.0})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            ask(cluster, THREAD_DIALECTS["apar"], endless, on_threads=interrupt)
    sampling = sampling_in_threads(thread_models, "pasta", max_tokens=MAX_TOKENS)
    expected = said_by_one_process(local, thread_models, "pasta", sampling)
    assert ask(cluster, THREAD_DIALECTS["pasta"], sampling).token_ids == [token.token_id for token in expected.document()]
