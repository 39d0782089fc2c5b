"""A resident cluster of real processes, a real Redis and gloo: what it answers, and what it does not leak."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from msgspec.structs import asdict
from support.clusters import client_of, keys_of, status_of
from support.processes import redis_of, wait_until
from support.timesteps import check_timesteps
from support.tiny_pair import Pair
from support.whole_scheduler import WholeScheduler
from transformers import PreTrainedTokenizerBase

import pipedec
from benchmarks.methods import applicable_options
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import RunningCluster
from pipedec.config import Settings
from pipedec.config.redis import RedisConfig
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, RankLost, SchedulerLost, UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import Choice, RunDescription
from pipedec.methods import METHOD_NAMES
from pipedec.scheduler import EmbeddedRedis, connect
from pipedec.tracing import SCHEDULER_TRACK
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PROMPTS = ("Natalia sold 12 clips in April.", "The pipeline is kept full: " * 25, "東京 \U0001f680")
LENGTH = 16
TREE = {"width": 8, "children": 8, "depth": 3, "rows": 20}


def prompt_request(
    text: str, method: str = "pipedec", max_tokens: int = 24, trace: bool = False, **sampling: Any
) -> PromptRequest:
    options = asdict(applicable_options(method, TREE))
    return PromptRequest(text, True, method, SamplingParams(max_tokens=max_tokens, **sampling), options, trace)


def check_answers(
    cluster: LocalCluster, reference: Reference, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str] = PROMPTS
) -> None:
    """Every prompt by every method says what transformers says, in the number of timesteps that the paper gives.

    No two prompts begin alike: where the stages find a prompt in their caches, the draft model may have to catch up.
    """
    passage, hits = cluster.spec.settings.passage, dict.fromkeys(METHOD_NAMES, 0)
    for prompt in prompts:
        for method in METHOD_NAMES:
            text = f"{METHOD_NAMES.index(method)}{PROMPTS.index(prompt)} {prompt}"
            token_ids = tokenizer(text)["input_ids"]
            expected = reference.generate(token_ids, LENGTH, ignore_eos=True)
            pieces: list[str] = []
            answer = client_of(cluster).ask(prompt_request(text, method, LENGTH, ignore_eos=True), pieces.append)
            assert answer.token_ids == expected
            assert answer.text == "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=True)
            metrics = answer.metrics
            assert metrics.hits + metrics.misses == len(expected) - 1
            check_timesteps(metrics, passage, method)
            if method in ("pp", "stpp"):  # the static tree enters once per miss
                assert metrics.draft_tokens == (0 if method == "pp" else TREE["rows"] * metrics.misses)
            else:  # in a passage of one timestep nothing is in flight when a token is accepted, and pipedec drafts nothing
                assert metrics.draft_tokens > metrics.hits or passage == 1
            assert metrics.ttft_seconds is not None and metrics.ttft_seconds > metrics.prefill_seconds
            assert metrics.tpot_seconds is not None and metrics.tpot_seconds > 0
            assert (answer.stages, answer.prompt_tokens) == (cluster.spec.settings.cut.stages, len(token_ids))
            assert answer.finish_reason == "length"
            hits[method] += metrics.hits
    assert hits["pp"] == 0 and hits["stpp"] > 0
    assert (
        min(hits["pipedec"], hits["pipedec-bestfirst"]) > 0 or passage == 1
    )  # a hit was in flight when its parent left the last group


@pytest.mark.fast_cases("windows", "tasks")
def test_two_stages_say_what_transformers_says(
    resident: LocalCluster, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert len(tokenizer(PROMPTS[1])["input_ids"]) > KNEE_ROWS
    is_default = resident.spec.settings.cluster.dispatch == "windows"
    check_answers(resident, reference, tokenizer, PROMPTS[: 2 if is_default else 1])


def test_every_rank_says_what_it_computes_in_and_why(resident: LocalCluster) -> None:
    described = resident.description()
    on_cpu = Choice("float32", "the target runs on a CPU: --dtype bfloat16 takes half the memory")
    assert [rank.dtype for rank in described.ranks] == [Choice("float32", "as given"), on_cpu, on_cpu]
    assert f"cpu, float32 ({on_cpu.why}); gloo over lo (" in str(described.ranks[1])
    numbers = described.settings.numbers
    assert (numbers.dtype, numbers.draft_dtype) == ("float32", "float32")


@pytest.mark.slow
@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("shape", "passage"), [((1, 1), 1), ((4, 4), 4), ((4, 2), 2), ((3, 3), 9)], ids=str)
def test_other_shapes_say_what_transformers_says(
    shape: tuple[int, int], passage: int, pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    with LocalCluster(pair.spec(*shape).replaced(passage=passage)) as cluster:
        pids = list(cluster.pids.values())
        check_answers(cluster, reference, tokenizer)
    assert len(pids) == shape[0] + 1 and not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("method", ["pipedec", "bita"])
def test_an_answer_ends_at_a_stop_token(
    resident: LocalCluster, reference: Reference, tokenizer: PreTrainedTokenizerBase, method: str
) -> None:
    """A stop token that the undisturbed answer holds ends it there, in the middle of a speculative tree."""
    text = PROMPTS[0]
    expected = reference.generate(tokenizer(text)["input_ids"], 24, ignore_eos=True)
    stop = expected[9]
    answer = client_of(resident).ask(prompt_request(text, method, ignore_eos=True, stop_token_ids=(stop,)))
    assert answer.token_ids == expected[: expected.index(stop) + 1]
    assert answer.finish_reason == "stop"


def test_a_trace_covers_every_rank_and_the_scheduler(resident: LocalCluster) -> None:
    client = client_of(resident)
    reply = client.follow(prompt_request(PROMPTS[1], max_tokens=6, trace=True, ignore_eos=True))
    answer, trace = reply.completed(), reply.trace
    assert {event.rank for event in trace} == {SCHEDULER_TRACK, 0, 1, 2}
    for rank in (1, 2):
        labels = {event.label for event in trace if event.rank == rank}
        # The prompt's chunks are rows, and the answer's timesteps follow theirs.
        chunks = -(-(answer.prompt_tokens - answer.metrics.cached_tokens) // KNEE_ROWS)
        if resident.spec.settings.cluster.dispatch == "windows":
            prefill = chunks + resident.spec.settings.cut.stages - 1
            assert {f"{rank}F{rank}", f"{rank}F{rank + 1}", f"{rank}S{prefill + answer.metrics.timesteps + 1}"} <= labels
        else:  # the first chunk passes all stages in timestep 0
            prefill = 0 if chunks == 1 else chunks - 1 + resident.spec.settings.cut.stages - 1
            assert {f"{rank}P0", f"{rank}F{rank}", f"{rank}S{prefill + answer.metrics.timesteps}"} <= labels
    assert all(re.fullmatch(r"(\d+[PFSWE]-?\d+)|(\d+>\d+@-?\d+)|((\d+|all)V-?\d+)", event.label) for event in trace)
    assert all(event.start_us <= event.end_us for event in trace)
    scheduled = {event.label for event in trace if event.rank == SCHEDULER_TRACK}
    done = {event.label for event in trace if event.rank != SCHEDULER_TRACK}
    if resident.spec.settings.cluster.dispatch == "windows":
        # The windows go on when an answer has ended, so that a rank tells of its tasks inside them only.
        assert {"0W1", "1W1", "2W1"} <= scheduled and not [label for label in scheduled if "F" in label]
        done -= {label for label in done if int(re.split("[A-Z@]", label)[-1]) > 0 and "W" not in label}
    assert {label for label in done if label[-2] != "E"} <= scheduled | {"0E" + str(answer.metrics.timesteps)}
    assert client.follow(prompt_request(PROMPTS[0], max_tokens=2)).trace == []


def test_a_draft_that_reads_more_than_the_stages_costs_no_timestep(
    resident: LocalCluster, tokenizer: PreTrainedTokenizerBase
) -> None:
    client, text = client_of(resident), "What do they know already? " * 5
    assert KNEE_ROWS < len(tokenizer(text)["input_ids"]) < 2 * KNEE_ROWS
    client.ask(prompt_request(text, "pp", max_tokens=2))
    metrics = client.ask(prompt_request(text, "stpp", max_tokens=8, ignore_eos=True)).metrics
    assert metrics.cached_tokens > KNEE_ROWS and metrics.timesteps == 3 * metrics.misses


def test_many_requests_leave_keys_and_memory_as_they_were(resident: LocalCluster) -> None:
    client = client_of(resident)
    for text in PROMPTS:  # the longest one sets the size of the caches
        client.ask(prompt_request(text, max_tokens=8))
    keys, resident_bytes = run_keys(resident), memory_of(resident)
    for number in range(12):
        client.ask(prompt_request(PROMPTS[number % len(PROMPTS)], "pp" if number % 2 else "pipedec", max_tokens=8))
    assert wait_until(lambda: run_keys(resident) <= keys), run_keys(resident) - keys
    for rank, size in memory_of(resident).items():
        assert size < resident_bytes[rank] + 12 * 2**20


def run_keys(cluster: LocalCluster) -> set[bytes]:
    """But the leases, which come and go."""
    return keys_of(cluster, but=(b":alive:", b":node:"))


def memory_of(cluster: LocalCluster) -> dict[int, int]:
    return {rank: psutil.Process(pid).memory_info().rss for rank, pid in cluster.pids.items()}


class Asking(threading.Thread):
    """A client of its own connection in the background. ``result()`` gives the answer, or raises what ``ask`` raised."""

    def __init__(self, cluster: LocalCluster, request: PromptRequest) -> None:
        super().__init__(daemon=True)
        self._address, self._request = cluster.address, request
        self._outcome: Completion | BaseException | None = None
        self.speaks = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            scheduler = RunningCluster(self._address.redis_url, self._address.run_id).connect()
            self._outcome = Client(scheduler, silence_seconds=60).ask(self._request, lambda text: self.speaks.set())
        except BaseException as error:
            self._outcome = error

    def result(self, seconds: float = 30.0) -> Completion:
        self.join(seconds)
        assert self._outcome is not None, f"no answer and no error within {seconds} s"
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


def test_two_clients_at_once_both_get_their_own_answer(
    resident: LocalCluster, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = (PROMPTS[0], PROMPTS[2])
    asked = [Asking(resident, prompt_request(text, max_tokens=20, ignore_eos=True)) for text in texts]
    for text, asking in zip(texts, asked, strict=True):
        assert asking.result().token_ids == reference.generate(tokenizer(text)["input_ids"], 20, ignore_eos=True)


def test_a_bad_request_gets_one_line_and_the_cluster_goes_on(resident: LocalCluster) -> None:
    """One of each place where it may be refused; the tests of messages, methods and prompts have all mistakes."""
    fields = json.loads(PromptRequest("Hello").to_json())
    refusals: dict[str, dict[str, Any]] = {
        "prompt is empty": {"prompt": " \n"},
        "the request: prompt: must be a string or a list, not an integer": {"prompt": 5},
        "the request: not valid JSON": {"prompt": "\ud800"},
        "the request: unknown key 'colour': known: prompt, raw, method": {"colour": "red"},
        "unknown method 'magic': choose one of pp, stpp, pipedec, pipedec-bestfirst": {"method": "magic"},
        "max_tokens: must be an integer (at least 1), not 0": {"sampling": {"max_tokens": 0}},
        "sampling.stop_token_ids[0]: must be an integer, not [1]": {"sampling": {"stop_token_ids": [[1]]}},
        "the model's context is 2048": {"sampling": {"max_tokens": 10**6}},
        "logit_bias names token 5000": {"sampling": {"logit_bias": {"5000": 1}}},
        "width: must be an integer (1 to 512), not 513": {"options": {"width": 513}},
        "method pp has no option 'width': it is an option of stpp, pipedec": {"method": "pp", "options": {"width": 4}},
        "5 layers of 128 rows are drafted at once": {"method": "stpp", "options": {"width": 128, "depth": 5}},
        "depth 4, but this BiTA was trained with 3 masks: lower --depth": {"method": "bita", "options": {"depth": 4}},
    }
    bad = [(json.dumps(fields | change), message) for message, change in refusals.items()]
    for text, message in [*bad, *((text, "request") for text in ("", "null", "[]", '"text"', "{", "1", '{"prompt":'))]:
        with pytest.raises(UserError, match=re.escape(message)) as refused:
            ask_raw(resident, text)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert len(client_of(resident).ask(prompt_request("Hello", max_tokens=2, ignore_eos=True)).token_ids) == 2


def ask_raw(cluster: LocalCluster, text: str) -> None:
    class Raw:
        priority = 0

        def to_json(self) -> str:
            return text

        def seeded(self) -> Raw:
            return self

    client_of(cluster).ask(Raw())  # type: ignore[arg-type]


def test_an_idle_cluster_hardly_speaks_to_redis(resident: LocalCluster) -> None:
    with connect(resident.address.redis_url) as client:
        began, before, clients = time.monotonic(), counted_commands(client), client.info("clients")
        time.sleep(5)  # so many periods that one more of each at the edges does not matter
        after, seconds = counted_commands(client), time.monotonic() - began
    calls = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    ranks = len(resident.pids)
    # A second of a rank: BLPOP, the peers' leases, its own and when it told, the failure flag. Rank 0 also looks for requests and
    # a failure.
    # The supervisor looks at everything twice, in one script, whose commands are counted, too.
    assert sum(calls.values()) <= seconds * (ranks * 6 + 10 + 2 * 19), calls
    assert calls["blpop"] <= seconds * ranks * 2
    assert clients["blocked_clients"] <= ranks


def counted_commands(client: redis.Redis) -> dict[str, int]:
    """Commands so far; those that a script calls are counted with it, so they are left out here."""
    within_scripts = {"sadd", "expire", "set", "exists", "info", "hmget", "scard", "del", "zpopmin", "hset", "hgetall"}
    stats: Any = client.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): fields["calls"]
        for name, fields in stats.items()
        if name.removeprefix("cmdstat_") not in within_scripts
    }


@pytest.mark.parametrize(
    ("method", "error"), [("pipedec", KeyboardInterrupt), ("bita", BrokenPipeError)], ids=["Ctrl-C", "nobody reads on"]
)
def test_a_request_whose_reader_goes_away_ends_and_the_next_one_is_right(
    resident: LocalCluster, reference: Reference, tokenizer: PreTrainedTokenizerBase, method: str, error: type[BaseException]
) -> None:
    def interrupt(text: str) -> None:
        raise error

    with pytest.raises(error):
        client_of(resident).ask(prompt_request(PROMPTS[0], method, max_tokens=1500, ignore_eos=True), interrupt)
    assert wait_until(lambda: not status_of(resident).running, 5)
    answer = client_of(resident).ask(prompt_request(PROMPTS[2], method, max_tokens=12, ignore_eos=True))
    assert answer.token_ids == reference.generate(tokenizer(PROMPTS[2])["input_ids"], 12, ignore_eos=True)


@pytest.mark.slow
def test_a_stop_finishes_the_request_under_way_and_refuses_the_rest(
    pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    with EmbeddedRedis() as server, connect(server.url) as redis_client:
        spec = pair.spec(2).replaced(max_num_seqs=1)
        cluster = LocalCluster(spec.replaced(redis=RedisConfig(server.url)), "stopped")
        cluster.start()
        try:
            first = Asking(cluster, prompt_request(PROMPTS[0], max_tokens=150, ignore_eos=True))
            assert first.speaks.wait(20)
            second = Asking(cluster, prompt_request(PROMPTS[2]))
            assert wait_until(lambda: status_of(cluster).waiting == 1)
            RunningCluster(cluster.address.redis_url, cluster.run_id).connect().stop()  # like ``pipedec down``
            cluster.wait()  # the ranks end by themselves, and well
            expected = reference.generate(tokenizer(PROMPTS[0])["input_ids"], 150, ignore_eos=True)
            assert first.result().token_ids == expected
            with pytest.raises(UserError, match="being stopped"):
                second.result()
            assert wait_until(lambda: redis_client.keys("*") == []), redis_client.keys("*")
        finally:
            cluster.stop()


def test_ending_a_cluster_cancels_the_request_under_way(pair: Pair) -> None:
    with LocalCluster(pair.spec(1)) as cluster:
        asking = Asking(cluster, prompt_request(PROMPTS[0], max_tokens=2000, ignore_eos=True))
        assert asking.speaks.wait(20)
        cluster.stop()
        try:
            assert asking.result().finish_reason == "cancelled"
        except PipedecError as error:  # Redis went down before the client had read the end
            assert "Redis" in str(error) or "stopped" in str(error)


@pytest.mark.failure_case("S15")
def test_a_run_name_in_use_is_refused_and_the_run_goes_on(pair: Pair, resident: LocalCluster) -> None:
    second = LocalCluster(pair.spec(1).replaced(redis=RedisConfig(resident.address.redis_url)), resident.run_id)
    with pytest.raises(UserError, match=f"'{resident.run_id}' is already up"):
        second.start()
    assert second.pids == {}
    assert len(client_of(resident).ask(prompt_request("Hello", max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_what_a_dead_run_left_does_not_hinder_the_next(pair: Pair) -> None:
    with EmbeddedRedis() as server, connect(server.url) as redis_client:
        dead = WholeScheduler(redis_client, "again", pair.spec(1).topology, lease_ms=300)
        dead.renew_lease(1)
        dead.open(RunDescription(Settings.of(target="target"), ((1,),), ((0, 8),)))
        dead.abort(1, "went away")
        with LocalCluster(pair.spec(1).replaced(redis=RedisConfig(server.url)), "again") as cluster:
            assert len(client_of(cluster).ask(prompt_request("Hello", max_tokens=3, ignore_eos=True)).token_ids) == 3
        assert redis_client.keys("*") == []


def test_a_cluster_that_cannot_start_says_why_and_is_gone(pair: Pair, tmp_path: Path) -> None:
    """Ranks fail while they load: one of the files is damaged after it was checked."""
    spec = pair.spec(2)
    target = tmp_path / "target"
    target.mkdir()
    for file in pair.target.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    damaged = spec.replaced(target=str(target))
    (target / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(RankLost, match=r"rank [12]: .*model.safetensors is not a whole safetensors file"):
        LocalCluster(damaged).start()


@pytest.mark.parametrize("victim", [0, 2, None], ids=["draft", "stage", "Redis"])
def test_what_is_killed_while_the_ranks_start_is_named(pair: Pair, victim: int | None) -> None:
    cluster = LocalCluster(pair.spec(2))

    def kill() -> None:
        if victim is None:
            assert wait_until(lambda: len(cluster.pids) == 3)
            redis_of(cluster).kill()
        else:
            assert wait_until(lambda: victim in cluster.pids)
            psutil.Process(cluster.pids[victim]).send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    named = "cannot reach Redis" if victim is None else rf"rank {victim} \(.*\) was killed by SIGKILL"
    with pytest.raises(SchedulerLost if victim is None else RankLost, match=named):
        cluster.start()
    killer.join(10)


# Run by every process as it starts, and by every child that it forks: clocks differ by hours.
SKEW = """
import os, time

clocks = {"time": (time.time, 3600), "time_ns": (time.time_ns, 3600 * 10**9)}

def skew():
    hours = os.getpid() % 3
    for name, (clock, hour) in clocks.items():
        setattr(time, name, lambda clock=clock, hour=hour: clock() + hours * hour)

skew()
os.register_at_fork(after_in_child=skew)
"""


@pytest.mark.slow
@pytest.mark.failure_case("S18")
def test_ranks_whose_clocks_differ_by_an_hour_answer(
    pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    path = f"{tmp_path}:{Path(pipedec.__file__).parent.parent}"
    asked = ("--raw-prompt", "--prompt", PROMPTS[0], "--max-tokens", "200", "--ignore-eos", "--json")
    ended = subprocess.run(
        [sys.executable, "-m", "pipedec.cli", "generate", *pair.flags, "--stages", "3", *asked],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["token_ids"] == reference.generate(tokenizer(PROMPTS[0])["input_ids"], 200, ignore_eos=True)
    assert answer["recoveries"] == 0
