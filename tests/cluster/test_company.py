"""Many requests in a real cluster: each gets the answer that it gets alone; what a front-end needs is told; nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest
from msgspec import structs
from support.clusters import client_of, keys_of, read_all, read_until, scheduler_of, status_of
from support.processes import wait_until
from support.tiny_pair import CONTEXT, SENTENCES, Pair
from support.whole_scheduler import WholeScheduler
from transformers import PreTrainedTokenizerBase

from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.cluster.local import LocalCluster
from pipedec.core.completion import Completion
from pipedec.core.errors import RankLost, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.messages.stats import RunStats
from pipedec.methods import METHOD_NAMES
from pipedec.scheduler import connect

STAGES, MOST = 3, 8
PATIENT_SECONDS = 60.0  # a timestep of so many rows may take long on a busy machine: that is no stall
SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = PromptRequest("x", True, "pp", SamplingParams(max_tokens=1500, ignore_eos=True))
SAMPLINGS = (
    SAMPLING,
    SamplingParams(0.9, seed=3, max_tokens=16, logprobs=2),
    SamplingParams(max_tokens=30, stop=("e", "a clip")),
    SamplingParams(0.7, seed=9, max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.4),
)


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    """Three stages, up to 8 requests at once, up to 20 that wait."""
    with LocalCluster(pair.spec(STAGES).replaced(max_num_seqs=MOST, max_waiting=20, stall_timeout=PATIENT_SECONDS)) as running:
        yield running


@pytest.fixture(scope="module")
def token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """A sentence, several times: more tokens than enter at one timestep."""
    ids = (*tokenizer(SENTENCES[1])["input_ids"],) * 3
    assert len(ids) > 70
    return ids


def facts(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.seed


def short(prompt: str = "x", method: str = "pp", max_tokens: int = 2, priority: int = 0) -> PromptRequest:
    return PromptRequest(prompt, True, method, SamplingParams(max_tokens=max_tokens, ignore_eos=True), priority=priority)


def test_answers_in_company_are_the_answers_alone(cluster: LocalCluster) -> None:
    """Of every method and sampling, with stop strings, log-probabilities and penalties; more than the pipeline has room for."""
    kinds = [PromptRequest(SENTENCES[index % 2], True, "pp", sampling) for index, sampling in enumerate(SAMPLINGS)]
    alone = [facts(client_of(cluster).ask(request)) for request in kinds]
    requests = [
        structs.replace(kinds[index % len(kinds)], method=METHOD_NAMES[index % len(METHOD_NAMES)], priority=index % 3)
        for index in range(MOST + 2)
    ]
    replies = client_of(cluster).ask_all(requests)
    assert [facts(reply.completed()) for reply in replies] == [alone[index % len(kinds)] for index in range(len(requests))]
    for reply, request in zip(replies, requests, strict=True):
        logprobs = reply.completed().logprobs
        assert (logprobs is None) == (request.sampling.logprobs is None)
        assert logprobs is None or len(logprobs) == len(reply.completed().token_ids)
    assert_nothing_runs(cluster)


def test_requests_are_in_the_pipeline_at_the_same_time(cluster: LocalCluster) -> None:
    """As many as there is room for; the others wait until one of them ends, in turn; of those, too, there is a limit."""
    client = client_of(cluster)
    running = begin(client, MOST)
    assert len(status_of(cluster).running) == MOST
    late = [client.submit(short(priority=priority)) for priority in (5, 0, 1)]
    late += [client.submit(ENDLESS) for _ in range(17)]
    assert wait_until(lambda: status_of(cluster).waiting == 20)
    with pytest.raises(UserError) as refusal:
        client.submit(ENDLESS)
    assert "20" in str(refusal.value) and "--max-waiting" in str(refusal.value) and "\n" not in str(refusal.value)
    for reply in late[:2:-1]:
        client.cancel(reply)
    read_all(client, *late[3:])
    assert all(isinstance(reply.error, UserError) for reply in late[3:]), "those that waited never began"
    for reply in running[:7]:
        client.cancel(reply)  # one place stays taken, so the late ones take turns in those that are free
    read_all(client, *running[:7], *late[:3])
    client.cancel(running[7])
    assert read_all(client, running[7]) == [running[7]]
    assert {reply.completed().finish_reason for reply in running} == {"cancelled"}
    assert_nothing_runs(cluster)


def test_a_request_may_be_cancelled_while_its_prompt_enters(cluster: LocalCluster) -> None:
    client = client_of(cluster)
    reply = client.submit(short(SENTENCES[0] * 20, max_tokens=300))
    assert wait_until(lambda: reply.number in status_of(cluster).running)
    client.cancel(reply)
    assert read_all(client, reply) == [reply]
    assert reply.completed().finish_reason == "cancelled"
    assert_nothing_runs(cluster)


def test_a_request_comes_while_a_long_one_runs_and_goes_before_it(cluster: LocalCluster) -> None:
    client = client_of(cluster)
    long = client.submit(structs.replace(ENDLESS, method="pipedec"))
    assert wait_until(lambda: long.number in status_of(cluster).running)
    other = client.submit(short("y", "stpp", max_tokens=3))
    assert read_all(client, other) == [other]
    assert long.number in status_of(cluster).running
    client.cancel(long)
    read_all(client, long)


@pytest.mark.slow
@pytest.mark.parametrize("duplex", ["full", "half"])
def test_many_requests_with_random_cancels_leave_nothing(pair: Pair, duplex: str) -> None:
    """Answers are those alone, or their beginnings. Keys in Redis, lanes and KV slots, and the memory of every rank are what they
    were after the first ones: of three ranks that grows by 40 to 86 MB in 600 requests, and by 10 in the 2,400 after these.
    """
    rng = random.Random(60)
    with LocalCluster(
        replace(pair.spec(STAGES).replaced(max_num_seqs=MOST, stall_timeout=PATIENT_SECONDS), duplex=duplex)
    ) as cluster:
        alone = {sentence: client_of(cluster).ask(short(sentence)).token_ids for sentence in SENTENCES}
        drive(cluster, rng, 300, alone)
        before, slots, memory = keys_of(cluster), slots_of(cluster), cluster_memory(cluster)
        drive(cluster, rng, 200, alone)
        assert wait_until(lambda: not [key for key in keys_of(cluster) if b"answer" in key]), keys_of(cluster)
        assert len(keys_of(cluster)) <= len(before) + 4, "queues and bells come and go"
        assert slots_of(cluster) == slots
        assert cluster_memory(cluster) < memory + 96 * 2**20


def drive(cluster: LocalCluster, rng: random.Random, count: int, alone: dict[str, list[int]]) -> None:
    """Answer ``count`` requests, a dozen at a time, of which about a third is cancelled at some time."""
    client, open_replies, prompts = client_of(cluster), list[Reply](), dict[int, str]()
    while len(prompts) < count or open_replies:
        while len(prompts) < count and len(open_replies) < 12:
            prompt, method = rng.choice(SENTENCES), METHOD_NAMES[len(prompts) % len(METHOD_NAMES)]
            open_replies.append(client.submit(short(prompt, method, rng.randint(1, 20), rng.randint(-1, 1))))
            prompts[open_replies[-1].number] = prompt
        if rng.random() < 0.3:
            client.cancel(rng.choice(open_replies))
        assert len(status_of(cluster).running) <= MOST
        for reply in client.read(0.05):
            open_replies.remove(reply)
            said = alone[prompts[reply.number]]
            if reply.error is not None:
                assert "cancelled before it began" in str(reply.error)
            else:
                found = reply.completed().token_ids
                assert found[: len(said)] == said[: len(found)]
    assert_nothing_runs(cluster)


@pytest.mark.slow
def test_a_wrong_order_of_transfers_over_half_duplex_links_ends_the_run_with_one_line(pair: Pair) -> None:
    with LocalCluster(replace(pair.spec(STAGES).replaced(max_restarts=0), duplex="half")) as cluster:
        client_of(cluster).ask(short())
        scheduler = scheduler_of(cluster)
        scheduler.client.hset(scheduler.keys.run, "duplex", "full")
        with pytest.raises(RankLost, match=r"refuses the order of transfers that Redis granted: .* the links are half duplex"):
            client_of(cluster).ask(short())
        cluster.kill()


def stats_of(cluster: LocalCluster) -> RunStats:
    """When nothing runs any more."""
    assert wait_until(lambda: (stats := status_of(cluster).stats) is not None and stats.running == stats.kv.used == 0)
    stats = status_of(cluster).stats
    assert stats is not None
    return stats


def test_prompts_of_token_ids(cluster: LocalCluster, tokenizer: PreTrainedTokenizerBase, token_ids: tuple[int, ...]) -> None:
    client, text = client_of(cluster), tokenizer.decode(token_ids)
    by_ids = client.ask(PromptRequest(token_ids, sampling=SAMPLING))  # a template is for text
    assert by_ids.prompt_tokens == len(token_ids)
    assert by_ids.token_ids == client.ask(PromptRequest(text, True, sampling=SAMPLING)).token_ids
    refusals: dict[str, tuple[int, ...]] = {
        "the prompt is empty: give at least one token id": (),
        "the prompt names token 300000, but the vocabulary has 300 tokens": (5, 300_000),
        f"the prompt has {CONTEXT - 5} tokens and --max-tokens asks for 20 more": (5,) * (CONTEXT - 5),
    }
    for message, prompt in refusals.items():
        with pytest.raises(UserError, match=message) as refused:
            client.ask(PromptRequest(prompt, sampling=SAMPLING))
        assert "\n" not in str(refused.value)


def test_a_prompt_has_log_probabilities(cluster: LocalCluster, token_ids: tuple[int, ...]) -> None:
    """As many as tokens, whatever is cached; None for the first; in company, of the whole vocabulary's softmax."""
    client, asked = client_of(cluster), structs.replace(SAMPLING, prompt_logprobs=2)
    requests = [PromptRequest(token_ids[: 100 - 40 * index], sampling=asked) for index in range(2)]
    long, other = (reply.completed() for reply in client.ask_all([*requests, PromptRequest(token_ids, sampling=SAMPLING)])[:2])
    assert long.prompt_logprobs is not None and other.prompt_logprobs is not None
    assert long.prompt_logprobs[0] is other.prompt_logprobs[0] is None
    assert [next(iter(found or {}), None) for found in long.prompt_logprobs] == [None, *token_ids[1:100]]
    assert all(found is not None and 2 <= len(found) <= 3 and max(found.values()) < 0 for found in long.prompt_logprobs[1:])
    for ours, theirs in zip(other.prompt_logprobs[1:], long.prompt_logprobs[1:60], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert client.ask(PromptRequest((9,), sampling=asked)).prompt_logprobs == [None]


def test_activations_of_int8_hardly_change_what_is_probable(
    pair: Pair, cluster: LocalCluster, token_ids: tuple[int, ...]
) -> None:
    asked = PromptRequest(token_ids, sampling=structs.replace(SAMPLING, prompt_logprobs=0))
    exact = client_of(cluster).ask(asked)
    with LocalCluster(pair.spec(STAGES).replaced(wire_dtype="int8")) as rounded:
        found = client_of(rounded).ask(asked)
    assert len(found.token_ids) == SAMPLING.max_tokens
    ours, theirs = ([next(iter(one.values())) for one in answer.prompt_logprobs or () if one] for answer in (found, exact))
    assert ours == pytest.approx(theirs, abs=0.2) and ours != pytest.approx(theirs, abs=1e-4)


def test_what_is_counted_is_what_was_answered(pair: Pair, token_ids: tuple[int, ...]) -> None:
    """By rank 0 and by every stage, from the first request on."""
    prompts = [PromptRequest(token_ids[start:], sampling=SAMPLING) for start in (1, 2, 3)]
    with LocalCluster(pair.spec(STAGES, draft=str(pair.target))) as cluster:
        assert (status_of(cluster).stats, status_of(cluster).stages) == (None, ())
        metrics = [reply.completed().metrics for reply in client_of(cluster).ask_all(prompts)]
        computed = sum(len(prompt.prompt) - each.cached_tokens for prompt, each in zip(prompts, metrics, strict=True))
        assert wait_until(lambda: stats_of(cluster).prompt_rows >= computed)
        counted = stats_of(cluster)
        entered = counted.prompt_rows + counted.root_rows + counted.draft_rows + counted.mask_rows
        assert wait_until(lambda: len(found := status_of(cluster).stages) == STAGES and found[0].rows >= entered)
        assert wait_until(lambda: all(stage.pruned_rows for stage in status_of(cluster).stages))
        stages = status_of(cluster).stages
    assert (counted.prompt_rows, counted.waiting) == (computed, 0)
    assert counted.accepted_tokens == sum(each.hits for each in metrics) > 0
    assert counted.draft_rows == sum(each.draft_tokens for each in metrics)
    assert counted.drafts == sum(each.misses for each in metrics)
    assert counted.timesteps >= max(each.timesteps for each in metrics)
    assert counted.rows_per_timestep.total == entered and sum(counted.rows_per_timestep.counts) <= counted.timesteps
    assert counted.timestep_seconds.total > 0 and sum(counted.timestep_seconds.counts) <= counted.timesteps
    assert [stage.rank for stage in stages] == [1, 2, 3]
    assert stages[0].rows == entered, "the first stage computes all that enters"
    for stage in stages:
        assert 0 < stage.rows <= entered and 0 < stage.pruned_rows <= entered
        assert stage.compute_seconds > 0 and stage.wait_seconds > 0 and stage.timesteps > 0


def test_requests_of_a_dead_front_end_end_and_others_go_on(cluster: LocalCluster) -> None:
    """Running ones and waiting ones; nothing of them is left, and the places are somebody else's."""
    client, known = client_of(cluster), scheduler_of(cluster)
    with connect(cluster.address.redis_url) as redis:
        others = WholeScheduler(redis, known.run_id, known.topology)
        kept = others.submit(ENDLESS.to_json(), owner="alive")
        numbers = [others.submit(ENDLESS.to_json(), owner="dead") for _ in range(MOST - 1)]
        assert wait_until(lambda: set(status_of(cluster).running) == {kept, *numbers})
        reply = client.submit(short(max_tokens=20))
        numbers += [others.submit(ENDLESS.to_json(), owner="dead") for _ in range(4)]
        others.release_owner("dead")
        assert read_all(client, reply) == [reply] and len(reply.completed().token_ids) == 20
        assert wait_until(lambda: status_of(cluster).running == (kept,) and others.renew_owner("alive"))
        assert status_of(cluster).waiting == 0
        answers = {f"pipedec:{{{cluster.run_id}}}:answer:{number}".encode() for number in numbers}
        assert not answers & keys_of(cluster)
        assert others.cancel(kept)
        others.close_answer(kept)
        others.release_owner("alive")
        assert wait_until(lambda: status_of(cluster).running == ())
        assert not redis.exists(others.keys.owners, others.keys.unread, others.keys.cancelled)
    assert stats_of(cluster).kv.used == 0


def begin(client: Client, count: int) -> list[Reply]:
    """Submit requests that do not end, and wait until each has a token; before that, rank 0 may have taken but not begun it."""
    begun: set[int] = set()

    def on_text(index: int) -> Callable[[str], None]:
        return lambda text: begun.add(index)

    replies = [client.submit(ENDLESS, on_text(index)) for index in range(count)]
    read_until(client, lambda: len(begun) == count)
    return replies


def assert_nothing_runs(cluster: LocalCluster) -> None:
    assert wait_until(lambda: not status_of(cluster).running and not status_of(cluster).waiting)


def slots_of(cluster: LocalCluster) -> dict[int, int]:
    """Capacity of the KV pools, which would grow if lanes were not closed."""
    return client_of(cluster).follow(structs.replace(short(), trace=True)).cache_slots


def cluster_memory(cluster: LocalCluster) -> int:
    """Bytes that all ranks hold for themselves."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in cluster.pids.values())
