"""Clusters of real processes that share one device: all methods with a draft, long prompts, threads, pauses, a killed rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.kv_budgets import with_slots
from support.processes import wait_until
from support.thread_models import BIASES, LETTERS, PROMPTS, THREAD_DIALECTS, ThreadModels
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.cluster.local import LocalCluster
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import load_prompter
from pipedec.engine.local import LocalPipeline
from pipedec.messages.request import PromptRequest
from pipedec.methods import METHOD_NAMES
from pipedec.plan.spec import DISPATCHES
from pipedec.verify.reference import Reference

TOKENS = 24
LONG = "The pipeline is kept full: " * 60
SECONDS = 120.0


def client_of(cluster: LocalCluster) -> Client:
    assert cluster.scheduler is not None
    return Client(cluster.scheduler, cluster.check, silence_seconds=60)


def read_all(client: Client, *replies: Reply) -> None:
    def ended() -> bool:
        client.read(0.05)
        return all(reply.has_ended for reply in replies)

    assert wait_until(ended, SECONDS)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(pair: Pair, device: str) -> Reference:
    return Reference(pair.spec().replaced(device=device))


@pytest.fixture(scope="module", params=list(DISPATCHES))
def cluster(pair: Pair, device: str, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Three stages and the draft."""
    with LocalCluster(pair.spec(3).replaced(device=device, dispatch=request.param)) as running:
        yield running


def expected_of(cluster: LocalCluster, reference: Reference, prompt: str, tokens: int) -> list[int]:
    return reference.generate(load_prompter(cluster.spec).token_ids(prompt, True, tokens), tokens, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_all_methods_say_what_transformers_says(cluster: LocalCluster, reference: Reference, device: str) -> None:
    expected = expected_of(cluster, reference, SENTENCES[1], TOKENS)
    on = {rank.rank: rank.device for rank in cluster.description().ranks}
    assert all((name == "cpu") == (device == "cpu") for name in on.values()), "the draft, too, is on the device"
    for method in METHOD_NAMES:
        answer = client_of(cluster).ask(PromptRequest(SENTENCES[1], True, method, greedy(TOKENS)))
        assert answer.token_ids == expected, method


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_a_long_prompt_enters_in_parts_and_is_found_again(cluster: LocalCluster, reference: Reference) -> None:
    """It takes more rows than a captured forward has, and its context grows from one size of captures to the next."""
    assert len(load_prompter(cluster.spec).token_ids(LONG, True, TOKENS)) > 1024
    expected = expected_of(cluster, reference, LONG, TOKENS)
    cached = []
    for method in ("pp", "pipedec-bestfirst", "pipedec"):
        answer = client_of(cluster).ask(PromptRequest(LONG, True, method, greedy(TOKENS)))
        assert answer.token_ids == expected, method
        cached.append(answer.metrics.cached_tokens > 0)
    assert cached == [False, *[cluster.spec.shares_prefixes] * 2]


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("cluster", ["windows"], indirect=True)
def test_an_answer_outgrows_several_sizes_of_captures(cluster: LocalCluster, reference: Reference) -> None:
    expected = expected_of(cluster, reference, SENTENCES[0], 140)
    assert client_of(cluster).ask(PromptRequest(SENTENCES[0], True, sampling=greedy(140))).token_ids == expected


@pytest.mark.slow
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("dialect", ["apar", "pasta"])
def test_threads_say_what_one_process_says(thread_models: ThreadModels, device: str, dialect: str) -> None:
    spec = thread_models.spec(4, 2).replaced(device=device)
    bias = dict.fromkeys(LETTERS, 0.0) | BIASES[dialect]
    logit_bias = {thread_models.tokenizer.token_to_id(text): 40.0 + value for text, value in bias.items()}
    sampling, threads = SamplingParams(max_tokens=60, logit_bias=logit_bias), THREAD_DIALECTS[dialect].to_json()
    local = LocalPipeline.load(spec)
    for _ in local.run(TokenizedRequest(0, thread_models.prompt_ids(PROMPTS[0]), sampling, threads=threads)):
        pass
    assert local.last.sequence is not None and len(local.last.sequence.threads) > 1
    with LocalCluster(spec) as running:
        for method in ("pp", "pipedec-bestfirst", "bita"):
            answer = client_of(running).ask(PromptRequest(PROMPTS[0], True, method, sampling, threads=threads))
            assert answer.token_ids == [token.token_id for token in local.last.sequence.document()], method


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_an_answer_that_gives_way_goes_on_as_if_it_had_not(pair: Pair, device: str) -> None:
    """There is memory for one long answer at a time. On a GPU slots are handed out in larger blocks."""
    slots, tokens = {"cpu": (288, 150), "cuda": (1024, 520)}[device]
    long = PromptRequest(SENTENCES[0], True, "pipedec", greedy(tokens), {"width": 8}, priority=5)
    with LocalCluster(with_slots(pair.spec(2).replaced(device=device), slots)) as running:
        client, pieces = client_of(running), list[str]()
        alone = client.ask(long)
        reply = client.submit(long, pieces.append)
        assert wait_until(lambda: client.read(0.05) is not None and len(pieces) > 3, SECONDS)
        hurried = client.submit(PromptRequest("x", True, "pp", greedy(tokens)))
        read_all(client, reply, hurried)
        assert reply.completed().metrics.pauses >= 1
        assert reply.completed().token_ids == alone.token_ids
        assert "".join(pieces) == alone.text


@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("devices", "stages", "transport", "draft"),
    [
        pytest.param("cpu", 3, "gloo", None),
        pytest.param("cuda", 3, "gloo", None, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, "nccl", "none", marks=pytest.mark.gpu(2)),
    ],
)
def test_a_killed_stage_costs_one_restart_and_no_answer(
    pair: Pair, devices: str, stages: int, transport: str, draft: str | None
) -> None:
    spec = pair.spec(stages, draft=draft).replaced(device=devices, transport=transport)
    request = PromptRequest(SENTENCES[0], True, "pipedec", greedy(80), {"width": 8})
    with LocalCluster(spec) as running:
        client, pieces = client_of(running), list[str]()
        alone, killed = client.ask(request), running.pids[2]
        reply = client.submit(request, pieces.append)
        assert wait_until(lambda: client.read(0.01) is not None and bool(pieces), SECONDS)
        assert not reply.has_ended, "the answer is too short"
        os.kill(killed, signal.SIGKILL)
        read_all(client, reply)
        assert reply.completed().token_ids == alone.token_ids
        assert running.scheduler is not None
        (recovery,) = running.scheduler.status().recoveries
        assert running.pids[2] != killed
        # On a GPU a killed process may close its connections well before its supervisor can see that it is gone: then a lost
        # connection begins the recovery.
        assert recovery.lost == (2,) or (devices == "cuda" and recovery.lost == ())
