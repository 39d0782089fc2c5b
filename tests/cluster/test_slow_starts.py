"""Ranks whose first forwards take long warm up before they serve. Nobody takes that for a stall; what hangs later is one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from support.captures import Repeated
from support.hosts import Hosts
from support.obedient_ranks import endless_file, obey
from support.prepared_ranks import PreparedRanks
from support.processes import wait_until
from support.slow_starts import FORWARD, slow_calls, slow_down, slow_environment, write_slow_calls
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.cluster import rank as rank_module
from pipedec.cluster.local import LocalCluster
from pipedec.core import SamplingParams
from pipedec.messages import PromptRequest
from pipedec.model.captured_graphs import Run
from pipedec.scheduler import RunStatus

pytestmark = pytest.mark.usefixtures("leaves_nothing")

STAGES = 2
REQUEST, LONG = (
    PromptRequest(SENTENCES[0], True, "pp", SamplingParams(max_tokens=count, ignore_eos=True)) for count in (20, 300)
)


def slow_and_obedient(folder: Path) -> None:
    slow_down(folder)
    obey(folder)


def status_of(cluster: LocalCluster) -> RunStatus:
    assert cluster.scheduler is not None
    return cluster.scheduler.status()


def client_of(cluster: LocalCluster) -> Client:
    assert cluster.scheduler is not None
    return Client(cluster.scheduler, cluster.check, silence_seconds=120)


@pytest.mark.parametrize(
    ("seconds", "limits"), [(2.5, {"stall_timeout": 1.0}), pytest.param(20.0, {}, marks=pytest.mark.slow)], ids=["short", "20s"]
)
def test_a_slow_first_forward_is_no_stall_and_one_that_hangs_later_is(
    pair: Pair, tmp_path: Path, seconds: float, limits: dict[str, float]
) -> None:
    """At the start, in a rank that replaces another one, and then a rank that computes forever."""
    write_slow_calls(tmp_path, {FORWARD: seconds})
    spec = pair.spec(STAGES).replaced(transport=PreparedRanks("auto", slow_and_obedient, tmp_path), **limits)
    cluster, reports = LocalCluster(spec), list[tuple[int, str, int, int]]()
    cluster.start(lambda *report: reports.append(report))
    try:
        assert slow_calls(tmp_path) == STAGES + 1, "every rank was slow before it was ready"
        for rank in range(STAGES + 1):
            warming = [(done, total) for other, what, done, total in reports if (other, what) == (rank, "warming")]
            assert warming == [(done, warming[0][1]) for done in range(warming[0][1] + 1)] and len(warming) > 1
        said = client_of(cluster).ask(REQUEST).token_ids
        assert status_of(cluster).num_recoveries == 0
        os.kill(cluster.pids[2], signal.SIGKILL)
        assert client_of(cluster).ask(REQUEST).token_ids == said
        assert slow_calls(tmp_path) == STAGES + 2, "the replacement was slow, too"
        assert [one.reason for one in status_of(cluster).recoveries] == ["rank 2 (stage 2) was killed by SIGKILL"]
        assert hang(cluster, tmp_path, 1) == (*said, *client_of(cluster).ask(LONG).token_ids[len(said) :])
        reasons = [one.reason for one in status_of(cluster).recoveries]
        assert len(reasons) == 2
        assert re.fullmatch(r"rank 1 \(stage 1\) computed one timestep for more than \d+ s \(--stall-timeout\)", reasons[1])
    finally:
        cluster.stop()


def hang(cluster: LocalCluster, folder: Path, rank: int) -> tuple[int, ...]:
    """A long answer, in the middle of which a rank begins to compute forever."""
    client, pid = client_of(cluster), cluster.pids[rank]
    said = list[str]()
    reply = client.submit(LONG, said.append)
    assert wait_until(lambda: client.read(0.01) is not None and said, 60)
    os.kill(pid, signal.SIGUSR2)
    assert wait_until(endless_file(folder, pid).exists, 60)
    assert wait_until(lambda: client.read(0.1) is not None and reply.has_ended, 120)
    return tuple(reply.completed().token_ids)


CAPTURE_SECONDS = 9.0


def capture_slowly(folder: Path) -> None:
    """As if there were a GPU: forwards are captured, and one of them takes long when the test says so."""

    class Capture(Repeated):
        def __call__(self, run: Run) -> Run:
            with suppress(FileNotFoundError):
                (folder / "wanted").rename(folder / "was-slow")
                time.sleep(CAPTURE_SECONDS)
            return super().__call__(run)

    rank_module.device_capture = lambda device: Capture()


def test_a_capture_in_the_middle_of_an_answer_is_no_stall(pair: Pair, tmp_path: Path) -> None:
    """Answers side by side have buckets that no rank has captured before."""
    prepared = PreparedRanks("auto", capture_slowly, tmp_path)
    with LocalCluster(pair.spec(STAGES).replaced(transport=prepared, stall_timeout=3.0, max_model_len=512)) as cluster:
        client = client_of(cluster)
        alone = client.ask(LONG).token_ids
        (tmp_path / "wanted").touch()
        replies = [client.submit(LONG) for _ in range(3)]
        assert wait_until(lambda: client.read(0.1) is not None and all(reply.has_ended for reply in replies), 120)
        assert [reply.completed().token_ids for reply in replies] == [alone] * 3
        assert (tmp_path / "was-slow").exists() and not status_of(cluster).recoveries


@pytest.mark.slow
def test_a_stage_on_another_host_may_warm_up_for_long(hosts3: Hosts, pair: Pair, tmp_path: Path) -> None:
    """Three hosts with a stage each; the second one's first forward takes 20 s."""
    write_slow_calls(tmp_path, {FORWARD: 20.0}, host="host-2")
    devices = [{"host": name, "devices": {"cpu": 1 + (index == 0)}} for index, name in enumerate(hosts3.names)]
    document = {
        "target": str(pair.target), "draft": str(pair.draft), "servers": devices,
        "launch": {"environment": slow_environment(tmp_path)},
        "partitions": {"all": {"stages": 3, "draft_device": {"host": "host-1", "device": "cpu"}}},
    }  # fmt: skip
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(document))

    def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "pipedec.cli", *arguments)
        ended = hosts3.run(0, *command, environment={"OMP_NUM_THREADS": "1"}, timeout=150)
        assert ended.returncode == 0, ended.stderr
        return ended

    cli("launch", str(file), "--detach")
    try:
        assert slow_calls(tmp_path) == 1
        asked = ("--method", "pp", "--prompt", SENTENCES[0], "--max-tokens", "20", "--ignore-eos", "--json")
        assert len(json.loads(cli("submit", *asked).stdout)["token_ids"]) == 20
        assert "Recoveries" not in cli("status").stderr
    finally:
        cli("down")
