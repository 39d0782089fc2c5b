"""Ranks and Redis that die or stop in mid-generation where nobody replaces them: an error within seconds that names them, and
nothing left.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from support.clusters import client_of, read_all, status_of
from support.obedient_ranks import KILLS_SEED, RAISES_SEED, suffer
from support.prepared_ranks import PreparedRanks
from support.processes import redis_of, wait_until
from support.tiny_pair import Pair
from support.whole_scheduler import WholeScheduler

from pipedec.client.client import Client
from pipedec.cluster.lease import LeaseKeeper
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.place import RankPlace
from pipedec.cluster.state import RunningCluster
from pipedec.config import Settings
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, RankLost, RequestFailed, SchedulerLost
from pipedec.core.sampling import SamplingParams
from pipedec.engine.activity import Activity
from pipedec.engine.build import resolve
from pipedec.messages.request import PromptRequest
from pipedec.plan.spec import DISPATCHES
from pipedec.scheduler import EmbeddedRedis, connect
from pipedec.topology import Topology

pytestmark = pytest.mark.usefixtures("leaves_nothing")
with_each_dispatch = pytest.mark.parametrize("dispatch", DISPATCHES)

STAGES = 3
NO_RECOVERY = {"max_restarts": 0}
NAMES = {0: r"rank 0 \(draft\)"} | {rank: rf"rank {rank} \(stage {rank}\)" for rank in range(1, STAGES + 1)}
LONG = PromptRequest("Natalia sold 12 clips.", True, "pipedec", SamplingParams(max_tokens=2000, ignore_eos=True))


class Victim:
    """A cluster with a request under way, and two who watch it: its owner's client, and a client from elsewhere."""

    def __init__(self, cluster: LocalCluster) -> None:
        elsewhere = RunningCluster(cluster.address.redis_url, cluster.run_id).connect()
        self._speaks = threading.Event()
        self._outcomes: dict[str, Completion | PipedecError] = {}
        self._threads = [
            threading.Thread(target=self._ask, args=("owner", client_of(cluster)), daemon=True),
            threading.Thread(target=self._ask, args=("elsewhere", Client(elsewhere)), daemon=True),
        ]
        self._threads[0].start()
        assert self._speaks.wait(30), "the cluster does not answer"
        self._threads[1].start()
        assert wait_until(lambda: len(elsewhere.status().running) == 2)

    def _ask(self, who: str, client: Client) -> None:
        try:
            self._outcomes[who] = client.ask(LONG, lambda text: self._speaks.set())
        except PipedecError as error:
            self._outcomes[who] = error

    def errors(self, seconds: float) -> tuple[PipedecError, PipedecError]:
        """What the clients were told, the owner first."""
        for thread in self._threads:
            thread.join(seconds)
        assert set(self._outcomes) == {"owner", "elsewhere"}, f"no error within {seconds} s"
        owner, elsewhere = self._outcomes["owner"], self._outcomes["elsewhere"]
        assert isinstance(owner, PipedecError) and isinstance(elsewhere, PipedecError)
        return owner, elsewhere


def supervise(cluster: LocalCluster, expected: type[PipedecError], message: str) -> None:
    """What ``pipedec up`` does: the supervisor ends with an error, which is a non-zero exit status."""
    with pytest.raises(expected, match=message):
        cluster.wait()


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases("windows-1")
@pytest.mark.parametrize(("dispatch", "rank"), [("windows", 0), ("windows", 1), ("tasks", 2), ("tasks", 3)])
def test_a_rank_killed_in_mid_generation_is_named(pair: Pair, rank: int, dispatch: str) -> None:
    with LocalCluster(pair.spec(STAGES).replaced(dispatch=dispatch, **NO_RECOVERY)) as cluster:
        victim = Victim(cluster)
        os.kill(cluster.pids[rank], signal.SIGKILL)
        supervise(cluster, RankLost, f"{NAMES[rank]} was killed by SIGKILL")
        owner, elsewhere = victim.errors(10)
        assert isinstance(owner, RankLost) and f"rank {rank}" in str(owner)
        assert f"rank {rank}" in str(elsewhere)


@with_each_dispatch
def test_a_stage_that_stands_still_is_named(pair: Pair, dispatch: str) -> None:
    """Its sockets stay open. Its lease gives it away, and those who wait for it would, too."""
    by_lease_alone = {**NO_RECOVERY, "stall_timeout": 60.0}
    with LocalCluster(pair.spec(STAGES).replaced(dispatch=dispatch, **by_lease_alone)) as cluster:
        victim = Victim(cluster)
        others = [psutil.Process(pid) for rank, pid in cluster.pids.items() if rank != 2]
        os.kill(cluster.pids[2], signal.SIGSTOP)
        owner, elsewhere = victim.errors(30)
        assert "rank 2" in str(owner) and "stopped answering" in str(owner)
        assert "rank 2" in str(elsewhere)
        supervise(cluster, RankLost, r"rank 2 .*stopped answering")
        # Neighbours that wait in a transfer for the one that stands still end by themselves, without a supervisor.
        assert psutil.wait_procs(others, timeout=15)[1] == []
        cluster.kill()


@with_each_dispatch
def test_redis_killed_in_mid_generation_is_named(pair: Pair, dispatch: str) -> None:
    with LocalCluster(pair.spec(STAGES).replaced(dispatch=dispatch, **NO_RECOVERY)) as cluster:
        victim = Victim(cluster)
        redis_of(cluster).kill()
        owner, elsewhere = victim.errors(10)
        assert isinstance(owner, SchedulerLost) and isinstance(elsewhere, SchedulerLost)
        assert str(owner).startswith("cannot reach Redis at 127.0.0.1:")
        supervise(cluster, SchedulerLost, "cannot reach Redis")


@pytest.mark.slow
@pytest.mark.in_turn(2)
@with_each_dispatch
def test_redis_that_stands_still_is_named(pair: Pair, dispatch: str) -> None:
    with LocalCluster(pair.spec(1).replaced(dispatch=dispatch, **NO_RECOVERY)) as cluster:
        victim = Victim(cluster)
        redis_of(cluster).suspend()
        owner, elsewhere = victim.errors(30)
        assert "Redis" in str(owner) and "does not answer" in str(owner) and "does not answer" in str(elsewhere)
        cluster.kill()


@pytest.mark.slow
@pytest.mark.in_turn(2)
@with_each_dispatch
def test_keys_deleted_in_mid_generation_end_the_run(pair: Pair, dispatch: str) -> None:
    with LocalCluster(pair.spec(STAGES).replaced(dispatch=dispatch, **NO_RECOVERY)) as cluster:
        victim = Victim(cluster)
        with connect(cluster.address.redis_url) as client:
            client.flushall()
        owner, elsewhere = victim.errors(10)
        assert isinstance(owner, PipedecError) and isinstance(elsewhere, PipedecError)
        supervise(cluster, RankLost, r"rank \d: .*(Redis|could not)")


@with_each_dispatch
@pytest.mark.failure_case("S7")
def test_a_corrupted_request_fails_and_the_others_do_not(pair: Pair, tmp_path: Path, dispatch: str) -> None:
    """One for which a stage computes NaN."""
    rare = 0  # <pad>, which is in no text
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    tensors["model.embed_tokens.weight"][rare, 0] = torch.nan
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    spec = resolve(Settings.of(target=target, draft="none", stages=2, device="cpu"))
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={rare: -100.0})
    sound, corrupt = (PromptRequest((5, token_id, 30), True, "pp", sampling) for token_id in (9, rare))
    with LocalCluster(spec.replaced(dispatch=dispatch)) as cluster:
        client = client_of(cluster)
        before = client.ask(sound).token_ids
        with pytest.raises(PipedecError, match="stage 1 computed NaN or infinity"):
            client.ask(corrupt)
        assert len(before) == 6 and client.ask(sound).token_ids == before


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases("raises-windows")
@with_each_dispatch
@pytest.mark.parametrize("seed", [RAISES_SEED, KILLS_SEED], ids=["raises", "dies"])
@pytest.mark.failure_case("S20")
def test_a_stage_that_raises_or_dies_for_a_request_fails_it_and_no_other(
    pair: Pair, tmp_path: Path, dispatch: str, seed: int
) -> None:
    """Twice, with as many restarts as one such request costs: its losses are not the cluster's."""
    spec = pair.spec(2).replaced(dispatch=dispatch, max_restarts=2, transport=PreparedRanks("auto", suffer, tmp_path))
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    innocent = [PromptRequest((5, token, 30), True, "pipedec-bestfirst", sampling) for token in (9, 19, 29)]
    guilty = PromptRequest((7, 8), True, "pp", structs.replace(sampling, temperature=1.0, seed=seed))
    with LocalCluster(spec) as cluster:
        client = client_of(cluster)
        wanted = [client.ask(one).token_ids for one in innocent]
        for _ in range(2):
            replies = [client.submit(one) for one in (*innocent, guilty)]
            read_all(client, *replies)
            with pytest.raises(RequestFailed, match="no such row" if seed == RAISES_SEED else "has lost ranks 5 times"):
                replies[-1].completed()
            assert [reply.completed().token_ids for reply in replies[:-1]] == wanted
        blamed = [recovery.request for recovery in status_of(cluster).recoveries]
        assert blamed == (
            [] if seed == RAISES_SEED else [number for number in (replies[0].number - 1, replies[-1].number) for _ in range(5)]
        )


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses with which the lease keeper ended the process (which it does not here)."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


@contextmanager
def keeping(num_ranks: int = 3) -> Iterator[tuple[LeaseKeeper, WholeScheduler, EmbeddedRedis]]:
    with EmbeddedRedis() as server:
        scheduler = WholeScheduler(connect(server.url), "kept", Topology.even(num_ranks - 1, num_ranks - 1), lease_ms=400)
        keeper = LeaseKeeper(
            scheduler, RankPlace(1, 3, 1, 3), Activity(), SimpleNamespace(can_rejoin=True, abort=lambda: None), 0.05, 0.2
        )
        keeper.start()
        yield keeper, scheduler, server


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("the run failed", "rank 2: went away"),
        ("it stood still", "was suspended for"),
        ("Redis died", "cannot reach Redis"),
    ],
)
@pytest.mark.failure_case("R15")
def test_the_lease_keeper_ends_a_rank_that_is_stuck(
    trouble: str, said: str, given_up: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    with keeping() as (_, scheduler, server):
        if trouble == "the run failed":
            scheduler.abort(2, "went away")
        elif trouble == "it stood still":
            scheduler.lease_ms = 10
        else:
            psutil.Process(server.pid).kill()
        assert wait_until(lambda: given_up == [1], 5)
        assert said in capfd.readouterr().err


@pytest.mark.failure_case("M11")
def test_a_full_disk_keeps_no_rank_alive(given_up: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with keeping() as (_, scheduler, _), open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(full, write_through=True))
        scheduler.abort(2, "went away")
        assert wait_until(lambda: given_up == [1], 5)


def test_the_lease_keeper_gives_the_lease_up_in_order(given_up: list[int]) -> None:
    with keeping(num_ranks=2) as (keeper, scheduler, _):
        assert not wait_until(lambda: scheduler.expired_ranks(), 0.8)  # renewed in time
        assert scheduler.members() == [1]
        keeper.stop()
        assert scheduler.members() == [] and given_up == []
