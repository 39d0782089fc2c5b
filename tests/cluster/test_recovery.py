"""Ranks that are killed, that stand still or fail while requests run: others take their places, and every answer is the one that
it would have been.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from architectures.zoo import save_model
from msgspec import structs
from support.clusters import client_of, read_all, read_until, status_of
from support.lasting_server import LastingServer
from support.obedient_ranks import (
    SLOW_SECONDS,
    aborts_on_loss,
    delays,
    endless_file,
    hangs_on_loss,
    load_for_hours,
    obey,
    obey_slowly,
)
from support.prepared_ranks import PreparedRanks
from support.processes import redis_of, wait_until
from support.thread_models import ThreadModels
from support.thread_requests import thread_request
from support.tiny_pair import CONTEXT, SENTENCES, Pair, tiny_tokenizer

from pipedec.client.reply import Reply
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster
from pipedec.config import Settings
from pipedec.config.redis import RedisConfig
from pipedec.core.completion import Completion
from pipedec.core.errors import RankLost
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import resolve
from pipedec.messages.request import PromptRequest
from pipedec.messages.stats import Recovery
from pipedec.scheduler import ClientScheduler, connect
from pipedec.transport.rendezvous import MEETING_SECONDS

LEAVES_NOTHING = pytest.mark.usefixtures("leaves_nothing")
STAGES, LENGTH = 3, 60
NAMES = ["rank 0 (draft)", *(f"rank {rank} (stage {rank})" for rank in range(1, STAGES + 1))]


def _kind(prompt: str, method: str, temperature: float = 0.0, seed: int | None = None, **values: Any) -> PromptRequest:
    sampling = SamplingParams(temperature, seed=seed, **{"max_tokens": LENGTH, "ignore_eos": True, **values})
    return PromptRequest(prompt, True, method, sampling)


KINDS = {
    "greedy": _kind(SENTENCES[0], "pipedec"),
    "penalized": _kind(SENTENCES[2], "pp", 0.8, 5, repetition_penalty=1.2, logprobs=2),
    "drawn": _kind(SENTENCES[1], "pipedec-bestfirst", 1.0, 4),
    "bita": _kind(SENTENCES[0][:40], "bita"),
    "lockstep": _kind(SENTENCES[1][:50], "stpp", 0.7, 9),
}
Facts = tuple[object, ...]


def facts(completion: Completion) -> Facts:
    logprobs = completion.logprobs and [next(iter(entry)) for entry in completion.logprobs]
    return completion.token_ids, completion.text, completion.finish_reason, completion.seed, logprobs


def weights_of(cluster: LocalCluster, folder: Path) -> dict[int, list[int]]:
    """The addresses of the weights of every rank."""
    files = {rank: folder / str(pid) for rank, pid in cluster.pids.items()}
    for rank, file in files.items():
        file.unlink(missing_ok=True)
        os.kill(cluster.pids[rank], signal.SIGUSR1)
    assert wait_until(lambda: all(file.exists() for file in files.values()), 60)
    return {rank: json.loads(file.read_text()) for rank, file in files.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def cluster(pair: Pair, folder: Path) -> Iterator[LocalCluster]:
    spec = pair.spec(STAGES).replaced(max_num_seqs=8)
    with LocalCluster(spec.replaced(transport=PreparedRanks("auto", obey, folder), max_restarts=100)) as running:
        yield running


@pytest.fixture(scope="module")
def alone(cluster: LocalCluster) -> Callable[[str], Facts]:
    """The undisturbed answers by kind."""
    return cache(lambda kind: facts(client_of(cluster).ask(KINDS[kind])))


class Asked:
    """Requests of all kinds that are under way: every answer has begun."""

    def __init__(self, cluster: LocalCluster, count: int, requests: Mapping[str, PromptRequest] = KINDS) -> None:
        self.client = client_of(cluster)
        self.kinds = list(islice(cycle(requests), count))
        self._said = [0] * count
        self._replies = [self._submit(index, requests[kind]) for index, kind in enumerate(self.kinds)]
        read_until(self.client, lambda: all(self._said))
        assert not any(reply.has_ended for reply in self._replies), "the answers are too short"

    def _submit(self, index: int, request: PromptRequest) -> Reply:
        def count(text: str) -> None:
            self._said[index] += 1

        return self.client.submit(request, count)

    def answers(self) -> list[Facts]:
        read_all(self.client, *self._replies)
        return [facts(reply.completed()) for reply in self._replies]


def recovered(cluster: LocalCluster, epoch: int) -> Recovery:
    """The recovery that began this epoch, when it is over."""
    assert wait_until(lambda: status_of(cluster).epoch >= epoch and not status_of(cluster).is_recovering, 60)
    (found,) = (one for one in status_of(cluster).recoveries if one.epoch == epoch)
    return found


@pytest.mark.fast_cases("1-2")
@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 2), (2, 8), (3, 1)])
@pytest.mark.failure_case("S1", "S2", "S3")
def test_answers_survive_a_killed_rank(
    cluster: LocalCluster, alone: Callable[[str], Facts], folder: Path, rank: int, count: int
) -> None:
    """Those who survive keep their processes, and their weights where they are."""
    epoch, pids, weights = status_of(cluster).epoch, cluster.pids, weights_of(cluster, folder)
    assert all(weights.values())
    asked = Asked(cluster, count)
    os.kill(pids[rank], signal.SIGKILL)
    assert asked.answers() == [alone(kind) for kind in asked.kinds]
    recovery = recovered(cluster, epoch + 1)
    assert recovery.lost == (rank,) and recovery.reason == f"{NAMES[rank]} was killed by SIGKILL"
    assert recovery.seconds is not None and status_of(cluster).epoch == epoch + 1
    assert [other for other, pid in cluster.pids.items() if pid != pids[other]] == [rank]
    since = {described.rank: described.since_epoch for described in cluster.description().ranks}
    assert [other for other, began in since.items() if began == epoch + 1] == [rank]
    survivors = weights.keys() - {rank}
    assert {other: places for other, places in weights_of(cluster, folder).items() if other in survivors} == {
        other: weights[other] for other in survivors
    }


@pytest.mark.slow
@pytest.mark.failure_case("S3")
def test_two_ranks_killed_at_the_same_time(cluster: LocalCluster, alone: Callable[[str], Facts]) -> None:
    asked = Asked(cluster, 3)
    for rank in (0, 2):
        os.kill(cluster.pids[rank], signal.SIGKILL)
    assert asked.answers() == [alone(kind) for kind in asked.kinds]


@pytest.mark.slow
def test_a_replacement_that_is_killed_before_it_serves_is_replaced(cluster: LocalCluster, alone: Callable[[str], Facts]) -> None:
    asked, first = Asked(cluster, 3), cluster.pids[1]
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: cluster.pids[1] != first, 60)
    os.kill(cluster.pids[1], signal.SIGKILL)
    assert asked.answers() == [alone(kind) for kind in asked.kinds]


@pytest.mark.slow
@pytest.mark.failure_case("S4")
def test_a_rank_that_is_stopped_is_killed_and_replaced(cluster: LocalCluster, alone: Callable[[str], Facts]) -> None:
    epoch, asked = status_of(cluster).epoch, Asked(cluster, 3)
    os.kill(cluster.pids[2], signal.SIGSTOP)
    assert asked.answers() == [alone(kind) for kind in asked.kinds]
    recovery = recovered(cluster, epoch + 1)
    assert recovery.lost == (2,) and recovery.reason.startswith((f"{NAMES[2]} stopped answering", f"{NAMES[2]} kept rank 3"))


@pytest.mark.failure_case("R5")
def test_redis_that_dies_is_started_again_and_answers_go_on(cluster: LocalCluster, alone: Callable[[str], Facts]) -> None:
    """With its data, which that process kept."""
    asked, first = Asked(cluster, 2), redis_of(cluster)
    pids = cluster.pids
    first.kill()
    assert asked.answers() == [alone(kind) for kind in asked.kinds]
    assert redis_of(cluster).pid != first.pid and cluster.pids == pids


@pytest.mark.slow
@pytest.mark.failure_case("R4", "R12")
@LEAVES_NOTHING
def test_a_redis_that_loses_its_data_ends_the_run_in_one_line(pair: Pair) -> None:
    with LocalCluster(pair.spec(STAGES)) as cluster:
        asked = Asked(cluster, 2)
        with connect(cluster.address.redis_url) as client:
            client.flushall()
        with pytest.raises(RankLost, match=r"set appendonly yes there\)$"):
            asked.answers()
        with pytest.raises(
            RankLost, match=r"^rank \d.*: Redis at 127\.0\.0\.1:\d+ has lost the run: .* \(set appendonly yes there\)$"
        ):
            cluster.wait()


@pytest.mark.slow
@pytest.mark.failure_case("R5")
def test_answers_go_on_when_redis_comes_back_with_its_data(pair: Pair, alone: Callable[[str], Facts], tmp_path: Path) -> None:
    """One that somebody else runs."""
    with (
        LastingServer(tmp_path, password="secret") as first,
        LocalCluster(pair.spec(STAGES).replaced(redis=RedisConfig(first.url))) as cluster,
    ):
        asked, pids = Asked(cluster, 3), cluster.pids
        os.kill(first.pid, signal.SIGKILL)
        assert wait_until(lambda: not first.is_running)
        with LastingServer(tmp_path, first.port, "secret"):
            assert asked.answers() == [alone(kind) for kind in asked.kinds]
            assert cluster.pids == pids and recovered(cluster, 1).lost == ()
            cluster.stop()


@pytest.mark.slow
@LEAVES_NOTHING
def test_a_cluster_is_stopped_in_the_middle_of_a_recovery(pair: Pair) -> None:
    with LocalCluster(pair.spec(STAGES)) as cluster:
        os.kill(cluster.pids[1], signal.SIGKILL)
        assert wait_until(lambda: status_of(cluster).epoch == 1, 60)


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("rank", [0, 2])
@LEAVES_NOTHING
@pytest.mark.failure_case("S1")
def test_answers_survive_a_killed_rank_under_single_tasks(pair: Pair, alone: Callable[[str], Facts], rank: int) -> None:
    with LocalCluster(pair.spec(STAGES).replaced(dispatch="tasks")) as cluster:
        asked = Asked(cluster, 1)
        os.kill(cluster.pids[rank], signal.SIGKILL)
        assert asked.answers() == [alone(kind) for kind in asked.kinds]


@pytest.mark.slow
@LEAVES_NOTHING
@pytest.mark.failure_case("S1")
def test_answers_with_recurrent_layers_survive_a_killed_rank(pair: Pair, tmp_path: Path) -> None:
    """Lanes are opened anew, and their states are computed again."""
    tokenizer = tiny_tokenizer()
    save_model("qwen3_5_text", tmp_path, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
    tokenizer.save_pretrained(tmp_path)
    requests = {kind: KINDS[kind] for kind in ("greedy", "penalized", "drawn")}
    given = {"draft_dtype": "float32", "device": "cpu", "priors": False}
    with LocalCluster(resolve(Settings.of(target=tmp_path, draft=pair.draft, stages=2, **given))) as cluster:
        undisturbed = {kind: facts(client_of(cluster).ask(request)) for kind, request in requests.items()}
        asked = Asked(cluster, 3, requests)
        os.kill(cluster.pids[1], signal.SIGKILL)
        assert asked.answers() == [undisturbed[kind] for kind in asked.kinds]
        assert recovered(cluster, 1).lost == (1,)


@pytest.fixture(scope="module")
def threads_cluster(thread_models: ThreadModels) -> Iterator[LocalCluster]:
    spec = thread_models.spec(4, STAGES).replaced(max_num_seqs=8)
    with LocalCluster(spec.replaced(max_restarts=1000)) as running:
        yield running


@pytest.fixture(scope="module")
def in_threads(thread_models: ThreadModels) -> dict[str, PromptRequest]:
    """Requests in one thread and in several, greedy and drawn."""

    def request(dialect: str | None, **values: Any) -> PromptRequest:
        made = thread_request(thread_models, dialect, "pipedec", max_tokens=LENGTH, ignore_eos=dialect is None, **values)
        return structs.replace(made, show_threads=dialect is not None)

    return {
        "greedy": request(None), "drawn": request(None, temperature=1.0, seed=8), "apar": request("apar"),
        "parallel": request("parallel", temperature=1.0, seed=8), "pasta": request("pasta", temperature=1.0, seed=9),
    }  # fmt: skip


@pytest.fixture(scope="module")
def in_threads_alone(threads_cluster: LocalCluster, in_threads: dict[str, PromptRequest]) -> dict[str, Facts]:
    return {name: facts(client_of(threads_cluster).ask(request)) for name, request in in_threads.items()}


@pytest.mark.slow
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("rank", range(STAGES + 1))
@pytest.mark.failure_case("S1")
def test_answers_in_threads_survive_a_killed_rank(
    threads_cluster: LocalCluster, in_threads: dict[str, PromptRequest], in_threads_alone: dict[str, Facts], rank: int
) -> None:
    asked = Asked(threads_cluster, 8, in_threads)
    os.kill(threads_cluster.pids[rank], signal.SIGKILL)
    assert asked.answers() == [in_threads_alone[kind] for kind in asked.kinds]


class Watching:
    """A reader of a run's feed, in a thread."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.frames: list[dict[str, Any]] = []
        self._ends = False
        address = cluster.address
        self._scheduler = ClientScheduler(connect(address.redis_url), address.run_id, cluster.topology)
        self._feed = RunHandle.of(self._scheduler, address.run_id).client.live()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert wait_until(lambda: self.frames, 60)

    def _read(self) -> None:
        for frame in self._feed:
            self.frames.append(frame)
            if self._ends:
                break

    def end(self) -> None:
        self._ends = True
        self._thread.join(60)
        self._scheduler.client.close()

    @property
    def text(self) -> str:
        """Of the only request, as a viewer has it: an opening tells what was said before."""
        text = ""
        for frame in list(self.frames):
            if frame["k"] == "open":
                text = frame["said"]
            text += "".join(verdict["text"] for verdict in frame.get("out", ()))
        return text


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_live_feed_goes_on_when_a_rank_is_killed(cluster: LocalCluster, alone: Callable[[str], Facts], rank: int) -> None:
    """It shows the whole answer."""
    undisturbed, epoch, watching, asked = alone("greedy"), status_of(cluster).epoch, Watching(cluster), Asked(cluster, 1)
    os.kill(cluster.pids[rank], signal.SIGKILL)
    assert asked.answers() == [undisturbed]
    said = str(undisturbed[1]).rstrip("\ufffd")
    assert wait_until(lambda: watching.text.rstrip("\ufffd") == said, 60), (watching.text, said)
    watching.end()
    assert [frame["epoch"] for frame in watching.frames if frame["k"] == "run"][-1] == epoch + 1
    recoveries = watching.frames[-1].get("recoveries", [])
    assert not recoveries or recoveries[-1]["lost"] == [rank]


@pytest.mark.fast_cases("hangs")
@pytest.mark.parametrize("prepare", [hangs_on_loss, aborts_on_loss], ids=["hangs", "aborts"])
@LEAVES_NOTHING
@pytest.mark.failure_case("S3a", "S6")
def test_a_stage_that_is_lost_over_nccl_costs_one_restart_and_nobody_hangs(
    pair: Pair, tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    """Although the next stage waits for activations that never come, over a group that must not be aborted."""
    ranks, request, victim = PreparedRanks("nccl", prepare, tmp_path), _kind(SENTENCES[0], "pipedec", max_tokens=20), 2
    with LocalCluster(pair.spec(STAGES).replaced(transport=ranks, max_restarts=1, restart_window=600)) as cluster:
        assert [rank.transport.name for rank in cluster.description().ranks] == ["gloo", *["nccl"] * STAGES]
        client, pids = client_of(cluster), cluster.pids
        undisturbed = client.ask(request)
        os.kill(pids[victim], signal.SIGUSR1)
        completion = client.ask(request)
        assert facts(completion) == facts(undisturbed)
        assert completion.metrics.recoveries <= 1, "the stage may be lost before the request begins"
        (recovery,) = status_of(cluster).recoveries
        assert victim in recovery.lost and recovery.reason == f"{NAMES[victim]} was killed by SIGKILL"
        assert recovery.seconds is not None and recovery.seconds < MEETING_SECONDS / 4
        assert [rank for rank, pid in cluster.pids.items() if pid == pids[rank]] == [0], "rank 0 uses gloo"
        assert not list(tmp_path.glob("*.aborts"))
        os.kill(cluster.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"1 rank had been replaced within 600 s \(--max-restarts 1\)"):
            wait_until(cluster.check, 30)


@LEAVES_NOTHING
@pytest.mark.failure_case("S3e")
def test_a_rank_and_a_link_are_lost_while_another_rank_loads_for_hours(pair: Pair, tmp_path: Path) -> None:
    """It loads once. The hours are no time in which the ranks could not meet, and these losses are not the request's fault."""
    with LocalCluster(pair.spec(2).replaced(transport=PreparedRanks("auto", load_for_hours, tmp_path))) as cluster:
        undisturbed, asked = facts(client_of(cluster).ask(KINDS["greedy"])), Asked(cluster, 1)
        delays(tmp_path, 1).touch()
        os.kill(cluster.pids[1], signal.SIGKILL)
        assert wait_until(lambda: (tmp_path / f"{cluster.pids[1]}.loads").exists(), 60)
        pids = cluster.pids
        (tmp_path / "clock").write_text("h")
        os.kill(pids[2], signal.SIGKILL)
        assert wait_until(lambda: (tmp_path / "waits-2").exists(), 60), "the others wait for the one that loads"
        (tmp_path / "clock").write_text("hh")
        (tmp_path / "breaks-2").touch()
        delays(tmp_path, 1).unlink()
        assert asked.answers() == [undisturbed]
        assert [rank for rank, pid in cluster.pids.items() if pid != pids[rank]] == [2]
        assert [one.lost for one in status_of(cluster).recoveries] == [(1,), (2,), ()]


@LEAVES_NOTHING
def test_what_is_slow_at_first_is_no_stall_and_what_hangs_later_is(pair: Pair, tmp_path: Path) -> None:
    """Ranks warm up before they serve: also in a rank that replaces another one; and forwards may be captured later."""
    stages, request = 1, _kind(SENTENCES[0], "pp", max_tokens=30)
    reports, settings = list[tuple[int, str, int, int]](), {"stall_timeout": SLOW_SECONDS / 2, "max_model_len": 256}
    prepared = PreparedRanks("auto", obey_slowly, tmp_path)
    cluster = LocalCluster(pair.spec(stages).replaced(transport=prepared, **settings))
    cluster.start(lambda *report: reports.append(report))
    try:
        assert len(list(tmp_path.glob("*.was-slow"))) == stages + 1, "every rank was slow before it was ready"
        for rank in range(stages + 1):
            warming = [(done, total) for other, what, done, total in reports if (other, what) == (rank, "warming")]
            assert warming == [(done, warming[0][1]) for done in range(warming[0][1] + 1)] and len(warming) > 1
        client = client_of(cluster, silence_seconds=120)
        said = client.ask(request).token_ids
        (tmp_path / "wanted").touch()
        replies = [client.submit(request) for _ in range(5)]
        read_all(client, *replies)
        assert [reply.completed().token_ids for reply in replies] == [said] * 5
        assert (tmp_path / "captured").exists() and not status_of(cluster).recoveries
        os.kill(cluster.pids[1], signal.SIGKILL)
        assert client.ask(request).token_ids == said
        assert len(list(tmp_path.glob("*.was-slow"))) == stages + 2, "the replacement was slow, too"
        hanging = cluster.pids[1]
        os.kill(hanging, signal.SIGUSR2)
        assert client.ask(request).token_ids == said and endless_file(tmp_path, hanging).exists()
        killed, hung = (one.reason for one in status_of(cluster).recoveries)
        assert killed == "rank 1 (stage 1) was killed by SIGKILL"
        assert re.fullmatch(r"rank 1 \(stage 1\) computed one timestep for more than \d+ s \(--stall-timeout\)", hung)
    finally:
        cluster.stop()
