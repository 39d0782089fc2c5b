"""What a front-end needs of a real cluster: prompts of token ids and their log-probabilities, leases, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs
from support.processes import wait_until
from support.tiny_pair import CONTEXT, SENTENCES, Pair
from support.whole_scheduler import WholeScheduler

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import SamplingParams, UserError
from pipedec.messages import PromptRequest, RunStats
from pipedec.scheduler import ClientScheduler, RunStatus, connect
from pipedec.text.prompt import Prompter

STAGES = 3
SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = PromptRequest("x", True, sampling=SamplingParams(max_tokens=1900, ignore_eos=True))


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[LocalCluster]:
    with LocalCluster(pair.spec(STAGES).replaced(max_num_seqs=4, max_waiting=20)) as running:
        yield running


@pytest.fixture(scope="module")
def token_ids(pair: Pair) -> tuple[int, ...]:
    """A sentence, several times: more tokens than enter at one timestep."""
    ids = Prompter(pair.target, CONTEXT).token_ids(SENTENCES[1], raw=True, max_tokens=1) * 3
    assert len(ids) > 70
    return ids


def scheduler_of(cluster: LocalCluster) -> ClientScheduler:
    assert cluster.scheduler is not None
    return cluster.scheduler


def client_of(cluster: LocalCluster) -> Client:
    return Client(scheduler_of(cluster), cluster.check)


def status_of(cluster: LocalCluster) -> RunStatus:
    return scheduler_of(cluster).status()


def stats_of(cluster: LocalCluster) -> RunStats:
    """When nothing runs any more."""
    assert wait_until(lambda: (stats := status_of(cluster).stats) is not None and stats.running == stats.kv.used == 0)
    stats = status_of(cluster).stats
    assert stats is not None
    return stats


@pytest.mark.slow
def test_token_ids_are_the_prompt(cluster: LocalCluster, pair: Pair, token_ids: tuple[int, ...]) -> None:
    client, text = client_of(cluster), Prompter(pair.target, CONTEXT).text(token_ids)
    by_ids = client.ask(PromptRequest(token_ids, sampling=SAMPLING))  # a template is for text
    assert by_ids.prompt_tokens == len(token_ids)
    assert by_ids.token_ids == client.ask(PromptRequest(text, True, sampling=SAMPLING)).token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "the prompt is empty: give at least one token id"),
        ((5, 300_000), "the prompt has the token id 300000: give ids from 0 to"),
        ((5,) * (CONTEXT - 5), f"the prompt has {CONTEXT - 5} tokens and --max-tokens asks for 20 more"),
    ],
    ids=["none", "not in the vocabulary", "too many"],
)
def test_token_ids_that_are_refused(cluster: LocalCluster, prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        client_of(cluster).ask(PromptRequest(prompt, sampling=SAMPLING))
    assert "\n" not in str(refused.value)


def test_a_prompt_has_log_probabilities(cluster: LocalCluster, token_ids: tuple[int, ...]) -> None:
    """As many as tokens, whatever is cached; None for the first; in company, of the whole vocabulary's softmax."""
    client, asked = client_of(cluster), structs.replace(SAMPLING, prompt_logprobs=2)
    requests = [PromptRequest(token_ids[: 100 - 40 * index], sampling=asked) for index in range(2)]
    long, short = (reply.completed() for reply in client.ask_all([*requests, PromptRequest(token_ids, sampling=SAMPLING)])[:2])
    assert long.prompt_logprobs is not None and short.prompt_logprobs is not None
    assert long.prompt_logprobs[0] is short.prompt_logprobs[0] is None
    assert [next(iter(found or {}), None) for found in long.prompt_logprobs] == [None, *token_ids[1:100]]
    assert all(found is not None and 2 <= len(found) <= 3 and max(found.values()) < 0 for found in long.prompt_logprobs[1:])
    for ours, theirs in zip(short.prompt_logprobs[1:], long.prompt_logprobs[1:60], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert client.ask(PromptRequest((9,), sampling=asked)).prompt_logprobs == [None]


def test_what_is_counted_is_what_was_answered(pair: Pair, token_ids: tuple[int, ...]) -> None:
    """By rank 0 and by every stage, from the first request on."""
    prompts = [PromptRequest(token_ids[start:], sampling=structs.replace(SAMPLING, max_tokens=40)) for start in (1, 2, 3)]
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


@pytest.mark.slow
def test_requests_of_a_dead_front_end_end_and_others_go_on(cluster: LocalCluster) -> None:
    """Running ones and waiting ones; nothing of them is left, and the places are somebody else's."""
    client = client_of(cluster)
    other = PromptRequest(SENTENCES[0], True, sampling=structs.replace(SAMPLING, max_tokens=150))
    alone = client.ask(other).token_ids
    with connect(cluster.address.redis_url) as redis:
        dead = WholeScheduler(redis, cluster.run_id, scheduler_of(cluster).topology)
        numbers = [dead.submit(ENDLESS.to_json(), owner="dead") for _ in range(3)]
        assert wait_until(lambda: set(status_of(cluster).running) == set(numbers))
        replies = [client.submit(other) for _ in range(2)]
        numbers += [dead.submit(ENDLESS.to_json(), owner="dead") for _ in range(4)]
        dead.release_owner("dead")
        assert wait_until(lambda: client.read(0.05) is not None and all(reply.has_ended for reply in replies), 60)
        assert [reply.completed().token_ids for reply in replies] == [alone, alone]
        assert wait_until(lambda: status_of(cluster).running == () and status_of(cluster).waiting == 0)
        answers = {f"pipedec:{{{cluster.run_id}}}:answer:{number}".encode() for number in numbers}
        assert not answers & set(redis.keys(f"pipedec:*{cluster.run_id}*"))
        assert not redis.exists(dead.keys.owners, dead.keys.unread, dead.keys.cancelled)
    assert stats_of(cluster).kv.used == 0


def test_a_front_end_that_goes_on_keeps_its_requests(cluster: LocalCluster) -> None:
    """Rank 0 has looked for orphans meanwhile: those of the other front-end are gone."""
    known, client = scheduler_of(cluster), client_of(cluster)
    scheduler = WholeScheduler(known.client, known.run_id, known.topology)
    kept = scheduler.submit(ENDLESS.to_json(), owner="alive")
    orphan = scheduler.submit(ENDLESS.to_json(), owner="gone")
    assert wait_until(lambda: status_of(cluster).running == (kept, orphan))
    scheduler.release_owner("gone")
    assert wait_until(lambda: orphan not in status_of(cluster).running and scheduler.renew_owner("alive"))
    assert status_of(cluster).running == (kept,)
    assert scheduler.cancel(kept)
    scheduler.close_answer(kept)
    assert wait_until(lambda: status_of(cluster).running == ())
    assert len(client.ask(PromptRequest("x", True, sampling=SAMPLING)).token_ids) == 20
